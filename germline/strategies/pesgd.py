"""PESGD: Shahab, Grot, "Population-Based Evolutionary Distributed SGD", 2020.

In a generation each member trains by gradient descent for some epochs, all members are evaluated, the best become
parents and stay, and the others are replaced by children of the parents: crossed, then mutated. Members do not
communicate while they train; afterwards scores travel, and the weights of parents to the processes that make a child of
them. ``theta`` is the best model that was ever evaluated.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from germline.arguments import SETTING, check_fields
from germline.errors import BadInput
from germline.genome import Genome
from germline.noise import Field, Kind, Stream, round_to
from germline.optim.optimizers import Moments, TorchOptimizer
from germline.optim.schedules import Scheduled, value_at
from germline.optim.shaping import goodness, rank_members
from germline.strategies.candidates import Candidates, Offspring
from germline.strategies.protocol import GenerationResult, MemberBuilder, MemberStrategy, RowReader, StrategyKind
from germline.strategies.settings import (
    build_optimizer,
    check_count,
    check_optimizer,
    check_rate,
    document_settings,
    is_portable,
    setting,
)


@dataclass(frozen=True)
class State:
    theta: Tensor  # the best weights that were ever evaluated
    members: Tensor  # (members, parameters); a rank of a fleet holds its own members
    first: Tensor  # the members' moments, where they outlive a generation: as many rows, or none
    second: Tensor
    best: float | None = None  # the score of theta; larger is better
    power1: float = 1.0
    power2: float = 1.0


class Child(NamedTuple):
    place: int  # the member that it replaces
    mother: int
    father: int


class Selection(NamedTuple):
    children: list[Child]
    best: tuple[int, float] | None  # the best member and its score, if it is better than theta


@document_settings
@dataclass(frozen=True)
class PESGD(MemberStrategy[State]):
    """A population of models that train by gradient descent separately, and evolve together between epochs.

    >>> PESGD(population=4).count_parents()
    2
    """

    name: ClassVar[str] = "pesgd"
    kind: ClassVar[StrategyKind] = "train_members"
    ask_arrays: ClassVar[tuple[str, ...]] = ("members",)

    population: int = setting(4, "members that train side by side")
    epochs: int = setting(1, "epochs of gradient descent between evaluations")
    lr: Scheduled = setting(0.1, "learning rate of the optimizer: a number or a schedule, by generations")
    optimizer: str | Callable[..., Any] = setting("sgd", "adam, sgd, momentum, torch.NAME, or a function of parameters")
    scheduler: Callable[..., Any] | None = setting(None, "a torch scheduler, as a function of the torch optimizer")
    weight_decay: float = setting(0.0, "decoupled weight decay")
    keep_moments: bool = setting(True, "whether the optimizer's moments outlive a generation; children get a mother's")
    workers_per_member: int = setting(1, "ranks that share each batch of a member, cut into as many slices")
    parents: int | None = setting(None, "members that are selected and stay; none is half of them")
    selection: Literal["truncation", "tournament"] = setting(
        "truncation", "how parents are selected: truncation (the best) or tournament (winners of two)"
    )
    crossover: Literal["layer", "uniform", "average", "none"] = setting(
        "layer", "how two parents make a child: layer (each layer from one), uniform (each parameter), average or none"
    )
    sigma: float = setting(0.001, "standard deviation of the mutation of children; 0 is none")
    mutation: float = setting(1.0, "fraction of a child's parameters that are mutated")
    diversity: Literal["reset", "noise"] = setting(
        "reset", "how the first members differ from the model: reset (new initial weights) or noise"
    )
    spread: float = setting(0.05, "standard deviation of that noise")
    noise: Kind = setting("popcount", "values of the noise: popcount, sign or uniform")
    layers: tuple[int, ...] | None = setting(None, "the first parameter of each layer; set when a run starts")

    def __post_init__(self) -> None:
        check_fields(self, SETTING)
        check_optimizer(self)
        for name in ("population", "epochs", "workers_per_member"):
            check_count(name, getattr(self, name))
        for name in ("sigma", "spread"):
            check_rate(name, getattr(self, name), zero=True)
        if not 1 <= self.count_parents() <= self.population:
            raise BadInput(f"There must be from 1 to {self.population} parents, not {self.parents}.")
        if not 0 < self.mutation <= 1:
            raise BadInput(f"The setting mutation must be above 0 and at most 1, not {self.mutation}.")
        if self.keep_moments and isinstance(build_optimizer(self), TorchOptimizer):
            raise BadInput("The state of a torch optimizer cannot outlive a generation: give keep_moments=false.")
        if self.layers is not None:
            object.__setattr__(self, "layers", tuple(int(i) for i in self.layers))  # from a header

    def count_parents(self) -> int:
        """Return the number of members that are selected and stay."""
        return max(1, self.population // 2) if self.parents is None else self.parents

    @property
    def is_portable(self) -> bool:
        return is_portable(build_optimizer(self))

    @property
    def row_arrays(self) -> tuple[str, ...]:
        moments = build_optimizer(self).init(torch.zeros(1)) if self.keep_moments else Moments()
        return tuple(name for name in ("first", "second") if getattr(moments, name) is not None)

    def bind(self, genome: Genome) -> "PESGD":
        """Return the strategy with the first parameter of each layer."""
        if self.layers is not None:
            return self
        owners = [slot.name.rpartition(".")[0] for slot in genome.slots]
        pairs = zip(genome.slots, owners, [None, *owners], strict=False)
        return replace(self, layers=tuple(slot.start for slot, owner, before in pairs if owner != before))

    def field(self, seed: int, genome: Genome) -> Field:
        return Field(seed, self.noise, mirrored=False)

    def init(self, theta: Tensor) -> State:
        return self.with_members(theta, theta.expand(self.population, -1).clone())

    def init_members(self, theta: Tensor, build: MemberBuilder) -> Tensor:
        """Return the weights of the first members: the model as it is, and others by the setting ``diversity``."""
        if self.diversity == "noise":
            return torch.cat([theta[None], build.perturb(np.arange(1, self.population), self.spread)])
        return torch.stack([theta, *(build.reset(member) for member in range(1, self.population))])

    def with_members(self, theta: Tensor, members: Tensor) -> State:
        first, second = (
            torch.zeros_like(members) if name in self.row_arrays else members.new_zeros(0, theta.numel())
            for name in ("first", "second")
        )
        return State(theta, members, first, second)

    def values(self, state: State, generation: int) -> dict[str, float]:
        rate = value_at(self.lr, generation)
        check_rate("lr", rate, zero=True)
        return {"lr": rate}

    def ask(self, state: State, field: Field, generation: int, values: Mapping[str, float]) -> Candidates:
        def make(members: NDArray[np.int64], low: int, high: int) -> Tensor:
            return state.members[torch.from_numpy(members).to(state.members.device), low:high]

        return Offspring(field, generation, state.theta, 0.0, make=make)

    def step(
        self, theta: Tensor, gradient: Tensor, moments: Moments, values: Mapping[str, float]
    ) -> tuple[Tensor, Moments]:
        return build_optimizer(self).step(theta, gradient, moments, values["lr"])

    def moments(self, state: State, row: int) -> Moments:
        if not self.keep_moments:
            return build_optimizer(self).init(state.members[row])
        arrays = {name: getattr(state, name)[row] for name in self.row_arrays}
        return Moments(**arrays, power1=state.power1, power2=state.power2)

    def after_training(self, state: State, members: list[Tensor], moments: list[Moments]) -> State:
        state = replace(state, members=torch.stack(members) if members else state.members)
        if not self.keep_moments or not moments:
            return state
        rows: Any = {name: torch.stack([getattr(one, name) for one in moments]) for name in self.row_arrays}
        return replace(state, **rows, power1=moments[0].power1, power2=moments[0].power2)

    def tell(self, state: State, result: GenerationResult, field: Field, *, maximize: bool, start: int = 0) -> State:
        """Return the State after an evolution of members that have been trained."""
        selection = self.select(state, result, field, maximize=maximize)
        if selection is None:
            return state

        def row(member: int, array: str = "members") -> Tensor:
            rows: Tensor = getattr(state, array)
            return rows[member]

        members, best = range(self.population), self.best_member(selection)
        after = self.apply_selection(state, selection, members, row, field, result.generation, start)
        return after if best is None else replace(after, theta=row(best).clone())

    def select(self, state: State, result: GenerationResult, field: Field, *, maximize: bool) -> Selection | None:
        if not np.isfinite(result.scores).any():
            return None
        order = rank_members(result.scores, maximize=maximize)
        good = goodness(result.scores, maximize)
        leader, score = int(order[0]), float(good[order[0]])
        improved = np.isfinite(score) and (state.best is None or score > state.best)
        parents = order[: self.count_parents()]
        if self.selection == "tournament":
            drawn = field.below(
                self.population, 2 * self.count_parents(), result.generation, Stream.SELECTION, member=1
            )
            place = np.argsort(order)  # of each member among all
            winners = np.where(place[drawn[::2]] <= place[drawn[1::2]], drawn[::2], drawn[1::2])
            parents = np.array(sorted({leader, *map(int, winners)}, key=lambda k: int(place[k])))
        mates = field.below(len(parents), 2 * self.population, result.generation, Stream.SELECTION)
        staying = set(map(int, parents))
        children = [
            Child(k, int(parents[mates[2 * k]]), int(parents[mates[2 * k + 1]]))
            for k in range(self.population)
            if k not in staying
        ]
        return Selection(children, (leader, score) if improved else None)

    def rows_needed(self, selection: Selection, members: range) -> set[tuple[int, str]]:
        children = [child for child in selection.children if child.place in members]
        parents = {(parent, "members") for child in children for parent in (child.mother, child.father)}
        return parents | {(child.mother, name) for child in children for name in self.row_arrays}

    def best_member(self, selection: Selection) -> int | None:
        return None if selection.best is None else selection.best[0]

    def apply_selection(
        self,
        state: State,
        selection: Selection,
        members: range,
        row: RowReader,
        field: Field,
        generation: int,
        start: int = 0,
    ) -> State:
        if selection.best is not None:
            state = replace(state, best=selection.best[1])
        arrays = {name: getattr(state, name).clone() for name in ("members", *self.row_arrays)}
        for child in selection.children:
            if child.place in members:
                i = child.place - members.start
                arrays["members"][i] = self.make_child(
                    child, row(child.mother), row(child.father), field, generation, start
                )
                for name in self.row_arrays:
                    arrays[name][i] = row(child.mother, name)
        return replace(state, **arrays)

    def make_child(
        self, child: Child, mother: Tensor, father: Tensor, field: Field, generation: int, start: int
    ) -> Tensor:
        """Return the weights of a child: a crossover of two parents, then a mutation."""
        noise, span = field.members([child.place], generation, mother.device), (start, start + mother.numel())
        crossed = mother
        if self.crossover == "average":
            crossed = (mother + father) * round_to(0.5, mother.dtype)
        elif self.crossover == "uniform":
            crossed = torch.where(noise.bits(span, Stream.CROSSOVER)[0], mother, father)
        elif self.crossover == "layer":
            from_mother = self.draw_layers(field, generation, child.place, span, mother.device)
            crossed = torch.where(from_mother, mother, father)
        if not self.sigma:
            return crossed.clone()
        mutated = noise.perturb(crossed.contiguous(), self.sigma, start=start)[0]
        if self.mutation == 1:
            return mutated
        drawn = noise.halves(span, Stream.COEFFICIENT)[0] < max(1, round(self.mutation * 65536))
        return torch.where(drawn, mutated, crossed)

    def draw_layers(
        self, field: Field, generation: int, place: int, span: tuple[int, int], device: torch.device
    ) -> Tensor:
        """Draw which columns belong to a layer that a child gets from its mother."""
        starts = self.layers or (0,)
        coins = field.below(2, len(starts), generation, Stream.CROSSOVER, member=place)
        from_mother = torch.zeros(span[1] - span[0], dtype=torch.bool, device=device)
        for low, high, coin in zip(starts, [*starts[1:], span[1]], coins, strict=True):
            if coin:
                from_mother[max(0, low - span[0]) : max(0, high - span[0])] = True
        return from_mother
