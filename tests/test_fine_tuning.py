"""Fine-tuning on a pretrained network's own terms: patterns of parameters, adapters, frozen and quantized weights."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import germline as gl
from germline.errors import BadInput
from tests.test_architectures import Adapts

X = torch.randn(32, 6, generator=torch.Generator().manual_seed(0))
DATA = (X, X.sum(1, keepdim=True).repeat(1, 3))
STRATEGY = gl.OpenAIES(population=8, sigma=0.1, lr=0.1)


def make_net() -> nn.Sequential:
    """Return a network whose second layer has 8-bit weights and an adapter."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), Adapts(nn.Linear(8, 8)), nn.Linear(8, 3))


def changed(before: dict[str, torch.Tensor], after: nn.Module) -> list[str]:
    """Return the names of what differs between two states of a module."""
    return [name for name, value in after.state_dict().items() if not torch.equal(value, before[name])]


def copy_state(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return a copy of a module's state."""
    return {name: value.clone() for name, value in module.state_dict().items()}


@pytest.mark.parametrize(
    ("trainable", "names"),
    [
        ("2", ["2.weight", "2.bias"]),
        (["1.a", "1.b.*"], ["1.a.weight", "1.b.weight"]),
        (["*.bias"], ["0.bias", "2.bias"]),
    ],
)
def test_only_the_parameters_that_match_are_trained(trainable: Any, names: list[str]) -> None:
    net = make_net()
    before = copy_state(net)
    result = gl.train(net, DATA, loss=F.mse_loss, strategy=STRATEGY, generations=2, run=False, trainable=trainable)
    assert changed(before, result.model) == names
    search_net = make_net()
    search = gl.Search(search_net, STRATEGY, loss=F.mse_loss, trainable=trainable)
    search.step(*DATA)
    assert changed(before, search.model) == names


def test_a_resumed_run_trains_the_same_parameters(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"loss": F.mse_loss, "strategy": STRATEGY, "trainable": ["1.a", "1.b"]}
    whole = gl.train(make_net(), DATA, generations=4, run=tmp_path / "whole", **settings)
    gl.train(make_net(), DATA, generations=2, run=tmp_path / "parts", **settings)
    parts = gl.train(make_net(), DATA, generations=4, resume=tmp_path / "parts", **settings)
    assert whole.summary["theta_sha256"] == parts.summary["theta_sha256"]
    settings["trainable"] = "2"
    with pytest.raises(BadInput, match="The model is not that of"):
        gl.train(make_net(), DATA, generations=5, resume=tmp_path / "parts", **settings)


def test_patterns_that_match_nothing_are_refused() -> None:
    with pytest.raises(BadInput, match=r"trainable= names 'lora', but no parameter .* such as 0.weight"):
        gl.train(make_net(), DATA, loss=F.mse_loss, run=False, trainable="lora")


def test_a_recipe_has_patterns_too() -> None:
    recipe = gl.Recipe(make_net(), DATA, loss=F.mse_loss, trainable="2.bias")
    assert [name for name, p in recipe.model.named_parameters() if p.requires_grad] == ["2.bias"]
