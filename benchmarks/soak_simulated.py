"""The faults of ``soak.py`` on a simulated clock: the real coordinator, chunk scheduler, journal and workers.

    python benchmarks/soak_simulated.py [--faults 1000] [--seed 0]

All run in this process. Only time, the network and the machines are simulated: a machine has a speed, messages take
time, and what a machine would compute later is computed when the clock is there. A coordinator that is killed goes on
from a copy of its run directory, made at that instant.
"""

import argparse
import heapq
import itertools
import queue
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from forgery import small_recipe
from rogues import GARBAGE, LIES, Liar, Rogue
from soak import FAULTS

import germline as gl
from germline.engine import loop, opening
from germline.engine.follower import Follower
from germline.engine.journal import Journal
from germline.engine.stopping import Stop
from germline.fleet import Local
from germline.fleet.cluster import admission, crew, jobs
from germline.fleet.cluster.backend import Backend, Event, Message
from germline.fleet.cluster.fleet import Cluster
from germline.fleet.cluster.worker import Responder

MACHINES = 6
LATENCY = 0.002  # seconds of a message
PIECE = 0.2  # seconds that a machine of speed 1 takes for a piece: enough for all machines to be asked
EVERY = 0.8  # seconds between faults, on average
GIVEN_UP = 15.0  # seconds after which the scheduler gives up a silent machine
BACK = (0.5, 8.0)  # seconds until a machine connects again
LAST_LIARS = 300  # generations in which the last liars are found out, if they are asked for anything
ENDLESS = 10**9  # generations


class KilledError(BaseException):
    """The coordinator is killed."""


class Machine:
    """A place with a worker process.

    Attributes:
        address: How coordinators call its present connection; None if it has none.
        free: When it has computed all that it was sent.
        asleep: Until when it is frozen.
        deaf: Until when its link is cut.
        slow_until: Until when it is ten times slower.
    """

    def __init__(self, world: "World", kind: str = "honest") -> None:
        self.world, self.speed, self.address = world, 10 ** world.chance.uniform(-0.5, 0.5), None
        self.free = self.asleep = self.deaf = self.slow_until = 0.0
        self.process = 0
        self.start(kind)

    address: str | None

    def start(self, kind: str) -> None:
        """Start a new worker process."""
        self.kind, self.process = kind, self.process + 1
        lies = {lie.__name__: lie for lie in LIES}

        def make_follower(fleet: Local) -> Follower:
            if kind == "honest":
                return Follower(fleet)
            return Liar(fleet, lies[kind], honest=2) if kind in lies else Rogue(fleet, kind)

        recipe: Any = {"recipe": None, "say": lambda text: None, "on_end": self.note_end}
        self.responder = Responder(f"{kind}-{id(self)}", fleet=Local("cpu", 1), make_follower=make_follower, **recipe)
        self.responder._make_recipe = lambda header, shipped: make_problem()  # type: ignore[method-assign]

    @property
    def is_liar(self) -> bool:
        return self.kind in [lie.__name__ for lie in LIES]

    def note_end(self, reason: str | None) -> None:
        """End the process, which was turned away; an honest one takes its place."""
        if reason is not None:
            self.world.turned_away[self.kind] += 1
            self.world.after(0.0, self.world.replace, self, "honest")

    def receive(self, address: str, process: int, token: str, message: Message) -> None:
        """Take a message that has arrived, if this is still the connection and the process that it is for."""
        world = self.world
        if (address, process) != (self.address, self.process) or world.now < self.deaf:
            return
        pieces = message.head["last"] - message.head["first"] if message.head["op"] == "job" else 0.2
        began = max(world.now, self.free, self.asleep)
        self.free = began + pieces * PIECE / self.speed * (10 if world.now < self.slow_until else 1)
        world.after(self.free - world.now, self.answer, address, process, token, message, self.free - began)

    def answer(self, address: str, process: int, token: str, message: Message, seconds: float) -> None:
        """Answer a message, when it has been computed."""
        world = self.world
        if process != self.process:
            return
        if world.now < self.asleep:
            world.after(self.asleep - world.now, self.answer, address, process, token, message, seconds)
            return
        answer = self.responder.answer(Message(message.head | {"token": token}, message.arrays))
        if answer is not None and world.now >= self.deaf:
            head = answer.head | ({"seconds": seconds} if isinstance(answer.head.get("seconds"), float) else {})
            world.after(LATENCY, world.deliver, token, Event("answered", address, Message(head, answer.arrays)))


class World(Backend):
    """A simulated network with machines: the backend of one coordinator after another."""

    def __init__(self, seed: int, run: Path) -> None:
        self.run, self.reported = run, 0  # and the generations that were on disk when callbacks were called
        self.chance, self.now, self.numbers = random.Random(seed), 0.0, itertools.count()
        self.agenda: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self.turned_away: Counter[str] = Counter()
        self.counts: Counter[str] = Counter()
        self.machines: list[Machine] = []
        self.address, self.events, self.waiting = "simulated", self, list[Event]()  # type: ignore[assignment]
        self.last_fault: int | None = None  # the generation in which the last fault happened
        self.token, self.is_killed, self.last_answer = "", False, Event("left", "stranger")
        self.machines = [Machine(self) for _ in range(MACHINES)]

    # The clock

    def monotonic(self) -> float:
        return self.now

    def after(self, seconds: float, work: Callable[..., None], *arguments: Any) -> None:
        heapq.heappush(self.agenda, (self.now + seconds, next(self.numbers), work, arguments))

    def get(self, timeout: float) -> Event:
        """Let time pass until there is an event for the coordinator."""
        until = self.now + timeout
        while not self.waiting:
            if not self.agenda or self.agenda[0][0] > until:
                self.now = max(self.now, until)
                raise queue.Empty
            self.now, _, work, arguments = heapq.heappop(self.agenda)
            work(*arguments)
            if self.is_killed:
                self.is_killed = False
                raise KilledError
        return self.waiting.pop(0)

    # The network, as a coordinator knows it

    def begin(self) -> None:
        """Be the network of a new coordinator: all machines connect to it."""
        self.token, self.waiting = str(next(self.numbers)), []
        for machine in self.machines:
            machine.address = None
            self.after(self.chance.uniform(*BACK), self.connect, machine, machine.process, self.token)

    def look(self) -> None: ...

    def close(self) -> None: ...

    def submit(self, worker: str, message: Message) -> None:
        for machine in self.machines:
            if machine.address == worker:
                self.after(LATENCY, machine.receive, worker, machine.process, self.token, message)

    def deliver(self, token: str, event: Event) -> None:
        """Bring an event to the coordinator for which it is, if that is still there."""
        if token == self.token:
            self.waiting.append(event)
            self.last_answer = event if event.kind == "answered" else self.last_answer

    def connect(self, machine: Machine, process: int, token: str) -> None:
        """Let a machine join, as soon as it can."""
        if process != machine.process or machine.address is not None or token != self.token:
            return
        if self.now < max(machine.asleep, machine.deaf):
            self.after(max(machine.asleep, machine.deaf) - self.now, self.connect, machine, process, token)
            return
        machine.address = f"machine-{next(self.numbers)}"
        self.deliver(token, Event("joined", machine.address))

    def disconnect(self, machine: Machine) -> None:
        """End the connection of a machine, which then joins again."""
        if machine.address is not None:
            self.deliver(self.token, Event("left", machine.address))
            machine.address = None
        self.after(self.chance.uniform(*BACK), self.connect, machine, machine.process, self.token)

    def give_up(self, machine: Machine, address: str | None) -> None:
        """End the connection of a machine that was silent for too long."""
        if machine.address == address and self.now < max(machine.asleep, machine.deaf):
            self.disconnect(machine)

    def replace(self, machine: Machine, kind: str) -> None:
        """Start another process on a machine."""
        if machine.address is not None:
            self.deliver(self.token, Event("left", machine.address))
            machine.address = None
        machine.start(kind)
        machine.free = machine.asleep = machine.deaf = 0.0
        self.after(self.chance.uniform(*BACK), self.connect, machine, machine.process, self.token)

    # The faults

    @property
    def has_liar(self) -> bool:
        return any(machine.is_liar for machine in self.machines)

    def strike(self, faults: int) -> None:
        """Let a fault happen, and later the next."""
        if sum(self.counts.values()) >= faults:
            return
        self.after(self.chance.expovariate(1 / EVERY), self.strike, faults)
        fault = self.chance.choices(list(FAULTS), list(FAULTS.values()))[0]
        honest = [machine for machine in self.machines if machine.kind == "honest"]
        if (fault == "coordinator" and self.has_liar) or (fault in ("rogue", "lie") and len(honest) <= 2):
            fault = "garbage"
        machine = self.chance.choice(honest)
        self.counts[fault] += 1
        if self.counts.total() % 500 == 0:
            print(f"simulated: {self.counts.total()} faults, generation {self.reported}", flush=True)
        getattr(self, f"strike_{fault}")(machine)

    def strike_kill(self, machine: Machine) -> None:
        self.replace(machine, "honest")

    def strike_freeze(self, machine: Machine) -> None:
        machine.asleep = self.now + 10 ** self.chance.uniform(-1, 1.5)
        self.after(GIVEN_UP, self.give_up, machine, machine.address)

    def strike_slow(self, machine: Machine) -> None:
        machine.slow_until = self.now + 4.0

    def strike_cut(self, machine: Machine) -> None:
        if self.chance.random() < 0.5:
            self.disconnect(machine)
        else:
            machine.deaf = self.now + 30.0
            self.after(GIVEN_UP, self.give_up, machine, machine.address)

    def strike_garbage(self, machine: Machine) -> None:
        """Send what no worker has been asked for: by a stranger, or an answer twice."""
        head = self.chance.choice(({}, {"op": "answer"}, {"op": "ready", "run": 3}, {"job": 1, "chunk": [2]}))
        stranger = Event("answered", "stranger", Message(dict(head), [self.chance.randbytes(7)]))
        self.waiting.append(self.chance.choice((stranger, self.last_answer)))

    def strike_rogue(self, machine: Machine) -> None:
        fault = self.chance.choice(GARBAGE)
        self.replace(machine, fault)
        process = machine.process

        def end() -> None:
            if machine.process == process:  # its answers are ignored, and it was not turned away
                self.replace(machine, "honest")

        self.after(30.0, end)

    def strike_lie(self, machine: Machine) -> None:
        machine.speed = 3.0  # one that is too slow to be asked is not found out, and does no harm
        self.replace(machine, self.chance.choice(LIES).__name__)

    def strike_scheduler(self, machine: Machine) -> None:
        for one in self.machines:
            self.disconnect(one)

    def strike_coordinator(self, machine: Machine) -> None:
        self.is_killed, old, self.run = True, self.run, self.run.with_name(f"run-{next(self.numbers)}")
        shutil.copytree(old, self.run)  # as it is now: nothing that is written from here on counts


def make_problem() -> gl.Recipe:
    """Return a problem of eight pieces that takes a millisecond, and that the net cannot learn.

    Where every score is 0 a lie changes nothing, and a run of any answers has the right weights.
    """
    recipe = small_recipe(gl.OpenAIES(population=256, weight_decay=0.1))
    x = torch.linspace(-1, 1, 240).reshape(48, 5)
    return replace(recipe, data=(x, torch.arange(48) % 3))


def simulate(faults: int, seed: int) -> bool:
    """Train through some faults; print what became of the run, and return whether it is as it should be."""
    with tempfile.TemporaryDirectory() as folder:
        world = World(seed, Path(folder) / "run")
        world.after(5.0, world.strike, faults)
        for module in (jobs, crew, admission):
            module.time = world  # type: ignore[attr-defined]
        try:
            summary, lost = train_in(world, faults)
        finally:
            for module in (jobs, crew, admission):
                module.time = time  # type: ignore[attr-defined]
        alone = opening.start(make_problem(), Path(folder) / "alone", seed=0, fleet=Local("cpu", 1), about={})
        expected = loop.run(alone, Stop(generations=summary["generations"]))
        scores = [record.result.scores for record in alone.require_journal().records()][-1]
        alone.require_journal().close()
    same = summary["theta_sha256"] == expected["theta_sha256"]
    counts = ", ".join(f"{name} {count}" for name, count in world.counts.items())
    print(f"{sum(world.counts.values())} faults in {world.now / 3600:.1f} hours of a simulated clock: {counts}")
    print(
        f"weights after {summary['generations']} generations: {'the same as' if same else 'NOT those'} of one process"
    )
    liars, honest = sum(world.turned_away[lie.__name__] for lie in LIES), world.turned_away["honest"]
    print(f"generations lost with a coordinator: {lost}")
    print(f"liars turned away: {liars} of {world.counts['lie']}; honest workers turned away: {honest}")
    print(f"scores of the last generation: from {scores.min():.4g} to {scores.max():.4g}")
    return same and not honest and not lost and bool(scores.min() < scores.max())


def go_back(world: World, forget: Callable[[int], None], generation: int) -> None:
    """Go back to a generation, behind a lie: those after it are not lost, but undone."""
    world.reported = min(world.reported, generation)
    forget(generation)


def train_in(world: World, faults: int) -> tuple[dict[str, Any], int]:
    """Train with one coordinator after another; return the summary, and how many written generations were lost."""
    lost = 0

    def is_over(session: Any, row: Any) -> bool:
        count, world.reported = sum(world.counts.values()), row["generation"] + 1
        if count >= faults and world.last_fault is None:
            world.last_fault = world.reported
        if world.last_fault is not None and world.reported > world.last_fault + LAST_LIARS:
            for machine in [machine for machine in world.machines if machine.is_liar]:  # it may never be asked
                world.after(0.0, world.replace, machine, "honest")
        return count >= faults and not world.has_liar

    while True:
        fleet = Cluster(world, "cpu")
        fleet.crew.say = lambda text: None
        fleet.coordinator.go_back = partial(go_back, world, fleet.coordinator.go_back)  # type: ignore[method-assign]
        world.begin()
        if world.run.exists():
            journal = Journal.open(world.run)
            lost += max(0, world.reported - journal.length())
            session = opening.resume(make_problem(), journal, fleet)
        else:
            session = opening.start(make_problem(), world.run, seed=0, fleet=fleet, about={})
        old = world.run
        try:
            return loop.run(session, Stop(generations=ENDLESS), [is_over]), lost
        except KilledError:
            pass
        finally:
            fleet.close()
            session.require_journal().close()
            shutil.rmtree(old)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=1000, help="number of faults (default 1,000)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the faults (default 0)")
    options = parser.parse_args()
    sys.exit(not simulate(options.faults, options.seed))


if __name__ == "__main__":
    main()
