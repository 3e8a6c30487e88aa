"""A run from its journal: State is a fold over the records, and everything here is that fold."""

from dataclasses import replace
from typing import Any

from germline.core import Core
from germline.errors import BadInput
from germline.fleet import Local
from germline.genome import Genome, theta_sha256
from germline.header import revive
from germline.journal import PROBE, Journal, Record, content_sha256
from germline.objective import Objective
from germline.run import Run
from germline.strategies import AnyStrategy, pack


def reopen(journal: Journal, given: AnyStrategy | None = None) -> Run:
    """A run from its journal alone, for strategies that need no gradient: to be replayed, not to go on.

    Functions among its settings, which a journal does not hold, are taken from the strategy given.
    """
    header = journal.header
    nothing = Objective(lambda model: float("nan"), header["maximize"], of_model=True)
    genome = Genome.from_description(header["layout"])
    core = Core(None, revive(header, given, replayed=True), nothing, Local("cpu"), header["seed"], genome=genome)
    return Run(core, None, journal, journal.path, {}, None)


def replay(training: Run, until: int | None = None, *, from_start: bool = False) -> None:
    """Folds the journal's records into the State: from the latest snapshot, or all of them."""
    core, journal = training.core, training.kept
    records = list(journal.records())
    if records and records[0].result.generation == PROBE:
        apply_probe(training, records.pop(0))
    length = len(records) if until is None else until
    if length > len(records):
        raise BadInput(f"{journal.path} has {len(records)} generations, so there is no generation {length}.")
    first, core.state = journal.latest(core.state, 0 if from_start else length, core.device)
    if first == 0 and theta_sha256(core.state.theta) != journal.header["initial_theta_sha256"]:
        raise BadInput(f"Snapshot 0 of {journal.path} is not the one the run began with: restore it from a copy.")
    for record in records[:length]:
        generation = record.result.generation
        if generation >= first:
            fold(training, record)
            if record.theta_sha256 not in (None, theta_sha256(core.state.theta)):
                first = go_on_from_snapshot(core, generation + 1, length, journal)
        training.note(record)
        training.generation = generation + 1


def fold(training: Run, record: Record) -> None:
    """The State after one more record; a gradient, which records do not hold, is computed again."""
    core, result = training.core, record.result
    if core.rears:
        core.prepare(training.batch(result.generation))
        core.rear(result.generation, training.lessons(result.generation), training.exam)
        core.tell(result)
        return
    if core.strategy.needs_gradient and core.differentiating.differentiates(result.generation):
        again = core.differentiate(result.generation, training.batch(result.generation), result.values)
        result = replace(result, gradient=again.gradient)
    core.tell(result)


def go_on_from_snapshot(core: Core, generation: int, length: int, journal: Journal) -> int:
    """The next snapshot, where backprop gives other last bits than on the machine that wrote the journal."""
    later = [g for g in journal.snapshots() if generation <= g <= length]
    if not later:
        message = (
            f"Generation {generation} of {journal.path} comes out differently here: backprop gives other last bits "
        )
        raise BadInput(f"{message}on this machine, and there is no snapshot between it and generation {length}.")
    core.state = journal.load(core.state, later[0], core.device)
    return later[0]


def apply_probe(training: Run, record: Record) -> None:
    """From the probe's record on, sigma is the one that it chose."""
    training.core.strategy = replace(training.core.strategy, sigma=record.result.values["sigma"])  # type: ignore[type-var]
    training.account(record)


def verify(training: Run) -> dict[str, Any]:
    """Replays everything from the beginning and compares every hash and every snapshot on the way."""
    journal, core = training.kept, training.core
    template, snapshots, checked = core.state, journal.snapshots(), 0
    replay(training, until=0, from_start=True)
    for record in journal.records():
        if record.result.generation == PROBE:
            continue
        fold(training, record)
        training.generation = record.result.generation + 1
        if record.theta_sha256 is not None and record.theta_sha256 != theta_sha256(core.state.theta):
            raise BadInput(f"Generation {training.generation} of {journal.path} replays to other weights than it had.")
        if training.generation in snapshots:
            saved = journal.load(template, training.generation, core.device)
            if content_sha256(*pack(saved)) != content_sha256(*pack(core.state)):
                raise BadInput(f"Snapshot {training.generation} of {journal.path} is not what its records replay to.")
            checked += 1
    return {
        "generations": training.generation,
        "snapshots": checked + 1,
        "theta_sha256": theta_sha256(core.state.theta),
    }
