"""The training loop: generation after generation, until a limit is reached or the user interrupts."""

import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from germline.engine.history import Row
from germline.engine.session import Session
from germline.engine.stopping import Stop

PATIENCE = 0.05  # seconds for which records may wait to be written together, where all callbacks can wait
TWICE = 0.5  # seconds between two interrupts: launchers pass on the one that a terminal has sent already


# A function that is called after each generation, once it is on disk. One with a true attribute ``can_wait`` may be
# called for several short generations together.
Callback = Callable[[Session, Row], object]


def run(session: Session, stop: Stop, callbacks: Sequence[Callback] = ()) -> dict[str, Any]:
    """Run a session until it reaches a limit; return its summary."""
    stop.check(session.scorer.objective, session.splits)
    if stop.target is not None and stop.target.metric.startswith("train_"):
        session.eval_splits = ("train", *session.eval_splits)
    session.measure_part, session.part_used = stop.part_used, stop.part_used(session, session.samples)
    patience = PATIENCE if all(getattr(callback, "can_wait", False) for callback in callbacks) else 0.0
    unreported: list[Row] = []
    with interruptible(session):
        try:
            while (reason := stop.reason(session)) is None:
                unreported.append(session.step(patience))
                if session.journal is None or session.journal.is_committed:
                    report(session, unreported, callbacks)
        finally:
            session.commit()
        report(session, unreported, callbacks)
    return session.finish(reason)


def report(session: Session, rows: list[Row], callbacks: Sequence[Callback]) -> None:
    """Call the callbacks for generations that are on disk, once."""
    for row in rows:
        for callback in callbacks:
            callback(session, row)
    rows.clear()


@contextmanager
def interruptible(session: Session) -> Iterator[None]:
    """Let the first Ctrl-C end the run after the present generation, and the second end it at once."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    first = float("inf")  # when the first interrupt came

    def interrupt(number: int, frame: Any) -> None:
        nonlocal first
        if time.monotonic() - first > TWICE or session.fleet.is_idle:
            raise KeyboardInterrupt
        if not session.interrupted:
            session.interrupted, first = True, time.monotonic()

    before = signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
