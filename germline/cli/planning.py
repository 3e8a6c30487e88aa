"""The command that predicts: plan."""

import json
from dataclasses import asdict
from typing import Annotated

from typer import Option

from germline.cli.app import command, print_table
from germline.cli.options import AsJson, DataOptions, Device, RecipeName, StrategyOptions


@command
def plan(
    recipe: RecipeName,
    strategy: StrategyOptions,
    data: DataOptions,
    device: Device = "auto",
    workers: Annotated[str, Option(help="numbers of workers, with commas")] = "1,2,4,8,16,32,64,96",
    network: Annotated[str, Option(help="network between workers, such as 1gbit, '10mbit 20ms' or none")] = "1gbit",
    json_: AsJson = False,
) -> None:
    """Predict time, memory and bytes of a generation by exchange and number of workers."""
    from germline.cli import costs
    from germline.genome import Genome
    from germline.noise import check_whole_number
    from germline.strategies.settings import parse_setting

    data.apply()
    made, _ = strategy.build_recipe(recipe)
    between = costs.Network.parse(network)
    numbers = [parse_setting(int, "workers", text) for text in workers.split(",")]
    counts = [check_whole_number("number of workers", number, 1 << 20) for number in numbers]
    rates, parameters = costs.measure_rates(made, made.strategy, device), Genome.from_module(made.model).size
    rows = costs.predict_costs(rates, made.strategy, parameters, made.strategy.population, between, counts)
    advice = costs.recommend(rows)
    if json_:
        about = {"parameters": parameters, "rates": asdict(rates), "use": advice}
        print(json.dumps({**about, "costs": [asdict(row) for row in rows]}))
        return
    about_run = f"{made.strategy.name}, {parameters:,} parameters, population {made.strategy.population}"
    print(f"{about_run}, network: {between.describe()}")
    cells = [row.as_row() for row in rows]
    print_table(cells[0], [row.values() for row in cells], box=None, pad_edge=False, padding=(0, 1))
    print(advice)
