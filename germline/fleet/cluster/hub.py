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
LOOPBACK = ("127.0.0.1", "localhost", "::1")


@dataclass(eq=False)
class Peer:
    """A worker that has been let in, as the coordinator sees it.

    Attributes:
        about: What the worker has said about its machine.
        bandwidth: Measured bytes per second.
    """

    number: int
    stream: Stream
    about: Head
    bandwidth: float
    outbox: "asyncio.Queue[Message]" = field(default_factory=asyncio.Queue)

    @property
    def name(self) -> str:
        return str(self.about.get("name"))


class Event(NamedTuple):
    kind: Literal["joined", "answered", "left"]
    peer: Peer
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
        greet: Callable[[Stream], Awaitable[tuple[Head, float]]],
        timeout: float,
        say: Callable[[str], None] = print_status,
    ) -> None:
        if keys is None and host not in LOOPBACK:
            message = f"Without keys, every machine that reaches {host} could join"
            raise BadInput(f"{message}: give --keys DIR (see 'germline keys'), or listen on 127.0.0.1.")
        self.greet, self.timeout, self.say = greet, timeout, say
        self.events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self.numbers, self.peers = itertools.count(1), dict[int, Peer]()
        self.refusals: list[str] = []
        address, options = messages.address_for(host, port, keys, server=True)
        self.listener = messages.load_transport().listen(address, self._meet, deserialize=False, **options)
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, name="germline-hub", daemon=True)
        self.thread.start()
        try:
            asyncio.run_coroutine_threadsafe(self._start(), self.loop).result()
        except Exception as error:
            message = f"Cannot listen on {host}:{port}: {error}"
            raise BadInput(f"{message}. Choose another address with --listen.") from error
        self.host, self.port = messages.parse_address(self.listener.contact_address.partition("://")[2])

    @property
    def address(self) -> str:
        return f"{self.host}:{self.port}"

    async def _start(self) -> None:
        await self.listener.start()
        self.watch = asyncio.ensure_future(self._watch())

    async def _watch(self) -> None:
        """Give up silent workers."""
        while True:
            await asyncio.sleep(self.timeout / HEARTBEATS)
            for peer in list(self.peers.values()):
                if peer.stream.silent_seconds > self.timeout:
                    self.say(f"worker {peer.name} has been silent for {self.timeout:g} s and is given up")
                    peer.stream.abort()

    async def _meet(self, comm: Any) -> None:
        stream = Stream(comm)
        try:
            about, bandwidth = await self.greet(stream)
        except Exception as error:  # whatever connects
            self._remember(f"{comm.peer_address}: {error}")
            self.say(f"a worker at {comm.peer_address} was turned away: {error}")
            comm.abort()
            return
        peer = Peer(next(self.numbers), stream, about, bandwidth)
        self.peers[peer.number] = peer
        self.events.put(Event("joined", peer))
        heartbeats = stream.send_heartbeats(self.timeout / HEARTBEATS)
        tasks = [asyncio.ensure_future(heartbeats), asyncio.ensure_future(self._write(peer))]
        try:
            while True:
                message = await stream.read()
                if message.head.get("op") != "alive":
                    self.events.put(Event("answered", peer, message))
        except ConnectionLostError:
            pass
        finally:
            for task in tasks:
                task.cancel()
            comm.abort()
            del self.peers[peer.number]
            self.events.put(Event("left", peer))

    async def _write(self, peer: Peer) -> None:
        try:
            while True:
                await peer.stream.write(*await peer.outbox.get())
        except Exception:
            peer.stream.abort()

    def send(self, peer: Peer, head: Head, arrays: Sequence[bytes] = ()) -> None:
        """Send a message from any thread; messages to one peer arrive in order."""
        self.loop.call_soon_threadsafe(peer.outbox.put_nowait, Message(head, arrays))

    def disconnect(self, peer: Peer) -> None:
        """Close a connection; the worker connects again."""
        self.loop.call_soon_threadsafe(peer.stream.abort)

    def refuse(self, peer: Peer, reason: str) -> None:
        """Close a connection for good, and say why on both sides."""

        async def end() -> None:
            with suppress(ConnectionLostError):
                await peer.stream.write({"op": "refused", "reason": reason})
            peer.stream.abort()

        self._remember(f"{peer.name}: {reason}")
        self.say(f"worker {peer.name} is turned away: {reason}")
        asyncio.run_coroutine_threadsafe(end(), self.loop)

    def _remember(self, refusal: str) -> None:
        self.refusals = [*self.refusals[-REFUSALS:], refusal]

    def close(self, last: Head | None) -> None:
        """Close all connections, after a last message if there is one."""

        async def end() -> None:
            with suppress(ConnectionLostError, asyncio.TimeoutError):
                streams = [peer.stream.write(last) for peer in self.peers.values() if last is not None]
                await asyncio.wait_for(asyncio.gather(*streams, return_exceptions=True), 2.0)
            self.listener.stop()
            for peer in list(self.peers.values()):
                await peer.stream.comm.close()

        if self.loop.is_running():
            with suppress(TimeoutError):
                asyncio.run_coroutine_threadsafe(end(), self.loop).result(5.0)
            self.loop.call_soon_threadsafe(self.loop.stop)
            self.thread.join(5.0)
