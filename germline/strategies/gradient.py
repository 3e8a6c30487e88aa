"""Backprop, the baseline that every result is set beside: the gradient on the generation's batch, one step."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, get_args

import torch

from germline.genome import Genome
from germline.noise import Field
from germline.optim import Moments
from germline.schedule import Scheduled
from germline.strategies.base import Candidates, Told, Wire
from germline.strategies.settings import check_choice, check_count, check_optimiser, optimiser_of, rate_at, setting


@dataclass(frozen=True)
class State:
    theta: torch.Tensor
    moments: Moments


@dataclass(frozen=True)
class Gradient:
    """Gradient descent by backprop with any optimiser.

    >>> Gradient(lr=0.1, optimizer="torch.SGD").values(Gradient().init(torch.zeros(1)), generation=0)
    {'lr': 0.1}
    """

    name: ClassVar[str] = "gradient"
    needs_gradient: ClassVar[bool] = True
    asked: ClassVar[tuple[str, ...]] = ("theta",)
    population: ClassVar[int] = 1

    lr: Scheduled = setting(0.003, "learning rate of the optimiser: a number or a schedule")
    optimizer: str | Callable[..., Any] = setting(
        "adam", "adam, sgd, momentum, torch.NAME, or a function of parameters"
    )
    scheduler: Callable[..., Any] | None = setting(None, "a torch scheduler, as a function of the torch optimiser")
    weight_decay: float = setting(0.0, "decoupled weight decay")
    slices: int = setting(4, "parts of a batch whose gradients are computed apart and summed in order")
    per_worker: bool = setting(
        False, "batch size and slices are those of each worker: the batch grows with their number"
    )
    wire: Wire = setting("float32", "how gradients travel between processes: float32, bfloat16 or int8")

    def __post_init__(self) -> None:
        check_optimiser(self)
        check_count("slices", self.slices)
        check_choice("wire", self.wire, get_args(Wire))

    def differentiates(self, generation: int) -> bool:
        return True

    def samples(self, generation: int) -> bool:
        return False

    def informed(self, state: State, gradient: torch.Tensor, generation: int, *, maximize: bool) -> State:
        return state

    def unshifted(self, state: State, field: Field, generation: int, values: Mapping[str, float]) -> Candidates | None:
        return None

    def field(self, seed: int, genome: Genome) -> Field:
        return Field(seed)

    def init(self, theta: torch.Tensor) -> State:
        return State(theta, optimiser_of(self).init(theta))

    def values(self, state: State, generation: int) -> dict[str, float]:
        return {"lr": rate_at(optimiser_of(self), self.lr, state.theta, state.moments, generation)}

    def ask(self, state: State, field: Field, generation: int, values: Mapping[str, float]) -> Candidates:
        return Candidates(field, generation, state.theta, sigma=0.0)

    def tell(self, state: State, told: Told, field: Field, *, maximize: bool, start: int = 0) -> State:
        if told.gradient is None or not bool(torch.isfinite(told.gradient).all()):
            return state
        gradient = -told.gradient if maximize else told.gradient
        theta, moments = optimiser_of(self).step(state.theta, gradient, state.moments, told.values["lr"])
        return State(theta, moments)
