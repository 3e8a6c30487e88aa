"""The recipes by name, and from files and modules: a recipe is a function that returns a ``Recipe``."""

import hashlib
import importlib
import importlib.util
import inspect
import sys
import traceback
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from germline.errors import BadInput, unknown_name
from germline.recipes.darwinn import cif_8m, cif_900k, mnist_3m
from germline.recipes.digits import digits
from germline.recipes.hybrid_es import hybrid_es_convnet, hybrid_es_mnist
from germline.recipes.mnist import mnist_conv, mnist_mlp
from germline.recipes.nuclei import unet_nuclei
from germline.recipes.pesgd import pesgd_mnist
from germline.recipes.recipe import Recipe
from germline.recipes.series import lstm_etth1, lstm_temperature
from germline.recipes.threshold import threshold_digits
from germline.strategies.settings import parse

Maker = Callable[..., Recipe]
RECIPES: dict[str, Maker] = {
    "digits": digits,
    "mnist-mlp": mnist_mlp,
    "mnist-conv": mnist_conv,
    "mnist-3m": mnist_3m,
    "cif-900k": cif_900k,
    "cif-8m": cif_8m,
    "hybrid-es-mnist": hybrid_es_mnist,
    "hybrid-es-convnet": hybrid_es_convnet,
    "pesgd-mnist": pesgd_mnist,
    "unet-nuclei": unet_nuclei,
    "lstm-temperature": lstm_temperature,
    "lstm-etth1": lstm_etth1,
    "threshold-digits": threshold_digits,
}


def address(name: str) -> str:
    """What a journal calls a recipe: a file by its whole path, so that it is found from anywhere."""
    return str(Path(name).resolve()) if name.endswith(".py") else name


def find(name: str) -> Maker:
    """A name from the list, a Python file with a function ``recipe``, or module:function."""
    if name in RECIPES:
        return RECIPES[name]
    if name.endswith(".py"):
        file = Path(name).resolve()
        if not file.is_file():
            raise BadInput(f"There is no file {name}.")
        return function_of(lambda: load_file(file), name, "recipe")
    if ":" in name:
        where, function = name.split(":", 1)
        importable(Path.cwd())
        return function_of(lambda: importlib.import_module(where), name, function)
    raise unknown_name("recipe", name, RECIPES)


def load_file(file: Path) -> ModuleType:
    """Under a name that no other module has; its neighbors can be imported."""
    importable(file.parent)
    name = f"germline_recipe_{hashlib.sha256(str(file).encode()).hexdigest()[:16]}"
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def importable(directory: Path) -> None:
    if str(directory) not in sys.path:
        sys.path.append(str(directory))


def function_of(load: Callable[[], ModuleType], name: str, function: str) -> Maker:
    try:
        module = load()
    except Exception as error:
        raise BadInput(f"The recipe {name} cannot be loaded: {told(error)}") from error
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
            raise unknown_name(f"setting of the recipe {name}", key, [p for p in parameters if p != "seed"])
        default = parameters[key].default
        usual = str if default in (None, inspect.Parameter.empty) else type(default)
        values[key] = parse(kinds.get(key, usual), f"recipe.{key}", text)
    try:
        recipe = maker(**values)
    except BadInput:
        raise
    except Exception as error:
        raise BadInput(f"The recipe {name} failed: {told(error)}") from error
    if not isinstance(recipe, Recipe):
        raise BadInput(f"The recipe {name} returned a {type(recipe).__name__}, not a gl.Recipe.")
    return recipe


def told(error: Exception) -> str:
    """An error in someone else's code, with the place where it happened."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {error}{where}"
