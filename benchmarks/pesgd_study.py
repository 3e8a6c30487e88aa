"""What the evolution of PESGD adds, and where data-parallel gradient descent stops scaling with its batch.

    python benchmarks/pesgd_study.py [--only study target batches generalization] [--seeds 3] [--json FILE]
    python benchmarks/pesgd_study.py --json FILE --plot FILE.png

``study`` trains ``pesgd-mnist`` on its first 5,500 training images, 12 epochs for each member, and changes one thing at
a time: the population, the epochs between two evolutions, the crossover, the mutation, the selection, and how the first
members differ. Controls are ``parents=P``, in which all members stay, so that the result is the best of P independent
runs, and ``crossover=none sigma=0``, in which the best are only copied. The test accuracy is that of the model with the
lowest loss on dev that was ever evaluated. The distances are those of two members, in the mean, after the training of
the first, the fourth and the last generation, each before the evolution that follows.

``target`` counts the epochs until 97 % dev accuracy on all 55,000 images, of members that evolve and of independent
ones.

``batches`` trains the same net by gradient descent on all images until that accuracy, with some learning rates for each
size of the batch: data-parallel descent by N processes with batches of B is descent with batches of N B.
``generalization`` trains with the best of these rates until the loss on dev has not fallen in 15 evaluations.

Each run is one process of one thread, and nothing is timed; ``--processes`` runs are made at the same time.
"""

import argparse
import json
import statistics
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

import germline as gl
from germline.recipes import make_recipe
from germline.recipes.recipe import Recipe
from germline.strategies import PESGD

EXAMPLES, EPOCHS = 5_500, 12
TARGET, PATIENCE = 0.97, 15
POPULATIONS = (1, 2, 4, 8)
RATES = {64: (0.1, 0.2, 0.4), 512: (0.2, 0.4, 0.6), 4096: (0.3, 0.4, 0.5, 0.6)}  # by size of the batch
MOST_EPOCHS = {64: 12, 512: 40, 4096: 120}
BEST_RATES = {64: 0.2, 512: 0.4, 4096: 0.4}
BATCHES = tuple(RATES)


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
    result = train(recipe, strategy, generations, seed, evaluate_every=1)
    distances = [one.get("diversity", 0.0) for one in result.history]
    return {
        "test": 100 * result.summary["metrics"]["test_accuracy"],
        "distances": [distances[0], distances[min(3, generations - 1)], distances[-1]],
    }


def count_epochs(population: int, evolves: bool, seed: int) -> dict[str, Any]:
    """Return the epochs that each member takes until one has reached the target."""
    recipe = make_recipe("pesgd-mnist", {}, seed)
    strategy = PESGD(population=population, lr=0.1)
    if not evolves:
        strategy = replace(strategy, parents=population)
    result = train(recipe, strategy, 24, seed, target=f"dev_accuracy={TARGET}", evaluate_every=1)
    return {"epochs": result.summary["generations"], "reached": result.summary["stopped_by"] == "target"}


def count_steps(batch: int, rate: float, seed: int) -> dict[str, Any]:
    """Return the steps and epochs that gradient descent takes to the target, and whether it reaches it."""
    recipe = make_recipe("pesgd-mnist", {"batch_size": str(batch)}, seed)
    epoch = len(recipe.data[1]) // batch
    every = max(1, epoch // 4)
    options = {"target": f"dev_accuracy={TARGET}", "evaluate_every": every}
    result = train(recipe, gl.Gradient(lr=rate, optimizer="sgd"), MOST_EPOCHS[batch] * epoch, seed, **options)
    steps = result.summary["generations"]
    reached = result.summary["stopped_by"] == "target"
    return {"reached": reached, "steps": steps, "epochs": steps / epoch}


def measure_generalization(batch: int, seed: int) -> dict[str, float]:
    """Return the test accuracy of gradient descent at its lowest loss on dev, and the epochs until then."""
    recipe = make_recipe("pesgd-mnist", {"batch_size": str(batch)}, seed)
    epoch = len(recipe.data[1]) // batch
    options: dict[str, Any] = {"keep": "best", "patience": PATIENCE, "evaluate_every": epoch}
    strategy = gl.Gradient(lr=BEST_RATES[batch], optimizer="sgd")
    result = train(recipe, strategy, 200 * epoch, seed, **options)
    epochs = result.summary["kept_generation"] / epoch
    return {"test": 100 * result.summary["metrics"]["test_accuracy"], "epochs": epochs}


Outcomes = list[list[dict[str, Any]]]  # of each row, by seed


def run_all(pool: ProcessPoolExecutor, function: Callable[..., Any], rows: Sequence[Any], seeds: int) -> Outcomes:
    """Return what a function gives for the arguments of each row and each seed."""
    runs = [[pool.submit(function, *row, seed) for seed in range(seeds)] for row in rows]
    return [[run.result() for run in row] for row in runs]


def show_study(pool: ProcessPoolExecutor, seeds: int) -> list[dict[str, Any]]:
    """Run the study, and print and return its rows: medians of the seeds, and their range."""
    print(f"{'':12} {'':36} {'test accuracy':26} {'distances':>20}")
    rows = []
    for row, outcomes in zip(ROWS, run_all(pool, study, [(row,) for row in ROWS], seeds), strict=True):
        tests = [outcome["test"] for outcome in outcomes]
        distances = [statistics.median(column) for column in zip(*(o["distances"] for o in outcomes), strict=True)]
        accuracy = f"{statistics.median(tests):.2f} ({min(tests):.2f} to {max(tests):.2f})"
        print(
            f"{row.about:12} {row.name:36} {accuracy:26}", *(f"{distance:6.2f}" for distance in distances), flush=True
        )
        rows.append({"about": row.about, "name": row.name, "tests": tests, "distances": distances})
    return rows


def show_target(pool: ProcessPoolExecutor, seeds: int) -> list[dict[str, Any]]:
    """Count the epochs to the target, and print and return the rows."""
    print(f"{'members':>8} {'':12} {'reached':>8} {'epochs of a member, by seed':>28}")
    cases = [(p, evolves) for p in POPULATIONS for evolves in ((True, False) if p > 1 else (True,))]
    rows = []
    for (population, evolves), outcomes in zip(cases, run_all(pool, count_epochs, cases, seeds), strict=True):
        epochs, reached = [o["epochs"] for o in outcomes], sum(o["reached"] for o in outcomes)
        print(f"{population:8} {'evolve' if evolves else 'independent':12} {reached:3} of {seeds} {epochs!s:>28}")
        rows.append({"members": population, "evolve": evolves, "reached": reached, "epochs": epochs})
    return rows


def show_batches(pool: ProcessPoolExecutor, seeds: int) -> list[dict[str, Any]]:
    """Count the steps of each batch and learning rate, and print and return the rows: medians of the seeds."""
    print(f"{'batch':>6} {'lr':>5} {'reached':>8} {'steps':>7} {'epochs':>7}   steps by seed")
    cases = [(batch, rate) for batch, rates in RATES.items() for rate in rates]
    rows = []
    for (batch, rate), outcomes in zip(cases, run_all(pool, count_steps, cases, seeds), strict=True):
        reached = sum(outcome["reached"] for outcome in outcomes)
        steps, epochs = (statistics.median(outcome[name] for outcome in outcomes) for name in ("steps", "epochs"))
        each = [outcome["steps"] for outcome in outcomes]
        print(f"{batch:6} {rate:5} {reached:3} of {seeds} {steps:7.0f} {epochs:7.2f}   {each}", flush=True)
        rows.append({"batch": batch, "lr": rate, "reached": reached, "steps": steps, "epochs": epochs})
    return rows


def show_generalization(pool: ProcessPoolExecutor, seeds: int) -> list[dict[str, Any]]:
    """Print and return the test accuracy of each batch, by seed."""
    print(f"{'batch':>6} {'lr':>5} {'epochs':>7}   test accuracy by seed")
    rows = []
    for batch, outcomes in zip(
        BATCHES, run_all(pool, measure_generalization, [(batch,) for batch in BATCHES], seeds), strict=True
    ):
        tests, epochs = [o["test"] for o in outcomes], statistics.median(o["epochs"] for o in outcomes)
        print(f"{batch:6} {BEST_RATES[batch]:5} {epochs:7.0f}  ", *(f"{test:.2f}" for test in tests), flush=True)
        rows.append({"batch": batch, "lr": BEST_RATES[batch], "tests": tests, "epochs": epochs})
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
    batches.loglog(missed, most, "^", color="#d55e00", label="not reached") if missed else None
    first = best[0]
    ideal = [first["steps"] * first["batch"] / batch for batch in BATCHES]
    batches.loglog(BATCHES, ideal, "--", color="#666666", label="perfect scaling")
    batches.set_xticks(BATCHES, [str(batch) for batch in BATCHES])
    batches.minorticks_off()
    batches.set(title="steps of descent to 97 % on dev", xlabel="examples of a batch", ylabel="steps")
    batches.legend(fontsize=9)
    figure.savefig(file, dpi=80)
    print(file)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = {
        "study": show_study, "target": show_target, "batches": show_batches, "generalization": show_generalization,
    }  # fmt: skip
    parser.add_argument("--only", nargs="+", choices=parts, default=list(parts), help="run only these parts")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each row (default 3)")
    parser.add_argument("--processes", type=int, default=1, help="runs at the same time (default 1)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="the file to which results are added")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw what is in the file of --json; run nothing")
    arguments = parser.parse_args()
    results = json.loads(arguments.json.read_text()) if arguments.json and arguments.json.is_file() else {}
    if arguments.plot is not None:
        draw(results, arguments.plot)
        return
    with ProcessPoolExecutor(arguments.processes, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        for name in arguments.only:
            results[name] = parts[name](pool, arguments.seeds)
            if arguments.json is not None:
                arguments.json.write_text(json.dumps(results))


if __name__ == "__main__":
    main()
