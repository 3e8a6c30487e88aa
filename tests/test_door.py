"""The door of a cluster: one coordinator for a run, strangers that connect, and keys."""

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from germline.fleet.spmd.launch import free_port
from tests.test_cluster import GERMLINE, LONG, RUN
from tests.test_cluster_processes import ProcessFleet, start_fleet  # noqa: F401
from tests.test_first_hour_trainer import run_in_terminal

pytestmark = pytest.mark.slow

SERVE = """
import subprocess, sys
from germline.cli import main
worker = [sys.executable, "-m", "germline", "worker", "127.0.0.1:{port}", "--recipe", "digits", "--device", "cpu"]
with subprocess.Popen(worker, stderr=subprocess.DEVNULL):
    where = ["--listen", "127.0.0.1:{port}", "--status", "127.0.0.1:0", "--device", "cpu", "--json"]
    sys.argv = ["germline", "serve", "digits", "--population", "16", "--generations", "3", *where]
    main()
"""


def test_serve_shows_what_it_does_before_the_first_generation(tmp_path: Path) -> None:
    sent = run_in_terminal(SERVE.format(port=free_port()), 80, tmp_path / "stdout")
    for stage in ("loading data", "choosing how members are evaluated", "computing the first generation"):
        assert stage in sent, sent


def test_a_run_has_one_coordinator_at_a_time(start_fleet: Callable[..., ProcessFleet]) -> None:  # noqa: F811
    """A second one ends with a sentence, and the first goes on."""
    fleet = start_fleet(LONG)
    fleet.wait_for_line("waiting for workers")
    command = [*GERMLINE, "serve", *RUN, "--listen", "127.0.0.1:0", "--status", "127.0.0.1:0"]
    command += ["--runs", str(fleet.folder / "runs"), "--name", "run", "--generations", str(LONG)]
    second = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert second.returncode == 2
    assert "Another coordinator serves the run" in second.stderr
    assert "Traceback" not in second.stderr
    assert fleet.coordinator.poll() is None
