"""Outputs of layers that are computed when they are first used, so that what follows can be done in the same pass.

User code calls a layer, then an activation, perhaps a pooling. The layer returns a ``Pending`` tensor; an activation of
one is a Pending again, with a longer epilogue; any other use computes it first. So code that uses an output in another
way is right, too; code that uses it both before and after its activation has it computed twice. What is pooled and kept
as well, as in a U-Net, is computed once, and then pooled.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from weakref import ref

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_map

from germline.population.rules.pooling import as_pair, max_pool2d


@dataclass(frozen=True)
class Relu:
    """A relu as part of an epilogue."""

    def __call__(self, x: Tensor) -> Tensor:
        """Apply it in place."""
        return x.relu_()


@dataclass(frozen=True)
class MaxPool:
    """A max pooling of images without padding as part of an epilogue."""

    kernel: tuple[int, int]
    stride: tuple[int, int]

    def __call__(self, x: Tensor) -> Tensor:
        """Return the pooled images of x: (..., channels, height, width)."""
        pooled: Tensor = max_pool2d(x.reshape(-1, *x.shape[-3:]), self.kernel, self.stride)
        return pooled.view(*x.shape[:-2], *pooled.shape[-2:])


Epilogue = tuple[Relu | MaxPool, ...]  # what is done with a layer's output, which it may write to


def apply_epilogue(x: Tensor, epilogue: Epilogue) -> Tensor:
    """Return what an epilogue makes of an output."""
    for function in epilogue:
        x = function(x)
    return x


def read_max_pool(x: Tensor, kernel_size: Any, stride: Any = None, *more: Any, **settings: Any) -> MaxPool | None:
    """Return a call of max_pool2d as part of an epilogue, or None if it has a padding, a dilation or the like."""
    if any(as_pair(value) != POOL_DEFAULTS.get(name, (0, 0)) for name, value in settings.items()) or more:
        return None
    return MaxPool(as_pair(kernel_size), as_pair(kernel_size if stride is None else stride))


POOL_DEFAULTS = {"dilation": (1, 1)}
FUSIBLE: dict[Any, Callable[..., Relu | MaxPool | None]] = {
    **dict.fromkeys((F.relu, torch.relu, Tensor.relu, torch.relu_, Tensor.relu_), lambda *args, **kwargs: Relu()),
    **dict.fromkeys((F.max_pool2d, torch.max_pool2d), read_max_pool),
}
IN_PLACE = (torch.relu_, Tensor.relu_)


class Pending(Tensor):
    """A tensor that is still to be computed."""

    call: Callable[[Epilogue], Tensor]
    epilogue: Epilogue
    value: Tensor | None
    before: "Callable[[], Pending | None]"  # the images that are pooled, if other code still refers to them

    @staticmethod
    def create(call: Callable[[Epilogue], Tensor], epilogue: Epilogue = ()) -> "Pending":
        """Return a tensor that ``call`` computes, given the epilogue."""
        # code that gets past __torch_function__ reads NaN, which the check notices
        pending = torch.full((), float("nan")).as_subclass(Pending)
        pending.call, pending.epilogue, pending.value, pending.before = call, epilogue, None, lambda: None
        return pending

    def compute(self) -> Tensor:
        """Return the value, which is computed at the first call."""
        if self.value is None:
            unpooled = self.before()
            # a value that was computed before may have been written to since
            if unpooled is not None and unpooled.value is None and unpooled.epilogue == self.epilogue[:-1]:
                self.value = self.epilogue[-1](unpooled.compute())
            else:
                self.value = self.call(self.epilogue)
        return self.value

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Add a function to the epilogue if it can be part of one, else compute the tensor and call the function."""
        kwargs = kwargs or {}
        first = args[0] if args else None
        if function in FUSIBLE and isinstance(first, Pending) and first.value is None:
            step = FUSIBLE[function](*args, **kwargs)
            if step is not None:
                if function in IN_PLACE or kwargs.get("inplace"):
                    first.epilogue = (*first.epilogue, step)
                    return first
                result = Pending.create(first.call, (*first.epilogue, step))
                if isinstance(step, MaxPool) and step.kernel != (1, 1):  # which would be a view of what is kept
                    result.before = ref(first)
                return result
        return function(*materialize(args), **materialize(kwargs))


def materialize(value: Any) -> Any:
    """Return a value with every pending tensor in it computed."""
    return tree_map(lambda x: x.compute() if isinstance(x, Pending) else x, value)
