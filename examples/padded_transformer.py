"""A transformer over sequences of different lengths, which are padded: which of two tokens comes more often?"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import germline as gl


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8, 16, padding_idx=0)
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.head = nn.Linear(16, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        is_padding = tokens == 0
        x = self.layer(self.embedding(tokens), src_key_padding_mask=is_padding)
        return self.head(x.masked_fill(is_padding[..., None], 0).sum(1))


generator = torch.Generator().manual_seed(0)
tokens = torch.randint(1, 8, (1000, 10), generator=generator)
tokens[torch.arange(10) >= torch.randint(4, 11, (1000, 1), generator=generator)] = 0
target = ((tokens == 1).sum(1) > (tokens == 2).sum(1)).long()
model, strategy = gl.seeded(0, Classifier), gl.OpenAIES(population=64, sigma=0.1, lr=0.05)
settings = {"loss": F.cross_entropy, "batch_size": 128, "generations": 60, "strategy": strategy}
result = gl.train(model, data=(tokens, target), **settings)
print(f"accuracy {gl.accuracy(result.model(tokens), target):.3f}")
