"""Arguments have the types that functions and dataclasses declare; they are checked before any value is used.

The annotations are the table: ``gl.train``, ``gl.Search``, recipes, strategies and fleets are checked by the same
function. NumPy's numbers are accepted and become Python's.
"""

import collections.abc
import dataclasses
import functools
import inspect
import math
import os
import reprlib
import types
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import numpy as np

from germline.errors import BadInput, unknown_name

P = ParamSpec("P")
T = TypeVar("T")
ARGUMENT, SETTING = "{}=", "The setting {}"  # how a message calls a value
NAMES = {bool: "True or False", int: "a whole number", float: "a finite number", str: "a text", Path: "a path"}
NAMES |= {type(None): "None", collections.abc.Callable: "a function", collections.abc.Mapping: "a dict"}  # type: ignore[dict-item]
OF_STRATEGIES = ("population", "sigma", "lr", "rank", "shaping", "optimizer", "weight_decay")  # settings, not arguments
LARGEST = 1 << 63  # whole numbers are smaller
CONTAINERS = (list, tuple, collections.abc.Sequence)


class Mismatch(Exception):
    """A value does not have a type."""


def check_arguments(function: Callable[P, T]) -> Callable[P, T]:
    """Return a function that checks the types of its arguments before it begins: a decorator.

    >>> @check_arguments
    ... def train(generations: int, seconds: float | None = None) -> int:
    ...     return generations
    >>> train(np.int64(3))
    3
    >>> train(float("nan"))
    Traceback (most recent call last):
    germline.errors.BadInput: generations= must be a whole number, not nan.
    """
    signature = inspect.signature(function)

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        for name in OF_STRATEGIES:
            if name in kwargs and name not in signature.parameters:
                message = f"{name}= is a setting of the strategy"
                raise BadInput(f"{message}: write strategy=gl.OpenAIES({name}={show(kwargs[name])}).")
        bound = signature.bind(*args, **kwargs)
        hints = read_hints(function)
        for name, value in bound.arguments.items():
            if name in hints and signature.parameters[name].kind != inspect.Parameter.VAR_POSITIONAL:
                bound.arguments[name] = convert(ARGUMENT.format(name), value, hints[name])
        return function(*bound.args, **bound.kwargs)

    return call


def check_fields(instance: Any, label: str = ARGUMENT) -> None:
    """Check the types of a dataclass's fields, and give them Python's numbers: for its ``__post_init__``."""
    owner: Any = type(instance)
    hints = read_hints(owner)
    for field in dataclasses.fields(instance):
        value = getattr(instance, field.name)
        converted = convert(label.format(field.name), value, hints[field.name])
        if converted is not value:
            object.__setattr__(instance, field.name, converted)


@functools.cache
def read_hints(owner: Any) -> dict[str, Any]:
    """Return the types of a function's arguments or a dataclass's fields."""
    return typing.get_type_hints(owner)


def convert(label: str, value: Any, kind: Any) -> Any:
    """Return a value as one of the types that it may have, or raise an error that names them."""
    options = list_options(kind)
    for option in options:
        try:
            return match(value, option)
        except Mismatch:
            continue
    literals = [option for option in options if typing.get_origin(option) is typing.Literal]
    choices = [choice for literal in literals for choice in typing.get_args(literal) if isinstance(choice, str)]
    if choices and isinstance(value, str) and set(options) <= {*literals, type(None)}:
        raise unknown_name(label.removesuffix("=").rpartition(" ")[2], value, choices)
    described = dict.fromkeys(describe(option) for option in options)
    raise BadInput(f"{label} must be {' or '.join(described)}, not {show(value)}.")


def list_options(kind: Any) -> list[Any]:
    """Return the types of a union, or the type itself."""
    is_union = isinstance(kind, types.UnionType) or typing.get_origin(kind) is typing.Union
    return [part for option in typing.get_args(kind) for part in list_options(option)] if is_union else [kind]


def match(value: Any, kind: Any) -> Any:
    """Return a value as a type that it has, or raise ``Mismatch``."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any or isinstance(kind, TypeVar):
        return value
    if origin is typing.Literal:
        if any(type(value) is type(choice) and value == choice for choice in args):
            return value
    elif kind is bool:
        if isinstance(value, bool | np.bool_):
            return bool(value)
    elif kind is int:
        if isinstance(value, int | np.integer) and not isinstance(value, bool) and abs(int(value)) < LARGEST:
            return int(value)
    elif kind is float:
        is_number = isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)
        if is_number and is_finite(value):
            return value.item() if isinstance(value, np.generic) else value
    elif kind is Path:
        if isinstance(value, os.PathLike):
            return value
    elif origin is collections.abc.Callable:
        if callable(value):
            return value
    elif origin in CONTAINERS:
        return match_items(value, origin, args)
    elif kind is type(None):
        if value is None:
            return value
    elif (origin or kind) in type(value).__mro__ or (inspect.isabstract(origin) and isinstance(value, origin)):
        return value
    raise Mismatch


def match_items(value: Any, origin: Any, args: tuple[Any, ...]) -> Any:
    """Return a list or a tuple whose items have the types that they should have, or raise ``Mismatch``."""
    if not isinstance(value, list | tuple):
        raise Mismatch
    is_fixed = origin is tuple and args[-1:] != (Ellipsis,)
    if is_fixed and len(value) != len(args):
        raise Mismatch
    kinds = args if is_fixed else [args[0]] * len(value)
    items = []
    for item, kind in zip(value, kinds, strict=True):
        for option in list_options(kind):
            try:
                items.append(match(item, option))
                break
            except Mismatch:
                continue
        else:
            raise Mismatch
    return tuple(items) if origin is tuple else items


def is_finite(value: Any) -> bool:
    """Return whether a number is finite and within the range of floats."""
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def describe(kind: Any) -> str:
    """Return what a person would call a type."""
    origin = typing.get_origin(kind) or kind
    if origin is typing.Literal:
        return " or ".join(repr(choice) for choice in typing.get_args(kind))
    if origin in CONTAINERS:
        return f"a {'tuple' if origin is tuple else 'list'}"
    return NAMES.get(origin) or f"a {origin.__name__}"


def show(value: Any) -> str:
    """Return a value for a message, cut if it is long."""
    if isinstance(value, int) and abs(value) >= LARGEST:
        return f"one of {value.bit_length()} bits"
    return repr(value) if isinstance(value, int | float) else reprlib.repr(value)
