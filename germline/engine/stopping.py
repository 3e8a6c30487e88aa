"""The limits at which a run ends."""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from germline.arguments import check_fields
from germline.engine.best import Best, lower_is_better
from germline.engine.session import Session
from germline.errors import BadInput, unknown_name
from germline.objective import Objective

REQUESTS = (None, "callback", "interrupt")  # by the number of a request to stop


@dataclass(frozen=True)
class Target:
    """A metric and the value at which a run ends."""

    metric: str
    value: float
    lower_is_better: bool

    @classmethod
    def parse(cls, target: "Target | str | Sequence[Any] | None") -> "Target | None":
        """Return the target of METRIC=VALUE, METRIC<=VALUE, METRIC>=VALUE or (metric, value); = goes by the name."""
        if target is None or isinstance(target, Target):
            return target
        match = re.fullmatch(
            r"\s*(\w+)\s*(<=|>=|=)\s*(\S+)\s*", target if isinstance(target, str) else "{}={}".format(*target)
        )
        try:
            if match is None:
                raise ValueError
            value = float(match[3])
        except ValueError:
            raise BadInput(f"A target is METRIC=VALUE, such as dev_accuracy=0.95, not {target!r}.") from None
        return cls(match[1], value, match[2] == "<=" or (match[2] == "=" and lower_is_better(match[1])))

    def is_reached(self, metrics: Mapping[str, float]) -> bool:
        """Return whether the metric has reached the value."""
        value = metrics.get(self.metric)
        return value is not None and (value <= self.value if self.lower_is_better else value >= self.value)


@dataclass(frozen=True)
class Stop:
    """The limits of a run, which ends at the first that it reaches.

    Attributes:
        generations: Generations in all.
        seconds: Seconds of training in all, over every resume.
        target: A metric and its value.
        evaluations: Forward passes of a batch, of which a backward pass counts as two.
        interactions: Steps of simulators that count them.
        patience: Evaluations of the dev set in a row that bring no better metric (``engine.best`` says which one).
    """

    generations: int | None = None
    seconds: float | None = None
    target: Target | None = None
    evaluations: int | None = None
    patience: int | None = None
    interactions: int | None = None

    @classmethod
    def from_header(cls, limits: Mapping[str, Any]) -> "Stop":
        """Return the limits that a run was started with."""
        target = Target(**limits["target"]) if limits.get("target") else None
        return cls(**{**limits, "target": target})

    def __post_init__(self) -> None:
        check_fields(self)
        if self.generations is not None and self.generations < 0:
            raise BadInput(f"The number of generations must not be negative, but is {self.generations}.")
        if self.evaluations is not None and self.evaluations < 0:
            raise BadInput(f"The number of evaluations must not be negative, but is {self.evaluations}.")
        if self.interactions is not None and self.interactions < 0:
            raise BadInput(f"The number of interactions must not be negative, but is {self.interactions}.")
        if self.patience is not None and self.patience < 1:
            raise BadInput(f"The patience must be at least 1 evaluation of the dev set, not {self.patience}.")
        if self.seconds is not None and self.seconds < 0:
            raise BadInput(f"The number of seconds must be 0 or more, not {self.seconds}.")

    def check(self, objective: Objective, splits: Collection[str]) -> None:
        """Raise an error that names the metrics, if the target's metric or that of patience will not be measured."""
        names = [f"{split}_{kind}" for split in splits for kind in objective.measured()] + [f"center_{objective.name}"]
        if objective.population is not None:
            population = objective.population
            names += [f"{split}_{kind}" for split in population.splits for kind in population.metrics]
        if self.patience is not None:
            Best.require(objective, splits, "patience")
        if self.interactions is not None and objective.columns == 1:
            raise BadInput("A limit of interactions needs an objective that counts them, such as gl.Gym.")
        if self.target is not None and self.target.metric not in names:
            raise unknown_name("metric", self.target.metric, names)

    def part_used(self, session: Session, generation: int, samples: int) -> float:
        """Return which part of its budget a run has used, from 0 to 1; 0 if it has no limit but a target.

        Args:
            session: The run.
            generation: Its finished generations.
            samples: Its samples so far.
        """
        seconds, _ = session.fleet.group.stop_status(session.seconds, False)
        passes = self.evaluations * session.batch_size if self.evaluations is not None else None
        steps = (samples, self.interactions)
        used = ((generation, self.generations), (samples, passes), (seconds, self.seconds), steps)
        return min(1.0, max((amount / limit for amount, limit in used if limit), default=0.0))

    def reason(self, session: Session) -> str | None:
        """Return which limit a session has reached, or None if it goes on."""
        if self.target is not None and self.target.is_reached(session.metrics):
            return "target"
        if self.patience is not None and session.best is not None and session.best.evaluations_since >= self.patience:
            return "patience"
        if self.generations is not None and session.generation >= self.generations:
            return "generations"
        if self.evaluations is not None and session.samples >= self.evaluations * session.batch_size:
            return "evaluations"
        if self.interactions is not None and session.samples >= self.interactions:
            return "interactions"
        seconds, request = session.fleet.group.stop_status(session.seconds, session.stop_request)
        if self.seconds is not None and seconds >= self.seconds:
            return "seconds"
        return REQUESTS[request]
