"""What every strategy is made of: a State, candidates that are descriptions, and what a generation told.

A strategy is a frozen dataclass of settings with pure functions over a State dataclass. The last axis of a State's
arrays is that of the parameters, and ``tell`` treats each parameter by itself: given a State that holds only some
columns it gives the same columns of the next State.
"""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from germline.genome import Genome
from germline.noise import Field, Noise, Sigma, Span


@dataclass(frozen=True)
class Candidates:
    """The members of a generation, as a description: center + sigma * noise. Nothing of size P x M is built."""

    shared: ClassVar[bool] = True  # whether all members have one center, which layers can make use of

    field: Field
    generation: int | torch.Tensor  # a tensor, and a sigma that changes, where a card launches what it has recorded
    center: torch.Tensor
    sigma: Sigma

    def weights(
        self, members: NDArray[np.int64], start: int, stop: int, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Parameters start:stop of some members: (members, parameters)."""
        noise = self.field.members(members, self.generation, self.center.device)
        sigma = self.sigma[start:stop] if isinstance(self.sigma, torch.Tensor) else self.sigma
        return noise.perturb(self.center[start:stop], sigma, start=start, out=out)


@dataclass(frozen=True)
class UnsharedCandidates(Candidates):
    """The same members, made as if they had no center in common."""

    shared: ClassVar[bool] = False


Wire = Literal["float32", "bfloat16", "int8"]  # float32 stands for the type of the weights: nothing is rounded
Make = Callable[[NDArray[np.int64], int, int], torch.Tensor]  # parameters low to high of some members


@dataclass(frozen=True)
class Offspring(Candidates):
    """Members that have no center in common: made of a State's arrays, those that are asked for."""

    shared: ClassVar[bool] = False

    make: Make = dataclasses.field(kw_only=True)

    def weights(
        self, members: NDArray[np.int64], start: int, stop: int, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        made = self.make(members, start, stop)
        return made if out is None else out.copy_(made)


def offspring(
    state: Any, field: Field, generation: int, members: Callable[[Any, NDArray[np.int64], int], torch.Tensor]
) -> Offspring:
    """Of a function of (a State cut to some columns, members, the first column)."""

    def make(some: NDArray[np.int64], low: int, high: int) -> torch.Tensor:
        return members(cut(state, low, high), some, low)

    return Offspring(field, generation, state.theta, 0.0, make=make)


@dataclass(frozen=True)
class GenerationResult:
    """What is known of a generation once it has been evaluated; with it alone a State can be advanced."""

    generation: int
    scores: NDArray[np.float32]
    values: Mapping[str, float]  # of the schedules
    gradient: torch.Tensor | None = None  # for strategies that ask for one


@dataclass(frozen=True)
class GenerationInputs:
    """What candidates, gradients or lessons are made of: for a fleet whose other processes have to make them, too."""

    strategy: "Strategy[Any]"
    state: Any
    version: str  # of the State: how many generations it has behind it, and a + if it knows the next gradient
    address: int  # generation at which noise is drawn
    values: Mapping[str, float]
    batch: int  # generation whose batch it is
    on_dev: bool = False  # whether that is one of the dev set
    given: Any = None  # the batch itself, where it is of no data set that others have


S = TypeVar("S")


class Strategy(Protocol[S]):
    """The protocol; ``openai_es.py`` is the example to read."""

    name: ClassVar[str]
    needs_gradient: ClassVar[bool]
    asked: ClassVar[tuple[str, ...]]  # the arrays of a State that ``ask`` reads; only ``tell`` reads the others

    @property
    def population(self) -> int: ...

    def field(self, seed: int, genome: Genome) -> Field: ...

    def init(self, theta: torch.Tensor) -> S: ...

    def values(self, state: S, generation: int) -> dict[str, float]: ...

    def ask(self, state: S, field: Field, generation: int, values: Mapping[str, float]) -> Candidates: ...

    def tell(self, state: S, result: GenerationResult, field: Field, *, maximize: bool, start: int = 0) -> S: ...


AnyStrategy = Strategy[Any]


class Differentiating(Protocol):
    """What a strategy that needs gradients says besides."""

    slices: int  # of a batch
    per_worker: bool  # whether batch and slices are those of each worker
    wire: Wire

    def differentiates(self, generation: int) -> bool: ...

    def samples(self, generation: int) -> bool: ...

    def with_gradient(self, state: Any, gradient: torch.Tensor, generation: int, *, maximize: bool) -> Any: ...

    def reference_candidates(
        self, state: Any, field: Field, generation: int, values: Mapping[str, float]
    ) -> Candidates | None: ...


class Summed(Protocol[S]):
    """What a strategy whose update is a sum over members can do besides: see ``fleet/exchange.py`` on semi-updates."""

    shards: int

    def weights(self, scores: NDArray[np.float32], *, maximize: bool) -> NDArray[np.int64] | None: ...

    def sums(self, noise: Noise, weights: NDArray[np.int64], span: Span) -> torch.Tensor: ...

    def step(self, state: S, sums: torch.Tensor, result: GenerationResult, field: Field, *, start: int = 0) -> S: ...


def cut(state: Any, low: int, high: int) -> Any:
    """The columns low:high of a State: of the last axis of its arrays, which is that of the parameters."""
    if isinstance(state, torch.Tensor):
        return state[..., low:high] if state.dim() else state
    if isinstance(state, dict):  # of a torch optimizer
        return {key: cut(value, low, high) for key, value in state.items()}
    if dataclasses.is_dataclass(state) and not isinstance(state, type):
        parts = {f.name: cut(getattr(state, f.name), low, high) for f in dataclasses.fields(state)}
        return type(state)(**parts)
    return state


def pack(state: Any, prefix: str = "") -> tuple[Any, dict[str, torch.Tensor]]:
    """A State as JSON in which a tensor is {"tensor": name}, and the tensors by name."""
    if isinstance(state, torch.Tensor):
        return {"tensor": prefix}, {prefix: state}
    if dataclasses.is_dataclass(state) and not isinstance(state, type):
        state = {f.name: getattr(state, f.name) for f in dataclasses.fields(state)}
    if not isinstance(state, dict | list | tuple):
        return state, {}
    items = state.items() if isinstance(state, dict) else enumerate(state)
    packed = [(key, *pack(value, f"{prefix}.{key}" if prefix else str(key))) for key, value in items]
    tensors = {name: tensor for _, _, found in packed for name, tensor in found.items()}
    if isinstance(state, dict):
        return {"items": [[key, tree] for key, tree, _ in packed]}, tensors
    return {"list": [tree for _, tree, _ in packed]}, tensors


def unpack(template: S, tree: Any, tensors: Mapping[str, torch.Tensor]) -> S:
    """The State that ``pack`` took apart; the template says which dataclasses it is made of."""
    return _unpack(template, tree, tensors)  # type: ignore[no-any-return]


def _unpack(template: Any, tree: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    if not isinstance(tree, dict):
        return tree
    if "tensor" in tree:
        return tensors[tree["tensor"]]
    if "list" in tree:
        return [_unpack(None, item, tensors) for item in tree["list"]]
    items = dict(tree["items"])
    if dataclasses.is_dataclass(template) and not isinstance(template, type):
        return type(template)(**{key: _unpack(getattr(template, key), item, tensors) for key, item in items.items()})
    return {key: _unpack(None, item, tensors) for key, item in items.items()}
