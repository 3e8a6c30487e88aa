"""Nets that backprop cannot train: neurons that are on or off, or weights of one bit, scored by their accuracy.

Of a net with real weights backprop can train the last layer, by cross-entropy: that is the baseline.
"""

from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from germline.data import load_digits
from germline.metrics import accuracy
from germline.recipes.recipe import Recipe, seeded
from germline.strategies import GA, PSO, SNES, MuLambda, OpenAIES
from germline.strategies.settings import check_choice

Weights = Literal["real", "binary"]


class Threshold(nn.Module):
    """A layer whose output is 1 above 0, else 0.

    >>> Threshold()(torch.tensor([-0.1, 0.1]))
    tensor([0., 1.])
    """

    def forward(self, x: Tensor) -> Tensor:
        return (x > 0).to(x.dtype)


class Binary(nn.Linear):
    """A linear layer that uses only the signs of its weights."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, torch.where(self.weight > 0, 1.0, -1.0).to(x.dtype), self.bias)


def threshold_digits(*, seed: int = 0, hidden: int = 64, weights: Weights = "real") -> Recipe:
    """Classify digits of 8 x 8 pixels by neurons that are on or off, of real or binary weights, scored by accuracy."""
    check_choice("weights", weights, get_args(Weights))
    layer = nn.Linear if weights == "real" else Binary
    data = load_digits()
    return Recipe(
        model=seeded(seed, lambda: nn.Sequential(layer(64, hidden), Threshold(), layer(hidden, 10))),
        **data.as_arguments(),
        score=accuracy,
        baseline_loss=F.cross_entropy if weights == "real" else None,
        metrics={"accuracy": accuracy},
        strategy=OpenAIES(population=256, sigma=0.3, lr=0.1),
        others={
            "snes": SNES(population=256, sigma=0.3),
            "mu-lambda": MuLambda(population=256, sigma=0.2),
            "ga": GA(population=256, sigma=0.2),
            "pso": PSO(population=256, sigma=0.3),
        },
        dtype="float32",  # the last bits decide whether a neuron is on
        generations=600,
    )
