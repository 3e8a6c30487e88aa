"""Convolutions of a block of members; see ``linear`` for what is gained where all members see one input."""

import torch

from germline.population.blend import blend, blend_outer
from germline.population.layer import Call, Outputs, each, one


def convolution(call: Call) -> Outputs:
    (x,) = call.inputs
    several = x.dim() == len(call.module.kernel_size) + 2  # examples, and not a single one
    if not (call.shared_input and call.separable("weight") and call.module.groups == 1 and several):
        return each(call)
    block, index = call.block, call.layer.slots["weight"]

    def convolved(weight: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = call.module._conv_forward(x, weight, None)
        return out

    product = block.generation.once(call.module, x, lambda: convolved(block.generation.centre(index)))
    bias, matrix, scales = call.weights("bias"), block.matrix(index), block.scales(index)
    if matrix is not None:
        a, b = block.factors(matrix, x.dtype)  # (a, R, r), (a, C, r)
        filters = b.transpose(1, 2).reshape(-1, *block.slot(index).shape[1:])  # (a r, channels, *kernel)
        return one(blend_outer(product, convolved(filters), a, scales, block.where, bias))
    return one(blend(product, lambda j: convolved(block.noise_at(index, j, x.dtype)), scales, block.where, bias))
