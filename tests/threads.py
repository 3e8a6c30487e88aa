"""Ranks of an spmd fleet as threads of one process: the same fleet, over a collective that passes objects.

Processes cost seconds to start; threads let the fast tests run every strategy and exchange by two ranks.
"""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

import pytest
import torch

from germline.fleet.spmd import fleet as spmd
from germline.fleet.spmd.collective import Collective
from germline.fleet.spmd.launch import Launch

T = TypeVar("T")
TIMEOUT = 60.0  # seconds


class Meeting:
    """A place where threads exchange values; each gets those of all."""

    def __init__(self, size: int) -> None:
        self.values: list[Any] = [None] * size
        self.barrier = threading.Barrier(size, timeout=TIMEOUT)

    def exchange(self, rank: int, value: T) -> list[T]:
        self.values[rank] = value
        self.barrier.wait()
        values = list(self.values)
        self.barrier.wait()
        return values


class Meetings:
    """All meetings of a fleet: of all ranks, of their signs of life, and of each team."""

    def __init__(self, size: int) -> None:
        self.size, self.all, self.beats = size, Meeting(size), Meeting(size)
        self.teams: dict[tuple[int, int], Meeting] = {}
        self.lock = threading.Lock()

    def team(self, width: int, number: int) -> Meeting:
        with self.lock:
            return self.teams.setdefault((width, number), Meeting(width))

    def abort(self) -> None:
        """Break all meetings, as the death of a process would."""
        for meeting in (self.all, self.beats, *self.teams.values()):
            meeting.barrier.abort()


class ThreadOperations:
    """The operations of a collective, between threads."""

    def __init__(self, rank: int, meeting: Meeting, meetings: Meetings) -> None:
        self.rank, self.meeting, self.meetings = rank, meeting, meetings

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.stack(self.meeting.exchange(self.rank, tensor.clone()))

    def add(self, tensor: torch.Tensor) -> None:
        first, *others = self.meeting.exchange(self.rank, tensor.clone())
        tensor.copy_(sum(others, start=first))

    def trade(self, sent: torch.Tensor, sent_sizes: list[int], sizes: list[int]) -> torch.Tensor:
        by_rank = self.meeting.exchange(self.rank, torch.split(sent.clone(), sent_sizes))
        received = [theirs[self.rank] for theirs in by_rank]
        assert [part.numel() for part in received] == sizes
        return torch.cat(received)

    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        tensor.copy_(self.meeting.exchange(self.rank, tensor.clone())[root])

    def beat(self, flag: torch.Tensor, root: int) -> None:
        flag.copy_(self.meetings.beats.exchange(self.rank, flag.clone())[root])

    def team(self, width: int) -> "ThreadOperations":
        return ThreadOperations(self.rank % width, self.meetings.team(width, self.rank // width), self.meetings)

    def close(self) -> None:
        pass


@contextmanager
def ranks_as_threads(size: int) -> Iterator[Callable[[Callable[[int], T]], list[T]]]:
    """Yield a function that runs some work, a function of the rank, in one thread per rank."""
    place, meetings = threading.local(), Meetings(size)

    def launch() -> Launch:
        return Launch("torchrun", place.rank, size, place.rank, size, "127.0.0.1")

    def connect(launch: Launch, backend: str, timeout: float) -> Collective:
        operations = ThreadOperations(place.rank, meetings.all, meetings)
        return Collective(place.rank, size, operations, timeout)

    def run(work: Callable[[int], T]) -> list[T]:
        failures: list[BaseException] = []

        def run_rank(rank: int) -> T:
            place.rank = rank
            try:
                return work(rank)
            except BaseException as error:
                failures.append(error)
                meetings.abort()
                raise

        with ThreadPoolExecutor(size) as threads:
            results = [threads.submit(run_rank, rank) for rank in range(size)]
        if failures:
            raise failures[0]  # the others have failed because this one has
        return [result.result() for result in results]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(spmd, "find_launch", launch)
        patch.setattr(spmd, "connect", connect)
        yield run
