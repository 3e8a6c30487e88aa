"""Draw docs/run.png, the picture of the README: evolution where backprop cannot go, and where it can.

python docs/picture.py
"""

import dataclasses
import tempfile
from pathlib import Path

from matplotlib.figure import Figure

from germline import Local
from germline.engine import loop, opening
from germline.engine.stopping import Stop
from germline.recipes import make_recipe
from germline.strategies import Gradient

PANELS = (  # recipe, seconds, title, names of the curves
    ("threshold-digits", 45.0, "neurons that are on or off", ("OpenAI-ES", "backprop: the last layer alone")),
    ("digits", 6.0, "tanh: backprop is faster", ("OpenAI-ES, scores alone", "backprop (Adam)")),
)


def curve(name: str, strategy: str, seconds: float, directory: Path) -> list[tuple[float, float]]:
    """Train a recipe by a strategy, and return pairs of seconds of training and accuracy on the dev set."""
    recipe = make_recipe(name, {}, seed=0)
    if strategy != recipe.strategy.name:
        recipe = dataclasses.replace(recipe, strategy=recipe.others.get(strategy, Gradient()))
    session = opening.start(recipe, directory / name / strategy, seed=0, fleet=Local("cpu"), about={})
    loop.run(session, Stop(seconds=seconds))
    return [(row["total_seconds"], row["dev_accuracy"]) for row in session.rows() if "dev_accuracy" in row]


def main() -> None:
    figure = Figure(figsize=(9, 3.2), layout="constrained")
    axes = figure.subplots(1, len(PANELS), sharey=True)
    with tempfile.TemporaryDirectory() as directory:
        for axis, (name, seconds, title, labels) in zip(axes, PANELS, strict=True):
            for strategy, label in zip(("openai-es", "gradient"), labels, strict=True):
                axis.plot(*zip(*curve(name, strategy, seconds, Path(directory)), strict=True), label=label, lw=1.6)
            axis.set(xlabel="seconds of training on 2 CPU cores", ylim=(0.5, 1), title=f"{name}: {title}")
            axis.grid(alpha=0.3)
            axis.legend(loc="lower right")
    axes[0].set_ylabel("dev accuracy")
    figure.savefig(Path(__file__).parent / "run.png", dpi=120)


if __name__ == "__main__":
    main()
