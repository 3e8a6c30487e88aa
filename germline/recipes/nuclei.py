"""Cell nuclei segmented by a U-Net, trained for what is asked of it: the first founding paper's encoder-decoder.

Kalia, Mohan, Nemani, "Evolutionary Training of Deep Neural Networks on Heterogeneous Computing Environments", 2022.
"""

import typing
from typing import Literal

import torch
import torch.nn.functional as F
from torch import nn

from germline.data import nuclei
from germline.errors import BadInput
from germline.optim.schedules import Schedule
from germline.recipes.recipe import Recipe, seeded
from germline.strategies import GA, PSO, SNES, Gradient, MuLambda, OpenAIES
from germline.strategies.settings import check_choice

Size = Literal["small", "large"]
SHAPES = {"small": (4, 2), "large": (32, 3)}  # channels of the first level, and how often they are halved in size


class UNet(nn.Module):
    """An encoder whose every level is handed on to the decoder of the same size (Ronneberger et al. 2015).

    >>> net = UNet(4, 2)
    >>> net(torch.zeros(1, 1, 64, 64)).shape, sum(p.numel() for p in net.parameters())
    (torch.Size([1, 1, 64, 64]), 7465)
    """

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        widths = [width << level for level in range(depth + 1)]
        self.down = nn.ModuleList(level(*sizes) for sizes in zip((1, *widths), widths, strict=False))
        self.up = nn.ModuleList(level(w + 2 * w, w) for w in reversed(widths[:-1]))
        self.head = nn.Conv2d(width, 1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = []
        for number, part in enumerate(self.down):
            x = part(F.max_pool2d(x, 2) if number else x)
            kept.append(x)
        for part, other in zip(self.up, reversed(kept[:-1]), strict=True):
            x = part(torch.cat([F.interpolate(x, scale_factor=2.0), other], 1))
        out: torch.Tensor = self.head(x)
        return out


def level(inputs: int, outputs: int) -> nn.Module:
    """Two convolutions."""
    first, second = nn.Conv2d(inputs, outputs, 3, padding=1), nn.Conv2d(outputs, outputs, 3, padding=1)
    return nn.Sequential(first, nn.ReLU(), second, nn.ReLU())


def overlap(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Cross entropy of each pixel, and what is missing of the Dice coefficient of each image, were it not hard."""
    inside = output.sigmoid()
    both, all_of_it = (inside * target).sum((1, 2, 3)), (inside + target).sum((1, 2, 3))
    missing = 1 - (2 * both + 1) / (all_of_it + 1)
    return F.binary_cross_entropy_with_logits(output, target) + missing.mean()


def dice(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Twice what is in both, in parts of what is in each; the mean over images.

    >>> dice(torch.tensor([[[[3.0, 1.0], [-1.0, -2.0]]]]), torch.tensor([[[[1.0, 0.0], [0.0, 0.0]]]])).item()
    0.6666666865348816
    """
    inside = (output > 0).float()
    both, all_of_it = (inside * target).sum((1, 2, 3)), (inside + target).sum((1, 2, 3))
    return torch.where(all_of_it > 0, 2 * both / all_of_it.clamp_min(1), 1.0).mean()


def iou(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """What is in both in parts of what is in any; the mean over images."""
    inside = (output > 0).float()
    both, either = (inside * target).sum((1, 2, 3)), torch.maximum(inside, target).sum((1, 2, 3))
    return torch.where(either > 0, both / either.clamp_min(1), 1.0).mean()


def crops(images: torch.Tensor, size: int) -> torch.Tensor:
    """Each image in squares."""
    found = images.unfold(2, size, size).unfold(3, size, size)
    return found.permute(0, 2, 3, 1, 4, 5).reshape(-1, 1, size, size).contiguous()


def unet_nuclei(
    *, seed: int = 0, size: Size = "small", batch_size: int = 64, crop: int = 32, steps: int = 2000
) -> Recipe:
    """Cell nuclei by a U-Net of 7,465 or 1,946,305 parameters; learns from squares, is judged by whole images."""
    check_choice("size", size, typing.get_args(Size))
    if crop < 16 or 256 % crop:
        raise BadInput(f"The setting crop is the size of squares that cut an image of 256 evenly, not {crop}.")
    data = nuclei()
    x, y = (crops(part, crop) for part in data.train)
    some = y.amax((1, 2, 3)) > 0  # squares without a nucleus teach little
    return Recipe(
        model=seeded(seed, lambda: UNet(*SHAPES[size])),
        data=(x[some], y[some]),
        dev=data.dev,
        test=data.test,
        loss=overlap,
        metrics={"dice": dice, "iou": iou},
        strategy=OpenAIES(population=64, sigma=0.05, lr=Schedule("linear", 0.04, 0.0, steps)),
        others={
            "snes": SNES(population=64, sigma=0.05),
            "mu-lambda": MuLambda(population=64, parents=8, sigma=0.03),
            "ga": GA(population=64, parents=16, sigma=0.02),
            "pso": PSO(population=64, sigma=0.05, decay=0.98),
            "gradient": Gradient(lr=Schedule("linear", 0.003, 0.0, steps)),
        },
        batch_size=batch_size,
        generations=steps,
        evaluate_every=50,
        snapshot_every=100,
    )
