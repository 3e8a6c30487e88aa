"""Work of the ranks of an spmd fleet in the tests: one function per test, called in every rank.

torchrun ... ranks.py FUNCTION ARGUMENTS...     each rank prints one line of JSON
"""

import dataclasses
import json
import os
import socket
import struct
import sys
import time
from collections.abc import Callable
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import germline as gl
from germline.cli import main
from germline.engine.history import Row
from germline.engine.session import Session
from germline.errors import MachineError
from germline.fleet import Fleet
from germline.fleet.spmd.collective import Backend
from germline.fleet.spmd.exchange import Exchange
from germline.genome import theta_sha256
from germline.strategies import AnyStrategy

STRATEGIES: dict[str, AnyStrategy] = {
    "openai-es": gl.OpenAIES(population=24, sigma=0.1, lr=0.05),
    "openai-es, rank 1, momentum": gl.OpenAIES(population=24, rank=1, optimizer="momentum", weight_decay=0.01),
    "openai-es, torch": gl.OpenAIES(population=24, optimizer="torch.RMSprop"),
    "openai-es, auto": gl.OpenAIES(population=24, sigma="auto"),
    "openai-es, scheduled": gl.OpenAIES(population=24, sigma=gl.Schedule("linear", 0.1, 0.05, 10)),
    "snes": gl.SNES(population=24, sigma=0.1),
    "mu-lambda": gl.MuLambda(population=24, parents=4, rank=1),
    "mu-lambda, fifth": gl.MuLambda(population=24, parents=4, mates=2, recombination="discrete", adaptation="fifth"),
    "ga": gl.GA(population=24, parents=4, crossover="one-point", mutation=0.5),
    "deep-ga": gl.DeepGA(population=24, parents=4, sigma=0.05),
    "pso": gl.PSO(population=24, decay=0.9),
    "gradient": gl.Gradient(lr=0.05),
    "gradient, int8": gl.Gradient(lr=0.05, slices=5, wire="int8"),
    "pesgd": gl.PESGD(population=5, lr=0.2, sigma=0.01),
    "pesgd, adam": gl.PESGD(population=6, lr=0.01, optimizer="adam", crossover="average", diversity="noise"),
    "pesgd, teams": gl.PESGD(population=4, lr=0.2, sigma=0.01, workers_per_member=2),
    "hybrid-es": gl.HybridES(population=5, lr=0.5, sigma=0.5, weight_decay=0.01, wire="bfloat16"),
    "hybrid-es, assisted": gl.HybridES(population=5, lr=0.5, sigma="auto", variant="assisted", adapt=1.1),
    "hybrid-es, gated": gl.HybridES(population=6, lr=0.5, variant="gated", interval=3),
}
GENERATIONS = 8


def problem(seed: int = 0, hidden: int = 9) -> dict[str, Any]:
    """Return a small model with data and a loss, as arguments of ``gl.train``."""
    x = torch.linspace(-1, 1, 240).reshape(48, 5)
    model = gl.seeded(seed, lambda: nn.Sequential(nn.Linear(5, hidden), nn.Tanh(), nn.Linear(hidden, 3)))
    return {"model": model, "data": (x, x[:, :3].argmax(1)), "loss": F.cross_entropy, "batch_size": 16}


def train(strategy: AnyStrategy, path: Path, fleet: Fleet, **changes: Any) -> str:
    """Train the problem, with some changes; return the hash of the weights."""
    settings = {**problem(), "generations": GENERATIONS, "snapshot_every": 3, **changes}
    result = gl.train(strategy=strategy, run=path, fleet=fleet, **settings)
    assert len(result.history) == settings["generations"]
    return str(result.summary["theta_sha256"])


def with_shards(strategy: AnyStrategy, shards: int) -> AnyStrategy:
    """Return a strategy with another number of shards."""
    return dataclasses.replace(strategy, shards=shards)  # type: ignore[type-var]


def exact_modes(name: str) -> tuple[Exchange, ...]:
    """Return the exchanges that give a strategy's weights the bits of a single process."""
    if STRATEGIES[name].kind != "evolve":
        return ("replay", "auto")
    return ("replay", "chromosome", "central", *(("auto",) if name == "openai-es" else ()))


def hashes(directory: str) -> dict[str, str]:
    """Return the hash of every strategy by every exchange."""
    by_name = {}
    for name, strategy in STRATEGIES.items():
        for mode in (*exact_modes(name), *(("semi",) if strategy.has_semi_updates else ())):
            fleet = gl.SPMD(mode, device="cpu", timeout=60)
            by_name[f"{name} by {mode}"] = train(strategy, Path(directory) / f"{name} {mode}", fleet)
    return by_name


def train_on_gpus(directory: str, backend: Backend, device: str) -> dict[str, str]:
    """Return the hash of some strategies by every exchange, on GPUs that exchange by one backend."""
    by_name = {}
    for name in ("openai-es", "snes", "gradient", "hybrid-es, gated"):
        for mode in exact_modes(name):
            fleet = gl.SPMD(mode, device=device, backend=backend, timeout=120)
            by_name[f"{name} by {mode}"] = train(STRATEGIES[name], Path(directory) / f"{name} {mode}", fleet)
    return by_name


def resume_runs(directory: str, *names: str) -> list[str]:
    """Resume runs that one process has started, by another exchange and all with one fleet; return their hashes.

    The last one cannot be resumed by semi-updates, which is the last answer.
    """
    fleet, answers = gl.SPMD("chromosome", device="cpu", timeout=60), []
    settings = {**problem(), "generations": GENERATIONS}
    for name in names:
        result = gl.train(strategy=STRATEGIES[name], resume=Path(directory) / name, fleet=fleet, **settings)
        answers.append(str(result.summary["theta_sha256"]))
    semi = gl.SPMD("semi", device="cpu", timeout=60)
    try:
        gl.train(strategy=STRATEGIES[names[0]], resume=Path(directory) / names[0], fleet=semi, **settings)
    except gl.BadInput as error:
        return [*answers, str(error)]
    return answers


def resume_per_worker(directory: str) -> dict[str, Any]:
    """Train with a batch and slices for each rank, without a break and with two; return what the runs have used."""
    strategy, path = gl.Gradient(lr=0.05, slices=3, per_worker=True), Path(directory)
    slices: set[tuple[int, int, int]] = set()

    def note(session: Session, row: Row) -> None:
        slices.add((session.strategy.slices, session.scorer.chosen_plan.slices, session.batch_size))  # type: ignore[attr-defined]

    def fleet() -> gl.SPMD:
        return gl.SPMD(device="cpu", timeout=60)

    straight = train(strategy, path / "straight", fleet(), callbacks=[note])
    train(strategy, path / "stopped", fleet(), generations=3)
    settings = {**problem(), "resume": path / "stopped", "callbacks": [note]}
    gl.train(strategy=strategy, fleet=fleet(), generations=5, **settings)
    resumed = gl.train(fleet=fleet(), generations=GENERATIONS, **settings).summary["theta_sha256"]
    return {"straight": straight, "resumed": resumed, "slices": sorted(slices)}


def resume_samples_per_worker(directory: str) -> dict[str, Any]:
    """Train Hybrid-ES with three samples for each rank, without a break and with one; return both hashes."""
    strategy, path = gl.HybridES(population=3, lr=0.5, sigma=0.5, samples_per_worker=True), Path(directory)

    def fleet() -> gl.SPMD:
        return gl.SPMD(device="cpu", timeout=60)

    straight = train(strategy, path / "straight", fleet())
    train(strategy, path / "stopped", fleet(), generations=3)
    again = gl.train(
        strategy=strategy, fleet=fleet(), generations=GENERATIONS, resume=path / "stopped", **problem()
    ).summary["theta_sha256"]
    return {"straight": straight, "resumed": again}


def fill_disk(directory: str, limit: str) -> dict[str, Any]:
    """Run the command where files cannot grow beyond some bytes; return the exit code and what it has printed."""
    import resource  # not on every system

    train(STRATEGIES["openai-es"], Path(directory) / "before", gl.SPMD(device="cpu", timeout=60))  # compiles kernels
    most = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(limit), most))
    sys.argv = ["germline", "train", "digits", "--population", "32", "--device", "cpu", "--runs", directory]
    sys.argv += ["--name", "full", "--fleet", "spmd", "--timeout", "30", "--generations", "3000"]
    with redirect_stderr(StringIO()) as errors:
        try:
            main()
        except SystemExit as end:
            return {"code": end.code, "text": errors.getvalue()}
    raise AssertionError("the command returned")


def fail_on_journal_rank(directory: str) -> list[str]:
    """Raise errors in the rank that owns the journal; return the kind and the sentence that this rank raises."""
    group, answers = gl.SPMD(device="cpu", timeout=60).group, []
    for error in (gl.BadInput("bad"), MachineError("full"), ZeroDivisionError("zero")):

        def work(error: Exception = error) -> None:
            if group.owns_journal:
                raise error

        for share in (group.on_journal_rank, group.all_or_none):
            try:
                share(work)
                answers.append("nothing")
            except (gl.BadInput, RuntimeError, ZeroDivisionError) as raised:
                answers.append(f"{type(raised).__name__}: {raised}")
    return answers


def disagreements(directory: str) -> dict[str, str]:
    """Return what is said where rank 1 does something else."""
    odd = int(os.environ["RANK"]) == 1
    other: dict[str, dict[str, Any]] = {
        "weights": problem(seed=int(odd)),
        "layout": problem(hidden=9 + odd),
        "data": {**problem(), "data": (torch.ones(48, 5) * (1 + odd), torch.zeros(48, dtype=torch.int64))},
        "batches": {**problem(), "batch_size": 16 + 8 * odd},
        "seed": {**problem(), "seed": int(odd)},
        "limit": {**problem(), "generations": GENERATIONS + odd},
        "target": {**problem(), "target": "no_such_metric=1" if odd else None},
        "score": {**problem(), "loss": fail_later if odd else F.cross_entropy, "generations": 90},
    }
    answers = {}
    for name, settings in other.items():
        try:
            train(STRATEGIES["openai-es"], Path(directory) / name, gl.SPMD(device="cpu", timeout=60), **settings)
            answers[name] = "nothing"
        except (gl.BadInput, RuntimeError, ZeroDivisionError) as error:
            answers[name] = str(error)
    sent = train(
        STRATEGIES["openai-es"],
        Path(directory) / "sent",
        gl.SPMD(device="cpu", timeout=60, send_weights=True),
        **problem(seed=int(odd)),
    )
    return {**answers, "sent": sent}


class Calls:
    count = 0


def fail_later(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Compute a loss that raises an error in the middle of a run."""
    Calls.count += 1
    if Calls.count > 60:
        raise ZeroDivisionError("the score cannot be computed")
    return F.cross_entropy(output, target)


def search(directory: str) -> dict[str, Any]:
    """Search in a loop of the user, from a saved state too; at the end rank 1 is given another batch."""
    arguments = problem()
    x, y = arguments["data"]
    fleet = gl.SPMD("chromosome", device="cpu", timeout=60)
    first = gl.Search(arguments["model"], STRATEGIES["snes"], loss=F.cross_entropy, seed=3, fleet=fleet)
    for start in range(0, 32, 8):
        first.step(x[start : start + 16], y[start : start + 16])
    state = first.state_dict()
    second = gl.Search(problem()["model"], STRATEGIES["snes"], loss=F.cross_entropy, seed=3, fleet=gl.SPMD("central"))
    second.load_state_dict(state)
    hashes = []
    for one in (first, second):
        one.step(x[:16], y[:16])
        hashes.append(theta_sha256(torch.cat([p.detach().flatten() for p in one.model.parameters()])))
    odd = int(os.environ["RANK"]) == 1
    try:
        first.step(x[16 + odd :][:16], y[16:][:16])
    except gl.BadInput as error:
        return {"hashes": hashes, "error": str(error)}
    return {"hashes": hashes, "error": None}


def count_bytes(exchange: Exchange) -> dict[str, list[int]]:
    """Return what a fleet counts, and what the operating system counts on this process's connections."""
    model = gl.seeded(0, lambda: nn.Sequential(nn.Linear(200, 500), nn.Linear(500, 2)))
    fleet = gl.SPMD(exchange, device="cpu", timeout=60)
    search = gl.Search(model, gl.SNES(population=12), loss=F.cross_entropy, fleet=fleet)
    x, y = torch.ones(4, 200), torch.zeros(4, dtype=torch.int64)
    search.step(x, y)
    before = read_system_counts(fleet)
    fleet.count_bytes()
    messages, session = fleet.collective.traffic.messages, search._session
    so_far = session.sent, session.received
    for _ in range(20):
        search.step(x, y)
    messages = fleet.collective.traffic.messages - messages
    counted = session.sent - so_far[0], session.received - so_far[1]
    after = read_system_counts(fleet)
    system = [b - a for a, b in zip(before, after, strict=True)]
    fleet.group.all(True)  # no rank leaves before all have counted
    return {"counted": list(counted), "system": system, "messages": [messages]}


def read_system_counts(fleet: gl.SPMD) -> list[int]:
    """Return the system's counts once everything that was sent has been acknowledged."""
    fleet.group.all(True)
    counts, last = acknowledged_bytes(), [0, 0]
    while counts != last:
        time.sleep(0.2)
        counts, last = acknowledged_bytes(), counts
    return counts


def acknowledged_bytes() -> list[int]:
    """Return the bytes that the other ends of all TCP connections have acknowledged, and those received from them."""
    total = [0, 0]
    for name in os.listdir("/proc/self/fd"):
        try:
            with socket.socket(fileno=os.dup(int(name))) as one:
                if one.type == socket.SOCK_STREAM and one.family in (socket.AF_INET, socket.AF_INET6):
                    info = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 192)
                    acknowledged, received = struct.unpack_from("QQ", info, 120)
                    total = [total[0] + acknowledged, total[1] + received]
        except OSError:
            continue
    return total


if __name__ == "__main__":
    functions: dict[str, Callable[..., Any]] = {
        f.__name__: f
        for f in (
            hashes,
            train_on_gpus,
            resume_runs,
            resume_per_worker,
            resume_samples_per_worker,
            fill_disk,
            fail_on_journal_rank,
            disagreements,
            search,
            count_bytes,
        )
    }
    line = json.dumps(functions[sys.argv[1]](*sys.argv[2:]))
    os.write(1, f"{line}\n".encode())  # at once: the others write to the same pipe
