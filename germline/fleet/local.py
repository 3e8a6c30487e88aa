"""One process: one device, or all cores of the CPU. The default fleet; there is nothing to start."""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from germline.arguments import check_fields
from germline.fleet.executor import Executor, find_device
from germline.fleet.gradients import Scores
from germline.fleet.protocol import Fleet, Group, Inputs, MemberShare, TrainedMember, TrainMember, Update, scores_of
from germline.fleet.recorded_sums import RecordedSums
from germline.noise import Field
from germline.objective import Batch
from germline.population import Evaluator, limited_torch_threads
from germline.strategies import AnyStrategy, Candidates, GenerationResult, MemberStrategy, Wire, by_columns

UPDATED_AT_ONCE = 1 << 21  # numbers of each array of a State, on a CPU: intermediate results take about 100 MB
MIN_COLUMNS = 1 << 16  # of parts of an update
PARAMETERS_PER_THREAD = 1 << 17  # of an update on a CPU: where there are few, it takes longer to wake more threads


class Solo(Group):
    """A group of one process: it owns the journal and agrees with itself."""


@dataclass(frozen=True)
class LocalUpdate(Update):
    """An update by one process, which holds the whole State."""

    strategy: AnyStrategy
    field: Field
    maximize: bool
    sums: RecordedSums | None = None

    def advance_early(self, state: Any, scores: Tensor, result: GenerationResult) -> Any:
        if self.sums is None:
            return None
        sums = self.sums.compute(scores, result.generation)
        return self.sums.strategy.step(state, sums, result, self.field)

    def advance(self, state: Any, result: GenerationResult) -> Any:
        def tell(part: Any, start: int = 0) -> Any:
            return self.strategy.tell(part, result, self.field, maximize=self.maximize, start=start)

        strategy, size = self.strategy, state.theta.numel()
        width = max(MIN_COLUMNS, UPDATED_AT_ONCE // (1 if strategy.has_semi_updates else strategy.population))
        if strategy.kind != "evolve" or not strategy.is_columnwise or state.theta.is_cuda:
            return tell(state)
        with limited_torch_threads(-(-size // PARAMETERS_PER_THREAD)):
            if size <= width:
                return tell(state)
            return by_columns(tell, state, size, width, ("theta", *strategy.ask_arrays))


@dataclass(frozen=True)
class LocalMembers(MemberShare):
    """All members train in this process."""

    update: LocalUpdate
    members: range
    executor: Executor

    def train(self, work: TrainMember, device: torch.device, inputs: Inputs) -> tuple[list[TrainedMember], Scores]:
        trained = self.executor.run(work, len(self.members), device)
        return trained, scores_of(trained)


@dataclass(frozen=True)
class Local(Fleet):
    """This process.

    Args:
        device: ``"auto"``, ``"cpu"``, ``"cuda"``, ``"cuda:N"`` or ``"mps"``.
        workers: The number of processes, or of threads where the system cannot fork, that share blocks of members on a
            CPU. By default as many as torch has threads, and one for an objective of the whole model.

    >>> Local(device="cpu").find_device()
    device(type='cpu')
    """

    group: ClassVar[Solo] = Solo()

    device: str = "auto"
    workers: int | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        Executor(self.workers)  # checks the number

    @property
    def executor(self) -> Executor:
        return Executor(self.workers)

    def find_device(self, default: torch.device | None = None) -> torch.device:
        return find_device(self.device, default)

    def score(
        self, evaluator: Evaluator, candidates: Candidates, population: int, batch: Batch | None, inputs: Inputs = None
    ) -> Scores:
        return self.executor.score_blocks(evaluator, candidates, population, batch)[: population * evaluator.columns]

    def gradient(
        self, evaluator: Evaluator, theta: Tensor, batch: Batch, wire: Wire, inputs: Inputs = None
    ) -> tuple[Scores, Tensor]:
        return self.executor.gradient(evaluator, theta, batch, wire)

    def share_update(self, strategy: AnyStrategy, state: Any, field: Field, *, maximize: bool) -> LocalUpdate:
        size, device = state.theta.numel(), state.theta.device
        sums = RecordedSums.create(strategy, field, maximize=maximize, size=size, device=device)
        return LocalUpdate(strategy, field, maximize, sums)

    def share_members(self, strategy: MemberStrategy[Any], state: Any, field: Field, *, maximize: bool) -> LocalMembers:
        return LocalMembers(LocalUpdate(strategy, field, maximize), range(strategy.population), self.executor)
