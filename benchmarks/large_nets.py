"""Nets of 0.3 to 11 million parameters, trained from random weights by evolution and by backprop.

    python benchmarks/large_nets.py --device cuda [--only mnist-3m,cif-8m] [--strategies auto,gradient]
    python benchmarks/large_nets.py --device cuda --only unet --strategies mu-lambda,ga,pso --at-once 3 --folder large

Every run is a ``germline train`` of as many seconds as the net's row says (``--seconds`` for all), in a process of its
own; ``--at-once`` runs share the device, and each then has a part of it. ``auto`` is the strategy of the recipe.
Backprop runs once for each of five learning rates, for a fifth of the time each, with early stopping by the dev set;
the one with the best dev metric is printed, and with ``--whole`` runs again for the whole time. The script prints a row
of a table for each run as it ends. With ``--folder``, what the runs printed is kept in files, and rows that are there
are not run again.

As a recipe, this file is ResNet-18 on CIFAR-10: ``germline train benchmarks/large_nets.py``.
"""

import argparse
import json
import math
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

from nets import ResNet18
from torch.nn import functional as F

import germline as gl
from germline.data import load_cifar10
from germline.engine.journal import PROBE, Journal
from germline.genome import count_parameters
from germline.recipes import make_recipe

RATES = (0.0003, 0.001, 0.003, 0.01, 0.03)  # of backprop, by Adam; each falls to 0
PATIENCE = 15  # evaluations of the dev set that bring nothing better


class Net(NamedTuple):
    """A recipe with its settings, what it is judged by, and how long it may train.

    Attributes:
        recipe: The name of the recipe.
        settings: Its settings, without the ``recipe.`` before each.
        metric: The metric of the dev and test sets.
        seconds: The time of a run.
        lower: Whether less is better.
    """

    recipe: str
    settings: dict[str, str]
    metric: str
    seconds: float
    lower: bool = False


NETS = {
    "unet": Net("unet-nuclei", {"size": "large"}, "dice", 300),
    "shapes": Net("unet-shapes", {"size": "large"}, "dice", 300),
    "mnist-3m": Net("mnist-3m", {}, "accuracy", 300),
    "cif-900k": Net("cif-900k", {}, "accuracy", 480),
    "cif-8m": Net("cif-8m", {}, "accuracy", 480),
    "resnet-18": Net(__file__, {}, "accuracy", 480),
    "lstm": Net("lstm-etth1", {"hidden": "272"}, "mse", 120, lower=True),
    "mnist-mlp": Net("mnist-mlp", {}, "accuracy", 60),
    "mnist-conv": Net("mnist-conv", {}, "accuracy", 480),
}


def recipe(*, seed: int = 0, batch_size: int = 128) -> gl.Recipe:
    """Classify CIFAR-10 by ResNet-18, with batch norm of the batch."""
    return gl.Recipe(
        model=gl.seeded(seed, lambda: ResNet18().train()),
        **load_cifar10().reshape(3, 32, 32).as_arguments(),
        loss=F.cross_entropy,
        batch_size=batch_size,
        generations=3000,
        evaluate_every=100,
        snapshot_every=500,
    )


def list_words(net: Net, strategy: str, rate: float | None, seconds: float, device: str) -> list[str]:
    """Return the command line of a run, without its folder."""
    words = ["train", net.recipe, "--device", device, "--seconds", f"{seconds:g}", "--keep", "best", "--json"]
    for key, value in net.settings.items():
        words += ["--set", f"recipe.{key}={value}"]
    if strategy != "auto":
        words += ["--strategy", strategy]
    if rate is not None:
        words += ["--set", f"lr=linear({rate:g}, 0)", "--patience", str(PATIENCE)]
    return words


def train(words: Sequence[str], file: Path | None) -> dict[str, Any]:
    """Run a command unless its result is in the file, and return what it prints with ``--json``."""
    if file is not None and file.exists():
        earlier: dict[str, Any] = json.loads(file.read_text())
        return earlier
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "germline", *words, "--runs", folder]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"germline {' '.join(words)}: {done.stderr.strip()[-2000:]}")
        summary: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        with closing(Journal.open(Path(summary["run"]), read_only=True)) as journal:
            first = next(iter(journal.records()), None)
            chosen = first.result.values if first is not None and first.result.generation == PROBE else {}
            summary["settings"] = {**journal.header["settings"], **chosen}
    if file is not None:
        file.write_text(json.dumps(summary, indent=1) + "\n")
    return summary


def describe(settings: dict[str, Any]) -> str:
    """Return the settings of a strategy in a few words."""
    shown = ("population", "rank", "sigma", "lr", "parents", "decay")
    values = {key: settings[key] for key in shown if settings.get(key) is not None}
    return ", ".join(
        f"{key} {value['schedule'] if isinstance(value, dict) else value}" for key, value in values.items()
    )


def print_row(name: str, net: Net, strategy: str, summary: dict[str, Any], parameters: int) -> None:
    metrics, digits = summary["metrics"], 4
    cells = [name, f"{parameters:,}", f"`{strategy}`", describe(summary["settings"]), f"{summary['generations']:,}"]
    cells += [f"{summary['seconds']:.0f}", f"{metrics[f'dev_{net.metric}']:.{digits}f}"]
    cells += [f"{metrics[f'test_{net.metric}']:.{digits}f}", f"{summary.get('peak_memory_bytes', math.nan) / 1e9:.1f}"]
    print(f"| {' | '.join(cells)} |", flush=True)


def compare(name: str, strategy: str, options: argparse.Namespace) -> None:
    """Train a net by a strategy and print its row; by backprop, with the best of the learning rates."""
    net = NETS[name]
    seconds = options.seconds or net.seconds
    count = count_parameters(make_recipe(net.recipe, net.settings, 0).model)

    def run(rate: float | None, seconds: float) -> dict[str, Any]:
        label = strategy if rate is None else f"{strategy}-{rate:g}-{seconds:.0f}"
        file = options.folder / f"{name}-{label}.json" if options.folder else None
        return train(list_words(net, strategy, rate, seconds, options.device), file)

    if strategy != "gradient":
        print_row(name, net, strategy, run(None, seconds), count)
        return
    runs = {rate: run(rate, seconds / len(RATES)) for rate in RATES}
    sign = 1 if net.lower else -1
    best = min(runs, key=lambda rate: sign * runs[rate]["metrics"][f"dev_{net.metric}"])
    print_row(name, net, strategy, runs[best], count)
    if options.whole:
        print_row(name, net, strategy, run(best, seconds), count)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(NETS), help="names of nets, with commas between them")
    parser.add_argument("--strategies", default="auto,gradient", help="names of strategies, with commas between them")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    parser.add_argument("--seconds", type=float, help="the time of every run")
    parser.add_argument("--at-once", type=int, default=1, help="runs that share the device")
    parser.add_argument("--folder", type=Path, help="where results are kept")
    parser.add_argument("--whole", action="store_true", help="train by the best learning rate for the whole time, too")
    options = parser.parse_args()
    if unknown := [name for name in options.only.split(",") if name not in NETS]:
        parser.error(f"there is no net {unknown[0]!r}: choose from {', '.join(NETS)}")
    if options.folder:
        options.folder.mkdir(parents=True, exist_ok=True)
    print("| net | parameters | strategy | settings | generations | seconds | dev | test | GB |")
    print("|---|---|---|---|---|---|---|---|---|")
    failed = 0
    with ThreadPoolExecutor(options.at_once) as pool:
        pairs = [(name, strategy) for name in options.only.split(",") for strategy in options.strategies.split(",")]
        for (name, strategy), future in [(pair, pool.submit(compare, *pair, options)) for pair in pairs]:
            if (error := future.exception()) is not None:
                print(f"{name} by {strategy}: {error}", file=sys.stderr, flush=True)
                failed += 1
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
