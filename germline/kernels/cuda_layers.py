"""Layers of a block of members on CUDA, in Triton, around the large products, which are left to the vendor's library.

Shapes of tiles are fixed, not tuned at run time: they decide the order of sums.
"""

import torch
import triton
import triton.language as tl

WIDEST = 64  # rows of a narrow layer, with those of its noise


@triton.jit
def _blend(
    out, base, thin, thick, bias, scales, where, n, rows, positions, addresses,
    SHARED: tl.constexpr, RANK: tl.constexpr, RELU: tl.constexpr, MAPS: tl.constexpr,
    TALL: tl.constexpr, WIDE: tl.constexpr,
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
        column = (j * addresses + address if SHARED else member * n + j) * RANK + r
        if MAPS:
            left = tl.load(thin + column[:, None] * positions + p[None, :], mask=here, other=0.0)
        else:
            left = tl.load(thin + column, mask=j < n, other=0.0)[:, None]
        right = tl.load(thick + (address * RANK + r) * rows + k, mask=some, other=0.0)
        total += left.to(scale.dtype) * right.to(scale.dtype)[None, :]
    place = j[:, None] * wide + q[None, :]
    value = tl.load(base + (place if SHARED else member * n * wide + place), mask=here, other=0.0).to(scale.dtype)
    own = tl.load(bias + member * rows + k, mask=some, other=0.0).to(scale.dtype)
    value = value + own[None, :] + scale * total
    if RELU:
        value = tl.where(value <= 0, 0.0, value)  # NaN stays NaN
    tl.store(out + member * n * wide + place, value, mask=here)


def blend_outer(
    out: torch.Tensor,
    base: torch.Tensor,
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
    shared = base.dim() == 3
    widest, warps = (128, 1) if shared else (256, 4)
    tall, wide = 16, min(widest, triton.next_power_of_2(rows * positions))
    grid = (members * triton.cdiv(n, tall) * triton.cdiv(rows * positions, wide),)
    sizes = (n, rows, positions, thin.shape[1])
    options = {"SHARED": shared, "RANK": thin.shape[2], "RELU": relu, "MAPS": positions > 1, "TALL": tall, "WIDE": wide}
    if out.numel():
        with torch.cuda.device_of(out):
            _blend[grid](out, base, thin, thick, bias, scales, where, *sizes, **options, num_warps=warps)


@triton.jit
def _thin(out, x, b, where, n, columns, rank, TALL: tl.constexpr, DEEP: tl.constexpr):
    tiles = tl.cdiv(n, TALL)
    program = tl.program_id(0).to(tl.int64)
    r, tile = program % rank, program // rank
    member, j = tile // tiles, tile % tiles * TALL + tl.arange(0, TALL)
    x += (member * n + j[:, None]) * columns
    b += (tl.load(where + member) * rank + r) * columns
    total = tl.zeros((TALL, DEEP), tl.float32)
    for first in range(0, columns, DEEP):
        c = first + tl.arange(0, DEEP)
        left = tl.load(x + c[None, :], mask=(j < n)[:, None] & (c < columns)[None, :], other=0.0)
        right = tl.load(b + c, mask=c < columns, other=0.0)
        total += left.to(tl.float32) * right.to(tl.float32)[None, :]
    tl.store(out + (member * n + j) * rank + r, tl.sum(total, 1), mask=j < n)


def thin_product(out: torch.Tensor, x: torch.Tensor, b: torch.Tensor, where: torch.Tensor) -> None:
    """out[i, j, r] = x[i, j] . b[where[i], r], for a rank so small that reading x is all the work; sums in float32."""
    members, n, columns = x.shape
    deep = min(256, triton.next_power_of_2(columns))
    tall = 4096 // deep
    if out.numel():
        with torch.cuda.device_of(out):
            grid = (members * triton.cdiv(n, tall) * out.shape[2],)
            _thin[grid](out, x, b, where, n, columns, out.shape[2], TALL=tall, DEEP=deep, num_warps=4)


@triton.jit
def _narrow(
    out, x, thin, thick, bias_x, scales_x, both, a, bias, scales, where, n, rows, columns, addresses,
    MADE: tl.constexpr, SHARED: tl.constexpr, RELU_X: tl.constexpr, RANK_X: tl.constexpr, RELU: tl.constexpr,
    RANK: tl.constexpr, TALL: tl.constexpr, WIDE: tl.constexpr, DEEP: tl.constexpr,
):  # fmt: skip
    """A tile of TALL examples of one member; inputs are read or, where they are MADE, put together as they come."""
    tiles = tl.cdiv(n, TALL)
    program = tl.program_id(0).to(tl.int64)
    member, tile = program // tiles, program % tiles
    j, k = tile * TALL + tl.arange(0, TALL), tl.arange(0, WIDE)
    address = tl.load(where + member)
    x += (j if SHARED else member * n + j)[:, None] * columns
    both += (address * WIDE + k[None, :]) * columns
    total = tl.zeros((TALL, WIDE), tl.float32)
    for first in range(0, columns, DEEP):
        c = first + tl.arange(0, DEEP)
        inside = c < columns
        left = tl.load(x + c[None, :], mask=(j < n)[:, None] & inside[None, :], other=0.0)
        if MADE:
            value = left.to(tl.float32)
            for r in tl.static_range(RANK_X):
                column = (j * addresses + address if SHARED else member * n + j) * RANK_X + r
                part = tl.load(thin + column, mask=j < n, other=0.0).to(tl.float32) * tl.load(scales_x + member)
                right = tl.load(thick + (address * RANK_X + r) * columns + c, mask=inside, other=0.0)
                value += part[:, None] * right.to(tl.float32)[None, :]
            value += tl.load(bias_x + member * columns + c, mask=inside, other=0.0).to(tl.float32)[None, :]
            if RELU_X:
                value = tl.where(value <= 0, 0.0, value)  # NaN stays NaN
            left = value.to(left.dtype)
        total = tl.dot(left, tl.load(both + c[:, None], mask=inside[:, None], other=0.0), total)
    result = total
    for r in tl.static_range(RANK):  # the products with the noise stand beside those with the weights
        side = tl.sum(tl.where(k[None, :] == rows + r, total, 0.0), 1) * tl.load(scales + member)
        factor = tl.load(a + (address * RANK + r) * rows + k, mask=k < rows, other=0.0)
        result += side[:, None] * factor.to(tl.float32)[None, :]
    result += tl.load(bias + member * rows + k, mask=k < rows, other=0.0).to(tl.float32)[None, :]
    if RELU:
        result = tl.where(result <= 0, 0.0, result)
    here = (j < n)[:, None] & (k < rows)[None, :]
    tl.store(out + (member * n + j[:, None]) * rows + k[None, :], result, mask=here)


def narrow_linear(
    out: torch.Tensor,
    inputs: tuple[torch.Tensor, ...],
    relu_inputs: bool,
    weight: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor,
    scales: torch.Tensor,
    where: torch.Tensor,
    relu: bool,
) -> None:
    """out[i] = x[i] (weight + scales[i] A B^T)^T + bias[i] for each member i, then relu, where A, B are at where[i].

    ``inputs`` is x, (members, n, columns), or what ``blend_outer`` would make it of: base, thin, thick, bias and
    scales. ``a`` is (addresses, rank, rows), ``b`` (addresses, rank, columns); rows and ranks together fit in WIDEST.
    All in one 16-bit type but for the scales, and thin products of x, which may be in float32.
    """
    members, n, rows = out.shape
    x, thin, thick, bias_x, scales_x = inputs if len(inputs) > 1 else (*inputs, *inputs * 3, scales)
    made, shared, rank = len(inputs) > 1, x.dim() == 2, a.shape[1]
    wide = max(16, triton.next_power_of_2(rows + rank))
    # weights and noise side by side, so that inputs are read, and multiplied, once
    both = torch.zeros(len(b), wide, x.shape[-1], dtype=x.dtype, device=x.device)
    both[:, :rows] = weight
    both[:, rows : rows + rank] = b
    tall = 128 if n > 64 else 64
    options = {"MADE": made, "SHARED": shared, "RELU_X": relu_inputs, "RANK_X": thick.shape[1] if made else 1}
    options |= {"RELU": relu, "RANK": rank, "TALL": tall, "WIDE": wide, "DEEP": 32}
    arrays = (out, x, thin, thick, bias_x, scales_x, both, a, bias, scales, where)
    if out.numel():
        with torch.cuda.device_of(out):
            grid = (members * triton.cdiv(n, tall),)
            _narrow[grid](*arrays, n, rows, x.shape[-1], thin.shape[1], **options, num_warps=4, num_stages=3)
