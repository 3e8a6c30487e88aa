"""Handwritten digits of 8 x 8 pixels: a small net that learns in a minute on any machine."""

import torch.nn.functional as F
from torch import nn

from germline.data import load_digits
from germline.recipes.recipe import Recipe, seeded
from germline.strategies import PSO, Gradient, OpenAIES


def digits(*, seed: int = 0, hidden: int = 64, batch_size: int = 256) -> Recipe:
    """Classify handwritten digits of 8 x 8 pixels by a net with one hidden layer."""
    data = load_digits()
    return Recipe(
        model=seeded(seed, lambda: nn.Sequential(nn.Linear(64, hidden), nn.Tanh(), nn.Linear(hidden, 10))),
        **data.as_arguments(),
        loss=F.cross_entropy,
        strategy=OpenAIES(population=256, sigma=0.05, lr=0.03),
        others={"gradient": Gradient(lr=0.003), "pso": PSO(population=256, decay=0.9)},
        batch_size=batch_size,
        generations=400,
    )
