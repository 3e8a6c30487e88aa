"""A Dask scheduler in a separate process, so that nothing that happens at its port can end a coordinator.

    python -P scheduler_process.py OPTIONS     runs the scheduler; prints its address, and ends with its standard input

This file is also that program, which imports nothing of Germline: it starts quickly and needs little memory.
"""

import asyncio
import errno
import json
import logging
import os
import sys
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from subprocess import PIPE, Popen
from typing import Any

SETTINGS = {
    "distributed.scheduler.worker-ttl": "15s",  # after which a silent worker is given up
    "distributed.comm.timeouts.tcp": "12s",
    "distributed.comm.retry.count": 0,
    "distributed.admin.low-level-log-length": 100,  # of the latest messages and events, which it keeps
    "distributed.comm.tls.min-version": 1.3,
}
REVOKED = "revoked.txt"  # the names of machines whose keys are revoked, in the folder of the authority
LOCAL = "127.0.0.1:0"  # where Dask's own HTTP pages are served
STRANGERS = 256  # connections that have not shown a certificate yet; one more makes the oldest one go
SHARE = 4  # strangers may have this part of the descriptors of the process, at most: the others are for workers
PAUSE = 0.05  # seconds to wait for descriptors if there are none
PATIENCE = 10.0  # seconds for a connection to show a certificate and begin to speak
LOOK = 2.0  # seconds between looks at the list of revoked names
QUIET = 60.0  # seconds between lines about connections that were turned away
ATTEMPTS = 3  # to start a scheduler that ends without a reason


class SchedulerProcess:
    """A Dask scheduler that this process starts, and starts again if it ends.

    Args:
        host: The address at which it listens.
        port: The port; 0 is any free port.
        security: Options of Dask's ``Security``, if there are keys.
        timeout: Seconds after which a silent worker is given up.
    """

    def __init__(self, host: str, port: int, security: dict[str, Any] | None = None, timeout: float = 15.0) -> None:
        revoked = str(Path(security["tls_ca_file"]).with_name(REVOKED)) if security is not None else None
        self.options = {"host": host, "port": port, "security": security, "timeout": timeout, "revoked": revoked}
        self.address = self._start()
        self.options["port"] = int(self.address.rpartition(":")[2])

    def _start(self) -> str:
        command, text = [sys.executable, "-P", __file__, json.dumps(self.options)], ""
        for _ in range(ATTEMPTS):
            self.process = Popen(command, stdin=PIPE, stdout=PIPE, start_new_session=True)
            assert self.process.stdout is not None
            word, _, text = self.process.stdout.readline().decode().strip().partition(" ")
            if word == "address":
                return text
            self.end()
            if text:
                break
        raise OSError(text or "the scheduler ends as soon as it is started")

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


class Door:
    """The door of a scheduler: strangers wait in it, few and not for long, and those whose key is revoked stay out.

    Args:
        revoked: The file with the names of machines whose keys are revoked, one in a line; it need not exist.
    """

    def __init__(self, revoked: str | None) -> None:
        self.revoked, self.waiting = revoked, dict[Any, asyncio.TimerHandle]()  # streams, in the order of arrival
        self.turned_away, self.last_line = 0, -QUIET
        self.places = min(STRANGERS, raise_limit() // SHARE)

    def guard(self, scheduler: Any) -> None:
        """Have all connections to a scheduler pass through this door."""
        for listener in scheduler.listeners:
            listener.tcp_server.handle_stream = partial(self._receive, listener.tcp_server.handle_stream)
        handle = scheduler.handle_comm

        async def let_in(comm: Any) -> None:
            self._forget(comm.stream)
            if self.is_revoked(comm):
                self.turn_away(comm.stream)
            else:
                await handle(comm)

        for listener in scheduler.listeners:
            listener.comm_handler = let_in

    async def _receive(self, handle: Any, stream: Any, address: Any) -> None:
        if len(self.waiting) >= self.places:
            self.turn_away(next(iter(self.waiting)))
        self.waiting[stream] = asyncio.get_running_loop().call_later(PATIENCE, self.turn_away, stream)
        try:
            await handle(stream, address)
        finally:
            if stream in self.waiting:  # it was never let in
                self.turn_away(stream)

    def wait_out(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Wait if there are no descriptors for one more connection, and let a stranger go: an exception handler."""
        if getattr(context.get("exception"), "errno", None) not in (errno.EMFILE, errno.ENFILE):
            loop.default_exception_handler(context)
            return
        if self.waiting:
            self.turn_away(next(iter(self.waiting)))
        time.sleep(PAUSE)  # otherwise the same connection would be tried without end

    def _forget(self, stream: Any) -> None:
        if (timer := self.waiting.pop(stream, None)) is not None:
            timer.cancel()

    def turn_away(self, stream: Any) -> None:
        """Close a connection; say so in one line for many."""
        self._forget(stream)
        stream.close()
        self.turned_away += 1
        if time.monotonic() - self.last_line > QUIET:
            self.last_line = time.monotonic()
            text = "connections without a valid certificate that were turned away so far"
            print(f"{text}: {self.turned_away}", file=sys.stderr, flush=True)

    def is_revoked(self, comm: Any) -> bool:
        """Return whether the name in the certificate of a connection is on the list of revoked names."""
        subject = (comm.extra_info.get("peercert") or {}).get("subject", ())
        names = [value for part in subject for key, value in part if key == "commonName"]
        try:
            return bool(set(names) & set(Path(self.revoked or "").read_text().split()))
        except OSError:
            return False

    async def keep_out_revoked(self, scheduler: Any) -> None:
        """Close connections of machines whose keys have been revoked since they came."""
        while True:
            await asyncio.sleep(LOOK)
            for comm in [comm for comm in list(scheduler._comms) if self.is_revoked(comm)]:
                self.turn_away(comm.stream)


def raise_limit() -> int:
    """Let this process open as many files and connections as the system allows it; return how many these are."""
    try:
        import resource
    except ImportError:  # not on Windows
        return 8192
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = hard if hard != resource.RLIM_INFINITY else max(soft, 1 << 20)
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


async def run_scheduler(options: dict[str, Any]) -> None:
    """Run a scheduler until standard input ends."""
    import dask
    from distributed import Scheduler
    from distributed.security import Security

    logging.getLogger("distributed").setLevel(logging.CRITICAL + 1)  # the door says what there is to say
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
    door = Door(options["revoked"])
    door.guard(scheduler)
    print(f"address {scheduler.address}", flush=True)
    looking, loop = asyncio.ensure_future(door.keep_out_revoked(scheduler)), asyncio.get_running_loop()
    loop.set_exception_handler(door.wait_out)
    while await loop.run_in_executor(None, os.read, 0, 1):
        pass
    looking.cancel()
    os._exit(0)  # whatever is connected


if __name__ == "__main__":
    asyncio.run(run_scheduler(json.loads(sys.argv[1])))
