"""Time series forecast by an LSTM: the recurrent networks of Kalia et al.

A net sees by how much the values of a window differ from its last ones, and forecasts by how much the next ones will,
both in units of the window's standard deviation: so neither the level of a series nor its spread matters. An output of
0 forecasts that the last value persists, which is what forecasts are measured against.

Kalia, Mohan, Nemani, "Evolutionary Training of Deep Neural Networks on Heterogeneous Computing Environments", 2022.
"""

from collections.abc import Sequence
from typing import Literal, get_args

import torch.nn.functional as F
from torch import Tensor, nn

from germline.data import load_series, make_windows
from germline.errors import BadInput
from germline.recipes.recipe import Recipe, seeded
from germline.strategies import GA, PSO, SNES, Gradient, MuLambda
from germline.strategies.settings import check_choice

Column = Literal["HUFL", "HULL", "MUFL", "MULL", "LUFL", "LULL", "OT"]  # six loads and the oil temperature
COLUMNS = get_args(Column)
YEAR, MONTH = 365, 30 * 24  # days; hours
LEAST_STD = 0.01  # added to the standard deviation of a window, which may be constant


class Forecaster(nn.Module):
    """An LSTM that reads a window and forecasts its last column.

    >>> import torch
    >>> net = Forecaster(7, 16, 24)
    >>> net(torch.zeros(3, 48, 7)).shape
    torch.Size([3, 24])
    """

    def __init__(self, columns: int, hidden: int, horizon: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(columns, hidden, batch_first=True)
        self.head = nn.Linear(hidden, horizon)

    def forward(self, x: Tensor) -> Tensor:
        unit = x[:, :, -1].std(1, keepdim=True) + LEAST_STD
        states, _ = self.lstm((x - x[:, -1:]) / unit[:, :, None])
        change: Tensor = self.head(states[:, -1])
        return x[:, -1, -1:] + change * unit


def mse(output: Tensor, target: Tensor) -> Tensor:
    """Return the mean squared error of a forecast."""
    return F.mse_loss(output, target[:, 1:])


def squared_error(output: Tensor, target: Tensor) -> Tensor:
    """Return the loss: the mean squared error, as a function of its own, so that ``mse`` is a metric of its own."""
    return mse(output, target)


def persistence_mse(output: Tensor, target: Tensor) -> Tensor:
    """Return the mean squared error of the forecast that the last known value persists."""
    return F.mse_loss(target[:, :1].expand_as(target[:, 1:]), target[:, 1:])


def lstm_temperature(*, seed: int = 0, hidden: int = 16, window: int = 28, horizon: int = 1) -> Recipe:
    """Forecast the next day's minimum temperature in Melbourne (1981 to 1990) from the last four weeks by an LSTM."""
    values = load_series("daily-min-temperatures.csv", [1])
    return build_recipe(values, (6 * YEAR, 8 * YEAR, len(values)), window, horizon, hidden, seed)


def lstm_etth1(
    *, seed: int = 0, hidden: int = 16, window: int = 48, horizon: int = 24, column: Column = "OT"
) -> Recipe:
    """Forecast a day of a transformer's oil temperature, or of a load, by the hour from two days of all by an LSTM."""
    check_choice("column", column, COLUMNS)
    others = [number for number, name in enumerate(COLUMNS, 1) if name != column]
    values = load_series("ETTh1.csv", [*others, 1 + COLUMNS.index(column)])
    return build_recipe(values, (12 * MONTH, 16 * MONTH, 20 * MONTH), window, horizon, hidden, seed)


def build_recipe(values: Tensor, cuts: Sequence[int], window: int, horizon: int, hidden: int, seed: int) -> Recipe:
    """Return the recipe of a series, whose train, dev and test end at the cuts."""
    if min(window, horizon) < 1:
        raise BadInput(f"The settings window and horizon must be at least 1, not {window} and {horizon}.")
    data = make_windows(values, cuts, window, horizon)
    x, y = data.train
    return Recipe(
        model=seeded(seed, lambda: Forecaster(x.shape[2], hidden, y.shape[1] - 1)),
        **data.as_arguments(),
        loss=squared_error,  # if it were mse, the best weights would be chosen by the next metric, which is constant
        metrics={"mse": mse, "persistence_mse": persistence_mse},
        others={
            "snes": SNES(population=128, sigma=0.05),
            "mu-lambda": MuLambda(population=128, parents=16, sigma=0.02),
            "ga": GA(population=128, parents=16, sigma=0.02),
            "pso": PSO(population=128, sigma=0.1, decay=0.98),
            "gradient": Gradient(lr=0.003),
        },
        batch_size=256,
        generations=600,
        evaluate_every=20,
        snapshot_every=100,
    )
