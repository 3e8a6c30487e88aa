"""Linear layers of a block of members.

A product with the weights of a member is one with the center and one with the member's noise:

    x (W + s_i A B^T)^T = x W^T + s_i (x B) A^T         of low rank: two thin products
    x (W + s_i E)^T     = x W^T + s_i x E^T             dense: one product for the two members that share E

Where all members see one input, x, as they do in a network's first layer, the product with the center is made once for
the whole generation. Where each has its own, a card does one large product with the center for all of them, and what
is left is put together in one pass; a CPU, and dense noise, perturb the weights and multiply.
"""

import torch
import torch.nn.functional as F

from germline.kernels import kernel_device, kernels_for
from germline.noise import cached_tensor
from germline.population.blend import Parts, add_bias, add_noise, blend, in_one_pass, put_together
from germline.population.block import Block
from germline.population.buffers import empty
from germline.population.layer import Call, Layer, Outputs, one
from germline.population.pending import Epilogue, Relu, apply_epilogue

SMALL = 1 << 21  # multiplications
THIN = 4  # ranks up to which a product with noise is bounded by reading its input
NARROW = 64  # rows of weights and noise up to which a layer is bounded by reading its input


def linear(call: Call) -> Outputs:
    (x,) = call.inputs
    if is_narrow(call.layer, call.block) and call.batched[0]:
        return one(narrow(call, (x.reshape(len(x), -1, x.shape[-1]).contiguous(),), False, x.shape[1:-1]))
    if has_parts(call):
        return one(put_together(parts(call)).view(call.block.size, *x.shape[call.batched[0] : -1], -1))
    if call.shared_input and call.separable("weight") and worth_sharing(call, x):
        return one(shared(call, x))
    weight = call.weights("weight")
    assert weight is not None
    x = x if call.batched[0] else x.expand(call.block.size, *x.shape)
    if kernel_device(x.device).type == "cuda":  # products there want the bias in memory first, as large as the result
        return one(add_bias(batched_linear(x, weight, None), call.weights("bias"), call.after))
    return one(apply_epilogue(batched_linear(x, weight, call.weights("bias")), call.after))


def has_parts(call: Call) -> bool:
    """Whether the noise of the weights is of low rank, and a member's product best made of parts."""
    sees_one_input_or_a_card = call.shared_input or call.inputs[0].device.type != "cpu"
    low_rank_matrices = call.separable("weight") and call.block.matrix(call.layer.slots["weight"]) is not None
    return sees_one_input_or_a_card and low_rank_matrices


def parts(call: Call) -> Parts:
    (x,), block, index = call.inputs, call.block, call.layer.slots["weight"]
    center, matrix, shared = block.generation.center(index), block.matrix(index), not call.batched[0]
    assert matrix is not None
    a, b = block.factors(matrix, x.dtype)  # (a, R, r), (a, C, r)
    across = b.transpose(1, 2).contiguous()  # (a, r, C)
    if shared:
        rows = x.reshape(-1, x.shape[-1])  # (n, C)
        base = block.generation.once(call.module, x, lambda: F.linear(rows, center))  # (n, R)
        thin = F.linear(rows, across.flatten(0, 1))  # (n, a r)
    else:
        each = x.reshape(len(x), -1, x.shape[-1]).contiguous()  # (m, n, C)
        base = F.linear(each.flatten(0, 1), center).view(*each.shape[:2], -1)  # (m, n, R)
        thin = thin_product(each, across, block)  # (m, n, r)
    return Parts(base, thin, a, call.weights("bias"), block.scales(index), block.where, call.after, shared)


def thin_product(x: torch.Tensor, across: torch.Tensor, block: Block) -> torch.Tensor:
    """x_i B_i for each member: x is (m, n, C), across (a, r, C); (m, n, r)."""
    where = cached_tensor(block.where, x.device)
    if kernel_device(x.device) != x.device or across.shape[1] > THIN or x.dtype == torch.float64:
        return torch.bmm(x, across[where].transpose(1, 2))
    out = torch.empty(*x.shape[:2], across.shape[1], device=x.device)
    kernels_for(x.device).thin_product(out, x, across, where)
    return out


def is_narrow(layer: Layer, block: Block) -> bool:
    """Whether a card does the whole layer in one pass over its input."""
    generation, index = block.generation, layer.slots.get("weight")
    matrix = block.matrix(index) if index is not None else None
    device = generation.candidates.center.device
    fits = matrix is not None and matrix.rank <= THIN and matrix.rows + matrix.rank <= NARROW
    return fits and kernel_device(device).type == "cuda" and generation.dtype == torch.bfloat16


def takes_parts(producer: Layer, after: Epilogue, consumer: Layer, block: Block) -> bool:
    """Whether a layer puts the output of another together as it reads it, so that it never is in memory."""
    index = producer.slots.get("weight")
    matrix = block.matrix(index) if index is not None else None
    plain = not after or (len(after) == 1 and isinstance(after[0], Relu))
    return plain and matrix is not None and matrix.rank <= THIN and is_narrow(consumer, block)


def narrow_of_parts(call: Call, given: Parts, sizes: torch.Size) -> Outputs:
    """The layer on the output of another that is yet to be put together; sizes are those of its input, but the last."""
    base, thin, thick, bias, scales = given.flat(given.base.device)
    inputs = (base.squeeze(-1), thin.squeeze(-1), thick, bias, scales)
    return one(narrow(call, inputs, bool(given.after), sizes))


def narrow(call: Call, inputs: tuple[torch.Tensor, ...], relu_inputs: bool, sizes: torch.Size) -> torch.Tensor:
    block, index = call.block, call.layer.slots["weight"]
    matrix, dtype = block.matrix(index), inputs[0].dtype
    assert matrix is not None
    a, b = (factor.transpose(1, 2).contiguous() for factor in block.factors(matrix, dtype))  # (a, r, R), (a, r, C)
    n = inputs[0].shape[-2]
    out = torch.empty(block.size, n, matrix.rows, dtype=dtype, device=inputs[0].device)
    relu, _, _, rest = in_one_pass(call.after)
    bias = call.weights("bias")
    bias = out.new_zeros(block.size, matrix.rows) if bias is None else bias.contiguous()
    scales, where = block.scales(index).float(), cached_tensor(block.where, out.device)
    weight = block.generation.center(index)
    kernels_for(out.device).narrow_linear(out, inputs, relu_inputs, weight, a, b, bias, scales, where, relu)
    return apply_epilogue(out, rest).view(block.size, *sizes, matrix.rows)


def worth_sharing(call: Call, x: torch.Tensor) -> bool:
    """On a CPU dense noise is multiplied address by address: not where a product is done sooner than its call."""
    if x.device.type == "cpu":
        return x.numel() * call.block.slot(call.layer.slots["weight"]).shape[0] >= SMALL
    return kernel_device(x.device) == x.device and not isinstance(call.block.generation.candidates.sigma, torch.Tensor)


def shared(call: Call, x: torch.Tensor) -> torch.Tensor:
    """Dense noise where all members see one input."""
    block, index = call.block, call.layer.slots["weight"]
    rows, center = x.reshape(-1, x.shape[-1]), block.generation.center(index)
    product = block.generation.once(call.module, x, lambda: F.linear(rows, center))  # (n, R)
    scales, bias = block.scales(index), call.weights("bias")
    if x.device.type != "cpu":
        terms = F.linear(rows, block.noises(index, x.dtype).flatten(0, 1))  # (n, a R)
        out = add_noise(product, terms, scales, block.where, bias, call.after)
        return out.view(block.size, *x.shape[:-1], product.shape[-1])
    noise = lambda j: F.linear(rows, block.noise_at(index, j, x.dtype))  # noqa: E731
    out = blend(product, noise, scales, block.where, bias, call.after)
    return out.view(block.size, *x.shape[:-1], product.shape[-1])


def batched_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """A linear layer for each member: x is (m, ..., C), weight (m, R, C), bias (m, R)."""
    rows = x.reshape(len(x), -1, x.shape[-1])  # (m, n, C)
    across = weight.transpose(1, 2)  # (m, C, R)
    out = empty((*rows.shape[:2], across.shape[2]), rows)
    product = torch.bmm(rows, across, out=out) if bias is None else torch.baddbmm(bias[:, None], rows, across, out=out)
    return product.view(*x.shape[:-1], product.shape[-1])
