"""Time series, and windows of them to forecast from."""

import csv
from collections.abc import Sequence
from itertools import pairwise

import torch

from germline.data.fetch import PUBLISHED, read_published
from germline.data.splits import Splits

SERIES = PUBLISHED["series"]["files"]  # by file, where a series is published, and its SHA-256


def load_series(file: str, columns: Sequence[int]) -> torch.Tensor:
    """Return some columns of a published series: (times, columns)."""
    mirror, sha256 = SERIES[file]
    lines = read_published("timeseries", mirror, file, sha256).decode().splitlines()[1:]
    values = [[float(cells[column]) for column in columns] for cells in csv.reader(lines)]
    return torch.tensor(values, dtype=torch.float32)


def make_windows(values: torch.Tensor, cuts: Sequence[int], window: int, horizon: int) -> Splits:
    """Return windows of all columns, with targets to forecast the last column from them.

    A target is the last known value of the last column, followed by the next ``horizon`` values. A window may begin
    before a cut, its forecast may not. All values are standardized by the mean and standard deviation of train.

    Args:
        values: A series of shape (times, columns).
        cuts: The times at which train, dev and test end.
        window: The number of times that a forecast is made from.
        horizon: The number of times that are forecast.
    """
    values = (values - values[: cuts[0]].mean(0)) / values[: cuts[0]].std(0)
    x = values.unfold(0, window, 1).transpose(1, 2)[: len(values) - window - horizon + 1]
    y = values[window - 1 :, -1].unfold(0, 1 + horizon, 1)
    first = torch.arange(len(x)) + window  # the time of the first value that is forecast
    parts = [(first >= low) & (first + horizon <= high) for low, high in pairwise((0, *cuts))]
    return Splits(*((x[part].contiguous(), y[part].contiguous()) for part in parts))
