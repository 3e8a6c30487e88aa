"""A recipe with a net of 8,296,424 parameters and random data, for what depends on the number of parameters alone."""

import torch
import torch.nn.functional as F
from torch import nn

import germline as gl


def recipe(batch_size: int = 64) -> gl.Recipe:
    """Classify noise by a net with one hidden layer."""
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(256, 1024, generator=generator), torch.randint(1000, (256,), generator=generator)
    return gl.Recipe(
        model=gl.seeded(0, lambda: nn.Sequential(nn.Linear(1024, 4096), nn.ReLU(), nn.Linear(4096, 1000))),
        data=(x, y),
        loss=F.cross_entropy,
        others={"gradient": gl.Gradient(lr=0.001), "pesgd": gl.PESGD(population=4, lr=0.1)},
        batch_size=batch_size,
    )
