"""The costs of a cluster: time lost to waiting, to a slow worker, and the bytes that each worker takes.

    python benchmarks/elastic.py [--busy] [--slow] [--hosts]        all three if none is given; --hosts needs root

--busy   two workers of one thread each: the part of their time that is evaluation, at chunks of about 50 ms, and the
         part of a core that Dask's scheduler takes
--slow   generations a second of two workers, and of the same two with a third that is ten times slower; the ideal is
         2.1 workers. They wait for their scores (``waiting.py``), so that they do not take each other's cores
--hosts  three network namespaces as hosts, with keys: a coordinator, a worker, and one behind 1 Mbit/s; ``mnist-3m``
         and ``cif-900k``: generations, and bytes of each worker for a generation as the coordinator counts them
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from soak import find_scheduler
from waiting import WAIT

from germline.fleet.cluster.keys import add_machine, create_authority, keep_private_keys
from germline.fleet.spmd.launch import free_port

GERMLINE = [sys.executable, "-m", "germline"]
WARM_UP, LASTS = 8.0, 30.0  # seconds before the measurement, and of the measurement
ROUNDS = 3  # of a comparison
HOSTS = {"coordinator": "10.78.0.1", "near": "10.78.0.2", "far": "10.78.0.3"}
LINK = "1mbit"


class Cluster:
    """A coordinator and its workers, each in a network namespace if there are keys."""

    def __init__(self, run: Sequence[str], folder: Path, host: str = "127.0.0.1", secret: Path | None = None) -> None:
        self.folder, self.host, self.port, self.status = folder, host, free_port(), free_port()
        self.secret, self.recipe, self.processes = secret, run[0], list[subprocess.Popen[bytes]]()
        where = ["--listen", f"{host}:{self.port}", "--status", f"{host}:{self.status}", "--runs", str(folder / "runs")]
        self.keys = secret or keep_private_keys(folder / "keys")
        trusted = ["--keys", str(self.keys)]
        self.start([*GERMLINE, "serve", *run, *where, *trusted, "--device", "cpu", "--json"], "coordinator")

    def start(self, command: list[str], name: str, **environment: str) -> "subprocess.Popen[bytes]":
        inside = ["ip", "netns", "exec", f"germline-{name}"] if self.secret is not None else []
        environment = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
        with (self.folder / f"{name}.txt").open("w") as log:
            process = subprocess.Popen([*inside, *command], stdout=log, stderr=log, env=environment)
        self.processes.append(process)
        return process

    def add_worker(self, name: str, **environment: str) -> "subprocess.Popen[bytes]":
        trusted = ["--keys", str(self.keys / ("worker" if self.secret is None else name))]
        command = [*GERMLINE, "worker", f"{self.host}:{self.port}", "--recipe", self.recipe, *trusted]
        return self.start([*command, "--device", "cpu", "--workers", "1", "--name", name], name, **environment)

    def read_status(self) -> dict[str, Any]:
        """Return the content of the status page."""
        address = f"http://{self.host}:{self.status}/status.json"
        if self.secret is None:
            with urllib.request.urlopen(address, timeout=5) as answer:
                content = answer.read()
        else:
            read = f"import urllib.request; print(urllib.request.urlopen({address!r}, timeout=5).read().decode())"
            inside = ["ip", "netns", "exec", "germline-coordinator", sys.executable, "-c", read]
            content = subprocess.run(inside, capture_output=True, check=True).stdout
        status: dict[str, Any] = json.loads(content)
        return status

    def wait(self, workers: int, generations: int = 1, seconds: float = 180.0) -> dict[str, Any]:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            with suppress(OSError, subprocess.CalledProcessError, ValueError):
                status = self.read_status()
                if len(status["workers"]) >= workers and status["generation"] >= generations:
                    return status
            time.sleep(0.2)
        raise RuntimeError((self.folder / "coordinator.txt").read_text()[-2000:])

    def close(self) -> None:
        for process in self.processes:
            with suppress(ProcessLookupError):
                process.send_signal(signal.SIGCONT)
            process.kill()
            process.wait()


@contextmanager
def start_cluster(run: Sequence[str], host: str = "127.0.0.1", secret: Path | None = None) -> Iterator[Cluster]:
    with tempfile.TemporaryDirectory() as folder:
        running = Cluster(run, Path(folder), host, secret)
        try:
            yield running
        finally:
            running.close()


def measure(running: Cluster, workers: int) -> tuple[float, dict[str, Any], dict[str, Any]]:
    """Return generations a second, and the content of the status page before and after."""
    running.wait(workers)
    time.sleep(WARM_UP)
    before, began = running.read_status(), time.monotonic()
    time.sleep(LASTS)
    after = running.read_status()
    return (after["generation"] - before["generation"]) / (time.monotonic() - began), before, after


def measure_busy() -> None:
    """Print the part of two workers' time that is evaluation."""
    with start_cluster(["digits", "--population", "2048", "--generations", "100000"]) as running:
        for name in ("one", "two"):
            running.add_worker(name)
        running.wait(2)
        scheduler = find_scheduler(running.processes[0].pid) or 0
        used, began = read_cpu_seconds(scheduler), time.monotonic()
        rate, before, after = measure(running, 2)
        share = (read_cpu_seconds(scheduler) - used) / (time.monotonic() - began)
    print(f"two workers, digits, population 2048: {rate:.2f} generations a second")
    both = sum(w["busy_seconds"] for w in after["workers"]) - sum(w["busy_seconds"] for w in before["workers"])
    print(f"  {both / (2 * LASTS):.2f} of their time is evaluation (goal 0.9)")
    for old, new in zip(before["workers"], after["workers"], strict=True):
        seconds = new["busy_seconds"] - old["busy_seconds"]
        chunk = 1e3 * seconds / max(1, new["answers"] - old["answers"])
        speed = (new["pieces"] - old["pieces"]) / max(seconds, 1e-9)
        print(
            f"  {new['name']}: {seconds / LASTS:.2f}, {chunk:.0f} ms a chunk, {speed:.0f} blocks in a second of these"
        )
    print(f"  Dask's scheduler takes {share:.2f} of a core")


def read_cpu_seconds(process: int) -> float:
    """Return the seconds of a core that a process has used."""
    user, system = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def measure_slow() -> None:
    """Print how much a slow worker adds to two others."""
    with start_cluster([str(Path(__file__).with_name("waiting.py"))]) as running:
        for name in ("one", "two"):
            running.add_worker(name)
        costs, parts = [], []
        for number in range(ROUNDS):  # in turns, because other work may run on this machine
            alone = measure(running, 2)[0]
            third = running.add_worker(f"slow-{number}", WAIT=str(10 * WAIT))
            together = measure(running, 3)[0]
            third.kill()
            third.wait()
            costs.append(1 - together / alone)
            parts.append(together / (alone * 2.1 / 2))
            print(f"two workers: {alone:.2f} generations a second; with one that is ten times slower {together:.2f}")
    cost, part = statistics.median(costs), statistics.median(parts)
    print(f"  it costs {cost:.1%} (goal: less than 10 %), {part:.2f} of the ideal (goal 0.9), medians of {ROUNDS}")


@contextmanager
def hosts() -> Iterator[None]:
    """Create network namespaces on one bridge, one of them behind a slow link."""

    def ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True)

    ip("link", "add", "germline0", "type", "bridge")
    ip("link", "set", "germline0", "up")
    try:
        for name, address in HOSTS.items():
            space, end = f"germline-{name}", f"gl{name[:8]}"
            ip("netns", "add", space)
            ip("link", "add", end, "type", "veth", "peer", "name", "eth0", "netns", space)
            ip("link", "set", end, "master", "germline0", "up")
            ip("-n", space, "addr", "add", f"{address}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                ip("-n", space, "link", "set", device, "up")
            if name == "far":
                shape = ["root", "tbf", "rate", LINK, "burst", "16kb", "latency", "400ms"]
                subprocess.run(["tc", "qdisc", "add", "dev", end, *shape], check=True)
                subprocess.run(["ip", "netns", "exec", space, "tc", "qdisc", "add", "dev", "eth0", *shape], check=True)
        yield
    finally:
        for name in HOSTS:
            subprocess.run(["ip", "netns", "del", f"germline-{name}"])
        ip("link", "del", "germline0")


def measure_hosts() -> None:
    """Print the bytes of workers on separate hosts."""
    with hosts(), tempfile.TemporaryDirectory() as folder:
        secret = Path(folder) / "keys"
        create_authority(secret)
        for name in ("near", "far"):
            add_machine(secret, name)
        for recipe in ("mnist-3m", "cif-900k"):
            run = [recipe, "--population", "64", "--generations", "100000", "--set", "recipe.batch_size=32"]
            with start_cluster(run, HOSTS["coordinator"], secret) as running:
                for name in ("near", "far"):
                    running.add_worker(name)
                rate, before, after = measure(running, 2)
            passed = max(1, after["generation"] - before["generation"])
            print(f"{recipe}, population 64: {rate:.2f} generations a second")
            for new in after["workers"]:
                old = next((one for one in before["workers"] if one["name"] == new["name"]), new)
                received, sent = ((new[key] - old[key]) / passed for key in ("bytes_received", "bytes_sent"))
                link = LINK if new["name"] == "far" else "no limit"
                pieces = new["pieces"] - old["pieces"]
                print(
                    f"  {new['name']} ({link}): {new['state']}, {pieces} blocks, for a generation {received:,.0f} "
                    f"bytes received and {sent:,.0f} sent"
                )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = {"busy": measure_busy, "slow": measure_slow, "hosts": measure_hosts}
    for name in parts:
        parser.add_argument(f"--{name}", action="store_true", help=parts[name].__doc__)
    chosen = vars(parser.parse_args())
    for name, part in parts.items():
        if chosen[name] or not any(chosen.values()):
            part()


if __name__ == "__main__":
    main()
