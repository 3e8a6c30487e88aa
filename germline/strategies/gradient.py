"""Backprop, the baseline that results are compared with: one step along the gradient of the generation's batch."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from germline.arguments import SETTING, check_fields
from germline.noise import Field
from germline.optim.optimizers import Moments
from germline.optim.schedules import Scheduled
from germline.strategies.candidates import Candidates
from germline.strategies.protocol import GenerationResult, GradientStrategy, StrategyKind, Wire
from germline.strategies.settings import (
    build_optimizer,
    check_count,
    check_optimizer,
    document_settings,
    is_portable,
    learning_rate_at,
    setting,
)


@dataclass(frozen=True)
class State:
    theta: Tensor
    moments: Moments


@document_settings
@dataclass(frozen=True)
class Gradient(GradientStrategy[State]):
    """Gradient descent by backprop with any optimizer.

    >>> Gradient(lr=0.1, optimizer="torch.SGD").values(Gradient().init(torch.zeros(1)), generation=0)
    {'lr': 0.1}
    """

    name: ClassVar[str] = "gradient"
    kind: ClassVar[StrategyKind] = "differentiate"
    population: ClassVar[int] = 1
    select_on: ClassVar[Literal["batch", "dev"]] = "batch"

    lr: Scheduled = setting(0.003, "learning rate of the optimizer: a number or a schedule")
    optimizer: str | Callable[..., Any] = setting(
        "adam", "adam, sgd, momentum, torch.NAME, or a function of parameters"
    )
    scheduler: Callable[..., Any] | None = setting(None, "a torch scheduler, as a function of the torch optimizer")
    weight_decay: float = setting(0.0, "decoupled weight decay")
    slices: int = setting(4, "parts of a batch whose gradients are computed separately and summed in order")
    per_worker: bool = setting(
        False, "whether batch size and slices are those of each rank, so that the batch grows with their number"
    )
    wire: Wire = setting("float32", "how gradients travel between processes: float32, bfloat16 or int8")

    def __post_init__(self) -> None:
        check_fields(self, SETTING)
        check_optimizer(self)
        check_count("slices", self.slices)

    @property
    def is_portable(self) -> bool:
        return is_portable(build_optimizer(self))

    def differentiates(self, generation: int) -> bool:
        return True

    def samples(self, generation: int) -> bool:
        return False

    def with_gradient(self, state: State, gradient: Tensor, generation: int, *, maximize: bool) -> State:
        return state

    def reference_candidates(
        self, state: State, field: Field, generation: int, values: Mapping[str, float]
    ) -> Candidates | None:
        return None

    def direction(self, state: State) -> Tensor | None:
        return None

    def init(self, theta: Tensor) -> State:
        return State(theta, build_optimizer(self).init(theta))

    def values(self, state: State, generation: int) -> dict[str, float]:
        return {"lr": learning_rate_at(build_optimizer(self), self.lr, state.theta, state.moments, generation)}

    def ask(self, state: State, field: Field, generation: int, values: Mapping[str, float]) -> Candidates:
        return Candidates(field, generation, state.theta, sigma=0.0)

    def tell(self, state: State, result: GenerationResult, field: Field, *, maximize: bool, start: int = 0) -> State:
        if result.gradient is None or not bool(torch.isfinite(result.gradient).all()):
            return state
        gradient = -result.gradient if maximize else result.gradient
        theta, moments = build_optimizer(self).step(state.theta, gradient, state.moments, result.values["lr"])
        return State(theta, moments)
