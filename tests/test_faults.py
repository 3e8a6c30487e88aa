"""A fleet of which one rank is killed or frozen, again and again, ends like an undisturbed run.

GERMLINE_FAULTS=20 python -m pytest tests/test_faults.py -s     20 faults, printed as they happen
"""

import json
import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
from contextlib import closing, suppress
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

FAULTS = int(os.environ.get("GERMLINE_FAULTS", "6"))
GENERATIONS = 500 * FAULTS
TIMEOUT = 5  # seconds until a silent rank is given up
NOTICED = 60.0  # seconds after the timeout in which the other ranks must have ended, on a busy machine
BIN = Path(sys.executable).parent


def count_generations(run: Path) -> int:
    """Return the number of generations in a journal."""
    try:
        with closing(sqlite3.connect(f"file:{run}/journal.sqlite?mode=ro", uri=True)) as connection:
            return int((connection.execute("SELECT generation FROM tip").fetchone() or [-1])[0]) + 1
    except sqlite3.Error:
        return 0


def child_processes(launcher: int) -> list[int]:
    """Return the processes that a launcher has started."""
    return [int(child) for child in Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()]


def is_running(process: int) -> bool:
    """Return whether a process runs, and is not one that has ended and whose parent has not noticed."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_for_generations(run: Path, launcher: "subprocess.Popen[str]", beyond: int) -> bool:
    """Wait until more generations are finished; return False if the run ends before."""
    while launcher.poll() is None:
        if count_generations(run) > beyond:
            return True
        time.sleep(0.05)
    return False


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the processes of torchrun are found in /proc")
def test_a_fleet_survives_kills_and_freezes(tmp_path: Path) -> None:
    arguments = ["train", "digits", "--population", "32", "--device", "cpu", "--json", "--runs", str(tmp_path)]
    arguments += ["--generations", str(GENERATIONS)]
    alone = subprocess.run([str(BIN / "germline"), *arguments, "--name", "undisturbed"], capture_output=True, text=True)
    expected = json.loads(alone.stdout.splitlines()[-1])["theta_sha256"]
    torchrun = [str(BIN / "torchrun"), "--standalone", "--nproc-per-node=3", f"--max-restarts={2 * FAULTS}"]
    fleet = ["--fleet", "spmd", "--exchange", "chromosome", "--timeout", str(TIMEOUT), "--name", "disturbed"]
    command = [*torchrun, "--no-python", str(BIN / "germline"), *arguments, *fleet]
    chance, run = random.Random(FAULTS), tmp_path / "disturbed"
    faults = {signal.SIGKILL: 0, signal.SIGSTOP: 0}  # how often each has happened
    with (
        (tmp_path / "stderr").open("w") as errors,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, start_new_session=True) as launcher,
    ):
        try:
            while sum(faults.values()) < FAULTS and launcher.poll() is None:
                before, fault = count_generations(run), chance.choice(list(faults))
                time.sleep(chance.uniform(0, 8))  # while ranks start, or while they work
                if fault == signal.SIGSTOP and not wait_for_generations(run, launcher, before):
                    break  # until all have arrived, a frozen rank looks like one that still loads its libraries
                victims = child_processes(launcher.pid)
                if len(victims) < 3:
                    continue
                victim = chance.choice(victims)
                with suppress(ProcessLookupError):
                    os.kill(victim, fault)
                    faults[fault] += 1
                    print(f"generation {count_generations(run)}: {fault.name}", flush=True)
                if fault == signal.SIGSTOP:
                    until = time.monotonic() + TIMEOUT + NOTICED
                    while any(is_running(other) for other in victims if other != victim):
                        assert time.monotonic() < until, "the other ranks have not noticed"
                        time.sleep(0.05)
                    with suppress(ProcessLookupError):
                        os.kill(victim, signal.SIGCONT)  # it wakes up when it has been given up
                while any(map(is_running, victims)):
                    time.sleep(0.05)
            output = launcher.communicate(timeout=300)[0]
        finally:
            if launcher.poll() is None:
                for process in (*child_processes(launcher.pid), launcher.pid):  # ranks have other process groups
                    with suppress(ProcessLookupError):
                        os.kill(process, signal.SIGKILL)
    assert launcher.returncode == 0, (tmp_path / "stderr").read_text()[-3000:]
    summary = json.loads(output.splitlines()[-1])
    assert (summary["theta_sha256"], summary["generations"]) == (expected, GENERATIONS)
    assert sum(faults.values()) == FAULTS
