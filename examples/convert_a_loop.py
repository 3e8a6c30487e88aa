"""A PyTorch loop that was converted by three lines: each has a comment with what stood there before."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import germline as gl

x = torch.randn(2048, 8, generator=torch.Generator().manual_seed(0))
loader = DataLoader(TensorDataset(x, x.argmax(1)), batch_size=512)
model = gl.seeded(0, lambda: nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 8)))

search = gl.Search(model, gl.OpenAIES(population=128), loss=F.cross_entropy)  # optimizer = Adam(model.parameters())
for _epoch in range(40):
    for inputs, targets in loader:
        search.step(inputs, targets)  # optimizer.zero_grad(); F.cross_entropy(...).backward(); optimizer.step()
model = search.model  # nothing: the optimizer changed the model in place

print(f"accuracy {gl.accuracy(model(x), x.argmax(1)):.3f}")
