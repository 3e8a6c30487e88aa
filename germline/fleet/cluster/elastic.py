"""The elastic fleet: a coordinator with the run, and workers on any machines that come, go, stall and die.

The coordinator keeps the State and the journal; workers only score. Blocks of members are scheduled by speed and have
the same scores wherever they are computed.
"""

import asyncio
import atexit
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from germline import noise
from germline.errors import BadInput
from germline.fleet import gradients
from germline.fleet.cluster import messages
from germline.fleet.cluster.crew import Crew
from germline.fleet.cluster.hub import Hub, RemoteWorker
from germline.fleet.cluster.jobs import TOLERANCE, Coordinator, Job, are_close
from germline.fleet.cluster.keys import create_authority
from germline.fleet.cluster.messages import ConnectionLostError, Head, Message, Stream
from germline.fleet.executor import Executor, find_device
from germline.fleet.gradients import Scores
from germline.fleet.local import LocalUpdate, Solo
from germline.fleet.protocol import Fleet, Inputs, MemberShare, Sample, TrainedMember, TrainMember, Update, scores_of
from germline.noise import Field
from germline.objective import Batch
from germline.optim.optimizers import Moments
from germline.population import Evaluator
from germline.strategies import AnyStrategy, Candidates, GenerationResult, MemberStrategy, Wire, pack, unpack
from germline.version import __version__

TIMEOUT = 15.0  # seconds after which a silent worker is given up
PAD = 1 << 16  # bytes by which the bandwidth to a worker is measured
PREPARING = 600.0  # seconds for a worker to build the run
STARTS = 3  # workers started here that may die before one of them is let in
TURNED_AWAY = 2  # the exit code of a worker that was not let in
PARENT = "GERMLINE_PARENT"  # the variable of a worker that ends with the process that holds its standard input


class Elastic(Fleet):
    """A coordinator of workers on any machines.

    Args:
        address: Where it listens, as HOST:PORT; port 0 is any free port.
        keys: A folder of certificates ('germline keys'). Without keys only this machine is listened to.
        device: The device of the coordinator, which checks samples of the workers' scores.
        workers: The number of workers to start here, for ``recipe``; others are started by 'germline worker'.
        recipe: The recipe of the workers that are started here: a name, a Python file, or module:function.
        strategy: Where they find a strategy that is not part of this package, as module:Class.
        timeout: Seconds after which a silent worker is given up.

    >>> fleet = Elastic()
    >>> fleet.hub.host
    '127.0.0.1'
    >>> fleet.close()
    """

    group: ClassVar[Solo] = Solo()

    def __init__(
        self,
        address: str = "127.0.0.1:0",
        *,
        keys: str | Path | None = None,
        device: str = "auto",
        workers: int = 0,
        recipe: str | None = None,
        strategy: str | None = None,
        timeout: float = TIMEOUT,
    ) -> None:
        if workers and recipe is None:
            raise BadInput("Workers here need to know the recipe: give recipe=, or start them with 'germline worker'.")
        host, port = messages.parse_address(address)
        self.device, self.timeout, self.executor = device, timeout, Executor()
        self.private_keys: tempfile.TemporaryDirectory[str] | None = None
        if workers and keys is None:  # otherwise every user of this machine could join
            self.private_keys = tempfile.TemporaryDirectory(prefix="germline-keys-")
            keys = Path(self.private_keys.name, "keys")
            create_authority(keys)
        self.hub = Hub(host, port, Path(keys) if keys is not None else None, self._greet, timeout)
        self.crew = Crew(self.hub)
        self.coordinator = Coordinator(self.hub, self.crew, self._check_processes)
        self.invitation: dict[str, Any] | None = None
        self.is_open = False  # whether workers score; before that, this process does
        self.block = 1  # members of a piece
        self.counted = (0, 0)  # bytes sent and received at the last count
        self.failed_starts = 0  # workers started here that have died since one was let in
        self.environment = {**os.environ, PARENT: "stdin"}
        self.environment.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // max(1, workers))))
        options = {"--recipe": recipe, "--device": device, "--keys": keys, "--strategy": strategy}
        self.command = [sys.executable, "-m", "germline", "worker", self.hub.address]
        self.command += [str(word) for option in options.items() if option[1] is not None for word in option]
        self.processes = [self._start_process() for _ in range(workers)]
        atexit.register(self.close)

    @property
    def is_idle(self) -> bool:
        return self.is_open and not self.crew.workers

    def find_device(self, default: torch.device | None = None) -> torch.device:
        return find_device(self.device, default)

    # Workers on this machine

    def _start_process(self) -> "subprocess.Popen[bytes]":
        return subprocess.Popen(self.command, env=self.environment, stdin=subprocess.PIPE, start_new_session=True)

    def _check_processes(self) -> None:
        """Start workers of this machine again that have died; raise an error if all were turned away."""
        if self.crew.workers:
            self.failed_starts = 0
        for place, process in enumerate(self.processes):
            if process.poll() in (None, TURNED_AWAY):  # which it would be again
                continue
            process.communicate()
            self.failed_starts += 1
            if self.failed_starts > STARTS:
                raise BadInput(f"Workers started here end before they can work (exit code {process.returncode}).")
            self.processes[place] = self._start_process()
        codes = {process.poll() for process in self.processes}
        if codes == {TURNED_AWAY} and not self.crew.workers:
            raise BadInput("All workers were turned away; they have said why.")

    def close(self, *, ended: bool = False) -> None:
        """Let all workers go: to wait for the run to go on or, where it has ended or started them, for good."""
        atexit.unregister(self.close)
        self.hub.close({"op": "end"} if ended or self.processes else None)
        for process in self.processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(3.0)
            process.kill()
            process.communicate()
        self.processes = []
        if self.private_keys is not None:
            self.private_keys.cleanup()

    # Admission

    def start_run(self) -> None:
        self.is_open, self.invitation, self.coordinator.run = False, None, None
        self.crew.forget_run()

    def admit(self, header: Mapping[str, Any], sample: Sample, batch: Batch | None = None) -> None:
        self.hub.say(f"waiting for workers at {self.hub.address}")
        run = hashlib.sha256(json.dumps(header, sort_keys=True).encode()).hexdigest()[:16]
        self.coordinator.run = run
        first = messages.encode_batch(batch, 0) if batch is not None else None
        self.invitation = {"run": run, "header": dict(header), "sample": sample(), "batch": first}

    async def _greet(self, stream: Stream) -> RemoteWorker:
        """Let a worker in that proves to do the same work."""
        about = (await asyncio.wait_for(stream.read(), self.timeout)).head
        texts = [about.get(name) for name in ("name", "device", "machine")]
        if about.get("op") != "join" or not all(isinstance(text, str) and len(text) < 200 for text in texts):
            raise BadInput("it does not speak as workers do")
        try:
            return await self._admit_worker(stream, about)
        except (BadInput, TimeoutError) as error:
            with suppress(ConnectionLostError, TimeoutError):
                await asyncio.wait_for(stream.write({"op": "refused", "reason": str(error)}), 2.0)
            raise

    async def _admit_worker(self, stream: Stream, about: Head) -> RemoteWorker:
        for what, version in (("germline", __version__), ("noise", noise.VERSION)):
            if about.get(what) != version:
                raise BadInput(f"it has version {about.get(what)} of {what}, and the coordinator {version}")
        heartbeats = asyncio.ensure_future(stream.send_heartbeats(self.timeout / messages.HEARTBEATS))
        try:
            started = time.monotonic()
            await stream.write({"op": "ping"})
            await self._expect(stream, "pong")
            round_trip, started = time.monotonic() - started, time.monotonic()
            await stream.write({"op": "ping"}, [os.urandom(PAD)])
            await self._expect(stream, "pong")
            bandwidth = PAD / max(1e-6, time.monotonic() - started - round_trip)
            while self.invitation is None:
                await asyncio.sleep(0.1)
            invitation = self.invitation
            check_device(about, invitation["header"])
            if invitation["batch"] is not None:
                await stream.write(*invitation["batch"])
            about_run = {"run": invitation["run"], "header": invitation["header"], "timeout": self.timeout}
            await stream.write({"op": "welcome", **about_run})
            ready = await asyncio.wait_for(self._expect(stream, "ready"), PREPARING)
        finally:
            heartbeats.cancel()
        if "differs" in ready.head:
            raise BadInput(str(ready.head["differs"])[:500])
        check_ready(ready.head)
        scores = np.frombuffer(b"".join(ready.arrays), np.float32)
        if not are_close(scores, invitation["sample"], TOLERANCE[invitation["header"]["plan"]["dtype"]]):
            raise BadInput("it computes other scores for the same members than the coordinator")
        about, head = about | {"run": invitation["run"]}, ready.head
        return RemoteWorker(stream, about, bandwidth, head.get("version"), head["whole"], head["tell"])

    async def _expect(self, stream: Stream, op: str) -> Message:
        """Return the next message that is not a sign of life."""
        while True:
            message = await asyncio.wait_for(stream.read(), self.timeout)
            if message.head.get("op") == op:
                return message
            if message.head.get("op") != "alive":
                raise BadInput(f"it said {str(message.head.get('op'))[:20]!r} where {op!r} was expected")

    # Work

    def score(
        self, evaluator: Evaluator, candidates: Candidates, population: int, batch: Batch | None, inputs: Inputs = None
    ) -> Scores:
        if not self.is_open or inputs is None:
            return self.executor.score_blocks(evaluator, candidates, population, batch)[:population]
        block = self.block = evaluator.plan.block

        def decode(first: int, last: int, arrays: Sequence[bytes]) -> Scores:
            return decode_scores(arrays[0], (last - first) * block)

        def compute(first: int, last: int) -> Scores:
            return self.executor.score_blocks(evaluator, candidates, population, batch, slice(first, last))

        pieces = -(-population // block)
        job = Job("scores", pieces, inputs, decode, compute, lambda scores: scores, evaluator.plan)
        return np.concatenate(self.coordinator.run_job(job))[:population]

    def gradient(
        self, evaluator: Evaluator, theta: Tensor, batch: Batch, wire: Wire, inputs: Inputs = None
    ) -> tuple[Scores, Tensor]:
        if not self.is_open or inputs is None:
            return self.executor.gradient(evaluator, theta, batch, wire)
        parts, size = batch.split(evaluator.plan.slices), theta.numel()
        width = gradients.count_encoded_bytes(size, wire, theta.dtype)

        def decode(first: int, last: int, arrays: Sequence[bytes]) -> tuple[Scores, Tensor]:
            rows = torch.frombuffer(bytearray(arrays[1]), dtype=torch.uint8).view(last - first, width)
            return decode_scores(arrays[0], last - first), rows

        def compute(first: int, last: int) -> tuple[Scores, Tensor]:
            scores, rows = self.executor.gradients(evaluator, theta, parts[first:last], batch.size)
            return scores, gradients.encode_rows(rows, wire).cpu()

        def numbers(answer: tuple[Scores, Tensor]) -> Scores:
            lengths = gradients.decode_rows(answer[1], size, wire, theta.dtype).double().norm(dim=1)
            return np.stack([answer[0], lengths.float().numpy()], 1).ravel()  # piece by piece

        answers = self.coordinator.run_job(Job("gradient", len(parts), inputs, decode, compute, numbers))
        rows = torch.cat([rows for _, rows in answers]).to(theta.device)
        scores = np.concatenate([scores for scores, _ in answers])
        return gradients.average_scores(scores, parts), gradients.sum_encoded(rows, size, wire, theta.dtype)

    def share_update(self, strategy: AnyStrategy, state: Any, field: Field, *, maximize: bool) -> "RecordedUpdate":
        self.is_open = True
        return RecordedUpdate(LocalUpdate(strategy, field, maximize), self.coordinator)

    def share_members(self, strategy: MemberStrategy[Any], state: Any, field: Field, *, maximize: bool) -> MemberShare:
        update = self.share_update(strategy, state, field, maximize=maximize)
        return RemoteMembers(update, range(strategy.population), strategy, self.coordinator, self.executor)

    def describe_workers(self) -> list[dict[str, Any]]:
        """Return what people want to know of each worker."""
        workers, generation = list(self.crew.workers.values()), self.coordinator.generation
        total = sum(worker.rate for worker in workers if worker.is_useful(generation)) or 1.0
        return [
            {
                "name": worker.name,
                "device": worker.about.get("device"),
                "machine": worker.about.get("machine"),
                "state": worker.describe(generation, self.timeout),
                "members_per_second": self.block * worker.rate,
                "share": worker.rate / total if worker.is_useful(generation) else 0.0,
                "busy_seconds": worker.busy_seconds,
                "answers": worker.answers,
                "pieces": worker.pieces,
                "bytes_sent": worker.stream.received,
                "bytes_received": worker.stream.sent,
            }
            for worker in workers
        ]

    def count_bytes(self) -> tuple[int, int]:
        streams, past = [worker.stream for worker in self.crew.workers.values()], self.coordinator.past_bytes
        before = self.counted
        now = self.counted = (past[0] + sum(s.sent for s in streams), past[1] + sum(s.received for s in streams))
        return now[0] - before[0], now[1] - before[1]


@dataclass(frozen=True)
class RecordedUpdate(Update):
    """An update by the coordinator, which workers that follow by records make for themselves meanwhile."""

    local: LocalUpdate
    coordinator: Coordinator

    def advance(self, state: Any, result: GenerationResult) -> Any:
        strategy, coordinator = self.local.strategy, self.coordinator
        if strategy.kind == "evolve":
            coordinator.crew.record(strategy, state, result, coordinator.job_number)
        coordinator.generation = result.generation + 1
        return self.local.advance(state, result)


@dataclass(frozen=True)
class RemoteMembers(MemberShare):
    """Members that train on workers: their weights and moments are sent there and back."""

    update: RecordedUpdate
    members: range
    strategy: MemberStrategy[Any]
    coordinator: Coordinator
    executor: Executor

    def train(self, work: TrainMember, device: torch.device, inputs: Inputs) -> tuple[list[TrainedMember], Scores]:
        assert inputs is not None
        strategy, state, sends_moments = self.strategy, inputs.state, bool(self.strategy.row_arrays)

        def members(first: int, last: int) -> list[TrainedMember]:
            rows = range(first, last)
            return [TrainedMember(state.members[row], strategy.moments(state, row), 0.0) for row in rows]

        def arrays(first: int, last: int) -> list[bytes]:
            return encode_members(members(first, last), with_moments=sends_moments)

        def decode(first: int, last: int, answer: Sequence[bytes]) -> list[TrainedMember]:
            before = members(first, last)
            trained = decode_members(answer, [member.moments for member in before], sends_moments, device)
            if [shapes_of(member) for member in trained] != [shapes_of(member) for member in before]:
                raise BadInput("it answered with weights or moments of another shape")
            return trained

        def compute(first: int, last: int) -> list[TrainedMember]:
            return self.executor.run(lambda place: work(first + place), last - first, device)

        pieces = len(self.members)
        job = Job("train", pieces, inputs, decode, compute, scores_of, arrays=arrays, is_sampled=False)
        trained = [member for part in self.coordinator.run_job(job) for member in part]
        return trained, scores_of(trained)


def decode_scores(content: bytes, count: int) -> Scores:
    """Return the scores of an answer, or raise an error if there are more or fewer than were asked for."""
    scores = np.frombuffer(content, np.float32)
    if scores.size != count:
        raise BadInput(f"it answered with {scores.size} scores where {count} were asked for")
    return scores


def encode_members(members: list[TrainedMember], *, with_moments: bool) -> list[bytes]:
    """Return members as arrays of a message."""
    rows = [[theta, moments if with_moments else None, score] for theta, moments, score in members]
    tree, layout, contents = messages.encode_state(rows)
    return [json.dumps({"tree": tree, "layout": layout}).encode(), *contents]


def decode_members(
    arrays: Sequence[bytes], templates: list[Moments], has_moments: bool, device: torch.device
) -> list[TrainedMember]:
    """Return the members of a message; where their moments are not sent, they have those of the templates."""
    about = json.loads(arrays[0])
    tensors, members = messages.decode_tensors(about["layout"], arrays[1:], device), []
    for item, template in zip(about["tree"]["list"], templates, strict=True):
        theta, moments, score = item["list"]
        own = unpack(template, moments, tensors) if has_moments else template
        members.append(TrainedMember(tensors[theta["tensor"]], own, float(score)))
    return members


def shapes_of(value: Any) -> list[Any]:
    """Return the names, shapes and types of the arrays of a value."""
    return [(name, array.shape, array.dtype) for name, array in pack(value)[1].items()]


def check_device(about: Head, header: Mapping[str, Any]) -> None:
    """Raise an error if a worker has another kind of device, and the strategy has other last bits there."""
    kinds = {header["device"].split(":")[0], about["device"].split(":")[0]}
    if len(kinds) > 1 and not header["is_portable"]:
        message = f"its device is {about['device']} and the coordinator's {header['device']}"
        raise BadInput(f"{message}, and torch optimizers differ between them: use adam, sgd or momentum")


def check_ready(head: Head) -> None:
    """Raise an error if what a worker says of its State is not what the coordinator relies on later."""
    tell, version = head.get("tell"), head.get("version")
    is_version = version is None or (isinstance(version, str) and version.isascii() and version.rstrip("+").isdigit())
    if not (isinstance(tell, int | float) and 0 <= tell < 1e12 and is_version and isinstance(head.get("whole"), bool)):
        raise BadInput("it does not speak as workers do")
