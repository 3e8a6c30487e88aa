"""The networks of DarwiNN: that of MNIST is Zhang et al.'s, those of CIFAR-10 are Lenc et al.'s.

Malik et al., "DarwiNN: Efficient Distributed Neuroevolution under Communication Constraints", 2020. Zhang, Clune,
Stanley, "On the Relationship Between the OpenAI Evolution Strategy and Stochastic Gradient Descent", 2017. Lenc, Elsen,
Schaul, Simonyan, "Non-Differentiable Supervised Learning with Evolution Strategies and Hybrid Methods", 2019. The
layers are those of DarwiNN's code, but for a ReLU after the hidden layer of ``mnist-3m``, which it leaves out.

The data are downloaded if they are not on this machine; ``data=synthetic`` is images of the same shape that are made.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Literal, get_args

import torch.nn.functional as F
from torch import nn

from germline.data import Splits, load_cifar10, load_mnist, make_synthetic
from germline.errors import BadInput
from germline.optim.schedules import Schedule
from germline.recipes.recipe import Recipe, seeded
from germline.strategies import SNES, Gradient, OpenAIES
from germline.strategies.settings import check_choice

Source = Literal["real", "synthetic"]
Block = Callable[[int, int, int], Iterator[nn.Module]]  # of input channels, output channels and stride

WIDTHS = (64, 64, 128, 128, 128, 256, 256, 256, 512, 512, 512)  # each that widens, but for the first, has a stride of 2


def mnist_3m(*, seed: int = 0, batch_size: int = 64, data: Source = "real", examples: int | None = None) -> Recipe:
    """Classify MNIST by DarwiNN's net of 3,274,634 parameters: two convolutions of 5 x 5, a hidden layer of 1024."""
    splits = load_splits((1, 28, 28), load_mnist, data, examples)
    rate = Schedule("linear", 0.003, 0.0)
    strategy = OpenAIES(population=1024, sigma=0.02, lr=rate, rank=1, weight_decay=0.1)
    return replace(build_recipe(seeded(seed, two_convolutions), splits, batch_size), strategy=strategy)


def cif_900k(*, seed: int = 0, batch_size: int = 128, data: Source = "real", examples: int | None = None) -> Recipe:
    """Classify CIFAR-10 by DarwiNN's net of 895,973 parameters: eleven separable convolutions with batch norm."""
    splits = load_splits((3, 32, 32), load_cifar10, data, examples)
    return build_recipe(seeded(seed, lambda: eleven_blocks(separable)), splits, batch_size)


def cif_8m(*, seed: int = 0, batch_size: int = 128, data: Source = "real", examples: int | None = None) -> Recipe:
    """Classify CIFAR-10 by DarwiNN's net of 7,790,794 parameters: eleven convolutions of 3 x 3 with batch norm."""
    splits = load_splits((3, 32, 32), load_cifar10, data, examples)
    return build_recipe(seeded(seed, lambda: eleven_blocks(plain)), splits, batch_size)


def two_convolutions() -> nn.Module:
    """Return the net 32C5-P-64C5-P-1024-10."""
    return nn.Sequential(
        *(nn.Conv2d(1, 32, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(32, 64, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(64 * 7 * 7, 1024), nn.ReLU(), nn.Linear(1024, 10)),
    )


def eleven_blocks(block: Block) -> nn.Module:
    """Return a net of blocks of one kind from 32 x 32 pixels down to 4 x 4, whose mean is classified."""
    layers: list[nn.Module] = []
    for before, width in zip((3, *WIDTHS), WIDTHS, strict=False):
        stride = 2 if layers and width > before else 1
        layers += [*block(before, width, stride), nn.BatchNorm2d(width), nn.ReLU()]
    return nn.Sequential(*layers, nn.AvgPool2d(4), nn.Flatten(), nn.Linear(WIDTHS[-1], 10))


def plain(inputs: int, outputs: int, stride: int) -> Iterator[nn.Module]:
    """Yield a convolution of 3 x 3."""
    yield nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)


def separable(inputs: int, outputs: int, stride: int) -> Iterator[nn.Module]:
    """Yield a convolution of 3 x 3 of each channel, and one of 1 x 1 of all channels."""
    yield nn.Conv2d(inputs, inputs, 3, stride, padding=1, groups=inputs, bias=False)
    yield nn.Conv2d(inputs, outputs, 1, bias=False)


def load_splits(
    shape: tuple[int, int, int], load: Callable[[], Splits], source: Source, examples: int | None
) -> Splits:
    """Return real or synthetic images of one shape, at most ``examples`` of each part."""
    check_choice("data", source, get_args(Source))
    if examples is not None and examples < 1:
        raise BadInput(f"The setting examples must be at least 1, or none for all of them, not {examples}.")
    splits = make_synthetic(shape) if source == "synthetic" else load()
    return (splits if examples is None else splits.first(examples)).reshape(*shape)


def build_recipe(model: nn.Module, splits: Splits, batch_size: int) -> Recipe:
    """Return the recipe that the three nets have in common."""
    return Recipe(
        model=model,
        **splits.as_arguments(),
        loss=F.cross_entropy,
        others={"snes": SNES(population=96, sigma=0.02), "gradient": Gradient(lr=0.001)},
        batch_size=batch_size,
        generations=3000,
        evaluate_every=100,
        snapshot_every=500,
    )
