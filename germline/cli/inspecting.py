"""The commands that look: replay, verify, report, recipes, strategies and doctor."""

import dataclasses
import inspect
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from germline.cli.app import command, print_table
from germline.cli.completion import complete_strategy
from germline.cli.options import AgainOptions, AsJson, RunPath
from germline.errors import BadInput, count

if TYPE_CHECKING:
    from germline.engine.session import Session


@command
def replay(
    run: RunPath,
    again: AgainOptions,
    generation: Annotated[int, Option(help="how many generations to replay; 0 is the beginning")],
    export: Annotated[Path, Option(metavar="FILE.safetensors", help="file to write the model to")],
    json_: AsJson = False,
) -> None:
    """Write the model of any generation, from the journal."""
    from germline.engine import replay as replaying
    from germline.engine.export import export_model, export_theta
    from germline.genome import theta_sha256

    if generation < 0:
        raise BadInput(f"There is no generation {generation}.")
    if export.exists():
        raise BadInput(f"{export} exists already, and nothing is overwritten: give another file with --export.")
    session = open_run(run, again, with_recipe=True)
    replaying.replay(session, until=generation)
    theta, is_whole = session.state.theta, session.recipe is not None
    if is_whole:
        export_model(session.model(), export)
    else:
        export_theta(session.scorer.genome, theta, export)
    digest, content = theta_sha256(theta), "model" if is_whole else "trainable weights"
    about = {"run": str(run), "generation": generation, "theta_sha256": digest, "export": str(export)}
    what = "the whole model" if is_whole else "the trainable weights (the whole model needs the recipe)"
    text = f"generation {generation} of {run}: {what} in {export}, theta_sha256 {digest}"
    print(json.dumps(about | {"content": content}) if json_ else text)


@command
def verify(run: RunPath, again: AgainOptions, json_: AsJson = False) -> None:
    """Replay a whole run and check every hash."""
    from germline.engine import replay as replaying

    checked = replaying.verify(open_run(run, again))
    generations, snapshots = count(checked["generations"], "generation"), count(checked["snapshots"], "snapshot")
    counts = f"{generations} and {snapshots} are as they were written"
    text = f"{run}: {counts}, theta_sha256 {checked['theta_sha256']}"
    print(json.dumps({"run": str(run), **checked}) if json_ else text)


def open_run(run: Path, again: AgainOptions, *, with_recipe: bool = False) -> "Session":
    """Open a run to be replayed: from its journal alone, where that is enough.

    Args:
        run: The directory of the run.
        again: What the user has given again.
        with_recipe: Whether the recipe is used where it is known and can be made on this machine.
    """
    from germline.engine import opening
    from germline.engine.header import find_class
    from germline.engine.journal import Journal
    from germline.fleet import Local

    journal = Journal.open(run, read_only=True)
    header = journal.header
    again.adopt(header)
    given = again.find_strategy()
    if find_class(header, given).kind != "evolve":
        return opening.rebuild(again.build_recipe(header, str(run)), journal, Local(header["device"]))
    if with_recipe and again.knows_recipe(header):
        try:
            return opening.rebuild(again.build_recipe(header, str(run)), journal, Local("cpu"))
        except BadInput as error:  # for instance because its data is not on this machine
            if again.recipe is not None:
                raise
            print(f"note: the journal is replayed without the recipe: {error}", file=sys.stderr)
    has_functions = any(isinstance(header["settings"].get(name), dict) for name in ("optimizer", "scheduler"))
    if has_functions:
        given = again.build_recipe(header, str(run)).strategy
    return opening.open_for_replay(journal, given)


@command
def report(
    runs: Annotated[list[Path], Argument(metavar="RUN...", help="directories of runs")],
    out: Annotated[
        Path | None, Option(help="the HTML file (default: report.html in the run, or here for several)")
    ] = None,
) -> None:
    """Write the HTML report of one run, or of several side by side."""
    from germline.reporting.report import read_run, write_report

    file = out or (runs[0] / "report.html" if len(runs) == 1 else Path("report.html"))
    write_report([read_run(run) for run in runs], file)
    print(file)


@command
def recipes() -> None:
    """List the recipes with their settings."""
    from germline.recipes import RECIPES

    rows = []
    for name, make in RECIPES.items():
        parameters = [p for p in inspect.signature(make).parameters.values() if p.name != "seed"]
        settings = "\n".join(f"recipe.{p.name}={p.default}" for p in parameters)
        rows.append((name, (make.__doc__ or "").splitlines()[0], settings))
    print_table(("recipe", "what it is", "settings"), rows)


@command
def strategies(
    name: Annotated[
        str | None, Argument(help="one strategy, to list its settings", autocompletion=complete_strategy)
    ] = None,
) -> None:
    """List the strategies, or all settings of one."""
    from germline.strategies.registry import describe_strategies, find_strategy

    if name is None:
        print_table(("strategy", "what it is"), describe_strategies())
        return
    fields = dataclasses.fields(find_strategy(name))
    rows = [(field.name, field.default, field.metadata.get("meaning", "")) for field in fields]
    print_table(("setting", "default", "meaning"), rows)


@command
def doctor(json_: AsJson = False) -> None:
    """Show devices, kernels, whether their noise agrees, and measured rates."""
    from germline.cli.doctor import examine

    findings = examine()
    if json_:
        print(json.dumps(findings))
    else:
        print_table(("what", "finding"), findings.items())
