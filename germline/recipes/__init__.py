"""The recipes by name, and from files and modules: a recipe is a function that returns a ``Recipe``."""

import hashlib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, get_type_hints

from germline.errors import BadInput, format_error, unknown_name
from germline.recipes.darwinn import cif_8m, cif_900k, mnist_3m
from germline.recipes.digits import digits
from germline.recipes.hybrid_es import hybrid_es_convnet, hybrid_es_mnist
from germline.recipes.language import lm_bytes, smollm2_concise, smollm2_countdown, smollm2_format
from germline.recipes.mnist import mnist_conv, mnist_mlp
from germline.recipes.nuclei import unet_nuclei, unet_shapes
from germline.recipes.pesgd import pesgd_mnist
from germline.recipes.recipe import Recipe
from germline.recipes.rl import cartpole, half_cheetah, lunar_lander, pong_ram, swimmer
from germline.recipes.series import lstm_etth1, lstm_temperature
from germline.recipes.threshold import threshold_digits
from germline.strategies.settings import parse_setting

Maker = Callable[..., Recipe]
CLASSES = (digits, mnist_mlp, mnist_conv, mnist_3m, cif_900k, cif_8m, hybrid_es_mnist, hybrid_es_convnet, pesgd_mnist)
OTHERS = (unet_nuclei, unet_shapes, lstm_temperature, lstm_etth1, threshold_digits)
SIMULATORS = (cartpole, lunar_lander, swimmer, half_cheetah, pong_ram)
LANGUAGE = (lm_bytes, smollm2_format, smollm2_concise, smollm2_countdown)
RECIPES: dict[str, Maker] = {
    make.__name__.replace("_", "-"): make for make in (*CLASSES, *OTHERS, *SIMULATORS, *LANGUAGE)
}


def recipe_address(name: str) -> str:
    """Return what a journal calls a recipe: a file by its whole path, so that it is found from any directory."""
    return str(Path(name).resolve()) if name.endswith(".py") else name


FILE_MODULE = "germline_recipe_"  # how the names of modules begin that were imported from a file


def find_recipe(name: str) -> Maker:
    """Return the function that makes a recipe.

    Args:
        name: A name of ``RECIPES``, a Python file with a function ``recipe``, or module:function.

    Raises:
        BadInput: There is no such recipe, or its file or module cannot be imported.
    """
    if name in RECIPES:
        return RECIPES[name]
    is_file = name.endswith(".py")
    module_name, colon, function = (name, ":", "recipe") if is_file else name.partition(":")
    if not colon:
        raise unknown_name("recipe", name, RECIPES)
    file = Path(name).resolve()
    if is_file and not file.is_file():
        raise BadInput(f"There is no file {name}.")
    add_to_path(file.parent if is_file else Path.cwd())
    try:
        module = import_file(file) if is_file else importlib.import_module(module_name)
    except Exception as error:
        raise BadInput(f"The recipe {name} cannot be loaded: {format_error(error)}") from error
    maker: Maker | None = getattr(module, function, None)
    if not inspect.isroutine(maker):
        raise BadInput(f"There is no function {function!r} in {name}: a recipe is a function that returns gl.Recipe.")
    if not is_file and not is_recipe(maker):  # in a file its name says what it is
        message = f"{name} does not say that it returns a recipe, and is not called"
        raise BadInput(f"{message}: write def {function}(...) -> gl.Recipe.")
    return maker


def is_recipe(function: Callable[..., Any]) -> bool:
    """Return whether a function is annotated as one that returns a ``Recipe``."""
    returned = getattr(function, "__annotations__", {}).get("return")
    return returned is Recipe or (isinstance(returned, str) and returned.rpartition(".")[2] == "Recipe")


def import_file(file: Path) -> ModuleType:
    """Import a file under a name that no other module has."""
    name = f"{FILE_MODULE}{hashlib.sha256(str(file).encode()).hexdigest()[:16]}"
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def add_to_path(directory: Path) -> None:
    """Append a directory to the path of imports, unless it is there."""
    if str(directory) not in sys.path:
        sys.path.append(str(directory))


def make_recipe(name: str, settings: Mapping[str, str], seed: int) -> Recipe:
    """Return a recipe with these settings.

    Args:
        name: A name, a file or a function, as for ``find_recipe``.
        settings: The recipe's settings as text, which is parsed by the types of its arguments.
        seed: The seed of the run, passed on to a recipe that has an argument ``seed``.

    Raises:
        BadInput: There is no such recipe or setting, a value cannot be parsed, or the recipe fails.
    """
    maker = find_recipe(name)
    parameters = inspect.signature(maker).parameters
    types = get_type_hints(maker)
    values: dict[str, Any] = {"seed": seed} if "seed" in parameters else {}
    for key, text in settings.items():
        if key not in parameters:
            raise unknown_name(f"setting of the recipe {name}", key, [p for p in parameters if p != "seed"])
        default = parameters[key].default
        fallback = str if default in (None, inspect.Parameter.empty) else type(default)
        values[key] = parse_setting(types.get(key, fallback), f"recipe.{key}", text)
    try:
        recipe = maker(**values)
    except BadInput:
        raise
    except Exception as error:
        raise BadInput(f"The recipe {name} failed: {format_error(error)}") from error
    if not isinstance(recipe, Recipe):
        raise BadInput(f"The recipe {name} returned a {type(recipe).__name__}, not a gl.Recipe.")
    return recipe
