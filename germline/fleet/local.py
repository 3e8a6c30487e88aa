"""One process: one device, or all cores of the CPU. The default fleet; there is nothing to start."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch

from germline.fleet.executor import Executor, find_device
from germline.fleet.gradients import average_scores, sum_in_order, weigh_gradient
from germline.fleet.protocol import Sample, Scores, TrainedMember
from germline.noise import Field
from germline.objective import Batch
from germline.population import Evaluator
from germline.strategies.candidates import Candidates
from germline.strategies.protocol import AnyStrategy, GenerationInputs, GenerationResult, MemberStrategy, Wire

T = TypeVar("T")


@dataclass(frozen=True)
class Solo:
    """A group of one process: it owns the journal and agrees with itself."""

    rank: int = 0
    size: int = 1
    owns_journal: bool = True

    def elect(self, has_journal: bool) -> bool:
        return has_journal

    def broadcast(self, value: T) -> T:
        return value

    def broadcast_state(self, state: Any) -> Any:
        return state

    def on_journal_rank(self, work: Callable[[], T]) -> T:
        return work()

    def all_or_none(self, work: Callable[[], T]) -> T:
        return work()

    def all(self, holds: bool) -> bool:
        return holds

    def agree(self, facts: Callable[[], dict[str, Any]]) -> None:
        pass

    def announce(self, seconds: float, interrupted: bool, digest: str = "") -> None:
        pass

    def stop_status(self, seconds: float, interrupted: bool) -> tuple[float, bool]:
        return seconds, interrupted


@dataclass(frozen=True)
class LocalUpdate:
    """An update by one process, which holds the whole State."""

    strategy: AnyStrategy
    field: Field
    maximize: bool

    def local_part(self, state: Any) -> Any:
        return state

    def advance(self, state: Any, result: GenerationResult) -> Any:
        return self.strategy.tell(state, result, self.field, maximize=self.maximize)

    def gather(self, state: Any) -> Any:
        return state


@dataclass(frozen=True)
class LocalMembers:
    """All members train in this process."""

    update: LocalUpdate
    executor: Executor

    @property
    def members(self) -> range:
        return range(self.update.strategy.population)

    def gradient(self, evaluator: Evaluator, theta: torch.Tensor, batch: Batch) -> torch.Tensor:
        if evaluator.plan.slices == 1:
            return evaluator.gradient(theta, batch)[1]
        parts = batch.split(evaluator.plan.slices)
        rows = torch.stack([weigh_gradient(evaluator, theta, part, batch.size)[1] for part in parts])
        return sum_in_order(rows, [len(parts)])

    def train(
        self, work: Callable[[int], TrainedMember], device: torch.device, inputs: GenerationInputs | None
    ) -> tuple[list[TrainedMember], Scores]:
        trained = self.executor.run(work, len(self.members), device)
        return trained, scores_of(trained)


@dataclass(frozen=True)
class Local:
    """This process.

    Args:
        device: ``"auto"``, ``"cpu"``, ``"cuda"``, ``"cuda:N"`` or ``"mps"``.
        workers: The number of threads that share blocks of members on a CPU. By default as many as torch has threads,
            and one for an objective of the whole model.

    >>> Local(device="cpu").find_device()
    device(type='cpu')
    """

    device: str = "auto"
    workers: int | None = None

    def __post_init__(self) -> None:
        Executor(self.workers)  # checks the number

    @property
    def executor(self) -> Executor:
        return Executor(self.workers)

    @property
    def group(self) -> Solo:
        return Solo()

    @property
    def launch_name(self) -> str | None:
        return None

    @property
    def is_idle(self) -> bool:
        return False

    @property
    def sends_weights(self) -> bool:
        return False

    def find_device(self, default: torch.device | None = None) -> torch.device:
        return find_device(self.device, default)

    def adapt(self, strategy: AnyStrategy) -> AnyStrategy:
        return strategy

    def check(self, strategy: AnyStrategy) -> None:
        pass

    def start_run(self) -> None:
        pass

    def admit(self, header: Mapping[str, Any], sample: Sample, batch: Batch | None = None) -> None:
        pass

    def score(
        self,
        evaluator: Evaluator,
        candidates: Candidates,
        population: int,
        batch: Batch | None,
        inputs: GenerationInputs | None = None,
    ) -> Scores:
        return self.executor.score_blocks(evaluator, candidates, population, batch)[:population]

    def gradient(
        self,
        evaluator: Evaluator,
        theta: torch.Tensor,
        batch: Batch,
        wire: Wire,
        inputs: GenerationInputs | None = None,
    ) -> tuple[Scores, torch.Tensor]:
        return local_gradient(self.executor, evaluator, theta, batch, wire)

    def share_update(self, strategy: AnyStrategy, state: Any, field: Field, *, maximize: bool) -> LocalUpdate:
        return LocalUpdate(strategy, field, maximize)

    def share_members(self, strategy: MemberStrategy[Any], state: Any, field: Field, *, maximize: bool) -> LocalMembers:
        return LocalMembers(LocalUpdate(strategy, field, maximize), self.executor)

    def count_bytes(self) -> tuple[int, int]:
        return 0, 0

    def close(self, *, ended: bool = False) -> None:
        pass


def local_gradient(
    executor: Executor, evaluator: Evaluator, theta: torch.Tensor, batch: Batch, wire: Wire
) -> tuple[Scores, torch.Tensor]:
    """Return the score of the center on a batch and its gradient, computed in this process."""
    parts = batch.split(evaluator.plan.slices)
    scores, rows = executor.gradients(evaluator, theta, parts, batch.size)
    return average_scores(scores, parts), sum_in_order(rows, [len(parts)], wire=wire)


def scores_of(trained: list[TrainedMember]) -> Scores:
    """Return the scores of trained members."""
    return np.array([member.score for member in trained], np.float32)
