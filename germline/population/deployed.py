"""Makes sure that what is trained is what is deployed: nothing that the check of a plan could see in plain copies.

Plain copies have what the user's module keeps, and are run as members are. So these differences need checks apart.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from germline.errors import BadInput
from germline.genome import iterate_kept_tensors
from germline.objective import Batch, Objective, seeded_generators
from germline.population.block import Generation
from germline.population.evaluator import Evaluator, make_evaluation_copy
from germline.population.isolation import exact_arithmetic
from germline.population.outputs import split_output

DIFFERENT = 1e-4  # of a score


def find_kept_tensors(module: nn.Module) -> list[tuple[nn.Module, str, str]]:
    """Return the attributes of a module that hold tensors which are neither parameters nor buffers.

    Returns:
        The part of the module, the attribute's name, and its full name, for each.
    """
    registries = ("_parameters", "_buffers", "_modules")
    attributes = []
    for prefix, part in module.named_modules():
        for name, value in vars(part).items():
            if name not in registries and any(True for _ in iterate_kept_tensors(value)):
                attributes.append((part, name, f"{prefix}.{name}".lstrip(".")))
    return attributes


@contextmanager
def cleared_attribute(part: nn.Module, name: str) -> Iterator[None]:
    """Have an attribute without its tensors: None, or an empty container."""
    attributes = vars(part)
    value = attributes[name]
    attributes[name] = None if isinstance(value, torch.Tensor) else type(value)()
    try:
        yield
    finally:
        attributes[name] = value


def refuse_stale_tensors(plain: Evaluator, generation: Generation, member: int) -> None:
    """Raise BadInput if the module keeps a tensor that it has computed from its weights, before they changed.

    Such a tensor is one that the module makes again if it is missing: with the weights of the center to the same
    output, with those of a member to another one.

    Args:
        plain: an evaluator of plain copies of the module.
        generation: members whose noise shows, and a batch.
        member: the member to be compared.
    """
    center = replace(generation, candidates=replace(generation.candidates, sigma=0.0), centers={}, products={})
    for part, name, full_name in find_kept_tensors(plain.module):
        same = []
        for some in (center, generation):
            outputs = split_output(plain.member_output(some, member))[0]
            try:
                with cleared_attribute(part, name):
                    again = split_output(plain.member_output(some, member))[0]
            except Exception:  # the module needs it, and does not make it again
                break
            pairs = zip(outputs, again, strict=False)
            same.append(len(outputs) == len(again) and all(is_close(*pair) for pair in pairs))
        if same == [True, False]:
            message = f"The module keeps a tensor in {full_name} that it has computed from its weights"
            raise BadInput(f"{message}, and that would stay as it is while they change: clear it before training.")


def is_close(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether two tensors of an output are equal except for rounding."""
    return a.shape == b.shape and bool(torch.allclose(a.double(), b.double(), 1e-3, 1e-5, equal_nan=True))


@torch.no_grad()
def warn_of_fast_path(module: nn.Module, objective: Objective, batch: Batch | None, device: torch.device) -> None:
    """Warn if torch's fast path of transformers, which members do not take, changes the score of the module.

    Args:
        module: the user's module.
        objective: computes the score.
        batch: the batch to compare on; None for an objective of the whole model.
        device: where members are evaluated.
    """
    if batch is None or objective.of_model or not any(isinstance(p, nn.TransformerEncoder) for p in module.modules()):
        return

    def score() -> Any:
        some, copied = batch.copy(), make_evaluation_copy(module).to(device)
        with seeded_generators(0):
            return float(objective.function(copied(*some.args, **some.kwargs), some.target))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch's own about nested tensors
        fast = score()
    with exact_arithmetic(device):
        plain = score()
    if abs(fast - plain) > DIFFERENT * abs(plain):
        warnings.warn(
            f"torch's fast path of nn.TransformerEncoder changes the score of this model from {plain:.6g} to "
            f"{fast:.6g}, for instance because it returns zeros at padded positions. Members are evaluated without it: "
            "score no padded positions, or call torch.backends.mha.set_fastpath_enabled(False) where it is used.",
            UserWarning,
            stacklevel=2,
        )
