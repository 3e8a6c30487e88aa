"""Particle swarm optimization: Kennedy, Eberhart 1995; inertia: Shi, Eberhart 1998; constriction: Clerc, Kennedy 2002.

    v <- w v + c1 r1 (own best - x) + c2 r2 (best of the neighbors - x),     x <- x + v

with r1 and r2 from 0 to 1, drawn for each parameter. A particle's neighbors are all particles (global), or one to each
side (ring). The usual w = 0.7298 and c1 = c2 = 1.49618 are Clerc's constriction of 2.05 + 2.05.

The first generation is the user's own weights, member 0, and others around them. Scores on different batches cannot be
compared, so old scores drift toward the mean of the swarm by ``decay``.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from germline.arguments import SETTING, check_fields
from germline.errors import BadInput
from germline.genome import Genome
from germline.machine import available_memory
from germline.noise import Field, Kind, Stream, as_tensor, round_to
from germline.optim.schedules import Scheduled, value_at
from germline.optim.shaping import goodness, mean_finite
from germline.strategies.candidates import Candidates, describe_offspring
from germline.strategies.protocol import GenerationResult, Strategy
from germline.strategies.settings import check_rate, document_settings, setting


@dataclass(frozen=True)
class State:
    """The swarm; before the first generation there is only the place where it will start."""

    start: Tensor  # (M,)
    positions: Tensor | None = None  # (P, M)
    velocities: Tensor | None = None  # (P, M)
    bests: Tensor | None = None  # (P, M), the best position of each particle
    scores: tuple[float, ...] = ()  # of the best positions; larger is better
    leader: int = 0
    best: Tensor | None = None  # (M,), the best position of the leader

    @property
    def theta(self) -> Tensor:
        return self.start if self.best is None else self.best


@document_settings
@dataclass(frozen=True)
class PSO(Strategy[State]):
    """A particle swarm of whole networks; its State holds three arrays of the swarm's size.

    >>> PSO(population=8).init(torch.zeros(3)).theta.tolist()
    [0.0, 0.0, 0.0]
    """

    name: ClassVar[str] = "pso"
    ask_arrays: ClassVar[tuple[str, ...]] = ("start", "positions", "best")

    population: int = setting(64, "particles")
    topology: Literal["global", "ring"] = setting(
        "global", "whose best position attracts a particle: global (that of all) or ring (that of its neighbors)"
    )
    inertia: Scheduled = setting(0.7298, "w, what is left of a velocity: a number or a schedule")
    own: float = setting(1.49618, "c1, the pull of a particle's own best position")
    others: float = setting(1.49618, "c2, the pull of its neighbors' best position")
    sigma: float = setting(0.1, "standard deviation of the first swarm around the initial weights")
    clamp: float = setting(0.5, "largest velocity of a parameter")
    decay: float = setting(1.0, "what is left of an old score in each generation; 1 where scores can be compared")
    noise: Kind = setting("popcount", "values of the first swarm's noise: popcount, sign or uniform")

    def __post_init__(self) -> None:
        check_fields(self, SETTING)
        check_rate("sigma", self.sigma)
        check_rate("clamp", self.clamp)
        check_rate("own", self.own, zero=True)
        check_rate("others", self.others, zero=True)
        check_rate("inertia", self.inertia, zero=True)
        if self.population < 2:
            raise BadInput(f"A swarm has at least 2 particles, not {self.population}.")
        if not 0 <= self.decay <= 1:
            raise BadInput(f"The setting decay must be from 0 to 1, not {self.decay}.")

    def field(self, seed: int, genome: Genome) -> Field:
        return Field(seed, self.noise)

    def init(self, theta: Tensor) -> State:
        # three arrays, three new ones, and what an update holds in between
        check_memory(9 * self.population * theta.nbytes, theta.device)
        return State(theta)

    def values(self, state: State, generation: int) -> dict[str, float]:
        inertia = value_at(self.inertia, generation)
        check_rate("inertia", inertia, zero=True)
        return {"inertia": inertia}

    def ask(self, state: State, field: Field, generation: int, values: Mapping[str, float]) -> Candidates:
        return describe_offspring(state, field, generation, partial(self.members, field, generation))

    def members(self, field: Field, generation: int, state: State, members: NDArray[np.int64], start: int) -> Tensor:
        """Return the positions of some particles, in the columns that the State holds."""
        if state.positions is not None:
            return state.positions[as_tensor(members, state.start.device)]
        swarm = field.members(members, generation, state.start.device).perturb(state.start, self.sigma, start=start)
        swarm[as_tensor(np.flatnonzero(members == 0), swarm.device)] = state.start
        return swarm

    def tell(self, state: State, result: GenerationResult, field: Field, *, maximize: bool, start: int = 0) -> State:
        if not np.isfinite(result.scores).any():
            return state
        swarm, device = np.arange(self.population), state.start.device
        x = self.members(field, result.generation, state, swarm, start)
        new = goodness(result.scores, maximize)
        old = self.drift_scores(state, new)
        better = as_tensor(new > old, device)
        bests = x if state.bests is None else torch.where(better[:, None], x, state.bests)
        good = np.maximum(new, old)
        leader = int(good.argmax())
        velocities = torch.zeros_like(x) if state.velocities is None else state.velocities
        noise, span, dtype = field.members(swarm, result.generation, device), (start, start + x.shape[1]), x.dtype
        pulls = noise.halves(span, Stream.COEFFICIENT).to(dtype) * round_to(self.own / 65536, dtype) * (bests - x)
        led = bests[leader] if self.topology == "global" else bests[as_tensor(find_leaders(good), device)]
        pulls = pulls + noise.halves(span, Stream.CROSSOVER).to(dtype) * round_to(self.others / 65536, dtype) * (
            led - x
        )
        limit = round_to(self.clamp, dtype)
        velocities = (velocities * round_to(result.values["inertia"], dtype) + pulls).clamp_(-limit, limit)
        scores, best = tuple(good.tolist()), bests[leader].clone()
        return State(state.start, x + velocities, velocities, bests, scores, leader, best)

    def drift_scores(self, state: State, good: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return the particles' best scores, which drift toward the mean of the new ones."""
        if not state.scores:
            return np.full(self.population, -np.inf, np.float32)
        mean = mean_finite(good)
        drift = [self.decay * old + (1 - self.decay) * mean if math.isfinite(old) else old for old in state.scores]
        return np.array(drift, np.float32)


def find_leaders(good: NDArray[np.float32]) -> NDArray[np.int64]:
    """Return, for each particle of a ring, the best among itself and its two neighbors."""
    numbers = np.arange(good.size)
    three = np.stack([numbers, np.roll(numbers, 1), np.roll(numbers, -1)])
    best: NDArray[np.int64] = three[good[three].argmax(0), numbers]
    return best


def check_memory(needed: int, device: torch.device) -> None:
    """Raise an error if a swarm needs more memory than the device has free."""
    free = available_memory(device)
    if free and needed > free:
        raise BadInput(
            f"The swarm would take {needed / 1e9:.1f} GB, and {free / 1e9:.1f} GB are free: use fewer particles."
        )
