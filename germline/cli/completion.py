"""The names that a shell completes, written down here because a shell must not wait until torch is imported."""

from collections.abc import Iterator
from glob import escape, glob
from importlib.metadata import entry_points
from os.path import isdir

RECIPES = (
    "digits",
    "mnist-mlp",
    "mnist-conv",
    "mnist-3m",
    "cif-900k",
    "cif-8m",
    "hybrid-es-mnist",
    "hybrid-es-convnet",
    "pesgd-mnist",
    "unet-nuclei",
    "unet-shapes",
    "lstm-temperature",
    "lstm-etth1",
    "threshold-digits",
    "cartpole",
    "lunar-lander",
    "swimmer",
    "half-cheetah",
    "pong-ram",
    "lm-bytes",
    "smollm2-format",
    "smollm2-concise",
    "smollm2-countdown",
)
STRATEGIES = ("openai-es", "snes", "mu-lambda", "ga", "deep-ga", "pso", "hybrid-es", "pesgd", "gradient")


def complete_recipe(incomplete: str) -> Iterator[str]:
    """Yield the recipes, Python files and folders that begin with what the user has typed."""
    yield from (name for name in RECIPES if name.startswith(incomplete))
    paths = sorted(glob(f"{escape(incomplete)}*"))
    yield from (f"{path}/" if isdir(path) else path for path in paths if isdir(path) or path.endswith(".py"))


def complete_strategy(incomplete: str) -> Iterator[str]:
    """Yield the strategies of this package and of installed packages that begin with what the user has typed."""
    names = (*STRATEGIES, *(point.name for point in entry_points(group="germline.strategies")))
    yield from (name for name in names if name.startswith(incomplete))
