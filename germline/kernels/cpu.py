"""The noise field on the CPU, in Numba.

A tile's 1,024 halves are made into a scratch vector that stays in the first-level cache, then read from it: both loops
are over contiguous memory, and the compiler turns both into vector code. Threads are Python threads over functions that
hold no lock, as many as torch is set to use: Numba's own threading layers must not be entered from several threads, and
blocks of members are evaluated by several threads.
"""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import pairwise
from typing import Any, cast

import numba
import numpy as np
import torch
from llvmlite import ir
from numba import int32, types, uint16, uint32, uint64
from numba.extending import intrinsic
from numpy.typing import NDArray

from germline import kernels
from germline.kernels import Address, Reading

Array = NDArray[Any]
Function = Callable[..., Any]

# Numba freezes constants into what it compiles, and its cache on disk knows the text of this file alone.
TILE, BLOCKS, ROUNDS = 1024, 128, 7
POPCOUNT, SIGN, UNIFORM = 0, 1, 2
assert (TILE, BLOCKS, ROUNDS) == (kernels.TILE, kernels.BLOCKS, kernels.ROUNDS)
assert (POPCOUNT, SIGN, UNIFORM) == (Reading.POPCOUNT, Reading.SIGN, Reading.UNIFORM)
WORTH_A_THREAD = 64  # tiles: below this, about 10 microseconds, handing work over costs more than it saves


def compiled(function: Function) -> Function:
    return cast(Function, numba.njit(nogil=True, cache=True, boundscheck=False)(function))


@intrinsic
def popcount(context, half):
    def generate(context, builder, signature, arguments):
        return builder.call(builder.module.declare_intrinsic("llvm.ctpop", [ir.IntType(16)]), arguments)

    return types.uint16(types.uint16), generate


@compiled
def words(block, member, generation, stream, key0, key1, rounds):
    # Numba widens 32-bit arithmetic to 64 bits: every step is cast back, or the loop is not vectorized.
    c0, c1, c2, c3 = uint32(block), uint32(member), uint32(generation), uint32(stream)
    k0, k1 = uint32(key0), uint32(key1)
    for _ in range(rounds):
        product0, product1 = uint64(c0) * uint64(0xD2511F53), uint64(c2) * uint64(0xCD9E8D57)
        c0, c1 = uint32(uint32(product1 >> uint64(32)) ^ c1 ^ k0), uint32(product1)
        c2, c3 = uint32(uint32(product0 >> uint64(32)) ^ c3 ^ k1), uint32(product0)
        k0, k1 = uint32(k0 + uint32(0x9E3779B9)), uint32(k1 + uint32(0xBB67AE85))
    return c0, c1, c2, c3


@compiled
def read_tile(eps, halves, member, tile, key0, key1, generation, stream, reading):
    for b in range(BLOCKS):
        c0, c1, c2, c3 = words(BLOCKS * tile + b, member, generation, stream, key0, key1, ROUNDS)
        halves[b], halves[128 + b] = uint16(c0), uint16(c0 >> uint32(16))
        halves[256 + b], halves[384 + b] = uint16(c1), uint16(c1 >> uint32(16))
        halves[512 + b], halves[640 + b] = uint16(c2), uint16(c2 >> uint32(16))
        halves[768 + b], halves[896 + b] = uint16(c3), uint16(c3 >> uint32(16))
    if reading == POPCOUNT:
        for k in range(TILE):
            eps[k] = int32(popcount(halves[k])) - int32(8)
    elif reading == SIGN:
        for k in range(TILE):
            eps[k] = int32(1) - int32(2) * int32(halves[k] & uint16(1))
    elif reading == UNIFORM:
        for k in range(TILE):
            eps[k] = int32(2) * int32(halves[k] & uint16(15)) - int32(15)
    else:
        for k in range(TILE):
            eps[k] = int32(halves[k])


@compiled
def fill_tiles(first, last, out, field, members, start, reading):
    key0, key1, generation, stream = field
    eps, halves = np.empty(TILE, np.int32), np.empty(TILE, np.uint16)
    stop = start + out.shape[1]
    tile0 = start // TILE
    tiles = (stop - 1) // TILE - tile0 + 1
    for unit in range(first, last):
        i, tile = unit // tiles, tile0 + unit % tiles
        read_tile(eps, halves, members[i], tile, key0, key1, generation, stream, reading)
        low, high = max(start, tile * TILE), min(stop, tile * TILE + TILE)
        to, source = out[i, low - start : high - start], eps[low - tile * TILE : high - tile * TILE]
        for k in range(to.size):
            to[k] = source[k]


@compiled
def perturb_tiles(first, last, out, theta, scale, signs, field, members, start, reading):
    key0, key1, generation, stream = field
    eps, halves = np.empty(TILE, np.int32), np.empty(TILE, np.uint16)
    stop = start + out.shape[1]
    tile0 = start // TILE
    tiles = (stop - 1) // TILE - tile0 + 1
    for unit in range(first, last):
        i, tile = unit // tiles, tile0 + unit % tiles
        read_tile(eps, halves, members[i], tile, key0, key1, generation, stream, reading)
        low, high = max(start, tile * TILE), min(stop, tile * TILE + TILE)
        to, center = out[i, low - start : high - start], theta[low - start : high - start]
        source = eps[low - tile * TILE : high - tile * TILE]
        sign = out.dtype.type(signs[i])
        if scale.size == 1:
            step = sign * scale[0]
            for k in range(to.size):
                to[k] = center[k] + step * out.dtype.type(source[k])
        else:
            steps = scale[low - start : high - start]
            for k in range(to.size):
                to[k] = center[k] + (sign * steps[k]) * out.dtype.type(source[k])


@compiled
def accumulate_tiles(first, last, out, weights, field, members, start, reading, center):
    key0, key1, generation, stream = field
    eps, halves = np.empty(TILE, np.int32), np.empty(TILE, np.uint16)
    total = np.empty(TILE, np.int32)
    stop = start + out.size
    for tile in range(start // TILE + first, start // TILE + last):
        total[:] = 0
        for i in range(members.size):
            read_tile(eps, halves, members[i], tile, key0, key1, generation, stream, reading)
            weight = int32(weights[i])
            if center:
                for k in range(TILE):
                    total[k] += int32(weight * int32(int32(eps[k] * eps[k]) - int32(center)))
            else:
                for k in range(TILE):
                    total[k] += int32(weight * eps[k])
        low, high = max(start, tile * TILE), min(stop, tile * TILE + TILE)
        out[low - start : high - start] = total[low - tile * TILE : high - tile * TILE]


@compiled
def perturb_outer_rows(first, last, out, theta, a, b, scale, skip):
    rows, rank, columns = a.shape[1], a.shape[2], b.shape[2]
    total = np.empty(columns, np.int32)
    for unit in range(first, last):
        i, row = unit // rows, unit % rows
        begin, end = max(0, row * columns - skip), min(out.shape[1], (row + 1) * columns - skip)
        shift = begin - (row * columns - skip)
        factor, other = int32(a[i, row, 0]), b[i, 0]
        for c in range(columns):
            total[c] = factor * int32(other[c])
        for r in range(1, rank):
            factor, other = int32(a[i, row, r]), b[i, r]
            for c in range(columns):
                total[c] += factor * int32(other[c])
        to, center, source = out[i, begin:end], theta[begin:end], total[shift : shift + end - begin]
        for k in range(to.size):
            to[k] = center[k] + scale[0] * out.dtype.type(source[k])


@compiled
def blend_rows(out, shared, thin, thick, bias, scales, where, relu):
    zero = out.dtype.type(0)
    for i in range(out.shape[0]):
        address, scale, own = where[i], out.dtype.type(scales[i]), bias[i]
        for j in range(out.shape[1]):
            to, base = out[i, j], shared[j]
            first, t = thick[address, 0], scale * thin[j, address, 0]
            for k in range(to.size):
                to[k] = base[k] + own[k] + t * first[k]
            for r in range(1, thick.shape[1]):
                factor, t = thick[address, r], scale * thin[j, address, r]
                for k in range(to.size):
                    to[k] += t * factor[k]
            if relu:
                for k in range(to.size):
                    to[k] = zero if to[k] <= zero else to[k]


@compiled
def blend_maps(out, shared, thin, thick, bias, scales, where, relu, window):
    """A map at a time goes through a scratch vector, and is pooled on its way out where there is a window."""
    high, wide, kernel_high, kernel_wide, down, across = window
    zero, line = out.dtype.type(0), np.empty(shared.shape[2], out.dtype)
    row = np.empty(wide, out.dtype)
    for i in range(out.shape[0]):
        address, scale = where[i], out.dtype.type(scales[i])
        for j in range(out.shape[1]):
            for k in range(out.shape[2]):
                to, base, own = out[i, j, k], shared[j, k], bias[i, k]
                source, t = thin[j, address, 0], scale * thick[address, 0, k]
                for p in range(line.size):
                    line[p] = base[p] + own + t * source[p]
                for r in range(1, thick.shape[1]):
                    more, t = thin[j, address, r], scale * thick[address, r, k]
                    for p in range(line.size):
                        line[p] += t * more[p]
                if relu:
                    for p in range(line.size):
                        line[p] = zero if line[p] <= zero else line[p]
                if not high:
                    for p in range(line.size):
                        to[p] = line[p]
                    continue
                columns = (wide - kernel_wide) // across + 1
                for y in range(to.size // columns):
                    top = line[y * down * wide : (y * down + 1) * wide]
                    for c in range(wide):
                        row[c] = top[c]
                    for a in range(1, kernel_high):
                        under = line[(y * down + a) * wide : (y * down + a + 1) * wide]
                        for c in range(wide):
                            row[c] = under[c] if (under[c] > row[c]) | (under[c] != under[c]) else row[c]
                    if kernel_wide == 2 and across == 2:
                        for c in range(columns):
                            left, right = row[2 * c], row[2 * c + 1]
                            to[y * columns + c] = right if (right > left) | (right != right) else left
                    else:
                        for c in range(columns):
                            best = row[c * across]
                            for b in range(1, kernel_wide):
                                v = row[c * across + b]
                                best = v if (v > best) | (v != v) else best
                            to[y * columns + c] = best


@cache
def pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(os.cpu_count(), "germline-noise")


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=pool.cache_clear)  # a child has none of its parent's threads


def share(kernel: Function, units: int, *arguments: Any, tiles_per_unit: int = 1) -> None:
    """kernel(first, last, ...) over all units, cut into as many runs as torch has threads."""
    threads = min(torch.get_num_threads(), max(1, units * tiles_per_unit // WORTH_A_THREAD), units)
    if threads <= 1:
        kernel(0, units, *arguments)
        return
    cuts = [units * t // threads for t in range(threads + 1)]
    runs = [pool().submit(kernel, a, b, *arguments) for a, b in pairwise(cuts[1:])]
    kernel(cuts[0], cuts[1], *arguments)
    for run in runs:
        run.result()


def tiles_of(start: int, count: int) -> int:
    return (start + count - 1) // TILE - start // TILE + 1 if count else 0


def field_of(address: Address) -> tuple[int, int, int, int]:
    return (*address.key, address.generation, address.stream)


def fill(out: Array, address: Address, reading: Reading) -> None:
    units = out.shape[0] * tiles_of(address.start, out.shape[1])
    share(fill_tiles, units, out, field_of(address), address.members, address.start, int(reading))


def perturb(out: Array, theta: Array, scale: Array, signs: Array, address: Address, reading: Reading) -> None:
    units = out.shape[0] * tiles_of(address.start, out.shape[1])
    share(
        perturb_tiles, units, out, theta, scale, signs, field_of(address), address.members, address.start, int(reading)
    )


def perturb_outer(out: Array, theta: Array, scale: Array, a: Array, b: Array, skip: int) -> None:
    """out[i] = theta + scale * (A_i B_i^T), from its ``skip``-th element on; b is (members, rank, columns)."""
    units = a.shape[0] * a.shape[1]
    share(perturb_outer_rows, units, out, theta, a, b, scale, skip, tiles_per_unit=-(-b.shape[2] // TILE))


def accumulate(out: Array, weights: Array, address: Address, reading: Reading, center: int) -> None:
    arguments = (out, weights, field_of(address), address.members, address.start, int(reading), center)
    share(accumulate_tiles, tiles_of(address.start, out.size), *arguments, tiles_per_unit=weights.size)


def blend_outer(
    out: Array,
    shared: Array,
    thin: Array,
    thick: Array,
    bias: Array,
    scales: Array,
    where: Array,
    relu: bool,
    window: tuple[int, ...] | None,
) -> None:
    """As ``reference.blend_outer``.

    By the calling thread alone: blocks of members are already shared out among threads.
    """
    if out.shape[3] == 1 and window is None:
        blend_rows(out[..., 0], shared[..., 0], thin[..., 0], thick, bias, scales, where, relu)
    else:
        blend_maps(out, shared, thin, thick, bias, scales, where, relu, window or (0,) * 6)
