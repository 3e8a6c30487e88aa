"""Ray below a cluster, on a real Ray: workers that come, answer, die, freeze and wake up."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

import germline as gl
from germline.engine.session import Session
from germline.errors import BadInput
from germline.fleet.cluster.backend import Event, Message
from germline.fleet.cluster.ray import RayBackend
from tests.test_cluster import GENERATIONS, make_digits, train

ray = pytest.importorskip("ray")

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent
PATIENCE = 60.0  # seconds for an event before the test fails
QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled"}
ECHO = "tests.echo:Echo"
EXPECTED = [("cpu", 2), ("cuda 0", 1), ("cuda 1", 1)]  # devices and threads, on a node without and one with two GPUs


@contextmanager
def start_ray(*options: str) -> Iterator[None]:
    """Run a node of Ray on this machine; it has ended when this returns."""
    command = [str(Path(sys.executable).parent / "ray"), "start", "--block", "--num-cpus=2", *options]
    environment = os.environ | QUIET | {"PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    assert process.stdout is not None
    with process.stdout:
        lines: list[str] = []
        for line in process.stdout:
            lines.append(line)
            if "Ray runtime started" in line:
                break
        else:
            pytest.fail("".join(lines))
        try:
            yield
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@pytest.fixture(scope="module")
def head() -> Iterator[str]:
    """The address of a Ray of one node with two CPUs."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    folder = tempfile.mkdtemp(prefix="ray", dir="/tmp")  # the paths of sockets must be short
    with pytest.MonkeyPatch.context() as patch:
        for name, value in QUIET.items():
            patch.setenv(name, value)
        store = f"--object-store-memory={500 << 20}"
        with start_ray("--head", f"--port={port}", "--include-dashboard=false", f"--temp-dir={folder}", store):
            yield f"127.0.0.1:{port}"
    shutil.rmtree(folder, ignore_errors=True)  # processes that have lost their node write a last line


@pytest.fixture(autouse=True)
def disconnected() -> Iterator[None]:
    """Let go of the cluster after a test that has failed: Ray ends a process that is connected to a dead node."""
    yield
    ray.shutdown()


@pytest.fixture
def backend(head: str) -> Iterator[RayBackend]:
    backend = RayBackend(head, responder=ECHO)
    yield backend
    backend.close()
    assert not ray.is_initialized()


def expect(backend: RayBackend, kind: str) -> Event:
    """Return the next event, which must be of this kind; Ray may notice only now that an earlier test ended a node."""
    until, event = time.monotonic() + PATIENCE, None
    while event is None or (event.kind == "left" and kind == "joined"):
        assert time.monotonic() < until, kind
        backend.look()
        time.sleep(0.01)
        event = None if backend.events.empty() else backend.events.get()
    assert event.kind == kind, event
    return event


def call(backend: RayBackend, worker: str, *arrays: bytes, **head: object) -> Message:
    """Return a worker's answer to a message, which must be the next event."""
    backend.submit(worker, Message({"op": "echo"} | head, arrays))
    event = expect(backend, "answered")
    assert event.worker == worker
    return event.message


def count_references() -> int:
    """Return how many objects this process keeps alive in the cluster."""
    return len(ray._private.worker.global_worker.core_worker.get_all_reference_counts())


def test_a_node_becomes_one_worker_that_uses_all_of_it(backend: RayBackend) -> None:
    worker = expect(backend, "joined").worker
    answer = call(backend, worker, b"", b"abc", number=1)
    assert answer.head["number"] == 1
    assert answer.head["threads"] == 2
    assert answer.head["pid"] != os.getpid()
    assert list(answer.arrays) == [b"", b"abc"]


def test_calls_with_small_and_large_arrays_are_answered(backend: RayBackend) -> None:
    worker = expect(backend, "joined").worker
    sizes = [0, 20_000_000, 10, 200_000, 20_000_000, 1] * 2
    sent = [[os.urandom(size), os.urandom(size // 2)] for size in sizes]
    for number, arrays in enumerate(sent):
        backend.submit(worker, Message({"op": "echo", "number": number}, arrays))
    answers = sorted((expect(backend, "answered").message for _ in sent), key=lambda answer: answer.head["number"])
    assert [answer.head["answered"] for answer in answers] == list(range(1, 1 + len(sent)))  # in the order of the calls
    assert [list(answer.arrays) for answer in answers] == sent


def test_nothing_is_kept_of_calls_that_have_ended(backend: RayBackend) -> None:
    worker = expect(backend, "joined").worker
    call(backend, worker)
    before = count_references()
    for number in range(300):
        call(backend, worker, bytes(200_000) if number % 10 == 0 else b"small")
    assert count_references() < before + 5  # looking whether the worker is alive is a call as well


def test_messages_that_share_arrays_upload_them_once(backend: RayBackend, tmp_path: Path) -> None:
    worker = expect(backend, "joined").worker
    gate, arrays = tmp_path / "gate", [bytes(1_000_000)]
    backend.submit(worker, Message({"op": "wait", "file": str(gate)}))
    before = count_references()
    for _ in range(10):
        backend.submit(worker, Message({"op": "echo"}, arrays))
    assert count_references() < before + 15  # ten answers and one upload; Ray may forget an earlier call late
    gate.touch()
    assert sorted(len(expect(backend, "answered").message.arrays) for _ in range(11)) == [0] + [1] * 10


def test_a_message_may_need_no_answer_or_fail(backend: RayBackend) -> None:
    worker = expect(backend, "joined").worker
    backend.submit(worker, Message({"op": "end"}))
    backend.submit(worker, Message({"op": "raise"}))
    failed = expect(backend, "failed")
    assert (failed.worker, failed.message.head["reason"]) == (worker, "ValueError: this message is not liked")
    assert call(backend, worker).head["answered"] == 2


def test_a_killed_worker_leaves_and_another_joins(backend: RayBackend) -> None:
    idle = expect(backend, "joined").worker
    os.kill(call(backend, idle).head["pid"], signal.SIGKILL)
    backend.submit(idle, Message({"op": "echo"}))
    assert expect(backend, "left").worker == idle
    busy = expect(backend, "joined").worker
    assert busy != idle
    pid = call(backend, busy).head["pid"]
    for _ in range(2):
        backend.submit(busy, Message({"op": "wait", "file": "/nowhere/at/all"}))
    os.kill(pid, signal.SIGKILL)
    assert expect(backend, "left").worker == busy
    backend.submit(busy, Message({"op": "echo"}))  # has no effect
    assert call(backend, expect(backend, "joined").worker).head["answered"] == 1


def test_a_worker_that_cannot_start_says_why(head: str) -> None:
    with closing(RayBackend(head, responder="tests.echo:Refuses")) as backend:
        failed = expect(backend, "failed")
        assert "Germline must be installed there: ImportError: a library is missing" in failed.message.head["reason"]


def test_a_late_node_joins_and_a_frozen_worker_holds_up_no_other(backend: RayBackend, head: str) -> None:
    first = expect(backend, "joined").worker
    with start_ray(f"--address={head}"):
        second = expect(backend, "joined").worker
        pid = call(backend, first).head["pid"]
        os.kill(pid, signal.SIGSTOP)
        backend.submit(first, Message({"op": "echo", "number": -1}))
        for number in range(50):
            assert call(backend, second, number=number).head["number"] == number
        os.kill(pid, signal.SIGCONT)
        late = expect(backend, "answered")
        assert (late.worker, late.message.head["number"]) == (first, -1)
        os.kill(pid, signal.SIGSTOP)
        assert call(backend, second).head["answered"] == 51
    assert expect(backend, "left").worker == second
    os.kill(pid, signal.SIGCONT)
    assert call(backend, first).head["answered"] == 3


def test_a_node_with_gpus_has_a_worker_for_each(head: str) -> None:
    with start_ray(f"--address={head}", "--num-gpus=2"), closing(RayBackend(head, responder=ECHO)) as backend:
        workers = [expect(backend, "joined").worker for _ in range(3)]  # Ray believes the number
        answers = [call(backend, worker).head for worker in workers]
        devices = [answer["GERMLINE_DEVICE"] or f"cuda {answer['CUDA_VISIBLE_DEVICES']}" for answer in answers]
        assert sorted(zip(devices, [answer["threads"] for answer in answers], strict=True)) == EXPECTED


@pytest.mark.parametrize("fault", ["none", "killed", "frozen", "late"])
def test_a_run_on_ray_has_the_weights_of_one_process(fault: str, head: str, tmp_path: Path) -> None:
    """A worker dies, freezes for a while, or a node joins late; the scores are the same."""
    expected = train(make_digits(), gl.Local("cpu"), tmp_path / "local", GENERATIONS)
    frozen: list[int] = []
    with ExitStack() as stack:
        if fault != "late":
            stack.enter_context(start_ray(f"--address={head}"))
        fleet = gl.Ray(head, device="cpu")
        stack.callback(fleet.close)

        def strike(session: Session, row: Any) -> None:
            workers = [worker.name for worker in fleet.crew.workers.values()]
            if row["generation"] == 10 and fault == "late":
                stack.enter_context(start_ray(f"--address={head}"))
            if row["generation"] == 10 and fault in ("killed", "frozen"):
                pid = int(workers[0].rpartition("-")[2])
                os.kill(pid, signal.SIGKILL if fault == "killed" else signal.SIGSTOP)
                frozen.extend([pid] if fault == "frozen" else [])
            if row["generation"] == 40 and frozen:
                os.kill(frozen.pop(), signal.SIGCONT)

        assert train(make_digits(), fleet, tmp_path / "ray", GENERATIONS, strike) == expected
        assert not frozen


def test_a_program_may_have_chosen_its_ray(head: str) -> None:
    ray.init(head, log_to_driver=False)
    backend = RayBackend("10.0.0.5:1", responder=ECHO)
    pid = call(backend, expect(backend, "joined").worker).head["pid"]
    backend.close()
    assert ray.is_initialized()
    ray.shutdown()
    assert pid


WRONG_ADDRESSES = {
    "127.0.0.1:1": r"the Ray cluster at 127\.0\.0\.1:1: .* Check the address",
    "no-port": "HOST:PORT, .* not 'no-port'",
    "127.0.0.1:word": r"HOST:PORT, .* not '127\.0\.0\.1:word'",
}


@pytest.mark.parametrize(("address", "message"), WRONG_ADDRESSES.items(), ids=str)
def test_an_address_without_a_cluster_is_an_error_in_words(address: str, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        RayBackend(address)


def test_a_machine_without_ray_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(BadInput, match=r"pip install 'germline\[ray\]'"):
        RayBackend()
