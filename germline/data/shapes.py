"""Synthetic images for segmentation: textured shapes under uneven light, the same on every machine.

Shapes and background have the same mean and the same contrast in each image, and light that falls from one side changes
both by more than they differ: no threshold separates them. What tells them apart is the scale of their texture.
"""

import numpy as np
import torch
from numpy.typing import NDArray

from germline.data.splits import Part, Splits
from germline.noise import Field, Stream

EXAMPLES = (160, 20, 40)  # images of train, dev and test
SIZE = 128  # pixels across
SHAPES = 6  # ellipses of an image
SEED = 0x5A9E  # of the images; the batches of a run come from the run's seed
FINE, COARSE = 1, 4  # pixels across of the cells that the textures of background and shapes are made of
LIGHT, CONTRAST = 0.35, 0.1  # how far light changes an image from its middle; the standard deviation of textures


def make_shapes() -> Splits:
    """Return images, (1, 128, 128) from 0 to 1, and masks of the same shape: 160 train, 20 dev, 40 test."""
    count = sum(EXAMPLES)
    masks = np.stack([draw_mask(numbers) for numbers in draw(count, 0, SHAPES * 5)])
    textures = [draw_texture(count, cell, 1 + i) for i, cell in enumerate((FINE, COARSE))]
    images = np.where(masks, textures[1], textures[0]) + draw_light(draw(count, 3, 3))
    x = torch.from_numpy(np.clip(images, 0, 1).astype(np.float32))[:, None]
    y = torch.from_numpy(masks.astype(np.float32))[:, None]
    cuts = np.cumsum(EXAMPLES)[:-1].tolist()
    parts: list[Part] = list(zip(x.tensor_split(cuts), y.tensor_split(cuts), strict=True))
    return Splits(*parts)


def draw(count: int, number: int, size: int) -> NDArray[np.float64]:
    """Return numbers from 0 to 1 for each image, from an address of the noise field."""
    halves = Field(SEED).members(range(count), number).halves((0, size), Stream.BATCH)
    return halves.numpy().astype(np.float64) / 65535


def draw_mask(numbers: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Return the union of ellipses, by five numbers for each: center, radii and angle."""
    row, column = np.mgrid[0:SIZE, 0:SIZE] / SIZE
    mask = np.zeros((SIZE, SIZE), bool)
    for y, x, a, b, angle in numbers.reshape(SHAPES, 5):
        cosine, sine = np.cos(np.pi * angle), np.sin(np.pi * angle)
        u = (row - y) * cosine + (column - x) * sine
        v = (column - x) * cosine - (row - y) * sine
        mask |= (u / (0.06 + 0.1 * a)) ** 2 + (v / (0.06 + 0.1 * b)) ** 2 < 1
    return mask


def draw_texture(count: int, cell: int, number: int) -> NDArray[np.float64]:
    """Return random cells of one size, with mean 0 and one standard deviation, whatever that size."""
    across = SIZE // cell
    cells = draw(count, number, across * across).reshape(count, across, across)
    scaled = (cells - 0.5) * 12**0.5 * CONTRAST
    return scaled.repeat(cell, axis=1).repeat(cell, axis=2)


def draw_light(numbers: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return light that falls from one side: a plane through 0.5 in the middle, by its direction and its slope."""
    row, column = np.mgrid[0:SIZE, 0:SIZE] * 2 / (SIZE - 1) - 1
    angle, slope = 2 * np.pi * numbers[:, 0, None, None], (0.5 + numbers[:, 1, None, None] / 2) * LIGHT
    light: NDArray[np.float64] = 0.5 + slope * (np.cos(angle) * row + np.sin(angle) * column) / 2**0.5
    return light
