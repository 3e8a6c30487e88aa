"""Metrics as people read them."""

import math
from collections.abc import Iterable, Mapping


def format_metric(name: str, value: float | None) -> str:
    """Return a metric's name in words and its value; a summary has None for a number that is not finite.

    >>> format_metric("dev_accuracy", 0.97833), format_metric("test_loss", None), format_metric("dev_mse", 123456.7)
    ('dev accuracy 0.9783', 'test loss nan', 'dev mse 1.235e+05')
    """
    return f"{name.replace('_', ' ')} {format_number(value)}"


def format_number(value: float | None, digits: int = 4) -> str:
    """Return a number with some digits after the point, or in scientific notation if it is large.

    >>> format_number(0.97833), format_number(None), format_number(123456.7), format_number(3.0, 1)
    ('0.9783', 'nan', '1.235e+05', '3.0')
    """
    if value is None or not math.isfinite(value):
        return "nan" if value is None else f"{value}"
    return f"{value:.{digits}f}" if abs(value) < 1e4 else f"{value:.4g}"


def format_metrics(metrics: Mapping[str, float | None], separator: str = "  ") -> str:
    """Return metrics in one line."""
    return separator.join(format_metric(name, value) for name, value in metrics.items())


def shorten(name: str, width: int) -> str:
    """Return a name, cut if it has more characters than fit.

    >>> shorten("dev_accuracy", 8)
    'dev_acc…'
    """
    return name if len(name) <= width else name[: width - 1] + "…"


def preferred_metric(names: Iterable[str]) -> str | None:
    """Return the metric that people want to see first: of the dev set, and not the loss or the score, if there is one.

    >>> preferred_metric(["center_loss", "dev_loss", "dev_accuracy"]), preferred_metric(["center_loss"])
    ('dev_accuracy', None)
    """
    on_dev = [name for name in names if name.startswith("dev_")]
    return next((name for name in on_dev if name not in ("dev_loss", "dev_score")), next(iter(on_dev), None))
