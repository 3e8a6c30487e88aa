"""The cost of a journal whose generations survive a power cut, its size, and the memory that a replay takes.

    python benchmarks/journal.py [--population P] [--generations N] [--directory DIR]

SQLite in WAL mode, on the disk of the directory: ``synchronous`` FULL (each commit reaches the disk before it returns)
with a commit for each record and with one for fifty, compared with NORMAL (the last commits may be lost in a power cut,
but not in a crash of the program). A replay reads one record at a time: its memory is printed for some generations and
for four times as many.
"""

import argparse
import tempfile
import time
import tracemalloc
from pathlib import Path

import numpy as np
import torch
from torch import nn

from germline import Recipe
from germline.engine.journal import HEADER, Journal, Record
from germline.engine.opening import open_for_replay, start
from germline.engine.replay import replay
from germline.fleet import Local
from germline.strategies import GenerationResult, OpenAIES


def measure(directory: Path, population: int, generations: int, synchronous: str, per_commit: int) -> tuple[float, int]:
    """Return the seconds of a record, and the bytes of the journal."""
    state = OpenAIES(population=population).init(torch.zeros(1000))
    header = {name: next(iter(getattr(kind, "__args__", (kind,))))() for name, kind in HEADER.items()}
    journal = Journal.create(directory / f"{synchronous}-{per_commit}", header, state)
    journal.connection.execute(f"PRAGMA synchronous = {synchronous}")
    scores = np.random.default_rng(0).random(population, np.float32)
    start = time.perf_counter()
    for generation in range(generations):
        result = GenerationResult(generation, scores, {"sigma": 0.05, "lr": 0.02})
        journal.append(Record(result, None, {"seconds": 0.01, "samples": 1000, "bytes": [0, 0]}))
        if generation % per_commit == per_commit - 1:
            journal.commit()
    journal.commit()
    seconds = (time.perf_counter() - start) / generations
    journal.close()
    return seconds, (journal.path / "journal.sqlite").stat().st_size


def measure_replay(path: Path, population: int, generations: int) -> int:
    """Return the most bytes that Python and NumPy hold while a run of made-up scores is replayed."""
    recipe = Recipe(nn.Linear(4, 1), objective=lambda net: 0.0, strategy=OpenAIES(population=population))
    session = start(recipe, path, seed=0, fleet=Local("cpu"), about={})
    journal = session.require_journal()
    scores = np.random.default_rng(0).random(population, np.float32)
    for generation in range(generations):
        result = GenerationResult(generation, scores, {"sigma": 0.05, "lr": 0.02})
        journal.append(Record(result, None, {"seconds": 0.01, "samples": 1000, "bytes": [0, 0]}))
    journal.commit()
    replay(open_for_replay(journal), until=2)  # compiles kernels and imports modules
    tracemalloc.start()
    replay(open_for_replay(journal))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    journal.close()
    return peak


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--population", type=int, default=256, help="scores of a record (default 256)")
    parser.add_argument("--generations", type=int, default=500, help="records to write (default 500)")
    parser.add_argument("--directory", type=Path, default=Path("."), help="a directory on the disk to be measured")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.directory) as directory:
        for synchronous, per_commit in (("FULL", 1), ("FULL", 50), ("NORMAL", 1)):
            settings = (arguments.population, arguments.generations, synchronous, per_commit)
            seconds, size = measure(Path(directory), *settings)
            cost = f"{1e3 * seconds:6.3f} ms a record  {size:,} bytes in the end"
            print(f"synchronous {synchronous:6}  {per_commit:2} a commit  {cost}")
        for times in (1, 4):
            generations = times * arguments.generations
            peak = measure_replay(Path(directory) / f"replay-{times}", arguments.population, generations)
            print(f"replay of {generations:,} generations: {peak / 1e6:.1f} MB at most")


if __name__ == "__main__":
    main()
