"""Objectives that run simulators: functions of members, the seed of a generation, environments that threads share."""

import functools
import inspect
import types
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.utils._pytree import tree_map

from germline.noise import ADDRESS_LIMIT, Field, Stream

SEED_LIMIT = 1 << 31  # seeds fit into the signed integers of 32 bits that some simulators have


def takes_seed(objective: Callable[..., Any]) -> bool:
    """Return whether an objective takes a second positional argument: one named seed, or one without a default.

    >>> takes_seed(lambda model: 0), takes_seed(lambda model, env=None: 0), takes_seed(lambda model, seed=0: 0)
    (False, False, True)
    """
    try:
        parameters = inspect.signature(objective).parameters.values()
    except (TypeError, ValueError):  # some functions in C have no signature
        return False
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    second = [p for p in parameters if p.kind in kinds][1:2]
    return any(p.name == "seed" or p.default is p.empty for p in second)


def draw_seed(run_seed: int, generation: int) -> int:
    """Return the seed that an objective gets for all members of a generation, from 0 to 2^31 - 1."""
    field = Field(run_seed)
    return int(field.below(SEED_LIMIT, 1, generation, Stream.BATCH, member=ADDRESS_LIMIT - 1)[0])


def find_environment(objective: Callable[..., Any]) -> str | None:
    """Return the name of an object with the methods reset and step that an objective holds, if there is one.

    >>> class Environment:
    ...     def reset(self): ...
    ...     def step(self, action): ...
    >>> env = Environment()
    >>> find_environment(lambda model, env=env: 0.0), find_environment(lambda model: Environment().reset())
    ('env', None)
    """
    return next((name for name, value in iterate_held(objective) if is_environment(value)), None)


def is_environment(value: Any) -> bool:
    """Return whether a value is an object, not a class, with the methods reset and step."""
    has_methods = all(callable(getattr(value, method, None)) for method in ("reset", "step"))
    return has_methods and not isinstance(value, type | types.ModuleType)


def iterate_held(function: Any) -> Iterator[tuple[str, Any]]:
    """Yield the values that a function or a callable object holds, by name, without calling it."""
    if isinstance(function, functools.partial):
        yield from ((f"argument {number}", value) for number, value in enumerate(function.args))
        yield from function.keywords.items()
        yield from iterate_held(function.func)
    elif isinstance(function, types.MethodType):
        yield from [("self", function.__self__), *getattr(function.__self__, "__dict__", {}).items()]
        yield from iterate_held(function.__func__)
    elif isinstance(function, types.FunctionType):
        with suppress(ValueError):  # a variable of the closure has no value yet
            variables = inspect.getclosurevars(function)
            yield from [*variables.nonlocals.items(), *variables.globals.items()]
        yield from ((p.name, p.default) for p in inspect.signature(function).parameters.values())
    else:
        yield from getattr(function, "__dict__", {}).items()


class MembersLike(Protocol):
    """Members as an objective of a population sees them; ``germline.population.members.Members`` has the details."""

    def __len__(self) -> int: ...

    @property
    def device(self) -> torch.device: ...

    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...

    def map(self, *args: Any, **kwargs: Any) -> Any: ...


class PopulationObjective(Protocol):
    """A function of (members, seed) that scores all members of a block together; derive from this class.

    Attributes:
        maximize: Whether it is maximized where the user does not say so.
        block: The most members that it takes at once; None for as many as fit into memory.
        columns: The numbers that it returns for each member: the score and, where it counts them, the steps of its
            episodes, then sums of its observations and of their squares.
        splits: The names of the sets of held-out episodes on which ``measure`` can be called.
        metrics: The names of what ``measure`` returns; the first is what runs are compared by, in the direction of the
            objective.
        allows_bfloat16: Whether members may compute in bfloat16, because they get no floats as inputs.
    """

    maximize: bool = False
    block: int | None = None
    columns: int = 1
    splits: tuple[str, ...] = ()
    metrics: tuple[str, ...] = ("return", "steps")
    allows_bfloat16: bool = False

    @property
    def name(self) -> str | None:
        """The name of the simulator, for the header of a run."""
        return None

    def __call__(self, members: MembersLike, seed: int) -> Any:
        """Return the scores: (members,) or (members, columns)."""

    def bind(self, module: nn.Module) -> "PopulationObjective":
        """Return the objective for the members of a module, the run's own copy, which it may prepare."""
        return self

    def size_block(
        self, population: int, device: torch.device, dtype: torch.dtype, weight_bytes: int, processes: int
    ) -> int | None:
        """Return how many members are evaluated together, a function of these alone; None where that is measured.

        Args:
            population: The number of members.
            device: The device that evaluates them.
            dtype: The type of their arithmetic.
            weight_bytes: The memory of a member's weights, without those that have noise of low rank.
            processes: The processes of the fleet; there is at least one block for each.
        """
        return None

    def measure(self, members: MembersLike, split: str, run_seed: int) -> dict[str, float]:
        """Return metrics of one member on held-out episodes: ``return`` and others."""
        return {}

    def draw(self, module: nn.Module, run_seed: int) -> bytes | None:
        """Return an animated picture of a module at work, as a GIF, or None."""
        return None


def as_population(function: Any) -> PopulationObjective | None:
    """Return a function if it is an objective of a population, else None."""
    return function if PopulationObjective in type(function).__mro__ else None


@dataclass(frozen=True)
class Vectorized(PopulationObjective):
    """The objective that ``vectorized`` makes of a function."""

    function: Callable[..., Any]
    block: int | None = None

    def __call__(self, members: MembersLike, seed: int) -> Any:
        return self.function(members, seed) if takes_seed(self.function) else self.function(members)


def vectorized(function: Callable[..., Any], block: int | None = None) -> Vectorized:
    """Return an objective that scores many members at once, for ``objective=``.

    Args:
        function: A function of (members, seed), or of members, that returns one score for each member. ``members(x)``
            and ``members.map(x)`` run the model. It is called once for each block of members, with the same seed for
            all blocks of a generation, and must score each member independently of the others.
        block: The most members of a block; by default as many as fit into memory, up to 256.

    >>> from torch import nn
    >>> import germline as gl
    >>> def fall(members, seed):
    ...     height = torch.full((len(members), 1, 1), 10.0)
    ...     for step in range(5):
    ...         height = height - members.map(height).abs()
    ...     return height.flatten()
    >>> search = gl.Search(nn.Linear(1, 1), gl.OpenAIES(population=8), objective=gl.vectorized(fall))
    >>> search.step().shape
    (8,)
    """
    return Vectorized(function, block)


@dataclass(frozen=True)
class SingleMember:
    """A plain module in the place of members: a population of one."""

    module: nn.Module | Callable[..., Any]

    def __len__(self) -> int:
        return 1

    @property
    def device(self) -> torch.device:
        """The device of the module."""
        parameters = self.module.parameters() if isinstance(self.module, nn.Module) else iter(())
        return next(parameters, torch.empty(0)).device

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return tree_map(add_member, self.module(*args, **kwargs))

    def map(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module on the only rows."""
        args, kwargs = tree_map(lambda x: x[0] if isinstance(x, torch.Tensor) else x, (args, kwargs))
        return self(*args, **kwargs)


def add_member(x: Any) -> Any:
    """Return a tensor with a first dimension for the only member."""
    return x[None] if isinstance(x, torch.Tensor) else x


def read_table(scores: Any, members: int, columns: int) -> NDArray[np.float32]:
    """Return what a population objective has returned, as an array: (members, columns).

    Raises:
        ValueError: It has another size.
    """
    table = np.asarray(scores.detach().cpu() if isinstance(scores, torch.Tensor) else scores)
    if table.size != members * columns or table.shape[:1] != (members,):
        message = f"The objective returned scores of shape {table.shape} for {members} members"
        raise ValueError(f"{message}: it must return one score for each, of shape ({members},).")
    return table.astype(np.float32).reshape(members, columns)
