"""When a run ends."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from germline.errors import BadInput, unknown_name
from germline.objective import Objective
from germline.run import Run

LOWER_IS_BETTER = ("loss", "mse", "mae", "rmse", "error", "perplexity")  # endings of metrics


def lower_is_better(metric: str) -> bool:
    """By its name.

    >>> lower_is_better("test_mse"), lower_is_better("test_accuracy")
    (True, False)
    """
    return metric.endswith(LOWER_IS_BETTER)


@dataclass(frozen=True)
class Target:
    """A metric and the value at which it is good enough."""

    metric: str
    value: float
    lower_is_better: bool

    @classmethod
    def parse(cls, given: "Target | str | Sequence[Any] | None") -> "Target | None":
        """From METRIC=VALUE, METRIC<=VALUE, METRIC>=VALUE or (metric, value); = takes the direction from the name."""
        if given is None or isinstance(given, Target):
            return given
        match = re.fullmatch(
            r"\s*(\w+)\s*(<=|>=|=)\s*(\S+)\s*", given if isinstance(given, str) else "{}={}".format(*given)
        )
        try:
            if match is None:
                raise ValueError
            value = float(match[3])
        except ValueError:
            raise BadInput(f"A target is METRIC=VALUE, such as dev_accuracy=0.95, not {given!r}.") from None
        return cls(match[1], value, match[2] == "<=" or (match[2] == "=" and lower_is_better(match[1])))

    def reached(self, metrics: Mapping[str, float]) -> bool:
        value = metrics.get(self.metric)
        return value is not None and (value <= self.value if self.lower_is_better else value >= self.value)


@dataclass(frozen=True)
class Stop:
    """When a run ends; the first that is met."""

    generations: int | None = None
    seconds: float | None = None
    target: Target | None = None
    evaluations: int | None = None  # forward passes of a batch, of which a backward pass counts as two

    def __post_init__(self) -> None:
        if self.generations is not None and self.generations < 0:
            raise BadInput(f"The number of generations must not be negative, but is {self.generations}.")
        if self.evaluations is not None and self.evaluations < 0:
            raise BadInput(f"The number of evaluations must not be negative, but is {self.evaluations}.")
        if self.seconds is not None and not 0 <= self.seconds < float("inf"):
            raise BadInput(f"The number of seconds must be 0 or more, not {self.seconds}.")

    def check(self, objective: Objective, splits: Iterable[str]) -> None:
        """Refuses a target that nothing will be measured for, and says which metrics there are."""
        name = "score" if objective.maximize else "loss"
        kinds = [*(objective.metrics or {}), *(() if objective.of_model else (name,))]
        names = [f"{split}_{kind}" for split in splits for kind in kinds] + [f"center_{name}"]
        if self.target is not None and self.target.metric not in names:
            raise unknown_name("metric", self.target.metric, names)

    def reason(self, training: Run) -> str | None:
        if self.target is not None and self.target.reached(training.metrics):
            return "target"
        if self.generations is not None and training.generation >= self.generations:
            return "generations"
        if self.evaluations is not None and training.samples >= self.evaluations * training.batch_size:
            return "evaluations"
        seconds, interrupted = training.core.fleet.heard(training.seconds, training.interrupted)
        if self.seconds is not None and seconds >= self.seconds:
            return "seconds"
        return "interrupt" if interrupted else None
