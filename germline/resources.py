"""What a step of Hybrid-ES costs: the paper's model with its constants, the same with those of this machine, and a run.

A full step of a worker is a forward and a backward pass of its part of the batch, and an update. A shifted step is its
part of the K samples, each a shift and a forward pass of the batch, and an update. Of r steps one is full, and only
full ones send gradients:

    runtime  (full + (r - 1) shifted) / (r full)
    memory   (1 + (r - 1) m) / r, a mean over time, where m is the memory of a forward pass in that of both
    network  1 / r

all beside steps that are all full. In the paper each worker has a batch of its own, and one sample.
"""

import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from germline.fleet import Local
from germline.journal import Journal
from germline.population import exact_arithmetic, single_threaded_torch
from germline.recipes.recipe import Recipe
from germline.strategies import GenerationResult, HybridES
from germline.trainer import set_up

REPEATS = 7
INTERVALS = (2, 3, 4)
STEPS = 24  # of a run that is measured: whole intervals of each
WORKERS = 2


@dataclass(frozen=True)
class Phases:
    """Seconds of the parts of a step of one worker, and bytes that are held at once."""

    forward: float
    backward: float
    shift: float
    update: float
    memory_full: float
    memory_shifted: float
    samples: int = 1  # of a worker in a shifted step
    sharing: int = 1  # workers that share the batch of a full step

    @property
    def full(self) -> float:
        return (self.forward + self.backward) / self.sharing + self.update

    @property
    def shifted(self) -> float:
        return self.samples * (self.shift + self.forward) + self.update


PUBLISHED = Phases(16.4e-3, 5.5e-3, 15.1e-3, 1.196e-3, 3.0, 1.0)  # memory by parts


@dataclass(frozen=True)
class Ratios:
    """Beside steps that are all full."""

    runtime: float
    memory: float
    network: float


def predicted(phases: Phases, interval: int) -> Ratios:
    """By the model.

    >>> found = predicted(PUBLISHED, 2)
    >>> round(found.runtime, 3), round(found.memory, 3), found.network
    (1.208, 0.667, 0.5)
    """
    others = interval - 1
    runtime = (phases.full + others * phases.shifted) / (interval * phases.full)
    memory = (1 + others * phases.memory_shifted / phases.memory_full) / interval
    return Ratios(runtime, memory, 1 / interval)


def measure(recipe: Recipe, workers: int = WORKERS) -> Phases:
    """The parts of a step on one core of this machine."""
    strategy = recipe.strategy
    assert isinstance(strategy, HybridES)
    core, _, _, batch = set_up(recipe, Local("cpu", workers=1), 0)
    core.prepare(batch)
    assert batch is not None
    plain, theta, field = core.plain(), core.state.theta, core.noise
    values = core.strategy.values(core.state, 0)
    one, out = field.members(np.arange(1), 1), theta.new_empty(1, theta.numel())
    sigma = values.get("sigma", 1e-3)
    _, gradient = plain.gradient(theta, batch)
    told = GenerationResult(0, np.ones(1, np.float32), values, gradient)

    def forward() -> None:
        with torch.no_grad():
            plain.score_at(theta, batch)

    with single_threaded_torch(), exact_arithmetic(core.device):
        seconds = {
            "forward": typical(forward),
            "both": typical(lambda: plain.gradient(theta, batch)),
            "shift": typical(lambda: one.perturb(theta, sigma, out=out)),
            "update": typical(lambda: core.strategy.tell(core.state, told, field, maximize=False)),
        }
        memory = peak(forward), peak(lambda: plain.gradient(theta, batch))
    return Phases(
        seconds["forward"],
        max(0.0, seconds["both"] - seconds["forward"]),
        seconds["shift"],
        seconds["update"],
        memory_full=memory[1],
        memory_shifted=memory[0],
        samples=-(-strategy.population // workers),
        sharing=1 if strategy.per_worker else workers,
    )


def typical(work: Callable[[], object]) -> float:
    found = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        work()
        found.append(time.perf_counter() - began)
    return statistics.median(found)


def peak(work: Callable[[], object]) -> float:
    """Bytes of tensors that some work holds at once, by torch's own account."""
    from torch.profiler import ProfilerActivity, profile

    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # it would print
    with tempfile.TemporaryDirectory() as folder:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as account:
            work()
        account.export_chrome_trace(f"{folder}/trace.json")
        events = json.loads(Path(folder, "trace.json").read_text())["traceEvents"]
    changes = [(e["ts"], e["args"]["Bytes"]) for e in events if e.get("name") == "[memory]"]
    held = np.cumsum([size for _, size in sorted(changes, key=lambda change: change[0])])
    return float(held.max(initial=0.0))


@dataclass(frozen=True)
class Measured:
    """A step of a run in several processes."""

    seconds: float
    bytes_sent: float
    peak_memory: float
    mean_memory: float  # in time, of what the process has of the system
    full: dict[str, float]  # seconds of the parts of a full step, by the process that keeps the journal
    shifted: dict[str, float]


def trial(recipe: str, settings: Sequence[str], interval: int, workers: int = WORKERS) -> Measured:
    """A short run in processes of one thread, as ``germline train`` does it."""
    chosen = [word for setting in (*settings, f"interval={interval}") for word in ("--set", setting)]
    with tempfile.TemporaryDirectory() as folder:
        fleet = ["--fleet", "spmd", "--workers", str(workers), "--device", "cpu"]
        command = ["train", recipe, *chosen, *fleet, "--generations", str(STEPS), "--runs", folder, "--json"]
        done = subprocess.run([sys.executable, "-m", "germline", *command], capture_output=True, text=True, check=True)
        summary = json.loads(done.stdout.splitlines()[-1])
        journal = Journal.open(Path(summary["run"]), read_only=True)
        steps = [record.side | record.side["diagnostics"] for record in journal.records()]
        journal.close()
    seconds = [step["seconds"] for step in steps]
    return Measured(
        summary["seconds"] / STEPS,
        summary["bytes_sent"] / STEPS,
        summary["peak_memory_bytes"],
        float(np.average([step.get("memory", 0) for step in steps], weights=seconds)),
        full=parts_of([step for step in steps if "backward_seconds" in step]),
        shifted=parts_of([step for step in steps if "backward_seconds" not in step]),
    )


def parts_of(steps: list[dict[str, float]]) -> dict[str, float]:
    """Typical seconds of the parts of some steps."""
    return {
        part: statistics.median(step.get(f"{part}_seconds", 0.0) for step in steps)
        for part in ("forward", "backward", "noise", "update")
        if steps
    }


def table(recipe: str, made: Recipe, settings: Sequence[str]) -> dict[str, Any]:
    """The model with the paper's constants and with this machine's, beside runs in two processes."""
    phases, plain = measure(made), trial(recipe, settings, 1)
    rows = []
    for interval in INTERVALS:
        found = trial(recipe, settings, interval)
        ratios = Ratios(
            found.seconds / plain.seconds, found.mean_memory / plain.mean_memory, found.bytes_sent / plain.bytes_sent
        )
        ways = {"paper": predicted(PUBLISHED, interval), "model": predicted(phases, interval), "measured": ratios}
        row = {name: dataclasses.asdict(one) for name, one in ways.items()}
        rows.append({"interval": interval, **row, "run": dataclasses.asdict(found)})
    return {"phases": dataclasses.asdict(phases), "all_full": dataclasses.asdict(plain), "rows": rows}
