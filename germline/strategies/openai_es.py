"""OpenAI-ES: Salimans, Ho, Chen, Sidor, Sutskever, "Evolution Strategies as a Scalable Alternative to RL", 2017.

    g = 1 / (P sigma) * sum of F_i z_i,        theta <- optimiser(theta, -g)

with F the shaped scores and z the members' noise, mirrored.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch

from germline.errors import BadInput
from germline.genome import Genome
from germline.noise import Field, Kind, low_rank, rounded
from germline.optim import Moments
from germline.schedule import Scheduled, value_at
from germline.shaping import Shaping, unit, utilities
from germline.strategies.base import Candidates, Told
from germline.strategies.settings import (
    check_choice,
    check_optimiser,
    check_rate,
    optimiser_of,
    rank_rules,
    ranks_of,
    rate_at,
    setting,
)


@dataclass(frozen=True)
class State:
    theta: torch.Tensor
    moments: Moments


@dataclass(frozen=True)
class OpenAIES:
    """Evolution strategies with a fixed Gaussian-like search distribution and any optimiser.

    >>> strategy = OpenAIES(population=4, sigma=0.5, lr=0.1, optimizer="sgd")
    >>> state = strategy.init(torch.zeros(2))
    >>> strategy.values(state, generation=0)
    {'sigma': 0.5, 'lr': 0.1}
    """

    name: ClassVar[str] = "openai-es"
    needs_gradient: ClassVar[bool] = False

    population: int = setting(256, "members of a generation; even if mirrored")
    sigma: Scheduled | Literal["auto"] = setting(0.05, "standard deviation of the noise: a number, a schedule or auto")
    lr: Scheduled = setting(0.02, "learning rate of the optimiser: a number or a schedule")
    rank: int | None = setting(None, "rank of the noise of matrices; none is dense noise")
    ranks: str = setting("", "other ranks for parameters by name: 'embedding.*=4, head.weight=none'")
    mirrored: bool = setting(True, "members in pairs with opposite noise")
    shaping: Shaping = setting("ranks", "how scores become utilities: ranks or zscore")
    optimizer: str | Callable[..., Any] = setting(
        "adam", "adam, sgd, momentum, torch.NAME, or a function of parameters"
    )
    scheduler: Callable[..., Any] | None = setting(None, "a torch scheduler, as a function of the torch optimiser")
    weight_decay: float = setting(0.0, "decoupled weight decay")
    noise: Kind = setting("popcount", "values of the noise: popcount, sign or uniform")

    def __post_init__(self) -> None:
        if self.population < 2 or (self.mirrored and self.population % 2):
            need = "an even number of at least 2" if self.mirrored else "at least 2"
            raise BadInput(f"The population must be {need}, not {self.population}.")
        check_choice("shaping", self.shaping, ("ranks", "zscore"))
        if self.sigma != "auto":
            check_rate("sigma", self.sigma)
        check_optimiser(self)
        rank_rules(self.ranks)

    def field(self, seed: int, genome: Genome) -> Field:
        ranks = ranks_of(genome, self.rank, self.ranks)
        return Field(seed, self.noise, self.mirrored, low_rank(genome.shapes, ranks))

    def init(self, theta: torch.Tensor) -> State:
        return State(theta, optimiser_of(self).init(theta))

    def values(self, state: State, generation: int) -> dict[str, float]:
        if self.sigma == "auto":
            raise BadInput('sigma="auto" must be resolved by a probe before the first generation.')
        rate = rate_at(optimiser_of(self), self.lr, state.theta, state.moments, generation)
        sigma = value_at(self.sigma, generation)
        check_rate("sigma", sigma)
        return {"sigma": sigma, "lr": rate}

    def ask(self, state: State, field: Field, generation: int, values: Mapping[str, float]) -> Candidates:
        return Candidates(field, generation, state.theta, values["sigma"])

    def tell(self, state: State, told: Told, field: Field, *, maximize: bool, start: int = 0) -> State:
        weights = utilities(told.scores, self.shaping, maximize=maximize)
        if weights is None:  # nothing was learned: no step, no decay, no change of the moments
            return state
        theta = state.theta
        noise = field.members(range(self.population), told.generation, theta.device)
        total = noise.weighted_sum(weights, (start, start + theta.numel()), theta.dtype)
        scale = unit(self.shaping, self.population) / (self.population * told.values["sigma"])
        gradient = total * rounded(-scale, theta.dtype)
        theta, moments = optimiser_of(self).step(theta, gradient, state.moments, told.values["lr"])
        return State(theta, moments)
