"""The worker's side of a cluster: it answers the messages of coordinators, whatever system brings them."""

import os
import pickle
import platform
import socket
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pkgutil import resolve_name
from typing import Any, Protocol

import torch

from germline import noise
from germline.errors import BadInput
from germline.fleet.cluster.backend import Head, Message, print_status
from germline.fleet.cluster.messages import answer_to
from germline.fleet.local import Local
from germline.machine import processor_name
from germline.recipes import RECIPES, Recipe, make_recipe
from germline.strategies import AnyStrategy, find_strategy
from germline.version import __version__

FOLLOWER = "germline.engine.follower:Follower"  # by name, because the engine is built on the fleets
RUNS = 2  # that a worker may follow at the same time, for coordinators on one cluster


class FollowsRun(Protocol):
    """A session that follows a run in a worker process: ``germline.engine.follower.Follower``."""

    version: str | None

    def join(self, run: str, header: dict[str, Any], recipe: Recipe, given: AnyStrategy | None) -> Message: ...

    def handle(self, message: Message) -> Message | None: ...


@dataclass(eq=False)
class Responder:
    """Answers the messages of coordinators in a worker process.

    Attributes:
        name: How coordinators call this worker.
        recipe: The recipe that it was given: a name, a Python file, or module:function. Without one it builds the
            recipes of this package by name, and takes others from the coordinator.
        strategy: The strategy that it was given, as module:Class, if it is not part of this package.
        fleet: Its device and its threads.
        on_end: Called when a coordinator says that the run has ended or, with the reason, turns this worker away.
    """

    name: str = field(default_factory=lambda: f"{socket.gethostname()}-{os.getpid()}")
    recipe: str | None = None
    strategy: str | None = None
    fleet: Local = field(default_factory=Local)
    on_end: Callable[[str | None], None] = lambda reason: None
    say: Callable[[str], None] = print_status
    make_follower: Callable[[Local], FollowsRun] = lambda fleet: resolve_name(FOLLOWER)(fleet)
    followers: dict[str, FollowsRun] = field(default_factory=dict)  # by coordinator
    turn: threading.Lock = field(default_factory=threading.Lock)  # coordinators may have a thread each

    @classmethod
    def from_environment(cls, threads: int | None) -> "Responder":
        """Return the side of a worker that others have started: what it is given are environment variables."""
        recipe, strategy, device = (os.environ.get(f"GERMLINE_{name}") for name in ("RECIPE", "STRATEGY", "DEVICE"))
        return cls(recipe=recipe, strategy=strategy, fleet=Local(device or "auto", threads))

    def answer(self, message: Message) -> Message | None:
        """Return the answer to a message, if it needs one."""
        head, op = message.head, message.head["op"]
        if op == "hello":
            return Message(self._introduce())
        with self.turn:
            if op in ("end", "refused"):
                self.followers.pop(head["token"], None)
                if op == "refused":
                    self.say(f"a coordinator has turned this worker away: {head['reason']}")
                self.on_end(head.get("reason"))
                return None
            follower = self._find_follower(head["token"])
            try:
                return self._join(follower, message) if op == "welcome" else follower.handle(message)
            except Exception as error:
                self.say(f"a job failed: {type(error).__name__}: {error}")
                if op != "job":
                    follower.version = None
                    return None
                return answer_to(head, "failed", reason=f"{type(error).__name__}: {error}")

    def _find_follower(self, token: str) -> FollowsRun:
        follower = self.followers.pop(token, None) or self.make_follower(self.fleet)
        self.followers = dict([*self.followers.items(), (token, follower)][-RUNS:])
        return follower

    def _join(self, follower: FollowsRun, message: Message) -> Message:
        """Build the run that a coordinator trains; what differs is the answer."""
        header = message.head["header"]
        try:
            given = find_strategy(self.strategy)() if self.strategy is not None else None
            ready = follower.join(message.head["run"], header, self._make_recipe(header, message.arrays), given)
        except Exception as error:
            reason = str(error) if isinstance(error, BadInput) else f"{type(error).__name__}: {error}"
            return Message({"op": "ready", "run": message.head["run"], "differs": reason.rstrip(".")})
        self.say(f"working for a coordinator: {header['recipe'] or 'a run started in Python'} by {header['strategy']}")
        return ready

    def _make_recipe(self, header: dict[str, Any], shipped: Sequence[bytes]) -> Recipe:
        """Return the recipe of a run: this worker's, one of this package, or the one that came with the message."""
        name = self.recipe or header["recipe"]
        if {name, header["recipe"]} <= set(RECIPES) and name != header["recipe"]:  # a file may have another path here
            raise BadInput(f"the coordinator trains {header['recipe']}, and this worker was given {name}")
        if self.recipe is not None or name in RECIPES:
            return make_recipe(name, header["recipe_settings"], header["seed"])
        if not shipped:
            message = f"this worker does not have {name or 'the recipe of the run'}, and it could not be pickled"
            raise BadInput(f"{message}: start it with GERMLINE_RECIPE=FILE.py")
        recipe: Recipe = pickle.loads(shipped[0])
        return recipe

    def _introduce(self) -> Head:
        about = {"op": "hello", "germline": __version__, "noise": noise.VERSION, "name": self.name}
        return about | describe_machine(self.fleet.find_device()) | {"has_recipe": self.recipe is not None}


def describe_machine(device: torch.device) -> Head:
    """Describe a device of this machine, and what computes on it: scores of equal ones have the same bits."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else processor_name()
    machine = f"{platform.system()} {platform.machine()}, {name}"
    return {"device": str(device), "machine": machine, "torch": str(torch.__version__)}
