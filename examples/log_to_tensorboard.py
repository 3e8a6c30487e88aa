"""Every number of every generation in TensorBoard: tensorboard --logdir logs"""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.tensorboard import SummaryWriter

import germline as gl

x = torch.randn(512, 8, generator=torch.Generator().manual_seed(0))
model = gl.seeded(0, lambda: nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8)))

with SummaryWriter("logs") as writer:

    def log(run: object, row: dict[str, float]) -> None:
        for key, value in row.items():
            writer.add_scalar(key, value, row["generation"])

    result = gl.train(model, data=(x, x.argmax(1)), loss=F.cross_entropy, generations=60, callbacks=log)
print(f"accuracy {gl.accuracy(result.model(x), x.argmax(1)):.3f}")
