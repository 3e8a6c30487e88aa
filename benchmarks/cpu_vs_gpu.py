"""Evolution on CPUs compared with backprop on a GPU: seconds to a stated quality, the claim of Kalia et al.

    python benchmarks/cpu_vs_gpu.py RECIPE [--target METRIC=VALUE] [--seconds 300] [--set KEY=VALUE ...] [--json FILE]
    python benchmarks/cpu_vs_gpu.py RECIPE --gpu-rows FILE

Four strategies of evolution train on 1 and on 2 CPU workers (threads of one process), backprop on the CPU and, where
there is one, on a GPU, each until a metric is reached or the time is over. With ``--gpu-rows`` the row of the GPU
comes from what ``--json`` wrote on a machine that has one. For each strategy that reaches the metric 'germline plan'
predicts from how many workers on, over a network of 1 Gbit/s, it would take less time than backprop on the GPU.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

TARGETS = {
    "digits": "dev_accuracy=0.95",
    "mnist-mlp": "dev_accuracy=0.95",
    "unet-nuclei": "dev_dice=0.88",
    "lstm-temperature": "dev_mse=0.35",
    "lstm-etth1": "dev_mse=0.06",
}
EVOLUTION = ("mu-lambda", "ga", "pso", "openai-es")
WORKERS = [1 << power for power in range(13)]


def germline(*words: str) -> dict[str, Any]:
    """Run a germline command and return the JSON object that it prints."""
    done = subprocess.run([sys.executable, "-m", "germline", *words, "--json"], capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(done.stderr[-2000:])
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def train_to_target(recipe: str, strategy: str, device: str, workers: int | None, options: list[str]) -> dict[str, Any]:
    """Run a strategy until the target is reached or the time is over, and return the row of the table."""
    with tempfile.TemporaryDirectory() as runs:
        words = ["train", recipe, "--strategy", strategy, "--device", device, "--runs", runs, *options]
        summary = germline(*words, *(["--workers", str(workers)] if workers else []))
    return {
        "strategy": strategy,
        "device": device,
        "workers": workers,
        "reached": summary["stopped_by"] == "target",
        "seconds": summary["seconds"],
        "generations": summary["generations"],
        "metrics": summary["metrics"],
    }


def workers_needed(recipe: str, row: dict[str, Any], goal: float, settings: list[str]) -> int | None:
    """Return from how many workers on a run would take less than ``goal`` seconds, as 'germline plan' predicts."""
    counts = ",".join(map(str, WORKERS))
    words = ["plan", recipe, "--strategy", row["strategy"], "--device", "cpu", "--workers", counts, *settings]
    costs = germline(*words)["costs"]
    fastest = {n: min(cost["seconds"] for cost in costs if cost["workers"] == n) for n in WORKERS}
    for count in WORKERS:
        if row["seconds"] * fastest[count] / fastest[1] < goal:
            return count
    return None


def format_row(row: dict[str, Any], metric: str) -> str:
    where = f"{row['workers']} CPU worker{'s' * (row['workers'] > 1)}" if row["workers"] else row["device"]
    name = "backprop" if row["strategy"] == "gradient" else row["strategy"]
    reached = f"{row['seconds']:8.1f} s" if row["reached"] else "not reached"
    return (
        f"{name:10} {where:14} {reached:>12}  {row['generations']:7} generations  {metric} {row['metrics'][metric]:.4f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe")
    parser.add_argument("--target", metavar="METRIC=VALUE", help="what a run must reach (default: one for each recipe)")
    parser.add_argument(
        "--seconds", type=float, default=300.0, help="seconds after which a run is given up (default 300)"
    )
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", dest="settings", help="recipe.KEY=VALUE"
    )
    parser.add_argument("--only", nargs="+", choices=[*EVOLUTION, "gradient"], help="train only these strategies")
    parser.add_argument("--gpu-rows", type=Path, metavar="FILE", help="what --json wrote on a machine with a GPU")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the rows to this file")
    arguments = parser.parse_args()
    target = arguments.target or TARGETS.get(arguments.recipe)
    if target is None:
        parser.error(f"there is no default target for {arguments.recipe}: give --target METRIC=VALUE")
    metric = target.partition("=")[0].strip("<> ")
    settings = [word for one in arguments.settings for word in ("--set", one)]
    options = ["--target", target, "--seconds", str(arguments.seconds), *settings]
    chosen: list[tuple[str, str, int | None]]
    chosen = [(strategy, "cpu", workers) for strategy in EVOLUTION for workers in (1, 2)]
    chosen += [("gradient", "cpu", None)]
    chosen += [("gradient", "cuda", None)] if torch.cuda.is_available() else []
    print(f"{arguments.recipe} until {target}, at most {arguments.seconds:g} s each")
    rows = []
    for strategy, device, workers in chosen:
        if arguments.only is None or strategy in arguments.only:
            rows.append(train_to_target(arguments.recipe, strategy, device, workers, options))
            print(format_row(rows[-1], metric), flush=True)
    if arguments.gpu_rows is not None:
        rows += [row for row in json.loads(arguments.gpu_rows.read_text()) if row["device"] == "cuda"]
        print(format_row(rows[-1], metric), "(measured on another machine)")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(rows))
    show_verdict(arguments.recipe, rows, settings)


def show_verdict(recipe: str, rows: list[dict[str, Any]], settings: list[str]) -> None:
    """Print whether evolution on CPUs takes less time than backprop on a GPU."""
    backprop = next((row["seconds"] for row in rows if row["device"] == "cuda" and row["reached"]), None)
    evolved = [row for row in rows if row["strategy"] != "gradient"]
    if not evolved:
        return
    evolved = [row for row in evolved if row["reached"]]
    if backprop is None:
        print("There is no time of backprop on a GPU to compare with: give --gpu-rows, or run this where there is one.")
        return
    if not evolved:
        print("No strategy reached the target in time: the claim does not hold here.")
        return
    best = min(evolved, key=lambda row: row["seconds"])
    holds = "holds" if best["seconds"] < backprop else "does not hold"
    times = f"{best['strategy']} takes {best['seconds']:.1f} s on {best['workers']} CPU workers"
    print(f"'Less time on CPUs than on a GPU' {holds} here: {times}, backprop {backprop:.1f} s on a GPU.")
    for row in evolved:
        if row["workers"] == 1:
            count = workers_needed(recipe, row, backprop, settings)
            least = f"from {count} workers on" if count else f"with no number of workers up to {WORKERS[-1]}"
            print(f"  by 'germline plan' {row['strategy']} would be faster than that {least}")


if __name__ == "__main__":
    main()
