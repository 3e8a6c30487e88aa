"""PESGD compared with data-parallel gradient descent, in two processes: epochs, seconds and bytes to a target.

    python benchmarks/pesgd.py [--target 0.97] [--seeds 3] [--runs DIR]

Two processes of one thread each. ``pesgd`` is ``germline train pesgd-mnist``: each member learns from batches of 64
for an epoch, then they evolve. ``data-parallel`` is ``--strategy gradient --set per_worker=true``: batches of 64 for
each process, gradients summed after each, by several learning rates. With a straggler one of the two is stopped for
half of the time, in turns of 40 ms; with two that alternate, each is stopped for a quarter of the time, and never both,
as stalls that come and go do. An epoch is one pass of one model over the training set, so a generation of P members has
P of them, P / 2 in each process; the column counts the epochs of a process.

The rows of one process are its descent without any exchange: one member of ``pesgd``, whose steps have no record, and
``--strategy gradient``, in which each step is a generation.
"""

import argparse
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

EXAMPLES, BATCH = 55_000, 64
TURN = 0.04  # seconds
MOST_EPOCHS = 24  # of each process


@dataclass(frozen=True)
class Way:
    """A way to train: members of PESGD, or gradient descent with a learning rate, in some processes."""

    members: int = 0
    rate: float = 0.1
    processes: int = 2

    @property
    def label(self) -> str:
        place = ", one process" if self.processes == 1 else ""
        if self.members:
            return f"pesgd, {self.members} member{'s' * (self.members > 1)}{place}"
        return f"{'gradient' if self.processes == 1 else 'data-parallel'}, lr {self.rate}{place}"

    def options(self, target: float) -> list[str]:
        """Return the options of 'germline train'."""
        stop = ["--target", f"dev_accuracy={target}"]
        if self.members:
            generations = self.processes * MOST_EPOCHS // self.members
            return ["--population", str(self.members), "--generations", str(generations), *stop]
        steps = EXAMPLES // (self.processes * BATCH)
        settings = ["per_worker=true", "slices=1", f"recipe.every={steps}", f"lr={self.rate}"]
        options = [word for setting in settings for word in ("--set", setting)]
        generations = self.processes * MOST_EPOCHS * steps
        return ["--strategy", "gradient", *options, "--generations", str(generations), *stop]

    def count_epochs(self, summary: dict[str, Any]) -> float:
        """Return the epochs of a process."""
        if self.members:
            return float(summary["generations"]) * self.members / self.processes
        return float(summary["generations"]) * BATCH / EXAMPLES


ALONE = (Way(members=1, processes=1), Way(processes=1))
COMPARED = (*(Way(rate=rate) for rate in (0.1, 0.2, 0.4)), Way(members=4), Way(members=8))
STALLED = (Way(), Way(members=4))
STALLS = {"none": (), "half speed": (1,), "alternating": (0, 1)}  # the processes that are stopped in turns


def run(way: Way, target: float, seed: int, stalled: Sequence[int], runs: Path) -> dict[str, Any]:
    """Train, and return the summary of the run."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    common = {**os.environ, "OMP_NUM_THREADS": "1"}
    name = f"{way.label}-{seed}-{len(stalled)}".replace(", ", "-").replace(" ", "-")
    command = [sys.executable, "-m", "germline", "train", "pesgd-mnist", *way.options(target)]
    command += ["--device", "cpu", "--seed", str(seed), "--runs", str(runs), "--name", name]
    if way.processes > 1:
        common |= {"WORLD_SIZE": str(way.processes), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        command += ["--fleet", "spmd", "--timeout", "600"]
    ranks = []
    for rank in range(way.processes):
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(way.processes)}
        output = subprocess.PIPE if rank == 0 else subprocess.DEVNULL
        environment = common | (own if way.processes > 1 else {})
        ranks.append(
            subprocess.Popen([*command, "--json"], stdout=output, stderr=subprocess.DEVNULL, text=True, env=environment)
        )
    ended = threading.Event()
    slowing = threading.Thread(target=slow_down, args=([ranks[rank] for rank in stalled], ended))
    slowing.start()
    try:
        text, _ = ranks[0].communicate()
    finally:
        ended.set()
        slowing.join()
        for process in ranks:
            process.wait()
    summary: dict[str, Any] = json.loads(text.splitlines()[-1])
    return summary


def slow_down(processes: "Sequence[subprocess.Popen[str]]", ended: threading.Event) -> None:
    """Stop some processes in turns, with a pause of the same length after each."""
    while processes and not ended.is_set() and processes[0].poll() is None:
        for process in processes:
            process.send_signal(signal.SIGSTOP)
            ended.wait(TURN)
            process.send_signal(signal.SIGCONT)
            ended.wait(TURN)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=float, default=0.97, help="dev accuracy to reach (default 0.97)")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each row (default 3)")
    parser.add_argument("--only", choices=STALLS, help="only the rows with these stalls")
    parser.add_argument("--runs", type=Path, help="a folder to keep the runs in (default: they are deleted)")
    parser.add_argument("--json", action="store_true", help="print all rows as one JSON object in the last line")
    arguments = parser.parse_args()
    print(f"{'':26} {'stalls':12} {'reached':>8} {'epochs':>7} {'seconds':>8} {'test':>8} {'bytes a process':>16}")
    results = []
    rows = [(way, "none") for way in (*ALONE, *COMPARED)]
    rows += [(way, stalls) for stalls in STALLS if stalls != "none" for way in STALLED]
    with tempfile.TemporaryDirectory() as folder:
        for way, stalls in (row for row in rows if arguments.only in (None, row[1])):
            place = arguments.runs or Path(folder)
            summaries = [run(way, arguments.target, seed, STALLS[stalls], place) for seed in range(arguments.seeds)]
            reached = sum(summary["stopped_by"] == "target" for summary in summaries)
            row = {
                "epochs": statistics.median(way.count_epochs(summary) for summary in summaries),
                "seconds": statistics.median(summary["seconds"] for summary in summaries),
                "test": statistics.median(summary["metrics"]["test_accuracy"] for summary in summaries),
                "bytes": statistics.median(summary["bytes_sent"] for summary in summaries),
            }
            print(
                f"{way.label:26} {stalls:12} {reached:3} of {len(summaries)} {row['epochs']:7.1f}"
                f" {row['seconds']:8.1f} {row['test']:8.4f} {row['bytes']:16,.0f}",
                flush=True,
            )
            results.append({"way": way.label, "stalls": stalls, "reached": reached, **row})
    if arguments.json:
        print(json.dumps(results))


if __name__ == "__main__":
    main()
