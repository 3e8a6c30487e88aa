"""Any mix of machines: a coordinator with the run, and workers that come, go, stall and die.

The coordinator keeps State and journal; workers only score. A worker follows the run by its records, from which it
makes the State by itself, or is sent what candidates are made of, whichever its measured rates make cheaper. Blocks of
members are dealt by speed (``deck.py``) and have the same scores whoever computes them.
"""

import asyncio
import atexit
import hashlib
import json
import os
import queue
import subprocess
import sys
import tempfile
import time
import typing
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from germline import noise
from germline.errors import BadInput
from germline.fleet import keys as certificates
from germline.fleet.deck import AT_ONCE, Chunk, Deck
from germline.fleet.hub import (
    BEATS,
    PARENT,
    ConnectionLostError,
    Event,
    Head,
    Hub,
    Message,
    Peer,
    Stream,
    address_of,
    asked,
    bits,
    packed,
    tensors_of,
)
from germline.fleet.local import Local, mean_score
from germline.fleet.wire import decode_rows, encode_rows, packed_bytes, sum_packed
from germline.genome import theta_sha256
from germline.noise import Field
from germline.objective import Batch
from germline.population import Evaluator
from germline.strategies.base import AnyStrategy, Candidates, GenerationInputs, GenerationResult, Wire, pack, unpack
from germline.version import __version__

TIMEOUT = 15.0  # seconds after which a silent worker is given up
PAD = 1 << 16  # bytes by which the way to a worker is measured
CHECK_EVERY = 20  # generations after which a worker's weights and some of its scores are looked at again
REMEMBERED = 1 << 24  # bytes of records that are kept for workers that are behind
TOLERANCE = {"float32": 1e-3, "bfloat16": 0.1}  # of scores of unlike machines
KINDS = ("scores", "gradient", "rear")
LONGEST = 1e6  # seconds that any work may take
FAR = 50.0  # times the tolerance, for single members
RECENT = 0.3  # weight of the latest measurement of a worker's speed
TICK = 0.02  # seconds between looks at who is late
PREPARING = 600.0  # seconds for a worker to build the run
STRIKES = 6  # answers in a row that a worker may make with other weights
VAIN = 3  # workers started here that may die before one of them is let in
FORGIVEN = 50  # generations after which a worker that was too slow to be of use is tried again


class WrongAnswerError(Exception):
    """An answer that cannot be right."""


@dataclass
class Worker:
    """What the coordinator knows of a worker."""

    peer: Peer
    version: str | None  # of the State that it has; none before it has any
    whole: bool  # whether that is all of a State, so that it can follow by records
    tell: float  # seconds that a record takes it
    rates: dict[str, float] = field(default_factory=dict)  # pieces a second, by kind of work
    joined: float = field(default_factory=time.time)
    pieces: int = 0  # done so far
    checked: int = -1  # generation in which its answers were last looked at
    latest: int = 0  # generation in which it was last of use
    batch: int = -1  # that it was sent last, where batches are
    busy: float = 0.0  # seconds of work
    answers: int = 0
    strikes: int = 0  # how often it had other weights than it was sent
    owes: set[tuple[int, int]] = field(default_factory=set)  # task and chunk of each answer that is awaited

    @property
    def name(self) -> str:
        return str(self.peer.about.get("name"))

    def of_use(self, generation: int) -> bool:
        """Whether an answer of its was used of late."""
        return generation - self.latest <= 2

    def state(self, generation: int, timeout: float) -> str:
        """In a word or two."""
        if self.peer.stream.silent > timeout / 2:
            return "silent"
        if not self.of_use(generation):
            return "too slow to be of use" if any(self.rates.values()) else "new"
        return "follows by records" if self.whole else "is sent weights"


@dataclass
class Task:
    """One piece of work of the whole fleet: what it is, how it is checked, and what has come of it."""

    kind: str
    pieces: int
    head: Head
    arrays: Callable[[int, int], list[bytes]]  # that the workers of pieces first to last need besides
    accept: Callable[[int, int, list[bytes]], Any]  # what an answer is, or an error that says what is wrong with it
    again: Callable[[int, int], Any]  # the same, computed here
    numbers: Callable[[Any], NDArray[np.float32]]  # those of an answer by which it is judged, piece by piece
    sampled: bool = True  # whether one piece of it is so cheap that it may be computed again now and then
    found: dict[int, Any] = field(default_factory=dict)  # by first piece


class Elastic(Local):
    """A coordinator of workers on any machines; ``address`` is where it listens, port 0 is any.

    ``keys`` is a folder of certificates ('germline keys'), without which only this machine is listened to. ``workers``
    are started here, for ``recipe``, by keys made for them where none are given; others are started by 'germline
    worker'. A worker that says nothing for ``timeout`` seconds is given up.

    >>> fleet = Elastic()
    >>> fleet.hub.host
    '127.0.0.1'
    >>> fleet.close()
    """

    def __init__(
        self,
        address: str = "127.0.0.1:0",
        *,
        keys: str | Path | None = None,
        device: str = "auto",
        workers: int = 0,
        recipe: str | None = None,
        timeout: float = TIMEOUT,
    ) -> None:
        super().__init__(device)
        if workers and recipe is None:
            raise BadInput("Workers here need to know the recipe: give recipe=, or start them with 'germline worker'.")
        host, port = address_of(address)
        self.crew: dict[int, Worker] = {}
        self.invitation: dict[str, Any] | None = None
        self.records: dict[int, GenerationResult] = {}
        self.remembered = 0
        self.open = False
        self.generation = 0
        self.block = 1  # members of a piece
        self.task = 0  # number of the work at hand
        self.counted = (0, 0)
        self.past = [0, 0]  # bytes of connections that have ended
        self.waited = 0.0  # when it was last said that nobody is here
        self.vain = 0  # workers started here that have died since one was let in
        self.private: tempfile.TemporaryDirectory[str] | None = None  # keys of workers started here
        if workers and keys is None:  # or anybody who can log in here could join
            self.private = tempfile.TemporaryDirectory(prefix="germline-keys-")
            keys = Path(self.private.name, "keys")
            certificates.init(keys)
        self.hub = Hub(host, port, Path(keys) if keys is not None else None, self._greet, timeout)
        self.timeout = timeout
        self.started: list[subprocess.Popen[bytes]] = []
        self.commands: list[list[str]] = []
        for _ in range(workers):
            where = f"{self.hub.host}:{self.hub.port}"
            command = [sys.executable, "-m", "germline", "worker", where, "--recipe", str(recipe), "--device", device]
            self.commands.append([*command, *(["--keys", str(keys)] if keys is not None else [])])
        self._start_workers()
        atexit.register(self.close)

    @property
    def idle(self) -> bool:
        return self.open and not self.crew

    # Workers on this machine

    def _start_workers(self) -> None:
        environment = {**os.environ, PARENT: "stdin"}
        environment.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // max(1, len(self.commands)))))
        for place, command in enumerate(self.commands):
            there = self.started[place] if place < len(self.started) else None
            if there is not None and there.poll() in (None, 2):  # 2: it was turned away, and would be again
                continue
            if there is not None:
                there.communicate()
                self.vain += 1
            if self.vain > VAIN:
                raise BadInput(
                    f"Workers started here end before they can work (exit code {there and there.returncode})."
                )
            new = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, start_new_session=True)
            self.started[place : place + 1] = [new]

    def close(self, *, ended: bool = False) -> None:
        """Lets go of all workers, to wait for the run to go on, or to end with it; those that were started here end."""
        atexit.unregister(self.close)
        self.commands = []
        self.hub.close({"op": "end"} if ended or self.started else None)
        for process in self.started:
            with suppress(subprocess.TimeoutExpired):
                process.wait(3.0)
            process.kill()
            process.communicate()
        self.started = []
        if self.private is not None:
            self.private.cleanup()

    # Admission

    def invite(
        self, header: Mapping[str, Any], sample: Callable[[], NDArray[np.float32]], given: Batch | None = None
    ) -> None:
        self.hub.say(f"workers are awaited at {self.hub.host}:{self.hub.port}")
        run = hashlib.sha256(json.dumps(header, sort_keys=True).encode()).hexdigest()[:16]
        tolerance = TOLERANCE[header["evaluation"]["dtype"]]
        self.invitation = {"run": run, "header": dict(header), "sample": sample(), "tolerance": tolerance}
        self.invitation["batch"] = sent(given, 0) if given is not None else None

    async def _greet(self, stream: Stream) -> tuple[Head, float]:
        """Lets a worker in that proves to be about the same work."""
        about = (await asyncio.wait_for(stream.read(), self.timeout)).head
        said = [about.get(name) for name in ("name", "device", "machine")]
        if about.get("op") != "join" or not all(isinstance(text, str) and len(text) < 200 for text in said):
            raise BadInput("it does not speak as workers do")
        try:
            return await self._admitted(stream, about)
        except (BadInput, TimeoutError) as error:
            with suppress(ConnectionLostError, TimeoutError):
                await asyncio.wait_for(stream.write({"op": "refused", "reason": str(error)}), 2.0)
            raise

    async def _admitted(self, stream: Stream, about: Head) -> tuple[Head, float]:
        for what, here in (("germline", __version__), ("noise", noise.VERSION)):
            if about.get(what) != here:
                raise BadInput(f"it has version {about.get(what)} of {what}, and the coordinator {here}")
        beats = asyncio.ensure_future(stream.beat(self.timeout / BEATS))
        try:
            began = time.monotonic()
            await stream.write({"op": "ping"})
            await self._heard(stream, "pong")
            there_and_back, began = time.monotonic() - began, time.monotonic()
            await stream.write({"op": "ping"}, [os.urandom(PAD)])
            await self._heard(stream, "pong")
            bandwidth = PAD / max(1e-6, time.monotonic() - began - there_and_back)
            while self.invitation is None:
                await asyncio.sleep(0.1)
            invitation = self.invitation
            self._refuse_unlike(about)
            if invitation["batch"] is not None:
                await stream.write(*invitation["batch"])
            about_run = {"run": invitation["run"], "header": invitation["header"], "timeout": self.timeout}
            await stream.write({"op": "welcome", **about_run})
            ready = await asyncio.wait_for(self._heard(stream, "ready"), PREPARING)
        finally:
            beats.cancel()
        if "differs" in ready.head:
            raise BadInput(str(ready.head["differs"])[:500])
        check_ready(ready.head)
        found = np.frombuffer(b"".join(ready.arrays), np.float32)
        if not close(found, invitation["sample"], invitation["tolerance"]):
            raise BadInput("it finds other scores for the same members than the coordinator")
        return about | ready.head | {"run": invitation["run"]}, bandwidth

    def _refuse_unlike(self, about: Head) -> None:
        """An optimizer of torch's has other last bits on another kind of device."""
        assert self.invitation is not None
        header = self.invitation["header"]
        chosen, kinds = (
            header["settings"].get("optimizer"),
            {header["device"].split(":")[0], about["device"].split(":")[0]},
        )
        if len(kinds) > 1 and (isinstance(chosen, dict) or str(chosen).startswith("torch.")):
            message = (
                f"its device is {about['device']}, the coordinator's {header['device']}, and torch's optimizers differ"
            )
            raise BadInput(f"{message} between them: use adam, sgd or momentum")

    async def _heard(self, stream: Stream, op: str) -> Any:
        """The next message but signs of life."""
        while True:
            message = await asyncio.wait_for(stream.read(), self.timeout)
            if message.head.get("op") == op:
                return message
            if message.head.get("op") != "alive":
                raise BadInput(f"it said {str(message.head.get('op'))[:20]!r} where {op!r} was expected")

    # What workers know

    def divide(self, strategy: AnyStrategy, state: Any, field: Field, *, maximize: bool) -> tuple[Any, Any]:
        self.open = True
        return None, state

    def new_run(self) -> None:
        self.open, self.invitation, self.records, self.remembered = False, None, {}, 0
        for worker in self.crew.values():  # they come again, for the next run
            self.hub.loop.call_soon_threadsafe(worker.peer.stream.abort)

    def advance(
        self, update: Any, strategy: AnyStrategy, state: Any, told: GenerationResult, field: Field, *, maximize: bool
    ) -> Any:
        """The State after a generation, which workers that follow by records make for themselves meanwhile."""
        if not strategy.needs_gradient:
            self.records[told.generation] = told
            self.remembered += told.scores.nbytes
            while self.remembered > REMEMBERED:
                self.remembered -= self.records.pop(min(self.records)).scores.nbytes
            before = str(told.generation)
            for worker in self.crew.values():
                behind = any(task < self.task for task, _ in worker.owes)  # it hears of it when it has caught up
                if behind or not worker.whole or worker.version != before:
                    continue
                if self._follows(worker, strategy, state, told):
                    self._tell(worker, told.generation, told.generation + 1)
        self.generation = told.generation + 1
        return super().advance(update, strategy, state, told, field, maximize=maximize)

    def _follows(self, worker: Worker, strategy: AnyStrategy, state: Any, told: GenerationResult) -> bool:
        """Whether records are cheaper for a worker than what candidates are made of."""
        wide = worker.peer.bandwidth
        return told.scores.nbytes / wide + worker.tell < size_of(asked(strategy, state)) / wide

    def _tell(self, worker: Worker, first: int, last: int) -> None:
        told = [self.records[generation] for generation in range(first, last)]
        head = {"op": "tell", "records": [[one.generation, dict(one.values)] for one in told]}
        self.hub.send(worker.peer, head, [one.scores.tobytes() for one in told])
        worker.version = str(last)

    def _bring_up(self, worker: Worker, origin: GenerationInputs, strategy: AnyStrategy) -> None:
        """Has a worker know what the candidates of a generation are made of."""
        if worker.version == origin.version:
            return
        wide, state = worker.peer.bandwidth, origin.state
        small = asked(strategy, state)
        known = worker.version if worker.whole and worker.version is not None else ""
        if known.isdigit() and origin.version.isdigit() and not strategy.needs_gradient:
            missing = range(int(known), int(origin.version))
            if missing and all(generation in self.records for generation in missing):
                width = self.records[missing[0]].scores.nbytes
                follow = len(missing) * (width / wide + worker.tell)
                once = worker.tell + width / wide < size_of(small) / wide
                if follow < size_of(small if not once else pack(state)[1]) / wide:
                    self._tell(worker, missing.start, missing.stop)
                    return
        latest = self.records.get(self.generation - 1)
        whole = latest is not None and self._follows(worker, strategy, state, latest)
        tree, layout, contents = packed(state)
        if not whole:
            chosen = [(about, content) for about, content in zip(layout, contents, strict=True) if about[0] in small]
            layout, contents = [about for about, _ in chosen], [content for _, content in chosen]
        head = {"op": "state", "version": origin.version, "tree": tree, "whole": whole, "layout": layout}
        head |= {"sha256": hashlib.sha256(b"".join(contents)).hexdigest()}
        self.hub.send(worker.peer, head, contents)
        worker.version, worker.whole = origin.version, whole

    # Work

    def evaluate(
        self,
        evaluator: Evaluator,
        candidates: Candidates,
        population: int,
        batch: Batch | None,
        origin: GenerationInputs | None = None,
    ) -> NDArray[np.float32]:
        if not self.open or origin is None:
            return super().evaluate(evaluator, candidates, population, batch)
        block = self.block = evaluator.plan.block

        def accept(first: int, last: int, arrays: list[bytes]) -> NDArray[np.float32]:
            scores = np.frombuffer(arrays[0], np.float32)
            if scores.size != (last - first) * block:
                raise BadInput(f"it answered with {scores.size} scores where {(last - first) * block} were asked for")
            return scores

        def again(first: int, last: int) -> NDArray[np.float32]:
            return self.score(evaluator, candidates, population, batch, slice(first, last))

        task = Task("scores", -(-population // block), {}, lambda first, last: [], accept, again, lambda scores: scores)
        found = self._done(task, origin, evaluator, evaluator.plan.dtype)
        return np.concatenate(found)[:population]

    def gradient(
        self,
        evaluator: Evaluator,
        theta: torch.Tensor,
        batch: Batch,
        wire: Wire,
        origin: GenerationInputs | None = None,
    ) -> tuple[NDArray[np.float32], torch.Tensor]:
        if not self.open or origin is None:
            return super().gradient(evaluator, theta, batch, wire)
        parts = batch.split(evaluator.plan.slices)
        width, size = packed_bytes(theta.numel(), wire, theta.dtype), theta.numel()

        def accept(first: int, last: int, arrays: list[bytes]) -> tuple[NDArray[np.float32], torch.Tensor]:
            scores = np.frombuffer(arrays[0], np.float32)
            rows = torch.frombuffer(bytearray(arrays[1]), dtype=torch.uint8).view(last - first, width)
            if scores.size != last - first:
                raise BadInput(f"it answered with {scores.size} scores where {last - first} were asked for")
            return scores, rows

        def again(first: int, last: int) -> tuple[NDArray[np.float32], torch.Tensor]:
            scores, rows = self.differentiate(evaluator, theta, parts[first:last], batch.size)
            return scores, encode_rows(rows, wire).cpu()

        def numbers(answer: tuple[NDArray[np.float32], torch.Tensor]) -> NDArray[np.float32]:
            lengths = decode_rows(answer[1], size, wire, theta.dtype).double().norm(dim=1)
            return np.stack([answer[0], lengths.float().numpy()], 1).ravel()  # piece by piece

        task = Task("gradient", len(parts), {}, lambda first, last: [], accept, again, numbers)
        found = self._done(task, origin, evaluator)
        rows = torch.cat([rows for _, rows in found]).to(theta.device)
        return mean_score(np.concatenate([scores for scores, _ in found]), parts), sum_packed(
            rows, size, wire, theta.dtype
        )

    def rear(
        self,
        work: Callable[[int], tuple[Any, Any, float]],
        population: int,
        device: torch.device,
        origin: GenerationInputs | None = None,
    ) -> tuple[list[tuple[Any, Any, float]], NDArray[np.float32]]:
        if not self.open or origin is None:
            return super().rear(work, population, device)
        strategy, state = typing.cast(Any, origin.strategy), origin.state
        kept: bool = strategy.keep_moments

        def arrays(first: int, last: int) -> list[bytes]:
            found = []
            for member in range(first, last):
                row = [state.members[member], *([strategy.moments(state, member)] if kept else [])]
                tree, layout, contents = packed(row)
                found += [json.dumps({"tree": tree, "layout": layout, "kept": kept}).encode(), *contents]
            return found

        def accept(first: int, last: int, answer: list[bytes]) -> list[tuple[Any, Any, float]]:
            found, per = [], len(answer) // (last - first)
            for place in range(last - first):
                about = json.loads(answer[per * place])
                tensors = tensors_of(about["layout"], answer[per * place + 1 : per * (place + 1)], device)
                theta, moments = tensors.pop("0"), strategy.moments(state, first + place)
                if theta.shape != state.theta.shape or theta.dtype != state.theta.dtype:
                    raise BadInput("it answered with weights of another shape")
                if kept:
                    moments, template = unpack(moments, about["tree"]["list"][1], tensors), moments
                    if shapes_of(moments) != shapes_of(template):
                        raise BadInput("it answered with moments of another shape")
                found.append((theta, moments, float(about["score"])))
            return found

        def again(first: int, last: int) -> list[tuple[Any, Any, float]]:
            return self.reared(lambda place: work(first + place), last - first, device)

        def numbers(answer: list[tuple[Any, Any, float]]) -> NDArray[np.float32]:
            return np.array([score for _, _, score in answer], np.float32)

        task = Task("rear", population, {}, arrays, accept, again, numbers, sampled=False)
        found = [one for part in self._done(task, origin, None) for one in part]
        return found, np.array([score for _, _, score in found], np.float32)

    def _done(
        self, task: Task, origin: GenerationInputs, evaluator: Evaluator | None, dtype: str = "float32"
    ) -> list[Any]:
        """Has the fleet do some work, and waits for all of it: what came of it, in order."""
        self.generation, self.task = int(origin.version.rstrip("+")), self.task + 1
        self._hear(None, 0.0)
        for worker in self.crew.values():
            if self.generation - worker.latest > FORGIVEN:  # it was too slow: perhaps it is not any more
                worker.latest, worker.rates, worker.owes = self.generation, {}, set()
        deck = Deck(task.pieces, {n: worker.rates.get(task.kind, 0.0) for n, worker in self.crew.items()})
        task.head |= {"op": "job", "kind": task.kind, "version": origin.version}
        task.head |= {"plan": dict(vars(evaluator.plan)) if evaluator is not None else None}
        task.head |= {"address": origin.address, "values": dict(origin.values), "batch": origin.batch}
        task.head |= {"judged": origin.on_dev, "generation": self.generation, "task": self.task}
        digest, known = None, None  # of the State, if they are needed
        while not deck.finished:
            for number, worker in list(self.crew.items()):
                while len(worker.owes) < AT_ONCE and (chunk := deck.take(number, time.monotonic())) is not None:
                    worker.owes.add((self.task, chunk.number))
                    self._bring_up(worker, origin, origin.strategy)
                    if origin.given is not None and worker.batch != origin.batch:
                        self.hub.send(worker.peer, *sent(origin.given, origin.batch))
                        worker.batch = origin.batch
                    check = worker.checked < 0 or self.generation - worker.checked >= CHECK_EVERY
                    head = {**task.head, "chunk": chunk.number, "first": chunk.first, "last": chunk.last}
                    self.hub.send(worker.peer, head | {"check": check}, task.arrays(chunk.first, chunk.last))
            waits = TICK if self.crew else 1.0
            for worker, message in self._hear(deck, waits):
                dealt, named, op = (message.head.get(key) for key in ("task", "chunk", "op"))
                if isinstance(dealt, int) and isinstance(named, int):
                    worker.owes.discard((dealt, named))
                chunk = deck.out.get(named) if isinstance(named, int) and dealt == self.task else None
                if chunk is None or chunk.worker != worker.peer.number:
                    self._late(worker, message.head)
                    continue  # an answer that nobody waits for any more
                self._measured(
                    worker, task.kind, chunk.size, message.head.get("seconds"), time.monotonic() - chunk.since
                )
                if op == "dropped" or not deck.wanted(chunk):
                    deck.returned(chunk.number, time.monotonic())
                    continue
                digest = digest or (theta_sha256(origin.state.theta) if "theta" in message.head else None)
                known = known or bits(origin.strategy, origin.state)
                try:
                    stale = op == "stale"
                    if stale or message.head.get("theta", digest) != digest or message.head.get("bits", known) != known:
                        worker.strikes += 1
                        if worker.strikes > STRIKES:
                            raise WrongAnswerError("again and again it has other weights than it was sent")
                        if not stale:
                            self.hub.say(f"worker {worker.name} has other weights: it is sent the right ones")
                        worker.version, worker.whole = None, False
                        deck.returned(chunk.number, time.monotonic())
                        continue
                    answer = self._believed(task, chunk, message, dtype)
                except WrongAnswerError as error:
                    deck.returned(chunk.number, time.monotonic())
                    self._turn_away(worker, deck, str(error))
                    continue
                worker.strikes = 0
                if "theta" in message.head:
                    worker.checked = self.generation
                deck.answered(chunk.number, time.monotonic())
                task.found[chunk.first] = answer
                worker.pieces += chunk.size
                worker.latest = self.generation
                deck.rates[worker.peer.number] = worker.rates.get(task.kind, 0.0)
        return [task.found[first] for first in sorted(task.found)]

    def _believed(self, task: Task, chunk: Chunk, message: Message, dtype: str) -> Any:
        """An answer, if the worker can be believed; what it finds odd, and a sample now and then, is computed here."""
        if message.head.get("op") != "answer":
            task.again(chunk.first, chunk.last)  # if it fails here, too, it is not the worker's fault
            raise WrongAnswerError(str(message.head.get("reason"))[:200])
        try:
            answer = task.accept(chunk.first, chunk.last, message.arrays)
            found = task.numbers(answer)
        except Exception as error:  # whatever it has sent
            raise WrongAnswerError(f"its answer cannot be read ({type(error).__name__}: {error})") from error
        odd = not np.isfinite(found).all()
        if odd or ("theta" in message.head and task.sampled):
            expected = task.numbers(task.again(chunk.first, chunk.last if odd else chunk.first + 1))
            if not close(found[: expected.size], expected, TOLERANCE[dtype]):
                raise WrongAnswerError("it finds other scores for the same members than the coordinator")
        return answer

    def _measured(self, worker: Worker, kind: str, pieces: int, seconds: Any, waited: float = 0.0) -> None:
        """The speed of a worker, by an answer of its: with the way to it, and what else it had to do before."""
        if isinstance(seconds, int | float) and 0 < seconds < LONGEST:
            worker.busy += seconds
            worker.answers += 1
            rate, before = pieces / max(seconds, waited, 1e-6), worker.rates.get(kind)
            worker.rates[kind] = rate if before is None else before + RECENT * (rate - before)

    def _late(self, worker: Worker, head: Head) -> None:
        """Of an answer that came too late one still learns how slow the worker is."""
        first, last, kind = head.get("first"), head.get("last"), head.get("kind")
        if isinstance(first, int) and isinstance(last, int) and 0 < last - first < 1 << 32 and kind in KINDS:
            self._measured(worker, kind, last - first, head.get("seconds"))

    def _turn_away(self, worker: Worker, deck: Deck, reason: str) -> None:
        self.crew.pop(worker.peer.number, None)
        deck.gone(worker.peer.number)
        self.hub.drop(worker.peer, reason)

    def _hear(self, deck: Deck | None, seconds: float) -> list[tuple[Worker, Message]]:
        """What has happened; waits so long for the first event."""
        answers, until = [], time.monotonic() + seconds
        while True:
            try:
                event: Event = self.hub.events.get(timeout=max(0.0, until - time.monotonic()))
            except queue.Empty:
                break
            until = 0.0  # and all that are there already
            number, about = event.peer.number, event.peer.about
            if event.kind == "joined" and about["run"] != (self.invitation or {}).get("run"):
                self.hub.loop.call_soon_threadsafe(event.peer.stream.abort)  # it comes again, for this run
            elif event.kind == "joined":
                self.vain = 0
                self.crew[number] = Worker(event.peer, about.get("version"), bool(about.get("whole")), about["tell"])
                self.hub.say(f"worker {about.get('name')} has joined: {about.get('device')}, {about.get('machine')}")
                if deck is not None:
                    deck.rates[number] = 0.0
            elif event.kind == "left" and number in self.crew:
                worker = self.crew.pop(number)
                self.past[0] += event.peer.stream.sent
                self.past[1] += event.peer.stream.received
                self.hub.say(f"worker {worker.name} has gone")
                if deck is not None:
                    deck.gone(number)
            elif event.kind == "answered" and number in self.crew:
                answers.append((self.crew[number], event.message))
        if not self.crew and time.monotonic() - self.waited > 10.0:
            self.waited = time.monotonic()
            self.hub.say(f"nobody is here to work: waiting for workers at {self.hub.host}:{self.hub.port}")
        if any(process.poll() not in (None, 2) for process in self.started):
            self._start_workers()
        if self.started and all(process.poll() == 2 for process in self.started) and not self.crew:
            raise BadInput("All workers were turned away; they have said why.")
        return answers

    def told_of_workers(self) -> list[dict[str, Any]]:
        """What people want to know of each worker."""
        crew = list(self.crew.values())
        total = sum(sum(worker.rates.values()) for worker in crew if worker.of_use(self.generation)) or 1.0
        return [
            {
                "name": worker.name,
                "device": worker.peer.about.get("device"),
                "machine": worker.peer.about.get("machine"),
                "state": worker.state(self.generation, self.timeout),
                "members_per_second": self.block * sum(worker.rates.values()),
                "share": sum(worker.rates.values()) / total if worker.of_use(self.generation) else 0.0,
                "busy_seconds": worker.busy,
                "answers": worker.answers,
                "pieces": worker.pieces,
                "bytes_sent": worker.peer.stream.received,
                "bytes_received": worker.peer.stream.sent,
            }
            for worker in crew
        ]

    def traffic(self) -> tuple[int, int]:
        streams = [worker.peer.stream for worker in self.crew.values()]
        now = (self.past[0] + sum(s.sent for s in streams), self.past[1] + sum(s.received for s in streams))
        before, self.counted = self.counted, now
        return now[0] - before[0], now[1] - before[1]


def shapes_of(value: Any) -> list[Any]:
    return [(name, array.shape, array.dtype) for name, array in pack(value)[1].items()]


def check_ready(head: Head) -> None:
    """What a worker says of itself must be what it is taken for later."""
    tell, version = head.get("tell"), head.get("version")
    known = version is None or (isinstance(version, str) and version.isascii() and version.rstrip("+").isdigit())
    if not (isinstance(tell, int | float) and 0 <= tell < 1e12 and known and isinstance(head.get("whole"), bool)):
        raise BadInput("it does not speak as workers do")


def sent(batch: Batch, number: int) -> Message:
    """A batch as a message."""
    tree, layout, contents = packed([list(batch.args), dict(batch.kwargs), batch.target])
    return Message({"op": "batch", "batch": number, "tree": tree, "layout": layout, "size": batch.size}, contents)


def size_of(arrays: Mapping[str, torch.Tensor]) -> int:
    return sum(array.nbytes for array in arrays.values())


def close(found: Any, expected: NDArray[np.float32], tolerance: float) -> bool:
    """Whether scores are the same but for what unlike machines make of them: last bits, and an example or two."""
    finite = np.isfinite(expected)
    if found.shape != expected.shape or not np.array_equal(finite, np.isfinite(found)):
        return False
    if not finite.any():
        return True
    apart = np.abs(found[finite] - expected[finite]) / max(float(np.abs(expected[finite]).max()), 1e-6)
    return bool(apart.max() <= FAR * tolerance and np.mean(apart <= tolerance) >= 0.5)
