"""A module whose parameters are those of a whole block of members.

Every part of a copy of the user's module that owns trained parameters becomes its own twin: an object of the same
class, but for two things. Its parameters are read from the block at hand, and layers that have a rule compute all
members at once. The user's code runs unchanged under ``torch.func.vmap``, sees one member with the usual shapes, and
may read any parameter anywhere: there is no other copy of a weight that it could see by mistake.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from germline.genome import Genome
from germline.population.block import Block, current
from germline.population.convolution import convolution
from germline.population.dropout import SPATIAL, dropout
from germline.population.embedding import embedding
from germline.population.layer import Call, Layer, Rule, each
from germline.population.linear import linear
from germline.population.pending import After, Pending, settled
from germline.population.recurrent import cell, recurrent

RULES: dict[type[nn.Module], Rule] = {
    nn.Linear: linear,
    nn.Conv1d: convolution,
    nn.Conv2d: convolution,
    nn.Conv3d: convolution,
    nn.ConvTranspose1d: each,
    nn.ConvTranspose2d: each,
    nn.ConvTranspose3d: each,
    nn.Embedding: embedding,
    nn.LSTM: recurrent,
    nn.GRU: recurrent,
    nn.RNN: recurrent,
    nn.LSTMCell: cell,
    nn.GRUCell: cell,
    nn.RNNCell: cell,
    nn.Bilinear: each,
    nn.EmbeddingBag: each,
}
LAZY = (linear, convolution)  # what follows them can be done in the same pass
# Everything else (norms, attention, bare parameters, the user's own layers) computes as it does, under vmap, with the
# weights of the block: torch's own rules are as good as any that could be written here.


def twinned(module: nn.Module, genome: Genome) -> nn.Module:
    """The module, changed into its twin; give it a copy."""
    place = {name: index for index, slot in enumerate(genome.slots) for name in (slot.name, *slot.aliases)}
    for prefix, part in list(module.named_modules()):
        own = {
            name: f"{prefix}.{name}" if prefix else name
            for name in part._parameters
            if part._parameters[name] is not None
        }
        slots = {name: place[full] for name, full in own.items() if full in place}
        if slots:
            become_twin(part, slots)
    return module


def with_dropout(module: nn.Module) -> nn.Module:
    """The module with dropout at work, though it is in evaluation mode; give it a copy."""
    for part in list(module.modules()):
        if type(part) in SPATIAL:
            become(part, {"forward": dropout})
    return module


def become_twin(part: nn.Module, slots: dict[str, int]) -> None:
    kind = type(part)
    body: dict[str, Any] = {name: property(reader(index)) for name, index in slots.items()}
    rule = RULES.get(kind)
    if rule is not None:
        body["forward"] = forward_by(rule, Layer(kind, slots))
    if isinstance(part, nn.RNNBase):
        body |= RECURRENT
        del part._flat_weights
    for name in slots:
        del part._parameters[name]
    become(part, body)


# Recurrent layers keep a list of their weights beside the weights themselves.
RECURRENT: dict[str, Any] = {
    "_flat_weights": property(lambda self: [getattr(self, name, None) for name in self._flat_weights_names]),
    "_update_flat_weights": lambda self: None,
    "flatten_parameters": lambda self: None,
}


def become(part: nn.Module, body: dict[str, Any]) -> None:
    part.__class__ = type(type(part).__name__, (type(part),), body)


def reader(index: int) -> Callable[[nn.Module], torch.Tensor]:
    return lambda part: current().parameter(index)


def forward_by(rule: Rule, layer: Layer) -> Callable[..., Any]:
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        block: Block = current()
        if block.member is not None:
            return layer.kind.forward(self, *args, **kwargs)
        given, spec = tree_flatten(settled((args, kwargs)))
        tensors = [i for i, value in enumerate(given) if isinstance(value, torch.Tensor)]
        versions = [given[i]._version for i in tensors]

        def work(after: After) -> Any:
            shape_of_output: list[Any] = []

            def call(inputs: list[torch.Tensor], batched: list[bool]) -> list[torch.Tensor]:
                def forward_of(member: int) -> Any:
                    values = list(given)
                    for i, x, has_members in zip(tensors, inputs, batched, strict=True):
                        values[i] = x[member] if has_members else x
                    args, kwargs = tree_unflatten(values, spec)
                    return layer.kind.forward(self, *args, **kwargs)

                outputs, shape = rule(Call(layer, self, block, inputs, batched, forward_of, after))
                shape_of_output.append(shape)
                return outputs

            if current() is not block:
                raise RuntimeError("the output of a layer was used while another block was evaluated")
            if versions != [given[i]._version for i in tensors]:
                raise RuntimeError("the input of a layer was changed in place before its output was used")
            outputs = block.through([given[i] for i in tensors], call)
            return tree_unflatten(outputs, shape_of_output[0])

        return Pending.of(work) if rule in LAZY else work(())

    return forward
