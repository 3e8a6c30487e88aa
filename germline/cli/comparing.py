"""The commands that compare several runs: compare and sweep."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Exit, Option

from germline.cli.app import command, print_table
from germline.cli.options import ComparisonOptions, MachineOptions, OutputOptions, RecipeName, StopOptions, StrategyName
from germline.errors import BadInput, count

if TYPE_CHECKING:
    from germline.cli.comparison import Comparison

STANDARD = "openai-es,snes,mu-lambda,ga,pso,gradient"  # what is compared by default
SECONDS = 60.0  # of each run, if no limit is given
WIDTH = 200  # characters of a table that is not for a terminal
Seeds = Annotated[int, Option(min=1, help="number of runs of each, with seeds 0, 1, ...")]


@command
def compare(
    recipe: RecipeName,
    stop: StopOptions,
    machine: MachineOptions,
    output: OutputOptions,
    options: ComparisonOptions,
    strategies: Annotated[str, Option(help="names or module:Class of strategies, or auto, with commas")] = STANDARD,
    seeds: Seeds = 3,
    settings: Annotated[
        list[str] | None,
        Option("--set", metavar="KEY=VALUE", help="STRATEGY.KEY of a strategy, or recipe.KEY of the recipe"),
    ] = None,
) -> None:
    """Train a recipe by several strategies under one budget, with several seeds; started again, it goes on."""
    from germline.cli.comparison import Comparison, Variant
    from germline.recipes import recipe_address
    from germline.strategies import find_strategy

    texts = [text.strip() for text in strategies.split(",")]
    names = {text if text == "auto" else find_strategy(text).name: text for text in texts}
    own = {name: ["--strategy", text] for name, text in names.items()}
    common: list[str] = []
    for setting in settings or []:
        owner, dot, rest = setting.partition(".")
        if owner == "recipe":
            common += ["--set", setting]
        elif dot and owner in own:
            own[owner] += ["--set", rest]
        else:
            message = "--set takes recipe.KEY=VALUE or STRATEGY.KEY=VALUE"
            raise BadInput(f"{message}, with one of the strategies {', '.join(own)}, not {setting}.")
    common += common_options(stop, machine, options)
    outside = {name: text for name, text in names.items() if ":" in text}
    variants = tuple(Variant(name, tuple(words), outside.get(name)) for name, words in own.items())
    folder = output.runs / (output.name or f"compare-{Path(recipe).stem}")
    comparison = Comparison(folder, recipe_address(recipe), tuple(common), variants, seeds, options.jobs)
    show_comparison(comparison, options.metric, f"Germline: {recipe} by {', '.join(own)}", as_json=output.json_)


@command
def sweep(
    recipe: RecipeName,
    stop: StopOptions,
    machine: MachineOptions,
    output: OutputOptions,
    options: ComparisonOptions,
    settings: Annotated[
        list[str],
        Option("--set", metavar="KEY=V1,V2", help="values of a setting, or of recipe.KEY; together a grid"),
    ],
    strategy: StrategyName = None,
    seeds: Seeds = 1,
) -> None:
    """Train a recipe with every combination of some settings under one budget; started again, it goes on."""
    from germline.cli.comparison import Comparison, Variant, expand_grid, format_options
    from germline.recipes import recipe_address

    common = [*format_options(strategy=strategy), *common_options(stop, machine, options)]
    outside = strategy if strategy is not None and ":" in strategy else None
    variants = tuple(
        Variant(",".join(chosen).replace("/", "|"), tuple(word for one in chosen for word in ("--set", one)), outside)
        for chosen in expand_grid(settings)
    )
    folder = output.runs / (output.name or f"sweep-{Path(recipe).stem}{f'-{strategy}' if strategy else ''}")
    comparison = Comparison(folder, recipe_address(recipe), tuple(common), variants, seeds, options.jobs)
    show_comparison(
        comparison, options.metric, f"Germline: {recipe}, {count(len(variants), 'setting')}", as_json=output.json_
    )


def common_options(stop: StopOptions, machine: MachineOptions, options: ComparisonOptions) -> list[str]:
    """Return the options that every run of a comparison is given: its budget and its machine."""
    from germline.cli.comparison import format_options

    seconds = stop.seconds if stop.is_limited else SECONDS
    budget = {"generations": stop.generations, "seconds": seconds, "evaluations": stop.evaluations}
    data = machine.data.resolve() if machine.data is not None else None
    where = {"device": machine.device, "dtype": machine.dtype, "workers": options.workers, "data": data}
    return format_options(**budget, target=stop.target, patience=stop.patience, keep=options.keep, **where)


def show_comparison(comparison: "Comparison", metric: str | None, title: str, *, as_json: bool) -> None:
    """Run what has not been run, write the report and print the table."""
    from germline.cli import comparison as comparing

    try:
        trials = comparison.run()
    except KeyboardInterrupt:
        print("the same command goes on from here", file=sys.stderr)
        raise
    chosen = comparing.choose_metric(trials, metric)
    file = comparison.folder / "report.html"
    rows = comparing.write_comparison(trials, chosen, file, title)
    cells = [comparing.format_row(row) for row in rows if "median" in row]
    if as_json:
        print(json.dumps({"metric": chosen, "report": str(file), "rows": rows}))
    else:
        if cells:
            width = None if sys.stdout.isatty() else WIDTH
            print_table(comparing.column_names(chosen), cells, width, box=None, pad_edge=False)
            print(comparing.explain_table(comparison.seeds))
            print(comparing.describe_winner(rows, chosen))
        for row in rows:
            if "failure" in row:
                print(f"{row['variant']}: {row['failure']}")
        print(f"report: {file}")
    if not cells:
        print("error: all runs failed", file=sys.stderr)
        raise Exit(1)
