"""A recipe whose members take WAIT seconds each but hardly any CPU, as if another machine simulated them."""

import os
import time

import torch
import torch.nn.functional as F
from torch import nn

import germline as gl

WAIT = float(os.environ.get("WAIT", "0.004"))


def recipe() -> gl.Recipe:
    """Fit the sum of four inputs by a loss that waits."""
    x = torch.linspace(-1, 1, 64).reshape(16, 4)
    return gl.Recipe(
        model=gl.seeded(0, lambda: nn.Linear(4, 1)),
        data=(x, x.sum(1, keepdim=True)),
        loss=slow_mse,
        strategy=gl.OpenAIES(population=512),
        generations=100_000,
    )


def slow_mse(output: torch.Tensor, target: torch.Tensor) -> float:
    """Return the mean squared error after WAIT seconds."""
    time.sleep(WAIT)
    return float(F.mse_loss(output, target))
