"""Generations, or their blocks, that a GPU launches as a whole, as CUDA graphs."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
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
        remaining = iter(tensors)
        sigma = next(remaining) if isinstance(self.candidates.sigma, torch.Tensor) else self.live
        candidates = replace(self.candidates, generation=self.live.generation, center=center, sigma=sigma)
        return self.evaluate(candidates, replace_tensors(self.batch, remaining))


class BlockRecording:
    """The evaluation of blocks of members that have no center in common, of one shape of batch.

    The strategy's code makes the weights of a block, in the memory that a graph reads; the module's code is launched.
    All blocks have the same size, so one graph serves them all.

    Args:
        make_weights: returns the weights of some members for each parameter, in tensors that it may be given.
        evaluate: returns the scores of members with such weights on a batch, on the device.
        blocks: the members of each block.
    """

    def __init__(
        self,
        make_weights: Callable[[Candidates, NDArray[np.int64], Sequence[torch.Tensor]], list[torch.Tensor]],
        evaluate: Callable[[Candidates, NDArray[np.int64], Sequence[torch.Tensor], Batch], torch.Tensor],
        blocks: list[NDArray[np.int64]],
    ) -> None:
        self.make_weights = make_weights
        self.evaluate = evaluate
        self.blocks = blocks
        self.recorded = Recorded(self._score_tensors, doubted=True)
        self.parameters = 0

    @property
    def trusted(self) -> bool:
        """Return whether the next block is launched without running any code of the module."""
        return self.recorded.trusted

    def scores(self, candidates: Candidates, batch: Batch) -> torch.Tensor:
        """Return the scores of a generation, on the device."""
        self.candidates, self.batch = candidates, batch
        tensors, parts = list(iterate_tensors([batch.args, batch.kwargs, batch.target])), []
        for members in self.blocks:
            weights = self.make_weights(candidates, members, self.recorded.inputs[: self.parameters])
            self.members, self.parameters = members, len(weights)
            parts.append(self.recorded(*weights, *tensors).clone())  # the next block overwrites it
        return torch.cat(parts)

    def _score_tensors(self, *tensors: torch.Tensor) -> torch.Tensor:
        """Return the scores of a block where its weights and the batch are in the memory that the graph reads."""
        batch = replace_tensors(self.batch, iter(tensors[self.parameters :]))
        return self.evaluate(self.candidates, self.members, tensors[: self.parameters], batch)


def replace_tensors(batch: Batch, tensors: Iterator[torch.Tensor]) -> Batch:
    """Return a batch with other tensors, which are taken in the order of ``iterate_tensors``."""
    parts = (batch.args, batch.kwargs, batch.target)
    args, kwargs, target = tree_map(lambda x: next(tensors) if isinstance(x, torch.Tensor) else x, parts)
    return Batch(args, kwargs, target, batch.size)


def describe_batch(batch: Batch) -> Any:
    """Return what two batches must have in common for the same kernels, or None if a batch has unknown objects."""
    if not batch.kwargs and all(isinstance(x, torch.Tensor) for x in (*batch.args, batch.target)):
        return tuple((x.shape, x.dtype, x.stride()) for x in (*batch.args, batch.target))
    leaves, spec = tree_flatten((batch.args, batch.kwargs, batch.target))
    if not all(isinstance(x, torch.Tensor | int | float | str | None) for x in leaves):
        return None
    return str(spec), repr([(x.shape, x.dtype, x.stride()) if isinstance(x, torch.Tensor) else x for x in leaves])
