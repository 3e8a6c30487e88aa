"""The choice of sigma and the learning rate before the first generation, from the scores of mirrored pairs of members.

Half of the difference of a pair's scores is the odd part of the score along the pair's noise, and their mean is the
even part. A direction is learned from odd parts alone. Where the score is smooth, the share of the odd part is 1 at
small sigmas and falls as curvature takes over. The probe finds the sigma up to which the odd part dominates: the
score's reach, which also says how long a step may be. Where the score or the network is made of steps, no sigma is
small enough for that: the probe takes a large one, unless members then lose what the network can do already.
"""

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from germline.engine.journal import PROBE
from germline.errors import BadInput
from germline.fleet.protocol import Scores
from germline.noise import ADDRESS_LIMIT
from germline.objective import Batch
from germline.optim.shaping import any_finite, ranks
from germline.stages import announce_stage
from germline.strategies import GenerationInputs, GenerationResult
from germline.strategies.openai_es import RATES, choose_relative_rate

if TYPE_CHECKING:
    from germline.engine.session import Session

SIGMAS = (0.2, 0.1, 0.05, 0.02, 0.01, 0.005, 0.002, 0.001, 0.0005, 0.0002, 0.0001)  # that a probe chooses from
MEMBERS = 64  # that are scored for each of them
ODD_SHARE, RANK_SHARE = 0.5, 0.75  # of the chosen sigma, where the score is smooth
SMOOTH_SHARE, SMOOTH_STEPS = 0.95, 3  # the share of a smooth score at one of the next smaller sigmas
LARGEST_REACH = STEP_SIGMA = SIGMAS[1]  # of a choice, where the score is smooth and where it is made of steps
REACH_RATE = 8.0  # the learning rate of a smooth score, in units of its sigma times sqrt(population / parameters)
STEP_FACTOR, KEEPING_FACTOR = 2.5, 0.3  # of the learning rate where the score is made of steps; if much can be lost
STEEPEST = 4  # the power of sigma by which the spread of scores may grow around a choice
EVEN_RATIO = 1.5  # of the two sigmas of a smooth score, above which curvature is alike in all directions
LARGEST_LOSS = 0.3  # of what members have lost where they are clearly worse, by their mean
LARGEST_SPREADS = 3.0  # standard deviations by which members are worse than the center if it is more than lucky
LEAST_GAP = 0.5  # standard deviations of members by which the center is then better than the best of them, if not that


def probe_sigma(session: "Session", batch: Batch | None) -> GenerationResult:
    """Choose sigma by the scores of mirrored pairs at several sigmas."""
    if not session.noise.mirrored:
        message = 'sigma="auto" compares pairs with opposite noise: leave the setting mirrored at true'
        raise BadInput(f"{message}, or give numbers for sigma and lr.")
    announce_stage("choosing sigma")
    scores: dict[float, Scores] = {}

    def score(sigma: float) -> Scores:
        for number in {SIGMAS[-1], sigma} - scores.keys():
            scores[number] = score_members(session, batch, number)
        return (scores[sigma] if batch is not None else align_parts(scores[sigma], scores[SIGMAS[-1]])).ravel()

    maximize = session.scorer.objective.maximize
    strategy, parameters = session.strategy, session.scorer.genome.size
    smooth = find_smooth_sigma(score, maximize=maximize)
    if smooth is not None:
        reach, factor = smooth
        sigma = min(reach, round_to_digits(strategy.limit_smooth_sigma(parameters)))
        rate = factor * REACH_RATE * math.sqrt(strategy.population / parameters) * reach
        rate = max(rate, RATES[0] * sigma)
    else:
        sigma, factor = find_step_sigma(score, maximize=maximize)
        rate = factor * choose_relative_rate(strategy.population, parameters) * sigma
    values = {"sigma": sigma, "lr": round_to_digits(min(rate, RATES[1] * sigma))}
    return GenerationResult(PROBE, np.concatenate([scores[number].ravel() for number in sorted(scores)]), values)


def score_members(session: "Session", batch: Batch | None, sigma: float) -> Scores:
    """Return the scores of some members at a sigma, computed by the whole fleet: (parts, members)."""
    strategy, evaluator = session.strategy, session.scorer.evaluator
    members, values = min(strategy.population, MEMBERS), {"sigma": sigma}
    # an objective draws its episodes or texts by the generation, and those of all sigmas must be the same
    number = SIGMAS.index(sigma) if batch is not None else 0
    parts = []
    for part in range(math.ceil(MEMBERS / members)):
        address = ADDRESS_LIMIT - 1 - number - part * len(SIGMAS)  # generations that no run reaches
        candidates = strategy.ask(session.state, session.noise, address, values)
        inputs = GenerationInputs(strategy, session.state, "0", address, values, 0, given_batch=session.given_batch)
        parts.append(session.fleet.score(evaluator, candidates, members, batch, inputs)[:: evaluator.columns])
    return np.stack(parts)


def align_parts(scores: Scores, base: Scores) -> Scores:
    """Return scores as if all parts had the episodes or texts of the first.

    Args:
        scores: (parts, members); the parts have different episodes or texts.
        base: the same for members that are close to the center.

    >>> align_parts(np.array([[1.5, 0.5], [7.0, 5.0]], np.float32), np.array([[1.0, 1.0], [6.0, 6.0]], np.float32))
    array([[1.5, 0.5],
           [2. , 0. ]], dtype=float32)
    """
    centers = np.array([finite_mean(part) for part in base])
    aligned: Scores = (scores - np.nan_to_num(centers - centers[0])[:, None]).astype(np.float32)
    return aligned


def find_smooth_sigma(score: Callable[[float], Scores], *, maximize: bool) -> tuple[float, float] | None:
    """Return the sigma up to which directions are good, the score's reach, or None if it is not smooth below it.

    There are two: the sigma at which odd parts are as large as the distance of pairs from the center, and half of the
    sigma at which odd parts are three quarters of the variance, by ranks. The larger one is taken. Curvature that is
    alike in all directions moves all pairs away from the center and makes little variance. It forgives longer steps
    than curvature in some directions: the second number is a factor of the learning rate.
    """
    center = finite_mean(score(SIGMAS[-1]))  # of pairs that are close to it
    by_size = find_crossing(lambda sigma: odd_share(score(sigma), center), ODD_SHARE)
    # from there upwards: far away, where nothing is left of what a network has learned, pairs may be odd again
    larger = [sigma for sigma in SIGMAS if sigma >= by_size > 0]
    shares = {sigma: rank_share(score(sigma), maximize=maximize) for sigma in larger}
    first = next((i for i in reversed(range(len(larger))) if shares[larger[i]] < RANK_SHARE), 0)
    by_rank = find_crossing(lambda sigma: rank_share(score(sigma), maximize=maximize), RANK_SHARE, first)
    smaller = [sigma for sigma in SIGMAS if sigma < max(by_size, by_rank)][:SMOOTH_STEPS]
    if not any(rank_share(score(sigma), maximize=maximize) >= SMOOTH_SHARE for sigma in smaller):
        return None
    factor = by_rank / (EVEN_RATIO * by_size) if by_size > 0 else 1.0
    return stay_below_jump(score, min(max(by_size, by_rank / 2), LARGEST_REACH)), max(1.0, factor)


def stay_below_jump(score: Callable[[float], Scores], sigma: float) -> float:
    """Return a sigma, or the next smaller one that is tried if scores spread steeply from there to above it.

    The noise of many layers multiplies: the scores of a deep network without norms spread by powers of sigma.
    """
    i = max(i for i in range(len(SIGMAS)) if SIGMAS[i] >= sigma)
    while i + 1 < len(SIGMAS):
        smaller, larger = (float(np.std(score(s), dtype=np.float64)) for s in (SIGMAS[i + 1], SIGMAS[i]))
        if not larger > smaller * (SIGMAS[i] / SIGMAS[i + 1]) ** STEEPEST > 0:
            break
        i += 1
        sigma = SIGMAS[i]
    return sigma


def find_crossing(share: Callable[[float], float], least: float, first: int = 0) -> float:
    """Return the largest sigma with at least this share, between those that are tried; 0 if there is none.

    Args:
        share: Returns the share at a sigma.
        least: The share.
        first: The index of the largest sigma that is tried.
    """
    above = 0.0  # the share at the next larger sigma
    for i in range(first, len(SIGMAS)):
        here = share(SIGMAS[i])
        if here >= least:
            ratio = SIGMAS[max(first, i - 1)] / SIGMAS[i]
            return round_to_digits(SIGMAS[i] * ratio ** ((here - least) / max(here - above, 1e-9)))
        above = here
    return 0.0


def round_to_digits(value: float) -> float:
    """Return a number with two significant digits, so that the last bits of scores do not matter."""
    return float(f"{value:.2g}")


def find_step_sigma(score: Callable[[float], Scores], *, maximize: bool) -> tuple[float, float]:
    """Return a sigma for a score that is made of steps, and a factor of the learning rate.

    If members at some sigma are clearly worse than the center, the network can do something already: sigma is then the
    largest one at which members keep most of it. Otherwise nothing can be lost, and sigma is large.
    """
    sign = 1 if maximize else -1
    center = sign * finite_mean(score(SIGMAS[-1]))
    for i in reversed(range(len(SIGMAS))):
        loss = center - sign * finite_mean(score(SIGMAS[i]))
        if math.isnan(loss) or is_ruined(sign * score(SIGMAS[i]), center):
            # of nothing but NaN, what the center scores can be lost
            tolerated = LARGEST_LOSS * (abs(center) if math.isnan(loss) else loss)
            smaller = (s for s in SIGMAS[i + 1 :] if center - sign * finite_mean(score(s)) <= tolerated)
            return next(smaller, SIGMAS[-1]), KEEPING_FACTOR
    return STEP_SIGMA, STEP_FACTOR


def is_ruined(scores: Scores, center: float) -> bool:
    """Return whether members are so much worse than the center that it must have learned something.

    Either they are by many standard deviations, or all of them are by more than the best of them differ from each
    other: some scores have two values far from each other for what has learned nothing, as the F1 of two classes has.

    >>> is_ruined(np.array([0.1, 0.12, 0.08, 0.1], np.float32), center=0.16)
    True
    >>> [is_ruined(np.array([0.0, 0.0, 0.7, 0.7, 0.7, 0.71], np.float32), center) for center in (0.8, 0.95)]
    [False, True]
    """
    finite = np.sort(scores[np.isfinite(scores)]).astype(np.float64)
    if not finite.size:
        return True
    spread, best, quartile = finite.std(), finite[-1], finite[-1 - finite.size // 4]
    is_far = center - finite.mean() > LARGEST_SPREADS * spread
    return bool(is_far or center - best > max(best - quartile, LEAST_GAP * spread))


def odd_share(scores: Scores, center: float) -> float:
    """Return the share of the odd part in how mirrored pairs differ from the center; 0 if no pair does, or is finite.

    >>> odd_share(np.array([2.0, 0.0, 3.0, -1.0], np.float32), center=1.0)
    1.0
    >>> odd_share(np.array([2.0, 0.0, 3.0, -1.0], np.float32), center=0.0)  # curvature moves all of them
    0.714...
    """
    pairs = np.asarray(scores, np.float64).reshape(-1, 2)
    if not np.isfinite(pairs).all():
        return 0.0
    return compute_share(pairs, center)


def rank_share(scores: Scores, *, maximize: bool) -> float:
    """Return the share of the odd part by ranks, for which no single pair counts much.

    >>> rank_share(np.array([1.0, -1.0, 2.0, -2.0, -3.0, 3.0], np.float32), maximize=True)
    1.0
    >>> rank_share(np.array([1.0, 1.0, 2.0, 2.0, 3.0, 3.0], np.float32), maximize=True)
    0.0
    """
    if not any_finite(scores):
        return 0.0
    return compute_share(ranks(scores, maximize=maximize).astype(np.float64).reshape(-1, 2), 0.0)


def compute_share(pairs: NDArray[np.float64], center: float) -> float:
    """Return the share of the odd part in the squares of pairs."""
    odd, even = (pairs[:, 0] - pairs[:, 1]) / 2, pairs.mean(1) - center
    parts = float(np.mean(odd**2)), float(np.mean(even**2))
    return parts[0] / sum(parts) if sum(parts) > 0 else 0.0


def finite_mean(scores: Scores) -> float:
    """Return the mean of the finite scores; NaN if there is none."""
    finite = scores[np.isfinite(scores)]
    return float(finite.mean(dtype=np.float64)) if finite.size else float("nan")
