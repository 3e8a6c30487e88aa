"""Norms of a block of members on a GPU, in few passes; elsewhere their own code runs under vmap."""

from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from germline.kernels import kernel_device, kernels_for
from germline.population.rules.joining import call_with_channels_last, find_block
from germline.population.rules.layer import LayerCall
from germline.population.rules.pending import materialize

WIDEST_ROW = 8192  # elements that a program of the kernel holds


def has_norm_kernel(module: Any, arguments: dict[str, Any]) -> bool:
    """Return whether there is a kernel for a call of a layer norm."""
    x = arguments["input"]
    fits = prod(module.normalized_shape) <= WIDEST_ROW and x.dtype != torch.float64
    return fits and {"weight", "bias"} <= set(module.trained_slots) and kernel_device(x.device).type == "cuda"


def layer_norm(call: LayerCall) -> Tensor:
    """Normalize for all members."""
    (x,) = call.inputs_of_members()
    rows = x.reshape(len(x), -1, prod(call.module.normalized_shape)).contiguous()
    out = torch.empty_like(rows)
    weight, bias = (call.weights(name).reshape(len(x), -1).contiguous() for name in ("weight", "bias"))
    kernels_for(x.device).layer_norm(out, rows, weight, bias, call.module.eps)
    return out.view(x.shape)


def batch_norm(
    x: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """Return ``F.batch_norm``; that of images is computed with their channels next to each other in memory."""
    x = materialize(x)
    is_updated = training and running_mean is not None
    block = find_block([x]) if x.dtype != torch.float64 and x.numel() and not is_updated else None
    if block is None:
        return F.batch_norm(x, running_mean, running_var, weight, bias, training, momentum, eps)
    statistics = {} if training else {"mean": running_mean, "var": running_var}
    given = {name: x for name, x in ({"weight": weight, "bias": bias} | statistics).items() if x is not None}

    def normalize(images: list[Tensor], *vectors: Tensor) -> Tensor:
        (x,) = images
        kernels, rows = kernels_for(x.device), x.reshape(len(x), -1, x.shape[-1]).contiguous()
        columns = dict(zip(given, vectors, strict=True))
        mean, var = kernels.moments(rows) if training else (columns["mean"].float(), columns["var"].float())
        scale, shift = (var + eps).rsqrt(), columns.get("bias", mean.new_zeros(()))
        scale = scale * columns["weight"] if "weight" in columns else scale
        out: Tensor = kernels.scale_columns(rows, mean, scale, shift)
        return out.view(x.shape)

    return call_with_channels_last(block, [x], normalize, list(given.values()))
