"""Memory for the outputs of layers, used again as soon as nobody holds what was in it.

The system's allocator gives large tensors new pages each time, which have to be cleared, or cuts up what it has kept. A
tensor made of a NumPy array holds a reference to it: an array that only its list refers to is free.
"""

import sys
import threading
from math import prod

import numpy as np
import torch
from numpy.typing import NDArray

ALIGNED = 64  # bytes
KEPT = 16  # arrays of one size and thread
SIZES = 64  # for which arrays are kept
LARGE = 1 << 18  # bytes: what is smaller is left to the system
TYPES = {torch.float32: np.float32, torch.float64: np.float64}


class Arrays(threading.local):
    """Each thread has its own."""

    def __init__(self) -> None:
        self.of_size: dict[int, list[NDArray[np.uint8]]] = {}


arrays = Arrays()


def empty(shape: tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
    """A new tensor of like's type on its device, in memory that may have been used before."""
    size = prod(shape) * like.element_size()
    if like.device.type != "cpu" or like.dtype not in TYPES or size < LARGE:
        return like.new_empty(shape)
    whole = free(size)
    skip = -whole.ctypes.data % ALIGNED
    return torch.from_numpy(whole[skip : skip + size].view(TYPES[like.dtype]).reshape(shape))


def free(size: int) -> NDArray[np.uint8]:
    """An array that nothing refers to: a view of an array, and so a tensor made of one, refers to it."""
    if size not in arrays.of_size and len(arrays.of_size) >= SIZES:
        arrays.of_size.clear()  # another module, or batches of another size
    kept = arrays.of_size.setdefault(size, [])
    for i in range(len(kept)):
        if sys.getrefcount(kept[i]) == 2:  # the list's reference, and this question's
            return kept[i]
    whole = np.empty(size + ALIGNED, np.uint8)
    if len(kept) < KEPT:
        kept.append(whole)
    return whole


def stacked(tensors: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack(tensors, out=empty((len(tensors), *tensors[0].shape), tensors[0]))
