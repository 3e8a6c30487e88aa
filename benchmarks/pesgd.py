"""PESGD compared with data-parallel gradient descent, in two processes: epochs, seconds and bytes to a target.

    python benchmarks/pesgd.py [--target 0.97] [--seeds 3] [--members 4 8] [--runs DIR]

Two processes of one thread each. ``pesgd`` is ``germline train pesgd-mnist``: each member learns from batches of 64
for an epoch, then they evolve. ``data-parallel`` is ``--strategy gradient --set per_worker=true``: batches of 64 for
each process, gradients summed after each. With a straggler one of the two is stopped for half of the time, in turns of
40 ms. An epoch is one pass of one model over the training set, so a generation of P members has P of them, P / 2 in
each process; the column counts the epochs of a process.
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
from pathlib import Path
from typing import Any

EXAMPLES, BATCH = 55_000, 64
TURN = 0.04  # seconds
MOST_EPOCHS = 24  # of each process


def train_options(way: str, members: int, target: float) -> list[str]:
    """Return the options of 'germline train' for one way to train."""
    stop = ["--target", f"dev_accuracy={target}"]
    if way == "pesgd":
        return ["--population", str(members), "--generations", str(2 * MOST_EPOCHS // members), *stop]
    steps = EXAMPLES // (2 * BATCH)
    settings = ["per_worker=true", "slices=1", f"recipe.every={steps}"]
    options = [word for setting in settings for word in ("--set", setting)]
    return ["--strategy", "gradient", *options, "--generations", str(2 * MOST_EPOCHS * steps), *stop]


def run(way: str, members: int, target: float, seed: int, straggler: bool, runs: Path) -> dict[str, Any]:
    """Train in two processes, and return the summary of the run."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    common = {**os.environ, "OMP_NUM_THREADS": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    name = f"{way}-{members}-{seed}-{'slow' if straggler else 'even'}"
    command = [sys.executable, "-m", "germline", "train", "pesgd-mnist", *train_options(way, members, target)]
    command += ["--fleet", "spmd", "--device", "cpu", "--timeout", "600"]
    command += ["--seed", str(seed), "--runs", str(runs), "--name", name]
    ranks = [
        subprocess.Popen(
            [*command, "--json"],
            stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2"},
        )
        for rank in range(2)
    ]
    ended = threading.Event()
    slowing = threading.Thread(target=slow_down, args=(ranks[1], ended))
    if straggler:
        slowing.start()
    try:
        output, _ = ranks[0].communicate()
    finally:
        ended.set()
        if straggler:
            slowing.join()
        for rank in ranks:
            rank.wait()
    summary: dict[str, Any] = json.loads(output.splitlines()[-1])
    return summary


def slow_down(process: "subprocess.Popen[str]", ended: threading.Event) -> None:
    """Stop a process for half of the time."""
    while not ended.is_set() and process.poll() is None:
        process.send_signal(signal.SIGSTOP)
        ended.wait(TURN)
        process.send_signal(signal.SIGCONT)
        ended.wait(TURN)


def count_epochs(way: str, members: int, summary: dict[str, Any]) -> float:
    """Return the epochs of a process."""
    if way == "pesgd":
        return float(summary["generations"]) * members / 2
    return float(summary["generations"]) * BATCH / EXAMPLES


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=float, default=0.97, help="dev accuracy to reach (default 0.97)")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each row (default 3)")
    parser.add_argument("--members", type=int, nargs="+", default=[4, 8], help="populations of PESGD (default 4 8)")
    parser.add_argument("--runs", type=Path, help="a folder to keep the runs in (default: they are deleted)")
    parser.add_argument("--json", action="store_true", help="print all rows as one JSON object in the last line")
    arguments = parser.parse_args()
    ways = [("data-parallel", 2), *(("pesgd", members) for members in arguments.members)]
    print(f"{'':20} {'straggler':10} {'reached':>8} {'epochs':>7} {'seconds':>8} {'test':>8} {'bytes a process':>16}")
    results = []
    with tempfile.TemporaryDirectory() as folder:
        for straggler in (False, True):
            for way, members in ways:
                summaries = [
                    run(way, members, arguments.target, seed, straggler, arguments.runs or Path(folder))
                    for seed in range(arguments.seeds)
                ]
                reached = sum(summary["stopped_by"] == "target" for summary in summaries)
                row = {
                    "epochs": statistics.median(count_epochs(way, members, summary) for summary in summaries),
                    "seconds": statistics.median(summary["seconds"] for summary in summaries),
                    "test": statistics.median(summary["metrics"]["test_accuracy"] for summary in summaries),
                    "bytes": statistics.median(summary["bytes_sent"] for summary in summaries),
                }
                label = way if way != "pesgd" else f"{way}, {members} members"
                speed = "half speed" if straggler else "none"
                print(
                    f"{label:20} {speed:10} {reached:3} of {len(summaries)} {row['epochs']:7.1f}"
                    f" {row['seconds']:8.1f} {row['test']:8.4f} {row['bytes']:16,.0f}",
                    flush=True,
                )
                results.append({"way": label, "straggler": straggler, "reached": reached, **row})
    if arguments.json:
        print(json.dumps(results))


if __name__ == "__main__":
    main()
