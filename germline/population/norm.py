"""Layer norms of a block of members on a card, in one pass; elsewhere they compute as they do."""

from math import prod
from typing import Any

import torch

from germline.kernels import kernel_device, kernels_for
from germline.population.layer import Call, Outputs, one

WIDEST = 8192  # elements of a row that a program holds


def has_kernel(module: Any, x: torch.Tensor) -> bool:
    fits = prod(module.normalized_shape) <= WIDEST and x.dtype != torch.float64
    return fits and kernel_device(x.device).type == "cuda"


def layer_norm(call: Call) -> Outputs:
    (x,), weight, bias = call.inputs, call.weights("weight"), call.weights("bias")
    assert weight is not None
    assert bias is not None
    x = x if call.batched[0] else x.expand(call.block.size, *x.shape)
    rows = x.reshape(len(x), -1, prod(call.module.normalized_shape)).contiguous()
    out = torch.empty_like(rows)
    scale, shift = (part.reshape(len(x), -1).contiguous() for part in (weight, bias))
    kernels_for(x.device).layer_norm(out, rows, scale, shift, call.module.eps)
    return one(out.view(x.shape))
