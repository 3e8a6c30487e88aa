"""A pretrained net whose body stays as it is: only the head is trained, by accuracy itself."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F

import germline as gl

x, y = (torch.from_numpy(array) for array in load_digits(return_X_y=True))
x = (x / 16).float()
is_small = y < 5
net = gl.seeded(
    0, lambda: nn.Sequential(nn.Sequential(nn.Linear(64, 32), nn.BatchNorm1d(32), nn.ReLU()), nn.Linear(32, 10))
)
optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
for _ in range(100):  # stands for the pretraining, on the digits 0 to 4
    optimizer.zero_grad()
    F.cross_entropy(net(x[is_small]), y[is_small]).backward()
    optimizer.step()

body = net[0].requires_grad_(False).eval()  # its batch norm keeps its statistics
before = body[1].running_mean.clone()
result = gl.train(
    net, data=(x, y), score=gl.accuracy, batch_size=512, generations=150, strategy=gl.OpenAIES(sigma=0.5, lr=0.3)
)
assert torch.equal(result.model[0][1].running_mean, before)
print(f"accuracy on all ten digits {gl.accuracy(result.model(x), y):.3f}")
