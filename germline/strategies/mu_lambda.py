"""(mu + lambda)- and (mu, lambda)-ES: Beyer, Schwefel, "Evolution strategies: a comprehensive introduction", 2002.

    a child     the mean of rho parents (intermediate), or each parameter from one of them (discrete), + sigma z
    its sigma   self-adaptation: the mean of its parents' sigmas, times exp(tau N(0, 1))
                1/5 rule: one sigma for all, which grows if more than a fifth of the children beat their parents
    selection   the best mu of parents and children (plus), or of the children alone (comma)

Scores on different batches cannot be compared. Under plus, parents are therefore scored again with their children, as
the last members of a generation; with ``rescore=false`` their old scores drift toward the mean by ``decay``.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from germline.arguments import SETTING, check_fields
from germline.errors import BadInput
from germline.genome import Genome
from germline.noise import Field, Kind, Stream, as_tensor, round_to
from germline.optim.optimizers import exponential
from germline.optim.shaping import goodness, mean_finite, rank_members
from germline.strategies.candidates import Candidates, describe_offspring
from germline.strategies.protocol import GenerationResult, Strategy
from germline.strategies.settings import (
    check_rate,
    document_settings,
    low_rank_field,
    parse_ranks,
    setting,
)

STEP = 0.85  # the factor by which the 1/5 rule changes sigma
HALVES = 16  # 16-bit halves whose bits are summed to one nearly normal number: the sum has variance 64


@dataclass(frozen=True)
class State:
    parents: Tensor  # (mu, M), the best first; one row before the first generation
    sigmas: tuple[float, ...]  # of each parent
    scores: tuple[float, ...]  # of each parent when it was last scored; larger is better
    size: int  # M, the number of all parameters, whatever columns this State holds

    @property
    def theta(self) -> Tensor:
        return self.parents[0]


@document_settings
@dataclass(frozen=True)
class MuLambda(Strategy[State]):
    """Evolution strategies with parents, children and recombination.

    >>> MuLambda(population=100, parents=20).children, MuLambda(population=100, parents=20, plus=False).children
    (80, 100)
    """

    name: ClassVar[str] = "mu-lambda"
    ask_arrays: ClassVar[tuple[str, ...]] = ("parents",)

    population: int = setting(256, "members scored in a generation: the children and, under plus, the parents again")
    parents: int = setting(32, "mu, the number of parents")
    mates: int | None = setting(None, "rho, the parents of a child; none is all of them")
    plus: bool = setting(True, "whether parents compete with their children")
    recombination: Literal["intermediate", "discrete"] = setting(
        "intermediate", "how mates make a child: intermediate (their mean) or discrete (each parameter from one)"
    )
    sigma: float = setting(0.05, "initial step size")
    adaptation: Literal["self", "fifth", "none"] = setting(
        "self", "how the step size adapts: self, fifth (the 1/5 rule) or none"
    )
    tau: float | None = setting(None, "learning rate of self-adaptation; none is 1 / sqrt(2 M)")
    rescore: bool = setting(True, "whether parents are scored again with their children (under plus)")
    decay: float = setting(0.9, "what is left of a parent's old score in each generation (without rescore)")
    rank: int | None = setting(None, "rank of the noise of matrices; none is dense noise")
    ranks: str = setting("", "other ranks for parameters by name: 'embedding.*=4, head.weight=none'")
    noise: Kind = setting("popcount", "values of the noise: popcount, sign or uniform")

    def __post_init__(self) -> None:
        check_fields(self, SETTING)
        check_rate("sigma", self.sigma)
        if self.tau is not None:
            check_rate("tau", self.tau, zero=True)
        if not 1 <= self.parents <= self.children:
            message = f"not {self.parents} parents and {self.children} children"
            raise BadInput(f"There must be at least one parent, and as many children as parents: {message}.")
        if self.mates is not None and not 1 <= self.mates <= self.parents:
            raise BadInput(f"A child has from 1 to {self.parents} mates as its parents, not {self.mates}.")
        if not 0 <= self.decay <= 1:
            raise BadInput(f"The setting decay must be from 0 to 1, not {self.decay}.")
        parse_ranks(self.ranks)

    @property
    def children(self) -> int:
        return self.population - (self.parents if self.plus and self.rescore else 0)

    def field(self, seed: int, genome: Genome) -> Field:
        return low_rank_field(seed, genome, self.noise, self.rank, self.ranks)

    def init(self, theta: Tensor) -> State:
        return State(theta[None], (self.sigma,), (-math.inf,), theta.numel())

    def values(self, state: State, generation: int) -> dict[str, float]:
        return {"sigma": math.fsum(state.sigmas) / len(state.sigmas)}

    def ask(self, state: State, field: Field, generation: int, values: Mapping[str, float]) -> Candidates:
        sigmas = self.step_sizes(state, field, generation)
        return describe_offspring(state, field, generation, partial(self.members, field, generation, sigmas))

    def members(
        self, field: Field, generation: int, sigmas: list[float], state: State, members: NDArray[np.int64], start: int
    ) -> Tensor:
        """Return some members of a generation, children first, in the columns that the State holds."""
        parents, device = state.parents, state.parents.device
        chosen = draw_mates(field, generation, self.children, len(parents), self.mates)
        old = members >= self.children
        child = np.where(old, 0, members)
        noise = field.members(members, generation, device)
        if self.recombination == "discrete" and chosen.shape[1] > 1:
            picks = noise.halves((start, start + parents.shape[1]), Stream.CROSSOVER).long() * chosen.shape[1] >> 16
            parent = as_tensor(chosen[child], device).gather(1, picks)
            base = parents.gather(0, parent)
        else:
            base = average_rows(parents, chosen[child])
        z = noise.perturb(torch.zeros_like(parents[0]), 1.0, start=start)
        scale = torch.from_numpy(np.array(sigmas)[child]).to(device, parents.dtype)
        weights = base + scale[:, None] * z
        if old.any():
            numbers = np.minimum(members[old] - self.children, len(parents) - 1)
            weights[as_tensor(np.flatnonzero(old), device)] = parents[as_tensor(numbers, device)]
        return weights

    def step_sizes(self, state: State, field: Field, generation: int) -> list[float]:
        """Return the step size of each child."""
        if self.adaptation != "self":
            return [float(np.float32(state.sigmas[0]))] * self.children
        chosen = draw_mates(field, generation, self.children, len(state.parents), self.mates)
        tau = self.tau if self.tau is not None else 1 / math.sqrt(2 * state.size)
        mean = average_rows(torch.tensor(state.sigmas, dtype=torch.float64)[:, None], chosen)[:, 0]
        normal = torch.from_numpy(draw_normals(field, generation, self.children))
        sigmas: list[float] = (mean * exponential(normal * tau)).float().tolist()
        return sigmas

    def tell(self, state: State, result: GenerationResult, field: Field, *, maximize: bool, start: int = 0) -> State:
        if not np.isfinite(result.scores).any():
            return state
        generation, count, mu = result.generation, self.children, len(state.parents)
        good = goodness(result.scores, maximize)
        scores = good[:count]
        sigmas, numbers = self.step_sizes(state, field, generation), np.arange(count)
        if self.plus:
            old = good[count : count + mu] if self.rescore else self.drift_scores(state, good)
            scores, numbers = np.concatenate([old, scores]), np.concatenate([-1 - np.arange(mu), numbers])
        best = rank_members(scores, maximize=True)[: min(self.parents, int(np.isfinite(scores).sum()))]
        chosen = numbers[best]
        members = np.where(chosen < 0, count - 1 - chosen, chosen)  # parents come after the children
        parents = self.members(field, generation, sigmas, state, members, start)
        step_sizes = tuple(state.sigmas[-1 - n] if n < 0 else sigmas[n] for n in chosen.tolist())
        if self.adaptation == "fifth":
            step_sizes = (self.adapt_by_success(state, good, field, generation),) * len(chosen)
        return State(parents, step_sizes, tuple(float(score) for score in scores[best]), state.size)

    def drift_scores(self, state: State, good: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return the parents' old scores, which drift toward the mean of the new ones."""
        mean = mean_finite(good)
        return np.array([self.decay * old + (1 - self.decay) * mean for old in state.scores], np.float32)

    def adapt_by_success(self, state: State, good: NDArray[np.float32], field: Field, generation: int) -> float:
        """Return sigma by the 1/5 rule: a child succeeds if it is better than the mean of its parents."""
        old = good[self.children :][: len(state.parents)] if self.plus and self.rescore else np.array(state.scores)
        if not np.isfinite(old).all():
            return state.sigmas[0]
        chosen = draw_mates(field, generation, self.children, len(state.parents), self.mates)
        parents = np.array([math.fsum(old[row].tolist()) / len(row) for row in chosen])
        successes = int((good[: self.children] > parents).sum())
        return state.sigmas[0] * (1 / STEP if 5 * successes > self.children else STEP)


@lru_cache(maxsize=4)
def draw_mates(field: Field, generation: int, children: int, parents: int, mates: int | None) -> NDArray[np.int64]:
    """Draw the parents of each child: (children, mates)."""
    if mates is None or mates >= parents:
        return np.tile(np.arange(parents), (children, 1))
    return field.below(parents, children * mates, generation, Stream.SELECTION).reshape(children, mates)


@lru_cache(maxsize=4)
def draw_normals(field: Field, generation: int, children: int) -> NDArray[np.float64]:
    """Draw a nearly normal number for each child, in steps of 1/8."""
    halves = field.members(np.arange(children), generation).halves((0, HALVES), Stream.COEFFICIENT).numpy()
    ones = np.bitwise_count(halves.view(np.uint32)).sum(1, dtype=np.int64)
    numbers: NDArray[np.float64] = (ones - 8 * HALVES) / 8.0
    return numbers


def average_rows(parents: Tensor, chosen: NDArray[np.int64]) -> Tensor:
    """Return the means of some rows, summed one after the other: (children, columns)."""
    if (chosen == chosen[:1]).all():
        chosen = chosen[:1]  # all children have the same parents
    total = parents[as_tensor(chosen[:, 0], parents.device)]
    for column in range(1, chosen.shape[1]):
        total = total + parents[as_tensor(chosen[:, column], parents.device)]
    return total * round_to(1 / chosen.shape[1], parents.dtype) if chosen.shape[1] > 1 else total
