"""The loop: evaluate, tell, journal."""

import copy
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from germline import noise
from germline.core import Core
from germline.errors import BadInput
from germline.fleet import Local
from germline.genome import frozen_sha256
from germline.header import header_of, revive, settings_of
from germline.journal import Journal, Record
from germline.objective import Batch, Batches, Data
from germline.population import Plan
from germline.recipes.recipe import Recipe
from germline.replay import apply_probe, replay
from germline.run import Row, Run
from germline.stopping import Stop

PATIENCE = 0.05  # seconds that generations may wait until they are on disk, together, where nobody hears of them before
TWICE = 0.5  # seconds between one Ctrl-C and the next: launchers pass on the one that a terminal has sent already


def run(training: Run, stop: Stop, callbacks: Sequence[Callable[[Run, Row], None]] = ()) -> dict[str, Any]:
    """The loop."""
    stop.check(training.core.objective, training.splits)
    if stop.target is not None and stop.target.metric.startswith("train_"):
        training.measured = ("train", *training.measured)
    patience = PATIENCE if all(getattr(callback, "patient", False) for callback in callbacks) else 0.0
    unheard: list[Row] = []
    with interruptible(training):
        try:
            while (reason := stop.reason(training)) is None:
                unheard.append(training.step(patience))
                if training.journal is None or training.journal.whole:
                    report(training, unheard, callbacks)
        finally:
            training.commit()
        report(training, unheard, callbacks)
    return training.finish(reason)


def report(training: Run, rows: list[Row], callbacks: Sequence[Callable[[Run, Row], None]]) -> None:
    """Says what is on disk to those who listen, once."""
    for row in rows:
        for callback in callbacks:
            callback(training, row)
    rows.clear()


@contextmanager
def interruptible(training: Run) -> Iterator[None]:
    """The first Ctrl-C ends the run after the generation at hand; the second ends it at once."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    began = float("inf")

    def interrupt(number: int, frame: Any) -> None:
        nonlocal began
        if time.monotonic() - began > TWICE or training.core.fleet.idle:
            raise KeyboardInterrupt
        if not training.interrupted:
            training.interrupted, began = True, time.monotonic()

    before = signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def begin(
    recipe: Recipe,
    path: Path,
    *,
    seed: int,
    fleet: Local,
    about: Mapping[str, Any],
    stop: Stop | None = None,
    named: bool = True,
) -> Run:
    """A new run; or, where the launcher of this process has started it again, the run that it began before."""
    fleet.new_run()
    same = {"launch": fleet.launch, "seed": seed, "recipe": about.get("recipe"), "command": about.get("command")}
    places = [path] if named else [file.parent for file in path.parent.glob("[!.]*/journal.sqlite")]
    found = (place for place in places if Journal.begins_with(place, same | {"strategy": recipe.strategy.name}))
    earlier = next(found, None) if fleet.launch is not None else None
    if not fleet.elect(earlier is not None):
        return start(recipe, path, seed=seed, fleet=fleet, about=about, stop=stop)
    return resume(recipe, Journal.open(earlier) if earlier is not None and fleet.keeper else None, fleet)


def start(
    recipe: Recipe, path: Path, *, seed: int, fleet: Local, about: Mapping[str, Any], stop: Stop | None = None
) -> Run:
    """A new run, with generation 0 on disk; nothing is written before everything has been tried."""
    stop = stop or Stop()

    def tried() -> tuple[Core, dict[str, Data], Batches | None]:
        core, splits, batches, batch = set_up(recipe, fleet, seed)
        stop.check(core.objective, splits)
        core.prepare(batch)
        return core, splits, batches

    core, splits, batches = fleet.together(tried)
    every = [recipe.evaluate_every, recipe.snapshot_every]
    share_weights(core)
    core.adopt(Plan(**fleet.told(asdict(core.settled))))
    header = header_of(core, splits, batches, {**about, "stop": asdict(stop)})
    fleet.join(lambda: facts_of(core, header) | {"times of evaluation and snapshots": every})
    journal = fleet.together(lambda: Journal.create(path, header, core.state) if fleet.keeper else None)
    training = Run(core, recipe, journal, Path(fleet.told(str(path))), splits, batches)
    choose_sigma(training)
    invite(training, header)
    core.divide()
    return training


def invite(training: Run, header: Mapping[str, Any]) -> None:
    """Lets in workers that come when they come: they begin with what the journal says, and with what was settled."""
    core = training.core
    settled = {"settings": settings_of(core.strategy), "evaluation": asdict(core.settled)}
    core.fleet.invite({**header, **settled}, lambda: core.sample(training.batch(0)))


def facts_of(core: Core, header: Mapping[str, Any]) -> dict[str, Any]:
    """What must be the same in all processes of a fleet."""
    return {
        "version of the noise": noise.VERSION,
        "kind of device": core.device.type,
        "limit at which to stop": header["stop"],
        "noise on its device": noise.field_digest(core.device),
        "recipe": [header["recipe"], header["recipe_settings"], header["batch_size"], header["maximize"]],
        "strategy": [header["strategy"], header["settings"], header["seed"]],
        "model (names, shapes or types of its parameters)": header["layout"],
        **{f"data set ({name})": fingerprint for name, fingerprint in header["data"].items()},
        "initial weights": header["initial_theta_sha256"],
        "value of the model's frozen parameters and buffers": header["fixed"],
    }


def share_weights(core: Core) -> None:
    """All begin with the weights of the process that keeps the journal, where that is asked for."""
    if core.fleet.sends_weights:
        assert core.module is not None
        core.module.load_state_dict(core.fleet.shared(dict(core.module.state_dict())))
        core.state = core.initial(core.genome.read(core.module, core.device))
        core.evaluator = None


def set_up(recipe: Recipe, fleet: Local, seed: int) -> tuple[Core, dict[str, Data], Batches | None, Batch | None]:
    """A recipe made ready and tried on its first batch; nothing is written."""
    splits = recipe.splits()
    core = Core(recipe.model, recipe.strategy, recipe.goal(), fleet, seed, None, recipe.dtype, recipe.dropout)
    batches = batches_of(recipe, splits, seed, fleet.size if getattr(core.strategy, "per_worker", False) else 1)
    batch = batches.batch(0, core.device) if batches is not None else None
    core.try_out(batch)
    return core, splits, batches, batch


def choose_sigma(training: Run) -> None:
    """Where sigma is auto, probes and journals the choice."""
    core = training.core
    if getattr(core.strategy, "sigma", None) != "auto" or core.strategy.needs_gradient:
        return
    began = time.perf_counter()
    batch = training.batch(0)
    told = core.probe(batch)
    samples = told.scores.size * (batch.size if batch else 1)
    mine = {"seconds": round(time.perf_counter() - began, 6), "samples": samples, "bytes": core.fleet.traffic()}
    side = core.fleet.told(mine)
    if training.journal is not None:
        training.journal.append(told, None, side)
        training.journal.commit()
    apply_probe(training, Record(told, None, side))


def resume(recipe: Recipe, journal: Journal | None, fleet: Local) -> Run:
    """A run as its journal left it, ready for the next generation; of a fleet, only one process has the journal."""
    training = fleet.together(lambda: rebuild(recipe, journal, fleet))
    core = training.core
    fleet.join(lambda: {"noise on its device": noise.field_digest(core.device), "kind of device": core.device.type})
    fleet.attended(lambda: replay(training))
    sigma = getattr(core.strategy, "sigma", None)
    kept = ("generation", "seconds", "samples", "evaluations", "metrics")
    known = {name: getattr(training, name) for name in kept}
    known, plan, sigma = fleet.told((known, asdict(core.settled), sigma if isinstance(sigma, float) else None))
    for name, value in known.items():
        setattr(training, name, value)
    core.adopt(Plan(**plan))
    if getattr(core.strategy, "sigma", None) == "auto" and sigma is not None:
        core.strategy = replace(core.strategy, sigma=sigma)  # type: ignore[type-var]
    core.state = fleet.shared(core.state)
    choose_sigma(training)
    if training.journal is not None:
        invite(training, training.journal.header)
    core.divide()
    return training


def rebuild(recipe: Recipe, journal: Journal | None, fleet: Local) -> Run:
    """A run before its first generation, from the recipe it was begun with."""
    header, path = fleet.told((dict(journal.header), str(journal.path)) if journal is not None else ({}, ""))
    if fleet.sends_weights:
        model = copy.deepcopy(recipe.model)
        model.load_state_dict(fleet.shared(dict(model.state_dict())))
        recipe = replace(recipe, model=model)
    return rebuilt(recipe, header, fleet, Path(path), journal)


def rebuilt(recipe: Recipe, header: Mapping[str, Any], fleet: Local, path: Path, journal: Journal | None) -> Run:
    """The same from the head of its journal."""
    splits = recipe.splits()
    strategy = revive(header, recipe.strategy)
    core = Core(recipe.model, strategy, recipe.goal(), fleet, header["seed"], Plan(**header["evaluation"]))
    differences = {
        "model": (core.genome.describe(), header["layout"]),
        "number of shards": (getattr(core.strategy, "shards", 1), header["settings"].get("shards", 1)),
        "objective": (core.objective.maximize, header["maximize"]),
        "order of the batches": (recipe.shuffle, header.get("shuffle", True)),
        "value of the model's frozen parameters and buffers": (frozen_sha256(recipe.model), header["fixed"]),
    }
    if header["data"]:  # else batches are given one by one
        differences |= {f"{name} data": (data.fingerprint, header["data"].get(name)) for name, data in splits.items()}
    for what, (here, there) in differences.items():
        if here != there:
            raise BadInput(f"The {what} is not that of {path}: a run goes on only with what it began with.")
    batches = batches_of(replace(recipe, batch_size=header["batch_size"]), splits, header["seed"])
    core.try_out(batches.batch(0, core.device) if batches is not None else None)
    return Run(core, recipe, journal, path, splits, batches)


def batches_of(recipe: Recipe, splits: dict[str, Data], seed: int, workers: int = 1) -> Batches | None:
    """The batches of a run; of so many workers, where each has a batch of its own."""
    if "train" not in splits:
        return None
    train = splits["train"]
    size = recipe.batch_size or train.batch_size or train.length
    return Batches(train, min(workers * size, train.length), seed, recipe.shuffle)
