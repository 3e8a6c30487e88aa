"""Chains of mutations are the genetic algorithm with its parents in memory, bit for bit, and take few bytes."""

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import germline as gl
from germline.engine.journal import Journal
from germline.strategies import AnyStrategy, pack


def train(strategy: AnyStrategy, run: Path, generations: int = 40) -> gl.Result:
    x = torch.randn(32, 4, generator=torch.Generator().manual_seed(0))
    return gl.train(
        gl.seeded(1, lambda: nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))),
        (x, x[:, :1] * x[:, 1:2]),
        loss=F.mse_loss,
        strategy=strategy,
        generations=generations,
        run=run,
    )


@pytest.mark.parametrize("parents", [1, 5])
def test_chains_are_the_dense_algorithm_on_the_same_addresses(parents: int, tmp_path: Path) -> None:
    deep = train(gl.DeepGA(population=30, parents=parents, sigma=0.1), tmp_path / "deep")
    dense = train(
        gl.GA(population=30, parents=parents, elites=1, crossover="none", sigma=0.1, mutation=1.0), tmp_path / "dense"
    )
    records = [list(Journal.open(tmp_path / name).records()) for name in ("deep", "dense")]
    for a, b in zip(*records, strict=True):
        assert a.result.scores.tobytes() == b.result.scores.tobytes()
    assert deep.summary["theta_sha256"] == dense.summary["theta_sha256"]
    assert deep.history[-1]["best"] < deep.history[0]["best"]


def test_chains_end_at_the_last_common_ancestor() -> None:
    """An individual is as long as its family tree is deep, not as the run is."""
    x = torch.randn(16, 4, generator=torch.Generator().manual_seed(0))
    search = gl.Search(gl.seeded(1, lambda: nn.Linear(4, 1)), gl.DeepGA(population=64, parents=8), loss=F.mse_loss)
    longest = 0
    for _ in range(300):
        search.step(x, x[:, :1])
        longest = max(longest, *(len(chain) // 2 for chain in search._session.state.chains))
    assert longest < 100
    tree, _ = pack(search._session.state)
    assert len(json.dumps(tree)) < 10_000
