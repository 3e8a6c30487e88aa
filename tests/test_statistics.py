"""The distribution of the field's values is that of the design, and they are independent in every direction.

Thresholds are five standard errors, derived from the sample size and the exact moments of the values.
"""

import math

import pytest
import torch

from germline.noise import VALUES, Field, Kind, Stream

N = 1 << 20
SIGMAS = 5.0

# every value with its probability
PMF: dict[str, dict[int, float]] = {
    "popcount": {k - 8: math.comb(16, k) / 2**16 for k in range(17)},
    "sign": {-1: 0.5, 1: 0.5},
    "uniform": dict.fromkeys(range(-15, 16, 2), 1 / 16),
}
# by hand: a binomial distribution of 16 fair bits has -2 / 16, a uniform one of n values -6/5 (n^2 + 1) / (n^2 - 1)
EXCESS_KURTOSIS = {"popcount": -1 / 8, "sign": -2.0, "uniform": -6 / 5 * 257 / 255}
every_kind = pytest.mark.parametrize("kind", list(VALUES))


def moment(kind: str, power: int) -> float:
    return math.fsum(p * e**power for e, p in PMF[kind].items())


@every_kind
def test_mean_variance_skewness_kurtosis(kind: Kind) -> None:
    eps = Field(1, kind).members([0], 0).integers((0, N))[0].double()
    for power in range(1, 5):
        error = math.sqrt(max(moment(kind, 2 * power) - moment(kind, power) ** 2, 0) / N)
        assert abs((eps**power).mean().item() - moment(kind, power)) <= SIGMAS * error


@every_kind
def test_the_excess_kurtosis_of_the_field_is_that_of_the_design(kind: Kind) -> None:
    """The standard error of m4 / m2^2 is that of its linear approximation around the exact moments."""
    eps = Field(1, kind).members([0], 0).integers((0, N))[0].double()
    excess = ((eps**4).mean() / (eps**2).mean() ** 2).item() - 3
    m2, m4 = moment(kind, 2), moment(kind, 4)
    influence = {e: (e**4 - m4) / m2**2 - 2 * m4 * (e**2 - m2) / m2**3 for e in PMF[kind]}
    error = math.sqrt(math.fsum(p * influence[e] ** 2 for e, p in PMF[kind].items()) / N)
    assert abs(excess - EXCESS_KURTOSIS[kind]) <= SIGMAS * error
    assert SIGMAS * error < 1 / 16  # or a normal distribution would pass, too


@every_kind
def test_every_value_has_its_probability(kind: Kind) -> None:
    eps = Field(2, kind).members([1], 2).integers((0, N))[0]
    values, counts = torch.unique(eps, return_counts=True)
    observed = dict(zip(values.tolist(), counts.tolist(), strict=True))
    assert set(observed) <= set(PMF[kind])
    chi_squared = sum((observed.get(e, 0) - N * p) ** 2 / (N * p) for e, p in PMF[kind].items())
    freedom = len(PMF[kind]) - 1
    assert chi_squared < freedom + SIGMAS * math.sqrt(2 * freedom)


def correlation(a: torch.Tensor, b: torch.Tensor) -> float:
    """Return the mean product in standard errors, 1 / sqrt(n), for independent a and b of variance 1."""
    return (a * b).mean().item() * math.sqrt(a.numel())


def standardize(eps: torch.Tensor, kind: str) -> list[torch.Tensor]:
    """Return the values and their squares, both with mean 0 and variance 1; the squares of signs are constant."""
    eps = eps.double()
    both = [eps / math.sqrt(moment(kind, 2))]
    if kind != "sign":
        both.append((eps**2 - moment(kind, 2)) / math.sqrt(moment(kind, 4) - moment(kind, 2) ** 2))
    return both


@every_kind
@pytest.mark.parametrize("lag", [1, 2, 3, 4, 16, 64, 127, 128, 129, 256, 1023, 1024, 1025, 8192])
def test_neighboring_parameters_are_uncorrelated(kind: Kind, lag: int) -> None:
    eps = Field(3, kind).members([7], 9).integers((0, N + lag))[0]
    for x in standardize(eps, kind):
        assert abs(correlation(x[:-lag], x[lag:])) < SIGMAS


def field(
    kind: Kind, seed: int = 5, generation: int = 11, member: int = 13, stream: Stream = Stream.DENSE
) -> torch.Tensor:
    return Field(seed, kind).members([member], generation).integers((0, N), stream)[0]


@every_kind
@pytest.mark.parametrize(
    "other",
    [
        *({"member": 13 ^ 1 << bit} for bit in (0, 1, 8, 31)),
        *({"generation": 11 ^ 1 << bit} for bit in (0, 1, 8, 31)),
        *({"seed": 5 ^ 1 << bit} for bit in (0, 1, 31, 32, 33, 63)),
        *({"stream": stream} for stream in Stream if stream != Stream.DENSE),
        {"member": 11, "generation": 13},
    ],
    ids=str,
)
def test_neighboring_addresses_are_uncorrelated(kind: Kind, other: dict[str, int]) -> None:
    here, there = field(kind), field(kind, **other)  # type: ignore[arg-type]
    for x, y in zip(standardize(here, kind), standardize(there, kind), strict=True):
        assert abs(correlation(x, y)) < SIGMAS


def test_bits_of_a_half_are_fair_and_independent() -> None:
    halves = Field(6).members([0], 0).halves((0, N), Stream.COEFFICIENT)[0]
    bits = torch.stack([(halves >> b & 1) * 2 - 1 for b in range(16)]).double()
    assert (bits.mean(1).abs() * math.sqrt(N)).max().item() < SIGMAS
    products = (bits @ bits.T / N - torch.eye(16, dtype=torch.float64)).abs() * math.sqrt(N)
    assert products.max().item() < SIGMAS
