"""Dropout whose mask is a function of the member's address; only in runs that use dropout."""

from typing import Any

from torch import Tensor, nn

from germline.population.block import current_block

SPATIAL = {nn.Dropout: 0, nn.Dropout1d: 1, nn.Dropout2d: 2, nn.Dropout3d: 3}  # dimensions that are dropped as a whole


def dropout_forward(self: Any, x: Tensor) -> Tensor:
    """Drop elements, or whole channels: the forward of a dropout layer, in evaluation mode, too."""
    block = current_block.get()
    spatial = next(count for kind, count in SPATIAL.items() if isinstance(self, kind))
    own = 2 if spatial == 2 else x.dim() - spatial  # Dropout2d takes three dimensions as examples and channels, too
    shape = (*x.shape[:own], *(1,) * (x.dim() - own))

    def draw_factors() -> Tensor:
        """Return 0 where an element is dropped, else 1 / (1 - p): (members, *shape)."""
        return block.draw_dropout_mask(shape, self.p).to(x.dtype) * (1 / (1 - self.p) if self.p < 1 else 0.0)

    if block.single_member is not None:
        return x * draw_factors()[block.single_member]
    (out,) = block.call_once([x], lambda inputs, batched: [inputs[0] * draw_factors()])
    return out
