"""A module as one flat vector, theta, and back.

The genome is the module's trainable parameters in the module's own order. Tied weights count once, parameters with
``requires_grad=False`` and all buffers are left alone. Theta is float32 (float64 if the module has float64 parameters),
whatever the module's own types: evolution takes steps that 16-bit weights would swallow.
"""

import copy
import hashlib
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from germline.errors import BadInput
from germline.normalization import Normalize


@dataclass(frozen=True)
class Slot:
    """A slot is the part of theta that holds one parameter."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    start: int
    aliases: tuple[str, ...] = ()  # the other names of a tied parameter

    @property
    def stop(self) -> int:
        return self.start + math.prod(self.shape)


@dataclass(frozen=True)
class Genome:
    """A genome is the layout of a module's trainable parameters in one flat vector.

    >>> net = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1, bias=False))
    >>> genome = Genome.from_module(net)
    >>> [(slot.name, slot.shape, slot.start) for slot in genome.slots]
    [('0.weight', (2, 3), 0), ('0.bias', (2,), 6), ('1.weight', (1, 2), 8)]
    >>> theta = genome.read(net)
    >>> genome.write(torch.zeros_like(theta), net)
    >>> net(torch.ones(3)).item()
    0.0
    """

    slots: tuple[Slot, ...]

    @classmethod
    def from_module(cls, module: nn.Module) -> "Genome":
        """Return the layout of a module.

        Args:
            module: any module with trainable parameters.

        Raises:
            BadInput: if there are no trainable parameters, or one is lazy, is not a real floating-point tensor,
                belongs to a ScriptModule, or shares memory with another tensor of the module.
        """
        refuse_script_modules(module)
        names: dict[nn.Parameter, list[str]] = {}
        for name, parameter in module.named_parameters(remove_duplicate=False):
            if not parameter.requires_grad:
                continue
            if nn.parameter.is_lazy(parameter):
                raise BadInput(f"Parameter {name} has no shape yet: run the module once on a batch before training it.")
            if not parameter.dtype.is_floating_point:
                reason = "only real floating-point parameters can be trained"
                raise BadInput(f"Parameter {name} is {parameter.dtype}; {reason}.")
            names.setdefault(parameter, []).append(name)
        if not names:
            raise BadInput("The module has no trainable parameters: every parameter is frozen, or there are none.")
        refuse_shared_memory(module)
        slots: list[Slot] = []
        for p, (name, *aliases) in names.items():
            slots.append(Slot(name, tuple(p.shape), p.dtype, slots[-1].stop if slots else 0, tuple(aliases)))
        return cls(tuple(slots))

    @property
    def size(self) -> int:
        """Return the number of trainable parameters: the length of theta."""
        return self.slots[-1].stop

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """Return the shapes of the parameters, in the order of theta."""
        return [slot.shape for slot in self.slots]

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of theta."""
        return torch.float64 if any(slot.dtype == torch.float64 for slot in self.slots) else torch.float32

    @cached_property
    def fingerprint(self) -> str:
        """Return a hash that is the same for two modules if a theta of one is a theta of the other.

        The hash does not depend on which 16-bit types the parameters have.
        """
        layout = [str(self.dtype), *([s.name, list(s.shape), list(s.aliases)] for s in self.slots)]
        return hashlib.sha256(json.dumps(layout, separators=(",", ":")).encode()).hexdigest()

    def describe(self) -> list[list[Any]]:
        """Return the layout as JSON, which ``from_description`` reads."""
        return [[s.name, list(s.shape), str(s.dtype), list(s.aliases)] for s in self.slots]

    @classmethod
    def from_description(cls, description: list[list[Any]]) -> "Genome":
        """Return the layout that ``describe`` has written as JSON."""
        slots: list[Slot] = []
        for name, shape, dtype_name, aliases in description:
            dtype = getattr(torch, dtype_name.removeprefix("torch."))
            if not all(type(extent) is int and extent >= 0 for extent in shape) or not dtype.is_floating_point:
                raise BadInput(f"The layout has a parameter {name!r} of shape {shape} and type {dtype_name}.")
            slots.append(Slot(name, tuple(shape), dtype, slots[-1].stop if slots else 0, tuple(aliases)))
        return cls(tuple(slots))

    def read(self, module: nn.Module, device: torch.device | str | None = None) -> Tensor:
        """Return the module's weights as a new theta.

        Args:
            module: a module with this layout.
            device: of theta, by default that of the module's first parameter.

        Raises:
            BadInput: if the module has another layout.
        """
        parameters = self.parameters(module)
        theta = torch.empty(self.size, dtype=self.dtype, device=device or parameters[0].device)
        for slot, parameter in zip(self.slots, parameters, strict=True):
            theta[slot.start : slot.stop] = parameter.detach().reshape(-1)
        return theta

    @torch.no_grad()
    def write(self, theta: Tensor, module: nn.Module) -> None:
        """Copy theta into the module's parameters; nothing else of the module changes.

        Args:
            theta: a flat vector.
            module: a module with this layout.

        Raises:
            BadInput: if theta or the module has another layout.
        """
        views = self.views(theta)
        for slot, parameter in zip(self.slots, self.parameters(module), strict=True):
            parameter.copy_(views[slot.name])

    def views(self, theta: Tensor) -> dict[str, Tensor]:
        """Return theta as named parameters, aliases included, ready for ``torch.func.functional_call``.

        Args:
            theta: a flat vector; it may have leading dimensions (members).

        Returns:
            Views of theta wherever the parameter has theta's dtype, else copies.

        Raises:
            BadInput: if theta has another size.
        """
        if theta.shape[-1:] != (self.size,):
            expected = f"the module has {self.size} trainable parameters"
            raise BadInput(f"Theta has shape {tuple(theta.shape)}, but {expected}.")
        named = {}
        for slot in self.slots:
            view = theta[..., slot.start : slot.stop].view((*theta.shape[:-1], *slot.shape)).to(slot.dtype)
            named.update(dict.fromkeys((slot.name, *slot.aliases), view))
        return named

    def parameters(self, module: nn.Module) -> list[nn.Parameter]:
        """Return the parameters behind the slots, or raise BadInput with the first difference."""
        other = Genome.from_module(module)
        if other.fingerprint != self.fingerprint:
            for expected, slot in zip(self.slots, other.slots, strict=False):
                if (expected.name, expected.shape, expected.aliases) != (slot.name, slot.shape, slot.aliases):
                    raise BadInput(f"The module does not fit this genome: expected {expected}, found {slot}.")
            counts = f"{len(self.slots)} parameters of {self.dtype}, found {len(other.slots)} of {other.dtype}"
            raise BadInput(f"The module does not fit this genome: expected {counts}.")
        named = dict(module.named_parameters(remove_duplicate=False))
        return [named[slot.name] for slot in self.slots]


def set_trainable(module: nn.Module, patterns: str | Sequence[str]) -> None:
    """Set ``requires_grad`` of all parameters: True for those whose names match a pattern, False for all others.

    Args:
        module: the module, whose parameters are changed.
        patterns: names of parameters, or of parts of the module, with the wildcards ``*``, ``?`` and ``[...]``.

    Raises:
        BadInput: if a pattern matches no parameter, or one that is not a floating-point tensor.

    >>> net = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
    >>> set_trainable(net, ["0.bias", "1"])
    >>> [name for name, parameter in net.named_parameters() if parameter.requires_grad]
    ['0.bias', '1.weight', '1.bias']
    """
    named, chosen = dict(module.named_parameters(remove_duplicate=False)), set()
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        names = [name for name in named if fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*")]
        if not names:
            first = f", such as {next(iter(named))}" if named else ""
            raise BadInput(f"trainable= names {pattern!r}, but no parameter of the module has such a name{first}.")
        chosen |= {id(named[name]) for name in names}  # a tied parameter has several names
        for name in names:
            if not named[name].dtype.is_floating_point:
                raise BadInput(f"trainable= names {name}, which is {named[name].dtype} and cannot be trained.")
    for parameter in named.values():
        parameter.requires_grad_(id(parameter) in chosen)


def count_parameters(module: nn.Module) -> int:
    """Return the number of trainable parameters."""
    return sum(p.numel() for p in module.parameters() if p.requires_grad and not is_lazy(p))


def refuse_script_modules(module: nn.Module) -> None:
    """Raise BadInput if a module, or a part of it with trainable parameters, was made by torch.jit.

    A copy of such a module has no trainable parameters, so its members could not be told apart.
    """
    scripted = [(name, part) for name, part in module.named_modules() if isinstance(part, torch.jit.ScriptModule)]
    for name, part in scripted:
        if not name or any(parameter.requires_grad for parameter in part.parameters()):
            what = f"The module's part {name}" if name else "The module"
            reason = "is a ScriptModule (torch.jit.script or torch.jit.trace), whose parameters cannot be replaced"
            raise BadInput(f"{what} {reason}: train the nn.Module that it was made from, and script it afterwards.")


class MemoryRange(NamedTuple):
    """A memory range holds the elements of one tensor of a module."""

    device: str
    start: int
    stop: int
    name: str
    is_trainable: bool


def refuse_inference_tensors(module: nn.Module) -> None:
    """Raise BadInput if a module was made in inference mode, and is trained outside: it could not be written there."""
    names = [name for name, tensor in [*module.named_parameters(), *module.named_buffers()] if tensor.is_inference()]
    if names and not torch.is_inference_mode_enabled():
        raise BadInput(f"{names[0]} was made in torch.inference_mode() and cannot be written: make the module outside.")


def refuse_shared_memory(module: nn.Module) -> None:
    """Raise BadInput if a trainable parameter shares memory with another tensor of the module.

    Tied weights must be one Parameter: a tie that rests on shared memory is lost when a module is copied.
    """
    ranges = []
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        if nn.parameter.is_lazy(tensor) or tensor.is_meta or tensor.layout != torch.strided or not tensor.numel():
            continue
        extent = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
        stop = tensor.data_ptr() + extent * tensor.element_size()
        ranges.append(MemoryRange(str(tensor.device), tensor.data_ptr(), stop, name, tensor.requires_grad))
    furthest = MemoryRange("", 0, 0, "", False)
    for memory in sorted(ranges):
        overlaps = memory.device == furthest.device and memory.start < furthest.stop
        if overlaps and (memory.is_trainable or furthest.is_trainable):
            message = f"{furthest.name} and {memory.name} lie in the same memory but are two tensors: "
            raise BadInput(message + "tie weights by assigning one Parameter to both modules, or clone one of them.")
        furthest = max(furthest, memory, key=lambda r: (r.device, r.stop))


def copy_module(module: nn.Module, *, shares_weights: bool = False) -> nn.Module:
    """Return a deep copy of a module, in which compiled parts are plain ones again.

    Tensors that a module has computed and keeps, as old weight norm and pruning do, are copied as they are: torch
    copies no tensor that has a history of gradients.

    Args:
        module: the module to be copied.
        shares_weights: whether the parameters of the copy are in the memory of the module's: for a copy whose code is
            never run, since code may write to its weights.
    """
    tensors = [x for part in module.modules() for value in vars(part).values() for x in iterate_kept_tensors(value)]
    memo: dict[int, Any] = {id(x): x.detach().clone() for x in tensors if not x.is_leaf}
    if shares_weights:
        plain = [x for x in module.parameters() if type(x) is nn.Parameter]
        memo |= {id(x): nn.Parameter(x.data, x.requires_grad) for x in plain}
    copied = copy.deepcopy(module, memo)
    for part in copied.modules():
        if type(part).__name__ == "OptimizedModule":  # of torch.compile, whose import takes a second
            part.__class__ = Uncompiled
            vars(part).pop("forward", None)
    return copied


def iterate_kept_tensors(value: Any) -> Iterator[Tensor]:
    """Yield the tensors of an attribute: itself, or in nested dicts, lists and tuples."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict | list | tuple):
        for item in value.values() if isinstance(value, dict) else value:
            yield from iterate_kept_tensors(item)


class Uncompiled(nn.Module):
    """Calls the module in it, as what ``torch.compile`` has made of it would, under the same names of parameters."""

    _orig_mod: nn.Module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module that was compiled."""
        return self._orig_mod(*args, **kwargs)


def tracks_statistics(part: nn.Module) -> bool:
    """Return whether a part of a module is a norm (of batches or instances) with running statistics."""
    return isinstance(part, nn.modules.batchnorm._NormBase) and part.running_mean is not None


def frozen_sha256(module: nn.Module) -> str:
    """Return the hash of what a run needs of a module in addition to theta: frozen parameters, persistent buffers.

    The running statistics of norms in training mode are left out, since they are re-estimated, and so are those of
    layers that normalize observations, which are in the journal.

    Args:
        module: the module of a run.
    """
    trainable = {name for name, p in module.named_parameters(remove_duplicate=False) if p.requires_grad}
    parts = module.named_modules(remove_duplicate=False)
    norms = [name for name, part in parts if tracks_statistics(part) and part.training]
    buffers = ("running_mean", "running_var", "num_batches_tracked")
    statistics = {f"{norm}.{buffer}".lstrip(".") for norm in norms for buffer in buffers}
    normalizing = [name for name, part in module.named_modules(remove_duplicate=False) if isinstance(part, Normalize)]
    statistics |= {f"{name}.{buffer}".lstrip(".") for name in normalizing for buffer in ("mean", "std")}
    digest = hashlib.sha256()
    for name, tensor in module.state_dict().items():
        if name not in trainable and name not in statistics:
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)};".encode())
            digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


def theta_sha256(theta: Tensor) -> str:
    """Return the hash of a flat vector: of its little-endian bytes, in layout order."""
    array = theta.detach().cpu().contiguous().numpy()
    return hashlib.sha256(array.astype(array.dtype.newbyteorder("<"), copy=False).reshape(-1).data).hexdigest()
