"""Pooling on a CPU, where torch's own takes longer than the convolutions around it."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode


def max_pool2d(
    x: torch.Tensor,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Any:
    """The largest of a few strided views: a pass over contiguous memory for each place in the window.

    >>> x = torch.randn(2, 3, 9, 8)
    >>> torch.equal(max_pool2d(x, 3, 2, 1), F.max_pool2d(x, 3, 2, 1))
    True
    """
    if x.device.type != "cpu" or ceil_mode or return_indices or pair(dilation) != (1, 1):
        usual: Any = F.max_pool2d
        return usual(x, kernel_size, stride, padding, dilation, ceil_mode, return_indices)
    (high, wide), (down, across) = pair(kernel_size), pair(kernel_size if stride is None else stride)
    if pair(padding) != (0, 0):
        top, left = pair(padding)
        x = F.pad(x, (left, left, top, top), value=float("-inf"))
    rows, columns = (x.shape[-2] - high) // down, (x.shape[-1] - wide) // across
    best = None
    for i in range(high):
        for j in range(wide):
            view = x[..., i : i + rows * down + 1 : down, j : j + columns * across + 1 : across]
            best = view if best is None else torch.maximum(best, view)
    return best


def pair(value: Any) -> tuple[int, int]:
    if isinstance(value, int):
        return value, value
    return (value[0], value[-1])


FUNCTIONS: dict[Any, Callable[..., Any]] = {F.max_pool2d: max_pool2d, torch.max_pool2d: max_pool2d}


class FasterFunctions(TorchFunctionMode):
    """While it is entered, functions that have a faster form are called in it, by this thread."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        plain = bool(args) and type(args[0]) is torch.Tensor  # others have a way of their own
        return (FUNCTIONS.get(function, function) if plain else function)(*args, **(kwargs or {}))
