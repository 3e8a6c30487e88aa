"""Functions of torch that have a faster form for a block of members."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from germline.population.attention import attention
from germline.population.pooling import max_pool2d

FUNCTIONS: dict[Any, Callable[..., Any]] = {
    F.max_pool2d: max_pool2d,
    torch.max_pool2d: max_pool2d,
    F.scaled_dot_product_attention: attention,
}


class FasterFunctions(TorchFunctionMode):
    """While it is entered, functions that have a faster form are called in it, by this thread."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        plain = bool(args) and type(args[0]) is torch.Tensor  # others have a way of their own
        return (FUNCTIONS.get(function, function) if plain else function)(*args, **(kwargs or {}))
