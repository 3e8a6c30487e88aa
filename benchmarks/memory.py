"""The peak memory of a run of every strategy on a network of 3,274,634 parameters, each in a process of its own.

    python benchmarks/memory.py [--generations 3] [--json]

The net is that of DarwiNN's MNIST experiments, 32C5-P-64C5-P-1024-10, on random images; strategies have their defaults.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import germline as gl
from germline.genome import Genome
from germline.run import peak_memory
from germline.strategies import STRATEGIES

WANTED = 24e9


def net() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(1, 32, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(32, 64, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(3136, 1024), nn.ReLU(), nn.Linear(1024, 10)),
    )


def one(name: str, generations: int) -> None:
    """A short run, then its peak memory in bytes."""
    torch.manual_seed(0)
    data = (torch.randn(64, 1, 28, 28), torch.randint(0, 10, (64,)))
    with tempfile.TemporaryDirectory() as directory:
        settings = {"loss": F.cross_entropy, "strategy": STRATEGIES[name](), "batch_size": 16}
        gl.train(net(), data, generations=generations, run=Path(directory) / "run", **settings)
    print(peak_memory())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--generations", type=int, default=3)
    parser.add_argument("--only", choices=STRATEGIES, help="this strategy, in this process")
    parser.add_argument("--json", action="store_true", help="the last line is one JSON object")
    arguments = parser.parse_args()
    if arguments.only:
        one(arguments.only, arguments.generations)
        return
    print(f"{Genome.from_module(net()).size:,} parameters, {arguments.generations} generations")
    found = {}
    for name in STRATEGIES:
        command = [sys.executable, __file__, "--only", name, "--generations", str(arguments.generations)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        found[name] = int(done.stdout.split()[-1])
        verdict = "" if found[name] < WANTED else "  (more than 24 GB)"
        print(
            f"{name:12} population {STRATEGIES[name]().population:4} {found[name] / 1e9:6.2f} GB{verdict}", flush=True
        )
    if arguments.json:
        print(json.dumps(found))


if __name__ == "__main__":
    main()
