"""Settings that change over the generations. Their values are journaled, so that a replay needs no schedule."""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from germline.arguments import check_fields
from germline.errors import BadInput, format_error


@dataclass(frozen=True)
class Schedule:
    """A schedule goes from ``start`` to ``stop`` over a number of generations, or over the whole run.

    After its number of generations it stays at ``stop``. Without one it ends when the run does, whichever limit that
    is: generations, evaluations or seconds. A run without any of these limits stays at ``start``.

    Args:
        shape: linear, cosine or exponential.
        start: The value at generation 0.
        stop: The value at the end.
        generations: At least 1; None is the whole run.

    Raises:
        BadInput: If the shape is unknown, there are no generations, or an exponential schedule is not above 0.

    >>> cosine = Schedule("cosine", 1.0, 0.0, 100)
    >>> [round(cosine(g), 3) for g in (0, 50, 100, 200)]
    [1.0, 0.5, 0.0, 0.0]
    >>> Schedule("cosine", 1.0, 0.0).value_after(0.5)  # of the run
    0.5
    >>> Schedule.parse("linear(0.1, 0.01, 300)")
    Schedule(shape='linear', start=0.1, stop=0.01, generations=300)
    """

    shape: Literal["linear", "cosine", "exponential"]
    start: float
    stop: float
    generations: int | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        if self.generations is not None and self.generations < 1:
            raise BadInput(f"A schedule must last at least one generation, not {self.generations}.")
        if self.shape == "exponential" and not (self.start > 0 and self.stop > 0):
            raise BadInput("An exponential schedule needs a start and a stop above 0.")

    def __call__(self, generation: int) -> float:
        """Return the value at a generation; a schedule over the whole run is at its start."""
        return self.value_after(generation / self.generations if self.generations is not None else 0.0)

    def value_after(self, part: float) -> float:
        """Return the value after a part of the schedule, from 0 to 1."""
        t = min(1.0, part)
        if self.shape == "linear":
            return self.start + (self.stop - self.start) * t
        if self.shape == "cosine":
            return self.stop + (self.start - self.stop) * 0.5 * (1 + math.cos(math.pi * t))
        return float(self.start * (self.stop / self.start) ** t)

    def __str__(self) -> str:
        last = "" if self.generations is None else f", {self.generations}"
        return f"{self.shape}({self.start}, {self.stop}{last})"

    @classmethod
    def parse(cls, text: str) -> "Schedule":
        """Return the schedule of a text such as "linear(0.1, 0.01)" or "linear(0.1, 0.01, 300)", or raise BadInput."""
        match = re.fullmatch(r"\s*(linear|cosine|exponential)\(([^,]+),([^,]+)(?:,([^,]+))?\)\s*", text)
        try:
            if match is None:
                raise ValueError
            generations = int(match[4]) if match[4] is not None else None
            return cls(match[1], float(match[2]), float(match[3]), generations)  # type: ignore[arg-type]
        except BadInput:
            raise
        except ValueError:
            form = "linear(START, STOP) or linear(START, STOP, GENERATIONS)"
            message = f"{text!r} is not a schedule: write a number or {form}, with linear, cosine or exponential."
            raise BadInput(message) from None


Scheduled = float | Schedule | Callable[[int], float]  # a setting: one value, or a value for each generation


def value_at(setting: Scheduled, generation: int) -> float:
    """Return the value of a setting at a generation."""
    try:
        return float(setting(generation)) if callable(setting) else float(setting)
    except Exception as error:
        message = f"The schedule {setting!r} gives no number at generation {generation}"
        raise BadInput(f"{message}: {format_error(error)}") from error
