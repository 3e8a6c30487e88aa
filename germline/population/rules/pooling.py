"""Max pooling on a CPU, where torch's own takes longer than the convolutions around it."""

from typing import Any

import torch
import torch.nn.functional as F


def max_pool2d(
    x: torch.Tensor,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Any:
    """Return the largest of a few strided views: one pass over contiguous memory for each place in the window.

    >>> x = torch.randn(2, 3, 9, 8)
    >>> torch.equal(max_pool2d(x, 3, 2, 1), F.max_pool2d(x, 3, 2, 1))
    True
    """
    if x.device.type != "cpu" or ceil_mode or return_indices or as_pair(dilation) != (1, 1):
        torch_max_pool2d: Any = F.max_pool2d
        return torch_max_pool2d(x, kernel_size, stride, padding, dilation, ceil_mode, return_indices)
    (height, width), (down, right) = as_pair(kernel_size), as_pair(kernel_size if stride is None else stride)
    if as_pair(padding) != (0, 0):
        top, left = as_pair(padding)
        x = F.pad(x, (left, left, top, top), value=float("-inf"))
    rows, columns = (x.shape[-2] - height) // down, (x.shape[-1] - width) // right
    largest = None
    for i in range(height):
        for j in range(width):
            view = x[..., i : i + rows * down + 1 : down, j : j + columns * right + 1 : right]
            largest = view if largest is None else torch.maximum(largest, view)
    return largest


def as_pair(value: Any) -> tuple[int, int]:
    """Return a number, or a sequence of one or two numbers, as two numbers."""
    return (value, value) if isinstance(value, int) else (value[0], value[-1])
