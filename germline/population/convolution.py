"""Convolutions of a block of members; see ``linear`` for what is gained where all members see one input."""

import torch

from germline.population.blend import Parts, blend, put_together
from germline.population.buffers import stacked
from germline.population.layer import Call, Outputs, one
from germline.population.pending import finish


def member_by_member(call: Call, x: torch.Tensor) -> torch.Tensor:
    """Grouped convolutions would do all members at once, but torch is slower at them."""
    weight, bias = call.weights("weight"), call.weights("bias")
    assert weight is not None
    inputs = x if call.batched[0] else [x] * call.block.size
    biases = [None] * call.block.size if bias is None else bias
    convolve = call.module._conv_forward
    return stacked([finish(convolve(*of_one), call.after) for of_one in zip(inputs, weight, biases, strict=True)])


def convolution(call: Call) -> Outputs:
    (x,) = call.inputs
    several = x.dim() == len(call.module.kernel_size) + 2  # examples, and not a single one
    if not (call.shared_input and call.separable("weight") and call.module.groups == 1 and several):
        return one(member_by_member(call, x))
    block, index = call.block, call.layer.slots["weight"]

    def convolved(weight: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = call.module._conv_forward(x, weight, None)
        return out

    product = block.generation.once(call.module, x, lambda: convolved(block.generation.centre(index)))
    bias, matrix, scales = call.weights("bias"), block.matrix(index), block.scales(index)
    if matrix is not None:
        a, b = block.factors(matrix, x.dtype)  # (a, R, r), (a, C, r)
        filters = b.transpose(1, 2).reshape(-1, *block.slot(index).shape[1:])  # (a r, channels, *kernel)
        return one(put_together(Parts(product, convolved(filters), a, bias, scales, block.where, call.after)))
    noise = lambda j: convolved(block.noise_at(index, j, x.dtype))  # noqa: E731
    return one(blend(product, noise, scales, block.where, bias, call.after))
