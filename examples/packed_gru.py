"""A GRU over packed sequences: is the sum of a sequence above zero?"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence

import germline as gl


class Reader(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gru, self.head = nn.GRU(1, 8, batch_first=True), nn.Linear(8, 2)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        return self.head(self.gru(packed)[1][-1])


generator = torch.Generator().manual_seed(0)
lengths = torch.randint(3, 9, (512,), generator=generator)
x = torch.randn(512, 8, 1, generator=generator)
target = ((x[..., 0] * (torch.arange(8) < lengths[:, None])).sum(1) > 0).long()
strategy = gl.OpenAIES(population=64, sigma=0.1, lr=0.05)
result = gl.train(
    gl.seeded(0, Reader),
    data=(x, lengths, target),
    loss=F.cross_entropy,
    batch_size=64,
    generations=60,
    strategy=strategy,
)
print(f"accuracy {gl.accuracy(result.model(x, lengths), target):.3f}")
