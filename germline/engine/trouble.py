"""Runs that learn nothing: how their scores show it, and what to change.

A run that learns must never be accused, so everything here asks for evidence of progress in a robust way, and speaks
only where there is none: ranks instead of values, medians instead of means.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Rows = Sequence[dict[str, Any]]

SKIPPED = 3  # generations in a row without a finite score
EQUAL = 5  # generations from the first on in which all members have one score
MANY = 100  # generations after which there should be progress; then twice as many, four times as many, ...
TREND = 1.0  # standard deviations of Kendall's statistic below which the scores of members have no trend
DEV_TREND = 2.0  # the same for the dev set: it has no noise from batches, so that progress shows clearly
JUMP = 4.0  # robust standard deviations by which later scores are better than the first ones
FIRST = 3  # generations that count as the first ones: an easy problem may be solved in a few
POINTS = 1000  # of a trend, at most


def explain_trouble(history: Rows, *, maximize: bool, evolves: bool, population: int, parameters: int) -> str | None:
    """Return a sentence if the generations so far show that a run learns nothing, with what to change.

    Args:
        history: Rows of generations, the last of which is new.
        maximize: Whether larger scores are better.
        evolves: Whether the strategy learns from differences between the scores of its members.
        population: The number of members.
        parameters: The number of trained parameters.
    """
    if len(history) >= SKIPPED and all(row["skipped"] for row in history[-SKIPPED:]):
        if len(history) > SKIPPED and history[-SKIPPED - 1]["skipped"]:
            return None  # it was said when it began
        message = f"No member had a finite score in the last {SKIPPED} generations, so nothing changes"
        return f"{message}: check the loss for divisions by 0 and logarithms, or lower sigma and lr."
    if len(history) == EQUAL and evolves and all(row["spread"] == 0 for row in history):
        message = f"All members have had the same score in each of the first {EQUAL} generations, so nothing is learned"
        return f'{message}: raise sigma or choose sigma="auto", use more examples, or a score that has finer steps.'
    generations = history[-1]["generation"] + 1
    if generations % MANY or not math.log2(generations / MANY).is_integer():
        return None
    sign = 1.0 if maximize else -1.0
    means = np.array([sign * row["mean"] for row in history])
    dev = np.array([sign * row[name] for row in history for name in ("dev_score", "dev_loss") if name in row])
    if shows_progress(means, TREND) or shows_progress(dev, DEV_TREND):
        return None
    message = f"The scores have not improved over {generations} generations"
    agreements = [row["agreement"] for row in history if "agreement" in row]
    if not agreements:
        return f"{message}: try another learning rate, sigma or population, or a larger batch."
    mean, chance = float(np.mean(agreements)), 1 / math.sqrt(len(agreements) * parameters)
    if mean > 3 * chance:
        return f"{message}, although two halves of the population agree on a direction: try another learning rate."
    advice = "a larger population, a larger batch or another sigma would help"
    if expected_agreement(population, parameters) > 3 * chance:
        message += " and two halves of the population agree on a direction no better than chance"
    return f"{message}: {advice}."


def expected_agreement(population: int, parameters: int) -> float:
    """Return the cosine of the directions from two halves of a population, if scores are linear and without noise.

    The direction from n pairs is the gradient's projection on n random directions: its cosine with the gradient is
    about sqrt(n / (n + M)) in M dimensions, and that of two such directions is the square of it. With many more
    parameters than members it is small even for a perfect score.

    >>> round(expected_agreement(256, 4810), 3)
    0.013
    """
    pairs = population / 4  # of one half
    return pairs / (pairs + parameters)


def shows_progress(goodness: NDArray[np.float64], threshold: float) -> bool:
    """Return whether values, where larger is better, have risen in the course of a run: slowly, or at its beginning.

    >>> shows_progress(np.arange(100.0), TREND), shows_progress(np.zeros(100), TREND)
    (True, False)
    """
    values = goodness[np.isfinite(goodness)]
    if values.size < 2 * FIRST:
        return False
    values = values[:: -(-values.size // POINTS)]
    return trend(values) >= threshold or jump(values) >= JUMP


def trend(values: NDArray[np.float64]) -> float:
    """Return the statistic of the Mann-Kendall test for a rising trend: standard normal if there is no trend."""
    n = values.size
    concordance = np.sign(values[None, :] - values[:, None])[np.triu_indices(n, 1)].sum()
    return float(concordance / math.sqrt(n * (n - 1) * (2 * n + 5) / 18))


def jump(values: NDArray[np.float64]) -> float:
    """Return how much better the later half of some values is than the worst of the first ones.

    The unit is the standard deviation of the later half, as its median absolute deviation estimates it.
    """
    later = values[values.size // 2 :]
    center = np.median(later)
    spread = 1.4826 * np.median(np.abs(later - center))  # the standard deviation, if values are normal
    rise = float(center - values[:FIRST].min())
    return rise / max(float(spread), 1e-300) if rise > 0 else 0.0
