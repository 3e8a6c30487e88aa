"""Every command-line option, declared once; commands take the groups that they need."""

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, cast

from typer import Argument, Option

from germline.cli.settings import replace_strategy
from germline.engine.stopping import Stop, Target
from germline.errors import BadInput
from germline.fleet.spmd.fleet import TIMEOUT
from germline.noise import check_whole_number
from germline.population import DType
from germline.recipes import make_recipe, recipe_address
from germline.recipes.recipe import Recipe

RecipeName = Annotated[str, Argument(metavar="RECIPE", help="a name, a Python file, or module:function")]
RunPath = Annotated[Path, Argument(metavar="RUN", help="the directory of a run")]
AsJson = Annotated[bool, Option("--json", help="print one JSON object as the last line of standard output")]
KeysDir = Annotated[Path | None, Option("--keys", help="the folder of this machine's key (see 'germline keys')")]
Device = Annotated[str, Option(help="device of the members: auto, cpu, cuda, cuda:N or mps")]
Seed = Annotated[int, Option(help="seed of the run's random numbers")]
StrategyName = Annotated[str | None, Option("--strategy", help="a name from 'germline strategies', or module:Class")]


@dataclass
class StrategyOptions:
    """Which strategy, and its settings."""

    strategy: StrategyName = None
    population: Annotated[int | None, Option(help="number of members of a generation")] = None
    rank: Annotated[str | None, Option(help="rank of the noise of matrices, or none for dense noise")] = None
    settings: Annotated[
        list[str] | None,
        Option("--set", metavar="KEY=VALUE", help="a setting of the strategy, or recipe.KEY of the recipe"),
    ] = None

    def build_recipe(self, name: str, seed: int = 0, dtype: str = "auto") -> tuple[Recipe, dict[str, Any]]:
        """Return a recipe with the strategy and the type of arithmetic, and what a header says about the recipe."""
        settings: dict[str, dict[str, str]] = {"strategy": {}, "recipe": {}}
        for setting in self.settings or []:
            key, equals, value = setting.partition("=")
            if not equals or not key:
                raise BadInput(f"--set takes KEY=VALUE, not {setting!r}.")
            owner = "recipe" if key.startswith("recipe.") else "strategy"
            settings[owner][key.removeprefix("recipe.")] = value
        shortcuts: dict[str, Any] = {"population": self.population, "rank": self.rank}
        settings["strategy"] |= {key: str(value) for key, value in shortcuts.items() if value is not None}
        check_whole_number("seed", seed, 1 << 63)
        recipe = make_recipe(name, settings["recipe"], seed)
        recipe = replace_strategy(recipe, self.strategy, settings["strategy"])
        recipe = recipe if dtype == "auto" else replace(recipe, dtype=cast(DType, dtype))
        return recipe, {"recipe": recipe_address(name), "recipe_settings": settings["recipe"]}


@dataclass
class DataOptions:
    """Where the data sets are."""

    data: Annotated[Path | None, Option("--data", help="folder of the data sets (else GERMLINE_DATA)")] = None

    def apply(self) -> None:
        """Make the folder known to the data sets of this process."""
        if self.data is not None:
            os.environ["GERMLINE_DATA"] = str(self.data)


@dataclass
class MachineOptions(DataOptions):
    """Where and in which arithmetic members are evaluated."""

    device: Device = "auto"
    dtype: Annotated[str, Option(help="type of the members' arithmetic: auto, float32 or bfloat16")] = "auto"


@dataclass
class FleetOptions:
    """Who evaluates the members."""

    fleet: Annotated[str, Option(help="local, elastic, or spmd (by torchrun, srun, mpirun or --workers)")] = "local"
    workers: Annotated[
        int | None, Option(help="number of threads that share the members; of a fleet, of processes here")
    ] = None
    exchange: Annotated[str, Option(help="exchange of an spmd fleet: auto, replay, chromosome, semi or central")] = (
        "auto"
    )
    timeout: Annotated[float, Option(help="seconds until a silent rank of an spmd fleet is given up")] = TIMEOUT


@dataclass
class StopOptions:
    """When to stop."""

    generations: Annotated[int | None, Option(help="stop after this many generations in all")] = None
    seconds: Annotated[float | None, Option(help="stop after this many seconds of session in all")] = None
    evaluations: Annotated[
        int | None, Option(help="stop after this many forward passes of a batch; a backward pass counts as two")
    ] = None
    target: Annotated[str | None, Option(metavar="METRIC=VALUE", help="stop when a metric reaches a value")] = None

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

    runs: Annotated[Path, Option(help="folder in which runs are kept")] = Path("runs")
    name: Annotated[str | None, Option(help="name of the run's directory")] = None
    json_: AsJson = False


@dataclass
class AgainOptions:
    """What a run's header names but does not bring: code outside of this package must be given again."""

    recipe: Annotated[str | None, Option(help="the run's recipe, if it is a Python file or module:function")] = None
    strategy: Annotated[str | None, Option(help="the run's strategy, if it is not part of germline: module:Class")] = (
        None
    )


@dataclass
class ComparisonOptions:
    """Runs that are compared."""

    metric: Annotated[str | None, Option(help="metric to compare by (default: the first of the test set)")] = None
    jobs: Annotated[int, Option(min=1, help="number of runs at the same time")] = 1
    workers: Annotated[int | None, Option(help="number of threads of each run")] = None
