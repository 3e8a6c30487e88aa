"""Linear layers of a block of members.

Where all members see one input, x, as they do in a network's first layer, the product with the centre is made once for
the whole generation, and what is left for a member is its noise:

    x (W + s_i A B^T)^T = x W^T + s_i (x B) A^T         of low rank: two thin products
    x (W + s_i E)^T     = x W^T + s_i x E^T             dense: one product for the two members that share E

Elsewhere the weights are perturbed and multiplied.
"""

import numpy as np
import torch
import torch.nn.functional as F

from germline.kernels import home, kernels_of, on
from germline.population.blend import blend, blend_outer, in_one_pass
from germline.population.buffers import empty
from germline.population.layer import Call, Outputs, one
from germline.population.pending import finish

SMALL = 1 << 21  # multiplications
RANKS = 16  # to which factors are filled up: the smallest that tensor cores take


def linear(call: Call) -> Outputs:
    (x,) = call.inputs
    if call.shared_input and call.separable("weight") and worth_sharing(call, x):
        return one(shared(call, x))
    x = x if call.batched[0] else x.expand(call.block.size, *x.shape)
    if x.device.type != "cpu" and call.separable("weight") and call.block.matrix(call.layer.slots["weight"]):
        return one(corrected(call, x))
    weight = call.weights("weight")
    assert weight is not None
    return one(finish(batched_linear(x, weight, call.weights("bias")), call.after))


def corrected(call: Call, x: torch.Tensor) -> torch.Tensor:
    """One product with the centre for all members, then the correction of each: large products are what cards like."""
    block, index = call.block, call.layer.slots["weight"]
    matrix, centre, bias = block.matrix(index), block.generation.centre(index), call.weights("bias")
    assert matrix is not None
    a, b = block.factors(matrix, x.dtype)  # (a, R, r), (a, C, r)
    rows = x.reshape(len(x), -1, x.shape[-1])  # (m, n, C)
    scales, where = on(block.scales(index).astype(np.float32), x.device), on(block.where, x.device)
    if home(x.device) == x.device and x.dtype == torch.bfloat16 and matrix.rank <= RANKS:
        a, b = (F.pad(part.transpose(1, 2), (0, 0, 0, RANKS - matrix.rank)).contiguous() for part in (a, b))
        out = x.new_empty(*rows.shape[:2], matrix.rows)
        relu, _, rest = in_one_pass(call.after, 0)
        bias = x.new_zeros(len(x), matrix.rows) if bias is None else bias.contiguous()
        kernels_of(x.device).linear_outer(out, rows.contiguous(), centre, a, b, bias, scales, where, relu)
    else:
        product = F.linear(rows.flatten(0, 1), centre).view(*rows.shape[:2], -1)
        thin = torch.bmm(rows, b[where]) * scales[:, None, None].to(x.dtype)
        out, rest = torch.baddbmm(product, thin, a[where].transpose(1, 2)), call.after
        out = out if bias is None else out.add_(bias[:, None])
    return finish(out, rest).view(*x.shape[:-1], matrix.rows)


def worth_sharing(call: Call, x: torch.Tensor) -> bool:
    """Dense noise is multiplied address by address: not where a product is done sooner than its call."""
    index = call.layer.slots["weight"]
    large = x.device.type == "cpu" and x.numel() * call.block.slot(index).shape[0] >= SMALL
    return large or call.block.matrix(index) is not None


def batched_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """A linear layer for each member: x is (m, ..., C), weight (m, R, C), bias (m, R)."""
    rows = x.reshape(len(x), -1, x.shape[-1])  # (m, n, C)
    across = weight.transpose(1, 2)  # (m, C, R)
    out = empty((*rows.shape[:2], across.shape[2]), rows)
    product = torch.bmm(rows, across, out=out) if bias is None else torch.baddbmm(bias[:, None], rows, across, out=out)
    return product.view(*x.shape[:-1], product.shape[-1])


def shared(call: Call, x: torch.Tensor) -> torch.Tensor:
    block, index = call.block, call.layer.slots["weight"]
    rows = x.reshape(-1, x.shape[-1])  # (n, C)
    centre = block.generation.centre(index)
    product = block.generation.once(call.module, x, lambda: F.linear(rows, centre))  # (n, R)
    bias, matrix, scales = call.weights("bias"), block.matrix(index), block.scales(index)
    if matrix is not None:
        a, b = block.factors(matrix, x.dtype)  # (a, R, r), (a, C, r)
        thin = F.linear(rows, b.transpose(1, 2).flatten(0, 1))  # (n, a r)
        out = blend_outer(product, thin, a, scales, block.where, bias, call.after)
    else:
        noise = lambda j: F.linear(rows, block.noise_at(index, j, x.dtype))  # noqa: E731
        out = blend(product, noise, scales, block.where, bias, call.after)
    return out.view(block.size, *x.shape[:-1], product.shape[-1])
