"""Particle swarm optimization: Kennedy, Eberhart 1995; inertia: Shi, Eberhart 1998; constriction: Clerc, Kennedy 2002.

    v <- w v + c1 r1 (own best - x) + c2 r2 (best of the neighbors - x),     x <- x + v

with r1 and r2 from 0 to 1, drawn for each parameter. The neighbors are all (global), or one to each side (ring). The
usual w = 0.7298 and c1 = c2 = 1.49618 are Clerc's constriction of 2.05 + 2.05.

The first generation is the user's own weights, member 0, and others around them. On changing batches old scores cannot
be compared with new ones: they drift towards the mean of the swarm by ``decay``.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from germline.errors import BadInput
from germline.genome import Genome
from germline.noise import Field, Kind, Stream, as_tensor, round_to
from germline.optim.schedules import Scheduled, value_at
from germline.optim.shaping import goodness, mean_finite
from germline.strategies.base import Candidates, GenerationResult, offspring
from germline.strategies.settings import check_choice, check_number, check_rate, setting


@dataclass(frozen=True)
class State:
    """Before the first generation there is no swarm, only where it will be."""

    start: torch.Tensor  # (M,)
    positions: torch.Tensor | None = None  # (P, M)
    velocities: torch.Tensor | None = None  # (P, M)
    bests: torch.Tensor | None = None  # (P, M), where each was best
    scores: tuple[float, ...] = ()  # how good they were there; larger is better
    leader: int = 0
    best: torch.Tensor | None = None  # (M,), where the leader was best

    @property
    def theta(self) -> torch.Tensor:
        return self.start if self.best is None else self.best


@dataclass(frozen=True)
class PSO:
    """A swarm of whole networks: three arrays of its size are kept.

    >>> PSO(population=8).init(torch.zeros(3)).theta.tolist()
    [0.0, 0.0, 0.0]
    """

    name: ClassVar[str] = "pso"
    needs_gradient: ClassVar[bool] = False
    asked: ClassVar[tuple[str, ...]] = ("start", "positions", "best")

    population: int = setting(64, "particles")
    topology: Literal["global", "ring"] = setting(
        "global", "whose best attracts a particle: everybody's, or its neighbors'"
    )
    inertia: Scheduled = setting(0.7298, "w, what is left of a velocity: a number or a schedule")
    own: float = setting(1.49618, "c1, the pull of a particle's own best")
    others: float = setting(1.49618, "c2, the pull of its neighbors' best")
    sigma: float = setting(0.1, "spread of the first swarm around the initial weights")
    clamp: float = setting(0.5, "the largest velocity of a parameter")
    decay: float = setting(1.0, "what is left of an old score in each generation; 1 where scores can be compared")
    noise: Kind = setting("popcount", "values of the first swarm's spread: popcount, sign or uniform")

    def __post_init__(self) -> None:
        check_choice("topology", self.topology, ("global", "ring"))
        check_rate("sigma", self.sigma)
        check_number("sigma", self.sigma)
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

    def init(self, theta: torch.Tensor) -> State:
        # three arrays, three new ones, and what an update makes on the way
        refuse_what_does_not_fit(9 * self.population * theta.nbytes, theta.device)
        return State(theta)

    def values(self, state: State, generation: int) -> dict[str, float]:
        inertia = value_at(self.inertia, generation)
        check_rate("inertia", inertia, zero=True)
        return {"inertia": inertia}

    def ask(self, state: State, field: Field, generation: int, values: Mapping[str, float]) -> Candidates:
        def members(some: State, members: NDArray[np.int64], start: int) -> torch.Tensor:
            return self.members(some, field, generation, members, start)

        return offspring(state, field, generation, members)

    def members(
        self, state: State, field: Field, generation: int, members: NDArray[np.int64], start: int
    ) -> torch.Tensor:
        if state.positions is not None:
            return state.positions[as_tensor(members, state.start.device)]
        made = field.members(members, generation, state.start.device).perturb(state.start, self.sigma, start=start)
        made[as_tensor(np.flatnonzero(members == 0), made.device)] = state.start
        return made

    def tell(self, state: State, result: GenerationResult, field: Field, *, maximize: bool, start: int = 0) -> State:
        if not np.isfinite(result.scores).any():
            return state
        everybody, device = np.arange(self.population), state.start.device
        x = self.members(state, field, result.generation, everybody, start)
        new = goodness(result.scores, maximize)
        old = self.drifted(state, new)
        better = as_tensor(new > old, device)
        bests = x if state.bests is None else torch.where(better[:, None], x, state.bests)
        good = np.maximum(new, old)
        leader = int(good.argmax())
        velocities = torch.zeros_like(x) if state.velocities is None else state.velocities
        noise, span, dtype = field.members(everybody, result.generation, device), (start, start + x.shape[1]), x.dtype
        pulls = noise.halves(span, Stream.COEFFICIENT).to(dtype) * round_to(self.own / 65536, dtype) * (bests - x)
        led = bests[leader] if self.topology == "global" else bests[as_tensor(neighbors(good), device)]
        pulls = pulls + noise.halves(span, Stream.CROSSOVER).to(dtype) * round_to(self.others / 65536, dtype) * (
            led - x
        )
        limit = round_to(self.clamp, dtype)
        velocities = (velocities * round_to(result.values["inertia"], dtype) + pulls).clamp_(-limit, limit)
        scores, best = tuple(good.tolist()), bests[leader].clone()
        return State(state.start, x + velocities, velocities, bests, scores, leader, best)

    def drifted(self, state: State, good: NDArray[np.float32]) -> NDArray[np.float32]:
        """The particles' best scores, which drift towards the mean of the new ones."""
        if not state.scores:
            return np.full(self.population, -np.inf, np.float32)
        mean = mean_finite(good)
        drift = [self.decay * old + (1 - self.decay) * mean if math.isfinite(old) else old for old in state.scores]
        return np.array(drift, np.float32)


def neighbors(good: NDArray[np.float32]) -> NDArray[np.int64]:
    """The best of a particle and the ones beside it, in a ring."""
    numbers = np.arange(good.size)
    three = np.stack([numbers, np.roll(numbers, 1), np.roll(numbers, -1)])
    best: NDArray[np.int64] = three[good[three].argmax(0), numbers]
    return best


def refuse_what_does_not_fit(needed: int, device: torch.device) -> None:
    free = int(torch.cuda.mem_get_info(device)[0]) if device.type == "cuda" else available_memory()
    if free and needed > free:
        raise BadInput(
            f"The swarm would take {needed / 1e9:.1f} GB, and {free / 1e9:.1f} GB are free: use fewer particles."
        )


def available_memory() -> int:
    """Of this machine, in bytes; 0 where it cannot be told."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return 0
