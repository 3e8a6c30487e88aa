"""Networks of the benchmarks that are larger than a few layers, in plain torch."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY, WIDTH, LAYERS, HEADS, KEY_HEADS, INNER, TOKENS = 256, 256, 4, 8, 4, 688, 64


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """Return x, (..., tokens, size), with each pair of its features turned by the angle of its position."""
    first, second = x.chunk(2, -1)
    return torch.cat([first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()], -1)


class LlamaLayer(nn.Module):
    """Causal attention with groups of query heads for each key, then a gated network, both on normalized inputs."""

    def __init__(self) -> None:
        super().__init__()
        size = WIDTH // HEADS
        self.attention_norm, self.inner_norm = nn.RMSNorm(WIDTH, eps=1e-5), nn.RMSNorm(WIDTH, eps=1e-5)
        self.query = nn.Linear(WIDTH, WIDTH, bias=False)
        self.key, self.value = (nn.Linear(WIDTH, KEY_HEADS * size, bias=False) for _ in range(2))
        self.output = nn.Linear(WIDTH, WIDTH, bias=False)
        self.gate, self.up = (nn.Linear(WIDTH, INNER, bias=False) for _ in range(2))
        self.down = nn.Linear(INNER, WIDTH, bias=False)

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        normed = self.attention_norm(x)
        q, k, v = (part(normed).unflatten(-1, (-1, WIDTH // HEADS)) for part in (self.query, self.key, self.value))
        q, k, v = (part.transpose(-2, -3) for part in (q, k, v))  # (batch, heads, tokens, size)
        q, k = rotate(q, angles), rotate(k, angles)
        k, v = (part.repeat_interleave(HEADS // KEY_HEADS, -3) for part in (k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.output(mixed.transpose(-2, -3).flatten(-2))
        normed = self.inner_norm(x)
        inner: Tensor = self.down(F.silu(self.gate(normed)) * self.up(normed))
        return x + inner


class Llama(nn.Module):
    """A language model as Llama has it: RMSNorm, rotary positions, grouped attention, SwiGLU; 4 layers of 256.

    Touvron et al., "Llama 2: Open Foundation and Fine-Tuned Chat Models", 2023.
    """

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(LlamaLayer() for _ in range(LAYERS))
        self.norm, self.head = nn.RMSNorm(WIDTH, eps=1e-5), nn.Linear(WIDTH, VOCABULARY, bias=False)
        size = WIDTH // HEADS
        frequencies = 10000.0 ** (-torch.arange(0, size, 2) / size)
        self.register_buffer("angles", torch.arange(TOKENS)[:, None] * frequencies, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.tokens(x)
        for layer in self.layers:
            x = layer(x, self.angles)
        logits: Tensor = self.head(self.norm(x))
        return logits.flatten(0, 1)  # (batch * tokens, vocabulary)


class Encoder(nn.Module):
    """A classifier of sequences by torch's own transformer: 4 layers of 256."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, 10)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.layers(self.tokens(x)).mean(1))
        return logits


class ResidualBlock(nn.Module):
    """Two convolutions of 3 x 3 with norms, and a connection past them."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.second = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.first_norm, self.second_norm = nn.BatchNorm2d(outputs), nn.BatchNorm2d(outputs)
        self.past: nn.Module = nn.Identity()
        if stride > 1 or inputs != outputs:
            self.past = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.first_norm(self.first(x)))
        return F.relu(self.second_norm(self.second(out)) + self.past(x))


class ResNet18(nn.Module):
    """He et al., "Deep Residual Learning for Image Recognition", 2016; norms in evaluation mode."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.stem_norm = nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64)
        sizes = [(64, 64, 1), (64, 64, 1), (64, 128, 2), (128, 128, 1)]
        sizes += [(128, 256, 2), (256, 256, 1), (256, 512, 2), (512, 512, 1)]
        self.blocks = nn.Sequential(*(ResidualBlock(*size) for size in sizes))
        self.head = nn.Linear(512, 10)
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.stem_norm(self.stem(x))), 3, 2, 1)
        out: Tensor = self.head(self.blocks(x).mean((-2, -1)))
        return out
