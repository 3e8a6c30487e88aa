"""The comparison of Kalia et al.: (mu + lambda)-ES, GA and PSO with backprop, on a U-Net and on LSTMs.

    python benchmarks/kalia.py [--only PART ...] [--seconds S] [--seeds K] [--runs DIR]
    python benchmarks/kalia.py --pictures FILE.png [--runs DIR]

Each part is a ``germline compare`` under one budget of time, and can be resumed. It is followed by a baseline that
needs no training: Otsu's threshold for the nuclei, and for the series the forecast that the last value persists.
``--pictures`` draws the masks that the trained U-Nets predict for test images.
"""

import argparse
import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from germline.data import load_nuclei, load_nuclei_arrays, make_shapes
from germline.engine.journal import Journal
from germline.recipes import make_recipe
from germline.recipes.nuclei import dice, iou

STRATEGIES = "openai-es,snes,mu-lambda,ga,pso,gradient"
SHOWN = 4  # test images in the picture


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


def compare(name: str, part: Part, seeds: int, runs: Path, strategies: str) -> None:
    """Run the comparison of a part, and print its table and its baseline."""
    settings = [word for setting in part.settings for word in ("--set", setting)]
    words = ["compare", part.recipe, "--strategies", strategies, "--seconds", str(part.seconds), *settings]
    words += ["--seeds", str(seeds), "--runs", str(runs), "--name", name]
    print(f"{name}: {part.recipe} {' '.join(part.settings)}, {part.seconds:g} s each, {seeds} seed(s)", flush=True)
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


def draw_masks(runs: Path, file: Path) -> None:
    """Draw images, true masks and the masks that each net predicts."""
    from matplotlib.figure import Figure
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
    figure = Figure(figsize=(1.7 * len(columns), 1.8 * SHOWN + 0.4), layout="constrained")
    axes = figure.subplots(SHOWN, len(columns))
    for column, (title, images) in enumerate(columns.items()):
        for row in range(SHOWN):
            axes[row][column].imshow(images[row, 0], cmap="gray")
            axes[row][column].set_axis_off()
        axes[0][column].set_title(title, fontsize=9)
    figure.savefig(file, dpi=80)


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
    parser.add_argument("--seeds", type=int, default=1, help="runs of each strategy (default 1)")
    parser.add_argument("--strategies", default=STRATEGIES, help="names of strategies, with commas")
    parser.add_argument("--runs", type=Path, default=Path("runs/kalia"), help="the folder of the runs")
    parser.add_argument(
        "--pictures", type=Path, metavar="FILE", help="draw the masks of runs that have ended, and run nothing"
    )
    arguments = parser.parse_args()
    if arguments.pictures is not None:
        draw_masks(arguments.runs, arguments.pictures)
        return
    for name in arguments.only:
        part = PARTS[name]
        part = dataclasses.replace(part, seconds=arguments.seconds or part.seconds)
        compare(name, part, arguments.seeds, arguments.runs, arguments.strategies)


if __name__ == "__main__":
    main()
