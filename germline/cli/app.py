"""The command-line application, and the decorator that makes a function a command.

A parameter whose type is a dataclass of options (see ``options.py``) is expanded into one option per field, so that each
option is declared once and used by any number of commands.
"""

import dataclasses
import inspect
import sys
import typing
from collections.abc import Callable
from typing import Any

import typer

from germline.errors import BadInput, FleetLostError, MachineError

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Train PyTorch modules by evolution. Results go to standard output, everything else to standard error.",
)


def command(function: Callable[..., None], name: str | None = None, group: typer.Typer = app) -> Callable[..., None]:
    """Add a function to the command line; its errors end in a sentence and an exit code.

    Args:
        function: The command; its docstring is the help text.
        name: The name of the command, if it is not that of the function.
        group: The group of commands to add it to.
    """
    group.command(name or function.__name__)(exit_on_error(expand_options(function)))
    return function


def expand_options(function: Callable[..., None]) -> Callable[..., None]:
    """Return a function with one parameter per field, in place of each parameter that is a dataclass of options."""
    signature, hints = inspect.signature(function), typing.get_type_hints(function, include_extras=True)
    groups: dict[str, type[Any]] = {}
    positional: list[inspect.Parameter] = []
    for parameter in signature.parameters.values():
        kind = hints[parameter.name]
        if dataclasses.is_dataclass(kind) and isinstance(kind, type):
            groups[parameter.name] = kind
            types = typing.get_type_hints(kind, include_extras=True)
            fields = {f.name: f.default for f in dataclasses.fields(kind)}
        else:
            types, fields = {parameter.name: kind}, {parameter.name: parameter.default}
        for name, default in fields.items():
            value = inspect.Parameter.empty if default is dataclasses.MISSING else default
            positional.append(
                inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=value, annotation=types[name])
            )

    def call(**values: Any) -> None:
        arguments = {
            name: kind(**{f.name: values.pop(f.name) for f in dataclasses.fields(kind)})
            for name, kind in groups.items()
        }
        function(**arguments, **values)

    call.__name__, call.__doc__ = function.__name__, function.__doc__
    call.__signature__ = inspect.Signature(positional)  # type: ignore[attr-defined]
    call.__annotations__ = {parameter.name: parameter.annotation for parameter in positional}
    return call


def exit_on_error(function: Callable[..., None]) -> Callable[..., None]:
    """Return a function whose errors are printed as a sentence: exit code 2 for bad input, 1 for failures."""

    def call(**values: Any) -> None:
        try:
            function(**values)
        except (BadInput, FleetLostError, MachineError) as error:
            print(f"error: {error}", file=sys.stderr)
            raise typer.Exit(2 if isinstance(error, BadInput) else 1) from None
        except KeyboardInterrupt:
            print("interrupted; every finished generation is on disk", file=sys.stderr)
            raise typer.Exit(130) from None

    call.__name__, call.__doc__ = function.__name__, function.__doc__
    call.__signature__ = inspect.signature(function)  # type: ignore[attr-defined]
    call.__annotations__ = function.__annotations__
    return call
