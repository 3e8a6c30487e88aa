"""Train, then load the exported weights in plain torch."""

import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional as F

import germline as gl

x = torch.randn(512, 8, generator=torch.Generator().manual_seed(0))


def build() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 8))


result = gl.train(gl.seeded(0, build), data=(x, x.argmax(1)), loss=F.cross_entropy, generations=60)
model = build()
model.load_state_dict(load_file(result.run / "model.safetensors"))
model.eval()
assert torch.equal(model(x), result.model(x))
print(f"accuracy {gl.accuracy(model(x), x.argmax(1)):.3f}")
