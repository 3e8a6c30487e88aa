"""The command line: parse, build, call. Results go to standard output, everything else to standard error."""

import dataclasses
import functools
import inspect
import json
import os
import shlex
import sys
import typing
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from rich.console import Console
from rich.table import Table

from germline import trainer
from germline.api import free_directory
from germline.errors import BadInput, unknown
from germline.fleet import Local
from germline.genome import theta_sha256
from germline.journal import Journal
from germline.progress import Progress
from germline.recipe import Recipe
from germline.recipes import RECIPES, make
from germline.report import write_curves, write_report
from germline.strategies import STRATEGIES, strategy_class
from germline.strategies.settings import parse

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help=__doc__)
F = TypeVar("F", bound=Callable[..., Any])


def command(function: F) -> F:
    """A command whose bad input ends in a sentence and exit code 2."""

    @functools.wraps(function)
    def called(*arguments: Any, **options: Any) -> None:
        try:
            function(*arguments, **options)
        except BadInput as error:
            print(f"error: {error}", file=sys.stderr)
            raise typer.Exit(2) from None
        except KeyboardInterrupt:
            print("interrupted; every finished generation is on disk", file=sys.stderr)
            raise typer.Exit(130) from None

    return typing.cast(F, app.command()(called))


RecipeName = Annotated[str, typer.Argument(metavar="RECIPE", help="a name, a Python file, or module:function")]
RunPath = Annotated[Path, typer.Argument(metavar="RUN", help="the directory of a run")]
StrategyName = Annotated[str | None, typer.Option("--strategy", help="see 'germline strategies'")]
Population = Annotated[int | None, typer.Option(help="members of a generation")]
Rank = Annotated[str | None, typer.Option(help="rank of the noise of matrices, or none for dense noise")]
Seed = Annotated[int, typer.Option(help="of everything that is drawn")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:N or mps")]
Workers = Annotated[int | None, typer.Option(help="threads that share the members on a CPU")]
DataDir = Annotated[Path | None, typer.Option("--data", help="where data sets lie, else GERMLINE_DATA")]
Runs = Annotated[Path, typer.Option(help="where runs are kept")]
Name = Annotated[str | None, typer.Option(help="of the run's directory")]
AsJson = Annotated[bool, typer.Option("--json", help="the last line of standard output is one JSON object")]
Generations = Annotated[int | None, typer.Option(help="stop after so many generations in all")]
Seconds = Annotated[float | None, typer.Option(help="stop after so many seconds of training in all")]
Target = Annotated[str | None, typer.Option(metavar="METRIC=VALUE", help="stop when a metric is reached")]
Settings = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="of the strategy, or recipe.KEY")
]


@command
def train(
    recipe: RecipeName,
    strategy: StrategyName = None,
    population: Population = None,
    rank: Rank = None,
    seed: Seed = 0,
    device: Device = "auto",
    workers: Workers = None,
    data: DataDir = None,
    runs: Runs = Path("runs"),
    name: Name = None,
    json_: AsJson = False,
    generations: Generations = None,
    seconds: Seconds = None,
    target: Target = None,
    settings: Settings = None,
    baseline: Annotated[bool, typer.Option(help="then train by backprop for the same time, to compare")] = False,
) -> None:
    """Train a recipe."""
    if data is not None:
        os.environ["GERMLINE_DATA"] = str(data)
    own, of_recipe = split_settings(settings or [])
    made = make(recipe, of_recipe, seed)
    shortcuts = {"population": population, "rank": rank}
    own |= {key: str(value) for key, value in shortcuts.items() if value is not None}
    made = with_strategy(made, strategy, own)
    stop = stop_of(generations, seconds, target, made)
    path = runs / name if name is not None else free_directory(runs, f"{Path(recipe).stem}-{made.strategy.name}-{seed}")
    about = {
        "recipe": recipe,
        "recipe_settings": of_recipe,
        "command": command_line(),
        "stop": dataclasses.asdict(stop),
    }
    fleet = Local(device, workers)
    summary = finish(
        trainer.start(made, path, seed=seed, fleet=fleet, about=about), stop, as_json=json_ and not baseline
    )
    if baseline and summary["stopped_by"] != "interrupt":
        made = with_strategy(make(recipe, of_recipe, seed), "gradient", {})
        other = trainer.start(made, path.with_name(path.name + "-backprop"), seed=seed, fleet=fleet, about=about)
        compared = finish(other, trainer.Stop(seconds=summary["seconds"]), as_json=False, quiet=True)
        for key, value in summary["metrics"].items():
            if key.startswith("test_") and not key.endswith(("_loss", "_score")):
                said = f"{key.replace('_', ' ')}: {value:.4f} by {summary['strategy']}, without a gradient; "
                beside = f"{compared['metrics'][key]:.4f} by backprop on the same net and data"
                print(f"{said}{beside} in the same {summary['seconds']:.1f} s")
        write_report(
            [path, other.journal.path], path / "report.html", {path.name: summary, other.journal.path.name: compared}
        )
        if json_:
            print(json.dumps(summary))


@command
def resume(
    run: RunPath,
    device: Annotated[
        str | None, typer.Option(help="auto, cpu, cuda, cuda:N or mps; that of the run if not given")
    ] = None,
    workers: Workers = None,
    data: DataDir = None,
    json_: AsJson = False,
    generations: Generations = None,
    seconds: Seconds = None,
    target: Target = None,
) -> None:
    """Go on where a run stopped."""
    if data is not None:
        os.environ["GERMLINE_DATA"] = str(data)
    journal = Journal.open(run)
    session = trainer.resume(recipe_of(journal), journal, Local(device or journal.header["device"], workers))
    said = journal.header["stop"]
    if generations is None and seconds is None and target is None:
        stop = trainer.Stop(
            said.get("generations"), said.get("seconds"), tuple(said["target"]) if said.get("target") else None
        )
    else:
        stop = stop_of(generations, seconds, target, None)
    finish(session, stop, as_json=json_)


@command
def replay(
    run: RunPath,
    generation: Annotated[int, typer.Option(help="how many generations to replay; 0 is the beginning")],
    export: Annotated[Path, typer.Option(metavar="FILE.safetensors", help="where to write the weights")],
    json_: AsJson = False,
) -> None:
    """Write the weights of any generation, from the journal."""
    if generation < 0:
        raise BadInput(f"There is no generation {generation}.")
    session = session_of(run)
    trainer.replay(session, until=generation)
    core = session.core
    digest = theta_sha256(core.state.theta)
    trainer.export_theta(core.genome, core.state.theta, export)
    print(json.dumps({"run": str(run), "generation": generation, "theta_sha256": digest, "export": str(export)})
          if json_ else f"generation {generation} of {run}: {export}, theta_sha256 {digest}")  # fmt: skip


@command
def verify(run: RunPath, json_: AsJson = False) -> None:
    """Replay a whole run and check every hash."""
    found = trainer.verify(session_of(run))
    text = f"{found['generations']} generations and {found['snapshots']} snapshots are as they were written"
    print(json.dumps({"run": str(run), **found}) if json_ else f"{run}: {text}, theta_sha256 {found['theta_sha256']}")


@command
def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="directories of runs")],
    out: Annotated[Path | None, typer.Option(help="the HTML file; in the first run if not given")] = None,
) -> None:
    """Write the HTML report of one run, or of several side by side."""
    file = out or runs[0] / "report.html"
    write_report(runs, file)
    print(file)


@command
def recipes() -> None:
    """List the recipes with their settings."""
    table = Table("recipe", "what it is", "settings")
    for name, maker in RECIPES.items():
        parameters = [p for p in inspect.signature(maker).parameters.values() if p.name != "seed"]
        table.add_row(
            name, (maker.__doc__ or "").splitlines()[0], "\n".join(f"recipe.{p.name}={p.default}" for p in parameters)
        )
    Console().print(table)


@command
def strategies(name: Annotated[str | None, typer.Argument(help="one of them, with every setting")] = None) -> None:
    """List the strategies, or all settings of one."""
    if name is None:
        table = Table("strategy", "what it is")
        for key, cls in STRATEGIES.items():
            table.add_row(key, (cls.__doc__ or "").splitlines()[0])
    else:
        table = Table("setting", "default", "meaning")
        for field in dataclasses.fields(strategy_class(name)):
            table.add_row(field.name, str(field.default), field.metadata.get("meaning", ""))
    Console().print(table)


@command
def doctor(json_: AsJson = False) -> None:
    """Show devices, kernels, whether their noise agrees, and measured rates."""
    from germline.doctor import examine

    found = examine()
    if json_:
        print(json.dumps(found))
        return
    table = Table("what", "found")
    for key, value in found.items():
        table.add_row(key, str(value))
    Console().print(table)


def finish(session: trainer.Session, stop: trainer.Stop, *, as_json: bool, quiet: bool = False) -> dict[str, Any]:
    """Runs a session to its end, with progress, and says what came of it."""
    path = session.journal.path
    with Progress(stop).shown() as progress:
        summary = trainer.run(session, stop, [progress])
    write_curves(session.history, path / "curves.csv")
    session.journal.close()
    write_report([path], path / "report.html", {path.name: summary})
    if summary["stopped_by"] == "interrupt":
        print(f"interrupted after generation {session.generation}; go on with: germline resume {path}", file=sys.stderr)
    if as_json:
        print(json.dumps(summary))
    elif not quiet:
        told = "  ".join(f"{key.replace('_', ' ')} {value:.4f}" for key, value in summary["metrics"].items())
        print(f"{summary['generations']} generations in {summary['seconds']:.1f} s  {told}")
        print(f"run: {path}\nreport: {path / 'report.html'}")
    if summary["stopped_by"] == "interrupt":
        raise typer.Exit(130)
    return summary


def split_settings(settings: Sequence[str]) -> tuple[dict[str, str], dict[str, str]]:
    """Those of the strategy and those of the recipe."""
    own: dict[str, str] = {}
    of_recipe: dict[str, str] = {}
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not equals or not key:
            raise BadInput(f"--set takes KEY=VALUE, not {setting!r}.")
        (of_recipe if key.startswith("recipe.") else own)[key.removeprefix("recipe.")] = value
    return own, of_recipe


def with_strategy(recipe: Recipe, name: str | None, settings: dict[str, str]) -> Recipe:
    """The recipe with the strategy asked for, at the recipe's own settings of it, changed as asked."""
    strategy = recipe.strategy
    if name is not None and name != strategy.name:
        cls = strategy_class(name)
        strategy = recipe.others.get(name) or cls()
    kinds = typing.get_type_hints(type(strategy))
    names = [field.name for field in dataclasses.fields(strategy)]  # type: ignore[arg-type]
    for key in settings:
        if key not in names:
            raise unknown(f"setting of {strategy.name}", key, names)
    values = {key: parse(kinds[key], key, text) for key, text in settings.items()}
    return dataclasses.replace(recipe, strategy=dataclasses.replace(strategy, **values))  # type: ignore[type-var]


def stop_of(generations: int | None, seconds: float | None, target: str | None, recipe: Recipe | None) -> trainer.Stop:
    if generations is not None and generations < 0:
        raise BadInput(f"--generations must not be negative, but is {generations}.")
    goal = None
    if target is not None:
        metric, _, value = target.partition("=")
        try:
            goal = (metric, float(value))
        except ValueError:
            raise BadInput(f"--target takes METRIC=VALUE, such as dev_accuracy=0.95, not {target!r}.") from None
    if recipe is not None and generations is None and seconds is None:
        generations = recipe.generations
    return trainer.Stop(generations, seconds, goal)


def recipe_of(journal: Journal) -> Recipe:
    header = journal.header
    if header["recipe"] is None:
        message = f"{journal.path} was begun in Python, not by a recipe: go on there, with "
        raise BadInput(message + f"gl.train(..., resume={str(journal.path)!r}).")
    recipe = make(header["recipe"], header["recipe_settings"], header["seed"])
    strategy = recipe.strategy if recipe.strategy.name == header["strategy"] else recipe.others.get(header["strategy"])
    return dataclasses.replace(recipe, strategy=strategy or strategy_class(header["strategy"])())


def session_of(run: Path) -> trainer.Session:
    """A run to be replayed: from its journal alone where that is enough."""
    journal = Journal.open(run)
    if strategy_class(journal.header["strategy"]).needs_gradient:
        return trainer.rebuild(recipe_of(journal), journal, Local(journal.header["device"]))
    return trainer.reopen(journal)


def command_line() -> str:
    return shlex.join(["germline", *sys.argv[1:]])


def main() -> None:
    app()
