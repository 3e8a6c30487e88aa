"""Scalars of the noise, rounded in one way on every device: sigma to 20 significant bits, all others to a dtype."""

import math
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from germline.errors import BadInput
from germline.kernels import to_kernel_device

SIGNIFICANT_BITS = 20  # of sigma: sigma * eps is then exact in float32, and contraction harmless


class LiveScalars:
    """The number of a generation and its sigma in GPU memory, for kernels that are recorded once and launched often.

    Args:
        device: the GPU.

    >>> live = LiveScalars(torch.device("cpu"))
    >>> half = live.scale_sigma(0.5, torch.float32)
    >>> live.set(generation=3, sigma=0.25)
    >>> half.tolist(), live.generation.tolist()
    ([0.125], 3)
    """

    def __init__(self, device: torch.device) -> None:
        self.generation = torch.zeros((), dtype=torch.int64, device=device)
        self.sigma = 0.0
        self.products: dict[tuple[float, torch.dtype], torch.Tensor] = {}

    def set(self, generation: int, sigma: float) -> None:
        """Set the generation and sigma, and with it all tensors that ``scale_sigma`` has returned."""
        self.generation.fill_(generation)
        self.sigma = sigma
        for (factor, _), product in self.products.items():
            product.fill_(round_to_significant_bits(sigma * factor))

    def scale_sigma(self, factor: float, dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor with sigma * factor, which ``set`` keeps up to date."""
        if (factor, dtype) not in self.products:
            value = round_to_significant_bits(self.sigma * factor)
            self.products[factor, dtype] = torch.full((1,), value, dtype=dtype, device=self.generation.device)
        return self.products[factor, dtype]


Sigma = float | torch.Tensor | LiveScalars  # one for all parameters, one per parameter, or one that changes


def scale_sigma(sigma: Sigma, factor: float, like: torch.Tensor) -> torch.Tensor:
    """Return sigma * factor with 20 significant bits: numbers are rounded, vectors cut.

    Args:
        sigma: the standard deviation of the noise.
        factor: a number.
        like: a tensor with the dtype and the device of the result.

    Raises:
        BadInput: if sigma is not finite.
    """
    if isinstance(sigma, LiveScalars):
        return sigma.scale_sigma(factor, like.dtype)
    if not isinstance(sigma, torch.Tensor):
        if not abs(sigma) < 1e38:
            raise BadInput(f"Sigma must be a finite number, not {sigma}.")
        return torch.full((1,), round_to_significant_bits(sigma * factor), dtype=like.dtype, device=like.device)
    scaled = sigma.to(like.dtype) * round_to(factor, like.dtype)
    bits, precision = (torch.int32, 24) if like.dtype == torch.float32 else (torch.int64, 53)
    return (scaled.view(bits) & -(1 << (precision - SIGNIFICANT_BITS))).view(like.dtype)


def round_to_significant_bits(value: float) -> float:
    """Return a number rounded to 20 significant bits."""
    mantissa, exponent = math.frexp(value)
    return math.ldexp(round(math.ldexp(mantissa, SIGNIFICANT_BITS)), exponent - SIGNIFICANT_BITS)


def round_to(value: float, dtype: torch.dtype) -> float:
    """Return a scalar as a tensor of this dtype would hold it: rounded once, whatever device multiplies by it."""
    return float(np.float32(value)) if dtype == torch.float32 else value


def cached_tensor(array: NDArray[Any], device: torch.device) -> torch.Tensor:
    """Return a host array that does not change as a tensor; a GPU copies it once."""
    on_device = to_kernel_device(array, device)
    return torch.from_numpy(on_device) if isinstance(on_device, np.ndarray) else on_device


def as_tensor(array: NDArray[Any] | torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return an array or a tensor as a tensor on a device."""
    return (torch.from_numpy(array) if isinstance(array, np.ndarray) else array).to(device)
