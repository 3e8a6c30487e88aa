"""The strategies by name."""

from typing import Any

from germline.errors import unknown_name
from germline.strategies.base import (
    AnyStrategy,
    Candidates,
    Differentiating,
    GenerationInputs,
    GenerationResult,
    Strategy,
    UnsharedCandidates,
    cut,
    pack,
    unpack,
)
from germline.strategies.ga import GA
from germline.strategies.gradient import Gradient
from germline.strategies.hybrid_es import HybridES
from germline.strategies.mu_lambda import MuLambda
from germline.strategies.openai_es import OpenAIES
from germline.strategies.pesgd import PESGD
from germline.strategies.pso import PSO
from germline.strategies.snes import SNES

STRATEGIES: dict[str, type[Any]] = {
    cls.name: cls for cls in (OpenAIES, SNES, MuLambda, GA, PSO, HybridES, PESGD, Gradient)
}


def strategy_class(name: str) -> type[Any]:
    """The strategy of that name, or a sentence that names the nearest."""
    if name not in STRATEGIES:
        raise unknown_name("strategy", name, STRATEGIES)
    return STRATEGIES[name]


__all__ = [
    "GA",
    "PESGD",
    "PSO",
    "SNES",
    "STRATEGIES",
    "AnyStrategy",
    "Candidates",
    "Differentiating",
    "GenerationInputs",
    "GenerationResult",
    "Gradient",
    "HybridES",
    "MuLambda",
    "OpenAIES",
    "Strategy",
    "UnsharedCandidates",
    "cut",
    "pack",
    "strategy_class",
    "unpack",
]
