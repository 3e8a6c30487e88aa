"""An elastic fleet trains to the weights of a run in one process, whatever its workers answer."""

import asyncio
import enum
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import germline as gl
from germline.cli.options import StrategyOptions
from germline.engine import loop, opening, scoring
from germline.engine.follower import NEVER, Follower
from germline.engine.session import Session
from germline.engine.stopping import Stop
from germline.errors import BadInput
from germline.fleet import Fleet
from germline.fleet.cluster.hub import RemoteWorker
from germline.fleet.cluster.worker import RefusedError, WorkerProcess
from germline.strategies import GA, PESGD, PSO, SNES, AnyStrategy, Gradient, HybridES, MuLambda, OpenAIES
from tests.rogue import Rogue

GENERATIONS = 60
LONG = 600  # generations of a run that is watched
GERMLINE = [sys.executable, "-m", "germline"]
RUN = ["digits", "--population", "64", "--generations", str(GENERATIONS), "--device", "cpu", "--json"]


def train(recipe: gl.Recipe, fleet: Fleet, path: Path, generations: int, *callbacks: loop.Callback) -> str:
    """Train a recipe and return the hash of its final weights."""
    session = opening.start(recipe, path, seed=0, fleet=fleet, about={})
    summary = loop.run(session, Stop(generations=generations), callbacks)
    session.require_journal().close()
    return str(summary["theta_sha256"])


# Workers in threads of this process


class ThreadWorker:
    """A worker of a cluster in a thread of this process.

    Attributes:
        error: Why the coordinator has turned it away; None if it has not.
    """

    def __init__(self, fleet: gl.Elastic, follower: Follower, name: str) -> None:
        self.error: BadInput | None = None
        self.process = WorkerProcess(fleet.hub.address, follower, name, say=lambda text: None)
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            asyncio.run(self.process.run())
        except BadInput as error:
            self.error = error
        finally:
            self.process.thread.shutdown()

    def join(self) -> None:
        """Wait until the worker has ended, as it does with its run or when it is turned away."""
        self.thread.join(30)
        assert not self.thread.is_alive()


class Cluster:
    """A coordinator with workers in threads of this process.

    Attributes:
        lines: What the coordinator has said.
        sent: How many messages of each kind it has sent.
    """

    def __init__(self, recipe: gl.Recipe) -> None:
        self.recipe, self.fleet = recipe, gl.Elastic(device="cpu")
        self.workers: list[ThreadWorker] = []
        self.lines: list[str] = []
        self.sent: Counter[str] = Counter()
        self.fleet.hub.say = self.lines.append
        self.fleet.coordinator.check_processes = self.check_workers
        send = self.fleet.hub.send

        def count_and_send(worker: RemoteWorker, head: dict[str, Any], arrays: Sequence[bytes] = ()) -> None:
            self.sent[head["op"]] += 1
            send(worker, head, arrays)

        self.fleet.hub.send = count_and_send  # type: ignore[method-assign]

    def check_workers(self) -> None:
        """Fail if all workers were turned away: the coordinator would wait for others forever."""
        assert not self.workers or any(worker.error is None for worker in self.workers), self.lines

    def add(self, follower: Follower | None = None) -> ThreadWorker:
        """Start a worker, and wait until the coordinator has let it in."""
        follower = follower or Follower(lambda settings, seed: self.recipe, gl.Local("cpu", 1))
        self.workers.append(ThreadWorker(self.fleet, follower, f"worker-{len(self.workers)}"))
        until = time.monotonic() + 60
        while len(self.fleet.hub.workers) < len(self.workers):
            assert time.monotonic() < until, self.lines
            time.sleep(0.01)
        return self.workers[-1]

    def add_before_training(self, *followers: Follower | None) -> None:
        """Have workers join one after the other, once the run is set up and before its first generation."""
        admit = self.fleet.admit

        def admit_and_add(header: Any, sample: Any, batch: Any = None) -> None:
            admit(header, sample, batch)
            for follower in followers:
                self.add(follower)

        self.fleet.admit = admit_and_add  # type: ignore[method-assign]

    def close(self) -> None:
        self.fleet.close(ended=True)
        for worker in self.workers:
            worker.join()


@contextmanager
def open_cluster(recipe: gl.Recipe) -> Iterator[Cluster]:
    cluster = Cluster(recipe)
    try:
        yield cluster
    finally:
        cluster.close()


STRATEGIES: dict[str, AnyStrategy] = {
    "openai-es": OpenAIES(population=16, sigma=0.1, lr=0.05),
    "openai-es with torch.AdamW": OpenAIES(population=16, sigma=0.1, lr=0.05, optimizer="torch.AdamW"),
    "snes": SNES(population=16, sigma=0.1),
    "mu-lambda": MuLambda(population=16, parents=4),
    "ga": GA(population=16, parents=4, crossover="uniform"),
    "pso": PSO(population=8),
    "hybrid-es": HybridES(population=6, sigma=0.5, interval=3, adapt=1.2),
    "hybrid-es on dev": HybridES(population=6, variant="fixed", base="slot", epoch=4, select_on="dev"),
    "pesgd": PESGD(population=4, optimizer="adam", lr=0.01, sigma=0.01),
    "gradient": Gradient(lr=0.01),
}
WAYS = [
    (name, way)
    for name, strategy in STRATEGIES.items()
    for way in (("records", "weights") if strategy.kind == "evolve" else ("weights",))  # a record holds no gradient
]


@pytest.mark.parametrize(("name", "way"), WAYS)
def test_every_strategy_trains_to_the_weights_of_one_process(
    name: str, way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two workers follow by records or are sent weights, and none of them is ever found to have other weights."""
    x = torch.randn(48, 12, generator=torch.Generator().manual_seed(0))
    model = gl.seeded(0, lambda: nn.Sequential(nn.Linear(12, 10), nn.Tanh(), nn.Linear(10, 3)))
    data, dev = (x[:32], x[:32, :3].argmax(1)), (x[32:], x[32:, :3].argmax(1))
    recipe = gl.Recipe(model, data, dev, loss=F.cross_entropy, strategy=STRATEGIES[name], batch_size=8)
    monkeypatch.setattr(scoring, "block_size", lambda *arguments, **settings: 4)  # so that there is work for both
    generations = 45  # a worker's weights and scores are checked in full every 20 generations
    expected = train(recipe, gl.Local("cpu"), tmp_path / "local", generations)
    monkeypatch.setattr(Follower, "measure_tell", lambda follower: 0.0 if way == "records" else NEVER)
    with open_cluster(recipe) as cluster:
        cluster.add_before_training(None, None)
        assert train(recipe, cluster.fleet, tmp_path / "elastic", generations) == expected
        followed, other = ("tell", "state") if way == "records" else ("state", "tell")
        assert cluster.sent[followed] >= generations - 1
        assert cluster.sent[other] == 0
        assert len(cluster.fleet.crew.workers) == 2
        assert all(worker.pieces > 0 for worker in cluster.fleet.crew.workers.values())
    assert [worker.error for worker in cluster.workers] == [None, None]
    assert cluster.fleet.hub.refusals == []
    assert not [line for line in cluster.lines if "waiting for workers" not in line and "has joined" not in line]


# Faults


class WrongAnswer(enum.Enum):
    NAN = "NaN instead of scores"
    GARBAGE = "something that cannot be read as scores"
    SHORT = "fewer scores than were asked for"
    OLD = "scores of an older generation"
    ASTRAY = "scores of other weights"
    ERROR = "an error"
    ODD = "values of other types than those of the protocol"
    STALE = "again and again, that it has missed something"


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the hash of the weights of an undisturbed run in one process."""
    return train(make_digits(), gl.Local("cpu"), tmp_path_factory.mktemp("local") / "run", GENERATIONS)


def make_digits() -> gl.Recipe:
    """Return the recipe that the commands of these tests train."""
    return StrategyOptions(population=64).build_recipe("digits")[0]


@pytest.mark.parametrize("wrong", WrongAnswer, ids=lambda wrong: wrong.name.lower())
def test_a_wrong_answer_does_not_change_the_weights(wrong: WrongAnswer, expected: str, tmp_path: Path) -> None:
    recipe = make_digits()
    with open_cluster(recipe) as cluster:
        cluster.add_before_training(Rogue(recipe, wrong.name.lower()))

        def add_honest_worker(session: Session, row: Any) -> None:
            if row["generation"] == 0:
                cluster.add()

        assert train(recipe, cluster.fleet, tmp_path / "run", GENERATIONS, add_honest_worker) == expected
    rogue, honest = cluster.workers
    assert honest.error is None
    # an answer that belongs to nothing is ignored, as is that of a worker that was frozen for a while
    is_refused = wrong not in (WrongAnswer.OLD, WrongAnswer.ODD)
    assert [("is turned away" in line) for line in cluster.lines].count(True) == is_refused
    assert isinstance(rogue.error, RefusedError) == is_refused
