"""The loop: evaluate, tell, journal."""

import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from germline.core import Core
from germline.errors import BadInput
from germline.fleet import Local
from germline.genome import fixed_sha256
from germline.header import header_of, revive
from germline.journal import Journal, Record
from germline.objective import Batch, Batches, Data
from germline.population import Plan
from germline.recipe import Recipe
from germline.replay import replay, settle
from germline.run import Row, Run
from germline.stopping import Stop


def run(training: Run, stop: Stop, callbacks: Sequence[Callable[[Run, Row], None]] = ()) -> dict[str, Any]:
    """The loop."""
    stop.check(training.core.objective, training.splits)
    if stop.target is not None and stop.target.metric.startswith("train_"):
        training.measured = ("train", *training.measured)
    with interruptible(training):
        while (reason := stop.reason(training)) is None:
            row = training.step()
            for callback in callbacks:
                callback(training, row)
    return training.finish(reason)


@contextmanager
def interruptible(training: Run) -> Iterator[None]:
    """The first Ctrl-C ends the run after the generation at hand; the second ends it at once."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number: int, frame: Any) -> None:
        if training.interrupted:
            raise KeyboardInterrupt
        training.interrupted = True

    before = signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def start(
    recipe: Recipe, path: Path, *, seed: int, fleet: Local, about: Mapping[str, Any], stop: Stop | None = None
) -> Run:
    """A new run, with generation 0 on disk; nothing is written before everything has been tried."""
    core, splits, batches, batch = set_up(recipe, fleet, seed)
    stop = stop or Stop()
    stop.check(core.objective, splits)
    core.prepare(batch)
    header = header_of(core, splits, batches, {**about, "stop": asdict(stop)})
    training = Run(core, recipe, Journal.create(path, header, core.state), splits, batches)
    choose_sigma(training)
    return training


def set_up(recipe: Recipe, fleet: Local, seed: int) -> tuple[Core, dict[str, Data], Batches | None, Batch | None]:
    """A recipe made ready and tried on its first batch; nothing is written."""
    splits = recipe.splits()
    core = Core(recipe.model, recipe.strategy, recipe.goal(), fleet, seed, None, recipe.dtype, recipe.dropout)
    batches = batches_of(recipe, splits, seed)
    batch = batches.batch(0, core.device) if batches is not None else None
    core.try_out(batch)
    return core, splits, batches, batch


def choose_sigma(training: Run) -> None:
    """Where sigma is auto, probes and journals the choice."""
    core = training.core
    if getattr(core.strategy, "sigma", None) != "auto":
        return
    began = time.perf_counter()
    batch = training.batch(0)
    told = core.probe(batch)
    samples = told.scores.size * (batch.size if batch else 1)
    side = {"seconds": round(time.perf_counter() - began, 6), "samples": samples, "bytes": [0, 0]}
    training.journal.append(told, None, side)
    settle(training, Record(told, None, side))


def resume(recipe: Recipe, journal: Journal, fleet: Local) -> Run:
    """A run as its journal left it, ready for the next generation."""
    training = rebuild(recipe, journal, fleet)
    replay(training)
    choose_sigma(training)
    return training


def rebuild(recipe: Recipe, journal: Journal, fleet: Local) -> Run:
    """A run before its first generation, from the recipe it was begun with."""
    header = journal.header
    splits = recipe.splits()
    strategy = revive(header, recipe.strategy)
    core = Core(recipe.model, strategy, recipe.goal(), fleet, header["seed"], Plan(**header["evaluation"]))
    differences = {
        "model": (core.genome.described(), header["layout"]),
        "objective": (core.objective.maximize, header["maximize"]),
        "value of the model's frozen parameters and buffers": (fixed_sha256(recipe.model), header["fixed"]),
        **{f"{name} data": (data.fingerprint, header["data"].get(name)) for name, data in splits.items()},
    }
    for what, (here, there) in differences.items():
        if here != there:
            raise BadInput(f"The {what} is not that of {journal.path}: a run goes on only with what it began with.")
    batches = batches_of(replace(recipe, batch_size=header["batch_size"]), splits, header["seed"])
    core.try_out(batches.batch(0, core.device) if batches is not None else None)
    return Run(core, recipe, journal, splits, batches)


def batches_of(recipe: Recipe, splits: dict[str, Data], seed: int) -> Batches | None:
    if "train" not in splits:
        return None
    train = splits["train"]
    size = recipe.batch_size or train.batch_size or train.length
    return Batches(train, min(size, train.length), seed)
