"""The data that users hand over, as tensors: NumPy arrays, lists of examples, and parts within parts."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import default_collate

from germline.errors import BadInput

ARRAYS = (np.ndarray, np.generic)  # arrays and single numbers of NumPy


def float_type(module: nn.Module) -> torch.dtype:
    """Return the type that NumPy's float64 becomes for a module: float64 if one of its parameters is, else float32."""
    return torch.float64 if any(p.dtype == torch.float64 for p in module.parameters()) else torch.float32


def to_tensors(value: Any, name: str, dtype: torch.dtype, kinds: tuple[type, ...] = ARRAYS) -> Any:
    """Return nested dicts, lists and tuples with a tensor in place of each NumPy array; what else they hold stays.

    Args:
        value: What the user has given.
        name: The argument that it was given as, for error messages.
        dtype: The type that float64 becomes, which NumPy makes unless it is told otherwise.
        kinds: The types of which tensors are made.

    >>> to_tensors((np.zeros(2), {"a": np.arange(2)}), "data", torch.float32)
    (tensor([0., 0.]), {'a': tensor([0, 1])})
    """
    if isinstance(value, kinds):
        return to_tensor(np.asarray(value), name, dtype)
    if isinstance(value, Mapping):
        return {key: to_tensors(item, f"{name}[{key!r}]", dtype, kinds) for key, item in value.items()}
    if isinstance(value, list | tuple):
        items = [to_tensors(item, f"{name}[{i}]", dtype, kinds) for i, item in enumerate(value)]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value


def to_tensor(array: np.ndarray[Any, Any], name: str, dtype: torch.dtype) -> Tensor:
    """Return an array as a tensor that shares its memory where it can."""
    try:
        tensor = torch.from_numpy(np.require(array, requirements=["C", "W"]))
    except (TypeError, ValueError) as error:
        raise BadInput(f"{name} is an array of {array.dtype}, for which torch has no type: give numbers.") from error
    return tensor.to(dtype) if tensor.dtype == torch.float64 else tensor


def is_list_of_examples(value: Any) -> bool:
    """Return whether a value is a list of tuples or of dicts: one for each example, as those of a Dataset."""
    kinds = [kind for kind in (tuple, Mapping) if isinstance(value, list) and value and isinstance(value[0], kind)]
    return any(all(isinstance(example, kind) for example in value) for kind in kinds)


def collate_examples(examples: Sequence[Any], name: str, dtype: torch.dtype) -> Any:
    """Return examples as one batch, as torch collates them, with single numbers in the type of the arithmetic."""
    try:
        return default_collate([to_tensors(example, name, dtype, (*ARRAYS, float)) for example in examples])
    except (TypeError, RuntimeError, KeyError) as error:
        raise BadInput(f"The examples of {name}= cannot be put into one batch: {error}") from error


def read_batch(raw: Any, dtype: torch.dtype) -> Any:
    """Return a batch of the user's with tensors in place of NumPy arrays and of a list of examples."""
    if is_list_of_examples(raw):
        return collate_examples(raw, "batch", dtype)
    return to_tensors(raw, "batch", dtype)


def name_parts(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield everything in nested dicts, lists and tuples that is none itself, with its place: ``1.boxes``.

    >>> dict(name_parts((3, {"boxes": 4, "ids": (5, 6)})))
    {'0': 3, '1.boxes': 4, '1.ids.0': 5, '1.ids.1': 6}
    """
    if not isinstance(value, Mapping | list | tuple):
        yield prefix, value
        return
    for key, item in value.items() if isinstance(value, Mapping) else enumerate(value):
        yield from name_parts(item, f"{prefix}.{key}" if prefix else str(key))
