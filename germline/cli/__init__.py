"""The command line: parse, build, call. Results go to standard output, everything else to standard error."""

import io
import sys
import warnings
from typing import Any

from germline.cli import comparing, inspecting, planning, serving, training  # they add their commands
from germline.cli.app import app
from germline.errors import NoProgress


def show_warning(message: Warning | str, category: type[Warning], *place: Any, **more: Any) -> None:
    """Print a warning of this library as a sentence, once in a fleet, and those of others as they are."""
    from germline.fleet.spmd.launch import find_launch
    from germline.population import SlowPath

    if find_launch().rank:
        return
    is_own = issubclass(category, SlowPath | NoProgress)
    print(f"note: {message}" if is_own else f"{category.__name__}: {message}", file=sys.stderr)


def main() -> None:
    """Run the command line."""
    warnings.showwarning = show_warning
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a path need not be text
    app(prog_name="germline")
