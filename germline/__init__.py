"""Germline trains ordinary PyTorch modules by evolution, on one machine or on any mix of machines."""

import os
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

# Products of matrices then have the same bits whatever the alignment of memory; read by MKL at its first use.
os.environ.setdefault("MKL_CBWR", "AUTO")
# A thread of torch's that waits does not hold the core that a block of members needs; read when torch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from germline.version import __version__

if TYPE_CHECKING:
    from germline.api import Result, train
    from germline.errors import BadInput, NoProgress
    from germline.fleet import SPMD, Dask, Elastic, Local, Ray
    from germline.metrics import accuracy
    from germline.normalization import Normalize
    from germline.optim.schedules import Schedule
    from germline.population.members import Members
    from germline.recipes.recipe import Recipe, seeded
    from germline.rl.gym import Gym
    from germline.search import Search
    from germline.simulators import vectorized
    from germline.strategies import GA, PESGD, PSO, SNES, DeepGA, Gradient, HybridES, MuLambda, OpenAIES, Strategy

__all__ = [
    "GA",
    "PESGD",
    "PSO",
    "SNES",
    "SPMD",
    "BadInput",
    "Dask",
    "DeepGA",
    "Elastic",
    "Gradient",
    "Gym",
    "HybridES",
    "Local",
    "Members",
    "MuLambda",
    "NoProgress",
    "Normalize",
    "OpenAIES",
    "Ray",
    "Recipe",
    "Result",
    "Schedule",
    "Search",
    "Strategy",
    "__version__",
    "accuracy",
    "seeded",
    "train",
    "vectorized",
]

_NAMES = {  # the public names by the module that defines them, which is imported when one of them is first used
    "germline.api": ("Result", "train"),
    "germline.errors": ("BadInput", "NoProgress"),
    "germline.fleet": ("SPMD", "Dask", "Elastic", "Local", "Ray"),
    "germline.metrics": ("accuracy",),
    "germline.normalization": ("Normalize",),
    "germline.optim.schedules": ("Schedule",),
    "germline.population.members": ("Members",),
    "germline.recipes.recipe": ("Recipe", "seeded"),
    "germline.rl.gym": ("Gym",),
    "germline.search": ("Search",),
    "germline.simulators": ("vectorized",),
    "germline.strategies": (
        "GA",
        "PESGD",
        "PSO",
        "SNES",
        "DeepGA",
        "Gradient",
        "HybridES",
        "MuLambda",
        "OpenAIES",
        "Strategy",
    ),
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names}


def __getattr__(name: str) -> Any:
    """Return a public name or a submodule, which is imported now: the command line must not wait for torch."""
    if name in _MODULES:
        value = getattr(import_module(_MODULES[name]), name)
    elif not name.startswith("_") and find_spec(f"germline.{name}") is not None:
        value = import_module(f"germline.{name}")
    else:
        raise AttributeError(f"module 'germline' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """Return the public names, for the completion of interactive shells."""
    return __all__
