"""The plan by which members are evaluated, which is chosen once for a run, and the size of its blocks."""

from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from germline.genome import Genome
from germline.objective import Batch, device_memory, iterate_tensors, seeded_generators

DType = Literal["auto", "float32", "bfloat16"]
Method = Literal["population", "vmap", "loop", "isolated"]
METHODS: dict[Method, str] = {
    "population": "all members of a block at once",
    "vmap": "all members of a block at once, with all their weights in memory",
    "loop": "member by member",
    "isolated": "member by member, each on a new copy of the model with the same random numbers",
}

# On a CPU a block is what stays in the processor's caches, not what the machine could hold; on a GPU it is large enough
# to keep the GPU busy, and to make launches and Python small compared with the work.
BLOCK_BYTES = 96 << 20
LARGEST_BLOCK = 64
LARGEST_GPU_BLOCK = 4096
GPU_MEMORY_PARTS = 8  # a block may fill one of this many equal parts of a GPU's memory
LIVE_TENSORS = 2  # of the largest size at the same time: an input and an output

# A CPU gets enough blocks for many cores, if the Python code of more blocks makes a generation little slower on few.
# Work is measured in elements of tensors that a member computes, of roughly a nanosecond each.
MANY_CORES = 16
FEW_MEMBERS = 32  # of a block, down to which there is one for each of many cores at any cost
TOLERATED = 0.12  # the part of a generation's processor time by which more blocks may prolong it
BLOCK_OVERHEAD, OPERATION_OVERHEAD = 1_100_000, 250_000  # elements: of a block, and of each of its operations
ELEMENTS_PER_FLOP = 0.0085
ELEMENTS_PER_PARAMETER = 2  # with dense noise
FUSED = ("aten::relu", "aten::max_pool2d")


@dataclass(frozen=True)
class Plan:
    """Says how members are evaluated. It is chosen once for a run, never by timing, and is part of its header."""

    block: int  # members that are evaluated together
    method: Method
    vectorized: bool = True  # whether the score, too, is computed for all members at once
    dtype: Literal["float32", "bfloat16"] = "float32"  # of the arithmetic; float32 stands for the module's own types
    dropout: bool = False
    slices: int = 1  # parts of a batch whose gradients are computed separately and summed in order
    renewed: bool = False  # whether each block begins with the module's first state, inputs and random numbers
    private: bool = False  # whether members share no tensor that the module's code makes
    looped: tuple[str, ...] = ()  # the names of the parts of the module that are run for one member at a time

    def __post_init__(self) -> None:
        object.__setattr__(self, "looped", tuple(self.looped))  # a list in JSON

    @property
    def one_by_one(self) -> bool:
        """Return whether the module is run for one member at a time."""
        return self.method in ("loop", "isolated")


@dataclass(frozen=True)
class PlanChoice:
    """A plan, and the reason why it is not a faster one."""

    plan: Plan
    reason: str | None = None
    seconds: float = 0.0  # of a member

    def sentence(self) -> str:
        """Return the choice, what it costs and its reason, as a sentence for the user."""
        how = METHODS[self.plan.method] + (", in float32" if "bfloat16" in (self.reason or "") else "")
        if self.plan.block > 1 and not self.plan.vectorized:
            how += ", and scored one by one"
        milliseconds = f"{1e3 * self.seconds:.{0 if self.seconds >= 0.01 else 3}f}"
        price = f" (about {milliseconds} ms each, with the score)" if self.seconds else ""
        return f"This model is evaluated in a slower way, {how}{price}, because {self.reason}."


class SlowPath(UserWarning):
    """Warns that a model is evaluated by a slower path than it might be."""


def block_size(
    population: int,
    genome: Genome,
    module: nn.Module,
    batch: Batch | None,
    copies: int = 1,
    processes: int = 1,
    largest: int = LARGEST_BLOCK,
    low_rank: bool | None = None,
) -> int:
    """Return how many members are evaluated together.

    It is a function of the problem and of the kind of device, never of how busy a machine is: bits depend on it.

    Args:
        population: the number of members.
        genome: the layout of the module's trained parameters.
        module: the module, on the device that evaluates it.
        batch: a batch such as the module will see; None for an objective of the whole model.
        copies: how many arrays of the size of a member's weights exist while they are generated.
        processes: the processes of the fleet; there is at least one block for each.
        largest: the most members of a block on a CPU.
        low_rank: whether the noise is of low rank; if None, the blocks are as large as they may be.

    Returns:
        An even number of members.
    """
    forward = measure_forward(module, batch)
    member_bytes = 4 * (copies * genome.size + LIVE_TENSORS * forward.largest)
    device = next(module.parameters()).device
    most, memory = largest, BLOCK_BYTES
    if device.type == "cuda":
        most, memory = LARGEST_GPU_BLOCK, device_memory(device) // GPU_MEMORY_PARTS
    largest = max(2, min(most, memory // member_bytes))
    if device.type == "cpu" and low_rank is not None and batch is not None:
        processes = max(processes, count_blocks(population, largest, genome, forward, low_rank))
    return even_block(population, largest, processes)


def count_blocks(population: int, largest: int, genome: Genome, forward: "Forward", low_rank: bool) -> int:
    """Return how many blocks many cores should share: a power of two, fewer where members are cheap."""
    work = forward.elements + ELEMENTS_PER_FLOP * (forward.inner_flops if low_rank else forward.flops)
    work += 0 if low_rank else ELEMENTS_PER_PARAMETER * genome.size
    overhead = BLOCK_OVERHEAD + OPERATION_OVERHEAD * forward.operations
    fewest = max(-(-population // largest), min(MANY_CORES, population // FEW_MEMBERS))
    affordable = fewest + TOLERATED * (fewest + population * work / overhead)
    return min(MANY_CORES, 1 << (int(affordable).bit_length() - 1), population // 2)


def even_block(population: int, largest: int, processes: int) -> int:
    """Return the size of equal blocks of whole pairs, of which the last needs little padding.

    There is a power of two of them, so that any usual number of cores is evenly loaded, or one for each process.

    >>> even_block(256, 64, 3), even_block(250, 64, 1), even_block(768, 64, 96)
    (64, 64, 8)
    """
    blocks = max(processes, 1 << (-(-population // largest) - 1).bit_length())
    return 2 * -(-population // (2 * blocks))


@torch.no_grad()
def measure_forward(module: nn.Module, batch: Batch | None) -> "Forward":
    """Return what the module computes from a batch."""
    batch = batch.copy() if batch is not None else None
    watch = Forward(module, batch)
    if batch is not None:
        # an operator such as FlexAttention runs in no mode; then what is computed before it counts
        with seeded_generators(0), watch, suppress(NotImplementedError):
            module(*batch.args, **batch.kwargs)
    return watch


class Forward(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Measures what is computed while it is entered, other than views of weights.

    Attributes:
        largest: The elements of the largest tensor.
        elements: The elements of all tensors that are neither views nor computed in the pass of another operation.
        operations: The number of operations that compute tensors.
        flops: Of products with weights.
        inner_flops: The part of them that is not a product of the batch.
    """

    def __init__(self, module: nn.Module, batch: Batch | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.weights = {storage_of(parameter) for parameter in module.parameters()}
        inputs = iterate_tensors([batch.args, batch.kwargs]) if batch is not None else iter(())
        self.inputs = {storage_of(tensor) for tensor in inputs}
        self.largest = self.elements = self.operations = 0
        self.flops = self.inner_flops = 0.0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # otherwise torch imports its compiler at the first call, which takes a second

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function of torch and look at the tensors that it returns."""
        output = function(*args, **(kwargs or {}))
        given = list(iterate_tensors([args, kwargs or {}]))
        known = {storage_of(tensor) for tensor in given}
        outputs = [
            x for x in iterate_tensors(output) if x.layout == torch.strided and storage_of(x) not in self.weights
        ]
        self.largest = max([self.largest, *(x.numel() for x in outputs)])
        computed = [x for x in outputs if storage_of(x) not in known]
        if computed:
            name = function._schema.name
            self.operations += 1
            self.elements += sum(x.numel() for x in computed) if not name.startswith(FUSED) else 0
            self.count_flops(name, given, computed[0])
        return output

    def count_flops(self, name: str, given: list[Tensor], output: Tensor) -> None:
        """Count a product with weights: each of its elements is multiplied once for each row or position."""
        matrices = [x for x in given if x.dim() > 1 and storage_of(x) in self.weights]
        if not matrices or "embedding" in name or not output.dim():
            return
        channels = output.shape[1 if "conv" in name and output.dim() > 1 else -1]
        flops = 2.0 * sum(x.numel() for x in matrices) * output.numel() / max(channels, 1)
        self.flops += flops
        if not any(storage_of(x) in self.inputs for x in given):
            self.inner_flops += flops


def storage_of(tensor: Tensor) -> int:
    """Return the address of a tensor's memory."""
    return tensor.untyped_storage().data_ptr() if tensor.layout == torch.strided else id(tensor)
