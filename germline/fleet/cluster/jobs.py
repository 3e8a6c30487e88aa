"""Jobs of a cluster: work that is cut into pieces, scheduled on workers, checked, and put together in order."""

import queue
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from germline.fleet.cluster.crew import Crew, RemoteWorker
from germline.fleet.cluster.hub import Event, Hub
from germline.fleet.cluster.messages import Head, Message, checksum, encode_batch, fields_to_check
from germline.fleet.cluster.scheduler import CHUNKS_PER_WORKER, Chunk, ChunkScheduler
from germline.genome import theta_sha256
from germline.population import Plan
from germline.strategies.protocol import GenerationInputs

CHECK_EVERY = 20  # generations after which a worker's weights and some of its scores are checked again
TOLERANCE = {"float32": 1e-3, "bfloat16": 0.1}  # of scores of unlike machines
FAR = 50.0  # times the tolerance, for single members
KINDS = ("scores", "gradient", "train")
TICK = 0.02  # seconds between looks at which workers are late
STRIKES = 6  # answers in a row that a worker may compute with other weights
FORGIVEN = 50  # generations after which a worker that was too slow is tried again
WAITING_NOTE = 10.0  # seconds between lines that say that there are no workers


class WrongAnswerError(Exception):
    """An answer of a worker that cannot be right."""


@dataclass
class Job:
    """One piece of work of the whole fleet.

    Attributes:
        kind: ``"scores"``, ``"gradient"`` or ``"train"``.
        pieces: The number of pieces that it can be cut into.
        decode: Makes an answer of pieces first to last from a worker's arrays, or raises an error.
        compute: Computes the same in this process.
        numbers: Returns the numbers of an answer by which it is checked, piece by piece.
        arrays: Returns what workers need for some pieces, in addition to the State.
        is_sampled: Whether one piece is so cheap that it may be computed again as a check.
    """

    kind: str
    pieces: int
    decode: Callable[[int, int, list[bytes]], Any]
    compute: Callable[[int, int], Any]
    numbers: Callable[[Any], NDArray[np.float32]]
    arrays: Callable[[int, int], list[bytes]] = lambda first, last: []
    is_sampled: bool = True
    answers: dict[int, Any] = field(default_factory=dict)  # by first piece


@dataclass
class Coordinator:
    """Runs jobs on the workers that are there.

    Attributes:
        run: The name of the run that workers must have joined for; None before there is one.
        generation: The generation of the present job.
        job_number: The number of the present job.
        check_processes: Called now and then; starts workers again, or raises an error if there is none left.
    """

    hub: Hub
    crew: Crew
    check_processes: Callable[[], None]
    run: str | None = None
    generation: int = 0
    job_number: int = 0
    past_bytes: tuple[int, int] = (0, 0)  # of connections that have ended
    last_note: float = 0.0

    def run_job(self, job: Job, inputs: GenerationInputs, plan: Plan | None = None) -> list[Any]:
        """Have the fleet do a job, and wait for all of it; return the answers in order."""
        self.generation, self.job_number = int(inputs.version.rstrip("+")), self.job_number + 1
        self.take_events(None, 0.0)
        for worker in self.crew.workers.values():
            if self.generation - worker.last_useful > FORGIVEN:  # it was too slow, and may not be any more
                worker.last_useful, worker.rates, worker.pending = self.generation, {}, set()
        rates = {number: worker.rates.get(job.kind, 0.0) for number, worker in self.crew.workers.items()}
        scheduler = ChunkScheduler(job.pieces, rates)
        head: Head = {"op": "job", "kind": job.kind, "version": inputs.version, "job": self.job_number}
        head |= {"plan": asdict(plan) if plan is not None else None, "generation": self.generation}
        head |= {"address": inputs.address, "values": dict(inputs.values), "batch": inputs.batch}
        head |= {"on_dev": inputs.on_dev, "checked_fields": fields_to_check(inputs.strategy, inputs.state)}
        expected: dict[str, Any] = {}  # checksums of the State, computed when they are needed
        while not scheduler.is_finished:
            self._send_chunks(job, scheduler, inputs, head)
            for worker, message in self.take_events(scheduler, TICK if self.crew.workers else 1.0):
                chunk = self._find_chunk(scheduler, worker, message.head)
                if chunk is None:
                    continue
                waited = time.monotonic() - chunk.since
                worker.measure(job.kind, chunk.size, message.head.get("seconds"), waited)
                if message.head.get("op") == "dropped" or not scheduler.is_needed(chunk):
                    scheduler.return_chunk(chunk.number, time.monotonic())
                    continue
                try:
                    answer = self._check_answer(job, chunk, worker, message, inputs, expected, plan)
                except WrongAnswerError as error:
                    scheduler.return_chunk(chunk.number, time.monotonic())
                    self._turn_away(worker, scheduler, str(error))
                    continue
                if answer is None:  # it had other weights, and is sent the right ones
                    scheduler.return_chunk(chunk.number, time.monotonic())
                    continue
                scheduler.complete(chunk.number, time.monotonic())
                job.answers[chunk.first] = answer
                worker.pieces += chunk.size
                worker.strikes, worker.last_useful = 0, self.generation
                scheduler.rates[worker.peer.number] = worker.rates.get(job.kind, 0.0)
        return [job.answers[first] for first in sorted(job.answers)]

    def _send_chunks(self, job: Job, scheduler: ChunkScheduler, inputs: GenerationInputs, head: Head) -> None:
        """Give every worker that has fewer than two chunks its next one."""
        for number, worker in list(self.crew.workers.items()):
            while len(worker.pending) < CHUNKS_PER_WORKER:
                chunk = scheduler.next_chunk(number, time.monotonic())
                if chunk is None:
                    break
                worker.pending.add((self.job_number, chunk.number))
                self.crew.bring_up_to_date(worker, inputs, self.generation)
                if inputs.given_batch is not None and worker.batch != inputs.batch:
                    self.hub.send(worker.peer, *encode_batch(inputs.given_batch, inputs.batch))
                    worker.batch = inputs.batch
                is_checked = worker.checked < 0 or self.generation - worker.checked >= CHECK_EVERY
                about = {"chunk": chunk.number, "first": chunk.first, "last": chunk.last, "check": is_checked}
                self.hub.send(worker.peer, head | about, job.arrays(chunk.first, chunk.last))

    def _find_chunk(self, scheduler: ChunkScheduler, worker: RemoteWorker, head: Head) -> Chunk | None:
        """Return the chunk of an answer, or None if it is not awaited any more; then only its speed is taken in."""
        job, number = head.get("job"), head.get("chunk")
        if isinstance(job, int) and isinstance(number, int):
            worker.pending.discard((job, number))
        chunk = scheduler.out.get(number) if isinstance(number, int) and job == self.job_number else None
        if chunk is not None and chunk.worker == worker.peer.number:
            return chunk
        first, last, kind = head.get("first"), head.get("last"), head.get("kind")
        if isinstance(first, int) and isinstance(last, int) and 0 < last - first < 1 << 32 and kind in KINDS:
            worker.measure(str(kind), last - first, head.get("seconds"))
        return None

    def _check_answer(
        self,
        job: Job,
        chunk: Chunk,
        worker: RemoteWorker,
        message: Message,
        inputs: GenerationInputs,
        expected: dict[str, Any],
        plan: Plan | None,
    ) -> Any:
        """Return a worker's answer if it can be right, None if the worker had other weights, or raise an error."""
        head = message.head
        if "theta" in head and "theta" not in expected:
            expected["theta"] = theta_sha256(inputs.state.theta)
        if "checksum" not in expected:
            expected["checksum"] = checksum(fields_to_check(inputs.strategy, inputs.state), inputs.state)
        is_stale = head.get("op") == "stale"
        if is_stale or any(head.get(name, value) != value for name, value in expected.items()):
            worker.strikes += 1
            if worker.strikes > STRIKES:
                raise WrongAnswerError("again and again it has other weights than it was sent")
            if not is_stale:
                self.hub.say(f"worker {worker.name} has other weights: it is sent the right ones")
            worker.version, worker.has_whole_state = None, False
            return None
        answer = self._decode_answer(job, chunk, message, plan.dtype if plan is not None else "float32")
        if "theta" in head:
            worker.checked = self.generation
        return answer

    def _decode_answer(self, job: Job, chunk: Chunk, message: Message, dtype: str) -> Any:
        """Return an answer; one with infinities, and a sample now and then, is computed here again and compared."""
        if message.head.get("op") != "answer":
            job.compute(chunk.first, chunk.last)  # if it fails here as well, it is not the worker's fault
            raise WrongAnswerError(str(message.head.get("reason"))[:200])
        try:
            answer = job.decode(chunk.first, chunk.last, message.arrays)
            numbers = job.numbers(answer)
        except Exception as error:  # whatever the worker has sent
            raise WrongAnswerError(f"its answer cannot be read ({type(error).__name__}: {error})") from error
        has_infinities = not np.isfinite(numbers).all()
        if has_infinities or ("theta" in message.head and job.is_sampled):
            last = chunk.last if has_infinities else chunk.first + 1
            expected = job.numbers(job.compute(chunk.first, last))
            if not are_close(numbers[: expected.size], expected, TOLERANCE[dtype]):
                raise WrongAnswerError("it computes other scores for the same members than the coordinator")
        return answer

    def _turn_away(self, worker: RemoteWorker, scheduler: ChunkScheduler, reason: str) -> None:
        self.crew.workers.pop(worker.peer.number, None)
        scheduler.drop_worker(worker.peer.number)
        self.hub.refuse(worker.peer, reason)

    def take_events(self, scheduler: ChunkScheduler | None, seconds: float) -> list[tuple[RemoteWorker, Message]]:
        """Take in all events, after waiting up to some seconds for the first; return the answers among them."""
        answers, until = [], time.monotonic() + seconds
        while True:
            try:
                event = self.hub.events.get(timeout=max(0.0, until - time.monotonic()))
            except queue.Empty:
                break
            until = 0.0  # then only those that are there already
            if event.kind == "answered" and event.peer.number in self.crew.workers:
                answers.append((self.crew.workers[event.peer.number], event.message))
            elif event.kind == "joined":
                self._add_worker(event, scheduler)
            elif event.kind == "left":
                self._remove_worker(event, scheduler)
        if not self.crew.workers and time.monotonic() - self.last_note > WAITING_NOTE:
            self.last_note = time.monotonic()
            self.hub.say(f"there are no workers: waiting for some at {self.hub.address}")
        self.check_processes()
        return answers

    def _add_worker(self, event: Event, scheduler: ChunkScheduler | None) -> None:
        peer, about = event.peer, event.peer.about
        if about["run"] != self.run:
            self.hub.disconnect(peer)  # it connects again, for this run
            return
        worker = RemoteWorker(peer, about.get("version"), bool(about.get("whole")), about["tell"])
        self.crew.workers[peer.number] = worker
        self.hub.say(f"worker {about.get('name')} has joined: {about.get('device')}, {about.get('machine')}")
        if scheduler is not None:
            scheduler.rates[peer.number] = 0.0

    def _remove_worker(self, event: Event, scheduler: ChunkScheduler | None) -> None:
        worker = self.crew.workers.pop(event.peer.number, None)
        if worker is None:
            return
        stream = event.peer.stream
        self.past_bytes = self.past_bytes[0] + stream.sent, self.past_bytes[1] + stream.received
        self.hub.say(f"worker {worker.name} has left")
        if scheduler is not None:
            scheduler.drop_worker(event.peer.number)


def are_close(numbers: Any, expected: NDArray[np.float32], tolerance: float) -> bool:
    """Return whether scores are equal but for what unlike machines make of them: last bits, and an example or two."""
    finite = np.isfinite(expected)
    if numbers.shape != expected.shape or not np.array_equal(finite, np.isfinite(numbers)):
        return False
    if not finite.any():
        return True
    apart = np.abs(numbers[finite] - expected[finite]) / max(float(np.abs(expected[finite]).max()), 1e-6)
    return bool(apart.max() <= FAR * tolerance and np.mean(apart <= tolerance) >= 0.5)
