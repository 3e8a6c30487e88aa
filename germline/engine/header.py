"""The header of a journal: everything that a run is made of, and a strategy made from it again."""

import dataclasses
import functools
import platform
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from germline.engine.session import Session
from germline.errors import BadInput
from germline.genome import Genome, frozen_sha256, theta_sha256
from germline.machine import processor_name, product_mode
from germline.objective import Objective
from germline.optim.schedules import Schedule
from germline.population import METHODS, Plan
from germline.recipes import Recipe
from germline.strategies import STRATEGIES, AnyStrategy, class_path, is_built_in
from germline.version import __version__

SCHEDULED = ("sigma", "lr", "lr_sigma", "inertia")  # settings that may be functions, whose values are in the records


def build_header(session: Session, about: Mapping[str, Any]) -> dict[str, Any]:
    """Return the header of a session; ``about`` holds the recipe's name and settings, the command and the limits."""
    scorer, fleet, batches = session.scorer, session.fleet, session.batches
    assert scorer.module is not None
    norms, simulator = session.fixed_norms, name_simulator(scorer.objective)
    return {
        "recipe": about.get("recipe"),
        "recipe_settings": about.get("recipe_settings", {}),
        "strategy": session.strategy.name,
        "strategy_class": class_path(session.strategy),
        "settings": describe_settings(session.strategy),
        "is_portable": session.strategy.is_portable,
        "maximize": scorer.objective.maximize,
        "seed": session.seed,
        "layout": scorer.genome.describe(),
        "frozen_sha256": frozen_sha256(scorer.module),
        **({"fixed_norms": norms} if norms else {}),
        **({"simulator": simulator} if simulator else {}),
        "data": {name: data.fingerprint for name, data in session.splits.items()},
        "batch_size": batches.batch_size if batches is not None else None,
        "shuffle": batches.shuffle if batches is not None else True,
        "plan": dataclasses.asdict(scorer.chosen_plan),
        "initial_theta_sha256": theta_sha256(session.read_theta()),
        "device": str(scorer.device) if fleet.launch_name is None and fleet.group.size == 1 else scorer.device.type,
        "processes": fleet.group.size,
        "launch": fleet.launch_name,
        "versions": {"germline": __version__, "torch": torch.__version__, "numpy": np.__version__},
        "machine": f"{platform.system()} {platform.machine()}, {processor_name()}, Python {platform.python_version()}",
        "products": product_mode(),
        "command": about.get("command"),
        "stop": about.get("stop", {}),
        "keep": about.get("keep", "last"),
    }


def name_simulator(objective: Objective) -> str | None:
    """Return the name of the simulator that an objective runs, if it has one."""
    return objective.population.name if objective.population is not None else None


def describe_settings(strategy: AnyStrategy) -> dict[str, Any]:
    """Return a strategy's settings as JSON; a function by its name only."""
    return {name: describe_value(value) for name, value in vars(strategy).items()}


def describe_value(value: Any) -> Any:
    """Return the value of a setting as JSON."""
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, tuple):
        return [describe_value(item) for item in value]
    if isinstance(value, Schedule):
        return {"schedule": str(value)}
    if isinstance(value, functools.partial):
        return {"function": f"partial {getattr(value.func, '__qualname__', type(value.func).__qualname__)}"}
    return {"function": getattr(value, "__qualname__", type(value).__qualname__)} if callable(value) else value


@contextmanager
def translate_header_errors(run: str) -> Iterator[None]:
    """Turn an error about what a header holds into a sentence: no run has written it."""
    try:
        yield
    except BadInput:
        raise
    except Exception as error:
        message = f"The header of {run} cannot be used ({type(error).__name__}: {error})"
        raise BadInput(f"{message}: restore the run from a copy.") from error


def check_parts(header: Mapping[str, Any], run: str) -> None:
    """Raise an error if the layout, the plan or the settings of a header are none that a run has written."""
    with translate_header_errors(run):
        for name in ("settings", "recipe_settings", "stop", "versions"):
            header[name].items()
        Genome.from_description(header["layout"])
        METHODS[Plan(**header["plan"]).method]


def restore_strategy(
    header: Mapping[str, Any], given: AnyStrategy | None = None, *, for_replay: bool = False
) -> AnyStrategy:
    """Return the strategy of a run, with the settings of its header.

    Nothing is imported because a header names it: a class that is not part of this package, and functions among the
    settings, are taken from the strategy that the user has given.

    Args:
        header: The header of the run.
        given: The strategy that the user has given, or that of the recipe.
        for_replay: Whether the run is only replayed: then the functions of schedules are not needed, because their
            values are in the records.

    Raises:
        BadInput: If the given strategy is another one, or one is needed and not given.
    """
    cls = find_class(header, given)
    settings = {}
    for name, value in header["settings"].items():
        if isinstance(value, dict) and "schedule" in value:
            value = Schedule.parse(value["schedule"])
        elif isinstance(value, dict) and "function" in value and for_replay and name in SCHEDULED:
            value = 1.0
        elif isinstance(value, dict) and "function" in value:
            if given is None or describe_value(vars(given).get(name)) != value:
                advice = "give the run's strategy again, with gl.train(..., strategy=..., resume=...)"
                raise BadInput(f"The setting {name} of this run is the function {value['function']}: {advice}.")
            value = vars(given)[name]
        elif isinstance(value, list):
            value = tuple(tuple(item) if isinstance(item, list) else item for item in value)
        settings[name] = value
    strategy: AnyStrategy = cls(**settings)
    return strategy


def find_class(header: Mapping[str, Any], given: AnyStrategy | None) -> type[Any]:
    """Return the class of a run's strategy: one of this package, or that of the strategy that the user has given."""
    name, path = header["strategy"], header["strategy_class"]
    if given is not None and (given.name != name or not is_same_class(class_path(given), path)):
        message = f"The run was trained by the strategy {name} ({path}), not by {given.name} ({class_path(given)})"
        raise BadInput(f"{message}: give the run's own strategy.")
    built_in = next((cls for cls in STRATEGIES.values() if class_path(cls) == path), None)
    if built_in is not None:
        return built_in
    if given is None:
        message = f"The strategy {name} of this run is the class {path}, which is not part of germline"
        raise BadInput(f"{message}: give it again, with --strategy module:Class or strategy=.")
    return type(given)


def is_same_class(path: str, other: str) -> bool:
    """Return whether two paths name one class; outside this package a module may be a script one time, __main__."""
    if is_built_in(path) or is_built_in(other):
        return path == other
    return path.partition(":")[2] == other.partition(":")[2]


def recipe_for_run(recipe: Recipe, header: Mapping[str, Any], given: AnyStrategy | None = None) -> Recipe:
    """Return a recipe with the strategy of a run: the given one, the recipe's own, or one of this package.

    Args:
        recipe: The recipe that the run was started with.
        header: The header of the run.
        given: The strategy that the user has named again, if any.
    """
    name = header["strategy"]
    known = [recipe.strategy, *recipe.others.values()]
    own = next(
        (one for one in known if one.name == name and is_same_class(class_path(one), header["strategy_class"])), None
    )
    strategy = given or own
    return recipe.with_strategy(strategy if strategy is not None else find_class(header, None)())
