"""Products of layers that are linear in their weights: what all members share, their noise, their bias, the epilogue.

A product with the weights of member i is one with the center and one with the member's noise:

    x (W + s_i A B^T)^T = x W^T + s_i (x B) A^T         of low rank: two products with thin matrices
    x (W + s_i E)^T     = x W^T + s_i x E^T             dense: one product for the two members that share E

The same holds for a convolution, where the columns of B and the rows of E are filters.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from germline.kernels import as_kernel_arg, kernel_device, kernels_for
from germline.noise import cached_tensor
from germline.population.buffers import allocate
from germline.population.rules.layer import LayerCall
from germline.population.rules.passes import Fused, add_noise_on_cpu, fuse_epilogue
from germline.population.rules.pending import Epilogue, apply_epilogue

Addresses = NDArray[np.int64]  # of each member, the place of its noise among the addresses of the block


@dataclass(frozen=True)
class Parts:
    """The parts of an output: base + scale_i x_b_i a_i^T + bias_i for each member i, then the epilogue.

    ``base`` is (n, R) or (n, R, ...) and ``x_b`` (n, addresses * rank) or (n, addresses * rank, ...), the same for all
    members; or there is one for each, with the members first: (members, n, R, ...) and (members, n, rank, ...), of
    which the first may be written to. ``a`` is (addresses, R, rank), ``bias`` (members, R).
    """

    base: Tensor
    x_b: Tensor
    a: Tensor
    bias: Tensor | None
    scales: Tensor  # of the noise of each member
    member_address: Addresses
    epilogue: Epilogue
    shared: bool = True

    def flatten(self, device: torch.device) -> tuple[Tensor, ...]:
        """Return base, x_b, a, bias and scales as kernels take them: positions in one axis, ranks before rows."""
        (addresses, _, rank), members = self.a.shape, len(self.scales)
        place = torch.device("cpu") if device.type == "cpu" else self.base.device
        n, rows = self.base.shape[:2] if self.shared else self.base.shape[1:3]
        full = torch.float64 if self.base.dtype == torch.float64 else torch.float32
        dtype = full if device.type == "cpu" else self.base.dtype  # in memory; the arithmetic is in full
        base = self.base.reshape(*(() if self.shared else (members,)), n, rows, -1).to(place, dtype)
        x_b = self.x_b.reshape(*((n, addresses) if self.shared else (members, n)), rank, -1).to(place)
        if device.type == "cpu":
            base, x_b = base.contiguous(), x_b.contiguous().to(dtype)
        a = self.a.transpose(1, 2).to(place, dtype).contiguous()  # (addresses, rank, R)
        bias = base.new_zeros(members, rows) if self.bias is None else self.bias.to(place, dtype).contiguous()
        return base, x_b, a, bias, self.scales.to(place, full)


def split_shared_product(call: LayerCall, x: Tensor, multiply: Callable[[Tensor], Tensor]) -> Parts:
    """Return the parts of a layer's output where all members see one input and the noise is of low rank.

    Args:
        call: the call of the layer.
        x: its input.
        multiply: returns the product of x and weights of the layer's shape, with any number of rows: (n, rows, ...).
    """
    block, index = call.block, call.layer.slots["weight"]
    base = multiply_center(call, x, multiply)
    a, b = block.factors(index, x.dtype)  # (addresses, R, rank), (addresses, C, rank)
    x_b = multiply(b.transpose(1, 2).reshape(-1, *block.slot(index).shape[1:]))
    bias = call.optional_weights("bias")
    return Parts(base, x_b, a, bias, block.scales(index), block.member_address, call.epilogue)


def multiply_center(call: LayerCall, x: Tensor, multiply: Callable[[Tensor], Tensor]) -> Tensor:
    """Return the product of x and the center, (n, R, ...), which is computed once for all blocks of a generation."""
    generation, index = call.block.generation, call.layer.slots["weight"]

    def compute() -> Tensor:
        base = multiply(generation.center(index))
        if base.dim() == 2 or kernel_device(base.device).type == "cpu":
            return base
        return base.movedim(1, -1).contiguous().movedim(-1, 1)  # as kernels read it

    return generation.share_product(call.module, x, compute)


def multiply_shared_input(call: LayerCall, x: Tensor, multiply: Callable[[Tensor], Tensor]) -> Tensor:
    """Return a layer's output where all members see one input: (members, n, R, ...). See ``split_shared_product``."""
    block, index = call.block, call.layer.slots["weight"]
    if block.matrix(index) is not None:
        return combine(split_shared_product(call, x, multiply))
    base = multiply_center(call, x, multiply)
    if kernel_device(x.device).type == "cuda":
        return add_noise(call, base, multiply(block.dense_noise(index, x.dtype).flatten(0, 1)))
    return add_noise_on_cpu(call, base, multiply)


def can_multiply_noise(call: LayerCall, x: Tensor) -> bool:
    """Return whether ``multiply_shared_input`` can be used: on all devices, except for dense noise on some."""
    has_vector_sigma = isinstance(call.block.generation.candidates.sigma, Tensor)
    has_kernels = kernel_device(x.device).type == "cuda" and not has_vector_sigma
    return x.device.type == "cpu" or has_kernels or call.block.matrix(call.layer.slots["weight"]) is not None


def combine(parts: Parts) -> Tensor:
    """Return the output that the parts are of, (members, n, R, ...), after its epilogue."""
    device = kernel_device(parts.base.device)
    if not parts.shared and device != parts.base.device:
        return combine_without_kernels(parts)
    positions = parts.base.shape[2 if parts.shared else 3 :]
    fused, sizes, rest = fuse_epilogue(parts.epilogue, positions)
    base, x_b, a, bias, scales = parts.flatten(device)
    members, (n, rows) = len(scales), base.shape[-3:-1]
    out = allocate_output((members, n, rows, sizes.numel()), base, device) if parts.shared or fused.window else base
    member_address = cached_tensor(parts.member_address, base.device)
    arrays = (as_kernel_arg(array) for array in (out, base, x_b, a, bias, scales, member_address))
    kernels_for(device).blend_outer(*arrays, *fused)
    return apply_epilogue(out.view(members, n, rows, *sizes).to(parts.base.device, parts.base.dtype), rest)


def allocate_output(shape: tuple[int, int, int, int], like: Tensor, device: torch.device) -> Tensor:
    """Return memory for (members, n, rows, positions), in the order of a device's kernels: a GPU's have rows last."""
    if device.type == "cpu":
        return allocate(shape, like)
    members, n, rows, positions = shape
    return like.new_empty(members, n, positions, rows).transpose(2, 3)


def combine_without_kernels(parts: Parts) -> Tensor:
    """Do the same as ``combine`` by torch's operations, for a device without kernels, where bases are not shared."""
    base, x_b, a, bias, scales = parts.flatten(parts.base.device)
    a_of_members = a[cached_tensor(parts.member_address, base.device)]  # (members, rank, R)
    scaled = x_b.to(base.dtype) * scales.to(base.dtype)[:, None, None, None]
    term = torch.einsum("mnrp,mrk->mnkp", scaled, a_of_members)
    out = base.add_(term).add_(bias[:, None, :, None])
    return apply_epilogue(out.view(parts.base.shape), parts.epilogue)


def add_noise(call: LayerCall, base: Tensor, noise: Tensor) -> Tensor:
    """Return base + scale_i noise_i + bias_i for each member, on a GPU: (members, n, R, ...), after the epilogue.

    ``base`` is (n, R, ...), ``noise`` (n, addresses * R, ...).
    """
    n, rows = base.shape[:2]
    fused, sizes, rest = fuse_epilogue(call.epilogue, base.shape[2:])
    out = allocate_output((call.block.size, n, rows, sizes.numel()), base, kernel_device(base.device))
    noise = noise.reshape(n, -1, rows, base.shape[2:].numel())
    base = base.reshape(n, rows, -1)
    scales, bias = call.block.scales(call.layer.slots["weight"]), call.optional_weights("bias")
    add_terms(out, base, noise, bias, scales, call.block.member_address, fused)
    return apply_epilogue(out.view(*out.shape[:3], *sizes), rest)


def add_bias(x: Tensor, bias: Tensor | None, epilogue: Epilogue) -> Tensor:
    """Add bias_i to each member in place, then apply the epilogue: x (members, ..., R), bias (members, R)."""
    if kernel_device(x.device).type != "cuda" or not x.is_contiguous():
        return apply_epilogue(x if bias is None else x.add_(bias.view(len(x), *(1,) * (x.dim() - 2), -1)), epilogue)
    if bias is None and not epilogue:
        return x
    flat = x.view(len(x), -1, x.shape[-1], 1)
    fused, _, rest = fuse_epilogue(epilogue)
    add_terms(flat, flat, None, bias, x.new_ones(len(x)), np.zeros(len(x), np.int64), fused)
    return apply_epilogue(x, rest)


def add_terms(
    out: Tensor, base: Tensor, noise: Tensor | None, bias: Tensor | None, scales: Tensor, index: Addresses, fused: Fused
) -> None:
    """Write base + noise + bias of each member to out, by the kernel of ``combine`` without a factor A."""
    full = torch.float64 if out.dtype == torch.float64 else torch.float32
    bias = out.new_zeros(out.shape[0], out.shape[2]) if bias is None else bias.contiguous()
    arrays = (out, base, noise, None, bias, scales.to(full), cached_tensor(index, out.device))
    kernels_for(out.device).blend_outer(*arrays, *fused)
