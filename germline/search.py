"""Evolution in a loop that the caller writes: ``step`` scores members on a batch, ``ask`` lets the caller run them."""

import hashlib
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import nn

from germline import noise
from germline.arguments import check_arguments
from germline.engine import opening
from germline.engine.drivers import CHECK_SIGMA, OFFSPRING_COPIES, sum_observations
from germline.engine.header import build_header, describe_settings, restore_strategy
from germline.engine.journal import Journal, Record, content_sha256
from germline.engine.probe import probe_sigma
from germline.engine.rehearsal import Rehearsal, count_dead_pairs
from germline.engine.replay import apply_probe, replay
from germline.engine.scoring import LARGEST_GROUP, ONE_BY_ONE
from germline.engine.session import Session
from germline.errors import BadInput
from germline.fleet.executor import run_on_threads
from germline.fleet.local import Local
from germline.fleet.protocol import Fleet
from germline.genome import count_parameters, refuse_inference_tensors, set_trainable, theta_sha256
from germline.objective import Batch, Objective, build_objective, iterate_tensors, seeded_generators, tensor_bytes
from germline.population import (
    Call,
    DType,
    Evaluator,
    Generation,
    Members,
    Plan,
    SlowPath,
    describe_error,
    exact_arithmetic,
    refresh_statistics,
    single_threaded_torch,
)
from germline.recipes import Recipe
from germline.sources import read_batch
from germline.strategies import (
    AnyStrategy,
    GenerationResult,
    GradientStrategy,
    OpenAIES,
    UnsharedCandidates,
    choose_strategy,
    class_path,
    find_strategy,
    pack,
    unpack,
)
from germline.strategies.settings import is_over_run

SNAPSHOT_EVERY = 100  # generations between snapshots of a search with a directory
WORTH_THREADS = 8 << 20  # bytes of weights from which the blocks of a recorded call are shared out among threads


def hash_batch(batch: Batch | None) -> str:
    """Return the hash of a batch."""
    digest = hashlib.sha256()
    for tensor in iterate_tensors([batch.args, batch.kwargs, batch.target]) if batch is not None else ():
        digest.update(f"{tensor.dtype} {tuple(tensor.shape)};".encode())
        digest.update(tensor_bytes(tensor))
    return digest.hexdigest()


def refuse_step(model: nn.Module) -> float:
    """Raise an error: the objective of a search that was given none."""
    raise BadInput("Search.step needs loss=, score= or objective=; without one, use ask and tell.")


def read_plan(journal: Journal | None) -> Plan | None:
    """Return the plan of a search's journal, unless no model was evaluated in its first generation."""
    plan = Plan(**journal.header["plan"]) if journal is not None else ONE_BY_ONE
    return plan if plan != ONE_BY_ONE else None


class Search:
    """Evolution in a loop that the caller writes.

    ``step`` scores a generation on a batch, or by an objective, and moves the center. ``ask`` returns the members as a
    callable for code that scores them itself, and ``tell`` takes the scores.

    Args:
        model: The module to train.
        strategy: The algorithm, or its name. If it is not given, or ``"auto"``, it is chosen by the model, as for
            ``gl.train``; ``gl.OpenAIES()`` for ``ask`` and ``tell``.
        loss: A function of (output, target) to minimize. ``step`` needs one of ``loss``, ``score`` and ``objective``;
            ``ask`` and ``tell`` need none of them.
        score: A function of (output, target) to maximize unless ``maximize=False``.
        objective: A function of the model, or of (model, seed), to minimize unless ``maximize=True``.
        maximize: Whether a score, an objective or the scores of ``tell`` are maximized.
        seed: The seed of the search's random numbers.
        fleet: Who evaluates the members; ``gl.Local()`` if not given.
        dtype: The type of the members' arithmetic: ``"auto"``, ``"float32"`` or ``"bfloat16"``.
        dropout: Whether members are scored with their dropout layers active.
        trainable: The parameters to train, by patterns of their names, such as ``["*.lora_*", "head"]``: sets
            ``requires_grad`` of all parameters. Give it again to resume.
        run: The directory of a journal to create: then every generation is on disk when ``step`` or ``tell`` returns.
        resume: The directory of a search to go on with, with its strategy and its seed.

    >>> import torch
    >>> from torch import nn
    >>> model = nn.Linear(3, 1)
    >>> search = Search(model, OpenAIES(population=32, lr=0.1), loss=nn.functional.mse_loss, seed=0)
    >>> for x in torch.randn(50, 64, 3, generator=torch.Generator().manual_seed(0)):
    ...     scores = search.step(x, x.sum(1, keepdim=True))
    >>> scores.shape, bool(nn.functional.mse_loss(search.model(x), x.sum(1, keepdim=True)) < 0.3)
    ((32,), True)

    Scores may come from anywhere:

    >>> search = Search(nn.Linear(3, 1), OpenAIES(population=32, lr=0.1))
    >>> for _ in range(50):
    ...     outputs = search.ask()(torch.ones(1, 3))  # (32, 1, 1)
    ...     search.tell((outputs.flatten() - 7).abs())
    >>> bool((search.model(torch.ones(1, 3)) - 7).abs() < 1)
    True
    """

    @check_arguments
    def __init__(
        self,
        model: nn.Module,
        strategy: AnyStrategy | str | None = None,
        *,
        loss: Callable[..., Any] | None = None,
        score: Callable[..., Any] | None = None,
        objective: Callable[..., Any] | None = None,
        maximize: bool | None = None,
        seed: int = 0,
        fleet: Fleet | None = None,
        dtype: DType = "auto",
        dropout: bool = False,
        trainable: str | Sequence[str] | None = None,
        run: str | Path | None = None,
        resume: str | Path | None = None,
    ) -> None:
        refuse_inference_tensors(model)
        if trainable is not None:
            set_trainable(model, trainable)
        if loss is None and score is None and objective is None:
            goal = Objective(refuse_step, bool(maximize), of_model=True)
        else:
            goal = build_objective(loss, score, objective, maximize, None)
        if run is not None and resume is not None:
            raise BadInput("Give run= for a new search or resume= for one to go on with, not both.")
        journal = Journal.open(Path(resume)) if resume is not None else None
        if journal is not None:
            named = isinstance(strategy, str) and strategy != "auto"
            given = find_strategy(str(strategy))() if named else None if isinstance(strategy, str) else strategy
            if given is not None and not named:  # a name says nothing about the settings
                opening.check_same_settings(given, journal.header, str(journal.path))
            strategy, seed = restore_strategy(journal.header, given), journal.header["seed"]
        if strategy is None or strategy == "auto":
            is_asked = goal.function is refuse_step  # a probe scores members, which ask and tell leave to the caller
            has_loss = loss is not None
            strategy = OpenAIES() if is_asked else choose_strategy(count_parameters(model), has_loss=has_loss)
        strategy = find_strategy(strategy)() if isinstance(strategy, str) else strategy
        fleet = fleet or Local()
        needs_dev = strategy.kind == "differentiate" and cast(GradientStrategy[Any], strategy).select_on == "dev"
        if strategy.kind == "train_members" or needs_dev:
            raise BadInput(f"The strategy {strategy.name} needs a data set, not batches: use gl.train.")
        for name, value in vars(strategy).items():
            if is_over_run(value):
                message = f"The schedule {value} of {name} is over a whole run, and a Search does not know its end"
                raise BadInput(f"{message}: give the schedule a number of generations.")
        self._module = model
        with torch.inference_mode(False):
            strategy = fleet.adapt(strategy)
            fleet.check(strategy)
            plan = read_plan(journal)
            self._session = Session.create(model, strategy, goal, fleet, seed, plan=plan, dtype=dtype, dropout=dropout)
        recipe = Recipe(model, loss=loss, score=score, objective=objective, maximize=maximize, strategy=strategy)
        self._session.recipe = recipe  # for workers that were given none
        self._shapes: Any = ()  # of the inputs on which the module was last tried
        self._has_joined = False
        self._is_asked = False  # whether members of this generation were handed out
        self._run = Path(run) if run is not None else None
        self._started = time.perf_counter()
        if journal is not None:
            self._resume(journal)

    def _resume(self, journal: Journal) -> None:
        session = self._session
        if session.scorer.genome.describe() != journal.header["layout"]:
            raise BadInput(f"The model is not that of {journal.path}: its parameters have other names or shapes.")
        if session.scorer.objective.maximize != journal.header["maximize"]:
            raise BadInput(f"{journal.path} was started with maximize={journal.header['maximize']}: give the same.")
        session.journal, session.path = journal, journal.path
        replay(session)

    @property
    def generation(self) -> int:
        """The number of finished generations."""
        return self._session.generation

    @property
    def strategy(self) -> AnyStrategy:
        """The strategy, with what was chosen for this model and, after the first step, by a probe."""
        return self._session.strategy

    def step(self, *batch: Any) -> NDArray[np.float32]:
        """Run one generation on a batch.

        Args:
            batch: Inputs and target, as tensors or NumPy arrays, or one dict; nothing for an objective of the model.

        Returns:
            The scores of all members, in member order.
        """
        with torch.inference_mode(False):  # tensors of inference mode do not tell when they are changed
            result, given = self._score(batch)
            self._advance(result, self._session.driver.count_samples(self._session, result, given))
            return result.scores

    def rehearse(self, *batch: Any) -> Rehearsal:
        """Score the members of the present generation, and learn nothing from them: a look at a run before it begins.

        Args:
            batch: As for ``step``.

        Returns:
            The scores, that of the center, and the part of the mirrored pairs whose members have equal scores.

        >>> search = Search(nn.Linear(2, 1), OpenAIES(population=8), objective=lambda net: float(net.bias > 0))
        >>> search.rehearse().scores.shape, search.generation
        ((8,), 0)
        """
        session = self._session
        with torch.inference_mode(False):
            started = time.perf_counter()
            result, given = self._score(batch)
            seconds = time.perf_counter() - started
            with torch.no_grad(), single_threaded_torch():
                center = float(session.scorer.objective.score(session.model(), given, session.generation))
        dead_pairs = count_dead_pairs(result.scores, is_mirrored=session.noise.mirrored)
        return Rehearsal(result.scores, center, dead_pairs, seconds)

    def _score(self, batch: tuple[Any, ...]) -> tuple[GenerationResult, Batch | None]:
        session = self._session
        scorer, group = session.scorer, session.fleet.group
        if batch:
            raw = read_batch(batch[0] if len(batch) == 1 else batch, scorer.genome.dtype)
            session.given_batch = Batch.from_raw(raw, scorer.device)
        elif not scorer.objective.of_model:
            raise BadInput("Search.step needs a batch: step(inputs, target), or step(batch) with a dict.")
        given = session.given_batch
        shapes = [tensor.shape for tensor in iterate_tensors([given.args, given.kwargs])] if given else None
        if shapes != self._shapes:
            scorer.try_module(given)
            self._shapes = shapes
        is_first, self._has_joined = not self._has_joined, True
        if is_first:
            self._join()
        group.announce(0.0, 0, hash_batch(given) if group.size > 1 else "")
        if is_first:
            opening.admit_workers(session, build_header(session, {}), given)
        if session.strategy.needs_probe:
            result = probe_sigma(session, given)
            apply_probe(session, Record(result, None, {"seconds": 0.0, "samples": 0, "bytes": (0, 0)}))
        if is_first:
            session.share_update()
        return session.evaluate(session.generation, given), given

    def ask(self) -> Members:
        """Return the members of the generation as one callable; asking twice gives the same members.

        Raises:
            BadInput: The strategy needs a gradient, trains members, or has ``sigma="auto"``; or there are several
                processes, for which ``objective=gl.vectorized(...)`` is.
        """
        session = self._session
        scorer, strategy, number = session.scorer, session.strategy, session.generation
        self._check_asking()
        candidates = strategy.ask(session.state, session.noise, number, session.values(number))

        def find_evaluator(call: Call) -> Evaluator:
            if scorer.plan is None:
                first = candidates
                if not candidates.shared:
                    first = UnsharedCandidates(session.noise, 0, session.state.theta, CHECK_SIGMA)
                copies = 1 if candidates.shared else OFFSPRING_COPIES
                scorer.adopt(scorer.choose_members_plan(strategy.population, first, call, LARGEST_GROUP, copies=copies))
            return scorer.find_evaluator(replace(scorer.chosen_plan, dtype="float32"))

        def fall_back(error: Exception) -> Evaluator:
            plan = replace(ONE_BY_ONE, method="isolated", dropout=scorer.dropout)
            reason = f"its code cannot run for several members at once ({describe_error(error)})"
            warnings.warn(f"This model is evaluated in a slower way, because {reason}.", SlowPath, stacklevel=2)
            scorer.adopt(plan)
            return scorer.evaluator

        def run(work: Callable[[int], Any], count: int) -> list[Any]:
            is_small = 4 * strategy.population * scorer.genome.size < WORTH_THREADS
            threads = 1 if is_small or scorer.device.type != "cpu" else torch.get_num_threads()
            with single_threaded_torch():
                return run_on_threads(work, list(range(count)), threads)

        @contextmanager
        def settings() -> Iterator[None]:
            with exact_arithmetic(scorer.device), seeded_generators(0), torch.inference_mode(False), torch.no_grad():
                yield

        self._is_asked = True
        generation = Generation(candidates, None, scorer.genome, None)
        numbers = np.arange(strategy.population)
        return Members(generation, numbers, find_evaluator, fall_back, run, settings, single_threaded_torch)

    def tell(self, scores: ArrayLike | torch.Tensor) -> None:
        """Move the center by the scores of the members that ``ask`` returns.

        Args:
            scores: One number for each member, in their order. NaN and infinities count as worst.
        """
        session = self._session
        self._check_asking()
        if isinstance(scores, torch.Tensor):
            scores = scores.detach().cpu().numpy()
        given, limit = np.asarray(scores, np.float64), float(np.finfo(np.float32).max)
        numbers = np.where(np.isfinite(given), given.clip(-limit, limit), given).astype(np.float32)
        if numbers.shape != (session.strategy.population,):
            message = f"There are {session.strategy.population} members, but the scores have shape {numbers.shape}"
            raise BadInput(f"{message}: give one score for each member.")
        if not self._is_asked:
            raise BadInput(f"There are no members of generation {session.generation} to tell the scores of: ask first.")
        result = GenerationResult(session.generation, numbers, session.values(session.generation))
        self._advance(result, numbers.size)

    def _check_asking(self) -> None:
        session = self._session
        name, size = session.strategy.name, session.fleet.group.size
        if session.strategy.kind != "evolve":
            raise BadInput(f"The strategy {name} needs the gradient of a loss: use Search.step or gl.train with it.")
        if session.strategy.needs_probe:
            raise BadInput("With sigma='auto' members are scored before the first generation: give sigma a number.")
        if size > 1:
            message = f"There are {size} processes, and Search.ask is for one"
            raise BadInput(f"{message}: give objective=gl.vectorized(function), which all of them share.")

    def _advance(self, result: GenerationResult, samples: int) -> None:
        """Move the center by a result, and record it where the search has a directory."""
        session, started = self._session, self._started
        if self._run is not None and session.journal is None and session.fleet.group.owns_journal:
            self._create_journal(self._run)
        session.advance(result)
        session.generation += 1
        self._is_asked = False
        self._started = time.perf_counter()
        theta = theta_sha256(session.state.theta) if session.driver.records_theta and self._run is not None else None
        info: dict[str, Any] = {"seconds": round(self._started - started, 6), "samples": samples}
        info |= {"bytes": session.fleet.count_bytes(), **sum_observations(result)}
        if session.scorer.plan is not None:
            info["plan"] = asdict(session.scorer.plan)
        record = Record(result, theta, info)
        if session.journal is not None:
            session.journal.append(record)
            session.commit()
            if session.generation % SNAPSHOT_EVERY == 0:
                session.save_snapshot()
        session.note(record)

    def _create_journal(self, path: Path) -> None:
        """Create the journal before the first generation is recorded, when it is known how members are evaluated."""
        session = self._session
        plan, session.scorer.plan = session.scorer.plan, session.scorer.plan or ONE_BY_ONE
        header = build_header(session, {})
        session.scorer.plan = plan
        session.journal, session.path = Journal.create(path, header, session.gather_state()), path

    def _join(self) -> None:
        """Make sure, before the first generation, that all processes of a fleet do the same search."""
        session = self._session
        scorer, strategy, group = session.scorer, session.strategy, session.fleet.group
        session.fleet.start_run()
        opening.share_weights(session)
        session.prepare(session.given_batch)
        scorer.adopt(Plan(**group.broadcast(asdict(scorer.chosen_plan))))
        facts: dict[str, Any] = {
            "noise on its device": noise.field_digest(scorer.device),
            "model": [scorer.genome.fingerprint, session.fixed_norms],
            "strategy": [strategy.name, describe_settings(strategy), session.seed],
            "kind of device": scorer.device.type,
            "generation": session.generation,
            "initial weights": content_sha256(*pack(session.state)),
        }
        group.agree(lambda: facts)

    @property
    def model(self) -> nn.Module:
        """The user's module in evaluation mode, with the weights of the center written into it."""
        session = self._session
        session.scorer.genome.write(session.state.theta, self._module)
        if session.given_batch is not None:
            batch = session.given_batch.copy().to(next(self._module.parameters()).device)
            refresh_statistics(self._module, iter([batch]), session.fixed_norms)
        return self._module.train().eval()  # some modules clear what they have cached when they begin to train

    def state_dict(self) -> dict[str, Any]:
        """Return everything that a search needs to go on: plain values and tensors, for ``torch.save``.

        In a fleet all processes must call this, and all get it.
        """
        session = self._session
        tree, tensors = pack(session.fleet.group.broadcast_state(session.gather_state()))
        plan = session.scorer.plan
        return {
            "strategy": session.strategy.name,
            "strategy_class": class_path(session.strategy),
            "settings": describe_settings(session.strategy),
            "seed": session.seed,
            "plan": asdict(plan) if plan is not None else None,
            "fixed_norms": session.fixed_norms,
            "layout": session.scorer.genome.fingerprint,
            "generation": session.generation,
            "is_asked": self._is_asked,
            "tree": tree,
            "tensors": {name: tensor.clone() for name, tensor in tensors.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a ``state_dict``; the search must be of the same model, with the same objective."""
        session = self._session
        scorer = session.scorer
        if state["layout"] != scorer.genome.fingerprint:
            raise BadInput("This state is that of another model: its parameters have other names or shapes.")
        strategy = restore_strategy(state, session.strategy)
        session.fleet.check(strategy)
        plan = Plan(**state["plan"]) if state["plan"] is not None else None
        restored = Session.create(
            self._module,
            strategy,
            scorer.objective,
            session.fleet,
            state["seed"],
            plan=plan,
            dtype=scorer.dtype,
            dropout=scorer.dropout,
            norms=state.get("fixed_norms", session.fixed_norms),
        )
        device = restored.scorer.device
        tensors = {name: tensor.to(device, copy=True) for name, tensor in state["tensors"].items()}
        restored.state = unpack(restored.state, state["tree"], tensors)
        restored.generation, self._session, self._has_joined = state["generation"], restored, False
        self._is_asked = state.get("is_asked", True)
        restored.journal, restored.path, restored.recipe = session.journal, session.path, session.recipe
