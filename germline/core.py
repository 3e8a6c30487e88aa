"""A strategy at work on a module: what a run, its replay and a search in one's own loop have in common."""

import copy
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from germline.errors import BadInput, Lost
from germline.fleet import Local
from germline.fleet.local import one_thread_each
from germline.genome import Genome
from germline.journal import PROBE
from germline.kernels import home
from germline.noise import WORD, Field, Stream
from germline.objective import Batch, Objective
from germline.population import (
    SURVIVAL,
    DType,
    Evaluator,
    Plan,
    Settled,
    SlowPath,
    agrees,
    block_size,
    correlation,
    exact_arithmetic,
    first_sentence,
    in_type,
    prepared,
    scores_of,
    settle,
)
from germline.shaping import utilities
from germline.strategies import AnyStrategy, Apart, Candidates, Told

LADDER = (0.2, 0.1, 0.05, 0.02, 0.01, 0.005)  # the sigmas that sigma="auto" chooses from
CHECK_EVERY = 100  # generations between checks of sampled members
SAMPLED = 3  # members of such a check
OFFSPRING = 6  # arrays of the size of a child that are there while it is made: parents, masks, noise
RANKED = 256  # members whose ranks are compared where the arithmetic is in bfloat16


@dataclass
class Core:
    """A strategy at work: the part that a run, its replay and a search in one's own loop have in common.

    A replay that needs no gradient needs no module either; the genome is then given, and nothing can be evaluated.
    """

    module: nn.Module | None  # the user's own, which is copied and not touched
    strategy: AnyStrategy
    objective: Objective
    fleet: Local
    seed: int
    plan: Plan | None = None  # how members are evaluated; settled on the first batch if not given
    dtype: DType = "auto"
    dropout: bool = False
    genome: Genome = field(default=None)  # type: ignore[assignment]
    device: torch.device = field(init=False)
    noise: Field = field(init=False)
    state: Any = field(init=False)
    evaluator: Evaluator | None = field(init=False, default=None)
    update: Any = field(init=False, default=None)  # how a fleet shares out the update; see ``divide``
    under_way: "UnderWay | None" = field(init=False, default=None)  # see ``begin``

    def __post_init__(self) -> None:
        self.device = self.fleet.place()
        if self.module is not None:
            self.genome = Genome.of(self.module)
            if self.objective.of_model:  # it may bring tensors of its own, for the device where the module is
                self.device = self.fleet.place(next(self.module.parameters()).device)
            self.module = copy.deepcopy(self.module)
            theta = self.genome.read(self.module, self.device)
        else:
            theta = torch.zeros(self.genome.size, dtype=self.genome.dtype, device=self.device)
        self.strategy = self.fleet.adapted(self.strategy)
        if hasattr(self.strategy, "resolved"):  # constants that depend on the number of parameters
            self.strategy = self.strategy.resolved(self.genome.size)
        self.noise = self.strategy.field(self.seed, self.genome)
        self.state = self.strategy.init(theta)

    def try_out(self, batch: Batch | None) -> None:
        """Runs the user's own module once, so that what does not fit is said before anything else is done."""
        assert self.module is not None
        self.objective = self.objective.tried(prepared(self.module).to(self.device), batch)

    def prepare(self, batch: Batch | None) -> Evaluator:
        """Settles, once and for all, how members are evaluated."""
        if self.evaluator is None:
            self.plan = self.plan or self._settle(batch)
            self.evaluator = self._make(self.plan)
        return self.evaluator

    @property
    def settled(self) -> Plan:
        assert self.plan is not None
        return self.plan

    def _make(self, plan: Plan) -> Evaluator:
        assert self.module is not None
        return Evaluator.of(self.module, self.genome, self.objective, self.device, plan)

    def _settle(self, batch: Batch | None) -> Plan:
        if self.strategy.needs_gradient:
            return Plan(1, "loop", vectorised=False)
        assert self.module is not None
        sigma = getattr(self.strategy, "sigma", None)
        values = {"sigma": LADDER[2]} if sigma == "auto" else self.strategy.values(self.state, 0)
        candidates = self.strategy.ask(self.state, self.noise, 0, values)
        if not candidates.shared:
            candidates = Apart(self.noise, 0, self.state.theta, LADDER[2])
        copies = 1 if candidates.shared else OFFSPRING
        with one_thread_each(), exact_arithmetic(self.device):
            size = block_size(
                self.strategy.population,
                self.genome,
                prepared(self.module).to(self.device),
                batch,
                copies,
                processes=self.fleet.size,
            )
            settled = settle(self._make, size, candidates, batch, dropout=self.dropout)
            settled = in_type(self._make, settled, self.dtype, candidates, batch)
        if settled.reason is not None:
            warnings.warn(settled.sentence(), SlowPath, stacklevel=2)
        if home(self.device).type != self.device.type:
            message = (
                f"There are no kernels for {self.device}: its noise is made on the CPU, and layers go by torch's own."
            )
            warnings.warn(message, SlowPath, stacklevel=2)
        return settled.plan

    def evaluate(self, generation: int, batch: Batch | None) -> Told:
        evaluator = self.prepare(batch)
        values = self.strategy.values(self.state, generation)
        if self.strategy.needs_gradient:
            return self.differentiate(generation, batch, values)
        candidates = self.strategy.ask(self.state, self.noise, generation, values)
        population, plan = self.strategy.population, evaluator.plan
        alone, slower = Plan(1, "alone", vectorised=False, dropout=plan.dropout), None
        begun, self.under_way = self.under_way, None
        try:
            if begun is not None and begun.fits(self, generation, batch, values):
                scores = begun.scores.cpu().numpy()[:population]
            else:
                scores = self.fleet.evaluate(evaluator, candidates, population, batch)
            looked_at = batch is not None and generation % CHECK_EVERY == 1
            if looked_at and not self._all_confirm(candidates, batch, scores):
                if plan.dtype == "bfloat16":
                    slower = Settled(replace(plan, dtype="float32"), "bfloat16 no longer tells them apart")
                else:
                    slower = Settled(alone, "scores of sampled members are no longer those of the model by itself")
        except (BadInput, Lost):
            raise
        except Exception as error:  # code that takes another way with this batch than it took in the check
            if plan.one_by_one:
                raise
            slower = Settled(alone, f"{type(error).__name__}: {first_sentence(error)}")
        if slower is not None:
            scores = self.fleet.evaluate(self._make(slower.plan), candidates, population, batch)  # or it is an error
            warnings.warn(slower.sentence(), SlowPath, stacklevel=2)
            self.adopt(slower.plan)
        return Told(generation, scores, values)

    @property
    def goes_ahead(self) -> bool:
        """Whether a card could evaluate the next generation while this process does something else."""
        alone = self.fleet.size == 1 and self.evaluator is not None
        return alone and any(r.trusted for r in self.evaluator.recordings.values())  # type: ignore[union-attr]

    def begin(self, generation: int, batch: Batch | None) -> None:
        """Has a card begin a generation by itself, for ``evaluate`` to find; where it cannot, nothing is done."""
        if self.evaluator is None or batch is None:
            return
        values = self.strategy.values(self.state, generation)
        candidates = self.strategy.ask(self.state, self.noise, generation, values)
        recording = self.evaluator.recording(candidates, self.strategy.population, batch)
        if recording is not None and recording.trusted:
            scores = recording.scores(candidates, batch)
            self.under_way = UnderWay(generation, batch, values, self.state, self.strategy, scores)

    def _all_confirm(self, candidates: Candidates, batch: Batch | None, scores: NDArray[np.float32]) -> bool:
        assert batch is not None
        fleet, given = self.fleet, batch
        return fleet.all(fleet.together(lambda: self._confirmed(candidates, given, scores)))

    def _confirmed(self, candidates: Candidates, batch: Batch, scores: NDArray[np.float32]) -> bool:
        """Whether sampled members, or all but one of them, have the scores of plain copies of the module."""
        assert self.plan is not None
        if self.plan.one_by_one:
            return True
        if self.plan.dtype == "bfloat16":
            count = min(RANKED, scores.size)
            exactly = replace(self.plan, dtype="float32", block=min(self.plan.block, RANKED))
            with one_thread_each(), exact_arithmetic(self.device):
                exact = scores_of(self._make(exactly), candidates, batch, count)
            return correlation(exact, scores[:count]) >= SURVIVAL
        number = int(candidates.generation)
        sampled = self.noise.below(scores.size, SAMPLED, number, Stream.SELECTION, member=WORD - 1)
        with one_thread_each(), exact_arithmetic(self.device):
            plain = self._make(Plan(1, "alone", vectorised=False, dropout=self.plan.dropout))
            right = [agrees(plain, candidates, batch, scores, int(member)) for member in sampled]
        return sum(right) >= SAMPLED - 1

    def adopt(self, plan: Plan) -> None:
        """From here on members are evaluated by this plan."""
        if plan != self.plan:
            self.plan, self.evaluator, self.under_way = plan, None, None

    def differentiate(self, generation: int, batch: Batch | None, values: Mapping[str, float]) -> Told:
        if batch is None:
            raise BadInput(
                f"The strategy {self.strategy.name} needs data and a loss of (output, target), not an objective."
            )
        try:
            scores, gradient = self.fleet.gradient(self.prepare(batch), self.state.theta, batch)
        except RuntimeError as error:
            if "does not require grad" in str(error):
                message = "The loss has no gradient, which the strategy 'gradient' needs: use openai-es for it."
                raise BadInput(message) from error
            raise
        return Told(generation, scores, values, gradient)

    def tell(self, told: Told) -> None:
        """Folds a generation into a whole State."""
        self.state = self.strategy.tell(self.state, told, self.noise, maximize=self.objective.maximize)

    def advance(self, told: Told) -> None:
        """The same by the whole fleet, each with its part of the State."""
        maximize = self.objective.maximize
        given = (self.strategy, self.state, told, self.noise)
        self.state = self.fleet.advance(self.update, *given, maximize=maximize)

    def divide(self) -> None:
        """Leaves of a whole State what this process needs."""
        maximize = self.objective.maximize
        found = self.fleet.divide(self.strategy, self.state, self.noise, maximize=maximize)
        self.update, self.state = found

    def whole(self) -> Any:
        """The State with what other processes have of it; all must ask for it."""
        return self.fleet.whole(self.update, self.strategy, self.state)

    def probe(self, batch: Batch | None) -> Told:
        """Chooses sigma: the one for which two halves of a population agree best on where to go."""
        evaluator = self.prepare(batch)
        half = self.strategy.population // 4 * 2 or 1  # whole pairs
        found, all_scores = [], []
        for i, sigma in enumerate(LADDER):
            address = WORD - 1 - i  # generations that no run reaches
            candidates = self.strategy.ask(self.state, self.noise, address, {"sigma": sigma})
            scores = self.fleet.evaluate(evaluator, candidates, self.strategy.population, batch)
            all_scores.append(scores)
            found.append((self._agreement(scores, half, address), sigma))
        return Told(PROBE, np.concatenate(all_scores), {"sigma": max(found)[1]})

    def diagnose(self, told: Told, before: Any) -> dict[str, float]:
        """How far a generation moved the centre, at what sigma, and how far two halves of it agree on the direction."""
        found = {"step": float((self.state.theta - before.theta).double().norm())}
        candidates = self.strategy.ask(before, self.noise, told.generation, told.values)
        if isinstance(candidates.sigma, torch.Tensor):
            found["sigma"] = float(candidates.sigma.double().mean())
        if candidates.shared and not self.strategy.needs_gradient and self.strategy.population >= 4:
            half = self.strategy.population // 4 * 2
            if all(np.isfinite(part).any() for part in (told.scores[:half], told.scores[half : 2 * half])):
                found["agreement"] = self._agreement(told.scores, half, told.generation)
        return found

    def _agreement(self, scores: NDArray[np.float32], half: int, generation: int) -> float:
        """The cosine between the directions that two halves of the population give."""
        directions = []
        for part in (slice(0, half), slice(half, 2 * half)):
            weights = utilities(scores[part], "ranks", maximize=self.objective.maximize)
            if weights is None:
                return -1.0
            members = np.arange(self.strategy.population)[part]
            noise = self.noise.members(members, generation, self.device)
            directions.append(noise.weighted_sum(weights, (0, self.genome.size), often=False).double())
        a, b = directions
        return float((a @ b) / (a.norm() * b.norm()).clamp_min(1e-30))


@dataclass(frozen=True)
class UnderWay:
    """Scores that a card is computing, and what they are made of."""

    generation: int
    batch: Batch
    values: Mapping[str, float]
    state: Any
    strategy: AnyStrategy
    scores: torch.Tensor

    def fits(self, core: Core, generation: int, batch: Batch | None, values: Mapping[str, float]) -> bool:
        same = self.batch is batch and self.state is core.state and self.strategy is core.strategy
        return same and self.generation == generation and self.values == values
