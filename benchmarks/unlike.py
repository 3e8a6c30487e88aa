"""One run on unlike machines: a coordinator on the CPU with a worker on the CPU and a worker on a GPU.

    python benchmarks/unlike.py [--recipe digits] [--population 4096] [--generations 200] [--devices cpu,cuda]

Prints what each worker did, by its device: shares go by speed. Then the journal is replayed on the CPU, without any of
the workers, and its weights are compared with those of the run.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from contextlib import suppress
from pathlib import Path
from typing import Any

from germline.fleet.cluster.keys import keep_private_keys
from germline.fleet.spmd.launch import free_port

GERMLINE = [sys.executable, "-m", "germline"]


def read_workers(status: int) -> dict[str, dict[str, Any]]:
    """Return what the status page says of each worker, by name."""
    with suppress(OSError, ValueError), urllib.request.urlopen(f"http://127.0.0.1:{status}/status.json") as answer:
        return {worker["name"]: worker for worker in json.load(answer)["workers"]}
    return {}


def run(arguments: argparse.Namespace, folder: Path) -> bool:
    """Train, print the workers, and replay; return whether the replay has the weights of the run."""
    port, status, seen = free_port(), free_port(), dict[str, dict[str, Any]]()
    size = ["--population", str(arguments.population), "--generations", str(arguments.generations)]
    where = ["--listen", f"127.0.0.1:{port}", "--status", f"127.0.0.1:{status}", "--runs", str(folder), "--name", "run"]
    serve = [*GERMLINE, "serve", arguments.recipe, *size, *where, "--device", "cpu", "--json"]
    keys = keep_private_keys(folder / "run.keys")  # as the coordinator would make them
    coordinator = subprocess.Popen(serve, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    join = [*GERMLINE, "worker", f"127.0.0.1:{port}", "--recipe", arguments.recipe, "--keys", str(keys / "worker")]
    environment = {**os.environ, "OMP_NUM_THREADS": str(arguments.threads)}
    workers = [
        subprocess.Popen([*join, "--device", device, "--name", device], env=environment)
        for device in arguments.devices.split(",")
    ]
    try:
        while coordinator.poll() is None:
            seen |= read_workers(status)
            time.sleep(0.2)
        assert coordinator.stdout is not None
        summary = json.loads(coordinator.stdout.read().splitlines()[-1])
    finally:
        for process in (coordinator, *workers):
            process.kill()
            process.communicate()
    total = sum(worker["pieces"] for worker in seen.values()) or 1
    for worker in seen.values():
        speed = f"{worker['members_per_second']:,.0f} members a second"
        print(f"{worker['device']:8} {worker['machine']}: {worker['pieces'] / total:.0%} of the blocks, {speed}")
    metrics = "  ".join(f"{name} {value:.4f}" for name, value in summary["metrics"].items() if value is not None)
    print(f"{summary['generations']} generations  {metrics}")
    last = ["--generation", str(summary["generations"]), "--export", str(folder / "last.safetensors"), "--json"]
    replayed = subprocess.run([*GERMLINE, "replay", str(folder / "run"), *last], capture_output=True, text=True)
    again = json.loads(replayed.stdout.splitlines()[-1])["theta_sha256"] if replayed.returncode == 0 else "none"
    print(f"weights of the run  {summary['theta_sha256']}\nreplayed on the CPU {again}")
    return bool(again == summary["theta_sha256"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="digits")
    parser.add_argument("--population", type=int, default=4096)
    parser.add_argument("--generations", type=int, default=200)
    parser.add_argument("--devices", default="cpu,cuda", help="the device of each worker")
    parser.add_argument("--threads", type=int, default=1, help="threads of torch in each worker")
    with tempfile.TemporaryDirectory() as folder:
        sys.exit(0 if run(parser.parse_args(), Path(folder)) else 1)


if __name__ == "__main__":
    main()
