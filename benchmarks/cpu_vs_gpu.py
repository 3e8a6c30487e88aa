"""Evolution on CPUs beside backprop on a GPU: seconds to a stated quality, the claim of the first founding paper.

    python benchmarks/cpu_vs_gpu.py RECIPE [--target METRIC=VALUE] [--seconds 300] [--set KEY=VALUE ...] [--json FILE]
    python benchmarks/cpu_vs_gpu.py RECIPE --beside FILE

mu-lambda, ga, pso and openai-es train on 1 and on 2 CPU workers (threads of one process), backprop on the CPU and,
where there is one, on a GPU, each until a metric is reached or the time is over. With ``--beside`` the row of the GPU
comes from what ``--json`` wrote on a machine that has one. For each strategy that gets there 'germline plan' says from
how many workers on, over a network of 1 Gbit, it would take less time than backprop on the GPU.
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
    done = subprocess.run([sys.executable, "-m", "germline", *words, "--json"], capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(done.stderr[-2000:])
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def seconds_to(recipe: str, strategy: str, device: str, workers: int | None, options: list[str]) -> dict[str, Any]:
    """How long a run takes to the target; or how far it came."""
    with tempfile.TemporaryDirectory() as runs:
        words = ["train", recipe, "--strategy", strategy, "--device", device, "--runs", runs, *options]
        found = germline(*words, *(["--workers", str(workers)] if workers else []))
    return {
        "strategy": strategy,
        "device": device,
        "workers": workers,
        "reached": found["stopped_by"] == "target",
        "seconds": found["seconds"],
        "generations": found["generations"],
        "metrics": found["metrics"],
    }


def workers_needed(recipe: str, row: dict[str, Any], goal: float, settings: list[str]) -> int | None:
    """From how many workers on a run would take less than so many seconds, by what 'germline plan' predicts."""
    counts = ",".join(map(str, WORKERS))
    words = ["plan", recipe, "--strategy", row["strategy"], "--device", "cpu", "--workers", counts, *settings]
    costs = germline(*words)["costs"]
    fastest = {n: min(cost["seconds"] for cost in costs if cost["workers"] == n) for n in WORKERS}
    for count in WORKERS:
        if row["seconds"] * fastest[count] / fastest[1] < goal:
            return count
    return None


def told(row: dict[str, Any], metric: str) -> str:
    where = f"{row['workers']} CPU worker{'s' * (row['workers'] > 1)}" if row["workers"] else row["device"]
    name = "backprop" if row["strategy"] == "gradient" else row["strategy"]
    reached = f"{row['seconds']:8.1f} s" if row["reached"] else "not reached"
    return (
        f"{name:10} {where:14} {reached:>12}  {row['generations']:7} generations  {metric} {row['metrics'][metric]:.4f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe")
    parser.add_argument("--target", help="METRIC=VALUE; a usual one for the recipe if not given")
    parser.add_argument("--seconds", type=float, default=300.0, help="after which a run is given up")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="settings", help="recipe.KEY")
    parser.add_argument("--only", nargs="+", choices=[*EVOLUTION, "gradient"], help="these strategies")
    parser.add_argument("--beside", type=Path, metavar="FILE", help="what --json wrote on a machine with a GPU")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to write the rows, too")
    arguments = parser.parse_args()
    target = arguments.target or TARGETS.get(arguments.recipe)
    if target is None:
        parser.error(f"say what is to be reached in {arguments.recipe}, with --target METRIC=VALUE")
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
            rows.append(seconds_to(arguments.recipe, strategy, device, workers, options))
            print(told(rows[-1], metric), flush=True)
    if arguments.beside is not None:
        rows += [row for row in json.loads(arguments.beside.read_text()) if row["device"] == "cuda"]
        print(told(rows[-1], metric), "(measured elsewhere)")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(rows))
    judge(arguments.recipe, rows, settings)


def judge(recipe: str, rows: list[dict[str, Any]], settings: list[str]) -> None:
    """Whether evolution on CPUs takes less time than backprop on a GPU."""
    backprop = next((row["seconds"] for row in rows if row["device"] == "cuda" and row["reached"]), None)
    evolved = [row for row in rows if row["strategy"] != "gradient"]
    if not evolved:
        return
    evolved = [row for row in evolved if row["reached"]]
    if backprop is None:
        print("There is no time of backprop on a GPU to compare with: give --beside, or run this where there is one.")
        return
    if not evolved:
        print("No strategy reached it in the time given: the claim does not hold here.")
        return
    best = min(evolved, key=lambda row: row["seconds"])
    holds = "holds" if best["seconds"] < backprop else "does not hold"
    said = f"{best['strategy']} takes {best['seconds']:.1f} s on {best['workers']} CPU workers"
    said += f", backprop {backprop:.1f} s on a GPU"
    print(f"'Less time on CPUs than on a GPU' {holds} here: {said}.")
    for row in evolved:
        if row["workers"] == 1:
            count = workers_needed(recipe, row, backprop, settings)
            least = f"from {count} workers on" if count else f"with no number of workers up to {WORKERS[-1]}"
            print(f"  by 'germline plan' {row['strategy']} would be faster than that {least}")


if __name__ == "__main__":
    main()
