"""A population whose members live in different processes: only parents travel, to those who make a child of them."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from germline.fleet.collective import Collective
from germline.noise import Field
from germline.strategies import PESGD, GenerationResult
from germline.strategies.pesgd import Child


@dataclass(frozen=True)
class Rows:
    """Who has which members, settled for a run: so many each, in order."""

    collective: Collective
    owned: list[range]  # the members of each process
    width: int  # neighbors who have the same ones
    root: int  # the process that keeps the journal, which gets the best

    def members(self, rank: int) -> range:
        return self.owned[rank]

    def sends(self, rank: int, to: int) -> bool:
        """Whether it is the one of its team from whom another process has what it needs."""
        return rank % self.width == to % self.width

    def __call__(self, strategy: PESGD, state: Any, told: GenerationResult, field: Field, *, maximize: bool) -> Any:
        """The State after an evolution."""
        if not np.isfinite(told.scores).any():
            return state
        children, best = (
            strategy.evolution(told, field, maximize=maximize),
            strategy.improved(state, told, maximize=maximize),
        )
        wanted = [self.wanted(rank, strategy, children, best) for rank in range(self.collective.size)]
        rows = self.traded(state, wanted)
        mine = self.members(self.collective.rank)

        def row(member: int, array: str = "members") -> torch.Tensor:
            if member in mine:
                found: torch.Tensor = getattr(state, array)[member - mine.start]
                return found
            return rows[member, array]

        if best is not None:
            theta = row(best[0]).clone() if self.collective.rank == self.root else state.theta
            state = replace(state, theta=theta, best=best[1])
        return strategy.bred(state, children, list(mine), row, field, told.generation)

    def wanted(
        self, rank: int, strategy: PESGD, children: list[Child], best: tuple[int, float] | None
    ) -> list[tuple[int, str]]:
        """The rows that a process needs and does not have: parents, mothers' moments, the best."""
        mine = self.members(rank)
        own = [child for child in children if child.place in mine]
        found = {(parent, "members") for child in own for parent in (child.mother, child.father)}
        found |= {(child.mother, name) for child in own for name in strategy.kept_arrays}
        if best is not None and rank == self.root:
            found.add((best[0], "members"))
        return sorted(one for one in found if one[0] not in mine)

    def traded(self, state: Any, wanted: list[list[tuple[int, str]]]) -> dict[tuple[int, str], torch.Tensor]:
        rank, like = self.collective.rank, state.theta
        mine = self.members(rank)
        empty = like.new_empty(0, dtype=torch.uint8)
        sent = [[one for one in rows if one[0] in mine and self.sends(rank, to)] for to, rows in enumerate(wanted)]
        parts = [
            torch.cat([getattr(state, name)[m - mine.start].contiguous().view(torch.uint8) for m, name in rows])
            if rows
            else empty
            for rows in sent
        ]
        coming = [
            [one for one in wanted[rank] if one[0] in self.members(r) and self.sends(r, rank)]
            for r in range(self.collective.size)
        ]
        sizes = [len(rows) * like.nbytes for rows in coming]
        if not any(wanted):
            return {}
        received = self.collective.trade(parts, sizes)
        found: dict[tuple[int, str], torch.Tensor] = {}
        for rows, content in zip(coming, received, strict=True):
            if rows:
                found |= dict(zip(rows, content.view(like.dtype).view(len(rows), -1), strict=True))
        return found

    def part(self, strategy: Any, state: Any) -> Any:
        """Of a whole State the members of this process."""
        mine = self.members(self.collective.rank)
        names = ("members", *strategy.kept_arrays)
        return replace(state, **{name: getattr(state, name)[mine.start : mine.stop].clone() for name in names})

    def whole(self, strategy: PESGD, state: Any) -> Any:
        """A State with all members, and the best."""
        found = {}
        for name in ("members", *strategy.kept_arrays):
            array = getattr(state, name)
            padded = array.new_zeros(max(map(len, self.owned)), array.shape[1])
            padded[: len(array)] = array
            rows = self.collective.gather(padded)
            firsts = range(0, self.collective.size, self.width)
            found[name] = torch.cat([rows[r, : len(self.owned[r])] for r in firsts])
        theta = self.collective.broadcast(state.theta.clone().contiguous(), self.root)
        return replace(state, theta=theta, **found)
