"""One process: one device, or all cores of the CPU. The default; nothing to start.

What other fleets do besides, a single process does trivially: it keeps the journal, agrees with itself, and hands a
State on as it is. So there is one loop for all fleets.
"""

import math
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from germline.errors import BadInput
from germline.fleet.wire import sum_in_order
from germline.noise import Field, round_to
from germline.objective import Batch, seeded_generators
from germline.population import ALL_BLOCKS, Evaluator, exact_arithmetic, keep_memory, single_threaded_torch
from germline.population.block import Generation
from germline.strategies.base import AnyStrategy, Candidates, GenerationInputs, GenerationResult, Wire

T = TypeVar("T")


@dataclass(frozen=True)
class Local:
    """This process. ``device`` is auto, cpu, cuda, cuda:N or mps; ``workers`` threads share the blocks on the CPU.

    >>> Local(device="cpu").place()
    device(type='cpu')
    """

    device: str = "auto"
    workers: int | None = None  # as many as torch has threads; one for an objective of the whole model

    def __post_init__(self) -> None:
        if self.workers is not None and self.workers < 1:
            raise BadInput(f"A local fleet needs at least one worker, not {self.workers}.")

    @property
    def rank(self) -> int:
        return 0

    @property
    def size(self) -> int:
        return 1

    @property
    def keeper(self) -> bool:
        """Whether this process keeps the journal."""
        return True

    @property
    def launch(self) -> str | None:
        """What began this run, by a name that stays if the same launcher begins it again."""
        return None

    @property
    def idle(self) -> bool:
        """Whether there is nobody to work, so that a generation might never end."""
        return False

    @property
    def sends_weights(self) -> bool:
        """Whether all processes begin with the weights of one."""
        return False

    def place(self, usual: torch.device | None = None) -> torch.device:
        """The device; where it is auto, the usual one if there is one, else a GPU if there is one."""
        if self.device == "auto":
            return usual or torch.device("cuda" if torch.cuda.is_available() else "cpu")
        try:
            device = torch.device(self.device)
        except RuntimeError:
            raise BadInput(f"There is no device {self.device!r}: choose auto, cpu, cuda, cuda:N or mps.") from None
        present = {
            "cpu": True,
            "cuda": torch.cuda.is_available() and (device.index or 0) < torch.cuda.device_count(),
            "mps": torch.backends.mps.is_available(),
        }
        if not present.get(device.type, False):
            raise BadInput(f"This machine has no device {self.device!r}: choose another with --device, or auto.")
        return device

    def evaluate(
        self,
        evaluator: Evaluator,
        candidates: Candidates,
        population: int,
        batch: Batch | None,
        origin: GenerationInputs | None = None,
    ) -> NDArray[np.float32]:
        """The scores of all members."""
        return self.score(evaluator, candidates, population, batch, ALL_BLOCKS)[:population]

    def score(
        self, evaluator: Evaluator, candidates: Candidates, population: int, batch: Batch | None, share: slice
    ) -> NDArray[np.float32]:
        """The scores of a share of the blocks of a population, those of a padded block with what pads it."""
        recording = evaluator.recording(candidates, population, batch, share)
        if recording is not None and recording.trusted:  # no code of anybody's runs
            assert batch is not None
            return recording.scores(candidates, batch).cpu().numpy()
        threads = self.threads(evaluator)
        # what the code of a model or a score draws from the global generators is not the user's
        with single_threaded_torch(), exact_arithmetic(evaluator.device), seeded_generators(0):
            if recording is not None:
                assert batch is not None
                return recording.scores(candidates, batch).cpu().numpy()
            if evaluator.device.type != "cpu":
                return evaluator.scores(candidates, population, batch, share).cpu().numpy()
            blocks, generation = evaluator.blocks(population)[share], evaluator.generation(candidates, batch)
            return self._score_on_threads(evaluator, generation, blocks, threads)

    def threads(self, evaluator: Evaluator) -> int:
        """Threads that may run the module's code at once; to be asked outside of ``single_threaded_torch``.

        A function of the whole model is the user's own code, a simulator perhaps: one call at a time unless asked.
        """
        alone = evaluator.device.type != "cpu" or evaluator.objective.of_model or evaluator.has_hooks
        return self.workers or (1 if alone else torch.get_num_threads())

    def _score_on_threads(
        self, evaluator: Evaluator, generation: Generation, blocks: list[NDArray[np.int64]], most: int
    ) -> NDArray[np.float32]:
        keep_memory()
        threads = min(most, len(blocks))

        def score(members: NDArray[np.int64]) -> NDArray[np.float32]:
            return evaluator.score_block(generation, members)

        scores = list(map(score, blocks) if threads == 1 else pool(threads).map(score, blocks))
        return np.concatenate(scores)

    def gradient(
        self,
        evaluator: Evaluator,
        theta: torch.Tensor,
        batch: Batch,
        wire: Wire,
        origin: GenerationInputs | None = None,
    ) -> tuple[NDArray[np.float32], torch.Tensor]:
        """The score of the center on a batch, and its gradient: the means of those of its slices."""
        parts = batch.split(evaluator.plan.slices)
        scores, rows = self.differentiate(evaluator, theta, parts, batch.size)
        return mean_score(scores, parts), sum_in_order(rows, [len(parts)], wire=wire)

    def differentiate(
        self, evaluator: Evaluator, theta: torch.Tensor, parts: list[Batch], size: int
    ) -> tuple[NDArray[np.float32], torch.Tensor]:
        """Of some slices of a batch the scores, and the gradients, each by its share of the examples."""
        keep_memory()

        def one(part: Batch) -> tuple[NDArray[np.float32], torch.Tensor]:
            return weighed(evaluator, theta, part, size)

        threads = min(self.threads(evaluator), len(parts))
        with single_threaded_torch(), exact_arithmetic(evaluator.device), seeded_generators(0):
            found = list(map(one, parts) if threads < 2 else pool(threads).map(one, parts))
        scores = np.concatenate([score for score, _ in found]) if found else np.empty(0, np.float32)
        return scores, torch.stack([row for _, row in found]) if found else theta.new_empty(0, theta.numel())

    def own(self, population: int) -> range:
        """The members that learn in this process."""
        return range(population)

    def lesson(self, evaluator: Evaluator, theta: torch.Tensor, batch: Batch) -> torch.Tensor:
        """The gradient of one of these members."""
        if evaluator.plan.slices == 1:
            return evaluator.gradient(theta, batch)[1]
        parts = batch.split(evaluator.plan.slices)
        rows = torch.stack([weighed(evaluator, theta, part, batch.size)[1] for part in parts])
        return sum_in_order(rows, [len(parts)])

    def rear(
        self,
        work: Callable[[int], tuple[Any, Any, float]],
        population: int,
        device: torch.device,
        origin: GenerationInputs | None = None,
    ) -> tuple[list[tuple[Any, Any, float]], NDArray[np.float32]]:
        """Has each of this process's own members learn; what became of them, and the scores of all."""
        found = self.reared(work, len(self.own(population)), device)
        return found, np.array([score for _, _, score in found], np.float32)

    def reared(
        self, work: Callable[[int], tuple[Any, Any, float]], count: int, device: torch.device, most: int | None = None
    ) -> list[tuple[Any, Any, float]]:
        keep_memory()
        threads = min(most or self.workers or torch.get_num_threads(), count) if device.type == "cpu" else 1
        with single_threaded_torch(), exact_arithmetic(device), seeded_generators(0):
            return list(map(work, range(count)) if threads < 2 else pool(threads).map(work, range(count)))

    def advance(
        self, update: Any, strategy: AnyStrategy, state: Any, told: GenerationResult, field: Field, *, maximize: bool
    ) -> Any:
        """The State after a generation."""
        return strategy.tell(state, told, field, maximize=maximize)

    def adapted(self, strategy: AnyStrategy) -> AnyStrategy:
        """A strategy as this fleet runs it, or a sentence that says why it cannot."""
        return strategy

    def join(self, facts: Callable[[], dict[str, Any]]) -> None:
        """Makes sure that all processes are about the same work: ``facts`` are to be the same everywhere."""

    def new_run(self) -> None:
        """What was known of another run is forgotten."""

    def invite(
        self, header: Mapping[str, Any], sample: Callable[[], NDArray[np.float32]], given: Batch | None = None
    ) -> None:
        """Lets others in who have the same recipe, and find the same scores for a sample of members."""

    def divide(self, strategy: AnyStrategy, state: Any, field: Field, *, maximize: bool) -> tuple[Any, Any]:
        """Who updates what; and of a whole State what this process needs."""
        return None, state

    def whole(self, update: Any, strategy: AnyStrategy, state: Any) -> Any:
        """A State with what other processes have of it."""
        return state

    def shared(self, state: Any) -> Any:
        """The State of the process that keeps the journal."""
        return state

    def told(self, value: T) -> T:
        """What the process that keeps the journal says."""
        return value

    def attended(self, work: Callable[[], T]) -> T:
        """What the process that keeps the journal finds, which may take longer than a generation."""
        return work()

    def all(self, holds: bool) -> bool:
        """Whether something holds for every process."""
        return holds

    def together(self, work: Callable[[], T]) -> T:
        """Work that every process does; if it fails in one it fails in all."""
        return work()

    def elect(self, has_journal: bool) -> bool:
        """Who has a journal keeps it; whether anybody has."""
        return has_journal

    def heard(self, seconds: float, interrupted: bool) -> tuple[float, bool]:
        """How long the run has taken and whether it is to end, as all processes see it."""
        return seconds, interrupted

    def begin(self, seconds: float, interrupted: bool, digest: str = "") -> None:
        """Before a generation: what others are to hear, and the hash of the batch where they might have another."""

    def traffic(self) -> tuple[int, int]:
        """Bytes sent and received since this was last asked."""
        return 0, 0


def weighed(
    evaluator: Evaluator, theta: torch.Tensor, part: Batch, size: int
) -> tuple[NDArray[np.float32], torch.Tensor]:
    """Of a slice of a batch of some size the score, and the gradient by its share of the examples."""
    score, gradient = evaluator.gradient(theta, part)
    return score, gradient * round_to(part.size / size, gradient.dtype)


def mean_score(scores: NDArray[np.float32], parts: list[Batch]) -> NDArray[np.float32]:
    """Of a whole batch, from those of its slices."""
    if len(parts) == 1:
        return scores
    total = math.fsum(float(score) * part.size for score, part in zip(scores, parts, strict=True))
    return np.array([total / sum(part.size for part in parts)], np.float32)


@cache
def pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, "germline-block", initializer=torch.set_num_threads, initargs=(1,))


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=pool.cache_clear)  # a child has none of its parent's threads
