"""Recipes and strategies with the settings that a command gives as text."""

import dataclasses
import typing
from collections.abc import Mapping
from typing import Any

from germline.engine.header import recipe_for_run
from germline.errors import BadInput, unknown_name
from germline.recipes import RECIPES, make_recipe
from germline.recipes.recipe import Recipe
from germline.strategies.protocol import AnyStrategy
from germline.strategies.registry import find_strategy
from germline.strategies.settings import parse_setting


def replace_strategy(recipe: Recipe, name: str | None, settings: dict[str, str]) -> Recipe:
    """Return a recipe with another strategy, at the recipe's settings for it, changed by the given settings."""
    strategy = recipe.strategy
    if name is not None and name != strategy.name:
        cls = find_strategy(name)
        strategy = recipe.others.get(name) or cls()
    types = typing.get_type_hints(type(strategy))
    names = [field.name for field in dataclasses.fields(strategy)]  # type: ignore[arg-type]
    for key in settings:
        if key in ("rank", "ranks") and key not in names:
            raise BadInput(f"The strategy {strategy.name} has no low-rank noise: leave out {key}.")
        if key not in names:
            raise unknown_name(f"setting of {strategy.name}", key, names)
    values: dict[str, Any] = {key: parse_setting(types[key], key, text) for key, text in settings.items()}
    changed: AnyStrategy = dataclasses.replace(strategy, **values)  # type: ignore[type-var]
    return recipe.with_strategy(changed)


def recipe_of_run(header: Mapping[str, Any], run: str, recipe: str | None, strategy: str | None) -> Recipe:
    """Return the recipe of a run, with its strategy.

    Nothing outside of this package is imported because the header names it: the user gives it again.

    Args:
        header: The header of the run.
        run: The directory of the run, for messages.
        recipe: The recipe that the user has named again.
        strategy: The strategy that the user has named again.
    """
    name = recipe or header["recipe"]
    if name is None:
        how = f"go on there, with gl.train(..., resume={run!r})"
        raise BadInput(f"{run} was started in Python, not by a recipe: {how}.")
    if recipe is None and name not in RECIPES:
        raise BadInput(f"The recipe of {run} is {name}, which is not part of germline: give it again, with --recipe.")
    made = make_recipe(name, header["recipe_settings"], header["seed"])
    return recipe_for_run(made, header, find_strategy(strategy)() if strategy is not None else None)
