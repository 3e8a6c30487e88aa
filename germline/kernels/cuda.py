"""The noise field on CUDA, in Triton; without a card, in Triton's interpreter (TRITON_INTERPRET=1).

A program owns one tile: 128 Philox blocks, whose 4 words of 2 halves are its 1,024 parameters, as a tensor of shape
(128, 2, 2, 2) indexed by block, then by the bits of the lane from high to low. Both halves of a word are read at once.
Floating-point contraction is switched off wherever floats occur.
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

RESIDENT_TILES = 2048  # enough programs to fill a large card; fewer tiles than this are also split over members

# One compiled kernel for all addresses: their types are fixed and their values not specialised on.
kernel = triton.jit(do_not_specialize=["count", "key0", "key1", "generation", "stream", "start", "stop"])


@triton.jit
def _read_tile(tile, member, key0, key1, generation, stream, READING: tl.constexpr):
    block = (tile * BLOCKS_ + tl.arange(0, BLOCKS_)).to(tl.uint32)
    zero = tl.zeros_like(block)
    c0, c1, c2, c3 = philox_impl(
        block,
        (zero + member).to(tl.uint32),
        (zero + generation).to(tl.uint32),
        (zero + stream).to(tl.uint32),
        (zero + key0).to(tl.uint32),
        (zero + key1).to(tl.uint32),
        ROUNDS_,
    )
    word = tl.join(tl.join(c0, c2), tl.join(c1, c3))  # (128, 2, 2): [b, i, j] is word 2 i + j
    if READING == POPCOUNT:
        word = word - ((word >> 1) & 0x55555555)
        word = (word & 0x33333333) + ((word >> 2) & 0x33333333)
        word = (word + (word >> 4)) & 0x0F0F0F0F
        word = (word + (word >> 8)) & 0x001F001F
    elif READING == SIGN:
        word = word & 0x00010001
    elif READING == UNIFORM:
        word = word & 0x000F000F
    half = tl.join(word & 0xFFFF, word >> 16).to(tl.int32)  # (128, 2, 2, 2)
    if READING == POPCOUNT:
        half = half - 8
    elif READING == SIGN:
        half = 1 - 2 * half
    elif READING == UNIFORM:
        half = 2 * half - 15
    return half


@triton.jit
def _columns(tile):
    """The parameters of a tile, in the shape that _read_tile gives."""
    block = tl.arange(0, BLOCKS_)[:, None, None, None]
    high, middle, low = tl.arange(0, 2), tl.arange(0, 2), tl.arange(0, 2)
    lane = 4 * high[None, :, None, None] + 2 * middle[None, None, :, None] + low[None, None, None, :]
    return tile * TILE_ + BLOCKS_ * lane + block


@kernel
def _fill(
    out, members,
    key0: tl.int64, key1: tl.int64, generation: tl.int64, stream: tl.int64, start: tl.int64, stop: tl.int64,
    READING: tl.constexpr,
):  # fmt: skip
    tile = start // TILE_ + tl.program_id(0).to(tl.int64)
    row = tl.program_id(1).to(tl.int64)
    eps = _read_tile(tile, tl.load(members + row), key0, key1, generation, stream, READING)
    k = _columns(tile)
    tl.store(out + row * (stop - start) + (k - start), eps, mask=(k >= start) & (k < stop))


@kernel
def _perturb(
    out, theta, scale, signs, members,
    key0: tl.int64, key1: tl.int64, generation: tl.int64, stream: tl.int64, start: tl.int64, stop: tl.int64,
    VECTOR: tl.constexpr, READING: tl.constexpr,
):  # fmt: skip
    tile = start // TILE_ + tl.program_id(0).to(tl.int64)
    row = tl.program_id(1).to(tl.int64)
    eps = _read_tile(tile, tl.load(members + row), key0, key1, generation, stream, READING)
    k = _columns(tile)
    mask = (k >= start) & (k < stop)
    centre = tl.load(theta + (k - start), mask=mask)
    step = tl.load(scale + (k - start), mask=mask) if VECTOR else tl.load(scale)
    step = tl.load(signs + row).to(centre.dtype) * step
    tl.store(out + row * (stop - start) + (k - start), centre + step * eps.to(centre.dtype), mask=mask)


@kernel
def _accumulate(
    out, weights, members, count,
    key0: tl.int64, key1: tl.int64, generation: tl.int64, stream: tl.int64, start: tl.int64, stop: tl.int64,
    CENTRE: tl.constexpr, READING: tl.constexpr,
):  # fmt: skip
    tile = start // TILE_ + tl.program_id(0).to(tl.int64)
    total = tl.zeros((BLOCKS_, 2, 2, 2), tl.int32)
    share = tl.cdiv(count, tl.num_programs(1))
    first = tl.program_id(1) * share
    for i in range(first, tl.minimum(first + share, count)):
        eps = _read_tile(tile, tl.load(members + i), key0, key1, generation, stream, READING)
        if CENTRE > 0:
            eps = eps * eps - CENTRE
        total += tl.load(weights + i) * eps
    k = _columns(tile)
    # integers: the order in which the shares are added does not matter
    tl.atomic_add(out + (k - start), total, mask=(k >= start) & (k < stop), sem="relaxed")


def _tiles(start: int, count: int) -> int:
    return (start + count - 1) // TILE - start // TILE + 1


def _field(address: Address, count: int) -> tuple[int, ...]:
    return (*address.key, address.generation, address.stream, address.start, address.start + count)


def fill(out: torch.Tensor, address: Address, reading: Reading) -> None:
    rows, count = out.shape
    if rows and count:
        grid = (_tiles(address.start, count), rows)
        _fill[grid](out, address.members, *_field(address, count), READING=int(reading))


def perturb(
    out: torch.Tensor, theta: torch.Tensor, scale: torch.Tensor, signs: torch.Tensor, address: Address, reading: Reading
) -> None:
    rows, count = out.shape
    if rows and count:
        grid = (_tiles(address.start, count), rows)
        arguments: tuple[Any, ...] = (out, theta, scale, signs, address.members, *_field(address, count))
        _perturb[grid](*arguments, VECTOR=scale.numel() > 1, READING=int(reading), enable_fp_fusion=False)


def accumulate(out: torch.Tensor, weights: torch.Tensor, address: Address, reading: Reading, centre: int) -> None:
    count = out.numel()
    out.zero_()
    if count and weights.numel():
        tiles = _tiles(address.start, count)
        shares = max(1, min(RESIDENT_TILES // tiles, weights.numel() // 8))
        arguments = (out, weights, address.members, weights.numel(), *_field(address, count))
        _accumulate[tiles, shares](*arguments, CENTRE=centre, READING=int(reading))
