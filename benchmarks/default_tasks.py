"""The tasks on which default settings are compared with tuned ones: recipes, and problems that no recipe has.

A task has a budget in evaluations of a batch, population times generations, so that its result does not depend on how
fast or how busy a machine is. Budgets are small: seconds of one core.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import more_tasks
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import germline as gl
from germline.data import load_digits, load_mnist
from germline.metrics import accuracy
from germline.recipes import make_recipe
from germline.recipes.mnist import convolutional
from germline.recipes.threshold import Threshold

PRETRAINING = 12000  # images of MNIST that a pretrained net has seen, once


@dataclass(frozen=True)
class Task:
    """A recipe, what it is judged by, and how long it may train.

    Attributes:
        build: Makes the recipe from a seed.
        metric: The metric of the dev and test sets; a loss is better if it is lower.
        population: Members of a generation of the tuned settings.
        generations: Generations of the tuned settings.
        lower: Whether less is better.
    """

    build: Callable[[int], gl.Recipe]
    metric: str
    population: int
    generations: int
    lower: bool = False

    @property
    def evaluations(self) -> int:
        """The budget: evaluations of a batch."""
        return self.population * self.generations


def named(name: str, **settings: Any) -> Callable[[int], gl.Recipe]:
    """Return a function that makes one of the package's recipes."""
    return lambda seed: make_recipe(name, {key: str(value) for key, value in settings.items()}, seed)


def digits_by_accuracy(seed: int) -> gl.Recipe:
    """Score the net of ``digits`` by its accuracy, as for a user who has no loss."""
    return replace(make_recipe("digits", {"batch_size": "128"}, seed), loss=None, score=accuracy)


def signs(seed: int) -> gl.Recipe:
    """Three layers whose neurons are +1 or -1 and whose weights are their signs."""

    class Sign(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return F.linear(x, torch.where(self.weight > 0, 1.0, -1.0) / self.in_features**0.5, self.bias)

    def build() -> nn.Module:
        return nn.Sequential(Sign(64, 96), Threshold(), Sign(96, 48), Threshold(), Sign(48, 10))

    return gl.Recipe(gl.seeded(seed, build), **load_digits().as_arguments(), loss=F.cross_entropy, dtype="float32")


def macro_f1(output: Tensor, target: Tensor) -> Tensor:
    """Return the mean over classes of F1."""
    predicted = F.one_hot(output.argmax(-1), output.shape[-1])
    true = F.one_hot(target, output.shape[-1])
    both = (predicted * true).sum(0).float()
    return (2 * both / (predicted.sum(0) + true.sum(0)).clamp_min(1)).mean()


def tabular(seed: int) -> gl.Recipe:
    """Classify tumors (breast cancer of Wisconsin) by a small net, scored by F1."""
    from sklearn.datasets import load_breast_cancer

    x, y = load_breast_cancer(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(x))
    x = torch.tensor((x - x.mean(0)) / x.std(0), dtype=torch.float32)[order]
    y = torch.tensor(y)[order]
    train, dev, test = ((x[part], y[part]) for part in (slice(0, 341), slice(341, 455), slice(455, None)))
    model = gl.seeded(seed, lambda: nn.Sequential(nn.Linear(30, 32), nn.ReLU(), nn.Linear(32, 2)))
    return gl.Recipe(model, train, dev, test, score=macro_f1, metrics={"f1": macro_f1})


def pretrain(model: nn.Module, x: Tensor, y: Tensor) -> nn.Module:
    """Train a model by backprop for one pass of the data."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.002)
    for part in range(0, len(x), 100):
        optimizer.zero_grad()
        F.cross_entropy(model(x[part : part + 100]), y[part : part + 100]).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    optimizer.zero_grad()
    return model


def turned(part: tuple[Tensor, Tensor], examples: int) -> tuple[Tensor, Tensor]:
    """Return images that are turned by a right angle."""
    x, y = part
    return torch.rot90(x[:examples], 1, (-2, -1)).contiguous(), y[:examples]


def pretrained(seed: int, *, head: bool = False) -> gl.Recipe:
    """Adapt a convolutional net, trained on MNIST, to digits that lie on their side: its last layer, or all of it."""
    data = load_mnist().reshape(1, 28, 28)
    model = gl.seeded(seed, lambda: pretrain(convolutional(8), *(part[:PRETRAINING] for part in data.train)))
    train, dev, test = turned(data.train, 20000), turned(data.dev, 2000), turned(data.test, 2000)
    trainable = "7.*" if head else None
    goal: dict[str, Any] = {"score": accuracy} if head else {"loss": F.cross_entropy}
    return gl.Recipe(model, train, dev, test, batch_size=64, trainable=trainable, **goal)


def last_layer(seed: int) -> gl.Recipe:
    """Adapt the last layer alone, scored by accuracy."""
    return pretrained(seed, head=True)


def polished(seed: int) -> gl.Recipe:
    """Go on with a net that is good already: a few percent are left, and much can be lost."""
    data = load_mnist()

    def build() -> nn.Module:
        return pretrain(nn.Sequential(nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 10)), *data.train)

    model = gl.seeded(seed, build)
    return gl.Recipe(model, data.train, data.dev, data.test, loss=F.cross_entropy, batch_size=256)


class Bytes(nn.Module):
    """A transformer of two layers that forecasts the next byte."""

    def __init__(self, width: int = 48, tokens: int = 32) -> None:
        super().__init__()
        self.embedding = nn.Embedding(128, width)
        self.position = nn.Parameter(torch.zeros(tokens, width))
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, 0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, 128)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(tokens), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.layers(self.embedding(x) + self.position, mask=self.mask, is_causal=True))
        return out.transpose(1, 2)  # classes second, as cross_entropy has them


def source_text(seed: int) -> gl.Recipe:
    """Forecast the bytes of Python's own documentation strings by a transformer."""
    import inspect
    import statistics

    text = inspect.getsource(statistics) + inspect.getsource(inspect)
    codes = torch.tensor([min(code, 127) for code in text.encode()])
    rows = codes[: len(codes) // 33 * 33].view(-1, 33)
    rows = rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))]
    tenth = len(rows) // 10
    parts = rows[: -2 * tenth], rows[-2 * tenth : -tenth], rows[-tenth:]
    train, dev, test = ((part[:, :-1], part[:, 1:].contiguous()) for part in parts)
    model = gl.seeded(seed, Bytes)
    return gl.Recipe(model, train, dev, test, loss=F.cross_entropy, metrics={"bits": bits}, batch_size=16)


def bits(output: Tensor, target: Tensor) -> Tensor:
    """Return bits per byte."""
    return F.cross_entropy(output, target) / 0.6931471805599453


TASKS = {
    "digits": Task(named("digits", batch_size=128), "accuracy", 128, 250),
    "digits by accuracy": Task(digits_by_accuracy, "accuracy", 128, 200),
    "threshold-digits": Task(named("threshold-digits"), "accuracy", 128, 150),
    "threshold-digits, 1 bit": Task(named("threshold-digits", weights="binary"), "accuracy", 128, 150),
    "1-bit net of three layers": Task(signs, "accuracy", 128, 150),
    "tabular F1": Task(tabular, "f1", 128, 150),
    "mnist-mlp": Task(named("mnist-mlp", machine="cores", batch_size=128), "accuracy", 256, 300),
    "mnist-conv": Task(named("mnist-conv", width=8, batch_size=32), "accuracy", 128, 120),
    "unet-nuclei": Task(named("unet-nuclei", batch_size=8), "dice", 64, 120),
    "lstm-temperature": Task(named("lstm-temperature"), "mse", 64, 120, lower=True),
    "lstm-etth1": Task(named("lstm-etth1", hidden=12), "mse", 64, 100, lower=True),
    "pretrained, last layer by accuracy": Task(last_layer, "accuracy", 64, 120),
    "pretrained, all layers": Task(pretrained, "accuracy", 128, 100),
    "pretrained, same data": Task(polished, "accuracy", 128, 120),
    "transformer on bytes": Task(source_text, "bits", 64, 100, lower=True),
    "CNN with batch norms": Task(more_tasks.of_digits(more_tasks.convolutional), "accuracy", 64, 150),
    "deep net": Task(more_tasks.of_digits(more_tasks.deep, as_images=False), "accuracy", 128, 200),
    "autoencoder": Task(more_tasks.compress, "mse", 128, 200, lower=True),
    "transformer on images": Task(more_tasks.of_digits(more_tasks.Rows), "accuracy", 128, 150),
    "GRU on temperatures": Task(more_tasks.gru_temperature, "mse", 64, 120, lower=True),
    "GRU on bytes": Task(more_tasks.with_net(source_text, more_tasks.NextByte), "bits", 64, 120, lower=True),
    "adder by bits": Task(more_tasks.adder, "bits", 64, 200),
}
