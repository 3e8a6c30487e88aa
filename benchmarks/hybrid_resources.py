"""The cost of a step of Hybrid-ES: the paper's model, the same model with the times of this machine, measured runs.

    python benchmarks/hybrid_resources.py [RECIPE] [--set KEY=VALUE ...] [--json FILE]
    sudo python benchmarks/hybrid_resources.py --link none --link 100mbit --link 10mbit [--json FILE]

A full step of a worker is a forward and a backward pass of its part of the batch, and an update. A shifted step is its
part of the K samples, each a shift and a forward pass of the batch, and an update. Of r steps one is full, and only
full ones send gradients:

    runtime  (full + (r - 1) shifted) / (r full)
    memory   (1 + (r - 1) m) / r, a mean over time, where m is the memory of a forward pass over that of both passes
    network  1 / r

all compared with a run in which every step is full. In the paper each worker has its own batch, and one sample.

``--link`` measures the milliseconds of a step with the network in them, which the paper leaves out: two processes, each
in a network namespace of its own, with a link of that bandwidth between them, for r = 1 to 4. The times of full and
shifted steps are medians. What a full step takes beyond its own work is the exchange of gradients, which stands next to
the time of computing the noise of a shifted step.
"""

import argparse
import dataclasses
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from scaling import HOSTS, LIMITS, PORT, connect, disconnect, set_limit

from germline.cli.costs import median_seconds
from germline.cli.options import StrategyOptions
from germline.engine.journal import Journal
from germline.engine.opening import set_up
from germline.errors import BadInput
from germline.fleet import Local
from germline.population import exact_arithmetic, single_threaded_torch
from germline.recipes.recipe import Recipe
from germline.strategies import GenerationResult, HybridES

REPEATS = 7
INTERVALS = (2, 3, 4)
STEPS = 24  # of a run that is measured: whole intervals of each
WORKERS = 2


@dataclass(frozen=True)
class Phases:
    """Seconds of the parts of a step of one worker, and bytes that are held at once."""

    forward: float
    backward: float
    shift: float
    update: float
    memory_full: float
    memory_shifted: float
    samples: int = 1  # of a worker in a shifted step
    sharing: int = 1  # workers that share the batch of a full step

    @property
    def full(self) -> float:
        """The seconds of a full step."""
        return (self.forward + self.backward) / self.sharing + self.update

    @property
    def shifted(self) -> float:
        """The seconds of a shifted step."""
        return self.samples * (self.shift + self.forward) + self.update


PUBLISHED = Phases(16.4e-3, 5.5e-3, 15.1e-3, 1.196e-3, 3.0, 1.0)  # memory in units of a forward pass


@dataclass(frozen=True)
class Ratios:
    """The cost of a step, as a fraction of that of a run in which every step is full."""

    runtime: float
    memory: float
    network: float


def predict_ratios(phases: Phases, interval: int) -> Ratios:
    """Return the ratios of the model for one full step in ``interval`` steps.

    >>> ratios = predict_ratios(PUBLISHED, 2)
    >>> round(ratios.runtime, 3), round(ratios.memory, 3), ratios.network
    (1.208, 0.667, 0.5)
    """
    others = interval - 1
    runtime = (phases.full + others * phases.shifted) / (interval * phases.full)
    memory = (1 + others * phases.memory_shifted / phases.memory_full) / interval
    return Ratios(runtime, memory, 1 / interval)


def measure_phases(recipe: Recipe, workers: int = WORKERS) -> Phases:
    """Measure the parts of a step on one core of this machine."""
    strategy = recipe.strategy
    assert isinstance(strategy, HybridES)
    session = set_up(recipe, Local("cpu", workers=1), 0)
    batch = session.batch(0)
    session.prepare(batch)
    assert batch is not None
    plain, state, field = session.scorer.gradient_evaluator, session.state, session.noise
    theta, values = state.theta, session.strategy.values(state, 0)
    member, out = field.members(np.arange(1), 1), theta.new_empty(1, theta.numel())
    sigma = values.get("sigma", 1e-3)
    _, gradient = plain.gradient(theta, batch)
    result = GenerationResult(0, np.ones(1, np.float32), values, gradient)

    def forward() -> None:
        with torch.no_grad():
            plain.score_at(theta, batch)

    def both() -> None:
        plain.gradient(theta, batch)

    with single_threaded_torch(), exact_arithmetic(session.scorer.device):
        forward_seconds, both_seconds, shift, update = (
            median_seconds(work, repeats=REPEATS)
            for work in (
                forward,
                both,
                lambda: member.perturb(theta, sigma, out=out),
                lambda: session.strategy.tell(state, result, field, maximize=False),
            )
        )
        memory_shifted, memory_full = peak_bytes(forward), peak_bytes(both)
    return Phases(
        forward_seconds,
        max(0.0, both_seconds - forward_seconds),
        shift,
        update,
        memory_full=memory_full,
        memory_shifted=memory_shifted,
        samples=-(-strategy.population // workers),
        sharing=1 if strategy.per_worker else workers,
    )


def peak_bytes(work: Callable[[], object]) -> float:
    """Return the most bytes of tensors that some work holds at once, as torch's profiler counts them."""
    from torch.profiler import ProfilerActivity, profile

    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else it prints
    with tempfile.TemporaryDirectory() as folder:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiler:
            work()
        profiler.export_chrome_trace(f"{folder}/trace.json")
        events = json.loads(Path(folder, "trace.json").read_text())["traceEvents"]
    changes = [(e["ts"], e["args"]["Bytes"]) for e in events if e.get("name") == "[memory]"]
    held = np.cumsum([size for _, size in sorted(changes, key=lambda change: change[0])])
    return float(held.max(initial=0.0))


@dataclass(frozen=True)
class MeasuredRun:
    """The cost of a step in a run of several processes."""

    seconds: float
    bytes_sent: float
    peak_memory: float
    mean_memory: float  # over time, of the resident memory of the process
    full: dict[str, float]  # seconds of a full step and of its parts, in the process that writes the journal
    shifted: dict[str, float]


def measure_run(recipe: str, settings: Sequence[str], interval: int, *, in_namespaces: bool = False) -> MeasuredRun:
    """Measure a short run of ``germline train`` in two processes of one thread."""
    options = [word for setting in (*settings, f"interval={interval}") for word in ("--set", setting)]
    with tempfile.TemporaryDirectory() as folder:
        fleet = ["--fleet", "spmd", "--device", "cpu", *([] if in_namespaces else ["--workers", str(WORKERS)])]
        command = ["train", recipe, *options, *fleet, "--generations", str(STEPS), "--runs", folder, "--json"]
        if in_namespaces:
            output = train_in_namespaces(command)
        else:
            whole = [sys.executable, "-m", "germline", *command]
            output = subprocess.run(whole, capture_output=True, text=True, check=True).stdout
        summary = json.loads(output.splitlines()[-1])
        journal = Journal.open(Path(summary["run"]), read_only=True)
        steps = [record.info | record.info["diagnostics"] for record in journal.records()]
        journal.close()
    seconds = [step["seconds"] for step in steps]
    return MeasuredRun(
        summary["seconds"] / STEPS,
        summary["bytes_sent"] / STEPS,
        summary["peak_memory_bytes"],
        float(np.average([step.get("memory", 0) for step in steps], weights=seconds)),
        full=median_parts([step for step in steps if "backward_seconds" in step]),
        shifted=median_parts([step for step in steps if "backward_seconds" not in step]),
    )


def median_parts(steps: list[dict[str, float]]) -> dict[str, float]:
    """Return the median seconds of the parts of some steps."""
    return {
        part: statistics.median(step.get(f"{part}_seconds", 0.0) for step in steps)
        for part in ("forward", "backward", "noise", "update")
        if steps
    } | ({"whole": statistics.median(step["seconds"] for step in steps)} if steps else {})


def train_in_namespaces(command: Sequence[str]) -> str:
    """Run a command of germline as two processes, each in its own namespace, and return what the first one prints."""
    environment = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": next(iter(HOSTS.values())), "MASTER_PORT": PORT}
    environment |= {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    started = [
        subprocess.Popen(
            ["ip", "netns", "exec", host, sys.executable, "-m", "germline", *command],
            stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            text=True,
            env=environment | {"RANK": str(rank)},
        )
        for rank, host in enumerate(HOSTS)
    ]
    output, _ = [process.communicate()[0] for process in started]
    if any(process.returncode for process in started):
        raise SystemExit("a process has failed")
    return output


def measure_links(recipe: str, settings: Sequence[str], links: Sequence[str]) -> list[dict[str, Any]]:
    """Return the seconds of steps over each link, for r = 1 to 4."""
    rows = []
    connect()
    try:
        for link in links:
            set_limit(link)
            for interval in (1, *INTERVALS):
                run = measure_run(recipe, settings, interval, in_namespaces=True)
                full, shifted = run.full["whole"], run.shifted.get("whole", 0.0)
                step = (full + (interval - 1) * shifted) / interval
                waiting = full - sum(seconds for part, seconds in run.full.items() if part != "whole")
                row = {"link": link, "interval": interval, "step": step, "full": full, "shifted": shifted}
                noise = run.shifted.get("noise", 0.0)
                rows.append({**row, "exchange": waiting, "noise": noise, "bytes": run.bytes_sent})
                print(f"{link}, r = {interval}: done", file=sys.stderr, flush=True)
    finally:
        disconnect()
    return rows


def show_links(rows: list[dict[str, Any]]) -> None:
    """Print the time of a step over each link, and the time of noise next to that of the exchange."""
    table = Table("link", "r", "step, ms", "of r = 1", "full", "shifted", "noise", "exchange", "bytes", box=None)
    alone = {row["link"]: row["step"] for row in rows if row["interval"] == 1}
    for row in rows:
        times = [f"{1e3 * row[name]:.3g}" for name in ("full", "shifted", "noise", "exchange")]
        ratio = f"{row['step'] / alone[row['link']]:.2f}"
        table.add_row(
            row["link"], str(row["interval"]), f"{1e3 * row['step']:.1f}", ratio, *times, f"{row['bytes']:,.0f}"
        )
    Console(width=120).print(table)


def compare_models(name: str, recipe: Recipe, settings: Sequence[str]) -> dict[str, Any]:
    """Return the model with the paper's times and with this machine's, and measured runs in two processes."""
    phases, all_full = measure_phases(recipe), measure_run(name, settings, 1)
    rows = []
    for interval in INTERVALS:
        run = measure_run(name, settings, interval)
        ratios = {
            "paper": predict_ratios(PUBLISHED, interval),
            "model": predict_ratios(phases, interval),
            "measured": Ratios(
                run.seconds / all_full.seconds,
                run.mean_memory / all_full.mean_memory,
                run.bytes_sent / all_full.bytes_sent,
            ),
        }
        row = {source: dataclasses.asdict(ratio) for source, ratio in ratios.items()}
        rows.append({"interval": interval, **row, "run": dataclasses.asdict(run)})
    return {"phases": dataclasses.asdict(phases), "all_full": dataclasses.asdict(all_full), "rows": rows}


def show(results: dict[str, Any]) -> None:
    """Print the results as tables."""
    phases, full = results["phases"], results["all_full"]
    parts = [f"{part} {1e3 * phases[part]:.3g}" for part in ("forward", "backward", "shift", "update")]
    print(f"one core, ms: {', '.join(parts)}; the paper's: forward 16.4, backward 5.5, shift 15.1, update 1.196")
    held = [phases[f"memory_{kind}"] / 1e6 for kind in ("full", "shifted")]
    print(f"tensors held at once by a gradient {held[0]:.3g} MB, by a sample {held[1]:.3g} MB")
    steps = f"{1e3 * full['seconds']:.3g} ms, {full['bytes_sent']:,.0f} bytes sent"
    print(f"all steps full, two processes: {steps}, at most {full['peak_memory'] / 1e6:,.0f} MB of memory")
    sources = {"paper": "the paper's model", "model": "the same, this machine", "measured": "two processes here"}
    table = Table("interval", "by", "runtime", "memory", "network", box=None, pad_edge=False)
    for row, (source, label) in itertools.product(results["rows"], sources.items()):
        ratios = (f"{row[source][ratio]:.3f}" for ratio in ("runtime", "memory", "network"))
        table.add_row(str(row["interval"]), label, *ratios)
    Console().print(table)
    print("as parts of what steps take that are all full; memory is a mean over time, of two processes what they keep")
    for row in results["rows"]:
        run = row["run"]
        spent = [", ".join(f"{part} {1e3 * s:.3g}" for part, s in run[kind].items()) for kind in ("full", "shifted")]
        times = "full step {}; shifted step {}".format(*spent)
        memory = f"memory {run['mean_memory'] / 1e6:,.0f} MB on average, {run['peak_memory'] / 1e6:,.0f} at most"
        print(f"interval {row['interval']}, ms of a process: {times}; {memory}")


def load_recipe(name: str, settings: Sequence[str]) -> Recipe:
    """Return a recipe of Hybrid-ES with settings of its strategy, or of the recipe as recipe.KEY=VALUE."""
    recipe, _ = StrategyOptions(settings=list(settings)).build_recipe(name)
    if not isinstance(recipe.strategy, HybridES):
        raise BadInput(f"The recipe {name} is trained by {recipe.strategy.name}: give one of Hybrid-ES.")
    return recipe


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", nargs="?", default="hybrid-es-mnist", help="a recipe of Hybrid-ES")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="settings",
                        help="a setting of the strategy, or recipe.KEY=VALUE")  # fmt: skip
    parser.add_argument(
        "--link", choices=LIMITS, action="append", help="measure steps over a network of this bandwidth"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also add the results to this file")
    options = parser.parse_args()
    try:
        recipe = load_recipe(options.recipe, options.settings)
    except BadInput as error:
        parser.error(str(error))
    print("measuring runs in two processes ...", file=sys.stderr)
    results: dict[str, Any]
    if options.link:
        results = {"links": measure_links(options.recipe, options.settings, options.link)}
        show_links(results["links"])
    else:
        results = compare_models(options.recipe, recipe, options.settings)
        show(results)
    if options.json is not None:
        before = json.loads(options.json.read_text()) if options.json.is_file() else {}
        options.json.write_text(json.dumps(before | results))


if __name__ == "__main__":
    main()
