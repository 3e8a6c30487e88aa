"""Members that train on the workers of a cluster, and stay there: scores travel, and the weights of selected parents.

After a generation the coordinator fetches the members that were selected, and so has the whole State. A worker makes
the next members from those that it has trained itself, where these are all that it needs; others are sent to it.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import torch

from germline.fleet.cluster.admission import WrongAnswerError
from germline.fleet.cluster.backend import Head, Message
from germline.fleet.cluster.crew import Crew, RemoteWorker
from germline.fleet.cluster.jobs import TICK, Coordinator, Job
from germline.fleet.cluster.messages import checksum, decode_members, decode_scores, encode_members
from germline.fleet.cluster.scheduler import Chunk
from germline.fleet.executor import Executor
from germline.fleet.gradients import Scores
from germline.fleet.local import LocalUpdate
from germline.fleet.protocol import Inputs, MemberShare, TrainedMember, TrainMember, Update, scores_of
from germline.strategies import GenerationResult, MemberStrategy

PATIENCE = 15.0  # seconds for a worker to send members, and twice the time that its link needs


@dataclass
class Origin:
    """The origin of the members of a generation.

    Attributes:
        result: The result of the generation before; None if the coordinator has made them all.
        parents: The members of the generation before that each member is made of.
        holders: The worker that has trained each member of the generation before.
    """

    result: GenerationResult | None = None
    parents: dict[int, set[int]] = field(default_factory=dict)
    holders: dict[int, str] = field(default_factory=dict)


@dataclass
class MembersJob(Job):
    """The training of members, a piece each, which workers keep.

    Attributes:
        work: Trains one member in this process.
        origin: What the members are made of.
        holders: The worker that has trained each member.
    """

    work: TrainMember = field(kw_only=True)
    origin: Origin = field(default_factory=Origin)
    holders: dict[int, str] = field(default_factory=dict)

    def starts(self, members: Sequence[int]) -> list[TrainedMember]:
        """Return members before their training."""
        state, strategy = self.inputs.state, cast(MemberStrategy[Any], self.inputs.strategy)
        return [TrainedMember(state.members[k], strategy.moments(state, k), 0.0) for k in members]

    def prepare(self, crew: Crew, worker: RemoteWorker, chunk: Chunk) -> Message:
        members, origin = range(chunk.first, chunk.last), self.origin
        there = {member for member, holder in origin.holders.items() if holder == worker.address}
        own = [k for k in members if origin.result is not None and origin.parents[k] <= there]
        scores = origin.result.scores.tobytes() if origin.result is not None and own else b""
        has_moments = bool(cast(MemberStrategy[Any], self.inputs.strategy).row_arrays)
        sent = encode_members(self.starts([k for k in members if k not in own]), with_moments=has_moments)
        return Message(self.head | {"version": None, "made": own}, [scores, *sent])

    def has_same_weights(self, head: Head, chunk: Chunk) -> bool:
        return head.get("checksum") == sum(map(checksum, self.starts(range(chunk.first, chunk.last))))

    def forget_weights(self, worker: RemoteWorker) -> None:
        holders = self.origin.holders
        self.origin.holders = {member: holder for member, holder in holders.items() if holder != worker.address}

    def take(self, worker: RemoteWorker, chunk: Chunk, answer: Any) -> None:
        super().take(worker, chunk, answer)
        self.holders |= dict.fromkeys(range(chunk.first, chunk.last), worker.address)


@dataclass(eq=False)
class RemoteMembers(MemberShare, Update):
    """Members that train on workers, and their update by the coordinator."""

    strategy: MemberStrategy[Any]
    local: LocalUpdate
    coordinator: Coordinator
    executor: Executor
    members: range
    job: MembersJob | None = None  # the training of the present generation, if workers did it
    origin: Origin = field(default_factory=Origin)

    @property
    def update(self) -> Update:  # type: ignore[override]
        return self

    def train(self, work: TrainMember, device: torch.device, inputs: Inputs) -> tuple[list[TrainedMember], Scores]:
        if inputs is None or not self.coordinator.is_open:
            trained = self.executor.run(work, len(self.members), device)
            return trained, scores_of(trained)

        def decode(first: int, last: int, arrays: Sequence[bytes]) -> Scores:
            return decode_scores(arrays[0], last - first)

        def compute(first: int, last: int) -> Scores:
            return scores_of(self.executor.run(lambda place: work(first + place), last - first, device))

        count, origin = len(self.members), self.origin
        self.job = MembersJob("train", count, inputs, decode, compute, work=work, origin=origin)
        return [], np.concatenate(self.coordinator.run_job(self.job))

    def advance(self, state: Any, result: GenerationResult) -> Any:
        job, strategy = self.job, self.strategy
        self.job, self.origin, self.coordinator.generation = None, Origin(), result.generation + 1
        if job is None:  # this process has trained all members
            return self.local.advance(state, result)
        selection = strategy.select(state, result, self.local.field, maximize=self.local.maximize)
        parents, best = {k: {k} for k in self.members}, None
        if selection is not None:
            best = strategy.best_member(selection)
            made_of = {k: {m for m, _ in strategy.rows_needed(selection, range(k, k + 1))} for k in self.members}
            parents = {k: sources or {k} for k, sources in made_of.items()}
        needed = set[int]().union(*parents.values(), () if best is None else (best,))
        rows = self._fetch(job, sorted(needed))
        rest = rows[min(rows)]  # of members that are replaced; their weights are not read any more
        trained = [rows.get(k, rest) for k in self.members]
        state = strategy.after_training(state, [row.theta for row in trained], [row.moments for row in trained])
        self.origin = Origin(result, parents, job.holders)
        return self.local.advance(state, result)

    def _fetch(self, job: MembersJob, members: list[int]) -> dict[int, TrainedMember]:
        """Return members that workers have trained; those whose worker is gone train again, in this process."""
        coordinator, workers = self.coordinator, self.coordinator.crew.workers
        coordinator.job_number += 1
        by_holder: dict[str, list[int]] = {}
        for member in members:
            if job.holders[member] in workers:
                by_holder.setdefault(job.holders[member], []).append(member)
        until = {address: self._ask(job, workers[address], some) for address, some in by_holder.items()}
        rows: dict[int, TrainedMember] = {}

        def take_rows(worker: RemoteWorker, message: Message) -> None:
            if message.head.get("job") == coordinator.job_number and until.pop(worker.address, None):
                rows.update(self._read_rows(job, by_holder[worker.address], message))

        while until:
            coordinator.take_events(TICK, take_rows)
            now = time.monotonic()
            until = {address: end for address, end in until.items() if address in workers and now < end}
        lost = [member for member in members if member not in rows]
        again = self.executor.run(lambda place: job.work(lost[place]), len(lost), job.inputs.state.theta.device)
        return rows | dict(zip(lost, again, strict=True))

    def _ask(self, job: MembersJob, worker: RemoteWorker, members: list[int]) -> float:
        """Ask a worker for members that it has; return when it is given up."""
        about = {"job": self.coordinator.job_number, "chunk": 0, "version": None, "generation": job.generation}
        self.coordinator.crew.send(worker, Message({"op": "job", "kind": "rows", "members": members, **about}))
        size = len(members) * int(job.inputs.state.theta.nbytes) * (1 + len(self.strategy.row_arrays))
        return time.monotonic() + PATIENCE + 2 * size / worker.bandwidth

    def _read_rows(self, job: MembersJob, members: list[int], message: Message) -> dict[int, TrainedMember]:
        """Return the members that a worker has sent, or raise an error if they cannot be read."""
        templates = [start.moments for start in job.starts(members)]
        try:
            rows = decode_members(message.arrays, templates, job.inputs.state.theta)
            return dict(zip(members, rows, strict=True))
        except Exception as error:  # whatever the worker has sent
            raise WrongAnswerError(f"its members cannot be read ({type(error).__name__}: {error})") from error
