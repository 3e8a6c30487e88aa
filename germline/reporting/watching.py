"""Finds out whether people see what this process shows."""

import sys


def is_notebook() -> bool:
    """Return whether this process is the kernel of a notebook."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return getattr(shell, "kernel", None) is not None


def is_watched() -> bool:
    """Return whether this process shows its standard error to people: on a terminal, or in a notebook."""
    return is_notebook() or (sys.stderr is not None and sys.stderr.isatty())
