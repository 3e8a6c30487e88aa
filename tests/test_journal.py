"""The journal: whole, small, and never silently wrong."""

import dataclasses
import random
import shutil
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from germline import OpenAIES, Recipe, replay, trainer
from germline.errors import BadInput
from germline.fleet import Local
from germline.genome import theta_sha256
from germline.journal import Journal
from germline.recipes.recipe import seeded
from germline.run import Row, Run, rows_of
from germline.stopping import Stop
from germline.strategies import GenerationResult, Gradient

X = torch.linspace(-1, 1, 400).reshape(80, 5)


def recipe(**changes: Any) -> Recipe:
    settings: dict[str, Any] = {
        "model": seeded(0, lambda: nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3))),
        "data": (X, X[:, :3].argmax(1)),
        "loss": F.cross_entropy,
        "strategy": OpenAIES(population=16),
        "batch_size": 16,
        "snapshot_every": 10,
    }
    return Recipe(**settings | changes)


def finished(path: Path, generations: int, made: Recipe | None = None, callbacks: Any = ()) -> dict[str, Any]:
    training = trainer.start(made or recipe(), path, seed=1, fleet=Local("cpu"), about={})
    summary = trainer.run(training, Stop(generations=generations), callbacks)
    training.kept.close()
    return summary


def test_every_generation_of_a_long_run_is_rebuilt_from_a_small_journal(tmp_path: Path) -> None:
    hashes: list[str] = []

    def remember(training: Run, row: Row) -> None:
        hashes.append(theta_sha256(training.core.state.theta))

    finished(tmp_path / "run", 500, recipe(strategy=OpenAIES(population=256)), [remember])
    assert (tmp_path / "run" / "journal.sqlite").stat().st_size < 1_000_000
    assert sorted(file.name for file in (tmp_path / "run").iterdir()) == [
        "journal.sqlite",
        "model.safetensors",
        "snapshots",
    ]
    training = replay.reopen(Journal.open(tmp_path / "run"))
    replay.replay(training, until=0, from_start=True)
    for record in training.kept.records():
        replay.fold(training, record)
        assert theta_sha256(training.core.state.theta) == hashes[record.result.generation]
    for generation in (0, 1, 9, 10, 11, 250, 499, 500):  # from the snapshot before each
        training = replay.reopen(Journal.open(tmp_path / "run"))
        replay.replay(training, until=generation)
        if generation:
            assert theta_sha256(training.core.state.theta) == hashes[generation - 1]
    with pytest.raises(BadInput, match="no generation 501"):
        replay.replay(replay.reopen(Journal.open(tmp_path / "run")), until=501)


def everything(path: Path) -> tuple[Any, ...]:
    """All that can be asked of a run."""
    found = replay.verify(replay.reopen(Journal.open(path)))
    rows = rows_of(Journal.open(path))
    resumed = trainer.resume(recipe(), Journal.open(path), Local("cpu"))
    return (
        found,
        repr(rows),
        theta_sha256(resumed.core.state.theta),
        resumed.generation,
        resumed.seconds,
        resumed.samples,
    )


def damages(content: bytes) -> Iterator[tuple[str, bytes]]:
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


def test_a_damaged_journal_is_refused_or_harmless(tmp_path: Path) -> None:
    finished(tmp_path / "run", 24)
    expected = everything(tmp_path / "run")
    content = (tmp_path / "run" / "journal.sqlite").read_bytes()
    refused = 0
    for kind, damaged in damages(content):
        shutil.rmtree(tmp_path / "copy", ignore_errors=True)
        shutil.copytree(tmp_path / "run", tmp_path / "copy")
        (tmp_path / "copy" / "journal.sqlite").write_bytes(damaged)
        try:
            found = everything(tmp_path / "copy")
        except BadInput:
            refused += 1
        else:
            assert found == expected, kind
    assert refused > 100  # the rest fell on parts of the file that hold nothing


def test_an_edited_record_is_refused(tmp_path: Path) -> None:
    finished(tmp_path / "run", 12)
    edits = [
        "UPDATE record SET scores = zeroblob(64) WHERE generation = 5",
        'UPDATE record SET vals = \'{"lr":9.0,"sigma":0.05}\' WHERE generation = 5',
        "UPDATE record SET side = '{\"seconds\":1.0}' WHERE generation = 5",
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
        with pytest.raises(BadInput, match=r"damaged|missing|cannot be used"):
            everything(tmp_path / "copy")


def test_damaged_snapshots_cost_a_longer_replay_or_are_refused(tmp_path: Path) -> None:
    summary = finished(tmp_path / "run", 24)
    for name in ("00000020", "00000024"):
        file = tmp_path / "run" / "snapshots" / f"{name}.safetensors"
        content = bytearray(file.read_bytes())
        content[-3] ^= 4
        file.write_bytes(content)
    resumed = trainer.resume(recipe(), Journal.open(tmp_path / "run"), Local("cpu"))
    assert theta_sha256(resumed.core.state.theta) == summary["theta_sha256"]
    with pytest.raises(BadInput, match="damaged"):
        replay.verify(replay.reopen(Journal.open(tmp_path / "run")))
    (tmp_path / "run" / "snapshots" / "00000000.safetensors").unlink()
    (tmp_path / "run" / "snapshots" / "00000010.safetensors").unlink()
    with pytest.raises(BadInput, match="damaged, missing"):
        trainer.resume(recipe(), Journal.open(tmp_path / "run"), Local("cpu"))


def foreign() -> dict[str, Recipe]:
    return {
        "model": recipe(model=nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))),
        "train data": recipe(data=(X + 1, X[:, :3].argmax(1))),
        "objective": recipe(loss=None, score=lambda output, target: -F.cross_entropy(output, target)),
        "value of the model's frozen parameters and buffers": recipe(model=frozen(2)),
    }


def frozen(seed: int) -> nn.Module:
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(5, 6).requires_grad_(False), nn.Tanh(), nn.Linear(6, 3))

    return seeded(seed, build)


@pytest.mark.parametrize(
    "what", ["model", "train data", "objective", "value of the model's frozen parameters and buffers"]
)
def test_a_run_does_not_go_on_with_something_else(what: str, tmp_path: Path) -> None:
    finished(tmp_path / "run", 3, recipe(model=frozen(1)) if "frozen" in what else None)
    with pytest.raises(BadInput, match=f"{what} is not that of"):
        trainer.resume(foreign()[what], Journal.open(tmp_path / "run"), Local("cpu"))


@pytest.mark.parametrize("key", ["noise_version", "format"])
def test_another_version_is_refused(key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    finished(tmp_path / "run", 3)
    monkeypatch.setattr({"noise_version": "germline.noise.VERSION", "format": "germline.journal.FORMAT"}[key], 2)
    with pytest.raises(BadInput, match="use germline"):
        Journal.open(tmp_path / "run")


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    finished(tmp_path / "run", 3)
    before = (tmp_path / "run" / "journal.sqlite").read_bytes()
    with pytest.raises(BadInput, match="exists already"):
        finished(tmp_path / "run", 3)
    assert (tmp_path / "run" / "journal.sqlite").read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["run"]


def test_a_snapshot_of_another_run_is_not_taken(tmp_path: Path) -> None:
    finished(tmp_path / "one", 12)
    finished(tmp_path / "two", 12, recipe(strategy=OpenAIES(population=18)))
    expected = everything(tmp_path / "one")
    shutil.copy(tmp_path / "two" / "snapshots" / "00000010.safetensors", tmp_path / "one" / "snapshots")
    resumed = trainer.resume(recipe(), Journal.open(tmp_path / "one"), Local("cpu"))
    assert theta_sha256(resumed.core.state.theta) == expected[2]
    with pytest.raises(BadInput, match="of another run"):
        replay.verify(replay.reopen(Journal.open(tmp_path / "one")))


def test_verify_looks_at_all_of_a_snapshot(tmp_path: Path) -> None:
    training = trainer.start(recipe(), tmp_path / "run", seed=1, fleet=Local("cpu"), about={})
    trainer.run(training, Stop(generations=12))
    state = training.core.state
    moments = dataclasses.replace(state.moments, first=state.moments.first * 100)
    training.kept.save(dataclasses.replace(state, moments=moments), 12)
    with pytest.raises(BadInput, match="not what its records replay to"):
        replay.verify(replay.reopen(Journal.open(tmp_path / "run")))


def test_an_archive_can_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    finished(tmp_path / "run", 3)
    monkeypatch.setattr("os.access", lambda path, mode: False)  # what a read-only file system says, also to root
    found = replay.verify(replay.reopen(Journal.open(tmp_path / "run", read_only=True)))
    assert found["generations"] == 3


class Listener:
    """Notes, when it hears of a generation, how many another process would find on disk."""

    def __init__(self, *, patient: bool) -> None:
        self.patient = patient
        self.heard: list[tuple[int, int]] = []

    def __call__(self, training: Run, row: Row) -> None:
        elsewhere = sqlite3.connect(training.path / "journal.sqlite")
        (found,) = elsewhere.execute("SELECT count(*) FROM record").fetchone()
        elsewhere.close()
        self.heard.append((row["generation"] + 1, found))


@pytest.mark.parametrize("patient", [False, True])
def test_what_anybody_hears_of_is_on_disk(patient: bool, tmp_path: Path) -> None:
    listener = Listener(patient=patient)
    finished(tmp_path / "run", 300, callbacks=[listener])
    assert [generation for generation, _ in listener.heard] == list(range(1, 301))
    assert all(generation <= found for generation, found in listener.heard)
    together = [found for generation, found in listener.heard if found > generation]
    assert bool(together) == patient


def test_two_writers_are_noticed(tmp_path: Path) -> None:
    finished(tmp_path / "run", 3)
    one, two = (trainer.resume(recipe(), Journal.open(tmp_path / "run"), Local("cpu")) for _ in range(2))
    one.step()
    with pytest.raises(BadInput, match="another process"):
        two.step()


def test_a_generation_without_scores_changes_nothing_and_says_so(tmp_path: Path) -> None:
    def broken(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return output.sum() * float("nan")

    training = trainer.start(recipe(loss=broken), tmp_path / "run", seed=1, fleet=Local("cpu"), about={})
    before = theta_sha256(training.core.state.theta)
    row = training.step()
    assert row["skipped"]
    assert theta_sha256(training.core.state.theta) == before


def test_backprop_on_another_machine_goes_on_from_the_next_snapshot(tmp_path: Path) -> None:
    """A record's hash that cannot be met here stands for a machine whose last bits differ."""
    made = recipe(strategy=Gradient())
    training = trainer.start(made, tmp_path / "run", seed=1, fleet=Local("cpu"), about={})
    for g in range(12):
        result = training.core.evaluate(g, training.batch(g))
        training.core.tell(result)
        training.kept.append(
            result,
            "elsewhere" if g == 3 else theta_sha256(training.core.state.theta),
            {"seconds": 0.0, "samples": 0, "bytes": [0, 0]},
        )
        training.generation += 1
    training.commit()
    with pytest.raises(BadInput, match="no snapshot between"):
        trainer.resume(made, Journal.open(tmp_path / "run"), Local("cpu"))
    training.kept.save(training.core.state, 12)
    resumed = trainer.resume(made, Journal.open(tmp_path / "run"), Local("cpu"))
    assert theta_sha256(resumed.core.state.theta) == theta_sha256(training.core.state.theta)
    with pytest.raises(BadInput, match="no snapshot between"):  # snapshot 12 is no answer to what generation 8 was
        replay.replay(trainer.rebuild(made, Journal.open(tmp_path / "run"), Local("cpu")), until=8)
    with pytest.raises(BadInput, match="replays to other weights"):
        replay.verify(trainer.rebuild(made, Journal.open(tmp_path / "run"), Local("cpu")))


def test_scores_are_kept_exactly(tmp_path: Path) -> None:
    training = trainer.start(recipe(), tmp_path / "run", seed=1, fleet=Local("cpu"), about={})
    scores = np.array([np.nan, np.inf, -0.0, 1e-45, 3.1415927], np.float32)
    training.kept.append(
        GenerationResult(0, scores, {"sigma": 0.1, "lr": 1e-300}), None, {"seconds": 0.5, "samples": 3, "bytes": [0, 0]}
    )
    training.commit()
    (record,) = Journal.open(tmp_path / "run").records()
    assert record.result.scores.tobytes() == scores.tobytes()
    assert record.result.values == {"sigma": 0.1, "lr": 1e-300}
