"""Dask below a cluster: the coordinator is a client of a Dask scheduler, and has a task on each of its workers.

The task answers the coordinator's calls until the coordinator is gone. A task for each call would cost Dask several
milliseconds, and some memory of the scheduler for good; so calls are messages, which a plugin of the scheduler passes
on. No connection to a worker is ever needed: answers are events, which travel over the connection that the worker has
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
import time
import uuid
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from germline.errors import BadInput
from germline.fleet.cluster.backend import Backend, Event, Message, count_bytes, parse_address
from germline.fleet.cluster.keys import check_dates, security_options
from germline.fleet.cluster.scheduler_process import SchedulerProcess
from germline.fleet.cluster.worker import Responder

TOPIC = "germline"
INBOXES = f"{TOPIC}-inboxes"  # of a worker: its calls, by client
PROTOCOLS = ("tcp", "tls")  # of the address of a scheduler
INLINE = 1 << 18  # bytes of the arrays of a call; larger ones are uploaded
INLINE_ANSWER = 1 << 15  # bytes of those of an event
SLOTS = 8  # variables of a worker for large answers; it has at most two answers that are not read
LOOK = 2.0  # seconds between looks at the scheduler, if nothing happens
DEAF = 8.0  # seconds after which a client that does not hear its own event connects again
CONNECT = 10.0  # seconds for a connection
CLOSING = 5.0  # seconds for the last calls
PROMPT = 0.001  # seconds between messages: chunks wait for them


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
    if keys is None or options is None:
        return None
    check_dates(keys)
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
    worker.extensions.setdefault(TOPIC, Responder.from_environment(worker.state.nthreads))


def serve_coordinator(token: str, client: str) -> None:
    """Answer the messages of a coordinator until it is gone; this is a task of a Dask worker.

    Args:
        token: The name of the coordinator.
        client: The name of its connection to the scheduler.
    """
    from distributed import get_worker, secede
    from distributed.core import Status

    worker = get_worker()
    if TOPIC not in worker.extensions:
        dask_setup(worker)
    inbox = queue.SimpleQueue[Any]()
    inboxes: dict[str, Any] = worker.extensions.setdefault(INBOXES, {})
    inboxes[client] = inbox
    worker.stream_handlers[TOPIC] = lambda client, call: inboxes[client].put(call) if client in inboxes else None
    secede()  # type: ignore[no-untyped-call]
    answerer = Answerer(worker, token, client)
    answerer.send({"ready": True})
    call: Any = {}
    while call is not None and worker.status in (Status.running, Status.paused):
        with suppress(queue.Empty):
            if call := inbox.get(timeout=1.0):
                answerer.answer(call)
    answerer.close()
    inboxes.pop(client, None)


@dataclass
class Answerer:
    """Answers the calls of one coordinator in a Dask worker.

    Attributes:
        slots: The variables in which answers are, or were.
    """

    worker: Any
    token: str
    client: str
    slots: set[str] = field(default_factory=set)

    def send(self, about: dict[str, Any]) -> None:
        """Send the coordinator an event."""
        self.worker.log_event(TOPIC, about | {"client": self.client})

    def answer(self, call: dict[str, Any]) -> None:
        """Answer a call; an error is an answer, too."""
        try:
            arrays, head = call["arrays"], json.loads(call["head"]) | {"token": self.token}
            if call["slot"] is not None:
                arrays = self._ask_scheduler("variable_get", name=call["slot"], timeout=60)["value"] or ()
                self.send({"read": call["number"]})
            answer = self.worker.extensions[TOPIC].answer(Message(head, arrays))
            if answer is None:
                return
            slot, sent = None, list(answer.arrays)
            if count_bytes(answer) > INLINE_ANSWER:
                slot = f"{TOPIC}-{self.client}-{self.worker.address}-{call['number'] % SLOTS}"
                self.slots.add(slot)
                self._ask_scheduler("variable_set", name=slot, data=sent)
            self.send({"head": json.dumps(answer.head), "arrays": [] if slot is not None else sent, "slot": slot})
        except Exception as error:
            reason = str(error) if isinstance(error, BadInput) else f"{type(error).__name__}: {error}"
            self.send({"error": reason})

    def _ask_scheduler(self, op: str, **about: Any) -> Any:
        from distributed.utils import sync

        return sync(self.worker.loop, getattr(self.worker.scheduler, op), **about)

    def close(self) -> None:
        """Empty the variables that the coordinator may not have read."""
        with suppress(Exception):  # the scheduler may be gone
            for slot in self.slots:
                self._ask_scheduler("variable_set", name=slot, data=None)


class ByReference(tuple[str, str]):
    """The arguments of ``serve_coordinator``, which is called when they are unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return serve_coordinator, tuple(self)


def make_relay() -> Any:
    """Return a plugin of Dask's scheduler that passes calls on to workers.

    It is sent to the scheduler with its code, because a scheduler need not have Germline.
    """
    from distributed import SchedulerPlugin

    class Relay(SchedulerPlugin):
        name, idempotent = f"{TOPIC}-relay", True

        async def start(self, scheduler: Any) -> None:
            self.scheduler, self.called = scheduler, dict[str, set[str]]()  # workers, by client
            scheduler.stream_handlers[TOPIC] = self.pass_on

        def pass_on(self, client: str, worker: str, call: Any) -> None:
            if worker in self.scheduler.stream_comms:
                self.called.setdefault(client, set()).add(worker)
                self.scheduler.stream_comms[worker].interval = PROMPT
                self.scheduler.worker_send(worker, {"op": TOPIC, "client": client, "call": call})

        def remove_worker(self, scheduler: Any, worker: str, **about: Any) -> None:
            for workers in self.called.values():
                workers.discard(worker)

        def remove_client(self, scheduler: Any, client: str) -> None:
            for worker in list(self.called.get(client, ())):
                self.pass_on(client, worker, None)
            self.called.pop(client, None)
            variables = scheduler.extensions["variables"].variables
            for name, variable in variables.items():
                if name.startswith(f"{TOPIC}-{client}-"):  # it stays, empty: a worker may be waiting for it
                    variable["value"] = None

    return Relay()


class Upload(NamedTuple):
    """Large arrays of a call that a worker has not read yet, and the variable where they are."""

    worker: str
    arrays: Sequence[bytes]
    slot: str


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
        self.tasks: dict[str, Any] = {}  # of the workers that are there
        self.workers: set[str] = set()  # whose task is running
        self.uploads: dict[int, Upload] = {}
        self.read: queue.SimpleQueue[int] = queue.SimpleQueue()  # of these, those that have been read
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
        self.client.scheduler_comm.interval = PROMPT
        self.client.register_plugin(make_relay())
        self.client.subscribe_topic(TOPIC, self._hear)
        self.client.subscribe_topic("all", self._note_change)  # workers come and go
        self.last_event = time.monotonic()

    def look(self) -> None:
        while not self.read.empty():
            self._forget(self.read.get())
        if time.monotonic() - self.last_look < LOOK:
            return
        self.last_look = time.monotonic()
        there: set[str] = set()
        try:
            if self.scheduler is not None and self.scheduler.has_ended:  # the client would wait for it for 10 s
                raise ConnectionError("the scheduler has ended")
            if self.client is None:
                self._connect()
            self.client.log_event(TOPIC, {"client": self.client.id})
            there = set(self.client.nthreads())
            if time.monotonic() - self.last_event > DEAF:
                raise TimeoutError("the scheduler does not send events any more")
        except self.lost_errors:
            self._disconnect()
            if self.scheduler is not None:
                self.scheduler.keep_running()
                self.last_look = 0.0
            there = set()  # workers that the next client finds join again: what was sent to them is lost
        for worker in self.tasks.keys() - there:
            self.workers.discard(worker)
            self.events.put(Event("left", worker))
            with suppress(*self.lost_errors):
                self.tasks.pop(worker).release()
            for number in [number for number, upload in self.uploads.items() if upload.worker == worker]:
                self._forget(number)
        for worker in there - self.tasks.keys():
            with suppress(*self.lost_errors):
                self._start_task(worker)

    def _start_task(self, worker: str) -> None:
        # the scheduler unpickles functions, and need not have Germline
        task = pickle.dumps(ByReference((self.token, self.client.id)))
        where = {"workers": [worker], "allow_other_workers": False, "pure": False, "retries": 0}
        key = f"{TOPIC}-{self.token}-{next(self.numbers)}"
        self.tasks[worker] = self.client.submit(pickle.loads, task, key=key, **where)
        self.tasks[worker].add_done_callback(partial(self._end_task, worker))

    def _note_change(self, event: Any) -> None:
        self.last_look = 0.0

    def _disconnect(self) -> None:
        client, self.client, self.uploads = self.client, None, {}
        if client is not None:
            with suppress(*self.lost_errors):
                client.unsubscribe_topic(TOPIC)
                client.unsubscribe_topic("all")
                client.close(timeout=1)

    def submit(self, worker: str, message: Message) -> None:
        if self.client is None or worker not in self.workers:
            return
        number, arrays = next(self.numbers), message.arrays
        with suppress(*self.lost_errors):  # then the client connects, and the worker joins, again
            slot = self._upload(arrays) if count_bytes(message) > INLINE else None
            if slot is not None:
                self.uploads[number] = Upload(worker, arrays, slot)
            sent = [] if slot is not None else list(arrays)
            self._call(worker, {"number": number, "head": json.dumps(message.head), "arrays": sent, "slot": slot})

    def _call(self, worker: str, call: dict[str, Any] | None) -> None:
        """Send a worker a call, or None, which ends its task."""
        self.client._send_to_scheduler({"op": TOPIC, "worker": worker, "call": call})

    def _upload(self, arrays: Sequence[bytes]) -> str:
        """Return the variable where arrays are: that of another call with the same ones, or a free one."""
        slots = {upload.slot: upload.arrays for upload in self.uploads.values()}
        for slot, others in slots.items():
            if others is arrays:
                return slot
        names = (f"{TOPIC}-{self.client.id}-{number}" for number in itertools.count())
        slot = next(name for name in names if name not in slots)
        self._set_variable(slot, list(arrays))
        return slot

    def _set_variable(self, slot: str, value: Any) -> None:
        self.client.sync(self.client.scheduler.variable_set, name=slot, data=value)

    def _end_task(self, worker: str, future: Any) -> None:
        is_present = self.tasks.get(worker) is future
        if is_present and future.status == "error":
            error = future.exception()
            self.events.put(Event("failed", worker, Message({"reason": f"{type(error).__name__}: {error}"})))

    def _forget(self, number: int) -> None:
        """Empty the variable of a call, if no other call needs it."""
        upload = self.uploads.pop(number, None)
        if upload is None or any(other.slot == upload.slot for other in self.uploads.values()):
            return
        with suppress(*self.lost_errors):
            self._set_variable(upload.slot, None)

    async def _hear(self, event: tuple[float, Any]) -> None:
        about = event[1]
        if self.client is None or not isinstance(about, dict) or about.get("client") != self.client.id:
            return  # of another coordinator
        if "worker" not in about:
            self.last_event = time.monotonic()
            return
        worker = about["worker"]
        if "ready" in about:
            if worker in self.workers:  # it was started again, at the same address
                self.events.put(Event("left", worker))
            self.workers.add(worker)
            self.events.put(Event("joined", worker))
            return
        if "error" in about:
            self.events.put(Event("failed", worker, Message({"reason": str(about["error"])})))
            return
        try:
            if "read" in about:
                self.read.put(int(about["read"]))
                return
            arrays, slot, scheduler = about.get("arrays", ()), about.get("slot"), self.client.scheduler
            if slot is not None:
                arrays = (await scheduler.variable_get(name=slot, timeout=60))["value"] or ()
                await scheduler.variable_set(name=slot, data=None)
            self.events.put(Event("answered", worker, Message(dict(json.loads(about["head"])), list(arrays))))
        except self.lost_errors:
            return  # the client connects, and the worker joins, again
        except Exception as error:  # whatever a worker has sent
            self.events.put(Event("failed", worker, Message({"reason": f"{type(error).__name__}: {error}"})))

    def close(self) -> None:
        until = time.monotonic() + CLOSING
        with suppress(*self.lost_errors):
            for worker in self.workers if self.client is not None else ():
                self._call(worker, None)
        while any(not self.tasks[worker].done() for worker in self.workers) and time.monotonic() < until:
            time.sleep(0.02)
        self.workers.clear()
        self._disconnect()
        if self.scheduler is not None:
            self.scheduler.end()
