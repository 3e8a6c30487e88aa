"""Work that begins before it is due: the next generation, and an update by scores that are still being computed."""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from germline.engine.drivers import make_inputs
from germline.engine.scoring import PrefetchedScores, is_checked
from germline.objective import Batch
from germline.optim.shaping import any_finite
from germline.strategies import GenerationResult

if TYPE_CHECKING:
    from germline.engine.session import Session


@dataclass(frozen=True)
class EarlyUpdate:
    """A State after a generation whose scores were not known yet, and the part of the run's budget used by then."""

    launched: PrefetchedScores
    state: Any
    part_used: float

    def holds(self, result: GenerationResult) -> bool:
        """Return whether a result has the scores of which the State was made, and they advance it."""
        return result.scores is self.launched.read() and any_finite(result.scores)


def update_early(session: "Session", batch: Batch | None) -> EarlyUpdate | None:
    """Have a GPU that is scoring this generation go on with the update and the next one, before the scores are read.

    Returns:
        The State after this generation, or None where the scores must be known first.
    """
    generation, launched = session.generation, session.scorer.prefetched.get(session.generation)
    if launched is None or session.update is None or is_checked(generation):  # a check may find the scores wrong
        return None
    values = session.values(generation)
    if not launched.fits(session.strategy, session.state, batch, values):
        return None
    result = GenerationResult(generation, np.empty(0, np.float32), values)
    with suppress(Exception):  # an error is reported when it is due
        state = session.update.advance_early(session.state, launched.scores, result)
        if state is None:
            return None
        part_used = session.part_after(generation + 1, session.driver.count_samples(session, result, batch))
        start_generation(session, generation + 1, state, part_used)
        return EarlyUpdate(launched, state, part_used)
    return None


def start_generation(session: "Session", generation: int, state: Any, part_used: float) -> None:
    """Have workers or a GPU start a generation, if there will be one, while this process does something else."""
    fleet, scorer, strategy = session.fleet, session.scorer, session.strategy
    session.prefetched_batch = None
    is_last = part_used >= 1.0 or session.stop_request
    is_possible = fleet.can_prefetch or (fleet.group.size == 1 and scorer.can_prefetch)
    if strategy.kind != "evolve" or is_last or not is_possible:
        return
    with suppress(Exception):  # an error of the next generation is reported when it is due
        values: Mapping[str, float] = session.values_of(state, generation, part_used)
        candidates = strategy.ask(state, session.noise, generation, values)
        batch = session.prefetched_batch = session.batch(generation)
        if fleet.can_prefetch:
            inputs = make_inputs(session, generation, values)
            fleet.prefetch(scorer.evaluator, candidates, strategy.population, batch, inputs)
        else:
            scorer.prefetch(strategy, state, candidates, batch, values)
