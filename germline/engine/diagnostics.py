"""Diagnostics of a search: agreement of directions, steps, gradients, runs that learn nothing."""

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from germline.clock import clock
from germline.engine.trouble import explain_trouble
from germline.fleet.protocol import Scores
from germline.machine import resident_memory
from germline.optim.shaping import utilities
from germline.strategies import GenerationResult

if TYPE_CHECKING:
    from germline.engine.session import Session

COLUMNS_AT_ONCE = 1 << 21  # of directions that are compared


def measure_agreement(session: "Session", scores: Scores, half: int, generation: int) -> float:
    """Return the cosine between the directions that two halves of a population give."""
    halves = []
    for part in (slice(0, half), slice(half, 2 * half)):
        weights = utilities(scores[part], "ranks", maximize=session.scorer.objective.maximize)
        if weights is None:
            return -1.0
        members = np.arange(session.strategy.population)[part]
        halves.append((session.noise.members(members, generation, session.scorer.device), weights))
    products = np.zeros(3)  # of a with b, of a with a and of b with b, a and b being the directions
    size = session.scorer.genome.size
    for low in range(0, size, COLUMNS_AT_ONCE):
        span = (low, min(low + COLUMNS_AT_ONCE, size))
        a, b = (noise.weighted_sum(weights, span, often=False).double() for noise, weights in halves)
        products += [float(a @ b), float(a @ a), float(b @ b)]
    return float(products[0] / max(math.sqrt(products[1] * products[2]), 1e-30))


def diagnose_step(session: "Session", result: GenerationResult, before: Any) -> dict[str, float]:
    """Return how far a generation moved the center, at what sigma, and how far two halves of it agree."""
    strategy = session.strategy
    numbers = {"step": float((session.state.theta - before.theta).norm(dtype=torch.float64))}
    candidates = strategy.ask(before, session.noise, result.generation, result.values)
    if isinstance(candidates.sigma, Tensor):
        numbers["sigma"] = float(candidates.sigma.double().mean())
    if strategy.kind == "train_members" and len(session.state.members) > 1:
        numbers["diversity"] = float(torch.pdist(before.members.double()).mean())
    if strategy.kind == "evolve" and candidates.shared and strategy.population >= 4:
        half = strategy.population // 4 * 2
        if all(np.isfinite(part).any() for part in (result.scores[:half], result.scores[half : 2 * half])):
            numbers["agreement"] = measure_agreement(session, result.scores, half, result.generation)
    return numbers


def compare_gradients(gradient: Tensor, before: Tensor | None) -> dict[str, float]:
    """Return the length of a gradient and, compared with the one before, how it changed and the angle between them."""
    length = float(gradient.double().norm())
    if before is None:
        return {"gradient_norm": length}
    other = float(before.double().norm())
    cosine = float(gradient.double() @ before.double()) / max(length * other, 1e-300)
    angle = math.degrees(math.acos(max(-1.0, min(1.0, cosine))))
    return {"gradient_norm": length, "gradient_change": length - other, "gradient_angle": angle}


def measure_resources(device: torch.device) -> dict[str, float]:
    """Return what a step took of this process: seconds of its parts on a CPU, peak bytes on a GPU, and memory."""
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        return {"memory": peak}
    spent = {f"{part}_seconds": round(seconds, 6) for part, seconds in sorted(clock.pop_seconds().items())}
    return spent | ({"memory": memory} if (memory := resident_memory()) else {})


def find_trouble(session: "Session") -> str | None:
    """Return a sentence if a run learns nothing, with what to change."""
    strategy, scorer = session.strategy, session.scorer
    return explain_trouble(
        session.history,
        maximize=scorer.objective.maximize,
        evolves=strategy.kind == "evolve",
        population=strategy.population,
        parameters=scorer.genome.size,
    )
