"""The workers of a cluster, as the coordinator knows them: how fast they are, and which State each of them has.

A worker follows the run by its records, from which it makes the State itself, or is sent what candidates are made of,
whichever its measured rates make cheaper.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from germline.fleet.cluster.hub import Hub, Peer
from germline.fleet.cluster.messages import encode_state
from germline.strategies import AnyStrategy, GenerationInputs, GenerationResult, pack
from germline.strategies.state import ask_tensors

RECORD_BYTES = 1 << 24  # of records that are kept for workers that are behind
RECENT = 0.3  # weight of the latest measurement of a worker's speed
LONGEST = 1e6  # seconds that any work may take


@dataclass
class RemoteWorker:
    """What the coordinator knows of a worker.

    Attributes:
        version: The version of the State that it has; None before it has any.
        has_whole_state: Whether that is all of a State, so that it can follow by records.
        tell_seconds: Seconds that a record takes it.
        rates: Pieces per second, by kind of work.
        pieces: Pieces that it has done.
        checked: The generation in which its answers were last checked.
        last_useful: The generation in which an answer was last used.
        batch: The number of the batch that it was sent last, where batches are sent.
        strikes: How often in a row it had other weights than it was sent.
        pending: Job and chunk of each answer that is awaited.
    """

    peer: Peer
    version: str | None
    has_whole_state: bool
    tell_seconds: float
    rates: dict[str, float] = field(default_factory=dict)
    pieces: int = 0
    checked: int = -1
    last_useful: int = 0
    batch: int = -1
    busy_seconds: float = 0.0
    answers: int = 0
    strikes: int = 0
    pending: set[tuple[int, int]] = field(default_factory=set)

    @property
    def rate(self) -> float:
        return sum(self.rates.values())

    def is_useful(self, generation: int) -> bool:
        """Return whether an answer was used in the last generations."""
        return generation - self.last_useful <= 2

    def describe(self, generation: int, timeout: float) -> str:
        """Return the state of the worker in a few words."""
        if self.peer.stream.silent_seconds > timeout / 2:
            return "silent"
        if not self.is_useful(generation):
            return "too slow to be of use" if any(self.rates.values()) else "new"
        return "follows by records" if self.has_whole_state else "is sent weights"

    def measure(self, kind: str, pieces: int, seconds: Any, waited: float = 0.0) -> None:
        """Take in the speed of an answer, with the time of its way and of what the worker had to do before."""
        if isinstance(seconds, int | float) and 0 < seconds < LONGEST:
            self.busy_seconds += seconds
            self.answers += 1
            rate, before = pieces / max(seconds, waited, 1e-6), self.rates.get(kind)
            self.rates[kind] = rate if before is None else before + RECENT * (rate - before)


@dataclass
class Crew:
    """All workers, and the records that those that are behind may still need."""

    hub: Hub
    workers: dict[int, RemoteWorker] = field(default_factory=dict)
    records: dict[int, GenerationResult] = field(default_factory=dict)
    record_bytes: int = 0

    def forget_run(self) -> None:
        """Forget the records of a run; its workers connect again, for the next run."""
        self.records, self.record_bytes = {}, 0
        for worker in self.workers.values():
            self.hub.disconnect(worker.peer)

    def record(self, strategy: AnyStrategy, state: Any, result: GenerationResult, job: int) -> None:
        """Keep a result, and send it to the workers that follow by records and are up to date."""
        self.records[result.generation] = result
        self.record_bytes += result.scores.nbytes
        while self.record_bytes > RECORD_BYTES:
            self.record_bytes -= self.records.pop(min(self.records)).scores.nbytes
        for worker in self.workers.values():
            is_behind = any(number < job for number, _ in worker.pending)  # it is told when it has caught up
            if is_behind or not worker.has_whole_state or worker.version != str(result.generation):
                continue
            if self.should_follow(worker, strategy, state, result):
                self.send_records(worker, result.generation, result.generation + 1)

    def should_follow(self, worker: RemoteWorker, strategy: AnyStrategy, state: Any, result: GenerationResult) -> bool:
        """Return whether records are cheaper for a worker than what candidates are made of."""
        bandwidth = worker.peer.bandwidth
        weights = count_bytes(ask_tensors(strategy.ask_arrays, state))
        return result.scores.nbytes / bandwidth + worker.tell_seconds < weights / bandwidth

    def send_records(self, worker: RemoteWorker, first: int, last: int) -> None:
        """Send the records of generations first to last - 1 to a worker."""
        results = [self.records[generation] for generation in range(first, last)]
        head = {"op": "tell", "records": [[result.generation, dict(result.values)] for result in results]}
        self.hub.send(worker.peer, head, [result.scores.tobytes() for result in results])
        worker.version = str(last)

    def bring_up_to_date(self, worker: RemoteWorker, inputs: GenerationInputs, generation: int) -> None:
        """Send a worker what it needs to make the candidates of a generation: records, or arrays of the State."""
        if worker.version == inputs.version:
            return
        strategy, state, bandwidth = inputs.strategy, inputs.state, worker.peer.bandwidth
        asked = ask_tensors(strategy.ask_arrays, state)
        latest = self.records.get(generation - 1)
        is_whole = latest is not None and self.should_follow(worker, strategy, state, latest)
        known = worker.version if worker.has_whole_state and worker.version is not None else ""
        if known.isdigit() and inputs.version.isdigit() and strategy.kind == "evolve":
            missing = range(int(known), int(inputs.version))
            if missing and all(number in self.records for number in missing):
                width = self.records[missing[0]].scores.nbytes
                by_records = len(missing) * (width / bandwidth + worker.tell_seconds)
                by_weights = count_bytes(pack(state)[1] if is_whole else asked) / bandwidth
                if by_records < by_weights:
                    self.send_records(worker, missing.start, missing.stop)
                    return
        tree, layout, contents = encode_state(state)
        if not is_whole:
            chosen = [(about, content) for about, content in zip(layout, contents, strict=True) if about[0] in asked]
            layout, contents = [about for about, _ in chosen], [content for _, content in chosen]
        head = {"op": "state", "version": inputs.version, "tree": tree, "whole": is_whole, "layout": layout}
        head |= {"sha256": hashlib.sha256(b"".join(contents)).hexdigest()}
        self.hub.send(worker.peer, head, contents)
        worker.version, worker.has_whole_state = inputs.version, is_whole


def count_bytes(arrays: Mapping[str, torch.Tensor]) -> int:
    """Return the bytes of some arrays."""
    return sum(array.nbytes for array in arrays.values())
