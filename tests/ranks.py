"""What processes of a fleet do in the tests: one function per test, called in every process.

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
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import germline as gl
from germline.fleet import Exchange
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
    x = torch.linspace(-1, 1, 240).reshape(48, 5)
    model = gl.seeded(seed, lambda: nn.Sequential(nn.Linear(5, hidden), nn.Tanh(), nn.Linear(hidden, 3)))
    return {"model": model, "data": (x, x[:, :3].argmax(1)), "loss": F.cross_entropy, "batch_size": 16}


def trained(strategy: AnyStrategy, path: Path, fleet: gl.Local, **changes: Any) -> str:
    settings = {**problem(), "generations": GENERATIONS, "snapshot_every": 3, **changes}
    result = gl.train(strategy=strategy, run=path, fleet=fleet, **settings)
    assert len(result.history) == settings["generations"]
    return str(result.summary["theta_sha256"])


def in_shards(strategy: AnyStrategy, shards: int) -> AnyStrategy:
    return dataclasses.replace(strategy, shards=shards)  # type: ignore[type-var]


def modes_of(name: str) -> tuple[Exchange, ...]:
    """The exact ones."""
    if STRATEGIES[name].needs_gradient:
        return ("replay", "auto")
    return ("replay", "chromosome", "central", *(("auto",) if name == "openai-es" else ()))


def hashes(directory: str) -> dict[str, str]:
    """Of every strategy by every exchange."""
    found = {}
    for name, strategy in STRATEGIES.items():
        for mode in (*modes_of(name), *(("semi",) if hasattr(strategy, "shards") else ())):
            fleet = gl.SPMD(mode, device="cpu", timeout=60)
            found[f"{name} by {mode}"] = trained(strategy, Path(directory) / f"{name} {mode}", fleet)
    return found


def resumed(directory: str, *names: str) -> list[str]:
    """Runs that one process began and many go on with, by another exchange, all with one fleet."""
    fleet, found = gl.SPMD("chromosome", device="cpu", timeout=60), []
    settings = {**problem(), "generations": GENERATIONS}
    for name in names:
        result = gl.train(strategy=STRATEGIES[name], resume=Path(directory) / name, fleet=fleet, **settings)
        found.append(str(result.summary["theta_sha256"]))
    semi = gl.SPMD("semi", device="cpu", timeout=60)
    try:
        gl.train(strategy=STRATEGIES[names[0]], resume=Path(directory) / names[0], fleet=semi, **settings)
    except gl.BadInput as error:
        return [*found, str(error)]
    return found


def disagreements(directory: str) -> dict[str, str]:
    """What is said where rank 1 is about something else."""
    odd = int(os.environ["RANK"]) == 1
    other: dict[str, dict[str, Any]] = {
        "weights": problem(seed=int(odd)),
        "layout": problem(hidden=9 + odd),
        "data": {**problem(), "data": (torch.ones(48, 5) * (1 + odd), torch.zeros(48, dtype=torch.int64))},
        "batches": {**problem(), "batch_size": 16 + 8 * odd},
        "seed": {**problem(), "seed": int(odd)},
        "limit": {**problem(), "generations": GENERATIONS + odd},
        "target": {**problem(), "target": "no_such_metric=1" if odd else None},
        "score": {**problem(), "loss": failing if odd else F.cross_entropy, "generations": 90},
    }
    found = {}
    for name, settings in other.items():
        try:
            trained(STRATEGIES["openai-es"], Path(directory) / name, gl.SPMD(device="cpu", timeout=60), **settings)
            found[name] = "nothing"
        except (gl.BadInput, RuntimeError, ZeroDivisionError) as error:
            found[name] = str(error)
    same = trained(
        STRATEGIES["openai-es"],
        Path(directory) / "sent",
        gl.SPMD(device="cpu", timeout=60, send_weights=True),
        **problem(seed=int(odd)),
    )
    return {**found, "sent": same}


class Failing:
    calls = 0


def failing(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    Failing.calls += 1
    if Failing.calls > 60:  # in the middle of the run
        raise ZeroDivisionError("the score cannot be computed")
    return F.cross_entropy(output, target)


def search(directory: str) -> dict[str, Any]:
    """One's own loop; at the end rank 1 is given another batch."""
    given = problem()
    x, y = given["data"]
    fleet = gl.SPMD("chromosome", device="cpu", timeout=60)
    found = gl.Search(given["model"], STRATEGIES["snes"], loss=F.cross_entropy, seed=3, fleet=fleet)
    for start in range(0, 32, 8):
        found.step(x[start : start + 16], y[start : start + 16])
    state = found.state_dict()
    again = gl.Search(problem()["model"], STRATEGIES["snes"], loss=F.cross_entropy, seed=3, fleet=gl.SPMD("central"))
    again.load_state_dict(state)
    for one in (found, again):
        one.step(x[:16], y[:16])
    hashes = [theta_sha256(torch.cat([p.detach().flatten() for p in one.model.parameters()])) for one in (found, again)]
    odd = int(os.environ["RANK"]) == 1
    try:
        found.step(x[16 + odd :][:16], y[16:][:16])
    except gl.BadInput as error:
        return {"hashes": hashes, "said": str(error)}
    return {"hashes": hashes, "said": "nothing"}


def bytes_counted(exchange: Exchange) -> dict[str, list[int]]:
    """What a fleet counts, and what the operating system counts on this process's connections to the others."""
    model = gl.seeded(0, lambda: nn.Sequential(nn.Linear(200, 500), nn.Linear(500, 2)))
    fleet = gl.SPMD(exchange, device="cpu", timeout=60)
    search = gl.Search(model, gl.SNES(population=12), loss=F.cross_entropy, fleet=fleet)
    x, y = torch.ones(4, 200), torch.zeros(4, dtype=torch.int64)
    search.step(x, y)
    before = settled(fleet)
    fleet.traffic()
    messages = fleet.collective.traffic.messages
    for _ in range(20):
        search.step(x, y)
    counted, messages = fleet.traffic(), fleet.collective.traffic.messages - messages
    after = settled(fleet)
    system = [b - a for a, b in zip(before, after, strict=True)]
    fleet.all(True)  # nobody leaves before all have counted
    return {"counted": list(counted), "system": system, "messages": [messages]}


def settled(fleet: gl.SPMD) -> list[int]:
    """The system's counts once everything that was sent has been acknowledged."""
    fleet.all(True)
    found, last = on_the_wire(), [0, 0]
    while found != last:
        time.sleep(0.2)
        found, last = on_the_wire(), found
    return found


def on_the_wire() -> list[int]:
    """Bytes acknowledged by and received from the other ends of all connections of this process, by the kernel."""
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
        f.__name__: f for f in (hashes, resumed, disagreements, search, bytes_counted)
    }
    line = json.dumps(functions[sys.argv[1]](*sys.argv[2:]))
    os.write(1, f"{line}\n".encode())  # at once: the others write to the same pipe
