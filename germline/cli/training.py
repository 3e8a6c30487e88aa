"""The commands that train: train and resume."""

import json
import shlex
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast, get_args

import typer

from germline.cli import options
from germline.cli.app import command
from germline.errors import BadInput, count, unknown_name

if TYPE_CHECKING:
    from germline.cli.status import Status
    from germline.engine.session import Session
    from germline.engine.stopping import Stop
    from germline.fleet import Fleet
    from germline.recipes import Recipe

FLEETS = ("local", "spmd", "elastic", "dask", "ray")


@command
def train(
    recipe: options.RecipeName,
    strategy: options.StrategyOptions,
    stop: options.StopOptions,
    machine: options.MachineOptions,
    fleet: options.FleetOptions,
    output: options.OutputOptions,
    seed: options.Seed = 0,
    keep: options.Keep = None,
    baseline: Annotated[bool, typer.Option(help="afterwards train by backprop for the same time")] = False,
) -> None:
    """Train a recipe."""
    from germline.engine import opening
    from germline.engine.journal import free_directory
    from germline.engine.stopping import Stop
    from germline.recipes import make_recipe
    from germline.reporting.numbers import format_metric
    from germline.reporting.report import read_run, write_report

    machine.apply()
    with show_stages("loading data"):
        made, about = strategy.build_recipe(recipe, seed, machine.dtype, stop.evaluations)
    about["keep"] = keep or "last"
    limits, is_named = stop.limits(made), output.name is not None
    default = free_directory(output.runs / f"{Path(recipe).stem}-{made.strategy.name}-{seed}")
    path = output.runs / output.name if output.name is not None else default
    if baseline and fleet.fleet != "local":
        raise BadInput("The baseline is trained in one process: leave out --baseline or --fleet.")
    chosen = build_fleet(fleet, machine.device, about["recipe"], strategy.strategy)
    start = partial(opening.start_or_continue, seed=seed, fleet=chosen, is_named=is_named)
    about_run = {**about, "command": command_line()}
    if not baseline:
        with show_stages():
            session = start(made, path, about=about_run, stop=limits)
        run_to_end(session, limits, as_json=output.json_, strategy=strategy.strategy, fleet=fleet)
        return
    other = options.replace_strategy(make_recipe(recipe, about["recipe_settings"], seed), "gradient", {})
    other_path = path.with_name(path.name + "-backprop")
    check_baseline(other, other_path, chosen)
    session = start(made, path, about=about_run, stop=limits)
    summary = run_to_end(session, limits, as_json=False)
    same_time = Stop(seconds=summary["seconds"])
    words = ["--strategy", "gradient", "--seconds", str(summary["seconds"]), "--seed", str(seed)]
    about_run = {**about, "command": shlex.join(["germline", "train", recipe, *words])}
    second = start(other, other_path, about=about_run, stop=same_time)
    compared = run_to_end(second, same_time, as_json=False, quiet=True)
    for key in choose_compared(summary["metrics"]):
        first = f"{format_metric(key, summary['metrics'][key])} by {summary['strategy']}, without a gradient"
        by_backprop = f"{format_metric(key, compared['metrics'][key])} by backprop on the same net and data"
        print(f"{first}; {by_backprop} in the same {summary['seconds']:.1f} s")
    write_report([read_run(session.path), read_run(second.path)], session.path / "report.html")
    if output.json_:
        print(json.dumps(summary))


@command
def resume(
    run: options.RunPath,
    again: options.AgainOptions,
    stop: options.StopOptions,
    fleet: options.FleetOptions,
    data: options.DataOptions,
    device: Annotated[
        str | None, typer.Option(help="device of the members: auto, cpu, cuda, cuda:N or mps (default: the run's)")
    ] = None,
    keep: options.Keep = None,
    json_: options.AsJson = False,
) -> None:
    """Go on where a run stopped."""
    from germline.engine import opening
    from germline.engine.header import translate_header_errors
    from germline.engine.journal import Journal
    from germline.engine.stopping import Stop

    data.apply()
    is_here = (run / "journal.sqlite").is_file()
    recipe, default_device = again.recipe, "auto"
    if is_here:
        known = Journal.open(run, read_only=True).header
        again.adopt(known)
        recipe, default_device = again.require_recipe(known, str(run)), known["device"]  # before workers load it
    chosen = build_fleet(fleet, device or default_device, recipe, again.strategy)
    chosen.start_run()
    if not chosen.group.elect(is_here):
        Journal.open(run)  # raises an error that says what is missing
    journal = Journal.open(run) if chosen.group.owns_journal else None
    header = chosen.group.broadcast(dict(journal.header) if journal is not None else {})
    with show_stages("loading data"):
        session = opening.resume(again.build_recipe(header, str(run)), journal, chosen)
    session.keep(keep or header.get("keep", "last"))
    given = stop.limits()
    refuse_fewer_generations(given, session)
    with translate_header_errors(str(run)):
        limits = given if given != Stop() else Stop.from_header(header["stop"])
    if limits is not given and limits.generations == session.generation and session.fleet.group.rank == 0:
        reached = f"the run has reached its limit of {count(limits.generations, 'generation')}"
        print(f"note: {reached}; to go on, give --generations above it", file=sys.stderr)
    run_to_end(session, limits, as_json=json_, strategy=again.strategy, fleet=fleet)


def refuse_fewer_generations(stop: "Stop", session: "Session") -> None:
    """Raise an error if a run has more generations already than it shall have."""
    if stop.generations is not None and stop.generations < session.generation:
        done = f"The run has {count(session.generation, 'generation')} already"
        raise BadInput(f"{done}: give --generations above {session.generation}.")


@contextmanager
def show_stages(first: str | None = None) -> Iterator[None]:
    """Show within the block what this process does before the first generation, in one process of a fleet."""
    from germline.engine.stopping import Stop
    from germline.fleet.spmd.launch import find_launch
    from germline.reporting.progress import Progress
    from germline.stages import announce_stage

    with Progress(Stop(), is_quiet=bool(find_launch().rank)).shown():
        if first is not None:
            announce_stage(first)
        yield


def run_to_end(
    session: "Session",
    stop: "Stop",
    *,
    as_json: bool,
    quiet: bool = False,
    status: "Status | None" = None,
    strategy: str | None = None,
    fleet: options.FleetOptions | None = None,
) -> dict[str, Any]:
    """Run a session to its end, with progress, and print its summary.

    Args:
        session: The run.
        stop: When it ends.
        as_json: Whether the summary is printed as JSON.
        quiet: Whether nothing else is printed.
        status: The status page, if there is one.
        strategy: The strategy that the user named, for the command that resumes the run.
        fleet: The fleet that the user asked for, for the same command.
    """
    from germline.engine import loop
    from germline.reporting.numbers import format_metrics
    from germline.reporting.progress import Progress
    from germline.reporting.report import write_results

    path, is_first = session.path, session.fleet.group.rank == 0
    below = status.table if status is not None else None
    with Progress(stop, below, is_quiet=not is_first).shown() as progress:
        summary = loop.run(session, stop, [progress, *([status] if status is not None else [])])
    is_interrupted = summary["stopped_by"] == "interrupt"
    session.fleet.close(ended=not is_interrupted)
    if session.journal is not None:
        write_results(session, session.rows(), summary)
        session.journal.close()
    if is_interrupted and is_first:
        how = "the same command" if status is not None else resume_command(session, strategy, fleet)
        print(f"interrupted after generation {session.generation}; go on with: {how}", file=sys.stderr)
    if as_json and is_first:
        print(json.dumps(summary))
    elif not quiet and is_first:
        time = f"{count(summary['generations'], 'generation')} in {summary['seconds']:.1f} s"
        print(f"{time}  {format_metrics(summary['metrics'])}")
        if summary["kept_generation"] != summary["generations"]:
            after = count(summary["kept_generation"], "generation")
            print(f"the result has the weights after {after}, the best on dev")
        print(f"run: {path}\nreport: {path / 'report.html'}")
    if is_interrupted:
        raise typer.Exit(130)
    return summary


def build_fleet(chosen: options.FleetOptions, device: str, recipe: str | None, strategy: str | None) -> "Fleet":
    """Return the fleet that was asked for; an spmd fleet of --workers is launched here, and this process ends."""
    from germline.fleet import SPMD, Dask, Elastic, Local, Ray
    from germline.fleet.spmd.exchange import Exchange
    from germline.fleet.spmd.fleet import TIMEOUT
    from germline.fleet.spmd.launch import find_launch, run_ranks

    if chosen.fleet not in FLEETS:
        raise unknown_name("fleet", chosen.fleet, FLEETS)
    if chosen.exchange is not None and chosen.exchange not in get_args(Exchange):
        raise unknown_name("exchange", chosen.exchange, get_args(Exchange))
    owners = {"address": ("dask", "ray"), "keys": ("dask",), "exchange": ("spmd",), "timeout": ("spmd",)}
    for option, fleets in owners.items():
        if getattr(chosen, option) is not None and chosen.fleet not in fleets:
            raise BadInput(f"--{option} is for --fleet {' or '.join(fleets)}: leave it out.")
    if chosen.workers is not None and chosen.fleet in ("dask", "ray"):
        raise BadInput(f"The workers of --fleet {chosen.fleet} are those of the cluster: leave out --workers.")
    if chosen.fleet == "local":
        return Local(device, chosen.workers)
    if chosen.fleet == "elastic":
        outside = strategy if strategy is not None and ":" in strategy else None
        return Elastic(device=device, workers=chosen.workers or 2, recipe=recipe, strategy=outside)
    if chosen.fleet in ("dask", "ray"):
        if chosen.address is None:
            raise BadInput(f"Say where the cluster is, with --address HOST:PORT, for --fleet {chosen.fleet}.")
        if chosen.fleet == "dask":
            return Dask(chosen.address, keys=chosen.keys, device=device)
        return Ray(chosen.address, device=device)
    if chosen.workers is not None and chosen.workers > 1 and find_launch().by == "none":
        raise typer.Exit(run_ranks([sys.executable, "-m", "germline", *sys.argv[1:]], chosen.workers))
    timeout = chosen.timeout if chosen.timeout is not None else TIMEOUT
    return SPMD(cast(Exchange, chosen.exchange or "auto"), device=device, timeout=timeout)


def check_baseline(recipe: "Recipe", path: Path, fleet: "Fleet") -> None:
    """Raise an error if there can be no baseline by backprop, before the run starts."""
    from germline.engine import opening
    from germline.engine.drivers import Differentiate

    if path.exists():
        raise BadInput(f"{path} exists already: give another --name.")
    session = opening.set_up(recipe, fleet, seed=0)
    session.prepare(session.batch(0))
    try:
        Differentiate().differentiate(session, 0, session.batch(0), {})
    except BadInput as error:
        if recipe.baseline_loss is not None:
            raise
        advice = "name one with gl.Recipe(..., baseline_loss=...), or leave out --baseline"
        raise BadInput(f"{error} The recipe has no baseline_loss for backprop either: {advice}.") from None


def choose_compared(metrics: Mapping[str, float]) -> list[str]:
    """Return the metrics of the test set by which two runs are compared, or else their losses or scores.

    >>> choose_compared({"test_loss": 0.1, "test_accuracy": 0.9, "dev_accuracy": 0.8})
    ['test_accuracy']
    >>> choose_compared({"dev_score": 1.0, "train_score": 2.0})
    ['dev_score']
    """
    is_goal = {key: key.endswith(("_loss", "_score")) for key in metrics}
    for split in ("test_", "dev_", "train_"):
        known = [key for key in metrics if key.startswith(split)]
        if known:
            return [key for key in known if not is_goal[key]] or known
    return []


def resume_command(session: "Session", strategy: str | None, fleet: options.FleetOptions | None) -> str:
    """Return the command that resumes a run; it names again what is not part of this package, and a cluster."""
    from germline.recipes import RECIPES
    from germline.strategies import STRATEGIES

    header = session.journal.header if session.journal is not None else {}
    words = ["germline", "resume", str(session.path)]
    if header.get("recipe") not in (None, *RECIPES):
        words += ["--recipe", header["recipe"]]
    if strategy is not None and strategy not in STRATEGIES:
        words += ["--strategy", strategy]
    if fleet is not None and fleet.address is not None:
        words += ["--fleet", fleet.fleet, "--address", fleet.address]
        words += ["--keys", str(fleet.keys)] if fleet.keys is not None else []
    return shlex.join(words)


def command_line() -> str:
    """Return the command that this process was started with."""
    return shlex.join(["germline", *sys.argv[1:]])
