"""A run that is killed at any instant and resumed ends as if nothing had happened."""

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

GENERATIONS = 40
KILLS = {"openai-es": 50, "auto": 20, "gradient": 20} | dict.fromkeys(
    ("hybrid-es", "pesgd", "snes", "mu-lambda", "ga", "pso"), 10
)


class Nursery:
    def __init__(self, process: subprocess.Popen[str], commands: IO[str], answers: IO[str]) -> None:
        self.process, self.commands, self.answers = process, commands, answers

    def live(self, path: Path, strategy: str, dies_at: int | None = None, killed_after: float | None = None) -> int:
        """One life of a run; the exit status, negative for a signal."""
        task = {"path": str(path), "strategy": strategy, "generations": GENERATIONS, "dies_at": dies_at}
        self.commands.write(json.dumps(task) + "\n")
        self.commands.flush()
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


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
@pytest.mark.parametrize("strategy", KILLS)
def test_killed_and_resumed_runs_end_with_the_hash_of_an_undisturbed_one(
    nursery: Nursery, strategy: str, tmp_path: Path
) -> None:
    began = time.monotonic()
    assert nursery.live(tmp_path / "undisturbed", strategy) == 0
    lifetime = time.monotonic() - began
    expected = (tmp_path / "undisturbed" / "hash").read_text()
    chance = random.Random(strategy)
    kills, runs = 0, 0
    while kills < KILLS[strategy]:
        runs += 1
        path = tmp_path / f"run{runs}"
        for _ in range(6):
            if chance.random() < 0.5:
                status = nursery.live(path, strategy, dies_at=int(10 ** chance.uniform(0, 3.5)))
            else:
                status = nursery.live(path, strategy, killed_after=chance.random() * lifetime)
            assert status in (0, -signal.SIGKILL)
            kills += status != 0
            if status == 0:
                break
        assert nursery.live(path, strategy) == 0
        assert (path / "hash").read_text() == expected
    assert not list(tmp_path.glob("run*/snapshots/*.partial")) or runs > 1
