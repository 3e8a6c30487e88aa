"""Images of all members that are joined along their channels, enlarged, averaged, or seen as vectors, on a GPU.

Rules for convolutions leave the channels of a pixel next to each other in memory. Under vmap, torch would put them
apart again when it joins images, takes several times as long to enlarge them, and averages them member by member.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from germline.kernels import kernel_device
from germline.population.block import Block, current_block
from germline.population.rules.pending import materialize


def find_block(images: Sequence[Tensor]) -> Block | None:
    """Return the block that is computed at once, if these are images of its members on a GPU."""
    block = current_block.find_whole()
    is_of_members = any(torch._C._functorch.is_batchedtensor(x) for x in images)  # not what all of them share
    if block is None or block.is_taped or not is_of_members:
        return None
    if any(x.dim() != 4 for x in images) or len({x.dtype for x in images}) != 1:
        return None
    return block if kernel_device(images[0].device).type == "cuda" else None


def cat(tensors: Sequence[Tensor], dim: int = 0, **settings: Any) -> Tensor:
    """Return ``torch.cat``; channels of images are copied next to each other."""
    images, dim = materialize(list(tensors)), settings.pop("axis", dim)
    block = find_block(images) if dim in (1, -3) and images and not settings else None
    if block is None:
        return torch.cat(images, dim, **settings)

    def join(images: list[Tensor]) -> Tensor:
        rows = [x.reshape(x.shape[:-1].numel(), x.shape[-1]) for x in images]  # torch is slow with many dimensions
        return torch.cat(rows, 1).view(*images[0].shape[:-1], sum(x.shape[-1] for x in images))

    return call_with_channels_last(block, images, join)


def interpolate(
    x: Tensor, size: Any = None, scale_factor: Any = None, mode: str = "nearest", **settings: Any
) -> Tensor:
    """Return ``F.interpolate``; to enlarge images by a whole number, their pixels are repeated."""
    x = materialize(x)
    is_whole = isinstance(scale_factor, int | float) and float(scale_factor).is_integer() and scale_factor >= 1
    is_plain = is_whole and size is None and mode == "nearest" and not any(settings.values())
    block = find_block([x]) if is_plain else None
    if block is None:
        return F.interpolate(x, size, scale_factor, mode, **settings)
    times = int(scale_factor)

    def enlarge(images: list[Tensor]) -> Tensor:
        (x,) = images
        *members, height, width, channels = x.shape
        pixels = x.contiguous().view(-1, 1, width, 1, channels)
        if channels * x.element_size() % 8 == 0 and pixels.data_ptr() % 8 == 0:
            pixels = pixels.view(torch.int64)  # the same bytes in fewer numbers
        large = pixels.expand(-1, times, -1, times, -1).contiguous()
        return large.view(x.dtype).view(*members, height * times, width * times, channels)

    return call_with_channels_last(block, [x], enlarge)


def adaptive_avg_pool2d(x: Tensor, output_size: Any) -> Tensor:
    """Return ``F.adaptive_avg_pool2d``; to average whole images, torch calls a function that vmap does not know."""
    x = materialize(x)
    is_one = isinstance(output_size, int | tuple | list) and output_size in (1, [1, 1], (1, 1))
    if is_one and find_block([x]) is not None:
        return x.mean((-2, -1), keepdim=True)
    return F.adaptive_avg_pool2d(x, output_size)


def view(x: Tensor, *shape: Any, **settings: Any) -> Tensor:
    """Return ``Tensor.view``; a copy where only the order of the channels in memory is in the way."""
    x = materialize(x)
    try:
        return x.view(*shape, **settings)
    except RuntimeError:
        if settings or any(isinstance(size, torch.dtype) for size in shape):
            raise
        return x.reshape(*shape)


def call_with_channels_last(
    block: Block, images: list[Tensor], function: Callable[..., Tensor], vectors: Sequence[Tensor] = ()
) -> Tensor:
    """Call a function of the images of all members, (members, n, height, width, channels), and of their vectors."""
    count = len(images)

    def compute(inputs: list[Tensor], batched: list[bool]) -> list[Tensor]:
        of_members = [x if own else x.expand(block.size, *x.shape) for x, own in zip(inputs, batched, strict=True)]
        return [function([x.movedim(2, -1) for x in of_members[:count]], *of_members[count:]).movedim(-1, 2)]

    (out,) = block.call_once([*images, *vectors], compute)
    return out
