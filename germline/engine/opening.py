"""Ways to get hold of a run: set up, start, resume, or open it for a replay."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
from torch import Tensor

from germline import noise
from germline.engine.best import Best
from germline.engine.header import (
    build_header,
    describe_settings,
    name_simulator,
    restore_strategy,
    translate_header_errors,
)
from germline.engine.journal import Journal, Record
from germline.engine.probe import probe_sigma
from germline.engine.replay import apply_probe, replay
from germline.engine.session import Session
from germline.engine.stopping import Stop
from germline.errors import BadInput, count
from germline.fleet.local import Local
from germline.fleet.protocol import Fleet, Scores
from germline.genome import Genome, copy_module, frozen_sha256
from germline.objective import Batches, Data, Objective
from germline.population import Plan, exact_arithmetic, score_first_members, single_threaded_torch
from germline.recipes import Recipe
from germline.stages import announce_stage
from germline.strategies import AnyStrategy, GradientStrategy

COMPARED = 4  # members of generation 0 whose scores are compared before a run goes on
TOLERANCE, COARSE_TOLERANCE = 0.01, 0.1  # of their median difference, as a part of the largest; in bfloat16


def set_up(recipe: Recipe, fleet: Fleet, seed: int) -> Session:
    """Make a recipe's session ready and try its module on the first batch; nothing is written."""
    announce_stage("loading data")
    strategy, splits = fleet.adapt(recipe.strategy), recipe.splits()
    fleet.check(strategy)
    session = Session.create(
        recipe.model, strategy, recipe.goal(), fleet, seed, dtype=recipe.dtype, dropout=recipe.dropout
    )
    workers = 1
    if strategy.kind == "differentiate" and cast(GradientStrategy[Any], strategy).per_worker:
        workers = fleet.group.size
    session.recipe, session.splits = recipe, splits
    session.batches = make_batches(recipe, splits, seed, workers)
    session.scorer.try_module(session.batch(0))
    return session


def make_batches(recipe: Recipe, splits: Mapping[str, Data], seed: int, workers: int = 1) -> Batches | None:
    """Return the batches of a run, which grow with the workers where each has its own; None without training data."""
    if "train" not in splits:
        return None
    train = splits["train"]
    size = recipe.batch_size or train.batch_size or train.length
    return Batches(train, min(workers * size, train.length), seed, recipe.shuffle)


def start(
    recipe: Recipe,
    path: Path,
    *,
    seed: int,
    fleet: Fleet,
    about: Mapping[str, Any],
    stop: Stop | None = None,
    is_named: bool = True,
) -> Session:
    """Start a new run, with generation 0 on disk; nothing is written before everything has been tried.

    Args:
        recipe: The model, the data, the objective and the strategy.
        path: The directory to create.
        seed: The seed of the run's random numbers.
        fleet: Who evaluates the members.
        about: For the header: the name and the settings of the recipe, the command, and which weights are kept.
        stop: The limits of the run.
        is_named: Whether the user has chosen the path; else another one is taken where it exists.
    """
    stop, group = stop or Stop(), fleet.group

    def try_run() -> Session:
        session = set_up(recipe, fleet, seed)
        stop.check(session.scorer.objective, session.splits)
        session.keep(about.get("keep", "last"))
        announce_stage("choosing how members are evaluated")
        session.prepare(session.batch(0))
        return session

    session = group.all_or_none(try_run)
    share_weights(session)
    session.scorer.adopt(Plan(**group.broadcast(asdict(session.scorer.chosen_plan))))
    header = build_header(session, {**about, "stop": asdict(stop)})
    every = [recipe.evaluate_every, recipe.snapshot_every]
    group.agree(lambda: run_facts(session, header) | {"times of evaluation and snapshots": every})
    session.journal = group.all_or_none(
        lambda: Journal.create(path, header, session.state, is_named=is_named) if group.owns_journal else None
    )
    session.path = Path(group.broadcast(str(session.journal.path if session.journal is not None else path)))
    admit_workers(session, header)
    choose_sigma(session)
    session.share_update()
    return session


def start_or_continue(
    recipe: Recipe,
    path: Path,
    *,
    seed: int,
    fleet: Fleet,
    about: Mapping[str, Any],
    stop: Stop | None = None,
    is_named: bool = True,
) -> Session:
    """Start a new run or, where the launcher of this process has started it again, resume the run of the first time."""
    fleet.start_run()
    launch = fleet.launch_name
    expected = {"launch": launch, "seed": seed, "recipe": about.get("recipe"), "command": about.get("command")}
    expected |= {"strategy": recipe.strategy.name}
    places = [path] if is_named else [file.parent for file in path.parent.glob("[!.]*/journal.sqlite")]
    matching = (place for place in places if Journal.header_matches(place, expected))
    earlier = next(matching, None) if launch is not None else None
    if not fleet.group.elect(earlier is not None):
        return start(recipe, path, seed=seed, fleet=fleet, about=about, stop=stop, is_named=is_named)
    owns = earlier is not None and fleet.group.owns_journal
    return resume(recipe, Journal.open(cast(Path, earlier)) if owns else None, fleet)


def resume(recipe: Recipe, journal: Journal | None, fleet: Fleet) -> Session:
    """Return a run as its journal left it, ready for the next generation.

    Args:
        recipe: What the run was started with; its strategy gives functions among the settings, and classes that are
            not part of this package.
        journal: The run's journal; None in a process of a fleet that does not own it.
        fleet: Who evaluates the members.
    """
    group = fleet.group
    session = group.all_or_none(lambda: rebuild(recipe, journal, fleet))
    device = session.scorer.device
    group.agree(lambda: {"noise on its device": noise.field_digest(device), "kind of device": device.type})
    announce_stage("replaying the journal")
    group.on_journal_rank(lambda: replay_and_check(session))
    about = dict(session.totals()), asdict(session.scorer.chosen_plan), session.probed
    totals, plan, session.probed = group.broadcast(about)
    best = totals.pop("best")
    session.best = Best(**best) if best is not None else None
    for name, value in totals.items():
        setattr(session, name, value)
    session.scorer.normalize(session.observations)
    session.scorer.adopt(Plan(**plan))
    if session.strategy.needs_probe and session.probed:
        session.strategy = session.strategy.after_probe(session.probed)
    session.state = group.broadcast_state(session.state)
    if session.journal is not None:
        admit_workers(session, session.journal.header)
    choose_sigma(session)
    session.share_update()
    return session


def replay_and_check(session: Session) -> None:
    """Replay a run that is to go on, and make sure that it goes on with the same score and the same module's code.

    A few members of generation 0 are scored again, as plain copies of the module. Objectives of the whole model are not
    compared, because their scores may differ from call to call.
    """
    replay(session)
    journal, scorer = session.require_journal(), session.scorer
    plan = Plan(**journal.header["plan"])
    first = next((record.result for record in journal.records() if record.result.generation == 0), None)
    is_alike = session.strategy.kind == "evolve" and not (plan.dropout or plan.renewed)
    batch = session.batch(0)
    if not is_alike or batch is None or first is None or not first.scores.size or 0 not in journal.snapshots():
        return
    state = journal.load(session.state, 0, scorer.device)
    candidates = session.strategy.ask(state, session.noise, 0, first.values)
    with single_threaded_torch(), exact_arithmetic(scorer.device):
        plain = scorer.build_evaluator(Plan(1, "isolated", vectorized=False))
        scores = score_first_members(plain, candidates, batch, min(COMPARED, first.scores.size))
    recorded, tolerance = first.scores[: len(scores)], COARSE_TOLERANCE if plan.dtype == "bfloat16" else TOLERANCE
    if np.isfinite(recorded).all():
        difference = np.abs(scores.astype(np.float64) - recorded) / max(np.abs(recorded).max(), 1e-30)
        if not np.median(difference) <= tolerance:
            message = f"The score, the data or the code of the module is not that of {journal.path}"
            values = f"the first members of generation 0 have the scores {format_scores(scores)}"
            raise BadInput(f"{message}: {values}, and had {format_scores(recorded)}.")


def format_scores(scores: Scores) -> str:
    """Return scores as a text."""
    return ", ".join(f"{score:.4g}" for score in scores)


def rebuild(recipe: Recipe, journal: Journal | None, fleet: Fleet) -> Session:
    """Return a run before its first generation, from its recipe and the header of its journal."""
    content = (dict(journal.header), str(journal.path)) if journal is not None else ({}, "")
    header, path = fleet.group.broadcast(content)
    if fleet.sends_weights:
        model = copy_module(recipe.model)
        model.load_state_dict(fleet.group.broadcast_state(dict(model.state_dict())))
        recipe = replace(recipe, model=model)
    session = rebuild_from_header(recipe, header, fleet, path)
    session.journal, session.path = journal, Path(path)
    return session


def rebuild_from_header(recipe: Recipe, header: Mapping[str, Any], fleet: Fleet, run: str) -> Session:
    """Return a run before its first generation; what differs from its header is an error that names it."""
    announce_stage("loading data")
    splits = recipe.splits()
    with translate_header_errors(run):
        strategy, plan = restore_strategy(header, recipe.strategy), Plan(**header["plan"])
    fleet.check(strategy)
    norms = header.get("fixed_norms", [])
    session = Session.create(recipe.model, strategy, recipe.goal(), fleet, header["seed"], plan=plan, norms=norms)
    assert session.scorer.module is not None
    frozen = frozen_sha256(session.scorer.module)
    layout = session.scorer.genome.describe()
    if layout != header["layout"]:
        message = f"The model is not that of {run}: a run goes on only with what it began with"
        trained = f"The run trains {list_parameters(header['layout'])}, and this model {list_parameters(layout)}"
        raise BadInput(f"{message}. {trained}; trainable= has to be given again.")
    train, size = splits.get("train"), recipe.batch_size
    given = min(size, train.length) if size is not None and train is not None else None
    is_multiple = strategy.kind == "differentiate" and cast(GradientStrategy[Any], strategy).per_worker
    if given not in (None, header["batch_size"]) and not is_multiple:
        message = f"{run} was started with batch_size={header['batch_size']}, not {size}"
        raise BadInput(f"{message}: a run keeps its settings.")
    differences = {
        "objective": (session.scorer.objective.maximize, header["maximize"]),
        "simulator": (name_simulator(session.scorer.objective), header.get("simulator")),
        "order of the batches": (recipe.shuffle, header["shuffle"]),
        "value of the model's frozen parameters and buffers": (frozen, header["frozen_sha256"]),
    }
    if header["data"]:  # otherwise the caller gives batches one by one
        differences |= {f"{name} data": (data.fingerprint, header["data"].get(name)) for name, data in splits.items()}
    for what, (here, there) in differences.items():
        if here != there:
            raise BadInput(f"The {what} is not that of {run}: a run goes on only with what it began with.")
    session.recipe, session.splits, session.keeps_best = recipe, splits, header.get("keep") == "best"
    session.batches = make_batches(replace(recipe, batch_size=header["batch_size"]), splits, header["seed"])
    if session.batches is not None or session.scorer.objective.of_model:
        session.scorer.try_module(session.batch(0))
    return session


def list_parameters(layout: Sequence[Any]) -> str:
    """Return what a layout describes in a few words.

    >>> list_parameters([["head.weight", [3, 4], "torch.float32", []], ["head.bias", [3], "torch.float32", []]])
    '2 parameters (head.weight 3 x 4, head.bias 3)'
    """
    shown = [f"{name} {' x '.join(map(str, shape))}".strip() for name, shape, *_ in layout[:3]]
    return f"{count(len(layout), 'parameter')} ({', '.join(shown)}{', ...' if len(layout) > len(shown) else ''})"


def replay_alone(session: Session, generation: int) -> Session:
    """Return a run as it was after some generations, replayed from its journal by this process alone."""
    journal, module = session.require_journal(), session.scorer.module
    assert session.recipe is not None
    assert module is not None
    recipe = replace(session.recipe, model=module).with_strategy(session.strategy)
    past = rebuild_from_header(recipe, journal.header, Local(str(session.scorer.device)), str(journal.path))
    past.journal = journal
    replay(past, until=generation)
    return past


def replay_theta(session: Session, generation: int) -> Tensor:
    """Return the weights that a run had after some generations."""
    theta: Tensor = replay_alone(session, generation).state.theta
    return theta


def go_back(session: Session, generation: int) -> None:
    """Undo all generations of a run from one on, in its journal too: their scores were wrong."""
    session.require_journal().truncate(generation)
    past = replay_alone(session, generation)
    session.state, session.history, session.best = past.state, past.history, past.best
    for name, value in past.totals().items():
        if name != "best":
            setattr(session, name, value)
    session.best_theta = session.last_gradient = session.prefetched_batch = None
    session.fleet.go_back(generation)
    session.share_update()


def open_for_replay(journal: Journal, given: AnyStrategy | None = None) -> Session:
    """Return a run of an ``evolve`` strategy from its journal alone: to be replayed, not to go on."""
    header = journal.header
    objective = Objective(lambda model: float("nan"), header["maximize"], of_model=True)
    with translate_header_errors(str(journal.path)):
        strategy = restore_strategy(header, given, for_replay=True)
        genome = Genome.from_description(header["layout"])
        if genome.size * genome.dtype.itemsize > journal.snapshot_bytes(0):  # a header may name any number
            raise BadInput(f"The header of {journal.path} is of {genome.size} parameters, its snapshot 0 of fewer.")
        session = Session.create(None, strategy, objective, Local("cpu"), header["seed"], genome=genome)
    session.journal, session.path = journal, journal.path
    return session


def check_same_settings(strategy: AnyStrategy, header: Mapping[str, Any], run: str) -> None:
    """Raise an error if a strategy has other settings than a run; the number of ranks may have changed two of them."""
    processes, recorded = header["processes"], header["settings"]
    for name, value in describe_settings(strategy.bind(Genome.from_description(header["layout"]))).items():
        allowed = [value]
        if name == "shards" and value == 1:
            allowed.append(processes)
        grows_by = {"slices": "per_worker", "population": "samples_per_worker"}.get(name)
        if grows_by is not None and recorded.get(grows_by):
            allowed.append(processes * value)
        if recorded.get(name, value) not in allowed:
            raise BadInput(f"{run} was started with {name}={recorded[name]}, not {value}: a run keeps its settings.")


def admit_workers(session: Session, header: Mapping[str, Any], batch: Any = None) -> None:
    """Let workers of a cluster in: they begin with what the journal says, and with what has been chosen since."""
    chosen = {"settings": describe_settings(session.strategy), "plan": asdict(session.scorer.chosen_plan)}
    first = batch if batch is not None else session.batch(0)
    session.fleet.admit({**header, **chosen}, lambda: session.score_sample(first), batch, session.recipe)


def run_facts(session: Session, header: Mapping[str, Any]) -> dict[str, Any]:
    """Return what must be the same in all processes of a fleet."""
    device = session.scorer.device
    return {
        "version of the noise": noise.VERSION,
        "kind of device": device.type,
        "limit at which to stop": header["stop"],
        "choice of the weights to keep": header["keep"],
        "noise on its device": noise.field_digest(device),
        "mode of MKL (import germline before the first matrix product)": header["products"] == "OFF",
        "recipe": [header["recipe"], header["recipe_settings"], header["batch_size"], header["maximize"]],
        "strategy": [header["strategy"], header["settings"], header["seed"]],
        "model (names, shapes or types of its parameters)": header["layout"],
        **{f"data set ({name})": fingerprint for name, fingerprint in header["data"].items()},
        "initial weights": header["initial_theta_sha256"],
        "simulator": header.get("simulator"),
        "mode of the model's norms": header.get("fixed_norms", []),
        "value of the model's frozen parameters and buffers": header["frozen_sha256"],
    }


def share_weights(session: Session) -> None:
    """Have all processes begin with the weights of the one that owns the journal, where the fleet is asked to."""
    module, group = session.scorer.module, session.fleet.group
    if session.fleet.sends_weights and module is not None:
        module.load_state_dict(group.broadcast_state(dict(module.state_dict())))
        session.state = session.driver.init(session, session.read_theta())
        session.scorer.evaluators.clear()


def choose_sigma(session: Session) -> None:
    """Choose sigma by a probe where the strategy asks for one, and record the choice."""
    if not session.strategy.needs_probe:
        return
    started = time.perf_counter()
    batch = session.batch(0)
    result = probe_sigma(session, batch)
    samples = result.scores.size * (batch.size if batch else 1)
    seconds = round(time.perf_counter() - started, 6)
    info = {"seconds": seconds, "samples": samples, "bytes": session.fleet.count_bytes()}
    record = Record(result, None, session.fleet.group.broadcast(info))
    if session.journal is not None:
        session.journal.append(record)
        session.journal.commit()
    apply_probe(session, record)
    announce_stage(describe_choice(session.strategy, result.values["sigma"]))


def describe_choice(strategy: AnyStrategy, sigma: float) -> str:
    """Return the settings of a run whose sigma was chosen by a probe, as a sentence."""
    settings = vars(strategy)
    rank = f", rank {settings['rank']}" if settings.get("rank") is not None else ""
    return f"{strategy.name}: sigma {sigma:g} by probe, population {strategy.population}{rank}."
