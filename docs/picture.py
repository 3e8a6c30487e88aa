"""Draw docs/run.png, the picture of the README: a run of digits compared with backprop on the same net.

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


def curve(strategy: str, directory: Path) -> list[tuple[float, float]]:
    """Train digits by a strategy, and return pairs of seconds of training and accuracy on the dev set."""
    recipe = make_recipe("digits", {}, seed=0)
    if strategy != recipe.strategy.name:
        recipe = dataclasses.replace(recipe, strategy=recipe.others[strategy])
    session = opening.start(recipe, directory / strategy, seed=0, fleet=Local("cpu"), about={})
    loop.run(session, Stop(seconds=6.0))
    return [(row["total_seconds"], row["dev_accuracy"]) for row in session.history if "dev_accuracy" in row]


def main() -> None:
    figure = Figure(figsize=(7, 3.2), layout="constrained")
    axis = figure.subplots()
    with tempfile.TemporaryDirectory() as directory:
        for strategy, label in (("openai-es", "OpenAI-ES, scores alone"), ("gradient", "backprop (Adam)")):
            points = curve(strategy, Path(directory))
            axis.plot(*zip(*points, strict=True), label=label, lw=1.6)
    axis.set(
        xlabel="seconds of training on 2 CPU cores", ylabel="dev accuracy", ylim=(0.5, 1), title="germline train digits"
    )
    axis.grid(alpha=0.3)
    axis.legend(loc="lower right")
    figure.savefig(Path(__file__).parent / "run.png", dpi=120)


if __name__ == "__main__":
    main()
