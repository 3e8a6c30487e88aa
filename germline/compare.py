"""Several ways to train one recipe under one budget: their runs, a table with medians and quartiles, and a report.

Every run is a process of its own, ``germline train``, so that its memory is its own, too. All are kept in one folder:
what was interrupted goes on, and what has ended is not run again.
"""

import html
import itertools
import json
import re
import signal
import statistics
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from germline.errors import BadInput
from germline.journal import Journal, write_whole
from germline.report import embedded, page, table
from germline.run import Row, rows_of
from germline.stopping import lower_is_better

ABOUT = "about.json"  # what a folder compares
POINTS = 200  # of a curve
AXES = {
    "total_seconds": "seconds of training",
    "total_passes": "forward passes of a batch (a backward pass is two)",
    "total_samples": "samples",
}
INTERRUPTED = 130  # exit code


@dataclass(frozen=True)
class Variant:
    """One of the ways, by what 'germline train' is given for it."""

    name: str
    arguments: tuple[str, ...]


@dataclass
class Trial:
    """A variant with one seed: what came of it, or why nothing did."""

    variant: Variant
    seed: int
    path: Path
    outcome: dict[str, Any] | None = None
    rows: list[Row] = field(default_factory=list)
    batch: int = 1
    command: str = ""  # that repeats it
    failure: str = ""


@dataclass(frozen=True)
class Comparison:
    """A folder of runs of one recipe; ``common`` is what all of them are given."""

    folder: Path
    recipe: str
    common: tuple[str, ...]
    variants: tuple[Variant, ...]
    seeds: int
    jobs: int = 1
    say: Callable[[str], None] = lambda text: print(text, file=sys.stderr, flush=True)
    processes: "list[subprocess.Popen[str]]" = field(default_factory=list)
    interrupted: threading.Event = field(default_factory=threading.Event)

    def run(self) -> list[Trial]:
        """All that has not been run yet."""
        self.claim()
        trials = [
            Trial(variant, seed, self.folder / f"{variant.name}-{seed}")
            for seed in range(self.seeds)
            for variant in self.variants
        ]
        with ThreadPoolExecutor(self.jobs) as threads, interruptible():
            try:
                list(threads.map(self.carry_out, trials))
            except KeyboardInterrupt:
                self.interrupted.set()
                for process in self.processes:
                    if process.poll() is None:
                        process.send_signal(signal.SIGINT)  # it ends after the generation at hand
        if self.interrupted.is_set():
            raise KeyboardInterrupt
        return trials

    def claim(self) -> None:
        """Notes what is compared here; the folder of another comparison is left alone."""
        file = self.folder / ABOUT
        known = json.loads(file.read_text()) if file.is_file() else {"variants": {}}
        here = {"recipe": self.recipe, "common": list(self.common)}
        given = {variant.name: list(variant.arguments) for variant in self.variants}
        other = [name for name, arguments in given.items() if known["variants"].get(name, arguments) != arguments]
        if other or any(known.get(key, value) != value for key, value in here.items()):
            raise BadInput(f"{self.folder} holds runs under another budget or other settings: give another --name.")
        self.folder.mkdir(parents=True, exist_ok=True)
        write_whole(file, json.dumps({**here, "variants": {**known["variants"], **given}}, indent=1).encode())

    def carry_out(self, trial: Trial) -> None:
        """Runs a trial to its end, if it has not come there."""
        if self.interrupted.is_set():
            return
        if not ended(trial.path):
            place = ["--runs", str(self.folder), "--name", trial.path.name]
            new = ["train", self.recipe, *trial.variant.arguments, *self.common, "--seed", str(trial.seed), *place]
            begun = (trial.path / "journal.sqlite").is_file()
            words = ["resume", str(trial.path)] if begun else new
            self.say(f"{trial.variant.name}, seed {trial.seed}{': goes on' if begun else ''}")
            command = [sys.executable, "-m", "germline", *words, "--json"]
            process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
            self.processes.append(process)
            trial.failure = heard(process, show=self.jobs == 1)
            if process.returncode == INTERRUPTED:
                self.interrupted.set()
                return
        if ended(trial.path):
            trial.failure = ""
            journal = Journal.open(trial.path, read_only=True)
            trial.rows, trial.outcome = rows_of(journal), journal.outcome()
            trial.batch, trial.command = journal.header["batch_size"] or 1, str(journal.header.get("command", ""))
            journal.close()
        elif self.jobs > 1:  # else it has been shown
            self.say(f"{trial.variant.name}, seed {trial.seed}: {trial.failure}")


@contextmanager
def interruptible() -> Iterator[None]:
    """Ctrl-C interrupts, also where this process was begun by a shell that has it ignored, as with ``&``."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def heard(process: "subprocess.Popen[str]", *, show: bool) -> str:
    """Waits for a run, whose progress is shown if wanted; the last thing it says is why it failed, if it did."""
    assert process.stderr is not None
    last = ""
    for line in process.stderr:
        last = line.strip() or last
        if show:
            print(line, end="", file=sys.stderr, flush=True)
    process.wait()
    return last


def ended(path: Path) -> bool:
    if not (path / "journal.sqlite").is_file():
        return False
    journal = Journal.open(path, read_only=True)
    outcome = journal.outcome()
    journal.close()
    return outcome is not None and bool(outcome["stopped_by"] != "interrupt")


def grid_of(settings: Sequence[str]) -> list[tuple[str, ...]]:
    """All combinations of KEY=V1,V2; a comma within parentheses is part of a value.

    >>> grid_of(["lr=1,linear(1, 0, 9)", "rank=none"])
    [('lr=1', 'rank=none'), ('lr=linear(1, 0, 9)', 'rank=none')]
    """
    axes = []
    for setting in settings:
        key, equals, values = setting.partition("=")
        if not equals or not key:
            raise BadInput(f"--set takes KEY=V1,V2, not {setting!r}.")
        axes.append([f"{key}={value.strip()}" for value in re.split(r",(?![^(]*\))", values)])
    return list(itertools.product(*axes))


def budget_of(generations: int | None, seconds: float | None, evaluations: int | None, target: str | None) -> list[str]:
    """What each run is given to stop by."""
    if generations is None and seconds is None and evaluations is None:
        seconds = 60.0
    given = {"generations": generations, "seconds": seconds, "evaluations": evaluations, "target": target}
    return [word for key, value in given.items() if value is not None for word in (f"--{key}", str(value))]


def machine_of(device: str, dtype: str, workers: int | None, data: Path | None) -> list[str]:
    given = {"workers": workers, "data": data and data.resolve()}
    options = [word for key, value in given.items() if value is not None for word in (f"--{key}", str(value))]
    return ["--device", device, "--dtype", dtype, *options]


def metric_of(trials: Sequence[Trial], wanted: str | None) -> str:
    """What variants are judged by: what was asked for, or the first metric of the test set."""
    names = sorted({name for trial in trials if trial.outcome for name in trial.outcome["metrics"]})
    if wanted is not None:
        if names and wanted not in names:
            raise BadInput(f"There is no metric {wanted!r}: choose one of {', '.join(names)}.")
        return wanted
    for split in ("test_", "dev_", "train_", "center_"):
        found = [name for name in names if name.startswith(split)]
        if found:
            return str(next((name for name in found if not name.endswith(("_loss", "_score"))), found[0]))
    return "test_loss"


def summary(trials: Sequence[Trial], metric: str) -> list[dict[str, Any]]:
    """A row for each variant: of the metric median and quartiles, of the rest medians."""
    found = []
    for name in dict.fromkeys(trial.variant.name for trial in trials):
        mine = [trial for trial in trials if trial.variant.name == name]
        done = [trial for trial in mine if trial.outcome is not None]
        values = [value for trial in done if (value := (trial.outcome or {})["metrics"].get(metric)) is not None]
        row: dict[str, Any] = {"variant": name, "seeds": len(done)}
        if not values:
            found.append({**row, "failure": next((trial.failure for trial in mine if trial.failure), "no value")})
            continue
        low, middle, high = (float(q) for q in np.quantile(values, (0.25, 0.5, 0.75)))
        row |= {"median": middle, "lower quartile": low, "upper quartile": high}
        for key in ("seconds", "generations", "samples", "peak_memory_bytes", "bytes_sent"):
            row[key] = statistics.median((trial.outcome or {})[key] for trial in done)
        row["passes"] = statistics.median((trial.outcome or {})["samples"] / trial.batch for trial in done)
        found.append(row)
    known = [row for row in found if "median" in row]
    return sorted(known, key=lambda row: row["median"] * (1 if lower_is_better(metric) else -1)) + [
        row for row in found if "median" not in row
    ]


def cells(row: Mapping[str, Any]) -> list[str]:
    """A row of the table as people read it."""
    if "median" not in row:
        return [row["variant"], row["failure"], *[""] * 6]
    quartiles = f" ({row['lower quartile']:.4f} to {row['upper quartile']:.4f})" if row["seeds"] > 1 else ""
    quality = f"{row['median']:.4f}{quartiles}"
    memory, sent = row["peak_memory_bytes"] / 1e6, row["bytes_sent"] / 1e6
    numbers = [f"{row['generations']:.0f}", f"{row['passes']:,.0f}", f"{row['samples']:,.0f}"]
    return [row["variant"], quality, f"{row['seconds']:.1f}", *numbers, f"{memory:,.0f}", f"{sent:,.1f}"]


def heads(metric: str) -> list[str]:
    names = ("seconds", "generations", "passes", "samples", "MB at most", "MB sent")
    return ["", metric.replace("_", " "), *names]


def note(seeds: int) -> str:
    """What the numbers are."""
    of = f"medians of {seeds} seeds, with quartiles; " if seeds > 1 else ""
    return f"{of}passes are forward passes of a batch, a backward pass counts as two"


def write_comparison(trials: Sequence[Trial], metric: str, file: Path, title: str) -> list[dict[str, Any]]:
    """The table and the curves as one HTML file; the table, as numbers, beside it."""
    rows = summary(trials, metric)
    seeds = len({trial.seed for trial in trials})
    body = [f"<h1>{html.escape(title)}</h1>", table(heads(metric), [cells(row) for row in rows])]
    body += [f"<p>{note(seeds)}</p>", curves(trials, metric)]
    commands = [[trial.path.name, trial.command] for trial in trials if trial.outcome is not None]
    body += ["<h2>The commands that repeat it</h2>", table(["run", "command"], commands)]
    write_whole(file, page(title, body))
    write_whole(file.with_suffix(".json"), json.dumps({"metric": metric, "rows": rows}, indent=1).encode())
    return rows


def curves(trials: Sequence[Trial], metric: str) -> str:
    """The metric against time, passes and samples: medians of the seeds, with a band between quartiles."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return "<p>There are no curves: matplotlib is not installed (pip install 'germline[report]').</p>"
    figure = Figure(figsize=(13, 4.2), layout="constrained")
    for axis, (along, label) in zip(figure.subplots(1, len(AXES)), AXES.items(), strict=True):
        for name in dict.fromkeys(trial.variant.name for trial in trials):
            lines = [line for trial in trials if trial.variant.name == name and (line := points(trial, metric, along))]
            if lines:
                x, low, middle, high = band(lines)
                axis.plot(x, middle, label=name, lw=1.3)
                axis.fill_between(x, low, high, alpha=0.2)
        axis.set(xlabel=label, ylabel=metric.replace("_", " "))
        axis.grid(alpha=0.3)
    figure.axes[0].legend(fontsize=8)
    return embedded(figure)


def points(trial: Trial, metric: str, along: str) -> list[tuple[float, float]]:
    """A metric as it was measured on the way; metrics that are measured at the end only have no curve."""
    factor = 1 / trial.batch if along == "total_passes" else 1.0
    key = "total_samples" if along == "total_passes" else along
    return [(row[key] * factor, row[metric]) for row in trial.rows if metric in row]


def band(lines: Sequence[Sequence[tuple[float, float]]]) -> tuple[Any, Any, Any, Any]:
    """Quartiles of several curves, from where the last of them begins to where the first ends.

    >>> x, low, middle, high = band([[(0.0, 0.0), (2.0, 2.0)], [(0.0, 2.0), (1.0, 3.0)]])
    >>> float(x[-1]), float(middle[0]), float(middle[-1])
    (1.0, 1.0, 2.0)
    """
    start, stop = max(line[0][0] for line in lines), min(line[-1][0] for line in lines)
    x = np.linspace(start, max(start, stop), POINTS)
    values = [np.interp(x, *np.array(line).T) for line in lines]
    low, middle, high = np.quantile(values, (0.25, 0.5, 0.75), axis=0)
    return x, low, middle, high
