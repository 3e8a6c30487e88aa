"""The commands of a cluster: serve, worker and keys."""

import os
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from germline.cli import options
from germline.cli.app import app, command
from germline.cli.completion import complete_recipe
from germline.cli.training import command_line, refuse_fewer_generations, run_to_end, show_stages
from germline.errors import BadInput

keys_app = typer.Typer(no_args_is_help=True, help="Create the certificates of a cluster.")
app.add_typer(keys_app, name="keys")


@command
def serve(
    recipe: options.RecipeName,
    strategy: options.StrategyOptions,
    stop: options.StopOptions,
    machine: options.MachineOptions,
    output: options.OutputOptions,
    seed: options.Seed = 0,
    keep: options.Keep = None,
    listen: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="address at which workers find the coordinator")
    ] = "127.0.0.1:8786",
    keys: options.KeysDir = None,
    status: Annotated[str, typer.Option(metavar="HOST:PORT", help="address of the status page")] = "127.0.0.1:8787",
) -> None:
    """Coordinate a cluster: train a recipe with workers that come and go; started again, it goes on."""
    from germline.cli.status import Status
    from germline.engine import opening
    from germline.engine.journal import Journal
    from germline.fleet import Elastic
    from germline.fleet.cluster.keys import keep_private_keys
    from germline.fleet.cluster.scheduler_process import raise_limit

    machine.apply()
    raise_limit()  # a journal must be written, however many connections there are
    with show_stages("loading data"):
        made, about = strategy.build_recipe(recipe, seed, machine.dtype, stop.evaluations)
    limits = stop.limits(made)
    path = output.runs / (output.name or f"{Path(recipe).stem}-{made.strategy.name}-{seed}")
    if keys is None:  # otherwise every user of this machine could join
        keys = keep_private_keys(path.with_name(f"{path.name}.keys"))
        print(f"workers need the keys in {keys / 'worker'}: copy that folder, and add --keys to them", file=sys.stderr)
    fleet = Elastic(listen, keys=keys, device=machine.device)
    fleet.start_run()
    page = Status(fleet, recipe, limits)
    print(f"status page: {page.serve(status)}", file=sys.stderr)
    try:
        with show_stages():
            if (path / "journal.sqlite").is_file():
                header = Journal.open(path, read_only=True).header
                refuse_other_run({**about, "seed": seed, "strategy": made.strategy.name}, header, path)
                claim_run(path)
                opening.check_same_settings(made.strategy, header, str(path))
                session = opening.resume(made, Journal.open(path), fleet)
                refuse_fewer_generations(stop.limits(), session)
                session.keep(keep or session.require_journal().header.get("keep", "last"))
            else:
                about |= {"command": command_line(), "keep": keep or "last"}
                session = opening.start(made, path, seed=seed, fleet=fleet, about=about, stop=limits)
                claim_run(path)
        run_to_end(session, limits, as_json=output.json_, status=page)
    finally:
        page.close()
        fleet.close()  # if the run has not ended, its workers wait


def refuse_other_run(given: Mapping[str, Any], header: Mapping[str, Any], path: Path) -> None:
    """Raise an error that says what differs, if a directory holds another run than the one that is to be served."""
    different = [name for name, value in given.items() if header.get(name) != value]
    if different:
        theirs = ", ".join(f"{name} {header.get(name)}" for name in different)
        mine = ", ".join(f"{name} {given[name]}" for name in different)
        raise BadInput(f"{path} is a run with {theirs}, and this command has {mine}: give it another --name.")


def claim_run(path: Path) -> None:
    """Raise an error if another coordinator has this run; otherwise it is this one's, until this process ends."""
    try:
        import fcntl
    except ImportError:  # not on Windows
        return
    try:
        fcntl.flock(os.open(path, os.O_RDONLY), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        message = f"Another coordinator serves the run {path}"
        raise BadInput(f"{message}: end that one first, or give this one another --name.") from error


@command
def worker(
    coordinator: Annotated[str, typer.Argument(metavar="HOST:PORT", help="address of the coordinator")],
    recipe: Annotated[
        str, typer.Option(help=f"the coordinator's recipe: {options.RECIPE_HELP}", autocompletion=complete_recipe)
    ],
    data: options.DataOptions,
    strategy: options.StrategyName = None,
    keys: options.KeysDir = None,
    device: options.Device = "auto",
    threads: Annotated[int | None, typer.Option("--workers", help="number of processes that share the members")] = None,
    name: Annotated[str | None, typer.Option(help="name by which the coordinator calls this worker")] = None,
    give_up: Annotated[
        float | None, typer.Option(min=0, metavar="SECONDS", help="end if there is no coordinator for so long")
    ] = None,
) -> None:
    """Work for the coordinator of a cluster, until its run has ended."""
    from germline.fleet import Local
    from germline.fleet.cluster.processes import run_worker
    from germline.fleet.cluster.worker import Responder

    data.apply()
    if recipe.endswith(".py") and not Path(recipe).is_file():
        raise BadInput(f"There is no file {recipe}.")
    default = keys.resolve().name if keys is not None else socket.gethostname()
    outside = strategy if strategy is not None and ":" in strategy else None
    responder = Responder(name or f"{default}-{os.getpid()}", recipe, outside, Local(device, threads))
    try:
        run_worker(coordinator, responder, keys=keys, give_up=give_up)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        raise typer.Exit(130) from None


def init(folder: Annotated[Path, typer.Argument(metavar="DIR", help="the folder to create")]) -> None:
    """Create the authority of a fleet, and the coordinator's key."""
    from germline.fleet.cluster.keys import create_authority

    create_authority(folder)
    print(f"{folder}: the authority and the coordinator's key; now 'germline keys add {folder} NAME' for each machine")


def add(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="the folder of the authority")],
    name: Annotated[str, typer.Argument(metavar="NAME", help="name of the machine")],
) -> None:
    """Create the key of one more machine; give it the folder that is printed, and nothing else."""
    from germline.fleet.cluster.keys import add_machine

    print(add_machine(folder, name))


def revoke(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="the folder of the authority")],
    name: Annotated[str, typer.Argument(metavar="NAME", help="name of the machine")],
) -> None:
    """Turn a machine away from now on; coordinators that are running notice within seconds."""
    from germline.fleet.cluster.keys import revoke_machine

    revoke_machine(folder, name)
    print(f"{name} is revoked; coordinators with the keys in {folder} turn it away")


command(init, group=keys_app)
command(add, group=keys_app)
command(revoke, group=keys_app)
