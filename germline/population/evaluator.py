"""Scores blocks of members of one module on one device, by one of the methods of ``METHODS``."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.utils._pytree import tree_map

from germline.clock import clock
from germline.genome import Genome, copy_module
from germline.kernels import kernel_device
from germline.objective import Batch, Objective, iterate_tensors
from germline.population.block import Block, Generation, current_block
from germline.population.buffers import ALIGNMENT
from germline.population.isolation import (
    MemberModule,
    PrivateTensors,
    ThreadModule,
    copy_with_flat_weights,
    isolated_generators,
    restored_attributes,
)
from germline.population.members import Members
from germline.population.norms import tracking_norms
from germline.population.outputs import combine_outputs, join_output, map_output, split_output
from germline.population.plan import Plan
from germline.population.population_module import enable_dropout, make_population_module
from germline.population.recording import (
    MAX_RECORDED_BLOCKS,
    MAX_RECORDINGS,
    BlockRecording,
    Recording,
    describe_batch,
)
from germline.population.rules.faster import FasterFunctions
from germline.population.rules.pending import materialize
from germline.population.rules.recurrent import split_cells
from germline.population.tape import Tape
from germline.strategies.candidates import Candidates

ALL_BLOCKS = slice(None)  # of the blocks of a population
CHANGED_INPUT = "It changes its input, or the target, in place"


@dataclass(frozen=True)
class Evaluator:
    """Scores blocks of members of one module on one device; make one with ``Evaluator.build``."""

    module: nn.Module  # in evaluation mode, with the weights of the source: copies of it are run, never itself
    genome: Genome
    objective: Objective
    device: torch.device
    plan: Plan
    thread_copies: ThreadModule  # copies of the module
    source: nn.Module  # what the copy is of
    recordings: dict[Any, Recording | BlockRecording] = field(default_factory=dict, compare=False)
    tapes: dict[Any, Tape | None] = field(default_factory=dict, compare=False)  # by the shapes of a call of members
    checked_generations: set[int] = field(default_factory=set, compare=False)  # whose calls of members were checked

    @classmethod
    def build(
        cls, module: nn.Module, genome: Genome, objective: Objective, device: torch.device, plan: Plan
    ) -> "Evaluator":
        """Return an evaluator of a copy of the user's module.

        Args:
            module: the user's module, which stays as it is.
            genome: the layout of its trained parameters.
            objective: computes the score of a member.
            device: where members are evaluated.
            plan: how they are evaluated.
        """
        copied = make_evaluation_copy(module, shares_weights=True).to(device)
        if plan.dtype == "bfloat16":
            copied = copied.to(torch.bfloat16)
        if plan.method == "population":
            copied = make_population_module(copied, genome, plan.looped)
        if plan.method == "vmap":
            copied = split_cells(copied)
        if plan.dropout:
            copied = enable_dropout(copied)
        return cls(copied, genome, objective, device, plan, ThreadModule(copied), module)

    def make_plain(self) -> "Evaluator":
        """Return an evaluator of plain copies of the module, which members are compared with."""
        plan = Plan(1, "isolated", vectorized=False, dtype=self.plan.dtype, dropout=self.plan.dropout)
        return Evaluator.build(self.source, self.genome, self.objective, self.device, plan)

    def blocks(self, population: int) -> list[NDArray[np.int64]]:
        """Return the members of each block; the last block is padded with its last members, or its last pair."""
        members = np.arange(-(-population // self.plan.block) * self.plan.block)
        last = population - 1 - (members + 1) % 2 if population % 2 == 0 else population - 1
        return list(np.where(members < population, members, last).reshape(-1, self.plan.block))

    def generation(self, candidates: Candidates, batch: Batch | None) -> Generation:
        """Return what all blocks of a generation share."""
        dtype = torch.bfloat16 if self.plan.dtype == "bfloat16" else None
        if batch is not None:
            args, kwargs = tree_map(lambda x: prepare_input(x, dtype), (batch.args, batch.kwargs))
            batch = Batch(args, kwargs, batch.target, batch.size)
        return Generation(candidates, batch, self.genome, dtype)

    def recording(
        self, candidates: Candidates, population: int, batch: Batch | None, share: slice = ALL_BLOCKS
    ) -> Recording | BlockRecording | None:
        """Return the recording of generations like this one, or None where a GPU cannot launch them, or their blocks.

        Args:
            candidates: the members of a generation.
            population: how many there are.
            batch: the batch that they are scored on.
            share: the blocks that this process evaluates.
        """
        is_vectorized = self.plan.vectorized and not self.plan.one_by_one
        is_vectorized = is_vectorized and (candidates.shared or not self.plan.dropout)  # whose masks go by the member
        if kernel_device(self.device).type != "cuda" or not is_vectorized or batch is None or self.plan.renewed:
            return None
        shapes, has_vector_sigma = describe_batch(batch), isinstance(candidates.sigma, Tensor)
        key = (population, share.start, share.stop, shapes, has_vector_sigma, candidates.field)
        if key not in self.recordings:
            if shapes is None or self.has_hooks:
                return None
            for other in [other for other in self.recordings if other[1:3] != key[1:3]]:
                del self.recordings[other]  # of a share that this process no longer has
            if len(self.recordings) >= MAX_RECORDINGS:
                return None
            if not candidates.shared:
                blocks = self.blocks(population)[share]
                self.recordings[key] = BlockRecording(self.make_weights, self._score_weights, blocks)
            elif -(-population // self.plan.block) > MAX_RECORDED_BLOCKS:
                return None
            else:
                self.recordings[key] = Recording(
                    lambda candidates, batch: self.scores(candidates, population, batch, share), self.device
                )
        return self.recordings[key]

    def make_weights(self, candidates: Candidates, members: NDArray[np.int64], out: Sequence[Tensor]) -> list[Tensor]:
        """Return the weights of some members, (members, parameters) for each parameter of the genome.

        Args:
            candidates: the members of a generation.
            members: their numbers.
            out: tensors to be overwritten and returned; none where they are to be allocated.
        """
        generation = self.generation(candidates, None)
        if not out:
            empty = candidates.center.new_empty
            sizes = [(slot.stop - slot.start, generation.get_dtype(slot)) for slot in self.genome.slots]
            out = [empty((len(members), size), dtype=dtype) for size, dtype in sizes]
        spans = [(slot.start, slot.stop) for slot in self.genome.slots]
        return [candidates.weights(members, *span, target) for span, target in zip(spans, out, strict=True)]

    def _score_weights(
        self, candidates: Candidates, members: NDArray[np.int64], weights: Sequence[Tensor], batch: Batch
    ) -> Tensor:
        """Return the scores of a block of members whose weights are made already."""
        generation = self.generation(candidates, batch)
        shaped = (part.view(-1, *slot.shape) for slot, part in zip(self.genome.slots, weights, strict=True))
        generation.block_weights.update(enumerate(shaped))
        return self._block_scores(generation, members)

    def scores(self, candidates: Candidates, population: int, batch: Batch | None, share: slice = ALL_BLOCKS) -> Tensor:
        """Return the scores of a share of the blocks, on the device, one block after the other.

        Args:
            candidates: the members of a generation.
            population: how many there are.
            batch: the batch that they are scored on; None for an objective of the whole model.
            share: the blocks to be evaluated.
        """
        generation, blocks = self.generation(candidates, batch), self.blocks(population)[share]
        return torch.cat([self._block_scores(generation, members) for members in blocks])

    @clock("forward")
    def score_block(self, generation: Generation, members: NDArray[np.int64]) -> NDArray[np.float32]:
        """Return the scores of one block's members."""
        return self._block_scores(generation, members).cpu().numpy()

    def _block_scores(self, generation: Generation, members: NDArray[np.int64]) -> Tensor:
        batch = generation.batch
        if self.objective.population is not None:
            own = Generation(generation.candidates, None, self.genome, generation.dtype)
            group = Members(own, members, lambda call: self, evaluator=self)
            table = self.objective.score_members(group, int(generation.candidates.generation))
            return table.reshape(-1)  # of each member its score, and what else it has counted
        with torch.no_grad(), refuse_changes(batch):
            if self.plan.one_by_one or batch is None:
                scores = [self.score_member(generation, member) for member in members]
            else:
                outputs = self.outputs(generation, members)
                if self.plan.vectorized:
                    tensors, template = split_output(outputs)
                    score = vmap(lambda *some: self.objective.function(join_output(some, template), batch.target))
                    with FasterFunctions():
                        return torch.as_tensor(score(*tensors)).reshape(len(members)).float()
                scores = [self.objective.function(select_member(outputs, i), batch.target) for i in range(len(members))]
            scalars = [torch.as_tensor(score, dtype=torch.float32, device=self.device) for score in scores]
            return torch.stack([scalar.detach().reshape(()) for scalar in scalars])

    def outputs(self, generation: Generation, members: NDArray[np.int64]) -> Any:
        """Return the module's outputs for each of the members: tensors with the members first."""
        batch, module = generation.batch, self.thread_copies.get()
        assert batch is not None
        if self.plan.renewed or self.plan.private:
            batch = batch.copy()
        if self.plan.one_by_one:
            return combine_outputs(torch.stack, [self.member_output(generation, member) for member in members])
        buffers, template = self.copy_buffers(), None
        with current_block.set(Block(generation, members)) as block:

            def forward(vmap_index: Tensor, weights: dict[str, Tensor]) -> list[Tensor]:
                nonlocal template
                block.vmap_index = vmap_index
                if not weights and not buffers:
                    output = module(*batch.args, **batch.kwargs)
                else:
                    output = functional_call(module, buffers | weights, batch.args, batch.kwargs)
                tensors, template = split_output(output)
                return [materialize(tensor) for tensor in tensors]

            # a tied parameter has its first name alone: functional_call knows the others
            slots = enumerate(self.genome.slots) if self.plan.method == "vmap" else ()
            weights = {slot.name: block.weights(index) for index, slot in slots} | self.expand_buffers(block, buffers)
            with FasterFunctions(), self.prepare_code(block, module):
                tensors = vmap(forward, randomness="same")(torch.arange(block.size), weights)
            return to_float32(join_output(tensors, template))

    @contextmanager
    def prepare_code(self, block: Block, module: nn.Module) -> Iterator[None]:
        """Prepare what the plan asks for: private tensors, the module's first state, the same random numbers."""
        with ExitStack() as stack:
            if self.plan.private:
                stack.enter_context(PrivateTensors(block))
            if self.plan.renewed:
                stack.enter_context(isolated_generators(block.generation.candidates))
                stack.enter_context(restored_attributes(module))
            yield

    def expand_buffers(self, block: Block, buffers: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the buffers of each member, if members have private tensors, for the code that writes to them."""
        if not self.plan.private:
            return {}
        looped = tuple(f"{part}." for part in self.plan.looped)  # whose code sees one member after the other
        some = ((name, buffer) for name, buffer in buffers.items() if not name.startswith(looped))
        return {name: buffer.expand(block.size, *buffer.shape).clone() for name, buffer in some}

    def member_output(self, generation: Generation, member: int) -> Any:
        """Return the output of one member, from a plain module with its weights."""
        with self.member_module(generation, member) as (module, batch):
            return to_float32(module(*batch.args, **batch.kwargs))

    def score_member(self, generation: Generation, member: int) -> Any:
        """Return the score of one member, from a plain module with its weights."""
        with self.member_module(generation, member) as (module, batch):
            if batch is None or self.objective.of_model:
                return self.objective.score_model(module, int(generation.candidates.generation))
            return self.objective.function(to_float32(module(*batch.args, **batch.kwargs)), batch.target)

    @contextmanager
    def member_module(self, generation: Generation, member: int) -> Iterator[tuple[nn.Module, Any]]:
        """Yield a plain module with a member's weights, and the batch; copies of both if the plan is to isolate it."""
        is_isolated, candidates, batch = self.plan.method == "isolated", generation.candidates, generation.batch
        if is_isolated:
            target = MemberModule(copy_with_flat_weights(self.module), self.genome)
            batch = batch.copy() if batch is not None else None
        else:
            target = self.thread_copies.get_member(self.genome)
        with isolated_generators(candidates) if is_isolated else nullcontext():
            if not self.plan.dropout:
                yield target.write(candidates, int(member)), batch
                return
            with current_block.set(Block(generation, np.array([member]), single_member=0)):  # which draws the masks
                yield target.write(candidates, int(member)), batch

    def copy_buffers(self) -> dict[str, Tensor]:
        """Return copies of the buffers, so that what a module writes to them is gone before the next block."""
        return {name: buffer.clone() for name, buffer in self.module.named_buffers()}

    def gradient(self, theta: Tensor, batch: Batch) -> tuple[NDArray[np.float32], Tensor]:
        """Return the score of the center on a batch, (1,), and its gradient by backprop."""
        with torch.enable_grad(), train_recurrent_layers(self.thread_copies.get()):
            center = theta.detach().clone().requires_grad_(True)
            score = self.score_at(center, batch)
            with clock("backward"):
                (gradient,) = torch.autograd.grad(score, center)
        return score.detach().float().cpu().numpy().reshape(1), gradient

    @clock("forward")
    def score_at(self, theta: Tensor, batch: Batch) -> Any:
        """Return the score of the module with these weights."""
        module = self.thread_copies.get()

        def forward(*args: Any, **kwargs: Any) -> Any:
            return functional_call(module, self.genome.views(theta) | self.copy_buffers(), args, kwargs)

        return self.objective.score(forward, batch)

    @property
    def columns(self) -> int:
        """The numbers that are computed for each member."""
        return self.objective.columns

    @property
    def has_hooks(self) -> bool:
        """Return whether the module has hooks: functions, which the copies of all threads share."""
        return any(part._forward_hooks or part._forward_pre_hooks for part in self.module.modules())


@contextmanager
def train_recurrent_layers(module: nn.Module) -> Iterator[None]:
    """Have recurrent layers in training mode, as cuDNN needs for a gradient; without dropout they compute the same."""
    layers = [(part, part.training) for part in module.modules() if isinstance(part, nn.RNNBase)]
    try:
        for layer, _ in layers:
            layer.training = True
        yield
    finally:
        for layer, training in layers:
            layer.training = training


def prepare_input(value: Any, dtype: torch.dtype | None) -> Any:
    """Return an input in the type of the arithmetic, at an aligned address, on which the last bits of sums depend."""
    if not isinstance(value, Tensor):
        return value
    if dtype is not None and value.is_floating_point():
        value = value.to(dtype)
    return value.clone() if value.layout == torch.strided and value.data_ptr() % ALIGNMENT else value


def to_float32(outputs: Any) -> Any:
    """Return outputs with bfloat16 tensors as float32: losses are computed in float32."""
    return map_output(lambda x: x.float() if x.dtype == torch.bfloat16 else x, outputs)


@contextmanager
def refuse_changes(batch: Batch | None) -> Iterator[None]:
    """Raise RuntimeError if code changes its input in place, since all members share it."""
    before = tensor_versions(batch)
    yield
    if tensor_versions(batch) != before:
        raise RuntimeError(CHANGED_INPUT)


def tensor_versions(batch: Batch | None) -> list[int]:
    """Return how often each tensor of a batch has been changed in place."""
    return [] if batch is None else [x._version for x in iterate_tensors([batch.args, batch.kwargs, batch.target])]


def select_member(outputs: Any, i: int) -> Any:
    """Return the outputs of one member."""
    return map_output(lambda tensor: tensor[i], outputs)


def make_evaluation_copy(module: nn.Module, *, shares_weights: bool = False) -> nn.Module:
    """Return a copy that computes without side effects: no dropout, and norms by their mode in the module.

    Norms in evaluation mode use their running statistics, and norms in training mode those of the batch.
    """
    norms_in_training = tracking_norms(module, training=True)
    # some adapters add their weights to others when they are no longer trained
    kinds = {type(part) for part in module.modules()}
    has_own_modes = any(kind.train is not nn.Module.train or kind.eval is not nn.Module.eval for kind in kinds)
    module = copy_module(module, shares_weights=shares_weights and not has_own_modes)
    module.train().eval()  # some modules clear what they have cached when they begin to train
    for name, part in module.named_modules():
        if isinstance(part, nn.RNNBase):
            part.dropout = 0.0
        if name in norms_in_training:
            part.track_running_stats = False
            part.running_mean = part.running_var = None
    return module
