"""The door of a cluster: one coordinator for a run, strangers that connect, and keys."""

import json
import os
import signal
import socket
import ssl
import stat
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Any

import pytest
from distributed import Client

import germline as gl
from germline.cli.status import is_own_name
from germline.errors import BadInput
from germline.fleet.cluster import keys, scheduler_process
from germline.fleet.cluster.backend import make_printable
from germline.fleet.cluster.keys import add_machine, create_authority, revoke_machine
from germline.fleet.spmd.launch import free_port
from tests.test_cluster import GERMLINE, LONG, RUN, make_digits, train
from tests.test_cluster_processes import ProcessFleet, start_fleet  # noqa: F401
from tests.test_faults import count_generations
from tests.test_first_hour_trainer import run_in_terminal

pytestmark = pytest.mark.slow

FLOOD = 2000  # connections that say nothing, or begin to
HALF_HELLO = bytes.fromhex("1603010200010001fc0303") + bytes(32)  # of TLS: 512 bytes are announced
SERVE = """
import subprocess, sys
from pathlib import Path
from germline.cli import main
from germline.fleet.cluster.keys import keep_private_keys
keys = keep_private_keys(Path("runs/digits-openai-es-0.keys"))
worker = [sys.executable, "-m", "germline", "worker", "127.0.0.1:{port}", "--recipe", "digits", "--device", "cpu"]
worker += ["--keys", str(keys / "worker")]
with subprocess.Popen(worker, stderr=subprocess.DEVNULL):
    where = ["--listen", "127.0.0.1:{port}", "--status", "127.0.0.1:0", "--device", "cpu", "--json"]
    sys.argv = ["germline", "serve", "digits", "--population", "16", "--generations", "3", *where]
    main()
"""


def test_serve_shows_what_it_does_before_the_first_generation(tmp_path: Path) -> None:
    sent = run_in_terminal(SERVE.format(port=free_port()), 80, tmp_path / "stdout")
    for stage in ("loading data", "choosing how members are evaluated", "computing the first generation"):
        assert stage in sent, sent


def test_a_run_has_one_coordinator_at_a_time(start_fleet: Callable[..., ProcessFleet]) -> None:  # noqa: F811
    """A second one ends with a sentence, and the first goes on."""
    fleet = start_fleet(LONG)
    fleet.wait_for_line("waiting for workers")
    command = [*GERMLINE, "serve", *RUN, "--listen", "127.0.0.1:0", "--status", "127.0.0.1:0"]
    command += ["--runs", str(fleet.folder / "runs"), "--name", "run", "--generations", str(LONG)]
    second = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert second.returncode == 2
    assert "Another coordinator serves the run" in second.stderr
    assert "Traceback" not in second.stderr
    assert fleet.coordinator.poll() is None


def test_a_flood_of_connections_does_not_end_a_run(tmp_path: Path) -> None:
    """Thousands of strangers connect while two workers train, show no certificate and stay; the run goes on."""
    expected = train(make_digits(), gl.Local("cpu"), tmp_path / "local", LONG)
    create_authority(tmp_path / "keys")
    machine, port = add_machine(tmp_path / "keys", "honest"), free_port()
    run = [*GERMLINE, "serve", *RUN, "--listen", f"127.0.0.1:{port}", "--status", "127.0.0.1:0", "--name", "run"]
    run += ["--runs", str(tmp_path), "--keys", str(tmp_path / "keys"), "--generations", str(LONG)]
    work = [*GERMLINE, "worker", f"127.0.0.1:{port}", "--recipe", "digits", "--device", "cpu", "--keys", str(machine)]
    log = tmp_path / "log.txt"
    with ExitStack() as stack, log.open("w") as errors:
        coordinator = stack.enter_context(subprocess.Popen(run, stdout=subprocess.PIPE, stderr=errors, text=True))
        stack.callback(coordinator.kill)
        for _ in range(2):
            worker = stack.enter_context(subprocess.Popen([*work, "--workers", "1"], stderr=subprocess.DEVNULL))
            stack.callback(worker.kill)
        until = time.monotonic() + 120
        while log.read_text().count("has joined") < 2 or count_generations(tmp_path / "run") < 2:
            assert time.monotonic() < until, log.read_text()
            time.sleep(0.1)
        for number in range(FLOOD):
            stranger = stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=60))
            if number % 2:
                with suppress(ConnectionError):  # it may have been turned away already
                    stranger.sendall(HALF_HELLO)
        during = count_generations(tmp_path / "run")
        summary = json.loads(coordinator.communicate(timeout=300)[0].splitlines()[-1])
    assert during < LONG  # all of them came while the run went on
    assert summary["theta_sha256"] == expected
    assert "Traceback" not in log.read_text()
    assert len([line for line in log.read_text().splitlines() if "turned away so far" in line]) <= 3


def test_a_stranger_that_begins_to_speak_and_stops_is_turned_away(start_fleet: Callable[..., ProcessFleet]) -> None:  # noqa: F811
    """Half of a greeting of TLS, and then nothing: the connection ends, though no other stranger wants its place."""
    fleet = start_fleet(LONG)
    fleet.wait_for_line("waiting for workers")
    with closing(socket.create_connection(("127.0.0.1", fleet.port), timeout=60)) as stranger:
        stranger.sendall(HALF_HELLO)
        with suppress(ConnectionResetError):
            assert stranger.recv(1) == b""


FEW = """
import json, resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, ({limit}, {limit}))
sys.argv = ["scheduler", json.dumps({options})]
exec(compile(open({file!r}).read(), {file!r}, "exec"))
"""


def test_descriptors_that_are_exhausted_are_waited_out(tmp_path: Path) -> None:
    """A scheduler with 48 descriptors: strangers take them all and stay; then a client comes, and is let in."""
    options = {"host": "127.0.0.1", "port": 0, "security": None, "timeout": 15.0, "revoked": None}
    script = FEW.format(limit=48, options=options, file=scheduler_process.__file__)
    with ExitStack() as stack, (tmp_path / "log.txt").open("w") as log:
        command, pipe = [sys.executable, "-c", script], subprocess.PIPE
        process = stack.enter_context(subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=log, text=True))
        stack.callback(process.kill)
        assert process.stdout is not None
        address = process.stdout.readline().split()[1]
        host, port = address.removeprefix("tcp://").split(":")
        for _ in range(200):
            stack.enter_context(socket.create_connection((host, int(port)), timeout=60))
        with Client(address, timeout=60, set_as_default=False) as client:  # type: ignore[no-untyped-call]
            assert client.nthreads() == {}
        assert process.poll() is None
    assert len((tmp_path / "log.txt").read_text().splitlines()) <= 2  # one line about all of them


def test_a_machine_whose_key_is_revoked_is_turned_away_without_a_restart(tmp_path: Path) -> None:
    create_authority(tmp_path / "keys")
    names, port = ("good", "bad"), free_port()
    machines = {name: add_machine(tmp_path / "keys", name) for name in names}
    run = [*GERMLINE, "serve", *RUN, "--listen", f"127.0.0.1:{port}", "--status", "127.0.0.1:0", "--name", "run"]
    run += ["--runs", str(tmp_path), "--keys", str(tmp_path / "keys"), "--generations", "1000000"]
    log = tmp_path / "log.txt"

    def wait_for(text: str) -> None:
        until = time.monotonic() + 120
        while text not in log.read_text():
            assert time.monotonic() < until, log.read_text()
            time.sleep(0.1)

    with ExitStack() as stack, log.open("w") as errors:
        coordinator = stack.enter_context(subprocess.Popen(run, stdout=subprocess.DEVNULL, stderr=errors))
        stack.callback(coordinator.kill)
        for name in names:
            work = [*GERMLINE, "worker", f"127.0.0.1:{port}", "--recipe", "digits", "--device", "cpu", "--name", name]
            command = [*work, "--keys", str(machines[name]), "--workers", "1"]
            stack.callback(stack.enter_context(subprocess.Popen(command, stderr=subprocess.DEVNULL)).kill)
            wait_for(f"worker {name} has joined")
        revoke_machine(tmp_path / "keys", "bad")
        wait_for("worker bad has left")
        time.sleep(3 * keys_look())
        assert log.read_text().count("worker bad has joined") == 1
        assert "worker good has left" not in log.read_text()


def keys_look() -> float:
    """Return the seconds between two looks at the list of revoked names."""
    from germline.fleet.cluster.scheduler_process import LOOK

    return LOOK


def test_serve_makes_keys_and_says_where_they_are(start_fleet: Callable[..., ProcessFleet]) -> None:  # noqa: F811
    """A worker without them is not let in; those of the first coordinator are good for the next."""
    fleet = start_fleet(LONG)
    fleet.wait_for_line(f"workers need the keys in {fleet.keys / 'worker'}")
    fleet.wait_for_line("waiting for workers at tls://")
    certificate = (fleet.keys / "worker" / "cert.pem").read_bytes()
    assert stat.S_IMODE(fleet.keys.stat().st_mode) == 0o700
    with closing(socket.create_connection(("127.0.0.1", fleet.port), timeout=60)) as stranger:
        stranger.sendall(b"\0" * 64)
        with suppress(ConnectionResetError):
            assert stranger.recv(1) in (b"", b"\x15")  # closed, with or without an alert of TLS
    fleet.add()
    fleet.wait(3)
    fleet.coordinator.kill()
    fleet.coordinator.wait()
    before = count_generations(fleet.folder / "runs" / "run")
    fleet.serve()
    fleet.wait(before + 3)
    assert (fleet.keys / "worker" / "cert.pem").read_bytes() == certificate


def test_keys_are_private_whatever_the_umask_is_and_expire(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = os.umask(0)
    try:
        create_authority(tmp_path / "keys")
        add_machine(tmp_path / "keys", "good")
        monkeypatch.setattr(keys, "MACHINE_DAYS", -1)
        machine = add_machine(tmp_path / "keys", "late")
    finally:
        os.umask(before)
    for place in (tmp_path / "keys", machine, *machine.iterdir()):
        assert stat.S_IMODE(place.stat().st_mode) & 0o077 == 0
    dates = decode_certificate(tmp_path / "keys" / "good" / "cert.pem")
    assert 30 < (dates["notAfter"] - dates["notBefore"]) / 86400 < 366  # months, not years
    with pytest.raises(BadInput, match="has expired on"):
        gl.Dask("127.0.0.1:1", keys=machine)
    with pytest.raises(BadInput, match="has no machine 'other'"):
        revoke_machine(tmp_path / "keys", "other")


def decode_certificate(file: Path) -> dict[str, float]:
    """Return when a certificate begins and ends, in seconds."""
    content: Any = ssl._ssl._test_decode_cert(str(file))  # type: ignore[attr-defined]
    return {name: ssl.cert_time_to_seconds(content[name]) for name in ("notBefore", "notAfter")}


def test_a_file_in_the_working_directory_is_not_run_by_workers(tmp_path: Path) -> None:
    (tmp_path / "http.py").write_text("raise SystemExit('this file must not be imported')")
    script = str(Path(sys.executable).parent / "germline")
    command = [script, "train", "digits", "--population", "16", "--generations", "2", "--device", "cpu", "--json"]
    command += ["--fleet", "elastic", "--workers", "1", "--runs", "runs"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr
    assert "must not be imported" not in done.stderr


def test_the_status_page_answers_to_its_own_names_and_few_connections(
    start_fleet: Callable[..., ProcessFleet],  # noqa: F811
) -> None:
    fleet = start_fleet(LONG)
    fleet.wait_for_line("waiting for workers")
    address = f"http://127.0.0.1:{fleet.status}/status.json"
    foreign = urllib.request.Request(address, headers={"Host": f"evil.example:{fleet.status}"})
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(foreign, timeout=10)
    caught.value.close()
    assert caught.value.code == 421
    with ExitStack() as stack:
        for _ in range(200):
            stack.enter_context(socket.create_connection(("127.0.0.1", fleet.status), timeout=10))
        time.sleep(0.5)
        threads = int(Path(f"/proc/{fleet.coordinator.pid}/status").read_text().split("Threads:")[1].split()[0])
        assert threads < 150
    with closing(urllib.request.urlopen(address, timeout=30)) as answer:
        assert json.loads(answer.read())["generation"] == 0
    assert is_own_name("[::1]:8787", "127.0.0.1")
    assert not is_own_name("127.0.0.1.evil.example", "127.0.0.1")


def test_text_of_workers_cannot_change_a_terminal() -> None:
    assert make_printable("a\x1b]0;title\x07\n\u202eb\u00e9") == "a?]0;title???b\u00e9"


def test_a_scheduler_that_is_killed_while_it_starts_is_started_once_more() -> None:
    """Find the scheduler among the children of this process, and kill it before it has imported anything."""
    killed: list[int] = []

    def kill() -> None:
        while not killed:
            for child in Path(f"/proc/{os.getpid()}/task").glob("*/children"):
                for number in map(int, child.read_text().split()):
                    with suppress(OSError):
                        if b"scheduler_process" in Path(f"/proc/{number}/cmdline").read_bytes() and not killed:
                            os.kill(number, signal.SIGKILL)
                            killed.append(number)

    killer = threading.Thread(target=kill)
    killer.start()
    scheduler = scheduler_process.SchedulerProcess("127.0.0.1", 0)
    try:
        killer.join()
        assert scheduler.process.pid not in killed
        with Client(scheduler.address, timeout=60, set_as_default=False) as client:  # type: ignore[no-untyped-call]
            assert client.nthreads() == {}
    finally:
        scheduler.end()
