"""MNIST by PESGD: members train separately by gradient descent, and evolve together (Shahab, Grot 2020)."""

import torch.nn.functional as F
from torch import nn

from germline.data import load_mnist
from germline.recipes.recipe import Recipe, seeded
from germline.strategies import PESGD, Gradient


def pesgd_mnist(*, seed: int = 0, hidden: int = 128, batch_size: int = 64, every: int = 1) -> Recipe:
    """Classify MNIST by a net with one hidden layer; in each generation every member trains for an epoch."""
    data = load_mnist()
    return Recipe(
        model=seeded(seed, lambda: nn.Sequential(nn.Linear(784, hidden), nn.ReLU(), nn.Linear(hidden, 10))),
        **data.as_arguments(),
        loss=F.cross_entropy,
        strategy=PESGD(population=4, lr=0.1),
        others={"gradient": Gradient(lr=0.1, optimizer="sgd")},
        batch_size=batch_size,
        generations=10,
        evaluate_every=every,
        snapshot_every=10,
    )
