"""Every command-line option, declared once; commands take the groups that they need."""

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast, get_type_hints

from typer import Argument, Option

from germline.cli.completion import complete_recipe, complete_strategy
from germline.errors import BadInput, unknown_name

if TYPE_CHECKING:
    from germline.engine.stopping import Stop
    from germline.population import DType
    from germline.recipes import Recipe
    from germline.strategies import AnyStrategy

RECIPE_HELP = "a name, a Python file, or module:function"
STRATEGY_HELP = "a name from 'germline strategies', module:Class, or auto"
RecipeName = Annotated[str, Argument(metavar="RECIPE", help=RECIPE_HELP, autocompletion=complete_recipe)]
RunPath = Annotated[Path, Argument(metavar="RUN", help="the directory of a run")]
AsJson = Annotated[bool, Option("--json", help="print one JSON object as the last line of standard output")]
KeysDir = Annotated[Path | None, Option("--keys", help="the folder of this machine's key (see 'germline keys')")]
Device = Annotated[str, Option(help="device of the members: auto, cpu, cuda, cuda:N or mps")]
Seed = Annotated[int, Option(help="seed of the run's random numbers")]
Keep = Annotated[str | None, Option(help="weights of the result: last, or best by the metric of the dev set")]
StrategyName = Annotated[str | None, Option("--strategy", help=STRATEGY_HELP, autocompletion=complete_strategy)]


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

    def build_recipe(
        self, name: str, seed: int = 0, dtype: str = "auto", evaluations: int | None = None
    ) -> "tuple[Recipe, dict[str, Any]]":
        """Return a recipe with the strategy and the type of arithmetic, and what a header says about the recipe."""
        from germline.noise import check_whole_number
        from germline.recipes import make_recipe, recipe_address

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
        recipe = replace_strategy(recipe, self.strategy, settings["strategy"], evaluations)
        recipe = recipe if dtype == "auto" else replace(recipe, dtype=cast("DType", dtype))
        return recipe, {"recipe": recipe_address(name), "recipe_settings": settings["recipe"]}


@dataclass
class DataOptions:
    """The folder of the data sets."""

    data: Annotated[Path | None, Option("--data", help="folder of the data sets (else GERMLINE_DATA)")] = None

    def apply(self) -> None:
        """Make the folder known to the data sets of this process."""
        if self.data is not None:
            os.environ["GERMLINE_DATA"] = str(self.data)


@dataclass
class MachineOptions(DataOptions):
    """The device and the arithmetic of the members."""

    device: Device = "auto"
    dtype: Annotated[str, Option(help="type of the members' arithmetic: auto, float32 or bfloat16")] = "auto"


@dataclass
class FleetOptions:
    """The fleet that evaluates the members."""

    fleet: Annotated[str, Option(help="local, spmd (by torchrun, srun, mpirun or --workers), elastic, dask or ray")] = (
        "local"
    )
    workers: Annotated[
        int | None,
        Option(help="number of processes that share the members (default: one per core)"),
    ] = None
    exchange: Annotated[
        str | None,
        Option(help="exchange of an spmd fleet: auto (the default), replay, chromosome, semi or central"),
    ] = None
    timeout: Annotated[
        float | None, Option(help="seconds until a silent rank of an spmd fleet is given up (default: 120)")
    ] = None
    address: Annotated[
        str | None, Option(metavar="HOST:PORT", help="address of the running cluster, for --fleet dask or ray")
    ] = None
    keys: KeysDir = None


@dataclass
class StopOptions:
    """When to stop."""

    generations: Annotated[int | None, Option(help="stop after this many generations in all")] = None
    seconds: Annotated[float | None, Option(help="stop after this many seconds of training in all")] = None
    evaluations: Annotated[
        int | None, Option(help="stop after this many forward passes of a batch; a backward pass counts as two")
    ] = None
    interactions: Annotated[int | None, Option(help="stop after this many steps of simulators")] = None
    target: Annotated[str | None, Option(metavar="METRIC=VALUE", help="stop when a metric reaches a value")] = None
    patience: Annotated[
        int | None, Option(help="stop when this many evaluations of the dev set in a row bring no better metric")
    ] = None

    @property
    def is_limited(self) -> bool:
        return any(x is not None for x in (self.generations, self.seconds, self.evaluations, self.interactions))

    def limits(self, recipe: "Recipe | None" = None) -> "Stop":
        """Return the limits of a run: if none is given, the recipe's number of generations."""
        from germline.engine.stopping import Stop, Target

        generations = self.generations if self.is_limited or recipe is None else recipe.generations
        target = Target.parse(self.target)
        return Stop(generations, self.seconds, target, self.evaluations, self.patience, self.interactions)


@dataclass
class OutputOptions:
    """The directory of the run, and the form of the output."""

    runs: Annotated[Path, Option(help="folder in which runs are kept")] = Path("runs")
    name: Annotated[str | None, Option(help="name of the run's directory")] = None
    json_: AsJson = False


@dataclass
class AgainOptions:
    """Parts of a run that its header names but does not bring: code outside of this package must be given again."""

    recipe: Annotated[str | None, Option(help="the run's recipe, if it is a Python file or module:function")] = None
    strategy: Annotated[str | None, Option(help="the run's strategy, if it is not part of germline: module:Class")] = (
        None
    )
    trust: Annotated[
        bool, Option("--trust", help="run the code that the run's header names; a run from a stranger may name any")
    ] = False

    def adopt(self, header: Mapping[str, Any]) -> None:
        """Take what a trusted header names, after showing it, where the user has not given it."""
        from germline.recipes import RECIPES
        from germline.strategies import is_built_in

        if not self.trust:
            return
        if self.recipe is None and header["recipe"] not in (None, *RECIPES):
            self.recipe = header["recipe"]
            print(f"note: --trust loads the recipe {self.recipe!r}", file=sys.stderr)
        if self.strategy is None and not is_built_in(header["strategy_class"]):
            self.strategy = header["strategy_class"]
            print(f"note: --trust loads the strategy {self.strategy!r}", file=sys.stderr)

    def find_strategy(self) -> "AnyStrategy | None":
        """Return the strategy that the user has named again, or None."""
        from germline.strategies import find_strategy

        return find_strategy(self.strategy)() if self.strategy is not None else None

    def knows_recipe(self, header: Mapping[str, Any]) -> bool:
        """Return whether the recipe of a run is part of this package, or the user has given it again."""
        from germline.recipes import RECIPES

        return self.recipe is not None or header["recipe"] in RECIPES

    def require_recipe(self, header: Mapping[str, Any], run: str) -> str:
        """Return the recipe that the user has given again, or that of a run if it is part of this package."""
        if not self.knows_recipe(header) and header["recipe"] is None:
            how = f"go on there, with gl.train(..., resume={run!r})"
            raise BadInput(f"{run} was started in Python, not by a recipe: {how}.")
        if not self.knows_recipe(header):
            reason = f"{header['recipe']!r}, which is not part of germline"
            how = "give it again, with --recipe, or add --trust if you trust that code"
            raise BadInput(f"The recipe of {run} is {reason}: {how}.")
        return self.recipe or str(header["recipe"])

    def build_recipe(self, header: Mapping[str, Any], run: str) -> "Recipe":
        """Return the recipe of a run, with its strategy.

        Nothing outside of this package is imported because the header names it: the user gives it again.

        Args:
            header: The header of the run.
            run: The directory of the run, for messages.
        """
        from germline.engine.header import recipe_for_run
        from germline.recipes import make_recipe

        recipe = make_recipe(self.require_recipe(header, run), header["recipe_settings"], header["seed"])
        return recipe_for_run(recipe, header, self.find_strategy())


@dataclass
class ComparisonOptions:
    """Runs that are compared."""

    metric: Annotated[str | None, Option(help="metric to compare by (default: the first of the dev set)")] = None
    jobs: Annotated[int, Option(min=1, help="number of runs at the same time")] = 1
    workers: Annotated[int | None, Option(help="number of processes of each run")] = None
    keep: Keep = None


def replace_strategy(
    recipe: "Recipe", name: str | None, settings: dict[str, str], evaluations: int | None = None
) -> "Recipe":
    """Return a recipe with another strategy, at the recipe's settings for it, changed by the given settings.

    Args:
        recipe: The recipe.
        name: The name of the strategy; that of the recipe if None.
        settings: Settings of the strategy as text.
        evaluations: The run's budget, by which a strategy is chosen if none is named.
    """
    from germline.strategies import find_strategy
    from germline.strategies.settings import parse_setting

    strategy = recipe.strategy
    if name == "auto" or (name is None and not recipe.names_strategy):
        strategy = recipe.choose_strategy(evaluations)
    elif name is not None and (name != strategy.name or not recipe.names_strategy):
        cls = find_strategy(name)
        strategy = recipe.others.get(name) or cls()
    types = get_type_hints(type(strategy))
    names = list(vars(strategy))
    for key in settings:
        if key in ("rank", "ranks") and key not in names:
            raise BadInput(f"The strategy {strategy.name} has no low-rank noise: leave out {key}.")
        if key not in names:
            raise unknown_name(f"setting of {strategy.name}", key, names)
    values = {key: parse_setting(types[key], key, text) for key, text in settings.items()}
    return recipe.with_strategy(strategy.with_settings(**values))
