"""A strategy at work on a module: what a run, its replay and a search in one's own loop have in common."""

import copy
import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from germline.errors import BadInput, FleetLostError
from germline.fleet import Local
from germline.fleet.local import mean_score
from germline.genome import Genome
from germline.journal import PROBE
from germline.kernels import kernel_device
from germline.noise import ADDRESS_LIMIT, Field, Stream
from germline.objective import Batch, Objective, seeded_generators
from germline.optim.optimizers import Moments
from germline.optim.shaping import utilities
from germline.population import (
    SURVIVAL,
    DType,
    Evaluator,
    Plan,
    PlanChoice,
    SlowPath,
    block_size,
    choose_dtype,
    choose_plan,
    exact_arithmetic,
    first_sentence,
    make_evaluation_copy,
    matches_plain_copy,
    rank_correlation,
    score_first_members,
    single_threaded_torch,
)
from germline.strategies import (
    AnyStrategy,
    Candidates,
    Differentiating,
    GenerationInputs,
    GenerationResult,
    UnsharedCandidates,
)
from germline.strategies.settings import build_optimizer

Exam = Callable[[Evaluator, torch.Tensor], float]
Learner = Callable[[int, torch.Tensor, Moments], tuple[torch.Tensor, Moments, float]]  # of a member

LADDER = (0.2, 0.1, 0.05, 0.02, 0.01, 0.005)  # the sigmas that sigma="auto" chooses from
CHECK_EVERY = 100  # generations between checks of sampled members
SAMPLED = 3  # members of such a check
OFFSPRING = 6  # arrays of the size of a child that are there while it is made: parents, masks, noise
PLAIN = Plan(1, "loop", vectorized=False)
FEW = 4  # processes up to which samples around a gradient have the same blocks, and so the same bits
SAME = 1e-4  # relative difference up to which the score of a batch is the mean of those of its slices
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
    single: Evaluator | None = field(init=False, default=None)  # of one member
    backward: Evaluator | None = field(init=False, default=None)  # of gradients
    latest: torch.Tensor | None = field(init=False, default=None)  # gradient; see ``compare``
    update: Any = field(init=False, default=None)  # how a fleet shares out the update; see ``divide``
    under_way: "UnderWay | None" = field(init=False, default=None)  # see ``begin``
    given: Batch | None = field(init=False, default=None)  # the batch at hand, where nobody else has it

    def __post_init__(self) -> None:
        self.device = self.fleet.place()
        if self.module is not None:
            self.genome = Genome.from_module(self.module)
            if self.objective.of_model:  # it may bring tensors of its own, for the device where the module is
                self.device = self.fleet.place(next(self.module.parameters()).device)
            self.module = copy.deepcopy(self.module)
            theta = self.genome.read(self.module, self.device)
        else:
            theta = torch.zeros(self.genome.size, dtype=self.genome.dtype, device=self.device)
        self.strategy = self.fleet.adapted(self.strategy)
        if hasattr(self.strategy, "bind"):  # constants that depend on the layout of the parameters
            self.strategy = self.strategy.bind(self.genome)
        self.noise = self.strategy.field(self.seed, self.genome)
        self.state = self.initial(theta)

    def initial(self, theta: torch.Tensor) -> Any:
        """The State before the first generation; members that learn begin at different places."""
        strategy: Any = self.strategy
        if not self.rears or self.module is None:
            return strategy.init(theta)
        members = [theta]
        if strategy.diversity == "noise":
            noise = self.noise.members(
                np.arange(1, strategy.population), ADDRESS_LIMIT - 1, self.device
            )  # of no generation
            members += list(noise.perturb(theta, strategy.spread))
        else:
            for k in range(1, strategy.population):
                seed = int(Field(self.seed).below(1 << 32, 1, k, Stream.INITIAL)[0])
                members.append(self.genome.read(reset(copy.deepcopy(self.module), seed), self.device))
        return strategy.begun(theta, torch.stack(members))

    @property
    def rears(self) -> bool:
        """Whether members learn between evaluations."""
        return getattr(self.strategy, "rears", False)

    def sample(self, batch: Batch | None) -> NDArray[np.float32]:
        """The scores of a few members around the initial weights, by which a process proves that it finds the same."""
        assert self.module is not None
        center = self.genome.read(self.module, self.device)
        candidates = Candidates(self.noise, ADDRESS_LIMIT - 2, center, LADDER[2])
        if self.rears or self.strategy.population == 1:  # they have no blocks of members
            return Local.evaluate(self.fleet, self._make(PLAIN), candidates, 1, batch)
        evaluator = self.prepare(batch)
        values = self.strategy.values(self.state, 0)
        if not self.strategy.needs_gradient and not self.strategy.ask(self.state, self.noise, 0, values).shared:
            candidates = UnsharedCandidates(self.noise, ADDRESS_LIMIT - 2, center, LADDER[2])
        return Local.evaluate(self.fleet, evaluator, candidates, evaluator.plan.block, batch)

    def try_out(self, batch: Batch | None) -> None:
        """Runs the user's own module once, so that what does not fit is said before anything else is done."""
        assert self.module is not None
        self.objective = self.objective.checked_on(make_evaluation_copy(self.module).to(self.device), batch)

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
        return Evaluator.build(self.module, self.genome, self.objective, self.device, plan)

    def _settle(self, batch: Batch | None) -> Plan:
        assert self.module is not None
        if self.rears or self.strategy.population == 1:
            return self._sliced(PLAIN, batch)
        candidates = Candidates(self.noise, 0, self.state.theta, LADDER[2])
        if not self.strategy.needs_gradient and getattr(self.strategy, "sigma", None) != "auto":
            candidates = self.strategy.ask(self.state, self.noise, 0, self.strategy.values(self.state, 0))
        if not candidates.shared:
            candidates = UnsharedCandidates(self.noise, 0, self.state.theta, LADDER[2])
        copies = 1 if candidates.shared else OFFSPRING
        with single_threaded_torch(), exact_arithmetic(self.device):
            size = block_size(
                self.strategy.population,
                self.genome,
                make_evaluation_copy(self.module).to(self.device),
                batch,
                copies,
                processes=max(self.fleet.size, FEW if self.strategy.needs_gradient else 1),
            )
            settled = choose_plan(self._make, size, candidates, batch, dropout=self.dropout)
            settled = choose_dtype(self._make, settled, self.dtype, candidates, batch)
        if settled.reason is not None:
            warnings.warn(settled.sentence(), SlowPath, stacklevel=2)
        if kernel_device(self.device).type != self.device.type:
            message = (
                f"There are no kernels for {self.device}: its noise is made on the CPU, and layers go by torch's own."
            )
            warnings.warn(message, SlowPath, stacklevel=2)
        return self._sliced(settled.plan, batch) if self.strategy.needs_gradient else settled.plan

    def _sliced(self, plan: Plan, batch: Batch | None) -> Plan:
        """In how many slices gradients are computed: one, where a score is not the mean of those of its parts."""
        slices, theta = self.differentiating.slices, self.state.theta
        parts = batch.split(slices) if batch is not None else []
        if len(parts) < 2:
            return plan
        evaluator = self._make(PLAIN)
        with torch.no_grad(), single_threaded_torch(), exact_arithmetic(self.device), seeded_generators(0):
            whole = float(evaluator.score_at(theta, batch))  # type: ignore[arg-type]
            scores = np.array([float(evaluator.score_at(theta, part)) for part in parts], np.float32)
        if math.isclose(whole, float(mean_score(scores, parts)[0]), rel_tol=SAME, abs_tol=SAME):
            return replace(plan, slices=slices)
        message = (
            "The loss of a batch is not the mean of the losses of its parts, so gradients are computed in one piece"
        )
        warnings.warn(f"{message}, by one process.", SlowPath, stacklevel=2)
        return plan

    @property
    def differentiating(self) -> Differentiating:
        return cast(Differentiating, self.strategy)

    def evaluate(self, generation: int, batch: Batch | None, on_dev: Batch | None = None) -> GenerationResult:
        """The scores of a generation, and its gradient if there is one; samples may be judged on another batch."""
        self.prepare(batch)
        values = self.strategy.values(self.state, generation)
        if not self.strategy.needs_gradient:
            candidates = self.strategy.ask(self.state, self.noise, generation, values)
            return GenerationResult(generation, self.scores(candidates, batch, self.origin(generation, values)), values)
        strategy, state, result = (
            self.differentiating,
            self.state,
            GenerationResult(generation, np.empty(0, np.float32), values),
        )
        if strategy.differentiates(generation):
            result = self.differentiate(generation, batch, values)
            if not strategy.samples(generation):
                return result
            assert result.gradient is not None
            state = strategy.with_gradient(state, result.gradient, generation, maximize=self.objective.maximize)
        origin = replace(self.origin(generation, values, state), on_dev=on_dev is not None)
        on_dev = batch if on_dev is None else on_dev
        scores = self.scores(self.strategy.ask(state, self.noise, generation, values), on_dev, origin)
        reference_candidates = strategy.reference_candidates(state, self.noise, generation, values)
        if reference_candidates is not None:
            self.single = self.single or self._make(replace(self.settled, block=1))
            scores = np.concatenate([self.fleet.evaluate(self.single, reference_candidates, 1, on_dev), scores])
        return replace(result, scores=scores)

    def origin(self, generation: int, values: Mapping[str, float], state: Any = None) -> GenerationInputs:
        """What a generation is made of; from the State as it is, or from one that knows the next gradient."""
        known = state is not None and state is not self.state
        version, state = f"{generation}{'+' * known}", state or self.state
        return GenerationInputs(self.strategy, state, version, generation, values, batch=generation, given=self.given)

    def scores(self, candidates: Candidates, batch: Batch | None, origin: GenerationInputs) -> NDArray[np.float32]:
        """Of all members; by a slower way from here on where the usual one fails."""
        evaluator, generation = self.prepare(batch), int(candidates.generation)
        population, plan = self.strategy.population, evaluator.plan
        alone, slower = Plan(1, "isolated", vectorized=False, dropout=plan.dropout), None
        begun, self.under_way = self.under_way, None
        try:
            if begun is not None and begun.fits(self, generation, batch, origin.values):
                scores = begun.scores.cpu().numpy()[:population]
            else:
                scores = self.fleet.evaluate(evaluator, candidates, population, batch, origin)
            looked_at = batch is not None and generation % CHECK_EVERY == 1
            if looked_at and not self._all_confirm(candidates, batch, scores):
                if plan.dtype == "bfloat16":
                    slower = PlanChoice(replace(plan, dtype="float32"), "bfloat16 no longer tells them apart")
                else:
                    slower = PlanChoice(alone, "scores of sampled members are no longer those of the model by itself")
        except (BadInput, FleetLostError):
            raise
        except Exception as error:  # code that takes another way with this batch than it took in the check
            if plan.one_by_one:
                raise
            slower = PlanChoice(alone, f"{type(error).__name__}: {first_sentence(error)}")
        if slower is not None:
            evaluator = self._make(slower.plan)
            scores = self.fleet.evaluate(evaluator, candidates, population, batch, origin)  # or it is an error
            warnings.warn(slower.sentence(), SlowPath, stacklevel=2)
            self.adopt(replace(slower.plan, slices=plan.slices))
        return scores

    @property
    def goes_ahead(self) -> bool:
        """Whether a card could evaluate the next generation while this process does something else."""
        alone = self.fleet.size == 1 and self.evaluator is not None and not self.strategy.needs_gradient
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
            with single_threaded_torch(), exact_arithmetic(self.device):
                exact = score_first_members(self._make(exactly), candidates, batch, count)
            return rank_correlation(exact, scores[:count]) >= SURVIVAL
        number = int(candidates.generation)
        sampled = self.noise.below(scores.size, SAMPLED, number, Stream.SELECTION, member=ADDRESS_LIMIT - 1)
        with single_threaded_torch(), exact_arithmetic(self.device):
            plain = self._make(Plan(1, "isolated", vectorized=False, dropout=self.plan.dropout))
            right = [matches_plain_copy(plain, candidates, batch, scores, int(member)) for member in sampled]
        return sum(right) >= SAMPLED - 1

    def adopt(self, plan: Plan) -> None:
        """From here on members are evaluated by this plan."""
        if plan != self.plan:
            self.plan, self.evaluator, self.single, self.backward, self.under_way = plan, None, None, None, None

    def differentiate(self, generation: int, batch: Batch | None, values: Mapping[str, float]) -> GenerationResult:
        if batch is None:
            raise BadInput(
                f"The strategy {self.strategy.name} needs data and a loss of (output, target), not an objective."
            )
        try:
            wire = self.differentiating.wire
            self.prepare(batch)
            origin = self.origin(generation, values)
            scores, gradient = self.fleet.gradient(self.plain(), self.state.theta, batch, wire, origin)
        except RuntimeError as error:
            if "does not require grad" in str(error):
                message = "The loss has no gradient, which the strategy 'gradient' needs: use openai-es for it."
                raise BadInput(message) from error
            raise
        return GenerationResult(generation, scores, values, gradient)

    def rear(self, generation: int, lessons: Callable[[int], Iterator[Batch]], exam: Exam) -> GenerationResult:
        """Members learn, each its own lessons, and are examined; the State is that of those who have learned."""
        strategy, state = cast(Any, self.strategy), self.state
        values = strategy.values(state, generation)
        mine, learner = self.fleet.own(strategy.population), self.learner(lessons, exam, values)

        def one(row: int) -> tuple[torch.Tensor, Moments, float]:
            return learner(mine[row], state.members[row].clone(), strategy.moments(state, row))

        origin = self.origin(generation, values)
        found, scores = self.fleet.rear(one, strategy.population, self.device, origin)
        self.state = strategy.learned(state, [theta for theta, _, _ in found], [moments for _, moments, _ in found])
        return GenerationResult(generation, scores, values)

    def learner(self, lessons: Callable[[int], Iterator[Batch]], exam: Exam, values: Mapping[str, float]) -> Learner:
        """How a member learns, and how well it does then."""
        plain, maximize, optimizer = self.plain(), self.objective.maximize, build_optimizer(self.strategy)

        def learn(member: int, theta: torch.Tensor, moments: Moments) -> tuple[torch.Tensor, Moments, float]:
            for batch in lessons(member):
                gradient = self.fleet.lesson(plain, theta, batch)
                theta, moments = optimizer.step(theta, -gradient if maximize else gradient, moments, values["lr"])
            return theta, moments, exam(plain, theta)

        return learn

    def passes(self, result: GenerationResult) -> int:
        """Forward passes of a generation; backprop counts as three."""
        if not self.strategy.needs_gradient:
            return self.strategy.population
        strategy, generation = self.differentiating, result.generation
        return 3 * strategy.differentiates(generation) + strategy.samples(generation) * int(result.scores.size)

    def plain(self) -> Evaluator:
        """Of gradients, which are those of the module itself."""
        if self.backward is None:
            self.backward = self._make(replace(PLAIN, slices=self.settled.slices))
        return self.backward

    def tell(self, result: GenerationResult) -> None:
        """Folds a generation into a whole State."""
        self.state = self.strategy.tell(self.state, result, self.noise, maximize=self.objective.maximize)

    def advance(self, result: GenerationResult) -> None:
        """The same by the whole fleet, each with its part of the State."""
        maximize = self.objective.maximize
        given = (self.strategy, self.state, result, self.noise)
        self.state = self.fleet.advance(self.update, *given, maximize=maximize)

    def divide(self) -> None:
        """Leaves of a whole State what this process needs."""
        maximize = self.objective.maximize
        found = self.fleet.divide(self.strategy, self.state, self.noise, maximize=maximize)
        self.update, self.state = found

    def whole(self) -> Any:
        """The State with what other processes have of it; all must ask for it."""
        return self.fleet.whole(self.update, self.strategy, self.state)

    def probe(self, batch: Batch | None) -> GenerationResult:
        """Chooses sigma: the one for which two halves of a population agree best on where to go."""
        evaluator = self.prepare(batch)
        half = self.strategy.population // 4 * 2 or 1  # whole pairs
        found, all_scores = [], []
        for i, sigma in enumerate(LADDER):
            address = ADDRESS_LIMIT - 1 - i  # generations that no run reaches
            candidates = self.strategy.ask(self.state, self.noise, address, {"sigma": sigma})
            scores = self.fleet.evaluate(evaluator, candidates, self.strategy.population, batch)
            all_scores.append(scores)
            found.append((self._agreement(scores, half, address), sigma))
        return GenerationResult(PROBE, np.concatenate(all_scores), {"sigma": max(found)[1]})

    def diagnose(self, result: GenerationResult, before: Any) -> dict[str, float]:
        """How far a generation moved the center, at what sigma, and how far two halves of it agree on the direction."""
        found = {"step": float((self.state.theta - before.theta).double().norm())}
        candidates = self.strategy.ask(before, self.noise, result.generation, result.values)
        if isinstance(candidates.sigma, torch.Tensor):
            found["sigma"] = float(candidates.sigma.double().mean())
        if self.rears and len(self.state.members) > 1:
            found["diversity"] = float(torch.pdist(before.members.double()).mean())
        if candidates.shared and not self.strategy.needs_gradient and self.strategy.population >= 4:
            half = self.strategy.population // 4 * 2
            if all(np.isfinite(part).any() for part in (result.scores[:half], result.scores[half : 2 * half])):
                found["agreement"] = self._agreement(result.scores, half, result.generation)
        return found

    def compare(self, result: GenerationResult) -> dict[str, float]:
        """The gradient of a generation beside the one before: its length, how much that changed, and the angle."""
        here = result.gradient if result.gradient is not None else getattr(self.state, "direction", None)
        before, self.latest = self.latest, here
        if here is None:
            return {}
        length = float(here.double().norm())
        found = {"gradient_norm": length}
        if before is not None:
            other = float(before.double().norm())
            cosine = float(here.double() @ before.double()) / max(length * other, 1e-300)
            found |= {"gradient_change": length - other}
            found |= {"gradient_angle": math.degrees(math.acos(max(-1.0, min(1.0, cosine))))}
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


def reset(module: nn.Module, seed: int) -> nn.Module:
    """A module with other initial weights, as its layers make them."""
    with seeded_generators(seed):
        for part in module.modules():
            getattr(part, "reset_parameters", lambda: None)()
    return module


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
