"""A recipe whose members take time and hardly a core, as if a simulator elsewhere scored them: WAIT seconds each."""

import os
import time

import torch
import torch.nn.functional as F
from torch import nn

import germline as gl

WAIT = float(os.environ.get("WAIT", "0.004"))


def recipe() -> gl.Recipe:
    x = torch.linspace(-1, 1, 64).reshape(16, 4)
    return gl.Recipe(
        model=gl.seeded(0, lambda: nn.Linear(4, 1)),
        data=(x, x.sum(1, keepdim=True)),
        loss=waited_for,
        strategy=gl.OpenAIES(population=512),
        generations=100_000,
    )


def waited_for(output: torch.Tensor, target: torch.Tensor) -> float:
    time.sleep(WAIT)
    return float(F.mse_loss(output, target))
