"""A run from its journal: a State is a fold over the records, and everything here is that fold."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from germline.engine.journal import PROBE, Journal, Record, content_sha256
from germline.engine.session import Session
from germline.errors import BadInput, count
from germline.genome import theta_sha256
from germline.machine import product_mode
from germline.strategies import pack


def replay(session: Session, until: int | None = None, *, from_start: bool = False) -> None:
    """Fold the journal's records into a session's State.

    Args:
        session: A session before its first generation, with a journal.
        until: How many generations to replay; all of them if None.
        from_start: Whether to start from snapshot 0 and not from the latest one.
    """
    journal, device = session.require_journal(), session.scorer.device
    available = journal.length()
    length = available if until is None else until
    if length > available:
        raise BadInput(f"{journal.path} has {count(available, 'generation')}, so there is no generation {length}.")
    first, session.state = journal.latest(session.state, 0 if from_start else length, device)
    if first == 0 and theta_sha256(session.state.theta) != journal.header["initial_theta_sha256"]:
        raise BadInput(f"Snapshot 0 of {journal.path} is not the one the run began with: restore it from a copy.")
    for record in journal.records():  # one at a time: a long run does not fit into memory
        generation = record.result.generation
        if generation == PROBE:
            apply_probe(session, record)
            continue
        if generation == length and until is not None:
            break
        if first <= generation < length:
            fold(session, record)
            if record.theta_sha256 not in (None, theta_sha256(session.state.theta)):
                first = skip_to_snapshot(session, generation + 1, length, journal)
        if generation < length:
            with translate_record_errors(session, generation):
                session.note(record)
            session.generation = generation + 1


def fold(session: Session, record: Record) -> None:
    """Advance a session's State by one record; a gradient, which records do not hold, is computed again."""
    generation, members = record.result.generation, record.result.scores.size
    if session.strategy.kind == "evolve" and members != session.strategy.population:
        population = f"{members} scores for a population of {session.strategy.population}"
        raise BadInput(f"Record {generation} of {session.path} has {population}: restore the run from a copy.")
    if session.driver.records_theta:
        session.prepare(session.batch(generation))
    with translate_record_errors(session, generation):
        session.tell(session.driver.restore(session, record.result))


@contextmanager
def translate_record_errors(session: Session, generation: int) -> Iterator[None]:
    """Turn what a strategy raises into a sentence, where a record holds what no run has written."""
    try:
        yield
    except BadInput:
        raise
    except Exception as error:
        message = f"Record {generation} of {session.path} cannot be replayed ({type(error).__name__}: {error})"
        raise BadInput(f"{message}: restore the run from a copy.") from error


def skip_to_snapshot(session: Session, generation: int, length: int, journal: Journal) -> int:
    """Go on from the next snapshot, where backprop has other last bits than on the machine that wrote the journal."""
    later = [number for number in journal.snapshots() if generation <= number <= length]
    if not later:
        message = f"Generation {generation} of {journal.path} has other weights here: {find_cause(journal)}"
        raise BadInput(f"{message}, and there is no snapshot up to generation {length}.")
    session.state = journal.load(session.state, later[0], session.scorer.device)
    return later[0]


def find_cause(journal: Journal) -> str:
    """Return why backprop has other last bits here than in the run."""
    here = product_mode()
    there = journal.header.get("products", here)
    if there == here:
        return "backprop has other last bits on this machine"
    advice = "import germline before the first matrix product" if here == "OFF" else f"set MKL_CBWR={there}"
    if there == "OFF":  # MKL has no name for it
        advice = "a matrix product came before import germline there: set MKL_CBWR='', an empty text"
    return f"its matrix products are in MKL's mode {there}, those of this process in {here}; {advice}"


def apply_probe(session: Session, record: Record) -> None:
    """Set sigma to the one that the probe has chosen."""
    with translate_record_errors(session, PROBE):
        session.strategy = session.strategy.after_probe(record.result.values)
        session.probed = dict(record.result.values)
        session.add_totals(record)


def verify(session: Session) -> dict[str, Any]:
    """Replay everything from the beginning, and compare every hash and every snapshot on the way.

    Returns:
        The number of generations and snapshots, and the hash of the final weights.

    Raises:
        BadInput: If a record or a snapshot is not what the run replays to.
    """
    journal, device = session.require_journal(), session.scorer.device
    written, template, snapshots, checked = journal.written_length(), session.state, journal.snapshots(), 0
    replay(session, until=0, from_start=True)
    for record in journal.records():
        if record.result.generation == PROBE:
            continue
        fold(session, record)
        session.generation = record.result.generation + 1
        if record.theta_sha256 is not None and record.theta_sha256 != theta_sha256(session.state.theta):
            message = f"Generation {session.generation} of {journal.path} replays to other weights than it had"
            raise BadInput(f"{message}: {find_cause(journal)}.")
        if session.generation in snapshots:
            saved = journal.load(template, session.generation, device)
            if content_sha256(*pack(saved)) != content_sha256(*pack(session.state)):
                raise BadInput(f"Snapshot {session.generation} of {journal.path} is not what its records replay to.")
            checked += 1
    if session.generation < written:
        message = f"{journal.path} has {count(session.generation, 'generation')}, but {written} were written"
        advice = "copy the run again, with journal.sqlite-wal, the write-ahead log, and while no process writes to it"
        raise BadInput(f"{message}: {advice}.")
    final = theta_sha256(session.state.theta)
    return {"generations": session.generation, "snapshots": checked + 1, "theta_sha256": final}
