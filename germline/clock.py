"""A clock for each kind of work: the seconds that a generation spends on noise, forward passes and the like."""

import os
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager


class Clock:
    """Measure the time inside ``with clock("forward"):``, less what is measured there as something else.

    The seconds of all threads are added.

    >>> clock = Clock()
    >>> with clock("forward"), clock("noise"):
    ...     time.sleep(0.01)
    >>> seconds = clock.pop_seconds()
    >>> seconds["forward"] < 0.01 <= seconds["noise"], clock.pop_seconds()
    (True, {})
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.lock = threading.Lock()
        self.thread = threading.local()

    @contextmanager
    def __call__(self, part: str) -> Iterator[None]:
        """Measure the time until the context ends as time of one part of the work."""
        outer_nested, start = getattr(self.thread, "nested", 0.0), time.perf_counter()
        self.thread.nested = 0.0  # seconds that contexts inside this one have measured
        try:
            yield
        finally:
            elapsed = time.perf_counter() - start
            with self.lock:
                self.seconds[part] = self.seconds.get(part, 0.0) + elapsed - self.thread.nested
            self.thread.nested = outer_nested + elapsed

    def add(self, seconds: Mapping[str, float]) -> None:
        """Add seconds that another process has measured."""
        with self.lock:
            for part, more in seconds.items():
                self.seconds[part] = self.seconds.get(part, 0.0) + more

    def pop_seconds(self) -> dict[str, float]:
        """Return the seconds of each part since the last call, and start again from 0."""
        with self.lock:
            seconds, self.seconds = self.seconds, {}
        return seconds


clock = Clock()  # of this process

if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=clock.__init__)  # type: ignore[misc]  # another thread may have held its lock
