"""The agreement of the ranks of a fleet on values, States, failures, and one message in every generation."""

import hashlib
import time
from collections.abc import Callable
from typing import Any, TypeVar, cast

import numpy as np
import torch

from germline.errors import BadInput, FleetLostError, MachineError
from germline.fleet.gradients import Scores
from germline.fleet.spmd.collective import Collective
from germline.fleet.spmd.shares import Shares
from germline.strategies import pack, unpack

T = TypeVar("T")
FAILURES = (BadInput, MachineError, RuntimeError)  # what a rank raises when another has failed; the last for all others
STATUS = np.dtype(
    [("failed", "<i4"), ("request", "<i4"), ("seconds", "<f8"), ("piece_seconds", "<f8"), ("digest", "S16")]
)


class Ranks:
    """The ranks that were started together, as one of them sees them.

    A generation is one message: each rank sends its scores and, with them, its status: whether it has failed or was
    asked to stop, how long a piece takes it, and a hash of its batch. Decisions that could differ between ranks are
    functions of that message.
    """

    def __init__(self, collective: Collective) -> None:
        self.collective, self.rank, self.size = collective, collective.rank, collective.size
        self.journal_rank, self.owns_journal = 0, collective.rank == 0
        self.status: Any = np.zeros(1, STATUS)  # what the others are to know with the next scores
        self.latest: tuple[float, int] | None = None  # seconds and requests to stop, as last announced

    def elect(self, has_journal: bool) -> bool:
        owners = self.collective.gather(torch.tensor([has_journal])).flatten().tolist()
        self.journal_rank = owners.index(True) if any(owners) else 0
        self.owns_journal = self.rank == self.journal_rank
        return any(owners)

    def broadcast(self, value: T) -> T:
        return cast(T, self.collective.say(value, self.journal_rank))

    def broadcast_state(self, state: Any) -> Any:
        tree, tensors = pack(state)
        device = next(iter(tensors.values())).device
        tree, tensors = self.collective.broadcast_arrays(tree, tensors, self.journal_rank, device)
        try:
            return unpack(state, tree, tensors)
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise FleetLostError(f"The State of rank {self.journal_rank} of the fleet cannot be read.") from error

    def on_journal_rank(self, work: Callable[[], T]) -> T:
        value = self.all_or_none(lambda: self.collective.run_with_heartbeat(work, self.journal_rank))
        return self.broadcast(cast(T, value))

    def all_or_none(self, work: Callable[[], T]) -> T:
        error: Exception | None = None
        try:
            value = work()
        except Exception as failure:
            error = failure
        self._raise_if_any_failed(error)
        return value

    def _raise_if_any_failed(self, error: Exception | None) -> None:
        said = None if error is None else [failure_kind(error), f"{error}" or type(error).__name__]
        failures = {rank: failure for rank, failure in enumerate(self.collective.exchange(said)) if failure is not None}
        for rank, failure in failures.items():  # the first decides for all
            if not (isinstance(failure, list) and len(failure) == 2 and failure[0] in range(len(FAILURES))):
                raise FleetLostError(f"What rank {rank} of the fleet sends cannot be read.")
            kind, sentence = failure
            if error is not None and failure_kind(error) == kind:
                raise error
            raise FAILURES[kind](f"Rank {rank}: {sentence}")

    def all(self, holds: bool) -> bool:
        return bool(self.collective.gather(torch.tensor([holds])).all())

    def agree(self, facts: Callable[[], dict[str, Any]]) -> None:
        digests = self.all_or_none(lambda: {name: digest(value) for name, value in facts().items()})
        by_rank = self.collective.exchange(digests)
        for rank, theirs in enumerate(by_rank):
            if not isinstance(theirs, dict):
                raise FleetLostError(f"What rank {rank} of the fleet sends cannot be read.")
            for name, value in theirs.items():
                if value != by_rank[0].get(name):
                    raise BadInput(f"Rank {rank} has another {name} than rank 0: all ranks must do the same work.")

    def announce(self, seconds: float, request: int, digest: str = "") -> None:
        self.status["seconds"], self.status["request"] = seconds, request
        self.status["digest"] = digest[:16].encode()

    def stop_status(self, seconds: float, request: int) -> tuple[float, int]:
        return self.latest or (seconds, 0)

    def share_work(self, shares: Shares, work: Callable[[slice], Scores]) -> Scores:
        """Do this rank's share of some work; return the scores of all ranks, and take in their statuses."""
        share, width = shares.slice_of(self.rank), shares.width * 4  # bytes
        scores, error, started = np.empty(0, np.float32), None, time.perf_counter()
        try:
            if share.stop > share.start:
                scores = work(share)
        except Exception as failure:  # the other ranks are waiting, and must know
            error = failure
        self.status["piece_seconds"] = (time.perf_counter() - started) / max(1, share.stop - share.start)
        self.status["failed"] = error is not None
        content = np.concatenate([self.status.view(np.uint8), scores.view(np.uint8)])
        lengths = [STATUS.itemsize + count * width for count in shares.counts]
        parts = [part.numpy() for part in self.collective.gather_parts(torch.from_numpy(content), lengths)]
        statuses = np.concatenate([part[: STATUS.itemsize] for part in parts]).view(STATUS)
        self._take_statuses(statuses, error)
        shares.rebalance(statuses["piece_seconds"].tolist())
        return np.concatenate([part[STATUS.itemsize :] for part in parts]).view(np.float32)

    def _take_statuses(self, statuses: Any, error: Exception | None) -> None:
        self.latest = float(statuses["seconds"][self.journal_rank]), int(statuses["request"].max())
        if statuses["failed"].any():
            self._raise_if_any_failed(error)
        others = np.flatnonzero(statuses["digest"] != statuses["digest"][0])
        if others.size:
            message = f"Rank {others[0]} was given another batch than rank 0"
            raise BadInput(f"{message}: all ranks must see the same examples.")


def failure_kind(error: Exception) -> int:
    """Return the number of an error's kind, by which other ranks raise the same."""
    return next((i for i, kind in enumerate(FAILURES) if isinstance(error, kind)), len(FAILURES) - 1)


def digest(value: Any) -> str:
    """Return a short hash of a value."""
    return hashlib.sha256(repr(value).encode()).hexdigest()[:16]
