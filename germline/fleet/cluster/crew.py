"""The workers of a cluster, and the State that each of them has.

A worker follows the run by its records, from which it makes the State itself, or is sent what candidates are made of,
whichever its measured rates make cheaper.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from germline.fleet.cluster.hub import Hub, RemoteWorker
from germline.fleet.cluster.messages import encode_state
from germline.strategies import AnyStrategy, GenerationInputs, GenerationResult, pack
from germline.strategies.state import ask_tensors

RECORD_BYTES = 1 << 24  # of records that are kept for workers that are behind


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
            self.hub.disconnect(worker)

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
        bandwidth = worker.bandwidth
        weights = count_bytes(ask_tensors(strategy.ask_arrays, state))
        return result.scores.nbytes / bandwidth + worker.tell_seconds < weights / bandwidth

    def send_records(self, worker: RemoteWorker, first: int, last: int) -> None:
        """Send the records of generations first to last - 1 to a worker."""
        results = [self.records[generation] for generation in range(first, last)]
        head = {"op": "tell", "records": [[result.generation, dict(result.values)] for result in results]}
        self.hub.send(worker, head, [result.scores.tobytes() for result in results])
        worker.version = str(last)

    def bring_up_to_date(self, worker: RemoteWorker, inputs: GenerationInputs, generation: int) -> None:
        """Send a worker what it needs to make the candidates of a generation: records, or arrays of the State."""
        if worker.version == inputs.version:
            return
        strategy, state, bandwidth = inputs.strategy, inputs.state, worker.bandwidth
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
        self.hub.send(worker, head, contents)
        worker.version, worker.has_whole_state = inputs.version, is_whole


def count_bytes(arrays: Mapping[str, torch.Tensor]) -> int:
    """Return the bytes of some arrays."""
    return sum(array.nbytes for array in arrays.values())
