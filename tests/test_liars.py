"""Workers that lie are found out by audits, and the run ends with the weights of honest workers."""

import random
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from rogues import LIES, Liar, Lie, lie_always, omit_fields

import germline as gl
from germline.engine import scoring
from germline.engine.follower import Follower
from germline.engine.journal import Journal
from germline.engine.opening import open_for_replay
from germline.engine.replay import verify
from germline.fleet.cluster import jobs
from germline.fleet.cluster.admission import Admission
from germline.fleet.cluster.backend import Head, Message
from germline.fleet.cluster.crew import Crew, RemoteWorker
from germline.fleet.cluster.jobs import Coordinator, Job
from germline.fleet.gradients import Scores
from tests.test_cluster import make_digits, open_cluster, train

pytestmark = pytest.mark.slow

GENERATIONS = 120  # an audit comes every 20 generations on average
HONEST = 12  # answers of a liar that are right
FOUND_OUT = 90  # generations within which 99 % of those that always lie are found out, as docs/fleets.md says


@pytest.fixture(autouse=True, scope="module")
def make_small_blocks() -> Iterator[None]:
    """Have blocks of 8 members, so that there is work for two workers."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scoring, "block_size", lambda *arguments, **settings: 8)
        yield


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the hash of the weights of an honest run."""
    return train(make_digits(), gl.Local("cpu"), tmp_path_factory.mktemp("honest") / "run", GENERATIONS)


@pytest.mark.parametrize("lie", LIES, ids=lambda lie: lie.__name__)
def test_a_liar_is_turned_away_and_the_result_is_the_honest_one(lie: Lie, expected: str, tmp_path: Path) -> None:
    with open_cluster() as cluster:
        cluster.fleet.coordinator.chance = random.Random(1)  # so that the test is the same each time
        found_out: list[int] = []  # the generation

        def say(text: str) -> None:
            cluster.lines.append(text)
            if "is turned away" in text:
                found_out.append(cluster.fleet.coordinator.generation)

        cluster.fleet.crew.say = say
        cluster.add_before_training(lambda fleet: Liar(fleet, lie, HONEST), Follower)
        assert train(make_digits(), cluster.fleet, tmp_path / "run", GENERATIONS) == expected
    liar, honest = cluster.workers
    assert liar.is_refused
    assert len(found_out) == 1
    assert found_out[0] <= HONEST + FOUND_OUT
    assert not honest.is_refused
    went_back = any("goes back to generation" in line for line in cluster.lines)
    assert went_back == (lie is not omit_fields)  # no answer without a checksum was ever used
    assert verify(open_for_replay(Journal.open(tmp_path / "run")))["theta_sha256"] == expected


def test_a_liar_of_the_last_generations_is_found_out_at_the_end(
    expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs, "AUDIT_EVERY", 1e9)  # by chance it would not be audited in this run
    monkeypatch.setattr(scoring, "CHECK_EVERY", 1000)  # nor this way
    with open_cluster() as cluster:
        cluster.add_before_training(lambda fleet: Liar(fleet, lie_always), Follower)
        assert train(make_digits(), cluster.fleet, tmp_path / "run", GENERATIONS) == expected
    assert [worker.is_refused for worker in cluster.workers] == [True, False]


def test_a_liar_that_leaves_is_audited_before_it_is_forgotten(
    expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its answers of the last generation are computed again when its connection ends."""
    monkeypatch.setattr(jobs, "AUDIT_EVERY", 1e9)
    monkeypatch.setattr(scoring, "CHECK_EVERY", 1000)
    with open_cluster() as cluster:

        def end_the_liar(session: Any, row: Any) -> None:
            if row["generation"] == 40:
                cluster.run(cluster.workers[0].server.close(timeout=2))

        cluster.add_before_training(lambda fleet: Liar(fleet, lie_always), Follower)
        assert train(make_digits(), cluster.fleet, tmp_path / "run", GENERATIONS, end_the_liar) == expected
        assert [line for line in cluster.lines if "goes back to generation 0" in line]


class SlowLiar(Liar):
    """A worker that lies for some generations, and then is too slow for its answers to be used."""

    def compute(self, head: Head, arrays: Sequence[bytes]) -> Message:
        if self.count > self.honest + 6:
            time.sleep(0.5)
        return super().compute(head, arrays)


class LiarThatSendsGarbage(Liar):
    """A worker that lies for some generations, and then sends what cannot be read."""

    def compute(self, head: Head, arrays: Sequence[bytes]) -> Message:
        answer = super().compute(head, arrays)
        return Message(answer.head, [b"no scores"]) if self.count > self.honest + 6 else answer


def test_a_liar_that_leaves_when_another_is_found_out_is_audited(
    expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run goes back to when the other one joined, which is after the first has begun to lie."""
    monkeypatch.setattr(jobs, "AUDIT_EVERY", 1e9)
    monkeypatch.setattr(scoring, "CHECK_EVERY", 1000)
    # on a busy machine a worker may have no part in a job, which would find the first liar before the other one joins
    monkeypatch.setattr(Coordinator, "_audit_absent", lambda self, job: None)
    with open_cluster() as cluster:

        def add_another(session: Any, row: Any) -> None:
            if row["generation"] == 40 and len(cluster.workers) == 2:
                cluster.add(lambda fleet: LiarThatSendsGarbage(fleet, lie_always, honest=2))
                cluster.wait_for_workers(3)

        def end_the_first(text: str) -> None:
            cluster.lines.append(text)
            if "goes back" in text and len(goings_back()) == 1:
                cluster.run(cluster.workers[0].server.close(timeout=2))

        def goings_back() -> list[int]:
            return [int(line.split()[-1]) for line in cluster.lines if "goes back to generation" in line]

        cluster.fleet.crew.say = end_the_first
        cluster.add_before_training(lambda fleet: Liar(fleet, lie_always), Follower)
        assert train(make_digits(), cluster.fleet, tmp_path / "run", GENERATIONS, add_another) == expected
        assert goings_back()[0] >= 40
        assert goings_back()[1:] == [0]


@pytest.mark.parametrize("kind", [SlowLiar, LiarThatSendsGarbage])
def test_a_liar_whose_answers_are_not_used_any_more_is_audited(
    kind: type[Liar], expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No later draw finds its answers, neither by chance nor at the end, and it was turned away for garbage alone."""
    monkeypatch.setattr(jobs, "AUDIT_EVERY", 1e9)
    monkeypatch.setattr(scoring, "CHECK_EVERY", 1000)
    with open_cluster() as cluster:
        cluster.add_before_training(lambda fleet: kind(fleet, lie_always), Follower)
        assert train(make_digits(), cluster.fleet, tmp_path / "run", GENERATIONS) == expected
        assert [line for line in cluster.lines if "goes back to generation 0" in line]
    assert [worker.is_refused for worker in cluster.workers] == [True, False]


def test_a_liar_does_not_make_a_run_doubt_its_plan(
    expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In generation 101 sampled members are scored by plain copies of the module: a wrong score is the worker's."""
    monkeypatch.setattr(jobs, "AUDIT_EVERY", 1e9)
    monkeypatch.setattr(scoring, "SAMPLED", 32)
    with open_cluster() as cluster:
        cluster.add_before_training(lambda fleet: Liar(fleet, lie_always), Follower)
        assert train(make_digits(), cluster.fleet, tmp_path / "run", GENERATIONS) == expected
    assert [worker.is_refused for worker in cluster.workers] == [True, False]


class LiarOfSomeBlocks(Liar):
    """A worker that lies in all chunks of a generation but its first."""

    def __init__(self, fleet: gl.Local) -> None:
        super().__init__(fleet, lie_always, honest=0)
        self.last_generation = -1

    def compute(self, head: Head, arrays: Sequence[bytes]) -> Message:
        is_first, self.last_generation = head["generation"] != self.last_generation, head["generation"]
        return Follower.compute(self, head, arrays) if is_first else super().compute(head, arrays)


class LateFollower(Follower):
    """An honest worker that leaves most of the work to a liar until that is turned away.

    A lie in a chunk that the other worker has computed as well may never be used.
    """

    def __init__(self, fleet: gl.Local, is_alone: threading.Event) -> None:
        super().__init__(fleet)
        self.is_alone = is_alone

    def compute(self, head: Head, arrays: Sequence[bytes]) -> Message:
        self.is_alone.wait(timeout=0.2)
        return super().compute(head, arrays)


def test_a_liar_of_some_blocks_does_not_make_a_run_doubt_its_plan(
    expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One block of a worker that is drawn may be right, where the members that differ from plain copies are wrong."""
    monkeypatch.setattr(jobs, "AUDIT_EVERY", 1e9)
    monkeypatch.setattr(scoring, "CHECK_EVERY", 2)
    monkeypatch.setattr(scoring, "SAMPLED", 32)
    monkeypatch.setattr(jobs, "AUDITS", 10**6)  # on a busy machine it passes many as absent, by its first block
    is_turned_away = threading.Event()

    def note(text: str) -> None:
        if "is turned away" in text:
            is_turned_away.set()

    with open_cluster() as cluster:
        cluster.fleet.coordinator.chance = FirstChoice()
        cluster.fleet.crew.say = note
        cluster.add_before_training(LiarOfSomeBlocks, lambda fleet: LateFollower(fleet, is_turned_away))
        assert train(make_digits(), cluster.fleet, tmp_path / "run", GENERATIONS) == expected
    assert [worker.is_refused for worker in cluster.workers] == [True, False]


class FirstChoice(random.Random):
    """Draws the first block of a worker."""

    def choice(self, sequence: Any) -> Any:
        return min(sequence)


def test_audits_are_drawn_as_promised() -> None:
    """Each worker is audited in one of 20 generations, and each of its pieces is drawn with the same probability."""
    drawn: Counter[int] = Counter()

    def compute(first: int, last: int) -> Scores:
        drawn[first] += last - first
        return np.zeros(2 * (last - first), np.float32)  # two members to a piece

    crew = Crew(cast(Any, None))
    coordinator = Coordinator(crew, Admission(crew), chance=random.Random(0))
    one, other = RemoteWorker("one"), RemoteWorker("other")
    job = Job("scores", 8, cast(Any, None), cast(Any, None), compute)
    for first, size, worker in ((0, 3, one), (3, 1, other), (4, 2, one), (6, 2, other)):
        job.answers[first], job.sources[first], job.sizes[first] = np.zeros(2 * size, np.float32), worker, size
    draws = 100_000
    for _ in range(draws):
        coordinator._draw_audit(job)
    rate = 1 / jobs.AUDIT_EVERY * (1 - 1 / (2 * jobs.AUDIT_EVERY))  # at most one worker in a generation
    for pieces in ((0, 1, 2, 4, 5), (3, 6, 7)):
        expected_count = draws * rate / len(pieces)
        for piece in pieces:
            assert abs(drawn[piece] - expected_count) < 5 * expected_count**0.5
    assert len(one.audits) == len(other.audits) == jobs.AUDITS
