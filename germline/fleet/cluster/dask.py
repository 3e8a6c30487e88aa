"""Dask below a cluster: the coordinator is a client of a Dask scheduler, and a call is a task of one of its workers.

No connection to a worker is ever needed. Answers are events, which travel over the connection that the worker has
opened to the scheduler. The scheduler keeps the last 1,000 events, so large arrays go another way, in both directions:
they wait in variables of the scheduler, which are emptied as soon as they are read.

A plain Dask worker can answer these calls where Germline is installed. As a preload this module makes it ready at once:

    dask worker tls://HOST:8786 --preload germline.fleet.cluster.dask
"""

import itertools
import json
import logging
import pickle
import queue
import ssl
import threading
import time
import uuid
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from germline.errors import BadInput
from germline.fleet.cluster.backend import Backend, Event, Message, count_bytes, parse_address
from germline.fleet.cluster.keys import security_options
from germline.fleet.cluster.scheduler_process import SchedulerProcess
from germline.fleet.cluster.worker import Responder

TOPIC = "germline"
PROTOCOLS = ("tcp", "tls")  # of the address of a scheduler
INLINE = 1 << 18  # bytes of the arrays of a call; larger ones are uploaded
INLINE_ANSWER = 1 << 15  # bytes of those of an event
SLOTS = 8  # variables of a worker for large answers; it has at most two answers that are not read
LOOK = 2.0  # seconds between looks at the scheduler, if nothing happens
DEAF = 8.0  # seconds after which a client that does not hear its own event connects again
CONNECT = 10.0  # seconds for a connection
CLOSING = 5.0  # seconds for the last calls


def load_dask() -> Any:
    """Return the library distributed, which is an optional dependency."""
    try:
        import distributed
    except ImportError as error:
        raise BadInput("A Dask cluster needs dask: pip install 'germline[dask]'.") from error
    return distributed


def make_security(keys: Path | None) -> Any:
    """Return how connections are secured by a folder of keys; without keys they are not."""
    options = security_options(keys)
    if options is None:
        return None
    security = load_dask().Security(**options, tls_min_version=ssl.TLSVersion.TLSv1_3)
    try:
        security.get_connection_args("client")
    except (ssl.SSLError, OSError) as error:
        raise BadInput(f"The keys in {keys} cannot be used: {error}.") from error
    return security


def complete_address(text: str, *, has_keys: bool) -> str:
    """Return the address of a scheduler with its protocol: tls if there are keys, and otherwise tcp.

    >>> complete_address("node7:8786", has_keys=True)
    'tls://node7:8786'
    """
    protocol, _, place = text.rpartition("://")
    parse_address(place)
    if not protocol:
        return f"{'tls' if has_keys else 'tcp'}://{text}"
    if protocol not in PROTOCOLS:
        raise BadInput(f"The address of a Dask scheduler begins with tcp:// or tls://, not {protocol}://.")
    if has_keys and protocol != "tls":
        raise BadInput(f"Keys are for a scheduler with TLS: give tls://{place}, or {place}, instead of {text}.")
    if not has_keys and protocol == "tls" and load_dask().Security().tls_client_cert is None:
        raise BadInput(f"The scheduler at {text} needs keys: name a folder of 'germline keys' (keys=, or --keys).")
    return text


def dask_setup(worker: Any) -> None:
    """Make a Dask worker ready for coordinators; Dask calls this for a preload."""
    threads = worker.state.nthreads
    worker.extensions.setdefault(TOPIC, Responder.from_environment(threads, is_shared=threads > 1))


def answer_call(text: str, arrays: Sequence[bytes], slot: str | None) -> None:
    """Answer a coordinator's message; this is a task of a Dask worker."""
    from distributed import get_worker
    from distributed.utils import sync

    worker, head = get_worker(), json.loads(text)
    if TOPIC not in worker.extensions:
        dask_setup(worker)
    responder: Responder = worker.extensions[TOPIC]
    if slot is not None:
        arrays = sync(worker.loop, worker.scheduler.variable_get, name=slot, timeout=60)["value"] or ()
    answer = responder.answer(Message(head, arrays))
    if answer is None:
        return
    about = {"token": head["token"], "head": json.dumps(answer.head), "arrays": list(answer.arrays)}
    if count_bytes(answer) > INLINE_ANSWER:
        about["slot"] = f"{TOPIC}-{head['token']}-{worker.address}-{head['call'] % SLOTS}"
        sync(worker.loop, worker.scheduler.variable_set, name=about["slot"], data=about.pop("arrays"))
    worker.log_event(TOPIC, about)


class ByReference(tuple[str, list[bytes], str | None]):
    """The arguments of ``answer_call``, which is called when they are unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return answer_call, tuple(self)


class Call(NamedTuple):
    """A task that has not ended, its arrays, and the variable where they are if they are large."""

    worker: str
    future: Any
    arrays: Sequence[bytes]
    slot: str | None


class DaskBackend(Backend):
    """The workers of a Dask scheduler.

    Args:
        address: The address of the scheduler, such as tls://HOST:8786.
        security: How connections are secured, as Dask has it.
        scheduler: The scheduler, if this program has started it: it starts it again if it ends.
    """

    def __init__(self, address: str, security: Any = None, scheduler: SchedulerProcess | None = None) -> None:
        self.distributed = load_dask()
        self.address, self.security, self.scheduler = address, security, scheduler
        self.token = uuid.uuid4().hex[:16]
        self.events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self.numbers = itertools.count(1)
        self.workers: set[str] = set()
        self.calls: dict[int, Call] = {}
        self.lock = threading.RLock()  # of the calls: they end in another thread
        self.last_look, self.last_event = 0.0, 0.0
        self.client: Any = None
        if scheduler is not None:  # that it is lost is no error: it is started again
            for name in ("distributed", "distributed.client"):
                logging.getLogger(name).setLevel(logging.CRITICAL)
        self.lost_errors = (OSError, self.distributed.client.ClosedClientError)  # if there is no connection any more
        try:
            self._connect()
        except (OSError, ValueError) as error:  # tornado's, if only this side has keys
            reason = str(error).rstrip(".") or type(error).__name__
            keys = "keys of the same authority" if address.startswith("tls") else "no keys either"
            advice = f"Check the address, that the scheduler is running, and that it uses {keys}"
            raise BadInput(f"Cannot connect to a Dask scheduler at {address}: {reason}. {advice}.") from error

    def _connect(self) -> None:
        options = {"security": self.security, "set_as_default": False, "timeout": CONNECT}
        self.client = self.distributed.Client(self.address, **options)
        self.client.scheduler_comm.interval = 0.001  # seconds between messages: chunks wait for them
        # as long as one task of its group is there, the scheduler does not note each call as a new computation
        self.anchor = self.client.submit(int, key=f"{TOPIC}-{self.token}-0", pure=False)
        self.client.subscribe_topic(TOPIC, self._hear)
        self.client.subscribe_topic("all", self._note_change)  # workers come and go
        self.last_event = time.monotonic()

    def look(self) -> None:
        if time.monotonic() - self.last_look < LOOK:
            return
        self.last_look = time.monotonic()
        there: set[str] = set()
        try:
            if self.scheduler is not None and self.scheduler.has_ended:  # the client would wait for it for 10 s
                raise ConnectionError("the scheduler has ended")
            if self.client is None:
                self._connect()
            self.client.log_event(TOPIC, {"token": self.token})
            there = set(self.client.nthreads())
            if time.monotonic() - self.last_event > DEAF:
                raise TimeoutError("the scheduler does not send events any more")
        except self.lost_errors:
            self._disconnect()
            if self.scheduler is not None:
                self.scheduler.keep_running()
                self.last_look = 0.0
            there = set()  # workers that the next client finds join again: what was sent to them is lost
        for worker in self.workers - there:
            with self.lock:
                for number in [number for number, call in self.calls.items() if call.worker == worker]:
                    self._forget(number)
            self.events.put(Event("left", worker))
        for worker in there - self.workers:
            self.events.put(Event("joined", worker))
        self.workers = there

    def _note_change(self, event: Any) -> None:
        self.last_look = 0.0

    def _disconnect(self) -> None:
        client, self.client, self.calls = self.client, None, {}
        if client is not None:
            with suppress(*self.lost_errors):
                client.unsubscribe_topic(TOPIC)
                client.unsubscribe_topic("all")
                client.close(timeout=1)

    def submit(self, worker: str, message: Message) -> None:
        if self.client is None or worker not in self.workers:
            return
        number, arrays = next(self.numbers), message.arrays
        head = json.dumps(message.head | {"token": self.token, "call": number})
        where = {"workers": [worker], "allow_other_workers": False, "pure": False, "retries": 0, "fifo_timeout": 0}
        with self.lock, suppress(*self.lost_errors):  # then the client connects, and the worker joins, again
            slot = self._upload(arrays) if count_bytes(message) > INLINE else None
            task = pickle.dumps(ByReference((head, [] if slot is not None else list(arrays), slot)))
            # the scheduler unpickles functions, and need not have Germline
            future = self.client.submit(pickle.loads, task, key=f"{TOPIC}-{self.token}-{number}", **where)
            self.calls[number] = Call(worker, future, arrays, slot)
            future.add_done_callback(partial(self._end_call, number))

    def _upload(self, arrays: Sequence[bytes]) -> str:
        """Return the variable where arrays are: that of another call with the same ones, or a free one."""
        slots = {call.slot: call.arrays for call in self.calls.values() if call.slot is not None}
        for slot, others in slots.items():
            if others is arrays:
                return slot
        names = (f"{TOPIC}-{self.token}-{number}" for number in itertools.count())
        slot = next(name for name in names if name not in slots)
        self._set_variable(slot, list(arrays))
        return slot

    def _set_variable(self, slot: str, value: Any) -> None:
        self.client.sync(self.client.scheduler.variable_set, name=slot, data=value)

    def _end_call(self, number: int, future: Any) -> None:
        call = self.calls.get(number)
        if call is not None and future.status == "error":
            error = future.exception()
            reason = str(error) if isinstance(error, BadInput) else f"{type(error).__name__}: {error}"
            self.events.put(Event("failed", call.worker, Message({"reason": reason})))
        self._forget(number)

    def _forget(self, number: int) -> None:
        """Have the scheduler forget a call, and its arrays if no other call needs them."""
        with self.lock:
            call = self.calls.pop(number, None)
            if call is None:
                return
            call.future.release()
            is_shared = any(other.slot == call.slot for other in self.calls.values())
            if call.slot is not None and not is_shared and self.client is not None:
                with suppress(*self.lost_errors):
                    self._set_variable(call.slot, None)

    async def _hear(self, event: tuple[float, Any]) -> None:
        about = event[1]
        if self.client is None or not isinstance(about, dict) or about.get("token") != self.token:
            return  # of another coordinator
        if "worker" not in about:
            self.last_event = time.monotonic()
            return
        try:
            arrays, slot, scheduler = about.get("arrays", ()), about.get("slot"), self.client.scheduler
            if slot is not None:
                arrays = (await scheduler.variable_get(name=slot, timeout=60))["value"] or ()
                await scheduler.variable_set(name=slot, data=None)
            self.events.put(Event("answered", about["worker"], Message(dict(json.loads(about["head"])), list(arrays))))
        except self.lost_errors:
            return  # the client connects, and the worker joins, again
        except Exception as error:  # whatever a worker has sent
            self.events.put(Event("failed", about["worker"], Message({"reason": f"{type(error).__name__}: {error}"})))

    def close(self) -> None:
        until = time.monotonic() + CLOSING
        while self.calls and time.monotonic() < until:
            time.sleep(0.02)
        self._disconnect()
        if self.scheduler is not None:
            self.scheduler.end()
