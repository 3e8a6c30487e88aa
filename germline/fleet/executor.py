"""The work of one process: blocks of members, slices of gradients and training, on all its cores or its GPU."""

import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from germline.arguments import check_fields
from germline.errors import BadInput
from germline.fleet.gradients import Scores, average_scores, sum_in_order, weigh_gradient
from germline.fleet.pool import CAN_FORK, FORK_AFTER, find_pool
from germline.objective import Batch, seeded_generators
from germline.population import (
    ALL_BLOCKS,
    Evaluator,
    Generation,
    exact_arithmetic,
    is_only_thread,
    keep_memory,
    release_memory,
    single_threaded_torch,
)
from germline.strategies import AnyStrategy, Candidates, GenerationResult, Wire
from germline.strategies.state import map_arrays

A = TypeVar("A")
T = TypeVar("T")


@dataclass(frozen=True)
class Executor:
    """Runs work in this process.

    Attributes:
        workers: The number of processes, or of threads where the system cannot fork, that share blocks of members on a
            CPU. By default as many as torch has threads, and one for an objective of the whole model, which may be a
            simulator.
    """

    workers: int | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        if self.workers is not None and self.workers < 1:
            raise BadInput(f"A fleet needs at least one worker, not {self.workers}.")

    def score_blocks(
        self,
        evaluator: Evaluator,
        candidates: Candidates,
        population: int,
        batch: Batch | None,
        share: slice = ALL_BLOCKS,
    ) -> Scores:
        """Return the scores of a share of the blocks of a population, those of a padded block with its padding."""
        recording = evaluator.recording(candidates, population, batch, share)
        if recording is not None and recording.trusted:  # none of the user's code runs
            assert batch is not None
            return recording.scores(candidates, batch).cpu().numpy()
        threads = self.count_threads(evaluator)
        # what a model's or a score's code draws from the global generators must not change the user's
        with single_threaded_torch(), exact_arithmetic(evaluator.device), seeded_generators(0):
            if recording is not None:
                assert batch is not None
                return recording.scores(candidates, batch).cpu().numpy()
            if evaluator.device.type != "cpu":
                return evaluator.scores(candidates, population, batch, share).cpu().numpy()
            keep_memory()
            blocks, generation = evaluator.blocks(population)[share], evaluator.generation(candidates, batch)
            return self.score_on_cores(evaluator, generation, blocks, min(threads, len(blocks)))

    def score_on_cores(
        self, evaluator: Evaluator, generation: Generation, blocks: list[NDArray[np.int64]], workers: int
    ) -> Scores:
        """Return the scores of some blocks: by threads at first, and by forked processes if there is much to do.

        Threads start at once, and compile the kernels that processes inherit. A simulator that several threads would
        share is used by processes from the start. Hooks, which collect what they see, and objectives of a population,
        which may have their own processes, stay in this process.
        """
        pool, objective = find_pool(evaluator), evaluator.objective
        stays_here = evaluator.has_hooks or objective.population is not None or pool.is_broken
        # a fork while another thread evaluates members could copy a lock of a library that this thread holds
        can_fork = CAN_FORK and not stays_here and (pool.children or is_only_thread(evaluator.device))
        if workers > 1 and can_fork and (objective.of_model or pool.seconds >= FORK_AFTER):
            scores = pool.score(evaluator, generation, np.stack(blocks), workers)
            if scores is not None:
                return scores
        if workers > 1:
            objective.warn_of_threads()
        started = time.perf_counter()
        of_blocks = run_on_threads(lambda members: evaluator.score_block(generation, members), blocks, workers)
        pool.seconds += time.perf_counter() - started
        if workers > 1 and can_fork and pool.seconds >= FORK_AFTER:
            release_memory()  # processes evaluate the next generation
        return np.concatenate(of_blocks)

    def count_threads(self, evaluator: Evaluator) -> int:
        """Return how many blocks may be evaluated at once; call this outside ``single_threaded_torch``.

        A function of the whole model is the user's own code: it is called by one thread unless workers are asked for.
        """
        is_alone = evaluator.device.type != "cpu" or evaluator.objective.of_model or evaluator.has_hooks
        return self.workers or (1 if is_alone else torch.get_num_threads())

    def gradient(self, evaluator: Evaluator, theta: Tensor, batch: Batch, wire: Wire) -> tuple[Scores, Tensor]:
        """Return the score of the center on a batch and its gradient, computed in this process."""
        parts = batch.split(evaluator.plan.slices)
        scores, rows = self.gradients(evaluator, theta, parts, batch.size)
        return average_scores(scores, parts), sum_in_order(rows, [len(parts)], wire=wire)

    def gradients(self, evaluator: Evaluator, theta: Tensor, parts: list[Batch], size: int) -> tuple[Scores, Tensor]:
        """Return the scores of some slices of a batch, and their gradients weighed by their share of its examples."""
        keep_memory()
        threads = self.count_threads(evaluator)
        with single_threaded_torch(), exact_arithmetic(evaluator.device), seeded_generators(0):
            pairs = run_on_threads(lambda part: weigh_gradient(evaluator, theta, part, size), parts, threads)
        if not pairs:
            return np.empty(0, np.float32), theta.new_empty(0, theta.numel())
        return np.concatenate([score for score, _ in pairs]), torch.stack([row for _, row in pairs])

    def run(
        self, work: Callable[[int], T], count: int, device: torch.device, max_threads: int | None = None
    ) -> list[T]:
        """Return the results of work(0), ..., work(count - 1), each computed by one thread."""
        keep_memory()
        threads = (max_threads or self.workers or torch.get_num_threads()) if device.type == "cpu" else 1
        with single_threaded_torch(), exact_arithmetic(device), seeded_generators(0):
            return run_on_threads(work, list(range(count)), threads)


def time_update(strategy: AnyStrategy, state: Any, advance: Callable[[Any, GenerationResult], Any]) -> float:
    """Return the seconds that an update takes, by trying it on made-up scores."""
    scores, seconds = np.arange(strategy.population, dtype=np.float32), 0.0
    result = GenerationResult(0, scores, strategy.values(state, 0))
    state = map_arrays(torch.clone, state)  # an update may overwrite arrays
    for _ in range(2):  # the first time kernels are compiled
        started = time.perf_counter()
        state = advance(state, result)
        state.theta.cpu()
        seconds = time.perf_counter() - started
    return seconds


def find_device(name: str, default: torch.device | None = None) -> torch.device:
    """Return the device of a name; auto is the default if there is one, else a GPU if there is one, else the CPU."""
    if name == "auto":
        return default or torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise BadInput(f"There is no device {name!r}: choose auto, cpu, cuda, cuda:N or mps.") from None
    is_present = {
        "cpu": True,
        "cuda": torch.cuda.is_available() and (device.index or 0) < torch.cuda.device_count(),
        "mps": torch.backends.mps.is_available(),
    }
    if not is_present.get(device.type, False):
        raise BadInput(f"This machine has no device {name!r}: choose another device, or auto.")
    return device


def run_on_threads(work: Callable[[A], T], items: list[A], threads: int) -> list[T]:
    """Return the results of some work on each item, in order."""
    threads = min(threads, len(items))
    return list(map(work, items) if threads < 2 else thread_pool(threads).map(work, items))


@cache
def thread_pool(threads: int) -> ThreadPoolExecutor:
    """Return the pool of threads that evaluate blocks, each with one thread of torch."""
    return ThreadPoolExecutor(threads, "germline-block", initializer=torch.set_num_threads, initargs=(1,))


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=thread_pool.cache_clear)  # a child process has none of its parent's threads
