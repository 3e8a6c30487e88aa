"""A population whose members live in different ranks: only parents travel, to the ranks that make a child of them."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from germline.fleet.executor import Executor
from germline.fleet.gradients import sum_in_order, weigh_gradient
from germline.fleet.protocol import Inputs, MemberShare, Scores, TrainedMember, TrainMember, Update, scores_of
from germline.fleet.spmd.collective import Collective
from germline.fleet.spmd.shares import Shares, split_evenly
from germline.noise import Field
from germline.objective import Batch
from germline.population import Evaluator
from germline.strategies import GenerationResult, MemberStrategy

Row = tuple[int, str]  # a member and an array of the State


@dataclass(frozen=True)
class RowUpdate(Update):
    """An update of members of which each rank holds some; made once for a run.

    Attributes:
        owned: The members of each rank, in order.
        width: The number of neighboring ranks that hold the same members, as a team.
        root: The rank that owns the journal, which gets the best member.
    """

    strategy: MemberStrategy[Any]
    field: Field
    maximize: bool
    collective: Collective
    owned: list[range]
    width: int
    root: int

    @property
    def members(self) -> range:
        return self.owned[self.collective.rank]

    def local_part(self, state: Any) -> Any:
        """Return the members of this rank, of a whole State."""
        members, names = self.members, ("members", *self.strategy.row_arrays)
        return replace(state, **{name: getattr(state, name)[members.start : members.stop].clone() for name in names})

    def advance(self, state: Any, result: GenerationResult) -> Any:
        """Return this rank's members after an evolution."""
        selection = self.strategy.select(state, result, self.field, maximize=self.maximize)
        if selection is None:
            return state
        best = self.strategy.best_member(selection)
        needed = [self._rows_to_fetch(rank, selection, best) for rank in range(self.collective.size)]
        fetched = self._trade(state, needed)

        def row(member: int, array: str = "members") -> Tensor:
            if member in self.members:
                rows: Tensor = getattr(state, array)
                return rows[member - self.members.start]
            return fetched[member, array]

        after = self.strategy.apply_selection(state, selection, self.members, row, self.field, result.generation)
        if best is not None and self.collective.rank == self.root:
            after = replace(after, theta=row(best).clone())
        return after

    def gather(self, state: Any) -> Any:
        """Return the State with all members, and the best."""
        arrays = {}
        for name in ("members", *self.strategy.row_arrays):
            array = getattr(state, name)
            columns = array.shape[1]
            parts = self.collective.gather_parts(array.reshape(-1), [len(members) * columns for members in self.owned])
            arrays[name] = torch.cat(parts[:: self.width]).view(-1, columns)  # one rank of each team
        theta = self.collective.broadcast(state.theta.clone().contiguous(), self.root)
        return replace(state, theta=theta, **arrays)

    def _rows_to_fetch(self, rank: int, selection: Any, best: int | None) -> list[Row]:
        """Return the rows that a rank needs and does not hold: parents, mothers' moments, the best member."""
        rows = self.strategy.rows_needed(selection, self.owned[rank])
        if best is not None and rank == self.root:
            rows = {*rows, (best, "members")}
        return sorted(row for row in rows if row[0] not in self.owned[rank])

    def _trade(self, state: Any, needed: list[list[Row]]) -> dict[Row, Tensor]:
        """Send the rows that other ranks need; return those that this rank needs."""
        if not any(needed):
            return {}
        own, ranks, like = self.collective.rank, range(self.collective.size), state.theta
        sent = [self._rows_to_send(own, to, needed[to]) for to in ranks]
        coming = [self._rows_to_send(rank, own, needed[own]) for rank in ranks]

        def encode(rows: list[Row]) -> Tensor:
            parts = [getattr(state, name)[member - self.members.start].contiguous() for member, name in rows]
            return torch.cat([like.new_empty(0), *parts]).view(torch.uint8)

        received = self.collective.trade([encode(rows) for rows in sent], [len(rows) * like.nbytes for rows in coming])
        rows = [row for rows in coming for row in rows]
        return dict(zip(rows, torch.cat(received).view(like.dtype).view(-1, like.numel()), strict=True))

    def _rows_to_send(self, rank: int, to: int, needed: list[Row]) -> list[Row]:
        """Return the rows that a rank sends to another, of those that it needs: one rank of each team sends."""
        return [row for row in needed if row[0] in self.owned[rank] and rank % self.width == to % self.width]


@dataclass(frozen=True)
class TeamMembers(MemberShare):
    """Members that train in different ranks; the ranks of a team share the work of each of their members."""

    update: RowUpdate
    members: range
    team: Collective
    executor: Executor
    share_work: Callable[[Shares, Callable[[slice], Scores]], Scores]  # of all ranks; see ``SPMD``

    def gradient(self, evaluator: Evaluator, theta: Tensor, batch: Batch) -> Tensor:
        """Return the gradient of one member on a batch, whose slices the ranks of the team share."""
        if evaluator.plan.slices == 1 and self.team.size == 1:
            return evaluator.gradient(theta, batch)[1]
        parts = batch.split(evaluator.plan.slices)
        shares = Shares(split_evenly(len(parts), self.team.size), 1)
        mine = parts[shares.slice_of(self.team.rank)]
        rows = [weigh_gradient(evaluator, theta, part, batch.size)[1] for part in mine]
        stacked = torch.stack(rows) if rows else theta.new_empty(0, theta.numel())
        return sum_in_order(stacked, list(shares.counts), self.team)

    def train(self, work: TrainMember, device: torch.device, inputs: Inputs) -> tuple[list[TrainedMember], Scores]:
        trained: list[TrainedMember] = []

        def train_share(share: slice) -> Scores:
            threads = None if self.team.size == 1 else 1  # a team goes through its members in one order
            trained.extend(self.executor.run(work, share.stop - share.start, device, threads))
            return scores_of(trained)

        owned = self.update.owned
        scores = self.share_work(Shares(tuple(map(len, owned)), 1), train_share)  # once for each rank of a team
        first = np.unique(np.concatenate(owned), return_index=True)[1]
        return trained, scores[first]
