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
from typing import Any

import torch
from torch import nn

from germline.errors import BadInput


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
        names: dict[nn.Parameter, list[str]] = {}
        for name, parameter in module.named_parameters(remove_duplicate=False):
            if not parameter.requires_grad:
                continue
            if nn.parameter.is_lazy(parameter):
                raise BadInput(f"Parameter {name} has no shape yet: run the module once on a batch before training it.")
            if not parameter.dtype.is_floating_point:
                raise BadInput(
                    f"Parameter {name} is {parameter.dtype}; only real floating-point parameters can be trained."
                )
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
        """The same for two modules when a theta of one is a theta of the other; 16-bit types do not matter to it."""
        layout = [str(self.dtype), *([s.name, list(s.shape), list(s.aliases)] for s in self.slots)]
        return hashlib.sha256(json.dumps(layout, separators=(",", ":")).encode()).hexdigest()

    def described(self) -> list[list[Any]]:
        """The layout as JSON."""
        return [[s.name, list(s.shape), str(s.dtype), list(s.aliases)] for s in self.slots]

    @classmethod
    def from_description(cls, described: list[list[Any]]) -> "Genome":
        slots: list[Slot] = []
        for name, shape, dtype, aliases in described:
            kind = getattr(torch, dtype.removeprefix("torch."))
            slots.append(Slot(name, tuple(shape), kind, slots[-1].stop if slots else 0, tuple(aliases)))
        return cls(tuple(slots))

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
            raise BadInput(
                f"Theta has shape {tuple(theta.shape)}, but the module has {self.size} trainable parameters."
            )
        named = {}
        for slot in self.slots:
            view = theta[..., slot.start : slot.stop].view((*theta.shape[:-1], *slot.shape)).to(slot.dtype)
            named.update(dict.fromkeys((slot.name, *slot.aliases), view))
        return named

    def parameters(self, module: nn.Module) -> list[nn.Parameter]:
        """The parameters behind the slots, or a sentence that names the first difference."""
        other = Genome.from_module(module)
        if other.fingerprint != self.fingerprint:
            for mine, theirs in zip(self.slots, other.slots, strict=False):
                if (mine.name, mine.shape, mine.aliases) != (theirs.name, theirs.shape, theirs.aliases):
                    raise BadInput(f"The module does not fit this genome: expected {mine}, found {theirs}.")
            counts = f"{len(self.slots)} parameters of {self.dtype}, found {len(other.slots)} of {other.dtype}"
            raise BadInput(f"The module does not fit this genome: expected {counts}.")
        named = dict(module.named_parameters(remove_duplicate=False))
        return [named[slot.name] for slot in self.slots]


def refuse_shared_memory(module: nn.Module) -> None:
    """Weights are tied by being one Parameter: a tie that rests on shared memory is lost when a module is copied."""
    ranges = []
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        if nn.parameter.is_lazy(tensor) or tensor.is_meta or tensor.layout != torch.strided or not tensor.numel():
            continue
        extent = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
        stop = tensor.data_ptr() + extent * tensor.element_size()
        ranges.append((str(tensor.device), tensor.data_ptr(), stop, name, tensor.requires_grad))
    furthest = ("", 0, 0, "", False)
    for here in sorted(ranges):
        if here[0] == furthest[0] and here[1] < furthest[2] and (here[4] or furthest[4]):
            message = f"{furthest[3]} and {here[3]} lie in the same memory but are two tensors: "
            raise BadInput(message + "tie weights by assigning one Parameter to both modules, or clone one of them.")
        furthest = max(furthest, here, key=lambda r: (r[0], r[2]))


def frozen_sha256(module: nn.Module) -> str:
    """The hash of what a run needs of a module and theta does not hold: frozen parameters and persistent buffers.

    The running statistics of batch norm are not needed: they are re-estimated.
    """
    trainable = {name for name, p in module.named_parameters(remove_duplicate=False) if p.requires_grad}
    norms = [name for name, part in module.named_modules() if isinstance(part, nn.modules.batchnorm._BatchNorm)]
    statistics = ("running_mean", "running_var", "num_batches_tracked")
    estimated = {f"{name}.{what}".lstrip(".") for name in norms for what in statistics}
    digest = hashlib.sha256()
    for name, tensor in module.state_dict().items():
        if name not in trainable and name not in estimated:
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)};".encode())
            digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def theta_sha256(theta: torch.Tensor) -> str:
    """The hash of a flat vector: its little-endian bytes, in layout order."""
    array = theta.detach().cpu().contiguous().numpy()
    return hashlib.sha256(array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes()).hexdigest()


__all__ = ["Genome", "Slot", "theta_sha256"]
