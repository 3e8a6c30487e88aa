"""Settings of strategies: their meaning beside their default, and their reading from text."""

import dataclasses
import types
import typing
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch

from germline.errors import BadInput, unknown_name
from germline.genome import Genome
from germline.optim.optimizers import SGD, Adam, Moments, Optimizer, TorchOptimizer
from germline.optim.schedules import Schedule, Scheduled, value_at


def setting(default: Any, meaning: str) -> Any:
    """A field of a strategy with its default and one line of what it means."""
    return dataclasses.field(default=default, metadata={"meaning": meaning})


def build_optimizer(strategy: Any) -> Optimizer:
    """adam, sgd and momentum are this package's own, exact ones; torch.NAME and functions are torch's."""
    choice, scheduler, weight_decay = strategy.optimizer, strategy.scheduler, strategy.weight_decay
    if callable(choice):
        if weight_decay:
            raise BadInput("A function that makes an optimizer gives it its weight decay too: leave weight_decay at 0.")
        return TorchOptimizer(choice, scheduler, own_rate=True)
    if choice.startswith("torch."):
        names = [n for n in dir(torch.optim) if isinstance(getattr(torch.optim, n), type) and n != "Optimizer"]
        if choice.removeprefix("torch.") not in names:
            raise unknown_name("optimizer", choice, [f"torch.{n}" for n in names])
        factory = getattr(torch.optim, choice.removeprefix("torch."))
        settings = {"lr": value_at(strategy.lr, 0)} | ({"weight_decay": weight_decay} if weight_decay else {})
        return TorchOptimizer(lambda parameters: factory(parameters, **settings), scheduler)
    if scheduler is not None:
        raise BadInput(
            f"A torch scheduler needs a torch optimizer, and {choice!r} is not one: give lr a schedule instead."
        )
    own: dict[str, Optimizer] = {
        "adam": Adam(weight_decay=weight_decay),
        "sgd": SGD(weight_decay=weight_decay),
        "momentum": SGD(momentum=0.9, weight_decay=weight_decay),
    }
    if choice not in own:
        raise unknown_name("optimizer", choice, [*own, "torch.NAME"])
    return own[choice]


def check_optimizer(strategy: Any) -> None:
    """Settings of the optimizer, tried on two numbers, so that what torch cannot do is said before a run starts."""
    check_rate("lr", strategy.lr, zero=True)
    check_rate("weight_decay", strategy.weight_decay, zero=True)
    optimizer = build_optimizer(strategy)
    if not isinstance(optimizer, TorchOptimizer):
        return
    try:
        theta, moments = torch.zeros(2), Moments()
        for _ in range(2):
            theta, moments = optimizer.step(theta, torch.ones(2), moments, 0.1)
    except Exception as error:
        what = strategy.optimizer if isinstance(strategy.optimizer, str) else "the function given as optimizer"
        raise BadInput(f"{what} cannot step a vector of parameters by a gradient: {error}") from error


def rate_at(optimizer: Optimizer, lr: Scheduled, theta: torch.Tensor, moments: Moments, generation: int) -> float:
    """The learning rate of a generation: that of torch's scheduler where there is one."""
    rate = optimizer.rate(theta, moments) if isinstance(optimizer, TorchOptimizer) else None
    rate = value_at(lr, generation) if rate is None else rate
    check_rate("lr", rate, zero=True)
    return rate


def check_population(population: int, mirrored: bool, shards: int) -> None:
    """At least two members that are ranked together, in whole pairs where they are mirrored."""
    if population < 2 or (mirrored and population % 2):
        need = "an even number of at least 2" if mirrored else "at least 2"
        raise BadInput(f"The population must be {need}, not {population}.")
    ranked = population // shards if shards > 0 else 0
    if ranked < 2 or population % shards or (mirrored and ranked % 2):
        need = "in whole pairs, " if mirrored else ""
        raise BadInput(f"A population of {population} cannot be cut into {shards} equal shards, {need}of at least 2.")


def check_choice(name: str, value: str, choices: Sequence[str]) -> None:
    if value not in choices:
        raise unknown_name(name, value, choices)


def check_rate(name: str, value: Any, *, zero: bool = False) -> None:
    """Above 0, or not below it, and finite: a number, or both ends of a schedule. Functions are checked as they go."""
    ends = (value.start, value.stop) if isinstance(value, Schedule) else () if callable(value) else (value,)
    for end in ends:
        if not isinstance(end, int | float) or not (end >= 0 if zero else end > 0) or not end < float("inf"):
            raise BadInput(f"The setting {name} must be {'0 or more' if zero else 'above 0'}, not {end!r}.")


def check_count(name: str, value: int) -> None:
    if value < 1:
        raise BadInput(f"{name} must be at least 1, not {value}.")


def check_number(name: str, value: Any) -> None:
    """For what cannot change over the generations."""
    if not isinstance(value, int | float):
        raise BadInput(f"The setting {name} must be a number here, not {value}.")


def rank_rules(ranks: str) -> list[tuple[str, int | None]]:
    """The setting ranks as a list of patterns of names and the rank of each.

    >>> rank_rules("embedding.*=4, head.weight=none")
    [('embedding.*', 4), ('head.weight', None)]
    """
    rules = []
    for part in filter(None, (part.strip() for part in ranks.split(","))):
        pattern, equals, value = (piece.strip() for piece in part.partition("="))
        if not (pattern and equals and (value.lower() == "none" or value.isdigit())):
            raise BadInput(f"The setting ranks takes NAME=RANK, NAME=none and so on, not {part!r}.")
        rules.append((pattern, None if value.lower() == "none" else int(value)))
    return rules


def ranks_of(genome: Genome, rank: int | None, ranks: str) -> list[int | None]:
    """The rank of each parameter's noise: the last rule that its name matches, else the rank of all."""
    names = [slot.name for slot in genome.slots]
    found = [rank] * len(names)
    for pattern, own in rank_rules(ranks):
        matching = [i for i, name in enumerate(names) if fnmatchcase(name, pattern)]
        if not matching:
            raise unknown_name("parameter", pattern, names)
        for i in matching:
            found[i] = own
    return found


def parse(kind: Any, name: str, text: str) -> Any:
    """A setting's value from the command line, by the type of its field."""
    options = (
        typing.get_args(kind)
        if isinstance(kind, types.UnionType) or typing.get_origin(kind) is typing.Union
        else (kind,)
    )
    if type(None) in options and text.lower() == "none":
        return None
    for option in options:
        origin = typing.get_origin(option)
        if origin is typing.Literal and text in typing.get_args(option):
            return text
        if option is bool and text.lower() in ("true", "false"):
            return text.lower() == "true"
        if option in (int, float):
            try:
                return option(text)
            except ValueError:
                continue
        if option is str:
            return text
    if Schedule in options and "(" in text:
        return Schedule.parse(text)
    wanted = [w for option in options for w in described(option)]
    raise BadInput(f"The setting {name} cannot be {text!r}: it takes {' or '.join(wanted)}.")


def described(option: Any) -> list[str]:
    if typing.get_origin(option) is typing.Literal:
        return [str(choice) for choice in typing.get_args(option)]
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "a name", type(None): "none"}
    return [names[option]] if option in names else ["linear(START, STOP, GENERATIONS)"] if option is Schedule else []
