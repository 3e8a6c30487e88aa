"""A recipe: everything that a run needs to know, in one value."""

import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from germline.errors import BadInput
from germline.objective import Data, Metric, Objective, build_objective
from germline.population import DType
from germline.strategies import AnyStrategy, OpenAIES
from germline.strategies.settings import check_choice


@dataclass(frozen=True)
class Recipe:
    """A model, its data, what is wanted of it, and how to train it.

    Give one of ``loss`` (minimized), ``score`` (maximized) and ``objective`` (a function of the model). A function that
    returns a Recipe can be given to ``germline train`` as FILE.py or module:function; its keyword arguments are the
    recipe's settings.

    >>> x = torch.randn(100, 4)
    >>> recipe = Recipe(model=nn.Linear(4, 1), data=(x, x.sum(1, keepdim=True)), loss=nn.functional.mse_loss)
    >>> recipe.strategy.name, recipe.generations
    ('openai-es', 300)
    """

    model: nn.Module
    data: Any = None
    dev: Any = None
    test: Any = None
    loss: Callable[..., Any] | None = None
    score: Callable[..., Any] | None = None
    objective: Callable[..., Any] | None = None
    maximize: bool | None = None
    metrics: Mapping[str, Metric] | None = None  # of (output, target); accuracy for classes if not given
    strategy: AnyStrategy = field(default_factory=OpenAIES)
    others: Mapping[str, AnyStrategy] = field(default_factory=dict)  # good settings of other strategies, by name
    batch_size: int | None = None  # a DataLoader's, else all of the data
    shuffle: bool = True  # whether each epoch has an order of its own; else all have that of the data
    dtype: DType = "auto"  # of the members' arithmetic: float32, bfloat16, or bfloat16 where it pays and ranks survive
    dropout: bool = False  # whether members are scored with their dropout layers at work
    generations: int = 300
    evaluate_every: int = 10  # generations between scores of dev and test
    snapshot_every: int = 100

    def __post_init__(self) -> None:
        check_choice("dtype", self.dtype, typing.get_args(DType))
        for name in ("evaluate_every", "snapshot_every", "batch_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise BadInput(f"{name} must be at least 1, not {value}.")

    def splits(self) -> dict[str, Data]:
        named = {"train": self.data, "dev": self.dev, "test": self.test}
        return {name: Data.from_source(source, name) for name, source in named.items() if source is not None}

    def with_strategy(self, strategy: AnyStrategy) -> "Recipe":
        """Return the recipe with another strategy."""
        return replace(self, strategy=strategy)

    def goal(self) -> Objective:
        return build_objective(self.loss, self.score, self.objective, self.maximize, self.metrics)


def seeded(seed: int, build: Callable[[], nn.Module]) -> nn.Module:
    """A module whose initial weights are a function of the seed; torch's global generator is left as it was.

    >>> a, b = (seeded(1, lambda: nn.Linear(3, 2)) for _ in range(2))
    >>> torch.equal(a.weight, b.weight)
    True
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return build()
