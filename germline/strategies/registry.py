"""Strategies by name: those of this package, those of installed packages, and classes given as module:Class."""

import importlib
import sys
from collections.abc import Iterable
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from germline.errors import BadInput, format_error, unknown_name
from germline.strategies.deep_ga import DeepGA
from germline.strategies.ga import GA
from germline.strategies.gradient import Gradient
from germline.strategies.hybrid_es import HybridES
from germline.strategies.mu_lambda import MuLambda
from germline.strategies.openai_es import OpenAIES
from germline.strategies.pesgd import PESGD
from germline.strategies.protocol import AnyStrategy, GradientStrategy, MemberStrategy, Strategy, SummedStrategy
from germline.strategies.pso import PSO
from germline.strategies.snes import SNES
from germline.strategies.state import is_dataclass_instance, pack

STRATEGIES: dict[str, type[Any]] = {
    cls.name: cls for cls in (OpenAIES, SNES, MuLambda, GA, DeepGA, PSO, HybridES, PESGD, Gradient)
}
GROUP = "germline.strategies"  # entry points of installed packages
PROTOCOLS = (Strategy, SummedStrategy, GradientStrategy, MemberStrategy)


def class_path(strategy: AnyStrategy | type[Any]) -> str:
    """Return module:Class of a strategy, by which a journal knows it."""
    cls = strategy if isinstance(strategy, type) else type(strategy)
    return f"{cls.__module__}:{cls.__qualname__}"


def is_built_in(path: str) -> bool:
    """Return whether module:Class is a strategy of this package."""
    return any(class_path(cls) == path for cls in STRATEGIES.values())


def known_names() -> list[str]:
    """Return the names that ``find_strategy`` takes without a module: built-in strategies and entry points."""
    return [*STRATEGIES, *(point.name for point in entry_points(group=GROUP))]


def find_strategy(name: str) -> type[Any]:
    """Return the strategy class that a user has named.

    Args:
        name: A built-in name, the name of an entry point in the group ``germline.strategies``, or ``module:Class``.

    Raises:
        BadInput: If there is no such class, or it does not derive from ``gl.Strategy``.
    """
    if name in STRATEGIES:
        return STRATEGIES[name]
    if ":" in name:
        module, _, attribute = name.partition(":")
        if str(Path.cwd()) not in sys.path:
            sys.path.append(str(Path.cwd()))
        try:
            cls = getattr(importlib.import_module(module), attribute)
        except Exception as error:  # whatever the user's module does
            raise BadInput(f"The strategy {name} cannot be loaded: {format_error(error)}") from error
    else:
        points = [point for point in entry_points(group=GROUP) if point.name == name]
        if not points:
            raise unknown_name("strategy", name, [*known_names(), "module:Class"])
        try:
            cls = points[0].load()
        except Exception as error:  # whatever the package does
            raise BadInput(f"The strategy {name} cannot be loaded: {format_error(error)}") from error
    if not (isinstance(cls, type) and Strategy in cls.__mro__):
        raise BadInput(f"{name} is not a strategy: a strategy is a class that derives from gl.Strategy.")
    return cls


def check_strategy(strategy: AnyStrategy) -> None:
    """Raise an error if a strategy does not define what the protocol asks for."""
    cls = type(strategy)
    defined = {name for parent in cls.__mro__ if parent not in PROTOCOLS for name in vars(parent)}
    missing = [name for name in ("name", "population", "init", "values", "ask", "tell") if name not in defined]
    if Strategy not in cls.__mro__ or missing:
        what = f"does not define {' and '.join(missing)}" if missing else "does not derive from gl.Strategy"
        raise BadInput(f"The strategy {class_path(cls)} {what}: docs/strategies.md has the protocol.")


def check_state(strategy: AnyStrategy, state: Any, parameters: int) -> None:
    """Raise an error if the State of a strategy cannot be cut into columns or saved."""
    fields = vars(state) if is_dataclass_instance(state) else {}
    if "theta" not in dir(state) or not fields:
        raise BadInput(f"The State of {strategy.name} must be a dataclass with theta, a field or a property.")
    unknown = [name for name in strategy.ask_arrays if name not in fields]
    if unknown:
        message = f"The setting ask_arrays of {strategy.name} names {unknown[0]}, which is not a field of its State"
        raise BadInput(f"{message} ({', '.join(fields)}).")
    for name, array in pack(state)[1].items():
        if array.dim() and array.shape[-1] != parameters:
            shape = f"The field {name} of the State of {strategy.name} has shape {tuple(array.shape)}"
            raise BadInput(f"{shape}, but the last axis of an array must be the {parameters} parameters: use a tuple.")


def describe_strategies() -> Iterable[tuple[str, str]]:
    """Yield the name of every known strategy and the first line of its description."""
    for name in known_names():
        yield name, (find_strategy(name).__doc__ or "").splitlines()[0]
