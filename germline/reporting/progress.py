"""The progress of a run: one live line on a terminal or in a notebook, a line every few seconds elsewhere."""

import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.spinner import Spinner
from rich.text import Text

from germline.engine.history import Row
from germline.engine.session import Session
from germline.engine.stopping import Stop
from germline.reporting.numbers import format_metric, shorten
from germline.reporting.watching import is_notebook
from germline.stages import listen_to_stages

EVERY = 5.0  # seconds between lines where there is no terminal, and between updates of a notebook's line: a tenth
METRIC_WIDTH = 34  # characters of a metric's name: with it, generation, metric and time left fit into 80 columns


class Progress:
    """A callback that shows the progress of a run.

    Args:
        stop: When the run will end.
        below: Returns what is shown below the line on a terminal.
        is_quiet: Whether nothing is shown: in a fleet one process speaks for all.
    """

    can_wait = True  # several generations may be reported together, a moment later

    def __init__(
        self, stop: Stop, below: Callable[[], RenderableType] | None = None, *, is_quiet: bool = False
    ) -> None:
        self.stop, self.below, self.is_quiet = stop, below, is_quiet
        self.console = Console(stderr=True, force_jupyter=False)
        self.live: Live | None = None
        self.notebook: Any = None  # the handle of the line in a notebook
        self.stage = ""  # what the process does before the first generation
        self.started = time.monotonic()  # when the stage began
        self.last = -math.inf  # when the last line was printed
        self.exits = ExitStack()

    def __call__(self, session: Session, row: Row) -> None:
        if self.is_quiet:
            return
        self.stage = ""
        line = format_progress(session, row, self.stop)
        now = time.monotonic()
        if self.live is not None:
            text = Text(line, overflow="ellipsis", no_wrap=True)
            self.live.update(text if self.below is None else Group(text, self.below()))
        elif self.notebook is not None:
            if now - self.last >= EVERY / 10 or self.stop.generations == row["generation"] + 1:
                self.last = now
                self.notebook.update(NotebookLine(line))
        elif now - self.last >= EVERY:
            self.last = now
            print(line, file=sys.stderr, flush=True)

    def show_stage(self, text: str) -> None:
        """Show what the process does before the first generation, with the seconds that it has taken.

        A text that ends in a period is a decision about the run, and stays on the screen.
        """
        if text.endswith("."):
            self.console.print(text, style="dim", highlight=False)
            return
        self.stage, self.started = text, time.monotonic()
        if self.live is not None:
            self.live.update(StageLine(self), refresh=True)
        elif self.notebook is not None:
            self.notebook.update(NotebookLine(f"{text} ..."))

    @contextmanager
    def shown(self) -> Iterator["Progress"]:
        """Show the live line within the block, until it is closed."""
        if self.is_quiet:
            yield self
            return
        try:
            self.exits.enter_context(listen_to_stages(self.show_stage))
            if is_notebook():
                from IPython.display import display

                self.notebook = display(NotebookLine(""), display_id=True)
            elif self.console.is_terminal:
                has_terminal = sys.stdout.isatty()  # else what is printed must reach its file
                live = Live(console=self.console, refresh_per_second=8, redirect_stdout=has_terminal)
                self.live = self.exits.enter_context(live)
            yield self
        finally:
            self.close()

    def close(self) -> None:
        """Leave the last line where it is and show nothing more."""
        if self.live is not None:
            self.live.transient = bool(self.stage)  # a stage is not worth keeping, the last generation is
        self.exits.close()
        self.live = None


class StageLine:
    """A spinner, the stage before the first generation, and its seconds, which rich asks for again and again."""

    def __init__(self, progress: Progress) -> None:
        self.progress, self.spinner = progress, Spinner("dots")

    def __rich__(self) -> Spinner:
        self.spinner.text = f"{self.progress.stage}  {time.monotonic() - self.progress.started:.0f} s"
        return self.spinner


class NotebookLine:
    """A line of text as a notebook displays it."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return self.text


def format_progress(session: Session, row: Row, stop: Stop) -> str:
    """Return a line of numbers, the most important ones first: generation, a dev metric, the time left.

    Best and mean score, members per second and diagnostics follow.
    """
    done = row["generation"] + 1
    parts = [f"gen {done}" + (f"/{stop.generations}" if stop.generations else "")]
    names = [key for key in session.metrics if key.startswith("dev_")] or [k for k in session.metrics if "test_" in k]
    preferred = [session.best.metric] if session.best is not None and session.best.metric in names else names
    if preferred:
        parts.append(format_metric(shorten(preferred[0], METRIC_WIDTH), session.metrics[preferred[0]]))
    recent = session.history[-20:]
    seconds = sum(r["seconds"] for r in recent)
    left = time_left(session, stop, seconds / len(recent))
    if left is not None:
        parts.append(f"{format_time(left)} left")
    scores = f"best {row['best']:.3g}  mean {row['mean']:.3g} ± {row['spread']:.2g}"
    parts.append("no finite score: skipped" if row["skipped"] else scores)
    rate = sum(r["members"] for r in recent) / max(seconds, 1e-9)
    parts.append(f"{rate:,.0f} members/s")
    latest = next((r for r in reversed(session.history) if "step" in r), {})
    parts += [f"{name} {latest[name]:.2g}" for name in ("sigma", "step", "agreement") if name in latest]
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
