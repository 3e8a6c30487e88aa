"""A module with two inputs and a dict as its output; the batch is a dict, too."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import germline as gl


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.head = nn.Linear(4, 16), nn.Linear(3, 16), nn.Linear(16, 2)

    def forward(self, left: Tensor, right: Tensor) -> dict[str, Tensor]:
        both = torch.tanh(self.left(left) + self.right(right))
        return {"sum": self.head(both)[:, 0], "difference": self.head(both)[:, 1]}


def loss(output: dict[str, Tensor], target: dict[str, Tensor]) -> Tensor:
    return F.mse_loss(output["sum"], target["sum"]) + F.mse_loss(output["difference"], target["difference"])


left, right = torch.randn(1000, 4, generator=torch.manual_seed(0)), torch.randn(1000, 3, generator=torch.manual_seed(1))
target = {"sum": left[:, 0] + right[:, 0], "difference": left[:, 0] - right[:, 0]}  # a nested target
data = {"left": left, "right": right, "target": target}
result = gl.train(gl.seeded(0, Pair), data=data, loss=loss, batch_size=250, generations=200)
print(f"loss {loss(result.model(left, right), target):.3f}")
