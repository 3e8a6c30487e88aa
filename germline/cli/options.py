"""Every command-line option, declared once; commands take the groups that they need."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from germline.cli.settings import parse_settings
from germline.engine.stopping import Stop, Target
from germline.fleet.spmd.fleet import TIMEOUT
from germline.recipes.recipe import Recipe

RecipeName = Annotated[str, typer.Argument(metavar="RECIPE", help="a name, a Python file, or module:function")]
RunPath = Annotated[Path, typer.Argument(metavar="RUN", help="the directory of a run")]
AsJson = Annotated[bool, typer.Option("--json", help="print one JSON object as the last line of standard output")]
KeysDir = Annotated[Path | None, typer.Option("--keys", help="the folder of this machine's key (see 'germline keys')")]
Device = Annotated[str, typer.Option(help="device of the members: auto, cpu, cuda, cuda:N or mps")]
StrategyName = Annotated[
    str | None, typer.Option("--strategy", help="a name from 'germline strategies', or module:Class")
]


@dataclass
class StrategyOptions:
    """Which strategy, and its settings."""

    strategy: StrategyName = None
    population: Annotated[int | None, typer.Option(help="number of members of a generation")] = None
    rank: Annotated[str | None, typer.Option(help="rank of the noise of matrices, or none for dense noise")] = None
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="a setting of the strategy, or recipe.KEY of the recipe"),
    ] = None

    def split(self) -> tuple[dict[str, str], dict[str, str]]:
        """Return the settings of the strategy, with --population and --rank among them, and those of the recipe."""
        own, of_recipe = parse_settings(self.settings or [])
        shortcuts: dict[str, Any] = {"population": self.population, "rank": self.rank}
        return own | {key: str(value) for key, value in shortcuts.items() if value is not None}, of_recipe


@dataclass
class DataOptions:
    """Where the data sets are."""

    data: Annotated[Path | None, typer.Option("--data", help="folder of the data sets (else GERMLINE_DATA)")] = None

    def apply(self) -> None:
        """Make the folder known to the data sets of this process."""
        if self.data is not None:
            os.environ["GERMLINE_DATA"] = str(self.data)


@dataclass
class MachineOptions(DataOptions):
    """Where and in which arithmetic members are evaluated."""

    device: Device = "auto"
    dtype: Annotated[
        str, typer.Option("--dtype", help="type of the members' arithmetic: auto, float32 or bfloat16")
    ] = "auto"


@dataclass
class FleetOptions:
    """Who evaluates the members."""

    fleet: Annotated[
        str, typer.Option("--fleet", help="local, elastic, or spmd (by torchrun, srun, mpirun or --workers)")
    ] = "local"
    workers: Annotated[
        int | None, typer.Option(help="number of threads that share the members; of a fleet, of processes here")
    ] = None
    exchange: Annotated[
        str, typer.Option("--exchange", help="exchange of an spmd fleet: auto, replay, chromosome, semi or central")
    ] = "auto"
    timeout: Annotated[float, typer.Option(help="seconds until a silent rank of an spmd fleet is given up")] = TIMEOUT


@dataclass
class StopOptions:
    """When to stop."""

    generations: Annotated[int | None, typer.Option(help="stop after this many generations in all")] = None
    seconds: Annotated[float | None, typer.Option(help="stop after this many seconds of session in all")] = None
    evaluations: Annotated[
        int | None, typer.Option(help="stop after this many forward passes of a batch; a backward pass counts as two")
    ] = None
    target: Annotated[str | None, typer.Option(metavar="METRIC=VALUE", help="stop when a metric reaches a value")] = (
        None
    )

    @property
    def is_limited(self) -> bool:
        return (self.generations, self.seconds, self.evaluations) != (None, None, None)

    def limits(self, recipe: Recipe | None = None) -> Stop:
        """Return the limits of a run: if none is given, the recipe's number of generations."""
        generations = self.generations if self.is_limited or recipe is None else recipe.generations
        return Stop(generations, self.seconds, Target.parse(self.target), self.evaluations)


@dataclass
class OutputOptions:
    """Where runs are kept, and what is printed."""

    runs: Annotated[Path, typer.Option(help="folder in which runs are kept")] = Path("runs")
    name: Annotated[str | None, typer.Option(help="name of the run's directory")] = None
    json_: AsJson = False


@dataclass
class SeedOptions:
    """The seed."""

    seed: Annotated[int, typer.Option(help="seed of the run's random numbers")] = 0


@dataclass
class AgainOptions:
    """What a run's header names but does not bring: code outside of this package must be given again."""

    recipe: Annotated[
        str | None, typer.Option("--recipe", help="the run's recipe, if it is a Python file or module:function")
    ] = None
    strategy: Annotated[
        str | None, typer.Option("--strategy", help="the run's strategy, if it is not part of germline: module:Class")
    ] = None


@dataclass
class ComparisonOptions:
    """Runs that are compared."""

    metric: Annotated[
        str | None, typer.Option("--metric", help="metric to compare by (default: the first of the test set)")
    ] = None
    jobs: Annotated[int, typer.Option(min=1, help="number of runs at the same time")] = 1
    workers: Annotated[int | None, typer.Option(help="number of threads of each run")] = None
