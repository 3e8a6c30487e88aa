"""A session: a run that is trained, replayed or followed. One generation is: ask, score, tell, record."""

import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from germline.clock import clock
from germline.engine.ahead import start_generation, update_early
from germline.engine.best import Best
from germline.engine.diagnostics import compare_gradients, diagnose_step, measure_resources
from germline.engine.drivers import Driver, find_driver, gradient_strategy, sum_observations
from germline.engine.export import export_model
from germline.engine.files import write_atomically
from germline.engine.history import Row, describe_record, read_rows
from germline.engine.journal import Journal, Record
from germline.engine.scoring import Scorer
from germline.errors import BadInput
from germline.fleet.executor import Executor
from germline.fleet.protocol import Fleet, MemberShare, Scores, Update
from germline.genome import Genome, copy_module, theta_sha256
from germline.machine import peak_memory
from germline.noise import Field
from germline.objective import Batch, Batches, Data, Objective
from germline.population import (
    DType,
    Evaluator,
    Plan,
    fixed_norms,
    refresh_statistics,
    set_fixed_norms,
    single_threaded_torch,
)
from germline.recipes import Recipe
from germline.simulators import SingleMember
from germline.strategies import AnyStrategy, Candidates, GenerationResult
from germline.strategies.registry import check_state, check_strategy
from germline.strategies.settings import check_choice, set_schedules

REMEMBERED, RECENT = 4096, 256  # generations that are kept in memory, and of these the last ones without a gap
ReplayTheta = Callable[[int], Tensor] | None
STATISTICS_BATCHES = 8  # batches from which running statistics are re-estimated


@dataclass
class Session:
    """A strategy at work on a module, with its data and its journal.

    ``gl.train``, ``gl.Search``, resume, replay, verify and the worker of a cluster all use one: they differ in where
    batches and results come from. Make it with ``Session.create``.

    Attributes:
        strategy: The algorithm, bound to the module's parameters.
        scorer: The module, the objective, and how members are evaluated.
        fleet: Who evaluates the members.
        seed: The seed of the run's random numbers.
        noise: The noise field.
        state: The strategy's State, or this process's part of it.
        splits: The data sets by name.
        batches: The batch of each generation; None where there is no training data.
        recipe: What the run is made of; None where a journal is replayed without it.
        journal: The run on disk; None in a process that does not own it.
        path: The directory of the run.
        generation: The number of finished generations.
        history: Rows of generations: all of the recent ones, of earlier ones fewer and fewer.
        best: The best metric of the dev set so far; None if there is none.
    """

    strategy: AnyStrategy
    scorer: Scorer
    fleet: Fleet
    seed: int
    noise: Field
    driver: Driver
    state: Any = None
    splits: dict[str, Data] = field(default_factory=dict)
    batches: Batches | None = None
    recipe: Recipe | None = None
    journal: Journal | None = None
    path: Path = Path()
    generation: int = 0
    seconds: float = 0.0
    samples: int = 0
    evaluations: int = 0
    sent: int = 0  # bytes, by this process
    received: int = 0
    metrics: dict[str, float] = field(default_factory=dict)
    history: list[Row] = field(default_factory=list)
    best: Best | None = None
    keeps_best: bool = False  # whether the result is the generation with the best metric of the dev set
    best_theta: Tensor | None = None  # its weights, where they have been seen by this process
    kept_theta: Tensor | None = None  # the weights of the result, if they are not those of the last generation
    eval_splits: tuple[str, ...] = ("dev", "test")  # that are scored during training
    interrupted: bool = False
    is_asked_to_stop: bool = False  # by a callback
    given_batch: Batch | None = None  # the batch of the caller, where there is no data set
    update: Update | None = None  # how the fleet shares out updates; see ``share_update``
    member_share: MemberShare | None = None  # which members train here
    last_gradient: Tensor | None = None  # for comparison with the next one
    prefetched_batch: Batch | None = None  # the batch of the next generation, if a GPU has started with it
    measure_part: "Callable[[Session, int, int], float] | None" = None  # see ``part_used``
    part_used: float = 0.0  # of the run's budget, by its limits and the samples so far: schedules go by it
    unrecorded_seconds: float = 0.0  # of writing the last generation, which the next record counts
    last_commit: float = 0.0  # when records were last written to disk
    observations: list[float] = field(default_factory=list)  # steps, sums and sums of squares of all generations
    probed: dict[str, float] = field(default_factory=dict)  # what a probe has chosen
    start_metrics: dict[str, float] = field(default_factory=dict)  # of the initial weights, which may stay the best
    peak_bytes: int = 0  # of a GPU, in generations whose resources were measured

    @classmethod
    def create(
        cls,
        module: nn.Module | None,
        strategy: AnyStrategy,
        objective: Objective,
        fleet: Fleet,
        seed: int,
        *,
        plan: Plan | None = None,
        dtype: DType = "auto",
        dropout: bool = False,
        genome: Genome | None = None,
        norms: Iterable[str] | None = None,
    ) -> "Session":
        """Create a session before its first generation; nothing is evaluated or written.

        Args:
            module: The user's module, which is copied; None for a replay that needs no gradient, with ``genome``.
            strategy: The algorithm.
            objective: What members are scored on.
            fleet: Who evaluates them.
            seed: The seed of the run's random numbers.
            plan: How members are evaluated, if that is known; else it is chosen on the first batch.
            dtype: The type of the members' arithmetic.
            dropout: Whether members are scored with their dropout layers active.
            genome: The layout of the parameters, where there is no module.
            norms: The names of the norms that keep their running statistics; those in evaluation mode if None.
        """
        device = fleet.find_device()
        if module is not None:
            genome = Genome.from_module(module)
            if objective.of_model:  # it may bring its own tensors, for the device where the module is
                device = fleet.find_device(next(module.parameters()).device)
            module = copy_module(module)
            if norms is not None:
                set_fixed_norms(module, norms)
        assert genome is not None
        check_strategy(strategy)
        if objective.takes_seed and strategy.kind != "evolve":
            raise BadInput(f"The strategy {strategy.name} needs data and a loss of (output, target), not an objective.")
        strategy = strategy.bind(genome)
        objective = replace(objective, run_seed=seed)  # from which it draws the seed of a generation
        if objective.population is not None and module is not None:
            objective = replace(objective, function=objective.population.bind(module))
        scorer = Scorer(module, genome, objective, device, dtype, dropout, plan)
        session = cls(strategy, scorer, fleet, seed, strategy.field(seed, genome), find_driver(strategy))
        theta = session.read_theta()
        if not bool(torch.isfinite(theta).all()):
            wrong = next(slot.name for slot in genome.slots if not torch.isfinite(theta[slot.start : slot.stop]).all())
            raise BadInput(f"Parameter {wrong} holds NaN or infinite values: give the module other initial weights.")
        session.state = session.driver.init(session, theta)
        if objective.population is not None:
            session.eval_splits = ("dev",)
            scorer.normalize(())  # the module may come from another run
        check_state(strategy, session.state, genome.size)
        return session

    def read_theta(self) -> Tensor:
        """Return the initial weights: those of the module, or zeros where there is none."""
        scorer = self.scorer
        if scorer.module is None:
            return torch.zeros(scorer.genome.size, dtype=scorer.genome.dtype, device=scorer.device)
        return scorer.genome.read(scorer.module, scorer.device)

    def prepare(self, batch: Batch | None) -> None:
        """Choose how members are evaluated, if that has not been chosen yet."""
        if self.scorer.plan is None:
            self.scorer.adopt(self.driver.choose_plan(self, batch))

    def score_sample(self, batch: Batch | None) -> Scores:
        """Return the scores of a few members around the initial weights, computed in this process alone."""
        self.prepare(batch)
        candidates, plan = self.driver.sample(self)
        evaluator = self.scorer.find_evaluator(plan)
        self.scorer.normalize(())
        try:
            return self._score_sample(evaluator, candidates, batch)
        finally:
            self.scorer.normalize(self.observations)

    def _score_sample(self, evaluator: Evaluator, candidates: Candidates, batch: Batch | None) -> Scores:
        plan = evaluator.plan
        return Executor().score_blocks(evaluator, candidates, plan.block, batch)[: plan.block * evaluator.columns]

    def share_update(self) -> None:
        """Decide how updates are shared out, and keep what this process needs of the State."""
        self.update = self.driver.share_update(self)
        self.state = self.update.local_part(self.state)

    def evaluate(self, generation: int, batch: Batch | None) -> GenerationResult:
        """Score the members of a generation."""
        self.prepare(batch)
        return self.driver.score(self, generation, batch)

    def values(self, generation: int) -> dict[str, float]:
        """Return the values of the strategy's schedules in a generation."""
        return self.values_of(self.state, generation, self.part_used)

    def values_of(self, state: Any, generation: int, part_used: float) -> dict[str, float]:
        """Return the values of the strategy's schedules in a generation that begins with some State."""
        values: dict[str, float] = set_schedules(self.strategy, part_used).values(state, generation)
        return values

    def tell(self, result: GenerationResult) -> None:
        """Advance a whole State by a result that may come from a journal or a coordinator."""
        maximize = self.scorer.objective.maximize
        self.state = self.strategy.tell(self.state, result, self.noise, maximize=maximize)

    def advance(self, result: GenerationResult) -> None:
        """Advance the State by a result, each process of the fleet with its part of it."""
        if self.update is None:
            self.share_update()
        assert self.update is not None
        self.state = self.update.advance(self.state, result)

    def gather_state(self) -> Any:
        """Return the whole State; all processes of the fleet must call this."""
        return self.state if self.update is None else self.update.gather(self.state)

    # A run with a journal

    def step(self, commit_delay: float = 0.0) -> Row:
        """Run one generation and record it; return its row.

        Args:
            commit_delay: Seconds for which records may wait until they are written to disk together.
        """
        assert self.recipe is not None
        started = time.perf_counter()
        group = self.fleet.group
        group.announce(self.seconds, self.stop_request)
        batch = self.batch(self.generation) if self.prefetched_batch is None else self.prefetched_batch
        self.prepare(batch)
        plan = self.scorer.plan
        clock.pop_seconds()
        result, before, samples = self.run_generation(batch)
        resources = measure_resources(self.scorer.device) if self.driver.records_theta else {}
        is_measured = self.generation % self.recipe.evaluate_every == 0
        metrics = group.on_journal_rank(lambda: self.measure(batch)) if is_measured else {}
        diagnostics = diagnose_step(self, result, before) if is_measured and group.owns_journal else {}
        diagnostics |= self._compare_gradients(result) if group.owns_journal else {}
        diagnostics |= resources
        ended = time.perf_counter()
        info: dict[str, Any] = {
            "seconds": round(ended - started + self.unrecorded_seconds, 6),
            "samples": samples,
            "bytes": self.fleet.count_bytes(),
        }
        info |= {"metrics": metrics} if metrics else {}
        info |= {"start": self.start_metrics} if self.start_metrics and self.generation == 1 else {}
        info |= sum_observations(result)
        info |= {"diagnostics": diagnostics} if diagnostics else {}
        info |= {"plan": asdict(self.scorer.chosen_plan)} if self.scorer.plan != plan else {}
        record = Record(result, theta_sha256(self.state.theta) if self.driver.records_theta else None, info)
        if self.journal is not None:
            self.journal.append(record)
        if self.generation % self.recipe.snapshot_every == 0:
            self.save_snapshot()
        if time.monotonic() - self.last_commit >= commit_delay:
            self.commit()
        self.unrecorded_seconds = time.perf_counter() - ended
        self.peak_bytes = max(self.peak_bytes, int(resources.get("memory", 0)))
        row = self.note(record)
        if self.keeps_best and self.best is not None and self.best.generation == self.generation:
            self.best_theta = self.state.theta.clone() if group.owns_journal else None
        return row

    def run_generation(self, batch: Batch | None) -> tuple[GenerationResult, Any, int]:
        """Evaluate a generation and advance the State; return the result, the State before, and how many samples."""
        early = update_early(self, batch)
        result = self.evaluate(self.generation, batch)
        before, samples = self.state, self.driver.count_samples(self, result, batch)
        self.generation += 1
        if early is not None and early.holds(result):
            self.state, self.part_used = early.state, early.part_used
        else:
            with clock("update"):
                self.advance(result)
            self.part_used = self.part_after(self.generation, samples)
            start_generation(self, self.generation, self.state, self.part_used)
        return result, before, samples

    def part_after(self, generation: int, samples: int) -> float:
        """Return the part of the run's budget that this many generations have used, the last one with its samples."""
        return self.measure_part(self, generation, self.samples + samples) if self.measure_part else self.part_used

    @property
    def stop_request(self) -> int:
        """The request to stop in this process: 2 for an interrupt, 1 for a callback's, else 0."""
        return 2 if self.interrupted else int(self.is_asked_to_stop)

    def keep(self, which: str) -> None:
        """Choose which weights the result will have: those of the ``"last"`` or the ``"best"`` generation, by dev."""
        check_choice("keep", which, ("last", "best"))
        self.keeps_best = which == "best"
        if self.keeps_best:
            Best.require(self.scorer.objective, self.splits, 'keep="best"')

    def _compare_gradients(self, result: GenerationResult) -> dict[str, float]:
        if self.strategy.kind != "differentiate":
            return {}
        gradient = result.gradient if result.gradient is not None else gradient_strategy(self).direction(self.state)
        before, self.last_gradient = self.last_gradient, gradient
        return {} if gradient is None else compare_gradients(gradient, before)

    def commit(self) -> None:
        """Write all records to disk."""
        if self.journal is not None:
            self.journal.commit()
        self.last_commit = time.monotonic()

    def require_journal(self) -> Journal:
        """Return the journal, in the process that owns it."""
        assert self.journal is not None, "this process does not own the journal"
        return self.journal

    def save_snapshot(self) -> Any:
        """Save a snapshot of the whole State and return it; all processes of the fleet must call this."""
        state = self.gather_state()
        if self.journal is not None:
            self.journal.save(state, self.generation)
            self.journal.prune(self.recipe.keep_snapshots if self.recipe is not None else None)
        return state

    def note(self, record: Record) -> Row:
        """Add a record to what is known of the run; return its row."""
        self.add_totals(record)
        if "plan" in record.info:  # from here on members were evaluated by another plan
            self.scorer.adopt(Plan(**record.info["plan"]))
        if "observations" in record.info:
            sums = record.info["observations"]
            self.observations = [a + b for a, b in zip(self.observations or [0.0] * len(sums), sums, strict=True)]
            self.scorer.normalize(self.observations)
        metrics = record.info.get("metrics", {})
        self.metrics |= metrics
        self.best = self.best or Best.of(self.scorer.objective, self.splits)
        if self.best is not None:
            self.best.note(record.info.get("start", {}), 0)
            self.best.note(metrics, record.result.generation + 1)
        self.evaluations += record.result.scores.size
        totals = {"total_seconds": self.seconds, "total_samples": self.samples}
        row = describe_record(record, self.scorer.objective.maximize) | totals
        self.history.append(row)
        if len(self.history) > REMEMBERED:
            self.history[:-RECENT] = self.history[:-RECENT:2]
        return row

    def add_totals(self, record: Record) -> None:
        """Add the seconds, samples and bytes of a record to the totals."""
        self.seconds += record.info["seconds"]
        self.samples += record.info["samples"]
        self.sent += record.info["bytes"][0]
        self.received += record.info["bytes"][1]

    def rows(self) -> list[Row]:
        """Return a row for every generation, where this process has the journal."""
        return read_rows(self.journal) if self.journal is not None else self.history

    # Data and measurements

    def batch(self, generation: int) -> Batch | None:
        """Return the batch of a generation, or None for an objective of the whole model."""
        return self.batches.batch(generation, self.scorer.device) if self.batches is not None else None

    @property
    def batch_size(self) -> int:
        return self.batches.batch_size if self.batches is not None else 1

    def dev_batch(self, generation: int) -> Batch:
        """Return the batch of the dev set on which samples of a generation are scored."""
        if "dev" not in self.splits or self.batches is None:
            raise BadInput("There is no dev set to select samples on: give one, or leave out select_on=dev.")
        dev = self.splits["dev"]
        size = min(self.batches.batch_size, dev.length)
        return Batches(dev, size, self.batches.seed).batch(generation, self.scorer.device)

    def measure(self, batch: Batch | None) -> dict[str, float]:
        """Return the center's score on a batch, and the metrics of the data sets that are evaluated."""
        objective, last = self.scorer.objective, max(self.generation - 1, 0)
        with torch.no_grad(), single_threaded_torch():  # a metric may end the run: it must not depend on threads
            model = self.model()
            metrics = {f"center_{objective.name}": float(objective.score(model, batch, last))}
            for split in self.eval_splits:
                if objective.population is not None and split in objective.population.splits:
                    values = objective.population.measure(SingleMember(model), split, self.seed)
                    metrics |= {f"{split}_{key}": value for key, value in values.items()}
                elif split in self.splits:
                    values = objective.evaluate(model, self.splits[split], self.scorer.device)
                    metrics |= {f"{split}_{key}": value for key, value in values.items()}
        return metrics

    def measure_start(self) -> None:
        """Measure the initial weights on the dev set; the record of generation 0 will hold it."""
        splits, self.eval_splits = self.eval_splits, ("dev",)
        try:
            metrics = self.fleet.group.on_journal_rank(lambda: self.measure(self.batch(0)))
        finally:
            self.eval_splits = splits
        self.start_metrics = {name: value for name, value in metrics.items() if name.startswith("dev_")}

    def model(self) -> nn.Module:
        """Return a copy of the module with the weights of the center, or of the result once the run has ended.

        The copy is in evaluation mode and on the device of the members.
        """
        assert self.scorer.module is not None
        model = copy_module(self.scorer.module)  # what it writes to its buffers must not reach any member
        self.scorer.genome.write(self.state.theta if self.kept_theta is None else self.kept_theta, model)
        model.to(self.scorer.device).train().eval()  # see ``make_evaluation_copy``
        if self.batches is not None:
            some = (self.batches.batch(g, self.scorer.device) for g in range(STATISTICS_BATCHES))
            refresh_statistics(model, some, self.fixed_norms)
        return model

    @property
    def fixed_norms(self) -> list[str]:
        """The names of the norms that keep the running statistics that they had at the start."""
        return fixed_norms(self.scorer.module) if self.scorer.module is not None else []

    def finish(self, stopped_by: str, replay_theta: ReplayTheta = None) -> dict[str, Any]:
        """Save the final snapshot and the exported model; return the summary of the run.

        Args:
            stopped_by: Which limit the run has reached.
            replay_theta: Returns the weights after some generations, from the journal; needed to keep the best ones.
        """
        self.seconds, self.unrecorded_seconds = self.seconds + self.unrecorded_seconds, 0.0
        state = self.save_snapshot()
        if self.strategy.kind == "train_members":  # not every rank has the best member
            self.state = replace(self.state, theta=state.theta)
        group = self.fleet.group
        summary = group.on_journal_rank(lambda: self._summarize(stopped_by, replay_theta))
        if summary["kept_generation"] != self.generation:
            theta = self.kept_theta if self.kept_theta is not None else torch.zeros_like(self.state.theta)
            self.kept_theta = group.broadcast_state({"theta": theta})["theta"]
        return summary

    def _keep_best(self, batch: Batch | None, replay_theta: ReplayTheta) -> int:
        """Choose the best of the measured generations and the last one; return after how many generations it was."""
        best = replace(self.best) if self.best is not None else Best.of(self.scorer.objective, self.splits)
        assert best is not None
        if best.note(self.metrics | self.measure(batch), self.generation) or best.value is None:
            return self.generation
        if best.generation != self.generation:
            assert replay_theta is not None
            self.kept_theta = self.best_theta if self.best_theta is not None else replay_theta(best.generation)
        return best.generation

    def _summarize(self, stopped_by: str, replay_theta: ReplayTheta) -> dict[str, Any]:
        batch = self.batch(max(self.generation - 1, 0))
        kept_generation = self._keep_best(batch, replay_theta) if self.keeps_best else self.generation
        self.eval_splits = ("train", "dev", "test") if not self.scorer.objective.of_model else ("dev", "test")
        self.metrics |= self.measure(batch)
        model = self.model()
        export_model(model, self.path / "model.safetensors")
        population = self.scorer.objective.population
        picture = population.draw(model.cpu(), self.seed) if population is not None else None
        if picture is not None:
            write_atomically(self.path / "episode.gif", picture)
        summary = {
            "run": str(self.path),
            "recipe": self.require_journal().header["recipe"],
            "strategy": self.strategy.name,
            "generations": self.generation,
            "evaluations": self.evaluations,
            "samples": self.samples,
            "seconds": round(self.seconds, 3),
            "metrics": {k: round(v, 6) if math.isfinite(v) else None for k, v in sorted(self.metrics.items())},
            "theta_sha256": theta_sha256(self.state.theta),
            "bytes_sent": self.sent,
            "bytes_received": self.received,
            "peak_memory_bytes": max(self.peak_bytes, peak_memory(self.scorer.device)),
            "stopped_by": stopped_by,
            "kept_generation": kept_generation,
        }
        self.require_journal().save_outcome(summary)
        return summary

    def totals(self) -> Mapping[str, Any]:
        """Return what a rank that joins a resumed run must know."""
        names = ("generation", "seconds", "samples", "evaluations", "metrics", "observations")
        return {name: getattr(self, name) for name in names} | {"best": asdict(self.best) if self.best else None}
