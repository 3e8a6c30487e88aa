"""A fleet of which anything may fail ends as if nothing had happened."""

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
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import germline as gl
from germline.fleet import keys
from germline.fleet.deck import Deck
from germline.fleet.launch import free_port
from germline.genome import theta_sha256
from germline.recipes import make_recipe
from tests.test_faults import finished, runs

GENERATIONS = 60
LONG = 600  # generations, where somebody has to look on
GERMLINE = [sys.executable, "-m", "germline"]
RUN = ["digits", "--population", "64", "--generations", str(GENERATIONS), "--device", "cpu", "--json"]
HERE = Path(__file__).parent.parent


class Fault(enum.Enum):
    KILLED = "a worker is killed"
    FROZEN = "a worker is frozen, and wakes up later"
    CUT = "the way to a worker is cut, without a word to either side"
    SLOW = "a worker becomes ten times slower"
    NAN = "a worker answers with NaN"
    GARBAGE = "a worker answers with something else than scores"
    SHORT = "a worker answers with fewer scores than it was asked for"
    OLD = "a worker answers to an older generation"
    ASTRAY = "a worker has other weights"
    ERROR = "a worker fails at its work"
    ODD = "a worker answers in another language"
    STALE = "a worker says again and again that it has missed something"
    COORDINATOR = "the coordinator is killed and started again"
    DISK = "the disk under the journal is full"


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The weights of an undisturbed run in one process."""
    runs = tmp_path_factory.mktemp("isolated")
    done = subprocess.run([*GERMLINE, "train", *RUN, "--runs", str(runs)], capture_output=True, text=True, check=True)
    return str(json.loads(done.stdout.splitlines()[-1])["theta_sha256"])


class Fleet:
    """A coordinator and its workers, as processes of this machine."""

    def __init__(self, folder: Path, generations: int = GENERATIONS) -> None:
        self.generations = str(generations)
        self.folder, self.port, self.status = folder, free_port(), free_port()
        self.workers: list[subprocess.Popen[bytes]] = []
        self.said, self.result = folder / "coordinator.txt", folder / "result.txt"
        self.serve()

    def serve(self, limit: int | None = None) -> None:
        """Starts the coordinator; it may be that no file can grow beyond a limit."""
        addresses = ["--listen", f"127.0.0.1:{self.port}", "--status", f"127.0.0.1:{self.status}"]
        command = [*GERMLINE, "serve", *RUN, *addresses, "--runs", str(self.folder / "runs"), "--name", "run"]
        command += ["--generations", self.generations]
        with self.said.open("a") as said, self.result.open("w") as result:
            self.coordinator = subprocess.Popen(
                command,
                stdout=result,
                stderr=said,
                preexec_fn=None if limit is None else lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)),
            )

    def join(self, *command: str, port: int | None = None) -> "subprocess.Popen[bytes]":
        where = f"127.0.0.1:{port or self.port}"
        usual = [*GERMLINE, "worker", where, "--recipe", "digits", "--device", "cpu", "--workers", "1"]
        rogue = [sys.executable, "-m", "tests.rogue", where, *command]
        with (self.folder / f"worker{len(self.workers)}.txt").open("w") as said:
            self.workers.append(subprocess.Popen(rogue if command else usual, stderr=said, cwd=HERE))
        return self.workers[-1]

    def wait(self, generation: int) -> None:
        until = time.monotonic() + 120
        while finished(self.folder / "runs" / "run") < generation and self.coordinator.poll() is None:
            assert time.monotonic() < until, self.words()
            time.sleep(0.05)

    def words(self) -> str:
        return self.said.read_text()

    def ended(self) -> dict[str, Any]:
        assert self.coordinator.wait(180) == 0, self.words()
        found: dict[str, Any] = json.loads(self.result.read_text().splitlines()[-1])
        return found

    def close(self) -> None:
        for process in (self.coordinator, *self.workers):
            with suppress(ProcessLookupError):
                process.send_signal(signal.SIGCONT)
            process.kill()
            process.wait()


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    made = Fleet(tmp_path)
    yield made
    made.close()


@contextmanager
def passage(port: int) -> Iterator[tuple[int, threading.Event]]:
    """A port from which everything is passed on to another, until the way is cut: then nothing is, either way."""
    cut, listener = threading.Event(), socket.create_server(("127.0.0.1", 0))
    sockets: list[socket.socket] = []

    def carry(here: socket.socket, there: socket.socket) -> None:
        with suppress(OSError):
            while data := here.recv(1 << 16):
                if cut.is_set():
                    return
                there.sendall(data)

    def accept() -> None:
        with suppress(OSError):
            while True:
                here = listener.accept()[0]
                sockets.append(here)
                if cut.is_set():
                    continue
                there = socket.create_connection(("127.0.0.1", port))
                sockets.append(there)
                for pair in ((here, there), (there, here)):
                    threading.Thread(target=carry, args=pair, daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    try:
        yield listener.getsockname()[1], cut
    finally:
        for one in (listener, *sockets):
            one.close()


@contextmanager
def slowed(process: int) -> Iterator[None]:
    """Stopped for nine tenths of the time."""
    over = threading.Event()

    def stop_and_go() -> None:
        with suppress(ProcessLookupError):
            while not over.is_set():
                os.kill(process, signal.SIGSTOP)
                over.wait(0.09)
                os.kill(process, signal.SIGCONT)
                over.wait(0.01)

    thread = threading.Thread(target=stop_and_go, daemon=True)
    thread.start()
    yield
    over.set()
    thread.join()


@pytest.mark.parametrize("fault", Fault, ids=lambda fault: fault.name.lower())
def test_whatever_fails_the_result_is_the_same(fault: Fault, fleet: Fleet, expected: str) -> None:
    if fault.name.lower() in ("nan", "garbage", "short", "old", "astray", "error", "odd", "stale"):
        rogue = fleet.join(fault.name.lower())
        fleet.wait(1)
        fleet.join()
        summary = fleet.ended()
        assert summary["theta_sha256"] == expected
        turned_away = fault not in (Fault.OLD, Fault.ODD)  # which nobody waits for, as for that of one who was frozen
        assert ("is turned away" in fleet.words()) == turned_away
        if turned_away:
            assert rogue.wait(30) == 2
        return
    fleet.join()
    if fault == Fault.DISK:
        fleet.wait(10)
        fleet.coordinator.kill()
        fleet.coordinator.wait()
        size = (fleet.folder / "runs" / "run" / "journal.sqlite").stat().st_size
        fleet.serve(limit=size + 4096)
        assert fleet.coordinator.wait(120) == 1
        assert "error: " in fleet.words()
        fleet.serve()
        summary = fleet.ended()
    elif fault == Fault.CUT:
        with passage(fleet.port) as (port, cut):
            fleet.join(port=port)
            fleet.wait(10)
            cut.set()
            summary = fleet.ended()
    else:
        other = fleet.join()
        fleet.wait(10)
        if fault == Fault.KILLED:
            other.kill()
            summary = fleet.ended()
        elif fault == Fault.FROZEN:
            other.send_signal(signal.SIGSTOP)
            fleet.wait(30)
            other.send_signal(signal.SIGCONT)
            summary = fleet.ended()
        elif fault == Fault.SLOW:
            with slowed(other.pid):
                summary = fleet.ended()
        else:
            fleet.coordinator.kill()
            fleet.coordinator.wait()
            fleet.serve()
            summary = fleet.ended()
    assert (summary["theta_sha256"], summary["generations"]) == (expected, GENERATIONS)


def test_a_fleet_is_one_command(expected: str, tmp_path: Path) -> None:
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


@pytest.fixture
def long_fleet(tmp_path: Path) -> Iterator[Fleet]:
    made = Fleet(tmp_path, LONG)
    yield made
    made.close()


def test_the_status_page_and_who_is_turned_away(long_fleet: Fleet) -> None:
    """On the port of the coordinator there may be anything: it goes on."""
    fleet = long_fleet
    half_open = socket.create_connection(("127.0.0.1", fleet.port)) if wait_for_port(fleet.port) else None
    with socket.create_connection(("127.0.0.1", fleet.port)) as rude:
        rude.sendall(np.random.default_rng(0).bytes(100_000))
    fleet.join()
    odd = [*GERMLINE, "worker", f"127.0.0.1:{fleet.port}", "--recipe", "mnist-3m", "--device", "cpu"]
    other = subprocess.run(odd, capture_output=True, text=True, timeout=120)
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
        look = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=3000", "--dump-dom"]
        page = subprocess.run([*look, f"http://127.0.0.1:{fleet.status}/"], capture_output=True, text=True, timeout=60)
        assert "digits by openai-es" in page.stdout
        assert re.search(r"<td>cpu</td>.*<td class=.n.>100 %</td>", page.stdout), page.stdout
        assert "<path " in page.stdout  # the curve
    assert fleet.ended()["generations"] == LONG
    assert half_open is not None
    half_open.close()


def wait_for_port(port: int) -> bool:
    until = time.monotonic() + 60
    while time.monotonic() < until:
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return True
        time.sleep(0.1)
    return False


def test_every_piece_is_done_once_and_the_slow_do_little() -> None:
    """Workers of unlike speed on a clock of their own, of whom one dies."""
    speeds, clock = {1: 100.0, 2: 50.0, 3: 10.0}, 0.0
    deck = Deck(200, dict.fromkeys(speeds, 0.0), smallest=0.01)
    done: list[int] = []
    free = dict.fromkeys(speeds, 0.0)
    ends: dict[int, float] = {}
    while not deck.finished:
        for worker in list(speeds):
            while (chunk := deck.take(worker, clock)) is not None:
                free[worker] = max(free[worker], clock) + chunk.size / speeds[worker]
                ends[chunk.number] = free[worker]
        number = min(ends, key=lambda n: ends[n]) if ends else None
        if number is None:
            clock += 0.01
            continue
        clock = max(clock, ends.pop(number))
        if number not in deck.out:
            continue
        worker = deck.out[number].worker
        if worker == 2 and clock > 0.5:
            del speeds[2]
            deck.gone(2)
            ends = {n: end for n, end in ends.items() if n in deck.out}
            continue
        deck.rates[worker] = speeds[worker]
        answered = deck.answered(number, clock)
        if answered is not None:
            done.extend(range(answered.first, answered.last))
    assert sorted(done) == list(range(200))
    assert clock < 2.5  # 200 pieces at 110 a second take 1.8


@pytest.mark.parametrize("pieces", [32, 64, 128])
def test_a_worker_ten_times_slower_costs_less_than_a_tenth(pieces: int) -> None:
    """Of what three workers would do that never wait: on a clock of their own, with messages that take 2 ms."""
    speeds, message, rng, taken = {1: 33.0, 2: 33.0, 3: 3.3}, 0.002, np.random.default_rng(0), []
    for _ in range(50):
        deck = Deck(pieces, {worker: speed * rng.uniform(0.9, 1.1) for worker, speed in speeds.items()})
        clock, free, ends = 0.0, dict.fromkeys(speeds, 0.0), dict[int, float]()
        while not deck.finished:
            for worker, speed in speeds.items():
                while (chunk := deck.take(worker, clock)) is not None:
                    free[worker] = max(free[worker], clock + message) + chunk.size / speed * rng.uniform(0.9, 1.1)
                    ends[chunk.number] = free[worker] + message
            number = min(ends, key=lambda n: ends[n])
            clock = ends.pop(number)
            deck.answered(number, clock)
        taken.append(clock)
    assert pieces / sum(speeds.values()) / np.mean(taken) > 0.9


@pytest.mark.parametrize(("workers", "pieces"), [(3, 1), (5, 2), (9, 4), (12, 5)])
def test_few_pieces_are_done_by_many_workers(workers: int, pieces: int) -> None:
    rates = {worker: 1.0 + 0.1 * worker for worker in range(workers)}
    deck, clock = Deck(pieces, rates), 0.0
    while not deck.finished:
        given = [chunk for worker in rates if (chunk := deck.take(worker, clock)) is not None]
        assert given or deck.out
        clock += 1.0
        deck.answered(next(iter(deck.out)), clock)


def test_only_workers_of_the_same_authority_are_let_in(tmp_path: Path) -> None:
    for name in ("ours", "theirs"):
        keys.init(tmp_path / name)
        keys.add(tmp_path / name, "machine")
    assert (tmp_path / "ours" / "ca.key").stat().st_mode & 0o077 == 0
    port, runs = free_port(), ["--runs", str(tmp_path / "runs")]
    ours = ["--keys", str(tmp_path / "ours")]
    where = ["--listen", f"127.0.0.1:{port}", "--status", f"127.0.0.1:{free_port()}"]
    with (tmp_path / "said").open("w") as said:
        serving = subprocess.Popen(
            [*GERMLINE, "serve", *RUN, *where, *ours, *runs], stdout=subprocess.PIPE, stderr=said, text=True
        )
    join = [*GERMLINE, "worker", f"127.0.0.1:{port}", "--recipe", "digits", "--device", "cpu"]
    strangers = [join, [*join, "--keys", str(tmp_path / "theirs" / "machine")]]
    others = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for command in strangers]
    try:
        assert wait_for_port(port)
        time.sleep(12)
        assert "has joined" not in (tmp_path / "said").read_text()
        assert "TLS handshake failed" in (tmp_path / "said").read_text()
        assert others[1].wait(30) == 2
        assert others[1].stderr is not None
        assert "not of one authority" in others[1].stderr.read()
        friend = subprocess.run([*join, "--keys", str(tmp_path / "ours" / "machine")], capture_output=True, text=True)
        assert friend.returncode == 0, friend.stderr
        assert serving.wait(60) == 0, (tmp_path / "said").read_text()
    finally:
        for process in (serving, *others):
            process.kill()
            process.communicate()


def test_the_keys_of_a_worker_do_not_make_a_coordinator(tmp_path: Path) -> None:
    keys.init(tmp_path)
    worker = keys.add(tmp_path, "machine")
    for server, accepted in ((tmp_path, True), (worker, False)):
        said: list[str] = []
        here, there = socket.socketpair()
        contexts = [(keys.context(server, server=True), there, True), (keys.context(worker, server=False), here, False)]
        met = [threading.Thread(target=shake_hands, args=(*one, said)) for one in contexts]
        for thread in met:
            thread.start()
        for thread in met:
            thread.join(20)
        assert said == ([] if accepted else ["SSLCertVerificationError"])


def shake_hands(context: Any, end: socket.socket, server: bool, said: list[str]) -> None:
    """One end of a connection; what the one that opened it has against the other."""
    try:
        context.wrap_socket(end, server_side=server).close()
    except OSError as error:
        end.close()
        if not server:
            said.append(type(error).__name__)


def test_workers_that_cannot_begin_are_not_started_for_ever(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("import os\nos._exit(7)\n")
    fleet = gl.Elastic(device="cpu", workers=1, recipe=str(tmp_path / "mine.py"))
    search = gl.Search(torch.nn.Linear(4, 2), gl.OpenAIES(population=8), loss=torch.nn.functional.mse_loss, fleet=fleet)
    with pytest.raises(gl.BadInput, match="exit code 7"):
        search.step(torch.zeros(3, 4), torch.zeros(3, 2))
    fleet.close()


def test_without_keys_only_this_machine_is_listened_to(tmp_path: Path) -> None:
    command = [*GERMLINE, "serve", *RUN, "--listen", "0.0.0.0:0", "--runs", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    assert "keys" in done.stderr


def test_a_search_of_ones_own_by_workers_elsewhere(tmp_path: Path) -> None:
    """The workers have the model and the loss by a recipe, and are sent the batches."""
    (tmp_path / "mine.py").write_text(
        "import torch, germline as gl\n"
        "from torch import nn\n"
        "def recipe():\n"
        "    net = gl.seeded(0, lambda: nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)))\n"
        "    x = torch.zeros(8, 4)\n"
        "    return gl.Recipe(net, (x, torch.zeros(8, dtype=torch.int64)), loss=nn.functional.cross_entropy)\n"
    )
    made = make_recipe(str(tmp_path / "mine.py"), {}, 0)
    found = []
    for fleet in (gl.Local("cpu"), gl.Elastic(device="cpu", workers=1, recipe=str(tmp_path / "mine.py"))):
        search = gl.Search(made.model, gl.OpenAIES(population=24), loss=made.loss, fleet=fleet)
        for x in torch.randn(6, 16, 4, generator=torch.Generator().manual_seed(0)):
            search.step(x, (x.sum(1) > 0).long())
        found.append(theta_sha256(search._core.state.theta))
        if isinstance(fleet, gl.Elastic):
            fleet.close(ended=True)
    assert found[0] == found[1]


def test_workers_end_with_the_coordinator_that_started_them(tmp_path: Path) -> None:
    command = [*GERMLINE, "train", *RUN, "--generations", "100000", "--fleet", "elastic", "--workers", "1"]
    with subprocess.Popen([*command, "--runs", str(tmp_path), "--name", "run"], stderr=subprocess.DEVNULL) as train:
        while finished(tmp_path / "run") < 2 and train.poll() is None:
            time.sleep(0.1)
        children = Path(f"/proc/{train.pid}/task/{train.pid}/children").read_text().split()
        train.kill()
    assert len(children) == 1
    until = time.monotonic() + 30
    while runs(int(children[0])):
        assert time.monotonic() < until
        time.sleep(0.1)
