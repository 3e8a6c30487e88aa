"""A genetic algorithm for networks: selection, crossover, mutation, elitism.

    parents    the best members of a generation; each child has two of them, drawn with equal probability (truncation),
               or each the best of a few that were drawn (tournament)
    crossover  uniform (each parameter from one of the two), one-point, blend (for each parameter a point on the line
               through both, or a little beyond: BLX-alpha, Eshelman, Schaffer 1993), or none
    mutation   each parameter changes with a probability, by sigma z
    elites     the best members go on unchanged, and are scored again with the others

Such et al., "Deep Neuroevolution", 2017, is the case without crossover.
"""

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
from germline.noise import ADDRESS_LIMIT, Field, Kind, Noise, Stream, as_tensor, round_to
from germline.optim.schedules import Scheduled, value_at
from germline.optim.shaping import rank_members
from germline.strategies.candidates import Candidates, describe_offspring
from germline.strategies.protocol import GenerationResult, Strategy
from germline.strategies.settings import (
    check_rate,
    document_settings,
    low_rank_field,
    parse_ranks,
    setting,
)


@dataclass(frozen=True)
class State:
    parents: Tensor  # (parents, M), the best first; one row before the first generation
    size: int  # M, the number of all parameters, whatever columns this State holds

    @property
    def theta(self) -> Tensor:
        return self.parents[0]


@document_settings
@dataclass(frozen=True)
class GA(Strategy[State]):
    """A genetic algorithm with elitism.

    >>> state = GA(population=8, parents=2, elites=1).init(torch.zeros(3))
    >>> state.parents.shape, state.theta.tolist()
    (torch.Size([1, 3]), [0.0, 0.0, 0.0])
    """

    name: ClassVar[str] = "ga"
    ask_arrays: ClassVar[tuple[str, ...]] = ("parents",)

    population: int = setting(256, "members of a generation")
    parents: int = setting(32, "members that are kept as parents")
    elites: int = setting(2, "parents that go on unchanged")
    selection: Literal["truncation", "tournament"] = setting(
        "truncation", "how parents are drawn: truncation (with equal probability) or tournament"
    )
    contestants: int = setting(3, "members of a tournament")
    crossover: Literal["uniform", "one-point", "blend", "none"] = setting(
        "uniform", "how two parents make a child: uniform, one-point, blend or none"
    )
    alpha: float = setting(0.5, "how far beyond its parents a blended child may lie, as a fraction of their distance")
    sigma: Scheduled = setting(0.05, "standard deviation of a mutation: a number or a schedule")
    mutation: float = setting(1.0, "probability that a parameter is mutated")
    rank: int | None = setting(None, "rank of the mutations of matrices; none is dense")
    ranks: str = setting("", "other ranks for parameters by name: 'embedding.*=4, head.weight=none'")
    noise: Kind = setting("popcount", "values of the noise: popcount, sign or uniform")

    def __post_init__(self) -> None:
        check_fields(self, SETTING)
        check_rate("sigma", self.sigma)
        check_rate("alpha", self.alpha, zero=True)
        if not 1 <= self.parents <= self.population:
            raise BadInput(f"There must be from 1 to {self.population} parents, not {self.parents}.")
        if not 0 <= self.elites <= self.parents:
            raise BadInput(f"Elites are parents that go on unchanged: from 0 to {self.parents}, not {self.elites}.")
        if not 0 < self.mutation <= 1:
            raise BadInput(f"The probability of a mutation must be above 0 and at most 1, not {self.mutation}.")
        if self.contestants < 1:
            raise BadInput(f"A tournament has at least one contestant, not {self.contestants}.")
        parse_ranks(self.ranks)

    def field(self, seed: int, genome: Genome) -> Field:
        return low_rank_field(seed, genome, self.noise, self.rank, self.ranks)

    def init(self, theta: Tensor) -> State:
        return State(theta[None], theta.numel())

    def values(self, state: State, generation: int) -> dict[str, float]:
        sigma = value_at(self.sigma, generation)
        check_rate("sigma", sigma)
        return {"sigma": sigma}

    def ask(self, state: State, field: Field, generation: int, values: Mapping[str, float]) -> Candidates:
        return describe_offspring(state, field, generation, partial(self.members, field, generation, values["sigma"]))

    def members(
        self, field: Field, generation: int, sigma: float, state: State, members: NDArray[np.int64], start: int
    ) -> Tensor:
        """Return some members of a generation, elites first, in the columns that the State holds."""
        parents, device = state.parents, state.parents.device
        contestants = self.contestants if self.selection == "tournament" else 1
        pairs = draw_pairs(field, generation, self.population, len(parents), contestants)[members]
        first, second = (parents[as_tensor(pairs[:, i], device)] for i in range(2))
        noise, span = field.members(members, generation, device), (start, start + parents.shape[1])
        child = first if self.crossover == "none" else self.cross(first, second, noise, span, state.size)
        step = noise.perturb(torch.zeros_like(parents[0]), sigma, start=start)
        if self.mutation < 1:
            step = step * (noise.halves(span, Stream.COEFFICIENT) < max(1, round(self.mutation * 65536))).to(step.dtype)
        child = child + step
        unchanged = np.flatnonzero(members < min(self.elites, len(parents)))
        if unchanged.size:
            child[as_tensor(unchanged, device)] = parents[as_tensor(members[unchanged], device)]
        return child

    def cross(self, first: Tensor, second: Tensor, noise: Noise, span: tuple[int, int], size: int) -> Tensor:
        """Return the children of pairs of parents, before mutation."""
        if self.crossover == "uniform":
            return torch.where(noise.bits(span, Stream.CROSSOVER), first, second)
        if self.crossover == "one-point":
            points = draw_points(noise.field, int(noise.generation), self.population)[noise.members]
            cuts = as_tensor((points >> 8) * size >> 24, first.device)
            return torch.where(torch.arange(*span, device=first.device) < cuts[:, None], first, second)
        halves = noise.halves(span, Stream.CROSSOVER).to(first.dtype)
        place = halves * round_to((1 + 2 * self.alpha) / 65536, first.dtype) - round_to(self.alpha, first.dtype)
        return first + (second - first) * place

    def tell(self, state: State, result: GenerationResult, field: Field, *, maximize: bool, start: int = 0) -> State:
        if not np.isfinite(result.scores).any():
            return state
        finite = int(np.isfinite(result.scores).sum())
        best = rank_members(result.scores, maximize=maximize)[: min(self.parents, finite)]
        parents = self.members(field, result.generation, result.values["sigma"], state, best, start)
        return State(parents, state.size)


@lru_cache(maxsize=4)
def draw_pairs(field: Field, generation: int, population: int, parents: int, contestants: int) -> NDArray[np.int64]:
    """Draw the two parents of each member, (population, 2): the winner of a tournament is the one that ranks first."""
    drawn = field.below(parents, 2 * population * contestants, generation, Stream.SELECTION)
    pairs: NDArray[np.int64] = drawn.reshape(population, 2, contestants).min(2)
    return pairs


@lru_cache(maxsize=4)
def draw_points(field: Field, generation: int, population: int) -> NDArray[np.int64]:
    """Draw where the parameters of each member's second parent begin, as a fraction of 2^32."""
    return field.below(ADDRESS_LIMIT, population, generation, Stream.CROSSOVER)
