"""The comparison of Kalia et al.: (mu + lambda)-ES, GA and PSO with backprop, on a U-Net and on LSTMs.

    python benchmarks/kalia.py [--only PART ...] [--seconds S | --evaluations N] [--seeds K] [--runs DIR]
    python benchmarks/kalia.py --fleet [--only PART ...]
    sudo python benchmarks/kalia.py --hosts [--only PART ...]
    python benchmarks/kalia.py --passes [--only PART ...]
    python benchmarks/kalia.py --pictures FILE.png [--runs DIR] [--masks PICTURE.png]

Each part is a ``germline compare`` under one budget, and can be resumed. Every strategy returns its best weights by the
dev set, and stops when that has brought nothing better for 30 evaluations, which stops backprop before it overfits. A
part is followed by a baseline that needs no training: Otsu's threshold for the nuclei, and for the series the forecast
that the last value persists. ``--fleet`` trains by the paper's three strategies on a coordinator and 1, 2 and 4 workers
in separate processes, and compares the weights with those of one process. ``--hosts`` does so on three network
namespaces as hosts: a coordinator, a worker, and one behind 1 Mbit/s. ``--passes`` prints the CPU seconds of a
forward pass of a batch, and of a forward and a backward pass, by one thread. ``--pictures`` draws the masks that the
trained U-Nets predict for test images, and the forecasts of the LSTMs, from runs that have ended.
"""

import argparse
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from elastic import HOSTS, LINK, hosts, start_cluster
from numpy.typing import NDArray

from germline.data import load_nuclei, load_nuclei_arrays, make_shapes
from germline.engine.journal import Journal
from germline.fleet.cluster.keys import add_machine, create_authority
from germline.recipes import make_recipe
from germline.recipes.nuclei import dice, iou

STRATEGIES = "openai-es,snes,mu-lambda,ga,pso,gradient"
SHOWN = 4  # test images in the picture
DAYS = 60  # of the series in the picture
PASSES = 9  # that are timed
PATIENCE = 30  # evaluations of the dev set
WORKERS = (1, 2, 4)
FLEET = {"unet": 4, "temperature": 15}  # parts that a fleet trains, and their generations
HOST_GENERATIONS = {"unet": 12, "temperature": 60}


@dataclasses.dataclass(frozen=True)
class Part:
    """A recipe with settings and a budget; ``baseline`` is a metric that needs no training."""

    recipe: str
    settings: tuple[str, ...] = ()
    seconds: float = 300.0
    baseline: str | None = None


PARTS = {
    "unet": Part("unet-nuclei", seconds=900.0),
    "shapes": Part("unet-shapes", seconds=150.0),
    "unet-large": Part("unet-nuclei", ("recipe.size=large",), seconds=120.0),
    "temperature": Part("lstm-temperature", seconds=120.0, baseline="test_persistence_mse"),
    "etth1-24": Part("lstm-etth1", seconds=180.0, baseline="test_persistence_mse"),
    "load": Part(
        "lstm-etth1", ("recipe.column=HUFL", "recipe.hidden=24"), seconds=40.0, baseline="test_persistence_mse"
    ),
    "etth1-1": Part("lstm-etth1", ("recipe.horizon=1",), seconds=180.0, baseline="test_persistence_mse"),
}


def compare(name: str, part: Part, seeds: int, runs: Path, strategies: str, evaluations: int | None) -> None:
    """Run the comparison of a part, and print its table and its baseline."""
    settings = [word for setting in part.settings for word in ("--set", setting)]
    budget = ["--evaluations", str(evaluations)] if evaluations is not None else ["--seconds", str(part.seconds)]
    words = ["compare", part.recipe, "--strategies", strategies, *budget, *settings, "--keep", "best"]
    metric = "test_dice" if part.recipe.startswith("unet") else "test_mse"
    words += ["--patience", str(PATIENCE), "--metric", metric, "--device", "cpu"]
    words += ["--seeds", str(seeds), "--runs", str(runs), "--name", name]
    print(f"{name}: {part.recipe} {' '.join(part.settings)}, {' '.join(budget)}, {seeds} seed(s)", flush=True)
    subprocess.run([sys.executable, "-m", "germline", *words], check=True)
    rows = json.loads((runs / name / "report.json").read_text())["rows"]
    backprop = next((row["median"] for row in rows if row["variant"] == "gradient" and "median" in row), None)
    if part.baseline is not None:
        print(f"the forecast that the last value persists: {read_metric(runs / name, part.baseline):.4f}")
        for row in rows:
            if backprop and "median" in row:
                print(f"  {row['variant']:10} {row['median'] / backprop:.2f} of backprop's error")
    elif part.recipe.startswith("unet"):
        print("Otsu's threshold, no learning: dice {:.4f}, iou {:.4f}".format(*otsu_scores(part.recipe)))
    print()


def read_metric(folder: Path, metric: str) -> float:
    """Return a metric that does not depend on the net, from any run."""
    journal = Journal.open(next(path.parent for path in folder.glob("*/journal.sqlite")), read_only=True)
    outcome: dict[str, Any] = journal.outcome() or {}
    journal.close()
    return float(outcome["metrics"][metric])


def otsu(image: NDArray[np.uint8]) -> NDArray[np.bool_]:
    """Return the pixels above the threshold that maximizes the variance between the two classes."""
    share = np.bincount(image.ravel(), minlength=256) / image.size
    below, mean = np.cumsum(share), np.cumsum(share * np.arange(256))
    with np.errstate(divide="ignore", invalid="ignore"):
        between = (mean[-1] * below - mean) ** 2 / (below * (1 - below))
    return image > int(np.nanargmax(between))


def otsu_scores(recipe: str) -> tuple[float, float]:
    """Return Dice coefficient and IoU of Otsu's threshold on the test images."""
    if recipe == "unet-nuclei":
        _, _, images, masks = load_nuclei_arrays()
        target = torch.from_numpy(masks.astype(np.float32))[:, None]
    else:
        x, target = make_shapes().test
        images = (255 * x[:, 0]).round().byte().numpy()
    output = torch.from_numpy(np.stack([otsu(image) for image in images]).astype(np.float32))[:, None] - 0.5
    return float(dice(output, target)), float(iou(output, target))


def train_by_fleets(name: str, part: Part) -> None:
    """Train by the paper's strategies in one process and by workers in separate processes; compare the weights."""
    settings = [word for setting in part.settings for word in ("--set", setting)]
    generations = ["--generations", str(FLEET[name]), "--device", "cpu", "--json"]
    print(f"{name}: {part.recipe}, {FLEET[name]} generations; seconds of training, and the weights of one process?")
    for strategy in ("mu-lambda", "ga", "pso"):
        outcomes = []
        for workers in (0, *WORKERS):
            fleet = ["--fleet", "elastic", "--workers", str(workers)] if workers else ["--workers", "1"]
            with tempfile.TemporaryDirectory() as folder:
                words = ["train", part.recipe, "--strategy", strategy, *settings, *generations, *fleet]
                command = [sys.executable, "-m", "germline", *words, "--runs", folder]
                environment = {**os.environ, "OMP_NUM_THREADS": "1"}
                done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
            outcomes.append(json.loads(done.stdout.splitlines()[-1]))
        alone, *shared = outcomes
        times = [f"{one['seconds']:.1f}" for one in outcomes]
        same = all(one["theta_sha256"] == alone["theta_sha256"] for one in shared)
        print(f"  {strategy:10} one process {times[0]} s, workers {WORKERS}: {', '.join(times[1:])} s", end="")
        received = ", ".join(f"{one['bytes_sent'] + one['bytes_received']:,}" for one in shared)
        print(
            f"; bytes {received}; {'the same weights' if same else 'OTHER WEIGHTS'}, {alone['theta_sha256'][:16]}",
            flush=True,
        )


def train_on_hosts(name: str, part: Part, secret: Path) -> None:
    """Train by the paper's strategies on three hosts: a coordinator and two workers, one of them behind a thin link."""
    settings = [word for setting in part.settings for word in ("--set", setting)]
    print(f"{name}: {part.recipe}, {HOST_GENERATIONS[name]} generations; a worker behind {LINK}")
    for strategy in ("mu-lambda", "ga", "pso"):
        words = [part.recipe, "--strategy", strategy, *settings, "--generations", str(HOST_GENERATIONS[name])]
        command = [sys.executable, "-m", "germline", "train", *words, "--device", "cpu", "--workers", "1", "--json"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        with tempfile.TemporaryDirectory() as runs:
            done = subprocess.run(
                [*command, "--runs", runs], capture_output=True, text=True, check=True, env=environment
            )
        alone = json.loads(done.stdout.splitlines()[-1])
        status: dict[str, Any] = {}
        with start_cluster(words, HOSTS["coordinator"], secret) as running:
            for worker in ("near", "far"):
                running.add_worker(worker)
            while running.processes[0].poll() is None:
                with suppress(OSError, subprocess.CalledProcessError, ValueError):
                    status = running.read_status()
                time.sleep(0.5)
            shared = json.loads((running.folder / "coordinator.txt").read_text().splitlines()[-1])
        same = "the same weights" if shared["theta_sha256"] == alone["theta_sha256"] else "OTHER WEIGHTS"
        parts = ", ".join(
            f"{worker['name']}: {worker['pieces']} blocks, {worker['bytes_received']:,} bytes received and "
            f"{worker['bytes_sent']:,} sent"
            for worker in status.get("workers", ())
        )
        print(f"  {strategy:10} one process {alone['seconds']:.1f} s, hosts {shared['seconds']:.1f} s; {same}; {parts}")
        sys.stdout.flush()


def time_passes(part: Part) -> None:
    """Print the CPU seconds of a forward pass, and of a forward and a backward pass."""
    settings = dict(one.removeprefix("recipe.").split("=") for one in part.settings)
    recipe = make_recipe(part.recipe, settings, 0)
    x, y = (tensor[: recipe.batch_size] for tensor in recipe.data)
    torch.set_num_threads(1)
    loss = recipe.loss
    assert loss is not None

    def forward() -> None:
        with torch.no_grad():
            loss(recipe.model(x), y)

    def both() -> None:
        recipe.model.zero_grad()
        loss(recipe.model(x), y).backward()

    times: dict[str, list[float]] = {"forward": [], "both": []}
    for _ in range(PASSES):  # in turns, because other work may run on this machine
        for name, work in (("forward", forward), ("both", both)):
            began = time.process_time()
            work()
            times[name].append(time.process_time() - began)
    once, twice = (1e3 * statistics.median(times[name]) for name in ("forward", "both"))
    label = " ".join((part.recipe, *part.settings))
    print(f"{label:50} forward {once:8.2f} ms, with backward {twice:8.2f} ms, {twice / once:.2f} times", flush=True)


def draw_pictures(runs: Path, file: Path, masks: Path | None) -> None:
    """Draw the masks of the U-Nets, or a picture of masks, above the forecasts of the LSTMs."""
    from matplotlib.figure import Figure
    from matplotlib.image import imread

    figure = Figure(figsize=(13, 12), layout="constrained")
    parts: Any = figure.subfigures(2, 1, height_ratios=(1.5, 1))
    above, below = parts
    if masks is None:
        draw_masks(runs, above)
    else:
        axis = above.subplots()
        axis.imshow(imread(masks), interpolation="antialiased")
        axis.set_axis_off()
    draw_forecasts(runs, below)
    figure.savefig(file, dpi=80)
    print(file)


def draw_forecasts(runs: Path, figure: Any) -> None:
    """Draw the ends of test series and the forecasts of seed 0 of each strategy."""
    from safetensors.torch import load_file

    axes = figure.subplots(2, 1)
    panels = (("temperature", 0, DAYS, "days"), ("etth1-24", 0, None, "hours"))
    for axis, (name, first, length, unit) in zip(axes, panels, strict=True):
        part = PARTS[name]
        recipe = make_recipe(part.recipe, dict(one.removeprefix("recipe.").split("=") for one in part.settings), 0)
        x, y = recipe.test
        if length is None:  # one forecast of many values, after its window
            window = len(y) // 2
            known = torch.cat([x[window, :, -1], y[window, 1:]])
            axis.plot(range(-x.shape[1], y.shape[1] - 1), known, color="black", lw=1.6, label="measured")
        else:
            axis.plot(y[first : first + length, 1], color="black", lw=1.6, label="measured")
            axis.plot(y[first : first + length, 0], color="#999999", lw=0.9, ls=":", label="persistence")
        for path in sorted((runs / name).glob("*-0/model.safetensors")):
            net = make_recipe(
                part.recipe, dict(one.removeprefix("recipe.").split("=") for one in part.settings), 0
            ).model
            net.load_state_dict(load_file(path))
            with torch.no_grad():
                output = net(x[window : window + 1])[0] if length is None else net(x[first : first + length])[:, 0]
            axis.plot(output, lw=1.0, label=path.parent.name[:-2])
        axis.set(
            xlabel=unit, title=f"{part.recipe}: {'the next day' if length is None else 'each next day'}, test series"
        )
        axis.legend(fontsize=8, ncols=2, loc="upper left", bbox_to_anchor=(1.0, 1.0))


def draw_masks(runs: Path, figure: Any) -> None:
    """Draw images, true masks and the masks that each net predicts."""
    from safetensors.torch import load_file

    x, y = load_nuclei().test
    chosen = y.sum((1, 2, 3)).argsort(descending=True)[:: len(y) // SHOWN][:SHOWN]
    columns = {"image": x[chosen].sqrt(), "true mask": y[chosen]}
    for path in sorted((runs / "unet").glob("*-0/model.safetensors")):
        net = make_recipe("unet-nuclei", {}, 0).model
        net.load_state_dict(load_file(path))
        with torch.no_grad():
            output = net(x)
        columns[f"{path.parent.name[:-2]}\ndice {float(dice(output, y)):.3f}"] = (output[chosen] > 0).float()
    axes = figure.subplots(SHOWN, len(columns))
    for column, (title, images) in enumerate(columns.items()):
        for row in range(SHOWN):
            axes[row][column].imshow(images[row, 0], cmap="gray")
            axes[row][column].set_axis_off()
        axes[0][column].set_title(title, fontsize=9)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only",
        nargs="+",
        choices=PARTS,
        default=list(PARTS),
        metavar="PART",
        help=f"run only these parts: {', '.join(PARTS)}",
    )
    parser.add_argument("--seconds", type=float, help="seconds of each run (default: one for each part)")
    parser.add_argument("--evaluations", type=int, help="instead of seconds: forward passes of a batch")
    parser.add_argument("--fleet", action="store_true", help="train on workers in separate processes instead")
    parser.add_argument("--hosts", action="store_true", help="train on workers in network namespaces instead (root)")
    parser.add_argument("--passes", action="store_true", help="time forward and backward passes instead")
    parser.add_argument("--seeds", type=int, default=1, help="runs of each strategy (default 1)")
    parser.add_argument("--strategies", default=STRATEGIES, help="names of strategies, with commas")
    parser.add_argument("--runs", type=Path, default=Path("runs/kalia"), help="the folder of the runs")
    parser.add_argument(
        "--pictures", type=Path, metavar="FILE", help="draw the masks of runs that have ended, and run nothing"
    )
    parser.add_argument("--masks", type=Path, metavar="FILE", help="a picture of masks that was drawn before")
    arguments = parser.parse_args()
    if arguments.pictures is not None:
        draw_pictures(arguments.runs, arguments.pictures, arguments.masks)
        return
    if arguments.passes:
        for name in arguments.only:
            time_passes(PARTS[name])
        return
    if arguments.fleet:
        for name in FLEET:
            if name in arguments.only:
                train_by_fleets(name, PARTS[name])
        return
    if arguments.hosts:
        with hosts(), tempfile.TemporaryDirectory() as place:
            secret = Path(place) / "keys"
            create_authority(secret)
            for worker in ("near", "far"):
                add_machine(secret, worker)
            for name in HOST_GENERATIONS:
                if name in arguments.only:
                    train_on_hosts(name, PARTS[name], secret)
        return
    for name in arguments.only:
        part = PARTS[name]
        part = dataclasses.replace(part, seconds=arguments.seconds or part.seconds)
        compare(name, part, arguments.seeds, arguments.runs, arguments.strategies, arguments.evaluations)


if __name__ == "__main__":
    main()
