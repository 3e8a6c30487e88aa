"""A 1-bit net: only the signs of its weights count and its neurons are on or off, so that it has no gradient."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F

import germline as gl


class OneBit(nn.Linear):
    """A linear layer that uses the signs of its weights."""

    def forward(self, x):
        return F.linear(x, torch.where(self.weight > 0, 1.0, -1.0), self.bias)


class Step(nn.Module):
    def forward(self, x):
        return (x > 0).float()


x, y = (torch.from_numpy(array) for array in load_digits(return_X_y=True))
data, test = ((x[part].float() / 16, y[part]) for part in (slice(0, 1400), slice(1400, None)))
model = gl.seeded(0, lambda: nn.Sequential(OneBit(64, 64), Step(), OneBit(64, 10)))
strategy = gl.OpenAIES(population=256, sigma=0.3, lr=0.1)
result = gl.train(model, data, test=test, score=gl.accuracy, batch_size=256, generations=200, strategy=strategy)
print(f"test accuracy {result.summary['metrics']['test_accuracy']:.3f} with weights of one bit")
