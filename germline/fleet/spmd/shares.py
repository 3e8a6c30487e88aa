"""Shares pieces of work out among ranks, by the seconds that each rank takes for one."""

from dataclasses import dataclass, field

RECENT = 0.3  # the weight of the latest generation in the measured speed of a rank
WORTH = 0.9  # new shares must take at most this fraction of the present time


@dataclass
class Shares:
    """The pieces of each rank.

    Attributes:
        counts: The number of pieces of each rank, in order.
        width: The number of scores that a piece gives.
        seconds: The measured seconds of each rank for a piece; empty before anything is measured.
    """

    counts: tuple[int, ...]
    width: int
    seconds: list[float] = field(default_factory=list)

    def slice_of(self, rank: int) -> slice:
        """Return the pieces of a rank."""
        first = sum(self.counts[:rank])
        return slice(first, first + self.counts[rank])

    def rebalance(self, measured: list[float]) -> None:
        """Take the latest measurements in, and share out anew where that is worth it."""
        before = self.seconds or measured
        slowest = max(seconds for seconds, n in zip(measured, self.counts, strict=True) if n)
        before = [old if n else slowest for old, n in zip(before, self.counts, strict=True)]
        latest = [seconds if n else slowest for seconds, n in zip(measured, self.counts, strict=True)]
        self.seconds = [old + RECENT * (seconds - old) for old, seconds in zip(before, latest, strict=True)]
        better = share_by_speed(sum(self.counts), self.seconds)
        if longest_time(better, self.seconds) < WORTH * longest_time(self.counts, self.seconds):
            self.counts = better


def share_by_speed(pieces: int, seconds: list[float]) -> tuple[int, ...]:
    """Return the pieces of each rank: each piece goes to the rank that would finish it first.

    >>> share_by_speed(10, [1.0, 1.0, 3.0])
    (5, 4, 1)
    """
    counts = [0] * len(seconds)
    for _ in range(pieces):
        ends = [(n + 1) * each for n, each in zip(counts, seconds, strict=True)]
        counts[ends.index(min(ends))] += 1
    return tuple(counts)


def split_evenly(pieces: int, ranks: int) -> tuple[int, ...]:
    """Return the pieces of each of some equally fast ranks."""
    return share_by_speed(pieces, [1.0] * ranks)


def longest_time(counts: tuple[int, ...], seconds: list[float]) -> float:
    """Return the seconds of the rank that finishes last."""
    return max(n * each for n, each in zip(counts, seconds, strict=True))


def members_of_rank(rank: int, population: int, ranks: int, width: int) -> range:
    """Return the members that train in a rank, where ``width`` neighboring ranks share the work of each.

    >>> [members_of_rank(rank, 3, 4, 2) for rank in range(4)]
    [range(0, 2), range(0, 2), range(2, 3), range(2, 3)]
    """
    share = Shares(split_evenly(population, ranks // width), 1).slice_of(rank // width)
    return range(share.start, share.stop)
