"""The strategy protocol: what an algorithm declares, and what it computes.

A strategy is a frozen dataclass of settings that derives from ``Strategy``. Its functions are pure functions of a
State, a second frozen dataclass. The last axis of a State's arrays is that of the parameters. ``tell`` treats each
parameter independently: given a State that holds only some columns, it returns the same columns of the next State,
which lets a fleet share out an update. ``openai_es.py`` is the example to read, ``docs/strategies.md`` the guide.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol, Self, TypeVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from germline.genome import Genome
from germline.noise import Field, MemberWeights, Noise, Span
from germline.optim.optimizers import Moments
from germline.strategies.candidates import Candidates

StrategyKind = Literal["evolve", "differentiate", "train_members"]
Wire = Literal["float32", "bfloat16", "int8"]  # float32 stands for the type of the weights: nothing is rounded
S = TypeVar("S")


@dataclass(frozen=True)
class GenerationResult:
    """The result of evaluating a generation; with it alone a State can be advanced.

    Attributes:
        generation: The number of the generation.
        scores: One score per member, in member order.
        values: The values of the strategy's schedules in this generation.
        gradient: The gradient, for strategies that ask for one.
        counts: What a simulator has counted of each member: steps, sums of observations and of their squares. A
            State does not depend on them.
    """

    generation: int
    scores: NDArray[np.float32]
    values: Mapping[str, float]
    gradient: Tensor | None = None
    counts: NDArray[np.float32] | None = None


@dataclass(frozen=True)
class GenerationInputs:
    """The inputs of a generation's members, for fleets whose other processes have to make them as well.

    Attributes:
        strategy: The strategy of the run.
        state: Its State, or one that includes the gradient of this generation.
        version: The version of that State: the number of generations behind it, and ``+`` if it includes the gradient.
        address: The generation at which noise is drawn.
        values: The values of the schedules.
        batch: The generation whose batch the members are scored on.
        on_dev: Whether that batch is one of the dev set.
        given_batch: The batch itself, where it comes from the caller and not from a data set that others have.
        gradient: The gradient that the State includes, if it includes that of this generation.
        observations: The sums of observations by which members normalize theirs.
    """

    strategy: "Strategy[Any]"
    state: Any
    version: str
    address: int
    values: Mapping[str, float]
    batch: int
    on_dev: bool = False
    given_batch: Any = None
    gradient: Tensor | None = None
    observations: Sequence[float] = ()


class Strategy(Protocol[S]):
    """An algorithm: settings, and pure functions over a State.

    Derive from this class, as a frozen dataclass, and define ``name``, ``population``, ``init``, ``values``, ``ask``
    and ``tell``. The rest has defaults.

    Attributes:
        name: How the strategy is called on the command line and in a journal.
        kind: Which driver runs it: ``"evolve"`` scores the members that ``ask`` describes, ``"differentiate"`` also
            computes gradients (see ``GradientStrategy``), ``"train_members"`` trains members between evaluations (see
            ``MemberStrategy``).
        ask_arrays: The names of the State's arrays that ``ask`` reads; every process of a fleet holds them whole.
        has_semi_updates: Whether the update is a sum over members that can be computed in shards (``SummedStrategy``).
        population: The number of members that are scored in a generation.

    >>> import torch
    >>> from germline.optim.shaping import rank_members
    >>> @dataclass(frozen=True)
    ... class State:
    ...     theta: torch.Tensor
    >>> @dataclass(frozen=True)
    ... class HillClimbing(Strategy[State]):
    ...     name: ClassVar[str] = "hill-climbing"
    ...     population: int = 16
    ...     def init(self, theta):
    ...         return State(theta)
    ...     def values(self, state, generation):
    ...         return {"sigma": 0.1}
    ...     def ask(self, state, field, generation, values):
    ...         return Candidates(field, generation, state.theta, values["sigma"])
    ...     def tell(self, state, result, field, *, maximize, start=0):
    ...         best = rank_members(result.scores, maximize=maximize)[0]  # a score that is NaN is the worst
    ...         noise = field.members([int(best)], result.generation, state.theta.device)
    ...         return State(noise.perturb(state.theta, result.values["sigma"], start=start)[0])
    >>> import germline as gl
    >>> search = gl.Search(torch.nn.Linear(2, 1), HillClimbing(), objective=lambda net: abs(net.bias.item() - 3))
    >>> costs = [float(search.step().min()) for _ in range(50)]
    >>> costs[-1] < 0.1
    True
    """

    name: ClassVar[str]
    kind: ClassVar[StrategyKind] = "evolve"
    ask_arrays: ClassVar[tuple[str, ...]] = ("theta",)
    has_semi_updates: ClassVar[bool] = False

    @property
    def population(self) -> int: ...

    @property
    def needs_probe(self) -> bool:
        """True if the setting ``sigma`` must be chosen by a probe before the first generation."""
        return False

    def limit_smooth_sigma(self, parameters: int) -> float:
        """Return the largest sigma that a probe may choose where the score is smooth."""
        return math.inf

    @property
    def is_columnwise(self) -> bool:
        """True if ``tell`` treats each parameter independently, so that columns can be updated apart."""
        return True

    @property
    def is_portable(self) -> bool:
        """True if ``tell`` gives the same bits on every kind of device."""
        return True

    def with_settings(self, **settings: Any) -> Self:
        """Return the strategy with other values of some settings."""
        return dataclasses.replace(self, **settings)  # type: ignore[type-var]

    def after_probe(self, values: Mapping[str, float]) -> Self:
        """Return the strategy with what a probe has chosen: ``sigma``, and ``lr`` for a first learning rate."""
        return self.with_settings(sigma=values["sigma"])

    def bind(self, genome: Genome) -> Self:
        """Return the strategy with the settings filled in that depend on the parameters; they join the run's header."""
        return self

    def field(self, seed: int, genome: Genome) -> Field:
        """Return the noise field of a run: dense noise unless this is overridden."""
        return Field(seed)

    def init(self, theta: Tensor) -> S:
        """Return the State before the first generation. It has an attribute ``theta``, the weights to be measured."""

    def values(self, state: S, generation: int) -> dict[str, float]:
        """Return the values of the schedules in a generation; a journal keeps them."""

    def ask(self, state: S, field: Field, generation: int, values: Mapping[str, float]) -> Candidates:
        """Describe the members of a generation."""

    def tell(self, state: S, result: GenerationResult, field: Field, *, maximize: bool, start: int = 0) -> S:
        """Return the State after a generation; ``start`` is the first column that ``state`` holds."""


AnyStrategy = Strategy[Any]


class SummedStrategy(Strategy[S], Protocol[S]):
    """A strategy whose update is a sum over members, which ranks of a fleet can compute in shards (semi-updates)."""

    @property
    def shards(self) -> int: ...

    def weights(self, scores: NDArray[np.float32], *, maximize: bool) -> NDArray[np.int64] | None:
        """Return an integer weight for each member, or None where no score is finite."""

    @property
    def weight_magnitude(self) -> int | None:
        """A bound of the sum of absolute weights, if a GPU can compute them from scores that the host does not have."""
        return None

    def device_weights(self, scores: Tensor, *, maximize: bool) -> MemberWeights:
        """Return the weights of members whose scores are in the memory of a device; some of them must be finite."""
        raise NotImplementedError

    def sums(self, noise: Noise, weights: NDArray[np.int64] | MemberWeights, span: Span) -> Tensor:
        """Return the exact sums over some members that an update is made of: (sums, parameters)."""

    def step(self, state: S, sums: Tensor, result: GenerationResult, field: Field, *, start: int = 0) -> S:
        """Return the State after a generation, from the sums over all members."""


class GradientStrategy(Strategy[S], Protocol[S]):
    """A strategy of kind ``differentiate``: some of its generations need a gradient, some score samples around it."""

    @property
    def slices(self) -> int: ...  # parts of a batch whose gradients are computed apart

    @property
    def per_worker(self) -> bool: ...  # whether batch size and slices are those of each rank

    @property
    def wire(self) -> Wire: ...

    @property
    def select_on(self) -> Literal["batch", "dev"]: ...

    def differentiates(self, generation: int) -> bool:
        """Return whether a generation needs a full gradient."""

    def samples(self, generation: int) -> bool:
        """Return whether a generation scores samples."""

    def with_gradient(self, state: S, gradient: Tensor, generation: int, *, maximize: bool) -> S:
        """Return the State that includes a new gradient, before any step."""

    def reference_candidates(
        self, state: S, field: Field, generation: int, values: Mapping[str, float]
    ) -> Candidates | None:
        """Describe the one candidate that samples are compared with, or return None."""

    def direction(self, state: S) -> Tensor | None:
        """Return the gradient that the State carries, if it carries one."""


class MemberStrategy(Strategy[S], Protocol[S]):
    """A strategy of kind ``train_members``: members train by gradient descent between evaluations.

    Its State has the arrays ``members``, (members, parameters), and those that ``row_arrays`` names, with as many rows.
    """

    @property
    def epochs(self) -> int: ...  # epochs of a member between evaluations

    @property
    def workers_per_member(self) -> int: ...

    @property
    def row_arrays(self) -> tuple[str, ...]: ...

    def init_members(self, theta: Tensor, build: "MemberBuilder") -> Tensor:
        """Return the weights of the first members: (members, parameters)."""

    def with_members(self, theta: Tensor, members: Tensor) -> S:
        """Return a State of these members, none of which has been evaluated."""

    def step(
        self, theta: Tensor, gradient: Tensor, moments: Moments, values: Mapping[str, float]
    ) -> tuple[Tensor, Moments]:
        """Return a member's weights and moments after one step along a gradient of the loss."""

    def moments(self, state: S, row: int) -> Moments:
        """Return the optimizer's moments of a member."""

    def after_training(self, state: S, members: list[Tensor], moments: list[Moments]) -> S:
        """Return the State with the members as training has left them."""

    def select(self, state: S, result: GenerationResult, field: Field, *, maximize: bool) -> Any:
        """Return which members are replaced and by whose children, or None where no score is finite."""

    def rows_needed(self, selection: Any, members: range) -> set[tuple[int, str]]:
        """Return the rows, as (member, array), from which the next generation of some members is made."""

    def best_member(self, selection: Any) -> int | None:
        """Return the member that is better than ``theta``, if one is."""

    def apply_selection(
        self, state: S, selection: Any, members: range, row: "RowReader", field: Field, generation: int, start: int = 0
    ) -> S:
        """Return the State after a selection, for the members that this process holds; ``theta`` stays."""


class MemberBuilder(Protocol):
    """Makes the weights of a first member: reset to new initial weights, or with noise added."""

    def reset(self, member: int) -> Tensor: ...

    def perturb(self, members: NDArray[np.int64], sigma: float) -> Tensor: ...


class RowReader(Protocol):
    """Returns one row of an array of the State, wherever in the fleet it is held."""

    def __call__(self, member: int, array: str = "members") -> Tensor: ...
