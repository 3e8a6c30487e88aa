"""The noise field on CUDA, in Triton; without a GPU, in Triton's interpreter (TRITON_INTERPRET=1).

A program owns one tile: 128 Philox blocks, whose 4 words of 2 halves are its 1,024 parameters, lane by lane.
Floating-point contraction is switched off where floats occur.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.random import philox_impl

from germline.kernels import BLOCKS, ROUNDS, TILE, Address, Reading
from germline.kernels.cuda_attention import attend as attend
from germline.kernels.cuda_attention import fits_attention as fits_attention
from germline.kernels.cuda_layers import blend_outer as blend_outer
from germline.kernels.cuda_layers import narrow_linear as narrow_linear
from germline.kernels.cuda_layers import thin_convolution as thin_convolution
from germline.kernels.cuda_layers import thin_product as thin_product
from germline.kernels.cuda_norms import layer_norm as layer_norm
from germline.kernels.cuda_norms import moments as moments
from germline.kernels.cuda_norms import scale_columns as scale_columns
from germline.kernels.cuda_recurrent import lstm as lstm

POPCOUNT = tl.constexpr(int(Reading.POPCOUNT))
SIGN = tl.constexpr(int(Reading.SIGN))
UNIFORM = tl.constexpr(int(Reading.UNIFORM))
BLOCKS_ = tl.constexpr(BLOCKS)
ROUNDS_ = tl.constexpr(ROUNDS)
TILE_ = tl.constexpr(TILE)

WARPS = 2  # two blocks a thread: of 1, 2 and 4 warps the fastest for sums on an H200, within a tenth for the rest
RESIDENT_TILES = 2048  # enough programs to fill a large GPU; fewer tiles than this are also split over members

# One compiled kernel for all addresses: their types are fixed and their values not specialized on.
field_kernel = triton.jit(do_not_specialize=["count", "key0", "key1", "stream", "start", "stop"])


@triton.jit
def _philox(tile, member, key0, key1, generation, stream):
    """Return the four words of each of the tile's 128 blocks."""
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


INTERPRETED = tl.constexpr(not isinstance(_philox, triton.JITFunction))


@triton.jit
def _popcount(half):
    if INTERPRETED:
        half = half - ((half >> 1) & 0x5555)
        half = (half & 0x3333) + ((half >> 2) & 0x3333)
        half = (half + (half >> 4)) & 0x0F0F
        return ((half + (half >> 8)) & 0x1F).to(tl.int32)
    return tl.inline_asm_elementwise("popc.b32 $0, $1;", "=r,r", [half], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def _read_half(word, HIGH: tl.constexpr, READING: tl.constexpr):
    """Return the integers that a reading makes of the high or the low halves of words."""
    half = word >> 16 if HIGH else word & 0xFFFF
    if READING == POPCOUNT:
        return _popcount(half) - 8
    if READING == SIGN:
        return 1 - 2 * (half & 1).to(tl.int32)
    if READING == UNIFORM:
        return 2 * (half & 15).to(tl.int32) - 15
    return half.to(tl.int32)


@triton.jit
def _read_lane(c0, c1, c2, c3, LANE: tl.constexpr, READING: tl.constexpr):
    word = c0 if LANE < 2 else c1 if LANE < 4 else c2 if LANE < 6 else c3
    return _read_half(word, LANE % 2, READING)


@triton.jit
def _tile_and_row(start, stop):
    """Return the tile and the row of a program; only a grid's first dimension may have more than 65,535 programs."""
    tiles = (stop - 1) // TILE_ - start // TILE_ + 1
    program = tl.program_id(0).to(tl.int64)
    return start // TILE_ + program % tiles, program // tiles


@triton.jit
def _tile_bounds(tile, start, stop):
    """Return where a tile begins in the slice, and the first and one past the last of its elements in the slice."""
    base = tile * TILE_ - start
    return base, tl.maximum(-base, 0).to(tl.int32), tl.minimum(stop - start - base, TILE_).to(tl.int32)


@field_kernel
def _fill(
    out, members,
    key0: tl.int64, key1: tl.int64, generation, stream: tl.int64, start: tl.int64, stop: tl.int64,
    READING: tl.constexpr,
):  # fmt: skip
    tile, row = _tile_and_row(start, stop)
    c0, c1, c2, c3 = _philox(tile, tl.load(members + row), key0, key1, tl.load(generation), stream)
    base, first, last = _tile_bounds(tile, start, stop)
    out += row * (stop - start) + base
    for lane in tl.static_range(8):
        k = lane * BLOCKS_ + tl.arange(0, BLOCKS_)
        tl.store(out + k, _read_lane(c0, c1, c2, c3, lane, READING), mask=(k >= first) & (k < last))


@field_kernel
def _perturb(
    out, theta, scale, signs, members,
    key0: tl.int64, key1: tl.int64, generation, stream: tl.int64, start: tl.int64, stop: tl.int64,
    VECTOR: tl.constexpr, PAIRS: tl.constexpr, READING: tl.constexpr,
):  # fmt: skip
    tile, row = _tile_and_row(start, stop)
    c0, c1, c2, c3 = _philox(tile, tl.load(members + row), key0, key1, tl.load(generation), stream)
    base, first, last = _tile_bounds(tile, start, stop)
    sign = 1.0 if PAIRS else tl.load(signs + row).to(theta.dtype.element_ty)
    out += (2 * row if PAIRS else row) * (stop - start) + base
    theta += base
    for lane in tl.static_range(8):
        k = lane * BLOCKS_ + tl.arange(0, BLOCKS_)
        mask = (k >= first) & (k < last)
        step = sign * (tl.load(scale + base + k, mask=mask) if VECTOR else tl.load(scale))
        eps = _read_lane(c0, c1, c2, c3, lane, READING).to(theta.dtype.element_ty)
        center = tl.load(theta + k, mask=mask)
        tl.store(out + k, center + step * eps, mask=mask)
        if PAIRS:
            tl.store(out + (stop - start) + k, center + -step * eps, mask=mask)


@triton.jit
def _read_term(word, HIGH: tl.constexpr, READING: tl.constexpr, VARIANCE: tl.constexpr):
    """Return eps or, for a variance above 0, eps^2 - variance."""
    eps = _read_half(word, HIGH, READING)
    return eps * eps - VARIANCE if VARIANCE > 0 else eps


@triton.jit
def _add_lane(out, LANE: tl.constexpr, total, first, last):
    k = LANE * BLOCKS_ + tl.arange(0, BLOCKS_)
    # integers: the order in which programs add their shares does not matter
    tl.atomic_add(out + k, total, mask=(k >= first) & (k < last), sem="relaxed")


@field_kernel
def _accumulate(
    out, weights, members, count,
    key0: tl.int64, key1: tl.int64, generation, stream: tl.int64, start: tl.int64, stop: tl.int64,
    VARIANCE: tl.constexpr, READING: tl.constexpr,
):  # fmt: skip
    tile = start // TILE_ + tl.program_id(0).to(tl.int64)
    share = tl.cdiv(count, tl.num_programs(1))
    begin = tl.program_id(1) * share
    number = tl.load(generation)
    t0 = tl.zeros((BLOCKS_,), tl.int32)  # one sum a lane, in variables: as one tensor they cost a third of the speed
    t1, t2, t3, t4, t5, t6, t7 = t0, t0, t0, t0, t0, t0, t0
    for i in range(begin, tl.minimum(begin + share, count)):
        c0, c1, c2, c3 = _philox(tile, tl.load(members + i), key0, key1, number, stream)
        weight = tl.load(weights + i)
        t0 += weight * _read_term(c0, 0, READING, VARIANCE)
        t1 += weight * _read_term(c0, 1, READING, VARIANCE)
        t2 += weight * _read_term(c1, 0, READING, VARIANCE)
        t3 += weight * _read_term(c1, 1, READING, VARIANCE)
        t4 += weight * _read_term(c2, 0, READING, VARIANCE)
        t5 += weight * _read_term(c2, 1, READING, VARIANCE)
        t6 += weight * _read_term(c3, 0, READING, VARIANCE)
        t7 += weight * _read_term(c3, 1, READING, VARIANCE)
    base, first, last = _tile_bounds(tile, start, stop)
    _add_lane(out + base, 0, t0, first, last)
    _add_lane(out + base, 1, t1, first, last)
    _add_lane(out + base, 2, t2, first, last)
    _add_lane(out + base, 3, t3, first, last)
    _add_lane(out + base, 4, t4, first, last)
    _add_lane(out + base, 5, t5, first, last)
    _add_lane(out + base, 6, t6, first, last)
    _add_lane(out + base, 7, t7, first, last)


@triton.jit
def _perturb_outer(
    out, theta, scale, a, b_t, skip, count, rows, columns, stride,
    RANK: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    tiles = tl.cdiv(count, WIDTH)
    program = tl.program_id(0).to(tl.int64)
    member, k = program // tiles, program % tiles * WIDTH + tl.arange(0, WIDTH)
    mask = k < count
    row, column = (k + skip) // columns, (k + skip) % columns
    total = tl.zeros((WIDTH,), tl.int32)
    for r in tl.static_range(RANK):
        left = tl.load(a + (member * rows + row) * RANK + r, mask=mask, other=0).to(tl.int32)
        total += left * tl.load(b_t + (member * RANK + r) * columns + column, mask=mask, other=0).to(tl.int32)
    center = tl.load(theta + k, mask=mask)
    tl.store(out + member * stride + k, center + tl.load(scale) * total.to(center.dtype), mask=mask)


@triton.jit
def _adam(
    theta, first, second, gradient, theta_out, first_out, second_out, count,
    decay, beta1, rest1, beta2, rest2, rate, correction, eps, DECAYS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Do one operation after the other, none contracted: the bits are those of ``germline.optim.Adam``."""
    k = tl.program_id(0).to(tl.int64) * WIDTH + tl.arange(0, WIDTH)
    mask = k < count
    x, g = tl.load(theta + k, mask=mask), tl.load(gradient + k, mask=mask)
    if DECAYS:
        x = x - x * decay
    m = tl.load(first + k, mask=mask) * beta1 + g * rest1
    v = tl.load(second + k, mask=mask) * beta2 + (g * g) * rest2
    scale = tl.sqrt_rn(v) * correction + eps
    tl.store(theta_out + k, x - tl.div_rn(m * rate, scale), mask=mask)
    tl.store(first_out + k, m, mask=mask)
    tl.store(second_out + k, v, mask=mask)


def _count_tiles(start: int, count: int) -> int:
    return (start + count - 1) // TILE - start // TILE + 1


def _field_arguments(address: Address, count: int) -> tuple[Any, ...]:
    """Return the arguments of a field kernel that describe an address; the generation is in GPU memory.

    A kernel that was recorded in one generation is launched in others, and reads the number of the generation anew.
    """
    number = address.generation
    if not isinstance(number, torch.Tensor):
        number = torch.full((), number, dtype=torch.int64, device=address.members.device)
    return (*address.key, number, address.stream, address.start, address.start + count)


def fill(out: torch.Tensor, address: Address, reading: Reading) -> None:
    """Set out[i, k] to the integer of member i at parameter start + k."""
    rows, count = out.shape
    if rows and count:
        with torch.cuda.device_of(out):  # Triton launches on the current device
            grid = (_count_tiles(address.start, count) * rows,)
            _fill[grid](out, address.members, *_field_arguments(address, count), READING=int(reading), num_warps=WARPS)


def perturb(
    out: torch.Tensor,
    theta: torch.Tensor,
    scale: torch.Tensor,
    signs: torch.Tensor | None,
    address: Address,
    reading: Reading,
) -> None:
    """Compute ``reference.perturb``."""
    count, has_pairs = out.shape[1], signs is None
    rows = len(address.members)
    if rows and count:
        arrays = (out, theta, scale, address.members if signs is None else signs, address.members)
        options = {"VECTOR": scale.numel() > 1, "PAIRS": has_pairs, "READING": int(reading)}
        with torch.cuda.device_of(out):
            grid = (_count_tiles(address.start, count) * rows,)
            field = _field_arguments(address, count)
            _perturb[grid](*arrays, *field, **options, num_warps=WARPS, enable_fp_fusion=False)


def perturb_outer(
    out: torch.Tensor, theta: torch.Tensor, scale: torch.Tensor, a: torch.Tensor, b_t: torch.Tensor, skip: int
) -> None:
    """Set out[i] to theta + scale * (A_i B_i^T), from element ``skip`` of A_i B_i^T on.

    Args:
        out: (members, parameters); rows may be apart in memory.
        theta: (parameters,).
        scale: one element.
        a: A, (members, rows, rank).
        b_t: B transposed, (members, rank, columns).
        skip: elements of the first row that come before ``theta``.
    """
    members, count = out.shape
    if members and count:
        sizes = (skip, count, a.shape[1], b_t.shape[2], out.stride(0))
        options = {"RANK": a.shape[2], "WIDTH": 1024, "num_warps": 4, "enable_fp_fusion": False}
        with torch.cuda.device_of(out):
            _perturb_outer[(members * triton.cdiv(count, 1024),)](out, theta, scale, a, b_t, *sizes, **options)


def accumulate(out: torch.Tensor, weights: torch.Tensor, address: Address, reading: Reading, variance: int) -> None:
    """Set out to the sum of weights[i] * eps[i] or, for a variance above 0, of weights[i] * (eps[i]^2 - variance)."""
    count = out.numel()
    out.zero_()
    if count and weights.numel():
        tiles = _count_tiles(address.start, count)
        shares = max(1, min(RESIDENT_TILES // tiles, weights.numel() // 8))
        arguments = (out, weights, address.members, weights.numel(), *_field_arguments(address, count))
        with torch.cuda.device_of(out):
            _accumulate[tiles, shares](*arguments, VARIANCE=variance, READING=int(reading), num_warps=WARPS)


def adam(
    theta: torch.Tensor, first: torch.Tensor, second: torch.Tensor, gradient: torch.Tensor, scalars: tuple[float, ...]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return theta and both moments after a step of Adam, in one pass over float32 arrays.

    Args:
        theta: the parameters.
        first: the first moments.
        second: the second moments.
        gradient: of the loss, one number per parameter.
        scalars: learning rate * weight decay, beta1, 1 - beta1, beta2, 1 - beta2, learning rate / (1 - beta1^t),
            1 / sqrt(1 - beta2^t) and eps, rounded to float32.
    """
    arrays = [x.contiguous() for x in (theta, first, second, gradient)]
    outputs = torch.empty_like(arrays[0]), torch.empty_like(arrays[0]), torch.empty_like(arrays[0])
    if theta.numel():
        options = {"DECAYS": scalars[0] != 0, "WIDTH": 1024, "num_warps": 4, "enable_fp_fusion": False}
        with torch.cuda.device_of(theta):
            _adam[(triton.cdiv(theta.numel(), 1024),)](*arrays, *outputs, theta.numel(), *scalars, **options)
    return outputs
