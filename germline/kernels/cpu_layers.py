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
def largest_of_shifts(out, source, count, shifts, step):
    """Set each out[p] to the largest of source[p], source[p + step], ... (``shifts`` of them); NaN is the largest."""
    shifted = source[min(1, shifts - 1) * step :]
    for p in range(count):
        out[p] = shifted[p] if (shifted[p] > source[p]) | (shifted[p] != shifted[p]) else source[p]
    for shift in range(2, shifts):
        shifted = source[shift * step :]
        for p in range(count):
            out[p] = shifted[p] if (shifted[p] > out[p]) | (shifted[p] != shifted[p]) else out[p]


@compile_kernel
def finish_image(target, source, scratch, relu, window):
    """Pool the maps of an image, one after the other, or copy them if the window is all zeros, then apply a ReLU.

    The largest of each window is found at every position, down and then to the right, in loops over all maps, and those
    of the steps are picked: loops over the rows of a small map are too short for vectors.
    """
    height, width, kernel_height, kernel_width, stride_y, stride_x = window
    zero = target.dtype.type(0)
    if not height:
        for p in range(target.size):
            target[p] = zero if relu & (source[p] <= zero) else source[p]
        return
    down, right = scratch[0], scratch[1]
    count = source.size - (kernel_height - 1) * width
    largest_of_shifts(down, source, count, kernel_height, width)
    largest_of_shifts(right, down, count - kernel_width + 1, kernel_width, 1)
    rows, columns = (height - kernel_height) // stride_y + 1, (width - kernel_width) // stride_x + 1
    p = 0
    for first in range(0, source.size, height * width):
        for y in range(first, first + rows * stride_y * width, stride_y * width):
            for c in range(y, y + columns * stride_x, stride_x):
                target[p] = zero if relu & (right[c] <= zero) else right[c]
                p += 1


@compile_kernel
def finish_images(out, images, relu, window):
    """Set out[i] to the maps of images[i] after a ReLU and a max pooling; both are (images, maps * positions)."""
    scratch = np.empty((2, images.shape[1]), out.dtype)
    for i in range(out.shape[0]):
        finish_image(out[i], images[i], scratch, relu, window)


@compile_kernel
def blend_images(out, bases, x_b, a, bias, scales, member_address, relu, window, shared):
    """Blend the maps of one image at a time in a scratch vector, then finish them.

    out and bases are (members or 1, n, rows * positions).
    """
    positions = x_b.shape[3]
    blended = np.empty(bases.shape[2], out.dtype)
    scratch = np.empty((2, blended.size), out.dtype)
    for j in range(out.shape[1]):
        for i in range(out.shape[0]):
            address, scale = member_address[i], out.dtype.type(scales[i])
            noises, base = x_b[j, address] if shared else x_b[i, j], bases[0 if shared else i, j]
            for k in range(bias.shape[1]):
                shift, target = bias[i, k], blended[k * positions : (k + 1) * positions]
                center, noise, factor = base[k * positions : (k + 1) * positions], noises[0], scale * a[address, 0, k]
                for p in range(positions):
                    target[p] = center[p] + shift + factor * noise[p]
                for r in range(1, a.shape[1]):
                    noise, factor = noises[r], scale * a[address, r, k]
                    for p in range(positions):
                        target[p] += factor * noise[p]
            finish_image(out[i, j], blended, scratch, relu, window)


@compile_kernel
def add_term(out, base, terms, term, bias, scale, relu, window):
    """Set out to base + scale * terms[:, term] + bias, then finish it: a member with dense noise.

    out and base are (n, rows * positions), terms (n, terms, rows * positions), bias (rows,).
    """
    size, rows = base.shape[1], bias.size
    positions = size // rows
    total, shifts = np.empty(size, out.dtype), np.empty(size, out.dtype)
    scratch = np.empty((2, size), out.dtype)
    for k in range(rows):
        for p in range(positions):
            shifts[k * positions + p] = bias[k]
    factor = out.dtype.type(scale)
    for j in range(out.shape[0]):
        center, noise = base[j], terms[j, term]
        for p in range(size):
            total[p] = center[p] + shifts[p] + factor * noise[p]
        finish_image(out[j], total, scratch, relu, window)


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
        bases = (base[None] if shared else base).reshape(-1, out.shape[1], out.shape[2] * base.shape[-1])
        images = out.reshape(*out.shape[:2], -1)
        blend_images(images, bases, x_b, *arguments, window or (0,) * 6, shared)
    elif shared:
        blend_rows(out[..., 0], base[..., 0], x_b[..., 0], *arguments)
    else:
        if out is not base:
            out[...] = base
        add_to_rows(out[..., 0], x_b[..., 0], *arguments)
