"""Norms that estimate running statistics: batch norm, and instance norm that is asked to.

As in torch, the mode of a norm says which statistics it uses: in evaluation mode the running ones, in training mode
those of the batch. Germline reads the modes once, when a run begins (``fixed_norms``), and its header keeps them.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase

from germline.genome import copy_module, tracks_statistics
from germline.objective import Batch, seeded_generators


def tracking_norms(module: nn.Module, *, training: bool) -> dict[str, Any]:
    """Return the norms with running statistics that are in training mode, or those that are not, by name."""
    parts = module.named_modules(remove_duplicate=False)
    return {name: part for name, part in parts if tracks_statistics(part) and part.training == training}


def fixed_norms(module: nn.Module) -> list[str]:
    """Return the names of the norms in evaluation mode, which keep their running statistics."""
    return list(tracking_norms(module, training=False))


def set_fixed_norms(module: nn.Module, names: Iterable[str]) -> None:
    """Set the mode of all norms with running statistics: evaluation for those of these names, else training."""
    names = set(names)
    for name, part in module.named_modules(remove_duplicate=False):
        if tracks_statistics(part):
            part.train(name not in names)


class LocalBatchNorm(_BatchNorm):
    """Batch norm for inputs of any shape, which waits for no other process."""

    def _check_input_dim(self, x: torch.Tensor) -> None:
        pass


@torch.no_grad()
def refresh_statistics(module: nn.Module, batches: Iterator[Batch], fixed: Iterable[str] = ()) -> None:
    """Estimate running statistics again, for the weights that the module now has; nothing else of it changes.

    Args:
        module: the module, whose norms are changed.
        batches: the batches whose statistics are averaged.
        fixed: the names of the norms that keep their statistics.
    """
    if not any(tracks_statistics(part) for part in module.modules()):
        return
    copied = copy_module(module).eval()
    set_fixed_norms(copied, fixed)
    norms: dict[str, _NormBase] = tracking_norms(copied, training=True)
    for part in norms.values():
        part.reset_running_stats()
        part.momentum = None  # a plain average
        if isinstance(part, nn.SyncBatchNorm):  # this process may be the only one that is here
            part.__class__ = LocalBatchNorm  # type: ignore[assignment]
    with seeded_generators(0):
        for number, batch in enumerate(batches if norms else (), 1):
            for part in norms.values():
                if not isinstance(part, _BatchNorm):  # instance norm takes no plain average if its momentum is None
                    part.momentum = 1 / number
            copied(*batch.args, **batch.kwargs)
    for name, part in norms.items():
        module.get_submodule(name).load_state_dict(part.state_dict())
