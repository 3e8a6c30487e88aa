"""The noise field's few functions, written three times: ``reference``, ``cpu``, ``cuda``.

Each module has ``fill``, ``perturb`` and ``accumulate`` with the same arguments and the same bits. ``reference`` is the
definition (NumPy, slow), ``cpu`` is Numba, ``cuda`` is Triton. They work in place on arrays that ``germline.noise`` has
already checked; nothing here allocates a result or refuses an argument.
"""

from collections import OrderedDict
from enum import IntEnum
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any, NamedTuple

import torch
from numpy.typing import NDArray

TILE = 1024  # parameters of a tile: 128 blocks by 8 lanes
BLOCKS = 128  # Philox blocks of a tile
ROUNDS = 7
KEPT = 1024  # arrays that cards keep: numbers of members, their signs and the like
kept: OrderedDict[Any, torch.Tensor] = OrderedDict()


class Reading(IntEnum):
    """How a 16-bit half becomes an integer.

    The first three are noise: symmetric about 0, and so small (at most 4 significant bits) that they are exact in int8,
    in bfloat16 and in 8-bit floats. ``HALF`` is the half itself, 0 to 65535.
    """

    POPCOUNT = 0  # popcount(half) - 8: binomial, -8 to 8, variance 4
    SIGN = 1  # 1 - 2 * (half & 1): -1 or 1
    UNIFORM = 2  # 2 * (half & 15) - 15: 16 levels, -15 to 15, variance 85
    HALF = 3


class Address(NamedTuple):
    """Where in the field a slice begins; the array it is written to says how long it is."""

    seed: int  # 64 bits: the Philox key, low word first
    stream: int
    generation: Any  # a number or, for a card, a tensor of one there, which a recorded kernel reads anew each time
    members: Any  # (m,) int64, on the kernel's own device
    start: int  # the first parameter

    @property
    def key(self) -> tuple[int, int]:
        return self.seed & 0xFFFFFFFF, self.seed >> 32


@cache
def kernel_device(device: torch.device) -> torch.device:
    """Where the noise for a device is made: there, or on the CPU where there are no kernels for it."""
    has_kernels = device.type == "cuda" and torch.version.hip is None and find_spec("triton") is not None
    return device if has_kernels else torch.device("cpu")


def kernels_for(place: torch.device) -> ModuleType:
    return import_module(f"germline.kernels.{place.type}")


def as_kernel_arg(tensor: torch.Tensor) -> Any:
    """A tensor as its kernels take it."""
    return tensor.numpy() if tensor.device.type == "cpu" else tensor


def to_kernel_device(array: NDArray[Any], place: torch.device) -> Any:
    """A host array as the kernels of a place take it; a card keeps what it was given of late, to be given it once."""
    if place.type == "cpu":
        return array
    key = (place, array.dtype.str, array.shape, array.tobytes())
    if key not in kept:
        kept[key] = torch.from_numpy(array).to(place)
        if len(kept) > KEPT:
            kept.popitem(last=False)
    kept.move_to_end(key)
    return kept[key]
