"""Members that train on the workers of a cluster, and stay there: scores travel, and the weights of selected parents.

After a generation the coordinator fetches the members that were selected, and so has the whole State. A worker makes
the next members from those that it has trained itself, where these are all that it needs; others are sent to it.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from germline.fleet.cluster.backend import Head, Message
from germline.fleet.cluster.crew import Crew, RemoteWorker
from germline.fleet.cluster.jobs import TICK, Coordinator, Job
from germline.fleet.cluster.messages import decode_members, decode_scores, encode_members, sum_member_bits
from germline.fleet.cluster.scheduler import Chunk
from germline.fleet.executor import Executor
from germline.fleet.gradients import Scores
from germline.fleet.local import LocalUpdate
from germline.fleet.protocol import Inputs, MemberShare, TrainedMember, TrainMember, Update, scores_of
from germline.strategies import GenerationResult, MemberStrategy

PATIENCE = 15.0  # seconds for a worker to send members, and twice the time that its link needs
Held = dict[str, set[int]]  # the members of each worker


@dataclass
class MembersJob(Job):
    """The training of some members, which workers keep.

    Attributes:
        members: The members of the pieces.
        before: The members of the generation before that each worker has trained, and the result of that generation.
        sources: The members of the generation before that each member is made of.
        held: The members that each worker has trained now.
    """

    members: list[int] = field(default_factory=list)
    before: tuple[Held, GenerationResult | None] = field(default_factory=lambda: ({}, None))
    sources: dict[int, set[int]] = field(default_factory=dict)
    held: Held = field(default_factory=dict)
    is_sampled = False

    def member(self, number: int) -> TrainedMember:
        """Return a member before its training."""
        state, strategy = self.inputs.state, self.inputs.strategy
        return TrainedMember(state.members[number], strategy.moments(state, number), 0.0)  # type: ignore[attr-defined]

    def prepare(self, crew: Crew, worker: RemoteWorker, chunk: Chunk) -> Message:
        numbers, (held, result) = self.members[chunk.first : chunk.last], self.before
        there = held.get(worker.address, set())
        made = [n for n in numbers if result is not None and self.sources[n] <= there]
        sent = encode_members(
            [self.member(number) for number in numbers if number not in made],
            with_moments=bool(self.inputs.strategy.row_arrays),  # type: ignore[attr-defined]
        )
        scores = result.scores.tobytes() if result is not None and made else b""
        head = self.head | {"version": None, "members": numbers, "made": made}
        return Message(head, [scores, *sent])

    def has_same_weights(self, head: Head, chunk: Chunk) -> bool:
        rows = [self.member(number) for number in self.members[chunk.first : chunk.last]]
        return head.get("checksum") == sum(sum_member_bits(row.theta, row.moments) for row in rows)

    def forget_weights(self, worker: RemoteWorker) -> None:
        self.before[0].pop(worker.address, None)

    def take(self, worker: RemoteWorker, chunk: Chunk, answer: Any) -> None:
        super().take(worker, chunk, answer)
        self.held.setdefault(worker.address, set()).update(self.members[chunk.first : chunk.last])


@dataclass(eq=False)
class RemoteMembers(MemberShare, Update):
    """Members that train on workers, and their update by the coordinator."""

    strategy: MemberStrategy[Any]
    local: LocalUpdate
    coordinator: Coordinator
    executor: Executor
    job: MembersJob | None = None  # the training of the present generation, if it was done by workers
    before: tuple[Held, GenerationResult | None] = field(default_factory=lambda: ({}, None))
    sources: dict[int, set[int]] = field(default_factory=dict)

    @property
    def update(self) -> Update:  # type: ignore[override]
        return self

    @property
    def members(self) -> range:  # type: ignore[override]
        return range(self.strategy.population)

    def train(self, work: TrainMember, device: torch.device, inputs: Inputs) -> tuple[list[TrainedMember], Scores]:
        if inputs is None or not self.coordinator.is_open:
            trained = self.executor.run(work, len(self.members), device)
            return trained, scores_of(trained)

        def decode(first: int, last: int, arrays: Sequence[bytes]) -> Scores:
            return decode_scores(arrays[0], last - first)

        def compute(first: int, last: int) -> Scores:
            return scores_of(self.executor.run(lambda place: work(first + place), last - first, device))

        job = MembersJob("train", len(self.members), inputs, decode, compute, lambda scores: scores)
        job.members, job.before, job.sources = list(self.members), self.before, self.sources
        self.job = job
        return [], np.concatenate(self.coordinator.run_job(job))

    def advance(self, state: Any, result: GenerationResult) -> Any:
        job, self.job = self.job, None
        self.coordinator.generation = result.generation + 1
        if job is None:  # this process has trained all members
            self.before = {}, None
            return self.local.advance(state, result)
        strategy = self.strategy
        selection = strategy.select(state, result, self.local.field, maximize=self.local.maximize)
        self.sources = {k: {k} for k in self.members}
        if selection is not None:
            made_of = {k: {m for m, _ in strategy.rows_needed(selection, range(k, k + 1))} for k in self.members}
            self.sources = {k: parents or {k} for k, parents in made_of.items()}
        best = strategy.best_member(selection) if selection is not None else None
        needed = set[int]().union(*self.sources.values(), [best] if best is not None else [])
        rows = self._fetch(job, sorted(needed))
        rest = rows[min(rows)]  # of members that are replaced; their weights are not read any more
        trained = [rows.get(k, rest) for k in self.members]
        state = strategy.after_training(state, [row.theta for row in trained], [row.moments for row in trained])
        self.before = job.held, result
        return self.local.advance(state, result)

    def _fetch(self, job: MembersJob, members: list[int]) -> dict[int, TrainedMember]:
        """Return members that workers have trained; those whose worker is gone train again, elsewhere."""
        rows: dict[int, TrainedMember] = {}
        while missing := [member for member in members if member not in rows]:
            lost = [member for member in missing if self._find_holder(job, member) is None]
            if lost:
                self.coordinator.run_job(self._train_again(job, lost))
            rows |= self._ask_holders(job, missing)
        return rows

    def _train_again(self, job: MembersJob, members: list[int]) -> MembersJob:
        def compute(first: int, last: int) -> Scores:
            return np.concatenate([job.compute(member, member + 1) for member in members[first:last]])

        return replace(job, members=members, pieces=len(members), answers={}, compute=compute)

    def _find_holder(self, job: MembersJob, member: int) -> RemoteWorker | None:
        workers = self.coordinator.crew.workers
        return next((workers[w] for w, held in job.held.items() if member in held and w in workers), None)

    def _ask_holders(self, job: MembersJob, members: list[int]) -> dict[int, TrainedMember]:
        """Ask the workers that have some members for them; return what comes. One that does not answer has none."""
        coordinator, wanted = self.coordinator, dict[str, list[int]]()
        coordinator.job_number += 1
        for member in members:
            if (holder := self._find_holder(job, member)) is not None:
                wanted.setdefault(holder.address, []).append(member)
        weights, until = job.inputs.state.theta, dict[str, float]()
        for address, numbers in wanted.items():
            worker = coordinator.crew.workers[address]
            head = {"op": "job", "kind": "rows", "job": coordinator.job_number, "chunk": 0, "version": None}
            head |= {"first": 0, "last": len(numbers), "generation": job.generation, "members": numbers}
            coordinator.crew.send(worker, Message(head))
            size = len(numbers) * weights.nbytes * (1 + len(self.strategy.row_arrays))
            until[address] = time.monotonic() + PATIENCE + 2 * size / worker.bandwidth
        rows: dict[int, TrainedMember] = {}
        while until:
            for worker, message in coordinator.take_events(TICK):
                if message.head.get("job") == coordinator.job_number and worker.address in until:
                    rows |= self._read_rows(job, worker, wanted[worker.address], message)
                    del until[worker.address]
            for address in [a for a, at in until.items() if a not in coordinator.crew.workers or time.monotonic() > at]:
                job.held.pop(address, None)
                del until[address]
        return rows

    def _read_rows(
        self, job: MembersJob, worker: RemoteWorker, numbers: list[int], message: Message
    ) -> dict[int, TrainedMember]:
        """Return the members that a worker has sent; one whose answer cannot be read is turned away."""
        strategy, state = self.strategy, job.inputs.state
        templates = [strategy.moments(state, number) for number in numbers]
        try:
            read = decode_members(message.arrays, templates, bool(strategy.row_arrays), state.theta)
            return dict(zip(numbers, read, strict=True))
        except Exception as error:  # whatever the worker has sent
            self.coordinator.admission.refuse(worker, f"its members cannot be read ({type(error).__name__}: {error})")
            return {}
