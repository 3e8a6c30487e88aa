"""Attention of short sequences on CUDA, in Triton: torch's kernels are made for long ones.

One program computes one head of a sequence, whose scores stay on the chip.
"""

import torch
import triton
import triton.language as tl

LONGEST, WIDEST = 128, 128  # tokens of a sequence, and elements of a head, that fit on the chip
LONGEST_FLOAT32 = 32  # tokens in float32, whose products are computed in registers


@triton.jit
def _load_head(x, sequence, head, t, c, mask, sequence_stride, head_stride, token_stride):
    x += sequence * sequence_stride + head * head_stride
    return tl.load(x + t[:, None] * token_stride + c[None, :], mask=mask, other=0.0)


@triton.jit
def _attend(
    out, query, key, value, heads, shared_by, length, width, scale,
    q0, q1, q2, k0, k1, k2, v0, v1, v2,
    CAUSAL: tl.constexpr, LENGTH: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    sequence, head = program // heads, program % heads
    t, c = tl.arange(0, LENGTH), tl.arange(0, WIDTH)
    mask = (t < length)[:, None] & (c < width)[None, :]
    queries = _load_head(query, sequence, head, t, c, mask, q0, q1, q2)
    keys = _load_head(key, sequence, head // shared_by, t, c, mask, k0, k1, k2)
    values = _load_head(value, sequence, head // shared_by, t, c, mask, v0, v1, v2)
    scores = tl.dot(queries, tl.trans(keys), input_precision="ieee") * scale
    is_seen = (t < length)[None, :]
    if CAUSAL:
        is_seen = is_seen & (t[None, :] <= t[:, None])
    scores = tl.where(is_seen, scores, float("-inf"))
    weights = tl.exp(scores - tl.max(scores, 1)[:, None])
    total = tl.dot(weights.to(values.dtype), values, input_precision="ieee") / tl.sum(weights, 1)[:, None]
    at = ((sequence * length + t[:, None]) * heads + head) * width + c[None, :]
    tl.store(out + at, total, mask=mask)


def fits_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> bool:
    """Return whether ``attend`` computes such tensors, (sequences, heads, tokens, width)."""
    length, width = query.shape[-2:]
    longest = {torch.float32: LONGEST_FLOAT32, torch.float64: 0}.get(query.dtype, LONGEST)
    is_short = 0 < length <= longest and 0 < width <= WIDEST
    is_alike = key.shape == value.shape and key.shape[-2:] == (length, width)
    return is_short and is_alike and key.shape[-3] > 0 and query.shape[-3] % key.shape[-3] == 0


def attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, is_causal: bool = False, scale: float | None = None
) -> torch.Tensor:
    """Return ``F.scaled_dot_product_attention`` of short sequences; sums are in float32.

    Args:
        query: (sequences, heads, tokens, width), in any order in memory.
        key: the same, with as many heads or a part of them, which queries share.
        value: like ``key``.
        is_causal: whether tokens attend only to those before them and to themselves.
        scale: what the products of queries and keys are multiplied by; 1 / sqrt(width) if None.
    """
    sequences, heads, length, width = query.shape
    out = query.new_empty(sequences, length, heads, width)
    rows = [x if x.stride(3) == 1 else x.contiguous() for x in (query, key, value)]
    strides = [stride for x in rows for stride in x.stride()[:3]]
    tile_t, tile_c = (max(16, triton.next_power_of_2(size)) for size in (length, width))
    warps = 1 if tile_t * max(tile_t, tile_c) <= 1024 else 4 if tile_t * max(tile_t, tile_c) <= 8192 else 8
    sizes = (heads, heads // key.shape[1], length, width, width**-0.5 if scale is None else scale)
    if out.numel():
        with torch.cuda.device_of(out):
            options = {"CAUSAL": is_causal, "LENGTH": tile_t, "WIDTH": tile_c, "num_warps": warps}
            _attend[(sequences * heads,)](out, *rows, *sizes, *strides, **options)
    return out.transpose(1, 2)
