"""Counts floating-point operations as torch's counter does, which is imported only for what is more than matrices.

Torch's counter imports Triton and the compiler of torch, which takes longer than the first generations of a small net.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

PRODUCTS = ("mm", "addmm", "bmm", "baddbmm")
OTHERS = ("conv", "attention", "scaled_mm")  # parts of the names of what else torch's counter counts


class ProductCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the operations of products of matrices while it is entered."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flops, self.is_complete = 0, True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # otherwise torch imports its compiler at the first call

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function of torch and count its operations."""
        output = function(*args, **(kwargs or {}))
        name = function._schema.name.removeprefix("aten::")
        if name in PRODUCTS:
            self.flops += 2 * output.numel() * args[-1].shape[-2]
        elif any(part in name for part in OTHERS) or is_composite(function):
            self.is_complete = False
        return output


def is_composite(function: Any) -> bool:
    """Return whether a function of torch is made of others, which may be products."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(function.name(), "CompositeImplicitAutograd")


def count_products(work: Callable[[], object]) -> int:
    """Return the floating-point operations of the products in some work, which may be done twice.

    >>> count_products(lambda: torch.ones(2, 3) @ torch.ones(3, 5))
    60
    """
    with ProductCounter() as counter:
        work()
    if counter.is_complete:
        return int(counter.flops)
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as exact:
        work()
    return int(exact.get_total_flops())
