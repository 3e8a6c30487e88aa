"""Journals that earlier versions have stored (scripts/store_journals) replay to the weights that they had then."""

import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from germline.cli.app import app
from germline.strategies import STRATEGIES

GOLDEN = Path(__file__).parent / "golden"
JOURNALS: dict[tuple[str, str], dict[str, Any]] = {
    (index.parent.name, name): entry
    for index in sorted(GOLDEN.glob("*/journals.json"))
    for name, entry in json.loads(index.read_text()).items()
}
RECIPE = ("--recipe", "stored_recipe:recipe")
ELSEWHERE = {  # another machine: other products of matrices, other vector instructions, one thread
    **{"MKL_CBWR": "COMPATIBLE", "ATEN_CPU_CAPABILITY": "default", "OMP_NUM_THREADS": "1"},
    **{"NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": ""},
}


def unpack(version: str, name: str, folder: Path) -> Path:
    """Return the directory of a stored run."""
    with tarfile.open(GOLDEN / version / f"{name}.tar.xz") as archive:
        archive.extractall(folder / name, filter="data")
    return folder / name


def choose_words(version: str, name: str, folder: Path) -> list[str]:
    """Return the arguments of the command that verifies a stored run."""
    recipe = RECIPE if JOURNALS[version, name]["needs_recipe"] else ()
    return ["verify", str(unpack(version, name, folder)), *recipe, "--json"]


def check(printed: str, version: str, name: str) -> None:
    """Compare what a run replays to with what it came to."""
    checked = json.loads(printed.splitlines()[-1])
    assert (checked["generations"], checked["snapshots"]) == (6, 3)
    assert checked["theta_sha256"] == JOURNALS[version, name]["theta_sha256"]


@pytest.mark.parametrize(("version", "name"), JOURNALS)
def test_a_stored_journal_replays(version: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(GOLDEN))
    result = CliRunner().invoke(app, choose_words(version, name, tmp_path))
    assert result.exit_code == 0, result.output
    check(result.stdout, version, name)


@pytest.mark.slow
@pytest.mark.parametrize(("version", "name"), JOURNALS)
def test_a_stored_journal_replays_elsewhere(version: str, name: str, tmp_path: Path) -> None:
    environment = os.environ | ELSEWHERE | {"PYTHONPATH": os.pathsep.join([str(GOLDEN.parent.parent), str(GOLDEN)])}
    command = [sys.executable, "-m", "germline", *choose_words(version, name, tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    check(done.stdout, version, name)


@pytest.mark.parametrize("name", ["snes", "gradient"])
def test_a_stored_run_goes_on(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(GOLDEN))
    for version in sorted({version for version, _ in JOURNALS}):
        run = unpack(version, name, tmp_path / version)
        words = ["resume", str(run), *RECIPE, "--generations", "8", "--json"]
        result = CliRunner().invoke(app, words)
        assert result.exit_code == 0, result.output
        assert json.loads(result.stdout.splitlines()[-1])["generations"] == 8


def test_every_strategy_has_a_stored_journal() -> None:
    for version in {version for version, _ in JOURNALS}:
        names = [name for stored, name in JOURNALS if stored == version]
        assert [strategy for strategy in STRATEGIES if strategy not in names] == []
