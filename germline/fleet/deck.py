"""Pieces of work dealt to workers of unlike speed: larger chunks to faster ones, and the tail of it twice.

A worker has two chunks at a time, so that it never waits for the next. Chunks get smaller towards the end. When nothing
new is left, whoever is idle does what somebody slow, frozen or gone still has; the first answer counts.
"""

import itertools
import math
from collections import deque
from dataclasses import dataclass, field

AT_ONCE = 2  # chunks of a worker
WORTH = 0.05  # seconds of work for which a message is worth its way
OVERDUE = 3.0  # times as long as expected
TASTE = 8  # part of its share by which the speed of a worker is found out
HASTE = 1.5  # by how much faster somebody idle must be than the one who has a chunk


@dataclass
class Chunk:
    """Pieces first to last that a worker is at."""

    number: int
    first: int
    last: int
    worker: int
    since: float  # when it could begin with them

    @property
    def size(self) -> int:
        return self.last - self.first


@dataclass
class Deck:
    """The pieces of one piece of work: who has which of them, and which are done.

    >>> deck = Deck(8, {1: 3.0, 2: 1.0})
    >>> deck.take(1, now=0.0).size, deck.take(2, now=0.0).size
    (3, 1)
    """

    pieces: int
    rates: dict[int, float]  # pieces a second of each worker, as far as known
    smallest: float = WORTH
    out: dict[int, Chunk] = field(default_factory=dict)
    done: set[int] = field(default_factory=set)
    fresh: deque[tuple[int, int]] = field(default_factory=deque)  # spans that nobody has
    numbers: "itertools.count[int]" = field(default_factory=itertools.count)

    def __post_init__(self) -> None:
        self.fresh.append((0, self.pieces))

    @property
    def finished(self) -> bool:
        return len(self.done) == self.pieces

    @property
    def left(self) -> int:
        """Pieces that nobody has."""
        return sum(last - first for first, last in self.fresh)

    def rate(self, worker: int) -> float:
        known = [rate for rate in self.rates.values() if rate > 0]
        return self.rates.get(worker) or (sum(known) / len(known) if known else 1.0)

    def take(self, worker: int, now: float) -> Chunk | None:
        """What a worker is to do next, if there is anything for it."""
        mine = [chunk for chunk in self.out.values() if chunk.worker == worker]
        if len(mine) >= AT_ONCE:
            return None
        return self._fresh(worker, mine, now) if self.fresh else self._copied(worker, mine, now)

    def _fresh(self, worker: int, mine: list[Chunk], now: float) -> Chunk | None:
        workers = set(self.rates) | {worker}
        total, own = sum(map(self.rate, workers)), self.rate(worker)
        waiting = sum(chunk.size for chunk in mine)
        left = self.left + sum(chunk.size for chunk in self.out.values())
        in_time = any(
            now - chunk.since <= OVERDUE * AT_ONCE * chunk.size / self.rate(chunk.worker) + self.smallest
            for chunk in self.out.values()
            if chunk.worker != worker
        )
        if in_time and (1 + waiting) / own > left / total and self.rates.get(worker):
            return None  # others are at it, and will have done it before
        size = max(math.ceil(self.left * own / total / AT_ONCE), math.floor(own * self.smallest), 1)
        if not self.rates.get(worker):  # first a little, to see how fast it is
            size = max(1, size // TASTE)
        first, last = self.fresh.popleft()
        taken = min(last, first + size)
        if taken < last:
            self.fresh.appendleft((taken, last))
        return self._given(first, taken, worker, now)

    def _copied(self, worker: int, mine: list[Chunk], now: float) -> Chunk | None:
        """The chunk that will be done last, if this worker would be much sooner."""
        if mine:
            return None
        found: list[tuple[float, Chunk]] = []
        for chunk in self.out.values():
            doubled = any(o is not chunk and o.first == chunk.first for o in self.out.values())
            if chunk.worker == worker or doubled or not self.wanted(chunk):
                continue
            before = sum(o.size for o in self.out.values() if o.worker == chunk.worker and o.number <= chunk.number)
            expected = before / self.rate(chunk.worker)
            waited = now - chunk.since
            overdue = waited > OVERDUE * expected + self.smallest and any(self.rates.values())
            remaining = math.inf if overdue else expected - waited
            if remaining > HASTE * chunk.size / self.rate(worker):
                found.append((remaining, chunk))
        if not found:
            return None
        slowest = max(found, key=lambda one: (one[0], -one[1].number))[1]
        return self._given(slowest.first, slowest.last, worker, now)

    def _given(self, first: int, last: int, worker: int, now: float) -> Chunk:
        chunk = Chunk(next(self.numbers), first, last, worker, now)
        self.out[chunk.number] = chunk
        return chunk

    def wanted(self, chunk: Chunk) -> bool:
        return not self.done.issuperset(range(chunk.first, chunk.last))

    def answered(self, number: int, now: float) -> Chunk | None:
        """The chunk of an answer, if anybody still waits for it; from here on it is done."""
        chunk = self._taken_back(number, now)
        if chunk is None or not self.wanted(chunk):
            return None
        self.done.update(range(chunk.first, chunk.last))
        return chunk

    def _taken_back(self, number: int, now: float) -> Chunk | None:
        """A chunk that its worker no longer has: it begins with its next one now."""
        chunk = self.out.pop(number, None)
        for other in self.out.values():
            if chunk is not None and other.worker == chunk.worker:
                other.since = now
        return chunk

    def returned(self, number: int, now: float) -> None:
        """A chunk that is not going to be answered."""
        chunk = self._taken_back(number, now)
        if chunk is None or not self.wanted(chunk):
            return
        if not any(o.first == chunk.first and o.last == chunk.last for o in self.out.values()):
            self.fresh.append((chunk.first, chunk.last))

    def gone(self, worker: int) -> None:
        """What a worker had is anybody's."""
        self.rates.pop(worker, None)
        for chunk in [chunk for chunk in self.out.values() if chunk.worker == worker]:
            self.returned(chunk.number, chunk.since)
