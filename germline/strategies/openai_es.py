"""OpenAI-ES: Salimans, Ho, Chen, Sidor, Sutskever, "Evolution Strategies as a Scalable Alternative to RL", 2017.

    g = 1 / (P sigma) * sum of F_i z_i,        theta <- optimizer(theta, -g)

with F the shaped scores and z the members' noise, mirrored.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from germline.arguments import SETTING, check_fields
from germline.errors import BadInput
from germline.genome import Genome
from germline.noise import Field, Kind, MemberWeights, Noise, Span, round_to
from germline.optim.optimizers import Moments
from germline.optim.schedules import Schedule, Scheduled, value_at
from germline.optim.shaping import Shaping, shape_by_shard, utilities, utility_unit
from germline.optim.tensor_shaping import rank_tensor
from germline.strategies.candidates import Candidates
from germline.strategies.protocol import GenerationResult, SummedStrategy
from germline.strategies.settings import (
    build_optimizer,
    check_optimizer,
    check_population,
    check_rate,
    document_settings,
    is_elementwise,
    is_portable,
    learning_rate_at,
    low_rank_field,
    parse_ranks,
    setting,
)

RATES = (0.1, 0.8)  # the least and the largest learning rate of lr="auto", in units of sigma


def choose_relative_rate(population: int, parameters: int) -> float:
    """Return the learning rate of ``lr="auto"``, in units of sigma.

    The direction of a generation is better the more members there are for a parameter, and a step may be longer. The
    best step grows with the cosine between direction and gradient, which is about sqrt(population / parameters).

    >>> choose_relative_rate(64, 4810), round(choose_relative_rate(256, 1_000_000), 3)
    (0.576..., 0.1)
    """
    return min(max(5 * math.sqrt(population / parameters), RATES[0]), RATES[1])


@dataclass(frozen=True)
class State:
    theta: Tensor
    moments: Moments


@document_settings
@dataclass(frozen=True)
class OpenAIES(SummedStrategy[State]):
    """Evolution strategies with a fixed Gaussian-like search distribution and any optimizer.

    >>> strategy = OpenAIES(population=4, sigma=0.5, lr=0.1, optimizer="sgd")
    >>> import torch
    >>> state = strategy.init(torch.zeros(2))
    >>> strategy.values(state, generation=0)
    {'sigma': 0.5, 'lr': 0.1}
    """

    name: ClassVar[str] = "openai-es"
    has_semi_updates: ClassVar[bool] = True

    population: int = setting(256, "members of a generation; even if mirrored")
    sigma: Scheduled | Literal["auto"] = setting(0.05, "standard deviation of the noise: a number, a schedule or auto")
    lr: Scheduled | Literal["auto"] = setting(0.02, "learning rate of the optimizer: a number, a schedule or auto")
    lr_unit: float | Literal["auto"] = setting(1.0, "what lr counts in: a number, or auto for what a probe chooses")
    rank: int | None = setting(None, "rank of the noise of matrices; none is dense noise")
    ranks: str = setting("", "other ranks for parameters by name: 'embedding.*=4, head.weight=none'")
    mirrored: bool = setting(True, "whether members come in pairs with opposite noise")
    shaping: Shaping = setting("ranks", "how scores become utilities: ranks, zscore or raw")
    optimizer: str | Callable[..., Any] = setting(
        "adam", "adam, sgd, momentum, torch.NAME, or a function of parameters"
    )
    scheduler: Callable[..., Any] | None = setting(None, "a torch scheduler, as a function of the torch optimizer")
    weight_decay: float = setting(0.0, "decoupled weight decay")
    start_decay: float = setting(0.0, "decoupled decay towards the weights before the run, for pretrained nets")
    noise: Kind = setting("popcount", "values of the noise: popcount, sign or uniform")
    shards: int = setting(1, "equal parts of the population that are ranked separately (semi-updates)")

    def __post_init__(self) -> None:
        check_fields(self, SETTING)
        check_population(self.population, self.mirrored, self.shards)
        if self.sigma != "auto":
            check_rate("sigma", self.sigma)
        if self.lr != "auto":
            check_optimizer(self)
        elif self.optimizer != "adam":
            raise BadInput('lr="auto" is for optimizer="adam": give the learning rate of another optimizer.')
        if self.lr_unit != "auto":
            check_rate("lr_unit", self.lr_unit)
        elif self.sigma != "auto":
            raise BadInput('lr_unit="auto" is what a probe chooses together with sigma="auto": give a number.')
        parse_ranks(self.ranks)

    @property
    def needs_probe(self) -> bool:
        return self.sigma == "auto"

    def bind(self, genome: Genome) -> "OpenAIES":
        """Return the strategy with the learning rate that ``lr="auto"`` means for this number of parameters."""
        if self.lr != "auto":
            return self
        unit: float | Literal["auto"] = "auto"
        if self.sigma != "auto":
            unit = choose_relative_rate(self.population, genome.size) * value_at(self.sigma, 0)
        return replace(self, lr=Schedule("linear", 1.0, 0.0), lr_unit=unit)

    def limit_smooth_sigma(self, parameters: int) -> float:
        """Return the largest sigma that a probe may choose: with many parameters, a larger one gains nothing.

        >>> OpenAIES().limit_smooth_sigma(100), OpenAIES().limit_smooth_sigma(100_000)
        (0.1, 0.03)
        """
        return min(max(0.1 * math.sqrt(500 / parameters), 0.03), 0.1)

    def after_probe(self, values: Mapping[str, float]) -> "OpenAIES":
        """Return the strategy with the sigma that a probe has chosen, and the learning rate."""
        return replace(self, sigma=values["sigma"], lr_unit=values["lr"] if self.lr_unit == "auto" else self.lr_unit)

    @property
    def is_columnwise(self) -> bool:
        return is_elementwise(build_optimizer(self))

    @property
    def is_portable(self) -> bool:
        return is_portable(build_optimizer(self))

    def field(self, seed: int, genome: Genome) -> Field:
        return low_rank_field(seed, genome, self.noise, self.rank, self.ranks, mirrored=self.mirrored)

    def init(self, theta: Tensor) -> State:
        return State(theta, build_optimizer(self).init(theta))

    def values(self, state: State, generation: int) -> dict[str, float]:
        if self.sigma == "auto":
            raise BadInput('sigma="auto" must be resolved by a probe before the first generation.')
        assert self.lr != "auto", "see bind"
        assert self.lr_unit != "auto", "see after_probe"
        rate = learning_rate_at(build_optimizer(self), self.lr, state.theta, state.moments, generation)
        sigma = value_at(self.sigma, generation)
        check_rate("sigma", sigma)
        return {"sigma": sigma, "lr": rate * self.lr_unit}

    def ask(self, state: State, field: Field, generation: int, values: Mapping[str, float]) -> Candidates:
        return Candidates(field, generation, state.theta, values["sigma"])

    def tell(self, state: State, result: GenerationResult, field: Field, *, maximize: bool, start: int = 0) -> State:
        weights = self.weights(result.scores, maximize=maximize)
        if weights is None:  # nothing was learned: no step, no decay, no change of the moments
            return state
        noise = field.members(range(self.population), result.generation, state.theta.device)
        span = (start, start + state.theta.numel())
        return self.move(state, noise.weighted_sum(weights, span, state.theta.dtype), result)

    def weights(self, scores: NDArray[np.float32], *, maximize: bool) -> NDArray[np.int64] | None:
        return shape_by_shard(scores, self.shards, lambda part: utilities(part, self.shaping, maximize=maximize))

    @property
    def weight_magnitude(self) -> int | None:
        return self.population**2 // 2 if self.shaping == "ranks" and self.shards == 1 else None

    def device_weights(self, scores: Tensor, *, maximize: bool) -> MemberWeights:
        assert self.weight_magnitude is not None
        return MemberWeights(rank_tensor(scores, maximize=maximize), self.weight_magnitude)

    def sums(self, noise: Noise, weights: NDArray[np.int64] | MemberWeights, span: Span) -> Tensor:
        return noise.exact_sum(weights, span)[None]

    def step(self, state: State, sums: Tensor, result: GenerationResult, field: Field, *, start: int = 0) -> State:
        return self.move(state, field.to_units(sums[0], (start, start + sums.shape[1]), state.theta.dtype), result)

    def move(self, state: State, total: Tensor, result: GenerationResult) -> State:
        """Return the State after a step along the sum of the members' noise, weighted by their utilities."""
        scale = utility_unit(self.shaping, self.population // self.shards) / (self.population * result.values["sigma"])
        gradient = total * round_to(-scale, total.dtype)
        theta, moments = build_optimizer(self).step(state.theta, gradient, state.moments, result.values["lr"])
        return State(theta, moments)
