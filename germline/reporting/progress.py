"""The progress of a run: one live line on a terminal, a line every few seconds elsewhere."""

import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from germline.engine.diagnostics import advise
from germline.engine.history import Row
from germline.engine.session import Session
from germline.engine.stopping import Stop

EVERY = 5.0  # seconds between lines where there is no terminal


class Progress:
    """A callback that shows the progress of a run.

    Args:
        stop: When the run will end.
        below: Returns what is shown below the line on a terminal.
    """

    can_wait = True  # several generations may be reported together, a moment later

    def __init__(self, stop: Stop, below: Callable[[], RenderableType] | None = None) -> None:
        self.stop, self.below = stop, below
        self.console = Console(stderr=True)
        self.live: Live | None = None
        self.last = 0.0  # when the last line was printed
        self.has_advised = False

    def __call__(self, session: Session, row: Row) -> None:
        line = format_progress(session, row, self.stop)
        if self.live is not None:
            text = Text(line, overflow="ellipsis", no_wrap=True)
            self.live.update(text if self.below is None else Group(text, self.below()))
        elif time.monotonic() - self.last >= EVERY or row["skipped"]:
            self.last = time.monotonic()
            print(line, file=sys.stderr, flush=True)
        if "agreement" in row and not self.has_advised:
            note = advise(session.history, session.scorer.genome.size)
            self.has_advised = note is not None
            if note is not None:
                self.console.print(f"note: {note}", soft_wrap=True)
        if row["skipped"] and self.live is not None:
            self.console.print(f"generation {row['generation'] + 1}: no member has a finite score, so nothing changed")

    @contextmanager
    def shown(self) -> Iterator["Progress"]:
        """Show the live line within the block, if there is a terminal."""
        if not self.console.is_terminal:
            yield self
            return
        with Live(console=self.console, refresh_per_second=8) as self.live:
            yield self
        self.live = None


def format_progress(session: Session, row: Row, stop: Stop) -> str:
    """Return a line with generation, best and mean score, diagnostics, a dev metric, members per second, time left."""
    done = row["generation"] + 1
    parts = [f"gen {done}" + (f"/{stop.generations}" if stop.generations else "")]
    scores = f"best {row['best']:.3g}  mean {row['mean']:.3g} ± {row['spread']:.2g}"
    parts.append("no finite score: skipped" if row["skipped"] else scores)
    latest = next((r for r in reversed(session.history) if "step" in r), {})
    parts += [f"{name} {latest[name]:.2g}" for name in ("sigma", "step", "agreement") if name in latest]
    names = [key for key in session.metrics if key.startswith("dev_")] or [k for k in session.metrics if "test_" in k]
    preferred = [key for key in names if not key.endswith(("_loss", "_score"))] or names
    if preferred:
        parts.append(f"{preferred[0].replace('_', ' ')} {session.metrics[preferred[0]]:.4f}")
    recent = session.history[-20:]
    seconds = sum(r["seconds"] for r in recent)
    rate = sum(r["members"] for r in recent) / max(seconds, 1e-9)
    parts.append(f"{rate:,.0f} members/s")
    left = time_left(session, stop, seconds / len(recent))
    if left is not None:
        parts.append(f"{format_time(left)} left")
    return "  ".join(parts)


def time_left(session: Session, stop: Stop, per_generation: float) -> float | None:
    """Return the seconds until the run ends, or None if that is not known."""
    limits = []
    if stop.generations is not None:
        limits.append((stop.generations - session.generation) * per_generation)
    if stop.seconds is not None:
        limits.append(stop.seconds - session.seconds)
    return max(0.0, min(limits)) if limits else None


def format_time(seconds: float) -> str:
    """Return a time as H:MM:SS or M:SS.

    >>> format_time(3661), format_time(59.5)
    ('1:01:01', '1:00')
    """
    whole = math.ceil(seconds)
    hours, minutes = whole // 3600, whole % 3600 // 60
    return f"{hours}:{minutes:02d}:{whole % 60:02d}" if hours else f"{minutes}:{whole % 60:02d}"
