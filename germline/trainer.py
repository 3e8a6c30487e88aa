"""The loop: evaluate, tell, journal."""

import copy
import dataclasses
import functools
import math
import platform
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from germline.errors import BadInput, unknown
from germline.fleet import Local
from germline.fleet.local import one_thread_each
from germline.genome import Genome, fixed_sha256, theta_sha256
from germline.journal import PROBE, Journal, Record, content_sha256, write_whole
from germline.noise import WORD, Field
from germline.objective import Batch, Batches, Data, Objective
from germline.population import Evaluator, Method, block_size, choose_method, prepared, refresh_statistics
from germline.recipe import Recipe
from germline.schedule import Schedule
from germline.shaping import goodness, utilities
from germline.strategies import AnyStrategy, Told, pack, strategy_class
from germline.version import __version__

LADDER = (0.2, 0.1, 0.05, 0.02, 0.01, 0.005)  # the sigmas that sigma="auto" chooses from
STATISTICS_BATCHES = 8  # batches from which running statistics are re-estimated

LOWER_IS_BETTER = ("loss", "mse", "mae", "rmse", "error", "perplexity")  # endings of metrics

Row = dict[str, Any]  # one generation, as people see it


@dataclass
class Core:
    """A strategy at work: the part that a run, its replay and a search in one's own loop have in common.

    A replay that needs no gradient needs no module either; the genome is then given, and nothing can be evaluated.
    """

    module: nn.Module | None  # the user's own, which is copied and not touched
    strategy: AnyStrategy
    objective: Objective
    fleet: Local
    seed: int
    block: int | None = None
    method: Method | None = None
    genome: Genome = field(default=None)  # type: ignore[assignment]
    device: torch.device = field(init=False)
    noise: Field = field(init=False)
    state: Any = field(init=False)
    evaluator: Evaluator | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.device = self.fleet.place()
        if self.module is not None:
            self.genome = Genome.of(self.module)
            if self.objective.of_model:  # it may bring tensors of its own, for the device where the module is
                self.device = self.fleet.place(next(self.module.parameters()).device)
            self.module = copy.deepcopy(self.module)
            theta = self.genome.read(self.module, self.device)
        else:
            theta = torch.zeros(self.genome.size, dtype=self.genome.dtype, device=self.device)
        self.noise = self.strategy.field(self.seed, self.genome)
        self.state = self.strategy.init(theta)

    def try_out(self, batch: Batch | None) -> None:
        """Runs the user's own module once, so that what does not fit is said before anything else is done."""
        assert self.module is not None
        self.objective = self.objective.tried(prepared(self.module).to(self.device), batch)

    def prepare(self, batch: Batch | None) -> Evaluator:
        """Settles, once and for all, how blocks of members are evaluated."""
        if self.evaluator is None:
            assert self.module is not None
            module, block = self.module, self.block or block_size(self.strategy.population, self.genome)

            def evaluator(method: Method) -> Evaluator:
                return Evaluator.of(module, self.genome, self.objective, self.device, block, method)

            if self.method is None:
                values = {"sigma": LADDER[2], "lr": 0.0}
                candidates = self.strategy.ask(self.state, self.noise, 0, values)
                self.method = choose_method(evaluator, candidates, batch)
                block = 1 if self.method == "loop" else block  # member by member: nothing is gained by blocks
            self.block, self.evaluator = block, evaluator(self.method)
        return self.evaluator

    def evaluate(self, generation: int, batch: Batch | None) -> Told:
        evaluator = self.prepare(batch)
        values = self.strategy.values(self.state, generation)
        if self.strategy.needs_gradient:
            return self.differentiate(generation, batch, values)
        candidates = self.strategy.ask(self.state, self.noise, generation, values)
        scores = self.fleet.evaluate(evaluator, candidates, self.strategy.population, batch)
        return Told(generation, scores, values)

    def differentiate(self, generation: int, batch: Batch | None, values: Mapping[str, float]) -> Told:
        if batch is None:
            raise BadInput(
                f"The strategy {self.strategy.name} needs data and a loss of (output, target), not an objective."
            )
        try:
            scores, gradient = self.fleet.gradient(self.prepare(batch), self.state.theta, batch)
        except RuntimeError as error:
            if "does not require grad" in str(error):
                message = "The loss has no gradient, which the strategy 'gradient' needs: use openai-es for it."
                raise BadInput(message) from error
            raise
        return Told(generation, scores, values, gradient)

    def tell(self, told: Told) -> None:
        self.state = self.strategy.tell(self.state, told, self.noise, maximize=self.objective.maximize)

    def probe(self, batch: Batch | None) -> Told:
        """Chooses sigma: the one for which two halves of a population agree best on where to go."""
        evaluator = self.prepare(batch)
        half = self.strategy.population // 4 * 2 or 1  # whole pairs
        found, all_scores = [], []
        for i, sigma in enumerate(LADDER):
            address = WORD - 1 - i  # generations that no run reaches
            candidates = self.strategy.ask(self.state, self.noise, address, {"sigma": sigma})
            scores = self.fleet.evaluate(evaluator, candidates, self.strategy.population, batch)
            all_scores.append(scores)
            found.append((self._agreement(scores, half, address), sigma))
        return Told(PROBE, np.concatenate(all_scores), {"sigma": max(found)[1]})

    def _agreement(self, scores: NDArray[np.float32], half: int, generation: int) -> float:
        """The cosine between the directions that two halves of the population give."""
        directions = []
        for part in (slice(0, half), slice(half, 2 * half)):
            weights = utilities(scores[part], "ranks", maximize=self.objective.maximize)
            if weights is None:
                return -1.0
            members = np.arange(self.strategy.population)[part]
            noise = self.noise.members(members, generation, self.device)
            directions.append(noise.weighted_sum(weights, (0, self.genome.size)).double())
        a, b = directions
        return float((a @ b) / (a.norm() * b.norm()).clamp_min(1e-30))


@dataclass(frozen=True)
class Target:
    """A metric and the value at which it is good enough."""

    metric: str
    value: float
    lower_is_better: bool

    @classmethod
    def of(cls, given: "Target | str | Sequence[Any] | None") -> "Target | None":
        """From METRIC=VALUE, METRIC<=VALUE, METRIC>=VALUE or (metric, value); = takes the direction from the name."""
        if given is None or isinstance(given, Target):
            return given
        match = re.fullmatch(
            r"\s*(\w+)\s*(<=|>=|=)\s*(\S+)\s*", given if isinstance(given, str) else "{}={}".format(*given)
        )
        try:
            if match is None:
                raise ValueError
            value = float(match[3])
        except ValueError:
            raise BadInput(f"A target is METRIC=VALUE, such as dev_accuracy=0.95, not {given!r}.") from None
        return cls(match[1], value, match[2] == "<=" or (match[2] == "=" and match[1].endswith(LOWER_IS_BETTER)))

    def reached(self, metrics: Mapping[str, float]) -> bool:
        value = metrics.get(self.metric)
        return value is not None and (value <= self.value if self.lower_is_better else value >= self.value)


@dataclass(frozen=True)
class Stop:
    """When a run ends; the first that is met."""

    generations: int | None = None
    seconds: float | None = None
    target: Target | None = None

    def __post_init__(self) -> None:
        if self.generations is not None and self.generations < 0:
            raise BadInput(f"The number of generations must not be negative, but is {self.generations}.")
        if self.seconds is not None and not 0 <= self.seconds < float("inf"):
            raise BadInput(f"The number of seconds must be 0 or more, not {self.seconds}.")

    def reason(self, session: "Session") -> str | None:
        if self.target is not None and self.target.reached(session.metrics):
            return "target"
        if self.generations is not None and session.generation >= self.generations:
            return "generations"
        if self.seconds is not None and session.seconds >= self.seconds:
            return "seconds"
        return "interrupt" if session.interrupted else None


@dataclass
class Session:
    """A run in progress: a core, its data and its journal."""

    core: Core
    recipe: Recipe | None  # none where the journal is only replayed
    journal: Journal
    splits: dict[str, Data]
    batches: Batches | None
    generation: int = 0
    seconds: float = 0.0
    samples: int = 0
    sent: int = 0  # bytes, by this process
    received: int = 0
    metrics: dict[str, float] = field(default_factory=dict)
    history: list[Row] = field(default_factory=list)
    measured: tuple[str, ...] = ("dev", "test")  # the splits that are scored on the way
    interrupted: bool = False

    def step(self) -> Row:
        """One generation; when this returns it is on disk."""
        assert self.recipe is not None
        began = time.perf_counter()
        core, generation = self.core, self.generation
        batch = self.batch(generation)
        told = core.evaluate(generation, batch)
        core.tell(told)
        self.generation += 1
        metrics = self.measure(batch) if self.generation % self.recipe.evaluate_every == 0 else {}
        seconds = time.perf_counter() - began
        digest = theta_sha256(core.state.theta) if core.strategy.needs_gradient else None
        samples = (3 if core.strategy.needs_gradient else core.strategy.population) * (batch.size if batch else 1)
        side: dict[str, Any] = {"seconds": round(seconds, 6), "samples": samples, "bytes": [0, 0]}
        side |= {"metrics": metrics} if metrics else {}
        self.journal.append(told, digest, side)
        if self.generation % self.recipe.snapshot_every == 0:
            self.journal.save(core.state, self.generation)
        return self.note(Record(told, digest, side))

    def note(self, record: Record) -> Row:
        """Adds a record to what is known of the run."""
        self.account(record)
        self.metrics |= record.side.get("metrics", {})
        row = describe(record, self.core.objective.maximize) | {"total_seconds": self.seconds}
        self.history.append(row)
        return row

    def account(self, record: Record) -> None:
        self.seconds += record.side["seconds"]
        self.samples += record.side["samples"]
        self.sent += record.side["bytes"][0]
        self.received += record.side["bytes"][1]

    def batch(self, generation: int) -> Batch | None:
        return self.batches.batch(generation, self.core.device) if self.batches is not None else None

    def measure(self, batch: Batch | None) -> dict[str, float]:
        """The centre's score on the batch at hand, and the metrics of dev and test."""
        name = "score" if self.core.objective.maximize else "loss"
        with torch.no_grad(), one_thread_each():  # a metric may end the run: it must not depend on threads
            model = self.model()
            found = {f"centre_{name}": float(self.core.objective.score(model, batch))}
            for split in self.measured:
                if split in self.splits:
                    values = self.core.objective.evaluate(model, self.splits[split], self.core.device)
                    found |= {f"{split}_{key}": value for key, value in values.items()}
        return found

    def model(self) -> nn.Module:
        """The centre as a module, in evaluation mode."""
        model = self.core.module
        assert model is not None
        self.core.genome.write(self.core.state.theta, model)
        model.to(self.core.device).eval()
        if self.batches is not None:
            refresh_statistics(model, (self.batches.batch(g, self.core.device) for g in range(STATISTICS_BATCHES)))
        return model

    def finish(self, stopped_by: str) -> dict[str, Any]:
        """What the run came to; with the final snapshot and the exported model on disk."""
        core = self.core
        self.journal.save(core.state, self.generation)
        model = self.model()
        self.metrics |= self.measure(self.batch(max(self.generation - 1, 0)))
        if "train" in self.splits and not core.objective.of_model:
            values = core.objective.evaluate(model, self.splits["train"], core.device)
            self.metrics |= {f"train_{key}": value for key, value in values.items()}
        export(model, self.journal.path / "model.safetensors")
        on_gpu = core.device.type == "cuda"
        summary = {
            "run": str(self.journal.path),
            "recipe": self.journal.header["recipe"],
            "strategy": core.strategy.name,
            "generations": self.generation,
            "evaluations": self.generation * core.strategy.population,
            "samples": self.samples,
            "seconds": round(self.seconds, 3),
            "metrics": {k: round(v, 6) if math.isfinite(v) else None for k, v in sorted(self.metrics.items())},
            "theta_sha256": theta_sha256(core.state.theta),
            "bytes_sent": self.sent,
            "bytes_received": self.received,
            "peak_memory_bytes": torch.cuda.max_memory_allocated() if on_gpu else peak_memory(),
            "stopped_by": stopped_by,
        }
        self.journal.conclude(summary)
        return summary

    def watch(self, target: Target | None) -> None:
        """Measures what a target is about, or says which metrics there are."""
        if target is None:
            return
        objective = self.core.objective
        name = "score" if objective.maximize else "loss"
        kinds = [*(objective.metrics or {}), *(() if objective.of_model else (name,))]
        names = [f"{split}_{kind}" for split in self.splits for kind in kinds] + [f"centre_{name}"]
        if target.metric not in names:
            raise unknown("metric", target.metric, names)
        if target.metric.startswith("train_"):
            self.measured = ("train", *self.measured)


@contextmanager
def interruptible(session: Session) -> Iterator[None]:
    """The first Ctrl-C ends the run after the generation at hand; the second ends it at once."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number: int, frame: Any) -> None:
        if session.interrupted:
            raise KeyboardInterrupt
        session.interrupted = True

    before = signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def run(session: Session, stop: Stop, callbacks: Sequence[Callable[[Session, Row], None]] = ()) -> dict[str, Any]:
    """The loop."""
    session.watch(stop.target)
    with interruptible(session):
        while (reason := stop.reason(session)) is None:
            row = session.step()
            for callback in callbacks:
                callback(session, row)
    return session.finish(reason)


def start(recipe: Recipe, path: Path, *, seed: int, fleet: Local, about: Mapping[str, Any]) -> Session:
    """A new run, with generation 0 on disk."""
    splits = recipe.splits()
    core = Core(recipe.model, recipe.strategy, recipe.goal(), fleet, seed)
    batches = batches_of(recipe, splits, seed)
    batch = batches.batch(0, core.device) if batches is not None else None
    core.try_out(batch)
    core.prepare(batch)
    header = {
        "recipe": about.get("recipe"),
        "recipe_settings": about.get("recipe_settings", {}),
        "strategy": core.strategy.name,
        "settings": settings_of(core.strategy),
        "maximize": core.objective.maximize,
        "seed": seed,
        "layout": core.genome.described(),
        "fixed": fixed_sha256(recipe.model),
        "data": {name: data.fingerprint for name, data in splits.items()},
        "batch_size": batches.batch_size if batches is not None else None,
        "block": core.block,
        "method": core.method,
        "initial_theta_sha256": theta_sha256(core.state.theta),
        "device": str(core.device),
        "versions": {"germline": __version__, "torch": torch.__version__, "numpy": np.__version__},
        "machine": f"{platform.system()} {platform.machine()}, {processor()}, Python {platform.python_version()}",
        "command": about.get("command"),
        "stop": about.get("stop", {}),
    }
    session = Session(core, recipe, Journal.create(path, header, core.state), splits, batches)
    choose_sigma(session)
    return session


def choose_sigma(session: Session) -> None:
    """Where sigma is auto, probes and journals the choice."""
    core = session.core
    if getattr(core.strategy, "sigma", None) != "auto":
        return
    began = time.perf_counter()
    batch = session.batch(0)
    told = core.probe(batch)
    samples = told.scores.size * (batch.size if batch else 1)
    side = {"seconds": round(time.perf_counter() - began, 6), "samples": samples, "bytes": [0, 0]}
    session.journal.append(told, None, side)
    settle(session, Record(told, None, side))


def resume(recipe: Recipe, journal: Journal, fleet: Local) -> Session:
    """A run as its journal left it, ready for the next generation."""
    session = rebuild(recipe, journal, fleet)
    replay(session)
    choose_sigma(session)
    return session


def rebuild(recipe: Recipe, journal: Journal, fleet: Local) -> Session:
    """A run before its first generation, from the recipe it was begun with."""
    header = journal.header
    splits = recipe.splits()
    strategy = revive(header, recipe.strategy)
    core = Core(recipe.model, strategy, recipe.goal(), fleet, header["seed"], header["block"], header["method"])
    differences = {
        "model": (core.genome.described(), header["layout"]),
        "objective": (core.objective.maximize, header["maximize"]),
        "value of the model's frozen parameters and buffers": (fixed_sha256(recipe.model), header["fixed"]),
        **{f"{name} data": (data.fingerprint, header["data"].get(name)) for name, data in splits.items()},
    }
    for what, (here, there) in differences.items():
        if here != there:
            raise BadInput(f"The {what} is not that of {journal.path}: a run goes on only with what it began with.")
    batches = batches_of(replace(recipe, batch_size=header["batch_size"]), splits, header["seed"])
    core.try_out(batches.batch(0, core.device) if batches is not None else None)
    return Session(core, recipe, journal, splits, batches)


def reopen(journal: Journal, given: AnyStrategy | None = None) -> Session:
    """A run from its journal alone, for strategies that need no gradient: to be replayed, not to go on.

    Functions among its settings, which a journal does not hold, are taken from the strategy given.
    """
    header = journal.header
    nothing = Objective(lambda model: float("nan"), header["maximize"], of_model=True)
    genome = Genome.from_description(header["layout"])
    core = Core(None, revive(header, given, replayed=True), nothing, Local("cpu"), header["seed"], genome=genome)
    return Session(core, None, journal, {}, None)


def replay(session: Session, until: int | None = None, *, from_start: bool = False) -> None:
    """Folds the journal's records into the State: from the latest snapshot, or all of them."""
    core, journal = session.core, session.journal
    records = list(journal.records())
    if records and records[0].told.generation == PROBE:
        settle(session, records.pop(0))
    length = len(records) if until is None else until
    if length > len(records):
        raise BadInput(f"{journal.path} has {len(records)} generations, so there is no generation {length}.")
    first, core.state = journal.latest(core.state, 0 if from_start else length, core.device)
    if first == 0 and theta_sha256(core.state.theta) != journal.header["initial_theta_sha256"]:
        raise BadInput(f"Snapshot 0 of {journal.path} is not the one the run began with: restore it from a copy.")
    for record in records[:length]:
        generation = record.told.generation
        if generation >= first:
            fold(session, record)
            if record.theta_sha256 not in (None, theta_sha256(core.state.theta)):
                first = go_on_from_snapshot(core, generation + 1, length, journal)
        session.note(record)
        session.generation = generation + 1


def fold(session: Session, record: Record) -> None:
    """The State after one more record; a gradient, which records do not hold, is computed again."""
    core, told = session.core, record.told
    if core.strategy.needs_gradient:
        told = core.differentiate(told.generation, session.batch(told.generation), told.values)
    core.tell(told)


def go_on_from_snapshot(core: Core, generation: int, length: int, journal: Journal) -> int:
    """The next snapshot, where backprop gives other last bits than on the machine that wrote the journal."""
    later = [g for g in journal.snapshots() if generation <= g <= length]
    if not later:
        message = (
            f"Generation {generation} of {journal.path} comes out differently here: backprop gives other last bits "
        )
        raise BadInput(f"{message}on this machine, and there is no snapshot between it and generation {length}.")
    core.state = journal.load(core.state, later[0], core.device)
    return later[0]


def settle(session: Session, record: Record) -> None:
    """From the probe's record on, sigma is the one that it chose."""
    session.core.strategy = replace(session.core.strategy, sigma=record.told.values["sigma"])  # type: ignore[type-var]
    session.account(record)


def verify(session: Session) -> dict[str, Any]:
    """Replays everything from the beginning and compares every hash and every snapshot on the way."""
    journal, core = session.journal, session.core
    template, snapshots, checked = core.state, journal.snapshots(), 0
    replay(session, until=0, from_start=True)
    for record in journal.records():
        if record.told.generation == PROBE:
            continue
        fold(session, record)
        session.generation = record.told.generation + 1
        digest = theta_sha256(core.state.theta)
        if record.theta_sha256 not in (None, digest):
            raise BadInput(f"Generation {session.generation} of {journal.path} replays to other weights than it had.")
        if session.generation in snapshots:
            saved = journal.load(template, session.generation, core.device)
            if content_sha256(*pack(saved)) != content_sha256(*pack(core.state)):
                raise BadInput(f"Snapshot {session.generation} of {journal.path} is not what its records replay to.")
            checked += 1
    return {"generations": session.generation, "snapshots": checked + 1, "theta_sha256": theta_sha256(core.state.theta)}


def batches_of(recipe: Recipe, splits: dict[str, Data], seed: int) -> Batches | None:
    if "train" not in splits:
        return None
    train = splits["train"]
    size = recipe.batch_size or train.batch_size or train.length
    return Batches(train, min(size, train.length), seed)


def settings_of(strategy: AnyStrategy) -> dict[str, Any]:
    """A strategy's settings as JSON."""
    values = {f.name: getattr(strategy, f.name) for f in dataclasses.fields(strategy)}  # type: ignore[arg-type]
    return {name: described(value) for name, value in values.items()}


def described(value: Any) -> Any:
    if isinstance(value, Schedule):
        return {"schedule": str(value)}
    if isinstance(value, functools.partial):
        return {"function": f"partial {getattr(value.func, '__qualname__', type(value.func).__qualname__)}"}
    return {"function": getattr(value, "__qualname__", type(value).__qualname__)} if callable(value) else value


def revive(header: Mapping[str, Any], given: AnyStrategy | None = None, *, replayed: bool = False) -> AnyStrategy:
    """The strategy of a run from its header; functions, which a header cannot hold, from the one given.

    Where it is only to be replayed the functions of schedules are not needed: their values are in the records.
    """
    settings = {}
    for name, value in header["settings"].items():
        if isinstance(value, dict) and "schedule" in value:
            value = Schedule.parse(value["schedule"])
        elif isinstance(value, dict) and "function" in value and replayed and name in ("sigma", "lr"):
            value = 1.0
        elif isinstance(value, dict) and "function" in value:
            if given is None or described(getattr(given, name, None)) != value:
                where = "go on from the Python code that began the run, with gl.train(..., resume=...)"
                raise BadInput(f"The setting {name} of this run is the function {value['function']}: {where}.")
            value = getattr(given, name)
        settings[name] = value
    strategy: AnyStrategy = strategy_class(header["strategy"])(**settings)
    return strategy


def describe(record: Record, maximize: bool) -> Row:
    """One generation in numbers for people."""
    scores = record.told.scores
    good = goodness(scores, maximize)
    finite = scores[np.isfinite(scores)]
    return {
        "generation": record.told.generation,
        "best": float(scores[int(good.argmax())]),
        "mean": float(finite.mean()) if finite.size else float("nan"),
        "spread": float(finite.std()) if finite.size else float("nan"),
        "skipped": not finite.size,
        "members": int(scores.size),
        "seconds": record.side["seconds"],
        **record.told.values,
        **record.side.get("metrics", {}),
    }


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


def peak_memory() -> int:
    try:
        import resource
    except ImportError:  # Windows
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor()
