"""Scores blocks of members of one module on one device, by one of four methods."""

import copy
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.func import functional_call, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_flatten, tree_map

from germline.clock import clock
from germline.genome import Genome
from germline.kernels import kernel_device
from germline.kernels.recorded import Recorded
from germline.noise import ADDRESS_LIMIT, Field, LiveScalars, Stream
from germline.objective import Batch, Objective, iterate_tensors, seeded_generators
from germline.population.block import Block, Generation, here
from germline.population.pending import settled
from germline.population.pooling import FasterFunctions
from germline.population.twins import make_population_module, with_dropout
from germline.strategies.base import Candidates

Method = Literal["population", "vmap", "loop", "isolated"]
METHODS: dict[Method, str] = {
    "population": "all members of a block at once",
    "vmap": "all members of a block at once, with all their weights in memory",
    "loop": "member by member",
    "isolated": "member by member, each on a new copy of the model with random generators of its own",
}
ALL_BLOCKS = slice(None)  # of the blocks of a population
ALIGNED = 64  # bytes
RECORDINGS = 4  # shapes of batches for which a card keeps a whole generation
BLOCKS_RECORDED = 64  # of a generation: where there are more, launching them is little beside their work
generators = threading.Lock()  # there is one set of global generators for all threads


@dataclass(frozen=True)
class Plan:
    """How members are evaluated: settled once for a run, never by timing, and part of its header."""

    block: int  # members that are evaluated together
    method: Method
    vectorized: bool = True  # whether the score, too, is computed for all members at once
    dtype: Literal["float32", "bfloat16"] = "float32"  # of the arithmetic; float32 stands for the module's own types
    dropout: bool = False
    slices: int = 1  # parts of a batch whose gradients are computed apart and summed in order

    @property
    def one_by_one(self) -> bool:
        return self.method in ("loop", "isolated")


@dataclass(frozen=True)
class Evaluator:
    """Scores blocks of members of one module on one device."""

    module: nn.Module  # a copy in evaluation mode; see ``make_evaluation_copy``
    genome: Genome
    objective: Objective
    device: torch.device
    plan: Plan
    own: threading.local  # what the code of a module writes to itself stays with the thread
    recordings: dict[Any, "Recording"] = field(default_factory=dict, compare=False)

    @classmethod
    def build(
        cls, module: nn.Module, genome: Genome, objective: Objective, device: torch.device, plan: Plan
    ) -> "Evaluator":
        copied = make_evaluation_copy(module).to(device)
        if plan.dtype == "bfloat16":
            copied = copied.to(torch.bfloat16)
        if plan.method == "population":
            copied = make_population_module(copied, genome)
        if plan.dropout:
            copied = with_dropout(copied)
        return cls(copied, genome, objective, device, plan, threading.local())

    def blocks(self, population: int) -> list[NDArray[np.int64]]:
        """The members of each block; the last one is padded with its own last ones, in pairs if they come in pairs."""
        members = np.arange(-(-population // self.plan.block) * self.plan.block)
        last = population - 1 - (members + 1) % 2 if population % 2 == 0 else population - 1
        return list(np.where(members < population, members, last).reshape(-1, self.plan.block))

    def generation(self, candidates: Candidates, batch: Batch | None) -> Generation:
        """What all blocks of a generation share."""
        dtype = torch.bfloat16 if self.plan.dtype == "bfloat16" else None
        if batch is not None:
            args, kwargs = tree_map(lambda x: made_ready(x, dtype), (batch.args, batch.kwargs))
            batch = Batch(args, kwargs, batch.target, batch.size)
        return Generation(candidates, batch, self.genome, dtype)

    def recording(
        self, candidates: Candidates, population: int, batch: Batch | None, share: slice = ALL_BLOCKS
    ) -> "Recording | None":
        """Of generations like this one, if a card can launch them as a whole."""
        card = kernel_device(self.device).type == "cuda"
        if not card or batch is None or not candidates.shared or not self.plan.vectorized or self.plan.one_by_one:
            return None
        kind = kind_of(batch)
        key = (population, share.start, share.stop, kind, isinstance(candidates.sigma, torch.Tensor), candidates.field)
        if key not in self.recordings:
            if kind is None or self.has_hooks:
                return None
            for other in [other for other in self.recordings if other[1:3] != key[1:3]]:
                del self.recordings[other]  # of a share that this process no longer has
            if len(self.recordings) >= RECORDINGS or -(-population // self.plan.block) > BLOCKS_RECORDED:
                return None
            self.recordings[key] = Recording(self, population, share)
        return self.recordings[key]

    def scores(
        self, candidates: Candidates, population: int, batch: Batch | None, share: slice = ALL_BLOCKS
    ) -> torch.Tensor:
        """The scores of a share of the blocks, on the device, one block after the other."""
        generation, blocks = self.generation(candidates, batch), self.blocks(population)[share]
        return torch.cat([self.block_scores(generation, members) for members in blocks])

    @clock("forward")
    def score_block(self, generation: Generation, members: NDArray[np.int64]) -> NDArray[np.float32]:
        return self.block_scores(generation, members).cpu().numpy()

    def block_scores(self, generation: Generation, members: NDArray[np.int64]) -> torch.Tensor:
        batch = generation.batch
        with torch.no_grad(), unchanged(batch):
            if self.plan.one_by_one or batch is None:
                scores = [self.one_by_one(generation, member) for member in members]
            else:
                outputs = self.outputs(generation, members)
                if self.plan.vectorized:
                    score = vmap(lambda output: self.objective.function(output, batch.target))
                    return torch.as_tensor(score(outputs)).reshape(len(members)).float()
                scores = [self.objective.function(row_of(outputs, i), batch.target) for i in range(len(members))]
            return torch.stack([as_scalar(score, self.device) for score in scores])

    def outputs(self, generation: Generation, members: NDArray[np.int64]) -> Any:
        """What the module makes of the batch for each of the members: tensors with the members first."""
        batch, module = generation.batch, self.mine()
        assert batch is not None
        if self.plan.one_by_one:
            outputs = [self.one_by_one(generation, member, scored=False) for member in members]
            return tree_map(lambda *rows: torch.stack(rows), *outputs)
        buffers = self.buffers()
        with evaluating(Block(generation, members)) as block:

            def forward(number: torch.Tensor, named: dict[str, torch.Tensor]) -> Any:
                block.number = number
                if not named and not buffers:
                    return settled(module(*batch.args, **batch.kwargs))
                return settled(functional_call(module, named | buffers, batch.args, batch.kwargs))

            # a tied parameter goes by its first name alone: functional_call knows the others
            slots = enumerate(self.genome.slots) if self.plan.method == "vmap" else ()
            named = {slot.name: block.weights(index) for index, slot in slots}
            with FasterFunctions():
                return widened(vmap(forward)(torch.arange(block.size), named))

    def one_by_one(self, generation: Generation, member: int, *, scored: bool = True) -> Any:
        """The score, or the output, of one member, on a plain module with its weights."""
        alone = self.plan.method == "isolated"
        batch = generation.batch.copy() if alone and generation.batch is not None else generation.batch
        module = copy_of(self.module) if alone else self.mine()
        with evaluating(Block(generation, np.array([member]), member=0)), own_generators(generation, alone):
            weights = generation.candidates.weights(np.array([member]), 0, self.genome.size)[0]
            self.genome.write(weights, module)
            for name, buffer in self.buffers().items():
                owner, _, own = name.rpartition(".")
                module.get_submodule(owner)._buffers[own] = buffer
            if batch is None or self.objective.of_model:
                return self.objective.function(module)
            output = widened(module(*batch.args, **batch.kwargs))
            return self.objective.function(output, batch.target) if scored else output

    def buffers(self) -> dict[str, torch.Tensor]:
        """Copies, so that what a module writes to its buffers is gone before the next block."""
        return {name: buffer.clone() for name, buffer in self.module.named_buffers()}

    def gradient(self, theta: torch.Tensor, batch: Batch) -> tuple[NDArray[np.float32], torch.Tensor]:
        """The score of the center on a batch, and its gradient by backprop."""
        with torch.enable_grad(), differentiable(self.mine()):
            center = theta.detach().clone().requires_grad_(True)
            score = self.score_at(center, batch)
            with clock("backward"):
                (gradient,) = torch.autograd.grad(score, center)
        return score.detach().float().cpu().numpy().reshape(1), gradient

    @clock("forward")
    def score_at(self, theta: torch.Tensor, batch: Batch) -> Any:
        """The score of the module with these weights."""
        module = self.mine()

        def forward(*args: Any, **kwargs: Any) -> Any:
            return functional_call(module, self.genome.views(theta) | self.buffers(), args, kwargs)

        return self.objective.score(forward, batch)

    @property
    def has_hooks(self) -> bool:
        """Whether the module has hooks: functions, of which every thread's copy of it has the same ones."""
        return any(part._forward_hooks or part._forward_pre_hooks for part in self.module.modules())

    def mine(self) -> nn.Module:
        if not hasattr(self.own, "module"):
            self.own.module = copy_of(self.module)
        module: nn.Module = self.own.module
        return module


class Recording:
    """Generations of one shape of batch on a card, launched as a whole once that has proved to be the same."""

    def __init__(self, evaluator: Evaluator, population: int, share: slice) -> None:
        self.live = LiveScalars(evaluator.device)
        self.evaluator, self.population, self.share = evaluator, population, share
        self.recorded = Recorded(self._scores, doubted=True)

    @property
    def trusted(self) -> bool:
        return self.recorded.trusted

    def scores(self, candidates: Candidates, batch: Batch) -> torch.Tensor:
        if self.recorded.failed:
            return self.evaluator.scores(candidates, self.population, batch, self.share)
        sigma = candidates.sigma
        vector = [sigma] if isinstance(sigma, torch.Tensor) else []
        assert isinstance(candidates.generation, int)
        assert not isinstance(sigma, LiveScalars)
        self.live.set(candidates.generation, 0.0 if isinstance(sigma, torch.Tensor) else sigma)
        self.candidates, self.batch = candidates, batch
        return self.recorded(candidates.center, *vector, *iterate_tensors([batch.args, batch.kwargs, batch.target]))

    def _scores(self, center: torch.Tensor, *tensors: torch.Tensor) -> torch.Tensor:
        given, was = iter(tensors), self.batch
        sigma = next(given) if isinstance(self.candidates.sigma, torch.Tensor) else self.live
        put = lambda x: next(given) if isinstance(x, torch.Tensor) else x  # noqa: E731
        args, kwargs, target = tree_map(put, (was.args, was.kwargs, was.target))
        batch = Batch(args, kwargs, target, was.size)
        candidates = replace(self.candidates, generation=self.live.generation, center=center, sigma=sigma)
        return self.evaluator.scores(candidates, self.population, batch, self.share)


def kind_of(batch: Batch) -> Any:
    """What must be the same for two batches to be evaluated by the same kernels."""
    if not batch.kwargs and all(isinstance(x, torch.Tensor) for x in (*batch.args, batch.target)):
        return tuple((x.shape, x.dtype, x.stride()) for x in (*batch.args, batch.target))
    leaves, spec = tree_flatten((batch.args, batch.kwargs, batch.target))
    if not all(isinstance(x, torch.Tensor | int | float | str | None) for x in leaves):
        return None  # objects, in which there may be anything
    return str(spec), repr([(x.shape, x.dtype, x.stride()) if isinstance(x, torch.Tensor) else x for x in leaves])


def copy_of(module: nn.Module) -> nn.Module:
    module = copy.deepcopy(module)
    for part in module.modules():
        if isinstance(part, nn.RNNBase):
            part.flatten_parameters()  # copying takes apart what cuDNN wants in one piece
    return module


@contextmanager
def differentiable(module: nn.Module) -> Iterator[None]:
    """Recurrent layers as cuDNN wants them for a gradient: in training, which without dropout computes the same."""
    layers = [part for part in module.modules() if isinstance(part, nn.RNNBase)]
    for layer in layers:
        layer.training = True
    try:
        yield
    finally:
        for layer in layers:
            layer.training = False


@contextmanager
def evaluating(block: Block) -> Iterator[Block]:
    here.block = block
    try:
        yield block
    finally:
        here.block = None


@contextmanager
def own_generators(generation: Generation, wanted: bool) -> Iterator[None]:
    """Global generators at a function of seed and generation: every member draws the same numbers."""
    if not wanted:
        yield
        return
    field, number = generation.candidates.field, int(generation.candidates.generation)
    seed = int(Field(field.seed).below(ADDRESS_LIMIT, 1, number, Stream.DROPOUT, member=ADDRESS_LIMIT - 1)[0])
    with generators, seeded_generators(seed):
        yield


def made_ready(value: Any, dtype: torch.dtype | None) -> Any:
    """An input in the type of the arithmetic, at an aligned address, on which the last bits of a product depend."""
    if not isinstance(value, torch.Tensor):
        return value
    if dtype is not None and value.is_floating_point():
        value = value.to(dtype)
    return value.clone() if value.layout == torch.strided and value.data_ptr() % ALIGNED else value


def widened(outputs: Any) -> Any:
    """Outputs in 16 bits as float32: a loss is computed in full."""
    return tree_map(
        lambda x: x.float() if isinstance(x, torch.Tensor) and x.dtype == torch.bfloat16 else x,
        outputs,
    )


@contextmanager
def unchanged(batch: Batch | None) -> Iterator[None]:
    """Notices code that changes its own input, which is everybody's."""
    before = versions(batch)
    yield
    if versions(batch) != before:
        raise RuntimeError("It changes its input, or the target, in place")


def versions(batch: Batch | None) -> list[int]:
    return [] if batch is None else [x._version for x in iterate_tensors([batch.args, batch.kwargs, batch.target])]


def row_of(outputs: Any, i: int) -> Any:
    return tree_map(lambda tensor: tensor[i], outputs)


def as_scalar(score: Any, device: torch.device) -> torch.Tensor:
    return torch.as_tensor(score, dtype=torch.float32, device=device).detach().reshape(())


def make_evaluation_copy(module: nn.Module) -> nn.Module:
    """A copy that computes without side effects: dropout off, batch norm by the statistics of its own batch."""
    module = copy.deepcopy(module).eval()
    for part in module.modules():
        if isinstance(part, nn.RNNBase):
            part.dropout = 0.0
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
def exact_arithmetic(device: torch.device) -> Iterator[None]:
    """No TF32, no kernels chosen by timing and no other code for attention, while members are evaluated.

    These are settings of the whole process: around all blocks, not around each.
    """
    flags: list[tuple[Any, str]] = []
    if torch.cuda.is_available():
        flags = [
            (torch.backends.cuda.matmul, "allow_tf32"),
            (torch.backends.cudnn, "allow_tf32"),
            (torch.backends.cudnn, "benchmark"),
        ]
    before = [getattr(owner, name) for owner, name in flags]
    attention = torch.backends.mha.get_fastpath_enabled()
    vmap_warns: Any = getattr(torch._C._functorch, "_set_vmap_fallback_warning_enabled", lambda on: None)
    try:
        for owner, name in flags:
            setattr(owner, name, False)
        torch.backends.mha.set_fastpath_enabled(False)
        # where vmap has no rule it loops: the check judges whether rightly, and there is nobody to warn
        vmap_warns(False)
        # vmap has rules for these; and what the user has switched on holds for the user's thread alone
        kinds = [SDPBackend.FLASH_ATTENTION] if device.type == "cuda" else []
        with sdpa_kernel([*kinds, SDPBackend.MATH]), torch.autocast(device.type, enabled=False):
            yield
    finally:
        vmap_warns(True)
        torch.backends.mha.set_fastpath_enabled(attention)
        for (owner, name), value in zip(flags, before, strict=True):
            setattr(owner, name, value)
