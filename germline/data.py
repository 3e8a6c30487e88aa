"""Named data sets."""

from dataclasses import dataclass

import torch

from germline.errors import BadInput
from germline.objective import split


@dataclass(frozen=True)
class Splits:
    """Inputs and targets of each part of a data set."""

    train: tuple[torch.Tensor, torch.Tensor]
    dev: tuple[torch.Tensor, torch.Tensor]
    test: tuple[torch.Tensor, torch.Tensor]


def digits() -> Splits:
    """scikit-learn's 1,797 handwritten digits of 8 x 8 pixels, from 0 to 1: 60 % train, 20 % dev, 20 % test.

    They come with scikit-learn: nothing is downloaded.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise BadInput(
            "The digits come with scikit-learn, which is not installed: pip install scikit-learn."
        ) from error
    bunch = load_digits()
    x = torch.tensor(bunch.data / 16.0, dtype=torch.float32)
    y = torch.tensor(bunch.target, dtype=torch.int64)
    train, dev, test = ((x[part], y[part]) for part in map(torch.from_numpy, split(len(y), [0.6, 0.2])))
    return Splits(train, dev, test)
