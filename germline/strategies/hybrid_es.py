"""Hybrid-ES (Bartolo): a full gradient in every r-th step, and random shifts of the last gradient between them.

    full step     d = gradient,                        theta <- theta - lr d
    shifted step  K samples theta - lr (d + sigma z),  of which the best is chosen by its seed and cost alone

Weight decay applies to matrices, not to biases. Variants:

    algorithm2   the best sample is applied, and its shifted gradient is carried on to the next step
    assisted     a full gradient in every step, then K samples around it; the step without a shift is one of them
    fixed        gradients of the first epoch only, then samples around their mean, or around that of the same slot
    gated        as in the published code, no shift is ever applied: if a sample is better than the weights before the
                 step, the last gradient is applied once more; otherwise only biases take a step
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from germline.arguments import SETTING, check_fields
from germline.errors import BadInput
from germline.genome import Genome
from germline.noise import Field, Kind, Noise, Stream, round_to
from germline.optim.schedules import Scheduled, value_at
from germline.optim.shaping import goodness, rank_members
from germline.strategies.candidates import Candidates
from germline.strategies.protocol import GenerationResult, GradientStrategy, StrategyKind, Wire
from germline.strategies.settings import check_count, check_rate, document_settings, setting

Variant = Literal["algorithm2", "assisted", "fixed", "gated"]
Base = Literal["last", "slot", "mean"]


@dataclass(frozen=True)
class State:
    theta: Tensor
    direction: Tensor  # the gradient that is shifted; under algorithm2 it includes the shifts applied so far
    cache: Tensor  # (slots, parameters): the gradients of an epoch, their mean, or no row
    scale: float = 1.0  # the factor of sigma, where it adapts
    deviation: float = 0.0  # a running mean of the standard deviation of gradients, where sigma has momentum


@document_settings
@dataclass(frozen=True)
class HybridES(GradientStrategy[State]):
    """Backprop in every ``interval``-th step and random shifts of its gradient between.

    >>> strategy = HybridES(interval=3, epoch=5)
    >>> [strategy.differentiates(step) for step in range(7)]
    [True, False, False, True, False, True, False]
    """

    name: ClassVar[str] = "hybrid-es"
    kind: ClassVar[StrategyKind] = "differentiate"
    ask_arrays: ClassVar[tuple[str, ...]] = ("theta", "direction", "cache")

    population: int = setting(10, "K, the samples of a shifted step, over all workers")
    samples_per_worker: bool = setting(
        False, "whether the population is that of each rank, so that the samples grow with their number"
    )
    interval: int = setting(2, "r: a full gradient in every r-th step of an epoch; 1 is plain gradient descent")
    variant: Variant = setting("algorithm2", "algorithm2, assisted, fixed or gated")
    sigma: float | Literal["auto"] = setting(
        0.1, "standard deviation of the shifts of a gradient summed over examples; auto takes that of its components"
    )
    momentum: float = setting(
        0.0, "for sigma=auto: fraction of sigma that each full gradient keeps, from 0 (none) to below 1"
    )
    examples: int = setting(
        1, "number of examples over which the gradient is summed that sigma refers to; 1 for a mean"
    )
    adapt: float = setting(
        1.0, "factor by which sigma grows if more than a fifth of the shifts are better than none; 1 keeps it"
    )
    lr: Scheduled = setting(0.1, "learning rate: a number or a schedule")
    weight_decay: float = setting(0.0, "weight decay of matrices, times the learning rate; biases have none")
    combine: Literal["best", "average"] = setting(
        "best", "what is applied: best (the best sample) or average (the mean of the better half)"
    )
    normalize: bool = setting(False, "whether gradients are scaled to length 1")
    select_on: Literal["batch", "dev"] = setting(
        "batch", "what samples are scored on: batch, or dev (a batch of the dev set)"
    )
    base: Base = setting(
        "last", "gradient that is shifted: last, mean (of an epoch) or slot (of the same step of the last epoch)"
    )
    epoch: int = setting(0, "steps of an epoch, in which the interval is counted; 0 counts through")
    start: int = setting(0, "steps before the first shifted one")
    fraction: float = setting(1.0, "fraction of the components that are shifted, drawn in each step")
    noise: Kind = setting("popcount", "values of the noise: popcount, sign or uniform")
    slices: int = setting(4, "parts of a batch whose gradients are computed separately and summed in order")
    per_worker: bool = setting(
        False, "whether batch size and slices are those of each rank, so that the batch grows with their number"
    )
    wire: Wire = setting("float32", "how gradients travel between processes: float32, bfloat16 or int8")
    vectors: tuple[tuple[int, int], ...] | None = setting(
        None, "spans of parameters that are not matrices; set when a run starts"
    )

    def __post_init__(self) -> None:
        check_fields(self, SETTING)
        for name in ("population", "interval", "examples", "slices"):
            check_count(name, getattr(self, name))
        if self.sigma != "auto":
            check_rate("sigma", self.sigma, zero=True)
        for name in ("lr", "weight_decay"):
            check_rate(name, getattr(self, name), zero=True)
        check_rate("adapt", self.adapt)
        if not 0 < self.fraction <= 1:
            raise BadInput(f"The fraction of the components must be above 0 and at most 1, not {self.fraction}.")
        if not 0 <= self.momentum < 1 or (self.momentum and self.sigma != "auto"):
            raise BadInput(f"Momentum is from 0 to below 1 and needs sigma=auto, not {self.momentum}, {self.sigma}.")
        if min(self.epoch, self.start) < 0:
            raise BadInput("The settings epoch and start count steps: they must not be negative.")
        if not self.epoch and (self.variant == "fixed" or self.base != "last"):
            raise BadInput("Say how many steps an epoch has, with epoch=, for gradients that are kept for one.")
        if self.variant == "fixed" and self.base == "last":
            object.__setattr__(self, "base", "mean")
        if self.vectors is not None:
            object.__setattr__(self, "vectors", tuple((int(a), int(b)) for a, b in self.vectors))  # from a header

    def bind(self, genome: Genome) -> "HybridES":
        """Return the strategy with the spans of the parameters that are not matrices."""
        spans = [(slot.start, slot.stop) for slot in genome.slots if len(slot.shape) < 2]
        return self if self.vectors is not None else replace(self, vectors=tuple(spans))

    def field(self, seed: int, genome: Genome) -> Field:
        return Field(seed, self.noise, mirrored=False)

    def init(self, theta: Tensor) -> State:
        slots = {"last": 0, "mean": 1, "slot": self.epoch}[self.base]
        return State(theta, torch.zeros_like(theta), theta.new_zeros(slots, theta.numel()))

    def differentiates(self, generation: int) -> bool:
        """Return whether a generation needs a full gradient."""
        if generation < self.start or self.variant == "assisted":
            return True
        epoch, slot = divmod(generation, self.epoch) if self.epoch else (0, generation)
        if self.variant == "fixed":
            return epoch == 0
        if self.base == "last":
            return slot % self.interval == 0
        return epoch == 0 or (slot + epoch) % self.interval == 0  # so that each slot has its turn

    def samples(self, generation: int) -> bool:
        """Return whether a generation scores samples."""
        return generation >= self.start and (self.variant == "assisted" or not self.differentiates(generation))

    def values(self, state: State, generation: int) -> dict[str, float]:
        rate = value_at(self.lr, generation)
        check_rate("lr", rate, zero=True)
        known = {} if self.sigma == "auto" else {"sigma": self.sigma / self.examples * state.scale}
        return {"lr": rate} | known

    def with_gradient(self, state: State, gradient: Tensor, generation: int, *, maximize: bool) -> State:
        """Return the State that includes a new gradient, before any step."""
        gradient = -gradient if maximize else gradient
        if self.momentum:
            latest, kept = deviation_of(gradient), state.deviation
            state = replace(state, deviation=latest + self.momentum * (kept - latest) if kept else latest)
        if self.base == "last":
            return replace(state, direction=gradient)
        cache = state.cache.clone()
        if self.base == "slot":
            cache[generation % self.epoch] = gradient
        elif generation < self.epoch:
            cache[0] += gradient * round_to(1 / self.epoch, cache.dtype)
        return replace(state, direction=gradient, cache=cache)

    def direction(self, state: State) -> Tensor:
        return state.direction

    def base_gradient(self, state: State, generation: int) -> Tensor:
        """Return the gradient of a step, before any shift."""
        if self.differentiates(generation) or self.base == "last":
            return state.direction
        return state.cache[generation % self.epoch if self.base == "slot" else 0]

    def ask(self, state: State, field: Field, generation: int, values: Mapping[str, float]) -> Candidates:
        direction = self.base_gradient(state, generation)
        rate = self.rate(direction, values)
        sigma = self.mask_sigma(rate * self.spread(state, direction, values), field, generation, state.theta, 0)
        return Candidates(field, generation, self.plain_step(state.theta, direction, values, 0), sigma)

    def reference_candidates(
        self, state: State, field: Field, generation: int, values: Mapping[str, float]
    ) -> Candidates | None:
        """Describe the one candidate that samples are compared with, or return None."""
        if self.variant == "gated":
            return Candidates(field, generation, state.theta, 0.0)
        if self.variant != "assisted" and self.adapt == 1:
            return None
        return Candidates(
            field, generation, self.plain_step(state.theta, self.base_gradient(state, generation), values, 0), 0.0
        )

    def tell(self, state: State, result: GenerationResult, field: Field, *, maximize: bool, start: int = 0) -> State:
        generation, values, before = result.generation, result.values, state
        if self.differentiates(generation):
            if result.gradient is None or not bool(torch.isfinite(result.gradient).all()):
                return before
            state = self.with_gradient(state, result.gradient, generation, maximize=maximize)
        direction = self.base_gradient(state, generation)
        center = self.plain_step(state.theta, direction, values, start)
        if not self.samples(generation):
            return replace(state, theta=center)
        good = goodness(result.scores, maximize)
        compared = result.scores.size > self.population  # the first score is that of the reference
        if not np.isfinite(good[compared:]).any():
            return before
        order = rank_members(result.scores[compared:], maximize=maximize)
        share = float((good[compared:] > good[0]).mean()) if compared else 1.0
        better, scale = share > 0, self.adapt_scale(state.scale, share) if compared else state.scale
        if self.variant == "gated":
            step = center if better else torch.where(self.mark_biases(state.theta, start), center, state.theta)
            return replace(state, theta=step, scale=scale)
        if not better and self.variant == "assisted":
            return replace(state, theta=center, scale=scale)
        spread, rate = self.spread(state, direction, values), self.rate(direction, values)
        chosen = order[: 1 if self.combine == "best" else -(-self.population // 2)]
        noise = field.members(chosen, generation, state.theta.device)
        theta, shifted = (
            self.shift_array(array, noise, self.mask_sigma(by, field, generation, state.theta, start), start)
            for array, by in ((center, rate * spread), (direction, -spread))
        )
        carried = shifted if self.variant == "algorithm2" and self.base == "last" else state.direction
        return replace(state, theta=theta, direction=carried, scale=scale)

    def plain_step(self, theta: Tensor, direction: Tensor, values: Mapping[str, float], start: int) -> Tensor:
        """Return theta after a step without a shift."""
        moved = theta - direction * round_to(self.rate(direction, values), theta.dtype)
        if not self.weight_decay:
            return moved
        decay = theta * round_to(values["lr"] * self.weight_decay, theta.dtype)
        return moved - decay.masked_fill(self.mark_biases(theta, start), 0.0)

    def rate(self, direction: Tensor, values: Mapping[str, float]) -> float:
        """Return the learning rate, divided by the length of the gradient where gradients are normalized."""
        length = math.sqrt(sum_of_squares(direction)) if self.normalize else 1.0
        return values["lr"] / length if length else 0.0

    def spread(self, state: State, direction: Tensor, values: Mapping[str, float]) -> float:
        """Return the standard deviation of the shifts of a gradient of the mean loss."""
        if self.sigma != "auto":
            return values["sigma"]
        deviation = state.deviation if self.momentum else deviation_of(direction)
        return round_to(deviation, torch.float32) * state.scale

    def mask_sigma(self, sigma: float, field: Field, generation: int, theta: Tensor, start: int) -> float | Tensor:
        """Return sigma for each parameter, where only some are shifted."""
        if self.fraction == 1:
            return sigma
        drawn = field.members([self.population], generation, theta.device)  # a number that no sample has
        halves = drawn.halves((start, start + theta.numel()), Stream.COEFFICIENT)[0]
        return (halves < round(self.fraction * 65536)).to(theta.dtype) * round_to(sigma, theta.dtype)

    def shift_array(self, array: Tensor, noise: Noise, sigma: float | Tensor, start: int) -> Tensor:
        """Return an array shifted by the noise of one sample, or by the mean noise of several."""
        count = noise.addresses.size
        if count == 1:
            return noise.perturb(array.contiguous(), sigma, start=start)[0]
        total = noise.weighted_sum(np.ones(count, np.int64), (start, start + array.numel()), array.dtype)
        scale = sigma / count if isinstance(sigma, Tensor) else round_to(sigma / count, array.dtype)
        return array + total * scale

    def mark_biases(self, theta: Tensor, start: int) -> Tensor:
        """Return which of the columns belong to no matrix."""
        is_bias = torch.zeros_like(theta, dtype=torch.bool)
        for low, high in self.vectors or ():
            is_bias[max(0, low - start) : max(0, high - start)] = True
        return is_bias

    def adapt_scale(self, scale: float, share: float) -> float:
        """Return the factor of sigma by the 1/5 rule: it grows if over a fifth of the samples beat the reference."""
        return scale * (self.adapt if share > 0.2 else 1 / self.adapt)


def deviation_of(array: Tensor) -> float:
    """Return the standard deviation of the components of an array, in float64."""
    mean = float(array.double().sum()) / array.numel()
    return math.sqrt(max(0.0, sum_of_squares(array) / array.numel() - mean * mean))


def sum_of_squares(array: Tensor) -> float:
    """Return the sum of the squares of an array, in float64."""
    return float((array.double() ** 2).sum())
