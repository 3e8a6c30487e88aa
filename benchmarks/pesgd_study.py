"""What the evolution of PESGD adds, and where data-parallel gradient descent stops scaling with its batch.

    python benchmarks/pesgd_study.py [--only study batches] [--seeds 3] [--json FILE]
    python benchmarks/pesgd_study.py --json FILE --plot FILE.png

``study`` trains ``pesgd-mnist`` on its first 5,500 training images, 12 epochs for each member, and changes one thing at
a time: the population, the epochs between two evolutions, the crossover, the mutation, the selection, and how the first
members differ. Controls are ``parents=P``, in which all members stay, so that the result is the best of P independent
runs, and ``crossover=none sigma=0``, in which the best are only copied. The test accuracy is that of the model with the
lowest loss on dev that was ever evaluated. ``diversity`` is the mean distance of two members after the last epoch.

``batches`` trains the same net by gradient descent on all 55,000 images until 97 % dev accuracy, with four learning
rates for each size of the batch: data-parallel descent by N processes with batches of B is descent with batches of N B.

All runs of a part are made in one process of one thread, and nothing is timed.
"""

import argparse
import json
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import germline as gl
from germline.recipes import make_recipe
from germline.recipes.recipe import Recipe
from germline.strategies import PESGD

EXAMPLES, EPOCHS = 5_500, 12
BATCHES, RATES, TARGET, MOST_EPOCHS = (64, 512, 4096), (0.1, 0.2, 0.4, 0.8), 0.97, 40


@dataclass(frozen=True)
class Row:
    """Settings of PESGD, by what they are about."""

    about: str
    name: str
    settings: dict[str, Any]


def independent(population: int) -> dict[str, Any]:
    return {"population": population, "parents": population}


ROWS = (
    Row("population", "1", {"population": 1}),
    *(Row("population", str(p), {"population": p}) for p in (2, 4, 8)),
    *(Row("independent", str(p), independent(p)) for p in (2, 4, 8)),
    Row("operators", "crossover=none sigma=0", {"crossover": "none", "sigma": 0.0}),
    Row("operators", "crossover=none", {"crossover": "none"}),
    Row("operators", "crossover=uniform", {"crossover": "uniform"}),
    Row("operators", "crossover=average", {"crossover": "average"}),
    Row("operators", "sigma=0.01", {"sigma": 0.01}),
    Row("operators", "selection=tournament", {"selection": "tournament"}),
    Row("operators", "parents=1", {"parents": 1}),
    Row("frequency", "epochs=3", {"epochs": 3}),
    Row("frequency", "epochs=6", {"epochs": 6}),
    Row("diversity", "diversity=noise", {"diversity": "noise"}),
    Row("diversity", "diversity=noise crossover=average", {"diversity": "noise", "crossover": "average"}),
)


def train(recipe: Recipe, strategy: Any, generations: int, seed: int, **options: Any) -> gl.Result:
    """Train the model of a recipe by a strategy, without a journal."""
    return gl.train(
        recipe.model, recipe.data, dev=recipe.dev, test=recipe.test, loss=recipe.loss, strategy=strategy,
        batch_size=recipe.batch_size, generations=generations, seed=seed, fleet=gl.Local("cpu", workers=1),
        run=False, progress=False, **options,
    )  # fmt: skip


def study(row: Row, seed: int) -> dict[str, float]:
    """Return what a row reaches with one seed."""
    recipe = make_recipe("pesgd-mnist", {}, seed)
    x, y = recipe.data
    recipe = Recipe(**{**vars(recipe), "data": (x[:EXAMPLES], y[:EXAMPLES])})
    strategy = PESGD(**{"population": 4, "lr": 0.1, **row.settings})
    generations = EPOCHS // strategy.epochs
    result = train(recipe, strategy, generations, seed, evaluate_every=generations)
    distances = [one["diversity"] for one in result.history if "diversity" in one]
    metrics = result.summary["metrics"]
    return {
        "test": 100 * metrics["test_accuracy"],
        "dev": 100 * metrics["dev_accuracy"],
        "diversity": distances[-1] if distances else 0.0,
    }


def count_steps(batch: int, rate: float, seed: int) -> dict[str, Any]:
    """Return the steps and epochs that gradient descent takes to the target, and whether it reaches it."""
    recipe = make_recipe("pesgd-mnist", {"batch_size": str(batch)}, seed)
    epoch = len(recipe.data[1]) // batch
    every = max(1, epoch // 4)
    options = {"target": f"dev_accuracy={TARGET}", "evaluate_every": every}
    result = train(recipe, gl.Gradient(lr=rate, optimizer="sgd"), MOST_EPOCHS * epoch, seed, **options)
    steps = result.summary["generations"]
    reached = result.summary["stopped_by"] == "target"
    return {"reached": reached, "steps": steps, "epochs": steps / epoch}


def show_study(seeds: int) -> list[dict[str, Any]]:
    """Run the study, and print and return its rows: medians of the seeds, and their range."""
    print(f"{'':12} {'':36} {'test accuracy':26} {'diversity':>10}")
    rows = []
    for row in ROWS:
        outcomes = [study(row, seed) for seed in range(seeds)]
        tests = [outcome["test"] for outcome in outcomes]
        distance = statistics.median(outcome["diversity"] for outcome in outcomes)
        accuracy = f"{statistics.median(tests):.2f} ({min(tests):.2f} to {max(tests):.2f})"
        print(f"{row.about:12} {row.name:36} {accuracy:26} {distance:10.2f}", flush=True)
        rows.append({"about": row.about, "name": row.name, "tests": tests, "diversity": distance})
    return rows


def show_batches(seeds: int) -> list[dict[str, Any]]:
    """Count the steps of each batch and learning rate, and print and return the rows: medians of the seeds."""
    print(f"{'batch':>6} {'lr':>5} {'reached':>8} {'steps':>7} {'epochs':>7}")
    rows = []
    for batch in BATCHES:
        for rate in RATES:
            outcomes = [count_steps(batch, rate, seed) for seed in range(seeds)]
            reached = sum(outcome["reached"] for outcome in outcomes)
            steps, epochs = (statistics.median(outcome[name] for outcome in outcomes) for name in ("steps", "epochs"))
            print(f"{batch:6} {rate:5} {reached:3} of {seeds} {steps:7.0f} {epochs:7.2f}", flush=True)
            rows.append({"batch": batch, "lr": rate, "reached": reached, "steps": steps, "epochs": epochs})
    return rows


def draw(results: dict[str, Any], file: Path) -> None:
    """Draw the study and the batches."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(14, 4.8), layout="constrained")
    populations, operators, batches = figure.subplots(1, 3, width_ratios=(1, 1.3, 1))
    rows = results["study"]
    alone = next(row for row in rows if row["name"] == "1")
    for about, label in (("population", "evolved"), ("independent", "the best of P independent runs")):
        own = [alone, *(row for row in rows if row["about"] == about and row is not alone)]
        sizes, medians = [int(row["name"]) for row in own], [statistics.median(row["tests"]) for row in own]
        below = [middle - min(row["tests"]) for middle, row in zip(medians, own, strict=True)]
        above = [max(row["tests"]) - middle for middle, row in zip(medians, own, strict=True)]
        shift = 0.97 if about == "population" else 1.03  # so that both ranges can be seen
        populations.errorbar(
            [shift * size for size in sizes], medians, (below, above), fmt="o-", capsize=3, label=label
        )
    populations.set_xscale("log", base=2)
    populations.set_xticks((1, 2, 4, 8), ("1", "2", "4", "8"))
    populations.set(title="test accuracy, %, by members", xlabel="members P")
    populations.legend(fontsize=9)
    default = next(row for row in rows if row["about"] == "population" and row["name"] == "4")
    control = next(row for row in rows if row["about"] == "independent" and row["name"] == "4")
    bars = [default | {"name": "defaults"}, control | {"name": "independent"}]
    bars += [row for row in rows if row["about"] not in ("population", "independent")]
    for place, row in enumerate(bars):
        operators.plot(row["tests"], [place] * len(row["tests"]), "o", color="#0072b2", alpha=0.6)
        operators.plot([statistics.median(row["tests"])], [place], "|", color="black", ms=14)
    operators.set_yticks(range(len(bars)), [row["name"] for row in bars], fontsize=8)
    operators.invert_yaxis()
    operators.set(title="test accuracy, %, 4 members")
    operators.grid(axis="x", alpha=0.3)
    best = [
        min(
            (row for row in results["batches"] if row["batch"] == batch and row["reached"]),
            key=lambda row: row["steps"],
        )
        for batch in BATCHES
        if any(row["batch"] == batch and row["reached"] for row in results["batches"])
    ]
    batches.loglog([row["batch"] for row in best], [row["steps"] for row in best], "o-", label="best learning rate")
    missed = [batch for batch in BATCHES if batch not in {row["batch"] for row in best}]
    most = [max(row["steps"] for row in results["batches"] if row["batch"] == batch) for batch in missed]
    batches.loglog(missed, most, "^", color="#d55e00", label=f"not reached in {MOST_EPOCHS} epochs") if missed else None
    first = best[0]
    ideal = [first["steps"] * first["batch"] / batch for batch in BATCHES]
    batches.loglog(BATCHES, ideal, "--", color="#666666", label="perfect scaling")
    batches.set_xticks(BATCHES, [str(batch) for batch in BATCHES])
    batches.minorticks_off()
    batches.set(title="steps of descent to 97 % on dev", xlabel="examples of a batch")
    batches.legend(fontsize=9)
    figure.savefig(file, dpi=80)
    print(file)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = {"study": show_study, "batches": show_batches}
    parser.add_argument("--only", nargs="+", choices=parts, default=list(parts), help="run only these parts")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each row (default 3)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="the file to which results are added")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw what is in the file of --json; run nothing")
    arguments = parser.parse_args()
    results = json.loads(arguments.json.read_text()) if arguments.json and arguments.json.is_file() else {}
    if arguments.plot is not None:
        draw(results, arguments.plot)
        return
    torch.set_num_threads(1)
    for name in arguments.only:
        results[name] = parts[name](arguments.seeds)
        if arguments.json is not None:
            arguments.json.write_text(json.dumps(results))


if __name__ == "__main__":
    main()
