"""A module whose parameters are those of a whole block of members.

Every part of a copy of the user's module that owns trained parameters becomes its own twin: an object of the same
class, but for two things. Its parameters are read from the block at hand, and layers that have a rule compute all
members at once. The user's code runs unchanged under ``torch.func.vmap``, sees one member with the usual shapes, and
may read any parameter anywhere: there is no other copy of a weight that it could see by mistake.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from germline.genome import Genome
from germline.population.attention import attend, attends_to_itself
from germline.population.block import Block, current
from germline.population.convolution import convolution
from germline.population.dropout import SPATIAL, dropout
from germline.population.embedding import embedding
from germline.population.layer import Call, Layer, Rule, each
from germline.population.linear import linear, narrow_of_parts, parts, takes_parts
from germline.population.norm import has_kernel, layer_norm
from germline.population.pending import Epilogue, Pending, settled
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


def make_population_module(module: nn.Module, genome: Genome) -> nn.Module:
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
            make_population_layer(part, slots)
    return module


def with_dropout(module: nn.Module) -> nn.Module:
    """The module with dropout at work, though it is in evaluation mode; give it a copy."""
    for part in list(module.modules()):
        if type(part) in SPATIAL:
            become(part, {"forward": dropout})
    return module


def make_population_layer(part: nn.Module, slots: dict[str, int]) -> None:
    kind = type(part)
    body: dict[str, Any] = {name: property(reader(index)) for name, index in slots.items()}
    body["trained"] = slots
    rule = RULES.get(kind)
    if rule is not None:
        body["forward"] = forward_by(rule, Layer(kind, slots))
    if kind is nn.MultiheadAttention:
        body["forward"] = attention_forward
    if kind is nn.LayerNorm:
        body["forward"] = norm_forward
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


@dataclass
class Work:
    """A call of a layer, to be made once it is known what is done with its output."""

    module: nn.Module
    rule: Rule
    layer: Layer
    block: Block
    given: list[Any]
    spec: TreeSpec

    def __post_init__(self) -> None:
        self.tensors = [i for i, value in enumerate(self.given) if isinstance(value, torch.Tensor)]
        self.versions = [self.given[i]._version for i in self.tensors]

    def __call__(self, after: Epilogue) -> Any:
        shape_of_output: list[Any] = []

        def call(inputs: list[torch.Tensor], batched: list[bool]) -> list[torch.Tensor]:
            outputs, shape = self.rule(self.call(inputs, batched, after))
            shape_of_output.append(shape)
            return outputs

        outputs = self.block.through(self.inputs(), call)
        return tree_unflatten(outputs, shape_of_output[0])

    def inputs(self) -> list[torch.Tensor]:
        if current() is not self.block:
            raise RuntimeError("the output of a layer was used while another block was evaluated")
        if self.versions != [self.given[i]._version for i in self.tensors]:
            raise RuntimeError("the input of a layer was changed in place before its output was used")
        return [self.given[i] for i in self.tensors]

    def call(self, inputs: list[torch.Tensor], batched: list[bool], after: Epilogue) -> Call:
        def forward_of(member: int) -> Any:
            values = list(self.given)
            for i, x, has_members in zip(self.tensors, inputs, batched, strict=True):
                values[i] = x[member] if has_members else x
            args, kwargs = tree_unflatten(values, self.spec)
            return self.layer.kind.forward(self.module, *args, **kwargs)

        return Call(self.layer, self.module, self.block, inputs, batched, forward_of, after)


@dataclass
class Chained:
    """A call of a linear layer on the output of another one, which never is in memory."""

    first: Pending
    after: Epilogue  # of the first, when the second was called
    second: Work

    def __call__(self, after: Epilogue) -> Any:
        if self.first.made is not None and self.first.after == self.after:  # by somebody else, in the meantime
            return replace(self.second, given=[self.first.made])(after)
        producer = self.first.work
        assert isinstance(producer, Work)

        def call(inputs: list[torch.Tensor], batched: list[bool]) -> list[torch.Tensor]:
            given = parts(producer.call(inputs, batched, self.after))
            outputs, _ = narrow_of_parts(self.second.call([], [], after), given, inputs[0].shape[batched[0] : -1])
            return outputs

        (output,) = self.second.block.through(producer.inputs(), call)
        return output


def attention_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
    block: Block = current()
    args, kwargs = settled((args, kwargs))
    parts = ((self, "in_proj_weight", "in_proj_bias"), (self.out_proj, "weight", "bias"))
    whole = all({weight, bias} <= set(getattr(part, "trained", ())) for part, weight, bias in parts)
    if block.member is not None or not whole or not attends_to_itself(self, args, kwargs):
        return nn.MultiheadAttention.forward(self, *args, **kwargs)

    def project(part: nn.Module, weight: str, bias: str, x: torch.Tensor) -> torch.Tensor:
        slots: Any = part.trained
        layer = Layer(nn.Linear, {"weight": slots[weight], "bias": slots[bias]})
        out: torch.Tensor = Work(part, linear, layer, block, *tree_flatten(((x,), {})))(())
        return out

    return attend(self, block, project, (args or (kwargs["query"],))[0]), None


def norm_forward(self: Any, input: torch.Tensor) -> torch.Tensor:  # noqa: A002  # as torch calls it
    block: Block = current()
    x = settled(input)
    out: torch.Tensor
    if block.member is not None or not {"weight", "bias"} <= set(self.trained) or not has_kernel(self, x):
        out = nn.LayerNorm.forward(self, x)
    else:
        out = Work(self, layer_norm, Layer(nn.LayerNorm, self.trained), block, *tree_flatten(((x,), {})))(())
    return out


def forward_by(rule: Rule, layer: Layer) -> Callable[..., Any]:
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        block: Block = current()
        if block.member is not None:
            return layer.kind.forward(self, *args, **kwargs)
        first = args[0] if len(args) == 1 and not kwargs and isinstance(args[0], Pending) else None
        if first is not None and rule is linear and first.made is None and isinstance(first.work, Work):
            producer = first.work
            if producer.rule is linear and takes_parts(producer.layer, first.after, layer, block):
                return Pending.create(
                    Chained(first, first.after, Work(self, rule, layer, block, [], tree_flatten(((0,), {}))[1]))
                )
        if kwargs:  # rules know arguments by their place
            bound = inspect.signature(layer.kind.forward).bind(self, *args, **kwargs)
            args, kwargs = bound.args[1:], bound.kwargs
        given, spec = tree_flatten(settled((args, kwargs)))
        work = Work(self, rule, layer, block, given, spec)
        return Pending.create(work) if rule in LAZY else work(())

    return forward
