"""Linear layers of a block of members; see ``blend`` for how a product is split into parts.

Where all members see one input, as they do in a network's first layer, the product with the center is computed once for
the whole generation. Where each has its own input, there is one large product with the center for all members, and the
noise of low rank is added in one pass. Dense noise, and a CPU in bfloat16, perturb the weights and multiply.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from germline.kernels import kernel_device, kernels_for
from germline.noise import cached_tensor
from germline.population.block import Block, current_block
from germline.population.rules import blend
from germline.population.rules.layer import Layer, LayerCall
from germline.population.rules.passes import fuse_epilogue
from germline.population.rules.pending import Epilogue, Relu, apply_epilogue
from germline.population.rules.product import multiply, multiply_members

SMALL = 1 << 21  # multiplications: a smaller product on a CPU takes less time than calling it
THIN = 4  # ranks up to which a product with noise is bounded by reading its input
NARROW = 64  # rows of weights and noise up to which a layer is bounded by reading its input


def linear(call: LayerCall) -> Tensor:
    """Compute a linear layer for all members."""
    (x,), (batched,), block = call.inputs, call.batched, call.block
    if not is_activation(call.epilogue):  # a pooling needs the output in its final shape
        return apply_epilogue(linear(replace(call, epilogue=())), call.epilogue)
    if is_narrow(call.layer, block) and batched:
        return multiply_narrow(call, (x.reshape(len(x), -1, x.shape[-1]).contiguous(),), False, x.shape[1:-1])
    if call.is_separable("weight"):
        has_low_rank = block.matrix(call.layer.slots["weight"]) is not None
        if not batched and (has_low_rank or is_worth_sharing(call, x)):
            return blend.multiply_shared_input(call, x, multiply_rows(x)).view(block.size, *x.shape[:-1], -1)
        if batched and has_low_rank and (x.device.type != "cpu" or x.dtype != torch.bfloat16):
            return blend.combine(split(call)).view(*x.shape[:-1], -1)
    (x,), weight, bias = call.inputs_of_members(), call.weights("weight"), call.optional_weights("bias")
    if kernel_device(x.device).type == "cuda":  # products there need the bias in memory first, as large as the result
        return blend.add_bias(batched_linear(x, weight, None), bias, call.epilogue)
    return apply_epilogue(batched_linear(x, weight, bias), call.epilogue)


def is_activation(epilogue: Epilogue) -> bool:
    """Return whether an epilogue is at most a relu."""
    return not epilogue or (len(epilogue) == 1 and isinstance(epilogue[0], Relu))


def is_worth_sharing(call: LayerCall, x: Tensor) -> bool:
    """Return whether dense noise is multiplied apart from the center: on a CPU, if the products are not small."""
    if x.device.type == "cpu":
        return x.numel() * call.block.slot(call.layer.slots["weight"]).shape[0] >= SMALL
    return blend.can_multiply_noise(call, x)


def multiply_rows(x: Tensor) -> Callable[[Tensor], Tensor]:
    """Return the function that multiplies x with weights, (rows, C), and gives (n, rows)."""
    flat = x.reshape(-1, x.shape[-1])  # (n, C)
    return lambda weight: multiply(flat, weight)


def split(call: LayerCall) -> blend.Parts:
    """Return the parts of the output of a layer whose noise is of low rank."""
    (x,), block, index = call.inputs, call.block, call.layer.slots["weight"]
    if call.has_shared_input:
        return blend.split_shared_product(call, x, multiply_rows(x))
    a, b = block.factors(index, x.dtype)  # (addresses, R, rank), (addresses, C, rank)
    rows = x.reshape(len(x), -1, x.shape[-1]).contiguous()  # (members, n, C)
    base = multiply(rows.flatten(0, 1), block.generation.center(index)).view(*rows.shape[:2], -1)  # (members, n, R)
    x_b = multiply_thin(rows, b.transpose(1, 2).contiguous(), block)  # (members, n, rank)
    bias = call.optional_weights("bias")
    return blend.Parts(base, x_b, a, bias, block.scales(index), block.member_address, call.epilogue, shared=False)


def multiply_thin(x: Tensor, b_t: Tensor, block: Block) -> Tensor:
    """Return x_i B_i for each member: x is (members, n, C), b_t (addresses, rank, C); (members, n, rank)."""
    member_address = cached_tensor(block.member_address, x.device)
    if kernel_device(x.device).type != "cuda" or b_t.shape[1] > THIN or x.dtype == torch.float64:
        b_of_members = b_t[member_address].contiguous()  # (members, rank, C)
        columns, rank = x.shape[2], b_t.shape[1]
        # torch gives a dimension of one element any stride, and MKL takes ten times as long with a stride of 1
        return torch.bmm(x, b_of_members.as_strided((len(x), columns, rank), (rank * columns, 1, columns)))
    out = torch.empty(*x.shape[:2], b_t.shape[1], device=x.device)
    kernels_for(x.device).thin_product(out, x, b_t, member_address)
    return out


def is_narrow(layer: Layer, block: Block) -> bool:
    """Return whether a GPU does the whole layer in one pass over its input."""
    generation, matrix = block.generation, block.matrix(layer.slots.get("weight"))
    has_kernels = kernel_device(generation.candidates.center.device).type == "cuda"
    fits = matrix is not None and matrix.rank <= THIN and matrix.rows + matrix.rank <= NARROW
    return fits and has_kernels and generation.dtype == torch.bfloat16


def can_chain(producer: Layer, epilogue: Epilogue, consumer: Layer, block: Block) -> bool:
    """Return whether a layer combines the parts of another's output as it reads it, so that it never is in memory."""
    matrix = block.matrix(producer.slots.get("weight"))
    return is_activation(epilogue) and matrix is not None and matrix.rank <= THIN and is_narrow(consumer, block)


def multiply_parts(call: LayerCall, parts: blend.Parts, sizes: torch.Size) -> Tensor:
    """Compute a narrow layer on the parts of another layer's output, of these sizes without the last."""
    base, x_b, a, bias, scales = parts.flatten(parts.base.device)
    return multiply_narrow(call, (base.squeeze(-1), x_b.squeeze(-1), a, bias, scales), bool(parts.epilogue), sizes)


def multiply_narrow(call: LayerCall, inputs: tuple[Tensor, ...], relu_inputs: bool, sizes: torch.Size) -> Tensor:
    """Compute a narrow layer by its kernel: of its input, (members, n, C), or of the parts of its input."""
    block, index, dtype = call.block, call.layer.slots["weight"], inputs[0].dtype
    a, b = (factor.transpose(1, 2).contiguous() for factor in block.factors(index, dtype))  # (addresses, rank, R or C)
    rows, n = a.shape[2], inputs[0].shape[-2]
    out = torch.empty(block.size, n, rows, dtype=dtype, device=inputs[0].device)
    fused, _, rest = fuse_epilogue(call.epilogue)
    bias = call.optional_weights("bias")
    bias = out.new_zeros(block.size, rows) if bias is None else bias.contiguous()
    scales, member_address = block.scales(index).float(), cached_tensor(block.member_address, out.device)
    weight = block.generation.center(index)
    arrays = (weight, a, b, bias, scales, member_address)
    kernels_for(out.device).narrow_linear(out, inputs, relu_inputs, *arrays, fused.relu)
    return apply_epilogue(out, rest).view(block.size, *sizes, rows)


def linear_function(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return ``F.linear``; with weights of members on a CPU, by products that are several times as fast as vmap's."""
    block, is_batched = current_block.find_whole(), torch._C._functorch.is_batchedtensor
    has_members = is_batched(weight) and weight.dim() == 2 and (bias is None or is_batched(bias))
    if block is None or not has_members or x.device.type != "cpu":
        return F.linear(x, weight, bias)

    def compute(inputs: list[Tensor], batched: list[bool]) -> list[Tensor]:
        rows = inputs[0] if batched[0] else inputs[0].expand(block.size, *inputs[0].shape)
        return [batched_linear(rows, inputs[1], inputs[2] if bias is not None else None)]

    (out,) = block.call_once([x, weight] + ([] if bias is None else [bias]), compute)
    return out


def batched_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return a linear layer of each member: x is (members, ..., C), weight (members, R, C), bias (members, R)."""
    rows = x.reshape(len(x), -1, x.shape[-1])  # (members, n, C)
    return multiply_members(rows, weight, bias).view(*x.shape[:-1], -1)
