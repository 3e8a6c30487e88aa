"""The SPMD fleet: one program in many processes.

Each rank scores a share of the blocks of members; shares go by measured speed. The scores travel, with what every rank
has to know about the others, in one message a generation; then the update is shared out as ``exchange`` says. Members,
blocks and sums are the same in every rank, so the weights do not depend on which rank did what.
"""

from functools import cached_property
from importlib.util import find_spec
from typing import Any, ClassVar, cast

import torch
from torch import Tensor

from germline.arguments import check_arguments
from germline.errors import BadInput
from germline.fleet.executor import Executor, find_device, time_update
from germline.fleet.gradients import Scores, average_scores, sum_in_order
from germline.fleet.protocol import Fleet, Inputs
from germline.fleet.spmd.collective import Backend, Collective, connect
from germline.fleet.spmd.exchange import Exchange, Mode, SharedUpdate, check_exchange
from germline.fleet.spmd.group import Ranks
from germline.fleet.spmd.launch import find_launch
from germline.fleet.spmd.members import RowUpdate, TeamMembers
from germline.fleet.spmd.shares import Shares, members_of_rank, split_evenly
from germline.noise import Field
from germline.objective import Batch
from germline.population import Evaluator
from germline.strategies import AnyStrategy, Candidates, GradientStrategy, MemberStrategy, SummedStrategy, Wire

TIMEOUT = 120.0  # seconds


class SPMD(Fleet):
    """One of many processes that were started together and do the same work.

    Args:
        exchange: How updates are shared out: ``"auto"``, ``"replay"``, ``"chromosome"``, ``"semi"`` or ``"central"``.
        device: ``"auto"``, ``"cpu"``, ``"cuda"``, ``"cuda:N"`` or ``"mps"``.
        workers: The number of threads of this process that share its blocks of members on a CPU.
        backend: ``"gloo"``, ``"nccl"`` (gloo and nccl) or ``"mpi"``; ``"auto"`` is mpi under mpirun if mpi4py is
            installed, else nccl on GPUs and gloo elsewhere.
        timeout: Seconds after which a rank that does not answer is given up; a generation must not take longer.
        send_weights: Whether all ranks begin with the weights of the rank that owns the journal.

    >>> SPMD(exchange="replay").group.size
    1
    """

    runs: ClassVar[int] = 0  # that this process has started

    @check_arguments
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
        if not timeout > 0:
            raise BadInput(f"The timeout must be above 0 seconds, not {timeout}.")
        self.exchange, self.device, self.backend, self.timeout = exchange, device, backend, timeout
        self.sends_weights, self.executor, self.launch = send_weights, Executor(workers), find_launch()
        self.shares: dict[tuple[int, int], Shares] = {}  # of blocks, and of slices
        self.counted = (0, 0)  # bytes sent and received at the last count
        self.run_number = 0  # in this program: there may be several runs, one after the other

    @property
    def launch_name(self) -> str | None:
        return None if self.launch.name is None else f"{self.launch.name} #{self.run_number}"

    @cached_property
    def group(self) -> Ranks:
        return Ranks(self.collective)

    @cached_property
    def collective(self) -> Collective:
        launch, on_gpu = self.launch, find_device(self.device).type == "cuda"
        backend: str = self.backend
        if backend == "auto":
            has_own_gpu = on_gpu and ":" not in self.device and launch.local_size <= torch.cuda.device_count()
            backend = "nccl" if has_own_gpu and torch.distributed.is_nccl_available() else "gloo"
            backend = "mpi" if launch.by == "mpirun" and find_spec("mpi4py") is not None else backend
        if backend != "mpi" and launch.size > 1 and launch.address is None:
            raise BadInput("Processes on several hosts meet at MASTER_ADDR: set it, or use the backend mpi.")
        if on_gpu:
            torch.cuda.set_device(self._find_gpu())
        return connect(launch, backend, self.timeout)

    def _find_gpu(self) -> torch.device:
        if ":" in self.device:
            return torch.device(self.device)
        if self.launch.by == "none" or torch.distributed.is_initialized():  # the program's own choice
            return torch.device("cuda", torch.cuda.current_device())
        return torch.device("cuda", self.launch.local_rank % torch.cuda.device_count())

    def find_device(self, default: torch.device | None = None) -> torch.device:
        device = find_device(self.device, default)
        return self._find_gpu() if device.type == "cuda" and device.index is None else device

    def adapt(self, strategy: AnyStrategy) -> AnyStrategy:
        check_exchange(self.exchange, strategy)
        gradient, summed = cast(GradientStrategy[Any], strategy), cast(SummedStrategy[Any], strategy)
        changes = {}
        if strategy.kind == "differentiate" and gradient.per_worker:
            changes["slices"] = self.group.size * gradient.slices
        if strategy.kind == "differentiate" and getattr(strategy, "samples_per_worker", False):
            changes["population"] = self.group.size * strategy.population
        if self.exchange == "semi" and summed.shards == 1:
            changes["shards"] = self.group.size
        return strategy.with_settings(**changes)

    def check(self, strategy: AnyStrategy) -> None:
        check_exchange(self.exchange, strategy)
        size, shards = self.group.size, cast(SummedStrategy[Any], strategy).shards if self.exchange == "semi" else 0
        if shards % size:
            message = f"Semi-updates by {size} ranks need a multiple of {size} shards, and the run has {shards}"
            raise BadInput(f"{message}: use another exchange or another number of ranks.")

    def start_run(self) -> None:
        SPMD.runs += 1
        self.run_number = SPMD.runs
        self.group.latest, self.shares = None, {}
        self.group.agree(lambda: {"exchange": self.exchange})

    def score(
        self, evaluator: Evaluator, candidates: Candidates, population: int, batch: Batch | None, inputs: Inputs = None
    ) -> Scores:
        block, columns = evaluator.plan.block, evaluator.columns

        def score_share(share: slice) -> Scores:
            return self.executor.score_blocks(evaluator, candidates, population, batch, share)

        shares = self._find_shares(-(-population // block), block * columns)
        return self.group.share_work(shares, score_share)[: population * columns]

    def gradient(
        self, evaluator: Evaluator, theta: Tensor, batch: Batch, wire: Wire, inputs: Inputs = None
    ) -> tuple[Scores, Tensor]:
        parts = batch.split(evaluator.plan.slices)
        shares, rows = self._find_shares(len(parts), 0), theta.new_empty(0, theta.numel())

        def differentiate(share: slice) -> Scores:
            nonlocal rows
            scores, rows = self.executor.gradients(evaluator, theta, parts[share], batch.size)
            return scores

        counts = list(shares.counts)  # before they are rebalanced
        scores = self.group.share_work(shares, differentiate)
        return average_scores(scores, parts), sum_in_order(rows, counts, self.collective, wire)

    def _find_shares(self, count: int, width: int) -> Shares:
        """Return which rank does which of ``count`` pieces, each of which gives ``width`` scores, or one."""
        if (count, width) not in self.shares:
            self.shares[count, width] = Shares(split_evenly(count, self.group.size), max(1, width))
        return self.shares[count, width]

    def share_update(self, strategy: AnyStrategy, state: Any, field: Field, *, maximize: bool) -> SharedUpdate:
        size = int(state.theta.numel())
        is_small = size < 8 * self.group.size  # there is too little to share out

        def make_update(mode: Mode) -> SharedUpdate:
            return SharedUpdate(mode, strategy, field, maximize, size, self.collective, self.group.journal_rank)

        if strategy.kind != "evolve" or (is_small and self.exchange in ("auto", "chromosome")):
            return make_update("replay")  # the sum of gradients is shared out already
        if self.exchange != "auto":
            return make_update(self.exchange)
        if self.group.size == 1 or not strategy.is_columnwise:
            return make_update("replay")
        seconds, replay, chromosome = [], make_update("replay"), make_update("chromosome")
        for update in (replay, chromosome):
            self.group.all(True)  # all ranks begin at once
            seconds.append(time_update(strategy, update.local_part(state), update.advance))
        slowest = self.collective.gather(torch.tensor(seconds)).amax(0).tolist()
        return chromosome if slowest[1] < slowest[0] else replay

    def share_members(self, strategy: MemberStrategy[Any], state: Any, field: Field, *, maximize: bool) -> TeamMembers:
        size, population = self.group.size, strategy.population
        width = strategy.workers_per_member if size % strategy.workers_per_member == 0 else 1
        if population < size // width:
            message = f"{population} members cannot train in {size} ranks, {width} for each"
            raise BadInput(f"{message}: start fewer ranks, or give a larger population or workers_per_member.")
        owned = [members_of_rank(rank, population, size, width) for rank in range(size)]
        update = RowUpdate(strategy, field, maximize, self.collective, owned, width, self.group.journal_rank)
        team = self.collective.team(width)
        return TeamMembers(update, update.members, team, self.executor, self.group.share_work)

    def count_bytes(self) -> tuple[int, int]:
        traffic, before = self.collective.traffic, self.counted
        now = self.counted = traffic.sent, traffic.received
        return now[0] - before[0], now[1] - before[1]
