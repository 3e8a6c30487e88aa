"""Layers of a block of members on CUDA, in Triton, around the large products, which are left to the vendor's library.

Shapes of tiles are fixed, not tuned at run time: they decide the order of sums.
"""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

MANY = 8  # channels from which on a thin convolution reads them once
DEEP = 32  # columns of a narrow layer that are multiplied at once


@triton.jit
def _blend(
    out, base, thin, thick, bias, scales, where, n, rows, positions, addresses,
    SHARED: tl.constexpr, RANK: tl.constexpr, WHOLE: tl.constexpr, RELU: tl.constexpr, MAPS: tl.constexpr,
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
    if WHOLE:
        left = tl.load(thin + (j * addresses + address)[:, None] * wide + q[None, :], mask=here, other=0.0)
        total += left.to(scale.dtype)
    place = j[:, None] * wide + q[None, :]
    value = tl.load(base + (place if SHARED else member * n * wide + place), mask=here, other=0.0).to(scale.dtype)
    own = tl.load(bias + member * rows + k, mask=some, other=0.0).to(scale.dtype)
    value = value + own[None, :] + scale * total
    if RELU:
        value = tl.where(value <= 0, 0.0, value)  # NaN stays NaN
    tl.store(out + member * n * wide + place, value, mask=here)


@triton.jit
def _blend_pooled(
    out, base, thin, thick, bias, scales, where, n, rows, positions, addresses,
    pixels, wide_map, wide_out, down, across,
    SHARED: tl.constexpr, RANK: tl.constexpr, WHOLE: tl.constexpr, RELU: tl.constexpr,
    KY: tl.constexpr, KX: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """A tile of the positions of all examples of one member, in each of its rows; one thread an output."""
    tiles = tl.cdiv(n * positions, TILE)
    program = tl.program_id(0).to(tl.int64)
    member, q = program // tiles, program % tiles * TILE + tl.arange(0, TILE)
    j, p = q // positions, q % positions
    first = p // wide_out * down * wide_map + p % wide_out * across  # the corner of the window
    address, scale = tl.load(where + member), tl.load(scales + member)
    own, line = (j if SHARED else member * n + j), (j * addresses + address if SHARED else member * n + j)
    base += own * rows * pixels + first
    thin += line * (rows if WHOLE else RANK) * pixels + first
    out += (member * n + j) * rows * positions + p
    for k in range(rows):
        shift = tl.load(bias + member * rows + k).to(scale.dtype)
        best = tl.zeros((TILE,), scale.dtype)
        for i in tl.static_range(KY * KX):
            at = i // KX * wide_map + i % KX
            total = tl.zeros((TILE,), scale.dtype)
            for r in tl.static_range(RANK):
                left = tl.load(thin + r * pixels + at, mask=j < n, other=0.0)
                total += left.to(scale.dtype) * tl.load(thick + (address * RANK + r) * rows + k).to(scale.dtype)
            if WHOLE:
                total += tl.load(thin + k * pixels + at, mask=j < n, other=0.0).to(scale.dtype)
            value = tl.load(base + at, mask=j < n, other=0.0).to(scale.dtype) + shift + scale * total
            best = value if i == 0 else tl.maximum(best, value, propagate_nan=tl.PropagateNan.ALL)
        if RELU:
            best = tl.where(best <= 0, 0.0, best)
        tl.store(out, best, mask=j < n)
        base += pixels
        out += positions


def blend_outer(
    out: torch.Tensor,
    base: torch.Tensor,
    thin: torch.Tensor | None,
    thick: torch.Tensor | None,
    bias: torch.Tensor,
    scales: torch.Tensor,
    where: torch.Tensor,
    relu: bool,
    window: tuple[int, ...] | None = None,
) -> None:
    """As ``reference.blend_outer``; the arithmetic is in the type of the scales.

    Without ``thick``, ``thin`` is the whole of what noise adds, (n, addresses, rows, positions); without both there is
    nothing to add but the bias.
    """
    members, n, rows, positions = out.shape
    shared, rank, whole = base.dim() == 3, 0 if thick is None else thick.shape[1], thin is not None and thick is None
    thin, thick = base if thin is None else thin, base if thick is None else thick
    arrays, sizes = (out, base, thin, thick, bias, scales, where), (n, rows, positions, thin.shape[1])
    options = {"SHARED": shared, "RANK": rank, "WHOLE": whole, "RELU": relu}
    if not out.numel():
        return
    with torch.cuda.device_of(out):
        if window is not None:
            _, wide, ky, kx, down, across = window
            map_sizes = (base.shape[-1], wide, (wide - kx) // across + 1, down, across)
            grid = (members * triton.cdiv(n * positions, 128),)
            _blend_pooled[grid](*arrays, *sizes, *map_sizes, **options, KY=ky, KX=kx, TILE=128, num_warps=4)
            return
        widest, warps = (128, 1) if shared else (256, 4)
        tall, wide = 16, min(widest, triton.next_power_of_2(rows * positions))
        grid = (members * triton.cdiv(n, tall) * triton.cdiv(rows * positions, wide),)
        _blend[grid](*arrays, *sizes, **options, MAPS=positions > 1, TALL=tall, WIDE=wide, num_warps=warps)


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
    RANK: tl.constexpr, EVEN: tl.constexpr, TALL: tl.constexpr, WIDE: tl.constexpr, DEEP: tl.constexpr,
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
        inside = tl.full((DEEP,), True, tl.int1) if EVEN else c < columns  # with a mask, loads are narrow and wait
        left = tl.load(x + c[None, :]) if EVEN else tl.load(x + c[None, :], (j < n)[:, None] & inside[None, :], 0.0)
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
        right = tl.load(both + c[:, None]) if EVEN else tl.load(both + c[:, None], mask=inside[:, None], other=0.0)
        total = tl.dot(left, right, total)
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
    scales. ``a`` is (addresses, rank, rows), ``b`` (addresses, rank, columns); there are few rows and ranks.
    All in one 16-bit type but for the scales, and thin products of x, which may be in float32.
    """
    members, n, rows = out.shape
    x, thin, thick, bias_x, scales_x = inputs if len(inputs) > 1 else (*inputs, *inputs * 3, scales)
    made, shared, rank = len(inputs) > 1, x.dim() == 2, a.shape[1]
    wide = max(16, triton.next_power_of_2(rows + rank))
    missing = -x.shape[-1] % DEEP
    if missing and shared:  # columns of zeros are cheap, masks are not
        x, thick, bias_x = (F.pad(part, (0, missing)) for part in (x, thick, bias_x))
    columns = x.shape[-1]
    # weights and noise side by side, so that inputs are read, and multiplied, once
    both = torch.zeros(len(b), wide, columns, dtype=x.dtype, device=x.device)
    both[:, :rows, : weight.shape[1]] = weight
    both[:, rows : rows + rank, : weight.shape[1]] = b
    tall = 128 if n > 64 else 64
    options = {"MADE": made, "SHARED": shared, "RELU_X": relu_inputs, "RANK_X": thick.shape[1] if made else 1}
    even = columns % DEEP == 0 and n % tall == 0
    options |= {"RELU": relu, "RANK": rank, "EVEN": even, "TALL": tall, "WIDE": wide, "DEEP": DEEP}
    arrays = (out, x, thin, thick, bias_x, scales_x, both, a, bias, scales, where)
    if out.numel():
        with torch.cuda.device_of(out):
            grid = (members * triton.cdiv(n, tall),)
            _narrow[grid](*arrays, n, rows, columns, thin.shape[1], **options, num_warps=4, num_stages=3)


@triton.jit
def _tap(
    out, x, b, where, n, channels, pixels, taps,
    EVEN: tl.constexpr, TAPS: tl.constexpr, CHANNELS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    tiles = tl.cdiv(pixels, WIDE)
    program = tl.program_id(0).to(tl.int64)
    image, p = program // tiles, program % tiles * WIDE + tl.arange(0, WIDE)
    k, c = tl.arange(0, TAPS), tl.arange(0, CHANNELS)
    b += (tl.load(where + image // n) * taps + k[:, None]) * channels
    x += image * channels * pixels + p[None, :]
    total = tl.zeros((TAPS, WIDE), tl.float32)
    for first in range(0, channels, CHANNELS):
        some = first + c
        left = tl.load(b + some[None, :], mask=(k < taps)[:, None] & (some < channels)[None, :], other=0.0)
        at = x + some[:, None] * pixels
        inside = (some < channels)[:, None] & (p < pixels)[None, :]
        right = tl.load(at) if EVEN else tl.load(at, mask=inside, other=0.0)
        total = tl.dot(left, right, total)
    place = out + (image * taps + k[:, None]) * pixels + p[None, :]
    tl.store(place, total, mask=(k < taps)[:, None] & (p < pixels)[None, :])


def tapped(x: torch.Tensor, b: torch.Tensor, where: torch.Tensor) -> torch.Tensor:
    """out[i, j, k, p] = sum over c of x[i, j, c, p] b[where[i], k, c]: (members, n, taps, pixels)."""
    members, n, channels, high, wide = x.shape
    taps, pixels = b.shape[1], high * wide
    out = torch.empty(members, n, taps, pixels, dtype=x.dtype, device=x.device)
    tile, block = min(256, max(16, triton.next_power_of_2(pixels))), min(64, max(16, triton.next_power_of_2(channels)))
    if out.numel():
        with torch.cuda.device_of(out):
            grid = (members * n * triton.cdiv(pixels, tile),)
            options = {"TAPS": max(16, triton.next_power_of_2(taps)), "CHANNELS": block, "WIDE": tile}
            options |= {"EVEN": channels % block == 0 and pixels % tile == 0, "num_warps": 4}
            _tap[grid](out, x, b.contiguous(), where, n, channels, pixels, taps, **options)
    return out


@triton.jit
def _thin_convolution(
    out, x, b, where, n, channels, high, wide, out_high, out_wide, rank, down, across, top, left, apart_y, apart_x,
    TAPS: tl.constexpr, KY: tl.constexpr, KX: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """A tile of the positions of all examples of one member; of TAPS, each place of a filter has a map of its own."""
    positions = out_high * out_wide
    tiles = tl.cdiv(n * positions, TILE)
    program = tl.program_id(0).to(tl.int64)
    r, tile, member = program % rank, program // rank % tiles, program // rank // tiles
    q = tile * TILE + tl.arange(0, TILE)
    j, y, z = q // positions, q % positions // out_wide, q % out_wide
    b += (tl.load(where + member) * rank + r) * channels * KY * KX
    x += ((member * n + j) * rank + r) * KY * KX * high * wide if TAPS else (member * n + j) * channels * high * wide
    total = tl.zeros((TILE,), tl.float32)
    for k in tl.static_range(KY * KX):
        row, column = y * down + k // KX * apart_y - top, z * across + k % KX * apart_x - left
        inside = (j < n) & (row >= 0) & (row < high) & (column >= 0) & (column < wide)
        at = x + row * wide + column
        if TAPS:
            total += tl.load(at + k * high * wide, mask=inside, other=0.0).to(tl.float32)
        else:
            for c in range(channels):
                value, weight = tl.load(at, mask=inside, other=0.0), tl.load(b + c * KY * KX + k)
                total += value.to(tl.float32) * weight.to(tl.float32)
                at += high * wide
    tl.store(out + ((member * n + j) * rank + r) * positions + q % positions, total, mask=j < n)


def thin_convolution(
    out: torch.Tensor,
    x: torch.Tensor,
    b: torch.Tensor,
    where: torch.Tensor,
    stride: tuple[int, int],
    padding: tuple[int, int],
    dilation: tuple[int, int],
) -> None:
    """out[i, j, r] = x[i, j] convolved with b[where[i], r], of few filters: (m, n, r, h, w); sums in float32."""
    members, n, channels, high, wide = x.shape
    rank, out_high, out_wide = out.shape[2:]
    many = channels >= MANY and x.dtype != torch.float32
    if many:  # each place of the filter by itself, in one pass over x; then the maps are shifted and added
        x = tapped(x, b.flatten(3).transpose(2, 3).reshape(len(b), -1, channels), where)
    sizes = (n, channels, high, wide, out_high, out_wide, rank, *stride, *padding, *dilation)
    if out.numel():
        with torch.cuda.device_of(out):
            grid = (members * rank * triton.cdiv(n * out_high * out_wide, 256),)
            options = {"TAPS": many, "KY": b.shape[-2], "KX": b.shape[-1], "TILE": 256, "num_warps": 4}
            _thin_convolution[grid](out, x, b, where, *sizes, **options)


@triton.jit
def _tanh(x):
    return 2 * tl.sigmoid(2 * x) - 1


@triton.jit
def _gate(
    GATE: tl.constexpr, h, weight, sides, a, bias, x, weight_x, member, address, at, j, k, n, hidden,
    INPUTS: tl.constexpr,
):  # fmt: skip
    """What one gate gets: from the state before, by the weights and the noise beside them, and from the input."""
    q, inside = GATE * hidden + k, k < hidden
    factor = tl.load(a + address * 4 * hidden + q, mask=inside, other=0.0).to(tl.float32)
    total = tl.dot(h, weight) + sides[:, None] * factor[None, :]
    total += tl.load(bias + member * 4 * hidden + q, mask=inside, other=0.0)[None, :]
    if INPUTS > 0:
        for i in tl.static_range(INPUTS):
            left = tl.load(x + at * INPUTS + i, mask=j < n, other=0.0).to(tl.float32)
            right = tl.load(weight_x + (member * 4 * hidden + q) * INPUTS + i, mask=inside, other=0.0).to(tl.float32)
            total += left[:, None] * right[None, :]
    else:
        here = (j < n)[:, None] & inside[None, :]
        total += tl.load(x + at[:, None] * 4 * hidden + q[None, :], mask=here, other=0.0).to(tl.float32)
    return total


@triton.jit
def _lstm(
    out, last_h, last_c, first_h, first_c, weight, a, b, bias, scales, where, x, weight_x,
    n, steps, hidden, per_example, per_step,
    BEGUN: tl.constexpr, INPUTS: tl.constexpr, SHARED: tl.constexpr, HIDDEN: tl.constexpr, TALL: tl.constexpr,
):  # fmt: skip
    """All steps of TALL examples of one member: its state never is in memory."""
    tiles = tl.cdiv(n, TALL)
    program = tl.program_id(0).to(tl.int64)
    member = program // tiles
    j, k = program % tiles * TALL + tl.arange(0, TALL), tl.arange(0, HIDDEN)
    address, scale, inside = tl.load(where + member), tl.load(scales + member), k < hidden
    square = inside[None, :] & inside[:, None]
    weight += k[None, :] * hidden + k[:, None]
    w0 = tl.load(weight, mask=square, other=0.0)
    w1 = tl.load(weight + hidden * hidden, mask=square, other=0.0)
    w2 = tl.load(weight + 2 * hidden * hidden, mask=square, other=0.0)
    w3 = tl.load(weight + 3 * hidden * hidden, mask=square, other=0.0)
    across = tl.load(b + address * hidden + k, mask=inside, other=0.0).to(tl.float32)
    here = (j < n)[:, None] & inside[None, :]
    state = (member * n + j)[:, None] * hidden + k[None, :]
    h, c = tl.zeros((TALL, HIDDEN), w0.dtype), tl.zeros((TALL, HIDDEN), tl.float32)
    if BEGUN:
        h = tl.load(first_h + state, mask=here, other=0.0)
        c = tl.load(first_c + state, mask=here, other=0.0).to(tl.float32)
    for t in range(steps):
        row = j * per_example + t * per_step
        own = member * n * steps + row
        at = row if SHARED else own
        sides = tl.sum(h.to(tl.float32) * across[None, :], 1) * scale
        i = _gate(0, h, w0, sides, a, bias, x, weight_x, member, address, at, j, k, n, hidden, INPUTS)
        f = _gate(1, h, w1, sides, a, bias, x, weight_x, member, address, at, j, k, n, hidden, INPUTS)
        g = _gate(2, h, w2, sides, a, bias, x, weight_x, member, address, at, j, k, n, hidden, INPUTS)
        o = _gate(3, h, w3, sides, a, bias, x, weight_x, member, address, at, j, k, n, hidden, INPUTS)
        c = tl.sigmoid(f) * c + tl.sigmoid(i) * _tanh(g)
        h = (tl.sigmoid(o) * _tanh(c)).to(h.dtype)
        tl.store(out + own[:, None] * hidden + k[None, :], h, mask=here)
    tl.store(last_h + state, h, mask=here)
    tl.store(last_c + state, c, mask=here)


def lstm(
    out: torch.Tensor,
    last: tuple[torch.Tensor, torch.Tensor],
    first: tuple[torch.Tensor, torch.Tensor] | None,
    weight: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor,
    scales: torch.Tensor,
    where: torch.Tensor,
    x: torch.Tensor,
    weight_x: torch.Tensor | None,
    examples_first: bool,
) -> None:
    """A recurrent layer of each member, whose weights from state to state have noise of rank 1: a, b by address.

    ``out`` is (members, examples, steps, hidden) or (members, steps, examples, hidden); states are (members, examples,
    hidden). ``x`` is the input in the same order, (members, ..., few) or (..., few) if it is the same for all, with the
    members' weights for it, (members, 4 hidden, few); or, without such weights, what they have made of it.
    """
    members, hidden = out.shape[0], out.shape[3]
    n, steps = (out.shape[1], out.shape[2]) if examples_first else (out.shape[2], out.shape[1])
    strides = (steps, 1) if examples_first else (1, n)
    arrays = (out, *last, *(first or last), weight, a, b, bias, scales, where, x, x if weight_x is None else weight_x)
    options = {"BEGUN": first is not None, "INPUTS": 0 if weight_x is None else x.shape[-1], "SHARED": x.dim() == 3}
    options |= {"HIDDEN": max(16, triton.next_power_of_2(hidden)), "TALL": 64}
    if out.numel():
        with torch.cuda.device_of(out):
            grid, warps = (members * triton.cdiv(n, 64),), 4 if hidden <= 64 else 8
            _lstm[grid](*arrays, n, steps, hidden, *strides, **options, num_warps=warps)


@triton.jit
def _layer_norm(out, x, weight, bias, n, columns, eps, TALL: tl.constexpr, WIDE: tl.constexpr):
    """TALL rows of one member."""
    tiles = tl.cdiv(n, TALL)
    program = tl.program_id(0).to(tl.int64)
    member, j, k = program // tiles, program % tiles * TALL + tl.arange(0, TALL), tl.arange(0, WIDE)
    inside = k < columns
    here = (j < n)[:, None] & inside[None, :]
    place = (member * n + j)[:, None] * columns + k[None, :]
    value = tl.load(x + place, mask=here, other=0.0).to(tl.float32)
    mean = tl.sum(value, 1) / columns
    value = tl.where(here, value - mean[:, None], 0.0)
    value = value * tl.rsqrt(tl.sum(value * value, 1) / columns + eps)[:, None]
    scale = tl.load(weight + member * columns + k, mask=inside, other=0.0).to(tl.float32)
    shift = tl.load(bias + member * columns + k, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + place, value * scale[None, :] + shift[None, :], mask=here)


def layer_norm(out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> None:
    """Rows of x, (members, n, columns), each with mean 0 and variance 1, times weight_i, plus bias_i; in float32."""
    members, n, columns = x.shape
    wide = triton.next_power_of_2(columns)
    tall = max(1, 2048 // wide)
    if out.numel():
        with torch.cuda.device_of(out):
            grid = (members * triton.cdiv(n, tall),)
            _layer_norm[grid](out, x, weight, bias, n, columns, eps, TALL=tall, WIDE=wide, num_warps=4)
