"""Passes over the outputs of layers: what of an epilogue a kernel does, and the passes of a CPU."""

from collections.abc import Callable, Iterator
from itertools import chain
from math import prod
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from germline.kernels import kernels_for
from germline.population.buffers import allocate, stack
from germline.population.rules.layer import LayerCall
from germline.population.rules.pending import Epilogue, MaxPool, Relu, apply_epilogue

Window = tuple[int, ...]  # height and width of an image, of the window that moves over it, and of a step
NO_POSITIONS = torch.Size()
NO_WINDOW = (0,) * 6
FEW_ROWS = 16  # of noise, up to which the addresses of a block are multiplied together
FEW_PLACES = 16  # of a window, up to which a kernel does the pooling in its pass


class Fused(NamedTuple):
    """The part of an epilogue that a kernel does in its pass."""

    relu: bool
    window: Window | None  # of a max pooling


def fuse_epilogue(epilogue: Epilogue, positions: torch.Size = NO_POSITIONS) -> tuple[Fused, torch.Size, Epilogue]:
    """Return what the kernel does of an epilogue, the sizes of images after it, and the rest of the epilogue."""
    relu = bool(epilogue) and isinstance(epilogue[0], Relu)
    rest = epilogue[1:] if relu else epilogue
    pool = rest[0] if rest else None
    if len(positions) != 2 or not isinstance(pool, MaxPool) or prod(pool.kernel) > FEW_PLACES:
        return Fused(relu, None), positions, rest
    axes = zip(positions, pool.kernel, pool.stride, strict=True)
    sizes = torch.Size([(size - kernel) // stride + 1 for size, kernel, stride in axes])
    return Fused(relu, (*positions, *pool.kernel, *pool.stride)), sizes, rest[1:]


def add_noise_on_cpu(call: LayerCall, base: Tensor, multiply: Callable[[Tensor], Tensor]) -> Tensor:
    """Return base + scale_i noise_i + bias_i for each member: (members, n, R, ...), after the epilogue.

    Few addresses at a time: the noise of all of them would leave the processor's caches.
    """
    block, index, dtype = call.block, call.layer.slots["weight"], base.dtype
    n, rows = base.shape[:2]
    full = torch.float64 if dtype == torch.float64 else torch.float32
    fused, sizes, rest = fuse_epilogue(call.epilogue, base.shape[2:])
    center, scales, bias = base.to(full).reshape(n, -1).contiguous(), block.scales(index), call.optional_weights("bias")
    shifts = center.new_zeros(block.size, rows) if bias is None else bias.to(full).contiguous()
    out = allocate((block.size, n, rows * sizes.numel()), center)
    step, window = max(1, FEW_ROWS // rows), fused.window or NO_WINDOW
    add_term = kernels_for(base.device).add_term
    for first in range(0, len(block.addresses), step):
        noise = block.dense_noise_at(index, slice(first, first + step), dtype)  # (addresses, R, ...)
        terms = multiply(noise.flatten(0, 1)).to(full).reshape(n, len(noise), -1).contiguous().numpy()
        for i in np.flatnonzero((block.member_address >= first) & (block.member_address < first + step)).tolist():
            term, arrays = block.member_address[i] - first, (out[i].numpy(), center.numpy())
            add_term(*arrays, terms, term, shifts[i].numpy(), float(scales[i]), fused.relu, window)
    return apply_epilogue(out.view(block.size, n, rows, *sizes).to(dtype), rest)


def has_channels_last(images: Tensor) -> bool:
    """Return whether the channels of images, (n, C, height, width), are next to each other in memory."""
    return images.dim() == 4 and not images.is_contiguous() and images.movedim(1, -1).is_contiguous()


def finish_outputs(outputs: Iterator[Tensor], members: int, epilogue: Epilogue) -> Tensor:
    """Return the outputs of all members, (n, R, ...) each, after the epilogue, in one tensor."""
    first = next(outputs)
    fused, sizes, rest = fuse_epilogue(epilogue, first.shape[2:])
    is_full = first.dtype in (torch.float32, torch.float64)
    if first.device.type != "cpu" or not is_full or not epilogue or rest:
        finished = [apply_epilogue(output, epilogue) for output in chain([first], outputs)]
        if has_channels_last(finished[0]):
            return torch.stack([output.movedim(1, -1) for output in finished]).movedim(-1, 2)
        return stack(finished)
    out = allocate((members, *first.shape[:2], *sizes), first)
    finish_images, window = kernels_for(first.device).finish_images, fused.window or NO_WINDOW
    for finished, output in zip(out.flatten(2).numpy(), chain([first], outputs), strict=True):
        finish_images(finished, output.contiguous().flatten(1).numpy(), fused.relu, window)
    return out
