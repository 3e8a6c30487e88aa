"""Data, batches and objectives."""

import random
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from germline.errors import BadInput
from germline.metrics import accuracy
from germline.objective import Batch, Batches, Data, Objective, build_objective

X, Y = torch.arange(20.0).reshape(10, 2), torch.arange(10)


class Dicts(Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 10

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        return {"x": X[i], "label": Y[i]}


SOURCES: dict[str, Any] = {
    "tensors": (X, Y),
    "dict": {"x": X, "label": Y},
    "dataset": TensorDataset(X, Y),
    "loader": DataLoader(TensorDataset(X, Y), batch_size=4, shuffle=True),
    "loader of dicts": DataLoader(Dicts(), batch_size=4),
}


@pytest.mark.parametrize("source", SOURCES.values(), ids=list(SOURCES))
def test_examples_by_number_from_every_source(source: Any) -> None:
    data = Data.from_source(source)
    assert data.length == 10
    assert data.batch_size == (4 if isinstance(source, DataLoader) else None)
    batch = data.fetch(np.array([7, 2]))
    inputs = batch.kwargs["x"] if batch.kwargs else batch.args[0]
    assert torch.equal(inputs, X[[7, 2]])
    assert batch.target.tolist() == [7, 2]
    assert batch.size == 2
    assert data.fingerprint == Data.from_source(source).fingerprint


def test_fingerprints_differ_between_data_sets() -> None:
    other = X.clone()
    other[3, 1] = 0
    fingerprints = {
        Data.from_source(s).fingerprint
        for s in ((X, Y), (other, Y), (X.double(), Y), (X[:9], Y[:9]), TensorDataset(other, Y))
    }
    assert len(fingerprints) == 5


def test_the_batch_is_a_function_of_seed_and_generation() -> None:
    data = Data.from_source((X, Y))
    batches = Batches(data, 4, seed=1)
    forwards = [batches.indices(g).tolist() for g in range(9)]
    backwards = [Batches(data, 4, seed=1).indices(g).tolist() for g in reversed(range(9))][::-1]
    assert forwards == backwards
    assert forwards != [Batches(data, 4, seed=2).indices(g).tolist() for g in range(9)]
    assert len(set(forwards[0] + forwards[1])) == 8  # an epoch is two batches of a permutation; two examples wait
    assert Batches(data, 10, seed=1).indices(5).tolist() == list(range(10))


def test_two_inputs_and_keyword_inputs_reach_the_model() -> None:
    def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return a * b

    objective = Objective(lambda output, target: (output - target).sum())
    assert objective.score(product, Batch.from_raw((torch.ones(2), torch.full((2,), 3.0), torch.ones(2)))) == 4
    batch = Batch.from_raw({"b": torch.ones(2), "a": torch.full((2,), 2.0), "target": torch.ones(2)})
    assert objective.score(product, batch) == 2


class Augmented(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """A data set that draws from all three global generators, as transforms do."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        return X[i] + torch.randn(2) + random.random() + np.random.rand(), Y[i]  # noqa: NPY002


def test_random_transforms_are_a_function_of_seed_and_generation() -> None:
    before = torch.get_rng_state()
    data = Data.from_source(Augmented())
    assert data.fingerprint == Data.from_source(Augmented()).fingerprint
    one, two, other = (Batches(data, 4, seed=s).batch(3).args[0] for s in (1, 1, 2))
    assert torch.equal(one, two)
    assert not torch.equal(one, other)
    assert not torch.equal(one, Batches(data, 4, seed=1).batch(4).args[0])
    assert torch.equal(torch.get_rng_state(), before)


def test_metrics_of_a_split_are_averages_over_its_examples() -> None:
    x, y = torch.randn(2500, 3), torch.randint(0, 3, (2500,))
    model = nn.Linear(3, 3)
    objective = Objective(F.cross_entropy, metrics={"accuracy": accuracy})
    metrics = objective.evaluate(model, Data.from_source((x, y)), "cpu")
    assert metrics["loss"] == pytest.approx(F.cross_entropy(model(x), y).item(), rel=1e-5)
    assert metrics["accuracy"] == pytest.approx((model(x).argmax(1) == y).float().mean().item(), rel=1e-5)


class Endless(torch.utils.data.IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(10))


@pytest.mark.parametrize(
    ("attempt", "sentence"),
    [
        (lambda: Data.from_source((X, Y[:9])), "one length"),
        (lambda: Data.from_source((X,)), "inputs and target"),
        (lambda: Data.from_source((X[:0], Y[:0])), "empty"),
        (lambda: Data.from_source((X, [1, 2])), "not a tensor"),
        (lambda: Data.from_source((X / 0, Y)), "NaN or infinite"),
        (lambda: Data.from_source(TensorDataset(X * float("nan"), Y)), "NaN or infinite"),
        (lambda: Data.from_source(3), "give a tuple"),
        (lambda: Data.from_source(Endless()), "iterable"),
        (lambda: Batch.from_raw({"x": X}), "target"),
        (lambda: Batch.from_raw(X), "tuple of inputs"),
        (lambda: build_objective(None, None, None, None, {}), "exactly one"),
        (lambda: build_objective(accuracy, accuracy, None, None, {}), "loss and score"),
        (lambda: build_objective(F.mse_loss, None, None, True, {}), "minimized"),
    ],
)
def test_bad_data_raises_an_error_that_says_why(attempt: Any, sentence: str) -> None:
    with pytest.raises(BadInput, match=sentence):
        attempt()
