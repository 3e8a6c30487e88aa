"""Simulates how far one coordinator scales: the real chunk scheduler on a simulated clock, with 10 to 100,000 workers.

    python benchmarks/scale.py [--relays] [--ranks] [--workers 10 --workers 1000] [--task-cost 0.0005]

Workers are unlike: speeds over two decades, mean lifetimes from 5 minutes to 3 days, links of 1 to 1,000 Mbit/s and
round trips of 20 to 200 ms, each log-uniform. One that leaves comes back as a new worker after about 10 s and must
receive the State first. The population grows with the fleet, so that a generation takes ``--seconds`` (10) if all
workers compute all the time: the ideal. A worker computes 0.1 to 10 blocks a second, of ``--members`` (8) members.

A worker receives the record of a generation (4 bytes per member) before its first chunk, or the weights (4 bytes for
each of ``--parameters``) where these are smaller; a head of 300 bytes for each chunk; and sends 4 bytes per score and
200 more. What the coordinator sends waits for its link (``--link``, 1 Gbit/s), heads before records.

The coordinator handles one message at a time. That takes the real time of the scheduler's calls, a measured time for
the JSON of each message, and ``--task-cost`` for each chunk: what the engine takes for a task, 0.0002 to 0.001 s for
Dask's scheduler, which comes on top of what is printed without this option. Encryption is not counted.

--relays  caches or relays serve records and weights, and the coordinator sends each of them once
--ranks   records hold ranks: 2 bytes per member up to 65,536 members, and 3 bytes up to 16,777,216

The first two generations are not counted; then there are 20, or 5 with 10,000 workers and 1 with 100,000. All five
fleets take a few minutes, most of them for the largest.
"""

import argparse
import heapq
import json
import math
import random
import sys
import time
from dataclasses import dataclass, field

from germline.fleet.cluster.scheduler import ChunkScheduler

SIZES = (10, 100, 1_000, 10_000, 100_000)
WARM_UP = 2  # generations
SPEEDS, LIFETIMES = (0.1, 10.0), (300.0, 3 * 86_400.0)  # blocks a second; mean seconds
LINKS, ROUND_TRIPS = (1e6 / 8, 1e9 / 8), (0.02, 0.2)  # bytes a second; seconds
AWAY = 10.0  # mean seconds until another worker takes the place of one that has left
HEAD, ANSWER = 300, 200  # bytes of a message without scores
MOMENTS = 2  # arrays of the State that only workers need that follow by records
RECENT = 0.3  # weight of the latest measurement of a worker's speed
TICK = 0.02  # seconds after which idle workers are asked again
FAN_OUT, HOP = 8, 0.1  # of relays, and the seconds that each level of them takes
ANSWERED, READY, LEFT, JOINED, TICKED = range(5)


@dataclass
class Machine:
    """One place of the fleet, at which workers come and go."""

    speed: float
    link: float
    delay: float  # one way
    lifetime: float
    worker: int = -1  # the number of the worker that is here; -1 if there is none
    version: int = -1  # the generation whose weights it has or is being sent
    previous: int = -1  # the one that it had before
    sent: float = 0.0  # when the coordinator starts to send them
    size: int = 0  # bytes of them
    arrives: float = 0.0  # when they are here
    free: float = 0.0  # when all chunks are computed


@dataclass
class Simulation:
    """A coordinator and its workers on a simulated clock."""

    size: int
    options: argparse.Namespace
    message_cost: float
    machines: list[Machine] = field(default_factory=list)
    rates: dict[int, float] = field(default_factory=dict)
    scheduler: ChunkScheduler = field(default_factory=lambda: ChunkScheduler(0, {}))
    events: list[tuple[float, int, int, int, int]] = field(default_factory=list)
    idle: list[tuple[float, int]] = field(default_factory=list)  # the fastest first
    generation: int = -1
    clock: float = 0.0  # when the coordinator has handled everything so far
    small_free: float = 0.0  # when its outgoing link has carried all heads
    bulk_free: float = 0.0  # when it has carried all records as well
    relayed: float = 0.0  # when all relays have the record
    scheduling: float = 0.0  # seconds of CPU
    handling: float = 0.0  # seconds of CPU
    sent_bytes: float = 0.0
    received_bytes: float = 0.0

    def __post_init__(self) -> None:
        self.random = random.Random(self.size)
        for slot in range(self.size):
            ranges = SPEEDS, LINKS, ROUND_TRIPS, LIFETIMES
            speed, link, trip, lifetime = (math.exp(self.random.uniform(*map(math.log, one))) for one in ranges)
            self.machines.append(Machine(speed, link, trip / 2, lifetime))
            self._add_worker(slot)
        self.pieces = math.ceil(self.options.seconds * sum(machine.speed for machine in self.machines))
        self.population = self.pieces * self.options.members
        width = (
            (2 if self.population <= 1 << 16 else 3 if self.population <= 1 << 24 else 4) if self.options.ranks else 4
        )
        self.record, self.weights = width * self.population, 4 * self.options.parameters
        self.bandwidth = self.options.link * 1e6 / 8

    def _add_worker(self, slot: int) -> None:
        machine = self.machines[slot]
        machine.worker = slot if machine.worker < 0 else machine.worker + self.size
        machine.version = machine.previous = -1
        machine.sent = machine.arrives = machine.free = 0.0
        self.rates[machine.worker] = self.scheduler.rates[machine.worker] = 0.0
        leaves = self.clock + self.random.expovariate(1 / machine.lifetime)
        heapq.heappush(self.events, (leaves, LEFT, machine.worker, 0, 0))

    def run_generation(self) -> None:
        """Have the workers compute all blocks of a generation."""
        self.generation += 1
        began = time.thread_time()
        self.scheduler = ChunkScheduler(self.pieces, dict(self.rates))
        self._count(time.thread_time() - began, 0, 0)
        self.idle = []
        if self.options.relays:
            size = min(self.record, self.weights)
            self.sent_bytes += size
            levels = math.ceil(math.log(self.size, FAN_OUT))
            self.relayed = self.clock + FAN_OUT * size / self.bandwidth + levels * HOP
        for machine in self.machines:
            self._cancel(machine)
            machine.free = min(machine.free, max(machine.arrives, self.clock + 1 / machine.speed))
        for machine in self.machines:
            if machine.arrives > self.clock:
                heapq.heappush(self.events, (machine.arrives + machine.delay, READY, machine.worker, 0, 0))
            else:
                self._offer(machine.worker)
        heapq.heappush(self.events, (self.clock + TICK, TICKED, 0, self.generation, 0))
        while not self.scheduler.is_finished:
            self._handle(*heapq.heappop(self.events))

    def _handle(self, when: float, kind: int, worker: int, job: int, number: int) -> None:
        self.clock = max(self.clock, when)
        if kind == JOINED:
            self._add_worker(worker % self.size)
            self._offer(self.machines[worker % self.size].worker)
        elif kind == TICKED and job == self.generation:
            heapq.heappush(self.events, (self.clock + TICK, TICKED, 0, job, 0))
            while self.idle and self._offer(heapq.heappop(self.idle)[1]):
                pass
        elif worker not in self.rates:
            return
        elif kind == READY:
            self._offer(worker)
        elif kind == LEFT:
            began = time.thread_time()
            self.scheduler.drop_worker(worker)
            self._count(time.thread_time() - began, 1, 0)
            del self.rates[worker]
            self._cancel(self.machines[worker % self.size])
            heapq.heappush(self.events, (self.clock + self.random.expovariate(1 / AWAY), JOINED, worker, 0, 0))
        elif kind == ANSWERED and job == self.generation:
            self._take_answer(worker, number)

    def _take_answer(self, worker: int, number: int) -> None:
        chunk = self.scheduler.out[number]
        self.received_bytes += ANSWER + 4 * self.options.members * chunk.size
        measured = min(self.machines[worker % self.size].speed, chunk.size / (self.clock - chunk.since))
        before = self.rates[worker] or measured
        began = time.thread_time()
        self.scheduler.complete(number, self.clock)
        self.rates[worker] = self.scheduler.rates[worker] = before + RECENT * (measured - before)
        self._count(time.thread_time() - began, 1, 0)
        self._offer(worker)

    def _offer(self, worker: int) -> bool:
        """Send a worker its next chunks; return whether there are any."""
        if worker not in self.rates:
            return True
        began = time.thread_time()
        chunks = list(iter(lambda: self.scheduler.next_chunk(worker, self.clock), None))
        self._count(time.thread_time() - began, len(chunks), len(chunks))
        machine = self.machines[worker % self.size]
        for chunk in chunks:
            if machine.version < self.generation:
                self._send_weights(machine)
            self.small_free = max(self.small_free, self.clock) + HEAD / self.bandwidth
            self.bulk_free += HEAD / self.bandwidth
            self.sent_bytes += HEAD
            arrives = max(machine.arrives, self.small_free + HEAD / machine.link + machine.delay)
            machine.free = max(machine.free, arrives) + chunk.size / machine.speed
            size = ANSWER + 4 * self.options.members * chunk.size
            answered = machine.free + size / machine.link + machine.delay
            heapq.heappush(self.events, (answered, ANSWERED, worker, self.generation, chunk.number))
        if not chunks and not self.scheduler.by_worker[worker]:
            heapq.heappush(self.idle, (-self.rates[worker], worker))
        return bool(chunks)

    def _send_weights(self, machine: Machine) -> None:
        """Send a worker the records that it does not have, or weights."""
        size = min(self.record * (self.generation - machine.version), self.weights)
        if machine.version < 0 and self.generation:  # a State, for a worker that goes on by records
            size = self.weights * (1 + MOMENTS if self.record < self.weights else 1)
        machine.previous, machine.version = machine.version, self.generation
        if self.generation == 0:  # which workers make themselves
            return
        if self.options.relays:
            machine.arrives = max(self.clock, self.relayed) + size / machine.link + machine.delay
            return
        machine.sent, machine.size = max(self.clock, self.bulk_free), size
        self.bulk_free = machine.sent + size / self.bandwidth
        machine.arrives = max(self.bulk_free, machine.sent + size / machine.link) + machine.delay
        self.sent_bytes += size

    def _cancel(self, machine: Machine) -> None:
        """Take back what waits for the link."""
        if machine.sent > self.clock:
            self.bulk_free -= machine.size / self.bandwidth
            self.sent_bytes -= machine.size
            machine.version, machine.sent, machine.arrives = machine.previous, 0.0, 0.0

    def _count(self, scheduling: float, messages: int, tasks: int) -> None:
        """Count seconds of the coordinator's CPU, for which everything else waits."""
        handling = messages * self.message_cost + tasks * self.options.task_cost
        self.scheduling, self.handling = self.scheduling + scheduling, self.handling + handling
        self.clock += scheduling + handling


def measure_message() -> float:
    """Return the seconds that the JSON of a message takes."""
    head: dict[str, object] = {"op": "job", "kind": "scores", "version": "1234", "address": [1, 2, 3], "batch": 1234}
    head |= {"job": 1234, "chunk": 12345, "first": 123456, "last": 123466, "checked_fields": ["theta", "generation"]}
    head |= {"plan": {"block": 8, "dtype": "float32", "way": "batched", "device": "cpu"}, "values": {"sigma": 0.01}}
    began, count = time.thread_time(), 20_000
    for _ in range(count):
        json.loads(json.dumps(head))
    return (time.thread_time() - began) / count / 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, action="append", help="the number of workers (default: 10 to 100,000)")
    parser.add_argument("--seconds", type=float, default=10.0, help="ideal seconds of a generation (default 10)")
    parser.add_argument("--members", type=int, default=8, help="members of a block (default 8)")
    parser.add_argument("--parameters", type=int, default=900_000, help="parameters of the model (default 900,000)")
    parser.add_argument("--link", type=float, default=1000.0, help="Mbit/s of the coordinator (default 1,000)")
    parser.add_argument("--task-cost", type=float, default=0.0, help="seconds of the engine for a chunk (default 0)")
    parser.add_argument("--relays", action="store_true", help="caches serve records and weights")
    parser.add_argument("--ranks", action="store_true", help="records hold ranks of 2 or 3 bytes")
    options = parser.parse_args()
    cost = measure_message()
    print(f"ideal: {1 / options.seconds:.4f} generations/s; JSON of a message: {1e6 * cost:.1f} us of CPU")
    print("| workers | population | generations/s | of the ideal | MB/s out | MB/s in | CPU s/generation | limit |")
    print("|--:|--:|--:|--:|--:|--:|--:|---|")
    for size in options.workers or SIZES:
        simulation, count = Simulation(size, options, cost), max(1, min(20, 50_000 // size))
        for number in range(WARM_UP + count):
            if number == WARM_UP:
                before = (simulation.clock, simulation.sent_bytes, simulation.received_bytes)
                simulation.scheduling = simulation.handling = 0.0
            simulation.run_generation()
            print(f"\r{size:,} workers, generation {number + 1}, {simulation.clock:,.0f} s", end="", file=sys.stderr)
        print("\r", end="", file=sys.stderr)
        lasted = simulation.clock - before[0]
        out, received = (simulation.sent_bytes - before[1]) / lasted, (simulation.received_bytes - before[2]) / lasted
        cpu = simulation.scheduling + simulation.handling
        most, limit = max((out / simulation.bandwidth, "its link"), (cpu / lasted, "its CPU"))
        ratio = count / lasted * options.seconds
        text = f"{limit}, {most:.0%} busy" if most > 0.5 else "none" if ratio > 0.8 else "workers' links and latency"
        seconds = f"{simulation.scheduling / count:.3f} + {simulation.handling / count:.3f}"
        rates = f"{count / lasted:.2g} | {ratio:.2g} | {out / 1e6:.2f} | {received / 1e6:.2f}"
        print(f"| {size:,} | {simulation.population:,} | {rates} | {seconds} | {text} |", flush=True)


if __name__ == "__main__":
    main()
