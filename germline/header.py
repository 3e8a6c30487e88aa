"""What stands at the head of a journal, and a strategy made from it again."""

import dataclasses
import functools
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from germline.core import Core
from germline.errors import BadInput
from germline.genome import frozen_sha256, theta_sha256
from germline.objective import Batches, Data
from germline.optim.schedules import Schedule
from germline.strategies import AnyStrategy, strategy_class
from germline.version import __version__

SCHEDULED = ("sigma", "lr", "lr_sigma", "inertia")  # settings that may be functions, whose values are in the records


def header_of(
    core: Core, splits: Mapping[str, Data], batches: Batches | None, about: Mapping[str, Any]
) -> dict[str, Any]:
    """Everything that a run is made of, its data by their fingerprints; ``about`` is what only people want to know."""
    assert core.module is not None
    return {
        "recipe": about.get("recipe"),
        "recipe_settings": about.get("recipe_settings", {}),
        "strategy": core.strategy.name,
        "settings": settings_of(core.strategy),
        "maximize": core.objective.maximize,
        "seed": core.seed,
        "layout": core.genome.describe(),
        "fixed": frozen_sha256(core.module),
        "data": {name: data.fingerprint for name, data in splits.items()},
        "batch_size": batches.batch_size if batches is not None else None,
        "shuffle": batches.shuffle if batches is not None else True,
        "evaluation": dataclasses.asdict(core.plan) if core.plan is not None else None,
        "initial_theta_sha256": theta_sha256(core.state.theta),
        "device": str(core.device) if core.fleet.launch is None and core.fleet.size == 1 else core.device.type,
        "processes": core.fleet.size,
        "launch": core.fleet.launch,
        "versions": {"germline": __version__, "torch": torch.__version__, "numpy": np.__version__},
        "machine": f"{platform.system()} {platform.machine()}, {processor()}, Python {platform.python_version()}",
        "command": about.get("command"),
        "stop": about.get("stop", {}),
    }


def settings_of(strategy: AnyStrategy) -> dict[str, Any]:
    """A strategy's settings as JSON."""
    values = {f.name: getattr(strategy, f.name) for f in dataclasses.fields(strategy)}  # type: ignore[arg-type]
    return {name: described(value) for name, value in values.items()}


def described(value: Any) -> Any:
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, Schedule):
        return {"schedule": str(value)}
    if isinstance(value, functools.partial):
        return {"function": f"partial {getattr(value.func, '__qualname__', type(value.func).__qualname__)}"}
    return {"function": getattr(value, "__qualname__", type(value).__qualname__)} if callable(value) else value


def revive(header: Mapping[str, Any], given: AnyStrategy | None = None, *, replayed: bool = False) -> AnyStrategy:
    """The strategy of a run from its header; functions, which a header cannot hold, from the one given.

    Where it is only to be replayed the functions of schedules are not needed: their values are in the records.
    """
    settings = {}
    for name, value in header["settings"].items():
        if isinstance(value, dict) and "schedule" in value:
            value = Schedule.parse(value["schedule"])
        elif isinstance(value, dict) and "function" in value and replayed and name in SCHEDULED:
            value = 1.0
        elif isinstance(value, dict) and "function" in value:
            if given is None or described(getattr(given, name, None)) != value:
                where = "go on from the Python code that began the run, with gl.train(..., resume=...)"
                raise BadInput(f"The setting {name} of this run is the function {value['function']}: {where}.")
            value = getattr(given, name)
        settings[name] = value
    strategy: AnyStrategy = strategy_class(header["strategy"])(**settings)
    return strategy


def processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor()
