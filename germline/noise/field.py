"""The noise field of a run: its seed, its kind of noise, and which parameters have noise of low rank."""

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from germline.errors import BadInput
from germline.noise import addresses
from germline.noise.addresses import ADDRESS_LIMIT, VALUES, Integers, Kind, Matrix, Span, Stream, check_whole_number
from germline.noise.members import Noise
from germline.noise.scaling import round_to

VERSION = 1  # of the field; recorded in every journal's header
DIGEST_SPAN = (777, 777 + 5000)  # the slice that proves a device


@dataclass(frozen=True)
class Field:
    """The noise of a run.

    Args:
        seed: 64 bits.
        kind: how the integers of the noise are distributed: popcount (binomial), sign or uniform.
        mirrored: whether members 2j and 2j + 1 have the same noise with opposite signs.
        matrices: the parameters whose noise is of low rank (see ``low_rank_matrices``); all others have dense noise.

    Raises:
        BadInput: if the seed does not fit into 64 bits, or there is no such kind.

    >>> noise = Field(seed=7).members([0, 1], generation=0)
    >>> noise.integers((0, 6)).tolist()
    [[3, 1, 2, -2, 2, 1], [2, -4, 2, -2, 4, -1]]
    >>> noise.accumulate([1, -1], (0, 6)).tolist()
    [1, 5, 0, 0, -2, 2]
    >>> noise.perturb(torch.zeros(6), sigma=0.5)[1].tolist()
    [0.5, -1.0, 0.5, -0.5, 1.0, -0.25]
    """

    seed: int
    kind: Kind = "popcount"
    mirrored: bool = False
    matrices: tuple[Matrix, ...] = ()

    def __post_init__(self) -> None:
        check_whole_number("seed", self.seed, 1 << 64)
        if self.kind not in VALUES:
            raise BadInput(f"There is no noise of kind {self.kind!r}: choose one of {', '.join(VALUES)}.")

    def members(self, members: Integers, generation: int | torch.Tensor, device: torch.device | str = "cpu") -> Noise:
        """Return the noise of some members in one generation.

        Args:
            members: member numbers; a range is fastest, for a whole population generation after generation.
            generation: a number, or a tensor with one on the same GPU as the noise (see ``LiveScalars``).
            device: where the noise is used.

        Raises:
            BadInput: if a member or the generation does not fit into 32 bits.
        """
        if not isinstance(generation, torch.Tensor):
            generation = check_whole_number("generation", generation, ADDRESS_LIMIT)
        return Noise(self, addresses.locate_members(members, self.mirrored), generation, resolve_device(device))

    def below(self, bound: int, count: int, generation: int, stream: Stream, *, member: int = 0) -> NDArray[np.int64]:
        """Draw ``count`` integers from 0 to bound - 1 on the host, uniform to one part in 2^32 / bound.

        >>> Field(seed=7).below(10, 8, generation=0, stream=Stream.BATCH).tolist()
        [3, 1, 3, 7, 4, 0, 9, 3]
        """
        if not 1 <= bound <= ADDRESS_LIMIT:
            raise BadInput(f"Integers below {bound} cannot be drawn: the bound must be from 1 to 2^32.")
        words = self.members([member], generation).words(count, stream)
        return (words * np.uint64(bound) >> np.uint64(32)).astype(np.int64)

    def permutation(self, count: int, generation: int, stream: Stream, *, member: int = 0) -> NDArray[np.int64]:
        """Draw a permutation of the integers from 0 to count - 1 on the host.

        >>> Field(seed=7).permutation(8, generation=0, stream=Stream.BATCH).tolist()
        [0, 1, 2, 6, 5, 3, 7, 4]
        """
        words = self.members([member], generation).words(2 * count, stream)
        return np.argsort((words[0::2] << np.uint64(32)) | words[1::2], kind="stable")

    def unit(self, matrix: Matrix | None) -> float:
        """Return what one integer of the noise is, in standard deviations of the noise.

        Args:
            matrix: whose low-rank noise ``A B^T`` it is, or None for dense noise.
        """
        variance = VALUES[self.kind].variance
        return 1 / math.sqrt(variance) if matrix is None else 1 / (variance * math.sqrt(matrix.rank))

    def to_units(self, sums: torch.Tensor, span: Span, dtype: torch.dtype) -> torch.Tensor:
        """Return exact sums of integers (see ``Noise.exact_sum``) in standard deviations of the noise.

        Args:
            sums: one number per parameter of the span; each is rounded once, then multiplied once.
            span: of parameters.
            dtype: of the result.
        """
        out = sums.to(dtype)
        for low, high, matrix in self.pieces(*span):
            out[low - span[0] : high - span[0]] *= round_to(self.unit(matrix), dtype)
        return out

    def pieces(self, start: int, stop: int) -> Iterator[tuple[int, int, Matrix | None]]:
        """Yield (low, high, matrix) for each piece of start:stop; the matrix is None where the noise is dense."""
        at = start
        for matrix in self.matrices:
            if matrix.stop <= start or matrix.start >= stop:
                continue
            if at < matrix.start:
                yield at, matrix.start, None
            at = min(matrix.stop, stop)
            yield max(matrix.start, start), at, matrix
        if at < stop:
            yield at, stop, None


def field_digest(device: torch.device | str) -> str:
    """Return the hash of a slice of the field as a device generates it: the same on every device."""
    noise = Field(0xF123456789ABCDEF).members([5, ADDRESS_LIMIT - 1], ADDRESS_LIMIT - 1, device)
    return hashlib.sha256(noise.integers(DIGEST_SPAN).cpu().numpy().tobytes()).hexdigest()


def resolve_device(device: torch.device | str) -> torch.device:
    """Return a device as tensors name it: plain "cuda" is cuda:N, the current GPU."""
    device = torch.device(device)
    return torch.device("cuda", torch.cuda.current_device()) if device == torch.device("cuda") else device
