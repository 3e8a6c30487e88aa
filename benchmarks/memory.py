"""The peak memory of a run of every strategy on a network of 3,274,634 parameters, each in a separate process.

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
from germline.machine import peak_memory
from germline.strategies import STRATEGIES

LIMIT = 24e9


def build_net() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(1, 32, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(32, 64, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(3136, 1024), nn.ReLU(), nn.Linear(1024, 10)),
    )


def measure(name: str, generations: int) -> None:
    """Train for a short time, and print the peak memory in bytes."""
    torch.manual_seed(0)
    data = (torch.randn(64, 1, 28, 28), torch.randint(0, 10, (64,)))
    with tempfile.TemporaryDirectory() as directory:
        settings = {"loss": F.cross_entropy, "strategy": STRATEGIES[name](), "batch_size": 16}
        gl.train(build_net(), data, generations=generations, run=Path(directory) / "run", **settings)
    print(peak_memory(torch.device("cpu")))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--generations", type=int, default=3, help="generations of each run (default 3)")
    parser.add_argument("--only", choices=STRATEGIES, help="train only this strategy, in this process")
    parser.add_argument(
        "--json", action="store_true", help="print all numbers of bytes as one JSON object in the last line"
    )
    arguments = parser.parse_args()
    if arguments.only:
        measure(arguments.only, arguments.generations)
        return
    print(f"{Genome.from_module(build_net()).size:,} parameters, {arguments.generations} generations")
    peaks = {}
    for name in STRATEGIES:
        command = [sys.executable, __file__, "--only", name, "--generations", str(arguments.generations)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        peaks[name] = int(done.stdout.split()[-1])
        verdict = "" if peaks[name] < LIMIT else "  (more than 24 GB)"
        print(
            f"{name:12} population {STRATEGIES[name]().population:4} {peaks[name] / 1e9:6.2f} GB{verdict}", flush=True
        )
    if arguments.json:
        print(json.dumps(peaks))


if __name__ == "__main__":
    main()
