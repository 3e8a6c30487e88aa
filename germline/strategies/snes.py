"""SNES: Schaul, Glasmachers, Schmidhuber, "High Dimensions and Heavy Tails for Natural Evolution Strategies", 2011.

    mean  <- mean + lr sigma sum of u_i z_i
    sigma <- sigma exp(lr_sigma / 2 sum of u_i (z_i^2 - 1))

with a sigma for each parameter and utilities u that depend on ranks alone. Only the better half of the members has a
positive utility. Low-rank noise has one sigma for all parameters, so SNES uses dense noise.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from germline.arguments import SETTING, check_fields
from germline.errors import BadInput
from germline.genome import Genome
from germline.noise import Field, Kind, MemberWeights, Noise, Span, round_to
from germline.optim.optimizers import exponential
from germline.optim.schedules import Scheduled, value_at
from germline.optim.shaping import any_finite, shape_by_shard, utilities_by_rank
from germline.optim.tensor_shaping import utilities_by_tensor_rank
from germline.strategies.candidates import Candidates
from germline.strategies.protocol import GenerationResult, SummedStrategy
from germline.strategies.settings import check_population, check_rate, document_settings, setting

ONE = 1 << 20  # utilities are counted in units of 2^-20


@dataclass(frozen=True)
class State:
    theta: Tensor
    sigma: Tensor


@document_settings
@dataclass(frozen=True)
class SNES(SummedStrategy[State]):
    """Separable natural evolution strategies: a mean and a step size for each parameter.

    >>> SNES(population=4, sigma=0.5).bind(Genome.from_module(torch.nn.Linear(9, 10))).utilities
    (503760, 20528, -262144, -262144)
    """

    name: ClassVar[str] = "snes"
    ask_arrays: ClassVar[tuple[str, ...]] = ("theta", "sigma")
    has_semi_updates: ClassVar[bool] = True

    population: int = setting(256, "members of a generation; even if mirrored")
    sigma: float | Literal["auto"] = setting(0.05, "initial standard deviation of every parameter: a number or auto")
    probed: float | None = setting(None, "what a probe has chosen if sigma is auto; step sizes then count in it")
    lr: Scheduled = setting(1.0, "learning rate of the mean: a number or a schedule")
    lr_sigma: Scheduled | None = setting(None, "learning rate of the step sizes; none is (3 + ln M) / (5 sqrt M)")
    mirrored: bool = setting(True, "whether members come in pairs with opposite noise")
    noise: Kind = setting("popcount", "values of the noise: popcount, sign or uniform")
    utilities: tuple[int, ...] | None = setting(
        None, "utilities by rank, in units of 2^-20; none takes the published ones", is_shown=False
    )
    shards: int = setting(1, "equal parts of the population that are ranked separately (semi-updates)")

    def __post_init__(self) -> None:
        check_fields(self, SETTING)
        check_population(self.population, self.mirrored, self.shards)
        if self.sigma != "auto":
            check_rate("sigma", self.sigma)
        if self.probed is not None:
            check_rate("probed", self.probed)
        check_rate("lr", self.lr, zero=True)
        if self.lr_sigma is not None:
            check_rate("lr_sigma", self.lr_sigma, zero=True)
        if self.noise == "sign":
            raise BadInput("SNES learns step sizes from the length of the noise, which is always 1 for signs.")
        if self.utilities is not None:
            object.__setattr__(self, "utilities", tuple(self.utilities))  # a list, from a header
        ranked = self.population // self.shards
        if self.utilities is not None and len(self.utilities) != ranked:
            raise BadInput(f"There must be one utility for each of the {ranked} members that are ranked together.")

    @property
    def needs_probe(self) -> bool:
        return self.sigma == "auto" and self.probed is None

    def after_probe(self, values: Mapping[str, float]) -> "SNES":
        """Return the strategy with the sigma that a probe has chosen; its State does not depend on it."""
        return replace(self, probed=values["sigma"])

    def bind(self, genome: Genome) -> "SNES":
        """Return the strategy with the published constants for this number of parameters."""
        usual = (3 + math.log(genome.size)) / (5 * math.sqrt(genome.size))
        strategy = self if self.lr_sigma is not None else replace(self, lr_sigma=usual)
        if self.utilities is not None:
            return strategy
        ranked = self.population // self.shards
        raw = [max(0.0, math.log(ranked / 2 + 1) - math.log(i)) for i in range(1, ranked + 1)]
        table = tuple(round((x / sum(raw) - 1 / ranked) * ONE) for x in raw)
        return replace(strategy, utilities=table)

    def field(self, seed: int, genome: Genome) -> Field:
        return Field(seed, self.noise, self.mirrored)

    def init(self, theta: Tensor) -> State:
        return State(theta, torch.full_like(theta, 1.0 if self.sigma == "auto" else self.sigma))

    def values(self, state: State, generation: int) -> dict[str, float]:
        assert self.lr_sigma is not None, "see bind"
        rates = {"lr": value_at(self.lr, generation), "lr_sigma": value_at(self.lr_sigma, generation)}
        for name, rate in rates.items():
            check_rate(name, rate, zero=True)
        if self.needs_probe:
            raise BadInput('sigma="auto" must be resolved by a probe before the first generation.')
        return rates if self.probed is None else rates | {"sigma": self.probed}

    def ask(self, state: State, field: Field, generation: int, values: Mapping[str, float]) -> Candidates:
        return Candidates(field, generation, state.theta, step_sizes(state, values))

    def tell(self, state: State, result: GenerationResult, field: Field, *, maximize: bool, start: int = 0) -> State:
        weights = self.weights(result.scores, maximize=maximize)
        if weights is None:
            return state
        noise = field.members(range(self.population), result.generation, state.theta.device)
        sums = self.sums(noise, weights, (start, start + state.theta.numel()))
        return self.step(state, sums, result, field, start=start)

    def weights(self, scores: NDArray[np.float32], *, maximize: bool) -> NDArray[np.int64] | None:
        assert self.utilities is not None, "see bind"
        table = self.utilities
        return shape_by_shard(
            scores,
            self.shards,
            lambda part: utilities_by_rank(part, table, maximize=maximize) if any_finite(part) else None,
        )

    @property
    def weight_magnitude(self) -> int | None:
        if self.utilities is None or self.shards > 1:
            return None
        return sum(map(abs, self.utilities)) + self.population  # the means of equal scores are rounded down

    def device_weights(self, scores: Tensor, *, maximize: bool) -> MemberWeights:
        assert self.utilities is not None, "see bind"
        assert self.weight_magnitude is not None
        weights = utilities_by_tensor_rank(scores, self.utilities, maximize=maximize)
        return MemberWeights(weights, self.weight_magnitude)

    def sums(self, noise: Noise, weights: NDArray[np.int64] | MemberWeights, span: Span) -> Tensor:
        first, second = noise.accumulate(weights, span), noise.accumulate(weights, span, power=2)
        return torch.stack([first.to(second.dtype), second])

    def step(self, state: State, sums: Tensor, result: GenerationResult, field: Field, *, start: int = 0) -> State:
        unit, dtype, whole = field.unit(None), state.theta.dtype, ONE * self.shards
        first_order = sums[0].to(dtype) * round_to(unit * result.values["lr"] / whole, dtype)
        rate = round_to(unit * unit * result.values["lr_sigma"] / (2 * whole), dtype)
        second_order = sums[1].to(dtype) * rate
        sigma = step_sizes(state, result.values)
        return State(state.theta + sigma * first_order, state.sigma * exponential(second_order))


def step_sizes(state: State, values: Mapping[str, float]) -> Tensor:
    """Return the standard deviation of every parameter: the State's, in units of what a probe has chosen if one has."""
    return state.sigma * round_to(values["sigma"], state.sigma.dtype) if "sigma" in values else state.sigma
