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
from collections.abc import Sequence
from pickle import PickleBuffer
from pkgutil import resolve_name
from typing import Any, NamedTuple

from germline.errors import BadInput, FleetLostError
from germline.fleet.cluster.backend import Backend, Event, Head, Message, count_bytes

RESPONDER = "germline.fleet.cluster.worker:Responder.from_environment"
INLINE = 100 << 10  # bytes of a call's arrays; larger ones go through the object store, as Ray does it by default
LOOK = 1.0  # seconds between looks at the nodes
CONNECT = 10.0  # seconds for the first connection: Ray tries for two minutes and then ends the process


class Answers:
    """The actor: it answers the messages of one coordinator, one after another.

    Ray does not copy a ``PickleBuffer`` when it pickles it. What arrives is a view of the object store, which does not
    have to keep what has been copied to bytes.
    """

    def __init__(self, responder: str, device: str, threads: int) -> None:
        if device != "auto":
            os.environ["GERMLINE_DEVICE"] = device
        self.responder = resolve_name(responder)(threads, is_shared=False)

    def answer(self, head: Head, arrays: Sequence[Any]) -> tuple[Head, list[PickleBuffer]] | None:
        """Return the answer to a message, if it needs one."""
        answer = self.responder.answer(Message(head, list(map(bytes, arrays))))
        return None if answer is None else (answer.head, list(map(PickleBuffer, answer.arrays)))


class Call(NamedTuple):
    """A call that has not ended, the arrays of its message, and what Ray was given for them."""

    future: Any
    sent: Sequence[bytes] = ()
    upload: Any = None


class Worker(NamedTuple):
    """An actor, its place, which is a node and a number there, and its calls in order."""

    actor: Any
    place: tuple[str, int]
    calls: list[Call]


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
        self.actor_class = self.ray.remote(max_restarts=0, enable_task_events=False)(Answers)
        self.events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self.numbers = itertools.count(1)
        self.taken: set[tuple[str, int]] = set()  # places that have an actor, or in which none can start
        self.workers: dict[str, Worker] = {}
        self.joined: set[str] = set()
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
            if worker in self.workers:  # it has not left
                upload = self._upload(message)
                ref = self.workers[worker].actor.answer.remote(message.head | {"token": "ray"}, upload)
                self._expect(worker, Call(ref.future(), message.arrays, upload))
            return next(self.numbers)

    def _upload(self, message: Message) -> Any:
        buffers = list(map(PickleBuffer, message.arrays))
        if count_bytes(message) <= INLINE:
            return buffers
        calls = (call for worker in self.workers.values() for call in worker.calls)
        return next((call.upload for call in calls if call.sent is message.arrays), None) or self.ray.put(buffers)

    def _expect(self, worker: str, call: Call) -> None:
        self.workers[worker].calls.append(call)
        call.future.add_done_callback(lambda future: self.ended.put(worker))

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
        while not self.is_closed and self.ray.is_initialized():  # otherwise Ray would start by itself
            if time.monotonic() >= look:
                self._look()
                look = time.monotonic() + LOOK
            try:
                name = self.ended.get(timeout=max(0.0, look - time.monotonic()))
            except queue.Empty:
                continue
            with self.lock:  # in the order of the calls: a large answer may arrive after the next one
                while (worker := self.workers.get(name)) and worker.calls and worker.calls[0].future.done():
                    self._report(name, worker, worker.calls.pop(0).future)

    def _look(self) -> None:
        """Start the actors that nodes lack, and call those that have no call: one that has died fails to answer."""
        nodes = [node for node in self.ray.nodes() if node["Alive"]]
        with self.lock:
            for node in nodes:
                self._start(node)
            for name, worker in self.workers.items():
                if not worker.calls:
                    self._expect(name, Call(worker.actor.__ray_ready__.remote().future()))

    def _start(self, node: dict[str, Any]) -> None:
        cpus, gpus = (int(node["Resources"].get(kind, 0)) for kind in ("CPU", "GPU"))
        gpus = 0 if self.device == "cpu" else gpus
        count = gpus or int(cpus > 0 and self.device != "cuda")
        pin = self.ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        needs = {"num_gpus": min(1, gpus), "num_cpus": 0 if gpus else 1, "scheduling_strategy": pin}
        for place in {(node["NodeID"], index) for index in range(count)} - self.taken:
            actor = self.actor_class.options(**needs).remote(self.responder, self.device, max(1, cpus // count))
            self.workers[f"{node['NodeManagerHostname']}-{next(self.numbers)}"] = Worker(actor, place, [])
            self.taken.add(place)

    def _report(self, name: str, worker: Worker, future: Any) -> None:
        """Put what a call has led to into the events."""
        errors, error = self.ray.exceptions, future.exception()
        reason = str(error).strip().splitlines()[-1]  # without Ray's traceback
        if isinstance(error, errors.RayActorError | errors.ActorUnschedulableError):
            self._drop(name, worker, reason, can_start=not getattr(error, "actor_init_failed", False))
        elif error is not None:
            self.events.put(Event("failed", name, Message({"reason": reason})))
        elif name not in self.joined:
            self.joined.add(name)
            self.events.put(Event("joined", name))
        elif isinstance(future.result(), tuple):
            head, arrays = future.result()
            self.events.put(Event("answered", name, Message(head, list(map(bytes, arrays)))))

    def _drop(self, name: str, worker: Worker, reason: str, *, can_start: bool) -> None:
        """Forget a worker that has died; the next look starts another one in its place if that one could start."""
        del self.workers[name]
        if name in self.joined:
            self.events.put(Event("left", name, Message({"reason": reason})))
        if can_start:
            self.taken.remove(worker.place)
        else:
            reason = f"No worker can start for {name}, where Germline must be installed: {reason}"
            self.events.put(Event("failed", name, Message({"reason": reason})))
