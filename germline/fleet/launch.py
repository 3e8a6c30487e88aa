"""Who launched this process, beside how many others: torchrun, srun, mpirun, or nobody."""

import os
import re
import socket
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from germline.errors import BadInput

PORTS = range(20000, 32000)  # from which a port is taken that all processes of a job derive by themselves


@dataclass(frozen=True)
class Launch:
    """This process among those that were launched together, and where they meet."""

    by: str
    rank: int = 0
    size: int = 1
    local_rank: int = 0
    address: str | None = None
    port: int = 0
    agent_store: bool = False  # whether torchrun's agent keeps a store at that address
    name: str | None = None  # of the launch: the same if the launcher starts these processes again


def launched(given: Mapping[str, str] | None = None) -> Launch:
    """By the variables that a launcher sets.

    >>> launched({"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "a", "MASTER_PORT": "29500"}).rank
    1
    >>> launched({}).by
    'nobody'
    """
    env = os.environ if given is None else given
    if "RANK" in env and "WORLD_SIZE" in env:
        return by_torchrun(env)
    if "OMPI_COMM_WORLD_RANK" in env or "PMI_RANK" in env:
        return by_mpirun(env)
    if "SLURM_PROCID" in env and "SLURM_STEP_ID" in env and env.get("SLURM_STEP_ID") != "batch":
        return by_srun(env)
    return Launch("nobody")


def by_torchrun(env: Mapping[str, str]) -> Launch:
    numbers = [int(env.get(name, "0")) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT")]
    if "MASTER_ADDR" not in env or "MASTER_PORT" not in env:
        raise BadInput("RANK and WORLD_SIZE are set but MASTER_ADDR and MASTER_PORT are not: start it with torchrun.")
    name = None
    if "TORCHELASTIC_RUN_ID" in env:  # the agent is the parent, and stays when it starts its workers again
        agent = os.getppid()
        name = f"torchrun {env['TORCHELASTIC_RUN_ID']} {socket.gethostname()} {agent} {born(agent)}"
    agent_store = env.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    rank, size, local_rank, port = numbers
    return Launch("torchrun", rank, size, local_rank, env["MASTER_ADDR"], port, agent_store, name)


def by_mpirun(env: Mapping[str, str]) -> Launch:
    names = {"RANK": "PMI_RANK", "SIZE": "PMI_SIZE", "LOCAL_RANK": "MPI_LOCALRANKID", "LOCAL_SIZE": "MPI_LOCALNRANKS"}
    rank, size, local_rank, local_size = (
        int(env.get(f"OMPI_COMM_WORLD_{ours}") or env.get(theirs) or 0) for ours, theirs in names.items()
    )
    address = env.get("MASTER_ADDR") or ("127.0.0.1" if local_size in (0, size) else None)
    job = env.get("PMIX_NAMESPACE") or env.get("OMPI_MCA_ess_base_jobid") or str(os.getppid())
    return Launch("mpirun", rank, size, local_rank, address, int(env.get("MASTER_PORT") or port_of(job)))


def by_srun(env: Mapping[str, str]) -> Launch:
    job = f"{env.get('SLURM_JOB_ID')}.{env.get('SLURM_STEP_ID')}"
    numbers = [int(env.get(name, "0")) for name in ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID")]
    nodes = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_NODELIST") or "127.0.0.1"
    rank, size, local_rank = numbers
    port = int(env.get("MASTER_PORT") or port_of(job))
    return Launch("srun", rank, size, local_rank, env.get("MASTER_ADDR") or first_node(nodes), port, name=f"srun {job}")


def first_node(nodes: str) -> str:
    """Of a list of Slurm's.

    >>> first_node("gpu[07-09,12],login1"), first_node("a1,a2"), first_node("rack[1-2]n[03,05]")
    ('gpu07', 'a1', 'rack1n03')
    """
    first = re.split(r",(?![^\[]*\])", nodes)[0]
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", first)


def port_of(job: str) -> int:
    return PORTS[zlib.crc32(job.encode()) % len(PORTS)]


def born(process: int) -> str:
    """When a process began, in ticks of its machine: its number alone may be used again."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return "?"
