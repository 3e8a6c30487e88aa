"""The functions of the noise field, written three times: ``reference``, ``cpu`` and ``cuda``.

Each module has ``fill``, ``perturb`` and ``accumulate`` with the same arguments and the same bits. ``reference`` is the
definition (NumPy, slow), ``cpu`` is Numba, ``cuda`` is Triton. They work in place on arrays that ``germline.noise`` has
already checked; nothing here allocates a result or rejects an argument.
"""

import sys
from collections import OrderedDict
from enum import IntEnum
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any, NamedTuple

import torch
from numpy.typing import NDArray

from germline.stages import announce_stage

TILE = 1024  # parameters of a tile: 128 blocks by 8 lanes
BLOCKS = 128  # Philox blocks of a tile
ROUNDS = 7
CACHED_ARRAYS = 1024  # host arrays with a cached copy on a GPU: member numbers, signs and the like
cached_arrays: OrderedDict[Any, torch.Tensor] = OrderedDict()


class Reading(IntEnum):
    """A reading says how a 16-bit half becomes an integer.

    The first three are noise: symmetric about 0, and so small (at most 4 significant bits) that they are exact in int8,
    in bfloat16 and in 8-bit floats. ``HALF`` is the half itself, 0 to 65535.
    """

    POPCOUNT = 0  # popcount(half) - 8: binomial, -8 to 8, variance 4
    SIGN = 1  # 1 - 2 * (half & 1): -1 or 1
    UNIFORM = 2  # 2 * (half & 15) - 15: 16 levels, -15 to 15, variance 85
    HALF = 3


class Address(NamedTuple):
    """An address says where in the field a slice begins; its length is that of the array it is written to."""

    seed: int  # 64 bits: the Philox key, low word first
    stream: int
    generation: Any  # a number or, on a GPU, a tensor with one number, which a recorded kernel reads at each launch
    members: Any  # (m,) int64, on the device of the kernel
    start: int  # the first parameter

    @property
    def key(self) -> tuple[int, int]:
        return self.seed & 0xFFFFFFFF, self.seed >> 32


@cache
def kernel_device(device: torch.device) -> torch.device:
    """Return the device that generates the noise for ``device``: the device itself, or the CPU if it has no kernels.

    Args:
        device: where the noise is used.
    """
    has_kernels = device.type == "cuda" and torch.version.hip is None and find_spec("triton") is not None
    return device if has_kernels else torch.device("cpu")


def kernels_for(device: torch.device) -> ModuleType:
    """Return the module of kernels for a device that ``kernel_device`` returned; importing it may take seconds."""
    name = f"germline.kernels.{device.type}"
    if name not in sys.modules:
        announce_stage("compiling kernels")  # as they are used for the first time, here and in what follows
    return import_module(name)


def as_kernel_arg(tensor: torch.Tensor) -> Any:
    """Return a tensor as the kernels of its device take it: a NumPy array on the CPU, the tensor on a GPU."""
    return tensor.numpy() if tensor.device.type == "cpu" else tensor


def to_kernel_device(array: NDArray[Any], device: torch.device) -> Any:
    """Return a host array as the kernels of a device take it.

    Args:
        array: values that do not change afterwards. A GPU caches the arrays it used last, so that each is copied once.
        device: a device that ``kernel_device`` returned.
    """
    if device.type == "cpu":
        return array
    key = (device, array.dtype.str, array.shape, array.tobytes())
    if key not in cached_arrays:
        cached_arrays[key] = torch.from_numpy(array).to(device)
        if len(cached_arrays) > CACHED_ARRAYS:
            cached_arrays.popitem(last=False)
    cached_arrays.move_to_end(key)
    return cached_arrays[key]
