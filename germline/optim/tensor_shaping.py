"""Fitness shaping of scores in GPU memory, without waiting for them: the same integers as in ``shaping``.

At least one score must be finite, which only the host can tell: it looks at the scores when they have arrived.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from germline.kernels import to_kernel_device


def rank_tensor(scores: Tensor, *, maximize: bool) -> Tensor:
    """Return how many members are worse less how many are better; equal scores share a rank.

    >>> rank_tensor(torch.tensor([0.5, 0.1, float("nan"), 0.1]), maximize=False).tolist()
    [-1, 2, -3, 2]
    """
    worse, not_better = count_worse(scores, maximize=maximize)
    return worse + not_better - scores.numel()


def utilities_by_tensor_rank(scores: Tensor, table: Sequence[int], *, maximize: bool) -> Tensor:
    """Return for each member the integer of its rank; equal scores share the mean of theirs, rounded down.

    Args:
        scores: one per member.
        table: one integer per rank, that of the best first.
        maximize: whether larger scores are better.

    >>> scores = torch.tensor([0.5, 0.1, float("nan"), 0.1])
    >>> utilities_by_tensor_rank(scores, [9, 4, 1, -3], maximize=False).tolist()
    [1, 6, -3, 6]
    """
    sums = torch.as_tensor(to_kernel_device(np.cumsum([0, *table]), scores.device))
    worse, not_better = count_worse(scores, maximize=maximize)
    first, last = scores.numel() - not_better, scores.numel() - worse
    return torch.div(sums[last] - sums[first], last - first, rounding_mode="floor")


def count_worse(scores: Tensor, *, maximize: bool) -> tuple[Tensor, Tensor]:
    """Return for each member how many are worse, and how many are not better, which includes itself."""
    good = torch.where(torch.isfinite(scores), scores if maximize else -scores, -torch.inf)
    ordered = good.sort().values
    return torch.searchsorted(ordered, good), torch.searchsorted(ordered, good, right=True)
