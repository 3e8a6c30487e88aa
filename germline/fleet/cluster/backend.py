"""The interface between a cluster and the system that it runs on: workers, calls to them, and events.

Dask and Ray are behind this interface. What is sent to whom, and what becomes of it, is decided above it, once.
"""

import queue
import sys
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, Protocol

from germline.errors import BadInput

Head = dict[str, Any]


class Message(NamedTuple):
    """A JSON object and arrays of bytes; numbers and names, no code."""

    head: Head
    arrays: Sequence[bytes] = ()


class Event(NamedTuple):
    """A worker has joined or left, has answered a call, or could not even begin with it."""

    kind: Literal["joined", "answered", "failed", "left"]
    worker: str
    message: Message = Message({})


class Backend(Protocol):
    """The workers of a cluster, by name.

    Attributes:
        address: Where workers or other people find the cluster.
        events: What has happened, in order.
    """

    address: str
    events: "queue.SimpleQueue[Event]"

    def submit(self, worker: str, message: Message) -> None:
        """Have a worker's ``Responder`` answer a message, after those that it was sent before.

        Messages that share one sequence of large arrays upload it once.
        """

    def look(self) -> None:
        """Look now and then which workers there are; this is called often."""

    def close(self) -> None:
        """Let go of the cluster."""


def count_bytes(message: Message, head: int = 0) -> int:
    """Return the bytes of a message's arrays, and of its head."""
    return head + sum(map(len, message.arrays))


def parse_address(text: str) -> tuple[str, int]:
    """Return the host and the port of an address.

    >>> parse_address("node7:8786"), parse_address("[::1]:80")
    (('node7', 8786), ('::1', 80))
    """
    host, _, number = text.rpartition(":")
    if not host or not number.isdigit() or int(number) > 65535:
        raise BadInput(f"An address is HOST:PORT, such as 192.168.1.5:8786, not {text!r}.")
    return host.strip("[]"), int(number)


def make_printable(text: str) -> str:
    """Return text in which nothing can change a terminal; it may come from another machine.

    >>> make_printable("worker " + chr(27) + "[2J1")
    'worker ?[2J1'
    """
    return "".join(character if character.isprintable() else "?" for character in text)


def print_status(text: str) -> None:
    """Print a line about a cluster to standard error."""
    print(make_printable(text), file=sys.stderr, flush=True)
