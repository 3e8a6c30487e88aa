"""A cluster under fire: workers are killed, frozen and slowed at random, and its scheduler is killed, for half an hour.

    python benchmarks/soak.py [--minutes 30] [--every 20] [--workers 4] [--seed 0]

Trains ``digits`` with a cluster of local workers. Every 20 seconds a fault hits one of them, the scheduler, which the
coordinator starts again, or the coordinator, which is started again with a new scheduler. At the end the run is
interrupted, and this prints whether its weights are those of an undisturbed run of as many generations in one process,
whether every generation is in the journal, the memory of coordinators and schedulers over time, and how long recoveries
took. A recovery lasts from a fault to the second generation that is written after it: the first may have been finished
before the fault.
"""

import argparse
import json
import os
import random
import signal
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from germline.fleet.spmd.launch import free_port

GERMLINE = [sys.executable, "-m", "germline"]
RUN = ["digits", "--population", "64", "--device", "cpu", "--json"]
FAULTS = {"kill": 4, "freeze": 4, "slow": 4, "scheduler": 2, "coordinator": 1}  # and how frequent they are
ENDLESS = 10**9  # generations
INTERRUPTED = 130  # exit code
EDGES = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0)  # seconds
Process = subprocess.Popen  # of bytes


def count_generations(run: Path) -> int:
    """Return the number of generations in a journal."""
    try:
        with closing(sqlite3.connect(f"file:{run}/journal.sqlite?mode=ro", uri=True)) as connection:
            return int((connection.execute("SELECT generation FROM tip").fetchone() or [-1])[0]) + 1
    except sqlite3.Error:
        return 0


def memory(process: int) -> int:
    """Return the bytes of memory that a process holds."""
    with suppress(OSError, StopIteration):
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
        return 1024 * int(next(line for line in lines if line.startswith("VmRSS")).split()[1])
    return 0


def find_scheduler(coordinator: int) -> int | None:
    """Return the process of the scheduler that a coordinator has started, if it runs."""
    for file in Path(f"/proc/{coordinator}/task").glob("*/children"):  # of each thread
        with suppress(OSError):
            for child in file.read_text().split():
                if b"scheduler_process" in Path(f"/proc/{child}/cmdline").read_bytes():
                    return int(child)
    return None


@dataclass
class Soak:
    """A coordinator, its scheduler and its workers, and the faults they have been through."""

    folder: Path
    count: int
    port: int = field(default_factory=free_port)
    status: int = field(default_factory=free_port)
    workers: list["Process[bytes]"] = field(default_factory=list)
    recoveries: dict[str, list[float]] = field(default_factory=lambda: {fault: [] for fault in FAULTS})
    sizes: dict[tuple[str, int], list[int]] = field(default_factory=dict)  # memory over time, by kind and process
    asleep: list[tuple[float, "Process[bytes]"]] = field(default_factory=list)  # and when they are to wake up

    @property
    def run(self) -> Path:
        return self.folder / "runs" / "soak"

    def start_coordinator(self) -> None:
        """Start the coordinator, or start it again."""
        where = ["--listen", f"127.0.0.1:{self.port}", "--status", f"127.0.0.1:{self.status}"]
        what = [*RUN, "--generations", str(ENDLESS), "--name", "soak"]
        with (self.folder / "log.txt").open("a") as log, (self.folder / "result.txt").open("w") as result:
            command = [*GERMLINE, "serve", *what, *where, "--runs", str(self.run.parent)]
            self.coordinator = subprocess.Popen(command, stdout=result, stderr=log)

    def start_worker(self) -> "Process[bytes]":
        command = [*GERMLINE, "worker", f"127.0.0.1:{self.port}", "--recipe", "digits", "--device", "cpu"]
        with (self.folder / "workers.txt").open("a") as log:
            return subprocess.Popen([*command, "--workers", "1"], stderr=log)

    def strike(self, fault: str, chance: random.Random) -> None:
        """Let a fault happen to a random worker, to the scheduler, or to the coordinator."""
        place = chance.randrange(self.count)
        victim = self.workers[place]
        if fault == "kill":
            victim.kill()
            victim.wait()
            self.workers[place] = self.start_worker()
        elif fault == "freeze":
            victim.send_signal(signal.SIGSTOP)
            self.asleep.append((time.monotonic() + chance.uniform(1, 30), victim))
        elif fault == "slow":
            for _ in range(40):
                for number, seconds in ((signal.SIGSTOP, 0.09), (signal.SIGCONT, 0.01)):
                    victim.send_signal(number)
                    time.sleep(seconds)
        elif fault == "scheduler":
            if (scheduler := find_scheduler(self.coordinator.pid)) is not None:
                os.kill(scheduler, signal.SIGKILL)
        else:
            self.coordinator.kill()
            self.coordinator.wait()
            self.start_coordinator()

    def wait(self, until: float) -> None:
        """Wait until some time, or the end; meanwhile note the memory, and wake frozen workers whose time has come."""
        while time.monotonic() < until and self.coordinator.poll() is None:
            coordinator = self.coordinator.pid
            for kind, number in (("coordinator", coordinator), ("scheduler", find_scheduler(coordinator))):
                if number is not None:
                    self.sizes.setdefault((kind, number), []).append(memory(number))
            for when, process in list(self.asleep):
                if time.monotonic() > when:
                    self.asleep.remove((when, process))
                    with suppress(ProcessLookupError):
                        process.send_signal(signal.SIGCONT)
            time.sleep(0.05)

    def wait_for_recovery(self, began: float, before: int) -> float:
        """Wait for the second generation after a fault, and return the seconds since then."""
        while count_generations(self.run) < before + 2 and self.coordinator.poll() is None:
            self.wait(time.monotonic() + 0.02)
        return time.monotonic() - began


def train_alone(folder: Path, length: int) -> dict[str, Any]:
    """Train as many generations in one process, and return the summary."""
    command = [*GERMLINE, "train", *RUN, "--generations", str(length)]
    done = subprocess.run(
        [*command, "--runs", str(folder / "isolated")], capture_output=True, text=True, check=True, env=os.environ
    )
    summary: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return summary


def report(soak: Soak, summary: dict[str, Any], expected: dict[str, Any]) -> None:
    """Print what became of the run."""
    count = sum(map(len, soak.recoveries.values()))
    print(f"{count} faults: " + ", ".join(f"{name} {len(times)}" for name, times in soak.recoveries.items()))
    same = summary["theta_sha256"] == expected["theta_sha256"]
    print(f"weights: {summary['theta_sha256'][:12]}, {'the same as' if same else 'NOT those'} of one process")
    with closing(sqlite3.connect(soak.run / "journal.sqlite")) as connection:
        written = [row[0] for row in connection.execute("SELECT generation FROM record ORDER BY generation")]
    whole = [g for g in written if g >= 0] == list(range(summary["generations"]))
    print(f"generations in the journal: {len(written)} of {summary['generations']}, {'none' if whole else 'SOME'} lost")
    for (kind, _), sizes in soak.sizes.items():
        steady = sizes[len(sizes) // 5 :]  # once it has started
        if len(steady) >= 1000:
            first, last = (statistics.median(part) for part in (steady[:200], steady[-200:]))
            print(f"memory of a {kind}: {first / 1e6:.0f} MB, then {last / 1e6:.0f} MB ({last / first - 1:+.1%})")
    print("recoveries, seconds:")
    for low, high in zip((0.0, *EDGES), (*EDGES, float("inf")), strict=True):
        counts = {name: sum(low <= t < high for t in times) for name, times in soak.recoveries.items()}
        print(f"  {low:5.1f} to {high:5.1f}  " + "  ".join(f"{name} {n:3}" for name, n in counts.items()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0, help="minutes of the run (default 30)")
    parser.add_argument("--every", type=float, default=20.0, help="seconds between faults (default 20)")
    parser.add_argument("--workers", type=int, default=4, help="number of workers (default 4)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the faults (default 0)")
    arguments = parser.parse_args()
    chance = random.Random(arguments.seed)
    with tempfile.TemporaryDirectory() as folder:
        soak = Soak(Path(folder), arguments.workers)
        soak.start_coordinator()
        soak.workers = [soak.start_worker() for _ in range(arguments.workers)]
        try:
            soak.wait_for_recovery(time.monotonic(), 0)  # the start is not measured
            ends = time.monotonic() + 60 * arguments.minutes
            while soak.coordinator.poll() is None:
                soak.wait(min(time.monotonic() + arguments.every, ends))
                if time.monotonic() > ends or soak.coordinator.poll() is not None:
                    break
                fault = chance.choices(list(FAULTS), list(FAULTS.values()))[0]
                began, before = time.monotonic(), count_generations(soak.run)
                soak.strike(fault, chance)
                soak.recoveries[fault].append(soak.wait_for_recovery(began, before))
                print(f"generation {before}: {fault}, {soak.recoveries[fault][-1]:.2f} s", flush=True)
            soak.coordinator.send_signal(signal.SIGINT)
            soak.coordinator.wait(120)  # its memory while it trained is what counts: now it reads all for its report
            output = (Path(folder) / "result.txt").read_text()
            if soak.coordinator.returncode != INTERRUPTED:
                sys.exit((Path(folder) / "log.txt").read_text()[-2000:])
            summary = json.loads(output.splitlines()[-1])
            report(soak, summary, train_alone(Path(folder), summary["generations"]))
        finally:
            for process in (soak.coordinator, *soak.workers):
                process.kill()
                process.wait()


if __name__ == "__main__":
    main()
