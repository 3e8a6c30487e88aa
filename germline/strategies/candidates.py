"""The members of a generation, as a description from which any of their weights can be made."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from germline.noise import Field, Sigma
from germline.strategies.state import slice_columns

MakeWeights = Callable[[NDArray[np.int64], int, int], Tensor]  # parameters low to high of some members


@dataclass(frozen=True)
class Candidates:
    """The members of a generation: center + sigma * noise. Nothing of size population x parameters is built.

    Attributes:
        field: The noise field of the run.
        generation: The generation at which noise is drawn; a tensor where a GPU launches what it has recorded.
        center: The weights that all members share.
        sigma: The standard deviation of the noise: one number, or one per parameter.
    """

    shared: ClassVar[bool] = True  # whether all members have one center, which layers can make use of

    field: Field
    generation: int | Tensor
    center: Tensor
    sigma: Sigma

    def weights(self, members: NDArray[np.int64], start: int, stop: int, out: Tensor | None = None) -> Tensor:
        """Return the parameters start:stop of some members: (members, parameters)."""
        noise = self.field.members(members, self.generation, self.center.device)
        sigma = self.sigma[start:stop] if isinstance(self.sigma, Tensor) else self.sigma
        return noise.perturb(self.center[start:stop], sigma, start=start, out=out)


@dataclass(frozen=True)
class UnsharedCandidates(Candidates):
    """Candidates that are evaluated as if they had no center in common."""

    shared: ClassVar[bool] = False


@dataclass(frozen=True)
class Offspring(Candidates):
    """Members without a common center, made from a State's arrays when a layer asks for their weights."""

    shared: ClassVar[bool] = False

    make: MakeWeights = dataclasses.field(kw_only=True)

    def weights(self, members: NDArray[np.int64], start: int, stop: int, out: Tensor | None = None) -> Tensor:
        """Return the parameters start:stop of some members: (members, parameters)."""
        weights = self.make(members, start, stop)
        return weights if out is None else out.copy_(weights)


def describe_offspring(
    state: Any, field: Field, generation: int, members: Callable[[Any, NDArray[np.int64], int], Tensor]
) -> Offspring:
    """Describe members that are made by a function of (a State cut to some columns, members, the first column).

    A function that can be pickled (a partial method, not a closure) is sent to the processes of a machine fastest.
    """
    return Offspring(field, generation, state.theta, 0.0, make=partial(make_columns, state, members))


def make_columns(
    state: Any, members: Callable[[Any, NDArray[np.int64], int], Tensor], some: NDArray[np.int64], low: int, high: int
) -> Tensor:
    """Return the parameters low to high of some members."""
    return members(slice_columns(state, low, high), some, low)
