"""Fitness shaping: scores to integer utilities, so that sums over members are exact.

Scores are rounded to float32 before anything else. NaN and infinities are worst, whatever their sign. Larger utilities
are better. In all functions ``scores`` has one number per member, and ``maximize`` says whether larger scores are
better.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

Shaping = Literal["ranks", "zscore", "raw"]

ONE = 1 << 12  # z-scores and raw differences are counted in units of 2^-12
CLIP = 8 * ONE


def utilities(scores: NDArray[Any], shaping: Shaping, *, maximize: bool) -> NDArray[np.int64] | None:
    """Return one integer per member, or None where no score is finite.

    Args:
        scores: one per member.
        shaping: "ranks" (centered ranks), "zscore" (standardized scores) or "raw" (differences from the mean).
        maximize: whether larger scores are better.
    """
    if not any_finite(scores):
        return None
    if shaping == "raw":
        return differences(scores, maximize=maximize)
    return ranks(scores, maximize=maximize) if shaping == "ranks" else zscores(scores, maximize=maximize)


def shape_by_shard(
    scores: NDArray[Any], shards: int, shape: Callable[[NDArray[Any]], NDArray[np.int64] | None]
) -> NDArray[np.int64] | None:
    """Return the utilities of a population whose equal parts are each shaped without the others.

    Args:
        scores: one per member.
        shards: how many parts; it divides the population.
        shape: returns the utilities of one part's scores, or None, which counts as zeros.

    Returns:
        One integer per member, or None if every part gave None.
    """
    if shards == 1:
        return shape(np.asarray(scores))
    parts = np.split(np.asarray(scores), shards)
    shaped = [shape(part) for part in parts]
    if all(part is None for part in shaped):
        return None
    zeros = np.zeros(parts[0].size, np.int64)
    return np.concatenate([zeros if part is None else part for part in shaped])


def any_finite(scores: NDArray[Any]) -> bool:
    """Return whether any score is finite in float32."""
    return bool(np.isfinite(to_float32(scores)).any())


def utility_unit(shaping: Shaping, population: int) -> float:
    """Return what one utility is worth: ranks span -1/2 to 1/2, z-scores have variance 1, raw ones are in scores."""
    return 1 / (2 * (population - 1)) if shaping == "ranks" else 1 / ONE


def ranks(scores: NDArray[Any], *, maximize: bool) -> NDArray[np.int64]:
    """Return how many members are worse less how many are better; equal scores share a rank, and the sum is 0.

    >>> ranks(np.array([0.5, 0.1, float("nan"), 0.1]), maximize=False).tolist()
    [-1, 2, -3, 2]
    """
    good = goodness(scores, maximize)
    order = np.argsort(good)
    ordered = good[order]
    result = np.empty(good.size, np.int64)
    if (ordered[1:] != ordered[:-1]).all():
        result[order] = np.arange(1 - good.size, good.size, 2)
        return result
    first, last = find_ties(ordered)
    result[order] = np.repeat(first + last - good.size, last - first)
    return result


def utilities_by_rank(scores: NDArray[Any], table: Sequence[int], *, maximize: bool) -> NDArray[np.int64]:
    """Return for each member the integer of its rank; equal scores share the mean of theirs, rounded down.

    Args:
        scores: one per member.
        table: one integer per rank, that of the best first.
        maximize: whether larger scores are better.

    >>> utilities_by_rank(np.array([0.5, 0.1, float("nan"), 0.1]), [9, 4, 1, -3], maximize=False).tolist()
    [1, 6, -3, 6]
    """
    good = goodness(scores, maximize)
    order = rank_members(scores, maximize=maximize)
    sums = np.concatenate([[0], np.cumsum(np.asarray(table, np.int64))])
    first, last = find_ties(good[order])
    result = np.empty(good.size, np.int64)
    result[order] = np.repeat((sums[last] - sums[first]) // (last - first), last - first)
    return result


def find_ties(ordered: NDArray[np.float32]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the first and one past the last index of each run of equal numbers."""
    edges = np.ones(ordered.size + 1, np.bool_)
    np.not_equal(ordered[1:], ordered[:-1], out=edges[1:-1])
    (places,) = edges.nonzero()
    return places[:-1], places[1:]


def rank_members(scores: NDArray[Any], *, maximize: bool) -> NDArray[np.int64]:
    """Return the member numbers, the best first; members with equal scores stay in order.

    >>> rank_members(np.array([0.5, 0.1, float("nan"), 0.1]), maximize=False).tolist()
    [1, 3, 0, 2]
    """
    return np.argsort(-goodness(scores, maximize), kind="stable")


def zscores(scores: NDArray[Any], *, maximize: bool) -> NDArray[np.int64]:
    """Return (score - mean) / standard deviation, both of the finite scores, in fixed point and clipped.

    >>> (zscores(np.array([1.0, 3.0, float("inf")]), maximize=True) / ONE).tolist()
    [-1.0, 1.0, -8.0]
    """
    good = goodness(scores, maximize)
    mean = mean_finite(good)
    finite = [float(g) for g in good if g > -np.inf]
    spread = math.sqrt(math.fsum((g - mean) ** 2 for g in finite) / len(finite))
    if spread == 0:
        return np.where(good > -np.inf, 0, -CLIP).astype(np.int64)
    return to_fixed_point(good, mean, spread)


def differences(scores: NDArray[Any], *, maximize: bool) -> NDArray[np.int64]:
    """Return score - mean of the finite scores, in fixed point and clipped, for scores of about 1, such as rewards.

    Nothing is divided by the spread of a few members, which may be tiny.

    >>> (differences(np.array([0.25, 0.75, float("nan")]), maximize=True) / ONE).tolist()
    [-0.25, 0.25, -8.0]
    """
    good = goodness(scores, maximize)
    return to_fixed_point(good, mean_finite(good), 1.0)


def to_fixed_point(good: NDArray[np.float32], mean: float, unit: float) -> NDArray[np.int64]:
    """Return differences from a mean in fixed point, clipped; what is not finite is worst."""
    fixed = [max(-CLIP, min(CLIP, round((float(g) - mean) / unit * ONE))) if g > -np.inf else -CLIP for g in good]
    return np.array(fixed, np.int64)


def goodness(scores: NDArray[Any], maximize: bool) -> NDArray[np.float32]:
    """Return the scores so that larger is better, with minus infinity for those that are not finite."""
    values = to_float32(scores)
    if np.isfinite(values).all():
        return values if maximize else -values
    return np.where(np.isfinite(values), values if maximize else -values, -np.inf).astype(np.float32)


def mean_finite(good: NDArray[np.float32]) -> float:
    """Return the mean of the finite numbers, exact before it is rounded, hence the same in any order."""
    finite = good[np.isfinite(good)].tolist()
    return math.fsum(finite) / len(finite)


def to_float32(scores: NDArray[Any]) -> NDArray[np.float32]:
    """Return the scores in float32, in which too large ones are infinite."""
    array = np.asarray(scores)
    if array.dtype == np.float32:
        return array
    with np.errstate(over="ignore"):
        return array.astype(np.float32)
