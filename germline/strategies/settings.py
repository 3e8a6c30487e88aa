"""Settings of strategies: their defaults and meanings, their checks, and their values from text."""

import dataclasses
import types
import typing
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any, TypeVar

import torch
from torch import Tensor

from germline.errors import BadInput, unknown_name
from germline.genome import Genome
from germline.noise import Field, Kind, low_rank_matrices
from germline.optim.optimizers import SGD, Adam, Moments, Optimizer, TorchOptimizer
from germline.optim.schedules import Schedule, Scheduled, value_at

C = TypeVar("C")
# torch optimizers that treat each parameter independently
ELEMENTWISE = ("SGD", "Adam", "AdamW", "RMSprop", "Adagrad", "NAdam", "RAdam", "Adamax", "Adadelta", "ASGD", "Rprop")


def setting(default: Any, meaning: str, *, is_shown: bool = True) -> Any:
    """Declare a setting of a strategy: a dataclass field with its default and one line that says what it means."""
    return dataclasses.field(default=default, metadata={"meaning": meaning}, repr=is_shown)


def document_settings(cls: type[C]) -> type[C]:
    """Add the settings of a strategy, with their meanings, to its docstring: the decorator of a dataclass."""
    fields = dataclasses.fields(cls)  # type: ignore[arg-type]
    lines = ["", "    Args:", *(f"        {field.name}: {field.metadata.get('meaning', '')}." for field in fields)]
    lines += ["", "    Raises:", "        BadInput: If a setting has a value that it cannot have.", "    "]
    cls.__doc__ = "\n".join([(cls.__doc__ or "").rstrip(), *lines])
    return cls


def build_optimizer(strategy: Any) -> Optimizer:
    """Return the optimizer that a strategy's settings name.

    adam, sgd and momentum are this package's own, exact ones; torch.NAME and functions are torch's.
    """
    choice, scheduler, weight_decay = strategy.optimizer, strategy.scheduler, strategy.weight_decay
    start_decay = getattr(strategy, "start_decay", 0.0)
    if start_decay and (callable(choice) or choice.startswith("torch.")):
        raise BadInput(
            "Only adam, sgd and momentum decay towards the start: choose one of them, or leave start_decay at 0."
        )
    if callable(choice):
        if weight_decay:
            raise BadInput("A function that makes an optimizer sets its weight decay too: leave weight_decay at 0.")
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
    exact: dict[str, Optimizer] = {
        "adam": Adam(weight_decay=weight_decay, start_decay=start_decay),
        "sgd": SGD(weight_decay=weight_decay, start_decay=start_decay),
        "momentum": SGD(momentum=0.9, weight_decay=weight_decay, start_decay=start_decay),
    }
    if choice not in exact:
        raise unknown_name("optimizer", choice, [*exact, "torch.NAME"])
    return exact[choice]


def is_portable(optimizer: Optimizer) -> bool:
    """Return whether an optimizer's step has the same bits on every kind of device."""
    return not isinstance(optimizer, TorchOptimizer)


def is_elementwise(optimizer: Optimizer) -> bool:
    """Return whether an optimizer treats each parameter independently."""
    if not isinstance(optimizer, TorchOptimizer):
        return True
    return type(optimizer.make([torch.nn.Parameter(torch.zeros(2))])).__name__ in ELEMENTWISE


def check_optimizer(strategy: Any) -> None:
    """Check the settings of the optimizer; torch's are tried on two numbers before a run starts."""
    check_rate("lr", strategy.lr, zero=True)
    check_rate("weight_decay", strategy.weight_decay, zero=True)
    check_rate("start_decay", getattr(strategy, "start_decay", 0.0), zero=True)
    optimizer = build_optimizer(strategy)
    if not isinstance(optimizer, TorchOptimizer):
        return
    try:
        theta, moments = torch.zeros(2), Moments()
        for _ in range(2):
            theta, moments = optimizer.step(theta, torch.ones(2), moments, 0.1)
    except Exception as error:
        name = strategy.optimizer if isinstance(strategy.optimizer, str) else "The function given as optimizer"
        raise BadInput(f"{name} cannot step a vector of parameters by a gradient: {error}") from error


def learning_rate_at(optimizer: Optimizer, lr: Scheduled, theta: Tensor, moments: Moments, generation: int) -> float:
    """Return the learning rate of a generation: that of torch's scheduler where there is one."""
    rate = optimizer.rate(theta, moments) if isinstance(optimizer, TorchOptimizer) else None
    rate = value_at(lr, generation) if rate is None else rate
    check_rate("lr", rate, zero=True)
    return rate


def set_schedules(strategy: Any, part: float) -> Any:
    """Return a strategy whose schedules over the whole run have the values that they have after a part of it."""
    settings = {name: value.value_after(part) for name, value in vars(strategy).items() if is_over_run(value)}
    return strategy.with_settings(**settings) if settings else strategy


def is_over_run(value: Any) -> bool:
    """Return whether a setting is a schedule over the whole run."""
    return isinstance(value, Schedule) and value.generations is None


def check_population(population: int, mirrored: bool, shards: int) -> None:
    """Check that at least two members are ranked together, in whole pairs where they are mirrored."""
    if population < 2 or (mirrored and population % 2):
        need = "an even number of at least 2" if mirrored else "at least 2"
        raise BadInput(f"The population must be {need}, not {population}.")
    ranked = population // shards if shards > 0 else 0
    if ranked < 2 or population % shards or (mirrored and ranked % 2):
        need = "in whole pairs, " if mirrored else ""
        raise BadInput(f"A population of {population} cannot be cut into {shards} equal shards, {need}of at least 2.")


def check_choice(name: str, value: str, choices: Sequence[str]) -> None:
    """Check that a setting is one of its choices."""
    if value not in choices:
        raise unknown_name(name, value, choices)


def check_rate(name: str, value: Any, *, zero: bool = False) -> None:
    """Check that a setting is finite and above 0, or not below it: a number, or both ends of a schedule.

    The values of functions are checked as they are computed.
    """
    ends = (value.start, value.stop) if isinstance(value, Schedule) else () if callable(value) else (value,)
    for end in ends:
        if not isinstance(end, int | float) or not (end >= 0 if zero else end > 0) or not end < float("inf"):
            raise BadInput(f"The setting {name} must be {'0 or more' if zero else 'above 0'}, not {end!r}.")


def check_count(name: str, value: int) -> None:
    """Check that a setting is at least 1."""
    if value < 1:
        raise BadInput(f"The setting {name} must be at least 1, not {value}.")


def parse_ranks(ranks: str) -> list[tuple[str, int | None]]:
    """Return the setting ranks as a list of patterns of names and the rank of each.

    >>> parse_ranks("embedding.*=4, head.weight=none")
    [('embedding.*', 4), ('head.weight', None)]
    """
    rules = []
    for part in filter(None, (part.strip() for part in ranks.split(","))):
        pattern, equals, value = (piece.strip() for piece in part.partition("="))
        if not (pattern and equals and (value.lower() == "none" or value.isdigit())):
            raise BadInput(f"The setting ranks takes NAME=RANK, NAME=none and so on, not {part!r}.")
        rules.append((pattern, None if value.lower() == "none" else int(value)))
    return rules


def ranks_by_parameter(genome: Genome, rank: int | None, ranks: str) -> list[int | None]:
    """Return the rank of each parameter's noise: that of the last rule that its name matches, else ``rank``."""
    names = [slot.name for slot in genome.slots]
    by_parameter = [rank] * len(names)
    for pattern, own in parse_ranks(ranks):
        matching = [i for i, name in enumerate(names) if fnmatchcase(name, pattern)]
        if not matching:
            raise unknown_name("parameter", pattern, names)
        for i in matching:
            by_parameter[i] = own
    return by_parameter


def low_rank_field(
    seed: int, genome: Genome, noise: Kind, rank: int | None, ranks: str, *, mirrored: bool = False
) -> Field:
    """Return the noise field of a strategy with the settings ``rank`` and ``ranks``."""
    return Field(seed, noise, mirrored, low_rank_matrices(genome.shapes, ranks_by_parameter(genome, rank, ranks)))


def parse_setting(kind: Any, name: str, text: str) -> Any:
    """Return a setting's value from text, by the type of its field."""
    is_union = isinstance(kind, types.UnionType) or typing.get_origin(kind) is typing.Union
    options = typing.get_args(kind) if is_union else (kind,)
    if type(None) in options and text.lower() == "none":
        return None
    for option in options:
        if typing.get_origin(option) is typing.Literal and text in typing.get_args(option):
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
    choices = [choice for option in options for choice in describe_option(option)]
    raise BadInput(f"The setting {name} cannot be {text!r}: it takes {' or '.join(choices)}.")


def describe_option(option: Any) -> list[str]:
    """Return what a person may write for one type of a setting."""
    if typing.get_origin(option) is typing.Literal:
        return [str(choice) for choice in typing.get_args(option)]
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "a name", type(None): "none"}
    return [names[option]] if option in names else ["linear(START, STOP)"] if option is Schedule else []
