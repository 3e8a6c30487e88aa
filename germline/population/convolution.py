"""Convolutions of a block of members; see ``linear`` for how a product is made of parts."""

from math import prod
from typing import Any

import torch

from germline.kernels import kernel_device, kernels_for
from germline.noise import cached_tensor
from germline.population.blend import Parts, add_noise, blend, put_together
from germline.population.buffers import stacked
from germline.population.layer import Call, Outputs, one
from germline.population.linear import THIN
from germline.population.pending import apply_epilogue


def convolution(call: Call) -> Outputs:
    (x,) = call.inputs
    several = x.dim() - call.batched[0] == len(call.module.kernel_size) + 2  # examples, and not a single one
    if not (call.separable("weight") and call.module.groups == 1 and several):
        return one(member_by_member(call, x))
    matrix = call.block.matrix(call.layer.slots["weight"])
    if call.shared_input:
        return one(of_one_input(call, x))
    if matrix is not None and matrix.rank <= THIN and has_kernel(call.module, x):
        return one(of_many_inputs(call, x))
    return one(member_by_member(call, x))


def of_one_input(call: Call, x: torch.Tensor) -> torch.Tensor:
    block, index = call.block, call.layer.slots["weight"]

    def convolved(weight: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = call.module._conv_forward(x, weight, None)
        return out

    product = block.generation.once(call.module, x, lambda: convolved(block.generation.center(index)))
    bias, matrix, scales = call.weights("bias"), block.matrix(index), block.scales(index)
    if matrix is not None:
        a, b = block.factors(matrix, x.dtype)  # (a, R, r), (a, C, r)
        filters = b.transpose(1, 2).reshape(-1, *block.slot(index).shape[1:])  # (a r, channels, *kernel)
        return put_together(Parts(product, convolved(filters), a, bias, scales, block.where, call.after))
    if kernel_device(x.device).type == "cuda" and not isinstance(block.generation.candidates.sigma, torch.Tensor):
        filters = block.noises(index, x.dtype).flatten(0, 1)
        return add_noise(product, convolved(filters), scales, block.where, bias, call.after)
    if x.device.type != "cpu":
        return member_by_member(call, x)
    noise = lambda j: convolved(block.noise_at(index, j, x.dtype))  # noqa: E731
    return blend(product, noise, scales, block.where, bias, call.after)


def of_many_inputs(call: Call, x: torch.Tensor) -> torch.Tensor:
    """One large convolution with the center's filters, and the noise of each member by a kernel of its own."""
    block, index, module = call.block, call.layer.slots["weight"], call.module
    matrix = block.matrix(index)
    assert matrix is not None
    a, b = block.factors(matrix, x.dtype)  # (a, R, r), (a, C, r)
    x = x.contiguous()
    base = module._conv_forward(x.flatten(0, 1), block.generation.center(index), None)
    base = base.contiguous().view(*x.shape[:2], *base.shape[1:])  # (m, n, R, *sizes)
    filters = b.transpose(1, 2).reshape(len(b), matrix.rank, *flat(block.slot(index).shape[1:], 3))
    thin = torch.empty(*x.shape[:2], matrix.rank, *flat(base.shape[3:], 2), device=x.device)
    settings = [
        flat(values, 2, missing=i != 1) for i, values in enumerate((module.stride, module.padding, module.dilation))
    ]
    where = cached_tensor(block.where, x.device)
    planes = x.view(*x.shape[:3], *flat(x.shape[3:], 2))
    kernels_for(x.device).thin_convolution(thin, planes, filters.contiguous(), where, *settings)
    thin = thin.view(*x.shape[:2], matrix.rank, *base.shape[3:])
    scales = block.scales(index)
    return put_together(Parts(base, thin, a, call.weights("bias"), scales, block.where, call.after, shared=False))


def has_kernel(module: Any, x: torch.Tensor) -> bool:
    plain = module.padding_mode == "zeros" and not isinstance(module.padding, str)
    small = len(module.kernel_size) <= 2 and prod(module.kernel_size) <= 49
    return plain and small and x.dtype != torch.float64 and kernel_device(x.device).type == "cuda"


def flat(sizes: Any, count: int, *, missing: int = 1) -> tuple[int, ...]:
    """Sizes of a sequence as those of an image of one row."""
    sizes = tuple(sizes)
    return (
        (*sizes[: count - 2], *(missing,) * (count - len(sizes)), *sizes[count - 2 :]) if len(sizes) < count else sizes
    )


def member_by_member(call: Call, x: torch.Tensor) -> torch.Tensor:
    """Grouped convolutions would do all members at once, but torch is slower at them."""
    weight, bias = call.weights("weight"), call.weights("bias")
    assert weight is not None
    inputs = x if call.batched[0] else [x] * call.block.size
    biases = [None] * call.block.size if bias is None else bias
    convolve = call.module._conv_forward
    return stacked(
        [apply_epilogue(convolve(*of_one), call.after) for of_one in zip(inputs, weight, biases, strict=True)]
    )
