"""Workers as processes: 'germline worker', which keeps a Dask worker connected, and those that a coordinator starts."""

import asyncio
import os
import random
import signal
import ssl
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from germline.errors import BadInput
from germline.fleet.cluster.backend import parse_address
from germline.fleet.cluster.dask import TOPIC, load_dask, make_security
from germline.fleet.cluster.scheduler_process import LOCAL, SETTINGS
from germline.fleet.cluster.worker import Responder

STARTS = 3  # workers started here that may die before one of them is let in
TURNED_AWAY = 2  # the exit code of a worker that was not let in
ONCE = "GERMLINE_ONCE"  # the variable of a worker that ends with its scheduler; the coordinator starts it again
PAUSES = (0.5, 8.0)  # seconds between attempts to connect: the first, and the longest
OTHER_AUTHORITY = (
    "The coordinator at {} and the keys {} are not of one authority: use a folder made by 'germline keys add'."
)


class LocalWorkers:
    """Worker processes that a coordinator has started on its own machine.

    Args:
        count: The number of workers.
        address: The address of their scheduler.
        options: Options of 'germline worker'; those that are None are left out.
    """

    def __init__(self, count: int, address: str, options: Mapping[str, Any]) -> None:
        self.failed_starts = 0  # workers that have died since one was let in
        self.environment = {**os.environ, ONCE: "1"}
        self.environment.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // max(1, count))))
        words = [str(word) for option in options.items() if option[1] is not None for word in option]
        self.command = [sys.executable, "-m", "germline", "worker", address.partition("://")[2], *words]
        self.processes = [self._start_process() for _ in range(count)]

    def _start_process(self) -> "subprocess.Popen[bytes]":
        return subprocess.Popen(self.command, env=self.environment, start_new_session=True)

    def check(self, *, has_workers: bool) -> None:
        """Start workers again that have died; raise an error if all were turned away."""
        if has_workers:
            self.failed_starts = 0
        for place, process in enumerate(self.processes):
            if process.poll() in (None, TURNED_AWAY):  # which it would be again
                continue
            self.failed_starts += 1
            if self.failed_starts > STARTS:
                raise BadInput(f"Workers started here end before they can work (exit code {process.returncode}).")
            self.processes[place] = self._start_process()
        codes = {process.poll() for process in self.processes}
        if codes == {TURNED_AWAY} and not has_workers:
            raise BadInput("All workers were turned away; they have said why.")

    def close(self) -> None:
        """Wait for the workers to end, and end those that do not."""
        for process in self.processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(5.0)
            process.kill()
            process.wait()
        self.processes = []


class RefusedError(BadInput):
    """The coordinator has turned this worker away."""


@dataclass
class WorkerProcess:
    """A Dask worker that connects again when its scheduler is gone.

    It listens on the loopback interface alone, because no process connects to it.
    """

    address: str
    responder: Responder
    keys: Path | None = None
    pause: float = PAUSES[0]

    async def run(self) -> None:
        """Work until the run has ended, or the coordinator turns this worker away."""
        distributed, say = load_dask(), self.responder.say
        security = make_security(self.keys)
        address = f"{'tcp' if security is None else 'tls'}://{self.address}"
        loop, end = asyncio.get_running_loop(), asyncio.Event()
        reasons: list[str | None] = []

        def note_end(reason: str | None) -> None:
            reasons.append(reason)
            loop.call_soon_threadsafe(end.set)

        self.responder.on_end = note_end
        while True:
            try:
                await self._try_connection(address, security)
                if await self._work(distributed, address, security, end):
                    break
                say("the coordinator is gone; trying again")
                self.pause = PAUSES[0]
            except (OSError, TimeoutError, RuntimeError, ValueError) as error:  # tornado's, if only one side has keys
                if self.pause == PAUSES[0]:
                    hint = ", or it uses no keys" if self.keys is not None else ", or it asks for keys (--keys)"
                    say(f"there is no coordinator at {self.address}{hint} ({first_line(error)}); trying again")
            if ONCE in os.environ:
                raise SystemExit(1)
            await asyncio.sleep(self.pause * random.uniform(0.7, 1.3))
            self.pause = min(PAUSES[1], 2 * self.pause)
        if reasons[0] is not None:
            raise RefusedError(f"The coordinator has turned this worker away: {reasons[0]}.")
        say("the run has ended")

    async def _try_connection(self, address: str, security: Any) -> None:
        """Connect once, and raise an error if that cannot succeed with these keys."""
        from distributed.comm import connect

        options = security.get_connection_args("worker") if security is not None else {}
        try:
            comm = await asyncio.wait_for(connect(address, timeout=10, **options), 20)  # type: ignore[no-untyped-call]
            await comm.close()
        except OSError as error:
            if any(isinstance(cause, ssl.SSLCertVerificationError) for cause in list_causes(error)):
                raise RefusedError(OTHER_AUTHORITY.format(self.address, self.keys)) from error
            raise

    async def _work(self, distributed: Any, address: str, security: Any, end: asyncio.Event) -> bool:
        """Be a worker of a scheduler until it is gone or the run has ended; return whether it has ended."""
        with tempfile.TemporaryDirectory(prefix="germline-worker-") as folder:
            where = {"host": "127.0.0.1", "dashboard_address": LOCAL, "local_directory": folder}
            worker = distributed.Worker(address, nthreads=1, memory_limit=0, security=security, **where)
            worker.extensions[TOPIC] = self.responder
            await worker
            waiting = [asyncio.ensure_future(work) for work in (worker.finished(), end.wait())]
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in waiting:
                task.cancel()
            await worker.close(timeout=2)
        return end.is_set()


def run_worker(address: str, responder: Responder, *, keys: Path | None = None) -> None:
    """Work for a coordinator until its run has ended."""
    import logging

    load_dask()
    import dask

    parse_address(address)
    responder.fleet.find_device()  # a device that this machine does not have is an error before a connection
    logging.getLogger("distributed").setLevel(logging.CRITICAL)
    dask.config.set(SETTINGS)
    worker = WorkerProcess(address, responder, keys)

    async def main() -> None:
        task = asyncio.ensure_future(worker.run())
        if sys.platform != "win32":
            asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
        await task

    with suppress(asyncio.CancelledError):
        asyncio.run(main())


def list_causes(error: BaseException | None) -> list[BaseException]:
    """Return an error, what it was raised from, and so on."""
    causes: list[BaseException] = []
    while error is not None and error not in causes:
        causes.append(error)
        error = error.__cause__ or error.__context__
    return causes


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message."""
    return (str(error).splitlines() or [type(error).__name__])[0][:160]
