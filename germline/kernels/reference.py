"""The noise field, version 1: its definition, in NumPy.

Philox4x32 with 7 rounds: Salmon, Moraes, Dror, Shaw, "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from germline.kernels import BLOCKS, ROUNDS, TILE, Address, Reading

Array = NDArray[Any]
LOW = np.uint64(0xFFFFFFFF)
HIGH = np.uint64(32)


def philox(counter: list[Array], key: tuple[int, int], rounds: int = ROUNDS) -> list[Array]:
    """Return four words for each counter (c0, c1, c2, c3): 32-bit words, held in uint64."""
    c0, c1, c2, c3 = (np.asarray(c, np.uint64) for c in counter)
    k0, k1 = key
    for _ in range(rounds):
        product0, product1 = c0 * np.uint64(0xD2511F53), c2 * np.uint64(0xCD9E8D57)
        c0, c1 = (product1 >> HIGH) ^ c1 ^ np.uint64(k0), product1 & LOW
        c2, c3 = (product0 >> HIGH) ^ c3 ^ np.uint64(k1), product0 & LOW
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return [c0, c1, c2, c3]


def build_counters(address: Address, member: int, block: Array) -> list[Array]:
    """Return the Philox counters (block, member, generation, stream) of an array of block numbers."""
    return [block, *(np.full_like(block, part) for part in (member, address.generation, address.stream))]


def draw_words(address: Address, count: int) -> Array:
    """Return the first ``count`` 32-bit words of a stream in plain order: word j is word j % 4 of block j // 4."""
    block = np.arange((count + 3) // 4)
    out = philox(build_counters(address, int(address.members[0]), block), address.key)
    words: Array = np.stack(out, axis=1).reshape(-1)[:count]
    return words


def draw_halves(address: Address, member: int, count: int) -> Array:
    """Return the 16-bit halves of the parameters from start to start + count."""
    k = address.start + np.arange(count)
    block, lane = BLOCKS * (k // TILE) + k % BLOCKS, k % TILE // BLOCKS
    out = np.stack(philox(build_counters(address, member, block), address.key))  # (4, count)
    word = out[lane // 2, np.arange(count)]
    half: Array = (word >> (np.uint64(16) * (lane % 2).astype(np.uint64)) & np.uint64(0xFFFF)).astype(np.int64)
    return half


def read_halves(half: Array, reading: Reading) -> Array:
    """Return the integers that a reading makes of halves."""
    if reading == Reading.POPCOUNT:
        return np.bitwise_count(half).astype(np.int64) - 8
    if reading == Reading.SIGN:
        return 1 - 2 * (half & 1)
    if reading == Reading.UNIFORM:
        return 2 * (half & 15) - 15
    return half


def draw_integers(address: Address, count: int, reading: Reading) -> Array:
    """Return the integers of every member of an address: (members, count)."""
    return np.stack([read_halves(draw_halves(address, int(m), count), reading) for m in address.members])


def fill(out: Array, address: Address, reading: Reading) -> None:
    """Set out[i, k] to the integer of member i at parameter start + k."""
    if out.size:
        out[:] = draw_integers(address, out.shape[1], reading)


def perturb(out: Array, theta: Array, scale: Array, signs: Array | None, address: Address, reading: Reading) -> None:
    """Set out[i] to theta + (signs[i] * scale) * eps[i]; ``scale`` has one element or one per parameter.

    Without ``signs`` each address stands for a mirrored pair: two rows of ``out``, of which the second has the opposite
    noise.
    """
    if out.size:
        eps = draw_integers(address, out.shape[1], reading)
        if signs is None:
            eps, signs = np.repeat(eps, 2, 0), np.tile(np.array([1, -1], np.int8), len(eps))
        out[:] = theta + (signs[:, None].astype(out.dtype) * scale) * eps.astype(out.dtype)


def accumulate(out: Array, weights: Array, address: Address, reading: Reading, variance: int) -> None:
    """Set out to the sum of weights[i] * eps[i] or, for a variance above 0, of weights[i] * (eps[i]^2 - variance)."""
    if not (out.size and weights.size):
        out[:] = 0
        return
    eps = draw_integers(address, out.size, reading)
    out[:] = weights.astype(np.int64) @ (eps * eps - variance if variance else eps)


def blend_outer(
    out: Array,
    shared: Array,
    x_b: Array,
    a: Array,
    bias: Array,
    scales: Array,
    member_address: Array,
    relu: bool,
    window: tuple[int, ...] | None = None,
) -> None:
    """Set out[i, j, k] to shared[j, k] + bias[i, k] + scales[i] * sum over r of x_b[j, m, r] a[m, r, k].

    This is the output of a layer whose weights have noise of low rank: x W^T + bias + scale (x B) A^T.

    Args:
        out: the outputs, (members, n, rows, positions).
        shared: x W^T, (n, rows, positions); or for each member its own, (members, n, rows, positions).
        x_b: x B, (n, addresses, rank, positions); or for each member its own, (members, n, rank, positions).
        a: A transposed, (addresses, rank, rows).
        bias: (members, rows).
        scales: (members,), what multiplies the integers of each member's noise, with its sign.
        member_address: for each member i, the index m of its noise in ``x_b`` and ``a``.
        relu: whether a ReLU follows.
        window: of a max pooling that follows: height and width of a map, of the window, and of its strides.
    """
    if shared.ndim == 4:
        outer = np.einsum("ijrp,irk->ijkp", x_b, a[member_address])
    else:
        outer = np.einsum("jirp,irk->ijkp", x_b[:, member_address], a[member_address])
    value = shared + bias[:, None, :, None] + scales[:, None, None, None] * outer
    value = np.where(value <= 0, 0, value) if relu else value
    if window is not None:
        height, width, kernel_height, kernel_width, stride_y, stride_x = window
        maps = value.reshape(*value.shape[:3], height, width)
        views = np.lib.stride_tricks.sliding_window_view(maps, (kernel_height, kernel_width), (3, 4))
        value = views[:, :, :, ::stride_y, ::stride_x].max((-2, -1)).reshape(out.shape)
    out[:] = value
