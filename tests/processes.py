"""What tests look up about other processes and their runs."""

import sqlite3
from contextlib import closing
from pathlib import Path


def count_generations(run: Path) -> int:
    """Return the number of generations in the journal of a run that another process may be writing."""
    try:
        with closing(sqlite3.connect(f"file:{run}/journal.sqlite?mode=ro", uri=True)) as connection:
            return int((connection.execute("SELECT generation FROM tip").fetchone() or [-1])[0]) + 1
    except sqlite3.Error:
        return 0


def is_running(process: int) -> bool:
    """Return whether a process runs; one that has ended and waits for its parent to ask for its status does not."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
