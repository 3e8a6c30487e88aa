"""The accuracy tables of the Hybrid-ES paper (Bartolo), repeated: variants, intervals and sigmas.

    python benchmarks/hybrid_es.py [--seeds 3] [--runs DIR] [--only NAME ...] [--device D] [--jobs N]
    python benchmarks/hybrid_es.py --table | --convnet

Each row is ``germline train hybrid-es-mnist`` with some settings, once for each seed. A run that was interrupted is
resumed, and one that has ended is not run again, so this can be stopped and started at any time. ``--table`` prints the
rows whose runs have ended and runs nothing. Figures are medians of the seeds, train and dev accuracy in percent.
``--convnet`` counts, for the first batches of the convolutional net, which samples improve on the step without a shift:
by the cost of the training batch, which chooses the step, and by that of the entire dev set, as the paper does.
"""

import argparse
import json
import statistics
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from germline.engine.journal import Journal
from germline.engine.opening import set_up
from germline.engine.session import Session
from germline.fleet import Local
from germline.recipes import make_recipe
from germline.strategies import HybridES

STEPS = 1500  # 30 epochs of 50


@dataclass(frozen=True)
class Row:
    """A row of the table: settings, and the published accuracy in percent."""

    name: str
    settings: tuple[str, ...]
    published: tuple[float, float] | None = None  # train and dev
    options: tuple[str, ...] = ()


def gated(interval: int, sigma: float = 0.1) -> tuple[str, ...]:
    return ("variant=gated", f"interval={interval}", f"sigma={sigma}")


FIXED = ("variant=fixed", "population=1", "sigma=0")  # the mean gradient of epoch 0, and no shifts
FIXED_LAST = ("start=50", "epoch=0", "interval=1500", "population=1", "sigma=0")  # the last gradient of epoch 0

ROWS = [
    Row("reference", ("interval=1",), (99.54, 96.57)),
    Row("reference-normalized", ("interval=1", "normalize=true"), (93.69, 93.23)),
    Row("reference-normalized-1", ("interval=1", "normalize=true", "lr=1")),
    Row("reference-normalized-0.5", ("interval=1", "normalize=true", "lr=0.5")),
    Row("assisted", ("variant=assisted",), (99.85, 96.08)),
    Row("gated-2-sigma-0.01", gated(2, 0.01), (96.49, 93.58)),
    Row("gated-2", gated(2), (96.54, 93.73)),
    Row("gated-2-sigma-0.5", gated(2, 0.5), (96.72, 94.01)),
    Row("gated-2-sigma-0.75", gated(2, 0.75), (96.69, 93.98)),
    Row("gated-2-sigma-1", gated(2, 1.0), (96.78, 94.16)),
    Row("gated-2-sigma-1.25", gated(2, 1.25), (96.80, 94.21)),
    Row("gated-2-sigma-1.5", gated(2, 1.5), (96.86, 94.09)),
    Row("gated-3-sigma-1.25", gated(3, 1.25), (95.34, 93.06)),
    Row("gated-4-sigma-1.25", gated(4, 1.25), (94.21, 92.23)),
    Row("parallel", (), (99.54, 96.57), ("--strategy", "gradient", "--fleet", "spmd", "--workers", "2")),
    Row("gated-2-sigma-0", ("variant=gated", "interval=2", "population=1", "sigma=0")),
    Row("gated-3", gated(3)),
    Row("gated-3-sigma-0.5", gated(3, 0.5)),
    Row("gated-3-sigma-1.5", gated(3, 1.5)),
    Row("gated-4", gated(4)),
    Row("gated-4-sigma-0.5", gated(4, 0.5)),
    Row("algorithm2-2", ("interval=2",)),
    Row("algorithm2-3", ("interval=3",)),
    Row("algorithm2-4", ("interval=4",)),
    Row("algorithm2-2-average", ("interval=2", "combine=average")),
    Row("algorithm2-2-dev", ("interval=2", "select_on=dev")),
    Row("algorithm2-2-auto", ("interval=2", "sigma=auto")),
    Row("algorithm2-2-momentum", ("interval=2", "sigma=auto", "momentum=0.9")),
    Row("algorithm2-2-adapted", ("interval=2", "adapt=1.2")),
    Row("algorithm2-2-sign", ("interval=2", "noise=sign")),
    Row("algorithm2-2-uniform", ("interval=2", "noise=uniform")),
    Row("algorithm2-2-tenth", ("interval=2", "fraction=0.1")),
    Row("algorithm2-2-late", ("interval=2", "start=500")),
    Row("algorithm2-2-int8", ("interval=2", "wire=int8")),
    Row("algorithm2-4-late", ("interval=4", "start=500")),
    Row("gated-4-late", (*gated(4), "start=500")),
    Row("gated-4-sigma-1.5", gated(4, 1.5)),
    Row("gated-4-sigma-1.5-late", (*gated(4, 1.5), "start=500")),
    Row("gated-4-slot", (*gated(4, 1.5), "base=slot")),
    Row("algorithm2-4-slower", ("interval=4", "lr=2")),
    Row("algorithm2-4-smaller", ("interval=4", "sigma=0.03")),
    Row("slot-2", ("interval=2", "base=slot")),
    Row("slot-4", ("interval=4", "base=slot")),
    Row("fixed-mean", ("variant=fixed",)),
    Row("fixed-slot", ("variant=fixed", "base=slot")),
    Row("fixed-last", FIXED_LAST),
    Row("fixed-gated", ("variant=gated", *FIXED_LAST)),
    Row("fixed-plain", FIXED),
    Row("fixed-plain-no-decay", (*FIXED, "weight_decay=0")),
    Row("fixed-plain-0.5", (*FIXED, "lr=0.5")),
    Row("fixed-plain-0.05", (*FIXED, "lr=0.05")),
]


def run_path(row: Row, seed: int, runs: Path) -> Path:
    return runs / f"{row.name}-{seed}"


def read_outcome(path: Path) -> dict[str, Any] | None:
    """Return the outcome of a run, or None if it has not ended."""
    if not (path / "journal.sqlite").is_file():
        return None
    journal = Journal.open(path, read_only=True)
    outcome = journal.outcome()
    journal.close()
    return outcome if outcome is not None and outcome["generations"] == STEPS else None


def run(row: Row, seed: int, runs: Path, device: str) -> dict[str, Any]:
    """Run a row with one seed, unless that has ended, and return its outcome."""
    path = run_path(row, seed, runs)
    outcome = read_outcome(path)
    if outcome is None:
        options = [*row.options, *(word for setting in row.settings for word in ("--set", setting))]
        new = ["train", "hybrid-es-mnist", *options, "--seed", str(seed), "--runs", str(runs), "--name", path.name]
        command = ["resume", str(path)] if path.exists() else new
        command = [sys.executable, "-m", "germline", *command, "--device", device, "--json"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        outcome = read_outcome(path)
        assert outcome is not None
    return outcome


def format_row(row: Row, outcomes: list[dict[str, Any]]) -> str:
    """Return a line of the table."""
    parts = [f"{row.name:24}"]
    for name, published in zip(("train_accuracy", "dev_accuracy"), row.published or (None, None), strict=True):
        values = [100 * one["metrics"][name] for one in outcomes]
        accuracy = f"{statistics.median(values):6.2f} ({min(values):.2f} to {max(values):.2f})"
        parts.append(f"{accuracy:26} {f'{published:.2f}' if published else '':>6}")
    settings = " ".join((*row.options, *row.settings))
    parts.append(f"{statistics.median(one['seconds'] for one in outcomes):7.1f} s   {settings}, {len(outcomes)} seeds")
    return "  ".join(parts)


def show_convnet(runs: Path) -> None:
    """Print the accuracy of the convolutional net, and how many of ten samples improve on the step without a shift."""
    path = runs / "convnet"
    if not path.exists():
        new = ["train", "hybrid-es-convnet", "--runs", str(runs), "--name", path.name, "--json"]
        subprocess.run([sys.executable, "-m", "germline", *new], check=True, stdout=subprocess.DEVNULL)
    journal = Journal.open(path, read_only=True)
    better = [int((r.result.scores[1:] < r.result.scores[0]).sum()) for r in journal.records()]
    outcome = journal.outcome() or {}
    print("dev {dev_accuracy:.4f}, test {test_accuracy:.4f}".format(**outcome["metrics"]), f"in {outcome['seconds']} s")
    print("better than the step without a shift, of ten, in the first batches:")
    print(f"  by the entire dev set {count_improvements(5)}, by the training batch {better[:5]}")
    print("  published, by the entire dev set: [5, 10, 6, 2, 4]")
    print(f"by the training batch {statistics.mean(better):.2f} on average, ", end="")
    print(f"at least one in {sum(map(bool, better))} of {len(better)}")


def count_improvements(batches: int) -> list[int]:
    """Return, for the first batches, how many samples have a lower cost of the entire dev set than the plain step."""
    session = set_up(make_recipe("hybrid-es-convnet", {}, 0), Local("cpu", workers=1), 0)
    strategy, evaluator = session.strategy, None
    assert isinstance(strategy, HybridES)
    counts = []
    for step in range(batches):
        batch = session.batch(step)
        if evaluator is None:
            session.prepare(batch)
            evaluator = session.scorer.gradient_evaluator
        theta, values = session.state.theta, strategy.values(session.state, step)
        result = session.evaluate(step, batch)
        assert result.gradient is not None
        plain = strategy.plain_step(theta, result.gradient, values, 0)
        noise = session.noise.members(np.arange(strategy.population), step)
        thetas = [plain, *noise.perturb(plain, values["lr"] * values["sigma"])]
        first, *others = (measure_dev_cost(session, evaluator, one) for one in thetas)
        counts.append(sum(cost < first for cost in others))
        session.advance(result)
    return counts


def measure_dev_cost(session: Session, evaluator: Any, theta: Tensor) -> float:
    """Return the loss of the entire dev set."""
    with torch.no_grad():
        parts = [
            (float(evaluator.score_at(theta, part)), part.size) for part in session.splits["dev"].in_order(theta.device)
        ]
    return sum(loss * size for loss, size in parts) / sum(size for _, size in parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3, help="runs of each row (default 3)")
    parser.add_argument("--runs", type=Path, default=Path("runs/hybrid-es"), help="the folder of the runs")
    parser.add_argument(
        "--only", nargs="+", choices=[row.name for row in ROWS], metavar="NAME", help="run only these rows"
    )
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    parser.add_argument("--jobs", type=int, default=1, help="runs at the same time")
    parser.add_argument("--table", action="store_true", help="print the rows that have ended, and run nothing")
    parser.add_argument("--convnet", action="store_true", help="run the convolutional net instead")
    parser.add_argument("--json", action="store_true", help="print all metrics as one JSON object in the last line")
    arguments = parser.parse_args()
    if arguments.convnet:
        show_convnet(arguments.runs)
        return
    rows = [row for row in ROWS if arguments.only is None or row.name in arguments.only]
    print(f"{'':24}  {'train':26} {'paper':>6}  {'dev':26} {'paper':>6}")
    results: dict[str, Any] = {}

    def outcome(row: Row, seed: int) -> dict[str, Any] | None:
        if arguments.table:
            return read_outcome(run_path(row, seed, arguments.runs))
        return run(row, seed, arguments.runs, arguments.device)

    with ThreadPoolExecutor(arguments.jobs) as jobs:
        waiting = [(row, [jobs.submit(outcome, row, seed) for seed in range(arguments.seeds)]) for row in rows]
        for row, seeds in waiting:
            outcomes = [result for seed in seeds if (result := seed.result()) is not None]
            if outcomes:
                results[row.name] = [outcome["metrics"] for outcome in outcomes]
                print(format_row(row, outcomes), flush=True)
    if arguments.json:
        print(json.dumps(results))


if __name__ == "__main__":
    main()
