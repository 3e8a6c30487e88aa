"""Dropout whose mask is a function of the member's address; only where it is asked for."""

from typing import Any

import torch
from torch import nn

from germline.population.block import Block, current

SPATIAL = {nn.Dropout: 0, nn.Dropout1d: 1, nn.Dropout2d: 2, nn.Dropout3d: 3}  # dimensions that are dropped as a whole


def dropout(self: Any, x: torch.Tensor) -> torch.Tensor:
    block: Block = current()
    spatial = next(count for kind, count in SPATIAL.items() if isinstance(self, kind))
    kept = 2 if spatial == 2 else x.dim() - spatial  # torch takes three dimensions, too, as examples and channels there
    shape = (*x.shape[:kept], *(1,) * (x.dim() - kept))

    def call(inputs: list[torch.Tensor], batched: list[bool]) -> list[torch.Tensor]:
        return [inputs[0] * factors(block, shape, self.p, x.dtype)]

    if block.member is not None:
        return x * factors(block, shape, self.p, x.dtype)[block.member]
    (out,) = block.through([x], call)
    return out


def factors(block: Block, shape: tuple[int, ...], p: float, dtype: torch.dtype) -> torch.Tensor:
    """0 where an element is dropped, 1 / (1 - p) where it is kept: (members, *shape)."""
    return block.keep(shape, p).to(dtype) * (1 / (1 - p) if p < 1 else 0.0)
