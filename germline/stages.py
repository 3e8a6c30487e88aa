"""Announces what a process does in the seconds before the first generation, for a progress line to show."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

listener: ContextVar[Callable[[str], object] | None] = ContextVar("listener", default=None)


def announce_stage(text: str) -> None:
    """Say what this process does from now on; nothing happens unless something listens.

    >>> with listen_to_stages(print):
    ...     announce_stage("loading data")
    loading data
    """
    listen = listener.get()
    if listen is not None:
        listen(text)


@contextmanager
def listen_to_stages(listen: Callable[[str], object]) -> Iterator[None]:
    """Call a function with every stage that this thread announces within the block."""
    token = listener.set(listen)
    try:
        yield
    finally:
        listener.reset(token)
