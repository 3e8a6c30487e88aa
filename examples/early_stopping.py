"""Stop when the dev set does not get better any more, and keep the best weights."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F

import germline as gl

x, y = (torch.from_numpy(array) for array in load_digits(return_X_y=True))
x = (x / 16).float()
result = gl.train(
    gl.seeded(0, lambda: nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))),
    data=(x[:200], y[:200]),  # few: it overfits
    dev=(x[200:600], y[200:600]),
    loss=F.cross_entropy,
    strategy=gl.OpenAIES(population=128, lr=0.1),
    generations=2000,
    evaluate_every=5,
    patience=8,
    keep="best",
)
print(f"test accuracy {gl.accuracy(result.model(x[600:]), y[600:]):.3f}")
print(f"stopped by {result.summary['stopped_by']} after {len(result.history)} generations")
