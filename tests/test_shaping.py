"""Fitness shaping turns scores into integer utilities."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from germline.optim.shaping import (
    CLIP,
    ONE,
    ranks,
    shape_by_shard,
    utilities,
    utilities_by_rank,
    utility_unit,
    zscores,
)
from germline.optim.tensor_shaping import rank_tensor, utilities_by_tensor_rank

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("size", [1, 2, 7, 50])
def test_ranks_are_how_many_are_worse_less_how_many_are_better(size: int, maximize: bool) -> None:
    random = np.random.default_rng(size)
    scores = random.integers(0, 10, size).astype(np.float32)  # with ties
    scores[random.random(size) < 0.1] = random.choice([NAN, INF, -INF])

    def better(a: float, b: float) -> bool:
        if not math.isfinite(b):
            return math.isfinite(a)
        return math.isfinite(a) and (a > b if maximize else a < b)

    expected = [sum(better(a, b) for b in scores) - sum(better(b, a) for b in scores) for a in scores]
    assert ranks(scores, maximize=maximize).tolist() == expected
    assert sum(expected) == 0


def test_scores_are_float32_before_anything_else() -> None:
    assert ranks(np.array([1.0, 1.0 + 1e-12]), maximize=True).tolist() == [0, 0]
    assert utilities(np.array([1e300, 1.0]), "ranks", maximize=True) is not None
    assert ranks(np.array([1e300, 1.0]), maximize=True).tolist() == [-1, 1]  # infinite in float32, hence worst


def test_zscores_by_hand() -> None:
    # mean 4, standard deviation sqrt((9 + 1 + 16) / 3): (1 - 4) / 2.943920 = -1.019049
    got = zscores(np.array([1.0, 3.0, 8.0]), maximize=True)
    assert (got / ONE).tolist() == pytest.approx([-1.019049, -0.339683, 1.358732], abs=1 / ONE)
    assert zscores(np.array([1.0, 3.0, 8.0]), maximize=False).tolist() == (-got).tolist()
    assert zscores(np.array([5.0, 5.0, NAN]), maximize=True).tolist() == [0, 0, -CLIP]
    wild = np.array([0.0] * 1000 + [1.0])
    assert zscores(wild, maximize=True).max() == CLIP


@pytest.mark.parametrize("shaping", ["ranks", "zscore"])
def test_there_are_no_utilities_without_a_finite_score(shaping: str) -> None:
    assert utilities(np.array([NAN, INF, -INF]), shaping, maximize=True) is None  # type: ignore[arg-type]
    one_finite = utilities(np.array([NAN, 2.0, -INF]), shaping, maximize=True)  # type: ignore[arg-type]
    assert one_finite is not None
    assert one_finite.argmax() == 1


def test_centered_ranks_span_one() -> None:
    spread = ranks(np.arange(10.0), maximize=True) * utility_unit("ranks", 10)
    assert (spread.min(), spread.max()) == (-0.5, 0.5)


def test_shards_are_shaped_without_each_other() -> None:
    scores = np.array([4.0, 3.0, NAN, INF, 1.0, 2.0])

    def shape(part: NDArray[Any]) -> NDArray[np.int64] | None:
        return utilities(part, "ranks", maximize=True)

    shaped = shape_by_shard(scores, 3, shape)
    assert shaped is not None
    assert shaped.tolist() == [1, -1, 0, 0, -1, 1]
    assert shape_by_shard(np.full(4, NAN), 2, shape) is None


def test_zscores_are_those_of_the_finite_scores() -> None:
    """Check by hand: (1, 3) has a mean of 2 and a standard deviation of 1, and what is not finite is the worst."""
    for worst in (NAN, INF, -INF):
        scores = np.array([1.0, worst, 3.0], np.float32)
        assert (zscores(scores, maximize=True) / ONE).tolist() == [-1.0, -CLIP / ONE, 1.0]
        assert (zscores(scores, maximize=False) / ONE).tolist() == [1.0, -CLIP / ONE, -1.0]


def test_zscores_are_worth_standard_deviations() -> None:
    worth = zscores(np.array([1.0, 3.0]), maximize=True) * utility_unit("zscore", 2)
    assert worth.tolist() == [-1.0, 1.0]


@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("size", [1, 2, 7, 50, 4097])
def test_tensors_have_the_utilities_of_arrays(size: int, maximize: bool) -> None:
    random = np.random.default_rng(size)
    table = random.integers(-(1 << 20), 1 << 20, size).tolist()
    for values in (random.integers(0, 10, size), random.normal(size=size), np.zeros(size), -np.zeros(size)):
        scores = values.astype(np.float32)
        for share in (0.0, 0.1, 0.9):
            scores[random.random(size) < share] = random.choice([NAN, INF, -INF, -0.0])
            tensor = torch.from_numpy(scores)
            assert rank_tensor(tensor, maximize=maximize).tolist() == ranks(scores, maximize=maximize).tolist()
            utilities_of_tensor = utilities_by_tensor_rank(tensor, table, maximize=maximize)
            assert utilities_of_tensor.tolist() == utilities_by_rank(scores, table, maximize=maximize).tolist()
