"""The noise field on the CPU, in Numba.

The 1,024 halves of a tile are written to a scratch vector that stays in the first-level cache, then read from it: both
loops are over contiguous memory, and the compiler turns both into vector code. Threads are Python threads over
functions that release the global interpreter lock, as many as torch is set to use: the threading layers of Numba must
not be entered from several threads, and blocks of members are evaluated by several threads.
"""

import os
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import int32, types, uint16, uint32, uint64
from numba.extending import intrinsic
from numpy.typing import NDArray

from germline import kernels
from germline.kernels import Address, Reading
from germline.kernels.compiling import Function, compile_kernel
from germline.kernels.cpu_layers import add_term as add_term
from germline.kernels.cpu_layers import blend_outer as blend_outer
from germline.kernels.cpu_layers import finish_images as finish_images

Array = NDArray[Any]

# Numba freezes constants into what it compiles, and its cache on disk is keyed by the text of this file alone.
TILE, BLOCKS, ROUNDS = 1024, 128, 7
POPCOUNT, SIGN, UNIFORM = 0, 1, 2
assert (TILE, BLOCKS, ROUNDS) == (kernels.TILE, kernels.BLOCKS, kernels.ROUNDS)
assert (POPCOUNT, SIGN, UNIFORM) == (Reading.POPCOUNT, Reading.SIGN, Reading.UNIFORM)
TILES_PER_THREAD = 64  # with fewer, about 10 microseconds of work, starting a thread costs more than it saves


@intrinsic
def popcount(context, half):
    def generate(context, builder, signature, arguments):
        return builder.call(builder.module.declare_intrinsic("llvm.ctpop", [ir.IntType(16)]), arguments)

    return types.uint16(types.uint16), generate


@compile_kernel
def philox(block, member, generation, stream, key0, key1, rounds):
    """Return the four 32-bit words of one counter."""
    # Numba widens 32-bit arithmetic to 64 bits: every step is cast back, or the loop is not vectorized.
    c0, c1, c2, c3 = uint32(block), uint32(member), uint32(generation), uint32(stream)
    k0, k1 = uint32(key0), uint32(key1)
    for _ in range(rounds):
        product0, product1 = uint64(c0) * uint64(0xD2511F53), uint64(c2) * uint64(0xCD9E8D57)
        c0, c1 = uint32(uint32(product1 >> uint64(32)) ^ c1 ^ k0), uint32(product1)
        c2, c3 = uint32(uint32(product0 >> uint64(32)) ^ c3 ^ k1), uint32(product0)
        k0, k1 = uint32(k0 + uint32(0x9E3779B9)), uint32(k1 + uint32(0xBB67AE85))
    return c0, c1, c2, c3


@compile_kernel
def read_tile(eps, halves, member, tile, key0, key1, generation, stream, reading):
    """Write the integers of one tile of one member to ``eps``; ``halves`` is scratch memory."""
    for b in range(BLOCKS):
        c0, c1, c2, c3 = philox(BLOCKS * tile + b, member, generation, stream, key0, key1, ROUNDS)
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


@compile_kernel
def fill_tiles(first, last, out, field, members, start, reading):
    key0, key1, generation, stream = field
    eps, halves = np.empty(TILE, np.int32), np.empty(TILE, np.uint16)
    stop = start + out.shape[1]
    first_tile = start // TILE
    tiles = (stop - 1) // TILE - first_tile + 1
    for unit in range(first, last):
        i, tile = unit // tiles, first_tile + unit % tiles
        read_tile(eps, halves, members[i], tile, key0, key1, generation, stream, reading)
        low, high = max(start, tile * TILE), min(stop, tile * TILE + TILE)
        target, source = out[i, low - start : high - start], eps[low - tile * TILE : high - tile * TILE]
        for k in range(target.size):
            target[k] = source[k]


@compile_kernel
def perturb_tiles(first, last, out, theta, scale, signs, field, members, start, reading):
    key0, key1, generation, stream = field
    eps, halves = np.empty(TILE, np.int32), np.empty(TILE, np.uint16)
    stop = start + out.shape[1]
    first_tile = start // TILE
    tiles = (stop - 1) // TILE - first_tile + 1
    copies = out.shape[0] // max(1, members.size)  # rows that have one address: two where these are mirrored pairs
    for unit in range(first, last):
        address, tile = unit // tiles, first_tile + unit % tiles
        read_tile(eps, halves, members[address], tile, key0, key1, generation, stream, reading)
        low, high = max(start, tile * TILE), min(stop, tile * TILE + TILE)
        center, source = theta[low - start : high - start], eps[low - tile * TILE : high - tile * TILE]
        for i in range(address * copies, (address + 1) * copies):
            target, sign = out[i, low - start : high - start], out.dtype.type(signs[i])
            if scale.size == 1:
                step = sign * scale[0]
                for k in range(target.size):
                    target[k] = center[k] + step * out.dtype.type(source[k])
            else:
                steps = scale[low - start : high - start]
                for k in range(target.size):
                    target[k] = center[k] + (sign * steps[k]) * out.dtype.type(source[k])


@compile_kernel
def accumulate_tiles(first, last, out, weights, field, members, start, reading, variance):
    key0, key1, generation, stream = field
    eps, halves = np.empty(TILE, np.int32), np.empty(TILE, np.uint16)
    total = np.empty(TILE, np.int32)
    stop = start + out.size
    for tile in range(start // TILE + first, start // TILE + last):
        for k in range(TILE):  # loops compile three times as fast as assignments of slices
            total[k] = int32(0)
        for i in range(members.size):
            read_tile(eps, halves, members[i], tile, key0, key1, generation, stream, reading)
            weight = int32(weights[i])
            if variance:
                for k in range(TILE):
                    total[k] += int32(weight * int32(int32(eps[k] * eps[k]) - int32(variance)))
            else:
                for k in range(TILE):
                    total[k] += int32(weight * eps[k])
        low, high = max(start, tile * TILE), min(stop, tile * TILE + TILE)
        target, source = out[low - start : high - start], total[low - tile * TILE : high - tile * TILE]
        for k in range(target.size):
            target[k] = source[k]


@compile_kernel
def perturb_outer_rows(first, last, out, theta, a, b_t, scale, skip):
    rows, rank, columns = a.shape[1], a.shape[2], b_t.shape[2]
    total = np.empty(columns, np.int32)
    for unit in range(first, last):
        i, row = unit // rows, unit % rows
        begin, end = max(0, row * columns - skip), min(out.shape[1], (row + 1) * columns - skip)
        shift = begin - (row * columns - skip)
        factor, b_row = int32(a[i, row, 0]), b_t[i, 0]
        for c in range(columns):
            total[c] = factor * int32(b_row[c])
        for r in range(1, rank):
            factor, b_row = int32(a[i, row, r]), b_t[i, r]
            for c in range(columns):
                total[c] += factor * int32(b_row[c])
        target, center, source = out[i, begin:end], theta[begin:end], total[shift : shift + end - begin]
        for k in range(target.size):
            target[k] = center[k] + scale[0] * out.dtype.type(source[k])


@cache
def thread_pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(os.cpu_count(), "germline-noise")


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=thread_pool.cache_clear)  # a child has none of its parent's threads


def run_in_threads(kernel: Function, units: int, *arguments: Any, tiles_per_unit: int = 1) -> None:
    """Call kernel(first, last, ...) for all units, split into as many runs as torch has threads."""
    threads = min(torch.get_num_threads(), max(1, units * tiles_per_unit // TILES_PER_THREAD), units)
    if threads <= 1:
        kernel(0, units, *arguments)
        return
    cuts = [units * t // threads for t in range(threads + 1)]
    runs = [thread_pool().submit(kernel, first, last, *arguments) for first, last in pairwise(cuts[1:])]
    kernel(cuts[0], cuts[1], *arguments)
    for run in runs:
        run.result()


def count_tiles(start: int, count: int) -> int:
    return (start + count - 1) // TILE - start // TILE + 1 if count else 0


def field_arguments(address: Address) -> tuple[int, int, int, int]:
    return (*address.key, address.generation, address.stream)


def fill(out: Array, address: Address, reading: Reading) -> None:
    """Set out[i, k] to the integer of member i at parameter start + k."""
    units = out.shape[0] * count_tiles(address.start, out.shape[1])
    run_in_threads(fill_tiles, units, out, field_arguments(address), address.members, address.start, int(reading))


def perturb(out: Array, theta: Array, scale: Array, signs: Array | None, address: Address, reading: Reading) -> None:
    """Compute ``reference.perturb``."""
    signs = np.tile(np.array([1, -1], np.int8), len(address.members)) if signs is None else signs
    units = len(address.members) * count_tiles(address.start, out.shape[1])
    arguments = (out, theta, scale, signs, field_arguments(address), address.members, address.start, int(reading))
    run_in_threads(perturb_tiles, units, *arguments)


def perturb_outer(out: Array, theta: Array, scale: Array, a: Array, b_t: Array, skip: int) -> None:
    """Set out[i] to theta + scale * (A_i B_i^T), from element ``skip`` of A_i B_i^T on.

    Args:
        out: (members, parameters).
        theta: (parameters,).
        scale: one element.
        a: A, (members, rows, rank).
        b_t: B transposed, (members, rank, columns).
        skip: elements of the first row that come before ``theta``.
    """
    units = a.shape[0] * a.shape[1]
    run_in_threads(perturb_outer_rows, units, out, theta, a, b_t, scale, skip, tiles_per_unit=-(-b_t.shape[2] // TILE))


def accumulate(out: Array, weights: Array, address: Address, reading: Reading, variance: int) -> None:
    """Set out to the sum of weights[i] * eps[i] or, for a variance above 0, of weights[i] * (eps[i]^2 - variance)."""
    arguments = (out, weights, field_arguments(address), address.members, address.start, int(reading), variance)
    run_in_threads(accumulate_tiles, count_tiles(address.start, out.size), *arguments, tiles_per_unit=weights.size)
