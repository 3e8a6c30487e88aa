"""The workers of a cluster, and what each of them knows of the run.

A worker follows the run by its records, from which it makes the State itself, or is sent what candidates are made of,
whichever its measured rates make cheaper.
"""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from germline.fleet.cluster.backend import Backend, Head, Message, count_bytes, print_status
from germline.fleet.cluster.messages import candidate_fields, encode_gradient
from germline.fleet.cluster.scheduler import OVERDUE, Chunk
from germline.strategies import AnyStrategy, GenerationResult, pack

RECORD_BYTES = 1 << 24  # of records that are kept for workers that are behind
RECENT = 0.3  # weight of the latest measurement of a worker's speed
LONGEST = 1e6  # seconds that any work may take
HEAD_START = 0.01  # seconds by which records are ahead of weights
LATENCY = 0.1  # seconds of a call's way that never make a worker slow


@dataclass(eq=False)
class RemoteWorker:
    """A worker as the coordinator knows it.

    Attributes:
        address: How the backend calls it.
        about: What it has said about its machine.
        bandwidth: Measured bytes per second.
        version: The version of the State that it has; None if that is not known.
        has_whole_state: Whether that is all of a State, so that it can follow by records.
        tell_seconds: Seconds that a record takes it.
        rates: Pieces per second, by kind of work.
        pieces: Pieces that it has done.
        is_exact: Whether it computes the same bits as the coordinator.
        joined: The generation, and the number of the job, in which it was let in.
        audits: The same of the last audits that it has passed.
        last_useful: The generation in which an answer was last used.
        batch: The number of the batch that it was sent last, where batches are sent.
        strikes: How often in a row it had other weights than it was sent.
        pending: The kind and the chunk of each answer that is awaited, by the numbers of its job and its chunk.
        sent: Bytes to it.
        received: Bytes from it.
        last_heard: When it last answered.
        asked: When it was last greeted.
        delays: Seconds that the answers to greetings took.
    """

    address: str
    about: Head = field(default_factory=dict)
    bandwidth: float = 0.0
    version: str | None = None
    has_whole_state: bool = False
    tell_seconds: float = 0.0
    rates: dict[str, float] = field(default_factory=dict)
    pieces: int = 0
    is_exact: bool = False
    joined: tuple[int, int] = (0, 0)
    audits: list[tuple[int, int]] = field(default_factory=list)
    last_useful: int = 0
    batch: int = -1
    busy_seconds: float = 0.0
    answers: int = 0
    strikes: int = 0
    pending: dict[tuple[int, int], tuple[str, Chunk]] = field(default_factory=dict)
    sent: int = 0
    received: int = 0
    last_heard: float = field(default_factory=time.monotonic)
    asked: float = 0.0
    delays: list[float] = field(default_factory=list)

    @property
    def name(self) -> str:
        return str(self.about.get("name", self.address))

    @property
    def rate(self) -> float:
        return sum(self.rates.values())

    @property
    def generation(self) -> int | None:
        """The generation from which it can follow by records; None if it does not have the whole State."""
        return int(self.version.rstrip("+")) if self.version is not None and self.has_whole_state else None

    def is_useful(self, generation: int) -> bool:
        """Return whether an answer was used in the last generations."""
        return generation - self.last_useful <= 2

    def measure(self, kind: str, pieces: int, seconds: Any, waited: float = 0.0) -> None:
        """Take in the speed of an answer: by the worker's clock, or by the time that it took in all if that is late.

        If latency always counted, a worker that is given little would look slow, and be given less and less.
        """
        if isinstance(seconds, int | float) and 0 < seconds < LONGEST:
            self.busy_seconds += seconds
            self.answers += 1
            is_late = waited > OVERDUE * seconds + LATENCY
            rate, before = pieces / max(waited if is_late else seconds, 1e-6), self.rates.get(kind)
            self.rates[kind] = rate if before is None else before + RECENT * (rate - before)


@dataclass
class Crew:
    """All workers that have been let in, and what those that are behind may still need.

    Attributes:
        sent: Bytes to all workers that the fleet has not reported yet.
        received: The same from them.
    """

    backend: Backend
    say: Callable[[str], None] = print_status
    sent: int = 0
    received: int = 0
    workers: dict[str, RemoteWorker] = field(default_factory=dict)
    records: dict[int, Message] = field(default_factory=dict)
    record_bytes: int = 0

    def forget_run(self) -> None:
        """Forget the records of a run, and who was let in."""
        self.workers, self.records, self.record_bytes = {}, {}, 0

    def send(self, worker: RemoteWorker, message: Message) -> None:
        """Send a message to a worker."""
        size = count_bytes(message, len(json.dumps(message.head)))
        worker.sent += size
        self.sent += size
        self.backend.submit(worker.address, message)

    def count_received(self, worker: RemoteWorker, message: Message) -> None:
        """Count a message from a worker."""
        size = count_bytes(message, len(json.dumps(message.head)))
        worker.received += size
        self.received += size
        worker.last_heard = time.monotonic()

    def record(self, strategy: AnyStrategy, state: Any, result: GenerationResult, job: int) -> None:
        """Keep a result, and send it to the workers that follow by records and are up to date."""
        message = self.records[result.generation] = encode_record(strategy, result)
        self.record_bytes += count_bytes(message)
        while self.record_bytes > RECORD_BYTES and len(self.records) > 1:
            self.record_bytes -= count_bytes(self.records.pop(min(self.records)))
        for worker in self.workers.values():
            is_behind = any(number < job for number, _ in worker.pending)  # it is told when it has caught up
            is_current = worker.generation == result.generation
            if is_current and not is_behind and self.should_follow(worker, strategy, state):
                self.send_records(worker, result.generation + 1)

    def should_follow(self, worker: RemoteWorker, strategy: AnyStrategy, state: Any) -> bool:
        """Return whether records are cheaper for a worker than what candidates are made of.

        A gradient does not count, because weights are as large. Records are sent before the coordinator's own update.
        """
        weights, scores = count_array_bytes(candidate_fields(strategy, state)), 4 * strategy.population
        return scores / worker.bandwidth + worker.tell_seconds < weights / worker.bandwidth + HEAD_START

    def has_records(self, worker: RemoteWorker, state: Any, generation: int) -> bool:
        """Return whether all records that a worker misses are there, and are cheaper than the State.

        A worker may be ahead: a coordinator that was killed has sent it records that are not on disk.
        """
        if worker.generation is None or worker.generation > generation:
            return False
        if not all(g in self.records for g in range(worker.generation, generation)):
            return False
        missing = [self.records[g] for g in range(worker.generation, generation)]
        by_records = len(missing) * worker.tell_seconds + sum(map(count_bytes, missing)) / worker.bandwidth
        return not missing or by_records < count_array_bytes(state) / worker.bandwidth

    def send_records(self, worker: RemoteWorker, last: int) -> None:
        """Send a worker all records that it misses before generation last; a gradient that it has is not sent again."""
        assert worker.generation is not None
        for generation in range(worker.generation, last):
            head, arrays = self.records[generation]
            has_gradient = worker.version == f"{generation}+"
            self.send(worker, Message(head | {"wire": None}, arrays[:1]) if has_gradient else Message(head, arrays))
            worker.version = str(generation + 1)


def encode_record(strategy: AnyStrategy, result: GenerationResult) -> Message:
    """Return the result of a generation as a message: its scores, and its gradient if it has one."""
    head = {"op": "tell", "generation": result.generation, "values": dict(result.values), "wire": None}
    arrays = [result.scores.tobytes()]
    if result.gradient is not None:
        head["wire"], content = encode_gradient(result.gradient, strategy)
        arrays.append(content)
    return Message(head, arrays)


def count_array_bytes(value: Any) -> int:
    """Return the bytes of the arrays of a State or any part of one."""
    return sum(array.nbytes for array in pack(value)[1].values())
