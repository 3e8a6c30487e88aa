"""A data set in three parts: train, dev and test."""

from dataclasses import dataclass

import torch

Part = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Splits:
    """Inputs and targets of each part of a data set.

    Args:
        train: What members are scored on.
        dev: What settings are chosen by.
        test: What results are reported on.
    """

    train: Part
    dev: Part
    test: Part

    def first(self, examples: int) -> "Splits":
        """Return the data set with at most this number of examples in each part."""
        return Splits(*((x[:examples], y[:examples]) for x, y in (self.train, self.dev, self.test)))

    def reshape(self, *shape: int) -> "Splits":
        """Return the data set with every input in another shape."""
        return Splits(*((x.reshape(-1, *shape), y) for x, y in (self.train, self.dev, self.test)))
