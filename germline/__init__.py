"""Germline trains ordinary PyTorch modules by evolution, on one machine or on any mix of machines."""

import os

# Products of matrices then have the same bits whatever the alignment of memory; read by MKL at its first use.
os.environ.setdefault("MKL_CBWR", "AUTO")
# A thread of torch's that waits does not hold the core that a block of members needs; read when torch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from germline.api import Result, Search, train
from germline.errors import BadInput, NoProgress
from germline.fleet import SPMD, Dask, Elastic, Local, Ray
from germline.objective import accuracy
from germline.optim.schedules import Schedule
from germline.recipes.recipe import Recipe, seeded
from germline.strategies import GA, PESGD, PSO, SNES, Gradient, HybridES, MuLambda, OpenAIES, Strategy
from germline.version import __version__

__all__ = [
    "GA",
    "PESGD",
    "PSO",
    "SNES",
    "SPMD",
    "BadInput",
    "Dask",
    "Elastic",
    "Gradient",
    "HybridES",
    "Local",
    "MuLambda",
    "NoProgress",
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
]


def __dir__() -> list[str]:
    """Return the public names, for the completion of interactive shells."""
    return __all__
