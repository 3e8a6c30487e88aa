"""A recipe: everything that a run needs to know, in one value."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from germline.arguments import check_fields
from germline.errors import BadInput
from germline.genome import count_parameters, set_trainable
from germline.metrics import Metrics
from germline.objective import Data, Objective, build_objective
from germline.population import DType
from germline.sources import float_type
from germline.strategies import AUTO, AnyStrategy, choose_strategy


@dataclass(frozen=True)
class Recipe:
    """A model, its data, its objective, and how to train it.

    A function that returns a Recipe can be given to ``germline train`` as FILE.py or module:function; its keyword
    arguments are the recipe's settings.

    Args:
        model: The module to train.
        data: The training set: a tuple or dict of tensors or NumPy arrays, a list of tuples (input, target), a Dataset
            or a DataLoader.
        dev: The set that settings are chosen by, in the same forms.
        test: The set that results are reported on, in the same forms.
        loss: A function of (output, target) to be minimized. Give one of ``loss``, ``score`` and ``objective``.
        score: A function of (output, target) to be maximized, unless ``maximize`` is False.
        objective: A function of the model, or of (model, seed), to be minimized unless ``maximize`` is True.
        maximize: Whether larger is better.
        metrics: Functions of (output, target) by which dev and test are measured: a dict by name, a list, or one; by
            default accuracy for classes.
        strategy: The strategy that trains the model; if it is not given, one is chosen by the number of parameters
            and by what members are scored on.
        others: Good settings of other strategies, by the name of the strategy.
        batch_size: Examples of a batch; by default that of the DataLoader, else all of the data.
        shuffle: Whether every epoch has another order; otherwise all have the order of the data.
        dtype: The arithmetic of the members: ``"float32"`` (the module's own types), ``"bfloat16"``, or ``"auto"``:
            bfloat16 where it is faster and does not change the ranks of the members.
        dropout: Whether members are scored with their dropout layers active.
        generations: The number of generations after which a run ends by default.
        evaluate_every: Generations between two measurements of dev and test.
        snapshot_every: Generations between two snapshots of the state.
        keep_snapshots: How many of the latest snapshots are kept besides the first; by default as many as take 2 GB
            together, but at least two.
        baseline_loss: A loss with a gradient, which backprop minimizes instead of a score that has none.
        trainable: The parameters to train, by patterns of their names, such as ``["*.lora_*", "head"]``; all others
            are frozen. If it is not given, the parameters with ``requires_grad`` are trained.

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
    metrics: Metrics | None = None
    strategy: AnyStrategy = AUTO
    others: Mapping[str, AnyStrategy] = field(default_factory=dict)
    batch_size: int | None = None
    shuffle: bool = True
    dtype: DType = "auto"
    dropout: bool = False
    generations: int = 300
    evaluate_every: int = 10
    snapshot_every: int = 100
    keep_snapshots: int | None = None
    baseline_loss: Callable[..., Any] | None = None
    trainable: str | Sequence[str] | None = None
    names_strategy: bool = field(init=False, default=True, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_fields(self)
        for name in ("evaluate_every", "snapshot_every", "keep_snapshots", "batch_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise BadInput(f"{name} must be at least 1, not {value}.")
        if self.trainable is not None:
            set_trainable(self.model, self.trainable)
        if self.strategy is AUTO:
            object.__setattr__(self, "strategy", self.choose_strategy())
            object.__setattr__(self, "names_strategy", False)

    def splits(self) -> dict[str, Data]:
        """Return the data sets that are given, by the names train, dev and test."""
        given = {"train": ("data", self.data), "dev": ("dev", self.dev), "test": ("test", self.test)}
        dtype = float_type(self.model)
        present = {split: pair for split, pair in given.items() if pair[1] is not None}
        return {split: Data.from_source(source, name, dtype) for split, (name, source) in present.items()}

    def choose_strategy(self, evaluations: int | None = None) -> AnyStrategy:
        """Return the strategy of a run that names none.

        Args:
            evaluations: The run's budget in forward passes of a batch, if it has one.
        """
        return choose_strategy(count_parameters(self.model), has_loss=self.loss is not None, evaluations=evaluations)

    def with_strategy(self, strategy: AnyStrategy) -> "Recipe":
        """Return the recipe with another strategy."""
        return replace(self, strategy=strategy)

    def goal(self) -> Objective:
        """Return the objective by which members are scored, or the loss that backprop minimizes instead."""
        if self.baseline_loss is not None and self.strategy.kind == "differentiate":
            measured = self.metrics or ({"score": self.score} if self.score is not None else None)
            return build_objective(self.baseline_loss, None, None, None, measured)
        return build_objective(self.loss, self.score, self.objective, self.maximize, self.metrics)


def seeded(seed: int, build: Callable[[], nn.Module]) -> nn.Module:
    """Return a module whose initial weights are a function of the seed, and leave torch's global generator unchanged.

    Args:
        seed: The seed of the weights.
        build: A function that makes the module.

    >>> a, b = (seeded(1, lambda: nn.Linear(3, 2)) for _ in range(2))
    >>> torch.equal(a.weight, b.weight)
    True
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return build()
