"""The commands of a cluster: serve, worker and keys."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from germline.cli.app import app, command
from germline.cli.options import (
    DataOptions,
    Device,
    KeysDir,
    MachineOptions,
    OutputOptions,
    RecipeName,
    SeedOptions,
    StopOptions,
    StrategyName,
    StrategyOptions,
)
from germline.cli.settings import build_recipe
from germline.cli.status import Status
from germline.cli.training import command_line, run_to_end
from germline.engine import opening
from germline.engine.follower import Follower
from germline.engine.journal import Journal
from germline.fleet import Elastic, Local
from germline.fleet.cluster.keys import add_machine, create_authority
from germline.fleet.cluster.worker import run_worker
from germline.recipes import make_recipe, recipe_address
from germline.recipes.recipe import Recipe
from germline.strategies.registry import find_strategy

keys_app = typer.Typer(no_args_is_help=True, help="Create the certificates of an elastic fleet.")
app.add_typer(keys_app, name="keys")


@command
def serve(
    recipe: RecipeName,
    strategy: StrategyOptions,
    stop: StopOptions,
    seed: SeedOptions,
    machine: MachineOptions,
    output: OutputOptions,
    listen: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="address at which workers find the coordinator")
    ] = "127.0.0.1:8786",
    keys: KeysDir = None,
    status: Annotated[str, typer.Option(metavar="HOST:PORT", help="address of the status page")] = "127.0.0.1:8787",
) -> None:
    """Coordinate an elastic fleet: train a recipe with workers that come and go; started again, it goes on."""
    machine.apply()
    own, of_recipe = strategy.split()
    made = build_recipe(recipe, of_recipe, seed.seed, strategy.strategy, own, machine.dtype)
    limits = stop.limits(made)
    path = output.runs / (output.name or f"{Path(recipe).stem}-{made.strategy.name}-{seed.seed}")
    identity = {"recipe": recipe_address(recipe), "recipe_settings": of_recipe}
    fleet = Elastic(listen, keys=keys, device=machine.device)
    fleet.start_run()
    page = Status(fleet, recipe, limits)
    print(f"status page: {page.serve(status)}", file=sys.stderr)
    try:
        expected = {**identity, "seed": seed.seed, "strategy": made.strategy.name}
        if Journal.header_matches(path, expected):
            opening.check_same_settings(made.strategy, Journal.open(path, read_only=True).header, str(path))
            session = opening.resume(made, Journal.open(path), fleet)
        else:
            about = {**identity, "command": command_line()}
            session = opening.start(made, path, seed=seed.seed, fleet=fleet, about=about, stop=limits)
        run_to_end(session, limits, as_json=output.json_, status=page)
    finally:
        page.close()
        fleet.close()  # if the run has not ended, its workers wait


@command
def worker(
    coordinator: Annotated[str, typer.Argument(metavar="HOST:PORT", help="address of the coordinator")],
    recipe: Annotated[str, typer.Option(help="the coordinator's recipe: a name, a Python file, or module:function")],
    data: DataOptions,
    strategy: StrategyName = None,
    keys: KeysDir = None,
    device: Device = "auto",
    threads: Annotated[int | None, typer.Option("--workers", help="number of threads that share the members")] = None,
    name: Annotated[str | None, typer.Option(help="name by which the coordinator calls this worker")] = None,
) -> None:
    """Work for the coordinator of an elastic fleet, until its run has ended."""
    data.apply()
    given = find_strategy(strategy)() if strategy is not None else None

    def build(settings: dict[str, str], seed: int) -> Recipe:
        return make_recipe(recipe, settings, seed)

    run_worker(coordinator, Follower(build, Local(device, threads), recipe, given), name=name, keys=keys)


def init(folder: Annotated[Path, typer.Argument(metavar="DIR", help="the folder to create")]) -> None:
    """Create the authority of a fleet, and the coordinator's key."""
    create_authority(folder)
    print(f"{folder}: the authority and the coordinator's key; now 'germline keys add {folder} NAME' for each machine")


def add(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="the folder of the authority")],
    name: Annotated[str, typer.Argument(metavar="NAME", help="name of the machine")],
) -> None:
    """Create the key of one more machine; give it the folder that is printed, and nothing else."""
    print(add_machine(folder, name))


command(init, group=keys_app)
command(add, group=keys_app)
