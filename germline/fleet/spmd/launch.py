"""Finds out what launched this process, and how many others with it: torchrun, srun, mpirun, or nothing."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
import uuid
import zlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from germline.errors import BadInput

LAUNCH = "GERMLINE_LAUNCH"  # the variable that names a launch by ``run_ranks``
RESTARTS = 10
GRACE = 3.0  # seconds for a process to end when another has
PORTS = range(20000, 32000)  # a port that all processes of a job derive from its name


@dataclass(frozen=True)
class Launch:
    """This process among those that were launched together, and where they meet.

    Attributes:
        by: The launcher: ``"torchrun"``, ``"srun"``, ``"mpirun"`` or ``"none"``.
        agent_store: Whether torchrun's agent keeps a store at the address.
        name: The name of the launch, which stays if the launcher starts these processes again.
    """

    by: str
    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    address: str | None = None
    port: int = 0
    agent_store: bool = False
    name: str | None = None


def find_launch(variables: Mapping[str, str] | None = None) -> Launch:
    """Find out how this process was launched, by the environment variables that a launcher sets.

    >>> find_launch({"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "a", "MASTER_PORT": "29500"}).rank
    1
    >>> find_launch({}).by
    'none'
    """
    env = os.environ if variables is None else variables
    if "RANK" in env and "WORLD_SIZE" in env:
        return read_torchrun(env)
    in_step = "SLURM_PROCID" in env and env.get("SLURM_STEP_ID", "batch") != "batch"
    if "OMPI_COMM_WORLD_RANK" in env or ("PMI_RANK" in env and not in_step):
        return read_mpirun(env)
    return read_srun(env) if in_step else Launch("none")


def read_torchrun(env: Mapping[str, str]) -> Launch:
    if "MASTER_ADDR" not in env or "MASTER_PORT" not in env:
        raise BadInput("RANK and WORLD_SIZE are set but MASTER_ADDR and MASTER_PORT are not: start it with torchrun.")
    name = env.get(LAUNCH)
    if "TORCHELASTIC_RUN_ID" in env:  # the agent is the parent, and stays when it starts its workers again
        agent = os.getppid()
        name = f"torchrun {env['TORCHELASTIC_RUN_ID']} {socket.gethostname()} {agent} {start_time(agent)}"
    numbers = read_numbers(env, "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    agent_store = env.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return Launch("torchrun", *numbers, env["MASTER_ADDR"], read_number(env, "MASTER_PORT"), agent_store, name)


def read_mpirun(env: Mapping[str, str]) -> Launch:
    names = ["PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"]
    if "OMPI_COMM_WORLD_RANK" in env:
        names = [f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")]
    numbers = read_numbers(env, *names)
    _, size, _, local_size = numbers
    address = env.get("MASTER_ADDR") or ("127.0.0.1" if local_size == size else None)
    job = env.get("PMIX_NAMESPACE") or env.get("OMPI_MCA_ess_base_jobid") or str(os.getppid())
    return Launch("mpirun", *numbers, address, read_number(env, "MASTER_PORT") or derive_port(job))


def read_srun(env: Mapping[str, str]) -> Launch:
    numbers = read_numbers(env, "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_NTASKS_PER_NODE")
    job = f"{env.get('SLURM_JOB_ID')}.{env.get('SLURM_STEP_ID')}"
    nodes = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_NODELIST") or "127.0.0.1"
    address, port = env.get("MASTER_ADDR") or first_node(nodes), read_number(env, "MASTER_PORT") or derive_port(job)
    return Launch("srun", *numbers, address, port, name=f"srun {job}")


def read_numbers(env: Mapping[str, str], *names: str) -> tuple[int, int, int, int]:
    """Return the rank, the number of ranks, and both on this machine, from the variables that hold them."""
    rank, size, local_rank, local_size = (read_number(env, name) for name in names)
    if rank >= size or (local_size and local_rank >= local_size):
        variables = ", ".join(f"{name}={env.get(name)}" for name in names if name in env)
        message = f"The ranks of N processes are 0 to N - 1, which does not hold for {variables}"
        raise BadInput(f"{message}: check the launcher.")
    return rank, size, local_rank, local_size


def read_number(env: Mapping[str, str], name: str) -> int:
    """Return the value of a variable that a launcher has set, or 0 if it has not."""
    text = env.get(name) or "0"
    if not (text.isascii() and text.isdecimal()):
        raise BadInput(f"The variable {name} must be a whole number of at least 0, not {text!r}: check the launcher.")
    return int(text)


def first_node(nodes: str) -> str:
    """Return the first host of a Slurm node list.

    >>> first_node("gpu[07-09,12],login1"), first_node("a1,a2"), first_node("rack[1-2]n[03,05]")
    ('gpu07', 'a1', 'rack1n03')
    """
    first = re.split(r",(?![^\[]*\])", nodes)[0]
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", first)


def derive_port(job: str) -> int:
    """Return the port of a job, which all its processes derive from its name."""
    return PORTS[zlib.crc32(job.encode()) % len(PORTS)]


def start_time(process: int) -> str:
    """Return when a process started, in ticks of its machine: a process number alone may be used again."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return "?"


def run_ranks(command: Sequence[str], processes: int) -> int:
    """Run a command in several processes of this machine, all of them again if one dies; return the exit code.

    The codes 0 (done), 2 (bad input) and 130 (interrupted) are passed on, and end the other processes.
    """
    environment = {**os.environ, "MASTER_ADDR": "127.0.0.1", "WORLD_SIZE": str(processes)}
    environment.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // processes)))
    environment |= {LAUNCH: uuid.uuid4().hex, "LOCAL_WORLD_SIZE": str(processes)}
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to the processes as well
    try:
        for _ in range(1 + RESTARTS):
            environment["MASTER_PORT"] = str(free_port())
            started = [
                subprocess.Popen(command, env=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)})
                for rank in range(processes)
            ]
            code = wait_for_all(started)
            if code in (0, 2, 130):
                return code
            print("note: a rank of the fleet has died; all ranks start again from the journal", file=sys.stderr)
        return 1
    finally:
        signal.signal(signal.SIGINT, before)


def wait_for_all(started: "Sequence[subprocess.Popen[bytes]]") -> int:
    """Wait for processes that belong together; return 0 if all end well, else the code of the first that does not."""
    try:
        while True:
            codes = [process.poll() for process in started]
            failed = [code for code in codes if code]
            if failed or None not in codes:
                return failed[0] if failed else 0
            time.sleep(0.05)
    finally:
        for process in started:
            with suppress(subprocess.TimeoutExpired):
                process.wait(GRACE if process.poll() is None else 0)  # it may be about to end as well
            process.kill()
            process.wait()


def free_port() -> int:
    """Return a port of the loopback interface that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
