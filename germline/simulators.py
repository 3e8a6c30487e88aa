"""Objectives that run simulators: the seed of a generation, and environments that threads would share."""

import functools
import inspect
import types
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

from germline.noise import ADDRESS_LIMIT, Field, Stream

SEED_LIMIT = 1 << 31  # seeds fit into the signed integers of 32 bits that some simulators have


def takes_seed(objective: Callable[..., Any]) -> bool:
    """Return whether an objective takes a second positional argument: one named seed, or one without a default.

    >>> takes_seed(lambda model: 0), takes_seed(lambda model, env=None: 0), takes_seed(lambda model, seed=0: 0)
    (False, False, True)
    """
    try:
        parameters = inspect.signature(objective).parameters.values()
    except (TypeError, ValueError):  # some functions in C have no signature
        return False
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    second = [p for p in parameters if p.kind in kinds][1:2]
    return any(p.name == "seed" or p.default is p.empty for p in second)


def draw_seed(run_seed: int, generation: int) -> int:
    """Return the seed that an objective gets for all members of a generation, from 0 to 2^31 - 1."""
    field = Field(run_seed)
    return int(field.below(SEED_LIMIT, 1, generation, Stream.BATCH, member=ADDRESS_LIMIT - 1)[0])


def find_environment(objective: Callable[..., Any]) -> str | None:
    """Return the name of an object with the methods reset and step that an objective holds, if there is one.

    >>> class Environment:
    ...     def reset(self): ...
    ...     def step(self, action): ...
    >>> env = Environment()
    >>> find_environment(lambda model, env=env: 0.0), find_environment(lambda model: Environment().reset())
    ('env', None)
    """
    return next((name for name, value in iterate_held(objective) if is_environment(value)), None)


def is_environment(value: Any) -> bool:
    """Return whether a value is an object, not a class, with the methods reset and step."""
    has_methods = all(callable(getattr(value, method, None)) for method in ("reset", "step"))
    return has_methods and not isinstance(value, type | types.ModuleType)


def iterate_held(function: Any) -> Iterator[tuple[str, Any]]:
    """Yield the values that a function or a callable object holds, by name, without calling it."""
    if isinstance(function, functools.partial):
        yield from ((f"argument {number}", value) for number, value in enumerate(function.args))
        yield from function.keywords.items()
        yield from iterate_held(function.func)
    elif isinstance(function, types.MethodType):
        yield from [("self", function.__self__), *getattr(function.__self__, "__dict__", {}).items()]
        yield from iterate_held(function.__func__)
    elif isinstance(function, types.FunctionType):
        with suppress(ValueError):  # a variable of the closure has no value yet
            variables = inspect.getclosurevars(function)
            yield from [*variables.nonlocals.items(), *variables.globals.items()]
        yield from ((p.name, p.default) for p in inspect.signature(function).parameters.values())
    else:
        yield from getattr(function, "__dict__", {}).items()
