"""The gradients of the Hybrid-ES paper's reference, and the figures of docs/papers/hybrid-es.md.

    python benchmarks/hybrid_gradients.py [--runs DIR] [--epochs 30]
    python benchmarks/hybrid_gradients.py --times FILE.json [--runs DIR]
    python benchmarks/hybrid_gradients.py --figures FILE.png [--runs DIR] [--resources FILE.json] [--page PAGE.md]

Trains ``hybrid-es-mnist`` by full gradients alone, and prints, by epoch, the norm of a gradient, the same with the
gradient of the L2 penalty added, the angle to the gradient of the step before and that to the gradient of the same
batch an epoch before. They are written to DIR/gradients.json. ``--times`` prints, for each link, the seconds until a
dev accuracy: the steps that a run of DIR took, times the seconds of a step with its r that ``hybrid_resources.py --link
... --json FILE`` has measured. ``--figures`` draws them with the curves of seed 0 of
``benchmarks/hybrid_es.py`` (the rows in CURVES must have ended there), with the times of steps in FILE, and with the
table of resources of a page, which ``benchmarks/hybrid_resources.py`` has printed.
"""

import argparse
import csv
import itertools
import json
import math
import statistics
from pathlib import Path
from typing import Any

from torch import Tensor

from germline.engine.opening import set_up
from germline.fleet import Local
from germline.recipes import make_recipe
from germline.strategies import HybridES

TIMED = (0.90, 0.935, 0.96)
CURVES = {
    "reference": "all gradients",
    "gated-2-sigma-1.25": "r = 2, sigma 1.25",
    "slot-2": "r = 2, base=slot",
    "fixed-plain": "one gradient, step 5",
    "fixed-plain-0.5": "one gradient, step 0.5",
    "fixed-plain-0.05": "one gradient, step 0.05",
}


def measure_gradients(epochs: int) -> dict[str, list[float]]:
    """Return norms and angles of the gradients of a run of full gradients, by step."""
    recipe = make_recipe("hybrid-es-mnist", {}, 0)
    recipe = recipe.with_strategy(recipe.strategy.with_settings(interval=1))
    session = set_up(recipe, Local("cpu", workers=1), 0)
    strategy = session.strategy
    assert isinstance(strategy, HybridES)
    session.prepare(session.batch(0))
    is_bias = strategy.mark_biases(session.state.theta, 0)
    kept: list[Tensor] = []
    rows: dict[str, list[float]] = {"norm": [], "with_penalty": [], "angle": [], "angle_of_slot": []}
    for step in range(epochs * strategy.epoch):
        theta = session.state.theta
        session.advance(session.evaluate(step, session.batch(step)))
        gradient = session.state.direction
        whole = gradient + strategy.weight_decay * theta.masked_fill(is_bias, 0.0)
        rows["norm"].append(float(gradient.norm()))
        rows["with_penalty"].append(float(whole.norm()))
        rows["angle"].append(measure_angle(gradient, kept[-1]) if kept else math.nan)
        rows["angle_of_slot"].append(measure_angle(gradient, kept[0]) if len(kept) == strategy.epoch else math.nan)
        kept = [*kept, gradient][-strategy.epoch :]
    return rows


def measure_angle(a: Tensor, b: Tensor) -> float:
    """Return the angle between two arrays, in degrees.

    >>> import torch
    >>> round(measure_angle(torch.tensor([1.0, 0.0]), torch.tensor([1.0, 1.0])), 3)
    45.0
    """
    return math.degrees(math.acos(max(-1.0, min(1.0, float(a.double() @ b.double() / (a.norm() * b.norm()).double())))))


def show_gradients(rows: dict[str, list[float]], epoch: int) -> None:
    """Print the median of each column in some epochs, and how much of the angle comes back after each epoch."""
    print(f"{'epoch':>5} {'norm':>8} {'with L2':>8} {'to the last':>12} {'to that of the batch':>21}")
    for first in range(0, len(rows["norm"]), epoch):
        values = [statistics.median(column[first : first + epoch]) for column in rows.values()]
        if first // epoch in (0, 1, 2, 4, 9, 14, 19, 24, 29):
            print(f"{first // epoch:5} {values[0]:8.3f} {values[1]:8.3f} {values[2]:12.1f} {values[3]:21.1f}")
    angles = rows["angle"][len(rows["angle"]) // 2 :]
    found = {lag: correlate(angles, lag) for lag in (1, epoch // 2, epoch - 1, epoch, epoch + 1)}
    print("autocorrelation of the angles in the second half:", {lag: round(value, 2) for lag, value in found.items()})


def correlate(values: list[float], lag: int) -> float:
    """Return the autocorrelation of some values.

    >>> round(correlate([1.0, -1.0] * 50, 2), 6), round(correlate([1.0, -1.0] * 50, 1), 6)
    (1.0, -1.0)
    """
    return statistics.correlation(values[:-lag], values[lag:])


def show_times(runs: Path, links: list[dict[str, Any]]) -> None:
    """Print the seconds until some dev accuracies over each link."""
    seconds = {(row["link"], row["interval"]): row["step"] for row in links}
    print(f"{'link':8} {'run':36} {'r':>2}  seconds (steps) to a dev accuracy of", *TIMED)
    for link in dict.fromkeys(row["link"] for row in links):
        for name, interval in (("reference", 1), ("gated-2-sigma-1.25", 2), ("slot-2", 2)):
            steps, values = read_curve(runs, name, "dev_accuracy")
            cells = []
            for goal in TIMED:
                first = next((step + 1 for step, value in zip(steps, values, strict=True) if value >= goal), None)
                cells.append("not reached" if first is None else f"{first * seconds[link, interval]:.0f} ({first})")
            print(f"{link:8} {CURVES[name]:36} {interval:2}  {', '.join(cells)}")


def read_curve(runs: Path, name: str, column: str) -> tuple[list[int], list[float]]:
    """Return the steps and the values of a column of a run's curves, where it has some."""
    with (runs / f"{name}-0" / "curves.csv").open() as lines:
        rows = [(int(row["generation"]), float(row[column])) for row in csv.DictReader(lines) if row[column]]
    return [step for step, _ in rows], [value for _, value in rows]


def read_train_losses(runs: Path, name: str) -> list[float]:
    """Return, for each epoch, the mean loss of the training batches of steps that score only one set of weights."""
    losses: dict[int, list[float]] = {}
    with (runs / f"{name}-0" / "curves.csv").open() as lines:
        for row in csv.DictReader(lines):
            if row["members"] == "1":
                losses.setdefault(int(row["generation"]) // 50, []).append(float(row["mean"]))
    return [statistics.mean(losses[epoch]) for epoch in sorted(losses)]


def draw_curves(axes: Any, runs: Path) -> None:
    """Draw accuracies and losses: figures 4 and 5 (one gradient), 10 and 9 (r = 2), each with the reference."""
    panels = (
        ("one fixed gradient: dev accuracy (figure 4)", "dev_accuracy", ("reference", "fixed-plain")),
        ("one fixed gradient: loss of dev, dashed of train (figure 5)", "dev_loss", ("reference", "fixed-plain")),
        ("r = 2: dev accuracy (figure 10)", "dev_accuracy", ("reference", "gated-2", "slot-2")),
        ("r = 2: loss of dev, dashed of train (figure 9)", "dev_loss", ("reference", "gated-2", "slot-2")),
    )
    for axis, (title, column, starts) in zip(axes, panels, strict=True):
        for name, label in CURVES.items():
            if name.startswith(starts) and (runs / f"{name}-0" / "curves.csv").is_file():
                steps, values = read_curve(runs, name, column)
                (line,) = axis.plot([(step + 1) / 50 for step in steps], values, label=label, lw=1.4)
                if column == "dev_loss":
                    train = read_train_losses(runs, name)
                    axis.plot([epoch + 0.5 for epoch in range(len(train))], train, "--", color=line.get_color(), lw=1.0)
        axis.set(title=title, xlabel="epoch")
        if column == "dev_loss":
            axis.set_yscale("log")
        elif "r = 2" in title:
            axis.set_ylim(0.85, 0.98)
        axis.legend(fontsize=8)


def draw_gradients(axes: Any, rows: dict[str, list[float]], epoch: int) -> None:
    """Draw norms, their changes, and angles: figures 2 and 3."""
    steps = [step / epoch for step in range(len(rows["norm"]))]
    norms, changes, angles = axes
    norms.semilogy(steps, rows["with_penalty"], lw=0.7, label="with the gradient of the L2 penalty")
    norms.semilogy(steps, rows["norm"], lw=0.7, label="of the loss alone")
    norms.set(title="norm of a full gradient", xlabel="epoch")
    norms.legend(fontsize=8)
    with_penalty = rows["with_penalty"]
    changes.plot(steps[1:], [b - a for a, b in itertools.pairwise(with_penalty)], lw=0.6)
    changes.set(title="change of the norm, with L2 (figure 2)", xlabel="epoch", ylim=(-1, 1))
    angles.plot(steps, rows["angle"], lw=0.4, label="to the step before (figure 3)")
    angles.plot(steps, rows["angle_of_slot"], lw=0.4, label="to the same batch an epoch before")
    angles.set(title="angle between gradients, degrees", xlabel="epoch", ylim=(0, 140))
    angles.legend(fontsize=8)


def read_resources(page: str) -> dict[str, list[float]]:
    """Return the percentages of runtime, memory and network for r = 2, then for r = 3, by who says so, from a table.

    >>> read_resources("| 2 | the paper's model | 1.208 | 0.667 | 0.500 |")
    {"the paper's model": [120.8, 66.7, 50.0]}
    """
    found: dict[str, list[float]] = {}
    for line in page.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 5 and cells[0] in ("2", "3") and cells[2].startswith(("0.", "1.", "2.", "3.")):
            found.setdefault(cells[1], []).extend(round(100 * float(cell), 1) for cell in cells[2:])
    return found


def draw_resources(axes: Any, resources: dict[str, list[float]], rows: list[dict[str, Any]]) -> None:
    """Draw runtime, memory and network of r = 2 and 3 (figure 12), and the time of a step over each link."""
    bars, links = axes
    width = 0.26
    for number, (source, values) in enumerate(resources.items()):
        places = [place + width * (number - 1) for place in range(6)]
        bars.bar(places, [values[kind + 3 * r] for kind in range(3) for r in range(2)], width, label=source)
    names = [f"{name}\nr = {r}" for name in ("runtime", "memory", "network") for r in (2, 3)]
    bars.set_xticks(range(len(names)), names, fontsize=8)
    bars.axhline(100, color="#444444", lw=0.8)
    bars.set(title="resources, % of all full steps (figure 12)")
    bars.legend(fontsize=8)
    for link in dict.fromkeys(row["link"] for row in rows):
        own = [row for row in rows if row["link"] == link]
        label = {"none": "no limit", "100mbit": "100 Mbit/s", "10mbit": "10 Mbit/s"}.get(link, link)
        links.plot([row["interval"] for row in own], [1e3 * row["step"] for row in own], "o-", label=label)
    links.set(title="milliseconds of a step, two processes", xlabel="r", xticks=(1, 2, 3, 4), yscale="log")
    links.legend(fontsize=8)


def draw_figures(runs: Path, page: Path, links: list[dict[str, Any]], file: Path) -> None:
    """Draw all panels."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(14, 11), layout="constrained")
    axes = figure.subplots(3, 3)
    draw_gradients(axes[0], json.loads((runs / "gradients.json").read_text()), 50)
    draw_curves([*axes[1][:2], *axes[2][:2]], runs)
    draw_resources([axes[1][2], axes[2][2]], read_resources(page.read_text()), links)
    figure.savefig(file, dpi=80)
    print(file)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, default=Path("runs/hybrid-es"), help="the folder of the runs")
    parser.add_argument("--epochs", type=int, default=30, help="epochs of full gradients (default 30)")
    parser.add_argument("--times", type=Path, metavar="FILE", help="print seconds to accuracies, by steps of this file")
    parser.add_argument("--figures", type=Path, metavar="FILE", help="draw the figures, and train nothing")
    parser.add_argument("--resources", type=Path, metavar="FILE", help="results of hybrid_resources.py --json")
    page = Path("docs/papers/hybrid-es.md")
    parser.add_argument("--page", type=Path, default=page, help=f"the page with the table of resources ({page})")
    arguments = parser.parse_args()
    if arguments.times is not None:
        show_times(arguments.runs, json.loads(arguments.times.read_text())["links"])
        return
    if arguments.figures is not None:
        links = json.loads(arguments.resources.read_text())["links"] if arguments.resources is not None else []
        draw_figures(arguments.runs, arguments.page, links, arguments.figures)
        return
    rows = measure_gradients(arguments.epochs)
    arguments.runs.mkdir(parents=True, exist_ok=True)
    (arguments.runs / "gradients.json").write_text(json.dumps(rows))
    show_gradients(rows, 50)


if __name__ == "__main__":
    main()
