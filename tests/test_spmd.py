"""Many processes that do one work: the same bits, whoever did what."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import germline as gl
from germline.errors import BadInput
from germline.fleet.exchange import refuse
from germline.fleet.launch import launched
from germline.fleet.spmd import deal
from germline.genome import theta_sha256
from germline.journal import Journal
from germline.replay import reopen, verify
from tests import ranks

SCRIPT = Path(ranks.__file__)
BIN = Path(sys.executable).parent


def environment(**more: str) -> dict[str, str]:
    path = f"{SCRIPT.parent.parent}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, **more}


def launch(processes: int, *arguments: str) -> list[Any]:
    """What each process of a torchrun answers; in the order in which they end."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    done = subprocess.run([*command, str(SCRIPT), *arguments], capture_output=True, text=True, env=environment())
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(lines) == processes
    return lines


@pytest.mark.parametrize("processes", [1, 2, 3, 4])
def test_weights_do_not_depend_on_processes_or_exchange(processes: int, tmp_path: Path) -> None:
    local = gl.Local("cpu", 1)
    expected: dict[str, str] = {}
    for name, strategy in ranks.STRATEGIES.items():
        plain = ranks.trained(strategy, tmp_path / f"{name} local", local)
        expected |= {f"{name} by {mode}": plain for mode in ranks.modes_of(name)}
        if hasattr(strategy, "shards"):  # semi-updates are the update of as many shards
            shards = ranks.in_shards(strategy, processes)
            expected[f"{name} by semi"] = ranks.trained(shards, tmp_path / f"{name} semi local", local)
    assert processes == 1 or expected["snes by semi"] != expected["snes by replay"]
    for found in launch(processes, "hashes", str(tmp_path)):
        assert found == expected
    for mode in ("chromosome", "semi"):  # snapshots are whole, and records enough
        assert verify(reopen(Journal.open(tmp_path / f"snes {mode}")))["theta_sha256"] == expected[f"snes by {mode}"]


def test_runs_go_on_in_a_fleet(tmp_path: Path) -> None:
    names = ("openai-es", "snes", "openai-es, scheduled")
    expected = [ranks.trained(ranks.STRATEGIES[name], tmp_path / f"{name} whole", gl.Local("cpu")) for name in names]
    for name in names:
        ranks.trained(ranks.STRATEGIES[name], tmp_path / name, gl.Local("cpu"), generations=5)
    refused = f"The number of shards is not that of {tmp_path / names[0]}: a run goes on only with what it began with."
    for found in launch(2, "resumed", str(tmp_path), *names):
        assert found[:3] == expected
        assert refused in found[3]


def test_processes_that_are_about_something_else_are_told_so(tmp_path: Path) -> None:
    expected = ranks.trained(ranks.STRATEGIES["openai-es"], tmp_path / "local", gl.Local("cpu"))
    for found in launch(2, "disagreements", str(tmp_path)):
        assert found.pop("sent") == expected
        words = {
            "weights": "initial weights",
            "layout": "model",
            "data": "data set (train)",
            "batches": "recipe",
            "seed": "strategy",
            "limit": "limit at which to stop",
            "target": "no_such_metric",
            "score": "the score cannot be computed",
        }
        assert {name for name, said in found.items() if words[name] in said} == set(words), found
        assert all("Rank 1" in found[name] for name in ("weights", "layout", "data", "batches", "seed", "limit"))


def test_search_in_a_fleet_is_search(tmp_path: Path) -> None:
    given = ranks.problem()
    x, y = given["data"]
    search = gl.Search(given["model"], ranks.STRATEGIES["snes"], loss=F.cross_entropy, seed=3, fleet=gl.Local("cpu"))
    for start in (0, 8, 16, 24, 0):
        search.step(x[start : start + 16], y[start : start + 16])
    expected = theta_sha256(torch.cat([p.detach().flatten() for p in search.model.parameters()]))
    for found in launch(2, "search", str(tmp_path)):
        assert found["hashes"] == [expected, expected]
        assert found["said"] == "Rank 1 was given another batch than rank 0: all must see the same examples."


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="TCP_INFO is Linux's")
@pytest.mark.parametrize("exchange", ["replay", "chromosome", "semi", "central"])
def test_bytes_are_those_that_the_system_counts(exchange: str) -> None:
    for found in launch(2, "bytes_counted", exchange):
        for counted, system in zip(found["counted"], found["system"], strict=True):
            # gloo adds some 300 bytes to each message
            assert counted <= system + 16 <= 1.01 * counted + 400 * found["messages"][0], found


def test_the_command_in_three_processes(tmp_path: Path) -> None:
    arguments = ["train", "digits", "--generations", "11", "--device", "cpu", "--json", "--runs", str(tmp_path)]
    local = subprocess.run([str(BIN / "germline"), *arguments, "--name", "local"], capture_output=True, text=True)
    alone = json.loads(local.stdout.splitlines()[-1])
    fleet = ["--fleet", "spmd", "--exchange", "chromosome", "--name", "fleet"]
    torchrun = [str(BIN / "torchrun"), "--standalone", "--nproc-per-node=3", "--no-python", str(BIN / "germline")]
    done = subprocess.run([*torchrun, *arguments, *fleet], capture_output=True, text=True, env=environment())
    assert done.returncode == 0, done.stderr[-3000:]
    summary = json.loads(done.stdout)  # nothing but rank 0's line
    assert summary["theta_sha256"] == alone["theta_sha256"]
    assert summary["metrics"] == alone["metrics"]
    assert min(summary["bytes_sent"], summary["bytes_received"]) > 11 * 4 * 4810 * 2 / 3
    # processes that nobody has launched are launched by the command, and go on with the run
    again = ["resume", str(tmp_path / "fleet"), "--generations", "13", "--fleet", "spmd", "--workers", "2", "--json"]
    more = subprocess.run([str(BIN / "germline"), *again], capture_output=True, text=True, env=environment())
    assert more.returncode == 0, more.stderr[-3000:]
    straight = [str(BIN / "germline"), "resume", str(tmp_path / "local"), "--generations", "13", "--json"]
    expected = json.loads(subprocess.run(straight, capture_output=True, text=True).stdout.splitlines()[-1])
    assert json.loads(more.stdout)["theta_sha256"] == expected["theta_sha256"]


@pytest.mark.skipif(sys.platform == "win32", reason="there are no process groups")
def test_ctrl_c_ends_all_processes_and_loses_nothing(tmp_path: Path) -> None:
    arguments = ["train", "digits", "--population", "32", "--device", "cpu", "--runs", str(tmp_path), "--name", "run"]
    command = [str(BIN / "germline"), *arguments, "--generations", "5000", "--fleet", "spmd", "--workers", "2"]
    with subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environment(), start_new_session=True
    ) as process:
        assert process.stderr is not None
        while not (line := process.stderr.readline()).startswith("gen "):
            assert line, "it has ended"
        os.killpg(process.pid, signal.SIGINT)
        said = process.stderr.read()
    assert "interrupted after generation" in said
    assert process.returncode == 130
    assert (tmp_path / "run" / "model.safetensors").exists()
    done = verify(reopen(Journal.open(tmp_path / "run")))["generations"]
    assert 0 < done < 5000
    again = ["resume", str(tmp_path / "run"), "--generations", str(done + 3), "--json"]
    result = subprocess.run([str(BIN / "germline"), *again], capture_output=True, text=True)
    assert json.loads(result.stdout.splitlines()[-1])["generations"] == done + 3


def test_the_same_by_mpi(tmp_path: Path) -> None:
    pytest.importorskip("mpi4py")
    expected = ranks.trained(ranks.STRATEGIES["snes"], tmp_path / "local", gl.Local("cpu"))
    code = f"""
import json, os
import germline as gl
from pathlib import Path
from tests import ranks
found = [ranks.trained(ranks.STRATEGIES["snes"], Path({str(tmp_path)!r}) / mode, gl.SPMD(mode, device="cpu"))
         for mode in ("replay", "chromosome", "central")]
fleet = gl.SPMD("semi", device="cpu")
found.append(ranks.trained(ranks.STRATEGIES["snes"], Path({str(tmp_path)!r}) / "semi", fleet))
os.write(1, (json.dumps([type(fleet.collective.operations).__name__, *found]) + chr(10)).encode())
"""
    mpirun = [str(BIN / "mpirun"), "--allow-run-as-root", "--oversubscribe", "-n", "2"]
    done = subprocess.run([*mpirun, sys.executable, "-c", code], capture_output=True, text=True, env=environment())
    assert done.returncode == 0, done.stderr[-3000:]
    shards = ranks.trained(ranks.in_shards(ranks.STRATEGIES["snes"], 2), tmp_path / "semi local", gl.Local("cpu"))
    assert [json.loads(line) for line in done.stdout.splitlines()] == [["MPI", *[expected] * 3, shards]] * 2


def test_bad_input_of_a_fleet_is_exit_code_2(tmp_path: Path) -> None:
    command = [str(BIN / "germline"), "train", "digits", "--runs", str(tmp_path), "--fleet", "spmd", "--workers", "2"]
    for more, word in (
        (["--strategy", "gradient", "--exchange", "chromosome"], "by columns already"),
        (["--population", "6", "--exchange", "semi"], "cut"),
    ):
        done = subprocess.run([*command, *more], capture_output=True, text=True, env=environment())
        assert (done.returncode, done.stdout) == (2, "")
        assert word in done.stderr


def test_blocks_are_dealt_by_speed() -> None:
    assert deal(8, [1.0, 1.0]) == (4, 4)
    assert deal(9, [1.0, 2.0]) == (6, 3)
    assert deal(2, [1.0, 1.0, 1.0]) == (1, 1, 0)
    shares = np.array(deal(1000, [1.0, 3.0, 10.0]))
    assert np.allclose(shares * [1.0, 3.0, 10.0], 1000 / (1 + 1 / 3 + 1 / 10), rtol=0.02)


def test_what_cannot_be_shared_out_is_refused() -> None:
    with pytest.raises(BadInput, match="no semi-updates for ga"):
        refuse("semi", gl.GA())
    with pytest.raises(BadInput, match="LBFGS does not treat each parameter by itself"):
        refuse("chromosome", gl.OpenAIES(optimizer=FakeLBFGS))
    with pytest.raises(BadInput, match="by columns already"):
        refuse("central", gl.Gradient())
    with pytest.raises(BadInput, match="exchange"):
        gl.SPMD("everything")  # type: ignore[arg-type]
    with pytest.raises(BadInput, match="timeout"):
        gl.SPMD(timeout=0)


class LBFGS(torch.optim.SGD):
    """Of a name that is not on the list."""


def FakeLBFGS(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:  # noqa: N802
    return LBFGS(parameters, lr=0.1)


def test_launchers_are_known_by_their_variables() -> None:
    slurm = {"SLURM_PROCID": "5", "SLURM_NTASKS": "8", "SLURM_LOCALID": "1", "SLURM_STEP_ID": "0"}
    found = launched({**slurm, "SLURM_JOB_ID": "77", "SLURM_STEP_NODELIST": "gpu[03-06]"})
    assert (found.by, found.rank, found.size, found.local_rank, found.address) == ("srun", 5, 8, 1, "gpu03")
    ompi = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
    assert (launched(ompi).by, launched(ompi).address) == ("mpirun", "127.0.0.1")
    assert launched({**ompi, "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}).address is None
    assert launched({**slurm, "PMI_RANK": "5", "PMI_SIZE": "8"}).by == "srun"
    with pytest.raises(BadInput, match="MASTER_ADDR"):
        launched({"RANK": "0", "WORLD_SIZE": "2"})
