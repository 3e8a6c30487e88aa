"""Addresses in the noise field: streams, kinds of noise, members, and matrices whose noise is of low rank."""

import hashlib
import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property, lru_cache
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from germline.errors import BadInput
from germline.kernels import Reading

Kind = Literal["popcount", "sign", "uniform"]
Integers = Sequence[int] | NDArray[Any]
Span = tuple[int, int]  # of parameters: first, one past the last

ADDRESS_LIMIT = 1 << 32
PARAMETER_LIMIT = 8 * ADDRESS_LIMIT  # a 32-bit block number addresses 8 halves


class Stream(IntEnum):
    """A stream is a part of the field with one purpose, independent of the other streams."""

    DENSE = 0
    LOW_RANK = 1
    CROSSOVER = 2
    COEFFICIENT = 3
    SELECTION = 4
    BATCH = 5
    INITIAL = 6
    DROPOUT = 7


class Values(NamedTuple):
    """The integers of one kind of noise have this reading, limit and variance."""

    reading: Reading
    limit: int  # the largest magnitude
    variance: int


VALUES = {
    "popcount": Values(Reading.POPCOUNT, 8, 4),
    "sign": Values(Reading.SIGN, 1, 1),
    "uniform": Values(Reading.UNIFORM, 15, 85),
}


@dataclass(frozen=True)
class Matrix:
    """A matrix is a parameter whose noise is of low rank: ``A B^T / sqrt(rank)``."""

    start: int  # its first index in theta
    rows: int
    columns: int
    rank: int
    address: int  # of A in the low-rank stream; B follows

    @property
    def stop(self) -> int:
        return self.start + self.rows * self.columns

    def rows_between(self, low: int, high: int) -> tuple[Span, int]:
        """Return the rows that hold the indices low:high of theta, and the elements of the first row before ``low``."""
        first = (low - self.start) // self.columns
        last = -(-(high - self.start) // self.columns)
        return (first, last), low - self.start - first * self.columns


def low_rank_matrices(shapes: Sequence[Sequence[int]], rank: int | Sequence[int | None] | None) -> tuple[Matrix, ...]:
    """Return the parameters whose noise is of low rank.

    A tensor is viewed as first dimension x rest. Vectors, and matrices whose factors would not be smaller than the
    matrix, keep dense noise.

    Args:
        shapes: the shapes of all parameters, in the order of the genome.
        rank: one rank for all parameters, or one per parameter; None is dense noise.

    Raises:
        BadInput: if a rank is below 1, or there are not as many ranks as shapes.

    >>> [(m.rows, m.columns, m.address) for m in low_rank_matrices([(300, 784), (300,), (10, 300)], rank=1)]
    [(300, 784, 0), (10, 300, 1084)]
    """
    ranks = list(rank) if isinstance(rank, Sequence) else [rank] * len(shapes)
    if len(ranks) != len(shapes):
        raise BadInput(
            f"There are {len(shapes)} parameters but {len(ranks)} ranks: give one rank, or one per parameter."
        )
    matrices, start, address = [], 0, 0
    for shape, r in zip(shapes, ranks, strict=True):
        if r is not None and r < 1:
            raise BadInput(f"The rank of low-rank noise must be 1 or more (or None for dense noise), not {r}.")
        size = math.prod(shape)
        if r is not None and len(shape) > 1 and size and r * (shape[0] + size // shape[0]) < size:
            matrices.append(Matrix(start, shape[0], size // shape[0], r, address))
            address += r * (shape[0] + size // shape[0])
        start += size
    return tuple(matrices)


class MemberAddresses:
    """The addresses and signs of some members: where in the field their noise is.

    Args:
        members: member numbers.
        mirrored: whether members 2j and 2j + 1 share the address j, with opposite signs.
    """

    def __init__(self, members: Integers, mirrored: bool) -> None:
        self.members = check_members(members)
        self.addresses = self.members >> 1 if mirrored else self.members
        self.signs = (1 - 2 * (self.members & 1 if mirrored else 0 * self.members)).astype(np.int8)
        even, odd = self.members[::2], self.members[1::2]
        can_be_pairs = mirrored and even.size == odd.size
        # whether the members are mirrored pairs, each with its even member first
        self.has_pairs = bool(can_be_pairs and ((even & 1) == 0).all() and (even + 1 == odd).all())

    @cached_property
    def unique(self) -> tuple[NDArray[np.int64], NDArray[np.int64] | None]:
        """Return each address once, in ascending order, and for each member the index of its address.

        The index is None where members 2j and 2j + 1 of the list have address j of the result.
        """
        if self.has_pairs and (np.diff(self.addresses[::2]) > 0).all():
            return self.addresses[::2], None
        return np.unique(self.addresses, return_inverse=True)

    @cached_property
    def key(self) -> bytes:
        """Return a hash of the member numbers."""
        return hashlib.sha256(self.members.tobytes()).digest()


def locate_members(members: Integers, mirrored: bool) -> MemberAddresses:
    """Return the addresses of some members; those of a range, such as the whole population, are cached."""
    return locate_range(members, mirrored) if isinstance(members, range) else MemberAddresses(members, mirrored)


@lru_cache(maxsize=16)
def locate_range(members: range, mirrored: bool) -> MemberAddresses:
    return MemberAddresses(members, mirrored)


def check_members(members: Integers) -> NDArray[np.int64]:
    """Return member numbers as an array, or raise BadInput if one of them has no address."""
    numbers = np.asarray(members)
    if numbers.ndim != 1 or (numbers.size and numbers.dtype.kind not in "iu"):
        raise BadInput(f"Members must be a list of whole numbers, not {numbers.dtype} of shape {numbers.shape}.")
    if numbers.size and (numbers.min() < 0 or numbers.max() >= ADDRESS_LIMIT):
        raise BadInput(f"Member numbers must be from 0 to 2^32 - 1: got {numbers.min()} to {numbers.max()}.")
    return numbers.astype(np.int64)


def check_whole_number(name: str, value: Any, limit: int) -> int:
    """Return ``value`` as an int.

    Args:
        name: what the value is, for the error message.
        value: any object.
        limit: a power of two, which the value must stay below.

    Raises:
        BadInput: if the value is not a whole number from 0 to limit - 1.
    """
    if not hasattr(value, "__index__") or not 0 <= operator.index(value) < limit:
        raise BadInput(f"The {name} must be a whole number from 0 to 2^{limit.bit_length() - 1} - 1, not {value!r}.")
    return operator.index(value)
