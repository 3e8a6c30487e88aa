"""The scheduler of an elastic fleet, on a simulated clock."""

import numpy as np
import pytest

from germline.fleet.cluster.scheduler import ChunkScheduler


def test_every_piece_is_done_once_and_slow_workers_do_few() -> None:
    """One of three workers of different speeds dies."""
    speeds, clock = {1: 100.0, 2: 50.0, 3: 10.0}, 0.0
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
