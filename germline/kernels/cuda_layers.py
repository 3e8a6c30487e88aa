"""Layers of a block of members on CUDA, in Triton, around the large products, which are left to the vendor's library.

The weights of member i are W + s_i A B^T: its output is x W^T + s_i (x B) A^T, and A and B belong to an address, which
two mirrored members share. In all kernels i counts members, j examples, k rows of the weights (outputs), c columns
(inputs), r ranks and p positions of a map. Shapes of tiles are fixed, not tuned at run time: they decide the order of
sums.
"""

from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

TAPS_FROM = 8  # channels from which on a thin convolution reads its input only once
NARROW_COLUMNS = 32  # columns of a narrow layer that are multiplied at once


@triton.jit
def _blend_tile(
    base, x_b, a, bias, scale, member, address, j, k, n, rows, pixels, addresses,
    SHARED: tl.constexpr, RANK: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Return a tile of base + bias + scale x_b a of one member: pixels j of all examples, and rows k of the weights."""
    k_mask = k < rows
    mask = (j < n)[:, None] & k_mask[None, :]
    example = j if SHARED else member * n + j  # n is a multiple of the pixels of an image
    noise = example // pixels * addresses + address if SHARED else example // pixels
    value = tl.load(base + example[:, None] * rows + k[None, :], mask=mask, other=0.0).to(scale.dtype)
    total = tl.zeros_like(value)
    for r in tl.static_range(RANK):
        left = tl.load(x_b + (noise * RANK + r) * pixels + j % pixels, mask=j < n, other=0.0).to(scale.dtype)
        right = tl.load(a + (address * RANK + r) * rows + k, mask=k_mask, other=0.0).to(scale.dtype)
        total += left[:, None] * right[None, :]
    if WHOLE:
        at = (j * addresses + address if SHARED else example)[:, None] * rows + k[None, :]
        total += tl.load(x_b + at, mask=mask, other=0.0).to(scale.dtype)
    shift = tl.load(bias + member * rows + k, mask=k_mask, other=0.0).to(scale.dtype)
    return value + shift[None, :] + scale * total


@triton.jit
def _blend(
    out, base, x_b, a, bias, scales, member_address, n, rows, pixels, addresses,
    SHARED: tl.constexpr, RANK: tl.constexpr, WHOLE: tl.constexpr, RELU: tl.constexpr,
    TILE_N: tl.constexpr, TILE_K: tl.constexpr,
):  # fmt: skip
    """Blend a tile of TILE_N pixels, which are the examples if there are no images, and TILE_K rows of one member."""
    tiles_k = tl.cdiv(rows, TILE_K)
    tiles = tl.cdiv(n, TILE_N) * tiles_k
    program = tl.program_id(0).to(tl.int64)
    member, tile = program // tiles, program % tiles
    j, k = tile // tiles_k * TILE_N + tl.arange(0, TILE_N), tile % tiles_k * TILE_K + tl.arange(0, TILE_K)
    address, scale = tl.load(member_address + member), tl.load(scales + member)
    value = _blend_tile(
        base, x_b, a, bias, scale, member, address, j, k, n, rows, pixels, addresses, SHARED, RANK, WHOLE
    )
    if RELU:
        value = tl.where(value <= 0, 0.0, value)  # NaN stays NaN
    mask = (j < n)[:, None] & (k < rows)[None, :]
    tl.store(out + (member * n + j)[:, None] * rows + k[None, :], value, mask=mask)


@triton.jit
def _blend_pooled(
    out, base, x_b, a, bias, scales, member_address, n, rows, pixels, addresses,
    places, map_width, out_width, stride_y, stride_x,
    SHARED: tl.constexpr, RANK: tl.constexpr, WHOLE: tl.constexpr, RELU: tl.constexpr,
    KY: tl.constexpr, KX: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr,
):  # fmt: skip
    """Blend and pool: a tile of TILE_N places of the pooled images, and of TILE_K rows, of one member."""
    tiles_k = tl.cdiv(rows, TILE_K)
    count = n // pixels * places
    tiles = tl.cdiv(count, TILE_N) * tiles_k
    program = tl.program_id(0).to(tl.int64)
    member, tile = program // tiles, program % tiles
    s, k = tile // tiles_k * TILE_N + tl.arange(0, TILE_N), tile % tiles_k * TILE_K + tl.arange(0, TILE_K)
    address, scale = tl.load(member_address + member), tl.load(scales + member)
    p = s % places
    corner = s // places * pixels + p // out_width * stride_y * map_width + p % out_width * stride_x  # of the window
    best = tl.zeros((TILE_N, TILE_K), scale.dtype)
    for i in tl.static_range(KY * KX):
        j = corner + i // KX * map_width + i % KX
        value = _blend_tile(
            base, x_b, a, bias, scale, member, address, j, k, n, rows, pixels, addresses, SHARED, RANK, WHOLE
        )
        best = value if i == 0 else tl.maximum(best, value, propagate_nan=tl.PropagateNan.ALL)
    if RELU:
        best = tl.where(best <= 0, 0.0, best)
    mask = (s < count)[:, None] & (k < rows)[None, :]
    tl.store(out + (member * count + s)[:, None] * rows + k[None, :], best, mask=mask)


def place_positions(x: torch.Tensor, axis: int) -> torch.Tensor:
    """Return a tensor whose last dimension, of positions, is in memory where ``axis`` says; a copy if need be."""
    return x.movedim(-1, axis).contiguous().movedim(axis, -1)


def blend_outer(
    out: torch.Tensor,
    base: torch.Tensor,
    x_b: torch.Tensor | None,
    a: torch.Tensor | None,
    bias: torch.Tensor,
    scales: torch.Tensor,
    member_address: torch.Tensor,
    relu: bool,
    window: tuple[int, ...] | None = None,
) -> None:
    """Compute ``reference.blend_outer``; the arithmetic is in the type of the scales.

    ``out``, ``base`` and x E^T are not copied if positions follow examples in memory, as in images whose channels come
    last. Without ``a``, ``x_b`` is x E^T, the product with dense noise: (n, addresses, rows, positions). Without both,
    only the bias is added.
    """
    members, images, rows, positions = out.shape
    is_shared, rank, is_whole = base.dim() == 3, 0 if a is None else a.shape[1], x_b is not None and a is None
    if not out.numel():
        return
    axis = 1 if is_shared else 2  # after the examples: a position is an example to a kernel
    base = place_positions(base, axis)
    if x_b is not None:
        x_b = place_positions(x_b, axis) if is_whole else x_b.contiguous()
    target = place_positions(out, 2)  # out itself, unless it is in another order in memory
    pixels, addresses = base.shape[-1], base.shape[1] if x_b is None else x_b.shape[1]
    sizes = (images * pixels, rows, pixels, addresses)
    x_b, a = base if x_b is None else x_b, base if a is None else a
    arrays = (target, base, x_b, a, bias, scales, member_address)
    options: dict[str, Any] = {"SHARED": is_shared, "RANK": rank, "WHOLE": is_whole, "RELU": relu}
    elements, warps = (2048, 1) if is_shared else (4096, 4)
    if window is not None:  # whose places are all in registers
        elements, warps = max(512, 8192 // triton.next_power_of_2(window[2] * window[3])), 4
    tile_k = min(elements // 16, triton.next_power_of_2(rows))
    options |= {"TILE_N": elements // tile_k, "TILE_K": tile_k, "num_warps": warps}
    tiles_k = triton.cdiv(rows, tile_k)
    with torch.cuda.device_of(out):
        if window is None:
            grid = (members * triton.cdiv(images * pixels, elements // tile_k) * tiles_k,)
            _blend[grid](*arrays, *sizes, **options)
        else:
            _, width, ky, kx, stride_y, stride_x = window
            places = (positions, width, (width - kx) // stride_x + 1, stride_y, stride_x)
            grid = (members * triton.cdiv(images * positions, elements // tile_k) * tiles_k,)
            _blend_pooled[grid](*arrays, *sizes, *places, **options, KY=ky, KX=kx)
    if target.data_ptr() != out.data_ptr():
        out.copy_(target)


@triton.jit
def _thin_product(out, x, b_t, member_address, n, columns, rank, TILE_N: tl.constexpr, TILE_C: tl.constexpr):
    tiles = tl.cdiv(n, TILE_N)
    program = tl.program_id(0).to(tl.int64)
    r, tile = program % rank, program // rank
    member, j = tile // tiles, tile % tiles * TILE_N + tl.arange(0, TILE_N)
    x += (member * n + j[:, None]) * columns
    b_t += (tl.load(member_address + member) * rank + r) * columns
    total = tl.zeros((TILE_N, TILE_C), tl.float32)
    for first in range(0, columns, TILE_C):
        c = first + tl.arange(0, TILE_C)
        left = tl.load(x + c[None, :], mask=(j < n)[:, None] & (c < columns)[None, :], other=0.0)
        right = tl.load(b_t + c, mask=c < columns, other=0.0)
        total += left.to(tl.float32) * right.to(tl.float32)[None, :]
    tl.store(out + (member * n + j) * rank + r, tl.sum(total, 1), mask=j < n)


def thin_product(out: torch.Tensor, x: torch.Tensor, b_t: torch.Tensor, member_address: torch.Tensor) -> None:
    """Set out[i, j, r] to x[i, j] . b_t[member_address[i], r], for a rank so small that reading x is all the work.

    Args:
        out: x B, (members, n, rank), in float32 as are the sums.
        x: (members, n, columns).
        b_t: B transposed, (addresses, rank, columns).
        member_address: for each member the index of its noise in ``b_t``.
    """
    members, n, columns = x.shape
    tile_c = min(256, triton.next_power_of_2(columns))
    tile_n = 4096 // tile_c
    if out.numel():
        with torch.cuda.device_of(out):
            grid, sizes = (members * triton.cdiv(n, tile_n) * out.shape[2],), (n, columns, out.shape[2])
            _thin_product[grid](out, x, b_t, member_address, *sizes, TILE_N=tile_n, TILE_C=tile_c, num_warps=4)


@triton.jit
def _narrow_linear(
    out, x, x_b_in, a_in, bias_in, scales_in, weight_and_b, a, bias, scales, member_address,
    n, rows, columns, addresses,
    BLEND: tl.constexpr, SHARED: tl.constexpr, RELU_IN: tl.constexpr, RANK_IN: tl.constexpr, RELU: tl.constexpr,
    RANK: tl.constexpr, EVEN: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr, TILE_C: tl.constexpr,
):  # fmt: skip
    """Compute a tile of TILE_N examples of one member; with BLEND the inputs are blended as they are read."""
    tiles = tl.cdiv(n, TILE_N)
    program = tl.program_id(0).to(tl.int64)
    member, tile = program // tiles, program % tiles
    j, k = tile * TILE_N + tl.arange(0, TILE_N), tl.arange(0, TILE_K)
    address = tl.load(member_address + member)
    x += (j if SHARED else member * n + j)[:, None] * columns
    weight_and_b += (address * TILE_K + k[None, :]) * columns
    total = tl.zeros((TILE_N, TILE_K), tl.float32)
    for first in range(0, columns, TILE_C):
        c = first + tl.arange(0, TILE_C)
        mask = tl.full((TILE_C,), True, tl.int1) if EVEN else c < columns  # with a mask, loads are narrow and wait
        left = tl.load(x + c[None, :]) if EVEN else tl.load(x + c[None, :], (j < n)[:, None] & mask[None, :], 0.0)
        if BLEND:
            value = left.to(tl.float32)
            for r in tl.static_range(RANK_IN):
                column = (j * addresses + address if SHARED else member * n + j) * RANK_IN + r
                part = tl.load(x_b_in + column, mask=j < n, other=0.0).to(tl.float32) * tl.load(scales_in + member)
                right = tl.load(a_in + (address * RANK_IN + r) * columns + c, mask=mask, other=0.0)
                value += part[:, None] * right.to(tl.float32)[None, :]
            value += tl.load(bias_in + member * columns + c, mask=mask, other=0.0).to(tl.float32)[None, :]
            if RELU_IN:
                value = tl.where(value <= 0, 0.0, value)  # NaN stays NaN
            left = value.to(left.dtype)
        at = weight_and_b + c[:, None]
        right = tl.load(at) if EVEN else tl.load(at, mask=mask[:, None], other=0.0)
        total = tl.dot(left, right, total)
    result = total
    for r in tl.static_range(RANK):  # columns of the products with B follow those of the products with the weights
        x_b = tl.sum(tl.where(k[None, :] == rows + r, total, 0.0), 1) * tl.load(scales + member)
        factor = tl.load(a + (address * RANK + r) * rows + k, mask=k < rows, other=0.0)
        result += x_b[:, None] * factor.to(tl.float32)[None, :]
    result += tl.load(bias + member * rows + k, mask=k < rows, other=0.0).to(tl.float32)[None, :]
    if RELU:
        result = tl.where(result <= 0, 0.0, result)
    out_mask = (j < n)[:, None] & (k < rows)[None, :]
    tl.store(out + (member * n + j[:, None]) * rows + k[None, :], result, mask=out_mask)


def narrow_linear(
    out: torch.Tensor,
    inputs: tuple[torch.Tensor, ...],
    relu_inputs: bool,
    weight: torch.Tensor,
    a: torch.Tensor,
    b_t: torch.Tensor,
    bias: torch.Tensor,
    scales: torch.Tensor,
    member_address: torch.Tensor,
    relu: bool,
) -> None:
    """Set out[i] to x[i] (weight + scales[i] A B^T)^T + bias[i] for each member i, in one pass over x.

    All arrays are of one 16-bit type, except for the scales and the x_b of the inputs, which may be float32.

    Args:
        out: (members, n, rows), of few rows.
        inputs: x, (members, n, columns); or what ``blend_outer`` would compute x from: base, x_b, a, bias and scales.
        relu_inputs: whether a ReLU follows the blending of the inputs.
        weight: (rows, columns).
        a: A transposed, (addresses, rank, rows).
        b_t: B transposed, (addresses, rank, columns).
        bias: (members, rows).
        scales: (members,).
        member_address: for each member the index of its noise in ``a`` and ``b_t``.
        relu: whether a ReLU follows.
    """
    members, n, rows = out.shape
    x, x_b_in, a_in, bias_in, scales_in = inputs if len(inputs) > 1 else (*inputs, *inputs * 3, scales)
    blends, is_shared, rank = len(inputs) > 1, x.dim() == 2, a.shape[1]
    tile_k = max(16, triton.next_power_of_2(rows + rank))
    missing = -x.shape[-1] % NARROW_COLUMNS
    if missing and is_shared:  # columns of zeros are cheap, masks are not
        x, a_in, bias_in = (F.pad(part, (0, missing)) for part in (x, a_in, bias_in))
    columns = x.shape[-1]
    # weights and B side by side, so that inputs are read, and multiplied, once
    weight_and_b = torch.zeros(len(b_t), tile_k, columns, dtype=x.dtype, device=x.device)
    weight_and_b[:, :rows, : weight.shape[1]] = weight
    weight_and_b[:, rows : rows + rank, : weight.shape[1]] = b_t
    tile_n = 128 if n > 64 else 64
    is_even = columns % NARROW_COLUMNS == 0 and n % tile_n == 0
    options = {"BLEND": blends, "SHARED": is_shared, "RELU_IN": relu_inputs, "RANK_IN": a_in.shape[1] if blends else 1}
    options |= {"RELU": relu, "RANK": rank, "EVEN": is_even}
    options |= {"TILE_N": tile_n, "TILE_K": tile_k, "TILE_C": NARROW_COLUMNS}
    arrays = (out, x, x_b_in, a_in, bias_in, scales_in, weight_and_b, a, bias, scales, member_address)
    if out.numel():
        with torch.cuda.device_of(out):
            grid = (members * triton.cdiv(n, tile_n),)
            _narrow_linear[grid](*arrays, n, rows, columns, x_b_in.shape[1], **options, num_warps=4, num_stages=3)


@triton.jit
def _multiply_taps(
    out, x, b_taps, member_address, n, channels, pixels, taps, channel_stride, pixel_stride,
    EVEN: tl.constexpr, TAPS: tl.constexpr, CHANNELS: tl.constexpr, TILE_P: tl.constexpr,
):  # fmt: skip
    tiles = tl.cdiv(pixels, TILE_P)
    program = tl.program_id(0).to(tl.int64)
    image, p = program // tiles, program % tiles * TILE_P + tl.arange(0, TILE_P)
    k, c = tl.arange(0, TAPS), tl.arange(0, CHANNELS)
    b_taps += (tl.load(member_address + image // n) * taps + k[:, None]) * channels
    x += image * channels * pixels + p[None, :] * pixel_stride
    total = tl.zeros((TAPS, TILE_P), tl.float32)
    for first in range(0, channels, CHANNELS):
        channel = first + c
        channel_mask = channel < channels
        left = tl.load(b_taps + channel[None, :], mask=(k < taps)[:, None] & channel_mask[None, :], other=0.0)
        at = x + channel[:, None] * channel_stride
        mask = channel_mask[:, None] & (p < pixels)[None, :]
        right = tl.load(at) if EVEN else tl.load(at, mask=mask, other=0.0)
        total = tl.dot(left, right, total)
    offset = out + (image * taps + k[:, None]) * pixels + p[None, :]
    tl.store(offset, total, mask=(k < taps)[:, None] & (p < pixels)[None, :])


def map_strides(x: torch.Tensor) -> tuple[int, int]:
    """Return how far two channels, and two pixels, are apart in memory: x is (members, n, channels, height, width)."""
    if x.is_contiguous():
        return x.shape[3] * x.shape[4], 1
    assert x.movedim(2, -1).is_contiguous()
    return 1, x.shape[2]


def multiply_taps(x: torch.Tensor, b_taps: torch.Tensor, member_address: torch.Tensor) -> torch.Tensor:
    """Return sum over c of x[i, j, c, p] b_taps[member_address[i], k, c]: (members, n, taps, pixels)."""
    members, n, channels, height, width = x.shape
    taps, pixels = b_taps.shape[1], height * width
    out = torch.empty(members, n, taps, pixels, dtype=x.dtype, device=x.device)
    tile_p = min(256, max(16, triton.next_power_of_2(pixels)))
    tile_c = min(64, max(16, triton.next_power_of_2(channels)))
    if out.numel():
        with torch.cuda.device_of(out):
            grid = (members * n * triton.cdiv(pixels, tile_p),)
            options = {"TAPS": max(16, triton.next_power_of_2(taps)), "CHANNELS": tile_c, "TILE_P": tile_p}
            options |= {"EVEN": channels % tile_c == 0 and pixels % tile_p == 0, "num_warps": 4}
            sizes = (n, channels, pixels, taps, *map_strides(x))
            _multiply_taps[grid](out, x, b_taps.contiguous(), member_address, *sizes, **options)
    return out


@triton.jit
def _thin_convolution(
    out, x, b, member_address, n, channels, height, width, out_height, out_width, rank,
    stride_y, stride_x, padding_y, padding_x, dilation_y, dilation_x,
    channel_stride, pixel_stride,
    TAPS: tl.constexpr, KY: tl.constexpr, KX: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Convolve a tile of the positions of all examples of one member; with TAPS, x has one map per tap of a filter."""
    positions = out_height * out_width
    tiles = tl.cdiv(n * positions, TILE)
    program = tl.program_id(0).to(tl.int64)
    r, tile, member = program % rank, program // rank % tiles, program // rank // tiles
    q = tile * TILE + tl.arange(0, TILE)
    j, out_y, out_x = q // positions, q % positions // out_width, q % out_width
    b += (tl.load(member_address + member) * rank + r) * channels * KY * KX
    maps = ((member * n + j) * rank + r) * KY * KX if TAPS else (member * n + j) * channels
    x += maps * height * width
    total = tl.zeros((TILE,), tl.float32)
    for k in tl.static_range(KY * KX):
        row = out_y * stride_y + k // KX * dilation_y - padding_y
        column = out_x * stride_x + k % KX * dilation_x - padding_x
        mask = (j < n) & (row >= 0) & (row < height) & (column >= 0) & (column < width)
        at = x + (row * width + column) * pixel_stride
        if TAPS:
            total += tl.load(at + k * channel_stride, mask=mask, other=0.0).to(tl.float32)
        else:
            for c in range(channels):
                value, weight = tl.load(at, mask=mask, other=0.0), tl.load(b + c * KY * KX + k)
                total += value.to(tl.float32) * weight.to(tl.float32)
                at += channel_stride
    tl.store(out + ((member * n + j) * rank + r) * positions + q % positions, total, mask=j < n)


def thin_convolution(
    out: torch.Tensor,
    x: torch.Tensor,
    b: torch.Tensor,
    member_address: torch.Tensor,
    stride: tuple[int, int],
    padding: tuple[int, int],
    dilation: tuple[int, int],
) -> None:
    """Set out[i, j, r] to x[i, j] convolved with the filter b[member_address[i], r], of which there are few.

    Args:
        out: (members, n, rank, height, width); sums are in float32.
        x: (members, n, channels, height, width), with the channels before or after the pixels in memory.
        b: B as filters, (addresses, rank, channels, kernel height, kernel width).
        member_address: for each member the index of its noise in ``b``.
        stride: of the convolution, along height and width.
        padding: of the convolution, along height and width.
        dilation: of the convolution, along height and width.
    """
    members, n, channels, height, width = x.shape
    rank, out_height, out_width = out.shape[2:]
    uses_taps = channels >= TAPS_FROM and x.dtype != torch.float32
    if uses_taps:  # one map for each tap of a filter, in one pass over x; then the maps are shifted and added
        x = multiply_taps(x, b.flatten(3).transpose(2, 3).reshape(len(b), -1, channels), member_address)
    sizes = (n, channels, height, width, out_height, out_width, rank, *stride, *padding, *dilation)
    strides = (height * width, 1) if uses_taps else map_strides(x)
    if out.numel():
        with torch.cuda.device_of(out):
            grid = (members * rank * triton.cdiv(n * out_height * out_width, 256),)
            options = {"TAPS": uses_taps, "KY": b.shape[-2], "KX": b.shape[-1], "TILE": 256, "num_warps": 4}
            _thin_convolution[grid](out, x, b, member_address, *sizes, *strides, **options)
