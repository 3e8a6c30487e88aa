"""Images segmented by a U-Net, trained for the overlap with their masks: the encoder-decoder of Kalia et al.

Kalia, Mohan, Nemani, "Evolutionary Training of Deep Neural Networks on Heterogeneous Computing Environments", 2022.
"""

from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from germline.data import Splits, load_nuclei, make_shapes
from germline.data.nuclei import NUCLEI_SIZE
from germline.data.shapes import SIZE as SHAPES_SIZE
from germline.errors import BadInput
from germline.optim.schedules import Schedule
from germline.recipes.recipe import Recipe, seeded
from germline.strategies import GA, PSO, SNES, Gradient, MuLambda, OpenAIES
from germline.strategies.settings import check_choice

Size = Literal["small", "large"]
SHAPES = {"small": (4, 2), "large": (32, 3)}  # channels of the first level, and how often images are halved in size
WORK = {"small": (64, 2000), "large": (16, 7000)}  # squares of a batch, and generations
STRATEGIES = {
    "small": OpenAIES(population=64, sigma=0.05, lr=Schedule("linear", 0.04, 0.0)),
    "large": OpenAIES(population=1024, sigma=0.01, lr=Schedule("linear", 0.003, 0.0), rank=1),
}


class UNet(nn.Module):
    """An encoder and a decoder, with a connection between their levels of the same size (Ronneberger et al. 2015).

    >>> net = UNet(4, 2)
    >>> net(torch.zeros(1, 1, 64, 64)).shape, sum(p.numel() for p in net.parameters())
    (torch.Size([1, 1, 64, 64]), 7465)
    """

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        widths = [width << level for level in range(depth + 1)]
        self.down = nn.ModuleList(two_convolutions(*sizes) for sizes in zip((1, *widths), widths, strict=False))
        self.up = nn.ModuleList(two_convolutions(w + 2 * w, w) for w in reversed(widths[:-1]))
        self.head = nn.Conv2d(width, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        levels = []
        for number, part in enumerate(self.down):
            x = part(F.max_pool2d(x, 2) if number else x)
            levels.append(x)
        for part, level in zip(self.up, reversed(levels[:-1]), strict=True):
            x = part(torch.cat([F.interpolate(x, scale_factor=2.0), level], 1))
        out: Tensor = self.head(x)
        return out


def two_convolutions(inputs: int, outputs: int) -> nn.Module:
    """Return two convolutions of 3 x 3, each with a ReLU."""
    first, second = nn.Conv2d(inputs, outputs, 3, padding=1), nn.Conv2d(outputs, outputs, 3, padding=1)
    return nn.Sequential(first, nn.ReLU(), second, nn.ReLU())


def overlap(output: Tensor, target: Tensor) -> Tensor:
    """Return the cross entropy of the pixels plus 1 minus the soft Dice coefficient, a mean over images."""
    inside = output.sigmoid()
    both, total = areas(inside, target)
    missing = 1 - (2 * both + 1) / (total + 1)
    return F.binary_cross_entropy_with_logits(output, target) + missing.mean()


def dice(output: Tensor, target: Tensor) -> Tensor:
    """Return the Dice coefficient, twice the intersection over the sum of both areas: a mean over images.

    >>> dice(torch.tensor([[[[3.0, 1.0], [-1.0, -2.0]]]]), torch.tensor([[[[1.0, 0.0], [0.0, 0.0]]]])).item()
    0.6666666865348816
    """
    both, total = areas((output > 0).float(), target)
    return torch.where(total > 0, 2 * both / total.clamp_min(1), 1.0).mean()


def iou(output: Tensor, target: Tensor) -> Tensor:
    """Return the intersection over the union: a mean over images."""
    both, total = areas((output > 0).float(), target)
    either = total - both
    return torch.where(either > 0, both / either.clamp_min(1), 1.0).mean()


def areas(inside: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Return, for each image, the area of the intersection, and the sum of both areas."""
    return (inside * target).sum((1, 2, 3)), (inside + target).sum((1, 2, 3))


def cut_squares(images: Tensor, size: int) -> Tensor:
    """Return each image as squares of ``size`` pixels across."""
    squares = images.unfold(2, size, size).unfold(3, size, size)
    return squares.permute(0, 2, 3, 1, 4, 5).reshape(-1, 1, size, size).contiguous()


def unet_nuclei(
    *, seed: int = 0, size: Size = "small", batch_size: int | None = None, crop: int = 32, steps: int | None = None
) -> Recipe:
    """Segment cell nuclei by a U-Net of 7,465 or 1,946,305 parameters, trained on squares, measured on whole images."""
    check_crop(crop, NUCLEI_SIZE)
    return build_recipe(load_nuclei(), size, batch_size, crop, steps, seed)


def unet_shapes(
    *, seed: int = 0, size: Size = "small", batch_size: int | None = None, crop: int = 32, steps: int | None = None
) -> Recipe:
    """Segment textured shapes under uneven light, which no threshold finds, by the U-Net of ``unet-nuclei``."""
    check_crop(crop, SHAPES_SIZE)
    return build_recipe(make_shapes(), size, batch_size, crop, steps, seed)


def check_crop(crop: int, pixels: int) -> None:
    """Check that images can be cut into squares of this size."""
    if crop < 16 or pixels % crop:
        message = f"The setting crop must be at least 16 and divide images of {pixels} pixels evenly"
        raise BadInput(f"{message}, not {crop}.")


def build_recipe(data: Splits, size: Size, batch_size: int | None, crop: int, steps: int | None, seed: int) -> Recipe:
    """Return the recipe of a U-Net on images with masks; the usual batch and generations are those of its size."""
    check_choice("size", size, get_args(Size))
    usual_batch, usual_steps = WORK[size]
    x, y = (cut_squares(part, crop) for part in data.train)
    has_mask = y.amax((1, 2, 3)) > 0  # the others teach little
    return Recipe(
        model=seeded(seed, lambda: UNet(*SHAPES[size])),
        data=(x[has_mask], y[has_mask]),
        dev=data.dev,
        test=data.test,
        loss=overlap,
        metrics={"dice": dice, "iou": iou},
        strategy=STRATEGIES[size],
        others={
            "snes": SNES(population=64, sigma=0.05),
            "mu-lambda": MuLambda(population=64, parents=8, sigma=0.03),
            "ga": GA(population=64, parents=16, sigma=0.02),
            "pso": PSO(population=64, sigma=0.05, decay=0.98),
            "gradient": Gradient(lr=Schedule("linear", 0.003, 0.0)),
        },
        batch_size=usual_batch if batch_size is None else batch_size,
        generations=usual_steps if steps is None else steps,
        evaluate_every=50,
        snapshot_every=100,
    )
