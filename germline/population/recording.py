"""Generations that a GPU launches as a whole, as CUDA graphs."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_map

from germline.kernels.recorded import Recorded
from germline.noise import LiveScalars
from germline.objective import Batch, iterate_tensors
from germline.strategies.candidates import Candidates

MAX_RECORDINGS = 4  # shapes of batches for which a whole generation is recorded
MAX_RECORDED_BLOCKS = 64  # with more blocks, the time to launch them is small compared with their work


class Recording:
    """The evaluation of generations of one shape of batch, launched as a whole once that has given the same bits.

    Args:
        evaluate: returns the scores of candidates on a batch, on the device.
        device: the GPU.
    """

    def __init__(self, evaluate: Callable[[Candidates, Batch], torch.Tensor], device: torch.device) -> None:
        self.evaluate = evaluate
        self.live = LiveScalars(device)
        self.recorded = Recorded(self._score_tensors, doubted=True)

    @property
    def trusted(self) -> bool:
        """Return whether the next generation is launched without running any code of the module."""
        return self.recorded.trusted

    def scores(self, candidates: Candidates, batch: Batch) -> torch.Tensor:
        """Return the scores of a generation, on the device."""
        if self.recorded.failed:
            return self.evaluate(candidates, batch)
        sigma = candidates.sigma
        sigmas = [sigma] if isinstance(sigma, torch.Tensor) else []
        assert isinstance(candidates.generation, int)
        assert not isinstance(sigma, LiveScalars)
        self.live.set(candidates.generation, 0.0 if isinstance(sigma, torch.Tensor) else sigma)
        self.candidates, self.batch = candidates, batch
        return self.recorded(candidates.center, *sigmas, *iterate_tensors([batch.args, batch.kwargs, batch.target]))

    def _score_tensors(self, center: torch.Tensor, *tensors: torch.Tensor) -> torch.Tensor:
        """Return the scores where theta, sigma and the batch are in the memory that the graph reads."""
        remaining, batch = iter(tensors), self.batch
        sigma = next(remaining) if isinstance(self.candidates.sigma, torch.Tensor) else self.live
        parts = (batch.args, batch.kwargs, batch.target)
        args, kwargs, target = tree_map(lambda x: next(remaining) if isinstance(x, torch.Tensor) else x, parts)
        candidates = replace(self.candidates, generation=self.live.generation, center=center, sigma=sigma)
        return self.evaluate(candidates, Batch(args, kwargs, target, batch.size))


def describe_batch(batch: Batch) -> Any:
    """Return what two batches must have in common for the same kernels, or None if a batch has unknown objects."""
    if not batch.kwargs and all(isinstance(x, torch.Tensor) for x in (*batch.args, batch.target)):
        return tuple((x.shape, x.dtype, x.stride()) for x in (*batch.args, batch.target))
    leaves, spec = tree_flatten((batch.args, batch.kwargs, batch.target))
    if not all(isinstance(x, torch.Tensor | int | float | str | None) for x in leaves):
        return None
    return str(spec), repr([(x.shape, x.dtype, x.stride()) if isinstance(x, torch.Tensor) else x for x in leaves])
