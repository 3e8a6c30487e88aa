"""The two nets of the Hybrid-ES paper (Bartolo) on MNIST, with the settings of the paper."""

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from germline.data import load_mnist_of_hybrid_es
from germline.recipes.recipe import Recipe, seeded
from germline.strategies import Gradient, HybridES

EPOCHS = 30
RATE, DECAY = 5.0, 2e-4  # of the mean loss: 5 / 1000 of a gradient summed over 1,000, and twice a penalty of 1e-4


def hybrid_es_mnist(*, seed: int = 0, hidden: int = 300, batch_size: int = 1000, epochs: int = EPOCHS) -> Recipe:
    """Classify MNIST by 784-300-10 with sigmoids, from 30 epochs of batches in one order, with steps of 5."""
    strategy = HybridES(lr=RATE, weight_decay=DECAY, sigma=0.1)
    gradient = Gradient(lr=RATE, optimizer="sgd", weight_decay=DECAY)

    def build() -> nn.Module:
        return init_normal(nn.Sequential(nn.Linear(784, hidden), nn.Sigmoid(), nn.Linear(hidden, 10)))

    return build_recipe(seeded(seed, build), strategy, gradient, batch_size, epochs, snapshot_epochs=10)


def hybrid_es_convnet(*, seed: int = 0, batch_size: int = 256, epochs: int = 5, lr: float = 0.1) -> Recipe:
    """Classify MNIST by 6C5-P2-16C5-P2-tanh-10, by the best of each gradient and of ten shifts of it."""
    strategy = HybridES(variant="assisted", lr=lr, sigma=1.0)
    gradient = Gradient(lr=lr, optimizer="sgd")
    return build_recipe(seeded(seed, ConvNet), strategy, gradient, batch_size, epochs, snapshot_epochs=5)


def init_normal(net: nn.Module) -> nn.Module:
    """Draw the weights of a net from a normal distribution of variance 1, and set its biases to 0."""
    for parameter in net.parameters():
        (nn.init.normal_ if parameter.dim() > 1 else nn.init.zeros_)(parameter)
    return net


class ConvNet(nn.Module):
    """The net 6C5-P2-16C5-P2-tanh-10."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 6, 5), nn.Conv2d(6, 16, 5)
        self.out = nn.Linear(16 * 4 * 4, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(self.first(x.view(-1, 1, 28, 28)), 2)
        x = F.max_pool2d(self.second(x), 2)
        y: Tensor = self.out(torch.tanh(x.flatten(1)))
        return y


def build_recipe(
    model: nn.Module, strategy: HybridES, gradient: Gradient, batch_size: int, epochs: int, snapshot_epochs: int
) -> Recipe:
    """Return the recipe that both nets have in common: batches in the same order in every epoch."""
    data = load_mnist_of_hybrid_es()
    steps = len(data.train[1]) // batch_size
    return Recipe(
        model=model,
        **data.as_arguments(),
        loss=F.cross_entropy,
        strategy=replace(strategy, examples=batch_size, epoch=steps),
        others={"gradient": gradient},
        batch_size=batch_size,
        shuffle=False,
        dtype="float32",
        generations=epochs * steps,
        evaluate_every=steps,
        snapshot_every=snapshot_epochs * steps,
    )
