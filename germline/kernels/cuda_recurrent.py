"""LSTM layers of a block of members on CUDA, in Triton; names are those of ``cuda_layers``."""

import torch
import triton
import triton.language as tl


@triton.jit
def _tanh(x):
    return 2 * tl.sigmoid(2 * x) - 1


@triton.jit
def _gate(
    GATE: tl.constexpr, h, weight, h_b, a, bias, x, weight_x, member, address, at, j, k, n, hidden,
    INPUTS: tl.constexpr, NOISE: tl.constexpr,
):  # fmt: skip
    """Return the sums of one gate: from the last state, by the weights and their noise, and from the input."""
    q, k_mask = GATE * hidden + k, k < hidden
    total = tl.dot(h, weight)
    if NOISE:
        factor = tl.load(a + address * 4 * hidden + q, mask=k_mask, other=0.0).to(tl.float32)
        total += h_b[:, None] * factor[None, :]
    total += tl.load(bias + member * 4 * hidden + q, mask=k_mask, other=0.0)[None, :]
    if INPUTS > 0:
        for i in tl.static_range(INPUTS):
            left = tl.load(x + at * INPUTS + i, mask=j < n, other=0.0).to(tl.float32)
            right = tl.load(weight_x + (member * 4 * hidden + q) * INPUTS + i, mask=k_mask, other=0.0).to(tl.float32)
            total += left[:, None] * right[None, :]
    else:
        mask = (j < n)[:, None] & k_mask[None, :]
        total += tl.load(x + at[:, None] * 4 * hidden + q[None, :], mask=mask, other=0.0).to(tl.float32)
    return total


@triton.jit
def _lstm(
    out, last_h, last_c, first_h, first_c, weight, a, b, bias, scales, member_address, x, weight_x,
    n, steps, hidden, example_stride, step_stride,
    HAS_STATE: tl.constexpr, INPUTS: tl.constexpr, SHARED: tl.constexpr, NOISE: tl.constexpr,
    HIDDEN: tl.constexpr, TILE_N: tl.constexpr,
):  # fmt: skip
    """Compute all steps of TILE_N examples of one member; its state stays on the chip.

    Without NOISE the weights are those of each member; with it, those of the center, to which noise of rank 1 is added.
    """
    tiles = tl.cdiv(n, TILE_N)
    program = tl.program_id(0).to(tl.int64)
    member = program // tiles
    j, k = program % tiles * TILE_N + tl.arange(0, TILE_N), tl.arange(0, HIDDEN)
    address, scale, k_mask = tl.load(member_address + member), tl.load(scales + member), k < hidden
    square = k_mask[None, :] & k_mask[:, None]
    weight += (0 if NOISE else member * 4 * hidden * hidden) + k[None, :] * hidden + k[:, None]
    w0 = tl.load(weight, mask=square, other=0.0)
    w1 = tl.load(weight + hidden * hidden, mask=square, other=0.0)
    w2 = tl.load(weight + 2 * hidden * hidden, mask=square, other=0.0)
    w3 = tl.load(weight + 3 * hidden * hidden, mask=square, other=0.0)
    b_row = tl.zeros((HIDDEN,), tl.float32)
    if NOISE:
        b_row = tl.load(b + address * hidden + k, mask=k_mask, other=0.0).to(tl.float32)
    mask = (j < n)[:, None] & k_mask[None, :]
    state = (member * n + j)[:, None] * hidden + k[None, :]
    h, c = tl.zeros((TILE_N, HIDDEN), w0.dtype), tl.zeros((TILE_N, HIDDEN), tl.float32)
    if HAS_STATE:
        h = tl.load(first_h + state, mask=mask, other=0.0)
        c = tl.load(first_c + state, mask=mask, other=0.0).to(tl.float32)
    for t in range(steps):
        row = j * example_stride + t * step_stride
        member_row = member * n * steps + row
        at = row if SHARED else member_row
        h_b = tl.sum(h.to(tl.float32) * b_row[None, :], 1) * scale if NOISE else scale
        i = _gate(0, h, w0, h_b, a, bias, x, weight_x, member, address, at, j, k, n, hidden, INPUTS, NOISE)
        f = _gate(1, h, w1, h_b, a, bias, x, weight_x, member, address, at, j, k, n, hidden, INPUTS, NOISE)
        g = _gate(2, h, w2, h_b, a, bias, x, weight_x, member, address, at, j, k, n, hidden, INPUTS, NOISE)
        o = _gate(3, h, w3, h_b, a, bias, x, weight_x, member, address, at, j, k, n, hidden, INPUTS, NOISE)
        c = tl.sigmoid(f) * c + tl.sigmoid(i) * _tanh(g)
        h = (tl.sigmoid(o) * _tanh(c)).to(h.dtype)
        tl.store(out + member_row[:, None] * hidden + k[None, :], h, mask=mask)
    tl.store(last_h + state, h, mask=mask)
    tl.store(last_c + state, c, mask=mask)


def lstm(
    out: torch.Tensor,
    last: tuple[torch.Tensor, torch.Tensor],
    first: tuple[torch.Tensor, torch.Tensor] | None,
    weight: torch.Tensor,
    a: torch.Tensor | None,
    b: torch.Tensor | None,
    bias: torch.Tensor,
    scales: torch.Tensor,
    member_address: torch.Tensor,
    x: torch.Tensor,
    weight_x: torch.Tensor | None,
    examples_first: bool,
) -> None:
    """Run an LSTM layer of each member, whose recurrent weights are its own, or have noise of rank 1.

    Args:
        out: (members, examples, steps, hidden) or (members, steps, examples, hidden).
        last: the states h and c after the last step, to be written: each (members, examples, hidden).
        first: the states before the first step, or None for zeros.
        weight: the recurrent weights of the center, (4 hidden, hidden); without ``a`` and ``b`` those of each member,
            (members, 4 hidden, hidden).
        a: A, (addresses, 4 hidden).
        b: B, (addresses, hidden).
        bias: (members, 4 hidden).
        scales: (members,).
        member_address: for each member the index of its noise in ``a`` and ``b``.
        x: the inputs, in the order of ``out``, (members, ..., inputs), or (..., inputs) if all members have the same;
            without ``weight_x``, their products with the input weights, (members, ..., 4 hidden).
        weight_x: the input weights of each member, (members, 4 hidden, inputs), for few inputs.
        examples_first: whether examples come before steps in ``out`` and ``x``.
    """
    members, hidden = out.shape[0], out.shape[3]
    n, steps = (out.shape[1], out.shape[2]) if examples_first else (out.shape[2], out.shape[1])
    strides = (steps, 1) if examples_first else (1, n)
    states, inputs = (*last, *(first or last)), (x, x if weight_x is None else weight_x)
    factors = (weight, weight) if a is None or b is None else (a, b)
    arrays = (out, *states, weight, *factors, bias, scales, member_address, *inputs)
    options = {"HAS_STATE": first is not None, "INPUTS": 0 if weight_x is None else x.shape[-1], "SHARED": x.dim() == 3}
    options |= {"NOISE": a is not None, "HIDDEN": max(16, triton.next_power_of_2(hidden)), "TILE_N": 64}
    if out.numel():
        with torch.cuda.device_of(out):
            grid, warps = (members * triton.cdiv(n, 64),), 4 if hidden <= 64 else 8
            _lstm[grid](*arrays, n, steps, hidden, *strides, **options, num_warps=warps)
