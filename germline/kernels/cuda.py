"""The noise field on CUDA, in Triton; without a card, in Triton's interpreter (TRITON_INTERPRET=1).

A program owns one tile: 128 Philox blocks, whose 4 words of 2 halves are its 1,024 parameters, lane by lane.
Floating-point contraction is switched off where floats occur.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.random import philox_impl

from germline.kernels import BLOCKS, ROUNDS, TILE, Address, Reading

POPCOUNT = tl.constexpr(int(Reading.POPCOUNT))
SIGN = tl.constexpr(int(Reading.SIGN))
UNIFORM = tl.constexpr(int(Reading.UNIFORM))
BLOCKS_ = tl.constexpr(BLOCKS)
ROUNDS_ = tl.constexpr(ROUNDS)
TILE_ = tl.constexpr(TILE)

WARPS = 2  # two blocks a thread: of 1, 2 and 4 warps the fastest for sums on an H200, within a tenth for the rest
RESIDENT_TILES = 2048  # enough programs to fill a large card; fewer tiles than this are also split over members

# One compiled kernel for all addresses: their types are fixed and their values not specialised on.
kernel = triton.jit(do_not_specialize=["count", "key0", "key1", "generation", "stream", "start", "stop"])


@triton.jit
def _words(tile, member, key0, key1, generation, stream):
    block = (tile * BLOCKS_ + tl.arange(0, BLOCKS_)).to(tl.uint32)
    zero = tl.zeros_like(block)
    return philox_impl(
        block,
        (zero + member).to(tl.uint32),
        (zero + generation).to(tl.uint32),
        (zero + stream).to(tl.uint32),
        (zero + key0).to(tl.uint32),
        (zero + key1).to(tl.uint32),
        ROUNDS_,
    )


INTERPRETED = tl.constexpr(not isinstance(_words, triton.JITFunction))


@triton.jit
def _popcount(half):
    if INTERPRETED:
        half = half - ((half >> 1) & 0x5555)
        half = (half & 0x3333) + ((half >> 2) & 0x3333)
        half = (half + (half >> 4)) & 0x0F0F
        return ((half + (half >> 8)) & 0x1F).to(tl.int32)
    return tl.inline_asm_elementwise("popc.b32 $0, $1;", "=r,r", [half], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def _value(word, HIGH: tl.constexpr, READING: tl.constexpr):
    half = word >> 16 if HIGH else word & 0xFFFF
    if READING == POPCOUNT:
        return _popcount(half) - 8
    if READING == SIGN:
        return 1 - 2 * (half & 1).to(tl.int32)
    if READING == UNIFORM:
        return 2 * (half & 15).to(tl.int32) - 15
    return half.to(tl.int32)


@triton.jit
def _lane(c0, c1, c2, c3, LANE: tl.constexpr, READING: tl.constexpr):
    word = c0 if LANE < 2 else c1 if LANE < 4 else c2 if LANE < 6 else c3
    return _value(word, LANE % 2, READING)


@triton.jit
def _tile_and_row(start, stop):
    """Of a program in a grid of one dimension, which alone may have more than 65,535 programs."""
    tiles = (stop - 1) // TILE_ - start // TILE_ + 1
    program = tl.program_id(0).to(tl.int64)
    return start // TILE_ + program % tiles, program // tiles


@triton.jit
def _places(tile, start, stop):
    """Where a tile begins in the slice, and which of its places are in the slice: from first to before last."""
    base = tile * TILE_ - start
    return base, tl.maximum(-base, 0).to(tl.int32), tl.minimum(stop - start - base, TILE_).to(tl.int32)


@kernel
def _fill(
    out, members,
    key0: tl.int64, key1: tl.int64, generation: tl.int64, stream: tl.int64, start: tl.int64, stop: tl.int64,
    READING: tl.constexpr,
):  # fmt: skip
    tile, row = _tile_and_row(start, stop)
    c0, c1, c2, c3 = _words(tile, tl.load(members + row), key0, key1, generation, stream)
    base, first, last = _places(tile, start, stop)
    out += row * (stop - start) + base
    for lane in tl.static_range(8):
        k = lane * BLOCKS_ + tl.arange(0, BLOCKS_)
        tl.store(out + k, _lane(c0, c1, c2, c3, lane, READING), mask=(k >= first) & (k < last))


@kernel
def _perturb(
    out, theta, scale, signs, members,
    key0: tl.int64, key1: tl.int64, generation: tl.int64, stream: tl.int64, start: tl.int64, stop: tl.int64,
    VECTOR: tl.constexpr, READING: tl.constexpr,
):  # fmt: skip
    tile, row = _tile_and_row(start, stop)
    c0, c1, c2, c3 = _words(tile, tl.load(members + row), key0, key1, generation, stream)
    base, first, last = _places(tile, start, stop)
    sign = tl.load(signs + row).to(theta.dtype.element_ty)
    out += row * (stop - start) + base
    theta += base
    for lane in tl.static_range(8):
        k = lane * BLOCKS_ + tl.arange(0, BLOCKS_)
        mask = (k >= first) & (k < last)
        step = sign * (tl.load(scale + base + k, mask=mask) if VECTOR else tl.load(scale))
        eps = _lane(c0, c1, c2, c3, lane, READING).to(theta.dtype.element_ty)
        tl.store(out + k, tl.load(theta + k, mask=mask) + step * eps, mask=mask)


@triton.jit
def _term(word, HIGH: tl.constexpr, READING: tl.constexpr, CENTRE: tl.constexpr):
    eps = _value(word, HIGH, READING)
    return eps * eps - CENTRE if CENTRE > 0 else eps


@triton.jit
def _add(out, LANE: tl.constexpr, total, first, last):
    k = LANE * BLOCKS_ + tl.arange(0, BLOCKS_)
    # integers: the order in which programs add their shares does not matter
    tl.atomic_add(out + k, total, mask=(k >= first) & (k < last), sem="relaxed")


@kernel
def _accumulate(
    out, weights, members, count,
    key0: tl.int64, key1: tl.int64, generation: tl.int64, stream: tl.int64, start: tl.int64, stop: tl.int64,
    CENTRE: tl.constexpr, READING: tl.constexpr,
):  # fmt: skip
    tile = start // TILE_ + tl.program_id(0).to(tl.int64)
    share = tl.cdiv(count, tl.num_programs(1))
    begin = tl.program_id(1) * share
    t0 = tl.zeros((BLOCKS_,), tl.int32)  # one sum a lane, in variables: as one tensor they cost a third of the speed
    t1, t2, t3, t4, t5, t6, t7 = t0, t0, t0, t0, t0, t0, t0
    for i in range(begin, tl.minimum(begin + share, count)):
        c0, c1, c2, c3 = _words(tile, tl.load(members + i), key0, key1, generation, stream)
        weight = tl.load(weights + i)
        t0 += weight * _term(c0, 0, READING, CENTRE)
        t1 += weight * _term(c0, 1, READING, CENTRE)
        t2 += weight * _term(c1, 0, READING, CENTRE)
        t3 += weight * _term(c1, 1, READING, CENTRE)
        t4 += weight * _term(c2, 0, READING, CENTRE)
        t5 += weight * _term(c2, 1, READING, CENTRE)
        t6 += weight * _term(c3, 0, READING, CENTRE)
        t7 += weight * _term(c3, 1, READING, CENTRE)
    base, first, last = _places(tile, start, stop)
    _add(out + base, 0, t0, first, last)
    _add(out + base, 1, t1, first, last)
    _add(out + base, 2, t2, first, last)
    _add(out + base, 3, t3, first, last)
    _add(out + base, 4, t4, first, last)
    _add(out + base, 5, t5, first, last)
    _add(out + base, 6, t6, first, last)
    _add(out + base, 7, t7, first, last)


@triton.jit
def _blend(
    out, shared, thin, thick, bias, scales, where, n, rows, positions, addresses,
    RANK: tl.constexpr, RELU: tl.constexpr, MAPS: tl.constexpr, TALL: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """A tile of TALL examples and WIDE of the rows x positions outputs of one member."""
    wide = rows * positions
    tiles = tl.cdiv(n, TALL) * tl.cdiv(wide, WIDE)
    program = tl.program_id(0).to(tl.int64)
    member, tile = program // tiles, program % tiles
    j = (tile // tl.cdiv(wide, WIDE)) * TALL + tl.arange(0, TALL)
    q = (tile % tl.cdiv(wide, WIDE)) * WIDE + tl.arange(0, WIDE)
    k, p = (q // positions, q % positions) if MAPS else (q, q * 0)
    here, some = (j < n)[:, None] & (q < wide)[None, :], q < wide
    address, scale = tl.load(where + member), tl.load(scales + member)
    total = tl.zeros((TALL, WIDE), scale.dtype)
    for r in tl.static_range(RANK):
        column = (j * addresses + address) * RANK + r
        if MAPS:
            left = tl.load(thin + column[:, None] * positions + p[None, :], mask=here, other=0.0)
        else:
            left = tl.load(thin + column, mask=j < n, other=0.0)[:, None]
        right = tl.load(thick + (address * RANK + r) * rows + k, mask=some, other=0.0)
        total += left.to(scale.dtype) * right.to(scale.dtype)[None, :]
    base = tl.load(shared + j[:, None] * wide + q[None, :], mask=here, other=0.0).to(scale.dtype)
    own = tl.load(bias + member * rows + k, mask=some, other=0.0).to(scale.dtype)
    value = base + own[None, :] + scale * total
    if RELU:
        value = tl.where(value <= 0, 0.0, value)  # NaN stays NaN
    tl.store(out + member * n * wide + j[:, None] * wide + q[None, :], value, mask=here)


@triton.jit
def _linear_outer(
    out, x, weight, a, b, bias, scales, where, n, rows, columns,
    RELU: tl.constexpr, RANKS: tl.constexpr, TALL: tl.constexpr, WIDE: tl.constexpr, DEEP: tl.constexpr,
):  # fmt: skip
    """A tile of TALL examples and WIDE outputs of one member; x and its product with B share one pass over x."""
    across = tl.cdiv(rows, WIDE)
    tiles = tl.cdiv(n, TALL) * across
    program = tl.program_id(0).to(tl.int64)
    member, tile = program // tiles, program % tiles
    j, k = (tile // across) * TALL + tl.arange(0, TALL), (tile % across) * WIDE + tl.arange(0, WIDE)
    address, rank = tl.load(where + member), tl.arange(0, RANKS)
    total, thin = tl.zeros((TALL, WIDE), tl.float32), tl.zeros((TALL, RANKS), tl.float32)
    x += member * n * columns + j[:, None] * columns
    weight += k[None, :].to(tl.int64) * columns
    b += (address * RANKS + rank[None, :]) * columns
    for first in range(0, columns, DEEP):
        c = first + tl.arange(0, DEEP)
        inside = c < columns
        left = tl.load(x + c[None, :], mask=(j < n)[:, None] & inside[None, :], other=0.0)
        right = tl.load(weight + c[:, None], mask=(k < rows)[None, :] & inside[:, None], other=0.0)
        total = tl.dot(left, right, total)
        thin = tl.dot(left, tl.load(b + c[:, None], mask=inside[:, None], other=0.0), thin)
    factors = tl.load(
        a + address * RANKS * rows + rank[:, None] * rows + k[None, :], mask=(k < rows)[None, :], other=0.0
    )
    total += tl.load(scales + member) * tl.dot(thin.to(factors.dtype), factors)
    total += tl.load(bias + member * rows + k, mask=k < rows, other=0.0).to(tl.float32)[None, :]
    if RELU:
        total = tl.where(total <= 0, 0.0, total)  # NaN stays NaN
    here = (j < n)[:, None] & (k < rows)[None, :]
    tl.store(out + member * n * rows + j[:, None] * rows + k[None, :], total, mask=here)


def _tiles(start: int, count: int) -> int:
    return (start + count - 1) // TILE - start // TILE + 1


def _field(address: Address, count: int) -> tuple[int, ...]:
    return (*address.key, address.generation, address.stream, address.start, address.start + count)


def fill(out: torch.Tensor, address: Address, reading: Reading) -> None:
    rows, count = out.shape
    if rows and count:
        with torch.cuda.device_of(out):  # Triton launches on the current device
            grid = (_tiles(address.start, count) * rows,)
            _fill[grid](out, address.members, *_field(address, count), READING=int(reading), num_warps=WARPS)


def perturb(
    out: torch.Tensor, theta: torch.Tensor, scale: torch.Tensor, signs: torch.Tensor, address: Address, reading: Reading
) -> None:
    rows, count = out.shape
    if rows and count:
        arguments: tuple[Any, ...] = (out, theta, scale, signs, address.members, *_field(address, count))
        options = {"num_warps": WARPS, "enable_fp_fusion": False}
        with torch.cuda.device_of(out):
            grid = (_tiles(address.start, count) * rows,)
            _perturb[grid](*arguments, VECTOR=scale.numel() > 1, READING=int(reading), **options)


def accumulate(out: torch.Tensor, weights: torch.Tensor, address: Address, reading: Reading, centre: int) -> None:
    count = out.numel()
    out.zero_()
    if count and weights.numel():
        tiles = _tiles(address.start, count)
        shares = max(1, min(RESIDENT_TILES // tiles, weights.numel() // 8))
        arguments = (out, weights, address.members, weights.numel(), *_field(address, count))
        with torch.cuda.device_of(out):
            _accumulate[tiles, shares](*arguments, CENTRE=centre, READING=int(reading), num_warps=WARPS)


def blend_outer(
    out: torch.Tensor,
    shared: torch.Tensor,
    thin: torch.Tensor,
    thick: torch.Tensor,
    bias: torch.Tensor,
    scales: torch.Tensor,
    where: torch.Tensor,
    relu: bool,
    window: None = None,
) -> None:
    """As ``reference.blend_outer``, without a window; the arithmetic is in the type of the scales."""
    members, n, rows, positions = out.shape
    tall, wide = 16, min(128, triton.next_power_of_2(rows * positions))
    grid = (members * triton.cdiv(n, tall) * triton.cdiv(rows * positions, wide),)
    sizes = (n, rows, positions, thin.shape[1])
    options = {"RANK": thin.shape[2], "RELU": relu, "MAPS": positions > 1, "TALL": tall, "WIDE": wide}
    if out.numel():
        with torch.cuda.device_of(out):
            _blend[grid](out, shared, thin, thick, bias, scales, where, *sizes, **options, num_warps=1)


def linear_outer(
    out: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor,
    scales: torch.Tensor,
    where: torch.Tensor,
    relu: bool,
) -> None:
    """out[i] = x[i] (weight + scales[i] A B^T)^T + bias[i] for each member i, then relu, where A, B are at where[i].

    ``x`` is (members, n, columns), ``a`` (addresses, ranks, rows), ``b`` (addresses, ranks, columns), of which ranks
    beyond the noise's own are zero: a power of two from 16 on, as tensor cores want it. All in one 16-bit type.
    """
    members, n, columns = x.shape
    rows, ranks = weight.shape[0], a.shape[1]
    tall = 128 if n > 64 else 64
    wide = 16 if rows <= 16 else 64 if rows <= 64 else 128
    grid = (members * triton.cdiv(n, tall) * triton.cdiv(rows, wide),)
    deep, warps = (32, 4) if wide == 16 else (64, 8)  # fixed, not tuned at run time: they decide the order of sums
    options = {"RELU": relu, "RANKS": ranks, "TALL": tall, "WIDE": wide, "DEEP": deep}
    if out.numel():
        with torch.cuda.device_of(out):
            arrays = (out, x, weight, a, b, bias, scales, where)
            _linear_outer[grid](*arrays, n, rows, columns, **options, num_warps=warps, num_stages=3)
