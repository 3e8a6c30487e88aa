"""The journal holds all of a run, is small, and is never silently wrong."""

import dataclasses
import random
import shutil
import sqlite3
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn

import germline as gl
from germline import OpenAIES, Recipe
from germline.engine import loop, opening, replay
from germline.engine.files import write_tensors
from germline.engine.history import Row, read_rows
from germline.engine.journal import Journal, Record
from germline.engine.session import Session
from germline.engine.stopping import Stop
from germline.errors import BadInput, MachineError
from germline.fleet import Local
from germline.genome import theta_sha256
from germline.recipes.recipe import seeded
from germline.strategies import GenerationResult, Gradient

X = torch.linspace(-1, 1, 400).reshape(80, 5)


def make_recipe(**changes: Any) -> Recipe:
    settings: dict[str, Any] = {
        "model": seeded(0, lambda: nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3))),
        "data": (X, X[:, :3].argmax(1)),
        "loss": F.cross_entropy,
        "strategy": OpenAIES(population=16),
        "batch_size": 16,
        "snapshot_every": 10,
    }
    return Recipe(**settings | changes)


def start(path: Path, recipe: Recipe | None = None) -> Session:
    """Start a run in this process."""
    return opening.start(recipe or make_recipe(), path, seed=1, fleet=Local("cpu"), about={})


def resume(path: Path, recipe: Recipe | None = None) -> Session:
    """Resume a run in this process."""
    return opening.resume(recipe or make_recipe(), Journal.open(path), Local("cpu"))


def rebuild(path: Path, recipe: Recipe) -> Session:
    """Return a run before its first generation."""
    return opening.rebuild(recipe, Journal.open(path), Local("cpu"))


def open_for_replay(path: Path) -> Session:
    """Open a run from its journal alone."""
    return opening.open_for_replay(Journal.open(path))


def train(path: Path, generations: int, recipe: Recipe | None = None, callbacks: Any = ()) -> dict[str, Any]:
    """Run some generations; return the summary of the run."""
    session = start(path, recipe)
    summary = loop.run(session, Stop(generations=generations), callbacks)
    session.require_journal().close()
    return summary


@pytest.mark.slow
def test_every_generation_of_a_long_run_is_rebuilt_from_a_small_journal(tmp_path: Path) -> None:
    hashes: list[str] = []

    def remember(session: Session, row: Row) -> None:
        hashes.append(theta_sha256(session.state.theta))

    train(tmp_path / "run", 500, make_recipe(strategy=OpenAIES(population=256)), [remember])
    assert (tmp_path / "run" / "journal.sqlite").stat().st_size < 1_000_000
    assert sorted(file.name for file in (tmp_path / "run").iterdir()) == [
        "journal.end",
        "journal.sqlite",
        "model.safetensors",
        "snapshots",
    ]
    session = open_for_replay(tmp_path / "run")
    replay.replay(session, until=0, from_start=True)
    for record in session.require_journal().records():
        replay.fold(session, record)
        assert theta_sha256(session.state.theta) == hashes[record.result.generation]
    for generation in (0, 1, 9, 10, 11, 250, 499, 500):  # from the snapshot before each
        session = open_for_replay(tmp_path / "run")
        replay.replay(session, until=generation)
        if generation:
            assert theta_sha256(session.state.theta) == hashes[generation - 1]
    with pytest.raises(BadInput, match="no generation 501"):
        replay.replay(open_for_replay(tmp_path / "run"), until=501)


def read_everything(path: Path) -> tuple[Any, ...]:
    """Return all that can be asked of a run."""
    outcome = replay.verify(open_for_replay(path))
    rows = read_rows(Journal.open(path))
    resumed = resume(path)
    return (
        outcome,
        repr(rows),
        theta_sha256(resumed.state.theta),
        resumed.generation,
        resumed.seconds,
        resumed.samples,
    )


def damage(content: bytes) -> Iterator[tuple[str, bytes]]:
    """Yield the name of a damage and a file so damaged, 200 times."""
    chance = random.Random(0)
    for i in range(200):
        kind = ("flip", "cut", "duplicate", "zero")[i % 4]
        at, length = chance.randrange(len(content)), chance.randrange(1, 5000)
        if kind == "flip":
            yield kind, content[:at] + bytes([content[at] ^ 1 << chance.randrange(8)]) + content[at + 1 :]
        elif kind == "cut":
            yield kind, content[:at] + (content[at + length :] if chance.random() < 0.5 else b"")
        elif kind == "duplicate":
            yield kind, content[: at + length] + content[at:]
        else:
            yield kind, content[:at] + bytes(min(length, len(content) - at)) + content[at + length :]


@pytest.mark.slow
def test_a_damaged_journal_is_refused_or_harmless(tmp_path: Path) -> None:
    train(tmp_path / "run", 24)
    expected = read_everything(tmp_path / "run")
    content = (tmp_path / "run" / "journal.sqlite").read_bytes()
    refused = 0
    for kind, damaged in damage(content):
        shutil.rmtree(tmp_path / "copy", ignore_errors=True)
        shutil.copytree(tmp_path / "run", tmp_path / "copy")
        (tmp_path / "copy" / "journal.sqlite").write_bytes(damaged)
        try:
            content_read = read_everything(tmp_path / "copy")
        except BadInput:
            refused += 1
        else:
            assert content_read == expected, kind
    assert refused > 100  # the rest fell on parts of the file that hold nothing


def test_an_edited_record_is_refused(tmp_path: Path) -> None:
    train(tmp_path / "run", 12)
    edits = [
        "UPDATE record SET scores = zeroblob(64) WHERE generation = 5",
        'UPDATE record SET schedule_values = \'{"lr":9.0,"sigma":0.05}\' WHERE generation = 5',
        "UPDATE record SET info = '{\"seconds\":1.0}' WHERE generation = 5",
        "DELETE FROM record WHERE generation = 5",
        "DELETE FROM record WHERE generation = 11",
        "DELETE FROM record",
        "DELETE FROM tip",
        "UPDATE record SET generation = 99 WHERE generation = 11",
        "UPDATE header SET json = replace(json, '\"seed\":1', '\"seed\":2')",
        "DELETE FROM header",
        "DROP TABLE record",
    ]
    for edit in edits:
        shutil.rmtree(tmp_path / "copy", ignore_errors=True)
        shutil.copytree(tmp_path / "run", tmp_path / "copy")
        connection = sqlite3.connect(tmp_path / "copy" / "journal.sqlite")
        with connection:
            connection.execute(edit)
        connection.close()
        with pytest.raises(BadInput, match=r"damaged|missing|other tables"):
            read_everything(tmp_path / "copy")


def test_damaged_snapshots_cost_a_longer_replay_or_are_refused(tmp_path: Path) -> None:
    summary = train(tmp_path / "run", 24)
    for name in ("00000020", "00000024"):
        file = tmp_path / "run" / "snapshots" / f"{name}.safetensors"
        content = bytearray(file.read_bytes())
        content[-3] ^= 4
        file.write_bytes(content)
    resumed = resume(tmp_path / "run")
    assert theta_sha256(resumed.state.theta) == summary["theta_sha256"]
    with pytest.raises(BadInput, match="damaged"):
        replay.verify(open_for_replay(tmp_path / "run"))
    (tmp_path / "run" / "snapshots" / "00000000.safetensors").unlink()
    (tmp_path / "run" / "snapshots" / "00000010.safetensors").unlink()
    with pytest.raises(BadInput, match="damaged, missing"):
        resume(tmp_path / "run")


def other_recipes() -> dict[str, Recipe]:
    """Return recipes that differ from a run in one thing each."""
    return {
        "model": make_recipe(model=nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))),
        "train data": make_recipe(data=(X + 1, X[:, :3].argmax(1))),
        "objective": make_recipe(loss=None, score=lambda output, target: -F.cross_entropy(output, target)),
        "value of the model's frozen parameters and buffers": make_recipe(model=half_frozen_model(2)),
    }


def half_frozen_model(seed: int) -> nn.Module:
    """Return a model of which one layer is not trained."""

    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(5, 6).requires_grad_(False), nn.Tanh(), nn.Linear(6, 3))

    return seeded(seed, build)


@pytest.mark.parametrize(
    "what", ["model", "train data", "objective", "value of the model's frozen parameters and buffers"]
)
def test_a_run_is_not_resumed_with_something_else(what: str, tmp_path: Path) -> None:
    train(tmp_path / "run", 3, make_recipe(model=half_frozen_model(1)) if "frozen" in what else None)
    with pytest.raises(BadInput, match=f"{what} is not that of"):
        resume(tmp_path / "run", other_recipes()[what])


@pytest.mark.parametrize("what", ["loss", "code"])
def test_a_run_does_not_go_on_with_another_score(what: str, tmp_path: Path) -> None:
    """A header cannot hold a function: members of generation 0 are scored again."""
    train(tmp_path / "run", 12)
    other = make_recipe(loss=lambda output, target: F.multi_margin_loss(output, target))
    if what == "code":
        other = make_recipe(model=seeded(0, lambda: nn.Sequential(nn.Linear(5, 6), nn.Sigmoid(), nn.Linear(6, 3))))
    with pytest.raises(BadInput, match=r"first members of generation 0 have the scores .*, and had "):
        resume(tmp_path / "run", other)
    assert resume(tmp_path / "run").generation == 12


def test_weights_are_as_readable_as_other_files(tmp_path: Path) -> None:
    train(tmp_path / "run", 3)
    modes = {oct(file.stat().st_mode) for file in (tmp_path / "run").rglob("*") if file.is_file()}
    assert len(modes) == 1


@pytest.mark.parametrize("key", ["noise_version", "format"])
def test_another_version_is_refused(key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train(tmp_path / "run", 3)
    constant = {"noise_version": "germline.noise.VERSION", "format": "germline.engine.journal.FORMAT"}[key]
    monkeypatch.setattr(constant, 99)
    with pytest.raises(BadInput, match="use germline"):
        Journal.open(tmp_path / "run")


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    train(tmp_path / "run", 3)
    before = (tmp_path / "run" / "journal.sqlite").read_bytes()
    with pytest.raises(BadInput, match="exists already"):
        train(tmp_path / "run", 3)
    assert (tmp_path / "run" / "journal.sqlite").read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["run"]


def test_a_snapshot_of_another_run_is_not_taken(tmp_path: Path) -> None:
    train(tmp_path / "one", 12)
    train(tmp_path / "two", 12, make_recipe(strategy=OpenAIES(population=18)))
    expected = read_everything(tmp_path / "one")
    shutil.copy(tmp_path / "two" / "snapshots" / "00000010.safetensors", tmp_path / "one" / "snapshots")
    resumed = resume(tmp_path / "one")
    assert theta_sha256(resumed.state.theta) == expected[2]
    with pytest.raises(BadInput, match="of another run"):
        replay.verify(open_for_replay(tmp_path / "one"))


def test_verify_looks_at_all_of_a_snapshot(tmp_path: Path) -> None:
    session = start(tmp_path / "run")
    loop.run(session, Stop(generations=12))
    state = session.state
    moments = dataclasses.replace(state.moments, first=state.moments.first * 100)
    session.require_journal().save(dataclasses.replace(state, moments=moments), 12)
    with pytest.raises(BadInput, match="not what its records replay to"):
        replay.verify(open_for_replay(tmp_path / "run"))


def test_an_archive_can_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train(tmp_path / "run", 3)
    monkeypatch.setattr("os.access", lambda path, mode: False)  # what a read-only file system says, also to root
    outcome = replay.verify(opening.open_for_replay(Journal.open(tmp_path / "run", read_only=True)))
    assert outcome["generations"] == 3


class Listener:
    """A callback that notes, for every generation, how many generations another process finds on disk."""

    def __init__(self, *, can_wait: bool) -> None:
        self.can_wait = can_wait
        self.notes: list[tuple[int, int]] = []  # generations up to this one, and generations on disk

    def __call__(self, session: Session, row: Row) -> None:
        connection = sqlite3.connect(session.path / "journal.sqlite")
        (count,) = connection.execute("SELECT count(*) FROM record").fetchone()
        connection.close()
        self.notes.append((row["generation"] + 1, count))


@pytest.mark.parametrize("can_wait", [False, True])
def test_a_generation_is_on_disk_before_callbacks_are_called(can_wait: bool, tmp_path: Path) -> None:
    listener = Listener(can_wait=can_wait)
    train(tmp_path / "run", 300, callbacks=[listener])
    assert [generation for generation, _ in listener.notes] == list(range(1, 301))
    assert all(generation <= on_disk for generation, on_disk in listener.notes)
    assert any(generation < on_disk for generation, on_disk in listener.notes) == can_wait  # written together


def test_a_run_can_be_read_while_it_is_written(tmp_path: Path) -> None:
    session = start(tmp_path / "run")
    for _ in range(3):
        session.step()
    records = Journal.open(tmp_path / "run", read_only=True).records()
    first = next(records)
    session.step()  # the end of the journal is now another one than when reading began
    assert [record.result.generation for record in (first, *records)] == [0, 1, 2]
    session.require_journal().close()


def test_two_writers_are_noticed(tmp_path: Path) -> None:
    train(tmp_path / "run", 3)
    one, two = (resume(tmp_path / "run") for _ in range(2))
    one.step()
    with pytest.raises(BadInput, match="another process"):
        two.step()


def test_a_generation_without_scores_changes_nothing_and_says_so(tmp_path: Path) -> None:
    def broken(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return output.sum() * float("nan")

    session = start(tmp_path / "run", make_recipe(loss=broken))
    before = theta_sha256(session.state.theta)
    row = session.step()
    assert row["skipped"]
    assert theta_sha256(session.state.theta) == before


def test_backprop_on_another_machine_goes_on_from_the_next_snapshot(tmp_path: Path) -> None:
    """A record whose hash cannot be met stands for a machine whose last bits differ."""
    recipe = make_recipe(strategy=Gradient())
    session = start(tmp_path / "run", recipe)
    journal = session.require_journal()
    for g in range(12):
        result = session.evaluate(g, session.batch(g))
        session.tell(result)
        theta = "of another machine" if g == 3 else theta_sha256(session.state.theta)
        journal.append(Record(result, theta, {"seconds": 0.0, "samples": 0, "bytes": [0, 0]}))
        session.generation += 1
    session.commit()
    with pytest.raises(BadInput, match="backprop has other last bits on this machine, and there is no snapshot up to"):
        resume(tmp_path / "run", recipe)
    journal.save(session.state, 12)
    resumed = resume(tmp_path / "run", recipe)
    assert theta_sha256(resumed.state.theta) == theta_sha256(session.state.theta)
    with pytest.raises(BadInput, match="no snapshot up to generation 8"):  # snapshot 12 does not say what 8 was
        replay.replay(rebuild(tmp_path / "run", recipe), until=8)
    with pytest.raises(BadInput, match="replays to other weights"):
        replay.verify(rebuild(tmp_path / "run", recipe))


def test_scores_are_recorded_exactly(tmp_path: Path) -> None:
    session = start(tmp_path / "run")
    scores = np.array([np.nan, np.inf, -0.0, 1e-45, 3.1415927], np.float32)
    result = GenerationResult(0, scores, {"sigma": 0.1, "lr": 1e-300})
    session.require_journal().append(Record(result, None, {"seconds": 0.5, "samples": 3, "bytes": [0, 0]}))
    session.commit()
    (record,) = Journal.open(tmp_path / "run").records()
    assert record.result.scores.tobytes() == scores.tobytes()
    assert record.result.values == {"sigma": 0.1, "lr": 1e-300}


@pytest.mark.parametrize("is_resumed", [False, True])
def test_the_memory_of_a_replay_does_not_grow_with_the_run(tmp_path: Path, is_resumed: bool) -> None:
    """All scores of this run are 5 MB, and were once in memory together; a coordinator that is restarted resumes."""
    recipe = make_recipe(strategy=OpenAIES(population=4096), batch_size=1)
    session = start(tmp_path / "run", recipe)
    journal = session.require_journal()
    scores = session.evaluate(0, session.batch(0)).scores
    for generation in range(300):
        result = GenerationResult(generation, scores, {"sigma": 0.05, "lr": 0.02})
        journal.append(Record(result, None, {"seconds": 0.0, "samples": 0, "bytes": [0, 0]}))
    journal.commit()
    session.require_journal().close()
    tracemalloc.start()
    replayed = resume(tmp_path / "run", recipe) if is_resumed else open_for_replay(tmp_path / "run")
    replay.replay(replayed)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert replayed.generation == 300
    assert peak < 2_500_000


@pytest.mark.parametrize("is_folder", [True, False])
def test_what_a_killed_process_has_left_of_a_file_is_removed(tmp_path: Path, is_folder: bool) -> None:
    left = tmp_path / "00000007.partial"
    if is_folder:
        left.mkdir()
        (left / ".tmpAbCdEf").write_bytes(b"half of a file")
    else:
        left.write_bytes(b"half of a file")
    write_tensors(tmp_path / "00000007.safetensors", {"theta": torch.arange(3.0)})
    assert [file.name for file in tmp_path.iterdir()] == ["00000007.safetensors"]
    assert load_file(tmp_path / "00000007.safetensors")["theta"].tolist() == [0, 1, 2]


def test_a_file_that_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    """A limit of the process, since there is no small disk here: see tests/test_faults.py for one that is full."""
    import resource
    import signal

    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        with pytest.raises(MachineError, match="cannot be written"):
            write_tensors(tmp_path / "large.safetensors", {"theta": torch.zeros(100_000)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("keep", "expected"), [(None, [0, 1, 2, 3, 4, 5]), (1, [0, 5]), (3, [0, 3, 4, 5])])
def test_the_number_of_snapshots_is_a_setting(keep: int | None, expected: list[int], tmp_path: Path) -> None:
    gl.train(
        nn.Linear(2, 1),
        objective=lambda net: float(net.bias) ** 2,
        strategy=gl.OpenAIES(population=4),
        generations=5,
        snapshot_every=1,
        keep_snapshots=keep,
        run=tmp_path / "run",
    )
    journal = Journal.open(tmp_path / "run")
    assert journal.snapshots() == expected
    assert replay.verify(opening.open_for_replay(journal))["snapshots"] == len(expected)


def test_snapshots_of_large_nets_are_pruned_by_their_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("germline.engine.journal.SNAPSHOT_BYTES", 1)
    objective = lambda net: float(net.bias) ** 2  # noqa: E731
    gl.train(nn.Linear(2, 1), objective=objective, generations=5, snapshot_every=1, run=tmp_path / "run")
    assert Journal.open(tmp_path / "run").snapshots() == [0, 4, 5]
