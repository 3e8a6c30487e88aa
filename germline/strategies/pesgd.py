"""PESGD: Shahab, Grot, "Population-Based Evolutionary Distributed SGD", 2020.

A generation is: each member learns for some epochs by itself, all are evaluated, the best become parents and stay, and
the others are replaced by their children: crossed, then mutated. Nobody talks to anybody while members learn; then
scores travel, and the weights of parents to those who make a child of them. ``theta`` is the best model evaluated.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from germline.errors import BadInput
from germline.genome import Genome
from germline.noise import Field, Kind, Stream, round_to
from germline.optim.optimizers import Moments, TorchOptimizer
from germline.optim.schedules import Scheduled, value_at
from germline.optim.shaping import goodness, rank_members
from germline.strategies.base import Candidates, GenerationResult, Offspring
from germline.strategies.settings import (
    build_optimizer,
    check_choice,
    check_count,
    check_number,
    check_optimizer,
    check_rate,
    setting,
)


@dataclass(frozen=True)
class State:
    theta: torch.Tensor  # the best that was ever evaluated
    members: torch.Tensor  # (members, parameters); of a process of a fleet its own
    first: torch.Tensor  # their moments, where they are kept: as many rows, or none
    second: torch.Tensor
    best: float | None = None  # how good theta was: a score, or a loss below zero
    power1: float = 1.0
    power2: float = 1.0


class Child(NamedTuple):
    place: int
    mother: int
    father: int


@dataclass(frozen=True)
class PESGD:
    """A population of models that learn by gradient descent apart, and now and then by evolution together.

    >>> PESGD(population=4).parents_kept
    2
    """

    name: ClassVar[str] = "pesgd"
    needs_gradient: ClassVar[bool] = True
    rears: ClassVar[bool] = True  # members learn between evaluations
    asked: ClassVar[tuple[str, ...]] = ("members",)

    population: int = setting(4, "members that learn side by side")
    epochs: int = setting(1, "epochs of gradient descent between evolutions")
    lr: Scheduled = setting(0.1, "learning rate of the optimizer: a number or a schedule, by generations")
    optimizer: str | Callable[..., Any] = setting("sgd", "adam, sgd, momentum, torch.NAME, or a function of parameters")
    scheduler: Callable[..., Any] | None = setting(None, "a torch scheduler, as a function of the torch optimizer")
    weight_decay: float = setting(0.0, "decoupled weight decay")
    keep_moments: bool = setting(True, "whether the optimizer's moments outlive an evolution; children have a mother's")
    workers_per_member: int = setting(1, "processes that share each batch of a member, cut into as many slices")
    parents: int | None = setting(None, "members that are selected and stay; none is half of them")
    selection: Literal["truncation", "tournament"] = setting("truncation", "of parents: the best, or winners of two")
    crossover: Literal["layer", "uniform", "average", "none"] = setting(
        "layer", "of two parents: each layer, or each parameter, from one of them; their mean; or only the mother"
    )
    sigma: float = setting(0.001, "deviation of the mutation of children; 0 is none")
    mutation: float = setting(1.0, "part of the parameters of a child that are mutated")
    diversity: Literal["reset", "noise"] = setting(
        "reset", "of the first members but one, which is the model as given: new initial weights, or noise added"
    )
    spread: float = setting(0.05, "deviation of that noise")
    noise: Kind = setting("popcount", "values of the noise: popcount, sign or uniform")
    layers: tuple[int, ...] | None = setting(None, "the number of the layer at each of the parameters' starts")

    def __post_init__(self) -> None:
        check_optimizer(self)
        check_choice("selection", self.selection, ("truncation", "tournament"))
        check_choice("crossover", self.crossover, ("layer", "uniform", "average", "none"))
        check_choice("diversity", self.diversity, ("reset", "noise"))
        for name in ("population", "epochs", "workers_per_member"):
            check_count(name, getattr(self, name))
        for name in ("sigma", "spread"):
            check_number(name, getattr(self, name))
            check_rate(name, getattr(self, name), zero=True)
        if not 1 <= self.parents_kept <= self.population:
            raise BadInput(f"There must be from 1 to {self.population} parents, not {self.parents}.")
        if not 0 < self.mutation <= 1:
            raise BadInput(f"The part of the parameters that are mutated must be above 0, at most 1: {self.mutation}.")
        if self.keep_moments and isinstance(build_optimizer(self), TorchOptimizer):
            raise BadInput("The state of a torch optimizer cannot be kept over an evolution: say keep_moments=false.")
        if self.layers is not None:
            object.__setattr__(self, "layers", tuple(int(i) for i in self.layers))  # from a header

    @property
    def parents_kept(self) -> int:
        return max(1, self.population // 2) if self.parents is None else self.parents

    @property
    def slices(self) -> int:
        """Of a batch."""
        return self.workers_per_member

    @property
    def kept_arrays(self) -> list[str]:
        """The moments that outlive an evolution."""
        moments = build_optimizer(self).init(torch.zeros(1)) if self.keep_moments else Moments()
        return [name for name in ("first", "second") if getattr(moments, name) is not None]

    def bind(self, genome: Genome) -> "PESGD":
        """With the first parameter of each layer, which from then on is part of the run."""
        if self.layers is not None:
            return self
        owners = [slot.name.rpartition(".")[0] for slot in genome.slots]
        pairs = zip(genome.slots, owners, [None, *owners], strict=False)
        return replace(self, layers=tuple(slot.start for slot, owner, before in pairs if owner != before))

    def field(self, seed: int, genome: Genome) -> Field:
        return Field(seed, self.noise, mirrored=False)

    def init(self, theta: torch.Tensor) -> State:
        return self.begun(theta, theta.expand(self.population, -1).clone())

    def begun(self, theta: torch.Tensor, members: torch.Tensor) -> State:
        """A State of these members, none of which has been evaluated."""
        first, second = (
            torch.zeros_like(members) if name in self.kept_arrays else members.new_zeros(0, theta.numel())
            for name in ("first", "second")
        )
        return State(theta, members, first, second)

    def values(self, state: State, generation: int) -> dict[str, float]:
        rate = value_at(self.lr, generation)
        check_rate("lr", rate, zero=True)
        return {"lr": rate}

    def ask(self, state: State, field: Field, generation: int, values: Mapping[str, float]) -> Candidates:
        def make(members: NDArray[np.int64], low: int, high: int) -> torch.Tensor:
            return state.members[torch.from_numpy(members).to(state.members.device), low:high]

        return Offspring(field, generation, state.theta, 0.0, make=make)

    # Learning

    def moments(self, state: State, row: int) -> Moments:
        """What the optimizer remembers of a member."""
        if not self.keep_moments:
            return build_optimizer(self).init(state.members[row])
        arrays = {name: getattr(state, name)[row] for name in self.kept_arrays}
        return Moments(**arrays, power1=state.power1, power2=state.power2)

    def learned(self, state: State, members: list[torch.Tensor], moments: list[Moments]) -> State:
        """The State with what the members have become."""
        state = replace(state, members=torch.stack(members) if members else state.members)
        if not self.keep_moments or not moments:
            return state
        rows: Any = {name: torch.stack([getattr(one, name) for one in moments]) for name in self.kept_arrays}
        return replace(state, **rows, power1=moments[0].power1, power2=moments[0].power2)

    # Evolution

    def evolution(self, result: GenerationResult, field: Field, *, maximize: bool) -> list[Child]:
        """Who is replaced, and by whose child; the parents, who stay, are all others."""
        order = rank_members(result.scores, maximize=maximize)
        chosen = order[: self.parents_kept]
        if self.selection == "tournament":
            drawn = field.below(self.population, 2 * self.parents_kept, result.generation, Stream.SELECTION, member=1)
            place = np.argsort(order)  # of each member among all
            winners = np.where(place[drawn[::2]] <= place[drawn[1::2]], drawn[::2], drawn[1::2])
            chosen = np.array(sorted({int(order[0]), *map(int, winners)}, key=lambda k: int(place[k])))
        mates = field.below(len(chosen), 2 * self.population, result.generation, Stream.SELECTION)
        staying = set(map(int, chosen))
        return [
            Child(k, int(chosen[mates[2 * k]]), int(chosen[mates[2 * k + 1]]))
            for k in range(self.population)
            if k not in staying
        ]

    def improved(self, state: State, result: GenerationResult, *, maximize: bool) -> tuple[int, float] | None:
        """The best member and how good it is, if it is better than any before."""
        good = goodness(result.scores, maximize)
        best = int(rank_members(result.scores, maximize=maximize)[0])
        if not np.isfinite(good[best]) or (state.best is not None and float(good[best]) <= state.best):
            return None
        return best, float(good[best])

    def tell(self, state: State, result: GenerationResult, field: Field, *, maximize: bool, start: int = 0) -> State:
        """Of members that have learned: the next population."""
        if not np.isfinite(result.scores).any():
            return state
        found = self.improved(state, result, maximize=maximize)
        if found is not None:
            state = replace(state, theta=state.members[found[0]].clone(), best=found[1])
        children = self.evolution(result, field, maximize=maximize)
        mine = list(range(self.population))
        rows = lambda k, name="members": getattr(state, name)[k]  # noqa: E731
        return self.bred(state, children, mine, rows, field, result.generation, start)

    def bred(
        self,
        state: State,
        children: list[Child],
        mine: list[int],
        row: Callable[..., torch.Tensor],
        field: Field,
        generation: int,
        start: int = 0,
    ) -> State:
        """The State with children at those places that are this process's own; ``row`` is of a member and an array."""
        arrays = {name: getattr(state, name).clone() for name in ("members", *self.kept_arrays)}
        for i, place in enumerate(mine):
            for child in (child for child in children if child.place == place):
                arrays["members"][i] = self.child(child, row(child.mother), row(child.father), field, generation, start)
                for name in self.kept_arrays:
                    arrays[name][i] = row(child.mother, name)
        return replace(state, **arrays)

    def child(
        self, child: Child, mother: torch.Tensor, father: torch.Tensor, field: Field, generation: int, start: int
    ) -> torch.Tensor:
        size = mother.numel()
        noise, span = field.members([child.place], generation, mother.device), (start, start + size)
        made = mother
        if self.crossover == "average":
            made = (mother + father) * round_to(0.5, mother.dtype)
        elif self.crossover == "uniform":
            made = torch.where(noise.bits(span, Stream.CROSSOVER)[0], mother, father)
        elif self.crossover == "layer":
            hers = self.layers_of_mother(field, generation, child.place, span, mother.device)
            made = torch.where(hers, mother, father)
        if not self.sigma:
            return made.clone()
        mutated = noise.perturb(made.contiguous(), self.sigma, start=start)[0]
        if self.mutation == 1:
            return mutated
        drawn = noise.halves(span, Stream.COEFFICIENT)[0] < max(1, round(self.mutation * 65536))
        return torch.where(drawn, mutated, made)

    def layers_of_mother(
        self, field: Field, generation: int, place: int, span: tuple[int, int], device: torch.device
    ) -> torch.Tensor:
        """Which of some columns are of a layer that a child has from its mother."""
        starts = self.layers or (0,)
        coins = field.below(2, len(starts), generation, Stream.CROSSOVER, member=place)
        found = torch.zeros(span[1] - span[0], dtype=torch.bool, device=device)
        for low, high, coin in zip(starts, [*starts[1:], span[1]], coins, strict=True):
            if coin:
                found[max(0, low - span[0]) : max(0, high - span[0])] = True
        return found
