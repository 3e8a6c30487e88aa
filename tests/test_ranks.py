"""Two ranks of an spmd fleet, as threads of this process: every strategy, by every exchange, has the same weights."""

import copy
from pathlib import Path

import pytest

import germline as gl
from germline.errors import FleetLostError
from germline.fleet.spmd.exchange import Exchange
from tests.ranks import STRATEGIES, exact_modes, problem, train, with_shards
from tests.threads import ranks_as_threads

MODEL = problem()["model"]  # made before there are threads: torch has one random generator for all of them
# of the others, members with new initial weights draw from that generator: tests/test_spmd.py runs them as processes
THREADED = [name for name, strategy in STRATEGIES.items() if vars(strategy).get("diversity") != "reset"]


def train_ranks(name: str, mode: Exchange, path: Path) -> list[str]:
    """Return the hashes of the weights that each of two ranks ends with."""
    with ranks_as_threads(2) as run:

        def train_rank(rank: int) -> str:
            return train(STRATEGIES[name], path, gl.SPMD(mode, device="cpu", timeout=60), model=copy.deepcopy(MODEL))

        return run(train_rank)


@pytest.mark.parametrize("name", THREADED)
def test_two_ranks_have_the_weights_of_one_process(name: str, tmp_path: Path) -> None:
    alone = train(STRATEGIES[name], tmp_path / "alone", gl.Local("cpu", workers=1))
    for mode in exact_modes(name):
        assert train_ranks(name, mode, tmp_path / mode) == [alone, alone]


@pytest.mark.parametrize("name", [name for name in STRATEGIES if STRATEGIES[name].has_semi_updates])
def test_semi_updates_have_the_weights_of_as_many_shards(name: str, tmp_path: Path) -> None:
    alone = train(with_shards(STRATEGIES[name], 2), tmp_path / "alone", gl.Local("cpu", workers=1))
    assert train_ranks(name, "semi", tmp_path / "semi") == [alone, alone]


def test_what_differs_between_ranks_is_named(tmp_path: Path) -> None:
    with ranks_as_threads(2) as run:

        def train_rank(rank: int) -> str:
            fleet = gl.SPMD(device="cpu", timeout=60)
            return train(STRATEGIES["openai-es"], tmp_path / "run", fleet, **problem(hidden=9 + rank))

        with pytest.raises(gl.BadInput, match="Rank 1 has another model"):
            run(train_rank)


def test_a_rank_that_dies_ends_the_others_with_a_sentence(tmp_path: Path) -> None:
    said: dict[int, str] = {}
    with ranks_as_threads(2) as run:

        def train_rank(rank: int) -> None:
            def die(session: object, row: object) -> None:
                raise SystemExit("this rank dies")

            fleet = gl.SPMD(device="cpu", timeout=5)
            try:
                settings = problem() | {"model": copy.deepcopy(MODEL), "fleet": fleet, "callbacks": [die] * rank}
                gl.train(**settings, run=tmp_path / "run", strategy=STRATEGIES["snes"])
            except FleetLostError as error:
                said[rank] = str(error)

        with pytest.raises(SystemExit):
            run(train_rank)
    assert "has died, or has not answered" in said[0]
    assert "Every finished generation is in the journal" in said[0]
