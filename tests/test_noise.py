"""The field as the rest of the package uses it: slices, perturbations, exact sums, and errors."""

import hashlib
import json
import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from germline.kernels import Reading, reference
from germline.noise import VALUES, Field, Kind, Stream, low_rank_matrices, scale_sigma
from germline.noise.weights import split_by_bound

GOLDEN = json.loads((Path(__file__).parent / "golden" / "field_v1.json").read_text())
DEVICES = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
on_every_device = pytest.mark.parametrize("device", DEVICES)
every_kind = pytest.mark.parametrize("kind", ["popcount", "sign", "uniform"])
SHAPES = [(30, 7, 3, 3), (30,), (4, 30), (2, 2), (50, 40), (1,)]  # the last but two has no smaller factors at rank 1
SIZE = 30 * 63 + 30 + 120 + 4 + 2000 + 1
# the largest magnitudes of eps and of eps^2 - variance; of signs the latter is 0, and bounded by 1
LARGEST = {"popcount": (8, 8**2 - 4), "sign": (1, 1), "uniform": (15, 15**2 - 85)}


@on_every_device
@pytest.mark.parametrize("golden", GOLDEN, ids=lambda g: f"{g['reading']}-{g['seed']}")
def test_golden_values(golden: dict[str, Any], device: str) -> None:
    span, stream = (golden["start"], golden["start"] + 4096), Stream(golden["stream"])
    reading = golden["reading"]
    field = Field(golden["seed"], kind="popcount" if reading == "half" else reading)
    noise = field.members([golden["member"]], golden["generation"], device)
    values = noise.halves(span, stream) if reading == "half" else noise.integers(span, stream)
    array = values[0].cpu().numpy().astype("<i4")
    assert array[:8].tolist() == golden["first"]
    assert hashlib.sha256(array.tobytes()).hexdigest() == golden["sha256"]


@on_every_device
@every_kind
def test_slices_of_a_slice_equal_the_whole(kind: Kind, device: str) -> None:
    field = Field(3, kind)
    whole = field.members(range(20), 5, device).integers((100, 5000))
    for low, high, first, last in [(100, 5000, 3, 4), (101, 102, 0, 20), (1500, 4096, 7, 19), (4999, 5000, 19, 20)]:
        part = field.members(range(first, last), 5, device).integers((low, high))
        assert torch.equal(part, whole[first:last, low - 100 : high - 100])


@every_kind
def test_bits_and_values_are_readings_of_the_same_halves(kind: Kind) -> None:
    noise = Field(1, kind).members([3], 4)
    halves = noise.halves((10, 3000), Stream.CROSSOVER)
    assert torch.equal(noise.bits((10, 3000), Stream.CROSSOVER), halves % 2 == 1)
    expected = {
        "popcount": [int(h).bit_count() - 8 for h in halves[0]],
        "sign": [1 - 2 * (int(h) & 1) for h in halves[0]],
        "uniform": [2 * (int(h) & 15) - 15 for h in halves[0]],
    }[kind]
    assert noise.integers((10, 3000), Stream.CROSSOVER)[0].tolist() == expected


def test_limits_and_variances_are_those_of_all_halves() -> None:
    for values in VALUES.values():
        every = reference.read_halves(np.arange(65536), values.reading)
        assert (every.sum(), (every**2).sum()) == (0, 65536 * values.variance)
        assert abs(every).max() == values.limit
    assert Reading.HALF not in {values.reading for values in VALUES.values()}


@on_every_device
def test_mirrored_members_have_opposite_noise(device: str) -> None:
    plain = Field(9).members(range(4), 2, device).integers((0, 50))
    mirrored = Field(9, mirrored=True).members(range(8), 2, device).integers((0, 50))
    assert torch.equal(mirrored[0::2], plain)
    assert torch.equal(mirrored[1::2], -plain)


@on_every_device
@pytest.mark.parametrize("mirrored", [False, True])
@pytest.mark.parametrize("rank", [None, 1, 3])
def test_perturb_is_theta_plus_sigma_z(rank: int | None, mirrored: bool, device: str) -> None:
    field = Field(5, mirrored=mirrored, matrices=low_rank_matrices(SHAPES, rank))
    noise = field.members([2, 3, 9], 7, device)
    theta = torch.linspace(-1, 1, SIZE, device=device)
    sigma = 0.0625
    got = noise.perturb(theta, sigma).cpu().double()
    for i, z in enumerate(plain_noise(field, [2, 3, 9], 7)):
        step = sigma * z  # sqrt(3) / 3 is rounded to 20 bits, the sum to 24
        assert ((got[i] - theta.cpu().double() - step).abs() <= 2**-23 * got[i].abs() + 2**-20 * step.abs()).all()


def plain_noise(field: Field, members: list[int], generation: int) -> torch.Tensor:
    """Return unit-variance noise of the whole genome by the definition of the layout, matrix by matrix, in float64."""
    rows = []
    for member in members:
        address, sign = (member >> 1, 1 - 2 * (member & 1)) if field.mirrored else (member, 1)
        plain = Field(field.seed).members([address], generation)
        z = plain.integers((0, SIZE))[0].double() / 2
        at = 0
        for matrix in field.matrices:
            r = matrix.rank
            a = plain.integers((at, at + matrix.rows * r), Stream.LOW_RANK).double().view(matrix.rows, r) / 2
            at += matrix.rows * r
            b = plain.integers((at, at + matrix.columns * r), Stream.LOW_RANK).double().view(matrix.columns, r) / 2
            at += matrix.columns * r
            z[matrix.start : matrix.stop] = (a @ b.T / r**0.5).reshape(-1)
        rows.append(sign * z)
    return torch.stack(rows)


def test_which_parameters_have_noise_of_low_rank() -> None:
    assert [(m.start, m.rows, m.columns, m.address) for m in low_rank_matrices(SHAPES, 1)] == [
        (0, 30, 63, 0),
        (1920, 4, 30, 93),
        (2044, 50, 40, 127),
    ]
    assert [m.rank for m in low_rank_matrices(SHAPES, [2, None, None, None, 5, None])] == [2, 5]
    assert low_rank_matrices(SHAPES, None) == ()
    assert low_rank_matrices([(3, 6)], 2) == ()  # 2 (3 + 6) >= 3 x 6


@on_every_device
def test_sigma_has_20_bits_and_its_product_is_exact(device: str) -> None:
    theta = torch.zeros(5000, device=device)
    noise = Field(1).members([0], 0, device)
    eps = noise.integers((0, 5000))[0].double()
    for sigma in (0.1, 1 / 3, 1e-30, 12345.678):
        step = noise.perturb(theta, sigma)[0].double()
        unit = step[eps == 1][0]
        assert torch.equal(step, unit * eps)
        assert abs(2 * unit.item() - sigma) <= sigma * 2**-20
    vector = torch.rand(5000, device=device)
    cut = scale_sigma(vector, 0.5, vector)
    assert torch.equal(noise.perturb(theta, vector)[0].double(), cut.double() * eps)
    assert ((vector / 2 - cut) / vector).abs().max().item() < 2**-19
    assert (cut.view(torch.int32) & 15 == 0).all()


@on_every_device
def test_perturb_into_a_buffer_and_from_the_middle(device: str) -> None:
    field = Field(4, matrices=low_rank_matrices(SHAPES, 1), mirrored=True)
    noise = field.members(range(6), 1, device)
    theta = torch.randn(SIZE, generator=torch.Generator().manual_seed(0)).to(device)
    whole = noise.perturb(theta, 0.25)
    buffer = torch.full((6, 700), 9.0, device=device)
    assert noise.perturb(theta[1600:2300], 0.25, start=1600, out=buffer) is buffer
    assert torch.equal(buffer, whole[:, 1600:2300])


@on_every_device
@pytest.mark.parametrize("mirrored", [False, True])
@pytest.mark.parametrize("rank", [None, 1, 3])
def test_weighted_sum_is_exact_and_the_same_for_any_cut(rank: int | None, mirrored: bool, device: str) -> None:
    field = Field(11, mirrored=mirrored, matrices=low_rank_matrices(SHAPES, rank))
    members, weights = list(range(10)), [9, -7, 5, -3, 1, 1, 0, -6, 0, 0]
    noise = field.members(members, 3, device)
    whole = noise.weighted_sum(weights, (0, SIZE))
    expected = torch.tensor(weights, dtype=torch.float64) @ plain_noise(field, members, 3)
    assert torch.allclose(whole.cpu().double(), expected, rtol=3e-7, atol=1e-12)  # three roundings
    random.seed(1)
    for _ in range(10):
        cuts = [0, *sorted(random.randrange(SIZE) for _ in range(4)), SIZE]
        parts = [noise.weighted_sum(weights, span) for span in pairwise(cuts)]
        assert torch.equal(torch.cat(parts), whole)
    order = random.sample(range(10), 10)
    shuffled = field.members([members[i] for i in order], 3, device)
    assert torch.equal(shuffled.weighted_sum([weights[i] for i in order], (0, SIZE)), whole)


@on_every_device
@every_kind
@pytest.mark.parametrize("power", [1, 2])
@pytest.mark.parametrize("mirrored", [False, True])
@pytest.mark.parametrize("size", [1, 10**6, 10**9, 10**13])
def test_accumulate_is_exact_whatever_the_weights(
    kind: Kind, power: Any, mirrored: bool, size: int, device: str
) -> None:
    field = Field(2, kind, mirrored=mirrored)
    members = range(40)
    weights = np.random.default_rng(0).integers(-size, size, 40, endpoint=True)
    eps = [[int(e) for e in row] for row in field.members(members, 6).integers((3, 60))]
    variance = VALUES[kind].variance
    got = field.members(members, 6, device).accumulate(weights, (3, 60), power)
    for k, total in enumerate(got.tolist()):
        terms = ((int(w), row[k]) for w, row in zip(weights, eps, strict=True))
        assert total == sum(w * e if power == 1 else w * (e * e - variance) for w, e in terms)
    fits = int(abs(weights).sum()) * LARGEST[kind][power - 1] < 2**31
    assert got.dtype == (torch.int32 if fits else torch.int64)


def test_the_bound_decides_between_32_and_64_bits() -> None:
    noise = Field(0).members([0, 1], 0)
    assert noise.accumulate([2**27, 2**27 - 1], (0, 9)).dtype == torch.int32  # 8 (2^28 - 1) < 2^31
    assert noise.accumulate([2**27, -(2**27)], (0, 9)).dtype == torch.int64
    assert list(split_by_bound(np.array([2**27, 2**27 - 1, 1, 5]), 8)) == [slice(0, 2), slice(2, 4)]
    assert noise.accumulate([0, 2**40], (0, 9)).dtype == torch.int64
    same = Field(0).members([3, 3], 0)
    assert same.accumulate([2**40, -(2**40)], (0, 9)).tolist() == [0] * 9
    for weights in ([2**60, 2**60], [2**62, -(2**62)], np.array([2**64 - 1, 0], np.uint64)):
        with pytest.raises(ValueError, match="too large"):
            noise.accumulate(weights, (0, 9))
    with pytest.raises(ValueError, match="too large"):
        noise.accumulate_low_rank([2**47, 0], low_rank_matrices([(5, 5)], 1)[0])


@on_every_device
def test_sums_over_many_members(device: str) -> None:
    """Sum more members than one dimension of a grid has programs, and more than fit into the scratch memory."""
    field = Field(3, matrices=low_rank_matrices([(4, 30)], 1))
    members = range(70_000)
    noise = field.members(members, 2, device)
    a, b = noise.factors(field.matrices[0])
    assert torch.equal(a[-1:], field.members([69_999], 2, device).factors(field.matrices[0])[0])
    expected = torch.einsum("mrk,mck->rc", a.double(), b.double())
    assert torch.equal(noise.accumulate_low_rank([1] * 70_000, field.matrices[0]), expected)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("germline.noise.members.SCRATCH", 34 * 999)
        assert torch.equal(noise.accumulate_low_rank([1] * 70_000, field.matrices[0]), expected)


def test_halves_bits_and_words_do_not_depend_on_mirroring() -> None:
    plain, mirrored = (Field(9, mirrored=m).members([2, 3], 2) for m in (False, True))
    assert torch.equal(plain.halves((0, 50), Stream.DROPOUT), mirrored.halves((0, 50), Stream.DROPOUT))
    assert torch.equal(plain.bits((0, 50), Stream.DROPOUT), mirrored.bits((0, 50), Stream.DROPOUT))
    assert plain.words(9, Stream.DROPOUT).tolist() == mirrored.words(9, Stream.DROPOUT).tolist()
    # word j is word j % 4 of block j // 4: the counter (0, 0, 0, 0) under the key 0 gives Random123's known answer
    assert Field(0).members([0], 0).words(4, Stream.DENSE).tolist() == [0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48]


def test_negative_zeros_do_not_depend_on_the_cut() -> None:
    field = Field(4, matrices=low_rank_matrices([(30, 40)], 1))
    theta = torch.full((1200,), -0.0)
    noise = field.members([0, 1], 0)
    whole = noise.perturb(theta, 0.1)
    for low, high in ((0, 40), (17, 300), (300, 1200), (1199, 1200)):
        part = noise.perturb(theta[low:high], 0.1, start=low)
        assert torch.equal(part.view(torch.int32), whole[:, low:high].contiguous().view(torch.int32))


@on_every_device
def test_empty_populations_and_spans(device: str) -> None:
    field = Field(4, matrices=low_rank_matrices([(30, 40)], 1))
    noise = field.members([], 0, device)
    assert noise.perturb(torch.zeros(1200, device=device), 0.1).shape == (0, 1200)
    assert noise.weighted_sum([], (0, 1200)).tolist() == [0.0] * 1200
    a, b = field.members([1], 0, device).factors(field.matrices[0], (2, 2))
    assert (a.shape, b.shape) == ((1, 0, 1), (1, 40, 1))
    assert field.members([1], np.int64(3), device).weighted_sum([1], (5, 5)).numel() == 0  # type: ignore[arg-type]
    theta = torch.zeros(3, device=device, requires_grad=True)
    assert not Field(1).members([0], 0, device).perturb(theta, 0.1).requires_grad


def test_host_draws_are_uniform_and_permutations_complete() -> None:
    field = Field(8)
    draws = field.below(10, 100_000, 3, Stream.BATCH)
    counts = np.bincount(draws, minlength=10)
    assert counts.size == 10
    assert ((counts - 10_000) ** 2 / 10_000).sum() < 9 + 5 * 18**0.5  # chi squared, 9 degrees of freedom, 5 sigma
    assert field.below(2**32, 5, 0, Stream.BATCH).max() >= 2**16
    assert field.below(1, 5, 0, Stream.BATCH).tolist() == [0] * 5
    order = field.permutation(1000, 0, Stream.BATCH)
    assert sorted(order.tolist()) == list(range(1000))
    assert abs(np.corrcoef(order, np.arange(1000))[0, 1]) < 5 / 1000**0.5
    assert (order != field.permutation(1000, 1, Stream.BATCH)).any()
    assert field.permutation(0, 0, Stream.BATCH).size == 0


@pytest.mark.parametrize(
    ("attempt", "message"),
    [
        (lambda: Field(-1), "seed"),
        (lambda: Field(2**64), "seed"),
        (lambda: Field(0, "gauss"), "gauss"),  # type: ignore[arg-type]
        (lambda: Field(0).members([0], 2**32), "generation"),
        (lambda: Field(0).members([0], -1), "generation"),
        (lambda: Field(0).members([2**32], 0), "Member"),
        (lambda: Field(0).members([-1], 0), "Member"),
        (lambda: Field(0).members([0.5], 0), "Members"),  # type: ignore[list-item]
        (lambda: Field(0).members([0], 0).integers((0, 2**35 + 1)), "span"),
        (lambda: Field(0).members([0], 0).integers((2, 1)), "span"),
        (lambda: Field(0).members([0], 0).perturb(torch.zeros(2), 1.0, start=2**35 - 1), "span"),
        (lambda: Field(0).members([0], 0).perturb(torch.zeros(2), float("nan")), "Sigma"),
        (lambda: Field(0).members([0], 0).perturb(torch.zeros(2), torch.zeros(3)), "Sigma"),
        (lambda: Field(0).members([0], 0).perturb(torch.zeros(2, dtype=torch.float16), 1.0), "float16"),
        (lambda: Field(0).members([0], 0).perturb(torch.zeros(2), 1.0, out=torch.zeros(2)), "buffer"),
        (lambda: Field(0).members([0], 0).accumulate([0.5], (0, 1)), "Weights"),  # type: ignore[list-item]
        (lambda: Field(0).members([0], 0).accumulate([1, 2], (0, 1)), "Weights"),
        (lambda: Field(0).members([0], 0).accumulate([1], (0, 1), 3), "power 1 or 2"),  # type: ignore[arg-type]
        (lambda: Field(0, matrices=low_rank_matrices([(5, 5)], 1)).members([0], 0).accumulate([1], (0, 4)), "low rank"),
        (lambda: Field(0, matrices=low_rank_matrices([(5, 5)], 1)).members([0], 0).integers((24, 26)), "low rank"),
        (lambda: Field(0).members([0], 0).perturb(torch.zeros(2), 1e39), "Sigma"),
        (lambda: Field(0).members([0], 0).perturb(torch.zeros(2, device="meta"), 1.0), "meta"),
        (lambda: Field(0).below(0, 1, 0, Stream.BATCH), "below 0"),
        (lambda: low_rank_matrices([(2, 3)], 0), "rank"),
        (lambda: low_rank_matrices([(2, 3)], [1, 1]), "ranks"),
    ],
)
def test_bad_addresses_and_arguments_are_errors(attempt: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        attempt()


@on_every_device
def test_global_generators_are_not_touched(device: str) -> None:
    before = torch.get_rng_state(), repr(np.random.get_state()), random.getstate()  # noqa: NPY002
    noise = Field(1, matrices=low_rank_matrices(SHAPES, 1)).members(range(4), 0, device)
    noise.perturb(torch.zeros(SIZE, device=device), 0.1)
    noise.weighted_sum([1, 2, 3, 4], (0, SIZE))
    noise.bits((0, 10), Stream.CROSSOVER)
    Field(1).permutation(10, 0, Stream.BATCH)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (repr(np.random.get_state()), random.getstate()) == before[1:]  # noqa: NPY002
