"""Scores a population of an unchanged module, a block of members at a time.

A score has the same bits whoever computes it, on machines of one kind, because a block is always computed in the same
way: members are dealt to blocks by their number, the last block is padded, each block is evaluated by one thread, on
copies of the weights that begin at aligned addresses, by a method that is chosen once for the run and stands in its
header.
"""

import copy
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.func import functional_call, vmap

from germline.genome import Genome
from germline.objective import Batch, Objective
from germline.strategies.base import Candidates

Method = Literal["vmap", "outputs", "loop"]
METHODS: tuple[Method, ...] = (
    "vmap",
    "outputs",
    "loop",
)  # all at once; the score member by member; all member by member
BLOCK_BYTES = 16 << 20  # of perturbed weights in a block
LARGEST_BLOCK = 32


def block_size(population: int, genome: Genome) -> int:
    """How many members are evaluated together: a function of the problem alone, never of the machine.

    As large as the budget allows, and equal, so that little of the last block is padding.
    """
    largest = max(1, min(LARGEST_BLOCK, BLOCK_BYTES // (4 * genome.size)))
    return -(-population // -(-population // largest))


@dataclass(frozen=True)
class Evaluator:
    """Scores blocks of members of one module on one device."""

    module: nn.Module  # a copy in evaluation mode; see ``prepared``
    genome: Genome
    objective: Objective
    device: torch.device
    block: int
    method: Method
    own: threading.local  # functional_call writes to the module while it runs: each thread has its own copy

    @classmethod
    def of(
        cls, module: nn.Module, genome: Genome, objective: Objective, device: torch.device, block: int, method: Method
    ) -> "Evaluator":
        return cls(prepared(module).to(device), genome, objective, device, block, method, threading.local())

    def blocks(self, population: int) -> list[NDArray[np.int64]]:
        """The members of each block; the last one is padded with its own last member."""
        members = np.arange(-(-population // self.block) * self.block)
        return list(np.minimum(members, population - 1).reshape(-1, self.block))

    def score_block(
        self, candidates: Candidates, members: NDArray[np.int64], batch: Batch | None
    ) -> NDArray[np.float32]:
        with torch.no_grad(), exact_arithmetic():
            weights = candidates.weights(members, 0, self.genome.size)
            return self._scores(weights, batch).float().cpu().numpy()

    def _scores(self, weights: torch.Tensor, batch: Batch | None) -> torch.Tensor:
        module = self.mine()
        if self.method == "loop":
            return torch.stack([self._one(module, row, batch) for row in weights])
        assert batch is not None
        buffers = self.buffers()
        if self.method == "vmap":
            score = vmap(lambda named: self.objective.score(bound(module, named | buffers), batch))
            return torch.as_tensor(score(self.named(weights))).reshape(len(weights))
        outputs = vmap(lambda named: bound(module, named | buffers)(*batch.args, **batch.kwargs))(self.named(weights))
        return torch.stack([self._score(row_of(outputs, i), batch) for i in range(len(weights))])

    def _one(self, module: nn.Module, row: torch.Tensor, batch: Batch | None) -> torch.Tensor:
        if batch is None or self.objective.of_model:
            self.genome.write(row, module)
            for name, buffer in module.named_buffers():
                buffer.copy_(self.module.get_buffer(name))
            return as_scalar(self.objective.function(module), row.device)
        return self._score(bound(module, self.named(row) | self.buffers())(*batch.args, **batch.kwargs), batch)

    def _score(self, output: Any, batch: Batch) -> torch.Tensor:
        return as_scalar(self.objective.function(output, batch.target), self.device)

    def named(self, weights: torch.Tensor) -> dict[str, torch.Tensor]:
        """Each parameter of all members in memory of its own, so that it begins at an aligned address.

        A tied parameter goes by its first name alone: functional_call knows the others.
        """
        views = self.genome.views(weights)
        first = (slot.name for slot in self.genome.slots)
        return {name: views[name].clone(memory_format=torch.contiguous_format) for name in first}

    def buffers(self) -> dict[str, torch.Tensor]:
        """Copies, so that what a module writes to its buffers is gone before the next member."""
        return {name: buffer.clone() for name, buffer in self.module.named_buffers()}

    def gradient(self, theta: torch.Tensor, batch: Batch) -> tuple[NDArray[np.float32], torch.Tensor]:
        """The score of the centre on a batch, and its gradient by backprop."""
        with torch.enable_grad(), exact_arithmetic():
            centre = theta.detach().clone().requires_grad_(True)
            score = self.objective.score(bound(self.mine(), self.genome.views(centre) | self.buffers()), batch)
            (gradient,) = torch.autograd.grad(score, centre)
        return score.detach().float().cpu().numpy().reshape(1), gradient

    def mine(self) -> nn.Module:
        if not hasattr(self.own, "module"):
            self.own.module = copy.deepcopy(self.module)
        module: nn.Module = self.own.module
        return module


def choose_method(evaluator: Callable[[Method], Evaluator], candidates: Candidates, batch: Batch | None) -> Method:
    """The first method whose scores of a full block are those of plain copies of the module."""
    plain = evaluator("loop")
    if batch is None or plain.objective.of_model:
        return "loop"
    members = plain.blocks(plain.block)[0]
    expected = plain.score_block(candidates, members, batch)
    for method in METHODS[:-1]:
        try:
            got = evaluator(method).score_block(candidates, members, batch)
        except Exception:  # whatever user code does under vmap that vmap cannot do
            continue
        # a score that counts examples may move by one where an output falls on the other side of a threshold
        counts = batch.size > 8 and np.allclose(expected * batch.size, np.round(expected * batch.size), atol=1e-3)
        if np.allclose(got, expected, rtol=1e-3, atol=1.01 / batch.size if counts else 1e-5, equal_nan=True):
            return method
    return "loop"


def bound(module: nn.Module, named: dict[str, torch.Tensor]) -> Callable[..., Any]:
    """The module as a function of its inputs, with these weights."""
    return lambda *args, **kwargs: functional_call(module, named, args, kwargs)


def row_of(outputs: Any, i: int) -> Any:
    return torch.utils._pytree.tree_map(lambda tensor: tensor[i], outputs)


def as_scalar(score: Any, device: torch.device) -> torch.Tensor:
    return torch.as_tensor(score, dtype=torch.float32, device=device).detach().reshape(())


def prepared(module: nn.Module) -> nn.Module:
    """A copy that computes without side effects: dropout off, batch norm by the statistics of its own batch."""
    module = copy.deepcopy(module).eval()
    for part in module.modules():
        if isinstance(part, nn.modules.batchnorm._BatchNorm):
            part.track_running_stats = False
            part.running_mean = part.running_var = None
    return module


@torch.no_grad()
def refresh_statistics(module: nn.Module, batches: Iterator[Batch]) -> None:
    """Re-estimates the running statistics of batch norm for the weights that the module now has."""
    norms = [part for part in module.modules() if isinstance(part, nn.modules.batchnorm._BatchNorm)]
    norms = [part for part in norms if part.track_running_stats]
    if not norms:
        return
    before = [(part, part.momentum, part.training) for part in norms]
    for part in norms:
        part.reset_running_stats()
        part.momentum = None  # a plain average
        part.train()
    for batch in batches:
        module(*batch.args, **batch.kwargs)
    for part, momentum, training in before:
        part.momentum = momentum
        part.train(training)


@contextmanager
def exact_arithmetic() -> Iterator[None]:
    """No TF32 and no kernels chosen by timing, for as long as members are evaluated."""
    if not torch.cuda.is_available():
        yield
        return
    flags: list[tuple[Any, str]] = [
        (torch.backends.cuda.matmul, "allow_tf32"),
        (torch.backends.cudnn, "allow_tf32"),
        (torch.backends.cudnn, "benchmark"),
    ]
    before = [getattr(owner, name) for owner, name in flags]
    try:
        for owner, name in flags:
            setattr(owner, name, False)
        yield
    finally:
        for (owner, name), value in zip(flags, before, strict=True):
            setattr(owner, name, value)
