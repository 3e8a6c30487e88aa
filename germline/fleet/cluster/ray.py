"""Ray below a cluster: a worker is an actor on one of its nodes, and a call is a call of that actor.

Every node uses all of what it has: a node with GPUs runs one actor for each of them, and any other node runs one actor
with as many threads as Ray counts CPUs there. Such an actor asks Ray for a single CPU, so that it also starts where
other programs have taken some of them, and waits only where they have taken all. A node without CPUs and GPUs, which a
head often is, runs none.

Actors are made of this module by its name, so Germline must be installed on the nodes. Ray restarts none of them: one
that has died has left, and another one joins in its place if the node is still there.
"""

import itertools
import logging
import os
import queue
import socket
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pickle import PickleBuffer
from pkgutil import resolve_name
from typing import Any, NamedTuple

from germline.errors import BadInput, FleetLostError
from germline.fleet.cluster.backend import Backend, Event, Head, Message, count_bytes

RESPONDER = "germline.fleet.cluster.worker:Responder.from_environment"
INLINE = 100 << 10  # bytes of a call's arrays; larger ones go through the object store, as Ray does it by default
LOOK = 1.0  # seconds between looks at the nodes
CONNECT = 10.0  # seconds for a first connection: Ray tries for two minutes and then ends the process


def wrap(arrays: Sequence[bytes]) -> list[PickleBuffer]:
    """Return arrays in the form that Ray does not copy when it pickles them."""
    return [PickleBuffer(array) for array in arrays]


def unwrap(arrays: Sequence[Any]) -> list[bytes]:
    """Return copies of the arrays that were wrapped: the object store does not have to keep them any longer."""
    return [bytes(array) for array in arrays]


class Answers:
    """The actor: it answers the messages of one coordinator, one after another."""

    def __init__(self, responder: str, device: str, threads: int) -> None:
        if device != "auto":
            os.environ["GERMLINE_DEVICE"] = device
        self.responder = resolve_name(responder)(threads, is_shared=False)

    def answer(self, head: Head, arrays: Sequence[Any]) -> tuple[Head, list[PickleBuffer]] | None:
        """Return the answer to a message, if it needs one."""
        answer = self.responder.answer(Message(head, unwrap(arrays)))
        return None if answer is None else (answer.head, wrap(answer.arrays))


class Call(NamedTuple):
    """A call that has not ended, the arrays of its message, and what Ray was given for them."""

    ref: Any
    future: Any
    sent: Sequence[bytes]
    upload: Any


@dataclass
class Worker:
    """An actor, its place, which is a node and a number there, and its calls in order."""

    actor: Any
    place: tuple[str, int]
    has_joined: bool = False
    calls: deque[Call] = field(default_factory=deque)


class RayBackend(Backend):
    """The nodes of a Ray cluster.

    Args:
        address: HOST:PORT of the cluster's head, of which this machine must be a node, or ``"auto"`` for the cluster
            that this machine is a node of. Without an address Ray starts on this machine, unless it runs there. A
            program that has called ``ray.init`` stays with the cluster that it has chosen.
        device: What workers compute on: ``"auto"``; ``"cpu"``, also on nodes with GPUs; or ``"cuda"``, only on these.
        responder: The function, as module:function, that makes what answers the messages in a worker.
    """

    def __init__(self, address: str | None = None, *, device: str = "auto", responder: str = RESPONDER) -> None:
        try:
            import ray
        except ImportError as error:
            raise BadInput("A Ray cluster needs ray: pip install 'germline[ray]'.") from error
        self.ray: Any = ray
        self.device, self.responder = device, responder
        self.owns_ray = not ray.is_initialized()
        if self.owns_ray:
            self._connect(address)
        self.address = ray.get_runtime_context().gcs_address
        self.actor_class = self.ray.remote(Answers)
        self.events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self.numbers = itertools.count(1)
        self.taken: set[tuple[str, int]] = set()  # places that have an actor, or in which none can start
        self.workers: dict[str, Worker] = {}
        self.lock = threading.Lock()  # of the workers and their calls
        self.ended: queue.SimpleQueue[str] = queue.SimpleQueue()  # workers, each time that a call of theirs has ended
        self.is_closed = False
        self.thread = threading.Thread(target=self._watch, name="germline-ray", daemon=True)
        self.thread.start()

    def _connect(self, address: str | None) -> None:
        try:
            if address is not None and address != "auto":
                host, _, port = address.rpartition(":")
                socket.create_connection((host, int(port)), CONNECT).close()
            self.ray.init(address, log_to_driver=False, logging_level=logging.ERROR)
        except (OSError, ValueError, RuntimeError) as error:
            raise BadInput(f"Cannot join the Ray cluster at {address or 'this machine'}: {error}") from error

    def submit(self, worker: str, message: Message) -> int:
        with self.lock:
            if worker not in self.workers:  # it has left
                return next(self.numbers)
            upload = self._upload(message)
            ref = self.workers[worker].actor.answer.remote(message.head | {"token": "ray"}, upload)
            return self._expect(worker, ref, message.arrays, upload)

    def _upload(self, message: Message) -> Any:
        if count_bytes(message) <= INLINE:
            return wrap(message.arrays)
        calls = (call for worker in self.workers.values() for call in worker.calls)
        uploads = [call.upload for call in calls if call.sent is message.arrays]
        return uploads[0] if uploads else self.ray.put(wrap(message.arrays))

    def _expect(self, worker: str, ref: Any, sent: Sequence[bytes] = (), upload: Any = None) -> int:
        call = Call(ref, ref.future(), sent, upload)
        self.workers[worker].calls.append(call)
        call.future.add_done_callback(lambda future: self.ended.put(worker))
        return next(self.numbers)

    def cancel(self, call: int) -> None:
        """Leave the call alone: Ray runs whatever it has passed on to an actor, and would only drop the answer."""

    def check(self) -> None:
        if not self.thread.is_alive():
            raise FleetLostError(f"The connection to the Ray cluster at {self.address} is lost.")

    def close(self) -> None:
        self.is_closed = True
        self.ended.put("")
        self.thread.join()
        for worker in self.workers.values():
            self.ray.kill(worker.actor)
        if self.owns_ray:
            self.ray.shutdown()

    def _watch(self) -> None:
        """Report what happens until the cluster is closed."""
        look = 0.0
        while not self.is_closed:
            if time.monotonic() >= look:
                self._look()
                look = time.monotonic() + LOOK
            try:
                name = self.ended.get(timeout=max(0.0, look - time.monotonic()))
            except queue.Empty:
                continue
            with self.lock:  # in the order of the calls: a large answer may arrive after the next one
                while (worker := self.workers.get(name)) and worker.calls and worker.calls[0].future.done():
                    self._report(name, worker, worker.calls.popleft().future)

    def _look(self) -> None:
        """Start the actors that nodes lack, and call those that have no call: one that has died fails to answer."""
        nodes = [node for node in self.ray.nodes() if node["Alive"]]
        with self.lock:
            for node in nodes:
                self._start(node)
            for name, worker in self.workers.items():
                if not worker.calls:
                    self._expect(name, worker.actor.__ray_ready__.remote())

    def _start(self, node: dict[str, Any]) -> None:
        cpus, gpus = (int(node["Resources"].get(kind, 0)) for kind in ("CPU", "GPU"))
        gpus = 0 if self.device == "cpu" else gpus
        count = gpus or int(cpus > 0 and self.device != "cuda")
        pin = self.ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        needs = {"num_gpus": 1, "num_cpus": 0} if gpus else {"num_gpus": 0, "num_cpus": 1}
        actor_class = self.actor_class.options(max_restarts=0, scheduling_strategy=pin, **needs)
        for place in {(node["NodeID"], index) for index in range(count)} - self.taken:
            actor = actor_class.remote(self.responder, self.device, max(1, cpus // count))
            self.workers[f"{node['NodeManagerHostname']}-{next(self.numbers)}"] = Worker(actor, place)
            self.taken.add(place)

    def _report(self, name: str, worker: Worker, future: Any) -> None:
        """Put what a call has led to into the events."""
        errors, error, had_joined = self.ray.exceptions, future.exception(), worker.has_joined
        if error is None:
            worker.has_joined = True
            if not had_joined:
                self.events.put(Event("joined", name))
            elif isinstance(future.result(), tuple):
                head, arrays = future.result()
                self.events.put(Event("answered", name, Message(head, unwrap(arrays))))
            return
        reason = str(error).strip().splitlines()[-1]  # without Ray's traceback
        if isinstance(error, errors.RayActorError | errors.ActorUnschedulableError):
            del self.workers[name]
            if had_joined:
                self.events.put(Event("left", name, Message({"reason": reason})))
            if not getattr(error, "actor_init_failed", False):
                self.taken.discard(worker.place)
                return
            reason = f"{name} cannot start, and Germline must be installed there: {reason}"
        self.events.put(Event("failed", name, Message({"reason": reason})))
