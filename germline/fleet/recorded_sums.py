"""The sums of an update from scores that a GPU has just computed, launched before this process knows the scores."""

from typing import Any, cast

import torch
from torch import Tensor

from germline.kernels import kernel_device
from germline.kernels.recorded import Recorded
from germline.noise import VALUES, Field
from germline.strategies import AnyStrategy
from germline.strategies.protocol import SummedStrategy


class RecordedSums:
    """Utilities, their sums by address and the sums of noise of a whole population, as one launch.

    Args:
        strategy: whose sums they are.
        field: the noise of the run.
        maximize: whether larger scores are better.
        size: the number of parameters.
    """

    def __init__(self, strategy: SummedStrategy[Any], field: Field, *, maximize: bool, size: int) -> None:
        self.strategy = strategy
        self.field = field
        self.maximize = maximize
        self.size = size
        self.recorded = Recorded(self.sum_members)

    @classmethod
    def create(
        cls, strategy: AnyStrategy, field: Field, *, maximize: bool, size: int, device: torch.device
    ) -> "RecordedSums | None":
        """Return the sums of a strategy's update, or None where they cannot be computed without the scores."""
        is_possible = strategy.has_semi_updates and has_one_author(type(strategy))
        if not is_possible or kernel_device(device).type != "cuda":
            return None
        summed, values = cast(SummedStrategy[Any], strategy), VALUES[field.kind]
        magnitude, largest = summed.weight_magnitude, max(values.limit**2, values.variance)
        if magnitude is None or magnitude * largest >= 2**31:
            return None
        return cls(summed, field, maximize=maximize, size=size)

    def compute(self, scores: Tensor, generation: int) -> Tensor:
        """Return the sums of a generation; they are valid until the next call."""
        return self.recorded(scores, torch.full((), generation, dtype=torch.int64, device=scores.device))

    def sum_members(self, scores: Tensor, generation: Tensor | int) -> Tensor:
        """Return the sums of a generation, whose number may be in the memory of the GPU."""
        weights = self.strategy.device_weights(scores, maximize=self.maximize)
        noise = self.field.members(range(self.strategy.population), generation, scores.device)
        return self.strategy.sums(noise, weights, (0, self.size))


def has_one_author(kind: type[AnyStrategy]) -> bool:
    """Return whether one class defines all that an update consists of: a subclass may change what ``tell`` computes.

    >>> from germline.strategies import OpenAIES
    >>> has_one_author(OpenAIES)
    True
    """
    names = ("tell", "weights", "device_weights", "sums", "step")
    return len({next(parent for parent in kind.__mro__ if name in vars(parent)) for name in names}) == 1
