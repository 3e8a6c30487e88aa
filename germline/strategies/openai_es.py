"""OpenAI-ES: Salimans, Ho, Chen, Sidor, Sutskever, "Evolution Strategies as a Scalable Alternative to RL", 2017.

    g = 1 / (P sigma) * sum of F_i z_i,        theta <- optimizer(theta, -g)

with F the shaped scores and z the members' noise, mirrored.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from germline.arguments import SETTING, check_fields
from germline.errors import BadInput
from germline.genome import Genome
from germline.noise import Field, Kind, Noise, Span, round_to
from germline.optim.optimizers import Moments
from germline.optim.schedules import Scheduled, value_at
from germline.optim.shaping import Shaping, shape_by_shard, utilities, utility_unit
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
    lr: Scheduled = setting(0.02, "learning rate of the optimizer: a number or a schedule")
    rank: int | None = setting(None, "rank of the noise of matrices; none is dense noise")
    ranks: str = setting("", "other ranks for parameters by name: 'embedding.*=4, head.weight=none'")
    mirrored: bool = setting(True, "whether members come in pairs with opposite noise")
    shaping: Shaping = setting("ranks", "how scores become utilities: ranks or zscore")
    optimizer: str | Callable[..., Any] = setting(
        "adam", "adam, sgd, momentum, torch.NAME, or a function of parameters"
    )
    scheduler: Callable[..., Any] | None = setting(None, "a torch scheduler, as a function of the torch optimizer")
    weight_decay: float = setting(0.0, "decoupled weight decay")
    noise: Kind = setting("popcount", "values of the noise: popcount, sign or uniform")
    shards: int = setting(1, "equal parts of the population that are ranked separately (semi-updates)")

    def __post_init__(self) -> None:
        check_fields(self, SETTING)
        check_population(self.population, self.mirrored, self.shards)
        if self.sigma != "auto":
            check_rate("sigma", self.sigma)
        check_optimizer(self)
        parse_ranks(self.ranks)

    @property
    def needs_probe(self) -> bool:
        return self.sigma == "auto"

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
        rate = learning_rate_at(build_optimizer(self), self.lr, state.theta, state.moments, generation)
        sigma = value_at(self.sigma, generation)
        check_rate("sigma", sigma)
        return {"sigma": sigma, "lr": rate}

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

    def sums(self, noise: Noise, weights: NDArray[np.int64], span: Span) -> Tensor:
        return noise.exact_sum(weights, span)[None]

    def step(self, state: State, sums: Tensor, result: GenerationResult, field: Field, *, start: int = 0) -> State:
        return self.move(state, field.to_units(sums[0], (start, start + sums.shape[1]), state.theta.dtype), result)

    def move(self, state: State, total: Tensor, result: GenerationResult) -> State:
        """Return the State after a step along the sum of the members' noise, weighted by their utilities."""
        scale = utility_unit(self.shaping, self.population // self.shards) / (self.population * result.values["sigma"])
        gradient = total * round_to(-scale, total.dtype)
        theta, moments = build_optimizer(self).step(state.theta, gradient, state.moments, result.values["lr"])
        return State(theta, moments)
