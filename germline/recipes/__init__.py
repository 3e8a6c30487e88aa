"""The recipes by name, and from files and modules: a recipe is a function that returns a ``Recipe``."""

import importlib
import importlib.util
import inspect
import sys
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from germline.errors import BadInput, unknown
from germline.recipe import Recipe
from germline.recipes.digits import digits
from germline.strategies.settings import parse

Maker = Callable[..., Recipe]
RECIPES: dict[str, Maker] = {"digits": digits}


def find(name: str) -> Maker:
    """A name from the list, a Python file with a function ``recipe``, or module:function."""
    if name in RECIPES:
        return RECIPES[name]
    if name.endswith(".py"):
        file = Path(name)
        if not file.is_file():
            raise BadInput(f"There is no file {name}.")
        spec = importlib.util.spec_from_file_location(file.stem, file)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[file.stem] = module
        return function_of(lambda: spec.loader.exec_module(module) or module, name, "recipe")  # type: ignore[union-attr]
    if ":" in name:
        where, function = name.split(":", 1)
        return function_of(lambda: importlib.import_module(where), name, function)
    raise unknown("recipe", name, RECIPES)


def function_of(load: Callable[[], Any], name: str, function: str) -> Maker:
    try:
        module = load()
    except Exception as error:
        raise BadInput(f"The recipe {name} cannot be loaded: {type(error).__name__}: {error}") from error
    maker = getattr(module, function, None)
    if not callable(maker):
        raise BadInput(f"There is no function {function!r} in {name}: a recipe is a function that returns gl.Recipe.")
    return maker  # type: ignore[no-any-return]


def make(name: str, settings: Mapping[str, str], seed: int) -> Recipe:
    """The recipe with settings given as text; the run's seed is passed on to a recipe that takes one."""
    maker = find(name)
    parameters = inspect.signature(maker).parameters
    kinds = typing.get_type_hints(maker)
    values: dict[str, Any] = {"seed": seed} if "seed" in parameters else {}
    for key, text in settings.items():
        if key not in parameters:
            raise unknown(f"setting of the recipe {name}", key, [p for p in parameters if p != "seed"])
        values[key] = parse(kinds.get(key, str), f"recipe.{key}", text)
    recipe = maker(**values)
    if not isinstance(recipe, Recipe):
        raise BadInput(f"The recipe {name} returned a {type(recipe).__name__}, not a gl.Recipe.")
    return recipe
