"""Workers as processes: 'germline worker', which keeps a Dask worker connected, and those that a coordinator starts."""

import asyncio
import logging
import os
import random
import signal
import ssl
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from germline.errors import BadInput, MachineError
from germline.fleet.cluster.dask import TOPIC, complete_address, load_dask, make_security
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
        # -P: a file in the working directory must not be imported in place of a module
        self.command = [sys.executable, "-P", "-m", "germline", "worker", address.partition("://")[2], *words]
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


def run_worker(address: str, responder: Responder, *, keys: Path | None = None, give_up: float | None = None) -> None:
    """Work for a coordinator until its run has ended, or until there has been none for ``give_up`` seconds."""
    load_dask()
    import dask

    url = complete_address(address, has_keys=keys is not None)
    responder.fleet.find_device()  # a device that this machine does not have is an error before a connection
    logging.getLogger("distributed").setLevel(logging.CRITICAL)
    dask.config.set(SETTINGS)
    with suppress(asyncio.CancelledError):
        asyncio.run(keep_working(url, responder, keys, give_up))


async def keep_working(url: str, responder: Responder, keys: Path | None, give_up: float | None = None) -> None:
    """Be a Dask worker until the run has ended, or the coordinator turns it away; connect again if it is gone."""
    security, say, pause = make_security(keys), responder.say, PAUSES[0]
    loop, task, end = asyncio.get_running_loop(), asyncio.current_task(), asyncio.Event()
    if sys.platform != "win32" and task is not None:
        loop.add_signal_handler(signal.SIGTERM, task.cancel)
    reasons: list[str | None] = []

    def note_end(reason: str | None) -> None:
        reasons.append(reason)
        loop.call_soon_threadsafe(end.set)

    responder.on_end, lost = note_end, time.monotonic()
    while True:
        try:
            await try_connection(url, security, keys)
            await work_for_scheduler(url, security, responder, end)
            if end.is_set():
                break
            lost = time.monotonic()
            say("the coordinator is gone; trying again")
            pause = PAUSES[0]
        except RefusedError:
            raise
        except (OSError, RuntimeError, ValueError) as error:  # tornado's, if only one side has keys
            if pause == PAUSES[0]:
                other = "uses no keys or has revoked this one" if keys is not None else "asks for keys (--keys)"
                hint = f", or it {other}"
                say(f"there is no coordinator at {url}{hint} ({first_line(error)}); trying again")
        if ONCE in os.environ:
            raise SystemExit(1)
        if give_up is not None and time.monotonic() - lost >= give_up:
            raise MachineError(f"There has been no coordinator at {url} for {give_up:g} seconds.")
        await asyncio.sleep(pause * random.uniform(0.7, 1.3))
        pause = min(PAUSES[1], 2 * pause)
    if reasons[0] is not None:
        raise RefusedError(f"The coordinator has turned this worker away: {reasons[0]}.")
    say("the run has ended")


async def try_connection(url: str, security: Any, keys: Path | None) -> None:
    """Connect once, and raise an error if that cannot succeed with these keys."""
    from distributed.comm import connect

    options = security.get_connection_args("worker") if security is not None else {}
    try:
        connection = connect(url, timeout=10, **options)  # type: ignore[no-untyped-call]
        await (await asyncio.wait_for(connection, 20)).close()
    except OSError as error:
        if ssl.SSLCertVerificationError.__name__ in "".join(traceback.format_exception(error)):  # it is the cause
            raise RefusedError(OTHER_AUTHORITY.format(url, keys)) from error
        raise


async def work_for_scheduler(url: str, security: Any, responder: Responder, end: asyncio.Event) -> None:
    """Be a worker of a scheduler until it is gone or the run has ended.

    The worker listens on the loopback interface alone, because no process connects to it.
    """
    with tempfile.TemporaryDirectory(prefix="germline-worker-") as folder:
        about = {"host": "127.0.0.1", "dashboard_address": LOCAL, "local_directory": folder, "security": security}
        worker = load_dask().Worker(url, nthreads=1, memory_limit=0, **about)
        worker.extensions[TOPIC] = responder
        await worker
        waiting = [asyncio.ensure_future(work) for work in (worker.finished(), end.wait())]
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        for task in waiting:
            task.cancel()
        await worker.close(timeout=2)


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message."""
    return (str(error).splitlines() or [type(error).__name__])[0][:160]
