"""Default settings against tuned ones, on tasks with a fixed budget of evaluations.

    python benchmarks/defaults.py                  trains every task by the defaults, and prints the table
    python benchmarks/defaults.py --sweep          tries settings on every task; results are kept in defaults.json
    python benchmarks/defaults.py --tasks digits,unet-nuclei --seeds 3 --processes 2

The tuned settings of a task are the best by its dev set of the recipe's own and of a grid: sigma from 0.003 to 0.3, and
a learning rate of 0.1 to 0.8 sigma that falls to 0. The table has the metric of the test set at the start, by tuned
settings and by the defaults, and which part of the gain of the tuned ones the defaults have. Each run is one thread of
one process, and its result does not depend on time; a sweep can be interrupted and goes on where it was.
"""

import argparse
import json
import sys
import warnings
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

import torch
from default_tasks import TASKS, Task

import germline as gl
from germline.strategies import AnyStrategy

FILE = Path(__file__).parent / "defaults.json"
SIGMAS = (0.003, 0.01, 0.02, 0.05, 0.1, 0.3)
RATIOS = (0.1, 0.2, 0.4, 0.8)  # of the learning rate to sigma
GOAL, LEAST = 0.95, 0.85  # parts of the gain


def grid(task: Task) -> dict[str, AnyStrategy]:
    """Return the settings of a sweep."""
    own = task.build(0).strategy
    settings: dict[str, AnyStrategy] = {}
    if own != gl.OpenAIES():  # else the task names no settings
        settings["recipe"] = own
    for sigma in SIGMAS:
        for ratio in RATIOS:
            lr = gl.Schedule("linear", ratio * sigma, 0.0)
            settings[f"sigma {sigma}, lr {ratio} sigma"] = gl.OpenAIES(task.population, sigma, lr)
    return settings


def train(name: str, strategy: AnyStrategy | None, seed: int, generations: int | None = None) -> dict[str, Any]:
    """Train a task by some settings, and return its metrics at the start and at the end."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    task = TASKS[name]
    recipe = task.build(seed)
    options = {key: getattr(recipe, key) for key in ("loss", "score", "objective", "maximize", "metrics", "dtype")}
    splits = {key: getattr(recipe, key) for key in ("data", "dev", "test")}
    population = getattr(strategy, "population", task.population)
    result = gl.train(
        recipe.model, **splits, **options, strategy=strategy, batch_size=recipe.batch_size, seed=seed,
        generations=generations or max(1, task.evaluations // population), evaluate_every=10**6,
        trainable=recipe.trainable, fleet=gl.Local("cpu", workers=1), run=False, progress=False,
    )  # fmt: skip
    metrics = result.summary["metrics"]
    return {"dev": metrics[f"dev_{task.metric}"], "test": metrics[f"test_{task.metric}"]}


def measure_start(name: str, seed: int) -> dict[str, Any]:
    """Return the metrics of a task before it is trained: those of a run whose steps are 0."""
    task = TASKS[name]
    return train(name, gl.OpenAIES(task.population, 1e-9, 0.0), seed, generations=1)


def sweep(names: list[str], processes: int) -> None:
    """Try the settings of the grid that are not in the file yet."""
    results = read_results()
    with ProcessPoolExecutor(processes) as pool:
        waiting = []
        for name in names:
            done = results.setdefault(name, {})
            for label, strategy in ({"start": None} | grid(TASKS[name])).items():
                if label not in done:
                    call = (measure_start, name, 0) if strategy is None else (train, name, strategy, 0)
                    waiting.append((name, label, pool.submit(*call)))
        for i, (name, label, future) in enumerate(waiting):
            results[name][label] = future.result()
            FILE.write_text(json.dumps(results, indent=1) + "\n")
            print(f"{i + 1}/{len(waiting)} {name}: {label}: {results[name][label]}", file=sys.stderr, flush=True)


def read_results() -> dict[str, dict[str, Any]]:
    """Return the results of the sweep so far: by task and settings."""
    results: dict[str, dict[str, Any]] = json.loads(FILE.read_text()) if FILE.exists() else {}
    return results


def find_tuned(name: str, results: dict[str, Any]) -> str:
    """Return the best settings of a task by its dev set."""
    sign = -1 if TASKS[name].lower else 1
    return max((label for label in results if label != "start"), key=lambda label: sign * results[label]["dev"])


def compare(names: list[str], seeds: int, processes: int) -> bool:
    """Print the table, and return whether the defaults reach the goal."""
    stored = read_results()
    parts: list[float] = []
    with ProcessPoolExecutor(processes) as pool:
        runs = {name: [pool.submit(train, name, None, 100 + seed) for seed in range(seeds)] for name in names}
        print("| task | parameters | start | tuned | settings | defaults | part of the gain |")
        print("|---|---|---|---|---|---|---|")
        for name in names:
            results = stored[name]
            tuned = find_tuned(name, results)
            start, best = results["start"]["test"], results[tuned]["test"]
            mine = median(future.result()["test"] for future in runs[name])
            parts.append((mine - start) / (best - start))
            size = sum(p.numel() for p in TASKS[name].build(0).model.parameters() if p.requires_grad)
            numbers = (f"{start:.3f}", f"{best:.3f}", tuned, f"{mine:.3f}", f"{parts[-1]:.2f}")
            print(f"| {name} | {size:,} | {' | '.join(numbers)} |", flush=True)
    reached = sum(part >= GOAL for part in parts)
    print(f"{reached} of {len(parts)} reach {GOAL}; the least is {min(parts):.2f}")
    return reached >= 0.8 * len(parts) and min(parts) >= LEAST


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sweep", action="store_true", help="try the settings of the grid")
    parser.add_argument("--tasks", default=",".join(TASKS), help="names of tasks, with commas between them")
    parser.add_argument("--seeds", type=int, default=1, help="runs by the defaults, of which the median counts")
    parser.add_argument("--processes", type=int, default=2, help="runs at once")
    options = parser.parse_args()
    names = [name for name in TASKS if name in options.tasks]
    if options.sweep:
        sweep(names, options.processes)
    elif not compare(names, options.seeds, options.processes):
        sys.exit(1)


if __name__ == "__main__":
    main()
