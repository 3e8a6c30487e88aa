"""The connections of a coordinator: it listens for workers, greets each, and reads and writes from then on.

All connections live in one thread; the program learns of them by a queue of events.
"""

import asyncio
import itertools
import queue
import sys
import threading
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from germline.errors import BadInput
from germline.fleet.cluster import messages
from germline.fleet.cluster.messages import HEARTBEATS, ConnectionLostError, Head, Message, Stream

REFUSALS = 100  # that are remembered
RECENT = 0.3  # weight of the latest measurement of a worker's speed
LONGEST = 1e6  # seconds that any work may take
LOOPBACK = ("127.0.0.1", "localhost", "::1")


@dataclass(eq=False)
class RemoteWorker:
    """A worker that has been let in, as the coordinator knows it.

    Attributes:
        about: What it has said about its machine, and the run that it has joined for.
        bandwidth: Measured bytes per second.
        version: The version of the State that it has; None before it has any.
        has_whole_state: Whether that is all of a State, so that it can follow by records.
        tell_seconds: Seconds that a record takes it.
        rates: Pieces per second, by kind of work.
        pieces: Pieces that it has done.
        checked: The generation in which its answers were last checked.
        last_useful: The generation in which an answer was last used.
        batch: The number of the batch that it was sent last, where batches are sent.
        strikes: How often in a row it had other weights than it was sent.
        pending: Job and chunk of each answer that is awaited.
    """

    stream: Stream
    about: Head
    bandwidth: float
    version: str | None
    has_whole_state: bool
    tell_seconds: float
    rates: dict[str, float] = field(default_factory=dict)
    pieces: int = 0
    checked: int = -1
    last_useful: int = 0
    batch: int = -1
    busy_seconds: float = 0.0
    answers: int = 0
    strikes: int = 0
    pending: set[tuple[int, int]] = field(default_factory=set)
    number: int = field(default_factory=itertools.count(1).__next__)
    outbox: "asyncio.Queue[Message]" = field(default_factory=asyncio.Queue)

    @property
    def name(self) -> str:
        return str(self.about.get("name"))

    @property
    def rate(self) -> float:
        return sum(self.rates.values())

    def is_useful(self, generation: int) -> bool:
        """Return whether an answer was used in the last generations."""
        return generation - self.last_useful <= 2

    def describe(self, generation: int, timeout: float) -> str:
        """Return the state of the worker in a few words."""
        if self.stream.silent_seconds > timeout / 2:
            return "silent"
        if not self.is_useful(generation):
            return "too slow to be of use" if any(self.rates.values()) else "new"
        return "follows by records" if self.has_whole_state else "is sent weights"

    def measure(self, kind: str, pieces: int, seconds: Any, waited: float = 0.0) -> None:
        """Take in the speed of an answer, with the time of its way and of what the worker had to do before."""
        if isinstance(seconds, int | float) and 0 < seconds < LONGEST:
            self.busy_seconds += seconds
            self.answers += 1
            rate, before = pieces / max(seconds, waited, 1e-6), self.rates.get(kind)
            self.rates[kind] = rate if before is None else before + RECENT * (rate - before)


class Event(NamedTuple):
    kind: Literal["joined", "answered", "left"]
    worker: RemoteWorker
    message: Message = Message({})


def print_status(text: str) -> None:
    """Print a line about a cluster to standard error."""
    print(text, file=sys.stderr, flush=True)


class Hub:
    """Listens for workers; ``greet`` lets each of them in, or raises an error."""

    def __init__(
        self,
        host: str,
        port: int,
        keys: Path | None,
        greet: Callable[[Stream], Awaitable[RemoteWorker]],
        timeout: float,
        say: Callable[[str], None] = print_status,
    ) -> None:
        if keys is None and host not in LOOPBACK:
            message = f"Without keys, every machine that reaches {host} could join"
            raise BadInput(f"{message}: give --keys DIR (see 'germline keys'), or listen on 127.0.0.1.")
        self.greet, self.timeout, self.say = greet, timeout, say
        self.events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self.workers: dict[int, RemoteWorker] = {}  # that are connected
        self.refusals: list[str] = []
        address, options = messages.address_for(host, port, keys, server=True)
        self.listener = messages.load_transport().listen(address, self._meet, deserialize=False, **options)
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, name="germline-hub", daemon=True)
        self.thread.start()
        try:
            asyncio.run_coroutine_threadsafe(self.listener.start(), self.loop).result()
        except Exception as error:
            message = f"Cannot listen on {host}:{port}: {error}"
            raise BadInput(f"{message}. Choose another address with --listen.") from error
        self.host, self.port = messages.parse_address(self.listener.contact_address.partition("://")[2])

    @property
    def address(self) -> str:
        return f"{self.host}:{self.port}"

    async def _meet(self, comm: Any) -> None:
        stream = Stream(comm, self.timeout)
        try:
            worker = await self.greet(stream)
        except Exception as error:  # whatever connects
            self._remember(f"{comm.peer_address}: {error}")
            self.say(f"a worker at {comm.peer_address} was turned away: {error}")
            stream.abort()
            return
        self.workers[worker.number] = worker
        self.events.put(Event("joined", worker))
        try:
            async with stream.keep_open(self.timeout / HEARTBEATS, self._write(worker)):
                while True:
                    message = await stream.read()
                    if message.head.get("op") != "alive":
                        self.events.put(Event("answered", worker, message))
        finally:
            if stream.silent_seconds > self.timeout:
                self.say(f"worker {worker.name} has been silent for {self.timeout:g} s and is given up")
            del self.workers[worker.number]
            self.events.put(Event("left", worker))

    async def _write(self, worker: RemoteWorker) -> None:
        try:
            while True:
                await worker.stream.write(*await worker.outbox.get())
        except Exception:
            worker.stream.abort()

    def send(self, worker: RemoteWorker, head: Head, arrays: Sequence[bytes] = ()) -> None:
        """Send a message from any thread; messages to one worker arrive in order."""
        self.loop.call_soon_threadsafe(worker.outbox.put_nowait, Message(head, arrays))

    def disconnect(self, worker: RemoteWorker) -> None:
        """Close a connection; the worker connects again."""
        self.loop.call_soon_threadsafe(worker.stream.abort)

    def refuse(self, worker: RemoteWorker, reason: str) -> None:
        """Close a connection for good, and say why on both sides."""

        async def end() -> None:
            with suppress(ConnectionLostError):
                await worker.stream.write({"op": "refused", "reason": reason})
            worker.stream.abort()

        self._remember(f"{worker.name}: {reason}")
        self.say(f"worker {worker.name} is turned away: {reason}")
        asyncio.run_coroutine_threadsafe(end(), self.loop)

    def _remember(self, refusal: str) -> None:
        self.refusals = [*self.refusals[-REFUSALS:], refusal]

    def close(self, last: Head | None) -> None:
        """Close all connections, after a last message if there is one."""

        async def end() -> None:
            with suppress(ConnectionLostError, asyncio.TimeoutError):
                streams = [worker.stream.write(last) for worker in self.workers.values() if last is not None]
                await asyncio.wait_for(asyncio.gather(*streams, return_exceptions=True), 2.0)
            self.listener.stop()
            for worker in list(self.workers.values()):
                await worker.stream.comm.close()

        if self.loop.is_running():
            with suppress(TimeoutError):
                asyncio.run_coroutine_threadsafe(end(), self.loop).result(5.0)
            self.loop.call_soon_threadsafe(self.loop.stop)
            self.thread.join(5.0)
