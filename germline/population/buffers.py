"""Memory for the outputs of layers, reused as soon as no tensor refers to it.

The system's allocator gives large tensors new pages each time, which have to be cleared, or fragments what it keeps. A
tensor that shares a NumPy array's memory holds a reference to the array: an array that only its list refers to is free.
"""

import sys
import threading
from math import prod
from weakref import WeakSet

import numpy as np
import torch
from numpy.typing import NDArray

ALIGNMENT = 64  # bytes
MAX_ARRAYS = 16  # of one size and thread
MAX_SIZES = 64  # for which arrays are cached
MIN_BYTES = 1 << 18  # what is smaller is left to the system
NUMPY_TYPES = {torch.float32: np.float32, torch.float64: np.float64}


class Cache:
    """The arrays of one thread by their size."""

    def __init__(self) -> None:
        self.by_size: dict[int, list[NDArray[np.uint8]]] = {}


class CurrentCache(threading.local):
    """The arrays of this thread."""

    def __init__(self) -> None:
        self.cache = Cache()
        caches.add(self.cache)


caches: WeakSet[Cache] = WeakSet()  # of all threads
current = CurrentCache()


def release_arrays() -> None:
    """Let go of the arrays of all threads; those that are in use are freed when they are no longer."""
    for cache in list(caches):
        cache.by_size.clear()


def allocate(shape: tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
    """Return an uninitialized tensor of like's type on its device, in memory that may have been used before."""
    size = prod(shape) * like.element_size()
    if like.device.type != "cpu" or like.dtype not in NUMPY_TYPES or size < MIN_BYTES:
        return like.new_empty(shape)
    array = find_free_array(size)
    skip = -array.ctypes.data % ALIGNMENT
    return torch.from_numpy(array[skip : skip + size].view(NUMPY_TYPES[like.dtype]).reshape(shape))


def find_free_array(size: int) -> NDArray[np.uint8]:
    """Return an array that nothing refers to: a view of an array, and so a tensor that shares it, refers to it."""
    by_size = current.cache.by_size
    if size not in by_size and len(by_size) >= MAX_SIZES:
        by_size.clear()  # another module, or batches of another size
    cached = by_size.setdefault(size, [])
    for i in range(len(cached)):
        if sys.getrefcount(cached[i]) == 2:  # the list's reference, and that of this call
            return cached[i]
    array = np.empty(size + ALIGNMENT, np.uint8)
    if len(cached) < MAX_ARRAYS:
        cached.append(array)
    return array


def stack(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Return the tensors stacked in memory of ``allocate``."""
    return torch.stack(tensors, out=allocate((len(tensors), *tensors[0].shape), tensors[0]))
