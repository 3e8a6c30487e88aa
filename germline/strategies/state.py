"""States as trees of arrays: cut to some columns, taken apart for a file or a message, and put together again."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from torch import Tensor

S = TypeVar("S")


def is_dataclass_instance(value: Any) -> bool:
    """Return whether a value is an instance of a dataclass, and not the class."""
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def map_arrays(function: Callable[[Tensor], Tensor], state: Any) -> Any:
    """Return a State, or a part of one, with a function of each array in its place; single numbers stay as they are."""
    if isinstance(state, Tensor):
        return function(state) if state.dim() else state
    if isinstance(state, dict):  # of a torch optimizer
        return {key: map_arrays(function, value) for key, value in state.items()}
    if is_dataclass_instance(state):
        parts = {f.name: map_arrays(function, getattr(state, f.name)) for f in dataclasses.fields(state)}
        return type(state)(**parts)
    return state


def slice_columns(state: Any, low: int, high: int) -> Any:
    """Return the columns low:high of a State: the last axis of its arrays is that of the parameters."""
    return map_arrays(lambda array: array[..., low:high], state)


def by_columns(
    advance: Callable[[Any, int], Any], state: S, parameters: int, width: int, untouched: tuple[str, ...]
) -> S:
    """Return a State that was advanced some columns at a time, so that what is computed on the way takes little memory.

    Args:
        advance: returns the next State of some columns, given these columns and the number of the first.
        state: the State before; its arrays are overwritten.
        parameters: the number of all columns.
        width: columns that are advanced at once.
        untouched: the fields whose arrays are not overwritten.
    """
    _, whole = pack(state)
    arrays: dict[str, Tensor] = {}
    for low in range(0, parameters, width):
        high = min(low + width, parameters)
        before = slice_columns(state, low, high)
        after = advance(before, low)
        if after is before:  # nothing was learned, which no column decides
            return state
        (tree, columns), (_, old_columns) = pack(after), pack(before)
        for name, part in columns.items():
            if not part.dim() or part is old_columns.get(name):
                arrays[name] = part if not part.dim() else whole[name]
                continue
            if low == 0:
                shape = (*part.shape[:-1], parameters)
                reused = name in whole and whole[name].shape == shape and name.split(".")[0] not in untouched
                arrays[name] = whole[name] if reused else part.new_empty(shape)
            arrays[name][..., low:high] = part
    next_state: S = unpack(after, tree, arrays)
    return next_state


def pack(state: Any, prefix: str = "") -> tuple[Any, dict[str, Tensor]]:
    """Take a State apart: JSON in which a tensor is {"tensor": name}, and the tensors by name."""
    if isinstance(state, Tensor):
        return {"tensor": prefix}, {prefix: state}
    if is_dataclass_instance(state):
        state = {f.name: getattr(state, f.name) for f in dataclasses.fields(state)}
    if not isinstance(state, dict | list | tuple):
        return state, {}
    items = state.items() if isinstance(state, dict) else enumerate(state)
    packed = [(key, *pack(value, f"{prefix}.{key}" if prefix else str(key))) for key, value in items]
    tensors = {name: tensor for _, _, part in packed for name, tensor in part.items()}
    if isinstance(state, dict):
        return {"items": [[key, tree] for key, tree, _ in packed]}, tensors
    return {"list": [tree for _, tree, _ in packed]}, tensors


def unpack(template: S, tree: Any, tensors: Mapping[str, Tensor]) -> S:
    """Put a State together again that ``pack`` took apart; the template says which dataclasses it is made of."""
    return _unpack(template, tree, tensors)  # type: ignore[no-any-return]


def _unpack(template: Any, tree: Any, tensors: Mapping[str, Tensor]) -> Any:
    if not isinstance(tree, dict):
        return tree
    if "tensor" in tree:
        return tensors[tree["tensor"]]
    if "list" in tree:
        return [_unpack(None, item, tensors) for item in tree["list"]]
    items = dict(tree["items"])
    if is_dataclass_instance(template):
        return type(template)(**{key: _unpack(getattr(template, key), item, tensors) for key, item in items.items()})
    return {key: _unpack(None, item, tensors) for key, item in items.items()}
