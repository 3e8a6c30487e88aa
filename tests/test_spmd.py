"""Many ranks train one run: its weights have the same bits whichever rank did what."""

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
from germline.engine.journal import Journal
from germline.engine.opening import open_for_replay
from germline.engine.replay import verify
from germline.errors import BadInput
from germline.fleet.spmd.exchange import check_exchange
from germline.fleet.spmd.launch import find_launch
from germline.fleet.spmd.shares import share_by_speed
from germline.genome import theta_sha256
from tests import ranks

SCRIPT = Path(ranks.__file__)
BIN = Path(sys.executable).parent


def environment(**more: str) -> dict[str, str]:
    """Return the environment of a rank: one thread, and this package first on the path."""
    path = f"{SCRIPT.parent.parent}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, **more}


def launch(processes: int, *arguments: str) -> list[Any]:
    """Call a function of ``ranks.py`` in ranks that torchrun starts; return their answers, as they end."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    done = subprocess.run([*command, str(SCRIPT), *arguments], capture_output=True, text=True, env=environment())
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(lines) == processes
    return lines


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2, 3, 4])
def test_weights_do_not_depend_on_the_number_of_ranks_or_the_exchange(processes: int, tmp_path: Path) -> None:
    local = gl.Local("cpu", 1)
    expected: dict[str, str] = {}
    for name, strategy in ranks.STRATEGIES.items():
        plain = ranks.train(strategy, tmp_path / f"{name} local", local)
        expected |= {f"{name} by {mode}": plain for mode in ranks.exact_modes(name)}
        if strategy.has_semi_updates:  # a semi-update is the update of as many shards
            shards = ranks.with_shards(strategy, processes)
            expected[f"{name} by semi"] = ranks.train(shards, tmp_path / f"{name} semi local", local)
    assert processes == 1 or expected["snes by semi"] != expected["snes by replay"]
    for hashes in launch(processes, "hashes", str(tmp_path)):
        assert hashes == expected
    for mode in ("chromosome", "semi"):  # snapshots are whole, and records are enough
        session = open_for_replay(Journal.open(tmp_path / f"snes {mode}"))
        assert verify(session)["theta_sha256"] == expected[f"snes by {mode}"]


@pytest.mark.slow
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(("backend", "device"), [("nccl", "cuda"), ("gloo", "cuda:0")])
def test_gpus_exchange_by_nccl_or_share_one_by_gloo(backend: str, device: str, tmp_path: Path) -> None:
    """nccl needs a GPU for each rank; two ranks that share one exchange by gloo."""
    if backend == "nccl" and torch.cuda.device_count() < 2:
        pytest.skip("nccl needs two GPUs")
    fleet = gl.Local("cuda:0")
    expected: dict[str, str] = {}
    for name in ("openai-es", "snes", "gradient", "hybrid-es, gated"):
        plain = ranks.train(ranks.STRATEGIES[name], tmp_path / f"{name} local", fleet)
        expected |= {f"{name} by {mode}": plain for mode in ranks.exact_modes(name)}
    for hashes in launch(2, "train_on_gpus", str(tmp_path), backend, device):
        assert hashes == expected


@pytest.mark.slow
def test_runs_of_one_process_are_resumed_by_ranks(tmp_path: Path) -> None:
    names = ("openai-es", "snes", "openai-es, scheduled")
    expected = [ranks.train(ranks.STRATEGIES[name], tmp_path / f"{name} whole", gl.Local("cpu")) for name in names]
    for name in names:
        ranks.train(ranks.STRATEGIES[name], tmp_path / name, gl.Local("cpu"), generations=5)
    for *hashes, refusal in launch(2, "resume_runs", str(tmp_path), *names):
        assert hashes == expected
        assert refusal.startswith("Semi-updates by 2 ranks need a multiple of 2 shards, and the run has 1: use another")


@pytest.mark.slow
def test_slices_for_each_rank_are_multiplied_once(tmp_path: Path) -> None:
    """Two ranks with batches of 16 in 3 slices each are one process with a batch of 32 in 6 slices."""
    strategy = gl.Gradient(lr=0.05, slices=6)
    expected = ranks.train(strategy, tmp_path / "local", gl.Local("cpu"), batch_size=32)
    for answer in launch(2, "resume_per_worker", str(tmp_path)):
        assert answer == {"straight": expected, "resumed": expected, "slices": [[6, 6, 32]]}
    for name in ("straight", "stopped"):
        header = Journal.open(tmp_path / name, read_only=True).header
        assert (header["settings"]["slices"], header["plan"]["slices"], header["batch_size"]) == (6, 6, 32)


@pytest.mark.slow
def test_samples_for_each_rank_are_multiplied_once(tmp_path: Path) -> None:
    """Two ranks with three samples each are one process with six."""
    expected = ranks.train(gl.HybridES(population=6, lr=0.5, sigma=0.5), tmp_path / "local", gl.Local("cpu"))
    for answer in launch(2, "resume_samples_per_worker", str(tmp_path)):
        assert answer == {"straight": expected, "resumed": expected}


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="files cannot be limited")
@pytest.mark.parametrize("limit", [20_000, 300_000], ids=["before the first generation", "later"])
def test_a_full_disk_ends_all_ranks_with_a_sentence(limit: int, tmp_path: Path) -> None:
    """A limit of the size of files, in the rank that owns the journal, stands for a full disk."""
    answers = launch(2, "fill_disk", str(tmp_path), str(limit))
    texts = sorted(answer["text"].splitlines()[-1] for answer in answers)
    assert [answer["code"] for answer in answers] == [1, 1]
    assert not any("Traceback" in answer["text"] for answer in answers)
    journal = f"The journal of {tmp_path / 'full'} cannot be used: disk I/O error. Check the disk"
    other = f"Rank 0: {journal}" if limit < 100_000 else "Another rank of the fleet has died"
    assert any(text.startswith(f"error: {journal}") for text in texts), texts
    assert any(text.startswith(f"error: {other}") for text in texts), texts


@pytest.mark.slow
def test_an_error_of_the_rank_that_owns_the_journal_is_raised_in_all(tmp_path: Path) -> None:
    own = ["BadInput: bad", "MachineError: full", "ZeroDivisionError: zero"]
    others = ["BadInput: Rank 0: bad", "MachineError: Rank 0: full", "RuntimeError: Rank 0: zero"]
    answers = sorted(launch(2, "fail_on_journal_rank", str(tmp_path)))
    assert answers == sorted([[error for error in errors for _ in range(2)] for errors in (own, others)])


@pytest.mark.slow
def test_ranks_that_do_something_else_are_named(tmp_path: Path) -> None:
    expected = ranks.train(ranks.STRATEGIES["openai-es"], tmp_path / "local", gl.Local("cpu"))
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
    for answers in launch(2, "disagreements", str(tmp_path)):
        assert answers.pop("sent") == expected
        assert {name for name, error in answers.items() if words[name] in error} == set(words), answers
        assert all("Rank 1" in answers[name] for name in ("weights", "layout", "data", "batches", "seed", "limit"))


@pytest.mark.slow
def test_search_by_ranks_is_search_by_one_process(tmp_path: Path) -> None:
    arguments = ranks.problem()
    x, y = arguments["data"]
    strategy, fleet = ranks.STRATEGIES["snes"], gl.Local("cpu")
    search = gl.Search(arguments["model"], strategy, loss=F.cross_entropy, seed=3, fleet=fleet)
    for start in (0, 8, 16, 24, 0):
        search.step(x[start : start + 16], y[start : start + 16])
    expected = theta_sha256(torch.cat([p.detach().flatten() for p in search.model.parameters()]))
    error = "Rank 1 was given another batch than rank 0: all ranks must see the same examples."
    for answer in launch(2, "search", str(tmp_path)):
        assert answer == {"hashes": [expected, expected], "error": error}


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux has TCP_INFO")
@pytest.mark.parametrize("exchange", ["replay", "chromosome", "semi", "central"])
def test_bytes_are_those_that_the_system_counts(exchange: str) -> None:
    for answer in launch(2, "count_bytes", exchange):
        for counted, system in zip(answer["counted"], answer["system"], strict=True):
            # gloo adds some 300 bytes to each message
            assert counted <= system + 16 <= 1.01 * counted + 400 * answer["messages"][0], answer


@pytest.mark.slow
def test_the_command_in_three_ranks(tmp_path: Path) -> None:
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
    # without a launcher the command starts the ranks, which resume the run
    again = ["resume", str(tmp_path / "fleet"), "--generations", "13", "--fleet", "spmd", "--workers", "2", "--json"]
    more = subprocess.run([str(BIN / "germline"), *again], capture_output=True, text=True, env=environment())
    assert more.returncode == 0, more.stderr[-3000:]
    straight = [str(BIN / "germline"), "resume", str(tmp_path / "local"), "--generations", "13", "--json"]
    expected = json.loads(subprocess.run(straight, capture_output=True, text=True).stdout.splitlines()[-1])
    assert json.loads(more.stdout)["theta_sha256"] == expected["theta_sha256"]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="there are no process groups")
def test_ctrl_c_ends_all_ranks_and_loses_nothing(tmp_path: Path) -> None:
    arguments = ["train", "digits", "--population", "32", "--device", "cpu", "--runs", str(tmp_path), "--name", "run"]
    command = [str(BIN / "germline"), *arguments, "--generations", "5000", "--fleet", "spmd", "--workers", "2"]
    with subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environment(), start_new_session=True
    ) as process:
        assert process.stderr is not None
        while not (line := process.stderr.readline()).startswith("gen "):
            assert line, "the run has ended"
        os.killpg(process.pid, signal.SIGINT)
        text = process.stderr.read()
    assert "interrupted after generation" in text
    assert process.returncode == 130
    assert (tmp_path / "run" / "model.safetensors").exists()
    done = verify(open_for_replay(Journal.open(tmp_path / "run")))["generations"]
    assert 0 < done < 5000
    again = ["resume", str(tmp_path / "run"), "--generations", str(done + 3), "--json"]
    result = subprocess.run([str(BIN / "germline"), *again], capture_output=True, text=True)
    assert json.loads(result.stdout.splitlines()[-1])["generations"] == done + 3


@pytest.mark.slow
def test_weights_by_mpi_are_the_same(tmp_path: Path) -> None:
    pytest.importorskip("mpi4py")
    expected = ranks.train(ranks.STRATEGIES["snes"], tmp_path / "local", gl.Local("cpu"))
    code = f"""
import json, os
import germline as gl
from pathlib import Path
from tests import ranks
hashes = [ranks.train(ranks.STRATEGIES["snes"], Path({str(tmp_path)!r}) / mode, gl.SPMD(mode, device="cpu"))
          for mode in ("replay", "chromosome", "central")]
fleet = gl.SPMD("semi", device="cpu")
hashes.append(ranks.train(ranks.STRATEGIES["snes"], Path({str(tmp_path)!r}) / "semi", fleet))
os.write(1, (json.dumps([type(fleet.collective.operations).__name__, *hashes]) + chr(10)).encode())
"""
    mpirun = [str(BIN / "mpirun"), "--allow-run-as-root", "--oversubscribe", "-n", "2"]
    done = subprocess.run([*mpirun, sys.executable, "-c", code], capture_output=True, text=True, env=environment())
    assert done.returncode == 0, done.stderr[-3000:]
    answers = [
        line for line in done.stdout.splitlines() if "[" in line and "MPI" in line
    ]  # Numba may reset colors, too
    shards = ranks.train(ranks.with_shards(ranks.STRATEGIES["snes"], 2), tmp_path / "semi local", gl.Local("cpu"))
    assert [json.loads(line) for line in answers] == [["MPI", *[expected] * 3, shards]] * 2


@pytest.mark.slow
def test_bad_input_of_a_fleet_has_exit_code_2(tmp_path: Path) -> None:
    command = [str(BIN / "germline"), "train", "digits", "--runs", str(tmp_path), "--fleet", "spmd", "--workers", "2"]
    for more, word in (
        (["--strategy", "gradient", "--exchange", "chromosome"], "by columns already"),
        (["--population", "6", "--exchange", "semi"], "cut"),
    ):
        done = subprocess.run([*command, *more], capture_output=True, text=True, env=environment())
        assert (done.returncode, done.stdout) == (2, "")
        assert word in done.stderr


def test_blocks_are_shared_out_by_speed() -> None:
    assert share_by_speed(8, [1.0, 1.0]) == (4, 4)
    assert share_by_speed(9, [1.0, 2.0]) == (6, 3)
    assert share_by_speed(2, [1.0, 1.0, 1.0]) == (1, 1, 0)
    shares = np.array(share_by_speed(1000, [1.0, 3.0, 10.0]))
    assert np.allclose(shares * [1.0, 3.0, 10.0], 1000 / (1 + 1 / 3 + 1 / 10), rtol=0.02)


def test_strategies_that_an_exchange_cannot_share_out_are_refused() -> None:
    with pytest.raises(BadInput, match="no semi-updates for ga"):
        check_exchange("semi", gl.GA())
    with pytest.raises(BadInput, match="openai-es cannot be updated separately, because its optimizer does not treat"):
        check_exchange("chromosome", gl.OpenAIES(optimizer=make_lbfgs))
    with pytest.raises(BadInput, match="by columns already"):
        check_exchange("central", gl.Gradient())
    with pytest.raises(BadInput, match="exchange"):
        gl.SPMD("everything")  # type: ignore[arg-type]
    with pytest.raises(BadInput, match="timeout"):
        gl.SPMD(timeout=0)


class LBFGS(torch.optim.SGD):
    """An optimizer by a name that is not on the list of those that treat each parameter independently."""


def make_lbfgs(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    return LBFGS(parameters, lr=0.1)


def test_launchers_are_known_by_their_variables() -> None:
    slurm = {"SLURM_PROCID": "5", "SLURM_NTASKS": "8", "SLURM_LOCALID": "1", "SLURM_STEP_ID": "0"}
    srun = find_launch({**slurm, "SLURM_JOB_ID": "77", "SLURM_STEP_NODELIST": "gpu[03-06]"})
    assert (srun.by, srun.rank, srun.size, srun.local_rank, srun.address) == ("srun", 5, 8, 1, "gpu03")
    ompi = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
    assert (find_launch(ompi).by, find_launch(ompi).address) == ("mpirun", "127.0.0.1")
    assert find_launch({**ompi, "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}).address is None
    assert find_launch({**slurm, "PMI_RANK": "5", "PMI_SIZE": "8"}).by == "srun"
    with pytest.raises(BadInput, match="MASTER_ADDR"):
        find_launch({"RANK": "0", "WORLD_SIZE": "2"})
