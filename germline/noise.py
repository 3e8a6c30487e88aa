"""The noise field: a function of (seed, stream, generation, member, parameter), with the same bits on every device.

Nothing is seeded and nothing advances. A slice of the field is made where it is needed, from its address alone; the
integers it is made of are so small that sums weighted by integers are exact in any order, on any device.
``docs/design.md`` defines the field; ``kernels/reference.py`` is that definition as code.
"""

import hashlib
import math
import operator
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property, lru_cache
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from germline.clock import clock
from germline.errors import BadInput
from germline.kernels import Address, Reading, as_kernel_arg, kernel_device, kernels_for, reference, to_kernel_device
from germline.kernels.recorded import Recorded

VERSION = 1  # of the field; stands in every journal's header

Kind = Literal["popcount", "sign", "uniform"]
Integers = Sequence[int] | NDArray[Any]
Span = tuple[int, int]  # of parameters: first, one past the last

ADDRESS_LIMIT = 1 << 32
PARAMETERS = 8 * ADDRESS_LIMIT  # a 32-bit block number addresses 8 halves
SIGNIFICANT = 20  # bits of sigma: sigma * eps is then exact in float32, and contraction harmless
SCRATCH = 1 << 22  # elements of low-rank factors that are held at once
DIGEST_SPAN = (777, 777 + 5000)  # the slice that proves a device
RECORDINGS = 8  # sums that cards have recorded
recordings: OrderedDict[Any, Recorded] = OrderedDict()


class Stream(IntEnum):
    """What a part of the field is for; each is independent of the others."""

    DENSE = 0
    LOW_RANK = 1
    CROSSOVER = 2
    COEFFICIENT = 3
    SELECTION = 4
    BATCH = 5
    INITIAL = 6
    DROPOUT = 7


class Values(NamedTuple):
    reading: Reading
    limit: int  # the largest magnitude
    variance: int


class LiveScalars:
    """The number of a generation and its sigma in the memory of a card, for what is recorded once and launched often.

    >>> live = LiveScalars(torch.device("cpu"))
    >>> half = live.times(0.5, torch.float32)
    >>> live.set(generation=3, sigma=0.25)
    >>> half.tolist(), live.generation.tolist()
    ([0.125], 3)
    """

    def __init__(self, device: torch.device) -> None:
        self.generation = torch.zeros((), dtype=torch.int64, device=device)
        self.sigma = 0.0
        self.products: dict[tuple[float, torch.dtype], torch.Tensor] = {}

    def set(self, generation: int, sigma: float) -> None:
        self.generation.fill_(generation)
        self.sigma = sigma
        for (factor, _), product in self.products.items():
            product.fill_(shortened(sigma * factor))

    def times(self, factor: float, dtype: torch.dtype) -> torch.Tensor:
        """sigma * factor, now and whenever it is set anew."""
        if (factor, dtype) not in self.products:
            value = torch.full((1,), shortened(self.sigma * factor), dtype=dtype, device=self.generation.device)
            self.products[factor, dtype] = value
        return self.products[factor, dtype]


Sigma = float | torch.Tensor | LiveScalars  # for all parameters, or one for each, or one for all that changes


class Folded(NamedTuple):
    """Weights by address instead of by member."""

    addresses: NDArray[np.int64]
    weights: NDArray[np.int64] | torch.Tensor
    magnitude: int  # at least the sum of the members' weights without their signs


Weights = Integers | Folded  # of members in a sum


VALUES = {
    "popcount": Values(Reading.POPCOUNT, 8, 4),
    "sign": Values(Reading.SIGN, 1, 1),
    "uniform": Values(Reading.UNIFORM, 15, 85),
}


@dataclass(frozen=True)
class Matrix:
    """A parameter whose noise is of low rank: ``A B^T / sqrt(rank)``."""

    start: int  # its first place in theta
    rows: int
    columns: int
    rank: int
    address: int  # of A in the low-rank stream; B follows

    @property
    def stop(self) -> int:
        return self.start + self.rows * self.columns


def low_rank_matrices(shapes: Sequence[Sequence[int]], rank: int | Sequence[int | None] | None) -> tuple[Matrix, ...]:
    """The parameters that get noise of low rank, given all shapes in the order of the genome.

    A tensor is viewed as first dimension x rest; vectors, and matrices whose factors would not be smaller than
    themselves, stay dense. ``rank`` may be given per shape; None is dense.

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


@dataclass(frozen=True)
class Field:
    """The noise of a run.

    ``mirrored``: members 2j and 2j + 1 have the same noise with opposite signs. ``matrices``: the parameters whose
    noise is of low rank (see ``low_rank_matrices``); all others have dense noise.

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

    def members(self, members: Integers, generation: int | torch.Tensor, device: torch.device | str = "cpu") -> "Noise":
        """The noise of some members in one generation, to be used on ``device``.

        The generation may be a number in the memory of a card (see ``LiveScalars``), for noise that is used on that card.
        """
        number = (
            generation
            if isinstance(generation, torch.Tensor)
            else check_whole_number("generation", generation, ADDRESS_LIMIT)
        )
        if isinstance(members, range):  # a whole population, generation after generation
            return Noise(self, places_of_all(members, self.mirrored), number, indexed(device))
        return Noise(self, Places(members, self.mirrored), number, indexed(device))

    def below(self, bound: int, count: int, generation: int, stream: Stream, *, member: int = 0) -> NDArray[np.int64]:
        """``count`` integers from 0 to bound - 1, on the host; even to one part in 2^32 / bound.

        >>> Field(seed=7).below(10, 8, generation=0, stream=Stream.BATCH).tolist()
        [3, 1, 3, 7, 4, 0, 9, 3]
        """
        if not 1 <= bound <= ADDRESS_LIMIT:
            raise BadInput(f"Integers below {bound} cannot be drawn: the bound must be from 1 to 2^32.")
        words = self.members([member], generation).words(count, stream)
        return (words * np.uint64(bound) >> np.uint64(32)).astype(np.int64)

    def permutation(self, count: int, generation: int, stream: Stream, *, member: int = 0) -> NDArray[np.int64]:
        """The integers from 0 to count - 1 in an order of the field's, on the host.

        >>> Field(seed=7).permutation(8, generation=0, stream=Stream.BATCH).tolist()
        [0, 1, 2, 6, 5, 3, 7, 4]
        """
        words = self.members([member], generation).words(2 * count, stream)
        return np.argsort((words[0::2] << np.uint64(32)) | words[1::2], kind="stable")

    def unit(self, matrix: Matrix | None) -> float:
        """One integer of the field, in standard deviations of the noise."""
        variance = VALUES[self.kind].variance
        return 1 / math.sqrt(variance) if matrix is None else 1 / (variance * math.sqrt(matrix.rank))

    def to_units(self, sums: torch.Tensor, span: Span, dtype: torch.dtype) -> torch.Tensor:
        """Exact sums of integers of the field, in standard deviations of the noise: rounded once, multiplied once."""
        out = sums.to(dtype)
        for low, high, matrix in self.pieces(*span):
            out[low - span[0] : high - span[0]] *= round_to(self.unit(matrix), dtype)
        return out

    def pieces(self, start: int, stop: int) -> Iterator[tuple[int, int, Matrix | None]]:
        """start:stop cut at the matrices: (low, high, the matrix they lie in, or None where the noise is dense)."""
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


class Places:
    """Where in the field some members have their noise."""

    def __init__(self, members: Integers, mirrored: bool) -> None:
        self.members = numbers_of(members)
        self.addresses = self.members >> 1 if mirrored else self.members
        self.signs = (1 - 2 * (self.members & 1 if mirrored else 0 * self.members)).astype(np.int8)
        even, odd = self.members[::2], self.members[1::2]
        whole = mirrored and even.size == odd.size
        # whether the members are mirrored pairs, each with its even member first
        self.paired = bool(whole and ((even & 1) == 0).all() and (even + 1 == odd).all())

    @cached_property
    def distinct(self) -> tuple[NDArray[np.int64], NDArray[np.int64] | None]:
        """Each address once, in ascending order, and where each member's is among them; None if two by two."""
        if self.paired and (np.diff(self.addresses[::2]) > 0).all():
            return self.addresses[::2], None
        return np.unique(self.addresses, return_inverse=True)

    @cached_property
    def key(self) -> bytes:
        return hashlib.sha256(self.members.tobytes()).digest()


@lru_cache(maxsize=16)
def places_of_all(members: range, mirrored: bool) -> Places:
    return Places(members, mirrored)


@dataclass(frozen=True, eq=False)
class Noise:
    """The noise of some members in one generation; made by ``Field.members``."""

    field: Field
    places: Places
    generation: int | torch.Tensor
    device: torch.device

    @property
    def addresses(self) -> NDArray[np.int64]:
        return self.places.addresses

    @property
    def signs(self) -> NDArray[np.int8]:
        return self.places.signs

    # Slices

    @clock("noise")
    def integers(self, span: Span, stream: Stream = Stream.DENSE, dtype: torch.dtype = torch.int8) -> torch.Tensor:
        """eps, the integers behind the noise: (members, parameters)."""
        self._refuse_matrices(span, stream)
        eps = self._fill(VALUES[self.field.kind].reading, dtype, self.addresses, span, stream)
        return eps.mul_(cached_tensor(self.signs, self.device)[:, None]) if self.field.mirrored else eps

    def halves(self, span: Span, stream: Stream) -> torch.Tensor:
        """Uniform integers from 0 to 65535, one per member (mirrored or not) and parameter: int32."""
        return self._fill(Reading.HALF, torch.int32, self.places.members, span, stream)

    def bits(self, span: Span, stream: Stream) -> torch.Tensor:
        """Fair coins, one per member (mirrored or not) and parameter: bool."""
        return (self.halves(span, stream) & 1).bool()

    def words(self, count: int, stream: Stream) -> NDArray[np.uint64]:
        """The first 32-bit words of the first member, on the host."""
        address = self._address(self.places.members[:1], (0, 2 * count), stream, torch.device("cpu"))
        return reference.words(address, count)

    @clock("noise")
    def factors(self, matrix: Matrix, rows: Span | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """A, which bears the member's sign, and B: int8, (members, rows, rank) and (members, columns, rank)."""
        low, high = rows or (0, matrix.rows)
        middle = matrix.address + matrix.rows * matrix.rank
        a = self.integers((matrix.address + low * matrix.rank, matrix.address + high * matrix.rank), Stream.LOW_RANK)
        span = (middle, middle + matrix.columns * matrix.rank)
        b = self._fill(VALUES[self.field.kind].reading, torch.int8, self.addresses, span, Stream.LOW_RANK)
        shape_a, shape_b = (high - low, matrix.rank), (matrix.columns, matrix.rank)
        return a.view(self.addresses.size, *shape_a), b.view(self.addresses.size, *shape_b)

    # Perturbing

    @clock("noise")
    def perturb(
        self, theta: torch.Tensor, sigma: Sigma, *, start: int = 0, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """theta + sigma z for each member: (members, parameters).

        ``theta`` holds the parameters from ``start`` on, in float32 or float64. ``sigma`` is a number, which is rounded
        to 20 significant bits, or a tensor with one per parameter, of which 20 significant bits are used. ``out`` may
        be of a narrower type, to which the sums are rounded.
        """
        if theta.dim() != 1 or theta.dtype not in (torch.float32, torch.float64):
            what = f"{theta.dtype} of shape {tuple(theta.shape)}"
            raise BadInput(f"Parameters must be a float32 or float64 vector, not {what}.")
        if isinstance(sigma, torch.Tensor) and sigma.shape != theta.shape:
            raise BadInput(
                f"Sigma must be a number or one per parameter: {tuple(theta.shape)}, not {tuple(sigma.shape)}."
            )
        if theta.device != self.device:
            raise BadInput(f"The parameters are on {theta.device}, but this noise is for {self.device}.")
        theta = theta.detach()
        shape = (self.addresses.size, theta.numel())
        if out is None:
            out = theta.new_empty(shape)
        elif out.shape != shape or not out.is_floating_point() or out.device != theta.device:
            raise BadInput(f"The buffer for perturbed parameters must be {theta.dtype}, {shape}, on {theta.device}.")
        for low, high, matrix in self.field.pieces(start, start + theta.numel()):
            window = slice(low - start, high - start)
            if matrix is None:
                part = sigma[window] if isinstance(sigma, torch.Tensor) else sigma
                self._perturb_dense(out[:, window], theta[window], part, low)
            elif isinstance(sigma, torch.Tensor):
                raise BadInput("Noise of low rank takes one sigma for all parameters, not one per parameter.")
            else:
                self._perturb_low_rank(out[:, window], theta[window], sigma, low, matrix)
        return out

    def _perturb_dense(self, out: torch.Tensor, theta: torch.Tensor, sigma: Sigma, start: int) -> None:
        place = kernel_device(self.device)
        scale = scale_sigma(sigma, self.field.unit(None), theta)
        direct = place == out.device and out.is_contiguous() and (place.type != "cpu" or out.dtype == theta.dtype)
        whole = out if direct else torch.empty(out.shape, dtype=theta.dtype, device=place)
        pairs = place.type == "cuda" and self.places.paired  # a card makes the noise of two members once
        signs = None if pairs else to_kernel_device(self.signs, place)
        address = self._address(
            self.addresses[::2] if pairs else self.addresses, (start, start + theta.numel()), Stream.DENSE, place
        )
        arrays = (
            as_kernel_arg(whole),
            as_kernel_arg(theta.contiguous().to(place)),
            as_kernel_arg(scale.to(place)),
            signs,
        )
        kernels_for(place).perturb(*arrays, address, VALUES[self.field.kind].reading)
        if whole is not out:
            out.copy_(whole)

    def _perturb_low_rank(
        self, out: torch.Tensor, theta: torch.Tensor, sigma: float | LiveScalars, start: int, matrix: Matrix
    ) -> None:
        rows, skip = rows_of(matrix, start, start + theta.numel())
        scale = scale_sigma(sigma, self.field.unit(matrix), theta)
        a, b = self.factors(matrix, rows)  # (m, R, r), (m, C, r)
        if kernel_device(self.device) == self.device:
            direct = out.stride(1) == 1 and (self.device.type != "cpu" or out.dtype == theta.dtype)
            whole = out if direct else theta.new_empty(out.shape)
            across = b.transpose(1, 2).contiguous()  # (m, r, C)
            arrays = (as_kernel_arg(x) for x in (whole, theta.contiguous(), scale, a, across))
            kernels_for(self.device).perturb_outer(*arrays, skip)
            if whole is not out:
                out.copy_(whole)
            return
        a, b = a.to(theta.dtype), b.to(theta.dtype)
        # small integers: exact in any order, but for the sign of zeros, which adding 0 settles
        product = (a @ b.transpose(1, 2)).flatten(1)[:, skip : skip + theta.numel()] + 0.0
        out.copy_(theta + product * scale)

    # Accumulating

    def accumulate(self, weights: Weights, span: Span, power: Literal[1, 2] = 1) -> torch.Tensor:
        """The exact sum over members of ``w_i eps_ik`` or, for power 2, of ``w_i (eps_ik^2 - variance)``; dense noise.

        The result is int32 where no sum can leave it, else int64, by the bound that the weights themselves give.
        """
        if power not in (1, 2):
            raise BadInput(f"Noise is summed at power 1 or 2, not {power}.")
        self._refuse_matrices(span, Stream.DENSE)
        values = VALUES[self.field.kind]
        limit = values.limit if power == 1 else max(values.limit**2 - values.variance, values.variance)
        addresses, folded, magnitude = without_zeros(self._fold(weights, power))
        bound = bounded(magnitude * limit, 2**63)
        place = kernel_device(self.device)

        def in_32_bits(some: slice, weights: NDArray[np.int64] | torch.Tensor) -> torch.Tensor:
            address = self._address(addresses[some], span, Stream.DENSE, place)
            sums = torch.empty(span[1] - span[0], dtype=torch.int32, device=place)
            weight = as_kernel_arg(as_tensor(weights[some], place).int())
            kernels_for(place).accumulate(
                as_kernel_arg(sums), weight, address, values.reading, values.variance if power == 2 else 0
            )
            return sums

        def in_64_bits(weights: NDArray[np.int64]) -> torch.Tensor:
            if (
                int(abs(weights).max(initial=0)) * limit >= 2**31
            ):  # a single member may leave 32 bits: cut the weights in two
                return (in_64_bits(weights >> 20) << 20) + in_64_bits(weights & ((1 << 20) - 1))
            return torch.stack([in_32_bits(some, weights).long() for some in chunks(weights, limit)]).sum(0)

        if bound < 2**31:
            return in_32_bits(slice(None), folded).to(self.device)
        assert isinstance(folded, np.ndarray)
        return in_64_bits(folded).to(self.device)

    def accumulate_low_rank(self, weights: Weights, matrix: Matrix, rows: Span | None = None) -> torch.Tensor:
        """The exact sum over members of ``w_i A_i B_i^T``, integers in float64, where the noise is made."""
        limit = VALUES[self.field.kind].limit ** 2 * matrix.rank
        addresses, folded, magnitude = without_zeros(self._fold(weights, 1))
        bounded(magnitude * limit, 2**53)
        low, high = rows or (0, matrix.rows)
        place = kernel_device(self.device)
        out = torch.zeros(high - low, matrix.columns, dtype=torch.float64, device=place)
        plain = Field(self.field.seed, self.field.kind)  # signs are folded into the weights
        step = max(1, SCRATCH // (matrix.rank * (high - low + matrix.columns)))
        for i in range(0, addresses.size, step):
            a, b = plain.members(addresses[i : i + step], self.generation, place).factors(matrix, (low, high))
            weight = as_tensor(folded[i : i + step], place).double()[:, None, None]
            a, b = a.to(torch.float64) * weight, b.to(torch.float64)  # (m, R, r), (m, C, r)
            out.addmm_(a.transpose(0, 1).flatten(1), b.transpose(1, 2).flatten(0, 1))
        return out

    def weighted_sum(
        self, weights: Weights, span: Span, dtype: torch.dtype = torch.float32, *, often: bool = True
    ) -> torch.Tensor:
        """The sum over members of ``w_i z_ik`` for any span of parameters, dense or low-rank.

        Exact until one rounding to ``dtype``, then one multiplication: the same bits however the span is cut. A card
        records what is asked for ``often``.
        """
        folded = self._fold(weights, 1)
        if often and kernel_device(self.device).type == "cuda":
            return self._recorded_sum(folded, span, dtype)
        return self._sum_of_pieces(folded, span, dtype)

    def exact_sum(self, weights: Weights, span: Span) -> torch.Tensor:
        """The integers behind ``weighted_sum``, for sums that are added up before they are rounded: see ``to_units``.

        They are int32 where no sum can leave it, else float64.
        """
        folded = self._fold(weights, 1)
        pieces = [(low - span[0], high - span[0], total) for low, high, _, total in self._totals(folded, span)]
        narrow = all(total.dtype == torch.int32 for _, _, total in pieces)
        out = torch.empty(span[1] - span[0], dtype=torch.int32 if narrow else torch.float64, device=self.device)
        for low, high, total in pieces:
            out[low:high] = total
        return out

    def _totals(self, folded: Folded, span: Span) -> Iterator[tuple[int, int, Matrix | None, torch.Tensor]]:
        for low, high, matrix in self.field.pieces(*span):
            if matrix is None:
                yield low, high, None, self.accumulate(folded, (low, high))
            else:
                rows, skip = rows_of(matrix, low, high)
                yield low, high, matrix, self.accumulate_low_rank(folded, matrix, rows).view(-1)[skip:][: high - low]

    def _sum_of_pieces(self, folded: Folded, span: Span, dtype: torch.dtype) -> torch.Tensor:
        out = torch.empty(span[1] - span[0], dtype=dtype, device=self.device)
        for low, high, matrix, total in self._totals(folded, span):
            part = total.to(dtype) * round_to(self.field.unit(matrix), dtype)
            out[low - span[0] : high - span[0]] = part.to(self.device)
        return out

    def _recorded_sum(self, folded: Folded, span: Span, dtype: torch.dtype) -> torch.Tensor:
        """The same with weights and generation in the card's memory, so that a card is given all its kernels at once.

        What a sum can reach is rounded up to a power of two, so that it rarely changes from one generation to the next.
        """
        bound = 1 << folded.magnitude.bit_length()
        if bound * VALUES[self.field.kind].limit >= 2**31:
            return self._sum_of_pieces(folded, span, dtype)
        key = (self.places.key, span, dtype, self.device, bound, self.field)
        if key not in recordings:
            field, device = self.field, self.device

            def sums(given: torch.Tensor) -> torch.Tensor:
                noise = field.members([], given[-1], device)
                return noise._sum_of_pieces(Folded(folded.addresses, given[:-1], bound), span, dtype)

            recordings[key] = Recorded(sums)
            if len(recordings) > RECORDINGS:
                recordings.popitem(last=False)
        recordings.move_to_end(key)
        given = np.append(folded.weights, int(self.generation))
        return recordings[key](torch.from_numpy(given).to(self.device)).clone()

    # Addresses

    def _fold(self, weights: Weights, power: int) -> Folded:
        """Each address once, with the weights of its members summed, signed for power 1."""
        if isinstance(weights, Folded):
            return weights
        given = np.asarray(weights)
        if given.shape != self.addresses.shape or (given.size and given.dtype.kind not in "iu"):
            raise BadInput(f"Weights must be whole numbers, one per member: got {given.dtype} of shape {given.shape}.")
        largest = max(abs(int(given.max(initial=0))), abs(int(given.min(initial=0))))
        safe = largest * given.size < 2**53
        magnitude = int(abs(given.astype(np.int64)).sum()) if safe else sum(map(abs, given.tolist()))
        bounded(magnitude, 2**63)
        signed = given.astype(np.int64) * (self.signs if power == 1 else 1)
        addresses, where = self.places.distinct
        if where is None:
            return Folded(addresses, signed[::2] + signed[1::2], magnitude)
        folded = np.zeros(addresses.size, np.int64)
        np.add.at(folded, where, signed)
        return Folded(addresses, folded, magnitude)

    def _refuse_matrices(self, span: Span, stream: Stream) -> None:
        if stream == Stream.DENSE and any(matrix is not None for _, _, matrix in self.field.pieces(*span)):
            raise BadInput(
                f"The noise of the parameters {span[0]}:{span[1]} is of low rank: it has factors, not integers."
            )

    def _fill(
        self, reading: Reading, dtype: torch.dtype, addresses: NDArray[np.int64], span: Span, stream: Stream
    ) -> torch.Tensor:
        place = kernel_device(self.device)
        address = self._address(addresses, span, stream, place)
        out = torch.empty((addresses.size, span[1] - span[0]), dtype=dtype, device=place)
        kernels_for(place).fill(as_kernel_arg(out), address, reading)
        return out.to(self.device)

    def _address(self, addresses: NDArray[np.int64], span: Span, stream: Stream, place: torch.device) -> Address:
        start, stop = span
        if not 0 <= start <= stop <= PARAMETERS:
            raise BadInput(f"The span {start}:{stop} is not within the field's 2^35 parameters.")
        return Address(self.field.seed, int(stream), self.generation, to_kernel_device(addresses, place), start)


def field_digest(device: torch.device | str) -> str:
    """A hash of a slice of the field as a device makes it: the same on every device."""
    far = Field(0xF123456789ABCDEF).members([5, ADDRESS_LIMIT - 1], ADDRESS_LIMIT - 1, device)
    return hashlib.sha256(far.integers(DIGEST_SPAN).cpu().numpy().tobytes()).hexdigest()


def without_zeros(folded: Folded) -> Folded:
    """Without the addresses that add nothing, if their weights are where they can be seen."""
    if isinstance(folded.weights, torch.Tensor):
        return folded
    some = folded.weights != 0
    return Folded(folded.addresses[some], folded.weights[some], folded.magnitude)


def bounded(bound: int, end: int) -> int:
    """What no sum exceeds, which must stay below ``end``."""
    if bound >= end:
        exact = f"2^{end.bit_length() - 1}"
        raise BadInput(f"The weights are too large: sums could reach {bound} and are exact only below {exact}.")
    return bound


def scale_sigma(sigma: Sigma, factor: float, like: torch.Tensor) -> torch.Tensor:
    """sigma * factor with 20 significant bits, in like's dtype and on its device: a number is rounded, a vector cut."""
    if isinstance(sigma, LiveScalars):
        return sigma.times(factor, like.dtype)
    if not isinstance(sigma, torch.Tensor):
        if not abs(sigma) < 1e38:
            raise BadInput(f"Sigma must be a finite number, not {sigma}.")
        return torch.full((1,), shortened(sigma * factor), dtype=like.dtype, device=like.device)
    scaled = sigma.to(like.dtype) * round_to(factor, like.dtype)
    bits, drop = (torch.int32, 24 - SIGNIFICANT) if like.dtype == torch.float32 else (torch.int64, 53 - SIGNIFICANT)
    return (scaled.view(bits) & -(1 << drop)).view(like.dtype)


def shortened(value: float) -> float:
    """A number rounded to 20 significant bits."""
    mantissa, exponent = math.frexp(value)
    return math.ldexp(round(math.ldexp(mantissa, SIGNIFICANT)), exponent - SIGNIFICANT)


def cached_tensor(array: NDArray[Any], device: torch.device) -> torch.Tensor:
    """A host array that does not change, as a tensor."""
    found = to_kernel_device(array, device)
    return torch.from_numpy(found) if isinstance(found, np.ndarray) else found


def as_tensor(array: NDArray[Any] | torch.Tensor, device: torch.device) -> torch.Tensor:
    return (torch.from_numpy(array) if isinstance(array, np.ndarray) else array).to(device)


def round_to(value: float, dtype: torch.dtype) -> float:
    """A scalar as an array of this dtype would hold it: rounded once, whatever device multiplies by it."""
    return float(np.float32(value)) if dtype == torch.float32 else value


def rows_of(matrix: Matrix, low: int, high: int) -> tuple[Span, int]:
    """The rows of a matrix that hold the places low:high of theta, and how many elements of the first row to skip."""
    first = (low - matrix.start) // matrix.columns
    last = -(-(high - matrix.start) // matrix.columns)
    return (first, last), low - matrix.start - first * matrix.columns


def chunks(weights: NDArray[np.int64], limit: int) -> Iterator[slice]:
    """Runs of members, each with a sum that stays in 32 bits."""
    begin, total = 0, 0
    for i, weight in enumerate(weights.tolist()):
        total += abs(weight) * limit
        if total >= 2**31:
            yield slice(begin, i)
            begin, total = i, abs(weight) * limit
    yield slice(begin, len(weights))


def numbers_of(members: Integers) -> NDArray[np.int64]:
    numbers = np.asarray(members)
    if numbers.ndim != 1 or (numbers.size and numbers.dtype.kind not in "iu"):
        raise BadInput(f"Members must be a list of whole numbers, not {numbers.dtype} of shape {numbers.shape}.")
    if numbers.size and (numbers.min() < 0 or numbers.max() >= ADDRESS_LIMIT):
        raise BadInput(f"Member numbers must be from 0 to 2^32 - 1: got {numbers.min()} to {numbers.max()}.")
    return numbers.astype(np.int64)


def check_whole_number(name: str, value: Any, bound: int) -> int:
    if not hasattr(value, "__index__") or not 0 <= operator.index(value) < bound:
        raise BadInput(f"The {name} must be a whole number from 0 to 2^{bound.bit_length() - 1} - 1, not {value!r}.")
    return operator.index(value)


def indexed(device: torch.device | str) -> torch.device:
    """cuda is the current card: cuda:N, as tensors call it."""
    device = torch.device(device)
    return torch.device("cuda", torch.cuda.current_device()) if device == torch.device("cuda") else device
