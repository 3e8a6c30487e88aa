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
from germline.kernels.cuda_layers import (
    blend_outer,
    layer_norm,
    lstm,
    narrow_linear,
    thin_convolution,
    thin_product,
)

POPCOUNT = tl.constexpr(int(Reading.POPCOUNT))
SIGN = tl.constexpr(int(Reading.SIGN))
UNIFORM = tl.constexpr(int(Reading.UNIFORM))
BLOCKS_ = tl.constexpr(BLOCKS)
ROUNDS_ = tl.constexpr(ROUNDS)
TILE_ = tl.constexpr(TILE)

WARPS = 2  # two blocks a thread: of 1, 2 and 4 warps the fastest for sums on an H200, within a tenth for the rest
RESIDENT_TILES = 2048  # enough programs to fill a large card; fewer tiles than this are also split over members

# One compiled kernel for all addresses: their types are fixed and their values not specialized on.
kernel = triton.jit(do_not_specialize=["count", "key0", "key1", "stream", "start", "stop"])


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
    key0: tl.int64, key1: tl.int64, generation, stream: tl.int64, start: tl.int64, stop: tl.int64,
    READING: tl.constexpr,
):  # fmt: skip
    tile, row = _tile_and_row(start, stop)
    c0, c1, c2, c3 = _words(tile, tl.load(members + row), key0, key1, tl.load(generation), stream)
    base, first, last = _places(tile, start, stop)
    out += row * (stop - start) + base
    for lane in tl.static_range(8):
        k = lane * BLOCKS_ + tl.arange(0, BLOCKS_)
        tl.store(out + k, _lane(c0, c1, c2, c3, lane, READING), mask=(k >= first) & (k < last))


@kernel
def _perturb(
    out, theta, scale, signs, members,
    key0: tl.int64, key1: tl.int64, generation, stream: tl.int64, start: tl.int64, stop: tl.int64,
    VECTOR: tl.constexpr, PAIRS: tl.constexpr, READING: tl.constexpr,
):  # fmt: skip
    tile, row = _tile_and_row(start, stop)
    c0, c1, c2, c3 = _words(tile, tl.load(members + row), key0, key1, tl.load(generation), stream)
    base, first, last = _places(tile, start, stop)
    sign = 1.0 if PAIRS else tl.load(signs + row).to(theta.dtype.element_ty)
    out += (2 * row if PAIRS else row) * (stop - start) + base
    theta += base
    for lane in tl.static_range(8):
        k = lane * BLOCKS_ + tl.arange(0, BLOCKS_)
        mask = (k >= first) & (k < last)
        step = sign * (tl.load(scale + base + k, mask=mask) if VECTOR else tl.load(scale))
        eps = _lane(c0, c1, c2, c3, lane, READING).to(theta.dtype.element_ty)
        center = tl.load(theta + k, mask=mask)
        tl.store(out + k, center + step * eps, mask=mask)
        if PAIRS:
            tl.store(out + (stop - start) + k, center + -step * eps, mask=mask)


@triton.jit
def _term(word, HIGH: tl.constexpr, READING: tl.constexpr, CENTER: tl.constexpr):
    eps = _value(word, HIGH, READING)
    return eps * eps - CENTER if CENTER > 0 else eps


@triton.jit
def _add(out, LANE: tl.constexpr, total, first, last):
    k = LANE * BLOCKS_ + tl.arange(0, BLOCKS_)
    # integers: the order in which programs add their shares does not matter
    tl.atomic_add(out + k, total, mask=(k >= first) & (k < last), sem="relaxed")


@kernel
def _accumulate(
    out, weights, members, count,
    key0: tl.int64, key1: tl.int64, generation, stream: tl.int64, start: tl.int64, stop: tl.int64,
    CENTER: tl.constexpr, READING: tl.constexpr,
):  # fmt: skip
    tile = start // TILE_ + tl.program_id(0).to(tl.int64)
    share = tl.cdiv(count, tl.num_programs(1))
    begin = tl.program_id(1) * share
    number = tl.load(generation)
    t0 = tl.zeros((BLOCKS_,), tl.int32)  # one sum a lane, in variables: as one tensor they cost a third of the speed
    t1, t2, t3, t4, t5, t6, t7 = t0, t0, t0, t0, t0, t0, t0
    for i in range(begin, tl.minimum(begin + share, count)):
        c0, c1, c2, c3 = _words(tile, tl.load(members + i), key0, key1, number, stream)
        weight = tl.load(weights + i)
        t0 += weight * _term(c0, 0, READING, CENTER)
        t1 += weight * _term(c0, 1, READING, CENTER)
        t2 += weight * _term(c1, 0, READING, CENTER)
        t3 += weight * _term(c1, 1, READING, CENTER)
        t4 += weight * _term(c2, 0, READING, CENTER)
        t5 += weight * _term(c2, 1, READING, CENTER)
        t6 += weight * _term(c3, 0, READING, CENTER)
        t7 += weight * _term(c3, 1, READING, CENTER)
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
def _adam(
    theta, first, second, gradient, theta_out, first_out, second_out, count,
    decay, beta1, rest1, beta2, rest2, rate, correction, eps, DECAYS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """One operation after the other, none contracted: see ``germline.optim.Adam``, whose bits these are."""
    k = tl.program_id(0).to(tl.int64) * WIDE + tl.arange(0, WIDE)
    inside = k < count
    x, g = tl.load(theta + k, mask=inside), tl.load(gradient + k, mask=inside)
    if DECAYS:
        x = x - x * decay
    m = tl.load(first + k, mask=inside) * beta1 + g * rest1
    v = tl.load(second + k, mask=inside) * beta2 + (g * g) * rest2
    scale = tl.sqrt_rn(v) * correction + eps
    tl.store(theta_out + k, x - tl.div_rn(m * rate, scale), mask=inside)
    tl.store(first_out + k, m, mask=inside)
    tl.store(second_out + k, v, mask=inside)


def _tiles(start: int, count: int) -> int:
    return (start + count - 1) // TILE - start // TILE + 1


def _field(address: Address, count: int) -> tuple[Any, ...]:
    """The generation is read from the card: a kernel that was recorded in one generation is launched in others."""
    number = address.generation
    if not isinstance(number, torch.Tensor):
        number = torch.full((), number, dtype=torch.int64, device=address.members.device)
    return (*address.key, number, address.stream, address.start, address.start + count)


def fill(out: torch.Tensor, address: Address, reading: Reading) -> None:
    rows, count = out.shape
    if rows and count:
        with torch.cuda.device_of(out):  # Triton launches on the current device
            grid = (_tiles(address.start, count) * rows,)
            _fill[grid](out, address.members, *_field(address, count), READING=int(reading), num_warps=WARPS)


def perturb(
    out: torch.Tensor,
    theta: torch.Tensor,
    scale: torch.Tensor,
    signs: torch.Tensor | None,
    address: Address,
    reading: Reading,
) -> None:
    """As ``reference.perturb``; without signs, each address is that of two rows, one with its noise, one against."""
    count, pairs = out.shape[1], signs is None
    rows = len(address.members)
    if rows and count:
        arrays = (out, theta, scale, address.members if signs is None else signs, address.members)
        options = {"num_warps": WARPS, "enable_fp_fusion": False}
        with torch.cuda.device_of(out):
            grid = (_tiles(address.start, count) * rows,)
            field = _field(address, count)
            _perturb[grid](*arrays, *field, VECTOR=scale.numel() > 1, PAIRS=pairs, READING=int(reading), **options)


@triton.jit
def _perturb_outer(
    out, theta, scale, a, b, skip, count, rows, columns, stride,
    RANK: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    tiles = tl.cdiv(count, WIDE)
    program = tl.program_id(0).to(tl.int64)
    member, k = program // tiles, program % tiles * WIDE + tl.arange(0, WIDE)
    inside = k < count
    row, column = (k + skip) // columns, (k + skip) % columns
    total = tl.zeros((WIDE,), tl.int32)
    for r in tl.static_range(RANK):
        left = tl.load(a + (member * rows + row) * RANK + r, mask=inside, other=0).to(tl.int32)
        total += left * tl.load(b + (member * RANK + r) * columns + column, mask=inside, other=0).to(tl.int32)
    center = tl.load(theta + k, mask=inside)
    tl.store(out + member * stride + k, center + tl.load(scale) * total.to(center.dtype), mask=inside)


def perturb_outer(
    out: torch.Tensor, theta: torch.Tensor, scale: torch.Tensor, a: torch.Tensor, b: torch.Tensor, skip: int
) -> None:
    """out[i] = theta + scale * (A_i B_i^T), from its ``skip``-th element on; b is (members, rank, columns)."""
    members, count = out.shape
    if members and count:
        options = {"RANK": a.shape[2], "WIDE": 1024, "num_warps": 4, "enable_fp_fusion": False}
        with torch.cuda.device_of(out):
            grid = (members * triton.cdiv(count, 1024),)
            _perturb_outer[grid](out, theta, scale, a, b, skip, count, a.shape[1], b.shape[2], out.stride(0), **options)


def accumulate(out: torch.Tensor, weights: torch.Tensor, address: Address, reading: Reading, center: int) -> None:
    count = out.numel()
    out.zero_()
    if count and weights.numel():
        tiles = _tiles(address.start, count)
        shares = max(1, min(RESIDENT_TILES // tiles, weights.numel() // 8))
        arguments = (out, weights, address.members, weights.numel(), *_field(address, count))
        with torch.cuda.device_of(out):
            _accumulate[tiles, shares](*arguments, CENTER=center, READING=int(reading), num_warps=WARPS)


def adam(
    theta: torch.Tensor, first: torch.Tensor, second: torch.Tensor, gradient: torch.Tensor, scalars: tuple[float, ...]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """theta and both moments after a step, in one pass over float32; so are the scalars, in the kernel's order."""
    arrays = [x.contiguous() for x in (theta, first, second, gradient)]
    made = torch.empty_like(arrays[0]), torch.empty_like(arrays[0]), torch.empty_like(arrays[0])
    if theta.numel():
        options = {"DECAYS": scalars[0] != 0, "WIDE": 1024, "num_warps": 4, "enable_fp_fusion": False}
        with torch.cuda.device_of(theta):
            _adam[(triton.cdiv(theta.numel(), 1024),)](*arrays, *made, theta.numel(), *scalars, **options)
    return made


__all__ = [
    "accumulate",
    "adam",
    "blend_outer",
    "fill",
    "layer_norm",
    "lstm",
    "narrow_linear",
    "perturb",
    "perturb_outer",
    "thin_convolution",
    "thin_product",
]
