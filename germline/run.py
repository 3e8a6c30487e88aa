"""A run in progress: its core, its data, its journal, and what is known of it so far."""

import copy
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from germline.clock import clock
from germline.core import Core
from germline.errors import BadInput
from germline.fleet.local import single_threaded_torch
from germline.genome import Genome, theta_sha256
from germline.journal import PROBE, Journal, Record, write_whole
from germline.objective import Batch, Batches, Data
from germline.optim.shaping import goodness
from germline.population import Evaluator, Plan, refresh_statistics
from germline.recipes.recipe import Recipe

ENOUGH = 10  # diagnoses before there is any advice
FIRST_ORDER = 2  # numbers of members' own orders of the examples begin here
REMEMBERED, LATE = 4096, 256  # generations that are kept in memory, and of these the last ones without a gap
STATISTICS_BATCHES = 8  # batches from which running statistics are re-estimated

Row = dict[str, Any]  # one generation, as people see it


@dataclass
class Run:
    """A run in progress: a core, its data and its journal."""

    core: Core
    recipe: Recipe | None  # none where the journal is only replayed
    journal: Journal | None  # none in a process of a fleet that does not keep it
    path: Path  # of the run
    splits: dict[str, Data]
    batches: Batches | None
    generation: int = 0
    seconds: float = 0.0
    samples: int = 0
    evaluations: int = 0
    sent: int = 0  # bytes, by this process
    received: int = 0
    metrics: dict[str, float] = field(default_factory=dict)
    history: list[Row] = field(default_factory=list)  # of late every generation, before that fewer and fewer
    measured: tuple[str, ...] = ("dev", "test")  # the splits that are scored on the way
    interrupted: bool = False
    ahead: Batch | None = None  # the batch of the next generation, if a card has begun with it
    owed: float = 0.0  # seconds of writing the last generation, which the next record counts
    committed: float = 0.0  # when
    peak: int = 0  # bytes of a card that were in use at once, in steps that were measured

    def step(self, patience: float = 0.0) -> Row:
        """One generation; when this returns it is on disk, or, with patience, a few of them so many seconds later."""
        assert self.recipe is not None
        began = time.perf_counter()
        core, generation, fleet = self.core, self.generation, self.core.fleet
        fleet.begin(self.seconds, self.interrupted)
        batch = self.batch(generation) if self.ahead is None else self.ahead
        core.prepare(batch)
        plan = core.plan
        on_dev = self.on_dev(generation)
        clock.pop_seconds()
        if core.rears:
            result = core.rear(generation, self.lessons(generation), self.exam)
        else:
            result = core.evaluate(generation, batch, on_dev)
        before = core.state
        with clock("update"):
            core.advance(result)
        resources = self.resources() if core.strategy.needs_gradient or core.rears else {}
        self.generation += 1
        self.look_ahead()
        looked_at = self.generation % self.recipe.evaluate_every == 0
        metrics = fleet.attended(lambda: self.measure(batch)) if looked_at else {}
        diagnostics = core.diagnose(result, before) if looked_at and fleet.keeper else {}
        diagnostics |= core.compare(result) if core.strategy.needs_gradient and fleet.keeper else {}
        diagnostics |= resources
        ended = time.perf_counter()
        seconds = ended - began + self.owed
        digest = theta_sha256(core.state.theta) if core.strategy.needs_gradient else None
        samples = self.lesson_samples() if core.rears else core.passes(result) * (batch.size if batch else 1)
        side: dict[str, Any] = {"seconds": round(seconds, 6), "samples": samples, "bytes": fleet.traffic()}
        side |= {"metrics": metrics} if metrics else {}
        side |= {"diagnostics": diagnostics} if diagnostics else {}
        side |= {"evaluation": asdict(core.plan)} if core.plan is not None and core.plan != plan else {}
        if self.journal is not None:
            self.journal.append(result, digest, side)
        if self.generation % self.recipe.snapshot_every == 0:
            self.save()
        if time.monotonic() - self.committed >= patience:
            self.commit()
        self.owed = time.perf_counter() - ended
        return self.note(Record(result, digest, side))

    def resources(self) -> dict[str, float]:
        """What a step took of this process: seconds of its parts, which a card does not tell apart, and memory."""
        if self.core.device.type == "cuda":
            held = torch.cuda.max_memory_allocated()
            self.peak = max(self.peak, held)
            torch.cuda.reset_peak_memory_stats()
            return {"memory": held}
        spent = {f"{part}_seconds": round(seconds, 6) for part, seconds in sorted(clock.pop_seconds().items())}
        return spent | ({"memory": held} if (held := resident_memory()) else {})

    def commit(self) -> None:
        """Has all generations on disk."""
        if self.journal is not None:
            self.journal.commit()
        self.committed = time.monotonic()

    @property
    def kept(self) -> Journal:
        """The journal, in the process that keeps it."""
        assert self.journal is not None
        return self.journal

    def save(self) -> Any:
        """A snapshot of the State, to which every process gives what it has of it."""
        state = self.core.whole()
        if self.journal is not None:
            self.journal.save(state, self.generation)
        return state

    def look_ahead(self) -> None:
        """Has a card begin the next generation, if there will be one, while this one is written to disk."""
        self.ahead = None
        if self.core.goes_ahead:
            with suppress(Exception):  # what is wrong with the next generation is said when it is its turn
                self.ahead = self.batch(self.generation)
                self.core.begin(self.generation, self.ahead)

    def note(self, record: Record) -> Row:
        """Adds a record to what is known of the run."""
        self.account(record)
        if "evaluation" in record.side:  # from here on members were evaluated in another way
            self.core.adopt(Plan(**record.side["evaluation"]))
        self.metrics |= record.side.get("metrics", {})
        self.evaluations += record.result.scores.size
        row = describe(record, self.core.objective.maximize) | {
            "total_seconds": self.seconds,
            "total_samples": self.samples,
        }
        self.history.append(row)
        if len(self.history) > REMEMBERED:
            self.history[:-LATE] = self.history[:-LATE:2]
        return row

    def rows(self) -> list[Row]:
        """Every generation, where this process has the journal."""
        return rows_of(self.journal) if self.journal is not None else self.history

    def account(self, record: Record) -> None:
        self.seconds += record.side["seconds"]
        self.samples += record.side["samples"]
        self.sent += record.side["bytes"][0]
        self.received += record.side["bytes"][1]

    def batch(self, generation: int) -> Batch | None:
        return self.batches.batch(generation, self.core.device) if self.batches is not None else None

    @property
    def batch_size(self) -> int:
        return self.batches.batch_size if self.batches is not None else 1

    def lessons(self, generation: int) -> Callable[[int], Iterator[Batch]]:
        """The batches from which a member learns in a generation, in an order of its own."""
        if self.batches is None:
            raise BadInput(f"The strategy {self.core.strategy.name} needs data and a loss of (output, target).")
        batches = self.batches

        def of(member: int) -> Iterator[Batch]:
            own, steps = replace(batches, member=FIRST_ORDER + member, orders={}), self.lesson_steps()
            return (own.batch(step, self.core.device) for step in range(generation * steps, (generation + 1) * steps))

        return of

    def lesson_steps(self) -> int:
        assert self.batches is not None
        strategy: Any = self.core.strategy
        return int(strategy.epochs) * max(1, self.batches.data.length // self.batches.batch_size)

    def lesson_samples(self) -> int:
        assert self.batches is not None
        learned = 3 * self.lesson_steps() * self.batches.batch_size
        return self.core.strategy.population * (learned + self.splits.get("dev", self.splits["train"]).length)

    def exam(self, evaluator: Evaluator, theta: torch.Tensor) -> float:
        """A member's score on all of dev, or on the training set where there is no dev."""
        data = self.splits.get("dev", self.splits["train"])
        with torch.no_grad():
            scored = [(evaluator.score_at(theta, batch), batch.size) for batch in data.in_order(self.core.device)]
        return math.fsum(float(score) * size for score, size in scored) / data.length

    def on_dev(self, generation: int) -> Batch | None:
        """The batch on which samples around a gradient are scored, where it is not the one of the gradient."""
        if getattr(self.core.strategy, "select_on", "batch") == "batch" or self.batches is None:
            return None
        if "dev" not in self.splits:
            raise BadInput("There is no dev set to select samples on: give one, or leave select_on=dev out.")
        dev = self.splits["dev"]
        size = min(self.batches.batch_size, dev.length)
        return Batches(dev, size, self.batches.seed).batch(generation, self.core.device)

    def measure(self, batch: Batch | None) -> dict[str, float]:
        """The center's score on the batch at hand, and the metrics of dev and test."""
        name = "score" if self.core.objective.maximize else "loss"
        with torch.no_grad(), single_threaded_torch():  # a metric may end the run: it must not depend on threads
            model = self.model()
            found = {f"center_{name}": float(self.core.objective.score(model, batch))}
            for split in self.measured:
                if split in self.splits:
                    values = self.core.objective.evaluate(model, self.splits[split], self.core.device)
                    found |= {f"{split}_{key}": value for key, value in values.items()}
        return found

    def model(self) -> nn.Module:
        """The center as a module, in evaluation mode."""
        model = copy.deepcopy(self.core.module)  # what it writes to its buffers is no member's concern
        assert model is not None
        self.core.genome.write(self.core.state.theta, model)
        model.to(self.core.device).eval()
        if self.batches is not None:
            refresh_statistics(model, (self.batches.batch(g, self.core.device) for g in range(STATISTICS_BATCHES)))
        return model

    def finish(self, stopped_by: str) -> dict[str, Any]:
        """What the run came to; with the final snapshot and the exported model on disk."""
        core = self.core
        self.seconds, self.owed = self.seconds + self.owed, 0.0
        state = self.save()
        if core.rears:  # of a fleet not all have the best
            core.state = replace(core.state, theta=state.theta)
        return core.fleet.attended(lambda: self.concluded(stopped_by))

    def concluded(self, stopped_by: str) -> dict[str, Any]:
        core = self.core
        self.measured = ("train", "dev", "test") if not core.objective.of_model else ("dev", "test")
        self.metrics |= self.measure(self.batch(max(self.generation - 1, 0)))
        export(self.model(), self.path / "model.safetensors")
        on_gpu = core.device.type == "cuda"
        summary = {
            "run": str(self.path),
            "recipe": self.kept.header["recipe"],
            "strategy": core.strategy.name,
            "generations": self.generation,
            "evaluations": self.evaluations,
            "samples": self.samples,
            "seconds": round(self.seconds, 3),
            "metrics": {k: round(v, 6) if math.isfinite(v) else None for k, v in sorted(self.metrics.items())},
            "theta_sha256": theta_sha256(core.state.theta),
            "bytes_sent": self.sent,
            "bytes_received": self.received,
            "peak_memory_bytes": max(self.peak, torch.cuda.max_memory_allocated()) if on_gpu else peak_memory(),
            "stopped_by": stopped_by,
        }
        self.kept.conclude(summary)
        return summary


def rows_of(journal: Journal) -> list[Row]:
    """One row per generation, with the seconds and samples so far."""
    rows, seconds, samples = [], 0.0, 0
    for record in journal.records():
        seconds, samples = seconds + record.side["seconds"], samples + record.side["samples"]
        if record.result.generation != PROBE:
            total = {"total_seconds": seconds, "total_samples": samples}
            rows.append(describe(record, journal.header["maximize"]) | total)
    return rows


def describe(record: Record, maximize: bool) -> Row:
    """One generation in numbers for people."""
    scores = record.result.scores
    good = goodness(scores, maximize)
    finite = scores[np.isfinite(scores)]
    return {
        "generation": record.result.generation,
        "best": float(scores[int(good.argmax())]),
        "mean": float(finite.mean()) if finite.size else float("nan"),
        "spread": float(finite.std()) if finite.size else float("nan"),
        "skipped": not finite.size,
        "members": int(scores.size),
        "seconds": record.side["seconds"],
        **record.result.values,
        **record.side.get("diagnostics", {}),
        **record.side.get("metrics", {}),
    }


def advice(training: Run) -> str | None:
    """What the diagnostics say, if they say that there is nothing to be gained this way."""
    found = [row["agreement"] for row in training.history if "agreement" in row][-ENOUGH:]
    chance = 1 / math.sqrt(len(found) * training.core.genome.size) if found else 0.0  # of directions without a meaning
    if len(found) < ENOUGH or sum(found) / len(found) > 2 * chance:
        return None
    said = f"two halves of the population agree on a direction no better than chance ({sum(found) / len(found):.1g})"
    return f"{said}: a larger population, a larger batch or another sigma would help"


def export(model: nn.Module, file: Path) -> None:
    """The model's state_dict, tied weights once, as safetensors."""
    from safetensors.torch import save

    tensors: dict[str, torch.Tensor] = {}
    seen: set[tuple[int, tuple[int, ...]]] = set()
    for name, tensor in model.state_dict().items():
        key = (tensor.data_ptr(), tuple(tensor.shape))
        if tensor.numel() and key in seen:
            continue
        seen.add(key)
        tensors[name] = tensor.detach().cpu().contiguous()
    write_whole(file, save(tensors))


def export_theta(genome: Genome, theta: torch.Tensor, file: Path) -> None:
    """The trainable parameters by name, tied ones once, as safetensors."""
    from safetensors.torch import save

    views = genome.views(theta.detach().cpu())
    write_whole(file, save({slot.name: views[slot.name].contiguous() for slot in genome.slots}))


def resident_memory() -> int:
    """Bytes of this process that are in memory now, where its system says so."""
    try:
        pages = Path("/proc/self/statm").read_text().split()[1]
    except OSError:
        return 0
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def peak_memory() -> int:
    try:
        import resource
    except ImportError:  # Windows
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
