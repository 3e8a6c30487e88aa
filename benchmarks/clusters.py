"""Compares the weights and the bytes of a generation of all strategies on spmd, Dask and Ray.

    python benchmarks/clusters.py [--fleets spmd,dask,ray] [--recipe digits] [--generations 15]
    python benchmarks/clusters.py --large

Each strategy trains in one process, and with two workers on each fleet. On Dask it does so twice: workers follow the
run by its records, and they are sent weights. The Dask cluster is started by Dask's own commands, the Ray cluster by
Ray's. The bytes are those that the process with the journal sends and receives in a generation, from generation 2 on,
as Germline counts them: what Dask and Ray add is not in it. "Fewest" is a generation with the fewest bytes, where they
differ much: a step of Hybrid-ES that shifts the last gradient.

--large trains nets of up to 8 million parameters on Dask, and prints the bytes of each worker and the memory of Dask's
scheduler over time as well: records do not grow with the net, and the scheduler keeps nothing of what it passes on.

The exit code is 1 if any weights differ from those of one process.
"""

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from functools import partial
from pathlib import Path
from statistics import mean
from typing import NamedTuple

from soak import memory

import germline as gl
from germline.cli.options import StrategyOptions
from germline.engine import loop, opening
from germline.engine.follower import NEVER
from germline.engine.journal import Journal
from germline.engine.stopping import Stop
from germline.fleet import Cluster, Fleet
from germline.fleet.cluster import jobs
from germline.fleet.cluster.crew import RemoteWorker
from germline.fleet.cluster.scheduler import ChunkScheduler
from germline.fleet.spmd.launch import free_port

WORKERS = 2
jobs.ChunkScheduler = partial(ChunkScheduler, smallest=0.0)  # type: ignore[misc,assignment]  # for short generations
STRATEGIES = {
    "openai-es": StrategyOptions("openai-es"),
    "openai-es, rank 1": StrategyOptions("openai-es", rank="1"),
    "snes": StrategyOptions("snes"),
    "mu-lambda": StrategyOptions("mu-lambda"),
    "ga": StrategyOptions("ga"),
    "deep-ga": StrategyOptions("deep-ga"),
    "pso": StrategyOptions("pso"),
    "gradient": StrategyOptions("gradient"),
    "hybrid-es": StrategyOptions("hybrid-es"),
    "hybrid-es, base=slot": StrategyOptions("hybrid-es", settings=["base=slot", "epoch=5"]),
    "pesgd": StrategyOptions("pesgd"),
}
EIGHT_MILLION = str(Path(__file__).with_name("eight_million.py"))
FEW = ["recipe.batch_size=64", "recipe.examples=256"]
LARGE = [  # recipe, strategy, generations
    ("mnist-3m", StrategyOptions("openai-es", 16, "1", FEW), 8),
    (EIGHT_MILLION, StrategyOptions("openai-es", 16, "1"), 8),
    ("mnist-3m", StrategyOptions("snes", 16, settings=FEW), 8),
    (EIGHT_MILLION, StrategyOptions("snes", 16), 8),
    ("mnist-3m", StrategyOptions("pso", 16, settings=FEW), 8),
    (EIGHT_MILLION, StrategyOptions("gradient"), 20),
    (EIGHT_MILLION, StrategyOptions("pesgd"), 20),
]


class Outcome(NamedTuple):
    """The result of a run: its weights' hash, bytes sent and received in a generation, the fewest of both, remarks."""

    weights: str
    sent: float
    received: float
    fewest: float
    remarks: str = ""

    def describe(self, expected: str) -> str:
        """Return the outcome as a cell of a table."""
        same = "equal" if self.weights == expected else f"DIFFERS ({self.weights[:8]})"
        fewest = f" (fewest {self.fewest:,.0f})" if self.fewest < (self.sent + self.received) / 2 else ""
        return f"{same} {self.sent:,.0f} + {self.received:,.0f}{fewest}{self.remarks}"


def start(stack: ExitStack, folder: str, *command: str) -> int:
    """Start a process in a new group, which ends with the stack; return its number."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GERMLINE_DEVICE": "cpu"}
    with Path(folder, "log.txt").open("a") as log:
        words = [sys.executable, "-m", *command]
        process = subprocess.Popen(words, stdout=log, stderr=log, start_new_session=True, env=environment)
    stack.callback(end, process)
    return process.pid


def end(process: "subprocess.Popen[bytes]") -> None:
    """End a process and all that it has started."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(10)


def wait_for_port(port: int) -> None:
    """Wait until a program listens on a port."""
    until = time.monotonic() + 60
    while time.monotonic() < until:
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return
        time.sleep(0.1)
    raise RuntimeError(f"No program listens on port {port}.")


@contextmanager
def start_dask() -> Iterator[tuple[Cluster, int]]:
    """Start a Dask cluster; yield its fleet, and the number of the scheduler's process."""
    with ExitStack() as stack:
        folder, port = stack.enter_context(tempfile.TemporaryDirectory()), free_port()
        address, here = f"tcp://127.0.0.1:{port}", ["--host", "127.0.0.1", "--no-dashboard"]
        scheduler = start(stack, folder, "dask", "scheduler", *here, "--port", str(port))
        wait_for_port(port)
        here += ["--no-nanny", "--nthreads", "1", "--local-directory", folder]
        for _ in range(WORKERS):
            start(stack, folder, "dask", "worker", address, *here, "--preload", "germline.fleet.cluster.dask")
        yield stack.enter_context(closing(gl.Dask(address, device="cpu"))), scheduler


@contextmanager
def start_ray() -> Iterator[Cluster]:
    """Start a Ray cluster with a node for each worker; yield its fleet."""
    with ExitStack() as stack:
        short = tempfile.TemporaryDirectory(prefix="ray", dir="/tmp")  # the paths of its sockets must be short
        folder, port, ray = stack.enter_context(short), free_port(), ["ray.scripts.scripts", "start", "--block"]
        node = ["--num-cpus", "1", "--node-ip-address", "127.0.0.1", "--object-store-memory", str(1 << 28)]
        head = ["--head", "--port", str(port), "--temp-dir", folder, "--include-dashboard", "false"]
        start(stack, folder, *ray, *node, *head, "--disable-usage-stats")
        wait_for_port(port)
        for _ in range(WORKERS - 1):
            start(stack, folder, *ray, *node, "--address", f"127.0.0.1:{port}")
        yield stack.enter_context(closing(gl.Ray(f"127.0.0.1:{port}", device="cpu")))


def wait_for_workers(fleet: Cluster) -> None:
    """Wait until all workers have joined the run."""
    until = time.monotonic() + 120
    while len(fleet.crew.workers) < WORKERS:
        if time.monotonic() > until:
            raise RuntimeError(f"Only {len(fleet.crew.workers)} workers have joined: {fleet.admission.refusals}")
        fleet.coordinator.take_events(0.1)


def train(recipe: str, options: StrategyOptions, generations: int, fleet: Fleet, tell: float | None = None) -> Outcome:
    """Train in this process, or as the coordinator of a cluster.

    Workers choose between records and weights by ``tell``, the seconds that a record costs them, measured by default.
    """
    made, about = options.build_recipe(recipe)
    workers: list[RemoteWorker] = []
    with tempfile.TemporaryDirectory() as folder:
        fleet.start_run()
        session = opening.start(made, Path(folder, "run"), seed=0, fleet=fleet, about=about)
        if isinstance(fleet, Cluster):
            wait_for_workers(fleet)
            workers = list(fleet.crew.workers.values())
        for worker in workers:
            worker.tell_seconds = worker.tell_seconds if tell is None else tell
        summary = loop.run(session, Stop(generations=generations))
        session.require_journal().close()
        counts = count_bytes(Path(folder, "run"))
    remarks = "" if all(worker.pieces for worker in workers) else ", NOT BY ALL WORKERS"
    if tell is not None and made.strategy.kind != "train_members":
        is_right = all(worker.has_whole_state == (tell == 0) for worker in workers)
        remarks += "" if is_right else ", NOT IN THIS WAY"
    return Outcome(summary["theta_sha256"], *counts, remarks)


def train_spmd(recipe: str, options: StrategyOptions, generations: int) -> Outcome:
    """Train with two ranks."""
    words = ["--strategy", str(options.strategy), *(["--rank", options.rank] if options.rank is not None else [])]
    words += [word for setting in options.settings or [] for word in ("--set", setting)]
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "germline", "train", recipe, *words, "--generations", str(generations)]
        command += ["--device", "cpu", "--fleet", "spmd", "--workers", str(WORKERS), "--json"]
        done = subprocess.run([*command, "--runs", folder, "--name", "run"], capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(done.stderr[-2000:])
        return Outcome(json.loads(done.stdout.splitlines()[-1])["theta_sha256"], *count_bytes(Path(folder, "run")))


def count_bytes(run: Path) -> tuple[float, float, float]:
    """Return the bytes sent and received in a generation, on average, and the fewest, from generation 2 on."""
    journal = Journal.open(run, read_only=True)
    counts = [record.info["bytes"] for record in journal.records() if record.result.generation >= 2]
    journal.close()
    fewest = min(sent + received for sent, received in counts)
    return mean(sent for sent, _ in counts), mean(received for _, received in counts), fewest


class Memory:
    """The memory of a process over time."""

    def __init__(self, process: int) -> None:
        self.process, self.sizes, self.is_over = process, [memory(process)], threading.Event()
        self.thread = threading.Thread(target=self.watch, daemon=True)
        self.thread.start()

    def watch(self) -> None:
        while not self.is_over.wait(0.02):
            self.sizes.append(memory(self.process))

    def describe(self) -> str:
        """End the watch; return the first size, the largest of both halves of the time, and the last, in megabytes."""
        self.is_over.set()
        self.thread.join()
        half = len(self.sizes) // 2
        sizes = (self.sizes[0], max(self.sizes[:half]), max(self.sizes[half:]), self.sizes[-1])
        return " ".join(f"{size / 1e6:.0f}" for size in sizes)


def compare_fleets(recipe: str, generations: int, fleets: list[str]) -> bool:
    """Print the table of all strategies; return whether all weights are those of one process."""
    with ExitStack() as stack:
        ways: dict[str, Callable[[StrategyOptions], Outcome]] = {}
        if "spmd" in fleets:
            ways["spmd"] = lambda options: train_spmd(recipe, options, generations)
        if "dask" in fleets:
            dask = stack.enter_context(start_dask())[0]
            ways["dask by records"] = lambda options: train(recipe, options, generations, dask, 0.0)
            ways["dask by weights"] = lambda options: train(recipe, options, generations, dask, NEVER)
        if "ray" in fleets:
            ray = stack.enter_context(start_ray())
            ways["ray"] = lambda options: train(recipe, options, generations, ray)
        rows, is_equal = [["strategy", "weights", *ways]], True
        for name, options in STRATEGIES.items():
            expected = train(recipe, options, generations, gl.Local("cpu")).weights
            rows.append([name, expected[:8]])
            for way, run in ways.items():
                if name == "pesgd" and way == "dask by weights":  # there is one way only
                    rows[-1].append("")
                    continue
                note(f"{name}: {way}")
                outcome = run(options)
                is_equal &= outcome.weights == expected
                rows[-1].append(outcome.describe(expected))
    print(f"{recipe}, {generations} generations, {WORKERS} workers: bytes sent + received in a generation")
    print_table(rows)
    return is_equal


def compare_sizes() -> bool:
    """Print the table of large nets; return whether all weights are those of one process."""
    rows, is_equal = [["net", "strategy", "weights", "way", "bytes to + from a worker", "MB of the scheduler"]], True
    with start_dask() as (fleet, scheduler):
        for recipe, options, generations in LARGE:
            names = [Path(recipe).stem, str(options.strategy)]
            expected = train(recipe, options, generations, gl.Local("cpu")).weights
            ways = {"by records": 0.0, "by weights": NEVER} if options.strategy != "pesgd" else {"members": None}
            for way, tell in ways.items():
                note(", ".join([*names, way]))
                watch = Memory(scheduler)
                outcome = train(recipe, options, generations, fleet, tell)
                share = outcome._replace(sent=outcome.sent / WORKERS, received=outcome.received / WORKERS)
                is_equal &= outcome.weights == expected
                rows.append([*names, expected[:8], way, share.describe(expected), watch.describe()])
    print(f"{WORKERS} workers; memory before, largest in the first and in the second half of the time, and afterwards")
    print_table(rows)
    return is_equal


def print_table(rows: list[list[str]]) -> None:
    """Print rows of cells in columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def note(text: str) -> None:
    """Print progress to standard error."""
    print(text, file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fleets", default="spmd,dask,ray", help="fleets to compare, with commas (default all)")
    parser.add_argument("--recipe", default="digits", help="recipe to train (default digits)")
    parser.add_argument("--generations", type=int, default=15, help="generations of each run (default 15)")
    parser.add_argument("--large", action="store_true", help="compare large nets on Dask instead")
    chosen = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends the clusters, too
    if chosen.large:
        is_equal = compare_sizes()
    else:
        is_equal = compare_fleets(chosen.recipe, chosen.generations, chosen.fleets.split(","))
    sys.exit(0 if is_equal else 1)


if __name__ == "__main__":
    main()
