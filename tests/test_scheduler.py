"""The scheduler of an elastic fleet, on a simulated clock."""

import heapq
import sys
from collections import Counter
from collections.abc import Iterator
from types import FrameType
from typing import Any

import numpy as np
import pytest

from germline.fleet.cluster.scheduler import ChunkScheduler


def test_every_piece_is_done_once_and_slow_workers_do_few() -> None:
    """One of three workers of different speeds dies."""
    speeds: dict[int | str, float] = {1: 100.0, 2: 50.0, 3: 10.0}
    clock = 0.0
    scheduler = ChunkScheduler(200, dict.fromkeys(speeds, 0.0), smallest=0.01)
    done: list[int] = []
    free = dict.fromkeys(speeds, 0.0)
    ends: dict[int, float] = {}
    while not scheduler.is_finished:
        for worker in list(speeds):
            while (chunk := scheduler.next_chunk(worker, clock)) is not None:
                free[worker] = max(free[worker], clock) + chunk.size / speeds[worker]
                ends[chunk.number] = free[worker]
        number = min(ends, key=lambda n: ends[n]) if ends else None
        if number is None:
            clock += 0.01
            continue
        clock = max(clock, ends.pop(number))
        if number not in scheduler.out:
            continue
        worker = scheduler.out[number].worker
        if worker == 2 and clock > 0.5:
            del speeds[2]
            scheduler.drop_worker(2)
            ends = {n: end for n, end in ends.items() if n in scheduler.out}
            continue
        scheduler.rates[worker] = speeds[worker]
        completed = scheduler.complete(number, clock)
        if completed is not None:
            done.extend(range(completed.first, completed.last))
    assert sorted(done) == list(range(200))
    assert clock < 2.5  # 200 pieces at 110 a second take 1.8


@pytest.mark.parametrize("pieces", [32, 64, 128])
def test_a_worker_ten_times_slower_costs_less_than_a_tenth(pieces: int) -> None:
    """The loss is compared with three workers that never wait; messages take 2 ms."""
    speeds, message, rng, totals = {1: 33.0, 2: 33.0, 3: 3.3}, 0.002, np.random.default_rng(0), []
    for _ in range(50):
        scheduler = ChunkScheduler(pieces, {worker: speed * rng.uniform(0.9, 1.1) for worker, speed in speeds.items()})
        clock, free, ends = 0.0, dict.fromkeys(speeds, 0.0), dict[int, float]()
        while not scheduler.is_finished:
            for worker, speed in speeds.items():
                while (chunk := scheduler.next_chunk(worker, clock)) is not None:
                    free[worker] = max(free[worker], clock + message) + chunk.size / speed * rng.uniform(0.9, 1.1)
                    ends[chunk.number] = free[worker] + message
            number = min(ends, key=lambda n: ends[n])
            clock = ends.pop(number)
            scheduler.complete(number, clock)
        totals.append(clock)
    assert pieces / sum(speeds.values()) / np.mean(totals) > 0.9


@pytest.mark.parametrize(("workers", "pieces"), [(3, 1), (5, 2), (9, 4), (12, 5)])
def test_many_workers_finish_few_pieces(workers: int, pieces: int) -> None:
    rates = {worker: 1.0 + 0.1 * worker for worker in range(workers)}
    scheduler, clock = ChunkScheduler(pieces, rates), 0.0
    while not scheduler.is_finished:
        chunks = [chunk for worker in rates if (chunk := scheduler.next_chunk(worker, clock)) is not None]
        assert chunks or scheduler.out
        clock += 1.0
        scheduler.complete(next(iter(scheduler.out)), clock)


class Fleet:
    """Workers that join, leave, freeze and slow down at random, and a scheduler that does not know it."""

    def __init__(self, workers: int, pieces: int, seed: int, *, are_known: bool, trouble: float) -> None:
        self.rng, self.trouble, self.clock = np.random.default_rng(seed), trouble, 0.0
        self.speeds = {f"worker {number}": self.draw_speed() for number in range(workers)}
        self.joined, self.answers, self.free = workers, list[tuple[float, int]](), dict[str, float]()
        self.frozen: set[str] = set()
        rates = {name: speed if are_known else 0.0 for name, speed in self.speeds.items()}
        self.scheduler = ChunkScheduler(pieces, rates)
        self.completed = Counter[int]()

    def draw_speed(self) -> float:
        return float(10 ** self.rng.uniform(-1, 1))

    def offer(self, name: str) -> None:
        """Have a worker compute its next chunks."""
        while (chunk := self.scheduler.next_chunk(name, self.clock)) is not None:
            start = max(self.free.get(name, 0.0), self.clock)
            self.free[name] = start + chunk.size / self.speeds[name] * self.rng.uniform(0.8, 1.2)
            if name not in self.frozen:
                heapq.heappush(self.answers, (self.free[name], chunk.number))

    def disturb(self) -> None:
        """Have a worker join, leave, freeze, fail or slow down."""
        name, event = str(self.rng.choice(list(self.speeds))), int(self.rng.integers(5))
        if event == 0:
            self.joined += 1
            name = f"worker {self.joined}"
            self.speeds[name], self.scheduler.rates[name] = self.draw_speed(), 0.0
        elif event == 1 and self.speeds.keys() - self.frozen - {name}:  # frozen ones are given up
            del self.speeds[name]
            self.scheduler.drop_worker(name)
        elif event == 2 and len(self.speeds) - len(self.frozen) > 1:
            self.frozen.add(name)
        elif event == 3 and self.scheduler.out:
            self.scheduler.return_chunk(int(self.rng.choice(list(self.scheduler.out))), self.clock)
        else:
            self.speeds[name] /= 10

    def run(self) -> None:
        """Run until all pieces are done; frozen workers are given up after 100 seconds without an answer."""
        last_answer = 0.0
        for name in list(self.speeds):
            self.offer(name)
        while not self.scheduler.is_finished:
            if self.rng.random() < self.trouble:
                self.disturb()
            if self.clock > last_answer + 100:
                for name in self.frozen & self.speeds.keys():
                    del self.speeds[name]
                    self.scheduler.drop_worker(name)
                self.frozen, last_answer = set(), self.clock
            if not self.answers or self.answers[0][0] > self.clock + 1:
                self.clock += 1.0
                for name in list(self.speeds):
                    self.offer(name)
                continue
            self.clock, number = heapq.heappop(self.answers)
            chunk = self.scheduler.out.get(number)
            if chunk is None or chunk.worker in self.frozen:
                continue
            last_answer, rate = self.clock, chunk.size / max(self.clock - chunk.since, 1e-6)
            if self.scheduler.complete(number, self.clock) is not None:
                self.completed.update(range(chunk.first, chunk.last))
            self.scheduler.rates[chunk.worker] = rate
            self.offer(str(chunk.worker))


@pytest.mark.parametrize("seed", range(12))
def test_random_joins_losses_and_slow_workers_lose_no_piece(seed: int) -> None:
    fleet = Fleet(2 + 3 * seed, pieces=300, seed=seed, are_known=seed % 2 == 0, trouble=0.1)
    fleet.run()
    assert fleet.completed == Counter(range(300))
    assert fleet.scheduler.done == set(range(300))
    assert not fleet.scheduler.unassigned
    assert fleet.scheduler.unassigned_pieces == 0


def test_all_pieces_are_assigned_or_out_or_done_at_any_time() -> None:
    fleet = Fleet(9, pieces=200, seed=1, are_known=False, trouble=0.3)
    offer = fleet.offer

    def offer_and_check(name: str) -> None:
        offer(name)
        scheduler = fleet.scheduler
        spans = [(chunk.first, chunk.last) for chunk in scheduler.out.values()] + list(scheduler.unassigned)
        assert scheduler.done.union(*(range(*span) for span in spans)) == set(range(200))
        assert scheduler.unassigned_pieces == sum(last - first for first, last in scheduler.unassigned)
        assert scheduler.total == pytest.approx(sum(scheduler.known.values()))

    fleet.offer = offer_and_check  # type: ignore[method-assign]
    fleet.run()
    assert fleet.completed == Counter(range(200))


class Unread(dict[Any, Any]):
    """A dictionary of which only single items may be read."""

    def __iter__(self) -> Iterator[Any]:
        raise AssertionError("A decision looks at all of them.")

    keys = values = items = __iter__  # type: ignore[assignment]


def count_lines(workers: int, *, are_known: bool) -> float:
    """Return how many lines of the scheduler Python runs for a call of it, on average."""
    calls, lines, file = 0, 0, ChunkScheduler.next_chunk.__code__.co_filename

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal calls, lines
        if frame.f_code.co_filename != file:
            return None
        calls += event == "call" and frame.f_code.co_name in ("next_chunk", "complete")
        lines += event == "line"
        return trace

    fleet, before = Fleet(workers, pieces=10 * workers, seed=0, are_known=are_known, trouble=0.0), sys.gettrace()
    fleet.scheduler.out, fleet.scheduler.rates = Unread(), Unread(fleet.scheduler.rates)
    sys.settrace(trace)
    try:
        fleet.run()
    finally:
        sys.settrace(before)
    return lines / calls


@pytest.mark.parametrize("are_known", [True, False])
def test_the_work_of_a_decision_does_not_grow_with_the_number_of_workers(are_known: bool) -> None:
    assert count_lines(1000, are_known=are_known) < 1.5 * count_lines(10, are_known=are_known)
