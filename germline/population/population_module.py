"""A population module: the user's module with layers replaced, so that it computes a whole block of members.

Every part of a copy of the user's module that owns trained parameters changes its class to a subclass that differs in
two things. Its parameters are read from the current block, and if it has a rule (``germline.population.rules``), it
computes all members at once. The user's code runs unchanged under ``torch.func.vmap``, sees one member with the usual
shapes, and may read any parameter anywhere: there is no other copy of a weight that it could read by mistake.
"""

import inspect
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from germline.genome import Genome
from germline.population.block import Block, StandIn, current_block
from germline.population.outputs import join_output, split_output
from germline.population.rules import RULES
from germline.population.rules.dropout import SPATIAL, dropout_forward
from germline.population.rules.layer import Layer, LayerCall, Rule
from germline.population.rules.linear import can_chain, linear, multiply_parts, split
from germline.population.rules.pending import Epilogue, Pending, materialize

# Recurrent layers have a list of their weights in addition to the weights themselves.
RECURRENT: dict[str, Any] = {
    "_flat_weights": property(lambda self: [getattr(self, name, None) for name in self._flat_weights_names]),
    "_update_flat_weights": lambda self: None,
    "flatten_parameters": lambda self: None,
}


def make_population_module(module: nn.Module, genome: Genome, looped: Collection[str] = ()) -> nn.Module:
    """Change a module, which should be a copy, into a population module and return it.

    Args:
        module: the module to be changed.
        genome: the layout of its trained parameters.
        looped: the names of the parts that are run for one member at a time.
    """
    numbers = {name: index for index, slot in enumerate(genome.slots) for name in (slot.name, *slot.aliases)}
    stand_ins: dict[int, StandIn] = {}
    for prefix, part in list(module.named_modules()):
        names = {name: f"{prefix}.{name}".lstrip(".") for name, value in part._parameters.items() if value is not None}
        slots = {name: numbers[full_name] for name, full_name in names.items() if full_name in numbers}
        rule = find_rule(part) if slots else None
        if prefix in looped:
            rule = Rule(run_per_member)
        if slots or rule is not None:
            replace_layer(part, slots, rule)
        for name, index in slots.items():  # tied parameters have one stand-in
            stand_ins.setdefault(index, StandIn.create(index, cast(Tensor, part._parameters[name])))
            part._parameters[name] = cast(nn.Parameter, stand_ins[index])
    return module


def find_rule(part: nn.Module) -> Rule | None:
    """Return the rule of a layer, if its weights are its parameters.

    Old weight norm and pruning compute a weight from other parameters, and keep it as a tensor of no kind.
    """
    is_computed = any(isinstance(value, Tensor) for value in vars(part).values())
    return None if is_computed else RULES.get(type(part))


def replace_layer(part: nn.Module, slots: dict[str, int], rule: Rule | None) -> None:
    """Have a part of a module read its trained parameters from the current block, and compute by its rule."""
    attributes: dict[str, Any] = {name: make_parameter(index) for name, index in slots.items()}
    attributes["trained_slots"] = slots
    if rule is not None:
        attributes["forward"] = make_forward(rule, Layer(type(part), slots))
    if isinstance(part, nn.RNNBase):
        attributes |= RECURRENT
        del part._flat_weights
    swap_class(part, attributes)


def enable_dropout(module: nn.Module) -> nn.Module:
    """Switch on dropout in a module, which should be a copy, though it is in evaluation mode, and return it."""
    for part in list(module.modules()):
        if type(part) in SPATIAL:
            swap_class(part, {"forward": dropout_forward})
    return module


def swap_class(part: nn.Module, attributes: dict[str, Any]) -> None:
    """Change an object's class to a subclass of the same name with these attributes."""
    part.__class__ = type(type(part).__name__, (type(part),), attributes)


def make_parameter(index: int) -> property:
    """Return the property by which a part reads a parameter of the current block."""
    return property(lambda part: current_block.get().parameter(index))


def make_forward(rule: Rule, layer: Layer) -> Callable[..., Any]:
    """Return the forward of a part whose layer has a rule."""
    signature = inspect.signature(layer.kind.forward)

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        block = current_block.get()
        if block.single_member is not None:
            return layer.kind.forward(self, *args, **kwargs)
        first = args[0] if len(args) == 1 and not kwargs and rule.compute is linear else None
        if isinstance(first, Pending) and has_linear_producer(first, layer, block):
            second = DeferredCall(self, rule, layer, block, [], tree_flatten(((0,), {}))[1])
            return Pending.create(ChainedCall(first, first.epilogue, second))
        args, kwargs = materialize((args, kwargs))
        if rule.compute is not run_per_member:  # which passes on the arguments as they are: forward may be a wrapper
            bound = signature.bind(self, *args, **kwargs)
            if not rule.applies(self, {name: value for name, value in bound.arguments.items() if name != "self"}):
                return layer.kind.forward(self, *args, **kwargs)
            args, kwargs = bound.args[1:], bound.kwargs
        call = DeferredCall(self, rule, layer, block, *tree_flatten((args, kwargs)))
        return Pending.create(call) if rule.takes_epilogue else call(())

    return forward


@dataclass
class DeferredCall:
    """A call of a layer, to be made when it is known what is done with its output."""

    module: nn.Module
    rule: Rule
    layer: Layer
    block: Block
    arguments: list[Any]
    spec: TreeSpec  # of the arguments

    def __post_init__(self) -> None:
        self.tensors = [i for i, value in enumerate(self.arguments) if isinstance(value, Tensor)]
        self.versions = [self.arguments[i]._version for i in self.tensors]

    def __call__(self, epilogue: Epilogue) -> Any:
        """Return the layer's output for the member that vmap shows."""
        templates: list[Any] = []

        def compute(inputs: list[Tensor], batched: list[bool]) -> list[Tensor]:
            try:
                output = self.rule.compute(self.make_layer_call(inputs, batched, epilogue))
            except Exception as error:
                rule = f"the rule {self.rule.compute.__name__} of {self.layer.kind.__name__}"
                raise RuntimeError(f"in {rule}, {type(error).__name__}: {error}") from error
            tensors, template = split_output(output)
            templates.append(template)
            return tensors

        return join_output(self.block.call_once(self.inputs(), compute), templates[0])

    def inputs(self) -> list[Tensor]:
        """Return the tensors among the arguments."""
        if current_block.get() is not self.block:
            raise RuntimeError("the output of a layer was used while another block was evaluated")
        if self.versions != [self.arguments[i]._version for i in self.tensors]:
            raise RuntimeError("the input of a layer was changed in place before its output was used")
        return [self.arguments[i] for i in self.tensors]

    def make_layer_call(self, inputs: list[Tensor], batched: list[bool], epilogue: Epilogue) -> LayerCall:
        """Return the call as a rule takes it."""

        def forward_member(member: int) -> Any:
            values = list(self.arguments)
            for i, x, has_members in zip(self.tensors, inputs, batched, strict=True):
                values[i] = x[member] if has_members else x
            args, kwargs = tree_unflatten(values, self.spec)
            return self.layer.kind.forward(self.module, *args, **kwargs)

        return LayerCall(self.layer, self.module, self.block, inputs, batched, forward_member, epilogue)


def run_per_member(call: LayerCall) -> Any:
    """Run a part of a module for one member after the other; its output may hold more than tensors."""
    rows: list[list[Tensor]] = []
    template: Any = None
    for member in range(call.block.size):
        with call.block.select(member):
            tensors, template = split_output(call.forward_member(member))
        rows.append(tensors)
    return join_output([torch.stack(tensors) for tensors in zip(*rows, strict=True)], template)


def has_linear_producer(x: Pending, consumer: Layer, block: Block) -> bool:
    """Return whether x is the output of a linear layer that is not computed, and need not be for the next layer."""
    call = x.call
    if x.value is not None or not isinstance(call, DeferredCall) or call.rule.compute is not linear:
        return False
    return can_chain(call.layer, x.epilogue, consumer, block)


@dataclass
class ChainedCall:
    """A call of a linear layer on the output of another one, which never is in memory."""

    first: Pending
    first_epilogue: Epilogue  # when the second was called
    second: DeferredCall

    def __call__(self, epilogue: Epilogue) -> Any:
        """Return the second layer's output for the member that vmap shows."""
        if self.first.value is not None and self.first.epilogue == self.first_epilogue:  # other code has used it
            return replace(self.second, arguments=[self.first.value])(epilogue)
        producer = self.first.call
        assert isinstance(producer, DeferredCall)

        def compute(inputs: list[Tensor], batched: list[bool]) -> list[Tensor]:
            parts = split(producer.make_layer_call(inputs, batched, self.first_epilogue))
            call = self.second.make_layer_call([], [], epilogue)
            return [multiply_parts(call, parts, inputs[0].shape[batched[0] : -1])]

        (output,) = self.second.block.call_once(producer.inputs(), compute)
        return output
