"""An elastic fleet trains to the weights of a run in one process, whatever fails on the way."""

import asyncio
import enum
import json
import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
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
from germline.fleet.cluster.keys import add_machine, create_authority, ssl_context
from germline.fleet.cluster.scheduler import ChunkScheduler
from germline.fleet.cluster.worker import RefusedError, WorkerProcess
from germline.fleet.spmd.launch import free_port
from germline.genome import theta_sha256
from germline.recipes import make_recipe
from germline.strategies import GA, PESGD, PSO, SNES, AnyStrategy, Gradient, HybridES, MuLambda, OpenAIES
from tests.rogue import Rogue
from tests.test_faults import count_generations, is_running

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


class Fault(enum.Enum):
    KILLED = "a worker is killed"
    FROZEN = "a worker is frozen, and wakes up later"
    CUT = "the connection to a worker is cut, and neither side is told"
    SLOW = "a worker becomes ten times slower"
    COORDINATOR = "the coordinator is killed and started again"
    DISK = "the disk of the journal is full"


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


class ProcessFleet:
    """A coordinator and its workers, as processes of this machine."""

    def __init__(self, folder: Path, generations: int = GENERATIONS) -> None:
        self.generations = str(generations)
        self.folder, self.port, self.status = folder, free_port(), free_port()
        self.workers: list[subprocess.Popen[bytes]] = []
        self.log, self.result = folder / "coordinator.txt", folder / "result.txt"
        self.serve()

    def serve(self, limit: int | None = None) -> None:
        """Start the coordinator; ``limit`` is the largest size of a file that it may write."""
        addresses = ["--listen", f"127.0.0.1:{self.port}", "--status", f"127.0.0.1:{self.status}"]
        command = [*GERMLINE, "serve", *RUN, *addresses, "--runs", str(self.folder / "runs"), "--name", "run"]
        command += ["--generations", self.generations]
        with self.log.open("a") as log, self.result.open("w") as result:
            self.coordinator = subprocess.Popen(
                command,
                stdout=result,
                stderr=log,
                preexec_fn=None if limit is None else lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)),
            )

    def add(self, port: int | None = None) -> "subprocess.Popen[bytes]":
        """Start a worker."""
        command = [*GERMLINE, "worker", f"127.0.0.1:{port or self.port}", "--recipe", "digits", "--device", "cpu"]
        with (self.folder / f"worker{len(self.workers)}.txt").open("w") as log:
            self.workers.append(subprocess.Popen([*command, "--workers", "1"], stderr=log))
        return self.workers[-1]

    def wait(self, generation: int) -> None:
        """Wait until some generations are finished."""
        until = time.monotonic() + 120
        while count_generations(self.folder / "runs" / "run") < generation and self.coordinator.poll() is None:
            assert time.monotonic() < until, self.log.read_text()
            time.sleep(0.05)

    def finish(self) -> dict[str, Any]:
        """Wait for the end of the run, and return its summary."""
        assert self.coordinator.wait(180) == 0, self.log.read_text()
        summary: dict[str, Any] = json.loads(self.result.read_text().splitlines()[-1])
        return summary

    def close(self) -> None:
        for process in (self.coordinator, *self.workers):
            with suppress(ProcessLookupError):
                process.send_signal(signal.SIGCONT)
            process.kill()
            process.wait()


@pytest.fixture
def start_fleet(tmp_path: Path) -> Iterator[Callable[..., ProcessFleet]]:
    """Return a function that starts a coordinator for a number of generations."""
    fleets: list[ProcessFleet] = []

    def start(generations: int = GENERATIONS) -> ProcessFleet:
        fleets.append(ProcessFleet(tmp_path, generations))
        return fleets[-1]

    yield start
    for fleet in fleets:
        fleet.close()


@contextmanager
def forward_port(port: int) -> Iterator[tuple[int, threading.Event]]:
    """Yield a port that forwards to another one, and an event that cuts it: then nothing passes, either way."""
    cut, listener = threading.Event(), socket.create_server(("127.0.0.1", 0))
    sockets: list[socket.socket] = []

    def forward(source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                if cut.is_set():
                    return
                target.sendall(data)

    def accept() -> None:
        with suppress(OSError):
            while True:
                near = listener.accept()[0]
                sockets.append(near)
                if cut.is_set():
                    continue
                far = socket.create_connection(("127.0.0.1", port))
                sockets.append(far)
                for pair in ((near, far), (far, near)):
                    threading.Thread(target=forward, args=pair, daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    try:
        yield listener.getsockname()[1], cut
    finally:
        for end in (listener, *sockets):
            end.close()


@contextmanager
def slow_down(process: int) -> Iterator[None]:
    """Stop a process for nine tenths of the time."""
    is_over = threading.Event()

    def stop_and_go() -> None:
        with suppress(ProcessLookupError):
            while not is_over.is_set():
                os.kill(process, signal.SIGSTOP)
                is_over.wait(0.09)
                os.kill(process, signal.SIGCONT)
                is_over.wait(0.01)

    thread = threading.Thread(target=stop_and_go, daemon=True)
    thread.start()
    yield
    is_over.set()
    thread.join()


@pytest.mark.parametrize("fault", Fault, ids=lambda fault: fault.name.lower())
def test_a_fault_does_not_change_the_weights(
    fault: Fault, start_fleet: Callable[..., ProcessFleet], expected: str
) -> None:
    fleet = start_fleet()
    fleet.add()
    if fault == Fault.DISK:
        fleet.wait(10)
        fleet.coordinator.kill()
        fleet.coordinator.wait()
        size = (fleet.folder / "runs" / "run" / "journal.sqlite").stat().st_size
        fleet.serve(limit=size + 4096)
        assert fleet.coordinator.wait(120) == 1
        assert "error: " in fleet.log.read_text()
        fleet.serve()
        summary = fleet.finish()
    elif fault == Fault.CUT:
        with forward_port(fleet.port) as (port, cut):
            fleet.add(port)
            fleet.wait(10)
            cut.set()
            summary = fleet.finish()
    else:
        victim = fleet.add()
        fleet.wait(10)
        if fault == Fault.KILLED:
            victim.kill()
            summary = fleet.finish()
        elif fault == Fault.FROZEN:
            victim.send_signal(signal.SIGSTOP)
            fleet.wait(30)
            victim.send_signal(signal.SIGCONT)
            summary = fleet.finish()
        elif fault == Fault.SLOW:
            with slow_down(victim.pid):
                summary = fleet.finish()
        else:
            fleet.coordinator.kill()
            fleet.coordinator.wait()
            fleet.serve()
            summary = fleet.finish()
    assert (summary["theta_sha256"], summary["generations"]) == (expected, GENERATIONS)


def test_one_command_starts_a_fleet(expected: str, tmp_path: Path) -> None:
    command = [*GERMLINE, "train", *RUN, "--fleet", "elastic", "--workers", "2", "--runs", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout.splitlines()[-1])
    assert summary["theta_sha256"] == expected
    assert summary["bytes_sent"] > 0
    assert done.stderr.count("the run has ended") == 2
    assert "Fatal" not in done.stderr


def read(address: str) -> bytes:
    with closing(urllib.request.urlopen(address, timeout=5)) as answer:
        content: bytes = answer.read()
        return content


def test_the_status_page_and_connections_that_are_turned_away(start_fleet: Callable[..., ProcessFleet]) -> None:
    """Anything may connect to the coordinator's port: the run goes on."""
    fleet = start_fleet(LONG)
    half_open = socket.create_connection(("127.0.0.1", fleet.port)) if wait_for_port(fleet.port) else None
    with socket.create_connection(("127.0.0.1", fleet.port)) as rude:
        rude.sendall(np.random.default_rng(0).bytes(100_000))
    fleet.add()
    command = [*GERMLINE, "worker", f"127.0.0.1:{fleet.port}", "--recipe", "mnist-3m", "--device", "cpu"]
    other = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert other.returncode == 2
    assert "away: the coordinator trains digits, and this worker was given mnist-3m." in other.stderr
    fleet.wait(5)
    status = json.loads(read(f"http://127.0.0.1:{fleet.status}/status.json"))
    assert status["workers"][0]["device"] == "cpu"
    assert status["generation"] >= 5
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        assert b"status.json" in read(f"http://127.0.0.1:{fleet.status}/")
    else:
        words = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=3000", "--dump-dom"]
        page = subprocess.run([*words, f"http://127.0.0.1:{fleet.status}/"], capture_output=True, text=True, timeout=60)
        assert "digits by openai-es" in page.stdout
        assert re.search(r"<td>cpu</td>.*<td class=.n.>100 %</td>", page.stdout), page.stdout
        assert "<path " in page.stdout  # the curve
    assert fleet.finish()["generations"] == LONG
    assert half_open is not None
    half_open.close()


def wait_for_port(port: int) -> bool:
    """Return whether a connection to a port is accepted within a minute."""
    until = time.monotonic() + 60
    while time.monotonic() < until:
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return True
        time.sleep(0.1)
    return False


# The scheduler, on a simulated clock


def test_every_piece_is_done_once_and_slow_workers_do_few() -> None:
    """One of three workers of different speeds dies."""
    speeds, clock = {1: 100.0, 2: 50.0, 3: 10.0}, 0.0
    scheduler = ChunkScheduler(200, dict.fromkeys(speeds, 0.0), smallest=0.01)
    done: list[int] = []
    free = dict.fromkeys(speeds, 0.0)
    ends: dict[int, float] = {}
    while not scheduler.is_finished:
        for worker in list(speeds):
            while (chunk := scheduler.next_chunk(worker, clock)) is not None:
                free[worker] = max(free[worker], clock) + chunk.size / speeds[worker]
                ends[chunk.number] = free[worker]
        number = min(ends, key=lambda n: ends[n]) if ends else None
        if number is None:
            clock += 0.01
            continue
        clock = max(clock, ends.pop(number))
        if number not in scheduler.out:
            continue
        worker = scheduler.out[number].worker
        if worker == 2 and clock > 0.5:
            del speeds[2]
            scheduler.drop_worker(2)
            ends = {n: end for n, end in ends.items() if n in scheduler.out}
            continue
        scheduler.rates[worker] = speeds[worker]
        completed = scheduler.complete(number, clock)
        if completed is not None:
            done.extend(range(completed.first, completed.last))
    assert sorted(done) == list(range(200))
    assert clock < 2.5  # 200 pieces at 110 a second take 1.8


@pytest.mark.parametrize("pieces", [32, 64, 128])
def test_a_worker_ten_times_slower_costs_less_than_a_tenth(pieces: int) -> None:
    """The loss is compared with three workers that never wait; messages take 2 ms."""
    speeds, message, rng, totals = {1: 33.0, 2: 33.0, 3: 3.3}, 0.002, np.random.default_rng(0), []
    for _ in range(50):
        scheduler = ChunkScheduler(pieces, {worker: speed * rng.uniform(0.9, 1.1) for worker, speed in speeds.items()})
        clock, free, ends = 0.0, dict.fromkeys(speeds, 0.0), dict[int, float]()
        while not scheduler.is_finished:
            for worker, speed in speeds.items():
                while (chunk := scheduler.next_chunk(worker, clock)) is not None:
                    free[worker] = max(free[worker], clock + message) + chunk.size / speed * rng.uniform(0.9, 1.1)
                    ends[chunk.number] = free[worker] + message
            number = min(ends, key=lambda n: ends[n])
            clock = ends.pop(number)
            scheduler.complete(number, clock)
        totals.append(clock)
    assert pieces / sum(speeds.values()) / np.mean(totals) > 0.9


@pytest.mark.parametrize(("workers", "pieces"), [(3, 1), (5, 2), (9, 4), (12, 5)])
def test_many_workers_finish_few_pieces(workers: int, pieces: int) -> None:
    rates = {worker: 1.0 + 0.1 * worker for worker in range(workers)}
    scheduler, clock = ChunkScheduler(pieces, rates), 0.0
    while not scheduler.is_finished:
        chunks = [chunk for worker in rates if (chunk := scheduler.next_chunk(worker, clock)) is not None]
        assert chunks or scheduler.out
        clock += 1.0
        scheduler.complete(next(iter(scheduler.out)), clock)


# Keys


def test_only_workers_of_the_same_authority_are_let_in(tmp_path: Path) -> None:
    for name in ("ours", "theirs"):
        create_authority(tmp_path / name)
        add_machine(tmp_path / name, "machine")
    assert (tmp_path / "ours" / "ca.key").stat().st_mode & 0o077 == 0
    port, runs = free_port(), ["--runs", str(tmp_path / "runs")]
    ours = ["--keys", str(tmp_path / "ours")]
    addresses = ["--listen", f"127.0.0.1:{port}", "--status", f"127.0.0.1:{free_port()}"]
    log = tmp_path / "coordinator.txt"
    with log.open("w") as file:
        serve = [*GERMLINE, "serve", *RUN, *addresses, *ours, *runs]
        coordinator = subprocess.Popen(serve, stdout=subprocess.PIPE, stderr=file)
    command = [*GERMLINE, "worker", f"127.0.0.1:{port}", "--recipe", "digits", "--device", "cpu"]
    others: list[subprocess.Popen[bytes]] = []
    errors = [tmp_path / "no-keys.txt", tmp_path / "other-keys.txt"]
    try:
        assert wait_for_port(port)
        for stderr, words in zip(errors, ([], ["--keys", str(tmp_path / "theirs" / "machine")]), strict=True):
            with stderr.open("w") as file:
                others.append(subprocess.Popen([*command, *words], stderr=file))
        assert others[1].wait(60) == 2
        assert "not of one authority" in errors[1].read_text()
        until = time.monotonic() + 60
        while "trying again" not in errors[0].read_text():
            assert time.monotonic() < until, errors[0].read_text()
            time.sleep(0.1)
        assert others[0].poll() is None
        assert "TLS handshake failed" in log.read_text()
        assert "has joined" not in log.read_text()
        words = [*command, "--keys", str(tmp_path / "ours" / "machine")]
        friend = subprocess.run(words, capture_output=True, text=True)
        assert friend.returncode == 0, friend.stderr
        assert coordinator.wait(60) == 0, log.read_text()
    finally:
        for process in (coordinator, *others):
            process.kill()
            process.communicate()


def test_the_keys_of_a_worker_do_not_make_a_coordinator(tmp_path: Path) -> None:
    create_authority(tmp_path)
    worker = add_machine(tmp_path, "machine")
    for keys, is_accepted in ((tmp_path, True), (worker, False)):
        errors: list[str] = []
        near, far = socket.socketpair()
        contexts = [(ssl_context(keys, server=True), far, True), (ssl_context(worker, server=False), near, False)]
        threads = [threading.Thread(target=shake_hands, args=(*context, errors)) for context in contexts]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        assert errors == ([] if is_accepted else ["SSLCertVerificationError"])


def shake_hands(context: Any, end: socket.socket, server: bool, errors: list[str]) -> None:
    """Open one end of a connection; note the error of the worker's end, if there is one."""
    try:
        context.wrap_socket(end, server_side=server).close()
    except OSError as error:
        end.close()
        if not server:
            errors.append(type(error).__name__)


# Workers that the coordinator starts


def test_workers_that_cannot_start_are_not_started_again_and_again(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("import os\nos._exit(7)\n")
    fleet = gl.Elastic(device="cpu", workers=1, recipe=str(tmp_path / "mine.py"))
    search = gl.Search(nn.Linear(4, 2), OpenAIES(population=8), loss=F.mse_loss, fleet=fleet)
    with pytest.raises(BadInput, match="exit code 7"):
        search.step(torch.zeros(3, 4), torch.zeros(3, 2))
    fleet.close()


def test_without_keys_the_coordinator_listens_to_this_machine_only(tmp_path: Path) -> None:
    command = [*GERMLINE, "serve", *RUN, "--listen", "0.0.0.0:0", "--runs", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    assert "keys" in done.stderr


def test_the_workers_of_a_search_are_sent_its_batches(tmp_path: Path) -> None:
    """They have the model and the loss from a recipe."""
    (tmp_path / "mine.py").write_text(
        "import torch, germline as gl\n"
        "from torch import nn\n"
        "def recipe():\n"
        "    net = gl.seeded(0, lambda: nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)))\n"
        "    x = torch.zeros(8, 4)\n"
        "    return gl.Recipe(net, (x, torch.zeros(8, dtype=torch.int64)), loss=nn.functional.cross_entropy)\n"
    )
    recipe = make_recipe(str(tmp_path / "mine.py"), {}, 0)
    hashes = []
    for fleet in (gl.Local("cpu"), gl.Elastic(device="cpu", workers=1, recipe=str(tmp_path / "mine.py"))):
        search = gl.Search(recipe.model, OpenAIES(population=24), loss=recipe.loss, fleet=fleet)
        for x in torch.randn(6, 16, 4, generator=torch.Generator().manual_seed(0)):
            search.step(x, (x.sum(1) > 0).long())
        hashes.append(theta_sha256(search._session.state.theta))
        if isinstance(fleet, gl.Elastic):
            fleet.close(ended=True)
    assert hashes[0] == hashes[1]


def test_workers_end_with_the_coordinator_that_started_them(tmp_path: Path) -> None:
    command = [*GERMLINE, "train", *RUN, "--generations", "100000", "--fleet", "elastic", "--workers", "1"]
    with subprocess.Popen([*command, "--runs", str(tmp_path), "--name", "run"], stderr=subprocess.DEVNULL) as process:
        while count_generations(tmp_path / "run") < 2 and process.poll() is None:
            time.sleep(0.1)
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        process.kill()
    assert len(children) == 1
    until = time.monotonic() + 30
    while is_running(int(children[0])):
        assert time.monotonic() < until
        time.sleep(0.1)
