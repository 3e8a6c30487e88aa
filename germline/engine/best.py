"""The generation of a run whose metric of the dev set is best."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from germline.errors import BadInput
from germline.objective import Objective

LOWER_IS_BETTER = ("loss", "mse", "mae", "rmse", "error", "perplexity")  # endings of metrics


def lower_is_better(metric: str) -> bool:
    """Return whether lower values of a metric are better, by its name.

    >>> lower_is_better("test_mse"), lower_is_better("test_accuracy")
    (True, False)
    """
    return metric.endswith(LOWER_IS_BETTER)


@dataclass
class Best:
    """The best value of a metric of the dev set so far.

    The metric is the first that is not the objective itself, else the objective on the dev set.

    Attributes:
        metric: The name of the metric.
        lower_is_better: Whether lower values are better.
        value: The best value; None before the first evaluation that is not NaN.
        generation: The number of generations after which it was measured.
        evaluations_since: How often the metric has been measured since.
    """

    metric: str
    lower_is_better: bool
    value: float | None = None
    generation: int = 0
    evaluations_since: int = 0

    @classmethod
    def of(cls, objective: Objective, splits: Collection[str]) -> "Best | None":
        """Return the metric of a run before its first generation, or None if nothing is measured on a dev set."""
        if objective.population is not None:
            metric = f"dev_{objective.population.metrics[0]}"
            return cls(metric, not objective.maximize) if "dev" in objective.population.splits else None
        measured = objective.measured()
        if "dev" not in splits or not measured:
            return None
        name = next((name for name, function in measured.items() if function is not objective.function), None)
        if name is not None:
            return cls(f"dev_{name}", lower_is_better(name))
        return cls(f"dev_{next(iter(measured))}", not objective.maximize)

    @classmethod
    def require(cls, objective: Objective, splits: Collection[str], argument: str) -> None:
        """Raise an error that names an argument, if nothing is measured on a dev set."""
        if cls.of(objective, splits) is None:
            what = "metrics= that are measured on dev" if "dev" in splits else "a dev set: give dev="
            raise BadInput(f"{argument} needs {what}, or leave {argument} out.")

    def note(self, metrics: Mapping[str, float], generation: int) -> bool:
        """Take in the metrics that were measured after some generations; return whether they are the best so far."""
        value = metrics.get(self.metric)
        if value is None:
            return False
        self.evaluations_since += 1
        is_better = value == value and (  # not NaN
            self.value is None or (value < self.value if self.lower_is_better else value > self.value)
        )
        if is_better:
            self.value, self.generation, self.evaluations_since = value, generation, 0
        return is_better
