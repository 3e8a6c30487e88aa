"""A call of a layer with a block of members, which is what a rule is given, and the rule that loops over members."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from germline.population.block import Block
from germline.population.buffers import allocate
from germline.population.rules.pending import Epilogue, apply_epilogue


@dataclass(frozen=True)
class Layer:
    """A layer's class, and the numbers of its trained parameters in the genome."""

    kind: type[nn.Module]
    slots: dict[str, int]


@dataclass(frozen=True)
class LayerCall:
    """One call of a layer with a block of members."""

    layer: Layer
    module: Any  # the layer itself: its settings, and its parameters that are not trained
    block: Block
    inputs: list[Tensor]  # the tensors among the arguments, in their order
    batched: list[bool]  # which inputs differ between members: these have the members first
    forward_member: Callable[[int], Any]  # the layer's own forward for one member
    epilogue: Epilogue = ()  # what is to be done with the output

    @property
    def has_shared_input(self) -> bool:
        """Return whether all members see the same inputs."""
        return not any(self.batched)

    def inputs_of_members(self) -> list[Tensor]:
        """Return all inputs with the members first; those that are the same for all members are expanded."""
        size, pairs = self.block.size, zip(self.inputs, self.batched, strict=True)
        return [x if has_members else x.expand(size, *x.shape) for x, has_members in pairs]

    def is_separable(self, name: str) -> bool:
        """Return whether a parameter is a center that all members share plus noise, in the type of the arithmetic."""
        generation = self.block.generation
        if name not in self.layer.slots or not generation.candidates.shared:
            return False
        dtype = generation.get_dtype(self.block.slot(self.layer.slots[name]))
        return dtype in (torch.float32, torch.float64, generation.dtype)

    def weights(self, name: str) -> Tensor:
        """Return a parameter of all members, (members, *shape); one that is not trained is the same for all."""
        if name in self.layer.slots:
            return self.block.weights(self.layer.slots[name])
        fixed: Tensor = getattr(self.module, name)
        return fixed.expand(self.block.size, *fixed.shape)

    def optional_weights(self, name: str) -> Tensor | None:
        """Return a parameter of all members, or None where the layer has none, for instance no bias."""
        has_parameter = name in self.layer.slots or getattr(self.module, name) is not None
        return self.weights(name) if has_parameter else None


@dataclass(frozen=True)
class Rule:
    """Says how a kind of layer computes all members of a block at once; see ``germline.population.rules``."""

    compute: Callable[[LayerCall], Any]
    applies: Callable[[Any, dict[str, Any]], bool] = lambda module, arguments: True
    takes_epilogue: bool = False


def per_member(call: LayerCall) -> Any:
    """Run the layer's own forward, member by member: as fast as inference."""
    outputs: list[Tensor] = []
    for member in range(call.block.size):
        call.block.single_member = member
        try:
            results, spec = tree_flatten(apply_epilogue(call.forward_member(member), call.epilogue))
        finally:
            call.block.single_member = None
        outputs = outputs or [allocate((call.block.size, *x.shape), x) for x in results]
        for output, result in zip(outputs, results, strict=True):
            output[member] = result
    return tree_unflatten(outputs, spec)
