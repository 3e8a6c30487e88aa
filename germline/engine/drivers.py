"""The three ways in which a generation is evaluated, one for each kind of strategy.

    evolve         score the members that ``ask`` describes
    differentiate  compute a gradient, score samples around it, or both
    train_members  train each member on its own batches, then score it

A driver holds no state: it works on a session.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from germline.engine.scoring import ONE_BY_ONE
from germline.errors import BadInput
from germline.fleet.protocol import MemberShare, TrainedMember, Update
from germline.genome import copy_module
from germline.noise import ADDRESS_LIMIT, Field, Stream
from germline.objective import Batch, Batches, seeded_generators
from germline.optim.optimizers import Moments
from germline.population import Plan
from germline.strategies import Candidates, UnsharedCandidates
from germline.strategies.protocol import (
    AnyStrategy,
    GenerationInputs,
    GenerationResult,
    GradientStrategy,
    MemberStrategy,
    StrategyKind,
)

if TYPE_CHECKING:
    from germline.engine.session import Session

CHECK_SIGMA = 0.05  # where the strategy has no sigma yet
OFFSPRING_COPIES = 6  # arrays of a member's size that exist while it is built: parents, masks, noise
SAME_BLOCKS = 4  # ranks up to which samples around a gradient are in the same blocks, and so have the same bits
FIRST_ORDER = 2  # the numbers of members' orders of the examples begin here
NO_GENERATION = ADDRESS_LIMIT - 2  # an address of noise that no run reaches


class Driver(Protocol):
    """A way to evaluate the generations of one kind of strategy."""

    records_theta: ClassVar[bool]  # whether a record holds the hash of the weights: a replay computes floats again

    def init(self, session: "Session", theta: Tensor) -> Any:
        """Return the State before the first generation."""
        return session.strategy.init(theta)

    def choose_plan(self, session: "Session", batch: Batch | None) -> Plan:
        """Choose how members are evaluated."""

    def sample(self, session: "Session") -> tuple[Candidates, Plan]:
        """Describe a few members around the initial weights, whose scores prove that a worker computes the same."""

    def share_update(self, session: "Session") -> Update:
        """Decide how the fleet shares out updates."""
        maximize = session.scorer.objective.maximize
        return session.fleet.share_update(session.strategy, session.state, session.noise, maximize=maximize)

    def score(self, session: "Session", generation: int, batch: Batch | None) -> GenerationResult:
        """Evaluate a generation."""

    def restore(self, session: "Session", result: GenerationResult) -> GenerationResult:
        """Complete a result from a journal with what a record does not hold, so that it can be told."""
        return result

    def count_samples(self, session: "Session", result: GenerationResult, batch: Batch | None) -> int:
        """Return the forward passes of examples of a generation; backprop counts as three."""


def blocks_of(session: "Session", batch: Batch | None, candidates: Candidates, processes: int) -> Plan:
    """Choose the plan of a strategy whose members are evaluated in blocks."""
    theta = session.state.theta
    if not candidates.shared:
        candidates = UnsharedCandidates(session.noise, 0, theta, CHECK_SIGMA)
    copies = 1 if candidates.shared else OFFSPRING_COPIES
    population = session.strategy.population
    return session.scorer.choose_plan(population, candidates, batch, copies=copies, processes=processes)


@dataclass(frozen=True)
class Evolve(Driver):
    """Scores the members that a strategy's ``ask`` describes."""

    records_theta: ClassVar[bool] = False

    def choose_plan(self, session: "Session", batch: Batch | None) -> Plan:
        return blocks_of(session, batch, self._first_candidates(session), session.fleet.group.size)

    def sample(self, session: "Session") -> tuple[Candidates, Plan]:
        kind = Candidates if self._first_candidates(session).shared else UnsharedCandidates
        candidates = kind(session.noise, NO_GENERATION, session.read_theta(), CHECK_SIGMA)
        return candidates, session.scorer.chosen_plan

    def _first_candidates(self, session: "Session") -> Candidates:
        strategy, state = session.strategy, session.state
        if strategy.needs_probe:
            return Candidates(session.noise, 0, state.theta, CHECK_SIGMA)
        return strategy.ask(state, session.noise, 0, strategy.values(state, 0))

    def score(self, session: "Session", generation: int, batch: Batch | None) -> GenerationResult:
        values = session.values(generation)
        candidates = session.strategy.ask(session.state, session.noise, generation, values)
        inputs = make_inputs(session, generation, values)
        numbers = session.scorer.score(session.fleet, session.strategy, candidates, batch, inputs)
        columns = session.scorer.objective.columns
        if columns == 1:
            return GenerationResult(generation, numbers, values)
        table = numbers.reshape(-1, columns)
        return GenerationResult(generation, table[:, 0].copy(), values, counts=table[:, 1:])

    def count_samples(self, session: "Session", result: GenerationResult, batch: Batch | None) -> int:
        if result.counts is not None:
            return int(result.counts[:, 0].sum(dtype=np.float64))
        return session.strategy.population * (batch.size if batch else 1)


@dataclass(frozen=True)
class Differentiate(Driver):
    """Computes gradients, and scores samples around them."""

    records_theta: ClassVar[bool] = True

    def choose_plan(self, session: "Session", batch: Batch | None) -> Plan:
        strategy, theta = gradient_strategy(session), session.state.theta
        plan = ONE_BY_ONE
        if strategy.population > 1:
            candidates = Candidates(session.noise, 0, theta, CHECK_SIGMA)
            plan = blocks_of(session, batch, candidates, max(session.fleet.group.size, SAME_BLOCKS))
        return session.scorer.slice_gradients(plan, strategy.slices, theta, batch)

    def sample(self, session: "Session") -> tuple[Candidates, Plan]:
        candidates = Candidates(session.noise, NO_GENERATION, session.read_theta(), CHECK_SIGMA)
        return candidates, session.scorer.chosen_plan if session.strategy.population > 1 else ONE_BY_ONE

    def score(self, session: "Session", generation: int, batch: Batch | None) -> GenerationResult:
        strategy, state, scorer = gradient_strategy(session), session.state, session.scorer
        values = session.values(generation)
        result = GenerationResult(generation, np.empty(0, np.float32), values)
        if strategy.differentiates(generation):
            result = self.differentiate(session, generation, batch, values)
            if not strategy.samples(generation):
                return result
            assert result.gradient is not None
            state = strategy.with_gradient(state, result.gradient, generation, maximize=scorer.objective.maximize)
        dev_batch = self._dev_batch(session, generation)
        inputs = make_inputs(session, generation, values, state)
        inputs = replace(inputs, on_dev=dev_batch is not None, gradient=result.gradient)
        scored_on = batch if dev_batch is None else dev_batch
        candidates = strategy.ask(state, session.noise, generation, values)
        scores = scorer.score(session.fleet, strategy, candidates, scored_on, inputs)
        reference = strategy.reference_candidates(state, session.noise, generation, values)
        if reference is not None:
            single = scorer.find_evaluator(replace(scorer.chosen_plan, block=1))
            scores = np.concatenate([session.fleet.score(single, reference, 1, scored_on), scores])
        return replace(result, scores=scores)

    def differentiate(
        self, session: "Session", generation: int, batch: Batch | None, values: Mapping[str, float]
    ) -> GenerationResult:
        """Return the score of the center on a batch and its gradient, as a result without samples."""
        strategy = gradient_strategy(session)
        if batch is None:
            raise BadInput(f"The strategy {strategy.name} needs data and a loss of (output, target), not an objective.")
        try:
            evaluator, inputs = session.scorer.gradient_evaluator, make_inputs(session, generation, values)
            theta = session.state.theta
            scores, gradient = session.fleet.gradient(evaluator, theta, batch, strategy.wire, inputs)
        except RuntimeError as error:
            if "does not require grad" in str(error):
                message = f"The loss has no gradient, which the strategy {strategy.name} needs: use openai-es for it."
                raise BadInput(message) from error
            raise
        if generation == 0 and not bool(gradient.any()):
            message = f"The gradient of the loss is 0 everywhere, and the strategy {strategy.name} needs one"
            raise BadInput(f"{message}: use openai-es for scores that are made of steps.")
        return GenerationResult(generation, scores, values, gradient)

    def _dev_batch(self, session: "Session", generation: int) -> Batch | None:
        is_on_dev = gradient_strategy(session).select_on == "dev" and session.batches is not None
        return session.dev_batch(generation) if is_on_dev else None

    def restore(self, session: "Session", result: GenerationResult) -> GenerationResult:
        if not gradient_strategy(session).differentiates(result.generation):
            return result
        again = self.differentiate(session, result.generation, session.batch(result.generation), result.values)
        return replace(result, gradient=again.gradient)

    def count_samples(self, session: "Session", result: GenerationResult, batch: Batch | None) -> int:
        strategy, generation = gradient_strategy(session), result.generation
        passes = 3 * strategy.differentiates(generation) + strategy.samples(generation) * int(result.scores.size)
        return passes * (batch.size if batch else 1)


@dataclass(frozen=True)
class TrainMembers(Driver):
    """Trains members by gradient descent, each on its own order of the examples, and scores them on dev."""

    records_theta: ClassVar[bool] = True

    def init(self, session: "Session", theta: Tensor) -> Any:
        strategy = member_strategy(session)
        if session.scorer.module is None:
            return strategy.init(theta)
        return strategy.with_members(theta, strategy.init_members(theta, FirstMembers(session, theta)))

    def choose_plan(self, session: "Session", batch: Batch | None) -> Plan:
        slices = member_strategy(session).workers_per_member
        return session.scorer.slice_gradients(ONE_BY_ONE, slices, session.state.theta, batch)

    def sample(self, session: "Session") -> tuple[Candidates, Plan]:
        return Candidates(session.noise, NO_GENERATION, session.read_theta(), CHECK_SIGMA), ONE_BY_ONE

    def share_update(self, session: "Session") -> Update:
        strategy, maximize = member_strategy(session), session.scorer.objective.maximize
        session.member_share = session.fleet.share_members(strategy, session.state, session.noise, maximize=maximize)
        return session.member_share.update

    def score(self, session: "Session", generation: int, batch: Batch | None) -> GenerationResult:
        strategy, state, share = member_strategy(session), session.state, self._share(session)
        values = session.values(generation)
        train = self.make_trainer(session, generation, values)

        def work(row: int) -> TrainedMember:
            return train(share.members[row], state.members[row].clone(), strategy.moments(state, row))

        inputs = make_inputs(session, generation, values)
        trained, scores = share.train(work, session.scorer.device, inputs)
        if trained:  # otherwise they are elsewhere
            members, moments = [member.theta for member in trained], [member.moments for member in trained]
            session.state = strategy.after_training(state, members, moments)
        return GenerationResult(generation, scores, values)

    def _share(self, session: "Session") -> MemberShare:
        if session.member_share is None:
            self.share_update(session)
        assert session.member_share is not None
        return session.member_share

    def make_trainer(
        self, session: "Session", generation: int, values: Mapping[str, float]
    ) -> Callable[[int, Tensor, Moments], TrainedMember]:
        """Return the function that trains a member, given by number, weights and moments, and then scores it."""
        strategy, share = member_strategy(session), self._share(session)
        evaluator, maximize = session.scorer.gradient_evaluator, session.scorer.objective.maximize

        def train(member: int, theta: Tensor, moments: Moments) -> TrainedMember:
            for batch in self.member_batches(session, generation, member):
                gradient = share.gradient(evaluator, theta, batch)
                theta, moments = strategy.step(theta, -gradient if maximize else gradient, moments, values)
            return TrainedMember(theta, moments, self.score_member(session, theta))

        return train

    def member_batches(self, session: "Session", generation: int, member: int) -> Iterator[Batch]:
        """Yield the batches on which a member trains in a generation, in its own order of the examples."""
        batches, steps = require_batches(session), self.count_steps(session)
        own = replace(batches, member=FIRST_ORDER + member, orders={})
        for step in range(generation * steps, (generation + 1) * steps):
            yield own.batch(step, session.scorer.device)

    def count_steps(self, session: "Session") -> int:
        """Return the gradient steps of a member in a generation."""
        batches = require_batches(session)
        return member_strategy(session).epochs * max(1, batches.data.length // batches.batch_size)

    def score_member(self, session: "Session", theta: Tensor) -> float:
        """Return a member's score on all of dev, or on the training set where there is no dev."""
        data, evaluator = session.splits.get("dev", session.splits["train"]), session.scorer.gradient_evaluator
        with torch.no_grad():
            batches = data.in_order(session.scorer.device)
            total = math.fsum(float(evaluator.score_at(theta, batch)) * batch.size for batch in batches)
        return total / data.length

    def restore(self, session: "Session", result: GenerationResult) -> GenerationResult:
        self.score(session, result.generation, session.batch(result.generation))  # the State of trained members
        return result

    def count_samples(self, session: "Session", result: GenerationResult, batch: Batch | None) -> int:
        steps = 3 * self.count_steps(session) * require_batches(session).batch_size
        dev = session.splits.get("dev", session.splits["train"])
        return session.strategy.population * (steps + dev.length)


@dataclass(frozen=True)
class FirstMembers:
    """Makes the weights of the first members of a session."""

    session: "Session"
    theta: Tensor

    def reset(self, member: int) -> Tensor:
        """Return new initial weights, as the module's layers draw them, by a seed of the member's own."""
        scorer = self.session.scorer
        seed = int(Field(self.session.seed).below(1 << 32, 1, member, Stream.INITIAL)[0])
        module: nn.Module = copy_module(cast(nn.Module, scorer.module))
        with seeded_generators(seed):
            for part in module.modules():
                if callable(reset := getattr(part, "reset_parameters", None)):
                    reset()
        return scorer.genome.read(module, scorer.device)

    def perturb(self, members: NDArray[np.int64], sigma: float) -> Tensor:
        """Return the weights with noise added, at an address that no generation has."""
        noise = self.session.noise.members(members, ADDRESS_LIMIT - 1, self.session.scorer.device)
        return noise.perturb(self.theta, sigma)


def make_inputs(
    session: "Session", generation: int, values: Mapping[str, float], state: Any = None
) -> GenerationInputs:
    """Describe what a generation is made of: the session's State, or one that includes the next gradient."""
    has_gradient = state is not None and state is not session.state
    version, state = f"{generation}{'+' * has_gradient}", session.state if state is None else state
    given = session.given_batch
    inputs = GenerationInputs(session.strategy, state, version, generation, values, batch=generation)
    return replace(inputs, given_batch=given, observations=session.observations)


def sum_observations(result: GenerationResult) -> dict[str, list[float]]:
    """Return what a record holds of the observations of a generation: steps, sums and sums of squares, if any."""
    if result.counts is None or result.counts.shape[1] < 2:
        return {}
    return {"observations": result.counts.sum(0, dtype=np.float64).tolist()}


def gradient_strategy(session: "Session") -> GradientStrategy[Any]:
    """Return the strategy of a session, of kind ``differentiate``."""
    return cast(GradientStrategy[Any], session.strategy)


def member_strategy(session: "Session") -> MemberStrategy[Any]:
    """Return the strategy of a session, of kind ``train_members``."""
    return cast(MemberStrategy[Any], session.strategy)


def require_batches(session: "Session") -> Batches:
    """Return the batches of a session, or raise an error that says that the strategy needs data."""
    if session.batches is None:
        raise BadInput(f"The strategy {session.strategy.name} needs data and a loss of (output, target).")
    return session.batches


DRIVERS: dict[StrategyKind, Driver] = {
    "evolve": Evolve(),
    "differentiate": Differentiate(),
    "train_members": TrainMembers(),
}


def find_driver(strategy: AnyStrategy) -> Driver:
    """Return the driver of a strategy's kind."""
    if strategy.kind not in DRIVERS:
        raise BadInput(
            f"The strategy {strategy.name} has kind {strategy.kind!r}: it must be one of {', '.join(DRIVERS)}."
        )
    return DRIVERS[strategy.kind]
