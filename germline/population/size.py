"""How many members are evaluated together: the one place that decides it."""

from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from germline.genome import Genome
from germline.objective import Batch, device_memory, iterate_tensors, seeded_generators

# Of a block: on a CPU what stays near the processor, not what the machine could hold; on a card enough to keep it busy
# and to make launches, and Python, small beside the work.
BLOCK_BYTES = 96 << 20
LARGEST_BLOCK = 64
LARGEST_ON_A_CARD = 4096
PART_OF_A_CARD = 8  # the part of its memory that a block may fill, one in so many
LIVE = 2  # tensors of the largest size that are alive at once: an input and an output


def block_size(
    population: int, genome: Genome, module: nn.Module, batch: Batch | None, copies: int = 1, processes: int = 1
) -> int:
    """A function of the problem and of the kind of device, never of how busy a machine is.

    ``copies`` of a member's weights are held while it is made; there is at least one block for each of the
    ``processes`` of a fleet.
    """
    one = 4 * (copies * genome.size + LIVE * widest(module, batch))
    device = next(module.parameters()).device
    most, memory = LARGEST_BLOCK, BLOCK_BYTES
    if device.type == "cuda":
        most, memory = LARGEST_ON_A_CARD, device_memory(device) // PART_OF_A_CARD
    largest = max(2, min(most, memory // one))
    return even_block(population, largest, processes)


def even_block(population: int, largest: int, processes: int) -> int:
    """The size of equal blocks, of whole pairs, so that little of the last one is padding.

    There is a power of two of them, so that any usual number of cores is evenly loaded, or one for each process.

    >>> even_block(256, 64, 3), even_block(250, 64, 1), even_block(768, 64, 96)
    (64, 64, 8)
    """
    blocks = max(processes, 1 << (-(-population // largest) - 1).bit_length())
    return 2 * -(-population // (2 * blocks))


@torch.no_grad()
def widest(module: nn.Module, batch: Batch | None) -> int:
    """The elements of the largest tensor that is made while the module works on a batch."""
    if batch is None:
        return 0
    batch = batch.copy()
    with seeded_generators(0), Watch(module) as watch:
        module(*batch.args, **batch.kwargs)
    return int(watch.largest)


class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees every tensor that is made, but for those that are weights in another shape."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.weights = {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}
        self.largest = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        for tensor in iterate_tensors(made):
            if tensor.layout == torch.strided and tensor.untyped_storage().data_ptr() not in self.weights:
                self.largest = max(self.largest, tensor.numel())
        return made
