"""The connections of an elastic fleet: streams of messages over Dask's own transport, with TLS where there are keys.

Workers open them, so a worker may be behind any router. A message is a JSON object and arrays of bytes: numbers, names
and weights, no code. All connections live in one thread; the program hears of them by a queue of events.
"""

import asyncio
import itertools
import json
import queue
import sys
import threading
import time
import zlib
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

from germline.errors import BadInput
from germline.fleet import keys as certificates
from germline.strategies.base import AnyStrategy, pack

BEATS = 5  # signs of life within the time after which a silent end is given up
PARENT = "GERMLINE_PARENT"  # the variable of a worker that ends with the process that holds its standard input
PIECE = 1 << 18  # bytes of a long message that are sent at once
LARGEST = 1 << 34  # bytes of a message
REFUSALS = 100  # that are remembered
LOOPBACK = ("127.0.0.1", "localhost", "::1")

Head = dict[str, Any]


class Message(NamedTuple):
    head: Head
    arrays: list[bytes]


def packed(value: Any) -> tuple[Any, list[Any], list[bytes]]:
    """A State or any part of one: its tree, the layout of its arrays, and their bytes."""
    tree, tensors = pack(value)
    arrays = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    layout = [[name, str(a.dtype).removeprefix("torch."), list(a.shape)] for name, a in arrays.items()]
    return tree, layout, [array.reshape(-1).view(torch.uint8).numpy().tobytes() for array in arrays.values()]


def tensors_of(layout: list[Any], contents: Sequence[bytes], device: torch.device) -> dict[str, torch.Tensor]:
    """The arrays of such a message, by name."""
    found = {}
    for (name, kind, shape), content in zip(layout, contents, strict=True):
        flat = torch.frombuffer(bytearray(content), dtype=torch.uint8) if content else torch.empty(0, dtype=torch.uint8)
        found[name] = flat.view(getattr(torch, kind)).reshape(shape).to(device)
    return found


def bits(strategy: AnyStrategy, state: Any) -> int:
    """A checksum of what candidates are made of, quick and the same on every device: the sum of all bits as numbers."""
    kinds = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    arrays = asked(strategy, state).values()
    total = sum(int(array.contiguous().view(kinds[array.element_size()]).sum()) for array in arrays)
    return total + zlib.crc32(json.dumps(plain(pack(state)[0])).encode())


def plain(tree: Any) -> list[Any]:
    """The items of a packed State that hold no array: numbers, which always travel."""
    return [item for item in tree["items"] if '"tensor"' not in json.dumps(item[1])]


def asked(strategy: AnyStrategy, state: Any) -> dict[str, torch.Tensor]:
    """The arrays of a State that candidates are made of."""
    return {name: t for name, t in pack(state)[1].items() if name.split(".")[0] in (*strategy.asked, "theta")}


class ConnectionLostError(Exception):
    """The other end of a connection is gone, or speaks another language."""


def transport() -> Any:
    """Dask's, which is an extra."""
    try:
        import dask
        from distributed import comm
    except ImportError as error:
        raise BadInput("An elastic fleet needs dask: pip install 'germline[elastic]'.") from error
    dask.config.set({"distributed.comm.timeouts.tcp": "12s", "distributed.comm.retry.count": 0})
    return comm


def address_of(text: str, *, port: int | None = None) -> tuple[str, int]:
    """A host and a port.

    >>> address_of("node7:8786"), address_of("[::1]:80")
    (('node7', 8786), ('::1', 80))
    """
    host, colon, number = text.rpartition(":")
    if not colon and port is not None:
        host, number = text, str(port)
    if not host or not number.isdigit() or int(number) > 65535:
        raise BadInput(f"An address is HOST:PORT, such as 192.168.1.5:8786, not {text!r}.")
    return host.strip("[]"), int(number)


def secured(keys: Path | None, *, server: bool) -> tuple[str, dict[str, Any]]:
    """The scheme of an address, and what makes it so."""
    if keys is None:
        return "tcp", {}
    return "tls", {"ssl_context": certificates.context(keys, server=server), "require_encryption": True}


@dataclass
class Stream:
    """One end of a connection."""

    comm: Any
    sent: int = 0
    received: int = 0
    heard: float = field(default_factory=time.monotonic)  # when last
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)  # to write

    async def write(self, head: Head, arrays: Sequence[bytes] = ()) -> None:
        """A message; what is long goes in pieces, so that the other end hears something all the time."""
        text, sizes = json.dumps(head), list(map(len, arrays))
        content = b"".join(arrays) if sum(sizes) > PIECE else b""
        try:
            async with self.turn:
                if not content:
                    await self.comm.write({"head": text, "arrays": list(arrays)}, serializers=["msgpack"])
                else:
                    await self.comm.write({"head": text, "sizes": sizes}, serializers=["msgpack"])
                    for start in range(0, len(content), PIECE):
                        piece = content[start : start + PIECE]
                        await self.comm.write({"piece": piece}, serializers=["msgpack"])
        except (OSError, RuntimeError) as error:
            raise ConnectionLostError(str(error)) from error
        self.sent += len(text) + sum(sizes)

    async def read(self) -> Message:
        try:
            found = await self.comm.read()
            text, head = found["head"], json.loads(found["head"])
            arrays = await self._pieces(found["sizes"]) if "sizes" in found else list(map(bytes, found["arrays"]))
            if not isinstance(head, dict):
                raise TypeError("no object")
        except asyncio.CancelledError:
            raise
        except Exception as error:  # whatever is at the other end
            raise ConnectionLostError(f"{type(error).__name__}: {error}") from error
        self.heard = time.monotonic()
        self.received += len(text) + sum(map(len, arrays))
        return Message(head, arrays)

    async def _pieces(self, sizes: Sequence[int]) -> list[bytes]:
        total, content = sum(sizes), bytearray()
        if total > LARGEST or min(sizes) < 0:
            raise ValueError("too long")
        while len(content) < total:
            content += (await self.comm.read())["piece"]
            self.heard = time.monotonic()
        ends = list(itertools.accumulate(sizes))
        return [bytes(content[end - size : end]) for end, size in zip(ends, sizes, strict=True)]

    async def beat(self, every: float) -> None:
        """Says now and then that this end is alive."""
        with suppress(ConnectionLostError):
            while True:
                await asyncio.sleep(every)
                await self.write({"op": "alive"})

    @property
    def silent(self) -> float:
        """Seconds since anything was heard."""
        return time.monotonic() - self.heard

    def abort(self) -> None:
        self.comm.abort()


@dataclass(eq=False)
class Peer:
    """A worker that has been let in, as the coordinator sees it."""

    number: int
    stream: Stream
    about: Head  # what it has said of itself
    bandwidth: float  # bytes a second
    outbox: "asyncio.Queue[Message]" = field(default_factory=asyncio.Queue)


class Event(NamedTuple):
    kind: str  # joined, answered, left
    peer: Peer
    message: Message = Message({}, [])


class Hub:
    """Listens for workers; each is greeted, and from then on heard and written to."""

    def __init__(
        self,
        host: str,
        port: int,
        keys: Path | None,
        greet: Callable[[Stream], Awaitable[tuple[Head, float]]],
        timeout: float,
        say: Callable[[str], None] = lambda text: print(text, file=sys.stderr, flush=True),
    ) -> None:
        if keys is None and host not in LOOPBACK:
            message = f"Without keys anybody who reaches {host} could join, so only this machine may be listened to"
            raise BadInput(f"{message}: give --keys DIR (see 'germline keys'), or listen on 127.0.0.1.")
        self.comm = transport()
        self.greet, self.timeout, self.say = greet, timeout, say
        self.events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self.numbers, self.peers = itertools.count(1), dict[int, Peer]()
        self.turned_away: list[str] = []
        self.loop = asyncio.new_event_loop()
        scheme, arguments = secured(keys, server=True)
        shown = f"[{host}]" if ":" in host else host
        self.listener = self.comm.listen(f"{scheme}://{shown}:{port}", self._meet, deserialize=False, **arguments)
        self.thread = threading.Thread(target=self._run, name="germline-hub", daemon=True)
        started: queue.SimpleQueue[Exception | None] = queue.SimpleQueue()
        self.thread.start()
        asyncio.run_coroutine_threadsafe(self._start(started), self.loop)
        error = started.get()
        if error is not None:
            raise BadInput(f"Nobody can be listened to at {host}:{port}: {error}.") from error
        self.host, self.port = address_of(self.listener.contact_address.partition("://")[2])

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()

    async def _start(self, started: "queue.SimpleQueue[Exception | None]") -> None:
        try:
            await self.listener.start()
        except Exception as error:
            started.put(error)
            return
        started.put(None)
        while True:
            await asyncio.sleep(self.timeout / BEATS)
            for peer in list(self.peers.values()):
                if peer.stream.silent > self.timeout:
                    self.say(f"worker {peer.about.get('name')} has been silent for {self.timeout:g} s: it is given up")
                    peer.stream.abort()

    async def _meet(self, comm: Any) -> None:
        stream = Stream(comm)
        try:
            about, bandwidth = await asyncio.wait_for(self.greet(stream), None)
        except Exception as error:  # whoever it is
            self._remember(f"{comm.peer_address}: {error}")
            self.say(f"a worker at {comm.peer_address} was turned away: {error}")
            comm.abort()
            return
        peer = Peer(next(self.numbers), stream, about, bandwidth)
        self.peers[peer.number] = peer
        self.events.put(Event("joined", peer))
        tasks = [asyncio.ensure_future(stream.beat(self.timeout / BEATS)), asyncio.ensure_future(self._write(peer))]
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
        """From any thread; what is written to one peer arrives in order."""
        self.loop.call_soon_threadsafe(peer.outbox.put_nowait, Message(head, list(arrays)))

    def drop(self, peer: Peer, reason: str) -> None:
        """Ends a connection, and says why on both sides."""

        async def end() -> None:
            with suppress(ConnectionLostError):
                await peer.stream.write({"op": "refused", "reason": reason})
            peer.stream.abort()

        self.say(f"worker {peer.about.get('name')} is turned away: {reason}")
        self._remember(f"{peer.about.get('name')}: {reason}")
        asyncio.run_coroutine_threadsafe(end(), self.loop)

    def _remember(self, refusal: str) -> None:
        self.turned_away = [*self.turned_away[-REFUSALS:], refusal]

    def close(self, last: Head | None) -> None:
        """Ends all connections, with a last word."""

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
