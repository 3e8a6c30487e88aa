"""A cluster of processes trains to the weights of a run in one process, whatever fails on the way."""

import enum
import json
import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import germline as gl
from germline.errors import BadInput
from germline.fleet.cluster.dask import make_security
from germline.fleet.cluster.keys import add_machine, create_authority
from germline.fleet.spmd.launch import free_port
from germline.genome import theta_sha256
from germline.recipes import make_recipe
from germline.strategies import OpenAIES
from tests.test_cluster import GENERATIONS, GERMLINE, LONG, RUN, make_digits, train
from tests.test_faults import count_generations, is_running

pytestmark = pytest.mark.slow


class Fault(enum.Enum):
    KILLED = "a worker is killed"
    FROZEN = "a worker is frozen, and wakes up later"
    CUT = "the connection to a worker is cut, and neither side is told"
    SLOW = "a worker becomes ten times slower"
    COORDINATOR = "the coordinator is killed and started again"
    DISK = "the disk of the journal is full"


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the hash of the weights of an undisturbed run in one process."""
    return train(make_digits(), gl.Local("cpu"), tmp_path_factory.mktemp("local") / "run", GENERATIONS)


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

    @property
    def keys(self) -> Path:
        """The keys that the coordinator has made."""
        self.wait_for_line("workers need the keys")
        return self.folder / "runs" / "run.keys"

    def add(self, port: int | None = None) -> "subprocess.Popen[bytes]":
        """Start a worker."""
        command = [*GERMLINE, "worker", f"127.0.0.1:{port or self.port}", "--recipe", "digits", "--device", "cpu"]
        command += ["--keys", str(self.keys / "worker")]
        with (self.folder / f"worker{len(self.workers)}.txt").open("w") as log:
            self.workers.append(subprocess.Popen([*command, "--workers", "1"], stderr=log))
        return self.workers[-1]

    def wait(self, generation: int) -> None:
        """Wait until some generations are finished."""
        until = time.monotonic() + 120
        while count_generations(self.folder / "runs" / "run") < generation and self.coordinator.poll() is None:
            assert time.monotonic() < until, self.log.read_text()
            time.sleep(0.05)

    def wait_for_line(self, text: str) -> None:
        """Wait until the coordinator has said something."""
        until = time.monotonic() + 120
        while text not in self.log.read_text():
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
    assert wait_for_port(fleet.port)
    rude = socket.create_connection(("127.0.0.1", fleet.port))
    with rude, socket.create_connection(("127.0.0.1", fleet.port)):  # the second one never says anything
        rude.sendall(np.random.default_rng(0).bytes(100_000))
        check_status_page(fleet)


def check_status_page(fleet: ProcessFleet) -> None:
    command = [*GERMLINE, "worker", f"127.0.0.1:{fleet.port}", "--recipe", "mnist-3m", "--device", "cpu"]
    command += ["--keys", str(fleet.keys / "worker")]
    other = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert other.returncode == 2
    assert "away: the coordinator trains digits, and this worker was given mnist-3m." in other.stderr
    fleet.add()
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
        assert re.search(r"<td>cpu</td>.*<td>100 %</td>", page.stdout), page.stdout
        assert "<canvas" in page.stdout  # the curves
    assert fleet.finish()["generations"] == LONG


def wait_for_port(port: int) -> bool:
    """Return whether a connection to a port is accepted within a minute."""
    until = time.monotonic() + 60
    while time.monotonic() < until:
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return True
        time.sleep(0.1)
    return False


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
        assert "connections without a valid certificate" in log.read_text()
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
        server = make_security(keys).get_listen_args("scheduler")["ssl_context"]
        client = make_security(worker).get_connection_args("worker")["ssl_context"]
        contexts = [(server, far, True), (client, near, False)]
        threads = [threading.Thread(target=shake_hands, args=(*context, errors)) for context in contexts]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        assert errors == ([] if is_accepted else ["SSLCertVerificationError"])

    with pytest.raises(BadInput, match="has the key of a worker: a coordinator needs the folder of"):
        gl.Elastic(keys=worker)


WRONG_WORKERS = {"127.0.0.1": "error: An address is HOST:PORT", "127.0.0.1:1": "error: This machine has no device"}


@pytest.mark.parametrize(("address", "message"), WRONG_WORKERS.items(), ids=str)
def test_a_worker_that_cannot_work_does_not_try_to_connect(address: str, message: str) -> None:
    command = [*GERMLINE, "worker", address, "--recipe", "digits", "--device", "cuda:99"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 2
    assert ended.stderr.startswith(message)


def test_a_worker_with_keys_keeps_trying_if_the_coordinator_has_none(tmp_path: Path) -> None:
    create_authority(tmp_path / "keys")
    coordinator = gl.Elastic()
    address, errors = coordinator.backend.address.partition("://")[2], tmp_path / "errors.txt"
    command = [*GERMLINE, "worker", address, "--recipe", "digits", "--keys", str(tmp_path / "keys")]
    with errors.open("w") as file:
        worker = subprocess.Popen(command, stderr=file)
    try:
        until = time.monotonic() + 60
        while "it uses no keys" not in errors.read_text():
            assert worker.poll() is None, errors.read_text()
            assert time.monotonic() < until
            time.sleep(0.1)
        time.sleep(4)  # several attempts
        assert worker.poll() is None, errors.read_text()
        assert "Traceback" not in errors.read_text()
    finally:
        worker.kill()
        worker.communicate()
        coordinator.close()


def shake_hands(context: Any, end: socket.socket, server: bool, errors: list[str]) -> None:
    """Open one end of a connection; note the error of the worker's end, if there is one."""
    try:
        context.wrap_socket(end, server_side=server).close()
    except OSError as error:
        end.close()
        if not server:
            errors.append(type(error).__name__)


# A worker that no other machine can connect to


@contextmanager
def make_namespace() -> Iterator[tuple[str, str]]:
    """Yield the name of a network namespace, and the address at which it reaches this one."""
    name, net = f"germline{os.getpid()}", f"10.{80 + os.getpid() % 100}.{os.getpid() % 256}"
    for words in (
        f"netns add {name}",
        f"link add {name[-12:]}h type veth peer name eth0 netns {name}",
        f"addr add {net}.1/30 dev {name[-12:]}h",
        f"link set {name[-12:]}h up",
        f"-n {name} addr add {net}.2/30 dev eth0",
        f"-n {name} link set eth0 up",
        f"-n {name} link set lo up",
    ):
        subprocess.run(["ip", *words.split()], check=True)
    try:
        yield name, f"{net}.1"
    finally:
        subprocess.run(["ip", "netns", "del", name], check=True)


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("ip") is None, reason="network namespaces need root and ip")
def test_a_worker_without_inbound_connections_trains_to_the_end(expected: str, tmp_path: Path) -> None:
    create_authority(tmp_path / "keys")
    keys = add_machine(tmp_path / "keys", "machine")
    port = free_port()
    with make_namespace() as (name, host), (tmp_path / "result.txt").open("w") as result:
        where = ["--listen", f"{host}:{port}", "--keys", str(tmp_path / "keys"), "--status", f"127.0.0.1:{free_port()}"]
        serve = [*GERMLINE, "serve", *RUN, *where, "--runs", str(tmp_path / "runs"), "--name", "run"]
        join = ["ip", "netns", "exec", name, *GERMLINE, "worker", f"{host}:{port}", "--recipe", "digits"]
        coordinator = subprocess.Popen(serve, stdout=result)
        worker = subprocess.Popen([*join, "--device", "cpu", "--keys", str(keys)])
        try:
            until = time.monotonic() + 120
            while count_generations(tmp_path / "runs" / "run") < 5 and coordinator.poll() is None:
                assert time.monotonic() < until
                time.sleep(0.05)
            table = subprocess.run(
                ["ip", "netns", "exec", name, "cat", "/proc/net/tcp"], capture_output=True, text=True
            )
            listening = [line.split()[1] for line in table.stdout.splitlines()[1:] if line.split()[3] == "0A"]
            assert listening
            assert {address.split(":")[0] for address in listening} == {"0100007F"}  # its own loopback interface
            assert coordinator.wait(180) == 0
            assert worker.wait(30) == 0
        finally:
            for process in (coordinator, worker):
                process.kill()
                process.wait()
    assert json.loads((tmp_path / "result.txt").read_text().splitlines()[-1])["theta_sha256"] == expected


# Workers that the coordinator starts


def test_workers_that_cannot_start_are_not_started_again_and_again(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("import os\nos._exit(7)\n")
    fleet = gl.Elastic(device="cpu", workers=1, recipe=str(tmp_path / "mine.py"))
    search = gl.Search(nn.Linear(4, 2), OpenAIES(population=8), loss=F.mse_loss, fleet=fleet)
    with pytest.raises(BadInput, match="exit code 7"):
        search.step(torch.zeros(3, 4), torch.zeros(3, 2))
    fleet.close()


def test_without_keys_a_coordinator_in_python_listens_to_this_machine_only() -> None:
    with pytest.raises(BadInput, match="Without keys, every machine that reaches"):
        gl.Elastic("0.0.0.0:0")


def test_the_workers_of_a_search_are_sent_its_batches(tmp_path: Path) -> None:
    """They have the model and the loss from a recipe, and a tuple of targets stays a tuple."""
    (tmp_path / "mine.py").write_text(
        "import torch, germline as gl\n"
        "from torch import nn\n"
        "def recipe():\n"
        "    net = gl.seeded(0, lambda: nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)))\n"
        "    x = torch.zeros(8, 4)\n"
        "    def loss(output, target):\n"
        "        assert isinstance(target, tuple), type(target)\n"
        "        return nn.functional.cross_entropy(output, target[0]) + 0 * target[1].mean()\n"
        "    return gl.Recipe(net, (x, (torch.zeros(8, dtype=torch.int64), x)), loss=loss)\n"
    )
    recipe = make_recipe(str(tmp_path / "mine.py"), {}, 0)
    hashes = []
    for fleet in (gl.Local("cpu"), gl.Elastic(device="cpu", workers=1, recipe=str(tmp_path / "mine.py"))):
        search = gl.Search(recipe.model, OpenAIES(population=24), loss=recipe.loss, fleet=fleet)
        for x in torch.randn(6, 16, 4, generator=torch.Generator().manual_seed(0)):
            search.step(x, ((x.sum(1) > 0).long(), x))
        hashes.append(theta_sha256(search._session.state.theta))
        if isinstance(fleet, gl.Elastic):
            fleet.close(ended=True)
    assert hashes[0] == hashes[1]


def test_scheduler_and_workers_end_with_the_coordinator_that_started_them(tmp_path: Path) -> None:
    command = [*GERMLINE, "train", *RUN, "--generations", "100000", "--fleet", "elastic", "--workers", "1"]
    with subprocess.Popen([*command, "--runs", str(tmp_path), "--name", "run"], stderr=subprocess.DEVNULL) as process:
        while count_generations(tmp_path / "run") < 2 and process.poll() is None:
            time.sleep(0.1)
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        process.kill()
    assert len(children) == 2  # the scheduler and the worker
    until = time.monotonic() + 30
    while any(is_running(int(child)) for child in children):
        assert time.monotonic() < until
        time.sleep(0.1)


def test_a_worker_gives_up_where_there_is_no_coordinator_for_so_long(tmp_path: Path) -> None:
    words = [*GERMLINE, "worker", f"127.0.0.1:{free_port()}", "--device", "cpu", "--give-up", "1"]
    done = subprocess.run([*words, "--recipe", "digits"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert "There has been no coordinator at tcp://127.0.0.1" in done.stderr
    done = subprocess.run([*words, "--recipe", "nothing.py"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert "There is no file nothing.py" in done.stderr


def test_serve_says_how_the_run_of_its_name_differs(tmp_path: Path) -> None:
    run = ["digits", "--generations", "3", "--runs", str(tmp_path), "--name", "mine"]
    subprocess.run([*GERMLINE, "train", *run, "--device", "cpu"], check=True, capture_output=True)
    addresses = ["--listen", f"127.0.0.1:{free_port()}", "--status", f"127.0.0.1:{free_port()}"]
    for words, message in (
        (["--seed", "1"], "is a run with seed 0, and this command has seed 1: give it another --name"),
        (["--generations", "2"], "The run has 3 generations already: give --generations above 3"),
    ):
        done = subprocess.run([*GERMLINE, "serve", *run, *addresses, *words], capture_output=True, text=True)
        assert done.returncode == 2
        assert message in done.stderr
