"""A cluster trains to the weights of a run in one process, whatever its workers answer."""

import asyncio
import enum
import itertools
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import pytest
import torch
import torch.nn.functional as F
from distributed import Scheduler, Worker
from rogues import Rogue
from torch import nn

import germline as gl
from germline.cli.options import StrategyOptions
from germline.engine import loop, opening, scoring
from germline.engine.follower import NEVER, Follower
from germline.engine.session import Session
from germline.engine.stopping import Stop
from germline.errors import BadInput
from germline.fleet import Fleet
from germline.fleet.cluster import dask
from germline.fleet.cluster.backend import Message
from germline.fleet.cluster.crew import RemoteWorker
from germline.fleet.cluster.keys import create_authority
from germline.fleet.cluster.worker import Responder
from germline.strategies import GA, PESGD, PSO, SNES, AnyStrategy, Gradient, HybridES, MuLambda, OpenAIES

T = TypeVar("T")
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


# A Dask cluster in a thread of this process


class ThreadWorker:
    """A Dask worker in a thread of this process.

    Attributes:
        reasons: Why the coordinator has turned it away, or None if the run has ended.
    """

    def __init__(self, name: str, make_follower: Callable[[gl.Local], Follower]) -> None:
        self.reasons: list[str | None] = []
        about: Any = {"say": lambda text: None, "on_end": self.reasons.append, "make_follower": make_follower}
        self.responder = Responder(name, fleet=gl.Local("cpu", 1), **about)
        self.server: Any = None

    @property
    def is_refused(self) -> bool:
        return any(reason is not None for reason in self.reasons)


class ThreadCluster:
    """A Dask scheduler with workers, in a thread of this process, and a coordinator.

    Attributes:
        lines: What the coordinator has said.
        sent: How many messages of each kind it has sent.
        sizes: The bytes of their arrays.
        addresses: The generations at which noise is drawn, of all chunks.
    """

    def __init__(self) -> None:
        self.workers: list[ThreadWorker] = []
        self.lines: list[str] = []
        self.sent: Counter[str] = Counter()
        self.sizes: Counter[str] = Counter()
        self.addresses: list[int] = []
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()
        self.scheduler = self.run(self.start_scheduler())
        self.fleet = gl.Dask(self.scheduler.address, device="cpu")
        self.fleet.crew.say = self.lines.append
        self.fleet.coordinator.check_processes = self.check_workers
        send = self.fleet.crew.send

        def count_and_send(worker: RemoteWorker, message: Message) -> None:
            self.sent[message.head["op"]] += 1
            self.sizes[message.head["op"]] += sum(map(len, message.arrays))
            self.addresses += [message.head["address"]] if "address" in message.head else []
            send(worker, message)

        self.fleet.crew.send = count_and_send  # type: ignore[method-assign]

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(60)

    async def start_scheduler(self) -> Any:
        return await Scheduler(host="127.0.0.1", port=0, dashboard=False, dashboard_address="127.0.0.1:0")

    async def start_worker(self, worker: ThreadWorker, threads: int) -> None:
        where: Any = {"host": "127.0.0.1", "dashboard_address": "127.0.0.1:0"}
        worker.server = Worker(self.scheduler.address, nthreads=threads, memory_limit=0, **where)
        worker.server.extensions["germline"] = worker.responder
        await worker.server

    def check_workers(self) -> None:
        """Fail if all workers were turned away: the coordinator would wait for others forever."""
        assert not self.workers or not all(worker.is_refused for worker in self.workers), self.lines

    def add(self, make_follower: Callable[[gl.Local], Follower] = Follower, threads: int = 1) -> ThreadWorker:
        """Start a worker."""
        worker = ThreadWorker(f"worker-{len(self.workers)}", make_follower)
        self.workers.append(worker)
        self.run(self.start_worker(worker, threads))
        return worker

    def wait_for_workers(self, count: int) -> None:
        """Wait until the coordinator has let some workers in."""
        until = time.monotonic() + 60
        while len(self.fleet.crew.workers) < count:
            assert time.monotonic() < until, self.lines
            self.fleet.coordinator.take_events(0.1)

    def add_before_training(self, *followers: Callable[[gl.Local], Follower], threads: int = 1) -> None:
        """Have workers join once the run is set up and before its first generation."""
        admit = self.fleet.admit

        def admit_and_add(*arguments: Any) -> None:
            admit(*arguments)
            for follower in followers:
                self.add(follower, threads)
            self.wait_for_workers(len(followers))

        self.fleet.admit = admit_and_add  # type: ignore[assignment,method-assign]

    def close(self) -> None:
        self.fleet.close(ended=True)
        for worker in self.workers:
            self.run(worker.server.close(timeout=2))
        self.run(self.scheduler.close())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(10)
        self.loop.close()


@contextmanager
def open_cluster() -> Iterator[ThreadCluster]:
    cluster = ThreadCluster()
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
    for way in (("members",) if strategy.kind == "train_members" else ("records", "weights"))
]


class Ahead(Follower):
    """A worker that says it is further than the run: the coordinator before was killed, or it says what is not true."""

    versions: ClassVar[Iterator[str]] = itertools.cycle(["7", "0+", "999999999"])

    def join(self, *about: Any) -> Message:
        head, arrays = super().join(*about)
        return Message(head | {"version": next(self.versions), "whole": True}, arrays)


@pytest.mark.parametrize("name", ["openai-es", "hybrid-es"])
def test_workers_that_are_ahead_of_the_run_are_sent_its_weights(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scoring, "block_size", lambda *arguments, **settings: 4)
    monkeypatch.setattr(Follower, "measure_tell", lambda follower: 0.0)
    recipe = make_digits().with_strategy(STRATEGIES[name])
    expected = train(recipe, gl.Local("cpu"), tmp_path / "local", 6)
    with open_cluster() as cluster:
        cluster.add_before_training(Ahead, Ahead, Ahead)
        assert train(recipe, cluster.fleet, tmp_path / "run", 6) == expected
        assert not any(worker.is_refused for worker in cluster.workers)


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
    with open_cluster() as cluster:
        cluster.add_before_training(Follower, Follower)
        assert train(recipe, cluster.fleet, tmp_path / "dask", generations) == expected
        allowed = {"records": {"tell", "gradient"}, "weights": {"state"}, "members": set[str]()}[way]
        seen = {op for op in ("tell", "gradient", "state") if cluster.sent[op]}
        assert seen <= allowed
        assert way == "members" or cluster.sent["tell"] + cluster.sent["state"] >= generations - 1
        assert len(cluster.fleet.crew.workers) == 2
        # who does how much depends on time: on a busy machine all of it may be the work of one
        assert any(worker.pieces > 0 for worker in cluster.fleet.crew.workers.values())
    assert [worker.reasons for worker in cluster.workers] == [[None], [None]]
    assert cluster.fleet.admission.refusals == []
    assert not [line for line in cluster.lines if "waiting for" not in line and "has joined" not in line]


def test_answers_between_generations_are_awaited_no_longer(tmp_path: Path) -> None:
    """Workers start the next generation before this one is reported, and what they answer meanwhile counts."""
    recipe = make_digits()
    expected = train(recipe, gl.Local("cpu"), tmp_path / "local", 20)
    with open_cluster() as cluster:
        cluster.add_before_training(Follower, Follower)
        coordinator, started = cluster.fleet.coordinator, []

        def take_all_answers(session: Session, row: Any) -> None:
            started.append(coordinator.generation == session.generation and coordinator.job is not None)
            until = time.monotonic() + 30
            while any(worker.pending for worker in cluster.fleet.crew.workers.values()):
                assert time.monotonic() < until
                coordinator.take_events(0.1)

        assert train(recipe, cluster.fleet, tmp_path / "dask", 20, take_all_answers) == expected
        assert started == [True] * 19 + [False]


def test_the_workers_probe_sigma(tmp_path: Path) -> None:
    """The coordinator scores no member of a probe itself, and chooses as one process does."""
    recipe = replace(make_digits(), strategy=OpenAIES(population=32, sigma="auto"))
    expected = train(recipe, gl.Local("cpu"), tmp_path / "local", 3)
    with open_cluster() as cluster:
        cluster.add_before_training(Follower)
        assert train(recipe, cluster.fleet, tmp_path / "dask", 3) == expected
        probes = Counter(address > 1 << 31 for address in cluster.addresses)
        assert probes[True] >= 3  # sigmas
        assert probes[False] >= 3


def test_large_arrays_take_variables_that_are_emptied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights and gradients of a million parameters pass through the scheduler, and nothing of them stays there.

    If the coordinator closes while workers compute, what it has sent and what they answer is dropped.
    """
    x = torch.randn(8, 1024, generator=torch.Generator().manual_seed(0))
    model = gl.seeded(0, lambda: nn.Sequential(nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 8)))
    monkeypatch.setattr(Follower, "measure_tell", lambda follower: NEVER)  # so that weights are sent
    strategies: dict[str, AnyStrategy] = {"snes": SNES(population=4, sigma=0.01), "gradient": Gradient(lr=0.01)}
    for name, strategy in strategies.items():
        recipe = gl.Recipe(model, (x, x[:, :8].argmax(1)), loss=F.cross_entropy, strategy=strategy)
        expected = train(recipe, gl.Local("cpu"), tmp_path / f"local-{name}", 4)
        with open_cluster() as cluster:
            cluster.add_before_training(Follower, Follower)
            assert train(recipe, cluster.fleet, tmp_path / name, 4) == expected
            assert cluster.sizes["state"] >= 3 * 4_000_000  # in each generation but the first, to one worker or both
            until = time.monotonic() + 30
            variables = cluster.scheduler.extensions["variables"].variables
            while any(record["value"] for record in variables.values()):
                assert time.monotonic() < until
                cluster.fleet.coordinator.take_events(0.05)
            assert variables
            assert len(cluster.scheduler.extensions["spans"].spans) < 5  # not one for each call
            monkeypatch.setattr(dask, "CLOSING", 0.0)
            for worker in cluster.fleet.crew.workers.values():
                cluster.fleet.crew.send(worker, Message({"op": "batch"}, [bytes(4_000_000)]))
            cluster.fleet.close(ended=True)
            while any(worker.server.extensions[dask.INBOXES] for worker in cluster.workers):
                assert time.monotonic() < until
                time.sleep(0.05)
            assert not any(record["value"] for record in variables.values())


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
    with open_cluster() as cluster:
        cluster.add_before_training(lambda fleet: Rogue(fleet, wrong.name.lower()))

        def add_honest_worker(session: Session, row: Any) -> None:
            if row["generation"] == 0:
                cluster.add()

        assert train(recipe, cluster.fleet, tmp_path / "run", GENERATIONS, add_honest_worker) == expected
    rogue, honest = cluster.workers
    assert not honest.is_refused
    # an answer that belongs to nothing is ignored, as is that of a worker that was frozen for a while
    is_refused = wrong not in (WrongAnswer.OLD, WrongAnswer.ODD)
    assert [("is turned away" in line) for line in cluster.lines].count(True) == is_refused
    assert rogue.is_refused == is_refused


# Addresses


WRONG_SCHEDULERS = {
    "no-port": "HOST:PORT, .* not 'no-port'",
    "http://127.0.0.1:1": "begins with tcp:// or tls://, not http://",
    "tls://127.0.0.1:1": "needs keys: name a folder",
    "127.0.0.1:1": r"Cannot connect to a Dask scheduler at tcp://127\.0\.0\.1:1: .* uses no keys either",
}


@pytest.mark.parametrize(("address", "message"), WRONG_SCHEDULERS.items(), ids=str)
def test_an_address_without_a_scheduler_is_an_error_in_words(
    address: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dask, "CONNECT", 0.2)
    with pytest.raises(BadInput, match=message):
        gl.Dask(address)


def test_keys_are_for_a_scheduler_with_tls(tmp_path: Path) -> None:
    create_authority(tmp_path / "keys")
    with pytest.raises(BadInput, match=r"give tls://127\.0\.0\.1:1, or 127\.0\.0\.1:1, instead"):
        gl.Dask("tcp://127.0.0.1:1", keys=tmp_path / "keys")


# Connections


def test_workers_join_again_if_the_coordinator_connects_again(monkeypatch: pytest.MonkeyPatch) -> None:
    with open_cluster() as cluster:
        cluster.add()
        backend, kinds = cluster.fleet.backend, []
        assert isinstance(backend, dask.DaskBackend)
        for deaf in (dask.DEAF, -1.0, dask.DEAF):  # in the second look the scheduler seems to send nothing
            monkeypatch.setattr(dask, "DEAF", deaf)
            backend.last_look = 0.0
            backend.look()
            kinds.append(backend.events.get(timeout=10).kind)
        assert kinds == ["joined", "left", "joined"]
