"""The two calls of the Python interface: ``train`` for a whole run, ``Search`` for one's own loop."""

import dataclasses
import hashlib
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from germline import noise, trainer
from germline.core import Core
from germline.errors import BadInput
from germline.fleet import Local
from germline.genome import theta_sha256
from germline.header import header_of, revive, settings_of
from germline.journal import Journal, content_sha256
from germline.objective import Batch, Metric, build_objective, iterate_tensors, tensor_bytes
from germline.population import DType, Plan, refresh_statistics
from germline.recipes.recipe import Recipe
from germline.run import Row, Run
from germline.stopping import Stop, Target
from germline.strategies import AnyStrategy, OpenAIES, pack, unpack
from germline.strategies.settings import check_choice


@dataclass(frozen=True)
class Result:
    """A finished run: the trained model, one row per generation, the directory, and the numbers it came to.

    >>> import tempfile
    >>> from torch import nn
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     result = train(nn.Linear(2, 1), objective=lambda net: net.bias.item() ** 2, generations=5, run=directory)
    >>> len(result.history), result.summary["stopped_by"], sorted(result.history[0])[:3]
    (5, 'generations', ['best', 'generation', 'lr'])
    """

    model: nn.Module
    history: list[dict[str, Any]]
    run: Path
    summary: dict[str, Any]


def train(
    model: nn.Module,
    data: Any = None,
    *,
    loss: Callable[..., Any] | None = None,
    score: Callable[..., Any] | None = None,
    objective: Callable[..., Any] | None = None,
    maximize: bool | None = None,
    dev: Any = None,
    test: Any = None,
    metrics: Mapping[str, Metric] | None = None,
    strategy: AnyStrategy | None = None,
    batch_size: int | None = None,
    generations: int | None = None,
    seconds: float | None = None,
    target: str | tuple[str, float] | None = None,
    seed: int = 0,
    fleet: Local | None = None,
    dtype: DType = "auto",
    dropout: bool = False,
    run: str | Path | None = None,
    resume: str | Path | None = None,
    evaluate_every: int = 10,
    snapshot_every: int = 100,
    callbacks: Sequence[Callable[[Run, Row], None]] = (),
) -> Result:
    """Trains a module by evolution and leaves its new weights in it.

    ``data`` is a tuple of tensors, a Dataset or a DataLoader. Give one of ``loss`` (minimized) and ``score``
    (maximized), functions of (output, target), or ``objective``, a function of the model. The run ends at the first of
    ``generations`` (300 if nothing is said), ``seconds`` and ``target``, a metric and its value. ``run`` is the
    directory to be made, ``resume`` one to go on with. ``dtype`` is that of the members' arithmetic (auto, float32 or
    bfloat16); with ``dropout`` members are scored with their dropout layers at work.

    >>> import tempfile, torch
    >>> from torch import nn
    >>> x = torch.randn(64, 3, generator=torch.Generator().manual_seed(0))
    >>> model = nn.Linear(3, 1)
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     result = train(model, data=(x, x.sum(1, keepdim=True)), loss=nn.functional.mse_loss, generations=100,
    ...                    strategy=OpenAIES(population=32, lr=0.1), run=directory + "/sum")
    >>> result.history[-1]["mean"] < 0.1 * result.history[0]["mean"]
    True
    """
    if generations is None and seconds is None and target is None:
        generations = 300
    recipe = Recipe(
        model,
        data,
        dev,
        test,
        loss,
        score,
        objective,
        maximize,
        metrics,
        strategy or OpenAIES(),
        batch_size=batch_size,
        dtype=dtype,
        dropout=dropout,
        evaluate_every=evaluate_every,
        snapshot_every=snapshot_every,
    )
    fleet, stop = fleet or Local(), Stop(generations, seconds, Target.parse(target))
    with torch.inference_mode(False):  # whose tensors do not tell when they are changed
        if resume is not None:
            fleet.new_run()
            if run is not None:
                raise BadInput("Give run= for a new run or resume= for one to go on with, not both.")
            if not fleet.elect((Path(resume) / "journal.sqlite").is_file()) and fleet.size > 1:
                raise BadInput(f"No process of the fleet has the run {resume}.")
            training = trainer.resume(recipe, Journal.open(Path(resume)) if fleet.keeper else None, fleet)
        else:
            path = Path(run) if run is not None else free_directory(Path("runs"), type(model).__name__.lower())
            training = trainer.begin(recipe, path, seed=seed, fleet=fleet, about={}, stop=stop, named=run is not None)
        try:
            summary = trainer.run(training, stop, callbacks)
            rows = training.rows()
        finally:
            if training.journal is not None:
                training.journal.close()
    model.load_state_dict(training.model().state_dict())
    if summary["stopped_by"] == "interrupt":
        raise KeyboardInterrupt(f"interrupted; go on with resume={str(training.path)!r}")
    return Result(model, rows, training.path, summary)


def batch_sha256(batch: Batch | None) -> str:
    digest = hashlib.sha256()
    for tensor in iterate_tensors([batch.args, batch.kwargs, batch.target]) if batch is not None else ():
        digest.update(f"{tensor.dtype} {tuple(tensor.shape)};".encode())
        digest.update(tensor_bytes(tensor))
    return digest.hexdigest()


def free_directory(runs: Path, name: str) -> Path:
    """runs/name, or the first of runs/name-2, runs/name-3, ... that is not there yet."""
    candidates = (runs / (name if i == 1 else f"{name}-{i}") for i in range(1, 1_000_000))
    return next(path for path in candidates if not path.exists())


class Search:
    """Evolution in one's own loop: ``step`` takes a batch, scores a generation on it and moves the center.

    >>> import torch
    >>> from torch import nn
    >>> model = nn.Linear(3, 1)
    >>> search = Search(model, OpenAIES(population=32, lr=0.1), loss=nn.functional.mse_loss, seed=0)
    >>> for x in torch.randn(50, 64, 3, generator=torch.Generator().manual_seed(0)):
    ...     scores = search.step(x, x.sum(1, keepdim=True))
    >>> scores.shape, bool(nn.functional.mse_loss(search.model(x), x.sum(1, keepdim=True)) < 0.3)
    ((32,), True)
    """

    def __init__(
        self,
        model: nn.Module,
        strategy: AnyStrategy | None = None,
        *,
        loss: Callable[..., Any] | None = None,
        score: Callable[..., Any] | None = None,
        objective: Callable[..., Any] | None = None,
        maximize: bool | None = None,
        seed: int = 0,
        fleet: Local | None = None,
        dtype: DType = "auto",
        dropout: bool = False,
    ) -> None:
        goal = build_objective(loss, score, objective, maximize, None)
        check_choice("dtype", dtype, typing.get_args(DType))
        strategy = strategy or OpenAIES()
        if getattr(strategy, "rears", False) or getattr(strategy, "select_on", "batch") == "dev":
            raise BadInput(f"The strategy {strategy.name} needs data of its own, not batches: use gl.train.")
        self._module = model
        with torch.inference_mode(False):
            self._core = Core(model, strategy, goal, fleet or Local(), seed, None, dtype, dropout)
        self._batch: Batch | None = None
        self._shapes: Any = ()  # of the inputs that were last tried
        self._joined = False
        self.generation = 0

    def step(self, *batch: Any) -> NDArray[np.float32]:
        """One generation on a batch: inputs and target, or one dict; nothing for an objective of the model."""
        with torch.inference_mode(False):  # whose tensors do not tell when they are changed
            return self._step(batch)

    def _step(self, batch: tuple[Any, ...]) -> NDArray[np.float32]:
        core = self._core
        if batch:
            self._batch = Batch.from_raw(batch[0] if len(batch) == 1 else batch, core.device)
        elif not core.objective.of_model:
            raise BadInput("Search.step needs a batch: step(inputs, target), or step(batch) with a dict.")
        shapes = (
            [tensor.shape for tensor in iterate_tensors([self._batch.args, self._batch.kwargs])]
            if self._batch
            else None
        )
        if shapes != self._shapes:
            core.try_out(self._batch)
            self._shapes = shapes
        first, self._joined = not self._joined, True
        if first:
            self._join()
        core.given = self._batch
        core.fleet.begin(0.0, False, batch_sha256(self._batch) if core.fleet.size > 1 else "")
        if getattr(core.strategy, "sigma", None) == "auto":
            chosen = core.probe(self._batch).values["sigma"]
            core.strategy = dataclasses.replace(core.strategy, sigma=chosen)  # type: ignore[type-var]
        if first:
            assert core.module is not None
            begun = theta_sha256(core.genome.read(core.module, core.device))
            header = header_of(core, {}, None, {}) | {"initial_theta_sha256": begun}
            core.fleet.invite(header, lambda: core.sample(self._batch), self._batch)
            core.divide()
        told = core.evaluate(self.generation, self._batch)
        core.advance(told)
        self.generation += 1
        return told.scores

    def _join(self) -> None:
        """Before the first generation: makes sure that all processes of a fleet are about the same search."""
        core = self._core
        core.fleet.new_run()
        trainer.share_weights(core)
        core.prepare(self._batch)
        core.adopt(Plan(**core.fleet.told(dataclasses.asdict(core.settled))))
        facts: dict[str, Any] = {
            "noise on its device": noise.field_digest(core.device),
            "model": core.genome.fingerprint,
        }
        facts |= {"strategy": [core.strategy.name, settings_of(core.strategy), core.seed]}
        facts |= {"kind of device": core.device.type, "generation": self.generation}
        facts |= {"initial weights": content_sha256(*pack(core.state))}
        core.fleet.join(lambda: facts)

    @property
    def model(self) -> nn.Module:
        """The user's module, with the weights of the center written into it."""
        self._core.genome.write(self._core.state.theta, self._module)
        if self._batch is not None:
            device = next(self._module.parameters()).device
            refresh_statistics(self._module, iter([self._batch.to(device)]))
        return self._module

    def state_dict(self) -> dict[str, Any]:
        """Everything that a search needs to go on: plain values and tensors, for ``torch.save``.

        In a fleet all processes must ask for it, and all get it.
        """
        core = self._core
        tree, tensors = pack(core.fleet.shared(core.whole()))
        settings = settings_of(core.strategy)
        about: dict[str, Any] = {"strategy": core.strategy.name, "settings": settings, "seed": core.seed}
        about |= {"evaluation": dataclasses.asdict(core.plan) if core.plan is not None else None}
        about |= {"layout": core.genome.fingerprint, "generation": self.generation}
        return {**about, "tree": tree, "tensors": {name: tensor.clone() for name, tensor in tensors.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from a ``state_dict``; the search must be of the same model, with the same objective."""
        core = self._core
        if state["layout"] != core.genome.fingerprint:
            raise BadInput("This state is of another model: its parameters have other names or shapes.")
        strategy = revive(state, core.strategy)
        plan = Plan(**state["evaluation"]) if state["evaluation"] is not None else None
        fresh = Core(self._module, strategy, core.objective, core.fleet, state["seed"], plan, core.dtype, core.dropout)
        tensors = {name: tensor.to(fresh.device) for name, tensor in state["tensors"].items()}
        fresh.state = unpack(fresh.state, state["tree"], tensors)
        self._core, self.generation, self._joined = fresh, state["generation"], False
