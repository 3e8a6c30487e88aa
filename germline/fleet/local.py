"""One process: one device, or all cores of the CPU. The default; nothing to start."""

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray

from germline.errors import BadInput
from germline.objective import Batch, seeded_generators
from germline.population import Evaluator, exact_arithmetic
from germline.strategies.base import Candidates


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
        self, evaluator: Evaluator, candidates: Candidates, population: int, batch: Batch | None
    ) -> NDArray[np.float32]:
        """The scores of all members."""
        recording = evaluator.recording(candidates, population, batch)
        if recording is not None and recording.trusted:  # no code of anybody's runs
            assert batch is not None
            return recording.scores(candidates, batch).cpu().numpy()
        # what the code of a model or a score draws from the global generators is not the user's
        with one_thread_each(), exact_arithmetic(evaluator.device), seeded_generators(0):
            if recording is not None:
                assert batch is not None
                return recording.scores(candidates, batch).cpu().numpy()
            if evaluator.device.type != "cpu":
                return evaluator.scores(candidates, population, batch).cpu().numpy()
            return self._evaluate_on_threads(evaluator, candidates, population, batch)

    def _evaluate_on_threads(
        self, evaluator: Evaluator, candidates: Candidates, population: int, batch: Batch | None
    ) -> NDArray[np.float32]:
        # a function of the whole model is the user's own code, a simulator perhaps: one call at a time unless asked
        usual = 1 if evaluator.objective.of_model or evaluator.hooked else torch.get_num_threads()
        blocks, generation = evaluator.blocks(population), evaluator.generation(candidates, batch)
        threads = min(self.workers or usual, len(blocks))

        def score(members: NDArray[np.int64]) -> NDArray[np.float32]:
            return evaluator.score_block(generation, members)

        scores = list(map(score, blocks) if threads == 1 else pool(threads).map(score, blocks))
        return np.concatenate(scores)[:population]

    def gradient(
        self, evaluator: Evaluator, theta: torch.Tensor, batch: Batch
    ) -> tuple[NDArray[np.float32], torch.Tensor]:
        with one_thread_each(), exact_arithmetic(evaluator.device):
            return evaluator.gradient(theta, batch)


@contextmanager
def one_thread_each() -> Iterator[None]:
    """A block is evaluated by one thread: sums over a batch differ between one thread and two."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@cache
def pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, "germline-block", initializer=torch.set_num_threads, initargs=(1,))


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=pool.cache_clear)  # a child has none of its parent's threads
