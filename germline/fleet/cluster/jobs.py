"""Jobs of a cluster: work that is cut into pieces, scheduled on workers, checked, and put together in order."""

import itertools
import queue
import random
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from germline.errors import WrongScoresError
from germline.fleet.cluster.admission import TOLERANCE, Admission, WrongAnswerError, are_close
from germline.fleet.cluster.backend import Event, Head, Message
from germline.fleet.cluster.crew import Crew, RemoteWorker
from germline.fleet.cluster.messages import candidate_fields, checksum, encode_batch, encode_gradient, encode_state
from germline.fleet.cluster.scheduler import CHUNKS_PER_WORKER, Chunk, ChunkScheduler
from germline.fleet.gradients import Scores
from germline.population import Plan
from germline.strategies import GenerationInputs

AUDIT_EVERY = 20  # generations between two audits of a worker, on average
AUDITS = 10  # that a worker must have passed since its first answer that is not doubted once it is found to be wrong
TICK = 0.02  # seconds between looks at which workers are late
OTHER_SCORES = "it computes other scores for the same members than the coordinator"
STRIKES = 6  # answers in a row that a worker may compute with other weights
FORGIVEN = 50  # generations after which a worker that was too slow is tried again
WAITING_NOTE = 10.0  # seconds between lines that say that there are no workers

TakeMessage = Callable[[RemoteWorker, Message], None]


@dataclass
class Job:
    """One piece of work of the whole fleet.

    Attributes:
        kind: ``"scores"``, ``"gradient"`` or ``"train"``.
        pieces: The number of pieces that it can be cut into.
        inputs: What the members of the generation are made of.
        decode: Makes an answer of pieces first to last from a worker's arrays, or raises an error.
        compute: Computes the same in this process.
        numbers: Returns the numbers of an answer by which it is checked, piece by piece.
        plan: How members are evaluated; None where they are not.
    """

    kind: str
    pieces: int
    inputs: GenerationInputs
    decode: Callable[[int, int, Sequence[bytes]], Any]
    compute: Callable[[int, int], Any]
    numbers: Callable[[Any], Scores] = lambda answer: answer
    plan: Plan | None = None
    answers: dict[int, Any] = field(default_factory=dict)  # by first piece
    sources: dict[int, RemoteWorker] = field(default_factory=dict)  # of the answers
    sizes: dict[int, int] = field(default_factory=dict)  # of the answers, in pieces

    @property
    def generation(self) -> int:
        return int(self.inputs.version.rstrip("+"))

    @cached_property
    def weights(self) -> dict[str, Any]:
        return candidate_fields(self.inputs.strategy, self.inputs.state)

    @cached_property
    def checksum(self) -> int:
        return checksum(self.weights)

    @cached_property
    def head(self) -> Head:
        """The head of the messages to workers about the job."""
        inputs, plan = self.inputs, asdict(self.plan) if self.plan is not None else None
        head: Head = {"op": "job", "kind": self.kind, "version": inputs.version, "generation": self.generation}
        head |= {"address": inputs.address, "values": dict(inputs.values), "batch": inputs.batch}
        head |= {"observations": list(inputs.observations)} if inputs.observations else {}
        return head | {"on_dev": inputs.on_dev, "plan": plan, "checked_fields": list(self.weights)}

    def is_same(self, other: "Job") -> bool:
        """Return whether another job asks for the same."""
        return self.pieces == other.pieces and self.head == other.head and self.inputs.state is other.inputs.state

    # Messages that several workers need are made once, and uploaded once.

    @cached_property
    def state_message(self) -> Message:
        return encode_state(self.inputs.state, self.inputs.version, is_whole=True)

    @cached_property
    def weights_message(self) -> Message:
        return encode_state(self.weights, self.inputs.version, is_whole=False)

    @cached_property
    def gradient_message(self) -> Message:
        assert self.inputs.gradient is not None
        wire, content = encode_gradient(self.inputs.gradient, self.inputs.strategy)
        return Message({"op": "gradient", "generation": self.generation, "wire": wire}, [content])

    @cached_property
    def batch_message(self) -> Message:
        return encode_batch(self.inputs.given_batch, self.inputs.batch)

    def prepare(self, crew: Crew, worker: RemoteWorker, chunk: Chunk) -> Message:
        """Send a worker what it needs for a chunk; return the message about the chunk itself."""
        inputs = self.inputs
        if worker.version != inputs.version:
            self._bring_up_to_date(crew, worker)
            worker.version = inputs.version
        if inputs.given_batch is not None and worker.batch != inputs.batch:
            crew.send(worker, self.batch_message)
            worker.batch = inputs.batch
        return Message(self.head)

    def _bring_up_to_date(self, crew: Crew, worker: RemoteWorker) -> None:
        """Send a worker what it needs to make the candidates of a generation: records, or arrays of the State."""
        inputs = self.inputs
        should_follow = crew.should_follow(worker, inputs.strategy, inputs.state)
        if should_follow and crew.has_records(worker, inputs.state, self.generation):
            crew.send_records(worker, self.generation)
            if worker.version == inputs.version:
                return
            if inputs.gradient is not None:
                crew.send(worker, self.gradient_message)
                return
        worker.has_whole_state = should_follow and inputs.gradient is None
        crew.send(worker, self.state_message if worker.has_whole_state else self.weights_message)

    def has_same_weights(self, head: Head, chunk: Chunk) -> bool:
        """Return whether an answer was computed with the right weights, as it must say."""
        return head.get("checksum") == self.checksum

    def forget_weights(self, worker: RemoteWorker) -> None:
        """Have a worker be sent its weights anew."""
        worker.version = None

    def take(self, worker: RemoteWorker, chunk: Chunk, answer: Any) -> None:
        """Keep an answer."""
        self.answers[chunk.first], self.sources[chunk.first], self.sizes[chunk.first] = answer, worker, chunk.size


@dataclass
class Coordinator:
    """Runs jobs on the workers that are there.

    Attributes:
        is_open: Whether workers may join; before that, this process does all work itself.
        generation: The generation of the present job.
        job_number: The number of the present job.
        scheduler: The pieces of the present job.
        job: The present job; None if there is none.
        last_jobs: The last job that was finished, by kind.
        chance: Draws audits; workers must not be able to foresee it.
        check_processes: Called now and then; starts workers again, or raises an error if there is none left.
    """

    crew: Crew
    admission: Admission
    check_processes: Callable[[], None] = lambda: None
    is_open: bool = False
    generation: int = 0
    job_number: int = 0
    scheduler: ChunkScheduler = field(default_factory=lambda: ChunkScheduler(0, {}))
    job: Job | None = None
    last_jobs: dict[str, Job] = field(default_factory=dict)
    chance: random.Random = field(default_factory=random.SystemRandom)
    last_note: float = 0.0

    def run_job(self, job: Job) -> list[Any]:
        """Have the fleet do a job, and wait for all of it; return the answers in order."""
        if self.job is not None and self.job.is_same(job):
            job = self.job  # workers have started with it
        else:
            self.start_job(job)
        while not self.scheduler.is_finished:
            self.take_events(TICK if self.crew.workers else 1.0)
            self._send_chunks(job)
            if self.scheduler.is_finished:
                self._draw_audit(job)
        self._audit_absent(job)
        self.job, self.last_jobs[job.kind] = None, job
        return [job.answers[first] for first in sorted(job.answers)]

    def start_job(self, job: Job) -> None:
        """Have the workers that are there start with a job; ``run_job`` waits for it."""
        self.generation, self.job_number = job.generation, self.job_number + 1
        self.job = None
        self.take_events(0.0)
        for worker in self.crew.workers.values():
            if self.generation - worker.last_useful > FORGIVEN:  # it was too slow, and may not be any more
                worker.last_useful, worker.rates, worker.pending = self.generation, {}, {}
        rates = {address: worker.rates.get(job.kind, 0.0) for address, worker in self.crew.workers.items()}
        self.scheduler, self.job = ChunkScheduler(job.pieces, rates), job
        self._send_chunks(job)

    def _send_chunks(self, job: Job) -> None:
        """Send every worker that has fewer than two chunks its next one; those that have none come first."""
        for has, (address, worker) in itertools.product(range(CHUNKS_PER_WORKER), list(self.crew.workers.items())):
            if len(worker.pending) > has or (chunk := self.scheduler.next_chunk(address, time.monotonic())) is None:
                continue
            head, arrays = job.prepare(self.crew, worker, chunk)
            about = {"job": self.job_number, "chunk": chunk.number, "first": chunk.first, "last": chunk.last}
            self.crew.send(worker, Message(head | about, arrays))
            worker.pending[self.job_number, chunk.number] = job.kind, chunk

    def _find_chunk(self, worker: RemoteWorker, head: Head) -> Chunk | None:
        """Return the chunk of an answer, or None if it is not awaited any more; then only its speed is taken in."""
        job, number = head.get("job"), head.get("chunk")
        if not (isinstance(job, int) and isinstance(number, int) and (job, number) in worker.pending):
            return None
        kind, chunk = worker.pending.pop((job, number))
        is_awaited = self.scheduler.out.get(number) is chunk
        worker.measure(kind, chunk.size, head.get("seconds"), time.monotonic() - chunk.since if is_awaited else 0.0)
        return chunk if is_awaited else None

    def _take_answer(self, job: Job, worker: RemoteWorker, chunk: Chunk, message: Message) -> None:
        """Take in a worker's answer to a chunk of a job; a wrong one is an error."""
        head, op = message.head, message.head.get("op")
        if not self.scheduler.is_needed(chunk):
            self.scheduler.return_chunk(chunk.number, time.monotonic())
        elif op == "stale" or (op == "answer" and not job.has_same_weights(head, chunk)):
            self._forget_weights(job, worker, is_stale=op == "stale")
            self.scheduler.return_chunk(chunk.number, time.monotonic())
        else:
            job.take(worker, chunk, self._decode_answer(job, chunk, message))
            self.scheduler.complete(chunk.number, time.monotonic())
            worker.pieces += chunk.size
            worker.strikes, worker.last_useful = 0, self.generation
            self.scheduler.rates[worker.address] = worker.rates.get(job.kind, 0.0)

    def _forget_weights(self, job: Job, worker: RemoteWorker, *, is_stale: bool) -> None:
        """Have a worker with other weights than it should have be sent the right ones, or raise an error."""
        worker.strikes += 1
        if worker.strikes > STRIKES:
            raise WrongAnswerError("again and again it has other weights than it was sent")
        if not is_stale:
            self.crew.say(f"worker {worker.name} has other weights: it is sent the right ones")
        job.forget_weights(worker)

    def _decode_answer(self, job: Job, chunk: Chunk, message: Message) -> Any:
        """Return an answer; one with infinities is computed here again and compared."""
        if message.head.get("op") != "answer":
            job.compute(chunk.first, chunk.last)  # if it fails here as well, it is not the worker's fault
            raise WrongAnswerError(str(message.head.get("reason"))[:200])
        try:
            answer = job.decode(chunk.first, chunk.last, message.arrays)
            numbers = job.numbers(answer)
        except Exception as error:  # whatever the worker has sent
            raise WrongAnswerError(f"its answer cannot be read ({type(error).__name__}: {error})") from error
        if not np.isfinite(numbers).all() and not self._is_right(job, chunk.first, chunk.last, numbers):
            raise WrongAnswerError(OTHER_SCORES)
        return answer

    def _is_right(self, job: Job, first: int, last: int, numbers: Scores, *, is_exact: bool = False) -> bool:
        """Return whether the numbers of pieces first to last are those that this process computes."""
        expected = job.numbers(job.compute(first, last))
        tolerance = TOLERANCE[job.plan.dtype if job.plan is not None else "float32"]
        is_equal = numbers.tobytes() == expected.tobytes()
        return is_equal or (not is_exact and are_close(numbers, expected, tolerance))

    def _draw_audit(self, job: Job) -> None:
        """Audit a worker now and then: the draw is secret, and comes when all its answers are there."""
        drawn = [worker for worker in list_sources(job) if self.chance.random() < 1 / AUDIT_EVERY]
        if drawn:
            self._audit(job, self.chance.choice(drawn))

    def _audit_absent(self, job: Job) -> None:
        """Audit the workers that have answered the job before and not this one: later draws cannot find them."""
        last, sources = self.last_jobs.get(job.kind, job), list_sources(job)
        for worker in list_sources(last):
            if worker not in sources and self.crew.workers.get(worker.address) is worker:
                self._audit_later(last, worker)

    def audit_all(self, *, is_whole: bool = False) -> None:
        """Audit the last answers of every worker, before they become the result of a run.

        Args:
            is_whole: Whether to compute all of their pieces again, and not only one of each worker.
        """
        for job in list(self.last_jobs.values()):
            for worker in list_sources(job):
                self._audit(job, worker, is_whole=is_whole)

    def _audit_leaver(self, worker: RemoteWorker) -> None:
        """Audit the last answers of a worker that has left, which later draws cannot find any more."""
        for job in (self.job, *self.last_jobs.values()):
            if job is not None and worker in job.sources.values():
                self._audit_later(job, worker)

    def _audit_later(self, job: Job, worker: RemoteWorker) -> None:
        """Audit answers of an earlier job, unless what members observe may have changed since."""
        if not job.inputs.observations:
            self._audit(job, worker)

    def _audit(self, job: Job, worker: RemoteWorker, *, is_whole: bool = False) -> None:
        """Compute one or all of the pieces that a worker has answered again; if one is wrong, undo what it has done.

        If only this job has used its answers, its pieces are computed once more, by others.

        Raises:
            WrongScoresError: Earlier generations have used its answers.
        """
        numbers = {first: job.numbers(job.answers[first]) for first, one in job.sources.items() if one is worker}
        sizes = {first: job.sizes[first] for first in numbers}
        pieces = [(first, place) for first, size in sizes.items() for place in range(size)]

        def is_right(first: int, place: int) -> bool:
            width = numbers[first].size // sizes[first]
            one = numbers[first][place * width : (place + 1) * width]
            return self._is_right(job, first + place, first + place + 1, one, is_exact=worker.is_exact)

        if all(is_right(*piece) for piece in (pieces if is_whole else [self.chance.choice(pieces)])):
            worker.audits = [*worker.audits, (self.generation, self.job_number)][-AUDITS:]
            return
        generation, number = worker.audits[0] if len(worker.audits) == AUDITS else worker.joined
        self.scheduler.drop_worker(worker.address)
        self.admission.refuse(worker, OTHER_SCORES)
        for last in self.last_jobs.values():  # it is not audited again
            last.sources = {first: one for first, one in last.sources.items() if one is not worker}
        if number < self.job_number or self.job is None:
            message = f"worker {worker.name} has given wrong scores: the run goes back to generation {generation}"
            self.crew.say(message)
            raise WrongScoresError(message, generation)
        now = self.job  # the only one that has used its answers, or the run has gone back since, to before it joined
        for first in [first for first, one in now.sources.items() if one is worker]:
            self.scheduler.withdraw(first, first + now.sizes[first])
            del now.answers[first], now.sources[first]

    def go_back(self, generation: int) -> None:
        """Forget what workers and this process know of the generations from this one on.

        The last jobs stay: a worker whose answers to one of them were wrong may have lied before this generation.
        """
        self.job = None
        self.crew.records, self.crew.record_bytes = {}, 0
        audited = (worker for job in self.last_jobs.values() for worker in list_sources(job))
        for worker in dict.fromkeys([*self.crew.workers.values(), *audited]):
            worker.version, worker.audits = None, [audit for audit in worker.audits if audit[0] <= generation]
            worker.joined = min(worker.joined, (generation, self.job_number + 1))

    def take_events(self, seconds: float, take_other: TakeMessage = lambda worker, message: None) -> None:
        """Take in all events, after waiting up to some seconds for the first.

        Args:
            seconds: How long to wait.
            take_other: Called with messages of workers that are no answers to chunks of the present job.
        """
        backend, until = self.crew.backend, time.monotonic() + seconds
        backend.look()
        with suppress(queue.Empty):
            while True:
                event = backend.events.get(timeout=max(0.0, until - time.monotonic()))
                until = 0.0  # then only those that are there already
                self._take_event(event, take_other)
        if not self.crew.workers and time.monotonic() - self.last_note > WAITING_NOTE:
            self.last_note = time.monotonic()
            refusals = self.admission.refusals
            refused = f"; the last one was turned away ({refusals[-1]})" if refusals else ""
            self.crew.say(f"there are no workers: waiting for some at {backend.address}{refused}")
        self.check_processes()

    def _take_event(self, event: Event, take_other: TakeMessage) -> None:
        """Take in what has happened to a worker; one with a wrong answer is turned away."""
        worker, reason = self.admission.known.get(event.worker), str(event.message.head.get("reason"))[:500]
        if event.kind == "joined":
            self.admission.greet(event.worker)
        elif worker is None:
            if event.kind == "failed":
                self.crew.say(f"worker {event.worker} has failed: {reason}")
        elif event.kind == "left":
            if worker.address in self.crew.workers:
                self.crew.say(f"worker {worker.name} has left")
            self.scheduler.drop_worker(worker.address)
            self.admission.forget(worker)
            self._audit_leaver(worker)
        else:
            self.crew.count_received(worker, event.message)
            try:
                if event.kind == "failed":
                    raise WrongAnswerError(reason)
                if worker.address in self.crew.workers:
                    chunk = self._find_chunk(worker, event.message.head)
                    if chunk is not None and self.job is not None:
                        self._take_answer(self.job, worker, chunk, event.message)
                    else:
                        take_other(worker, event.message)
                elif self.admission.take_answer(worker, event.message):
                    self.scheduler.rates[worker.address] = 0.0
                    worker.last_useful, worker.joined = self.generation, (self.generation, self.job_number)
            except WrongAnswerError as error:
                self.scheduler.drop_worker(worker.address)
                self.admission.refuse(worker, str(error))
                self._audit_leaver(worker)


def list_sources(job: Job) -> list[RemoteWorker]:
    """Return the workers whose answers to a job were used."""
    return list(dict.fromkeys(job.sources.values()))
