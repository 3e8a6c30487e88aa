"""The training loop: generation after generation, until a limit is reached or the user interrupts."""

import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from germline.engine.diagnostics import find_trouble
from germline.engine.history import Row
from germline.engine.opening import go_back, replay_theta
from germline.engine.session import Session
from germline.engine.stopping import Stop
from germline.errors import NoProgress, WrongScoresError
from germline.stages import announce_stage

COMMIT_DELAY = 0.05  # seconds for which records may wait to be written together, where all callbacks can wait
TWICE = 0.5  # seconds between two interrupts: launchers pass on the one that a terminal has sent already


# A function that is called after each generation, once it is on disk; if it returns True, the run stops. One with a
# true attribute ``can_wait`` may be called for several short generations together.
Callback = Callable[[Session, Row], object]


def run(session: Session, stop: Stop, callbacks: Sequence[Callback] = ()) -> dict[str, Any]:
    """Run a session until it reaches a limit; return its summary."""
    announce_stage("computing the first generation")
    stop.check(session.scorer.objective, session.splits)
    if stop.target is not None and stop.target.metric.startswith("train_"):
        session.eval_splits = ("train", *session.eval_splits)
    session.measure_part = stop.part_used
    session.part_used = stop.part_used(session, session.generation, session.samples)
    delay = COMMIT_DELAY if all(getattr(callback, "can_wait", False) for callback in callbacks) else 0.0
    if session.generation == 0 and (session.keeps_best or stop.patience is not None):
        session.measure_start()
    unreported: list[Row] = []
    can_warn = session.fleet.group.owns_journal
    with interruptible(session):
        try:
            while (reason := find_end(session, stop)) is None:
                try:
                    unreported.append(session.step(delay))
                except WrongScoresError as error:
                    go_back(session, error.generation)
                    unreported.clear()
                    continue
                if can_warn and (trouble := find_trouble(session)) is not None:
                    can_warn = False  # once is enough
                    warnings.warn(trouble, NoProgress, stacklevel=4)
                if session.journal is None or session.journal.is_committed:
                    report(session, unreported, callbacks)
        finally:
            session.commit()
        report(session, unreported, callbacks)
    if reason == "evaluations" and not session.generation and session.samples and can_warn:
        passes = session.samples // session.batch_size
        message = f"The choice of sigma took {passes} evaluations, and left none for a first generation"
        warnings.warn(f"{message}: raise the limit, or choose sigma yourself.", NoProgress, stacklevel=4)
    summary = session.finish(reason, lambda generation: replay_theta(session, generation))
    if summary["kept_generation"] == 0 < session.generation and can_warn:
        message = "No generation was better on the dev set than the weights that the run began with, which are kept"
        warnings.warn(f"{message}: try a smaller sigma and learning rate.", NoProgress, stacklevel=4)
    return summary


def find_end(session: Session, stop: Stop) -> str | None:
    """Return which limit a session has reached with scores that its fleet stands by, or None if it goes on."""
    try:
        reason = stop.reason(session)
        if reason is not None:
            session.fleet.confirm_scores()
        return reason
    except WrongScoresError as error:
        go_back(session, error.generation)
        return None


def report(session: Session, rows: list[Row], callbacks: Sequence[Callback]) -> None:
    """Call the callbacks for generations that are on disk, once; note whether one of them asks to stop."""
    for row in rows:
        for callback in callbacks:
            session.is_asked_to_stop |= callback(session, row) is True
    rows.clear()


@contextmanager
def interruptible(session: Session) -> Iterator[None]:
    """Let the first Ctrl-C end the run after the present generation, and the second end it at once.

    SIGTERM, by which services and batch systems end a process, means the same, except to a rank of several: launchers
    end ranks by it whose others are gone, and these would wait for them.
    """
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

    numbers = [signal.SIGINT] + ([signal.SIGTERM] if session.fleet.group.size == 1 else [])
    before = {number: signal.signal(number, interrupt) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
