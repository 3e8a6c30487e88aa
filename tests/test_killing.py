"""A run that is killed at any instant and resumed ends like an undisturbed run."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO

import pytest

from germline.engine.journal import Journal
from germline.engine.opening import rebuild
from germline.engine.replay import verify
from germline.fleet import Local
from tests.nursery import make_recipe

GENERATIONS = 40
SNAPSHOTS = [0, 7, 14, 21, 28, 35, 40]  # every 7 generations, and at the end
FAST = "pesgd"  # the strategy whose runs are killed in the fast tests, too
KILLS = {"openai-es": 50, "auto": 20, "gradient": 20} | dict.fromkeys(
    ("hybrid-es", "pesgd", "snes", "mu-lambda", "ga", "pso"), 10
)


class Nursery:
    """The process of ``nursery.py``, which forks a child for each run."""

    def __init__(self, process: subprocess.Popen[str], requests: IO[str], answers: IO[str]) -> None:
        self.process, self.requests, self.answers = process, requests, answers

    def run(self, path: Path, strategy: str, dies_at: int | None = None, killed_after: float | None = None) -> int:
        """Start or resume a run in a child; return the child's exit status, negative for a signal."""
        request = {"path": str(path), "strategy": strategy, "generations": GENERATIONS, "dies_at": dies_at}
        self.requests.write(json.dumps(request) + "\n")
        self.requests.flush()
        child = int(self.answers.readline())
        if killed_after is not None:
            time.sleep(killed_after)
            with suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        return int(self.answers.readline())


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    script = Path(__file__).parent / "nursery.py"
    with subprocess.Popen(
        [sys.executable, str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield Nursery(process, process.stdin, process.stdout)
        process.stdin.close()


def check_files(path: Path) -> None:
    """Check that a finished run holds whole files alone; a kill may have cost a snapshot, and left a partial folder."""
    names = ["hash", "journal.end", "journal.sqlite", "model.safetensors", "snapshots"]
    assert sorted(file.name for file in path.iterdir()) == names
    files = list((path / "snapshots").iterdir())
    whole = {int(file.stem) for file in files if file.suffix == ".safetensors"}
    partial = {int(file.stem) for file in files if file.suffix == ".partial"}
    assert len(whole) + len(partial) == len(files)
    assert {SNAPSHOTS[0], SNAPSHOTS[-1]} <= whole <= set(SNAPSHOTS)
    assert partial <= set(SNAPSHOTS)
    for number in partial & whole:  # the content of the folder has become the snapshot
        assert not list((path / "snapshots" / f"{number:08}.partial").iterdir())


def check_replay(path: Path, strategy: str, expected: str) -> None:
    """Check that the journal of a finished run replays to its weights and to all its snapshots."""
    journal = Journal.open(path)
    try:
        snapshots = journal.snapshots()
        outcome = verify(rebuild(make_recipe(strategy), journal, Local("cpu")))
    finally:
        journal.close()
    assert outcome == {"generations": GENERATIONS, "snapshots": len(snapshots), "theta_sha256": expected}


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork on this system")
@pytest.mark.parametrize(
    "strategy", [pytest.param(name, marks=() if name == FAST else pytest.mark.slow) for name in KILLS]
)
def test_killed_and_resumed_runs_end_with_the_hash_of_an_undisturbed_run(
    nursery: Nursery, strategy: str, tmp_path: Path
) -> None:
    started = time.monotonic()
    assert nursery.run(tmp_path / "undisturbed", strategy) == 0
    lifetime = time.monotonic() - started
    expected = (tmp_path / "undisturbed" / "hash").read_text()
    chance = random.Random(strategy)
    kills, runs = 0, 0
    while kills < KILLS[strategy]:
        runs += 1
        path = tmp_path / f"run{runs}"
        for _ in range(6):
            if chance.random() < 0.5:
                status = nursery.run(path, strategy, dies_at=int(10 ** chance.uniform(0, 3.5)))
            else:
                status = nursery.run(path, strategy, killed_after=chance.random() * lifetime)
            assert status in (0, -signal.SIGKILL)
            kills += status != 0
            if status == 0:
                break
        assert nursery.run(path, strategy) == 0
        assert (path / "hash").read_text() == expected
        check_files(path)
    check_replay(path, strategy, expected)
