"""Outputs of layers that are computed when they are first used, so that what follows can be done in the same pass.

User code calls a layer, then an activation, perhaps a pooling. The layer gives a ``Pending`` tensor; an activation of
one is a Pending again; whatever else is done with it computes it first. So code that uses an output in another way is
right too; code that uses it both before and after its activation has it computed twice.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_map

from germline.population.pooling import max_pool2d, pair


@dataclass(frozen=True)
class Relu:
    def __call__(self, x: Tensor) -> Tensor:
        return x.relu_()


@dataclass(frozen=True)
class MaxPool:
    kernel: tuple[int, int]
    stride: tuple[int, int]

    def __call__(self, x: Tensor) -> Tensor:
        pooled: Tensor = max_pool2d(x.reshape(-1, *x.shape[-3:]), self.kernel, self.stride)
        return pooled.view(*x.shape[:-2], *pooled.shape[-2:])


Epilogue = tuple[Relu | MaxPool, ...]  # what is done with a layer's output; may write to it
Work = Callable[[Epilogue], Tensor]


def apply_epilogue(x: Tensor, after: Epilogue) -> Tensor:
    for function in after:
        x = function(x)
    return x


def relu(x: Tensor, inplace: bool = False) -> Relu | None:
    return Relu()


def pool(x: Tensor, kernel_size: Any, stride: Any = None, *more: Any, **settings: Any) -> MaxPool | None:
    if any(pair(value) != USUAL.get(name, (0, 0)) for name, value in settings.items()) or more:
        return None  # a padding, a dilation or the like
    return MaxPool(pair(kernel_size), pair(kernel_size if stride is None else stride))


FUSIBLE: dict[Any, Callable[..., Relu | MaxPool | None]] = {
    **dict.fromkeys((F.relu, torch.relu, Tensor.relu, torch.relu_, Tensor.relu_), relu),
    **dict.fromkeys((F.max_pool2d, torch.max_pool2d), pool),
}
USUAL = {"dilation": (1, 1)}
IN_PLACE = (torch.relu_, Tensor.relu_)


class Pending(Tensor):
    """A tensor that is still to be computed."""

    work: Work
    after: Epilogue
    made: Tensor | None

    @staticmethod
    def create(work: Work, after: Epilogue = ()) -> "Pending":
        # there is nothing in it: code that gets past __torch_function__ finds NaN, and the check finds out
        pending = torch.full((), float("nan")).as_subclass(Pending)
        pending.work, pending.after, pending.made = work, after, None
        return pending

    def computed(self) -> Tensor:
        if self.made is None:
            self.made = self.work(self.after)
        return self.made

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        first = args[0] if args else None
        if function in FUSIBLE and isinstance(first, Pending) and first.made is None:
            more = FUSIBLE[function](*args, **kwargs)
            if more is not None:
                if function in IN_PLACE or kwargs.get("inplace"):
                    first.after = (*first.after, more)
                    return first
                return Pending.create(first.work, (*first.after, more))
        return function(*settled(args), **settled(kwargs))


def settled(value: Any) -> Any:
    """A value with every pending tensor in it computed."""
    return tree_map(lambda x: x.computed() if isinstance(x, Pending) else x, value)
