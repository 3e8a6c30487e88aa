"""The recipe of the stored journals; it must not change, because runs that compute gradients are replayed with it.

The gradients of ``Scales`` are computed element by element, and a generation sees one example. So each operation has
one result, which IEEE 754 defines, and a journal replays to the same bits on every machine. Strategies that only score
members are replayed from their journals alone, whatever the network.
"""

import torch
from torch import Tensor, nn

import germline as gl


class Scales(nn.Module):
    """Multiplies each input by a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(-1, 1, 9))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


def sum_squares(output: Tensor, target: Tensor) -> Tensor:
    """Return the sum of the squares of all differences."""
    return (output - target).square().sum()


def recipe(*, net: str = "mlp") -> gl.Recipe:
    """Return the recipe of a run of six generations with a snapshot after each three."""
    x = (torch.arange(12 * 9).reshape(12, 9) * 7 % 11 - 5).float() / 8
    nets = {"mlp": lambda: nn.Sequential(nn.Linear(9, 4), nn.Tanh(), nn.Linear(4, 9)), "scales": Scales}
    return gl.Recipe(
        model=gl.seeded(0, nets[net]),
        data=(x, 3 * x.flip(1)),
        loss=sum_squares,
        batch_size=1,
        dtype="float32",
        generations=6,
        evaluate_every=3,
        snapshot_every=3,
    )
