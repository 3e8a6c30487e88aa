"""Scores the members of a run by a plan that is chosen once, checked now and then, and replaced if it fails."""

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from germline.errors import BadInput, FleetLostError
from germline.fleet.gradients import average_scores
from germline.fleet.protocol import Fleet, Scores
from germline.genome import Genome
from germline.kernels import kernel_device
from germline.noise import ADDRESS_LIMIT, Stream
from germline.normalization import normalize
from germline.objective import Batch, Objective, iterate_tensors, seeded_generators
from germline.population import (
    METHODS,
    SURVIVAL,
    Call,
    DType,
    Evaluator,
    Generation,
    Members,
    Plan,
    PlanChoice,
    SlowPath,
    block_size,
    catch_first_call,
    choose_dtype,
    choose_plan,
    describe_error,
    exact_arithmetic,
    has_fast_bfloat16,
    make_evaluation_copy,
    matches_plain_copy,
    rank_correlation,
    release_memory,
    score_first_members,
    single_threaded_torch,
    warn_of_fast_path,
)
from germline.strategies import AnyStrategy, Candidates, GenerationInputs

CHECK_EVERY = 100  # generations between checks of sampled members
SAMPLED = 3  # members of such a check
RANKED = 256  # members whose ranks are compared where the arithmetic is in bfloat16
CLOSE = 1e-4  # relative difference up to which the score of a batch is the mean of those of its slices
ONE_BY_ONE = Plan(1, "loop", vectorized=False)
LARGEST_GROUP = 256  # members that an objective of a population gets at once on a CPU, unless it says so itself
CHECKED = 4  # members of a block by which a plan is chosen, where an objective sets the size of blocks
SMALL_WEIGHTS = 32 << 20  # bytes of a block's weights up to which they are kept in memory for a whole generation


@dataclass
class Scorer:
    """Scores members of one module for a run.

    Attributes:
        module: A copy of the user's module; None where a journal is replayed that needs no gradient.
        genome: The layout of its trainable parameters.
        objective: What members are scored on.
        device: Where they are evaluated.
        dtype: The type of the arithmetic that was asked for.
        dropout: Whether members are scored with their dropout layers active.
        plan: How members are evaluated; None before it is chosen, on the first batch.
    """

    module: nn.Module | None
    genome: Genome
    objective: Objective
    device: torch.device
    dtype: DType = "auto"
    dropout: bool = False
    plan: Plan | None = None
    evaluators: dict[Plan, Evaluator] = field(default_factory=dict)
    prefetched: "dict[int, PrefetchedScores]" = field(default_factory=dict)  # by generation

    @property
    def chosen_plan(self) -> Plan:
        assert self.plan is not None, "a plan is chosen before anything is evaluated"
        return self.plan

    @property
    def evaluator(self) -> Evaluator:
        """The evaluator of members by the plan of the run."""
        return self.find_evaluator(self.chosen_plan)

    @property
    def gradient_evaluator(self) -> Evaluator:
        """The evaluator of gradients, which are those of the plain module."""
        return self.find_evaluator(replace(ONE_BY_ONE, slices=self.chosen_plan.slices))

    def find_evaluator(self, plan: Plan) -> Evaluator:
        """Return the evaluator of a plan, which is built once."""
        if plan not in self.evaluators:
            self.evaluators[plan] = self.build_evaluator(plan)
        return self.evaluators[plan]

    def build_evaluator(self, plan: Plan) -> Evaluator:
        """Build an evaluator of a plan."""
        assert self.module is not None, "a replay without a module evaluates nothing"
        return Evaluator.build(self.module, self.genome, self.objective, self.device, plan)

    def normalize(self, observations: Sequence[float]) -> None:
        """Have all copies of the module normalize observations by these sums; by none before the first generation."""
        for module in (self.module, *(evaluator.module for evaluator in self.evaluators.values())):
            normalize(module, observations)

    def adopt(self, plan: Plan) -> None:
        """Evaluate members by another plan from now on."""
        if plan != self.plan:
            self.plan, self.evaluators, self.prefetched = plan, {}, {}

    def try_module(self, batch: Batch | None) -> None:
        """Run the user's module once on a batch, so that an error is reported before anything else is done."""
        assert self.module is not None
        self.objective = self.objective.checked_on(make_evaluation_copy(self.module).to(self.device), batch)

    def choose_plan(
        self, population: int, candidates: Candidates, batch: Batch | None, *, copies: int, processes: int
    ) -> Plan:
        """Choose the fastest plan that gives what plain copies of the module give, and warn if it is a slow one."""
        assert self.module is not None
        if self.objective.population is not None:
            return self.choose_population_plan(population, candidates, copies=copies, processes=processes)
        warn_of_fast_path(self.module, self.objective, batch, self.device)
        with single_threaded_torch(), exact_arithmetic(self.device):
            module = make_evaluation_copy(self.module).to(self.device)
            low_rank = candidates.shared and bool(candidates.field.matrices)
            size = block_size(population, self.genome, module, batch, copies, processes=processes, low_rank=low_rank)
            del module  # a plan is chosen by further copies
            choice = choose_plan(self.build_evaluator, size, candidates, batch, dropout=self.dropout)
            choice = choose_dtype(self.build_evaluator, choice, self.dtype, candidates, batch)
        release_memory()  # of several copies of the module
        if choice.reason is not None:
            warnings.warn(choice.sentence(), SlowPath, stacklevel=2)
        if kernel_device(self.device).type != self.device.type:
            message = f"There are no kernels for {self.device}: its noise is made on the CPU, its layers are torch's."
            warnings.warn(message, SlowPath, stacklevel=2)
        return choice.plan

    def choose_population_plan(self, population: int, candidates: Candidates, *, copies: int, processes: int) -> Plan:
        """Choose the plan for an objective of a population, on the inputs with which it first calls its members."""
        simulate = self.objective.population
        assert simulate is not None

        def first_call() -> Call | None:
            count = min(population, simulate.block or LARGEST_GROUP)
            group = Members(
                Generation(candidates, None, self.genome, None), np.arange(count), lambda call: self.evaluator
            )
            return catch_first_call(lambda members: self.objective.score_members(members, 0), group)

        try:
            with torch.no_grad(), single_threaded_torch(), exact_arithmetic(self.device), seeded_generators(0):
                call = first_call()
        except BadInput:
            raise
        except Exception as error:
            message = f"The objective cannot be run on the members: {type(error).__name__}: {error}"
            raise BadInput(message) from error
        largest = simulate.block or LARGEST_GROUP
        return self.choose_members_plan(population, candidates, call, largest, copies=copies, processes=processes)

    def choose_members_plan(
        self,
        population: int,
        candidates: Candidates,
        call: Call | None,
        largest: int,
        *,
        copies: int = 1,
        processes: int = 1,
    ) -> Plan:
        """Choose the plan for members that code calls itself, on the inputs of such a call."""
        assert self.module is not None
        dtype = self.choose_members_dtype()
        module = make_evaluation_copy(self.module).to(self.device)
        batch = call.as_batch() if call is not None else None
        goal = Objective(lambda output, target: target)  # scores are not the concern here

        def make(plan: Plan) -> Evaluator:
            assert self.module is not None
            return Evaluator.build(self.module, self.genome, goal, self.device, plan)

        with single_threaded_torch(), exact_arithmetic(self.device):
            try:
                size = self.size_own_block(population, candidates, copies, processes)
                checked = min(size or CHECKED, CHECKED)  # whose outputs may be large
                if size is None:
                    size = block_size(population, self.genome, module, batch, copies, processes, largest)
                    checked = size
            except Exception as error:
                shapes = [tuple(x.shape) for x in iterate_tensors([batch.args, batch.kwargs])] if batch else []
                message = f"The model cannot be run on inputs of shape {shapes}: {type(error).__name__}: {error}"
                raise BadInput(message) from error
            if batch is None:  # it never calls the model
                return Plan(size, "population")
            is_small = 4 * size * self.genome.size <= SMALL_WEIGHTS
            methods = sorted(METHODS, key=lambda method: method != "vmap") if is_small else list(METHODS)
            choice = choose_plan(make, checked, candidates, batch, dropout=self.dropout, methods=methods)
        release_memory()  # of several copies of the module
        if choice.plan.one_by_one:
            warnings.warn(choice.sentence(), SlowPath, stacklevel=2)
        return replace(choice.plan, block=size, dtype="float32" if choice.plan.one_by_one else dtype)

    def choose_members_dtype(self) -> Literal["float32", "bfloat16"]:
        """Return the arithmetic of members that code calls itself: bfloat16 only if their objective allows it."""
        objective = self.objective.population
        if objective is None or not objective.allows_bfloat16:
            if self.dtype == "bfloat16":
                raise BadInput("Members that code calls itself are evaluated in float32: leave dtype at auto.")
            return "float32"
        is_fast = self.device.type == "cuda" and has_fast_bfloat16(self.device)
        return "bfloat16" if self.dtype == "bfloat16" or (self.dtype == "auto" and is_fast) else "float32"

    def size_own_block(self, population: int, candidates: Candidates, copies: int, processes: int) -> int | None:
        """Return how many members an objective of a population wants at once; None if it leaves that open."""
        objective = self.objective.population
        if objective is None:
            return None
        of_low_rank = sum(m.stop - m.start for m in candidates.field.matrices) if candidates.shared else 0
        weight_bytes = copies * (self.genome.size - of_low_rank) * self.genome.dtype.itemsize
        dtype = torch.bfloat16 if self.choose_members_dtype() == "bfloat16" else torch.float32
        return objective.size_block(population, self.device, dtype, weight_bytes, processes)

    def slice_gradients(self, plan: Plan, slices: int, theta: Tensor, batch: Batch | None) -> Plan:
        """Return a plan with the number of slices of a gradient: one, if a score is not the mean of its slices'."""
        parts = batch.split(slices) if batch is not None else []
        if len(parts) < 2:
            return plan
        assert batch is not None
        evaluator = self.build_evaluator(ONE_BY_ONE)
        with torch.no_grad(), single_threaded_torch(), exact_arithmetic(self.device), seeded_generators(0):
            score = float(evaluator.score_at(theta, batch))
            scores = np.array([float(evaluator.score_at(theta, part)) for part in parts], np.float32)
        if math.isclose(score, float(average_scores(scores, parts)[0]), rel_tol=CLOSE, abs_tol=CLOSE):
            return replace(plan, slices=slices)
        message = "The loss of a batch is not the mean of the losses of its slices"
        warnings.warn(f"{message}, so one process computes gradients in one piece.", SlowPath, stacklevel=2)
        return plan

    def score(
        self, fleet: Fleet, strategy: AnyStrategy, candidates: Candidates, batch: Batch | None, inputs: GenerationInputs
    ) -> Scores:
        """Return the scores of all members; if the plan of the run fails, adopt a slower one with a warning."""
        evaluator, generation, plan = self.evaluator, int(candidates.generation), self.chosen_plan
        isolated, slower = Plan(1, "isolated", vectorized=False, dropout=plan.dropout), None
        prefetched = self.prefetched.pop(generation, None)
        try:
            if prefetched is not None and prefetched.fits(strategy, inputs.state, batch, inputs.values):
                scores = prefetched.read()
            else:
                self.prefetched.clear()
                scores = fleet.score(evaluator, candidates, strategy.population, batch, inputs)
            if batch is not None and is_checked(generation):
                checked = batch
                if not fleet.group.all(fleet.group.all_or_none(lambda: self.confirm(candidates, checked, scores))):
                    fleet.confirm_scores(in_doubt=True)  # a worker may be wrong, and not the plan
                    if plan.dtype == "bfloat16":
                        slower = PlanChoice(replace(plan, dtype="float32"), "bfloat16 no longer ranks members rightly")
                    else:
                        slower = PlanChoice(isolated, "sampled members no longer have the scores of the plain model")
        except (BadInput, FleetLostError):
            raise
        except Exception as error:  # code that takes another path with this batch than it took in the check
            if plan.one_by_one:
                raise
            slower = PlanChoice(isolated, f"its code cannot run for several members at once ({describe_error(error)})")
        if slower is not None:
            evaluator = self.build_evaluator(slower.plan)
            scores = fleet.score(evaluator, candidates, strategy.population, batch, inputs)  # or it is an error
            warnings.warn(slower.sentence(), SlowPath, stacklevel=2)
            self.adopt(replace(slower.plan, slices=plan.slices))
        return scores

    def confirm(self, candidates: Candidates, batch: Batch, scores: Scores) -> bool:
        """Return whether sampled members, or all but one of them, have the scores of plain copies of the module."""
        plan = self.chosen_plan
        if plan.one_by_one:
            return True
        with single_threaded_torch(), exact_arithmetic(self.device):
            if plan.dtype == "bfloat16":
                count = min(RANKED, scores.size)
                exact_plan = replace(plan, dtype="float32", block=min(plan.block, RANKED))
                exact = score_first_members(self.build_evaluator(exact_plan), candidates, batch, count)
                return rank_correlation(exact, scores[:count]) >= SURVIVAL
            number = int(candidates.generation)
            sampled = candidates.field.below(scores.size, SAMPLED, number, Stream.SELECTION, member=ADDRESS_LIMIT - 1)
            plain = self.build_evaluator(Plan(1, "isolated", vectorized=False, dropout=plan.dropout))
            right = [matches_plain_copy(plain, candidates, batch, scores, int(member)) for member in sampled]
        return sum(right) >= SAMPLED - 1

    @property
    def can_prefetch(self) -> bool:
        """True if a GPU could score the next generation while this process does something else."""
        evaluator = self.evaluators.get(self.plan) if self.plan is not None else None
        return evaluator is not None and any(recording.trusted for recording in evaluator.recordings.values())

    def prefetch(
        self, strategy: AnyStrategy, state: Any, candidates: Candidates, batch: Batch | None, values: Any
    ) -> None:
        """Have a GPU start to score a generation, for ``score`` to find; where it cannot, do nothing."""
        if batch is None:
            return
        recording = self.evaluator.recording(candidates, strategy.population, batch)
        if recording is not None and recording.trusted:
            scores = recording.scores(candidates, batch)[: strategy.population]
            self.prefetched[int(candidates.generation)] = PrefetchedScores(strategy, state, batch, values, scores)


def is_checked(generation: int) -> bool:
    """Return whether sampled members of a generation are compared with plain copies."""
    return generation % CHECK_EVERY == 1


class PrefetchedScores:
    """Scores that a GPU is computing, on their way to the host, and what they are made of.

    Args:
        strategy: The strategy of the run.
        state: Its State, from which the members come.
        batch: What they are scored on.
        values: The values of the strategy's schedules.
        scores: In the memory of the GPU, where the next generation overwrites them.
    """

    def __init__(
        self, strategy: AnyStrategy, state: Any, batch: Batch, values: Mapping[str, float], scores: Tensor
    ) -> None:
        self.strategy, self.state, self.batch, self.values, self.scores = strategy, state, batch, values, scores
        self.copy = torch.empty(scores.shape, dtype=scores.dtype, pin_memory=True)
        with torch.cuda.device(scores.device):
            self.copy.copy_(scores, non_blocking=True)
            self.arrival = torch.cuda.current_stream().record_event()
        self.numbers: Scores | None = None

    def read(self) -> Scores:
        """Return the scores, the same array each time, once they have arrived."""
        if self.numbers is None:
            self.arrival.synchronize()
            self.numbers = self.copy.numpy().copy()
        return self.numbers

    def fits(self, strategy: AnyStrategy, state: Any, batch: Batch | None, values: Mapping[str, float]) -> bool:
        """Return whether these are the scores of members of such a State on such a batch."""
        is_same = self.batch is batch and self.state is state and self.strategy is strategy
        return is_same and self.values == values
