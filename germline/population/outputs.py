"""Outputs of modules: containers and objects with tensors in them, of which only the tensors pass through vmap.

A module may return a dataclass, a cache of keys and values, None or a number next to its tensors. ``split_output``
takes the tensors out of an output, and ``join_output`` puts others into their places.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

# What has attributes, but is no part of an output.
CLOSED = (type, nn.Module, Enum, FunctionType, MethodType, ModuleType, torch.Generator)


def map_output(function: Callable[[Any], Any], output: Any, kind: Any = Tensor, seen: Any = None) -> Any:
    """Return an output with ``function(x)`` in place of each x of a kind, in a fixed order; the output stays as it is.

    Args:
        function: what is to be done with each x.
        output: nested containers, dataclasses and other objects.
        kind: the class of x, or a tuple of classes.
        seen: the objects that this one is part of.
    """
    if isinstance(output, kind):
        return function(output)
    if isinstance(output, Mapping):
        return with_items(output, {key: map_output(function, item, kind, seen) for key, item in output.items()})
    if isinstance(output, list | tuple):
        items = [map_output(function, item, kind, seen) for item in output]
        if all(a is b for a, b in zip(items, output, strict=True)):
            return output
        return type(output)(*items) if hasattr(output, "_fields") else type(output)(items)
    seen = seen or set()
    if isinstance(output, CLOSED) or id(output) in seen or not hasattr(output, "__dict__"):
        return output
    attributes = dict(vars(output))
    mapped = {name: map_output(function, item, kind, seen | {id(output)}) for name, item in attributes.items()}
    if all(mapped[name] is item for name, item in attributes.items()):
        return output
    copied = copy.copy(output)
    vars(copied).update(mapped)
    return copied


def with_items(mapping: Any, items: dict[Any, Any]) -> Any:
    """Return a mapping with other items under its keys, of the same class."""
    if all(items[key] is item for key, item in mapping.items()):
        return mapping
    if type(mapping) is dict:
        return items
    copied = copy.copy(mapping)
    for key, item in items.items():
        copied[key] = item
    return copied


@dataclass(frozen=True)
class Hole:
    """The place of a tensor in an output."""

    index: int


def split_output(output: Any) -> tuple[list[Tensor], Any]:
    """Return the tensors of an output, and the output with a ``Hole`` in the place of each."""
    tensors: list[Tensor] = []

    def take(tensor: Tensor) -> Hole:
        tensors.append(tensor)
        return Hole(len(tensors) - 1)

    return tensors, map_output(take, output)


def join_output(tensors: Sequence[Tensor], template: Any) -> Any:
    """Return an output with tensors in the holes that ``split_output`` has left."""
    return map_output(lambda hole: tensors[hole.index], template, Hole)


def combine_outputs(function: Callable[[list[Tensor]], Tensor], outputs: Sequence[Any]) -> Any:
    """Return the first of several outputs, with ``function(tensors)`` in place of the tensors at each place."""
    rows = [split_output(output) for output in outputs]
    columns = zip(*(tensors for tensors, _ in rows), strict=True)
    return join_output([function(list(tensors)) for tensors in columns], rows[0][1])
