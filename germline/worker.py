"""A worker of an elastic fleet: it follows a run from afar, and scores what it is given of each generation.

It connects to the coordinator, again and again if it must, proves that it is about the same work, and then does what it
is told. Its State comes from records, which it folds as a replay does, or is sent to it.
"""

import asyncio
import hashlib
import json
import os
import platform
import random
import signal
import socket
import ssl
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from germline import noise, trainer
from germline.errors import BadInput
from germline.fleet import Local
from germline.fleet.hub import (
    PARENT,
    ConnectionLostError,
    Head,
    Message,
    Stream,
    address_of,
    bits,
    packed,
    plain,
    secured,
    tensors_of,
    transport,
)
from germline.fleet.wire import encode_rows
from germline.genome import theta_sha256
from germline.header import processor
from germline.objective import Batch
from germline.population import Plan
from germline.recipes import RECIPES
from germline.recipes.recipe import Recipe
from germline.run import Run
from germline.strategies import GenerationResult, unpack
from germline.version import __version__

PAUSES = (0.5, 8.0)  # seconds between attempts to connect: the first, and the longest
ECHOED = ("task", "chunk", "version", "kind", "first", "last")  # of a job, in its answer
SILENCE = 15.0  # seconds after which a silent coordinator is given up

Maker = Callable[[dict[str, str], int], Recipe]  # of a recipe's settings and a seed


NOT_OURS = "The coordinator at {} and the keys {} are not of one authority: take a folder made by 'germline keys add'."


class RefusedError(BadInput):
    """The coordinator does not want this worker."""


@dataclass
class Follower:
    """The run as a worker knows it."""

    make: Maker
    fleet: Local
    recipe: str | None = None  # its name
    training: Run | None = None
    run: str | None = None  # which
    version: str | None = None  # of its State
    whole: bool = False  # whether that is all of it, and not only what candidates are made of
    given: tuple[int, Batch] | None = None  # the batch that was sent last, where they are, and its number
    newest: int = 0  # generation of which anything was heard; work for older ones is not wanted any more

    @property
    def followed(self) -> Run:
        if self.training is None:
            raise BadInput("this worker has not been told which run it is")
        return self.training

    def begin(self, run: str, header: dict[str, Any]) -> tuple[Head, list[bytes]]:
        """Builds the run, and proves that it is the same."""
        names = {self.recipe, header["recipe"]}
        if len(names) > 1 and names <= set(RECIPES):  # a file may have another path
            raise BadInput(f"the coordinator trains {header['recipe']}, and this worker was given {self.recipe}")
        if self.run != run:
            recipe = self.make(header["recipe_settings"], header["seed"])
            self.training = trainer.rebuilt(recipe, header, self.fleet, Path("the coordinator's run"), None)
            self.run, self.version, self.whole = run, "0", True
            self.given = None if header["data"] else self.given
        self.newest = 0
        core = self.followed.core
        if theta_sha256(core.genome.read(core.module, core.device)) != header["initial_theta_sha256"]:  # type: ignore[arg-type]
            raise BadInput("its initial weights are not those of the run: give both the same recipe and versions")
        core.adopt(Plan(**header["evaluation"]))
        sample = core.sample(self.batch(0))
        known = {"version": self.version, "whole": self.whole}
        return {"op": "ready", "tell": self.seconds_of_a_record(), **known}, [sample.tobytes()]

    def batch(self, number: int) -> Batch | None:
        """Of a generation: the one that was sent, or of the run's own data."""
        if self.given is not None:
            return self.given[1] if self.given[0] == number else None
        return self.followed.batch(number)

    def take(self, head: Head, arrays: list[bytes]) -> None:
        tensors = tensors_of(head["layout"], arrays, self.fleet.place())
        found: Any = unpack([], head["tree"], tensors)
        args, kwargs, target = found
        self.given = head["batch"], Batch(tuple(args), kwargs, target, head["size"])

    def seconds_of_a_record(self) -> float:
        """How long it takes to fold one, by trying it on scores that mean nothing."""
        core = self.followed.core
        if core.strategy.needs_gradient:
            return 1e9  # it cannot be done
        scores, seconds = np.arange(core.strategy.population, dtype=np.float32), 0.0
        told = GenerationResult(0, scores, core.strategy.values(core.state, 0))
        for _ in range(2):  # the first time kernels are compiled
            began = time.perf_counter()
            state = core.strategy.tell(core.state, told, core.noise, maximize=core.objective.maximize)
            state.theta.cpu()
            seconds = time.perf_counter() - began
        return seconds

    def do(self, message: Message) -> tuple[Head, list[bytes]] | None:
        """What a message asks for; the answer, if it wants one."""
        head, arrays = message
        if head["op"] == "tell":
            self.tell(head["records"], arrays)
        elif head["op"] == "state":
            self.load(head, arrays)
        elif head["op"] == "batch":
            self.take(head, arrays)
        elif head["op"] == "job":
            return self.job(head, arrays)
        return None

    def tell(self, records: list[Any], arrays: list[bytes]) -> None:
        core = self.followed.core
        for (generation, values), scores in zip(records, arrays, strict=True):
            if self.version != str(generation):
                self.version = None  # it has missed something: whoever asks for work hears of it
                return
            core.tell(GenerationResult(generation, np.frombuffer(scores, np.float32), values))
            self.version = str(generation + 1)

    def load(self, head: Head, arrays: list[bytes]) -> None:
        core, self.version = self.followed.core, None
        if hashlib.sha256(b"".join(arrays)).hexdigest() != head["sha256"]:
            return
        tensors = tensors_of(head["layout"], arrays, core.device)
        if head["whole"]:
            core.state = unpack(core.state, head["tree"], tensors)
        else:  # only what candidates are made of: the rest stays as it was, and is not read
            tops, numbers = {name.split(".")[0] for name in tensors}, plain(head["tree"])
            items = [item for item in head["tree"]["items"] if item[0] in tops or item in numbers]
            found = {name: unpack(getattr(core.state, name), part, tensors) for name, part in items}
            core.state = replace(core.state, **found)
        self.version, self.whole = head["version"], head["whole"]

    def job(self, head: Head, arrays: list[bytes]) -> tuple[Head, list[bytes]]:
        about = {key: head[key] for key in ECHOED}
        if head["generation"] < self.newest:
            return about | {"op": "dropped"}, []
        if head["version"] != self.version:
            return about | {"op": "stale"}, []
        training = self.followed
        core = training.core
        if head["plan"] is not None:
            core.adopt(Plan(**head["plan"]))
        began = time.perf_counter()
        about["bits"] = bits(core.strategy, core.state)
        answer = {"scores": self.score, "gradient": self.differentiate, "rear": self.rear}[head["kind"]](head, arrays)
        about |= {"op": "answer", "seconds": time.perf_counter() - began}
        if head["check"]:
            about["theta"] = theta_sha256(core.state.theta)
        return about, answer

    def score(self, head: Head, arrays: list[bytes]) -> list[bytes]:
        """Blocks of members of a generation."""
        training = self.followed
        core, share = training.core, slice(head["first"], head["last"])
        batch = training.on_dev(head["batch"]) if head["judged"] else self.batch(head["batch"])
        candidates = core.strategy.ask(core.state, core.noise, head["address"], head["values"])
        scores = self.fleet.score(core.prepare(batch), candidates, core.strategy.population, batch, share)
        return [scores.astype(np.float32).tobytes()]

    def differentiate(self, head: Head, arrays: list[bytes]) -> list[bytes]:
        """The gradients of some slices of a batch."""
        training = self.followed
        core, batch = training.core, self.batch(head["batch"])
        assert batch is not None
        core.prepare(batch)
        plain = core.plain()
        parts = batch.split(plain.plan.slices)[head["first"] : head["last"]]
        scores, rows = self.fleet.differentiate(plain, core.state.theta, parts, batch.size)
        return [scores.tobytes(), encode_rows(rows, core.differentiating.wire).cpu().numpy().tobytes()]

    def rear(self, head: Head, arrays: list[bytes]) -> list[bytes]:
        """Members that learn, each from its own lessons: its weights and moments before and after."""
        training, strategy = self.followed, self.followed.core.strategy
        core, found = training.core, []
        core.prepare(training.batch(head["batch"]))
        learner = core.learner(training.lessons(head["batch"]), training.exam, head["values"])

        def one(place: int) -> tuple[Any, Any, float]:
            about = json.loads(arrays[per * place])
            tensors = tensors_of(about["layout"], arrays[per * place + 1 : per * (place + 1)], core.device)
            theta, template = tensors.pop("0"), strategy.moments(core.state, 0)  # type: ignore[attr-defined]
            moments = unpack(template, about["tree"]["list"][1], tensors) if about["kept"] else template
            return learner(head["first"] + place, theta, moments)

        per = len(arrays) // (head["last"] - head["first"])
        for theta, moments, score in self.fleet.reared(one, head["last"] - head["first"], core.device):
            kept = strategy.keep_moments  # type: ignore[attr-defined]
            tree, layout, contents = packed([theta, moments] if kept else [theta])
            about = {"tree": tree, "layout": layout, "score": score}
            found += [json.dumps(about).encode(), *contents]
        return found


@dataclass
class Worker:
    """The process around a follower: connects, listens, works, answers."""

    address: str
    follower: Follower
    name: str
    keys: Path | None = None
    say: Callable[[str], None] = field(default=lambda text: print(text, file=sys.stderr, flush=True))
    patience: float = SILENCE  # seconds
    heard: bool = False  # whether the coordinator has ever said anything
    thread: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "germline-worker"))

    async def run(self) -> None:
        """Until the run has ended, or the coordinator does not want this worker."""
        comm = transport()
        host, port = address_of(self.address)
        scheme, arguments = secured(self.keys, server=False)
        where = f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"
        pause = PAUSES[0]
        while True:
            try:
                opened = comm.connect(where, timeout=10, deserialize=False, **arguments)
                stream = Stream(await asyncio.wait_for(opened, 20))
                if await self.serve(stream):
                    self.say("the run has ended")
                    return
                if self.heard:
                    self.say("the coordinator is gone; trying again")
                    pause = PAUSES[0]
                elif pause == PAUSES[0]:
                    self.say(f"{self.address} ends the connection: {self.doubt}; trying again")
            except (OSError, TimeoutError, ConnectionLostError) as error:
                if any(isinstance(cause, ssl.SSLCertVerificationError) for cause in causes(error)):
                    raise RefusedError(NOT_OURS.format(self.address, self.keys)) from error
                if pause == PAUSES[0]:
                    self.say(f"no coordinator at {self.address} ({first_line(error)}); trying again")
            await asyncio.sleep(pause * random.uniform(0.7, 1.3))
            pause = min(PAUSES[1], 2 * pause)

    async def serve(self, stream: Stream) -> bool:
        """One connection; whether the run has ended."""
        tasks: list[asyncio.Task[Any]] = []
        work: asyncio.Queue[Message] = asyncio.Queue()
        try:
            await stream.write(self.introduction())
            tasks = [
                asyncio.ensure_future(stream.beat(1.0)),
                asyncio.ensure_future(self.work(stream, work)),
                asyncio.ensure_future(self.watch(stream)),
            ]
            while True:
                head, arrays = await stream.read()
                op, self.heard = head.get("op"), True
                if op == "ping":
                    await stream.write({"op": "pong"})
                elif op == "refused":
                    raise RefusedError(f"The coordinator has turned this worker away: {head.get('reason')}.")
                elif op == "end":
                    return True
                elif op != "alive":
                    self.patience = max(SILENCE, head.get("timeout", 0.0)) if op == "welcome" else self.patience
                    self.follower.newest = max(self.follower.newest, head.get("generation", 0))
                    work.put_nowait(Message(head, arrays))
        except ConnectionLostError:
            return False
        finally:
            for task in tasks:
                task.cancel()
            stream.abort()

    @property
    def doubt(self) -> str:
        """Why a coordinator might not speak to this worker."""
        wants = "perhaps it wants keys (--keys)"
        return wants if self.keys is None else f"perhaps it does not know the keys {self.keys}"

    async def work(self, stream: Stream, work: "asyncio.Queue[Message]") -> None:
        """What the coordinator asks for, one after the other, beside what is heard and said meanwhile."""
        loop = asyncio.get_running_loop()
        with suppress(ConnectionLostError):
            while True:
                message = await work.get()
                answer = await loop.run_in_executor(self.thread, self.answer, message)
                if answer is not None:
                    await stream.write(*answer)

    def answer(self, message: Message) -> tuple[Head, list[bytes]] | None:
        head = message.head
        try:
            if head["op"] == "welcome":
                try:
                    ready = self.follower.begin(head["run"], head["header"])
                    what = f"{head['header']['recipe'] or 'a run begun in Python'} by {head['header']['strategy']}"
                    self.say(f"working for {self.address}: {what}")
                    return ready
                except Exception as error:
                    said = str(error) if isinstance(error, BadInput) else f"{type(error).__name__}: {error}"
                    return {"op": "ready", "differs": said.rstrip(".")}, []
            return self.follower.do(message)
        except Exception as error:
            self.say(f"a job failed: {type(error).__name__}: {error}")
            if head.get("op") != "job":
                self.follower.version = None
                return None
            about = {key: head[key] for key in ECHOED}
            return about | {"op": "failed", "reason": f"{type(error).__name__}: {error}"}, []

    async def watch(self, stream: Stream) -> None:
        """Gives up a coordinator of which nothing is heard."""
        while stream.silent < self.patience:
            await asyncio.sleep(1.0)
        stream.abort()

    def introduction(self) -> Head:
        device = self.follower.fleet.place()
        where = torch.cuda.get_device_name(device) if device.type == "cuda" else processor()
        about = {"op": "join", "germline": __version__, "noise": noise.VERSION, "name": self.name}
        return about | {"device": str(device), "machine": f"{platform.system()} {platform.machine()}, {where}"}


def run(address: str, follower: Follower, *, name: str | None = None, keys: Path | None = None) -> None:
    """Works for a coordinator until its run has ended."""
    usual = keys.resolve().name if keys is not None else socket.gethostname()
    worker = Worker(address, follower, name or f"{usual}-{os.getpid()}", keys)

    async def main() -> None:
        task = asyncio.ensure_future(worker.run())
        if PARENT in os.environ:
            threading.Thread(target=end_with, args=(asyncio.get_running_loop(), task), daemon=True).start()
        if sys.platform != "win32":
            asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
        await task

    with suppress(asyncio.CancelledError):
        asyncio.run(main())


def end_with(loop: asyncio.AbstractEventLoop, task: "asyncio.Future[None]") -> None:
    """Ends a worker whose coordinator started it, and is gone without a word: then its standard input ends."""
    with suppress(OSError, RuntimeError):
        while os.read(0, 1):  # not by sys.stdin, which a thread must not hold when the process ends
            pass
        loop.call_soon_threadsafe(task.cancel)


def causes(error: BaseException | None) -> list[BaseException]:
    """An error, what it was raised from, and so on."""
    found: list[BaseException] = []
    while error is not None and error not in found:
        found.append(error)
        error = error.__cause__ or error.__context__
    return found


def first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:160]
