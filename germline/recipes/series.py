"""Time series forecast by an LSTM: the recurrent networks of the first founding paper.

A net sees by how much the values of a window differ from its last ones, and forecasts by how much the next ones will,
both in units of the window's own deviation: so neither the level of a series nor its spread matters. If it says nothing
it forecasts that all stays as it is, which is what forecasts are measured against.
"""

import torch
import torch.nn.functional as F
from torch import nn

from germline.data import Splits, series, windows
from germline.errors import BadInput
from germline.recipes.recipe import Recipe, seeded
from germline.strategies import GA, PSO, SNES, Gradient, MuLambda, OpenAIES

YEAR, MONTH = 365, 30 * 24  # days; hours
STILL = 0.01  # deviation below which a window counts as constant


class Forecaster(nn.Module):
    """Reads a window, and forecasts its last column.

    >>> net = Forecaster(7, 16, 24)
    >>> net(torch.zeros(3, 48, 7)).shape
    torch.Size([3, 24])
    """

    def __init__(self, columns: int, hidden: int, horizon: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(columns, hidden, batch_first=True)
        self.head = nn.Linear(hidden, horizon)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        unit = x[:, :, -1].std(1, keepdim=True) + STILL
        states, _ = self.lstm((x - x[:, -1:]) / unit[:, :, None])
        change: torch.Tensor = self.head(states[:, -1])
        return x[:, -1, -1:] + change * unit


def mse(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(output, target[:, 1:])


def persistence_mse(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Of the forecast that all stays as it is."""
    return F.mse_loss(target[:, :1].expand_as(target[:, 1:]), target[:, 1:])


def lstm_temperature(*, seed: int = 0, hidden: int = 16, window: int = 28, horizon: int = 1) -> Recipe:
    """The minimum temperature of each day in Melbourne, 1981 to 1990, the next day's from the last four weeks."""
    values = series("daily-min-temperatures.csv", [1])
    data = windows(values, (6 * YEAR, 8 * YEAR, len(values)), *checked(window, horizon))
    return recipe_of(data, hidden, seed)


def lstm_etth1(*, seed: int = 0, hidden: int = 16, window: int = 48, horizon: int = 24) -> Recipe:
    """The oil temperature of a transformer, by the hour, the next day's from two days of it and of six loads."""
    values = series("ETTh1.csv", range(1, 8))
    data = windows(values, (12 * MONTH, 16 * MONTH, 20 * MONTH), *checked(window, horizon))
    return recipe_of(data, hidden, seed)


def checked(window: int, horizon: int) -> tuple[int, int]:
    if min(window, horizon) < 1:
        raise BadInput(f"The settings window and horizon count values: not {window} and {horizon}.")
    return window, horizon


def recipe_of(data: Splits, hidden: int, seed: int) -> Recipe:
    x, y = data.train
    return Recipe(
        model=seeded(seed, lambda: Forecaster(x.shape[2], hidden, y.shape[1] - 1)),
        data=data.train,
        dev=data.dev,
        test=data.test,
        loss=mse,
        metrics={"mse": mse, "persistence_mse": persistence_mse},
        strategy=OpenAIES(population=128, sigma=0.05, lr=0.01),
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
