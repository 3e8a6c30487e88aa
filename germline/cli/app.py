"""The command-line application, and the decorator that makes a function a command.

A parameter whose type is a dataclass of options (see ``options.py``) is expanded into one option per field, so that
each option is declared once and used by any number of commands.

The modules of the commands import the rest of Germline, and so torch, inside of their functions: help texts, the
completion of a shell and most errors need none of it.
"""

import dataclasses
import inspect
import sys
from collections.abc import Callable, Iterable
from typing import Annotated, Any

import typer

from germline.errors import BadInput, FleetLostError, MachineError
from germline.version import __version__


class Commands(typer.core.TyperGroup):
    """The commands, those first that a newcomer needs first."""

    def list_commands(self, context: Any) -> list[str]:
        return sorted(super().list_commands(context), key=lambda name: name not in ("train", "resume"))

    def resolve_command(self, context: Any, words: list[str]) -> Any:
        if words[0] == "version":
            context.fail("No such command 'version': germline --version prints the version.")
        return super().resolve_command(context, words)


app = typer.Typer(cls=Commands, no_args_is_help=True, pretty_exceptions_enable=False)


def show_version(is_asked: bool) -> None:
    """Print the version and end, if that is what the user asked for."""
    if is_asked:
        print(f"germline {__version__}")
        raise typer.Exit


@app.callback()
def describe(
    version: Annotated[
        bool, typer.Option("--version", callback=show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Germline trains PyTorch networks by evolution: it scores random changes of the weights and learns from them.

    Start with 'germline train digits'. Results go to standard output, everything else to standard error.
    """


def command(function: Callable[..., None], group: typer.Typer = app) -> Callable[..., None]:
    """Add a function to the command line; its errors end in a sentence: exit code 2 for bad input, 1 for failures.

    Args:
        function: The command; its docstring is the help text.
        group: The group of commands to add it to.
    """
    parameters = inspect.signature(function).parameters.values()
    groups: dict[str, Any] = {p.name: p.annotation for p in parameters if dataclasses.is_dataclass(p.annotation)}

    def call(**values: Any) -> None:
        for name, kind in groups.items():
            values[name] = kind(**{field.name: values.pop(field.name) for field in dataclasses.fields(kind)})
        try:
            function(**values)
        except (BadInput, FleetLostError, MachineError) as error:
            print(f"error: {make_printable(str(error))}", file=sys.stderr)
            raise typer.Exit(2 if isinstance(error, BadInput) else 1) from None
        except KeyboardInterrupt:
            print("interrupted; every finished generation is on disk", file=sys.stderr)
            raise typer.Exit(130) from None

    expanded = [option for parameter in parameters for option in expand_parameter(parameter)]
    call.__name__, call.__doc__ = function.__name__, function.__doc__
    call.__signature__ = inspect.Signature(expanded)  # type: ignore[attr-defined]
    call.__annotations__ = {option.name: option.annotation for option in expanded}
    group.command()(call)
    return function


def make_printable(text: str) -> str:
    """Return a text without control characters, which a stranger's file could send to the terminal."""
    return "".join(c if c.isprintable() or c == "\n" else ascii(c)[1:-1] for c in text)


def expand_parameter(parameter: inspect.Parameter) -> list[inspect.Parameter]:
    """Return a parameter for each field of a dataclass of options, or the parameter itself if it is no such group."""
    kind, is_group = parameter.annotation, dataclasses.is_dataclass(parameter.annotation)
    options = inspect.signature(kind).parameters.values() if is_group else [parameter]
    return [option.replace(kind=inspect.Parameter.KEYWORD_ONLY) for option in options]


def print_table(columns: Iterable[str], rows: Iterable[Iterable[Any]], width: int | None = None, **layout: Any) -> None:
    """Print a table to standard output.

    Args:
        columns: The names of the columns.
        rows: The cells of each row.
        width: Characters of a line, by default those of the terminal.
        layout: Settings of ``rich.table.Table``.
    """
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Column, Table

    table = Table(*(Column(name, overflow="fold") for name in columns), **layout)  # a long path is not cut
    for row in rows:
        table.add_row(*(escape(str(cell)) for cell in row))  # a cell may hold brackets, as a path does
    Console(width=width).print(table)
