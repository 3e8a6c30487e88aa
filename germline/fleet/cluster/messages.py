"""Messages between a coordinator and its workers: a JSON object and arrays of bytes; numbers and names, no code.

They travel over Dask's transport, with TLS where there are keys. Workers open the connections, so a worker may be
behind any router.
"""

import asyncio
import itertools
import json
import time
import zlib
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from germline.errors import BadInput
from germline.fleet.cluster.keys import ssl_context
from germline.objective import Batch
from germline.strategies import AnyStrategy, pack, unpack

HEARTBEATS = 5  # signs of life within the time after which a silent end is given up
PIECE = 1 << 18  # bytes of a long message that are sent at once
LARGEST = 1 << 34  # bytes of a message
CHECKSUM_TYPES = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

Head = dict[str, Any]


class ConnectionLostError(Exception):
    """The other end of a connection is gone, or does not speak this protocol."""


class Message(NamedTuple):
    head: Head
    arrays: Sequence[bytes] = ()


def answer_to(head: Head, op: str, arrays: Sequence[bytes] = (), **about: Any) -> Message:
    """Return the answer to a job, which says what it is an answer to."""
    echo = {key: head[key] for key in ("job", "chunk", "version", "kind", "first", "last")}
    return Message({**echo, "op": op, **about}, arrays)


def encode_state(value: Any) -> tuple[Any, list[Any], list[bytes]]:
    """Return the tree of a State or any part of one, the layout of its arrays, and their bytes."""
    tree, tensors = pack(value)
    arrays = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    layout = [[name, str(a.dtype).removeprefix("torch."), list(a.shape)] for name, a in arrays.items()]
    return tree, layout, [array.reshape(-1).view(torch.uint8).numpy().tobytes() for array in arrays.values()]


def decode_tensors(layout: list[Any], contents: Sequence[bytes], device: torch.device) -> dict[str, Tensor]:
    """Return the arrays of a message, by name."""
    tensors = {}
    for (name, dtype, shape), content in zip(layout, contents, strict=True):
        flat = torch.from_numpy(np.frombuffer(bytearray(content), np.uint8))
        tensors[name] = flat.view(getattr(torch, dtype)).reshape(shape).to(device)
    return tensors


def encode_batch(batch: Batch, number: int) -> Message:
    """Return a batch as a message."""
    tree, layout, contents = encode_state([list(batch.args), dict(batch.kwargs), batch.target])
    return Message({"op": "batch", "batch": number, "tree": tree, "layout": layout, "size": batch.size}, contents)


def decode_batch(head: Head, arrays: Sequence[bytes], device: torch.device) -> Batch:
    """Return the batch of a message."""
    parts: Any = unpack([], head["tree"], decode_tensors(head["layout"], arrays, device))
    args, kwargs, target = parts
    return Batch(tuple(args), kwargs, target, head["size"])


def plain_items(tree: Any) -> list[Any]:
    """Return the items of a packed State that hold no array: numbers, which are always sent."""
    return [item for item in tree["items"] if '"tensor"' not in json.dumps(item[1])]


def fields_to_check(strategy: AnyStrategy, state: Any) -> list[str]:
    """Return the fields of a State that its checksum covers: what ``ask`` reads, and plain numbers.

    A worker that was sent weights has no other fields.
    """
    plain = {name for name, _ in plain_items(pack(state)[0])}
    return [f.name for f in fields(state) if f.name in (*strategy.ask_arrays, "theta") or f.name in plain]


def checksum(names: Sequence[str], state: Any) -> int:
    """Return the sum of all bits of some fields of a State, as numbers: quick, and the same on every device."""
    tree, tensors = pack({name: getattr(state, name) for name in names})
    arrays = [array.contiguous().view(CHECKSUM_TYPES[array.element_size()]) for array in tensors.values()]
    return sum(int(array.sum()) for array in arrays) + zlib.crc32(json.dumps(plain_items(tree)).encode())


def load_transport() -> Any:
    """Return Dask's communication library, which is an optional dependency."""
    try:
        import dask
        from distributed import comm
    except ImportError as error:
        raise BadInput("An elastic fleet needs dask: pip install 'germline[elastic]'.") from error
    dask.config.set({"distributed.comm.timeouts.tcp": "12s", "distributed.comm.retry.count": 0})
    return comm


def parse_address(text: str) -> tuple[str, int]:
    """Return the host and the port of an address.

    >>> parse_address("node7:8786"), parse_address("[::1]:80")
    (('node7', 8786), ('::1', 80))
    """
    host, _, number = text.rpartition(":")
    if not host or not number.isdigit() or int(number) > 65535:
        raise BadInput(f"An address is HOST:PORT, such as 192.168.1.5:8786, not {text!r}.")
    return host.strip("[]"), int(number)


def address_for(host: str, port: int, keys: Path | None, *, server: bool) -> tuple[str, dict[str, Any]]:
    """Return the address of one end of a connection, and the options that secure it where there are keys."""
    shown = f"[{host}]" if ":" in host else host
    if keys is None:
        return f"tcp://{shown}:{port}", {}
    options = {"ssl_context": ssl_context(keys, server=server), "require_encryption": True}
    return f"tls://{shown}:{port}", options


@dataclass
class Stream:
    """One end of a connection."""

    comm: Any
    patience: float  # seconds after which a silent end is given up
    sent: int = 0  # bytes
    received: int = 0
    last_read: float = field(default_factory=time.monotonic)
    write_lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def write(self, head: Head, arrays: Sequence[bytes] = ()) -> None:
        """Write a message; a long one in pieces, so that the other end is never without a sign of life."""
        text, content = json.dumps(head), b"".join(arrays)
        first = {"head": text, "sizes": list(map(len, arrays)), "piece": content[:PIECE]}
        rest = ({"piece": content[start : start + PIECE]} for start in range(PIECE, len(content), PIECE))
        try:
            async with self.write_lock:
                for part in itertools.chain([first], rest):
                    await self.comm.write(part, serializers=["msgpack"])
        except (OSError, RuntimeError) as error:
            raise ConnectionLostError(str(error)) from error
        self.sent += len(text) + len(content)

    async def read(self) -> Message:
        """Return the next message."""
        try:
            part = await self.comm.read()
            text, sizes, content = part["head"], part["sizes"], bytearray(part["piece"])
            head, ends = json.loads(text), list(itertools.accumulate(sizes, initial=0))
            if not isinstance(head, dict) or min(sizes, default=0) < 0 or ends[-1] > LARGEST:
                raise ValueError("the message is too long, or its head is not an object")
            while len(content) < ends[-1]:
                self.last_read = time.monotonic()
                content += (await self.comm.read())["piece"]
        except Exception as error:  # the other end may send anything
            raise ConnectionLostError(f"{type(error).__name__}: {error}") from error
        self.last_read = time.monotonic()
        self.received += len(text) + len(content)
        return Message(head, [bytes(content[start:end]) for start, end in itertools.pairwise(ends)])

    async def send_heartbeats(self, every: float) -> None:
        """Say every few seconds that this end is alive."""
        with suppress(ConnectionLostError):
            while True:
                await asyncio.sleep(every)
                await self.write({"op": "alive"})

    async def watch(self) -> None:
        """Close the connection when the other end has been silent for too long."""
        while self.silent_seconds < self.patience:
            await asyncio.sleep(self.patience / HEARTBEATS)
        self.abort()

    @asynccontextmanager
    async def keep_open(self, every: float, work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
        """Send signs of life, watch for those of the other end and do some work, until the connection is lost."""
        tasks = [asyncio.ensure_future(task) for task in (self.send_heartbeats(every), self.watch(), work)]
        try:
            yield
        except ConnectionLostError:
            pass
        finally:
            for task in tasks:
                task.cancel()
            self.abort()

    @property
    def silent_seconds(self) -> float:
        """Seconds since anything was read."""
        return time.monotonic() - self.last_read

    def abort(self) -> None:
        """Close the connection at once."""
        self.comm.abort()
