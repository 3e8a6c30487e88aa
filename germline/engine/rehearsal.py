"""The rehearsal of a run: the scores of one generation, and how many pairs of members teach nothing."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Rehearsal:
    """The scores of a generation that nothing was learned from.

    Attributes:
        scores: The scores of all members.
        center: The score of the center, without noise.
        dead_pairs: The part of the mirrored pairs whose members have equal scores, which teach nothing; NaN if
            members are not mirrored.
        seconds: How long the generation took.
    """

    scores: NDArray[np.float32]
    center: float
    dead_pairs: float
    seconds: float

    @property
    def mean(self) -> float:
        """The mean of the scores."""
        return float(self.scores.mean(dtype=np.float64))

    def __str__(self) -> str:
        spread = float(self.scores.std(dtype=np.float64))
        parts = [f"center {self.center:.4g}", f"members {self.mean:.4g} +- {spread:.2g}", f"{self.seconds:.1f} s"]
        if not math.isnan(self.dead_pairs):
            parts.insert(2, f"{100 * self.dead_pairs:.0f} % of the pairs have equal scores")
        return ", ".join(parts)


def count_dead_pairs(scores: NDArray[Any], *, is_mirrored: bool) -> float:
    """Return the part of the mirrored pairs whose members have equal scores.

    >>> count_dead_pairs(np.array([1.0, 2.0, 0.5, 0.5]), is_mirrored=True)
    0.5
    """
    if not is_mirrored or scores.size % 2:
        return float("nan")
    return float((scores[0::2] == scores[1::2]).mean())
