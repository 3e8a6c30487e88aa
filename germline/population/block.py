"""The block of members at hand: their weights, made when a layer first reads them."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from germline.genome import Genome, Slot
from germline.kernels import kernel_device
from germline.noise import Field, Matrix, Noise, Stream, cached_tensor, scale_sigma
from germline.objective import Batch, iterate_tensors
from germline.population.buffers import empty
from germline.strategies.base import Candidates

Call = Callable[[list[torch.Tensor], list[bool]], list[torch.Tensor]]


@dataclass
class Generation:
    """What all blocks of a generation share: its candidates, its batch, and what is the same for every member."""

    candidates: Candidates
    batch: Batch | None
    genome: Genome
    dtype: torch.dtype | None  # of the arithmetic; None where each parameter has its own
    centers: dict[int, torch.Tensor] = field(default_factory=dict)
    read: set[int] = field(default_factory=set)  # the parameters that some layer has read
    products: dict[tuple[Any, ...], tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)

    def type_of(self, slot: Slot) -> torch.dtype:
        return self.dtype or slot.dtype

    def center(self, index: int) -> torch.Tensor:
        """A parameter of the center, in memory of its own, so that it begins at an aligned address."""
        if index not in self.centers:
            slot = self.genome.slots[index]
            part = self.candidates.center[slot.start : slot.stop].clone()
            self.centers[index] = part.view(slot.shape).to(self.type_of(slot))
        return self.centers[index]

    def once(self, layer: object, x: torch.Tensor, product: Callable[[], torch.Tensor]) -> torch.Tensor:
        """The product of a layer with an input that is part of the batch itself: made by the first block that asks.

        Two threads that ask at the same time both make it, with the same bits.
        """
        memory = x.untyped_storage().data_ptr() if x.layout == torch.strided else 0
        given = (
            memory
            and self.batch is not None
            and any(
                tensor.layout == torch.strided and memory == tensor.untyped_storage().data_ptr()
                for tensor in iterate_tensors([self.batch.args, self.batch.kwargs])
            )
        )
        if not given:
            return product()
        key = (layer, x.data_ptr(), tuple(x.shape), x.stride(), x._version)
        if key not in self.products:
            self.products[key] = (product(), x)  # x is kept: its memory must not become another tensor's
        return self.products[key][0]


@dataclass
class Block:
    """Some members of a generation, evaluated together by one thread."""

    generation: Generation
    members: NDArray[np.int64]
    number: torch.Tensor | None = None  # of a member in the block, as vmap sees it; None while there is no vmap
    member: int | None = None  # the one at hand while a layer goes through the members one by one
    calls: list[Call] = field(default_factory=list)  # those that vmap is making now
    drawn: int = 0  # elements of the dropout stream that have been used
    made: dict[int, torch.Tensor] = field(default_factory=dict)  # weights of all members
    seen: dict[int, torch.Tensor] = field(default_factory=dict)  # the same, as vmap shows them

    def __post_init__(self) -> None:
        candidates = self.generation.candidates
        self.noise: Noise = candidates.field.members(self.members, candidates.generation, candidates.center.device)
        # members that differ in nothing but the sign of their noise share its address
        self.addresses, self.where = np.unique(self.noise.addresses, return_inverse=True)
        self.unsigned = Field(candidates.field.seed, candidates.field.kind)

    @property
    def size(self) -> int:
        return int(self.members.size)

    def slot(self, index: int) -> Slot:
        return self.generation.genome.slots[index]

    def weights(self, index: int) -> torch.Tensor:
        """A parameter of all members: (members, *shape)."""
        if index not in self.made:
            slot = self.slot(index)
            candidates = self.generation.candidates
            kind, shape = self.generation.type_of(slot), (self.size, slot.stop - slot.start)
            if kernel_device(candidates.center.device).type == "cuda":  # kernels there round to the type that is wanted
                memory = candidates.center.new_empty(shape, dtype=kind)
            else:
                memory = empty(shape, candidates.center)
            made = candidates.weights(self.members, slot.start, slot.stop, memory)
            self.made[index] = made.view(self.size, *slot.shape).to(kind)
            self.generation.read.add(index)
        return self.made[index]

    def parameter(self, index: int) -> torch.Tensor:
        """A parameter as the code of a module sees it: that of one member, of the usual shape."""
        if self.member is not None:
            return self.weights(index)[self.member]
        if index not in self.seen:
            (self.seen[index],) = self.through([], lambda inputs, batched: [self.weights(index)])
        return self.seen[index]

    def through(self, inputs: Sequence[torch.Tensor], call: Call) -> list[torch.Tensor]:
        """A call that vmap makes once for the whole block: inputs and outputs have the members first."""
        assert self.number is not None
        self.calls.append(call)
        try:
            outputs: list[torch.Tensor] = layer(list(inputs), self.number, len(self.calls) - 1)
        finally:
            self.calls.pop()  # it knows this block: a circle, which would live on until it is searched for
        return outputs

    # The noise beside the center, for layers that are linear in their weights

    def matrix(self, index: int) -> Matrix | None:
        if not self.generation.candidates.shared:
            return None
        slot = self.slot(index)
        return next((m for m in self.generation.candidates.field.matrices if m.start == slot.start), None)

    def scales(self, index: int) -> torch.Tensor:
        """What the noise of an address is multiplied by, for each member, in the type of the center."""
        self.generation.read.add(index)
        candidates = self.generation.candidates
        signs = cached_tensor(self.noise.signs, candidates.center.device).to(candidates.center.dtype)
        if isinstance(candidates.sigma, torch.Tensor):
            return signs
        return signs * scale_sigma(candidates.sigma, candidates.field.unit(self.matrix(index)), candidates.center)

    def factors(self, matrix: Matrix, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """A and B of each address: (addresses, rows, rank) and (addresses, columns, rank)."""
        a, b = self.bare(slice(None)).factors(matrix)
        return a.to(dtype), b.to(dtype)

    def noise_at(self, index: int, address: int, dtype: torch.dtype) -> torch.Tensor:
        """The dense noise of one address in a parameter's shape: its integers, or in full where sigma is a vector."""
        slot, one = self.slot(index), self.bare(slice(address, address + 1))
        sigma = self.generation.candidates.sigma
        if isinstance(sigma, torch.Tensor):
            part = sigma[slot.start : slot.stop]
            noise = one.perturb(torch.zeros_like(part), part, start=slot.start)
        else:
            made = dtype if dtype in (torch.float32, torch.float64) else torch.int8
            noise = one.integers((slot.start, slot.stop), dtype=made)
        return noise.view(slot.shape).to(dtype)

    def noises(self, index: int, dtype: torch.dtype) -> torch.Tensor:
        """The integers of the dense noise of all addresses, in a parameter's shape: (addresses, *shape)."""
        slot = self.slot(index)
        return self.bare(slice(None)).integers((slot.start, slot.stop), dtype=dtype).view(-1, *slot.shape)

    def bare(self, addresses: slice) -> Noise:
        """The noise of some addresses, without signs."""
        candidates = self.generation.candidates
        return self.unsigned.members(self.addresses[addresses], candidates.generation, candidates.center.device)

    def keep(self, shape: tuple[int, ...], probability: float) -> torch.Tensor:
        """Which elements dropout keeps, a function of the members' addresses: (members, *shape)."""
        count = int(np.prod(shape))
        span = (self.drawn, self.drawn + count)
        self.drawn += count
        drop = min(65536, round(probability * 65536))
        return (self.noise.halves(span, Stream.DROPOUT) >= drop).view(self.size, *shape)


class Here(threading.local):
    """The block that this thread is evaluating."""

    block: Block | None = None


here = Here()


def current() -> Block:
    if here.block is None:
        raise AttributeError("A module made for a population has no weights while no population is being evaluated.")
    return here.block


@torch.library.custom_op("germline::layer", mutates_args=())
def layer(inputs: list[torch.Tensor], number: torch.Tensor, call: int) -> list[torch.Tensor]:
    """A layer of a whole block; vmap calls the rule below instead."""
    raise RuntimeError("A layer of a population was called outside of vmap.")


def layer_of_a_block(
    info: Any, in_dims: Any, inputs: list[torch.Tensor], number: torch.Tensor, call: int
) -> tuple[list[torch.Tensor], list[int]]:
    batched = [dim is not None for dim in in_dims[0]]
    first = [x if dim is None else x.movedim(dim, 0) for x, dim in zip(inputs, in_dims[0], strict=True)]
    outputs = current().calls[call](first, batched)
    return outputs, [0] * len(outputs)


torch.library.register_vmap(layer, layer_of_a_block)
