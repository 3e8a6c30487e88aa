"""A block of members: their weights, generated when a layer first reads them."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch._functorch.pyfunctorch import temporarily_pop_interpreter_stack
from torch.overrides import _pop_mode, _push_mode
from torch.utils._pytree import tree_map

from germline.genome import Genome, Slot
from germline.kernels import kernel_device
from germline.noise import Field, Matrix, Noise, Stream, cached_tensor, scale_sigma
from germline.objective import Batch, iterate_tensors
from germline.population.buffers import ALIGNMENT, allocate
from germline.strategies.candidates import Candidates

# A function of tensors with the members first, and of which of them have members at all.
BlockFunction = Callable[[list[torch.Tensor], list[bool]], list[torch.Tensor]]


@dataclass
class Generation:
    """Everything that the blocks of a generation share: candidates, batch, and products that are equal for all."""

    candidates: Candidates
    batch: Batch | None
    genome: Genome
    dtype: torch.dtype | None  # of the arithmetic; None where each parameter has its own
    centers: dict[int, torch.Tensor] = field(default_factory=dict)
    read_slots: set[int] = field(default_factory=set)  # the parameters that some layer has read
    products: dict[tuple[Any, ...], tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    block_weights: dict[int, torch.Tensor] = field(default_factory=dict)  # of its only block, if they are made before

    def get_dtype(self, slot: Slot) -> torch.dtype:
        """Return the type in which a parameter is used."""
        return self.dtype or slot.dtype

    def center(self, index: int) -> torch.Tensor:
        """Return a parameter of the center that begins at an aligned address; on a CPU it may be a view."""
        if index not in self.centers:
            slot = self.genome.slots[index]
            part = self.candidates.center[slot.start : slot.stop]
            is_aligned = part.device.type == "cpu" and part.data_ptr() % ALIGNMENT == 0
            self.centers[index] = (part if is_aligned else part.clone()).view(slot.shape).to(self.get_dtype(slot))
        return self.centers[index]

    def share_product(self, layer: object, x: torch.Tensor, product: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Return a layer's product with x; where x is part of the batch, all blocks use the first block's product.

        Two threads that ask at the same time both compute it, with the same bits.
        """
        memory = x.untyped_storage().data_ptr() if x.layout == torch.strided else 0
        inputs = () if self.batch is None else iterate_tensors([self.batch.args, self.batch.kwargs])
        strided = (tensor for tensor in inputs if tensor.layout == torch.strided)
        if not memory or all(memory != tensor.untyped_storage().data_ptr() for tensor in strided):
            return product()
        key = (layer, x.data_ptr(), tuple(x.shape), x.stride(), x._version)
        if key not in self.products:
            self.products[key] = (product(), x)  # with x, whose memory must not become another tensor's
        return self.products[key][0]


@dataclass
class Block:
    """Some members of a generation, evaluated together by one thread."""

    generation: Generation
    members: NDArray[np.int64]
    vmap_index: torch.Tensor | None = None  # a member's position in the block, as vmap shows it; None outside of vmap
    single_member: int | None = None  # the position of the member that is evaluated alone, if one is
    functions: list[BlockFunction] = field(default_factory=list)  # those that vmap is calling now
    dropout_offset: int = 0  # elements of the dropout stream that have been used
    weights_by_slot: dict[int, torch.Tensor] = field(default_factory=dict)
    vmap_weights: dict[int, torch.Tensor] = field(default_factory=dict)  # the same tensors, as vmap shows them
    keeps_factors: bool = False  # whether factors stay in memory, for a block that is evaluated step by step
    is_taped: bool = False  # whether a tape may be made of its operations, which knows torch's, and not our kernels
    factors_by_slot: dict[tuple[int, torch.dtype], tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        candidates = self.generation.candidates
        self.noise: Noise = candidates.field.members(self.members, candidates.generation, candidates.center.device)
        # members that differ in nothing but the sign of their noise share its address
        self.addresses, self.member_address = np.unique(self.noise.addresses, return_inverse=True)
        self.unsigned_field = Field(candidates.field.seed, candidates.field.kind)
        self.weights_by_slot.update(self.generation.block_weights)

    @property
    def size(self) -> int:
        """Return the number of members."""
        return int(self.members.size)

    def slot(self, index: int) -> Slot:
        """Return a parameter's place in the genome."""
        return self.generation.genome.slots[index]

    def weights(self, index: int) -> torch.Tensor:
        """Return a parameter of all members: (members, *shape)."""
        if index not in self.weights_by_slot:
            slot, candidates = self.slot(index), self.generation.candidates
            dtype, shape = self.generation.get_dtype(slot), (self.size, slot.stop - slot.start)
            if kernel_device(candidates.center.device).type == "cuda":  # kernels there round to the type themselves
                out = candidates.center.new_empty(shape, dtype=dtype)
            else:
                out = allocate(shape, candidates.center)
            weights = candidates.weights(self.members, slot.start, slot.stop, out)
            self.weights_by_slot[index] = weights.view(self.size, *slot.shape).to(dtype)
            self.generation.read_slots.add(index)
        return self.weights_by_slot[index]

    def parameter(self, index: int) -> torch.Tensor:
        """Return a parameter as the code of a module sees it: that of one member, of the usual shape."""
        if self.single_member is not None:
            return self.weights(index)[self.single_member]
        if index not in self.vmap_weights:
            (self.vmap_weights[index],) = self.call_once([], lambda inputs, batched: [self.weights(index)])
        return self.vmap_weights[index]

    def call_once(self, inputs: Sequence[torch.Tensor], function: BlockFunction) -> list[torch.Tensor]:
        """Have vmap call a function once for the whole block: its inputs and outputs have the members first."""
        assert self.vmap_index is not None
        functorch = torch._C._functorch
        level = functorch.maybe_get_level(self.vmap_index)
        if functorch.maybe_current_level() == level:  # what a custom operator does, without its overhead
            unwrapped = [functorch._unwrap_batched(x, level) for x in inputs]
            with outside_of_vmap():
                members_first = [x if dim is None else x.movedim(dim, 0) for x, dim in unwrapped]
                results = function(members_first, [dim is not None for _, dim in unwrapped])
            return [functorch._add_batch_dim(x, 0, level) for x in results]
        self.functions.append(function)  # the user's code is in another transform
        try:
            outputs: list[torch.Tensor] = layer(list(inputs), self.vmap_index, len(self.functions) - 1)
        finally:
            self.functions.pop()  # it refers to this block: a cycle, which would live until garbage is collected
        return outputs

    @contextmanager
    def select(self, member: int) -> Iterator[None]:
        """Have modules read the parameters of one member, by its position in the block."""
        self.single_member = member
        try:
            yield
        finally:
            self.single_member = None

    # The noise apart from the center, for layers that are linear in their weights

    def matrix(self, index: int | None) -> Matrix | None:
        """Return the low-rank matrix of a parameter's noise, or None where it is dense, or there is no parameter."""
        if index is None or not self.generation.candidates.shared:
            return None
        slot = self.slot(index)
        return next((m for m in self.generation.candidates.field.matrices if m.start == slot.start), None)

    def scales(self, index: int) -> torch.Tensor:
        """Return the factor of each member's noise, sigma with its sign, in the type of the center: (members,)."""
        self.generation.read_slots.add(index)
        candidates = self.generation.candidates
        signs = cached_tensor(self.noise.signs, candidates.center.device).to(candidates.center.dtype)
        if isinstance(candidates.sigma, torch.Tensor):
            return signs
        return signs * scale_sigma(candidates.sigma, candidates.field.unit(self.matrix(index)), candidates.center)

    def factors(self, index: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Return A and B of each address: (addresses, rows, rank) and (addresses, columns, rank)."""
        if (index, dtype) in self.factors_by_slot:
            return self.factors_by_slot[index, dtype]
        matrix = self.matrix(index)
        assert matrix is not None
        a, b = (factor.to(dtype) for factor in self.unsigned_noise(slice(None)).factors(matrix))
        if self.keeps_factors:
            self.factors_by_slot[index, dtype] = a, b
        return a, b

    def drop_weights(self) -> None:
        """Let go of the weights of the members, except for small ones, such as those of norms."""
        for index in [i for i in self.weights_by_slot if len(self.slot(i).shape) > 1]:
            del self.weights_by_slot[index]

    def dense_noise(self, index: int, dtype: torch.dtype) -> torch.Tensor:
        """Return the integers of the dense noise of all addresses: (addresses, *shape)."""
        slot = self.slot(index)
        return self.unsigned_noise(slice(None)).integers((slot.start, slot.stop), dtype=dtype).view(-1, *slot.shape)

    def dense_noise_at(self, index: int, addresses: slice, dtype: torch.dtype) -> torch.Tensor:
        """Return the dense noise of some addresses, (addresses, *shape); times sigma where sigma is a vector."""
        slot, noise = self.slot(index), self.unsigned_noise(addresses)
        sigma = self.generation.candidates.sigma
        if isinstance(sigma, torch.Tensor):
            sigma = sigma[slot.start : slot.stop]
            values = noise.perturb(torch.zeros_like(sigma), sigma, start=slot.start)
        else:
            integer_dtype = dtype if dtype in (torch.float32, torch.float64) else torch.int8
            values = noise.integers((slot.start, slot.stop), dtype=integer_dtype)
        return values.view(-1, *slot.shape).to(dtype)

    def unsigned_noise(self, addresses: slice) -> Noise:
        """Return the noise of some addresses, without signs."""
        candidates = self.generation.candidates
        return self.unsigned_field.members(self.addresses[addresses], candidates.generation, candidates.center.device)

    def draw_dropout_mask(self, shape: tuple[int, ...], probability: float) -> torch.Tensor:
        """Return which elements dropout keeps, a function of the members' addresses: (members, *shape)."""
        count = int(np.prod(shape))
        span = (self.dropout_offset, self.dropout_offset + count)
        self.dropout_offset += count
        drop = min(65536, round(probability * 65536))
        return (self.noise.halves(span, Stream.DROPOUT) >= drop).view(self.size, *shape)


@contextmanager
def outside_of_vmap() -> Iterator[None]:
    """Leave vmap for a while, and the modes that intercept functions of torch."""
    modes = [_pop_mode() for _ in range(torch._C._len_torch_function_stack())]  # type: ignore[no-untyped-call]
    try:
        with temporarily_pop_interpreter_stack():
            yield
    finally:
        for mode in reversed(modes):
            _push_mode(mode)  # type: ignore[no-untyped-call]


class CurrentBlock(threading.local):
    """The block that this thread is evaluating."""

    block: Block | None = None

    def get(self) -> Block:
        """Return the block, or raise AttributeError: modules read their parameters as attributes."""
        if self.block is None:
            raise AttributeError("A population module has no weights while no population is being evaluated.")
        return self.block

    @contextmanager
    def set(self, block: Block) -> Iterator[Block]:
        """Make a block the current one of this thread."""
        self.block = block
        try:
            yield block
        finally:
            self.block = None

    def find_whole(self) -> Block | None:
        """Return the block if code runs for all of its members at once, and not in a transform of the user's."""
        block, functorch = self.block, torch._C._functorch
        if block is None or block.vmap_index is None or block.single_member is not None:
            return None
        return block if functorch.maybe_current_level() == functorch.maybe_get_level(block.vmap_index) else None


current_block = CurrentBlock()


class StandIn(torch.Tensor):
    """Stands for a trained parameter where code goes through a module's parameters, as ``next(self.parameters())``.

    Questions about its type, its device or its shape are answered without making any weights. Every other function
    of torch gets the parameter of the current block instead.
    """

    slot: int

    @staticmethod
    def create(index: int, parameter: torch.Tensor) -> "StandIn":
        """Return what stands for a parameter, by its number in the genome."""
        # code that gets past __torch_function__ reads NaN, which the check notices
        value = torch.full((), float("nan"), dtype=parameter.dtype, device=parameter.device)
        stand_in = value.expand(parameter.shape).as_subclass(StandIn)
        stand_in.slot = index
        stand_in._is_param = True  # for isinstance(..., nn.Parameter)
        return stand_in

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Answer questions about the parameter, or call a function with the parameter of the current block."""
        if function in QUESTIONS:
            with torch._C.DisableTorchFunctionSubclass():
                return function(*args, **(kwargs or {}))
        args, kwargs = tree_map(cls.read, (args, kwargs or {}))
        return function(*args, **kwargs)

    @staticmethod
    def read(value: Any) -> Any:
        """Return the parameter of the current block for what stands for it, and any other value as it is."""
        return current_block.get().parameter(value.slot) if isinstance(value, StandIn) else value

    def __deepcopy__(self, memo: Any) -> "StandIn":
        """Return the same object, which never changes."""
        return self


PROPERTIES = (
    "dtype device shape ndim requires_grad layout is_cuda is_cpu is_meta is_sparse is_quantized is_leaf grad grad_fn"
)
METHODS = "size dim numel nelement is_floating_point is_complex element_size get_device __hash__"
QUESTIONS = {getattr(torch.Tensor, name).__get__ for name in PROPERTIES.split()}
QUESTIONS |= {getattr(torch.Tensor, name) for name in METHODS.split()}
QUESTIONS |= {torch.is_floating_point, torch.is_complex, torch.numel}


@torch.library.custom_op("germline::layer", mutates_args=())
def layer(inputs: list[torch.Tensor], vmap_index: torch.Tensor, function: int) -> list[torch.Tensor]:
    """Fail: vmap calls ``call_block_function`` instead, and nothing else may call a layer of a block."""
    raise RuntimeError("A layer of a population module was called outside of vmap.")


def call_block_function(
    info: Any, in_dims: Any, inputs: list[torch.Tensor], vmap_index: torch.Tensor, function: int
) -> tuple[list[torch.Tensor], list[int]]:
    """Call a function of the current block with the members first: the rule of ``germline::layer`` under vmap."""
    batched = [dim is not None for dim in in_dims[0]]
    members_first = [x if dim is None else x.movedim(dim, 0) for x, dim in zip(inputs, in_dims[0], strict=True)]
    outputs = current_block.get().functions[function](members_first, batched)
    return outputs, [0] * len(outputs)


torch.library.register_vmap(layer, call_block_function)
