"""The exceptions that are addressed to a person."""

from collections.abc import Iterable
from difflib import get_close_matches


class BadInput(ValueError):
    """Something that was asked for cannot be done; the message is a sentence that says what to do about it.

    >>> import germline as gl
    >>> try:
    ...     gl.OpenAIES(population=7)
    ... except gl.BadInput as error:
    ...     print(error)
    The population must be an even number of at least 2, not 7.
    """


class MachineError(BadInput):
    """What was asked for was right, but the machine could not do it: a full disk, for example."""


class FleetLostError(RuntimeError):
    """The other processes of a fleet are gone: this one ends, and whoever launched it may start all of them again."""


def unknown_name(what: str, name: str, names: Iterable[str]) -> BadInput:
    """The answer to a misspelt name: the nearest valid one, and all of them."""
    valid = sorted(names)
    near = get_close_matches(name, valid, n=1, cutoff=0.4)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return BadInput(f"There is no {what} {name!r}: {hint}choose one of {', '.join(valid) or 'none'}.")
