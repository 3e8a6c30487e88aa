"""Convolutions of a block of members; see ``blend`` for how a product is split into parts."""

from math import prod
from typing import Any

import torch
import torch.nn.functional as F

from germline.kernels import kernel_device, kernels_for
from germline.noise import cached_tensor
from germline.population.rules.blend import Parts, add_bias, can_multiply_noise, combine, multiply_shared_input
from germline.population.rules.layer import LayerCall
from germline.population.rules.linear import THIN, batched_linear
from germline.population.rules.passes import finish_outputs
from germline.population.rules.pending import apply_epilogue

LARGEST_KERNEL = 49  # places of a filter, up to which the noise has a kernel


def convolution(call: LayerCall) -> torch.Tensor:
    """Compute a convolution for all members."""
    (x,), module = call.inputs, call.module
    has_examples = x.dim() - call.batched[0] == len(module.kernel_size) + 2  # and is not a single image
    if call.is_separable("weight") and module.groups == 1 and has_examples:
        if call.has_shared_input and can_multiply_noise(call, x):
            return multiply_shared_input(call, x, lambda weight: module._conv_forward(x, weight, None))
        matrix = call.block.matrix(call.layer.slots["weight"])
        if not call.has_shared_input and matrix is not None and matrix.rank <= THIN and has_kernel(module, x):
            return convolve_with_kernel(call, x)
        if not call.has_shared_input and matrix is not None and is_worth_splitting(call, x):
            return convolve_thinly(call, x)
    if call.batched[0] and has_examples and is_pointwise(module) and kernel_device(x.device).type == "cuda":
        return convolve_points(call)
    return convolve_per_member(call)


def has_kernel(module: Any, x: torch.Tensor) -> bool:
    """Return whether the noise of each member has a kernel: for small filters with plain padding, on a GPU."""
    is_plain = module.padding_mode == "zeros" and not isinstance(module.padding, str)
    is_small = len(module.kernel_size) <= 2 and prod(module.kernel_size) <= LARGEST_KERNEL
    return is_plain and is_small and x.dtype != torch.float64 and kernel_device(x.device).type == "cuda"


def convolve_with_kernel(call: LayerCall, x: torch.Tensor) -> torch.Tensor:
    """Do one large convolution with the center's filters; a kernel adds the noise of each member."""
    block, index, module = call.block, call.layer.slots["weight"], call.module
    a, b = block.factors(index, x.dtype)  # (addresses, R, rank), (addresses, C, rank)
    rank, (channels, *kernel) = a.shape[2], block.slot(index).shape[1:]
    settings = as_image(module.stride), as_image(module.padding, missing=0), as_image(module.dilation)
    images = channels_last(x.reshape(-1, channels, *as_image(x.shape[3:])))
    center = block.generation.center(index).view(-1, channels, *as_image(kernel))
    base = channels_last(F.conv2d(images, center, None, *settings))
    base, images = (maps.view(*x.shape[:2], *maps.shape[1:]) for maps in (base, images))
    x_b = torch.empty(*x.shape[:2], rank, *base.shape[3:], device=x.device)
    filters = b.transpose(1, 2).reshape(len(b), rank, channels, *as_image(kernel)).contiguous()
    member_address = cached_tensor(block.member_address, x.device)
    kernels_for(x.device).thin_convolution(x_b, images, filters, member_address, *settings)
    base = base.squeeze(3) if x.dim() == 4 else base
    bias, scales = call.optional_weights("bias"), block.scales(index)
    return combine(Parts(base, x_b, a, bias, scales, block.member_address, call.epilogue, shared=False))


def channels_last(images: torch.Tensor) -> torch.Tensor:
    """Return images, (n, C, height, width), whose channels are next to each other in memory, as cuDNN takes them."""
    return images.contiguous(memory_format=torch.channels_last)


def is_worth_splitting(call: LayerCall, x: torch.Tensor) -> bool:
    """Return whether a CPU convolves the center and the noise apart: if a member has more weights than outputs."""
    module, rank = call.module, len(call.module.kernel_size)
    positions = prod(x.shape[-rank:]) // prod(module.stride)  # about
    columns = module.in_channels * prod(module.kernel_size)
    is_full = x.dtype in (torch.float32, torch.float64) and x.device.type == kernel_device(x.device).type == "cpu"
    return is_full and columns >= x.shape[1] * positions


def convolve_thinly(call: LayerCall, x: torch.Tensor) -> torch.Tensor:
    """Do one convolution with the center for all members, and one with the few filters of the noise of each."""
    block, index, convolve = call.block, call.layer.slots["weight"], call.module._conv_forward
    a, b = block.factors(index, x.dtype)  # (addresses, R, rank), (addresses, C, rank)
    base = convolve(x.flatten(0, 1), block.generation.center(index), None)
    filters = b.transpose(1, 2).reshape(len(b), a.shape[2], *block.slot(index).shape[1:])
    x_b = torch.stack([convolve(x[i], filters[address], None) for i, address in enumerate(block.member_address)])
    base = base.view(*x.shape[:2], *base.shape[1:])
    bias, scales = call.optional_weights("bias"), block.scales(index)
    return combine(Parts(base, x_b, a, bias, scales, block.member_address, call.epilogue, shared=False))


def as_image(sizes: Any, *, missing: int = 1) -> tuple[int, ...]:
    """Return the sizes of an image, or those of a sequence as an image of one row."""
    return (missing, *sizes) if len(sizes) == 1 else tuple(sizes)


def is_pointwise(module: Any) -> bool:
    """Return whether a convolution is one product with the channels of each pixel."""
    is_plain = not isinstance(module.padding, str) and not any(module.padding) and module.groups == 1
    return is_plain and set(module.kernel_size) == set(module.stride) == {1}


def convolve_points(call: LayerCall) -> torch.Tensor:
    """Multiply the channels of each pixel with each member's weights: one product for all members."""
    (x,), weight, bias = call.inputs, call.weights("weight").flatten(2), call.optional_weights("bias")
    out = add_bias(batched_linear(x.movedim(2, -1), weight, None), bias, ())
    return apply_epilogue(out.movedim(-1, 2), call.epilogue)


def convolve_per_member(call: LayerCall) -> torch.Tensor:
    """Convolve member by member: one grouped convolution for all members is slower in torch."""
    bias = call.optional_weights("bias")
    biases = [None] * call.block.size if bias is None else bias
    arguments = zip(*call.inputs_of_members(), call.weights("weight"), biases, strict=True)
    outputs = (call.module._conv_forward(*member) for member in arguments)
    return finish_outputs(outputs, call.block.size, call.epilogue)
