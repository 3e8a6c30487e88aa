"""Losses for which vmap on a CPU takes several times as long as it must; they are torch's up to rounding.

Torch calls them with the output and the target, and with all settings by name.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

MAX_CLASSES = 15  # with more, the classes of an example fill a vector register, and torch's log_softmax is fast


def cross_entropy(
    output: Tensor, target: Tensor, *, ignore_index: int = -100, reduction: str = "mean", **others: Any
) -> Tensor:
    """Return the log of the sum of exponentials less the output of the class, for few classes and usual settings.

    >>> output, target = torch.tensor([[1.0, 2.0, 0.0], [0.5, 0.0, 0.0]]), torch.tensor([1, 2])
    >>> torch.allclose(cross_entropy(output, target), F.cross_entropy(output, target))
    True
    """
    is_of_classes = target.dtype == torch.int64 and 0 < output.dim() < 3 and output.shape[:-1] == target.shape
    has_few = is_of_classes and output.shape[-1] <= MAX_CLASSES
    is_usual = has_no_settings(others, "label_smoothing") and not others.get("label_smoothing")
    if not (has_few and is_usual and is_suitable(output, reduction)):
        return F.cross_entropy(output, target, ignore_index=ignore_index, reduction=reduction, **others)
    is_ignored = target == ignore_index
    output = output - output.amax(-1, keepdim=True)  # before anything else: otherwise small losses lose their bits
    of_class = output.gather(-1, target.masked_fill(is_ignored, 0).unsqueeze(-1)).squeeze(-1)
    losses = (output.exp().sum(-1).log() - of_class).masked_fill(is_ignored, 0)
    if reduction == "none":
        return losses
    return losses.sum() if reduction == "sum" else losses.sum() / (~is_ignored).sum()


def binary_cross_entropy_with_logits(
    output: Tensor, target: Tensor, *, reduction: str = "mean", **others: Any
) -> Tensor:
    """Return (1 - target) * output + log(1 + exp(-output)), where there are no weights.

    >>> output, target = torch.tensor([-30.0, 0.5, 30.0]), torch.tensor([0.0, 0.3, 1.0])
    >>> losses = binary_cross_entropy_with_logits(output, target, reduction="none")
    >>> torch.allclose(losses, F.binary_cross_entropy_with_logits(output, target, reduction="none"), atol=0)
    True
    """
    is_alike = output.dtype == target.dtype and output.shape == target.shape
    if not (is_alike and has_no_settings(others) and is_suitable(output, reduction)):
        return F.binary_cross_entropy_with_logits(output, target, reduction=reduction, **others)
    losses = (1 - target) * output + F.softplus(-output)
    return losses if reduction == "none" else losses.sum() if reduction == "sum" else losses.mean()


def has_no_settings(settings: dict[str, Any], *known: str) -> bool:
    """Return whether settings other than some known ones have their default, which is None."""
    return all(value is None or name in known for name, value in settings.items())


def is_suitable(output: Tensor, reduction: str) -> bool:
    """Return whether an output is on a CPU, of a type that torch does not round in between."""
    is_known = reduction in ("none", "sum", "mean")
    return is_known and output.device.type == "cpu" and output.dtype in (torch.float32, torch.float64)
