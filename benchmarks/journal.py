"""What it costs that a journaled generation survives a power cut, and how large a journal is.

    python benchmarks/journal.py [--population P] [--generations N] [--directory DIR]

SQLite in WAL mode, with ``synchronous`` FULL (each commit reaches the disk before it returns), a commit for each record
and one for fifty, beside NORMAL (the last commits may be lost in a power cut, not in a crash of the program), on the
disk of the directory.
"""

import argparse
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from germline.journal import Journal
from germline.strategies import GenerationResult, OpenAIES


def measure(directory: Path, population: int, generations: int, synchronous: str, together: int) -> tuple[float, int]:
    """Seconds per record, and the bytes of the journal."""
    state = OpenAIES(population=population).init(torch.zeros(1000))
    journal = Journal.create(directory / f"{synchronous}-{together}", {"recipe": None}, state)
    journal.connection.execute(f"PRAGMA synchronous = {synchronous}")
    scores = np.random.default_rng(0).random(population, np.float32)
    start = time.perf_counter()
    for generation in range(generations):
        journal.append(
            GenerationResult(generation, scores, {"sigma": 0.05, "lr": 0.02}), None, {"seconds": 0.01, "samples": 1000}
        )
        if generation % together == together - 1:
            journal.commit()
    journal.commit()
    seconds = (time.perf_counter() - start) / generations
    journal.close()
    return seconds, (journal.path / "journal.sqlite").stat().st_size


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--population", type=int, default=256)
    parser.add_argument("--generations", type=int, default=500)
    parser.add_argument("--directory", type=Path, default=Path("."), help="on the disk to be measured")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.directory) as directory:
        for synchronous, together in (("FULL", 1), ("FULL", 50), ("NORMAL", 1)):
            given = (arguments.population, arguments.generations, synchronous, together)
            seconds, size = measure(Path(directory), *given)
            said = f"{1e3 * seconds:6.3f} ms a record  {size:,} bytes in the end"
            print(f"synchronous {synchronous:6}  {together:2} a commit  {said}")


if __name__ == "__main__":
    main()
