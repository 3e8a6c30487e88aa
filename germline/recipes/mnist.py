"""MNIST's handwritten digits by a net with one hidden layer, and by a small convolutional one."""

import typing
from typing import Literal

import torch
import torch.nn.functional as F
from torch import nn

from germline.data import mnist
from germline.optim.schedules import Schedule
from germline.recipes.recipe import Recipe, seeded
from germline.strategies import Gradient, OpenAIES
from germline.strategies.settings import check_choice

Machine = Literal["card", "cores"]
SIZES = {"card": (256, 4096, 256, 0.05, 15000), "cores": (64, 512, 512, 0.02, 11000)}


def mnist_mlp(
    *,
    seed: int = 0,
    machine: Machine = "card",
    hidden: int | None = None,
    batch_size: int | None = None,
    steps: int | None = None,
) -> Recipe:
    """MNIST by a net with one hidden layer, for a card or for two cores; its learning rate falls over so many steps."""
    check_choice("machine", machine, typing.get_args(Machine))
    usual_width, population, usual_batch, sigma, usual_steps = SIZES[machine]
    width, steps, data = hidden or usual_width, steps or usual_steps, mnist()
    return Recipe(
        model=seeded(seed, lambda: nn.Sequential(nn.Linear(784, width), nn.ReLU(), nn.Linear(width, 10))),
        data=data.train,
        dev=data.dev,
        test=data.test,
        loss=F.cross_entropy if machine == "card" else cross_entropy,
        strategy=OpenAIES(
            population=population, sigma=sigma, lr=Schedule("linear", 0.005, 0.0, steps), rank=1, weight_decay=0.1
        ),
        others={"gradient": Gradient(lr=Schedule("linear", 0.001, 0.0, steps))},
        batch_size=batch_size or usual_batch,
        generations=steps,
        evaluate_every=200,
        snapshot_every=1000,
    )


def cross_entropy(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """The usual one; of so few classes a CPU makes it four times as fast in this way.

    >>> output, target = torch.tensor([[1.0, 2.0, 0.0], [0.5, 0.0, 0.0]]), torch.tensor([1, 2])
    >>> torch.allclose(cross_entropy(output, target), F.cross_entropy(output, target))
    True
    """
    return (output.logsumexp(-1) - output.gather(-1, target[:, None])[:, 0]).mean()


def mnist_conv(*, seed: int = 0, width: int = 16, batch_size: int = 256, steps: int = 40000) -> Recipe:
    """MNIST by two convolutions of 5 x 5 and a linear layer, for a card; its learning rate falls over so many steps."""
    data = mnist()
    parts = [(x.view(-1, 1, 28, 28), y) for x, y in (data.train, data.dev, data.test)]
    return Recipe(
        model=seeded(seed, lambda: convolutional(width)),
        data=parts[0],
        dev=parts[1],
        test=parts[2],
        loss=F.cross_entropy,
        strategy=OpenAIES(
            population=1024, sigma=0.02, lr=Schedule("linear", 0.006, 0.0, steps), rank=1, weight_decay=0.1
        ),
        others={"gradient": Gradient(lr=Schedule("linear", 0.002, 0.0, steps))},
        batch_size=batch_size,
        generations=steps,
        evaluate_every=200,
        snapshot_every=1000,
    )


def convolutional(width: int) -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(1, width, 5), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(width, 2 * width, 5), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(2 * width * 4 * 4, 10)),
    )
