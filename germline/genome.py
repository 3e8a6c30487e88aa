"""A module as one flat vector, theta, and back.

The genome is the module's trainable parameters in the module's own order. Tied weights count once, parameters with
``requires_grad=False`` and all buffers are left alone. Theta is float32 (float64 if the module has float64 parameters),
whatever the module's own types: evolution takes steps that 16-bit weights would swallow.
"""

import hashlib
import json
import math
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import torch
from torch import nn


@dataclass(frozen=True)
class Slot:
    """One parameter's place in theta."""

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
    """The layout of a module's trainable parameters.

    >>> net = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1, bias=False))
    >>> genome = Genome.of(net)
    >>> [(slot.name, slot.shape, slot.start) for slot in genome.slots]
    [('0.weight', (2, 3), 0), ('0.bias', (2,), 6), ('1.weight', (1, 2), 8)]
    >>> theta = genome.read(net)
    >>> genome.write(torch.zeros_like(theta), net)
    >>> net(torch.ones(3)).item()
    0.0
    """

    slots: tuple[Slot, ...]

    @classmethod
    def of(cls, module: nn.Module) -> "Genome":
        tied: dict[object, list[str]] = {}
        parameters = dict(module.named_parameters(remove_duplicate=False))
        for name, parameter in parameters.items():
            if not parameter.requires_grad:
                continue
            if nn.parameter.is_lazy(parameter):
                raise ValueError(
                    f"Parameter {name} has no shape yet: run the module once on a batch before training it."
                )
            if not parameter.dtype.is_floating_point:
                raise ValueError(
                    f"Parameter {name} is {parameter.dtype}; only real floating-point parameters can be trained."
                )
            tied.setdefault(identity(parameter), []).append(name)
        if not tied:
            raise ValueError("The module has no trainable parameters: every parameter is frozen, or there are none.")
        refuse_overlaps({names[0]: parameters[names[0]] for names in tied.values()})
        slots: list[Slot] = []
        for name, *aliases in tied.values():
            p = parameters[name]
            slots.append(Slot(name, tuple(p.shape), p.dtype, slots[-1].stop if slots else 0, tuple(aliases)))
        return cls(tuple(slots))

    @property
    def size(self) -> int:
        return self.slots[-1].stop

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        return [slot.shape for slot in self.slots]

    @property
    def dtype(self) -> torch.dtype:
        """Of theta."""
        return torch.float64 if any(slot.dtype == torch.float64 for slot in self.slots) else torch.float32

    @cached_property
    def fingerprint(self) -> str:
        """The same for two modules exactly when a theta of one is a theta of the other."""
        layout = [[s.name, list(s.shape), str(s.dtype), list(s.aliases)] for s in self.slots]
        return hashlib.sha256(json.dumps(layout, separators=(",", ":")).encode()).hexdigest()

    def read(self, module: nn.Module, device: torch.device | str | None = None) -> torch.Tensor:
        """The module's weights as a new theta, by default on the device of its first parameter."""
        parameters = self.parameters(module)
        theta = torch.empty(self.size, dtype=self.dtype, device=device or parameters[0].device)
        for slot, parameter in zip(self.slots, parameters, strict=True):
            theta[slot.start : slot.stop] = parameter.detach().reshape(-1)
        return theta

    @torch.no_grad()
    def write(self, theta: torch.Tensor, module: nn.Module) -> None:
        """Puts theta into the module's own parameters; nothing else of the module changes."""
        views = self.views(theta)
        for slot, parameter in zip(self.slots, self.parameters(module), strict=True):
            parameter.copy_(views[slot.name])

    def views(self, theta: torch.Tensor) -> dict[str, torch.Tensor]:
        """Theta as named parameters, aliases included, ready for ``torch.func.functional_call``.

        They are views of theta wherever the parameter has theta's dtype. Theta may have leading dimensions (members).
        """
        if theta.shape[-1:] != (self.size,):
            raise ValueError(
                f"Theta has shape {tuple(theta.shape)}, but the module has {self.size} trainable parameters."
            )
        named = {}
        for slot in self.slots:
            view = theta[..., slot.start : slot.stop].view((*theta.shape[:-1], *slot.shape)).to(slot.dtype)
            named.update(dict.fromkeys((slot.name, *slot.aliases), view))
        return named

    def parameters(self, module: nn.Module) -> list[nn.Parameter]:
        """The parameters behind the slots, or a sentence that names the first difference."""
        other = Genome.of(module)
        if other != self:
            for mine, theirs in zip(self.slots, other.slots, strict=False):
                if mine != theirs:
                    raise ValueError(f"The module does not fit this genome: expected {mine}, found {theirs}.")
            counts = f"{len(self.slots)} parameters, found {len(other.slots)}"
            raise ValueError(f"The module does not fit this genome: expected {counts}.")
        named = dict(module.named_parameters(remove_duplicate=False))
        return [named[slot.name] for slot in self.slots]


def identity(parameter: nn.Parameter) -> object:
    """Equal for one Parameter under two names, and for two Parameters over the same memory."""
    if parameter.is_meta or not parameter.numel():
        return id(parameter)
    return parameter.device, parameter.data_ptr(), parameter.dtype, parameter.shape, parameter.stride()


def refuse_overlaps(parameters: dict[str, nn.Parameter]) -> None:
    """Two different windows on the same memory cannot both be written."""
    ranges = []
    for name, p in parameters.items():
        if p.numel() and not p.is_meta:
            extent = sum((size - 1) * stride for size, stride in zip(p.shape, p.stride(), strict=True)) + 1
            ranges.append((str(p.device), p.data_ptr(), p.data_ptr() + extent * p.element_size(), name))
    ranges.sort()
    for (device, _, stop, name), (other_device, start, _, other) in pairwise(ranges):
        if device == other_device and start < stop:
            message = f"Parameters {name} and {other} overlap in memory without being the same tensor: "
            raise ValueError(message + "tie weights by assigning one Parameter to both modules.")


def theta_sha256(theta: torch.Tensor) -> str:
    """The hash of a flat vector: its little-endian bytes, in layout order."""
    array = theta.detach().cpu().contiguous().numpy()
    return hashlib.sha256(array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes()).hexdigest()


__all__ = ["Genome", "Slot", "theta_sha256"]
