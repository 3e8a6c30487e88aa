"""Functions of torch that have a faster form on a CPU, or that vmap refuses, where a block of members calls them."""

import importlib
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from germline.population.rules.attention import attend
from germline.population.rules.joining import adaptive_avg_pool2d, cat, interpolate, view
from germline.population.rules.linear import linear_function
from germline.population.rules.losses import binary_cross_entropy_with_logits, cross_entropy
from germline.population.rules.norm import batch_norm
from germline.population.rules.pending import materialize
from germline.population.rules.pooling import max_pool2d

FUNCTIONS: dict[Any, Callable[..., Any]] = {
    **dict.fromkeys((F.max_pool2d, torch.max_pool2d), max_pool2d),
    F.linear: linear_function,
    F.scaled_dot_product_attention: attend,
    F.cross_entropy: cross_entropy,
    F.binary_cross_entropy_with_logits: binary_cross_entropy_with_logits,
}

OF_IMAGES: dict[Any, Callable[..., Any]] = {
    **dict.fromkeys((torch.cat, torch.concat, torch.concatenate), cat),
    F.interpolate: interpolate,
    F.adaptive_avg_pool2d: adaptive_avg_pool2d,
    F.batch_norm: batch_norm,
    torch.Tensor.view: view,
}
CHANNELS_LAST = (torch.channels_last, torch.channels_last_3d)


class FasterFunctions(TorchFunctionMode):
    """Replaces functions of torch by their faster forms while it is entered, in this thread."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function, or its faster form if its first argument is a plain tensor."""
        if kwargs and kwargs.get("memory_format") in CHANNELS_LAST:  # vmap knows no order of dimensions in memory
            if function is torch.Tensor.is_contiguous:
                return False
            kwargs = {name: value for name, value in kwargs.items() if name != "memory_format"}
        if getattr(function, "_name", None) == "flex_attention":  # an operator without a rule for vmap
            module = importlib.import_module(type(function).__module__)
            return module.math_attention(*materialize(args), **(kwargs or {}))
        if function is F.group_norm and args and args[0].dim() > 3:  # which asks for that order, but not of vectors
            images = materialize(args[0])
            return function(images.flatten(2), *args[1:], **(kwargs or {})).view(images.shape)
        if function in OF_IMAGES and args:
            return OF_IMAGES[function](*args, **(kwargs or {}))
        is_plain = bool(args) and type(args[0]) is torch.Tensor
        kwargs = kwargs or {}
        try:
            return (FUNCTIONS.get(function, function) if is_plain else function)(*args, **kwargs)
        except RuntimeError as error:
            if "memory_format other than" not in str(error):
                raise
        return function(*make_contiguous(args), **make_contiguous(kwargs))  # torch's own code asked for that order


def make_contiguous(value: Any) -> Any:
    """Return a value with every tensor in it computed, and in the ordinary order in memory.

    Images of one pixel can be in both orders, so that they are copied as well.
    """

    def copy(x: Any) -> Any:
        return x.clone(memory_format=torch.contiguous_format) if isinstance(x, torch.Tensor) else x

    return tree_map(copy, materialize(value))
