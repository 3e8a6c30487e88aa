"""The command line: parse, build, call. Results go to standard output, everything else to standard error."""

import dataclasses
import functools
import inspect
import itertools
import json
import os
import shlex
import sys
import typing
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from rich.console import Console
from rich.table import Table

from germline import trainer
from germline.api import free_directory
from germline.compare import (
    Comparison,
    Variant,
    budget_of,
    cells,
    grid_of,
    heads,
    machine_of,
    metric_of,
    note,
    write_comparison,
)
from germline.errors import BadInput, FleetLostError, MachineError, unknown_name
from germline.fleet import SPMD, TIMEOUT, Elastic, Exchange, Local, keys, launched, run_here
from germline.genome import Genome, theta_sha256
from germline.header import settings_of
from germline.journal import Journal
from germline.noise import check_whole_number
from germline.population import DType, SlowPath
from germline.progress import Progress
from germline.recipes import RECIPES, address, make
from germline.recipes.recipe import Recipe
from germline.replay import reopen
from germline.replay import replay as replay_records
from germline.replay import verify as verify_records
from germline.report import read, write_curves, write_report
from germline.run import Run, export_theta
from germline.status import Status
from germline.stopping import Stop, Target
from germline.strategies import STRATEGIES, AnyStrategy, HybridES, strategy_class
from germline.strategies.settings import parse

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help=__doc__)
keys_app = typer.Typer(no_args_is_help=True, help="Certificates of an elastic fleet.")
app.add_typer(keys_app, name="keys")
WIDE = 200  # characters of a table that is not for a terminal
STANDARD = "openai-es,snes,mu-lambda,ga,pso,gradient"  # what is compared if nothing is said
F = TypeVar("F", bound=Callable[..., Any])


def worded(function: F) -> F:
    """A command whose bad input ends in a sentence and exit code 2."""

    @functools.wraps(function)
    def called(*arguments: Any, **options: Any) -> None:
        try:
            function(*arguments, **options)
        except BadInput as error:
            print(f"error: {error}", file=sys.stderr)
            raise typer.Exit(2) from None
        except (FleetLostError, MachineError) as error:
            print(f"error: {error}", file=sys.stderr)
            raise typer.Exit(1) from None
        except KeyboardInterrupt:
            print("interrupted; every finished generation is on disk", file=sys.stderr)
            raise typer.Exit(130) from None

    return typing.cast(F, called)


def command(function: F) -> F:
    return app.command()(worded(function))


RecipeName = Annotated[str, typer.Argument(metavar="RECIPE", help="a name, a Python file, or module:function")]
RunPath = Annotated[Path, typer.Argument(metavar="RUN", help="the directory of a run")]
StrategyName = Annotated[str | None, typer.Option("--strategy", help="see 'germline strategies'")]
Population = Annotated[int | None, typer.Option(help="members of a generation")]
Rank = Annotated[str | None, typer.Option(help="rank of the noise of matrices, or none for dense noise")]
Seed = Annotated[int, typer.Option(help="of everything that is drawn")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:N or mps")]
DTypeName = Annotated[str, typer.Option("--dtype", help="of the members' arithmetic: auto, float32 or bfloat16")]
Workers = Annotated[int | None, typer.Option(help="threads that share the members; of a fleet, processes here")]
FleetName = Annotated[str, typer.Option("--fleet", help="local, elastic or spmd (torchrun, srun, mpirun or --workers)")]
ExchangeName = Annotated[str, typer.Option("--exchange", help="of spmd: auto, replay, chromosome, semi or central")]
Timeout = Annotated[float, typer.Option(help="of spmd: seconds until a silent process is given up")]
KeysDir = Annotated[Path | None, typer.Option("--keys", help="the folder of this machine's key ('germline keys')")]
DataDir = Annotated[Path | None, typer.Option("--data", help="where data sets lie, else GERMLINE_DATA")]
Runs = Annotated[Path, typer.Option(help="where runs are kept")]
Name = Annotated[str | None, typer.Option(help="of the run's directory")]
AsJson = Annotated[bool, typer.Option("--json", help="the last line of standard output is one JSON object")]
Generations = Annotated[int | None, typer.Option(help="stop after so many generations in all")]
Evaluations = Annotated[
    int | None, typer.Option(help="stop after so many forward passes of a batch; a backward pass is two")
]
Seconds = Annotated[float | None, typer.Option(help="stop after so many seconds of training in all")]
TargetText = Annotated[str | None, typer.Option(metavar="METRIC=VALUE", help="stop when a metric is reached")]
Seeds = Annotated[int, typer.Option(min=1, help="runs of each, with seeds 0, 1, ...")]
Jobs = Annotated[int, typer.Option(min=1, help="runs at the same time")]
MetricName = Annotated[str | None, typer.Option("--metric", help="to judge by; the first of the test set if not given")]
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
    dtype: DTypeName = "auto",
    fleet: FleetName = "local",
    workers: Workers = None,
    exchange: ExchangeName = "auto",
    timeout: Timeout = TIMEOUT,
    data: DataDir = None,
    runs: Runs = Path("runs"),
    name: Name = None,
    json_: AsJson = False,
    generations: Generations = None,
    seconds: Seconds = None,
    evaluations: Evaluations = None,
    target: TargetText = None,
    settings: Settings = None,
    baseline: Annotated[bool, typer.Option(help="then train by backprop for the same time, to compare")] = False,
) -> None:
    """Train a recipe."""
    if data is not None:
        os.environ["GERMLINE_DATA"] = str(data)
    own, of_recipe = split_settings(settings or [], population=population, rank=rank)
    made = recipe_with(recipe, of_recipe, seed, strategy, own, dtype)
    stop = stop_of(made, generations, seconds, target, evaluations)
    path = runs / name if name is not None else free_directory(runs, f"{Path(recipe).stem}-{made.strategy.name}-{seed}")
    chosen = fleet_of(fleet, device, workers, exchange, timeout, address(recipe))
    if baseline and fleet != "local":
        raise BadInput("The baseline is trained in one process: leave out --baseline or --fleet.")
    launch_here(fleet, workers)

    def begin(made: Recipe, path: Path, stop: Stop, command: str) -> Run:
        about = {"recipe": address(recipe), "recipe_settings": of_recipe, "command": command}
        return trainer.begin(made, path, seed=seed, fleet=chosen, about=about, stop=stop, named=name is not None)

    if not baseline:
        finish(begin(made, path, stop, command_line()), stop, as_json=json_)
        return
    other = with_strategy(make(recipe, of_recipe, seed), "gradient", {})
    beside = path.with_name(path.name + "-backprop")
    refuse_baseline(other, beside, chosen)
    summary = finish(begin(made, path, stop, command_line()), stop, as_json=False)
    same_time = Stop(seconds=summary["seconds"])
    repeat = f"germline train {shlex.quote(recipe)} --strategy gradient --seconds {summary['seconds']} --seed {seed}"
    compared = finish(begin(other, beside, same_time, repeat), same_time, as_json=False, quiet=True)
    for key, value in summary["metrics"].items():
        if key.startswith("test_") and not key.endswith(("_loss", "_score")):
            said = f"{key.replace('_', ' ')}: {value:.4f} by {summary['strategy']}, without a gradient; "
            print(
                f"{said}{compared['metrics'][key]:.4f} by backprop on the same net and data in the same "
                f"{summary['seconds']:.1f} s"
            )
    write_report([read(path), read(beside)], path / "report.html")
    if json_:
        print(json.dumps(summary))


@command
def resume(
    run: RunPath,
    device: Annotated[
        str | None, typer.Option(help="auto, cpu, cuda, cuda:N or mps; that of the run if not given")
    ] = None,
    fleet: FleetName = "local",
    workers: Workers = None,
    exchange: ExchangeName = "auto",
    timeout: Timeout = TIMEOUT,
    data: DataDir = None,
    json_: AsJson = False,
    generations: Generations = None,
    seconds: Seconds = None,
    target: TargetText = None,
) -> None:
    """Go on where a run stopped."""
    if data is not None:
        os.environ["GERMLINE_DATA"] = str(data)
    here = (run / "journal.sqlite").is_file()
    known: Mapping[str, Any] = Journal.open(run, read_only=True).header if here else {"device": "auto", "recipe": None}
    chosen = fleet_of(fleet, device or known["device"], workers, exchange, timeout, known["recipe"])
    launch_here(fleet, workers)
    chosen.new_run()
    if not chosen.elect(here):
        Journal.open(run)  # says what is missing
    journal = Journal.open(run) if chosen.keeper else None
    header = chosen.told(dict(journal.header) if journal is not None else {})
    training = trainer.resume(recipe_of(header, run), journal, chosen)
    stop = Stop(generations, seconds, Target.parse(target))
    if stop == Stop():
        said = header["stop"]
        goal = Target(**said["target"]) if said.get("target") else None
        stop = Stop(said.get("generations"), said.get("seconds"), goal, said.get("evaluations"))
    finish(training, stop, as_json=json_)


@command
def serve(
    recipe: RecipeName,
    listen: Annotated[str, typer.Option(metavar="HOST:PORT", help="where workers find it")] = "127.0.0.1:8786",
    keys: KeysDir = None,
    status: Annotated[str, typer.Option(metavar="HOST:PORT", help="of the status page")] = "127.0.0.1:8787",
    strategy: StrategyName = None,
    population: Population = None,
    rank: Rank = None,
    seed: Seed = 0,
    device: Device = "auto",
    dtype: DTypeName = "auto",
    data: DataDir = None,
    runs: Runs = Path("runs"),
    name: Name = None,
    json_: AsJson = False,
    generations: Generations = None,
    seconds: Seconds = None,
    target: TargetText = None,
    settings: Settings = None,
) -> None:
    """Coordinate an elastic fleet: train a recipe with workers that come and go; started again, it goes on."""
    if data is not None:
        os.environ["GERMLINE_DATA"] = str(data)
    own, of_recipe = split_settings(settings or [], population=population, rank=rank)
    made = recipe_with(recipe, of_recipe, seed, strategy, own, dtype)
    stop = stop_of(made, generations, seconds, target)
    path = runs / (name or f"{Path(recipe).stem}-{made.strategy.name}-{seed}")
    about = {"recipe": address(recipe), "recipe_settings": of_recipe, "command": command_line()}
    chosen = Elastic(listen, keys=keys, device=device)
    chosen.new_run()
    page = Status(chosen, recipe, stop)
    print(f"status page: {page.serve(status)}", file=sys.stderr)
    try:
        same = {"recipe": about["recipe"], "recipe_settings": of_recipe, "seed": seed, "strategy": made.strategy.name}
        if Journal.begins_with(path, same):
            refuse_other_settings(made.strategy, Journal.open(path, read_only=True).header, path)
            training = trainer.resume(made, Journal.open(path), chosen)
        else:
            training = trainer.start(made, path, seed=seed, fleet=chosen, about=about, stop=stop)
        finish(training, stop, as_json=json_, status=page)
    finally:
        page.close()
        chosen.close()  # if the run has not ended, its workers wait


@command
def worker(
    coordinator: Annotated[str, typer.Argument(metavar="HOST:PORT", help="where the coordinator listens")],
    recipe: Annotated[str, typer.Option(help="that of the coordinator: a name, a Python file, or module:function")],
    data: DataDir = None,
    keys: KeysDir = None,
    device: Device = "auto",
    threads: Annotated[int | None, typer.Option("--workers", help="threads that share the members")] = None,
    name: Annotated[str | None, typer.Option(help="by which the coordinator calls it")] = None,
) -> None:
    """Work for a coordinator of an elastic fleet, until its run has ended."""
    from germline import worker

    if data is not None:
        os.environ["GERMLINE_DATA"] = str(data)
    follower = worker.Follower(lambda settings, seed: make(recipe, settings, seed), Local(device, threads), recipe)
    try:
        worker.run(coordinator, follower, name=name, keys=keys)
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


@keys_app.command("init")
@worded
def keys_init(folder: Annotated[Path, typer.Argument(metavar="DIR", help="the folder to be made")]) -> None:
    """Make an authority for a fleet, and the coordinator's key."""
    keys.init(folder)
    print(f"{folder}: the authority and the coordinator's key; now 'germline keys add {folder} NAME' for each machine")


@keys_app.command("add")
@worded
def keys_add(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="the folder of the authority")],
    name: Annotated[str, typer.Argument(metavar="NAME", help="of the machine")],
) -> None:
    """Make the key of one more machine; give it the folder that is printed, and nothing else."""
    print(keys.add(folder, name))


@command
def compare(
    recipe: RecipeName,
    strategies: Annotated[str, typer.Option(help="their names, with commas")] = STANDARD,
    seeds: Seeds = 3,
    generations: Generations = None,
    seconds: Annotated[float | None, typer.Option(help="of training, of each run; 60 if nothing else is said")] = None,
    evaluations: Evaluations = None,
    target: TargetText = None,
    metric: MetricName = None,
    device: Device = "auto",
    dtype: DTypeName = "auto",
    workers: Workers = None,
    jobs: Jobs = 1,
    data: DataDir = None,
    runs: Runs = Path("runs"),
    name: Name = None,
    json_: AsJson = False,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="STRATEGY.KEY, or recipe.KEY")
    ] = None,
) -> None:
    """Train a recipe by several strategies under one budget, with several seeds; started again, it goes on."""
    names = [text.strip() for text in strategies.split(",")]
    own: dict[str, list[str]] = {strategy: ["--strategy", strategy] for strategy in names if strategy_class(strategy)}
    common: list[str] = []
    for setting in settings or []:
        of, dot, rest = setting.partition(".")
        if of == "recipe":
            common += ["--set", setting]
        elif dot and of in own:
            own[of] += ["--set", rest]
        else:
            raise BadInput(f"--set takes recipe.KEY=VALUE or STRATEGY.KEY=VALUE, with a strategy of these: {names}.")
    budget = budget_of(generations, seconds, evaluations, target)
    common += [*budget, *machine_of(device, dtype, workers, data)]
    variants = tuple(Variant(strategy, tuple(arguments)) for strategy, arguments in own.items())
    folder = runs / (name or f"compare-{Path(recipe).stem}")
    comparison = Comparison(folder, address(recipe), tuple(common), variants, seeds, jobs)
    show_comparison(comparison, metric, f"Germline: {recipe} by {', '.join(names)}", as_json=json_)


@command
def sweep(
    recipe: RecipeName,
    settings: Annotated[
        list[str],
        typer.Option("--set", metavar="KEY=V1,V2", help="of the strategy, or recipe.KEY; together a grid"),
    ],
    strategy: StrategyName = None,
    seeds: Seeds = 1,
    generations: Generations = None,
    seconds: Annotated[float | None, typer.Option(help="of training, of each run; 60 if nothing else is said")] = None,
    evaluations: Evaluations = None,
    target: TargetText = None,
    metric: MetricName = None,
    device: Device = "auto",
    dtype: DTypeName = "auto",
    workers: Workers = None,
    jobs: Jobs = 1,
    data: DataDir = None,
    runs: Runs = Path("runs"),
    name: Name = None,
    json_: AsJson = False,
) -> None:
    """Train a recipe with every combination of some settings under one budget; started again, it goes on."""
    grid = grid_of(settings)
    budget = budget_of(generations, seconds, evaluations, target)
    common = [*(["--strategy", strategy] if strategy else []), *budget, *machine_of(device, dtype, workers, data)]
    variants = [
        Variant(",".join(chosen).replace("/", "|"), tuple(word for one in chosen for word in ("--set", one)))
        for chosen in grid
    ]
    folder = runs / (name or f"sweep-{Path(recipe).stem}{f'-{strategy}' if strategy else ''}")
    comparison = Comparison(folder, address(recipe), tuple(common), tuple(variants), seeds, jobs)
    show_comparison(comparison, metric, f"Germline: {recipe}, {len(variants)} settings", as_json=json_)


def show_comparison(comparison: Comparison, metric: str | None, title: str, *, as_json: bool) -> None:
    try:
        trials = comparison.run()
    except KeyboardInterrupt:
        print("the same command goes on from here", file=sys.stderr)
        raise
    chosen = metric_of(trials, metric)
    file = comparison.folder / "report.html"
    rows = write_comparison(trials, chosen, file, title)
    if as_json:
        print(json.dumps({"metric": chosen, "report": str(file), "rows": rows}))
        return
    table = Table(*heads(chosen), box=None, pad_edge=False)
    for row in rows:
        if "median" in row:
            table.add_row(*cells(row))
    Console(width=None if sys.stdout.isatty() else WIDE).print(table)
    print(note(comparison.seeds))
    for row in rows:
        if "failure" in row:
            print(f"{row['variant']}: {row['failure']}")
    print(f"report: {file}")


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
    training = run_of(run)
    replay_records(training, until=generation)
    core = training.core
    digest = theta_sha256(core.state.theta)
    export_theta(core.genome, core.state.theta, export)
    print(json.dumps({"run": str(run), "generation": generation, "theta_sha256": digest, "export": str(export)})
          if json_ else f"generation {generation} of {run}: {export}, theta_sha256 {digest}")  # fmt: skip


@command
def verify(run: RunPath, json_: AsJson = False) -> None:
    """Replay a whole run and check every hash."""
    found = verify_records(run_of(run))
    text = f"{found['generations']} generations and {found['snapshots']} snapshots are as they were written"
    print(json.dumps({"run": str(run), **found}) if json_ else f"{run}: {text}, theta_sha256 {found['theta_sha256']}")


@command
def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="directories of runs")],
    out: Annotated[
        Path | None, typer.Option(help="the HTML file; if not given, in the run, or here for several")
    ] = None,
) -> None:
    """Write the HTML report of one run, or of several side by side."""
    file = out or (runs[0] / "report.html" if len(runs) == 1 else Path("report.html"))
    write_report([read(run) for run in runs], file)
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
def plan(
    recipe: RecipeName,
    strategy: StrategyName = None,
    population: Population = None,
    rank: Rank = None,
    device: Device = "auto",
    workers: Annotated[str, typer.Option(help="numbers of workers")] = "1,2,4,8,16,32,64,96",
    network: Annotated[str, typer.Option(help="between workers, such as 1gbit, '10mbit 20ms' or none")] = "1gbit",
    data: DataDir = None,
    settings: Settings = None,
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="the efficiencies as a picture, too")] = None,
    json_: AsJson = False,
) -> None:
    """Predict time, memory and bytes of a generation by exchange and number of workers."""
    from germline import costs

    if data is not None:
        os.environ["GERMLINE_DATA"] = str(data)
    own, of_recipe = split_settings(settings or [], population=population, rank=rank)
    made = with_strategy(make(recipe, of_recipe, 0), strategy, own)
    if isinstance(made.strategy, HybridES):
        show_resources(recipe, made, settings or [], as_json=json_)
        return
    between = costs.Network.parse(network)
    counts = [
        check_whole_number("number of workers", parse(int, "workers", text), 1 << 20) for text in workers.split(",")
    ]
    rates, parameters = costs.measure(made, made.strategy, device), Genome.from_module(made.model).size
    found = costs.table(rates, made.strategy, parameters, made.strategy.population, between, counts)
    said = costs.recommend(found)
    if plot is not None:
        thin = between if between != costs.Network.parse("none") else costs.Network.parse("100mbit")
        networks = (costs.Network.parse("none"), thin)
        costs.figure(rates, made.strategy, parameters, networks=networks).savefig(plot)
    if json_:
        rows = [dataclasses.asdict(cost) for cost in found]
        print(json.dumps({"parameters": parameters, "rates": dataclasses.asdict(rates), "costs": rows, "use": said}))
        return
    about = f"{made.strategy.name}, {parameters:,} parameters, population {made.strategy.population}"
    print(f"{about}, network: {between.described()}")
    table = Table(*found[0].told(), box=None, pad_edge=False, padding=(0, 1))
    for cost in found:
        table.add_row(*cost.told().values())
    Console().print(table)
    print(said)


def show_resources(name: str, made: Recipe, settings: list[str], *, as_json: bool) -> None:
    """The resource model of Hybrid-ES beside what is measured."""
    from germline import resources

    print("measuring runs in two processes ...", file=sys.stderr)
    found = resources.table(name, made, settings)
    if as_json:
        print(json.dumps(found))
        return
    parts = [f"{part} {1e3 * found['phases'][part]:.3g}" for part in ("forward", "backward", "shift", "update")]
    print(f"one core, ms: {', '.join(parts)}; the paper's: forward 16.4, backward 5.5, shift 15.1, update 1.196")
    full, held = found["all_full"], [found["phases"][f"memory_{kind}"] / 1e6 for kind in ("full", "shifted")]
    print(f"tensors held at once by a gradient {held[0]:.3g} MB, by a sample {held[1]:.3g} MB")
    steps = f"{1e3 * full['seconds']:.3g} ms, {full['bytes_sent']:,.0f} bytes sent"
    print(f"all steps full, two processes: {steps}, at most {full['peak_memory'] / 1e6:,.0f} MB of memory")
    ways = {"paper": "the paper's model", "model": "the same, this machine", "measured": "two processes here"}
    table = Table("interval", "by", "runtime", "memory", "network", box=None, pad_edge=False)
    for row, (way, by) in itertools.product(found["rows"], ways.items()):
        table.add_row(str(row["interval"]), by, *(f"{row[way][what]:.3f}" for what in ("runtime", "memory", "network")))
    Console().print(table)
    print("as parts of what steps take that are all full; memory is a mean over time, of two processes what they keep")
    for row in found["rows"]:
        run = row["run"]
        spent = [", ".join(f"{part} {1e3 * s:.3g}" for part, s in run[kind].items()) for kind in ("full", "shifted")]
        said = "full step {}; shifted step {}".format(*spent)
        memory = f"memory {run['mean_memory'] / 1e6:,.0f} MB on average, {run['peak_memory'] / 1e6:,.0f} at most"
        print(f"interval {row['interval']}, ms of a process: {said}; {memory}")


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


def finish(
    training: Run, stop: Stop, *, as_json: bool, quiet: bool = False, status: Status | None = None
) -> dict[str, Any]:
    """Runs a training to its end, with progress, and says what came of it."""
    path, first = training.path, training.core.fleet.rank == 0
    if first:
        with Progress(stop, below=status.table if status is not None else None).shown() as progress:
            summary = trainer.run(training, stop, [progress, *([status] if status is not None else [])])
    else:
        summary = trainer.run(training, stop)
    if isinstance(training.core.fleet, Elastic):
        training.core.fleet.close(ended=summary["stopped_by"] != "interrupt")
    if training.journal is not None:
        rows = training.rows()
        write_curves(rows, path / "curves.csv")
        write_report([(path.name, training.journal.header, rows, summary)], path / "report.html")
        training.journal.close()
    if summary["stopped_by"] == "interrupt" and first:
        how = "the same command" if status is not None else f"germline resume {path}"
        print(f"interrupted after generation {training.generation}; go on with: {how}", file=sys.stderr)
    if as_json and first:
        print(json.dumps(summary))
    elif not quiet and first:
        told = "  ".join(f"{key.replace('_', ' ')} {value:.4f}" for key, value in summary["metrics"].items())
        print(f"{summary['generations']} generations in {summary['seconds']:.1f} s  {told}")
        print(f"run: {path}\nreport: {path / 'report.html'}")
    if summary["stopped_by"] == "interrupt":
        raise typer.Exit(130)
    return summary


def refuse_other_settings(strategy: AnyStrategy, header: Mapping[str, Any], path: Path) -> None:
    """A run goes on with the settings it was begun with; what was settled by the run itself is not compared."""
    for name, value in settings_of(strategy).items():
        if value is not None and value != "auto" and header["settings"].get(name, value) != value:
            was = header["settings"][name]
            raise BadInput(f"{path} was begun with {name}={was}, not {value}: give it the same, or another --name.")


def recipe_with(
    name: str, settings: dict[str, str], seed: int, strategy: str | None, own: dict[str, str], dtype: str
) -> Recipe:
    """The recipe as it was asked for."""
    check_whole_number("seed", seed, 1 << 63)
    made = with_strategy(make(name, settings, seed), strategy, own)
    return made if dtype == "auto" else dataclasses.replace(made, dtype=typing.cast(DType, dtype))


def stop_of(
    made: Recipe, generations: int | None, seconds: float | None, target: str | None, evaluations: int | None = None
) -> Stop:
    """When to stop: where nothing is said, after the recipe's own number of generations."""
    said = (generations, seconds, evaluations) != (None, None, None)
    return Stop(generations if said else made.generations, seconds, Target.parse(target), evaluations)


def split_settings(settings: Sequence[str], **shortcuts: Any) -> tuple[dict[str, str], dict[str, str]]:
    """Those of the strategy, with options of their own among them, and those of the recipe."""
    own: dict[str, str] = {}
    of_recipe: dict[str, str] = {}
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not equals or not key:
            raise BadInput(f"--set takes KEY=VALUE, not {setting!r}.")
        (of_recipe if key.startswith("recipe.") else own)[key.removeprefix("recipe.")] = value
    return own | {key: str(value) for key, value in shortcuts.items() if value is not None}, of_recipe


def with_strategy(recipe: Recipe, name: str | None, settings: dict[str, str]) -> Recipe:
    """The recipe with the strategy asked for, at the recipe's own settings of it, changed as asked."""
    strategy = recipe.strategy
    if name is not None and name != strategy.name:
        cls = strategy_class(name)
        strategy = recipe.others.get(name) or cls()
    kinds = typing.get_type_hints(type(strategy))
    names = [field.name for field in dataclasses.fields(strategy)]  # type: ignore[arg-type]
    for key in settings:
        if key in ("rank", "ranks") and key not in names:
            raise BadInput(f"The strategy {strategy.name} has no noise of low rank: leave out {key}.")
        if key not in names:
            raise unknown_name(f"setting of {strategy.name}", key, names)
    values = {key: parse(kinds[key], key, text) for key, text in settings.items()}
    return dataclasses.replace(recipe, strategy=dataclasses.replace(strategy, **values))  # type: ignore[type-var]


def refuse_baseline(recipe: Recipe, path: Path, fleet: Local) -> None:
    """Says that there can be no backprop beside a run before the run is made."""
    if path.exists():
        raise BadInput(f"{path} exists already: give another --name.")
    core, _, _, batch = trainer.set_up(recipe, fleet, seed=0)
    core.differentiate(0, batch, {})


def fleet_of(
    name: str, device: str, workers: int | None, exchange: str, timeout: float, recipe: str | None = None
) -> Local:
    if name == "local":
        return Local(device, workers)
    if name == "elastic":
        return Elastic(device=device, workers=workers or 2, recipe=recipe)
    if name != "spmd":
        raise unknown_name("fleet", name, ("local", "spmd", "elastic"))
    return SPMD(typing.cast(Exchange, exchange), device=device, timeout=timeout)


def launch_here(fleet: str, workers: int | None) -> None:
    """Where processes of a fleet are asked for and nobody has launched them, this one does, and ends with them."""
    if fleet == "spmd" and workers is not None and workers > 1 and launched().by == "nobody":
        raise typer.Exit(run_here([sys.executable, "-m", "germline", *sys.argv[1:]], workers))


def recipe_of(header: Mapping[str, Any], path: Path) -> Recipe:
    if header["recipe"] is None:
        message = f"{path} was begun in Python, not by a recipe: go on there, with "
        raise BadInput(message + f"gl.train(..., resume={str(path)!r}).")
    recipe = make(header["recipe"], header["recipe_settings"], header["seed"])
    strategy = recipe.strategy if recipe.strategy.name == header["strategy"] else recipe.others.get(header["strategy"])
    return dataclasses.replace(recipe, strategy=strategy or strategy_class(header["strategy"])())


def run_of(run: Path) -> Run:
    """A run to be replayed: from its journal alone where that is enough."""
    journal = Journal.open(run, read_only=True)
    header = journal.header
    if strategy_class(header["strategy"]).needs_gradient:
        return trainer.rebuild(recipe_of(header, run), journal, Local(header["device"]))
    functions = any(isinstance(header["settings"].get(name), dict) for name in ("optimizer", "scheduler"))
    return reopen(journal, recipe_of(header, run).strategy if functions else None)


def command_line() -> str:
    return shlex.join(["germline", *sys.argv[1:]])


def show_warning(message: Warning | str, category: type[Warning], *place: Any, **more: Any) -> None:
    """What the library has to say, as a sentence, once in a fleet; other libraries' warnings as they are."""
    if launched().rank:
        return
    print(f"note: {message}" if issubclass(category, SlowPath) else f"{category.__name__}: {message}", file=sys.stderr)


def main() -> None:
    warnings.showwarning = show_warning
    app()
