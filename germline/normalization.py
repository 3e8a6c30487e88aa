"""A layer that normalizes observations by the statistics of a run."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

LEAST_VARIANCE = 1e-4  # of an observation that hardly changes


class Normalize(nn.Module):
    """Subtracts the mean of each observation, divides by its standard deviation, and clips the result.

    Put it first in a policy that is trained on ``gl.Gym``. The statistics are those of all earlier generations, the
    same for all members. They are part of the model's buffers and of its exported weights.

    Args:
        size: The number of observations.
        clip: The largest absolute value of the result.

    >>> layer = Normalize(2)
    >>> layer.load_sums([4, 8.0, 0.0, 20.0, 4.0])  # 4 steps: sums, and sums of squares
    >>> layer(torch.tensor([[3.0, 2.0]]))
    tensor([[1., 2.]])
    """

    mean: Tensor
    std: Tensor

    def __init__(self, size: int, clip: float = 10.0) -> None:
        super().__init__()
        self.size, self.clip = size, clip
        self.register_buffer("mean", torch.zeros(size))
        self.register_buffer("std", torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        """Return the normalized observations."""
        return ((x - self.mean) / self.std).clamp(-self.clip, self.clip)

    def load_sums(self, sums: Sequence[float]) -> None:
        """Set the statistics from the number of steps, the sums of the observations and those of their squares."""
        count, values = sums[0], np.asarray(sums[1:], np.float64)
        mean = values[: self.size] / count
        variance = np.maximum(values[self.size :] / count - mean * mean, LEAST_VARIANCE)
        self.mean.copy_(torch.from_numpy(mean))
        self.std.copy_(torch.from_numpy(np.sqrt(variance)))

    def reset_sums(self) -> None:
        """Set the statistics to those before the first generation."""
        self.mean.zero_()
        self.std.fill_(1.0)


def find_normalization(module: nn.Module | None) -> list[Normalize]:
    """Return the layers of a module that normalize observations."""
    return [part for part in module.modules() if isinstance(part, Normalize)] if module is not None else []


def normalize(module: nn.Module | None, sums: Sequence[float]) -> None:
    """Set the statistics of a module's layers that normalize, or reset them where there are none yet."""
    for layer in find_normalization(module):
        if sums:
            layer.load_sums(sums)
        else:
            layer.reset_sums()
