"""A residual network with batch norm and dropout, on images of 8 x 8 pixels."""

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

import germline as gl


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.norm, self.head = nn.BatchNorm2d(8), nn.Sequential(nn.Dropout(0.1), nn.Linear(128, 10))

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.first(x))
        x = F.relu(x + self.norm(self.second(x)))
        return self.head(F.max_pool2d(x, 2).flatten(1))


x, y = (torch.from_numpy(array) for array in load_digits(return_X_y=True))
x = (x / 16).float().reshape(-1, 1, 8, 8)
strategy = gl.OpenAIES(population=128, sigma=0.05, lr=gl.Schedule("linear", 0.05, 0.005))
result = gl.train(
    gl.seeded(0, Residual),
    data=(x[:1500], y[:1500]),
    loss=F.cross_entropy,
    batch_size=256,
    generations=150,
    strategy=strategy,
)
print(f"test accuracy {gl.accuracy(result.model(x[1500:]), y[1500:]):.3f}")
