"""Comparisons of several ways to train one recipe under one budget: their runs, a table of medians, and a report.

Every run is a separate process of ``germline train``, so that its memory can be measured. All runs of a comparison lie
in one folder: those that were interrupted are resumed, and those that have ended are not run again.
"""

import html
import itertools
import json
import math
import re
import signal
import statistics
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from germline.engine.best import lower_is_better
from germline.engine.files import write_atomically
from germline.engine.history import Row, read_rows
from germline.engine.journal import Journal
from germline.errors import BadInput
from germline.reporting.page import CONTROLS, Charts, render_page, render_table

ABOUT = "about.json"  # the file that says what a folder compares
POINTS = 200  # of a curve
AXES = {
    "total_seconds": "seconds of training",
    "total_passes": "forward passes of a batch (a backward pass is two)",
    "total_samples": "samples",
    "generation": "generations",
}
MEDIANS = ("seconds", "generations", "samples", "peak_memory_bytes", "bytes_sent")
INTERRUPTED = 130  # exit code


@dataclass(frozen=True)
class Variant:
    """One of the ways to train.

    Args:
        name: The name of the row in the table, and of the runs' directories.
        arguments: What ``germline train`` is given for it.
        strategy: Its strategy, as module:Class, if it is not part of this package: a resumed run is given it again.
    """

    name: str
    arguments: tuple[str, ...]
    strategy: str | None = None


@dataclass
class Trial:
    """A run of a variant with one seed: its results, or why it failed."""

    variant: Variant
    seed: int
    path: Path
    outcome: dict[str, Any] | None = None
    rows: list[Row] = field(default_factory=list)
    batch: int = 1
    command: str = ""  # that repeats it
    failure: str = ""

    @property
    def title(self) -> str:
        return f"{self.variant.name}, seed {self.seed}"

    @property
    def has_journal(self) -> bool:
        return (self.path / "journal.sqlite").is_file()

    def load(self) -> bool:
        """Read the results if the run has ended, and return whether it has."""
        if not self.has_journal:
            return False
        journal = Journal.open(self.path, read_only=True)
        outcome = journal.outcome()
        has_ended = outcome is not None and outcome["stopped_by"] != "interrupt"
        if has_ended:
            self.outcome, self.rows, self.failure = outcome, read_rows(journal), ""
            self.batch, self.command = journal.header["batch_size"] or 1, str(journal.header.get("command", ""))
        journal.close()
        return has_ended


@dataclass(frozen=True)
class Comparison:
    """A folder of runs of one recipe.

    Args:
        folder: The folder of the runs.
        recipe: The recipe, as journals call it.
        common: Arguments of ``germline train`` that all runs are given.
        variants: The ways to train that are compared.
        seeds: Runs of each variant, with seeds 0, 1, ...
        jobs: Runs at the same time.
        processes: The processes that were started.
        interrupted: Set once the user or a run has interrupted the comparison.
    """

    folder: Path
    recipe: str
    common: tuple[str, ...]
    variants: tuple[Variant, ...]
    seeds: int
    jobs: int = 1
    processes: "list[subprocess.Popen[str]]" = field(default_factory=list)
    interrupted: threading.Event = field(default_factory=threading.Event)

    def run(self) -> list[Trial]:
        """Run all trials that have not ended yet, and return all of them.

        Raises:
            BadInput: The folder holds runs with other settings.
            KeyboardInterrupt: The comparison was interrupted; it can be run again to go on.
        """
        self.claim()
        pairs = itertools.product(range(self.seeds), self.variants)
        trials = [Trial(variant, seed, self.folder / f"{variant.name}-{seed}") for seed, variant in pairs]
        with ThreadPoolExecutor(self.jobs) as threads, interruptible():
            try:
                list(threads.map(self.carry_out, trials))
            except KeyboardInterrupt:
                self.interrupted.set()
                for process in self.processes:
                    if process.poll() is None:
                        process.send_signal(signal.SIGINT)  # it ends after its current generation
        if self.interrupted.is_set():
            raise KeyboardInterrupt
        return trials

    def claim(self) -> None:
        """Write down what the folder compares, unless it belongs to another comparison."""
        file = self.folder / ABOUT
        known = json.loads(file.read_text()) if file.is_file() else {"variants": {}}
        own = {"recipe": self.recipe, "common": list(self.common)}
        variants = known["variants"] | {variant.name: list(variant.arguments) for variant in self.variants}
        same_variants = all(variants[name] == arguments for name, arguments in known["variants"].items())
        if not same_variants or any(known.get(key, value) != value for key, value in own.items()):
            raise BadInput(f"{self.folder} holds runs under another budget or other settings: give another --name.")
        self.folder.mkdir(parents=True, exist_ok=True)
        write_atomically(file, json.dumps({**own, "variants": variants}, indent=1).encode())

    def carry_out(self, trial: Trial) -> None:
        """Run a trial to its end, unless it has ended, and read its results."""
        if self.interrupted.is_set() or trial.load():
            return
        resumed = trial.has_journal
        print(f"{trial.title}{': resumed' if resumed else ''}", file=sys.stderr, flush=True)
        options = ["--seed", str(trial.seed), "--runs", str(self.folder), "--name", trial.path.name]
        new = ["train", self.recipe, *trial.variant.arguments, *self.common, *options]
        again = ["resume", str(trial.path), *format_options(recipe=self.recipe, strategy=trial.variant.strategy)]
        command = [sys.executable, "-m", "germline", *(again if resumed else new), "--json"]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        self.processes.append(process)
        trial.failure = wait_for(process, show=self.jobs == 1)
        if process.returncode == INTERRUPTED:
            self.interrupted.set()
        elif not trial.load() and self.jobs > 1:  # with one job the error has been shown
            print(f"{trial.title}: {trial.failure}", file=sys.stderr, flush=True)


@contextmanager
def interruptible() -> Iterator[None]:
    """Let Ctrl-C interrupt this process, also if a shell started it with ``&`` and so had it ignored."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def wait_for(process: "subprocess.Popen[str]", *, show: bool) -> str:
    """Wait until a run ends, and return the last line it has written to standard error: its error, if it failed.

    Args:
        process: The run.
        show: Whether its lines are shown as they come.
    """
    assert process.stderr is not None
    last = ""
    for line in process.stderr:
        last = line.strip() or last
        if show:
            print(line, end="", file=sys.stderr, flush=True)
    process.wait()
    return last


def expand_grid(settings: Sequence[str]) -> list[tuple[str, ...]]:
    """Return all combinations of settings KEY=V1,V2; a comma within parentheses is part of a value.

    >>> expand_grid(["lr=1,linear(1, 0, 9)", "rank=none"])
    [('lr=1', 'rank=none'), ('lr=linear(1, 0, 9)', 'rank=none')]
    """
    axes = []
    for setting in settings:
        key, equals, values = setting.partition("=")
        if not equals or not key:
            raise BadInput(f"--set takes KEY=V1,V2, not {setting!r}.")
        axes.append([f"{key}={value.strip()}" for value in re.split(r",(?![^(]*\))", values)])
    return list(itertools.product(*axes))


def format_options(**values: Any) -> list[str]:
    """Return command-line options for the values that are not None.

    >>> format_options(device="cpu", workers=None, seconds=60.0)
    ['--device', 'cpu', '--seconds', '60.0']
    """
    return [word for name, value in values.items() if value is not None for word in (f"--{name}", str(value))]


def choose_metric(trials: Sequence[Trial], name: str | None) -> str:
    """Return the metric that variants are chosen by: the one named, or the first of the dev set, if there is one."""
    names = sorted({metric for trial in trials if trial.outcome for metric in trial.outcome["metrics"]})
    if name is not None:
        if names and name not in names:
            raise BadInput(f"There is no metric {name!r}: choose one of {', '.join(names)}.")
        return name
    for split in ("dev_", "test_", "train_", "center_"):
        metrics = [metric for metric in names if metric.startswith(split)]
        if metrics:
            return str(next((metric for metric in metrics if not metric.endswith(("_loss", "_score"))), metrics[0]))
    return "dev_loss"


def find_test_metric(metric: str) -> str | None:
    """Return the metric of the test set that is reported next to one of the dev set; None for other metrics."""
    return metric.replace("dev_", "test_", 1) if metric.startswith("dev_") else None


def find_best(trial: Trial, metric: str) -> Mapping[str, float]:
    """Return the metrics of a run at the evaluation, or the end, at which one of them was best."""
    assert trial.outcome is not None
    rows = [row for row in (*trial.rows, trial.outcome["metrics"]) if row.get(metric) is not None]
    rows = [row for row in rows if math.isfinite(row[metric])]
    best = min if lower_is_better(metric) else max
    return best(rows, key=lambda row: row[metric]) if rows else {}


def summarize(trials: Sequence[Trial], metric: str) -> list[dict[str, Any]]:
    """Return a row for each variant, the best first: median and quartiles of the metric, medians of the rest.

    The test set does not decide: its metric is reported at the end of the run and at the evaluation that was best on
    the dev set.
    """
    rows, failures, test = [], [], find_test_metric(metric)
    for name, group in group_by_variant(trials).items():
        outcomes = [trial.outcome for trial in group if trial.outcome is not None]
        values = [value for outcome in outcomes if (value := outcome["metrics"].get(metric)) is not None]
        row: dict[str, Any] = {"variant": name, "seeds": len(outcomes)}
        if not values:
            failure = next((trial.failure for trial in group if trial.failure), "no value")
            failures.append({**row, "failure": failure})
            continue
        low, middle, high = (float(q) for q in np.quantile(values, (0.25, 0.5, 0.75)))
        row |= {"median": middle, "lower quartile": low, "upper quartile": high}
        best = [find_best(trial, metric) for trial in group if trial.outcome is not None]
        for key, measured in (("test", [outcome["metrics"] for outcome in outcomes]), ("test at best dev", best)):
            tests = [value for metrics in measured if test and (value := metrics.get(test)) is not None]
            row[key] = statistics.median(tests) if tests else None
        row |= {key: statistics.median(outcome[key] for outcome in outcomes) for key in MEDIANS}
        row["passes"] = statistics.median(trial.outcome["samples"] / trial.batch for trial in group if trial.outcome)
        rows.append(row)
    rows.sort(key=lambda row: row["median"], reverse=not lower_is_better(metric))
    return rows + failures


def group_by_variant(trials: Sequence[Trial]) -> dict[str, list[Trial]]:
    """Return the trials of each variant, by its name."""
    groups: dict[str, list[Trial]] = {}
    for trial in trials:
        groups.setdefault(trial.variant.name, []).append(trial)
    return groups


def format_row(row: Mapping[str, Any]) -> list[str]:
    """Return the cells of a row of the table."""
    if "median" not in row:
        return [row["variant"], row["failure"], *[""] * 8]
    quartiles = f" ({row['lower quartile']:.4f} to {row['upper quartile']:.4f})" if row["seeds"] > 1 else ""
    quality = f"{row['median']:.4f}{quartiles}"
    tests = ["" if row[key] is None else f"{row[key]:.4f}" for key in ("test", "test at best dev")]
    memory, sent = row["peak_memory_bytes"] / 1e6, row["bytes_sent"] / 1e6
    numbers = [f"{row['generations']:.0f}", f"{row['passes']:,.0f}", f"{row['samples']:,.0f}"]
    return [row["variant"], quality, *tests, f"{row['seconds']:.1f}", *numbers, f"{memory:,.0f}", f"{sent:,.1f}"]


def column_names(metric: str) -> list[str]:
    """Return the names of the columns of the table."""
    test = (find_test_metric(metric) or "test").replace("_", " ")
    numbers = ["seconds", "generations", "passes", "samples", "MB at most", "MB sent"]
    return ["", metric.replace("_", " "), test, f"{test} at best dev", *numbers]


def describe_winner(rows: Sequence[Mapping[str, Any]], metric: str) -> str:
    """Return a line about the best variant, with its result on the test set."""
    best, test = rows[0], find_test_metric(metric)
    line = f"best by {metric.replace('_', ' ')}: {best['variant']} ({best['median']:.4f})"
    if test is None or best["test"] is None:
        return line
    at_best = f"{best['test at best dev']:.4f} at its best evaluation on dev"
    return f"{line}, {test.replace('_', ' ')} {best['test']:.4f}, {at_best}"


def explain_table(seeds: int) -> str:
    """Return the note below the table."""
    medians = f"medians of {seeds} seeds, with quartiles; " if seeds > 1 else ""
    return f"{medians}passes are forward passes of a batch, a backward pass counts as two"


def write_comparison(trials: Sequence[Trial], metric: str, file: Path, title: str) -> list[dict[str, Any]]:
    """Write the table and the curves as one HTML file, and the numbers of the table as JSON next to it.

    Returns:
        The rows of the table.
    """
    rows = summarize(trials, metric)
    seeds = len({trial.seed for trial in trials})
    table = render_table(column_names(metric), [format_row(row) for row in rows], "numeric")
    body = [f"<h1>{html.escape(title)}</h1>", table]
    charts = Charts(AXES)
    names = sorted({key for trial in trials for row in trial.rows for key in row if key.startswith(("dev_", "test_"))})
    others = [name for name in names if name != metric]
    drawn = "".join(draw_curves(trials, name, charts) for name in (metric, *others))
    body += [f"<p class=quiet>{explain_table(seeds)}</p>", CONTROLS, f"<div class=charts>{drawn}</div>"]
    commands = [[trial.path.name, trial.command] for trial in trials if trial.outcome is not None]
    body += ["<h2>The commands that repeat it</h2>", render_table(["run", "command"], commands)]
    write_atomically(file, render_page(title, body, charts))
    write_atomically(file.with_suffix(".json"), json.dumps({"metric": metric, "rows": rows}, indent=1).encode())
    return rows


def draw_curves(trials: Sequence[Trial], metric: str, charts: Charts) -> str:
    """Return the chart of the metric: medians of the seeds, with a band between quartiles."""
    series: list[dict[str, Any]] = []
    for name, group in group_by_variant(trials).items():
        lines = {along: [line for one in group if (line := curve_points(one, metric, along))] for along in AXES}
        if all(lines.values()):  # a run may be too short to be measured
            tables = {
                along: charts.add_table(dict(zip((along, "low", "median", "high"), quartile_band(drawn), strict=True)))
                for along, drawn in lines.items()
            }
            band = {"band": ["low", "high"]} if len(group) > 1 else {}
            series.append({"label": name, "y": "median", "tables": tables, "color": len(series), **band})
    return charts.add_chart(metric.replace("_", " "), series)


def curve_points(trial: Trial, metric: str, along: str) -> list[tuple[float, float]]:
    """Return a metric as it was measured during a run; a metric that is only measured at the end has no points."""
    measured = [row for row in trial.rows if math.isfinite(row.get(metric, math.nan))]
    if along == "total_passes":
        return [(row["total_samples"] / trial.batch, row[metric]) for row in measured]
    return [(row[along] + (along == "generation"), row[metric]) for row in measured]


def quartile_band(lines: Sequence[Sequence[tuple[float, float]]]) -> tuple[Any, Any, Any, Any]:
    """Return x, and the quartiles of several curves, from where the last of them begins to where the first ends.

    >>> x, low, middle, high = quartile_band([[(0.0, 0.0), (2.0, 2.0)], [(0.0, 2.0), (1.0, 3.0)]])
    >>> float(x[-1]), float(middle[0]), float(middle[-1])
    (1.0, 1.0, 2.0)
    """
    start, stop = max(line[0][0] for line in lines), min(line[-1][0] for line in lines)
    x = np.linspace(start, max(start, stop), POINTS)
    values = [np.interp(x, *np.array(line).T) for line in lines]
    low, middle, high = np.quantile(values, (0.25, 0.5, 0.75), axis=0)
    return x, low, middle, high
