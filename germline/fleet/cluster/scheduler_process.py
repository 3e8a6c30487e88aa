"""A Dask scheduler in a separate process, so that nothing that happens at its port can end a coordinator.

    python -P scheduler_process.py OPTIONS     runs the scheduler; prints its address, and ends with its standard input

This file is also that program, which imports nothing of Germline: it starts quickly and needs little memory.
"""

import asyncio
import json
import logging
import os
import sys
from contextlib import suppress
from subprocess import PIPE, Popen
from typing import Any

SETTINGS = {
    "distributed.scheduler.worker-ttl": "15s",  # after which a silent worker is given up
    "distributed.comm.timeouts.tcp": "12s",
    "distributed.comm.retry.count": 0,
    "distributed.admin.low-level-log-length": 100,  # of the latest messages and events, which it keeps
    "distributed.comm.tls.min-version": 1.3,
}
LOCAL = "127.0.0.1:0"  # where Dask's own HTTP pages are served


class SchedulerProcess:
    """A Dask scheduler that this process starts, and starts again if it ends.

    Args:
        host: The address at which it listens.
        port: The port; 0 is any free port.
        security: Options of Dask's ``Security``, if there are keys.
        timeout: Seconds after which a silent worker is given up.
    """

    def __init__(self, host: str, port: int, security: dict[str, Any] | None = None, timeout: float = 15.0) -> None:
        self.options = {"host": host, "port": port, "security": security, "timeout": timeout}
        self.address = self._start()
        self.options["port"] = int(self.address.rpartition(":")[2])

    def _start(self) -> str:
        command = [sys.executable, "-P", __file__, json.dumps(self.options)]
        self.process = Popen(command, stdin=PIPE, stdout=PIPE, start_new_session=True)
        assert self.process.stdout is not None
        word, _, text = self.process.stdout.readline().decode().strip().partition(" ")
        if word != "address":
            self.end()
            raise OSError(text or "the scheduler ended at once")
        return text

    @property
    def has_ended(self) -> bool:
        return self.process.poll() is not None

    def keep_running(self) -> None:
        """Start the scheduler again, at the same address, if it has ended."""
        if self.has_ended:
            self.end()
            with suppress(OSError):  # the next attempt may succeed
                self._start()

    def end(self) -> None:
        """End the scheduler."""
        self.process.terminate()
        self.process.communicate()


async def run_scheduler(options: dict[str, Any]) -> None:
    """Run a scheduler until standard input ends."""
    import dask
    from distributed import Scheduler
    from distributed.security import Security

    logging.getLogger("distributed").setLevel(logging.CRITICAL + 1)
    logging.getLogger("distributed.comm").setLevel(logging.WARNING)
    logging.getLogger("tornado").setLevel(logging.CRITICAL + 1)  # tracebacks about clients that are no workers
    dask.config.set(SETTINGS | {"distributed.scheduler.worker-ttl": f"{options['timeout']} s"})
    security = None if options["security"] is None else Security(**options["security"])  # type: ignore[no-untyped-call]
    protocol = "tcp://" if security is None else "tls://"
    about = {"host": options["host"], "port": options["port"], "protocol": protocol, "security": security}
    try:
        scheduler = await Scheduler(**about, dashboard=False, dashboard_address=LOCAL)
    except (OSError, ValueError, RuntimeError) as error:
        print(f"error {error.__cause__ or error}", flush=True)
        return
    print(f"address {scheduler.address}", flush=True)
    loop = asyncio.get_running_loop()
    while await loop.run_in_executor(None, os.read, 0, 1):
        pass
    os._exit(0)  # whatever is connected


if __name__ == "__main__":
    asyncio.run(run_scheduler(json.loads(sys.argv[1])))
