"""Edges of settings, schedulers and journals: the last value that is allowed, the first that is not, one of each."""

import math
import os
import shutil
import sqlite3
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from torch import nn

from germline.engine.journal import END, Journal, canonical, connect, has_type, is_like, limit_steps
from germline.errors import BadInput
from germline.fleet.cluster.scheduler import OVERDUE, SHORTEST, ChunkScheduler
from germline.genome import Genome
from germline.noise import Field, Stream
from germline.optim.optimizers import SGD, Adam
from germline.optim.schedules import Schedule
from germline.optim.shaping import utilities_by_rank
from germline.strategies import GA, PSO, SNES, DeepGA, GenerationResult, MuLambda, OpenAIES, mu_lambda, pso
from germline.strategies.openai_es import choose_relative_rate
from germline.strategies.settings import (
    build_optimizer,
    check_count,
    check_population,
    check_rate,
    is_elementwise,
    is_over_run,
    is_portable,
    parse_setting,
    ranks_by_parameter,
    set_schedules,
)
from tests.test_journal import start

INF, NAN = float("inf"), float("nan")
GENOME = Genome.from_module(nn.Sequential(nn.Linear(2, 1), nn.Linear(1, 2)))


@pytest.mark.parametrize(
    ("make", "settings"),
    [
        (MuLambda, {"population": 4, "parents": 2}),
        (MuLambda, {"population": 2, "parents": 2, "plus": False, "mates": 2, "decay": 0.0}),
        (MuLambda, {"population": 2, "parents": 1, "mates": 1, "decay": 1.0, "tau": 0.0}),
        (DeepGA, {"population": 1, "parents": 1}),
        (DeepGA, {"population": 3, "parents": 3}),
        (PSO, {"population": 2, "decay": 0.0, "own": 0.0, "others": 0.0, "inertia": 0.0}),
        (PSO, {"population": 2, "decay": 1.0}),
        (SNES, {"population": 2, "mirrored": False, "lr_sigma": 0.0}),
        (OpenAIES, {"population": 4, "shards": 2}),
        (OpenAIES, {"population": 3, "mirrored": False}),
        (GA, {"population": 2, "parents": 1, "elites": 0}),
    ],
)
def test_settings_that_are_just_allowed(make: Any, settings: dict[str, Any]) -> None:
    strategy = make(**settings)
    assert {name: getattr(strategy, name) for name in settings} == settings


@pytest.mark.parametrize(
    ("make", "settings"),
    [
        (MuLambda, {"population": 3, "parents": 2}),
        (MuLambda, {"population": 1, "parents": 2, "plus": False}),
        (MuLambda, {"population": 4, "parents": 0}),
        (MuLambda, {"parents": 2, "mates": 3}),
        (MuLambda, {"parents": 2, "mates": 0}),
        (MuLambda, {"decay": 1.01}),
        (MuLambda, {"decay": -0.01}),
        (MuLambda, {"tau": -0.1}),
        (MuLambda, {"sigma": 0.0}),
        (DeepGA, {"population": 3, "parents": 4}),
        (DeepGA, {"parents": 0}),
        (DeepGA, {"sigma": 0.0}),
        (PSO, {"population": 1}),
        (PSO, {"decay": 1.01}),
        (PSO, {"decay": -0.01}),
        (PSO, {"clamp": 0.0}),
        (PSO, {"sigma": 0.0}),
        (PSO, {"own": -1.0}),
        (PSO, {"others": -1.0}),
        (SNES, {"noise": "sign"}),
        (SNES, {"sigma": 0.0}),
        (OpenAIES, {"population": 6, "shards": 2}),
        (OpenAIES, {"sigma": 0.0}),
    ],
)
def test_settings_that_are_just_refused(make: Any, settings: dict[str, Any]) -> None:
    with pytest.raises(BadInput):
        make(**settings)


def test_the_learning_rate_that_auto_means_is_in_units_of_the_first_sigma() -> None:
    strategy = OpenAIES(population=64, sigma=Schedule("linear", 0.5, 0.1, 10), lr="auto")
    size = GENOME.size
    assert strategy.bind(GENOME).lr_unit == choose_relative_rate(64, size) * 0.5
    assert strategy.bind(GENOME).lr == Schedule("linear", 1.0, 0.0)
    assert OpenAIES(population=64, sigma="auto", lr="auto").bind(GENOME).lr_unit == "auto"


def test_checks_of_settings() -> None:
    for allowed in (0, 0.0, 1e300, Schedule("linear", 0.0, 0.0), lambda generation: 0.0):
        check_rate("lr", allowed, zero=True)
    for refused in (-1e-9, INF, NAN, "x", Schedule("linear", 1.0, -1.0)):
        with pytest.raises(BadInput):
            check_rate("lr", refused, zero=True)
    with pytest.raises(BadInput, match="above 0"):
        check_rate("sigma", 0.0)
    check_count("slices", 1)
    with pytest.raises(BadInput):
        check_count("slices", 0)
    for population, mirrored, shards in ((2, True, 1), (3, False, 1), (4, False, 2), (6, False, 3), (8, True, 4)):
        check_population(population, mirrored, shards)
    wrong = ((1, False, 1), (3, True, 1), (4, False, 3), (4, False, 4), (4, False, 0), (6, True, 2), (4, False, -1))
    for population, mirrored, shards in wrong:
        with pytest.raises(BadInput):
            check_population(population, mirrored, shards)


def test_texts_become_settings() -> None:
    assert parse_setting(int | None, "rank", "NONE") is None
    assert parse_setting(bool, "mirrored", "False") is False
    assert parse_setting(bool, "mirrored", "true") is True
    assert parse_setting(int, "population", "12") == 12
    assert parse_setting(float | Schedule, "lr", "linear(1, 0.5)") == Schedule.parse("linear(1, 0.5)")
    assert parse_setting(float | Literal["auto"], "sigma", "auto") == "auto"
    assert parse_setting(Literal["auto"] | float, "sigma", "0.5") == 0.5
    for kind, text in ((int, "x"), (bool, "1"), (float | Schedule, "linear"), (int, "none")):
        with pytest.raises(BadInput, match="cannot be"):
            parse_setting(kind, "a", text)
    with pytest.raises(BadInput, match=r"it takes a number or linear\(START, STOP\) or none\.$"):
        parse_setting(float | Schedule | None, "a", "linear")


def test_optimizers_by_their_settings() -> None:
    assert build_optimizer(OpenAIES(optimizer="adam", weight_decay=0.5)) == Adam(weight_decay=0.5)
    assert build_optimizer(OpenAIES(optimizer="momentum")) == SGD(momentum=0.9, weight_decay=0.0)
    own, elementwise, whole = (OpenAIES(optimizer=name) for name in ("adam", "torch.AdamW", "torch.Adafactor"))
    assert [is_elementwise(build_optimizer(s)) for s in (own, elementwise, whole)] == [True, True, False]
    assert [is_portable(build_optimizer(s)) for s in (own, elementwise)] == [True, False]
    for name in ("torch.Nothing", "x", "torch.Optimizer", "torch.LBFGS"):
        with pytest.raises(BadInput):
            OpenAIES(optimizer=name)
    with pytest.raises(BadInput, match="weight_decay"):
        OpenAIES(optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1), weight_decay=0.1)
    with pytest.raises(BadInput, match="scheduler"):
        OpenAIES(scheduler=lambda optimizer: None)
    assert OpenAIES(sigma="auto").needs_probe
    assert not OpenAIES(sigma=0.1).needs_probe


def test_settings_are_in_the_docstring_of_a_strategy() -> None:
    text = SNES.__doc__ or ""
    assert text.startswith("Separable natural evolution strategies")
    assert "    Args:\n        population: members of a generation" in text


def test_schedules_over_a_run_and_ranks_by_name() -> None:
    over_run, counted = Schedule("linear", 1.0, 0.0), Schedule("linear", 1.0, 0.0, 10)
    assert [is_over_run(value) for value in (over_run, counted, 0.1)] == [True, False, False]
    assert set_schedules(OpenAIES(lr=over_run), 0.25).lr == 0.75
    fixed = OpenAIES(lr=counted)
    assert set_schedules(fixed, 0.25) is fixed
    assert ranks_by_parameter(GENOME, 2, "0.*=none, *.bias=3") == [None, 3, 2, 3]
    with pytest.raises(BadInput):
        ranks_by_parameter(GENOME, 2, "2.*=1")


def test_utilities_of_the_best_and_the_worst() -> None:
    got = utilities_by_rank(np.array([3.0, 1.0, 2.0, 2.0], np.float32), [8, 4, 1, -3], maximize=False)
    assert got.tolist() == [-3, 8, 2, 2]


def test_members_of_mu_lambda_without_rescoring() -> None:
    """Parents keep their scores, which drift toward the mean of the new ones; comma strategies forget them."""
    strategy = MuLambda(population=4, parents=2, sigma=0.5, rescore=False, decay=0.75, adaptation="none")
    field, parents = Field(7), torch.tensor([[1.0, 2.0], [3.0, -2.0]])
    state = mu_lambda.State(parents, (0.5, 0.5), (4.0, -8.0), 2)
    good = np.array([1.0, 3.0, NAN, -INF], np.float32)
    assert strategy.drift_scores(state, np.array([1.0, 3.0], np.float32)).tolist() == [3.5, -5.5]
    result = GenerationResult(4, np.array([1.0, 3.0, -1.0, 0.0], np.float32), {})  # mean 0.75
    got = strategy.tell(state, result, field, maximize=True)
    assert got.scores == pytest.approx((0.75 * 4 + 0.25 * 0.75, 3.0))  # the first parent, and the second child
    assert got.parents[0].tolist() == [1.0, 2.0]
    comma = replace(strategy, plus=False)
    assert comma.tell(state, result, field, maximize=True).scores == (3.0, 1.0)
    assert comma.tell(state, GenerationResult(4, good, {}), field, maximize=True).scores == (3.0, 1.0)
    nothing = GenerationResult(4, np.full(4, NAN, np.float32), {})
    assert strategy.tell(state, nothing, field, maximize=True) is state
    assert strategy.values(replace(state, sigmas=(0.5, 0.25)), 0) == {"sigma": 0.375}


def test_discrete_recombination_by_hand() -> None:
    strategy = MuLambda(population=8, parents=3, mates=2, recombination="discrete", plus=False, adaptation="none")
    field, parents = Field(7), torch.arange(12.0).reshape(3, 4) * 100
    state = mu_lambda.State(parents, (0.25, 0.25, 0.25), (0.0, 0.0, 0.0), 4)
    mates = field.below(3, 16, 5, Stream.SELECTION).reshape(8, 2).tolist()
    noise = field.members(range(8), 5)
    picks = (noise.halves((0, 4), Stream.CROSSOVER).long() * 2 // 65536).tolist()
    steps = noise.integers((0, 4)).double() * field.unit(None) * 0.25
    base = [[parents[mates[k][picks[k][j]], j].item() for j in range(4)] for k in range(8)]
    got = strategy.ask(state, field, 5, {}).weights(np.arange(8), 0, 4)
    assert torch.allclose(got.double(), torch.tensor(base).double() + steps, atol=1e-4)
    tau = MuLambda(population=8, parents=3, mates=2, plus=False)
    sizes = replace(state, sigmas=(0.1, 0.2, 0.4), size=8)
    normal = mu_lambda.draw_normals(field, 5, 8)
    expected = [sum(sizes.sigmas[m] for m in mates[k]) / 2 * math.exp(normal[k] / 4) for k in range(8)]
    assert tau.step_sizes(sizes, field, 5) == pytest.approx(expected, rel=1e-6)  # 1 / sqrt(2 * 8)


def test_the_fifth_rule_counts_children_that_beat_the_mean_of_their_parents() -> None:
    strategy = MuLambda(population=5, parents=2, plus=False, adaptation="fifth", sigma=1.0)
    field, state = Field(7), mu_lambda.State(torch.zeros(2, 2), (2.0, 2.0), (1.0, 3.0), 2)

    def after(*scores: float) -> float:
        result = GenerationResult(0, np.array(scores, np.float32), {})
        return float(strategy.tell(state, result, field, maximize=True).sigmas[0])

    assert after(2.5, 2.0, 0.0, 0.0, 0.0) == 2.0 * 0.85  # one of five is not more than a fifth
    assert after(2.5, 2.1, 0.0, 0.0, 0.0) == 2.0 / 0.85
    first = replace(state, scores=(-INF, 3.0))
    assert strategy.adapt_by_success(first, np.zeros(5, np.float32), field, 0) == 2.0


def test_a_swarm_of_a_ring_with_scores_that_fade() -> None:
    strategy = PSO(population=3, topology="ring", decay=0.5)
    state = pso.State(torch.zeros(2), torch.ones(3, 2), torch.zeros(3, 2), torch.ones(3, 2), (4.0, -INF, 0.0), 0)
    assert strategy.drift_scores(state, np.array([1.0, 3.0, NAN], np.float32)).tolist() == [3.0, -INF, 1.0]
    assert PSO(population=3).drift_scores(pso.State(torch.zeros(2)), np.zeros(3, np.float32)).tolist() == [-INF] * 3
    field, start_state = Field(7), PSO(population=3).init(torch.tensor([1.0, 2.0]))
    first = strategy.ask(start_state, field, 0, {"inertia": 0.5}).weights(np.arange(3), 0, 2)
    steps = field.members(range(3), 0).integers((0, 2)).double() * field.unit(None) * 0.1
    steps[0] = 0.0  # one particle starts where the model is
    assert torch.allclose(first.double(), torch.tensor([1.0, 2.0]).double() + steps, atol=1e-6)
    nothing = GenerationResult(0, np.full(3, NAN, np.float32), {"inertia": 0.5})
    assert strategy.tell(start_state, nothing, field, maximize=True) is start_state
    with pytest.raises(BadInput, match="fewer particles"):
        pso.check_memory(1 << 60, torch.device("cpu"))


# The scheduler of chunks


def test_the_first_chunk_of_an_unknown_worker_is_an_eighth_of_half_its_share() -> None:
    scheduler = ChunkScheduler(320, {1: 0.0, 2: 0.0})
    first = scheduler.next_chunk(1, 0.0)
    assert first is not None
    assert (first.first, first.last) == (0, 10)  # 320 / 2 workers / 2 chunks / 8
    assert scheduler.rate(3) == scheduler.rate() == 1.0
    slow = ChunkScheduler(10, {1: 0.25, 2: 0.5})
    assert slow.rate(3) == slow.rate() == 0.375
    assert slow.rate(1) == 0.25
    slow.total = 0.0  # what rounding may leave of rates that come and go
    assert slow.rate(3) == 1.0


def test_a_worker_that_is_new_counts_as_one_of_those_that_share() -> None:
    scheduler = ChunkScheduler(320, {1: 0.0})
    chunk = scheduler.next_chunk(2, 0.0)  # the first one has not been asked yet
    assert chunk is not None
    assert chunk.size == 10  # 320 / 2 workers / 2 chunks / 8
    known = scheduler.next_chunk(1, 0.0)
    assert known is not None
    assert known.size == 19  # the 310 that are left / 2 chunks / 8: the other one has not answered yet


def test_a_chunk_is_computed_again_when_it_is_overdue_and_not_before() -> None:
    scheduler = ChunkScheduler(4, {1: 1.0, 2: 1.0})
    chunks = [scheduler.next_chunk(worker, 0.0) for worker in (1, 2, 1, 2)]
    assert [chunk.size for chunk in chunks if chunk is not None] == [1, 1, 1, 1]
    for number in (1, 3):
        scheduler.complete(number, 1.0)
    late = chunks[2]
    assert late is not None
    assert (late.end, late.deadline) == (2.0, OVERDUE * 2.0 + SHORTEST)
    assert scheduler.next_chunk(2, 1.0) is None  # it would be as late itself
    copy = scheduler.next_chunk(2, 7.0)
    assert copy is not None
    assert (copy.first, copy.copy) == (late.first, late)
    scheduler.drop_worker(2)  # the copy is gone, and can be made again
    assert late.copy is None
    again = scheduler.next_chunk(3, 7.0)
    assert again is not None
    assert again.first == late.first


def test_a_much_faster_worker_takes_over_the_last_chunk() -> None:
    for speed, takes in ((1.5, False), (1.6, True)):
        scheduler = ChunkScheduler(2, {"slow": 1.0})
        slow = scheduler.next_chunk("slow", 0.0)
        assert slow is not None
        rest = scheduler.next_chunk("slow", 0.0)
        assert rest is not None
        scheduler.complete(slow.number, 0.0)  # the other one takes until 1.0
        scheduler.rates["fast"] = speed
        assert (scheduler.next_chunk("fast", 0.0) is not None) == takes


def test_a_slow_worker_is_given_work_only_when_a_fast_one_is_overdue() -> None:
    """Twelve pieces: alone the slow worker needs 10 seconds for one, both together 12 / 10.1 for all."""
    scheduler = ChunkScheduler(12, {"fast": 10.0, "slow": 0.1})
    chunk = scheduler.next_chunk("fast", 0.0)
    assert chunk is not None
    assert chunk.deadline == pytest.approx(OVERDUE * 6 / 10.0 + SHORTEST)
    for now, takes in ((0.0, False), (chunk.deadline, False), (math.nextafter(chunk.deadline, INF), True)):
        assert (scheduler.next_chunk("slow", now) is not None) == takes


def test_pieces_that_are_withdrawn_are_computed_once_more() -> None:
    scheduler = ChunkScheduler(3, {1: 0.0})
    while (chunk := scheduler.next_chunk(1, 0.0)) is not None:
        scheduler.complete(chunk.number, 0.0)
    assert scheduler.is_finished
    scheduler.withdraw(1, 3)
    assert (scheduler.is_finished, scheduler.unassigned_pieces) == (False, 2)
    assert scheduler.complete(99, 0.0) is None
    again = scheduler.next_chunk(1, 0.0)
    assert again is not None
    assert again.first == 1


# The journal


def test_a_header_is_matched_by_its_values(tmp_path: Path) -> None:
    session = start(tmp_path / "run")
    session.step()
    session.commit()
    seed = session.require_journal().header["seed"]
    assert Journal.header_matches(tmp_path / "run", {"seed": seed})
    assert not Journal.header_matches(tmp_path / "run", {"seed": seed + 1})
    assert not Journal.header_matches(tmp_path / "other", {})


def test_lengths_of_a_journal(tmp_path: Path) -> None:
    journal = start(tmp_path / "run").require_journal()
    assert (journal.length(), journal.written_length(), journal.snapshot_bytes(1)) == (0, 0, 0)
    session = start(tmp_path / "again")
    journal = session.require_journal()
    for _ in range(5):
        session.step()
    assert journal.length() == 5
    journal.commit()
    assert journal.written_length() == 5
    assert (tmp_path / "again" / END).read_text().strip() == "5"
    assert journal.snapshot_bytes(0) == journal.snapshot(0).stat().st_size
    before = journal.chain(3)
    journal.truncate(3)
    assert (journal.length(), journal.chain(3)) == (3, before)
    assert [record.result.generation for record in journal.records()] == [0, 1, 2]
    assert max(journal.snapshots()) <= 3
    assert journal.outcome() is None
    journal.save_outcome({"generations": 3})
    journal.save_outcome({"generations": 4})
    assert journal.outcome() == {"generations": 4}
    journal.connection.execute("UPDATE outcome SET checksum = x'00'")
    assert journal.outcome() is None


def test_the_folder_of_a_run_is_readable_by_all_and_writable_by_its_owner(tmp_path: Path) -> None:
    start(tmp_path / "run")
    assert (tmp_path / "run").stat().st_mode & 0o777 == 0o755


def test_a_journal_without_snapshots_and_its_length_file_promises_nothing(tmp_path: Path) -> None:
    journal = start(tmp_path / "run").require_journal()
    for snapshot in journal.snapshots():
        shutil.rmtree(journal.snapshot(snapshot).parent)
    (tmp_path / "run" / END).unlink(missing_ok=True)
    assert journal.written_length() == 0


def test_a_journal_in_a_folder_that_cannot_be_written_is_only_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = start(tmp_path / "run")
    session.step()
    session.commit()
    session.require_journal().close()
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write anywhere
    connection = connect(tmp_path / "run" / "journal.sqlite", read_only=True)
    assert connection.execute("SELECT count(*) FROM header").fetchone() == (1,)
    with pytest.raises(sqlite3.OperationalError, match="readonly"):
        connection.execute("DELETE FROM header")
    connection.close()


def test_sqlite_may_take_long_and_not_for_ever() -> None:
    connection = sqlite3.connect(":memory:")
    limit_steps(connection)
    count = "WITH RECURSIVE n(i) AS (VALUES (1) UNION ALL SELECT i + 1 FROM n {}) SELECT max(i) FROM n"
    assert connection.execute(count.format("WHERE i < 20000")).fetchone() == (20000,)
    with pytest.raises(sqlite3.OperationalError, match="interrupted"):
        connection.execute(count.format("")).fetchone()
    connection.close()


def test_states_and_types_of_headers() -> None:
    template = SNES().init(torch.zeros(3))
    assert is_like(SNES().init(torch.ones(3)), template)
    assert not is_like(SNES().init(torch.ones(4)), template)
    assert has_type(3, int)
    assert not has_type(True, int)
    assert not has_type("x", int)


def test_a_text_of_a_value_does_not_depend_on_the_order_of_its_keys() -> None:
    assert canonical({"b": [1, None], "a": 0.1}) == canonical({"a": 0.1, "b": [1, None]}) == '{"a":0.1,"b":[1,null]}'
