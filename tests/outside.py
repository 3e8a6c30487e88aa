"""A strategy that lives outside of the package, as docs/strategies.md shows it."""

# the example begins
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

import germline as gl
from germline.genome import Genome
from germline.noise import Field, round_to
from germline.optim.shaping import utilities
from germline.strategies import Candidates, GenerationResult, openai_es
from germline.strategies.settings import setting


@dataclass(frozen=True)
class State:
    theta: torch.Tensor


@dataclass(frozen=True)
class SignES(gl.Strategy[State]):
    """Moves each parameter by a fixed step, in the direction to which the better members point."""

    name: ClassVar[str] = "sign-es"

    population: int = setting(32, "number of members of a generation")
    sigma: float = setting(0.1, "standard deviation of the noise")
    step: float = setting(0.02, "step of each parameter")

    def field(self, seed: int, genome: Genome) -> Field:
        return Field(seed, mirrored=True)

    def init(self, theta: torch.Tensor) -> State:
        return State(theta)

    def values(self, state: State, generation: int) -> dict[str, float]:
        return {"sigma": self.sigma}

    def ask(self, state: State, field: Field, generation: int, values: Mapping[str, float]) -> Candidates:
        return Candidates(field, generation, state.theta, values["sigma"])

    def tell(self, state: State, result: GenerationResult, field: Field, *, maximize: bool, start: int = 0) -> State:
        weights = utilities(result.scores, "ranks", maximize=maximize)  # whole numbers, or None
        if weights is None:  # no score is finite
            return state
        noise = field.members(range(self.population), result.generation, state.theta.device)
        total = noise.weighted_sum(weights, (start, start + state.theta.numel()), state.theta.dtype)
        return State(state.theta + torch.sign(total) * round_to(self.step, total.dtype))


# the example ends


@dataclass(frozen=True)
class Renamed(gl.OpenAIES):
    """A subclass that keeps the name of a strategy of the package, and steps the other way."""

    def move(self, state: openai_es.State, total: torch.Tensor, result: GenerationResult) -> openai_es.State:
        return super().move(state, -total, result)
