"""Fleets of workers that come, go, stall and die: a coordinator with the run, and a cluster that scores for it.

The coordinator keeps the State and the journal; workers only score. Blocks of members are scheduled by speed and have
the same scores wherever they are computed. What the cluster runs on, Dask or Ray, is behind ``Backend``.
"""

import atexit
import hashlib
import json
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from germline.arguments import check_arguments
from germline.errors import BadInput
from germline.fleet import gradients
from germline.fleet.cluster.admission import Admission, Invitation
from germline.fleet.cluster.backend import Backend, Message, parse_address
from germline.fleet.cluster.crew import Crew
from germline.fleet.cluster.dask import DaskBackend, complete_address, load_dask, make_security
from germline.fleet.cluster.jobs import Coordinator, Job
from germline.fleet.cluster.keys import check_server, create_authority, security_options
from germline.fleet.cluster.members import RemoteMembers
from germline.fleet.cluster.messages import decode_scores, decode_slices, encode_batch
from germline.fleet.cluster.processes import LocalWorkers
from germline.fleet.cluster.ray import RayBackend
from germline.fleet.cluster.scheduler_process import SchedulerProcess
from germline.fleet.executor import Executor, find_device
from germline.fleet.gradients import Scores
from germline.fleet.local import LocalUpdate, Solo
from germline.fleet.protocol import Fleet, Inputs, Sample, Update
from germline.noise import Field
from germline.objective import Batch
from germline.population import Evaluator
from germline.recipes import FILE_MODULE, RECIPES, Recipe
from germline.strategies import AnyStrategy, Candidates, GenerationInputs, GenerationResult, MemberStrategy, Wire

TIMEOUT = 15.0  # seconds after which a silent worker is given up
LOOPBACK = ("127.0.0.1", "localhost", "::1")


class Cluster(Fleet):
    """A coordinator of the workers of a backend.

    Args:
        backend: Dask or Ray.
        device: The device of the coordinator, which checks samples of the workers' scores.
    """

    group: ClassVar[Solo] = Solo()

    def __init__(self, backend: Backend, device: str) -> None:
        self.backend, self.device, self.executor = backend, device, Executor()
        self.crew = Crew(backend)
        self.admission = Admission(self.crew)
        self.coordinator = Coordinator(self.crew, self.admission)
        self.block = 1  # members of a piece
        atexit.register(self.close)

    @property
    def is_idle(self) -> bool:
        return self.coordinator.is_open and not self.crew.workers

    @property
    def can_prefetch(self) -> bool:
        return self.coordinator.is_open

    def find_device(self, default: torch.device | None = None) -> torch.device:
        return find_device(self.device, default)

    def close(self, *, ended: bool = False) -> None:
        """Let all workers go: to wait for the run to go on or, where it has ended, for good."""
        atexit.unregister(self.close)
        if ended:
            for worker in self.admission.known.values():
                self.crew.send(worker, Message({"op": "end"}))
        self.admission.known.clear()
        self.backend.close()

    def start_run(self) -> None:
        self.coordinator.is_open, self.admission.invitation = False, None
        self.crew.forget_run()

    def admit(
        self, header: Mapping[str, Any], sample: Sample, batch: Batch | None = None, recipe: Recipe | None = None
    ) -> None:
        self.crew.say(f"waiting for workers at {self.backend.address}")
        run = hashlib.sha256(json.dumps(header, sort_keys=True).encode()).hexdigest()[:16]
        first = encode_batch(batch, 0) if batch is not None else None
        shipped = [] if recipe is None or header["recipe"] in RECIPES else pickle_recipe(recipe)
        self.admission.invite(Invitation(run, header, sample(), first, shipped))
        self.coordinator.is_open, self.coordinator.last_note = True, time.monotonic()

    def score(
        self, evaluator: Evaluator, candidates: Candidates, population: int, batch: Batch | None, inputs: Inputs = None
    ) -> Scores:
        if not self.coordinator.is_open or inputs is None:
            numbers = self.executor.score_blocks(evaluator, candidates, population, batch)
            return numbers[: population * evaluator.columns]
        job = self._score_job(evaluator, candidates, population, batch, inputs)
        return np.concatenate(self.coordinator.run_job(job))[: population * evaluator.columns]

    def prefetch(
        self,
        evaluator: Evaluator,
        candidates: Candidates,
        population: int,
        batch: Batch | None,
        inputs: GenerationInputs,
    ) -> None:
        self.coordinator.start_job(self._score_job(evaluator, candidates, population, batch, inputs))

    def _score_job(
        self,
        evaluator: Evaluator,
        candidates: Candidates,
        population: int,
        batch: Batch | None,
        inputs: GenerationInputs,
    ) -> Job:
        block, columns = evaluator.plan.block, evaluator.columns
        self.block = block

        def decode(first: int, last: int, arrays: Sequence[bytes]) -> Scores:
            return decode_scores(arrays[0], (last - first) * block * columns)

        def compute(first: int, last: int) -> Scores:
            return self.executor.score_blocks(evaluator, candidates, population, batch, slice(first, last))

        pieces = -(-population // block)
        return Job("scores", pieces, inputs, decode, compute, plan=evaluator.plan)

    def gradient(
        self, evaluator: Evaluator, theta: Tensor, batch: Batch, wire: Wire, inputs: Inputs = None
    ) -> tuple[Scores, Tensor]:
        if not self.coordinator.is_open or inputs is None:
            return self.executor.gradient(evaluator, theta, batch, wire)
        parts, size = batch.split(evaluator.plan.slices), theta.numel()

        def decode(first: int, last: int, arrays: Sequence[bytes]) -> tuple[Scores, Tensor]:
            return decode_slices(arrays, last - first, theta, wire)

        def compute(first: int, last: int) -> tuple[Scores, Tensor]:
            scores, rows = self.executor.gradients(evaluator, theta, parts[first:last], batch.size)
            return scores, gradients.encode_rows(rows, wire).cpu()

        def numbers(answer: tuple[Scores, Tensor]) -> Scores:
            lengths = gradients.decode_rows(answer[1], size, wire, theta.dtype).double().norm(dim=1)
            return np.stack([answer[0], lengths.float().numpy()], 1).ravel()  # piece by piece

        answers = self.coordinator.run_job(Job("gradient", len(parts), inputs, decode, compute, numbers))
        rows = torch.cat([rows for _, rows in answers]).to(theta.device)
        scores = np.concatenate([scores for scores, _ in answers])
        return gradients.average_scores(scores, parts), gradients.sum_encoded(rows, size, wire, theta.dtype)

    def share_update(self, strategy: AnyStrategy, state: Any, field: Field, *, maximize: bool) -> "RecordedUpdate":
        return RecordedUpdate(LocalUpdate(strategy, field, maximize), self.coordinator)

    def share_members(
        self, strategy: MemberStrategy[Any], state: Any, field: Field, *, maximize: bool
    ) -> RemoteMembers:
        local, members = LocalUpdate(strategy, field, maximize), range(strategy.population)
        return RemoteMembers(strategy, local, self.coordinator, self.executor, members)

    def confirm_scores(self, *, in_doubt: bool = False) -> None:
        self.coordinator.audit_all(is_whole=in_doubt)

    def go_back(self, generation: int) -> None:
        self.coordinator.go_back(generation)

    def count_bytes(self) -> tuple[int, int]:
        counts = self.crew.sent, self.crew.received
        self.crew.sent = self.crew.received = 0
        return counts


class Elastic(Cluster):
    """A cluster that this program starts: a Dask scheduler in a separate process, which any workers may join.

    Args:
        address: Where the scheduler listens, as HOST:PORT; port 0 is any free port.
        keys: A folder of certificates ('germline keys'). Without keys only this machine is listened to.
        device: The device of the coordinator, which checks samples of the workers' scores.
        workers: The number of workers to start here, for ``recipe``; others are started by 'germline worker'.
        recipe: The recipe of the workers that are started here: a name, a Python file, or module:function.
        strategy: Where they find a strategy that is not part of this package, as module:Class.
        timeout: Seconds after which a silent worker is given up.

    >>> fleet = Elastic()
    >>> fleet.backend.address.partition(":")[0]
    'tcp'
    >>> fleet.close()
    """

    @check_arguments
    def __init__(
        self,
        address: str = "127.0.0.1:0",
        *,
        keys: str | Path | None = None,
        device: str = "auto",
        workers: int = 0,
        recipe: str | None = None,
        strategy: str | None = None,
        timeout: float = TIMEOUT,
    ) -> None:
        if workers and recipe is None:
            raise BadInput("Workers here need to know the recipe: give recipe=, or start them with 'germline worker'.")
        load_dask()
        host, port = parse_address(address)
        self.private_keys = ExitStack()
        if workers and keys is None:  # otherwise every user of this machine could join
            keys = Path(self.private_keys.enter_context(tempfile.TemporaryDirectory(prefix="germline-keys-")), "keys")
            create_authority(keys)
        folder = Path(keys) if keys is not None else None
        if folder is None and host not in LOOPBACK:
            message = f"Without keys, every machine that reaches {host} could join"
            raise BadInput(f"{message}: give keys=DIR (--keys; see 'germline keys'), or listen on 127.0.0.1.")
        security = make_security(folder)
        if folder is not None:
            check_server(folder)
        try:
            scheduler = SchedulerProcess(host, port, security_options(folder), timeout)
        except OSError as error:
            message = f"Cannot listen on {host}:{port}: {error}"
            raise BadInput(f"{message}. Give Elastic (or --listen) another address.") from error
        super().__init__(DaskBackend(scheduler.address, security, scheduler), device)
        given = {"--recipe": recipe, "--device": device, "--keys": folder, "--strategy": strategy}
        self.processes = LocalWorkers(workers, scheduler.address, given)
        self.coordinator.check_processes = lambda: self.processes.check(has_workers=bool(self.crew.workers))

    def close(self, *, ended: bool = False) -> None:
        super().close(ended=ended or bool(self.processes.processes))
        self.processes.close()
        self.private_keys.close()


class Dask(Cluster):
    """The workers of a Dask cluster that is running already.

    Args:
        target: The address of its scheduler, such as tls://HOST:8786, or a ``Client`` or cluster of Dask's.
        keys: A folder of certificates ('germline keys'), for an address that begins with tls.
        device: The device of the coordinator, which checks samples of the workers' scores.

    >>> from distributed import LocalCluster
    >>> with LocalCluster(n_workers=0, processes=False, dashboard_address=":0") as cluster:
    ...     Dask(cluster).close()
    """

    @check_arguments
    def __init__(self, target: Any, *, keys: str | Path | None = None, device: str = "auto") -> None:
        if isinstance(target, str):
            security = make_security(Path(keys) if keys is not None else None)
            address = complete_address(target, has_keys=keys is not None)
        else:
            is_client = isinstance(target, load_dask().Client)
            if not is_client and not (hasattr(target, "scheduler_address") and hasattr(target, "security")):
                kinds = "the address of a scheduler, a Client or a cluster of Dask's"
                raise BadInput(f"The target of gl.Dask is {kinds}, not {type(target).__name__}.")
            address = target.scheduler.address if is_client else target.scheduler_address
            security = target.security
        super().__init__(DaskBackend(address, security), device)


class Ray(Cluster):
    """The nodes of a Ray cluster that is running already; one worker for each GPU, or for each node without one.

    Args:
        address: The address of its head, as HOST:PORT; by default the cluster of this machine.
        device: The device of the coordinator, which checks samples of the workers' scores.

    >>> Ray("127.0.0.1:1")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    germline.errors.BadInput: Cannot join the Ray cluster at 127.0.0.1:1: ...
    """

    @check_arguments
    def __init__(self, address: str | None = None, *, device: str = "auto") -> None:
        super().__init__(RayBackend(address), device)


@dataclass(frozen=True)
class RecordedUpdate(Update):
    """An update by the coordinator, which workers that follow by records make for themselves meanwhile."""

    local: LocalUpdate
    coordinator: Coordinator

    def advance(self, state: Any, result: GenerationResult) -> Any:
        coordinator = self.coordinator
        coordinator.crew.record(self.local.strategy, state, result, coordinator.job_number)
        coordinator.generation = result.generation + 1
        return self.local.advance(state, result)


def pickle_recipe(recipe: Recipe) -> list[bytes]:
    """Return a recipe for workers that were given none, or nothing if it cannot be pickled."""
    import cloudpickle

    try:
        for name, module in list(sys.modules.items()):
            if name.startswith(FILE_MODULE):  # workers do not have the file
                cloudpickle.register_pickle_by_value(module)
        return [cloudpickle.dumps(recipe)]
    except Exception:  # whatever the recipe is made of; a worker that needs it says so
        return []
