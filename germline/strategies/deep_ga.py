"""The genetic algorithm of deep neuroevolution, with individuals as chains of mutations.

    members  the elite, unchanged; every other one is a parent, drawn with equal probability, plus sigma z
    parents  the best members of the generation (truncation selection)
    chain    an individual is the list of its mutations, each of which is an address of noise: its generation and member

A chain takes two numbers for each mutation, whatever the size of the network, so a State that is sent or saved holds no
weights but one center. Mutations that all parents have in common are added to that center, in the order of the chain,
so that chains stay as long as the time back to the parents' last common ancestor, and no bit changes.

Such et al., "Deep Neuroevolution: Genetic Algorithms Are a Competitive Alternative for Training Deep Neural Networks
for Reinforcement Learning", 2017. ``GA(crossover="none", elites=1)`` is the same algorithm with its parents in memory.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from germline.arguments import SETTING, check_fields
from germline.errors import BadInput
from germline.noise import Field, Kind, as_tensor
from germline.optim.shaping import rank_members
from germline.strategies.candidates import Candidates, Offspring
from germline.strategies.ga import draw_pairs
from germline.strategies.protocol import GenerationResult, Strategy
from germline.strategies.settings import check_rate, document_settings, setting

Chain = tuple[int, ...]  # generation and member of each mutation, one after the other


@dataclass(frozen=True)
class State:
    theta: Tensor  # (M,) the best individual
    base: Tensor  # (M,) the individual from which all chains begin
    numbers: tuple[int, ...]  # the chains of the parents, the best first, each with its length before it

    @property
    def chains(self) -> tuple[Chain, ...]:
        """The chains of the parents, the best first."""
        chains, at = [], 0
        while at < len(self.numbers):
            end = at + 1 + self.numbers[at]
            chains.append(tuple(self.numbers[at + 1 : end]))  # JSON makes it a list
            at = end
        return tuple(chains)


@document_settings
@dataclass(frozen=True)
class DeepGA(Strategy[State]):
    """A genetic algorithm whose individuals are chains of mutations.

    >>> strategy = DeepGA(population=8, parents=2)
    >>> state, field = strategy.init(torch.zeros(3)), Field(seed=1)
    >>> for generation in range(2):
    ...     scores = np.arange(8, dtype=np.float32)
    ...     state = strategy.tell(state, GenerationResult(generation, scores, {}), field, maximize=True)
    >>> state.chains
    ((1, 7), (1, 6))
    """

    name: ClassVar[str] = "deep-ga"
    ask_arrays: ClassVar[tuple[str, ...]] = ("theta", "base")

    population: int = setting(1000, "members of a generation")
    parents: int = setting(20, "members that are kept as parents")
    sigma: float = setting(0.002, "standard deviation of a mutation")
    noise: Kind = setting("popcount", "values of the noise: popcount, sign or uniform")

    def __post_init__(self) -> None:
        check_fields(self, SETTING)
        check_rate("sigma", self.sigma)
        if not 1 <= self.parents <= self.population:
            raise BadInput(f"There must be from 1 to {self.population} parents, not {self.parents}.")

    def field(self, seed: int, genome: object) -> Field:
        return Field(seed, self.noise)

    def init(self, theta: Tensor) -> State:
        return State(theta, theta.clone(), join_chains(((),)))

    def values(self, state: State, generation: int) -> dict[str, float]:
        return {}

    def ask(self, state: State, field: Field, generation: int, values: Mapping[str, float]) -> Candidates:
        parents: list[Tensor] = []  # made once, when a layer first asks for weights

        def make(members: NDArray[np.int64], low: int, high: int) -> Tensor:
            if not parents:
                parents.append(self.grow(state.base, state.chains, field, 0))
            rows = parents[0][:, low:high]
            drawn = draw_pairs(field, generation, self.population, len(rows), 1)[members, 0]
            noise = field.members(members, generation, rows.device)
            children = rows[as_tensor(drawn, rows.device)] + noise.perturb(
                torch.zeros_like(rows[0]), self.sigma, start=low
            )
            children[as_tensor(np.flatnonzero(members == 0), rows.device)] = rows[0]
            return children

        return Offspring(field, generation, state.theta, 0.0, make=make)

    def grow(self, base: Tensor, chains: tuple[Chain, ...], field: Field, start: int) -> Tensor:
        """Return the individuals of some chains, (chains, parameters), in the columns that ``base`` holds."""
        grown: dict[Chain, Tensor] = {(): base}
        zeros = torch.zeros_like(base)
        for chain in chains:
            for end in range(2, len(chain) + 2, 2):
                if chain[:end] not in grown:
                    generation, member = chain[end - 2 : end]
                    step = field.members([member], generation, base.device).perturb(zeros, self.sigma, start=start)[0]
                    grown[chain[:end]] = grown[chain[: end - 2]] + step
        return torch.stack([grown[chain] for chain in chains])

    def tell(self, state: State, result: GenerationResult, field: Field, *, maximize: bool, start: int = 0) -> State:
        finite, generation = int(np.isfinite(result.scores).sum()), result.generation
        if not finite:
            return state
        best = rank_members(result.scores, maximize=maximize)[: min(self.parents, finite)].tolist()
        before = state.chains
        drawn = draw_pairs(field, generation, self.population, len(before), 1)[:, 0].tolist()
        chains = tuple((*before[drawn[member]], generation, member) if member else before[0] for member in best)
        common = count_common(chains)
        base = self.grow(state.base, (chains[0][:common],), field, start)[0]
        chains = tuple(chain[common:] for chain in chains)
        return State(self.grow(base, chains[:1], field, start)[0], base, join_chains(chains))


def join_chains(chains: tuple[Chain, ...]) -> tuple[int, ...]:
    """Return chains as one list of numbers, each with its length before it.

    >>> join_chains(((0, 7), ()))
    (2, 0, 7, 0)
    """
    return tuple(number for chain in chains for number in (len(chain), *chain))


def count_common(chains: tuple[Chain, ...]) -> int:
    """Return how many numbers all chains begin with in common: those of whole mutations.

    >>> count_common(((0, 1, 1, 2), (0, 1, 1, 3))), count_common(((0, 1),))
    (2, 2)
    """
    shortest = min(len(chain) for chain in chains)
    ends = (end for end in range(0, shortest, 2) if len({chain[end : end + 2] for chain in chains}) > 1)
    return next(ends, shortest)
