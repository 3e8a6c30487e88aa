"""Networks that people train, and modules whose code makes it hard to evaluate many members at once."""

import random
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class LeNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 6, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2)
        )
        self.fc1, self.fc2, self.fc3 = nn.Linear(400, 120), nn.Linear(120, 84), nn.Linear(84, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.features(x).flatten(1)
        out: Tensor = self.fc3(F.relu(self.fc2(F.relu(self.fc1(x)))))
        return out


class UNet(nn.Module):
    """A U-Net of two levels with skips; the way up is by transposed convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2 = self.pair(1, 4), self.pair(4, 8)
        self.bottom = self.pair(8, 12)
        self.up2, self.up1 = nn.ConvTranspose2d(12, 8, 2, stride=2), nn.ConvTranspose2d(8, 4, 2, stride=2)
        self.merge2, self.merge1 = self.pair(16, 8), self.pair(8, 4)
        self.head = nn.Conv2d(4, 1, 1)

    @staticmethod
    def pair(inputs: int, outputs: int) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, padding=1),
            nn.GroupNorm(2, outputs),
            nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, padding=1, padding_mode="reflect"),
            nn.ReLU(),
        )

    def forward(self, x: Tensor) -> Tensor:
        one = self.down1(x)
        two = self.down2(F.max_pool2d(one, 2))
        low = self.bottom(F.max_pool2d(two, 2))
        two = self.merge2(torch.cat([self.up2(low), two], 1))
        one = self.merge1(torch.cat([self.up1(two), one], 1))
        out: Tensor = self.head(one)
        return out


class Forecaster(nn.Module):
    """An LSTM with a hidden state of the batch's size that the user's code creates."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(1, 8, num_layers=2, batch_first=True), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.zeros(2, x.shape[0], 8, dtype=x.dtype, device=x.device)
        out, (h, _) = self.lstm(x, (h, h + 0.5))
        last: Tensor = self.head(out[:, -1] + h[-1])
        return last


class NamedArguments(nn.Module):
    """Calls layers with their arguments by name, in a different order."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.norm, self.head = nn.LSTM(1, 8), nn.LayerNorm(8), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.zeros(1, x.shape[1], 8, dtype=x.dtype, device=x.device)
        out, _ = self.lstm(hx=(h, h + 0.5), input=x)
        last: Tensor = self.head(input=self.norm(input=out[-1]))
        return last


class CellForecaster(nn.Module):
    """Calls recurrent cells in a loop."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.LSTMCell(1, 8), nn.GRUCell(8, 8), nn.RNNCell(8, 8)
        self.head = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = c = torch.zeros(len(x), 8, dtype=x.dtype, device=x.device)
        g = r = None
        for t in range(x.shape[1]):
            h, c = self.first(x[:, t], (h, c))
            g = self.second(h, g)
            r = self.third(g, r)
        out: Tensor = self.head(r)
        return out


class Transformer(nn.Module):
    """A transformer with positions by arange, a causal mask, and a head that is tied to the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.positions = nn.Embedding(40, 8), nn.Parameter(torch.randn(12, 8))
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.1)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.norm = nn.RMSNorm(8)

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        x = self.embedding(tokens) + self.positions[torch.arange(length, device=tokens.device)]
        mask = torch.full((length, length), float("-inf"), dtype=x.dtype, device=x.device).triu(1)
        x = self.norm(self.encoder(x, mask=mask))
        return F.linear(x, self.embedding.weight)


class ResidualBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(3, 6, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(6)
        self.conv2, self.norm2 = nn.Conv2d(6, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6)
        self.short = nn.Sequential(nn.Conv2d(3, 6, 1, stride=2), nn.BatchNorm2d(6))

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(y)) + self.short(x))


class TiedAutoencoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.bias = nn.Linear(6, 3), nn.Parameter(torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(torch.tanh(self.encoder(x)), self.encoder.weight.t(), self.bias)


class Siamese(nn.Module):
    """A module with two inputs, two outputs, and a nested part that is shared and called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 5))
        self.heads = nn.ModuleDict({"near": nn.Linear(10, 2), "far": self.trunk[2]})

    def forward(self, a: Tensor, b: Tensor) -> dict[str, Tensor]:
        a, b = self.trunk(a), self.trunk(b)
        return {"near": self.heads["near"](torch.cat([a, b], -1)), "far": self.heads["far"](a - b)}


class UsesOutputsTwice(nn.Module):
    """Uses outputs before and after an activation, in place and not, with a view and a sum between."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        before = self.one(x)
        after = F.relu(before)
        hidden = self.two(after + before)
        alias = hidden
        hidden.relu_()  # which changes the alias, too
        last = self.three(alias)
        return before, alias, last, torch.relu(last).view(-1, 2)


class Pools(nn.Module):
    """Convolutions followed by poolings of several kinds, of images that all members share and of others."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(2, 4, 3), nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, x: Tensor) -> list[Tensor]:
        first = F.max_pool2d(F.relu(self.one(x)), 2)
        return [
            F.max_pool2d(self.one(x), 3, 2),
            F.max_pool2d(torch.relu(self.two(first)), (2, 1)),
            F.max_pool2d(self.two(first), 2, padding=1),
            F.max_pool2d(self.two(first), 2, ceil_mode=True),
            F.max_pool2d(F.max_pool2d(self.one(x).relu(), 2, 1), 2, 1),
            F.max_pool1d(self.one(x).flatten(2).relu(), 2),
        ]


NETS: dict[str, tuple[type[nn.Module], tuple[Any, ...]]] = {
    "LeNet": (LeNet, ((5, 1, 28, 28),)),
    "U-Net": (UNet, ((3, 1, 16, 16),)),
    "LSTM forecaster": (Forecaster, ((5, 9, 1),)),
    "cells": (CellForecaster, ((5, 6, 1),)),
    "LSTM, named arguments": (NamedArguments, ((6, 5, 1),)),
    "transformer": (Transformer, ("tokens",)),
    "residual block": (ResidualBlock, ((5, 3, 8, 8),)),
    "tied autoencoder": (TiedAutoencoder, ((5, 6),)),
    "siamese": (Siamese, ((5, 6), (5, 6))),
    "outputs used twice": (UsesOutputsTwice, ((5, 6),)),
    "pools": (Pools, ((5, 2, 11, 12),)),
}


def make_inputs(shapes: tuple[Any, ...]) -> tuple[Tensor, ...]:
    """Return random inputs of these shapes; "tokens" stands for a batch of sequences of tokens."""
    return tuple(torch.randint(0, 40, (5, 12)) if shape == "tokens" else torch.randn(shape) for shape in shapes)


# Hostile modules; each takes (16, 6) and returns (16, 3)


class Hostile(nn.Module):
    """A module whose code makes it hard to evaluate many members at once."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(6, 6), nn.Linear(6, 3)
        self.add_parts()

    def add_parts(self) -> None:
        """Add what else the module consists of."""

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.hidden(x))
        return out

    def hidden(self, x: Tensor) -> Tensor:
        raise NotImplementedError


class LooksAtTheBatchSize(Hostile):
    def hidden(self, x: Tensor) -> Tensor:
        h: Tensor = self.layer(x)
        return h * x.shape[0] / len(x) + torch.zeros(x.shape[0], 6).add(float(x.size(0) == 16))


class MixesRows(Hostile):
    def hidden(self, x: Tensor) -> Tensor:
        h: Tensor = self.layer(x)
        return (h - h.mean(0)) / h.std(0) + h.roll(1, 0).cumsum(0)


class TransposesTheBatch(Hostile):
    """Reshapes with the batch last, which a module that flattens members and examples would get wrong."""

    def hidden(self, x: Tensor) -> Tensor:
        h: Tensor = self.layer(x)
        return h.t().reshape(2, -1).flip(0).reshape(6, -1).t().contiguous()


class BranchesOnData(Hostile):
    def hidden(self, x: Tensor) -> Tensor:
        h: Tensor = self.layer(x)
        return h if h.sum() > 0 else -h


class SelectsRows(Hostile):
    def hidden(self, x: Tensor) -> Tensor:
        h: Tensor = self.layer(x)
        return torch.where(h > 0, h, h[h > 0].mean())


class AssignsInPlace(Hostile):
    def hidden(self, x: Tensor) -> Tensor:
        out = torch.zeros(len(x), 6, device=x.device)
        for i in range(6):
            out[:, i] = self.layer(x)[:, i]
        return out


class LeavesTorch(Hostile):
    def hidden(self, x: Tensor) -> Tensor:
        h: Tensor = self.layer(x)
        return h * float(h.abs().max().item())


class UsesAWeightAsAFunction(Hostile):
    def hidden(self, x: Tensor) -> Tensor:
        return F.linear(self.layer(x), self.layer.weight, self.layer.bias)


class UsesItsParameters(Hostile):
    def hidden(self, x: Tensor) -> Tensor:
        penalty = torch.stack([p.square().sum() for p in self.parameters()]).sum()
        h: Tensor = self.layer(x)
        return h + penalty


class KeepsReferences(Hostile):
    def add_parts(self) -> None:
        self.references = [self.layer.weight, self.layer.bias]

    def hidden(self, x: Tensor) -> Tensor:
        return F.linear(x, *self.references)


class ReadsTheDictionary(Hostile):
    def hidden(self, x: Tensor) -> Tensor:
        weight = self.layer._parameters["weight"]
        assert weight is not None
        return F.linear(x, weight)


class CountsItsCalls(Hostile):
    def add_parts(self) -> None:
        self.count = 0

    def hidden(self, x: Tensor) -> Tensor:
        self.count += 1
        h: Tensor = self.layer(x)
        return h * self.count


class RemembersTheFirst(Hostile):
    def add_parts(self) -> None:
        self.cache: Tensor | None = None

    def hidden(self, x: Tensor) -> Tensor:
        if self.cache is None:
            self.cache = self.layer.weight.sum().detach()
        h: Tensor = self.layer(x)
        return h + self.cache


class KeepsAHiddenState(Hostile):
    def add_parts(self) -> None:
        self.state = torch.zeros(16, 6)

    def hidden(self, x: Tensor) -> Tensor:
        self.state = torch.tanh(self.layer(x) + 0.5 * self.state).detach()
        return self.state


class WritesToABuffer(Hostile):
    def add_parts(self) -> None:
        self.register_buffer("mean", torch.zeros(6))

    def hidden(self, x: Tensor) -> Tensor:
        h: Tensor = self.layer(x)
        mean = self.get_buffer("mean")
        mean.mul_(0.9).add_(h.mean(0).detach())
        return h - mean


class DrawsFromTorch(Hostile):
    def hidden(self, x: Tensor) -> Tensor:
        h: Tensor = self.layer(x)
        return h + torch.randn_like(h)


class DrawsFromPython(Hostile):
    def hidden(self, x: Tensor) -> Tensor:
        h: Tensor = self.layer(x)
        return h * random.random()


class ChangesItsInput(Hostile):
    def hidden(self, x: Tensor) -> Tensor:
        h: Tensor = self.layer(x.mul_(1.5))
        return h


class OverridesALayer(Hostile):
    def add_parts(self) -> None:
        class Scaled(nn.Linear):
            def forward(self, x: Tensor) -> Tensor:
                return F.linear(x, self.weight * 2, self.bias)

        self.layer = Scaled(6, 6)

    def hidden(self, x: Tensor) -> Tensor:
        h: Tensor = self.layer(x)
        return h


class HasHooks(Hostile):
    def add_parts(self) -> None:
        self.layer.register_forward_hook(lambda part, args, output: output + args[0])

    def hidden(self, x: Tensor) -> Tensor:
        h: Tensor = self.layer(x)
        return h


class HasAParametrization(Hostile):
    def add_parts(self) -> None:
        nn.utils.parametrizations.weight_norm(self.layer)

    def hidden(self, x: Tensor) -> Tensor:
        h: Tensor = self.layer(x)
        return h


class HasAFrozenLayer(Hostile):
    def add_parts(self) -> None:
        self.layer.weight.requires_grad_(False)

    def hidden(self, x: Tensor) -> Tensor:
        h: Tensor = self.layer(x)
        return h


class HasAnUnusedLayer(Hostile):
    def add_parts(self) -> None:
        self.unused = nn.Linear(3, 3)

    def hidden(self, x: Tensor) -> Tensor:
        h: Tensor = self.layer(x)
        return h


class ThresholdsHard(Hostile):
    def hidden(self, x: Tensor) -> Tensor:
        return torch.sign(self.layer(x))


class MasksWithInfinity(KeepsReferences):
    mask = float("-inf")

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        return torch.cat([out, torch.full_like(out[:, :1], self.mask)], 1)


class MasksWithALargeNumber(MasksWithInfinity):
    mask = -1e9


class HidesInAColumn(KeepsReferences):
    """Computes one of 121 columns in a way that a population module does not notice."""

    def forward(self, x: Tensor) -> Tensor:
        lone = F.linear(x, self.references[0])[:, :1]
        return torch.cat([10 * lone, self.head(self.layer(x)).repeat(1, 40)], 1)


class HasTwoNamesForAWeight(Hostile):
    def add_parts(self) -> None:
        self.one = nn.Parameter(torch.randn(6, 6))
        self.two = self.one

    def hidden(self, x: Tensor) -> Tensor:
        return F.linear(F.linear(self.layer(x), self.one), self.two)


class HasAnExpandedBuffer(Hostile):
    def add_parts(self) -> None:
        self.register_buffer("scale", torch.tensor(2.0).expand(6))

    def hidden(self, x: Tensor) -> Tensor:
        h: Tensor = self.layer(x)
        return h * self.get_buffer("scale")


class BranchesOnItsInput(Hostile):
    """Does with some batches what cannot be done for a block."""

    def hidden(self, x: Tensor) -> Tensor:
        h: Tensor = self.layer(x)
        return h * float(h.abs().max()) if x[0, 0] > 10 else h


HOSTILE: dict[type[Hostile], set[str]] = {  # the methods by which each may be evaluated; faster ones are wrong
    LooksAtTheBatchSize: {"population"},
    MixesRows: {"population"},
    TransposesTheBatch: {"population"},
    BranchesOnData: {"loop"},
    SelectsRows: {"loop"},
    AssignsInPlace: {"population"},
    LeavesTorch: {"loop"},
    UsesAWeightAsAFunction: {"population"},
    UsesItsParameters: {"population"},
    KeepsReferences: {"loop"},
    ReadsTheDictionary: {"population"},
    CountsItsCalls: {"population"},
    RemembersTheFirst: {"population"},
    KeepsAHiddenState: {"population"},
    WritesToABuffer: {"population"},
    DrawsFromTorch: {"population"},
    DrawsFromPython: {"population"},
    ChangesItsInput: {"population"},
    OverridesALayer: {"population"},
    HasHooks: {"population"},
    HasAParametrization: {"population"},
    HasAFrozenLayer: {"population"},
    HasAnUnusedLayer: {"population"},
    ThresholdsHard: {"population"},
    MasksWithInfinity: {"loop"},
    MasksWithALargeNumber: {"loop"},
    HidesInAColumn: {"loop"},
    HasTwoNamesForAWeight: {"population"},
    HasAnExpandedBuffer: {"population"},
    BranchesOnItsInput: {"population"},
}
