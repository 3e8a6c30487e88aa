"""Pieces of work scheduled on workers of different speed: larger chunks for faster ones, and the last chunks twice.

A worker has two chunks at a time, so that it never waits for the next. Chunks get smaller toward the end. When no piece
is unassigned, idle workers compute what slow or frozen workers still have; the first answer counts.
"""

import itertools
import math
from collections import deque
from dataclasses import dataclass, field

CHUNKS_PER_WORKER = 2
SHORTEST = 0.05  # seconds of work that are worth a message
OVERDUE = 3.0  # a chunk is overdue after this many times the expected time
TRIAL = 8  # the first chunk of a worker is this fraction of its share: it shows its speed
FASTER = 1.5  # by how much faster an idle worker must be to compute a chunk again


@dataclass
class Chunk:
    """Pieces first to last that a worker computes."""

    number: int
    first: int
    last: int
    worker: str
    since: float  # when the worker could start with them

    @property
    def size(self) -> int:
        return self.last - self.first


@dataclass
class ChunkScheduler:
    """The pieces of one job: which worker has which of them, and which are done.

    >>> scheduler = ChunkScheduler(8, {"a": 3.0, "b": 1.0})
    >>> scheduler.next_chunk("a", now=0.0).size, scheduler.next_chunk("b", now=0.0).size
    (3, 1)
    """

    pieces: int
    rates: dict[str, float]  # pieces per second of each worker; 0 if unknown
    smallest: float = SHORTEST
    out: dict[int, Chunk] = field(default_factory=dict)
    done: set[int] = field(default_factory=set)
    unassigned: deque[tuple[int, int]] = field(default_factory=deque)  # spans
    numbers: "itertools.count[int]" = field(default_factory=itertools.count)

    def __post_init__(self) -> None:
        self.unassigned.append((0, self.pieces))

    @property
    def is_finished(self) -> bool:
        return len(self.done) == self.pieces

    @property
    def unassigned_pieces(self) -> int:
        """The number of pieces that no worker has."""
        return sum(last - first for first, last in self.unassigned)

    def rate(self, worker: str) -> float:
        """Return the pieces per second of a worker, or the mean of all if it is unknown."""
        known = [rate for rate in self.rates.values() if rate > 0]
        return self.rates.get(worker) or (sum(known) / len(known) if known else 1.0)

    def next_chunk(self, worker: str, now: float) -> Chunk | None:
        """Return what a worker is to compute next, if there is anything for it."""
        mine = [chunk for chunk in self.out.values() if chunk.worker == worker]
        if len(mine) >= CHUNKS_PER_WORKER:
            return None
        return self._assign(worker, mine, now) if self.unassigned else self._copy_last(worker, mine, now)

    def _assign(self, worker: str, mine: list[Chunk], now: float) -> Chunk | None:
        workers = set(self.rates) | {worker}
        total, own = sum(map(self.rate, workers)), self.rate(worker)
        waiting = sum(chunk.size for chunk in mine)
        left = self.unassigned_pieces + sum(chunk.size for chunk in self.out.values())
        in_time = any(
            now - chunk.since <= OVERDUE * CHUNKS_PER_WORKER * chunk.size / self.rate(chunk.worker) + self.smallest
            for chunk in self.out.values()
            if chunk.worker != worker
        )
        if in_time and (1 + waiting) / own > left / total and self.rates.get(worker):
            return None  # others compute it, and will be done before
        size = max(
            math.ceil(self.unassigned_pieces * own / total / CHUNKS_PER_WORKER), math.floor(own * self.smallest), 1
        )
        if not self.rates.get(worker):  # a small chunk first, to see how fast it is
            size = max(1, size // TRIAL)
        first, last = self.unassigned.popleft()
        taken = min(last, first + size)
        if taken < last:
            self.unassigned.appendleft((taken, last))
        return self._hand_out(first, taken, worker, now)

    def _copy_last(self, worker: str, mine: list[Chunk], now: float) -> Chunk | None:
        """Assign the chunk that will be done last once more, if this worker would be much sooner."""
        if mine:
            return None
        late: list[tuple[float, Chunk]] = []
        for chunk in self.out.values():
            doubled = any(o is not chunk and o.first == chunk.first for o in self.out.values())
            if chunk.worker == worker or doubled or not self.is_needed(chunk):
                continue
            before = sum(o.size for o in self.out.values() if o.worker == chunk.worker and o.number <= chunk.number)
            expected = before / self.rate(chunk.worker)
            waited = now - chunk.since
            overdue = waited > OVERDUE * expected + self.smallest and any(self.rates.values())
            remaining = math.inf if overdue else expected - waited
            if remaining > FASTER * chunk.size / self.rate(worker):
                late.append((remaining, chunk))
        if not late:
            return None
        slowest = max(late, key=lambda one: (one[0], -one[1].number))[1]
        return self._hand_out(slowest.first, slowest.last, worker, now)

    def _hand_out(self, first: int, last: int, worker: str, now: float) -> Chunk:
        chunk = Chunk(next(self.numbers), first, last, worker, now)
        self.out[chunk.number] = chunk
        return chunk

    def is_needed(self, chunk: Chunk) -> bool:
        """Return whether a piece of a chunk is not done yet."""
        return not self.done.issuperset(range(chunk.first, chunk.last))

    def complete(self, number: int, now: float) -> Chunk | None:
        """Mark a chunk as done; return it, or None if it was not needed any more."""
        chunk = self._take_back(number, now)
        if chunk is None or not self.is_needed(chunk):
            return None
        self.done.update(range(chunk.first, chunk.last))
        return chunk

    def _take_back(self, number: int, now: float) -> Chunk | None:
        """Take a chunk from its worker, which starts with its next one now."""
        chunk = self.out.pop(number, None)
        for other in self.out.values():
            if chunk is not None and other.worker == chunk.worker:
                other.since = now
        return chunk

    def return_chunk(self, number: int, now: float) -> None:
        """Take back a chunk that is not going to be answered."""
        chunk = self._take_back(number, now)
        if chunk is None or not self.is_needed(chunk):
            return
        if not any(o.first == chunk.first and o.last == chunk.last for o in self.out.values()):
            self.unassigned.append((chunk.first, chunk.last))

    def drop_worker(self, worker: str) -> None:
        """Take back all chunks of a worker that is gone."""
        self.rates.pop(worker, None)
        for chunk in [chunk for chunk in self.out.values() if chunk.worker == worker]:
            self.return_chunk(chunk.number, chunk.since)
