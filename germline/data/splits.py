"""A data set in three parts: train, dev and test."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from germline.noise import Field, Stream

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


def split(length: int, fractions: Sequence[float], seed: int = 0) -> list[NDArray[np.int64]]:
    """Return the numbers 0 to length - 1, shuffled by the noise field and cut into parts of these fractions.

    What is left is one more part, the last.

    >>> [len(part) for part in split(10, [0.6, 0.2])]
    [6, 2, 2]
    """
    order = Field(seed).permutation(length, 0, Stream.BATCH)
    cuts = np.cumsum([round(fraction * length) for fraction in fractions])
    return list(np.split(order, cuts))
