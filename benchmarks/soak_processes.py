"""Processes and links for ``soak.py``: a nursery that forks coordinators and workers, and ports that can be cut.

Python, torch and Dask are imported once, by the nursery. Each process that it forks is a separate one, which may be
killed, stopped or cut off at any instant, and starts in a fraction of the time and the memory.
"""

import json
import os
import random
import signal
import socket
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

GERMLINE = [sys.executable, "-m", "germline"]


class Nursery:
    """A process that has imported everything, and forks others; it must be made before any thread."""

    def __init__(self) -> None:
        own, other = socket.socketpair()
        self.process = os.fork()
        if not self.process:
            own.close()
            serve_requests(other)
        other.close()
        self.stream = own.makefile("rw")
        self.lock = threading.Lock()

    def ask(self, **request: Any) -> Any:
        """Send a request, and return the answer."""
        with self.lock:
            self.stream.write(json.dumps(request) + "\n")
            self.stream.flush()
            return json.loads(self.stream.readline())

    def start(self, words: Sequence[str], log: Path, output: Path | None = None, rogue: str | None = None) -> "Child":
        """Start a process of the command line, or a worker that gives wrong answers."""
        return Child(self, self.ask(words=words, log=str(log), output=output and str(output), rogue=rogue))

    def close(self) -> None:
        """End the nursery, and all processes that it has started."""
        self.stream.close()
        os.waitpid(self.process, 0)


class Child:
    """A process that the nursery has started."""

    def __init__(self, nursery: Nursery, pid: int) -> None:
        self.nursery, self.pid, self.returncode = nursery, pid, None
        self.started = time.monotonic()

    returncode: int | None

    def poll(self) -> int | None:
        """Return the exit code, or None while it runs."""
        if self.returncode is None:
            self.returncode = self.nursery.ask(poll=self.pid)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill the process, and wait until it is gone."""
        self.send_signal(signal.SIGKILL)
        self.wait()

    def wait(self, seconds: float = 600.0) -> int:
        until = time.monotonic() + seconds
        while self.poll() is None:
            if time.monotonic() > until:
                raise TimeoutError(f"process {self.pid} does not end")
            time.sleep(0.01)
        assert self.returncode is not None
        return self.returncode


def serve_requests(connection: socket.socket) -> None:
    """Fork processes as the other end asks for them, until it is gone; then end all of them."""
    import distributed

    import germline.cli
    import germline.engine.follower

    assert all(module is not None for module in (distributed, germline.cli, germline.engine.follower))
    codes: dict[int, int | None] = {}  # exit codes of the processes; None while they run
    stream = connection.makefile("rw")
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for line in stream:
        request, answer = json.loads(line), None
        if "poll" in request:
            answer = codes[request["poll"]]
            if answer is None and (ended := os.waitpid(request["poll"], os.WNOHANG))[0]:
                answer = codes[request["poll"]] = os.waitstatus_to_exitcode(ended[1])
        else:
            answer = os.fork()
            if not answer:
                run_child(request)
            codes[answer] = None
        stream.write(json.dumps(answer) + "\n")
        stream.flush()
    for process in [process for process, code in codes.items() if code is None]:
        os.kill(process, signal.SIGKILL)
    os._exit(0)


def run_child(request: Mapping[str, Any]) -> None:
    """Be the process of a request."""
    code = 1
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for number, path, mode in ((1, request["output"], os.O_TRUNC), (2, request["log"], os.O_APPEND)):
            os.dup2(os.open(path or os.devnull, os.O_WRONLY | os.O_CREAT | mode, 0o600), number)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.closerange(3, 1024)
        sys.argv = ["germline", *request["words"]]
        if request["rogue"] is None:
            from germline.cli import main

            main()
        else:
            work_wrongly(request["rogue"], *request["words"])
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def work_wrongly(fault: str, address: str, recipe: str, keys: str) -> None:
    """Be a worker that gives wrong answers."""
    from rogues import LIES, Liar, Rogue

    from germline.engine.follower import Follower
    from germline.errors import BadInput
    from germline.fleet import Local
    from germline.fleet.cluster.processes import run_worker
    from germline.fleet.cluster.worker import Responder

    lies = {lie.__name__: lie for lie in LIES}

    def make_follower(fleet: Local) -> Follower:
        return Liar(fleet, lies[fault], honest=2) if fault in lies else Rogue(fleet, fault)

    name = f"{fault}-{os.getpid()}"
    try:
        run_worker(
            address, Responder(name, recipe, None, Local("cpu", 1), make_follower=make_follower), keys=Path(keys)
        )
    except BadInput:
        raise SystemExit(2) from None


class Link:
    """A port that forwards to another one, until it is cut.

    Args:
        target: The port to which connections go on.
    """

    def __init__(self, target: int) -> None:
        self.target, self.is_cut = target, False
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self.listener.getsockname()[1]
        self.sockets: set[socket.socket] = set()
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            near = self.listener.accept()[0]
            try:
                far = socket.create_connection(("127.0.0.1", self.target), timeout=10)
                far.settimeout(None)
            except OSError:
                near.close()
                continue
            for pair in ((near, far), (far, near)):
                threading.Thread(target=self._forward, args=pair, daemon=True).start()

    def _forward(self, source: socket.socket, target: socket.socket) -> None:
        self.sockets.add(source)
        with suppress(OSError):
            while data := source.recv(1 << 16):
                while self.is_cut:
                    time.sleep(0.02)
                target.sendall(data)
        for end in (source, target):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        self.sockets.discard(source)
        source.close()

    def reset(self) -> None:
        """End all connections."""
        for end in list(self.sockets):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def cut(self, seconds: float) -> None:
        """Let nothing pass for some seconds, and then end all connections: neither side is told before."""
        if seconds and not self.is_cut:
            self.is_cut = True
            time.sleep(seconds)
            self.reset()
            self.is_cut = False
        self.reset()


def send_garbage(port: int, chance: random.Random) -> None:
    """Send what no client would send to a port: noise, another protocol, half of a greeting, or nothing at all."""
    hello = bytes.fromhex("1603010200010001fc0303") + chance.randbytes(32)
    contents = (
        chance.randbytes(chance.randrange(1, 5000)),
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        hello,
        b"",
        b"\0" * 64,
    )
    content, count = chance.choice(contents), chance.choice((1, 1, 5, 40))
    ends: list[socket.socket] = []
    for _ in range(count):
        with suppress(OSError):
            ends.append(socket.create_connection(("127.0.0.1", port), timeout=2))
            ends[-1].sendall(content)
    time.sleep(chance.choice((0.0, 0.5, 3.0)))
    for end in ends:
        end.close()


def slow_down(process: Child, seconds: float) -> None:
    """Stop a process for nine tenths of the time."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        for number, pause in ((signal.SIGSTOP, 0.09), (signal.SIGCONT, 0.01)):
            process.send_signal(number)
            time.sleep(pause)


def freeze(process: Child, seconds: float) -> None:
    """Stop a process for some seconds."""
    process.send_signal(signal.SIGSTOP)
    time.sleep(seconds)
    process.send_signal(signal.SIGCONT)
