"""Norms on CUDA, in Triton, each in as few passes over memory as there can be; sums are in float32."""

import torch
import triton
import triton.language as tl

ROWS_OF_A_PART, MOST_PARTS = 1024, 64  # of a member's rows, whose moments are computed by one program
TILE, WIDEST = 4096, 64  # elements that a program of batch norm holds, and channels of them at most


@triton.jit
def _layer_norm(out, x, weight, bias, n, columns, eps, TILE_N: tl.constexpr, TILE_C: tl.constexpr):
    """Normalize TILE_N rows of one member."""
    tiles = tl.cdiv(n, TILE_N)
    program = tl.program_id(0).to(tl.int64)
    member, j, c = program // tiles, program % tiles * TILE_N + tl.arange(0, TILE_N), tl.arange(0, TILE_C)
    c_mask = c < columns
    mask = (j < n)[:, None] & c_mask[None, :]
    offset = (member * n + j)[:, None] * columns + c[None, :]
    value = tl.load(x + offset, mask=mask, other=0.0).to(tl.float32)
    mean = tl.sum(value, 1) / columns
    value = tl.where(mask, value - mean[:, None], 0.0)
    value = value * tl.rsqrt(tl.sum(value * value, 1) / columns + eps)[:, None]
    scale = tl.load(weight + member * columns + c, mask=c_mask, other=0.0).to(tl.float32)
    shift = tl.load(bias + member * columns + c, mask=c_mask, other=0.0).to(tl.float32)
    tl.store(out + offset, value * scale[None, :] + shift[None, :], mask=mask)


def layer_norm(out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> None:
    """Normalize each row of x, (members, n, columns), then multiply by weight[i] and add bias[i]; in float32."""
    members, n, columns = x.shape
    tile_c = triton.next_power_of_2(columns)
    tile_n = max(1, 2048 // tile_c)
    if out.numel():
        with torch.cuda.device_of(out):
            grid = (members * triton.cdiv(n, tile_n),)
            _layer_norm[grid](out, x, weight, bias, n, columns, eps, TILE_N=tile_n, TILE_C=tile_c, num_warps=4)


@triton.jit
def _moments(means, squares, x, rows, columns, rows_of_part, TILE_R: tl.constexpr, TILE_C: tl.constexpr):
    """Write the means of some rows of a member, and the sums of their squared distances from these."""
    parts = tl.cdiv(rows, rows_of_part)
    program, c = tl.program_id(0).to(tl.int64), tl.program_id(1) * TILE_C + tl.arange(0, TILE_C)
    member, part = program // parts, program % parts
    first, last = part * rows_of_part, tl.minimum((part + 1) * rows_of_part, rows)
    c_mask = (c < columns)[None, :]
    r = first + tl.arange(0, TILE_R)
    x += member * rows * columns + c[None, :]
    total = tl.zeros((TILE_R, TILE_C), tl.float32)
    for step in range(0, tl.cdiv(rows_of_part, TILE_R)):
        j = r + step * TILE_R
        mask = (j < last)[:, None] & c_mask
        total += tl.load(x + j[:, None] * columns, mask=mask, other=0.0).to(tl.float32)
    mean = tl.sum(total, 0) / (last - first)
    total = tl.zeros((TILE_R, TILE_C), tl.float32)
    for step in range(0, tl.cdiv(rows_of_part, TILE_R)):
        j = r + step * TILE_R
        mask = (j < last)[:, None] & c_mask
        value = tl.load(x + j[:, None] * columns, mask=mask, other=0.0).to(tl.float32)
        value = tl.where(mask, value - mean[None, :], 0.0)
        total += value * value
    tl.store(means + program * columns + c, mean, mask=c < columns)
    tl.store(squares + program * columns + c, tl.sum(total, 0), mask=c < columns)


@triton.jit
def _scale(out, x, mean, scale, shift, rows, columns, TILE_R: tl.constexpr, TILE_C: tl.constexpr):
    """Write (x - mean) * scale + shift of some rows of a member, whose columns have their own numbers."""
    tiles = tl.cdiv(rows, TILE_R)
    program, c = tl.program_id(0).to(tl.int64), tl.program_id(1) * TILE_C + tl.arange(0, TILE_C)
    member, j = program // tiles, program % tiles * TILE_R + tl.arange(0, TILE_R)
    c_mask = c < columns
    mask = (j < rows)[:, None] & c_mask[None, :]
    offset = (member * rows + j)[:, None] * columns + c[None, :]
    value = tl.load(x + offset, mask=mask, other=0.0).to(tl.float32)
    center = tl.load(mean + member * columns + c, mask=c_mask, other=0.0)
    factor = tl.load(scale + member * columns + c, mask=c_mask, other=0.0)
    term = tl.load(shift + member * columns + c, mask=c_mask, other=0.0)
    tl.store(out + offset, (value - center[None, :]) * factor[None, :] + term[None, :], mask=mask)


def moments(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the mean and the variance of each column of a member's rows, (members, columns), in float32.

    Args:
        x: (members, rows, columns), contiguous. In which parts rows are added does not depend on the number of members.
    """
    members, rows, columns = x.shape
    parts = min(triton.cdiv(rows, ROWS_OF_A_PART), MOST_PARTS)
    rows_of_part = triton.cdiv(rows, parts)
    parts = triton.cdiv(rows, rows_of_part)
    means, squares = (x.new_empty(members, parts, columns, dtype=torch.float32) for _ in range(2))
    tile_r, tile_c = _tile(columns)
    with torch.cuda.device_of(x):
        grid = (members * parts, triton.cdiv(columns, tile_c))
        _moments[grid](means, squares, x, rows, columns, rows_of_part, TILE_R=tile_r, TILE_C=tile_c, num_warps=4)
    if parts == 1:
        return means[:, 0], squares[:, 0] / rows
    sizes = torch.full((parts, 1), float(rows_of_part), dtype=torch.float32, device=x.device)
    sizes[-1] = rows - rows_of_part * (parts - 1)
    mean = (means * sizes).sum(1) / rows
    return mean, (squares + sizes * (means - mean[:, None]).square()).sum(1) / rows


def scale_columns(x: torch.Tensor, mean: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
    """Return (x - mean) * scale + shift, in the type of x.

    Args:
        x: (members, rows, columns), contiguous.
        mean: (members, columns), like the others; they are computed with in float32.
        scale: what a column is multiplied by.
        shift: what is added to it.
    """
    (members, rows, columns), out = x.shape, torch.empty_like(x)
    tile_r, tile_c = _tile(columns)
    numbers = [part.to(torch.float32).expand(members, columns).contiguous() for part in (mean, scale, shift)]
    with torch.cuda.device_of(x):
        grid = (members * triton.cdiv(rows, tile_r), triton.cdiv(columns, tile_c))
        _scale[grid](out, x, *numbers, rows, columns, TILE_R=tile_r, TILE_C=tile_c, num_warps=4)
    return out


def _tile(columns: int) -> tuple[int, int]:
    """Return the rows and the columns that a program holds at once."""
    tile_c = min(triton.next_power_of_2(columns), WIDEST)
    return TILE // tile_c, tile_c
