"""A Dataset with a random transform, read by a DataLoader with worker processes."""

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

import germline as gl


class Digits(Dataset[tuple[Tensor, Tensor]]):
    def __init__(self) -> None:
        x, y = load_digits(return_X_y=True)
        self.x, self.y = torch.from_numpy(x).float() / 16, torch.from_numpy(y)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.x[index] + 0.1 * torch.randn(64), self.y[index]


if __name__ == "__main__":
    loader = DataLoader(Digits(), batch_size=256, num_workers=2)
    model = gl.seeded(0, lambda: nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)))
    result = gl.train(model, data=loader, loss=F.cross_entropy, generations=150)
    print(f"accuracy {gl.accuracy(result.model(loader.dataset.x), loader.dataset.y):.3f}")
