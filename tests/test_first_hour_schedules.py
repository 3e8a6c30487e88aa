"""Schedules over the budget of a run: they end when the run does, whichever limit that is."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import germline as gl
from germline.engine import loop, opening
from germline.engine.journal import Journal
from germline.engine.replay import verify
from germline.engine.stopping import Stop
from germline.recipes import Recipe
from tests.ranks import train as train_rank
from tests.threads import ranks_as_threads

OVER_RUN = gl.OpenAIES(population=16, sigma=gl.Schedule("cosine", 0.2, 0.1), lr=gl.Schedule("linear", 0.1, 0.0))


def problem() -> dict[str, Any]:
    """Return a small regression."""
    x = torch.randn(64, 3, generator=torch.Generator().manual_seed(0))
    return {
        "model": gl.seeded(0, lambda: nn.Linear(3, 1)),
        "data": (x, x.sum(1, keepdim=True)),
        "loss": F.mse_loss,
        "batch_size": 16,
        "fleet": gl.Local("cpu", workers=1),
    }


def test_a_schedule_over_the_run_is_one_over_as_many_generations(tmp_path: Path) -> None:
    over_run = gl.train(**problem(), strategy=OVER_RUN, generations=20, run=tmp_path / "a")
    sigma, lr = gl.Schedule("cosine", 0.2, 0.1, 20), gl.Schedule("linear", 0.1, 0.0, 20)
    counted = gl.train(
        **problem(), strategy=OVER_RUN.with_settings(sigma=sigma, lr=lr), generations=20, run=tmp_path / "b"
    )
    assert over_run.summary["theta_sha256"] == counted.summary["theta_sha256"]
    assert [row["lr"] for row in over_run.history] == pytest.approx([0.1 * (1 - g / 20) for g in range(20)])


def test_seconds_without_generations_do_not_run_on_with_a_learning_rate_of_zero(tmp_path: Path) -> None:
    result = gl.train(**problem(), strategy=OVER_RUN, seconds=0.5, run=tmp_path / "run")
    rates = [row["lr"] for row in result.history]
    assert result.summary["stopped_by"] == "seconds"
    assert rates == sorted(rates, reverse=True)
    assert 0 < rates[-1] < 0.05 < rates[0] == 0.1
    journal = Journal.open(tmp_path / "run")
    assert verify(opening.open_for_replay(journal))["theta_sha256"] == result.summary["theta_sha256"]
    journal.close()


def test_an_interrupted_run_goes_on_with_its_schedule(tmp_path: Path) -> None:
    about = problem()
    fleet = about.pop("fleet")
    recipe, stop = Recipe(**about, strategy=OVER_RUN), Stop(evaluations=16 * 20)
    hashes = []
    for name, first in (("straight", None), ("interrupted", 9)):
        session = opening.start(recipe, tmp_path / name, seed=0, fleet=fleet, about={}, stop=stop)

        def interrupt(session: Any, row: dict[str, Any], first: int | None = first) -> None:
            session.interrupted = row["generation"] == first

        summary = loop.run(session, stop, [interrupt])
        if first is not None:
            assert (summary["stopped_by"], summary["generations"]) == ("interrupt", 10)
            session.require_journal().close()
            session = opening.resume(recipe, Journal.open(tmp_path / name), fleet)
            summary = loop.run(session, stop)
        session.require_journal().close()
        assert summary["generations"] == 20
        hashes.append(summary["theta_sha256"])
    assert hashes[0] == hashes[1]


def test_ranks_agree_on_a_schedule_over_the_run(tmp_path: Path) -> None:
    alone = train_rank(OVER_RUN, tmp_path / "alone", gl.Local("cpu", workers=1))
    with ranks_as_threads(2) as run:
        path = tmp_path / "ranks"
        hashes = run(lambda rank: train_rank(OVER_RUN, path, gl.SPMD("chromosome", device="cpu", timeout=60)))
    assert hashes == [alone, alone]


def test_a_search_does_not_know_its_end() -> None:
    with pytest.raises(gl.BadInput, match="give the schedule a number of generations"):
        gl.Search(nn.Linear(3, 1), OVER_RUN, loss=F.mse_loss)
