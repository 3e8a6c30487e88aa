"""A data set in three parts: train, dev and test."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

Part = tuple[Tensor, Tensor]


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

    def as_arguments(self) -> dict[str, Any]:
        """Return the parts as a ``Recipe`` takes them: data, dev and test."""
        return {"data": self.train, "dev": self.dev, "test": self.test}

    def first(self, examples: int) -> "Splits":
        """Return the data set with at most this number of examples in each part."""
        return Splits(*((x[:examples], y[:examples]) for x, y in (self.train, self.dev, self.test)))

    def reshape(self, *shape: int) -> "Splits":
        """Return the data set with every input in another shape."""
        return Splits(*((x.reshape(-1, *shape), y) for x, y in (self.train, self.dev, self.test)))
