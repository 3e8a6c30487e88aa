"""Dask below a cluster: the coordinator is a client of a Dask scheduler, and a call is a task of one of its workers.

No connection to a worker is ever needed. Answers are events, which travel over the connection that the worker has
opened to the scheduler. The scheduler keeps the last 1,000 events, so large arrays go another way, in both directions:
they wait in variables of the scheduler, which are emptied as soon as they are read.

A plain Dask worker can answer these calls where Germline is installed. As a preload this module makes it ready at once:

    dask worker tls://HOST:8786 --preload germline.fleet.cluster.dask
"""

import asyncio
import itertools
import json
import pickle
import queue
import ssl
import threading
import time
import uuid
from collections.abc import Sequence
from concurrent.futures import CancelledError
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from germline.errors import BadInput
from germline.fleet.cluster.backend import Backend, Event, Message, count_bytes
from germline.fleet.cluster.keys import security_options
from germline.fleet.cluster.scheduler_process import SchedulerProcess
from germline.fleet.cluster.worker import Responder

TOPIC = "germline"
INLINE = 1 << 15  # bytes of the arrays of a call or an event; larger ones are uploaded
SLOTS = 8  # variables of a worker for large answers; it has at most two answers that are not read
LOOK = 2.0  # seconds between looks at the scheduler, if nothing happens
DEAF = 8.0  # seconds after which a client that does not hear its own event connects again
CLOSING = 5.0  # seconds for the last calls

responders_lock = threading.Lock()


def load_dask() -> Any:
    """Return the library distributed, which is an optional dependency."""
    try:
        import distributed
    except ImportError as error:
        raise BadInput("A Dask cluster needs dask: pip install 'germline[dask]'.") from error
    return distributed


def make_security(keys: Path | None) -> Any:
    """Return how connections are secured by a folder of keys; without keys they are not."""
    if keys is None:
        return None
    security = load_dask().Security(**security_options(keys), tls_min_version=ssl.TLSVersion.TLSv1_3)
    try:
        security.get_connection_args("client")
    except (ssl.SSLError, OSError) as error:
        raise BadInput(f"The keys in {keys} cannot be used: {error}.") from error
    return security


def dask_setup(worker: Any) -> None:
    """Make a Dask worker ready for coordinators; Dask calls this for a preload."""
    threads = worker.state.nthreads
    worker.extensions[TOPIC] = Responder.from_environment(threads, is_shared=threads > 1)


def answer_call(text: str, arrays: Sequence[bytes], slot: str | None) -> None:
    """Answer a coordinator's message; this is a task of a Dask worker."""
    from distributed import get_worker
    from distributed.utils import sync

    worker, head = get_worker(), json.loads(text)
    with responders_lock:
        if TOPIC not in worker.extensions:
            dask_setup(worker)
    responder: Responder = worker.extensions[TOPIC]
    if slot is not None:
        arrays = sync(worker.loop, worker.scheduler.variable_get, name=slot, timeout=60)["value"] or ()
    answer = responder.answer(Message(head, arrays))
    if answer is None:
        return
    about = {"token": head["token"], "head": json.dumps(answer.head), "arrays": list(answer.arrays)}
    if count_bytes(answer) > INLINE:
        about["slot"] = f"{TOPIC}-{head['token']}-{worker.address}-{head['call'] % SLOTS}"
        sync(worker.loop, worker.scheduler.variable_set, name=about["slot"], data=about.pop("arrays"))
    worker.log_event(TOPIC, about)


@dataclass
class ByReference:
    """A call of ``answer_call`` that happens when it is unpickled."""

    head: str
    arrays: list[bytes]
    slot: str | None

    def __reduce__(self) -> tuple[Any, ...]:
        return answer_call, (self.head, self.arrays, self.slot)


@dataclass
class Upload:
    """Arrays that wait in a variable of the scheduler for some calls."""

    slot: str
    arrays: Sequence[bytes]
    users: int = 0


@dataclass
class Call:
    """A task that has not ended."""

    worker: str
    future: Any
    upload: Upload | None


class DaskBackend(Backend):
    """The workers of a Dask scheduler.

    Args:
        address: The address of the scheduler, such as tls://HOST:8786; ``scheduler`` may be given instead.
        security: How connections are secured, as Dask has it.
        scheduler: A scheduler that this program has started, and starts again if it ends.
    """

    def __init__(self, address: str, security: Any = None, scheduler: SchedulerProcess | None = None) -> None:
        self.distributed = load_dask()
        self.address, self.security, self.scheduler = address, security, scheduler
        self.token = uuid.uuid4().hex[:16]
        self.events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self.numbers = itertools.count(1)
        self.workers: set[str] = set()
        self.calls: dict[int, Call] = {}
        self.uploads: dict[int, Upload] = {}  # by the identity of their arrays
        self.slots = (f"{TOPIC}-{self.token}-{number}" for number in itertools.count())
        self.free_slots: list[str] = []
        self.client: Any = None
        self.heard = 0.0  # when this client last heard from itself
        self.loop = asyncio.new_event_loop()
        self.outbox: asyncio.Queue[tuple[int, str, Message]] = asyncio.Queue()
        self.changed = asyncio.Event()
        self.tasks: set[asyncio.Task[None]] = set()
        threading.Thread(target=self.loop.run_forever, name="germline-dask", daemon=True).start()
        try:
            self._run(self._connect())
        except (OSError, TimeoutError) as error:
            self.close()
            raise BadInput(f"There is no Dask scheduler at {address}: {error}.") from error
        for work in (self._look(), self._send()):
            self.loop.call_soon_threadsafe(self._start, work)

    def _run(self, work: Any, seconds: float = 30.0) -> None:
        asyncio.run_coroutine_threadsafe(work, self.loop).result(seconds)

    def _start(self, work: Any) -> None:
        task = self.loop.create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def _connect(self) -> None:
        options = {"asynchronous": True, "set_as_default": False, "timeout": 10}
        client = await self.distributed.Client(self.address, security=self.security, **options)
        client.subscribe_topic(TOPIC, self._hear)
        client.subscribe_topic("all", lambda event: self.changed.set())  # workers come and go
        self.client, self.heard = client, time.monotonic()

    async def _look(self) -> None:
        """Look which workers there are, whenever something has changed, and connect again where necessary."""
        while True:
            try:
                if self.client is None:
                    await self._connect()
                await self.client.scheduler.log_event(topic=TOPIC, msg={"token": self.token})
                there = set(await self.client.scheduler.ncores())
                if time.monotonic() - self.heard > DEAF:
                    raise TimeoutError("the scheduler does not send events any more")
            except (OSError, TimeoutError):
                there = set()
                await self._disconnect()
            for worker in self.workers - there:
                self._drop_worker(worker)
            for worker in there - self.workers:
                self.events.put(Event("joined", worker))
            self.workers = there
            with suppress(TimeoutError):
                await asyncio.wait_for(self.changed.wait(), LOOK)
            self.changed.clear()

    async def _disconnect(self) -> None:
        client, self.client = self.client, None
        self.uploads.clear()
        if client is not None:
            with suppress(OSError, TimeoutError):
                await client.close(timeout=1)
        if self.scheduler is not None:
            await self.loop.run_in_executor(None, self.scheduler.keep_running)

    def _drop_worker(self, worker: str) -> None:
        for number in [number for number, call in self.calls.items() if call.worker == worker]:
            self._forget(number)
        self.events.put(Event("left", worker))

    async def _send(self) -> None:
        while True:
            number, worker, message = await self.outbox.get()
            if worker in self.workers and self.client is not None:
                with suppress(OSError, TimeoutError):  # then the client connects again, and the worker joins again
                    await self._send_call(number, worker, message)

    async def _send_call(self, number: int, worker: str, message: Message) -> None:
        upload = await self._upload(message.arrays) if count_bytes(message) > INLINE else None
        head = json.dumps(message.head | {"token": self.token, "call": number})
        arrays, slot = (list(message.arrays), None) if upload is None else ([], upload.slot)
        where = {"workers": [worker], "allow_other_workers": False, "pure": False, "retries": 0, "fifo_timeout": 0}
        task = pickle.dumps(ByReference(head, arrays, slot))  # the scheduler need not have Germline
        future = self.client.submit(pickle.loads, task, key=f"{TOPIC}-{self.token}-{number}", **where)
        self.calls[number] = Call(worker, future, upload)
        self._start(self._finish(number, worker, future))

    async def _upload(self, arrays: Sequence[bytes]) -> Upload:
        upload = self.uploads.get(id(arrays))
        if upload is None:
            slot = self.free_slots.pop() if self.free_slots else next(self.slots)
            upload = self.uploads[id(arrays)] = Upload(slot, arrays)
            await self.client.scheduler.variable_set(name=slot, data=list(arrays))
        upload.users += 1
        return upload

    async def _finish(self, number: int, worker: str, future: Any) -> None:
        with suppress(asyncio.CancelledError, CancelledError, OSError):  # cancelled, or its scheduler is gone
            with self.client.as_current():
                await self.distributed.wait(future)
            if future.status == "error":
                error = await future.exception()
                self.events.put(Event("failed", worker, Message({"reason": f"{type(error).__name__}: {error}"})))
        self._forget(number)

    def _forget(self, number: int) -> None:
        """Let the scheduler forget a call, whether it has ended or not."""
        call = self.calls.pop(number, None)
        if call is None:
            return
        call.future.release()
        if call.upload is not None:
            call.upload.users -= 1
            if not call.upload.users and self.uploads.pop(id(call.upload.arrays), None) is not None:
                self._start(self._empty(call.upload.slot))
                self.free_slots.append(call.upload.slot)

    async def _empty(self, slot: str) -> None:
        if self.client is not None:
            with suppress(OSError):
                await self.client.scheduler.variable_set(name=slot, data=None)

    def _hear(self, event: tuple[float, Any]) -> None:
        about = event[1]
        if not isinstance(about, dict) or about.get("token") != self.token:
            return  # of another coordinator
        if "worker" not in about:
            self.heard = time.monotonic()
        elif "slot" in about:
            self._start(self._download(about))
        else:
            self._put_answer(about)

    async def _download(self, about: dict[str, Any]) -> None:
        with suppress(OSError, TimeoutError):
            record = await self.client.scheduler.variable_get(name=about["slot"], timeout=60)
            self._put_answer(about | {"arrays": record["value"] or ()})
            await self._empty(about["slot"])

    def _put_answer(self, about: dict[str, Any]) -> None:
        try:
            message = Message(dict(json.loads(about["head"])), list(about["arrays"]))
            self.events.put(Event("answered", about["worker"], message))
        except Exception as error:  # whatever a worker has sent
            self.events.put(Event("failed", about["worker"], Message({"reason": f"{type(error).__name__}: {error}"})))

    def submit(self, worker: str, message: Message) -> int:
        number = next(self.numbers)
        self.loop.call_soon_threadsafe(self.outbox.put_nowait, (number, worker, message))
        return number

    def cancel(self, call: int) -> None:
        self.loop.call_soon_threadsafe(self._forget, call)

    def close(self) -> None:
        async def end() -> None:
            until = time.monotonic() + CLOSING
            while self.client is not None and (self.calls or self.outbox.qsize()) and time.monotonic() < until:
                await asyncio.sleep(0.02)
            for task in self.tasks - {asyncio.current_task()}:
                task.cancel()
            if self.client is not None:
                for topic in (TOPIC, "all"):
                    self.client.unsubscribe_topic(topic)
                await self.client.close(timeout=2)

        if self.loop.is_running():
            with suppress(TimeoutError, OSError):
                self._run(end(), CLOSING + 5)
            self.loop.call_soon_threadsafe(self.loop.stop)
        if self.scheduler is not None:
            self.scheduler.end()
