"""The strategies by name."""

from typing import Any

from germline.errors import unknown
from germline.strategies.base import AnyStrategy, Candidates, Strategy, Told, cut, pack, unpack
from germline.strategies.gradient import Gradient
from germline.strategies.openai_es import OpenAIES

STRATEGIES: dict[str, type[Any]] = {cls.name: cls for cls in (OpenAIES, Gradient)}


def strategy_class(name: str) -> type[Any]:
    """The strategy of that name, or a sentence that names the nearest."""
    if name not in STRATEGIES:
        raise unknown("strategy", name, STRATEGIES)
    return STRATEGIES[name]


__all__ = [
    "STRATEGIES",
    "AnyStrategy",
    "Candidates",
    "Gradient",
    "OpenAIES",
    "Strategy",
    "Told",
    "cut",
    "pack",
    "strategy_class",
    "unpack",
]
