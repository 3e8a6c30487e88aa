"""Compares the ways to use the cores of one machine: processes that Germline forks, threads, SPMD ranks, inference.

    python benchmarks/cores.py                                  by 1, 2, 4, ... of all cores; about 15 s for each figure
    python benchmarks/cores.py --cores 2,16 --population 64     other numbers of cores and populations
    python benchmarks/cores.py --seconds 30                     the length of each run
    python benchmarks/cores.py --ways default,spmd              without threads

The task is ``mnist-mlp`` for cores (784-64-10, rank 1, batches of 512). Generations per second are those of whole runs
of ``germline train``, with journal, data and evaluation: by default (``--workers N``), by N threads, and by N ranks of
``--fleet spmd``. Inference is the plain forward pass of one network on population x batch samples, by N threads. All
runs of a population end with the same weights after the same number of generations, as their hashes show.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import nn

from germline.machine import processor_name

BATCH, COMPARED_AFTER = 512, 20  # examples of a batch; generations after which hashes are compared
THREADS = "from germline.fleet import executor; executor.CAN_FORK = False; from germline.cli import main; main()"
WAYS = ("default", "threads", "spmd")


def train(way: str, cores: int, population: int, *limits: str) -> Any:
    """Return the summary of a run."""
    start = ["-c", THREADS] if way == "threads" else ["-m", "germline"]
    with tempfile.TemporaryDirectory() as runs:
        options = ["--set", "recipe.machine=cores", "--population", str(population), "--device", "cpu", *limits]
        options += ["--workers", str(cores), "--runs", runs, "--json"] + (["--fleet", "spmd"] if way == "spmd" else [])
        environment = os.environ | {"OMP_NUM_THREADS": str(cores if way != "spmd" else 1)}
        command = [sys.executable, *start, "train", "mnist-mlp", *options]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def measure_inference(cores: int, population: int, seconds: float) -> float:
    """Return how often a second one network runs on population x batch samples, by some threads."""
    torch.set_num_threads(1)
    net, x = nn.Sequential(nn.Linear(784, 64), nn.ReLU(), nn.Linear(64, 10)), torch.rand(BATCH, 784)

    def forward(batches: int) -> None:
        with torch.inference_mode():
            for _ in range(batches):
                net(x)

    with ThreadPoolExecutor(cores, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        rounds, started = 0, time.perf_counter()
        while time.perf_counter() - started < seconds:
            list(pool.map(forward, [population // cores] * cores))
            rounds += 1
        return rounds / (time.perf_counter() - started)


def count_cores(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    available = len(os.sched_getaffinity(0))
    every = [1 << i for i in range(available.bit_length()) if 1 << i <= available]
    parser.add_argument("--cores", type=count_cores, default=every)
    parser.add_argument("--population", type=count_cores, default=[512, 2048])
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--ways", type=lambda text: text.split(","), default=WAYS, help=f"some of {','.join(WAYS)}")
    arguments = parser.parse_args()
    print(f"CPU: {processor_name()}, {available} cores, torch {torch.__version__}")
    for population in arguments.population:
        hashes = set()
        print(f"\npopulation {population}: generations per second, and times the first row")
        print(f"  {'cores':>5} {'inference':>16}" + "".join(f"{way:>17}" for way in arguments.ways))
        first: list[float] = []
        for cores in arguments.cores:
            rates = [measure_inference(cores, population, min(3.0, arguments.seconds))]
            for way in arguments.ways:
                summary = train(way, cores, population, "--seconds", str(arguments.seconds))
                rates.append(summary["generations"] / summary["seconds"])
                short = train(way, cores, population, "--generations", str(COMPARED_AFTER))
                hashes.add(short["theta_sha256"])
            first = first or rates
            columns = (f"{rate:9.2f} ({rate / base:4.1f}x)" for rate, base in zip(rates, first, strict=True))
            print(f"  {cores:>5} " + " ".join(f"{column:>16}" for column in columns), flush=True)
        print(f"  {len(hashes)} hash of the weights after {COMPARED_AFTER} generations: {', '.join(sorted(hashes))}")


if __name__ == "__main__":
    main()
