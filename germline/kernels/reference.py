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
    """Four words for each counter (c0, c1, c2, c3); 32-bit words held in uint64."""
    c0, c1, c2, c3 = (np.asarray(c, np.uint64) for c in counter)
    k0, k1 = key
    for _ in range(rounds):
        product0, product1 = c0 * np.uint64(0xD2511F53), c2 * np.uint64(0xCD9E8D57)
        c0, c1 = (product1 >> HIGH) ^ c1 ^ np.uint64(k0), product1 & LOW
        c2, c3 = (product0 >> HIGH) ^ c3 ^ np.uint64(k1), product0 & LOW
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return [c0, c1, c2, c3]


def counters(address: Address, member: int, block: Array) -> list[Array]:
    return [block, *(np.full_like(block, part) for part in (member, address.generation, address.stream))]


def words(address: Address, count: int) -> Array:
    """The first ``count`` 32-bit words of a stream in plain order: word j is word j % 4 of block j // 4."""
    block = np.arange((count + 3) // 4)
    out = philox(counters(address, int(address.members[0]), block), address.key)
    words: Array = np.stack(out, axis=1).reshape(-1)[:count]
    return words


def halves(address: Address, member: int, count: int) -> Array:
    """The 16-bit halves of parameters start .. start + count."""
    k = address.start + np.arange(count)
    block, lane = BLOCKS * (k // TILE) + k % BLOCKS, k % TILE // BLOCKS
    out = np.stack(philox(counters(address, member, block), address.key))  # (4, count)
    word = out[lane // 2, np.arange(count)]
    half: Array = (word >> (np.uint64(16) * (lane % 2).astype(np.uint64)) & np.uint64(0xFFFF)).astype(np.int64)
    return half


def read(half: Array, reading: Reading) -> Array:
    if reading == Reading.POPCOUNT:
        return np.bitwise_count(half).astype(np.int64) - 8
    if reading == Reading.SIGN:
        return 1 - 2 * (half & 1)
    if reading == Reading.UNIFORM:
        return 2 * (half & 15) - 15
    return half


def slices(address: Address, count: int, reading: Reading) -> Array:
    return np.stack([read(halves(address, int(m), count), reading) for m in address.members])  # (m, count)


def fill(out: Array, address: Address, reading: Reading) -> None:
    """out[i, k] = the integer of member i at parameter start + k."""
    if out.size:
        out[:] = slices(address, out.shape[1], reading)


def perturb(out: Array, theta: Array, scale: Array, signs: Array, address: Address, reading: Reading) -> None:
    """out[i] = theta + (signs[i] * scale) * eps[i]; scale has one element or one per parameter."""
    if out.size:
        eps = slices(address, out.shape[1], reading)
        out[:] = theta + (signs[:, None].astype(out.dtype) * scale) * eps.astype(out.dtype)


def blend_outer(
    out: Array,
    shared: Array,
    thin: Array,
    thick: Array,
    bias: Array,
    scales: Array,
    where: Array,
    relu: bool,
    window: tuple[int, ...] | None = None,
) -> None:
    """out[i, j, k] = shared[j, k] + bias[i, k] + scales[i] * sum over r of thin[j, a, r] thick[a, r, k], a = where[i].

    The last axis, of positions, belongs to out, shared and thin. Then relu, then the largest in each window, given as
    the height and width of a map, of the window, and of a step.
    """
    if shared.ndim == 4:  # for each member its own, and thin[i, j, r] with it
        outer = np.einsum("ijrp,irk->ijkp", thin, thick[where])
    else:
        outer = np.einsum("jirp,irk->ijkp", thin[:, where], thick[where])
    value = shared + bias[:, None, :, None] + scales[:, None, None, None] * outer
    value = np.where(value <= 0, 0, value) if relu else value
    if window is not None:
        high, wide, kernel_high, kernel_wide, down, across = window
        maps = value.reshape(*value.shape[:3], high, wide)
        views = np.lib.stride_tricks.sliding_window_view(maps, (kernel_high, kernel_wide), (3, 4))
        value = views[:, :, :, ::down, ::across].max((-2, -1)).reshape(out.shape)
    out[:] = value


def accumulate(out: Array, weights: Array, address: Address, reading: Reading, center: int) -> None:
    """out = sum of weights[i] * eps[i], or of weights[i] * (eps[i]^2 - center) where center is positive; int32."""
    eps = (
        slices(address, out.size, reading)
        if out.size and weights.size
        else np.zeros((weights.size, out.size), np.int64)
    )
    out[:] = weights.astype(np.int64) @ (eps * eps - center if center else eps)
