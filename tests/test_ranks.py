"""Two ranks of an spmd fleet, as threads of this process: every strategy, by every exchange, has the same weights."""

from pathlib import Path

import pytest

import germline as gl
from germline.errors import FleetLostError
from tests.ranks import STRATEGIES, in_shards, modes_of, problem, trained
from tests.threads import ranks_as_threads


@pytest.mark.parametrize("name", STRATEGIES)
def test_two_ranks_have_the_weights_of_one_process(name: str, tmp_path: Path) -> None:
    alone = trained(STRATEGIES[name], tmp_path / "alone", gl.Local("cpu", workers=1))
    with ranks_as_threads(2) as run:
        for mode in modes_of(name):
            fleets = [gl.SPMD(mode, device="cpu", timeout=60) for _ in range(2)]
            assert run(lambda rank: trained(STRATEGIES[name], tmp_path / mode, fleets[rank])) == [alone, alone]  # noqa: B023


@pytest.mark.parametrize("name", [name for name in STRATEGIES if STRATEGIES[name].has_semi_updates])
def test_semi_updates_have_the_weights_of_as_many_shards(name: str, tmp_path: Path) -> None:
    alone = trained(in_shards(STRATEGIES[name], 2), tmp_path / "alone", gl.Local("cpu", workers=1))
    with ranks_as_threads(2) as run:
        fleets = [gl.SPMD("semi", device="cpu", timeout=60) for _ in range(2)]
        assert run(lambda rank: trained(STRATEGIES[name], tmp_path / "semi", fleets[rank])) == [alone, alone]


def test_what_differs_between_ranks_is_named(tmp_path: Path) -> None:
    with ranks_as_threads(2) as run:

        def train(rank: int) -> str:
            fleet = gl.SPMD(device="cpu", timeout=60)
            return trained(STRATEGIES["snes"], tmp_path / "run", fleet, **problem(hidden=9 + rank))

        with pytest.raises(gl.BadInput, match="Rank 1 has another model"):
            run(train)


def test_a_rank_that_dies_ends_the_others_with_a_sentence(tmp_path: Path) -> None:
    said: dict[int, str] = {}
    with ranks_as_threads(2) as run:

        def train(rank: int) -> None:
            def die(session: object, row: object) -> None:
                raise SystemExit("this rank dies")

            fleet = gl.SPMD(device="cpu", timeout=5)
            try:
                callbacks = [die] if rank == 1 else []
                gl.train(**problem(), strategy=STRATEGIES["snes"], fleet=fleet, run=tmp_path / "run", callbacks=callbacks)
            except FleetLostError as error:
                said[rank] = str(error)

        with pytest.raises(SystemExit):
            run(train)
    assert "has died, or has not answered" in said[0]
    assert "Every finished generation is in the journal" in said[0]
