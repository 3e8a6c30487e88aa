"""Metrics: functions of (output, target) by name."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from germline.errors import BadInput

Metric = Callable[[Any, Any], Any]
Metrics = Mapping[str, Metric] | Sequence[Metric] | Metric


def name_metrics(metrics: Metrics) -> dict[str, Metric]:
    """Return metrics by name: those of a dict, or one function or several, which have their own names.

    >>> list(name_metrics(accuracy)), list(name_metrics([accuracy])), list(name_metrics({"right": accuracy}))
    (['accuracy'], ['accuracy'], ['right'])
    """
    if isinstance(metrics, Mapping):
        return dict(metrics)
    named: dict[str, Metric] = {}
    for metric in [metrics] if callable(metrics) else metrics:
        name = getattr(metric, "__name__", "")
        if not name.isidentifier() or name in named:
            problem = f"Two metrics are called {name}" if name in named else f"The metric {metric!r} has no name"
            raise BadInput(f"{problem}: give metrics as a dict of names and functions.")
        named[name] = metric
    return named


def accuracy(output: Tensor, target: Tensor) -> Tensor:
    """Return the fraction of examples whose largest output is at the index that the target names.

    Args:
        output: One row of outputs for each example.
        target: The index of the right output for each example.

    >>> accuracy(torch.tensor([[0.1, 0.9], [0.8, 0.2]]), torch.tensor([1, 1])).item()
    0.5
    """
    return (output.argmax(-1) == target).float().mean()


def default_metrics(output: Any, target: Any) -> dict[str, Metric]:
    """Return accuracy as the only metric where output and target look like classes, else none."""
    has_classes = isinstance(target, Tensor) and target.dtype == torch.int64 and target.dim() == 1
    has_scores = isinstance(output, Tensor) and output.dim() == 2 and output.shape[1] > 1
    return {"accuracy": accuracy} if has_classes and has_scores else {}
