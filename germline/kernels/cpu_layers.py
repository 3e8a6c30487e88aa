"""Kernels of layers on the CPU, in Numba: what follows a product, in one pass over its output."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from germline.kernels.compiling import compile_kernel

Array = NDArray[Any]


@compile_kernel
def blend_rows(out, shared, x_b, a, bias, scales, member_address, relu):
    """Blend outputs that have one position each and one base for all members."""
    zero = out.dtype.type(0)
    for i in range(out.shape[0]):
        address, scale, member_bias = member_address[i], out.dtype.type(scales[i]), bias[i]
        for j in range(out.shape[1]):
            target, base = out[i, j], shared[j]
            a_row, factor = a[address, 0], scale * x_b[j, address, 0]
            for k in range(target.size):
                target[k] = base[k] + member_bias[k] + factor * a_row[k]
            for r in range(1, a.shape[1]):
                a_row, factor = a[address, r], scale * x_b[j, address, r]
                for k in range(target.size):
                    target[k] += factor * a_row[k]
            if relu:
                for k in range(target.size):
                    target[k] = zero if target[k] <= zero else target[k]


@compile_kernel
def add_to_rows(out, x_b, a, bias, scales, member_address, relu):
    """Blend outputs that have one position each, in place: they hold the base of each member."""
    zero, shift = out.dtype.type(0), np.empty(out.shape[2], out.dtype)
    for i in range(out.shape[0]):
        address, scale = member_address[i], out.dtype.type(scales[i])
        for k in range(shift.size):
            shift[k] = bias[i, k]
        for j in range(out.shape[1]):
            target = out[i, j]
            a_row, factor = a[address, 0], scale * x_b[i, j, 0]
            for k in range(target.size):
                target[k] = target[k] + shift[k] + factor * a_row[k]
            for r in range(1, a.shape[1]):
                a_row, factor = a[address, r], scale * x_b[i, j, r]
                for k in range(target.size):
                    target[k] += factor * a_row[k]
            if relu:
                for k in range(target.size):
                    target[k] = zero if target[k] <= zero else target[k]


@compile_kernel
def blend_maps(out, bases, x_b, a, bias, scales, member_address, relu, window, shared):
    """Blend one map at a time in a scratch vector, and pool it as it is written unless the window is all zeros."""
    height, width, kernel_height, kernel_width, stride_y, stride_x = window
    zero, blended = out.dtype.type(0), np.empty(bases.shape[3], out.dtype)
    largest = np.empty(width, out.dtype)  # of each column, over the rows of a window
    for i in range(out.shape[0]):
        address, scale = member_address[i], out.dtype.type(scales[i])
        for j in range(out.shape[1]):
            noises = x_b[j, address] if shared else x_b[i, j]
            for k in range(out.shape[2]):
                target, base, shift = out[i, j, k], bases[0 if shared else i, j, k], bias[i, k]
                noise, factor = noises[0], scale * a[address, 0, k]
                for p in range(blended.size):
                    blended[p] = base[p] + shift + factor * noise[p]
                for r in range(1, a.shape[1]):
                    noise, factor = noises[r], scale * a[address, r, k]
                    for p in range(blended.size):
                        blended[p] += factor * noise[p]
                if relu:
                    for p in range(blended.size):
                        blended[p] = zero if blended[p] <= zero else blended[p]
                if not height:
                    for p in range(blended.size):
                        target[p] = blended[p]
                    continue
                columns = (width - kernel_width) // stride_x + 1
                for y in range(target.size // columns):
                    top = blended[y * stride_y * width : (y * stride_y + 1) * width]
                    for c in range(width):
                        largest[c] = top[c]
                    for dy in range(1, kernel_height):
                        row = blended[(y * stride_y + dy) * width : (y * stride_y + dy + 1) * width]
                        for c in range(width):
                            largest[c] = row[c] if (row[c] > largest[c]) | (row[c] != row[c]) else largest[c]
                    if kernel_width == 2 and stride_x == 2:
                        for c in range(columns):
                            left, right = largest[2 * c], largest[2 * c + 1]
                            target[y * columns + c] = right if (right > left) | (right != right) else left
                    else:
                        for c in range(columns):
                            best = largest[c * stride_x]
                            for dx in range(1, kernel_width):
                                value = largest[c * stride_x + dx]
                                best = value if (value > best) | (value != value) else best
                            target[y * columns + c] = best


def blend_outer(
    out: Array,
    base: Array,
    x_b: Array,
    a: Array,
    bias: Array,
    scales: Array,
    member_address: Array,
    relu: bool,
    window: tuple[int, ...] | None,
) -> None:
    """Compute ``reference.blend_outer`` in the calling thread: blocks of members already run in several threads."""
    shared, arguments = base.ndim == 3, (a, bias, scales, member_address, relu)
    if out.shape[3] > 1 or window is not None:
        blend_maps(out, base[None] if shared else base, x_b, *arguments, window or (0,) * 6, shared)
    elif shared:
        blend_rows(out[..., 0], base[..., 0], x_b[..., 0], *arguments)
    else:
        if out is not base:
            out[...] = base
        add_to_rows(out[..., 0], x_b[..., 0], *arguments)
