"""The process of a worker: it connects to a coordinator, again and again if it must, and does what it is asked for."""

import asyncio
import os
import platform
import random
import signal
import socket
import ssl
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch

from germline import noise
from germline.errors import BadInput
from germline.fleet.cluster import messages
from germline.fleet.cluster.elastic import PARENT
from germline.fleet.cluster.hub import print_status
from germline.fleet.cluster.messages import ConnectionLostError, Head, Message, Stream, answer_to
from germline.fleet.local import Local
from germline.machine import processor_name
from germline.version import __version__

PAUSES = (0.5, 8.0)  # seconds between attempts to connect: the first, and the longest
SILENCE = 15.0  # seconds after which a silent coordinator is given up
OTHER_AUTHORITY = (
    "The coordinator at {} and the keys {} are not of one authority: use a folder made by 'germline keys add'."
)


class RefusedError(BadInput):
    """The coordinator has turned this worker away."""


class FollowsRun(Protocol):
    """A session that follows a run in a worker process: ``germline.engine.follower.Follower``."""

    fleet: Local
    version: str | None
    newest: int

    def join(self, run: str, header: dict[str, Any]) -> Message: ...

    def handle(self, message: Message) -> Message | None: ...


@dataclass
class WorkerProcess:
    """Connects to a coordinator, reads its messages and answers them.

    Attributes:
        patience: Seconds after which a silent coordinator is given up.
        was_greeted: Whether a coordinator has ever said anything.
    """

    address: str
    follower: FollowsRun
    name: str
    keys: Path | None = None
    say: Callable[[str], None] = print_status
    patience: float = SILENCE
    was_greeted: bool = False
    thread: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "germline-worker"))

    async def run(self) -> None:
        """Work until the run has ended, or the coordinator turns this worker away."""
        comm = messages.load_transport()
        host, port = messages.parse_address(self.address)
        address, options = messages.address_for(host, port, self.keys, server=False)
        pause = PAUSES[0]
        while True:
            try:
                connection = comm.connect(address, timeout=10, deserialize=False, **options)
                stream = Stream(await asyncio.wait_for(connection, 20), self.patience)
                if await self.serve(stream):
                    self.say("the run has ended")
                    return
                if self.was_greeted:
                    self.say("the coordinator is gone; trying again")
                    pause = PAUSES[0]
                elif pause == PAUSES[0]:
                    keys = "ask for keys (--keys)" if self.keys is None else f"not know the keys {self.keys}"
                    self.say(f"{self.address} ends the connection: it may {keys}; trying again")
            except (OSError, TimeoutError, ConnectionLostError) as error:
                if any(isinstance(cause, ssl.SSLCertVerificationError) for cause in list_causes(error)):
                    raise RefusedError(OTHER_AUTHORITY.format(self.address, self.keys)) from error
                if pause == PAUSES[0]:
                    self.say(f"there is no coordinator at {self.address} ({first_line(error)}); trying again")
            await asyncio.sleep(pause * random.uniform(0.7, 1.3))
            pause = min(PAUSES[1], 2 * pause)

    async def serve(self, stream: Stream) -> bool:
        """Serve one connection; return whether the run has ended."""
        work: asyncio.Queue[Message] = asyncio.Queue()
        async with stream.keep_open(1.0, self._work(stream, work)):
            await stream.write(self._introduce())
            while True:
                head, arrays = await stream.read()
                op, self.was_greeted = head.get("op"), True
                if op == "ping":
                    await stream.write({"op": "pong"})
                elif op == "refused":
                    raise RefusedError(f"The coordinator has turned this worker away: {head.get('reason')}.")
                elif op == "end":
                    return True
                elif op != "alive":
                    stream.patience = self.patience = max(self.patience, head.get("timeout", 0.0))
                    self.follower.newest = max(self.follower.newest, head.get("generation", 0))
                    work.put_nowait(Message(head, arrays))
        return False

    async def _work(self, stream: Stream, work: "asyncio.Queue[Message]") -> None:
        """Do what the coordinator asks for, one message after the other, in a second thread."""
        loop = asyncio.get_running_loop()
        with suppress(ConnectionLostError):
            while True:
                message = await work.get()
                answer = await loop.run_in_executor(self.thread, self._answer, message)
                if answer is not None:
                    await stream.write(*answer)

    def _answer(self, message: Message) -> Message | None:
        head = message.head
        try:
            return self._join(head) if head["op"] == "welcome" else self.follower.handle(message)
        except Exception as error:
            self.say(f"a job failed: {type(error).__name__}: {error}")
            if head.get("op") != "job":
                self.follower.version = None
                return None
            return answer_to(head, "failed", reason=f"{type(error).__name__}: {error}")

    def _join(self, head: Head) -> Message:
        try:
            ready = self.follower.join(head["run"], head["header"])
        except Exception as error:
            reason = str(error) if isinstance(error, BadInput) else f"{type(error).__name__}: {error}"
            return Message({"op": "ready", "differs": reason.rstrip(".")})
        recipe, strategy = head["header"]["recipe"] or "a run started in Python", head["header"]["strategy"]
        self.say(f"working for {self.address}: {recipe} by {strategy}")
        return ready

    def _introduce(self) -> Head:
        device = self.follower.fleet.find_device()
        machine = torch.cuda.get_device_name(device) if device.type == "cuda" else processor_name()
        about = {"op": "join", "germline": __version__, "noise": noise.VERSION, "name": self.name}
        return about | {"device": str(device), "machine": f"{platform.system()} {platform.machine()}, {machine}"}


def run_worker(address: str, follower: FollowsRun, *, name: str | None = None, keys: Path | None = None) -> None:
    """Work for a coordinator until its run has ended."""
    default = keys.resolve().name if keys is not None else socket.gethostname()
    worker = WorkerProcess(address, follower, name or f"{default}-{os.getpid()}", keys)

    async def main() -> None:
        task = asyncio.ensure_future(worker.run())
        if PARENT in os.environ:
            threading.Thread(target=end_with_parent, args=(asyncio.get_running_loop(), task), daemon=True).start()
        if sys.platform != "win32":
            asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
        await task

    with suppress(asyncio.CancelledError):
        asyncio.run(main())


def end_with_parent(loop: asyncio.AbstractEventLoop, task: "asyncio.Future[None]") -> None:
    """End a worker whose coordinator started it and has died: then the worker's standard input ends."""
    with suppress(OSError, RuntimeError):
        while os.read(0, 1):  # not by sys.stdin, which a thread must not hold when the process ends
            pass
        loop.call_soon_threadsafe(task.cancel)


def list_causes(error: BaseException | None) -> list[BaseException]:
    """Return an error, what it was raised from, and so on."""
    causes: list[BaseException] = []
    while error is not None and error not in causes:
        causes.append(error)
        error = error.__cause__ or error.__context__
    return causes


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message."""
    return (str(error).splitlines() or [type(error).__name__])[0][:160]
