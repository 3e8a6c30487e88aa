"""Exchanges: ways to share out a generation's update among the ranks of a fleet, once all know the scores.

    replay       each rank computes all of it, from the scores alone
    chromosome   each rank updates its columns, and columns are gathered: DarwiNN's Algorithm 1 (Malik et al. 2020)
    semi         each rank sums over its shards of the population, which are ranked separately; sums are added: Lenc et
                 al. 2019
    central      one rank computes all of it, and sends what the others need to make members

Replay, chromosome and central give the same bits as a single process. So does semi, if that has as many ``shards``.
Every rank holds the arrays that ``ask`` reads; of arrays that only ``tell`` reads, such as an optimizer's moments, it
holds its own columns.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal, cast

import numpy as np
import torch
from torch import Tensor

from germline.errors import BadInput
from germline.fleet.gradients import column_spans
from germline.fleet.protocol import Update
from germline.fleet.spmd.collective import Collective
from germline.noise import Field, Span
from germline.strategies import AnyStrategy, GenerationResult, SummedStrategy, slice_columns
from germline.strategies.state import map_arrays

Mode = Literal["replay", "chromosome", "semi", "central"]
Exchange = Literal["auto", "replay", "chromosome", "semi", "central"]
COLUMNS = 8  # spans begin at multiples of it
LARGEST = 256  # above the largest integer of the field, and the square of one


@dataclass(frozen=True)
class SharedUpdate(Update):
    """Which rank updates what, decided once for a run."""

    mode: Mode
    strategy: AnyStrategy
    field: Field
    maximize: bool
    parameters: int
    collective: Collective
    root: int = 0  # the rank that updates, in central

    @property
    def spans(self) -> list[Span]:
        """The columns of each rank."""
        size, count = self.parameters, self.collective.size
        if self.mode == "central":
            return [(0, size) if rank == self.root else (size, size) for rank in range(count)]
        return column_spans(size, count, COLUMNS)

    @property
    def span(self) -> Span:
        return self.spans[self.collective.rank]

    def advance(self, state: Any, result: GenerationResult) -> Any:
        """Return this rank's part of the State after a generation."""
        if self.mode == "replay":
            return self.strategy.tell(state, result, self.field, maximize=self.maximize)
        if self.mode == "semi":
            return self._advance_semi(state, result)
        if self.mode == "central":
            return self._advance_central(state, result)
        arrays = {name: getattr(state, name) for name in self.strategy.ask_arrays}
        part = dataclasses.replace(state, **{name: slice_columns(x, *self.span) for name, x in arrays.items()})
        after = self.strategy.tell(part, result, self.field, maximize=self.maximize, start=self.span[0])
        changed = [name for name in arrays if getattr(after, name) is not getattr(part, name)]
        columns = self._gather_columns([getattr(after, name) for name in changed])
        return dataclasses.replace(after, **(arrays | dict(zip(changed, columns, strict=True))))

    def _advance_semi(self, state: Any, result: GenerationResult) -> Any:
        strategy = cast(SummedStrategy[Any], self.strategy)
        weights = strategy.weights(result.scores, maximize=self.maximize)
        if weights is None:
            return state
        rank, share = self.collective.rank, len(weights) // self.collective.size
        members = np.arange(rank * share, (rank + 1) * share)
        noise = self.field.members(members, result.generation, state.theta.device)
        sums = strategy.sums(noise, weights[members], (0, self.parameters))
        is_narrow = not self.field.matrices and int(abs(weights).sum()) * LARGEST < 2**31
        sums = self.collective.add(sums.to(torch.int32 if is_narrow else torch.float64))  # integers: exact in any order
        return strategy.step(state, sums, result, self.field)

    def _advance_central(self, state: Any, result: GenerationResult) -> Any:
        collective, names = self.collective, self.strategy.ask_arrays
        numbers: dict[str, Any] = {}
        arrays: dict[str, Tensor] = {}
        if collective.rank == self.root:
            before, state = state, self.strategy.tell(state, result, self.field, maximize=self.maximize)
            others = {name: getattr(state, name) for name in other_fields(state, names)}
            numbers = {name: value for name, value in others.items() if isinstance(value, int | float | tuple)}
            changed = [name for name in names if getattr(state, name) is not getattr(before, name)]
            arrays = {name: getattr(state, name) for name in changed}
        numbers, arrays = collective.broadcast_arrays(numbers, arrays, self.root, state.theta.device)
        if collective.rank == self.root:
            return state
        scalars = {name: tuple(value) if isinstance(value, list) else value for name, value in numbers.items()}
        return dataclasses.replace(state, **arrays, **scalars)

    def local_part(self, state: Any) -> Any:
        """Return what this rank needs of a whole State."""
        if self.mode not in ("chromosome", "central"):
            return state
        return self._map_others(state, lambda x: slice_columns(x, *self.span).clone())

    def gather(self, state: Any) -> Any:
        """Return a State with the columns that other ranks hold; in central, the journal's rank has them all."""
        return self._map_others(state, lambda x: self._gather_columns([x])[0]) if self.mode == "chromosome" else state

    def _map_others(self, state: Any, function: Any) -> Any:
        names = other_fields(state, self.strategy.ask_arrays)
        return dataclasses.replace(state, **{name: map_arrays(function, getattr(state, name)) for name in names})

    def _gather_columns(self, arrays: list[Tensor]) -> list[Tensor]:
        """Return arrays of which each rank has its columns, whole: in one message, padded to the widest span."""
        if not arrays:
            return []
        rows = [x.reshape(-1, x.shape[-1]) for x in arrays]
        parts = self.collective.gather_parts(torch.cat(rows), [high - low for low, high in self.spans])
        columns = torch.split(torch.cat(parts, dim=1), [len(x) for x in rows])
        return [part.reshape(*x.shape[:-1], self.parameters) for part, x in zip(columns, arrays, strict=True)]


def other_fields(state: Any, names: tuple[str, ...]) -> list[str]:
    """Return the names of a State's fields but some."""
    return [f.name for f in dataclasses.fields(state) if f.name not in names]


def check_exchange(mode: Exchange, strategy: AnyStrategy) -> None:
    """Raise an error if a strategy's updates cannot be shared out in a mode."""
    if strategy.kind != "evolve" and mode not in ("auto", "replay"):
        raise BadInput(
            f"Gradients are summed by columns already: leave out exchange={mode} (--exchange) for {strategy.name}."
        )
    if mode == "semi" and not strategy.has_semi_updates:
        reason = "its update is a choice among members, not a sum over them"
        raise BadInput(f"There are no semi-updates for {strategy.name}, {reason}: use replay or chromosome.")
    if mode == "chromosome" and not strategy.is_columnwise:
        reason = "its optimizer does not treat each parameter independently"
        raise BadInput(f"The columns of {strategy.name} cannot be updated separately, because {reason}: use replay.")
