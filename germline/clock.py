"""Where the time of a step goes: seconds of each kind of work, of all threads together."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager


class Clock:
    """Counts what is inside ``with clock("forward"):``, less what is counted there as something else.

    >>> clock = Clock()
    >>> with clock("forward"), clock("noise"):
    ...     time.sleep(0.01)
    >>> taken = clock.taken()
    >>> taken["forward"] < 0.01 <= taken["noise"], clock.taken()
    (True, {})
    """

    def __init__(self) -> None:
        self.spent: dict[str, float] = {}
        self.lock = threading.Lock()
        self.thread = threading.local()

    @contextmanager
    def __call__(self, part: str) -> Iterator[None]:
        around, began = getattr(self.thread, "inside", 0.0), time.perf_counter()
        self.thread.inside = 0.0
        try:
            yield
        finally:
            took = time.perf_counter() - began
            with self.lock:
                self.spent[part] = self.spent.get(part, 0.0) + took - self.thread.inside
            self.thread.inside = around + took

    def taken(self) -> dict[str, float]:
        """What was counted since this was last asked."""
        with self.lock:
            spent, self.spent = self.spent, {}
        return spent


clock = Clock()  # of this process
