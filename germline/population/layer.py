"""A layer at work on a block: what every rule is given, and the rule that goes through the members one by one."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten

from germline.population.block import Block
from germline.population.buffers import empty
from germline.population.pending import Epilogue, apply_epilogue


@dataclass(frozen=True)
class Layer:
    """A layer's class, and the places of its parameters in the genome."""

    kind: type[nn.Module]
    slots: dict[str, int]


@dataclass(frozen=True)
class Call:
    """One call of a layer with a block of members."""

    layer: Layer
    module: Any  # the layer itself
    block: Block
    inputs: list[torch.Tensor]
    batched: list[bool]  # which inputs differ between members: these have the members first
    forward: Callable[[int], Any]  # the layer's own forward for one member
    after: Epilogue = ()  # what is to be done with the output, while it is at hand

    @property
    def shared_input(self) -> bool:
        return not any(self.batched)

    def separable(self, name: str) -> bool:
        """Whether a parameter is the same for all members but for their noise, in the type of the arithmetic."""
        generation = self.block.generation
        if name not in self.layer.slots or not generation.candidates.shared:
            return False
        own = generation.type_of(self.block.slot(self.layer.slots[name]))
        return own in (torch.float32, torch.float64, generation.dtype)

    def weights(self, name: str) -> torch.Tensor | None:
        """A parameter of all members, (members, *shape); one that is not trained is the same for all."""
        if name in self.layer.slots:
            return self.block.weights(self.layer.slots[name])
        fixed = getattr(self.module, name)
        return None if fixed is None else fixed.expand(self.block.size, *fixed.shape)


Outputs = tuple[list[torch.Tensor], Any]  # tensors with the members first, and the tree that they are the leaves of
Rule = Callable[[Call], Outputs]


def one(output: torch.Tensor) -> Outputs:
    """The answer of a rule that has one output."""
    return [output], tree_flatten(output)[1]


def each(call: Call) -> Outputs:
    """The layer's own forward, member by member: at the speed of inference, since that is what it is."""
    outputs: list[torch.Tensor] = []
    for member in range(call.block.size):
        with at_hand(call.block, member):
            output = call.forward(member)
            results, shape = tree_flatten(apply_epilogue(output, call.after) if call.after else output)
        if not outputs:
            outputs = [empty((call.block.size, *x.shape), x) for x in results]
        for output, result in zip(outputs, results, strict=True):
            output[member] = result
    return outputs, shape


@contextmanager
def at_hand(block: Block, member: int) -> Iterator[None]:
    block.member = member
    try:
        yield
    finally:
        block.member = None
