"""Which workers may join a run: those that have the same version, recipe, data and weights, and compute the same."""

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from germline import noise
from germline.fleet.cluster.backend import Head, Message, make_printable
from germline.fleet.cluster.crew import Crew, RemoteWorker
from germline.fleet.cluster.worker import describe_machine
from germline.fleet.gradients import Scores
from germline.version import __version__

# bytes of greetings; after the first, which may take long, they measure the bandwidth, with the last only if it is fast
PADS = (0, 0, 1 << 16, 1 << 20)
FAST = 8e6  # bytes per second
REFUSALS = 100  # that are remembered
DEPARTED = 20  # workers that are remembered after they have left
TOLERANCE = {"float32": 1e-3, "bfloat16": 0.1}  # of scores of unlike machines
FAR = 50.0  # times the tolerance, for single members


class WrongAnswerError(Exception):
    """An answer of a worker that cannot be right, or shows that it may not join."""


@dataclass
class Invitation:
    """The run that workers may join.

    Attributes:
        run: Its name, a hash of its header.
        header: What a worker builds the run from.
        sample: Scores of a few members, which a worker must compute as well.
        batch: The first batch, where the caller gives batches one by one.
        recipe: The recipe, pickled, for workers that were given none.
    """

    run: str
    header: Mapping[str, Any]
    sample: Scores
    batch: Message | None
    recipe: list[bytes]


@dataclass
class Admission:
    """Greets workers, measures their bandwidth, and lets those in that prove to do the same work.

    Attributes:
        known: All workers that are there, let in or not.
        invitation: The run that they may join; None before there is one.
        refusals: Who was turned away, and why.
        departed: Workers that were let in and are gone, by name, and when they were missed.
    """

    crew: Crew
    known: dict[str, RemoteWorker] = field(default_factory=dict)
    invitation: Invitation | None = None
    refusals: list[str] = field(default_factory=list)
    departed: dict[str, tuple[RemoteWorker, float]] = field(default_factory=dict)

    def greet(self, address: str) -> None:
        """Ask a worker that has joined the cluster who it is."""
        worker = self.known[address] = RemoteWorker(address)
        self._say_hello(worker)

    def invite(self, invitation: Invitation) -> None:
        """Have all workers that are there build a run, and all that come later."""
        self.invitation = invitation
        for worker in list(self.known.values()):  # one that is turned away is not known any more
            if worker.bandwidth:
                self._welcome(worker)

    def _say_hello(self, worker: RemoteWorker) -> None:
        worker.asked = time.monotonic()
        self.crew.send(worker, Message({"op": "hello"}, [os.urandom(PADS[len(worker.delays)])]))

    def take_answer(self, worker: RemoteWorker, message: Message) -> bool:
        """Go on with a worker that has answered; return whether it is let in now. One that may not is an error."""
        head = message.head
        if head.get("op") == "hello" and len(worker.delays) < len(PADS):
            worker.about = check_about(head)
            self._measure(worker, time.monotonic() - worker.asked)
        elif head.get("op") == "ready" and self.invitation is not None and head.get("run") == self.invitation.run:
            self._check_ready(worker, message, self.invitation)
            self.crew.workers[worker.address] = worker
            self.departed.pop(worker.name, None)
            self.crew.say(f"worker {worker.name} has joined: {worker.about['device']}, {worker.about['machine']}")
            return True
        return False

    def _measure(self, worker: RemoteWorker, waited: float) -> None:
        """Take in how long a greeting took, and send a longer one or the invitation."""
        worker.delays.append(waited)
        count = len(worker.delays)
        if count > 2:
            worker.bandwidth = PADS[count - 1] / max(1e-4, worker.delays[-1] - worker.delays[1])
        if count <= 2 or (count < len(PADS) and worker.bandwidth > FAST):
            self._say_hello(worker)
        elif self.invitation is not None:
            self._welcome(worker)

    def _welcome(self, worker: RemoteWorker) -> None:
        invitation = self.invitation
        assert invitation is not None
        header = invitation.header
        kinds = {header["device"].split(":")[0], worker.about["device"].split(":")[0]}
        if len(kinds) > 1 and not header["is_portable"]:
            message = f"its device is {worker.about['device']} and the coordinator's {header['device']}"
            self.refuse(worker, f"{message}, and torch optimizers differ between them: use adam, sgd or momentum")
            return
        worker.pending, worker.batch = {}, -1
        if invitation.batch is not None:
            self.crew.send(worker, invitation.batch)
        shipped = [] if worker.about["has_recipe"] else invitation.recipe
        self.crew.send(worker, Message({"op": "welcome", "run": invitation.run, "header": dict(header)}, shipped))

    def _check_ready(self, worker: RemoteWorker, message: Message, invitation: Invitation) -> None:
        head = message.head
        if "differs" in head:
            raise WrongAnswerError(str(head["differs"])[:500])
        tell, version = head.get("tell"), head.get("version")
        is_version = version is None or (isinstance(version, str) and version.rstrip("+").isdecimal())
        is_whole = head.get("whole")
        if not (isinstance(tell, int | float) and 0 <= tell < 1e12 and is_version and isinstance(is_whole, bool)):
            raise WrongAnswerError("it does not speak as workers do")
        scores = np.frombuffer(b"".join(message.arrays), np.float32)
        if not are_close(scores, invitation.sample, TOLERANCE[invitation.header["plan"]["dtype"]]):
            raise WrongAnswerError("it computes other scores for the same members than the coordinator")
        own = describe_machine(torch.device(invitation.header["device"]))
        is_same_kind = all(worker.about.get(name) == own[name] for name in ("machine", "torch"))
        worker.is_exact = is_same_kind and scores.tobytes() == invitation.sample.tobytes()
        worker.version, worker.has_whole_state, worker.tell_seconds = version, is_whole, tell

    def refuse(self, worker: RemoteWorker, reason: str) -> None:
        """Turn a worker away for good, and say why on both sides."""
        reason = make_printable(reason.rstrip("."))
        self.crew.send(worker, Message({"op": "refused", "reason": reason}))
        self.forget(worker)
        self.refusals = [*self.refusals[-REFUSALS:], f"{worker.name}: {reason}"]
        self.crew.say(f"worker {worker.name} is turned away: {reason}")

    def forget(self, worker: RemoteWorker) -> None:
        """Forget a worker that is gone, but for its name and what it has done."""
        self.known.pop(worker.address, None)
        if self.crew.workers.pop(worker.address, None) is not None:
            recent = [*self.departed.items()][-DEPARTED:]
            self.departed = {**dict(recent), worker.name: (worker, time.monotonic())}


def check_about(head: Head) -> Head:
    """Return what a worker says about itself, or raise an error if it cannot do the same work."""
    texts = [head.get(name) for name in ("name", "device", "machine")]
    is_text = all(isinstance(text, str) and len(text) < 200 and text.isprintable() for text in texts)
    if not is_text or "has_recipe" not in head:
        raise WrongAnswerError("it does not speak as workers do")
    for what, version in (("germline", __version__), ("noise", noise.VERSION)):
        if head.get(what) != version:
            raise WrongAnswerError(f"it has version {head.get(what)} of {what}, and the coordinator {version}")
    return head


def are_close(numbers: Any, expected: Scores, tolerance: float) -> bool:
    """Return whether scores are equal but for what unlike machines make of them: last bits, and an example or two."""
    finite = np.isfinite(expected)
    if numbers.shape != expected.shape or not np.array_equal(finite, np.isfinite(numbers)):
        return False
    if not finite.any():
        return True
    apart = np.abs(numbers[finite] - expected[finite]) / max(float(np.abs(expected[finite]).max()), 1e-6)
    return bool(apart.max() <= FAR * tolerance and np.mean(apart <= tolerance) >= 0.5)
