"""Layer norms of a block of members on a GPU, in one pass; elsewhere their own code runs under vmap."""

from math import prod
from typing import Any

import torch

from germline.kernels import kernel_device, kernels_for
from germline.population.rules.layer import LayerCall

WIDEST_ROW = 8192  # elements that a program of the kernel holds


def has_norm_kernel(module: Any, arguments: dict[str, Any]) -> bool:
    """Return whether there is a kernel for a call of a layer norm."""
    x = arguments["input"]
    fits = prod(module.normalized_shape) <= WIDEST_ROW and x.dtype != torch.float64
    return fits and {"weight", "bias"} <= set(module.trained_slots) and kernel_device(x.device).type == "cuda"


def layer_norm(call: LayerCall) -> torch.Tensor:
    """Normalize for all members."""
    (x,) = call.inputs_of_members()
    rows = x.reshape(len(x), -1, prod(call.module.normalized_shape)).contiguous()
    out = torch.empty_like(rows)
    weight, bias = (call.weights(name).reshape(len(x), -1).contiguous() for name in ("weight", "bias"))
    kernels_for(x.device).layer_norm(out, rows, weight, bias, call.module.eps)
    return out.view(x.shape)
