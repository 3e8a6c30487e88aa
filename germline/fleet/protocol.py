"""The whole interface of a fleet, on one page: who evaluates which members, and how an update is shared out.

A fleet is made of parts and inherits from no other: each holds an ``Executor`` for the work of this process, and a
``Group`` for what the processes of one program agree on. The session calls nothing but what stands here. A body
here is what a single process does.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from germline.fleet.gradients import Scores, sum_in_order, weigh_gradient
from germline.noise import Field
from germline.objective import Batch
from germline.optim.optimizers import Moments
from germline.population import Evaluator
from germline.recipes import Recipe
from germline.strategies import AnyStrategy, Candidates, GenerationInputs, GenerationResult, MemberStrategy, Wire

T = TypeVar("T")
Inputs = GenerationInputs | None  # None for work that this process can do without the others
Sample = Callable[[], Scores]  # scores of a few members, by which a worker proves that it computes the same


class TrainedMember(NamedTuple):
    """A member after training: its weights, its optimizer's moments, and its score."""

    theta: Tensor
    moments: Moments
    score: float


TrainMember = Callable[[int], TrainedMember]  # of the row of a member in this process's State


def scores_of(trained: list[TrainedMember]) -> Scores:
    """Return the scores of trained members."""
    return np.array([member.score for member in trained], np.float32)


class Group(Protocol):
    """The processes of one program, as one of them sees them; a single process is a group of one."""

    rank: int = 0
    size: int = 1
    owns_journal: bool = True  # whether this process writes the journal

    def elect(self, has_journal: bool) -> bool:
        """Let the first process that has a journal own it; return whether any process has one."""
        return has_journal

    def broadcast(self, value: T) -> T:
        """Return the value, as JSON, of the process that owns the journal."""
        return value

    def broadcast_state(self, state: Any) -> Any:
        """Return the State of the process that owns the journal, with all its arrays."""
        return state

    def on_journal_rank(self, work: Callable[[], T]) -> T:
        """Return what the process that owns the journal computes, which may take longer than a generation."""
        return work()

    def all_or_none(self, work: Callable[[], T]) -> T:
        """Do some work in every process; if it fails in one, it fails in all."""
        return work()

    def all(self, holds: bool) -> bool:
        """Return whether something holds in every process."""
        return holds

    def agree(self, facts: Callable[[], dict[str, Any]]) -> None:
        """Raise an error unless all processes have the same facts."""
        return

    def announce(self, seconds: float, request: int, digest: str = "") -> None:
        """Say before a generation what the others must know: times, requests to stop, the hash of a given batch."""
        return

    def stop_status(self, seconds: float, request: int) -> tuple[float, int]:
        """Return how long the run has taken and the strongest request to stop it, as all processes see them."""
        return seconds, request


class Update(Protocol):
    """A way to share out the updates of a run among processes."""

    def local_part(self, state: Any) -> Any:
        """Return what this process needs of a whole State."""
        return state

    def advance(self, state: Any, result: GenerationResult) -> Any:
        """Return this process's part of the State after a generation.

        Arrays of the State before that neither ``ask`` nor the user reads, such as moments, may be overwritten.
        """

    def advance_early(self, state: Any, scores: Tensor, result: GenerationResult) -> Any:
        """Return the State after a generation whose scores are still being computed, or None where that cannot be.

        Args:
            state: The State before, which stays valid: it is the next one, too, if no score is finite.
            scores: Those of all members, in the memory of a GPU.
            result: The result without scores.
        """
        return None

    def gather(self, state: Any) -> Any:
        """Return the whole State, in the process that owns the journal at least; all processes must call this."""
        return state


class MemberShare(Protocol):
    """Which members train in this process, where members train between evaluations."""

    update: Update
    members: range

    def gradient(self, evaluator: Evaluator, theta: Tensor, batch: Batch) -> Tensor:
        """Return the gradient of one member on a batch."""
        if evaluator.plan.slices == 1:
            return evaluator.gradient(theta, batch)[1]
        parts = batch.split(evaluator.plan.slices)
        rows = torch.stack([weigh_gradient(evaluator, theta, part, batch.size)[1] for part in parts])
        return sum_in_order(rows, [len(parts)])

    def train(self, work: TrainMember, device: torch.device, inputs: Inputs) -> tuple[list[TrainedMember], Scores]:
        """Train this process's members, given by their row; return them and the scores of all members."""


class Fleet(Protocol):
    """The processes that evaluate the members of a run. ``Local``, ``SPMD`` and clusters are fleets."""

    sends_weights: bool = False  # whether all processes begin with the weights of one

    @property
    def group(self) -> Group: ...

    @property
    def launch_name(self) -> str | None:
        """The launcher of this run, by a name that stays if the same launcher starts it again."""
        return None

    @property
    def is_idle(self) -> bool:
        """True if there are no workers, so that a generation might never end."""
        return False

    @property
    def can_prefetch(self) -> bool:
        """True if workers can start with a generation while this process does something else."""
        return False

    def find_device(self, default: torch.device | None = None) -> torch.device:
        """Return the device of this process: the one asked for, else the default, else a GPU if there is one."""

    def adapt(self, strategy: AnyStrategy) -> AnyStrategy:
        """Return a new run's strategy with the settings that depend on the number of processes."""
        return strategy

    def check(self, strategy: AnyStrategy) -> None:
        """Raise an error if this fleet cannot run a strategy with its settings."""
        return

    def start_run(self) -> None:
        """Forget what was known of another run."""
        return

    def admit(
        self, header: Mapping[str, Any], sample: Sample, batch: Batch | None = None, recipe: Recipe | None = None
    ) -> None:
        """Let workers in that have the same recipe and compute the same scores for a sample of members."""
        return

    def score(
        self, evaluator: Evaluator, candidates: Candidates, population: int, batch: Batch | None, inputs: Inputs = None
    ) -> Scores:
        """Return the scores of all members, in member order."""

    def prefetch(
        self,
        evaluator: Evaluator,
        candidates: Candidates,
        population: int,
        batch: Batch | None,
        inputs: GenerationInputs,
    ) -> None:
        """Have workers start with scores that ``score`` will be asked for; only where ``can_prefetch`` says so."""
        return

    def gradient(
        self, evaluator: Evaluator, theta: Tensor, batch: Batch, wire: Wire, inputs: Inputs = None
    ) -> tuple[Scores, Tensor]:
        """Return the score of the center on a batch, and its gradient: the means over the slices of the batch."""

    def share_update(self, strategy: AnyStrategy, state: Any, field: Field, *, maximize: bool) -> Update:
        """Decide, once for a run, how updates are shared out."""

    def share_members(self, strategy: MemberStrategy[Any], state: Any, field: Field, *, maximize: bool) -> MemberShare:
        """Decide, once for a run, which process trains which members."""

    def confirm_scores(self, *, in_doubt: bool = False) -> None:
        """Check the last scores once more: some of each process, or all of them where one of them is in doubt.

        Raises:
            WrongScoresError: If the run must go back.
        """
        return

    def go_back(self, generation: int) -> None:
        """Forget what is known of the generations from this one on: they are computed again."""
        return

    def count_bytes(self) -> tuple[int, int]:
        """Return the bytes sent and received since the last call."""
        return 0, 0

    def close(self, *, ended: bool = False) -> None:
        """Let all workers go: to wait for the run to go on or, where it has ended, for good."""
        return
