"""The exceptions whose messages are written for the user."""

import sysconfig
import traceback
from collections.abc import Iterable
from difflib import get_close_matches
from pathlib import Path

PACKAGE = str(Path(__file__).parent)


class BadInput(ValueError):
    """The user asked for something that cannot be done; the message says what to do about it.

    >>> import germline as gl
    >>> try:
    ...     gl.OpenAIES(population=7)
    ... except gl.BadInput as error:
    ...     print(error)
    The population must be an even number of at least 2, not 7.
    """


class NoProgress(UserWarning):
    """A run learns nothing; the message says what to change. It is given once in a run.

    >>> import warnings
    >>> import germline as gl
    >>> from torch import nn
    >>> with warnings.catch_warnings(record=True) as caught:
    ...     warnings.simplefilter("always")
    ...     result = gl.train(nn.Linear(2, 1), objective=lambda net: 1.0, generations=10, run=False)
    >>> [warning.category.__name__ for warning in caught]
    ['NoProgress']
    """


class MachineError(RuntimeError):
    """The machine could not do what the user rightly asked for: its disk is full, for example."""


class FleetLostError(RuntimeError):
    """The other processes of a fleet are gone: this process ends, and its launcher may start all of them again."""


class WrongScoresError(FleetLostError):
    """A worker of a cluster has given wrong scores, which were used; the run must go back to before them.

    Attributes:
        generation: The generation to which it must go back.
    """

    def __init__(self, message: str, generation: int) -> None:
        super().__init__(message)
        self.generation = generation


def count(number: int, noun: str) -> str:
    """Return a number with its noun, in the plural unless the number is 1.

    >>> count(1, "generation"), count(2, "generation")
    ('1 generation', '2 generations')
    """
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def unknown_name(what: str, name: str, names: Iterable[str]) -> BadInput:
    """Return the error for a misspelled name, with the nearest valid name and all of them.

    Args:
        what: the kind of thing that has the name, such as "strategy".
        name: what the user wrote.
        names: the valid names.
    """
    valid = sorted(names)
    near = get_close_matches(name, valid, n=1, cutoff=0.4)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return BadInput(f"There is no {what} {name!r}: {hint}choose one of {', '.join(valid) or 'none'}.")


def format_error(error: Exception) -> str:
    """Return the type and the message of an error in the user's code, and the line of that code."""
    if isinstance(error, SyntaxError) and error.filename is not None:
        return f"{type(error).__name__}: {error.msg} ({error.filename}, line {error.lineno})"
    others = ("<", PACKAGE, *(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")))
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith(others)]
    where = f" ({own[-1].filename}, line {own[-1].lineno})" if own else ""
    return f"{type(error).__name__}: {error}{where}"
