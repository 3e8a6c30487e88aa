"""The plan by which members are evaluated, which is chosen once for a run, and the size of its blocks."""

from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
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


@dataclass(frozen=True)
class Plan:
    """Says how members are evaluated. It is chosen once for a run, never by timing, and is part of its header."""

    block: int  # members that are evaluated together
    method: Method
    vectorized: bool = True  # whether the score, too, is computed for all members at once
    dtype: Literal["float32", "bfloat16"] = "float32"  # of the arithmetic; float32 stands for the module's own types
    dropout: bool = False
    slices: int = 1  # parts of a batch whose gradients are computed separately and summed in order
    renewed: bool = False  # whether each block begins with the module's first state, and the same random numbers
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

    Returns:
        An even number of members.
    """
    member_bytes = 4 * (copies * genome.size + LIVE_TENSORS * measure_largest_tensor(module, batch))
    device = next(module.parameters()).device
    most, memory = largest, BLOCK_BYTES
    if device.type == "cuda":
        most, memory = LARGEST_GPU_BLOCK, device_memory(device) // GPU_MEMORY_PARTS
    return even_block(population, max(2, min(most, memory // member_bytes)), processes)


def even_block(population: int, largest: int, processes: int) -> int:
    """Return the size of equal blocks of whole pairs, of which the last needs little padding.

    There is a power of two of them, so that any usual number of cores is evenly loaded, or one for each process.

    >>> even_block(256, 64, 3), even_block(250, 64, 1), even_block(768, 64, 96)
    (64, 64, 8)
    """
    blocks = max(processes, 1 << (-(-population // largest) - 1).bit_length())
    return 2 * -(-population // (2 * blocks))


@torch.no_grad()
def measure_largest_tensor(module: nn.Module, batch: Batch | None) -> int:
    """Return the number of elements of the largest tensor that the module computes from a batch."""
    if batch is None:
        return 0
    batch = batch.copy()
    # an operator such as FlexAttention runs in no mode; then what is computed before it counts
    with seeded_generators(0), LargestTensor(module) as watch, suppress(NotImplementedError):
        module(*batch.args, **batch.kwargs)
    return int(watch.elements)


class LargestTensor(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Measures the largest tensor that is computed while it is entered, other than views of weights."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.weights = {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}
        self.elements = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # otherwise torch imports its compiler at the first call, which takes a second

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function of torch and look at the tensors that it returns."""
        output = function(*args, **(kwargs or {}))
        for tensor in iterate_tensors(output):
            if tensor.layout == torch.strided and tensor.untyped_storage().data_ptr() not in self.weights:
                self.elements = max(self.elements, tensor.numel())
        return output
