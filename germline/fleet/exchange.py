"""How a generation's update is shared out among the processes of a fleet, once all know the scores.

    replay       each does all of it, from the scores alone
    chromosome   each updates its columns, and columns are gathered: DarwiNN's Algorithm 1 (Malik et al. 2020)
    semi         each sums over its shards of the population, ranked by themselves; sums are added: Lenc et al. 2019
    central      one does all of it, and sends what the others need to make members

Replay, chromosome and central give the same bits as a single process. So does semi, if that has as many ``shards``.
A process has whole what ``ask`` reads; what only ``tell`` reads, an optimizer's moments, it has of its own columns.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, Literal, cast

import numpy as np
import torch

from germline.errors import BadInput
from germline.fleet.collective import Collective
from germline.noise import Field, Span
from germline.optim.optimizers import TorchOptimizer
from germline.strategies.base import AnyStrategy, GenerationResult, Summed, cut
from germline.strategies.settings import build_optimizer

Mode = Literal["replay", "chromosome", "semi", "central"]
Exchange = Literal["auto", "replay", "chromosome", "semi", "central"]
COLUMNS = 8  # spans begin at multiples of so many
LARGEST = 256  # above the largest integer of the field, and the square of one
BY_ELEMENT = ("SGD", "Adam", "AdamW", "RMSprop", "Adagrad", "NAdam", "RAdam", "Adamax", "Adadelta", "ASGD", "Rprop")


@dataclass(frozen=True)
class Update:
    """Who updates what, settled for a run."""

    mode: Mode
    parameters: int
    collective: Collective
    root: int = 0  # of central

    @property
    def spans(self) -> list[Span]:
        """The columns of each process."""
        size, count = self.parameters, self.collective.size
        if self.mode == "central":
            return [(0, size) if rank == self.root else (size, size) for rank in range(count)]
        cuts = [min(size, -(-size * rank // count // COLUMNS) * COLUMNS) for rank in range(count)] + [size]
        return list(pairwise(cuts))

    @property
    def span(self) -> Span:
        return self.spans[self.collective.rank]

    @property
    def cuts(self) -> bool:
        """Whether a process has what only ``tell`` reads of its own columns alone."""
        return self.mode in ("chromosome", "central")

    def __call__(
        self, strategy: AnyStrategy, state: Any, told: GenerationResult, field: Field, *, maximize: bool
    ) -> Any:
        """The State after a generation."""
        if self.mode == "replay":
            return strategy.tell(state, told, field, maximize=maximize)
        if self.mode == "semi":
            return self._semi(cast(Summed[Any], strategy), state, told, field, maximize=maximize)
        if self.mode == "central":
            return self._central(strategy, state, told, field, maximize=maximize)
        kept = {name: getattr(state, name) for name in strategy.asked}
        mine = dataclasses.replace(state, **{name: cut(array, *self.span) for name, array in kept.items()})
        after = strategy.tell(mine, told, field, maximize=maximize, start=self.span[0])
        new = [name for name in strategy.asked if getattr(after, name) is not getattr(mine, name)]
        columns = self._joined([getattr(after, name) for name in new])
        return dataclasses.replace(after, **(kept | dict(zip(new, columns, strict=True))))

    def _semi(self, strategy: Summed[Any], state: Any, told: GenerationResult, field: Field, *, maximize: bool) -> Any:
        weights = strategy.weights(told.scores, maximize=maximize)
        if weights is None:
            return state
        rank, share = self.collective.rank, len(weights) // self.collective.size
        mine = slice(rank * share, (rank + 1) * share)
        members = np.arange(len(weights))[mine]
        noise = field.members(members, told.generation, state.theta.device)
        sums = strategy.sums(noise, weights[mine], (0, self.parameters))
        narrow = not field.matrices and int(abs(weights).sum()) * LARGEST < 2**31
        sums = self.collective.add(sums.to(torch.int32 if narrow else torch.float64))  # integers: exact in any order
        return strategy.step(state, sums, told, field)

    def _central(
        self, strategy: AnyStrategy, state: Any, told: GenerationResult, field: Field, *, maximize: bool
    ) -> Any:
        collective, plain, arrays = self.collective, None, {}
        if collective.rank == self.root:
            before, state = state, strategy.tell(state, told, field, maximize=maximize)
            plain = {f.name: getattr(state, f.name) for f in dataclasses.fields(state) if f.name not in strategy.asked}
            plain = {name: value for name, value in plain.items() if isinstance(value, int | float | tuple)}
            arrays = {name: getattr(state, name) for name in strategy.asked}
            arrays = {name: array for name, array in arrays.items() if array is not getattr(before, name)}
        plain, shapes = collective.say([plain, {name: list(x.shape) for name, x in arrays.items()}], self.root)
        like = state.theta
        for name, shape in shapes.items():
            here = arrays[name].contiguous() if name in arrays else like.new_empty(shape)
            arrays[name] = collective.broadcast(here, self.root)
        if collective.rank == self.root:
            return state
        scalars = {name: tuple(value) if isinstance(value, list) else value for name, value in plain.items()}
        return dataclasses.replace(state, **arrays, **scalars)

    def part(self, strategy: AnyStrategy, state: Any) -> Any:
        """Of a whole State what this process needs."""
        if not self.cuts:
            return state
        others = [f.name for f in dataclasses.fields(state) if f.name not in strategy.asked]
        mine = {name: changed(getattr(state, name), lambda x: cut(x, *self.span).clone()) for name in others}
        return dataclasses.replace(state, **mine)

    def whole(self, strategy: AnyStrategy, state: Any) -> Any:
        """A State with the columns that other processes have of it."""
        if not self.cuts:
            return state
        if self.mode == "central":
            return state  # the one that keeps the journal has it all
        others = [f.name for f in dataclasses.fields(state) if f.name not in strategy.asked]
        gathered = {name: changed(getattr(state, name), lambda x: self._joined([x])[0]) for name in others}
        return dataclasses.replace(state, **gathered)

    def _joined(self, arrays: list[torch.Tensor]) -> list[torch.Tensor]:
        """Arrays of which each process has its columns, whole: in one message, padded to the widest span."""
        if not arrays:
            return []
        rows = [x.reshape(-1, x.shape[-1]) for x in arrays]
        low, high = self.span
        width, count = max(b - a for a, b in self.spans), sum(map(len, rows))
        sent = rows[0].new_zeros(count, width)
        sent[:, : high - low] = torch.cat(rows)
        found = self.collective.gather(sent)  # (processes, rows, width)
        whole = torch.cat([found[i, :, : b - a] for i, (a, b) in enumerate(self.spans)], dim=1)
        ends = [0, *accumulate(map(len, rows))]
        parts = [whole[low:high] for low, high in pairwise(ends)]
        return [part.reshape(*x.shape[:-1], self.parameters) for part, x in zip(parts, arrays, strict=True)]


def changed(value: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """A part of a State with a function of each of its arrays in its place; single numbers stay as they are."""
    if isinstance(value, torch.Tensor):
        return function(value) if value.dim() else value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: changed(getattr(value, f.name), function) for f in dataclasses.fields(value)}
        return dataclasses.replace(value, **fields)
    return {key: changed(item, function) for key, item in value.items()} if isinstance(value, dict) else value


def refuse(mode: Exchange, strategy: AnyStrategy) -> None:
    """Says what cannot be done."""
    if strategy.needs_gradient and mode not in ("auto", "replay"):
        raise BadInput(f"Gradients are summed by columns already: leave out --exchange {mode} for {strategy.name}.")
    if mode == "semi" and not hasattr(strategy, "shards"):
        message = "its update is a choice among members, not a sum over them"
        raise BadInput(f"There are no semi-updates for {strategy.name}, {message}: use replay or chromosome.")
    if mode == "chromosome" and hasattr(strategy, "optimizer"):
        optimizer = build_optimizer(strategy)
        if isinstance(optimizer, TorchOptimizer):
            name = type(optimizer.make([torch.nn.Parameter(torch.zeros(2))])).__name__
            if name not in BY_ELEMENT:
                message = f"torch.optim.{name} does not treat each parameter by itself"
                raise BadInput(f"{message}, so its columns cannot be updated apart: use replay.")
