"""Equal machines that start together: one program in many processes, by torchrun, srun, mpirun or alone.

Each process scores a share of the blocks of members; shares go by measured speed. The scores travel, with what every
process has to know about the others, in one message a generation; then the update is shared out as ``exchange`` says.
Members, blocks and sums are the same whoever has them, so the weights do not depend on who did what.
"""

import dataclasses
import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from importlib.util import find_spec
from typing import Any, ClassVar, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from germline.errors import BadInput
from germline.fleet.collective import Backend, Collective, connect
from germline.fleet.exchange import Exchange, Mode, Update, refuse
from germline.fleet.launch import Launch, launched
from germline.fleet.local import Local, mean_score, weighed
from germline.fleet.rows import Rows
from germline.fleet.wire import sum_in_order
from germline.noise import Field
from germline.objective import Batch
from germline.population import Evaluator
from germline.strategies.base import AnyStrategy, Candidates, GenerationInputs, GenerationResult, Wire, pack, unpack
from germline.strategies.settings import check_choice

T = TypeVar("T")
TIMEOUT = 120.0  # seconds
RECENT = 0.3  # the weight of the latest generation in the measured speed of a process
WORTH = 0.9  # of its time must be left for a new deal
STATUS = np.dtype(
    [("failed", "<i4"), ("interrupted", "<i4"), ("seconds", "<f8"), ("piece_seconds", "<f8"), ("digest", "S16")]
)


class SPMD(Local):
    """One of many processes that were started together and do the same work.

    ``exchange`` is auto, replay, chromosome, semi or central. ``backend`` is gloo, nccl (gloo and nccl) or mpi; auto is
    mpi under mpirun if mpi4py is there, else nccl on cards and gloo elsewhere. A process that does not answer within
    ``timeout`` seconds is given up; a generation must not take longer. With ``send_weights`` all begin with rank 0's.

    >>> SPMD(exchange="replay").size
    1
    """

    runs: ClassVar[int] = 0  # that this process has begun

    def __init__(
        self,
        exchange: Exchange = "auto",
        *,
        device: str = "auto",
        workers: int | None = None,
        backend: Backend = "auto",
        timeout: float = TIMEOUT,
        send_weights: bool = False,
    ) -> None:
        super().__init__(device, workers)
        check_choice("exchange", exchange, ("auto", "replay", "chromosome", "semi", "central"))
        check_choice("backend", backend, ("auto", "gloo", "nccl", "mpi"))
        if not timeout > 0:
            raise BadInput(f"The timeout must be above 0 seconds, not {timeout}.")
        self.exchange, self.backend, self.timeout = exchange, backend, timeout
        self.weights_are_sent = send_weights
        self.kept_by = 0  # the rank that keeps the journal
        self.status: Any = np.zeros(1, STATUS)  # what the others are to hear with the next scores
        self.last: tuple[float, bool] | None = None  # what was last heard
        self.deals: dict[tuple[int, int], Deal] = {}  # of blocks, and of slices
        self.team: Collective  # the processes that share the work of a member, where members learn
        self.counted = (0, 0)
        self.number = 0  # of the run in this program: there may be several, one after the other

    @property
    def rank(self) -> int:
        return self.collective.rank

    @property
    def size(self) -> int:
        return self.collective.size

    @property
    def keeper(self) -> bool:
        return self.rank == self.kept_by

    @property
    def launch(self) -> str | None:
        return None if self.launched.name is None else f"{self.launched.name} #{self.number}"

    @property
    def sends_weights(self) -> bool:
        return self.weights_are_sent

    @cached_property
    def launched(self) -> Launch:
        return launched()

    @cached_property
    def collective(self) -> Collective:
        launch = self.launched
        on_card = super().place().type == "cuda"
        backend: str = self.backend
        if backend == "auto":
            own_card = on_card and ":" not in self.device and launch.local_size <= torch.cuda.device_count()
            backend = "nccl" if own_card and torch.distributed.is_nccl_available() else "gloo"
            backend = "mpi" if launch.by == "mpirun" and find_spec("mpi4py") is not None else backend
        if backend != "mpi" and launch.size > 1 and launch.address is None:
            raise BadInput("Processes on several hosts meet at MASTER_ADDR: set it, or use the backend mpi.")
        if on_card:
            torch.cuda.set_device(self._card())
        return connect(launch, backend, self.timeout)

    def _card(self) -> torch.device:
        if ":" in self.device:
            return torch.device(self.device)
        if self.launched.by == "nobody" or torch.distributed.is_initialized():  # the program's own choice
            return torch.device("cuda", torch.cuda.current_device())
        return torch.device("cuda", self.launched.local_rank % torch.cuda.device_count())

    def place(self, usual: torch.device | None = None) -> torch.device:
        device = super().place(usual)
        return self._card() if device.type == "cuda" and device.index is None else device

    # Agreement

    def together(self, work: Callable[[], T]) -> T:
        error: Exception | None = None
        try:
            found = work()
        except Exception as failure:
            error = failure
        self._end_if_any_failed(error)
        return found

    def _end_if_any_failed(self, error: Exception | None) -> None:
        said = None if error is None else [isinstance(error, BadInput), f"{error}" or type(error).__name__]
        failures = {rank: heard for rank, heard in enumerate(self.collective.exchange(said)) if heard is not None}
        for rank, (bad_input, sentence) in failures.items():  # the first decides for all
            if error is not None and isinstance(error, BadInput) == bad_input:
                raise error
            raise (BadInput if bad_input else RuntimeError)(f"Rank {rank}: {sentence}")

    def join(self, facts: Callable[[], dict[str, Any]]) -> None:
        own = {"exchange": self.exchange}
        found = self.together(lambda: {name: digest_of(value) for name, value in (facts() | own).items()})
        everybody = self.collective.exchange(found)
        for rank, theirs in enumerate(everybody):
            for name, value in theirs.items():
                if value != everybody[0].get(name):
                    raise BadInput(
                        f"Rank {rank} has another {name} than rank 0: all processes must be about the same work."
                    )

    def new_run(self) -> None:
        SPMD.runs += 1
        self.number = SPMD.runs
        self.last, self.deals = None, {}

    def told(self, value: T) -> T:
        found: T = self.collective.say(value if self.keeper else None, self.kept_by)
        return found

    def attended(self, work: Callable[[], T]) -> T:
        found: Any = self.collective.attend(work, self.kept_by)
        return self.told(found)  # type: ignore[no-any-return]

    def all(self, holds: bool) -> bool:
        return bool(self.collective.gather(torch.tensor([holds])).all())

    def elect(self, has_journal: bool) -> bool:
        having = self.collective.gather(torch.tensor([has_journal])).flatten().tolist()
        self.kept_by = having.index(True) if any(having) else 0
        return any(having)

    def begin(self, seconds: float, interrupted: bool, digest: str = "") -> None:
        self.status["seconds"], self.status["interrupted"] = seconds, interrupted
        self.status["digest"] = digest[:16].encode()

    def heard(self, seconds: float, interrupted: bool) -> tuple[float, bool]:
        return self.last or (seconds, False)

    def traffic(self) -> tuple[int, int]:
        now, before = (self.collective.traffic.sent, self.collective.traffic.received), self.counted
        self.counted = now
        return now[0] - before[0], now[1] - before[1]

    # Scores

    def evaluate(
        self,
        evaluator: Evaluator,
        candidates: Candidates,
        population: int,
        batch: Batch | None,
        origin: GenerationInputs | None = None,
    ) -> NDArray[np.float32]:
        """Each process scores its share of the blocks; all have all scores."""
        block = evaluator.plan.block

        def score(share: slice) -> NDArray[np.float32]:
            return self.score(evaluator, candidates, population, batch, share)

        return self._shared_out(self._deal(-(-population // block), block), score)[:population]

    def gradient(
        self,
        evaluator: Evaluator,
        theta: torch.Tensor,
        batch: Batch,
        wire: Wire,
        origin: GenerationInputs | None = None,
    ) -> tuple[NDArray[np.float32], torch.Tensor]:
        """Each process has the gradients of its share of the slices; all have the sum."""
        parts = batch.split(evaluator.plan.slices)
        dealt, rows = self._deal(len(parts), 0), theta.new_empty(0, theta.numel())

        def differentiate(share: slice) -> NDArray[np.float32]:
            nonlocal rows
            scores, rows = self.differentiate(evaluator, theta, parts[share], batch.size)
            return scores

        counts = list(dealt.shares)  # as they are now
        scores = self._shared_out(dealt, differentiate)
        return mean_score(scores, parts), sum_in_order(rows, counts, self.collective, wire)

    def own(self, population: int) -> range:
        return members_of(self.rank, population, self.size, self.team.size)

    def lesson(self, evaluator: Evaluator, theta: torch.Tensor, batch: Batch) -> torch.Tensor:
        if self.team.size == 1:
            return super().lesson(evaluator, theta, batch)
        parts = batch.split(evaluator.plan.slices)
        dealt = Deal(deal(len(parts), [1.0] * self.team.size), 1)
        rows = [weighed(evaluator, theta, part, batch.size)[1] for part in parts[dealt.share(self.team.rank)]]
        mine = torch.stack(rows) if rows else theta.new_empty(0, theta.numel())
        return sum_in_order(mine, list(dealt.shares), self.team)

    def rear(
        self,
        work: Callable[[int], tuple[Any, Any, float]],
        population: int,
        device: torch.device,
        origin: GenerationInputs | None = None,
    ) -> tuple[list[tuple[Any, Any, float]], NDArray[np.float32]]:
        found: list[tuple[Any, Any, float]] = []
        owned = [members_of(r, population, self.size, self.team.size) for r in range(self.size)]

        def learn(share: slice) -> NDArray[np.float32]:
            threads = None if self.team.size == 1 else 1  # a team goes through its members in one order
            found.extend(self.reared(work, share.stop - share.start, device, threads))
            return np.array([score for _, _, score in found], np.float32)

        scores = self._shared_out(Deal(tuple(map(len, owned)), 1), learn)  # as often as a team has processes
        places = np.concatenate([np.asarray(members) for members in owned])
        return found, scores[[int(np.flatnonzero(places == member)[0]) for member in range(population)]]

    def _deal(self, count: int, width: int) -> "Deal":
        """Who does which of so many pieces of work of one kind, each of which gives so many scores, or one."""
        if (count, width) not in self.deals:
            self.deals[count, width] = Deal(deal(count, [1.0] * self.size), max(1, width))
        return self.deals[count, width]

    def _shared_out(self, dealt: "Deal", work: Callable[[slice], NDArray[np.float32]]) -> NDArray[np.float32]:
        """Each process does its share of the work; all have all that came of it, and hear what else others say."""
        share, width = dealt.share(self.rank), dealt.width
        scores, error, began = np.empty(0, np.float32), None, time.perf_counter()
        try:
            if share.stop > share.start:
                scores = work(share)
        except Exception as failure:  # all must hear of it: they are waiting
            error = failure
        self.status["piece_seconds"] = (time.perf_counter() - began) / max(1, share.stop - share.start)
        self.status["failed"] = error is not None
        room = max(dealt.shares) * width * 4
        content = np.zeros(room + STATUS.itemsize, np.uint8)
        if error is None:
            content[: scores.nbytes] = scores.view(np.uint8)
        content[room:] = self.status.view(np.uint8)
        rows = self.collective.gather(torch.from_numpy(content)).numpy()
        statuses = np.ascontiguousarray(rows[:, room:]).view(STATUS)[:, 0]
        self._heed(statuses, error)
        parts = [row[: 4 * width * n].copy().view(np.float32) for row, n in zip(rows, dealt.shares, strict=True)]
        dealt.heed(statuses["piece_seconds"].tolist())
        return np.concatenate(parts)

    def _heed(self, statuses: Any, error: Exception | None) -> None:
        """What the others have said beside their scores."""
        self.last = float(statuses["seconds"][self.kept_by]), bool(statuses["interrupted"].any())
        if statuses["failed"].any():
            self._end_if_any_failed(error)
        others = np.flatnonzero(statuses["digest"] != statuses["digest"][0])
        if others.size:
            raise BadInput(f"Rank {others[0]} was given another batch than rank 0: all must see the same examples.")

    # The update

    def adapted(self, strategy: AnyStrategy) -> AnyStrategy:
        refuse(self.exchange, strategy)
        if getattr(strategy, "per_worker", False):
            return dataclasses.replace(strategy, slices=self.size * strategy.slices)  # type: ignore[type-var, attr-defined]
        if self.exchange != "semi":
            return strategy
        shards = strategy.shards if strategy.shards > 1 else self.size  # type: ignore[attr-defined]
        if shards % self.size:
            raise BadInput(f"{shards} shards cannot be shared out evenly among {self.size} processes.")
        return dataclasses.replace(strategy, shards=shards)  # type: ignore[type-var]

    def divide(self, strategy: AnyStrategy, state: Any, field: Field, *, maximize: bool) -> tuple[Any, Any]:
        if getattr(strategy, "rears", False):
            width: int = strategy.workers_per_member if self.size % strategy.workers_per_member == 0 else 1  # type: ignore[attr-defined]
            if strategy.population < self.size // width:
                message = f"{strategy.population} members cannot learn in {self.size} processes, {width} for each"
                raise BadInput(f"{message}: start fewer, or give a larger --population or more workers_per_member.")
            self.team = self.collective.team(width)
            owned = [members_of(r, strategy.population, self.size, width) for r in range(self.size)]
            rows = Rows(self.collective, owned, width, self.kept_by)
            return rows, rows.part(strategy, state)
        size = int(state.theta.numel())
        if size < 8 * self.size and self.exchange in ("auto", "chromosome"):
            mode: Mode = "replay"  # there is nothing to share out
        elif strategy.needs_gradient:
            mode = "replay"  # the sum of the gradients is shared out already
        elif self.exchange == "auto":
            mode = self._faster(strategy, state, field, maximize=maximize)
        else:
            mode = self.exchange
        update = Update(mode, size, self.collective, self.kept_by)
        return update, update.part(strategy, state)

    def _faster(self, strategy: AnyStrategy, state: Any, field: Field, *, maximize: bool) -> Mode:
        """Replay or chromosome, by trying one update of each on scores that mean nothing."""
        if self.size == 1:
            return "replay"
        try:
            refuse("chromosome", strategy)
        except BadInput:
            return "replay"
        scores = np.arange(strategy.population, dtype=np.float32)
        seconds = {}
        modes: tuple[Mode, ...] = ("replay", "chromosome")
        values = strategy.values(state, 0)
        for mode in modes:
            update = Update(mode, int(state.theta.numel()), self.collective)
            mine = update.part(strategy, state)
            for _ in range(2):  # the first time kernels are compiled
                self.all(True)  # all begin at once
                began = time.perf_counter()
                update(strategy, mine, GenerationResult(0, scores, values), field, maximize=maximize).theta.cpu()
                seconds[mode] = time.perf_counter() - began
        slowest = self.collective.gather(torch.tensor([seconds[mode] for mode in modes])).amax(0).tolist()
        return "chromosome" if slowest[1] < slowest[0] else "replay"

    def advance(
        self, update: Any, strategy: AnyStrategy, state: Any, told: GenerationResult, field: Field, *, maximize: bool
    ) -> Any:
        return update(strategy, state, told, field, maximize=maximize)

    def whole(self, update: Any, strategy: AnyStrategy, state: Any) -> Any:
        return state if update is None else update.whole(strategy, state)

    def shared(self, state: Any) -> Any:
        """The State of the process that keeps the journal, with all its arrays."""
        tree, tensors = pack(state)
        shapes = {name: [list(x.shape), str(x.dtype).removeprefix("torch.")] for name, x in tensors.items()}
        tree, shapes = self.told([tree, shapes])
        device = next(iter(tensors.values())).device
        arrays = {}
        for name, (shape, kind) in shapes.items():
            empty = torch.empty(shape, dtype=getattr(torch, kind), device=device)
            here = tensors[name].detach().to(device).contiguous() if self.keeper else empty
            arrays[name] = self.collective.broadcast(here, self.kept_by)
        return unpack(state, tree, arrays)


@dataclass
class Deal:
    """How pieces of work are shared out: by the seconds that each process takes for one."""

    shares: tuple[int, ...]  # pieces of each process
    width: int  # scores that a piece gives
    seconds: list[float] = field(default_factory=list)  # of each process; none before there is anything measured

    def share(self, rank: int) -> slice:
        first = sum(self.shares[:rank])
        return slice(first, first + self.shares[rank])

    def heed(self, measured: list[float]) -> None:
        """Deals anew where that is worth it."""
        before = self.seconds or measured
        slowest = max(seconds for seconds, n in zip(measured, self.shares, strict=True) if n)
        before = [old if n else slowest for old, n in zip(before, self.shares, strict=True)]
        new = [seconds if n else slowest for seconds, n in zip(measured, self.shares, strict=True)]
        self.seconds = [old + RECENT * (seconds - old) for old, seconds in zip(before, new, strict=True)]
        better = deal(sum(self.shares), self.seconds)
        if longest(better, self.seconds) < WORTH * longest(self.shares, self.seconds):
            self.shares = better


def deal(pieces: int, seconds: list[float]) -> tuple[int, ...]:
    """How many pieces each process has, by the seconds that it takes for one: each the one that it would end first.

    >>> deal(10, [1.0, 1.0, 3.0])
    (5, 4, 1)
    """
    shares = [0] * len(seconds)
    for _ in range(pieces):
        ends = [(n + 1) * each for n, each in zip(shares, seconds, strict=True)]
        shares[ends.index(min(ends))] += 1
    return tuple(shares)


def members_of(rank: int, population: int, processes: int, width: int) -> range:
    """The members that learn in a process, where so many neighbors share the work of each.

    >>> [members_of(rank, 3, 4, 2) for rank in range(4)]
    [range(0, 2), range(0, 2), range(2, 3), range(2, 3)]
    """
    share = Deal(deal(population, [1.0] * (processes // width)), 1).share(rank // width)
    return range(share.start, share.stop)


def longest(shares: tuple[int, ...], seconds: list[float]) -> float:
    return max(n * each for n, each in zip(shares, seconds, strict=True))


def digest_of(value: Any) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()[:16]
