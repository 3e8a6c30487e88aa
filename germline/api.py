"""The Python interface for whole runs: ``train``."""

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import nn

from germline.arguments import check_arguments
from germline.engine import loop, opening
from germline.engine.header import restore_strategy, translate_header_errors
from germline.engine.journal import Journal, free_directory
from germline.engine.session import Session
from germline.engine.stopping import Stop, Target
from germline.errors import BadInput, count
from germline.fleet.local import Local
from germline.fleet.protocol import Fleet
from germline.genome import refuse_inference_tensors
from germline.metrics import Metrics
from germline.population import DType
from germline.recipes import Recipe
from germline.reporting.numbers import format_metrics, preferred_metric
from germline.reporting.report import render_result, write_report, write_results
from germline.reporting.watching import is_watched
from germline.strategies import AUTO, AnyStrategy, find_strategy


@dataclass(frozen=True)
class Result:
    """A finished run. A notebook shows it with a curve.

    Attributes:
        model: The trained model: the module that was given to ``train``, in evaluation mode, with its new weights.
        history: One row per generation, a dict of numbers.
        run: The directory of the run; None if it was trained with ``run=False``.
        summary: The numbers that the run came to, as ``germline train --json`` prints them.
        header: What the run was made of, as its journal says.

    >>> import tempfile
    >>> from torch import nn
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     result = train(nn.Linear(2, 1), objective=lambda net: net.bias.item() ** 2, generations=5, run=directory)
    >>> len(result.history), result.summary["stopped_by"], sorted(result.history[0])[:3]
    (5, 'generations', ['best', 'generation', 'lr'])
    """

    model: nn.Module
    history: list[dict[str, Any]]
    run: Path | None
    summary: dict[str, Any]
    header: Mapping[str, Any] = field(default_factory=dict)

    def __repr__(self) -> str:
        metrics = format_metrics(self.summary["metrics"], ", ")
        generations = count(self.summary["generations"], "generation")
        place = f"; {self.run}" if self.run is not None else ""
        return f"Result({generations} in {self.summary['seconds']:.1f} s: {metrics}{place})"

    def _repr_html_(self) -> str:
        name = f"{type(self.model).__name__}, {count(self.summary['generations'], 'generation')}"
        return render_result(name, self.history, self.summary, preferred_metric(self.summary["metrics"]))

    def report(self, file: str | Path | None = None) -> Path:
        """Write the HTML report of the run, and return its path.

        Args:
            file: The file to write; report.html in the directory of the run if not given.
        """
        if file is None and self.run is None:
            raise BadInput('This run has no directory: say where to write its report, as in report("report.html").')
        path = Path(file) if file is not None else cast(Path, self.run) / "report.html"
        name = self.run.name if self.run is not None else type(self.model).__name__
        write_report([(name, self.header, self.history, self.summary)], path)
        return path


@check_arguments
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
    metrics: Metrics | None = None,
    strategy: AnyStrategy | str | None = None,
    batch_size: int | None = None,
    generations: int | None = None,
    seconds: float | None = None,
    evaluations: int | None = None,
    interactions: int | None = None,
    target: str | tuple[str, float] | None = None,
    patience: int | None = None,
    keep: Literal["last", "best"] | None = None,
    seed: int = 0,
    fleet: Fleet | None = None,
    dtype: DType = "auto",
    dropout: bool = False,
    trainable: str | Sequence[str] | None = None,
    run: str | Path | Literal[False] | None = None,
    resume: str | Path | None = None,
    evaluate_every: int = 10,
    snapshot_every: int = 100,
    keep_snapshots: int | None = None,
    callbacks: loop.Callback | Sequence[loop.Callback] = (),
    progress: bool | None = None,
) -> Result:
    """Train a module by evolution, and leave its new weights in it.

    Args:
        model: The module to train; its trainable parameters are those with ``requires_grad``.
        data: The training data: a tuple or dict of tensors or NumPy arrays, a list of tuples (input, target), a Dataset
            or a DataLoader.
        loss: A function of (output, target) to minimize. Give one of ``loss``, ``score`` and ``objective``.
        score: A function of (output, target), differentiable or not, to maximize unless ``maximize=False``.
        objective: A function of the model, or of (model, seed), to minimize unless ``maximize=True``.
        maximize: Whether a score or an objective is maximized.
        dev: Data that is scored every ``evaluate_every`` generations.
        test: Further data that is scored, like ``dev``.
        metrics: Functions of (output, target): a dict by name, a list, or one; accuracy for classes if not given.
        strategy: The algorithm, or its name, such as ``"snes"`` or ``"module:Class"``. If it is not given, or
            ``"auto"``, it is chosen by the model, the score and the budget; with ``resume`` it is that of the run.
        batch_size: Examples of a generation; a DataLoader's batch size, else all of the data.
        generations: End after this many generations in all; 300 if no limit is given.
        seconds: End after this many seconds of training.
        evaluations: End after this many forward passes of a batch, by all members together.
        interactions: End after this many steps of the simulators of ``gl.Gym``.
        target: End when a metric reaches a value: ``"dev_accuracy=0.95"`` or ``("dev_accuracy", 0.95)``.
        patience: End when this many evaluations of ``dev`` in a row have brought no better metric.
        keep: Which weights the result has: those of the ``"last"`` generation, or of the one with the ``"best"``
            metric of ``dev``; ``"last"`` if not given or, with ``resume``, as the run was started.
        seed: The seed of the run's random numbers.
        fleet: Who evaluates the members; ``gl.Local()`` if not given.
        dtype: The type of the members' arithmetic: ``"auto"``, ``"float32"`` or ``"bfloat16"``.
        dropout: Whether members are scored with their dropout layers active.
        trainable: The parameters to train, by patterns of their names, such as ``["*.lora_*", "head"]``: sets
            ``requires_grad`` of all parameters. Give it again to resume.
        run: The directory to create; one under ``runs`` if not given. With False, nothing is left on disk.
        resume: The directory of a run to go on with.
        evaluate_every: Generations between scores of ``dev`` and ``test``.
        snapshot_every: Generations between snapshots.
        keep_snapshots: How many of the latest snapshots are kept besides the first; by default as many as take 2 GB
            together, but at least two.
        callbacks: A function of (session, row), or several, to call after each generation; if one returns True, the
            run stops.
        progress: Whether progress is shown; by default on a terminal and in a notebook.

    Returns:
        The trained model, one row per generation, the directory of the run and its summary.

    Raises:
        BadInput: If something that was asked for cannot be done; the message says what to do about it.
        KeyboardInterrupt: If the run was interrupted; every finished generation is on disk.

    >>> import tempfile, torch
    >>> from torch import nn
    >>> x = torch.randn(64, 3, generator=torch.Generator().manual_seed(0))
    >>> model = nn.Linear(3, 1)
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     result = train(model, data=(x, x.sum(1, keepdim=True)), loss=nn.functional.mse_loss, generations=100,
    ...                    strategy="openai-es", run=directory + "/sum")
    >>> result.history[-1]["mean"] < 0.1 * result.history[0]["mean"]
    True
    """
    refuse_inference_tensors(model)
    if all(limit is None for limit in (generations, seconds, target, evaluations, interactions)):
        generations = 300
    stop = Stop(generations, seconds, Target.parse(target), evaluations, patience, interactions)
    fleet = fleet or Local()
    called = [callbacks] if callable(callbacks) else list(callbacks)
    strategy = None if strategy == "auto" else strategy
    chosen = find_strategy(strategy)() if isinstance(strategy, str) else strategy
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
        chosen or AUTO,
        batch_size=batch_size,
        dtype=dtype,
        dropout=dropout,
        evaluate_every=evaluate_every,
        snapshot_every=snapshot_every,
        keep_snapshots=keep_snapshots,
        trainable=trainable,
    )
    if not recipe.names_strategy:
        recipe = recipe.with_strategy(recipe.choose_strategy(evaluations))
    with (
        torch.inference_mode(False),  # tensors of inference mode do not tell when they are changed
        tempfile.TemporaryDirectory(prefix="germline-") if run is False else nullcontext() as temporary,
        _shown(progress, stop, fleet) as shown,
    ):
        if resume is not None:
            if run is not None:
                raise BadInput("Give run= for a new run or resume= for one to go on with, not both.")
            session = _resume(recipe, Path(resume), fleet, strategy)
            if keep is not None:
                session.keep(keep)
        else:
            named = run if temporary is None else f"{temporary}/run"
            path = Path(named) if named else free_directory(Path("runs") / type(model).__name__.lower())
            about = {"keep": keep or "last"}
            session = opening.start_or_continue(
                recipe, path, seed=seed, fleet=fleet, about=about, stop=stop, is_named=bool(named)
            )
        try:
            summary = loop.run(session, stop, [*shown, *called])
            header = fleet.group.broadcast(dict(session.journal.header) if session.journal is not None else {})
            rows = session.rows()
            if temporary is None:
                write_results(session, rows, summary)
        finally:
            if session.journal is not None:
                session.journal.close()
    model.load_state_dict(session.model().state_dict())
    model.train().eval()  # some modules clear what they have cached when they begin to train
    if summary["stopped_by"] == "interrupt":
        how = f"go on with resume={str(session.path)!r}" if temporary is None else "nothing is on disk (run=False)"
        raise KeyboardInterrupt(f"interrupted; {how}")
    if temporary is not None:
        summary["run"] = None
    return Result(model, rows, session.path if temporary is None else None, summary, header)


@contextmanager
def _shown(progress: bool | None, stop: Stop, fleet: Fleet) -> Iterator[list[loop.Callback]]:
    """Show the progress of a run within the block, if it is wanted; yield the callbacks that do so."""
    if not (is_watched() if progress is None else progress) or fleet.group.rank:
        yield []
        return
    from germline.reporting.progress import Progress

    with Progress(stop).shown() as shown:
        yield [shown]


def _resume(recipe: Recipe, path: Path, fleet: Fleet, strategy: AnyStrategy | str | None) -> Session:
    """Resume a run by the strategy that the user has given, or by its own one of this package."""
    given = recipe.strategy if strategy is not None else None
    fleet.start_run()
    if not fleet.group.elect((path / "journal.sqlite").is_file()) and fleet.group.size > 1:
        raise BadInput(f"No process of the fleet has the run {path}.")
    journal = Journal.open(path) if fleet.group.owns_journal else None
    header = fleet.group.broadcast(dict(journal.header) if journal is not None else {})

    def choose_strategy() -> AnyStrategy:
        with translate_header_errors(str(path)):
            chosen = restore_strategy(header, given)
        if given is None or isinstance(strategy, str):  # a name says nothing about the settings
            return chosen
        opening.check_same_settings(given, header, str(path))
        return given

    return opening.resume(recipe.with_strategy(fleet.group.all_or_none(choose_strategy)), journal, fleet)
