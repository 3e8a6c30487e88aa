"""Settings that change over the generations. Their values are journaled, so that a replay needs no schedule."""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from germline.errors import BadInput, unknown_name


@dataclass(frozen=True)
class Schedule:
    """A schedule goes from ``start`` to ``stop`` over a number of generations, then stays at ``stop``.

    Args:
        shape: linear, cosine or exponential.
        start: the value at generation 0.
        stop: the value from generation ``generations`` on.
        generations: at least 1.

    Raises:
        BadInput: if the shape is unknown, there are no generations, or an exponential schedule is not above 0.

    >>> cosine = Schedule("cosine", 1.0, 0.0, 100)
    >>> [round(cosine(g), 3) for g in (0, 50, 100, 200)]
    [1.0, 0.5, 0.0, 0.0]
    >>> Schedule.parse("linear(0.1, 0.01, 300)")
    Schedule(shape='linear', start=0.1, stop=0.01, generations=300)
    """

    shape: Literal["linear", "cosine", "exponential"]
    start: float
    stop: float
    generations: int

    def __post_init__(self) -> None:
        if self.shape not in ("linear", "cosine", "exponential"):
            raise unknown_name("schedule", self.shape, ("linear", "cosine", "exponential"))
        if self.generations < 1:
            raise BadInput(f"A schedule must last at least one generation, not {self.generations}.")
        if self.shape == "exponential" and not (self.start > 0 and self.stop > 0):
            raise BadInput("An exponential schedule needs a start and a stop above 0.")

    def __call__(self, generation: int) -> float:
        """Return the value at a generation."""
        t = min(1.0, generation / self.generations)
        if self.shape == "linear":
            return self.start + (self.stop - self.start) * t
        if self.shape == "cosine":
            return self.stop + (self.start - self.stop) * 0.5 * (1 + math.cos(math.pi * t))
        return float(self.start * (self.stop / self.start) ** t)

    def __str__(self) -> str:
        return f"{self.shape}({self.start}, {self.stop}, {self.generations})"

    @classmethod
    def parse(cls, text: str) -> "Schedule":
        """Return the schedule of a text such as "linear(0.1, 0.01, 300)", or raise BadInput."""
        match = re.fullmatch(r"\s*(linear|cosine|exponential)\(([^,]+),([^,]+),([^,]+)\)\s*", text)
        try:
            if match is None:
                raise ValueError
            return cls(match[1], float(match[2]), float(match[3]), int(match[4]))  # type: ignore[arg-type]
        except BadInput:
            raise
        except ValueError:
            form = "linear(START, STOP, GENERATIONS)"
            message = f"{text!r} is not a schedule: write a number or {form}, with linear, cosine or exponential."
            raise BadInput(message) from None


Scheduled = float | Schedule | Callable[[int], float]  # a setting: one value, or a value for each generation


def value_at(setting: Scheduled, generation: int) -> float:
    """Return the value of a setting at a generation."""
    return float(setting(generation)) if callable(setting) else float(setting)
