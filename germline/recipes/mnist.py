"""MNIST's handwritten digits by a net with one hidden layer, and by a small convolutional one."""

from typing import Literal, get_args

import torch.nn.functional as F
from torch import nn

from germline.data import Splits, load_mnist
from germline.optim.schedules import Schedule
from germline.recipes.recipe import Recipe, seeded
from germline.strategies import Gradient, OpenAIES
from germline.strategies.settings import check_choice

Machine = Literal["gpu", "cores"]
SIZES = {  # hidden units, population, batch size, sigma, generations
    "gpu": (256, 4096, 256, 0.05, 15000),
    "cores": (64, 512, 512, 0.02, 21000),
}


def mnist_mlp(
    *,
    seed: int = 0,
    machine: Machine = "gpu",
    hidden: int | None = None,
    batch_size: int | None = None,
    steps: int | None = None,
) -> Recipe:
    """Classify MNIST by a net with one hidden layer, sized for a GPU or for two CPU cores.

    The learning rate falls to 0 over the run, which has ``steps`` generations unless another limit is given.
    """
    check_choice("machine", machine, get_args(Machine))
    usual_width, population, usual_batch, sigma, usual_steps = SIZES[machine]
    width, steps = hidden or usual_width, steps or usual_steps
    model = seeded(seed, lambda: nn.Sequential(nn.Linear(784, width), nn.ReLU(), nn.Linear(width, 10)))
    strategy = OpenAIES(population=population, sigma=sigma, lr=Schedule("linear", 0.005, 0.0), rank=1, weight_decay=0.1)
    gradient = Gradient(lr=Schedule("linear", 0.001, 0.0))
    return build_recipe(model, load_mnist(), strategy, gradient, batch_size or usual_batch, steps)


def mnist_conv(*, seed: int = 0, width: int = 16, batch_size: int = 256, steps: int = 40000) -> Recipe:
    """Classify MNIST by two convolutions of 5 x 5 and a linear layer, sized for a GPU.

    The learning rate falls to 0 over the run, which has ``steps`` generations unless another limit is given.
    """
    strategy = OpenAIES(population=1024, sigma=0.02, lr=Schedule("linear", 0.006, 0.0), rank=1, weight_decay=0.1)
    gradient, data = Gradient(lr=Schedule("linear", 0.002, 0.0)), load_mnist().reshape(1, 28, 28)
    model = seeded(seed, lambda: convolutional(width))
    return build_recipe(model, data, strategy, gradient, batch_size, steps)


def build_recipe(
    model: nn.Module, data: Splits, strategy: OpenAIES, gradient: Gradient, batch_size: int, steps: int
) -> Recipe:
    """Return the recipe that both nets have in common."""
    return Recipe(
        model=model,
        **data.as_arguments(),
        loss=F.cross_entropy,
        strategy=strategy,
        others={"gradient": gradient},
        batch_size=batch_size,
        generations=steps,
        evaluate_every=200,
        snapshot_every=1000,
    )


def convolutional(width: int) -> nn.Module:
    """Return two convolutions with pooling, of ``width`` and twice as many channels, and a linear layer."""
    return nn.Sequential(
        *(nn.Conv2d(1, width, 5), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(width, 2 * width, 5), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(2 * width * 4 * 4, 10)),
    )
