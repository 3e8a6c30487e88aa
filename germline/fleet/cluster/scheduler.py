"""Pieces of work scheduled on workers of different speed: larger chunks for faster ones, and the last chunks twice.

A worker has two chunks at a time, so that it never waits for the next. Chunks get smaller toward the end. When no piece
is unassigned, idle workers compute what slow or frozen workers still have; the first answer counts.

No decision looks at all workers or at all chunks: sums of both are kept, and a heap of when chunks should be done.
"""

import itertools
import math
from collections import defaultdict, deque
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Any

CHUNKS_PER_WORKER = 2
SHORTEST = 0.05  # seconds of work that are worth a message
OVERDUE = 3.0  # a chunk is overdue after this many times the expected time
TRIAL = 8  # the first chunk of a worker is this fraction of its share: it shows its speed
FASTER = 1.5  # by how much faster an idle worker must be to compute a chunk again

Worker = int | str


@dataclass(eq=False)
class Chunk:
    """Pieces first to last that a worker computes."""

    number: int
    first: int
    last: int
    worker: Worker
    since: float  # when the worker could start with them
    copy: "Chunk | None" = None  # the same pieces on another worker
    end: float = -math.inf  # when they should be done
    deadline: float = -math.inf  # when they are overdue

    @property
    def size(self) -> int:
        return self.last - self.first


class ChunkScheduler:
    """The pieces of one job: which worker has which of them, and which are done.

    >>> scheduler = ChunkScheduler(8, {1: 3.0, 2: 1.0})
    >>> scheduler.next_chunk(1, now=0.0).size, scheduler.next_chunk(2, now=0.0).size
    (3, 1)

    Args:
        pieces: The number of pieces.
        rates: Pieces per second of each worker, 0 if unknown; the caller changes them as it learns more.
        smallest: Seconds of work that are worth a message.
    """

    def __init__(self, pieces: int, rates: dict[Any, float], smallest: float = SHORTEST) -> None:
        self.pieces, self.rates, self.smallest = pieces, rates, smallest
        self.out: dict[int, Chunk] = {}
        self.by_worker: defaultdict[Worker, list[Chunk]] = defaultdict(list)  # the same chunks
        self.done: set[int] = set()
        self.unassigned, self.unassigned_pieces = deque([(0, pieces)]), pieces  # spans, and the sum of their sizes
        self.known = {worker: rate for worker, rate in rates.items() if rate > 0}
        self.total = sum(self.known.values())
        self.numbers = itertools.count()
        self.ends: list[tuple[float, int, Chunk]] = []  # a heap; the chunk that should be done last comes first

    @property
    def is_finished(self) -> bool:
        return len(self.done) == self.pieces

    def rate(self, worker: Worker | None = None) -> float:
        """Return the pieces per second of a worker, or the mean of all if it is unknown or not given."""
        return self.rates.get(worker) or (self.total / len(self.known) if self.known and self.total > 0 else 1.0)

    def _update_total(self, worker: Worker) -> None:
        """Take the present rate of a worker into the total of all."""
        rate = self.rates.get(worker, 0.0)
        self.total += rate - self.known.pop(worker, 0.0)
        self.known |= {worker: rate} if rate else {}

    def next_chunk(self, worker: Worker, now: float) -> Chunk | None:
        """Return what a worker is to compute next, if there is anything for it."""
        mine = self.by_worker[worker]
        if len(mine) >= CHUNKS_PER_WORKER:
            return None
        self._update_total(worker)
        self._estimate_ends(worker)
        return self._assign(worker, mine, now) if self.unassigned else self._copy_last(worker, mine, now)

    def _assign(self, worker: Worker, mine: list[Chunk], now: float) -> Chunk | None:
        workers = len(self.rates) + (worker not in self.rates)
        own, total = self.rate(worker), self.rate() * workers
        waiting, left = sum(chunk.size for chunk in mine), max(self.pieces - len(self.done), workers)
        late = self._find_last() if self.rates.get(worker) and len(self.out) > len(mine) else None
        if late is not None and now <= late.deadline and (1 + waiting) / own > left / total:
            return None  # others compute it, and will be done before
        share = min(self.unassigned_pieces, left * own / total - waiting)  # then all end at the same time
        worthwhile = min(math.floor(own * self.smallest), math.ceil(share))  # at the end all get their part
        size = max(math.ceil(share / CHUNKS_PER_WORKER), worthwhile, 1)
        size = size if self.rates.get(worker) else max(1, size // TRIAL)  # a small one first, to see how fast it is
        first, last = self.unassigned.popleft()
        taken = min(last, first + size)
        if taken < last:
            self.unassigned.appendleft((taken, last))
        self.unassigned_pieces -= taken - first
        return self._hand_out(Chunk(next(self.numbers), first, taken, worker, now))

    def _copy_last(self, worker: Worker, mine: list[Chunk], now: float) -> Chunk | None:
        """Assign the chunk that will be done last once more, if this worker would be much sooner."""
        last = None if mine else self._find_last()
        if last is None or (now <= last.deadline and last.end - now <= FASTER * last.size / self.rate(worker)):
            return None
        last.copy = Chunk(next(self.numbers), last.first, last.last, worker, now, last)
        return self._hand_out(last.copy)

    def _find_last(self) -> Chunk | None:
        """Return the chunk that should be done last, of those that are needed and have no copy."""
        while self.ends:
            negative_end, number, last = heappop(self.ends)
            self._estimate_ends(last.worker)
            if -negative_end == last.end and last.copy is None and number in self.out and self.is_needed(last):
                heappush(self.ends, (negative_end, number, last))
                return last
        return None

    def _hand_out(self, chunk: Chunk) -> Chunk:
        self.out[chunk.number] = chunk
        self.by_worker[chunk.worker].append(chunk)
        self._estimate_ends(chunk.worker)
        return chunk

    def _estimate_ends(self, worker: Worker) -> None:
        """Estimate when the chunks of a worker will be done, one after another."""
        pieces = 0
        for chunk in self.by_worker[worker]:
            pieces += chunk.size
            expected = pieces / self.rate(worker)
            chunk.deadline = chunk.since + OVERDUE * expected + self.smallest if self.known else math.inf
            if chunk.end != chunk.since + expected:
                chunk.end = chunk.since + expected
                heappush(self.ends, (-chunk.end, chunk.number, chunk))

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
        if chunk is not None:
            self.by_worker[chunk.worker].remove(chunk)
            for other in self.by_worker[chunk.worker]:
                other.since = now
            self._estimate_ends(chunk.worker)
            if chunk.copy is not None:
                chunk.copy.copy = None
                heappush(self.ends, (-chunk.copy.end, chunk.copy.number, chunk.copy))
        return chunk

    def return_chunk(self, number: int, now: float) -> None:
        """Take back a chunk that is not going to be answered."""
        chunk = self._take_back(number, now)
        if chunk is not None and chunk.copy is None and self.is_needed(chunk):
            self.unassigned.append((chunk.first, chunk.last))
            self.unassigned_pieces += chunk.size

    def withdraw(self, first: int, last: int) -> None:
        """Have pieces that are done be computed once more."""
        self.done.difference_update(range(first, last))
        self.unassigned.append((first, last))
        self.unassigned_pieces += last - first

    def drop_worker(self, worker: Worker) -> None:
        """Take back all chunks of a worker that is gone."""
        self.rates.pop(worker, None)
        self._update_total(worker)
        for chunk in list(self.by_worker[worker]):
            self.return_chunk(chunk.number, chunk.since)
