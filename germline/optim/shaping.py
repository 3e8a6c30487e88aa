"""Scores to integer utilities: how good a member was, in whole numbers, so that sums over members are exact.

Scores are float32 before anything else. NaN and infinities are worst, whatever their sign. Larger utilities are better.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

Shaping = Literal["ranks", "zscore"]

ONE = 1 << 12  # z-scores are counted in units of 2^-12
CLIP = 8 * ONE


def utilities(scores: NDArray[Any], shaping: Shaping, *, maximize: bool) -> NDArray[np.int64] | None:
    """One integer per member, or None where no score is finite and a generation has nothing to say."""
    if not any_finite(scores):
        return None
    return ranks(scores, maximize=maximize) if shaping == "ranks" else zscores(scores, maximize=maximize)


def shape_by_shard(
    scores: NDArray[Any], shards: int, weigh: Callable[[NDArray[Any]], NDArray[np.int64] | None]
) -> NDArray[np.int64] | None:
    """The utilities of equal parts of a population, each by itself; a part that has nothing to say has none but 0."""
    parts = np.split(np.asarray(scores), shards)
    found = [weigh(part) for part in parts]
    if all(weights is None for weights in found):
        return None
    silent = np.zeros(parts[0].size, np.int64)
    return np.concatenate([silent if weights is None else weights for weights in found])


def any_finite(scores: NDArray[Any]) -> bool:
    """Whether any of them says something."""
    return bool(np.isfinite(single(scores)).any())


def utility_unit(shaping: Shaping, population: int) -> float:
    """What one utility is worth: centerd ranks span -1/2 to 1/2, z-scores have variance 1."""
    return 1 / (2 * (population - 1)) if shaping == "ranks" else 1 / ONE


def ranks(scores: NDArray[Any], *, maximize: bool) -> NDArray[np.int64]:
    """How many are worse less how many are better; ties share, the sum is 0.

    >>> ranks(np.array([0.5, 0.1, float("nan"), 0.1]), maximize=False).tolist()
    [-1, 2, -3, 2]
    """
    key = goodness(scores, maximize)
    order = np.argsort(key)
    ordered = key[order]
    found = np.empty(key.size, np.int64)
    if (ordered[1:] != ordered[:-1]).all():
        found[order] = np.arange(1 - key.size, key.size, 2)
        return found
    first = np.flatnonzero(np.r_[True, ordered[1:] != ordered[:-1]])  # of those that share a score
    last = np.append(first[1:], key.size)
    found[order] = np.repeat(first + last - key.size, last - first)
    return found


def utilities_by_rank(scores: NDArray[Any], table: Sequence[int], *, maximize: bool) -> NDArray[np.int64]:
    """The integers of a table, the first for the best; ties share theirs, rounded down.

    >>> utilities_by_rank(np.array([0.5, 0.1, float("nan"), 0.1]), [9, 4, 1, -3], maximize=False).tolist()
    [1, 6, -3, 6]
    """
    key = goodness(scores, maximize)
    order = rank_members(scores, maximize=maximize)
    ordered, sums = key[order], np.concatenate([[0], np.cumsum(np.asarray(table, np.int64))])
    first = np.flatnonzero(np.r_[True, ordered[1:] != ordered[:-1]])
    last = np.append(first[1:], key.size)
    found = np.empty(key.size, np.int64)
    found[order] = np.repeat((sums[last] - sums[first]) // (last - first), last - first)
    return found


def rank_members(scores: NDArray[Any], *, maximize: bool) -> NDArray[np.int64]:
    """The members' numbers, the best first; of equals the first stays first.

    >>> rank_members(np.array([0.5, 0.1, float("nan"), 0.1]), maximize=False).tolist()
    [1, 3, 0, 2]
    """
    return np.argsort(-goodness(scores, maximize), kind="stable")


def zscores(scores: NDArray[Any], *, maximize: bool) -> NDArray[np.int64]:
    """(score - mean) / deviation in fixed point, clipped; the mean and deviation are those of the finite scores.

    >>> (zscores(np.array([1.0, 3.0, float("inf")]), maximize=True) / ONE).tolist()
    [-1.0, 1.0, -8.0]
    """
    key = goodness(scores, maximize)
    known = [float(k) for k in key if k > -np.inf]
    mean = math.fsum(known) / len(known)
    deviation = math.sqrt(math.fsum((k - mean) ** 2 for k in known) / len(known))
    if deviation == 0:
        return np.where(key > -np.inf, 0, -CLIP).astype(np.int64)
    fixed = [max(-CLIP, min(CLIP, round((float(k) - mean) / deviation * ONE))) if k > -np.inf else -CLIP for k in key]
    return np.array(fixed, np.int64)


def goodness(scores: NDArray[Any], maximize: bool) -> NDArray[np.float32]:
    """Larger is better; minus infinity for what is not finite."""
    values = single(scores)
    if np.isfinite(values).all():
        return values if maximize else -values
    return np.where(np.isfinite(values), values if maximize else -values, -np.inf).astype(np.float32)


def mean_finite(good: NDArray[np.float32]) -> float:
    """Of the finite ones, whatever their order."""
    known = good[np.isfinite(good)].tolist()
    return math.fsum(known) / len(known)


def single(scores: NDArray[Any]) -> NDArray[np.float32]:
    with np.errstate(over="ignore"):  # what float32 cannot hold is infinite
        return np.asarray(scores, np.float32)
