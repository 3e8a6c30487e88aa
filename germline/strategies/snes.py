"""SNES: Schaul, Glasmachers, Schmidhuber, "High Dimensions and Heavy Tails for Natural Evolution Strategies", 2011.

    mean  <- mean + lr sigma sum of u_i z_i
    sigma <- sigma exp(lr_sigma / 2 sum of u_i (z_i^2 - 1))

with a sigma for each parameter and utilities u that depend on ranks alone: the better half shares what is there, the
best most of it. Noise of low rank, which has no sigma for each parameter, is not for it.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import torch

from germline.errors import BadInput
from germline.genome import Genome
from germline.noise import Field, Kind, rounded
from germline.optim import exponential
from germline.schedule import Scheduled, value_at
from germline.shaping import by_rank
from germline.strategies.base import Candidates, Told
from germline.strategies.settings import check_number, check_rate, setting

ONE = 1 << 20  # utilities are counted in units of 2^-20


@dataclass(frozen=True)
class State:
    theta: torch.Tensor
    sigma: torch.Tensor


@dataclass(frozen=True)
class SNES:
    """Separable natural evolution strategies: a mean and a step size for each parameter.

    >>> SNES(population=4, sigma=0.5).resolved(100).utilities
    (503760, 20528, -262144, -262144)
    """

    name: ClassVar[str] = "snes"
    needs_gradient: ClassVar[bool] = False

    population: int = setting(256, "members of a generation; even if mirrored")
    sigma: float = setting(0.05, "initial standard deviation of every parameter")
    lr: Scheduled = setting(1.0, "learning rate of the mean: a number or a schedule")
    lr_sigma: Scheduled | None = setting(None, "learning rate of the step sizes; none is (3 + ln M) / (5 sqrt M)")
    mirrored: bool = setting(True, "members in pairs with opposite noise")
    noise: Kind = setting("popcount", "values of the noise: popcount, sign or uniform")
    utilities: tuple[int, ...] | None = setting(None, "by rank, in units of 2^-20; none is as published")

    def __post_init__(self) -> None:
        if self.population < 2 or (self.mirrored and self.population % 2):
            need = "an even number of at least 2" if self.mirrored else "at least 2"
            raise BadInput(f"The population must be {need}, not {self.population}.")
        check_rate("sigma", self.sigma)
        check_number("sigma", self.sigma)
        check_rate("lr", self.lr, zero=True)
        if self.lr_sigma is not None:
            check_rate("lr_sigma", self.lr_sigma, zero=True)
        if self.noise == "sign":
            raise BadInput("SNES learns step sizes from the length of the noise, which is always 1 for signs.")
        if self.utilities is not None:
            object.__setattr__(self, "utilities", tuple(self.utilities))  # a list, from a header
        if self.utilities is not None and len(self.utilities) != self.population:
            raise BadInput(f"There must be one utility for each of the {self.population} members.")

    def resolved(self, parameters: int) -> "SNES":
        """With the published constants for so many parameters, which from then on are part of the run."""
        usual = (3 + math.log(parameters)) / (5 * math.sqrt(parameters))
        strategy = self if self.lr_sigma is not None else replace(self, lr_sigma=usual)
        if self.utilities is not None:
            return strategy
        raw = [max(0.0, math.log(self.population / 2 + 1) - math.log(i)) for i in range(1, self.population + 1)]
        table = tuple(round((x / sum(raw) - 1 / self.population) * ONE) for x in raw)
        return replace(strategy, utilities=table)

    def field(self, seed: int, genome: Genome) -> Field:
        return Field(seed, self.noise, self.mirrored)

    def init(self, theta: torch.Tensor) -> State:
        return State(theta, torch.full_like(theta, self.sigma))

    def values(self, state: State, generation: int) -> dict[str, float]:
        assert self.lr_sigma is not None, "see resolved"
        rates = {"lr": value_at(self.lr, generation), "lr_sigma": value_at(self.lr_sigma, generation)}
        for name, rate in rates.items():
            check_rate(name, rate, zero=True)
        return rates

    def ask(self, state: State, field: Field, generation: int, values: Mapping[str, float]) -> Candidates:
        return Candidates(field, generation, state.theta, state.sigma)

    def tell(self, state: State, told: Told, field: Field, *, maximize: bool, start: int = 0) -> State:
        if not np.isfinite(told.scores).any():
            return state
        assert self.utilities is not None, "see resolved"
        weights, dtype = by_rank(told.scores, self.utilities, maximize=maximize), state.theta.dtype
        noise = field.members(range(self.population), told.generation, state.theta.device)
        span, unit = (start, start + state.theta.numel()), field.unit(None)
        first_order = noise.accumulate(weights, span).to(dtype) * rounded(unit * told.values["lr"] / ONE, dtype)
        second_order = noise.accumulate(weights, span, power=2).to(dtype)
        rate = rounded(unit * unit * told.values["lr_sigma"] / (2 * ONE), dtype)
        return State(state.theta + state.sigma * first_order, state.sigma * exponential(second_order * rate))
