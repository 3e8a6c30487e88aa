"""Products of an input with weights on a CPU, by the fastest library that torch brings."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from germline.population.buffers import allocate

LARGE = 1 << 20  # multiplications: a smaller product takes less time than calling oneDNN, about 10 microseconds
onednn: Any = getattr(torch.ops.mkldnn, "_linear_pointwise", None) if torch._C._has_mkldnn else None


def multiply(x: Tensor, weight: Tensor) -> Tensor:
    """Return x times the transpose of the weight: x is (n, C), weight (R, C); (n, R).

    Torch has two libraries for it on a CPU. MKL, its choice, uses narrower vectors on AMD's processors and reaches half
    of the speed of oneDNN there; on Intel's both are alike.
    """
    if onednn is None or not is_large(x, weight):
        return F.linear(x, weight)
    product: Tensor = onednn(x, weight, None, "none", [], "")
    return product


def multiply_members(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return x_i times the transpose of weight_i plus bias_i for each member: (members, n, C), (members, R, C)."""
    out = allocate((*x.shape[:2], weight.shape[1]), x)
    if onednn is not None and is_large(x[0], weight[0]):
        for i in range(len(x)):
            out[i] = onednn(x[i], weight[i], None if bias is None else bias[i], "none", [], "")
        return out
    weight_t = weight.transpose(1, 2)  # (members, C, R)
    if bias is None:
        return torch.bmm(x, weight_t, out=out)
    return torch.baddbmm(bias[:, None], x, weight_t, out=out)


def is_large(x: Tensor, weight: Tensor) -> bool:
    """Return whether a product is worth a call of oneDNN: one in float32, on a CPU, that is not small."""
    is_float32 = x.dtype == weight.dtype == torch.float32 and x.device.type == "cpu"
    return is_float32 and x.shape[0] * weight.numel() >= LARGE and x.is_contiguous() and weight.is_contiguous()
