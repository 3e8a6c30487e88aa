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
from functools import partial
from pickle import PickleBuffer
from pkgutil import resolve_name
from typing import Any

from germline.errors import BadInput
from germline.fleet.cluster.backend import Backend, Event, Head, Message, count_bytes, parse_address

RESPONDER = "germline.fleet.cluster.worker:Responder.from_environment"
INLINE = 100 << 10  # bytes of a call's arrays; larger ones go through the object store, as Ray does it by default
LOOK = 1.0  # seconds between looks at the nodes
CONNECT = 10.0  # seconds for the first connection: Ray tries for two minutes and then ends the process

Place = tuple[str, int]  # a node, and a number there


class Answers:
    """The actor: it answers the messages of one coordinator, one after another.

    Ray does not copy a ``PickleBuffer`` when it pickles it. What arrives is a view of the object store, which does not
    have to keep what has been copied to bytes.
    """

    def __init__(self, responder: str, threads: int, gpus: int) -> None:
        if not gpus:  # the node may have one that Ray was told not to use
            os.environ.setdefault("GERMLINE_DEVICE", "cpu")
        self.responder = resolve_name(responder)(threads)

    def answer(self, head: Head, arrays: Sequence[Any]) -> tuple[Head, list[PickleBuffer]] | None:
        """Return the answer to a message, if it needs one."""
        answer = self.responder.answer(Message(head, list(map(bytes, arrays))))
        return None if answer is None else (answer.head, list(map(PickleBuffer, answer.arrays)))


class RayBackend(Backend):
    """The nodes of a Ray cluster.

    Args:
        address: HOST:PORT of the cluster's head, of which this machine must be a node, or ``"auto"`` for the cluster
            that this machine is a node of. Without an address Ray starts on this machine, unless it runs there. A
            program that has called ``ray.init`` stays with the cluster that it has chosen.
        responder: The function, as module:function, that makes what answers the messages in a worker.
    """

    def __init__(self, address: str | None = None, *, responder: str = RESPONDER) -> None:
        try:
            import ray
        except ImportError as error:
            raise BadInput("A Ray cluster needs ray: pip install 'germline[ray]'.") from error
        self.ray: Any = ray
        self.responder = responder
        self.owns_ray = not ray.is_initialized()
        if self.owns_ray:
            self._connect(address)
        self.address = ray.get_runtime_context().gcs_address
        self.actor_class = self.ray.remote(max_restarts=0, enable_task_events=False)(Answers)
        self.events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self.numbers = itertools.count(1)
        self.actors: dict[str, Any] = {}
        self.places: dict[str, Place] = {}  # of workers, and of those that could not start
        self.uploads: dict[int, tuple[Sequence[bytes], Any]] = {}  # of calls that have not ended
        self.lock = threading.RLock()  # calls end in another thread
        self.last_look = 0.0

    def _connect(self, address: str | None) -> None:
        try:
            if address is not None and address != "auto":
                socket.create_connection(parse_address(address), CONNECT).close()
            self.ray.init(address, log_to_driver=False, logging_level=logging.ERROR)
        except (OSError, RuntimeError) as error:
            reason = f"Cannot join the Ray cluster at {address or 'this machine'}: {str(error).rstrip('.')}"
            advice = "Check the address, that this machine is a node of the cluster, and that it has its token"
            raise BadInput(f"{reason}. {advice}.") from error

    def look(self) -> None:
        if time.monotonic() - self.last_look < LOOK:
            return
        self.last_look = time.monotonic()
        nodes = {node["NodeID"]: node for node in self.ray.nodes() if node["Alive"]}
        with self.lock:
            for worker in [worker for worker, (node, _) in self.places.items() if node not in nodes]:
                self._drop_actor(worker, "its node has left", can_start=True)  # without a call it would not be missed
            for about in nodes.values():
                self._start_actors(about)

    def _start_actors(self, node: dict[str, Any]) -> None:
        cpus, gpus = (int(node["Resources"].get(kind, 0)) for kind in ("CPU", "GPU"))
        count = gpus or min(1, cpus)
        pin = self.ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        needs = {"num_gpus": min(1, gpus), "num_cpus": 0 if gpus else 1, "scheduling_strategy": pin}
        for place in {(node["NodeID"], index) for index in range(count)} - set(self.places.values()):
            name = f"{node['NodeManagerHostname']}-{next(self.numbers)}"
            actor = self.actor_class.options(**needs).remote(self.responder, max(1, cpus // count), gpus)
            self.actors[name], self.places[name] = actor, place
            self._expect(name, actor.__ray_ready__.remote())

    def submit(self, worker: str, message: Message) -> None:
        with self.lock:
            if worker in self.actors:  # it has not left
                upload = self._upload(message)
                ref = self.actors[worker].answer.remote(message.head | {"token": "ray"}, upload)
                self._expect(worker, ref, (message.arrays, upload))

    def _upload(self, message: Message) -> Any:
        buffers = list(map(PickleBuffer, message.arrays))
        if count_bytes(message) <= INLINE:
            return buffers
        uploads = (upload for arrays, upload in self.uploads.values() if arrays is message.arrays)
        return next(uploads, None) or self.ray.put(buffers)

    def _expect(self, worker: str, ref: Any, upload: tuple[Sequence[bytes], Any] = ((), None)) -> None:
        number = next(self.numbers)
        self.uploads[number] = upload
        ref.future().add_done_callback(partial(self._end_call, number, worker))

    def _end_call(self, number: int, worker: str, future: Any) -> None:
        errors, error = self.ray.exceptions, future.exception()
        reason = str(error).strip().splitlines()[-1]  # without Ray's traceback
        with self.lock:
            del self.uploads[number]
            if isinstance(error, errors.RayActorError | errors.ActorUnschedulableError):
                self._drop_actor(worker, reason, can_start=not getattr(error, "actor_init_failed", False))
            elif error is not None:
                self.events.put(Event("failed", worker, Message({"reason": reason})))
            elif future.result() is True:  # it has been made
                self.events.put(Event("joined", worker))
            elif future.result() is not None:
                head, arrays = future.result()
                self.events.put(Event("answered", worker, Message(head, list(map(bytes, arrays)))))

    def _drop_actor(self, worker: str, reason: str, *, can_start: bool) -> None:
        """Forget a worker that has died; the next look starts another one in its place if that one could start."""
        if self.actors.pop(worker, None) is None:
            return
        if can_start:
            del self.places[worker]
        else:
            reason = f"no worker can start, Germline must be installed there: {reason}"
            self.events.put(Event("failed", worker, Message({"reason": reason})))
        self.events.put(Event("left", worker))

    def close(self) -> None:
        while self.actors:
            self.ray.kill(self.actors.popitem()[1])
        if self.owns_ray:
            self.ray.shutdown()
