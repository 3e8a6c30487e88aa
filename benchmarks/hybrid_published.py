"""Hybrid-ES as its published code computes it, in plain torch: what the paper's text leaves open.

    python benchmarks/hybrid_published.py [--only fixed normalized control gradients] [--seeds 3] [--processes 2]

The net, the data and the steps are those of ``germline train hybrid-es-mnist``: 784-300-10 with sigmoids, 50 batches of
1,000 in one order, steps of 5 by the mean gradient, weights and not biases decayed. Two things are those of the
published code and not of the recipe: each position of a batch has separate biases, 1,000 columns of them, which are not
summed over the batch (rows that say "summed biases" have one column), and the gate tries samples one by one.

``fixed``       the gradients of the first epoch for all further epochs, with and without the gate
``normalized``  gradients whose rows, the weights of a neuron, have one length; as a whole matrix; and as they are
``control``     gradient descent by as many full gradients as Hybrid-ES has at r = 2, 3 and 4
``gradients``   of the first matrix, as the paper draws them: norms, angles and the variance of the components

Accuracies are in percent, of train and dev, medians of the seeds. Nothing is timed.
"""

import argparse
import statistics
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from germline.data import load_mnist_of_hybrid_es

BATCH, BATCHES, HIDDEN = 1000, 50, 300
STEP, L2 = 5.0, 1e-4
EPSILON = 1e-4  # added to lengths by which gradients are divided


@dataclass(frozen=True)
class Case:
    """An experiment.

    Attributes:
        epochs: The passes over the training set.
        gradient_epochs: The epochs in which gradients are computed; afterwards the last one is used.
        samples: The samples of the gate, of which one must be better than no step; 0 has no gate.
        normalized: What is scaled to a length: nothing, each row of a gradient, or the matrix.
        length: That length, of gradients summed over a batch: a step is 5 / 1,000 of it.
        summed_biases: Whether a layer has one column of biases, as the recipe has.
        sigma: The standard deviation of shifts, of gradients summed over a batch.
    """

    epochs: float = 30
    gradient_epochs: float = 30
    samples: int = 0
    normalized: Literal["", "rows", "matrix"] = ""
    length: float = 1.0
    summed_biases: bool = False
    sigma: float = 1.25


CASES = {
    "fixed": {
        "no gate": Case(gradient_epochs=1, epochs=10),
        "gate, one sample": Case(gradient_epochs=1, samples=1),
        "gate, one sample, summed biases": Case(gradient_epochs=1, samples=1, summed_biases=True),
        "gate, two samples, gradients in 10 epochs": Case(gradient_epochs=10, samples=2),
    },
    "normalized": {
        "gradients as they are": Case(),
        "rows of length 1": Case(normalized="rows"),
        "rows of length 1,000, the batch": Case(normalized="rows", length=BATCH),
        "rows of length 1,000, summed biases": Case(normalized="rows", length=BATCH, summed_biases=True),
        "matrices of length 1": Case(normalized="matrix"),
    },
    "control": {f"full gradients of r = {r} alone": Case(epochs=30 / r, gradient_epochs=30 / r) for r in (1, 2, 3, 4)},
}


@dataclass
class Net:
    """The weights of two layers, and their biases: one column, or one for each position of a batch."""

    weights: list[Tensor]
    biases: list[Tensor]

    def hidden(self, x: Tensor) -> Tensor:
        """Return the hidden units: (units, examples)."""
        return torch.sigmoid(self.weights[0] @ x.T + self.biases[0])

    def log_probabilities(self, hidden: Tensor) -> Tensor:
        return torch.log_softmax(self.weights[1] @ hidden + self.biases[1], 0)

    def loss(self, x: Tensor, y: Tensor) -> float:
        return float(F.nll_loss(self.log_probabilities(self.hidden(x)).T, y))

    def accuracy(self, x: Tensor, y: Tensor) -> float:
        """Return the percentage of right answers; batches have the size of those in training."""
        right = [
            (self.log_probabilities(self.hidden(part)).argmax(0) == labels).sum()
            for part, labels in zip(torch.split(x, BATCH), torch.split(y, BATCH), strict=True)
        ]
        return 100 * float(torch.stack(right).sum()) / len(y)

    def gradients(self, x: Tensor, y: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """Return the gradients of the summed loss by the weights, and by the biases of each example."""
        hidden = self.hidden(x)
        second = self.log_probabilities(hidden).exp() - F.one_hot(y, 10).T
        first = (self.weights[1].T @ second) * hidden * (1 - hidden)
        return [first @ x, second @ hidden.T], [first, second]

    def step(self, gradients: list[Tensor]) -> "Net":
        """Return the net after a step of the weights, which decay."""
        moved = [w - g * (STEP / BATCH) - w * (2 * STEP * L2) for w, g in zip(self.weights, gradients, strict=True)]
        return Net(moved, self.biases)


def normalize(gradient: Tensor, case: Case) -> Tensor:
    """Return a gradient with rows of the length that an experiment wants, or of that length as a whole."""
    if not case.normalized:
        return gradient
    length: Tensor = gradient.norm(dim=1, keepdim=True) if case.normalized == "rows" else gradient.norm()
    return gradient * (case.length / (length + EPSILON))


def load(split: str) -> tuple[Tensor, Tensor]:
    x, y = getattr(load_mnist_of_hybrid_es(), split)
    return x.float().flatten(1), y.long()


def make_net(generator: torch.Generator, summed_biases: bool) -> Net:
    columns = 1 if summed_biases else BATCH
    shapes = ((HIDDEN, 784), (10, HIDDEN))
    weights = [torch.randn(shape, generator=generator) for shape in shapes]
    return Net(weights, [torch.zeros(rows, columns) for rows, _ in shapes])


def iterate_batches(x: Tensor, y: Tensor, steps: int) -> Iterator[tuple[int, Tensor, Tensor]]:
    for step in range(steps):
        place = BATCH * (step % BATCHES)
        yield step, x[place : place + BATCH], y[place : place + BATCH]


def train(case: Case, seed: int) -> tuple[float, float]:
    """Return the train and dev accuracy of an experiment."""
    generator = torch.Generator().manual_seed(seed)
    net, (x, y) = make_net(generator, case.summed_biases), load("train")
    for step, inputs, labels in iterate_batches(x, y, round(case.epochs * BATCHES)):
        is_full = step < case.gradient_epochs * BATCHES
        if is_full:
            raw, biases = net.gradients(inputs, labels)
            gradients = [normalize(gradient, case) for gradient in raw]
        if is_full or not case.samples:
            moved = net.step(gradients)
        else:
            before, moved = net.loss(inputs, labels), net
            for _ in range(case.samples):
                shifted = [g + case.sigma * torch.randn(g.shape, generator=generator) for g in gradients]
                if net.step(shifted).loss(inputs, labels) < before:
                    moved = net.step(gradients)  # the shift itself is never applied
                    break
        steps = [b.sum(1, keepdim=True) if case.summed_biases else b for b in biases]
        net = replace(moved, biases=[b - s * (STEP / BATCH) for b, s in zip(net.biases, steps, strict=True)])
    return net.accuracy(x, y), net.accuracy(*load("dev"))


def show_cases(part: str, seeds: int, pool: ProcessPoolExecutor) -> None:
    """Print the accuracies of some experiments."""
    runs = {name: [pool.submit(train, case, seed) for seed in range(seeds)] for name, case in CASES[part].items()}
    for name, futures in runs.items():
        columns = list(zip(*(future.result() for future in futures), strict=True))
        train_dev = (f"{statistics.median(c):6.2f} ({min(c):.2f} to {max(c):.2f})" for c in columns)
        print(f"{part:11} {name:42}", *train_dev, flush=True)


def show_gradients(seed: int = 0, epochs: int = 10) -> None:
    """Print what the paper draws of the first matrix's gradients, summed over a batch, as medians of each epoch."""
    generator = torch.Generator().manual_seed(seed)
    net, (x, y) = make_net(generator, summed_biases=False), load("train")
    rows: list[tuple[float, float, float]] = []
    norm, before = 0.0, None
    for _, inputs, labels in iterate_batches(x, y, epochs * BATCHES):
        gradients, biases = net.gradients(inputs, labels)
        first = gradients[0].flatten()
        mean_norm = float(gradients[0].norm(dim=1).mean())
        cosine = float(F.cosine_similarity(first, before, dim=0)) if before is not None else 0.0
        rows.append((abs(mean_norm - norm), float(torch.tensor(cosine).arccos()), float(first.var())))
        norm, before = mean_norm, first
        biases = [b - g * (STEP / BATCH) for b, g in zip(net.biases, biases, strict=True)]
        net = replace(net.step(gradients), biases=biases)
    print("gradients   changes of the mean norm of a row in the first steps:", *(f"{row[0]:.1f}" for row in rows[:8]))
    for epoch in range(epochs):
        part = rows[epoch * BATCHES : (epoch + 1) * BATCHES]
        change, angle, variance = (statistics.median(column) for column in zip(*part, strict=True))
        text = f"change of the norm {change:5.2f}, angle {angle:.2f} rad, variance of the components {variance:.3f}"
        print(f"gradients   epoch {epoch}: {text}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=[*CASES, "gradients"], default=[*CASES, "gradients"])
    parser.add_argument("--seeds", type=int, default=3, help="runs of each row (default 3)")
    parser.add_argument("--processes", type=int, default=1, help="runs at the same time (default 1)")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{'':54} {'train':>24} {'dev':>24}")
    with ProcessPoolExecutor(arguments.processes, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        for part in arguments.only:
            if part == "gradients":
                show_gradients()
            else:
                show_cases(part, arguments.seeds, pool)


if __name__ == "__main__":
    main()
