"""A cluster under fire: kills, freezes, cut links, garbage, lies, lost schedulers and coordinators; no result changes.

    python benchmarks/soak.py [--minutes 30] [--every 20] [--workers 4] [--seed 0]
    python benchmarks/soak.py --faults 10000 --minutes 60 --every 1.2
    python benchmarks/soak.py --strategy snes --hidden 14000 --minutes 10 --every 1

Trains ``digits`` with a coordinator, its scheduler and workers, as processes of this machine with keys. Every so often
a fault hits one of them:

- ``kill``, ``freeze``, ``slow``: a worker is killed and started again, stopped for a while (one time in six until the
  scheduler gives it up), or stopped for nine tenths of the time;
- ``cut``: the link of a worker ends, or lets nothing pass for a while and then ends;
- ``garbage``: a stranger sends noise, another protocol, half of a greeting or nothing to the port of the scheduler or
  of the status page, over up to 40 connections;
- ``rogue``: a worker answers with what cannot be right, as ``rogues.py`` lists it; ``lie``: with wrong scores;
- ``scheduler``: it is killed, and the coordinator starts it again; ``coordinator``: it is killed and started again.

A coordinator is not killed while a liar is at work: what the liar has said since its last audit is then in the journal,
and a new coordinator does not know from whom it came.

With ``--faults``, what is missing after these minutes happens on a simulated clock: see ``soak_simulated.py``. In the
end the run is interrupted, and this prints whether its weights are those of an undisturbed run of as many generations
in one process, whether every generation is in the journal, whether memory has grown, and how long recoveries took. A
recovery lasts from a fault to the second generation that is written after it: the first may have been finished before.

Weight decay keeps the loss of ``openai-es`` near 1: without it all scores are 0 after some thousand generations, and
any answers would give the right weights. The scores of the last generation are printed, and must differ.
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
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from rogues import GARBAGE, LIES
from soak_processes import GERMLINE, Child, Link, Nursery, freeze, send_garbage, slow_down

from germline.fleet.cluster.keys import add_machine, create_authority
from germline.fleet.cluster.processes import TURNED_AWAY
from germline.fleet.spmd.launch import free_port

FAULTS = {  # and how frequent they are
    "kill": 12,
    "freeze": 16,
    "slow": 12,
    "cut": 12,
    "garbage": 16,
    "rogue": 6,
    "lie": 4,
    "scheduler": 1,
    "coordinator": 1,
}
ENDLESS = 10**9  # generations
INTERRUPTED = 130  # exit code
STALLED = 300.0  # seconds without a new generation after which a run is given up
ROGUE_TIME = 15.0  # seconds of a worker whose answers are ignored
LAST_LIARS = 60.0  # seconds for the last liars to be found out
STARTING = 20.0  # seconds in which a coordinator starts its scheduler; one that dies before it listens is an error
SPARED = 15.0  # seconds in which a worker that was hit can join again: then it is hit again
UNHURT = 2  # workers that were not hit for this long, at least, so that the run goes on
EDGES = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 60.0)  # seconds
OLD = 20.0  # seconds after which a process has all the memory that it needs


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
    nursery: Nursery
    settings: list[str]
    places: int
    chance: random.Random
    port: int = field(default_factory=free_port)
    status: int = field(default_factory=free_port)
    links: list[Link] = field(default_factory=list)
    workers: list[Child] = field(default_factory=list)
    wrong: dict[int, tuple[str, float]] = field(default_factory=dict)  # kind and start, by place
    hit: dict[int, float] = field(default_factory=dict)  # when a worker was last hit, by place
    owed: list[str] = field(default_factory=list)  # faults that wait for the end of a liar
    counts: Counter[str] = field(default_factory=Counter)
    trouble: Counter[str] = field(default_factory=Counter)
    waiting: list[tuple[str, float, int]] = field(default_factory=list)  # faults from which the run has not recovered
    recoveries: dict[str, list[float]] = field(default_factory=lambda: {fault: [] for fault in FAULTS})
    sizes: dict[str, list[tuple[float, float]]] = field(default_factory=dict)  # by kind: time, and bytes
    seen: dict[int, float] = field(default_factory=dict)  # when a scheduler was first seen
    clock: float = 0.0  # seconds of this run; those in which all processes were stopped do not count
    last_tick: float = field(default_factory=time.monotonic)
    progress: tuple[int, float] = (0, 0.0)  # the last generation, and when it came

    def __post_init__(self) -> None:
        create_authority(self.folder / "keys")
        add_machine(self.folder / "keys", "worker")
        self.links = [Link(self.port) for _ in range(self.places)]
        self.start_coordinator()
        self.workers = [self.start_worker(place) for place in range(self.places)]

    @property
    def run(self) -> Path:
        return self.folder / "runs" / "soak"

    @property
    def has_liar(self) -> bool:
        return any(kind == "lie" for kind, _ in self.wrong.values())

    def start_coordinator(self) -> None:
        """Start the coordinator, or start it again."""
        words = ["serve", "digits", *self.settings, "--generations", str(ENDLESS), "--name", "soak"]
        words += ["--listen", f"127.0.0.1:{self.port}", "--status", f"127.0.0.1:{self.status}"]
        words += ["--keys", str(self.folder / "keys"), "--runs", str(self.run.parent)]
        self.coordinator = self.nursery.start(words, self.folder / "log.txt", self.folder / "result.txt")

    def start_worker(self, place: int, rogue: str | None = None) -> Child:
        """Start a worker behind the link of a place."""
        where, keys = f"127.0.0.1:{self.links[place].port}", str(self.folder / "keys" / "worker")
        words = ["worker", where, "--recipe", "digits", "--device", "cpu", "--workers", "1", "--keys", keys]
        if rogue is not None:
            words = [where, "digits", keys]
        return self.nursery.start(words, self.folder / "workers.txt", rogue=rogue)

    def strike(self) -> None:
        """Let the next fault happen."""
        fault = self.chance.choices(list(FAULTS), list(FAULTS.values()))[0]
        if self.owed and not self.has_liar:
            fault = self.owed.pop()
        elif fault == "coordinator" and self.has_liar:
            self.owed.append(fault)
            fault = "garbage"
        elif fault == "scheduler" and time.monotonic() - self.coordinator.started < STARTING:
            fault = "garbage"
        elif fault == "lie" and (self.owed or self.has_liar):
            fault = "rogue"
        is_over = {place for place in range(self.places) if self.clock - self.hit.get(place, -SPARED) >= SPARED}
        places = sorted(is_over - self.wrong.keys())
        if fault not in ("garbage", "scheduler", "coordinator") and len(places) <= UNHURT:
            return
        place = self.chance.choice(places) if places else 0
        if fault not in ("garbage", "scheduler", "coordinator"):
            self.hit[place] = self.clock
        before, began = count_generations(self.run), self.clock
        getattr(self, f"strike_{fault}")(place)
        self.counts[fault] += 1
        self.waiting.append((fault, began, before))

    def do_meanwhile(self, work: Callable[..., None], *arguments: Any) -> None:
        threading.Thread(target=work, args=arguments, daemon=True).start()

    def strike_kill(self, place: int) -> None:
        self.workers[place].kill()
        self.workers[place] = self.start_worker(place)

    def strike_freeze(self, place: int) -> None:
        seconds = self.chance.uniform(16, 30) if self.chance.random() < 1 / 6 else self.chance.uniform(0.2, 4)
        self.do_meanwhile(freeze, self.workers[place], seconds)

    def strike_slow(self, place: int) -> None:
        self.do_meanwhile(slow_down, self.workers[place], 4.0)

    def strike_cut(self, place: int) -> None:
        self.do_meanwhile(self.links[place].cut, self.chance.choice((0.0, 0.0, 1.0, 3.0, 16.0)))

    def strike_garbage(self, place: int) -> None:
        port, seed = self.chance.choice((self.port, self.status)), self.chance.random()
        self.do_meanwhile(send_garbage, port, random.Random(seed))

    def strike_rogue(self, place: int) -> None:
        self.replace_worker(place, "rogue", self.chance.choice(GARBAGE))

    def strike_lie(self, place: int) -> None:
        self.replace_worker(place, "lie", self.chance.choice(LIES).__name__)

    def replace_worker(self, place: int, kind: str, rogue: str) -> None:
        self.workers[place].kill()
        self.workers[place] = self.start_worker(place, rogue)
        self.wrong[place] = kind, self.clock

    def strike_scheduler(self, place: int) -> None:
        if (scheduler := find_scheduler(self.coordinator.pid)) is not None:
            os.kill(scheduler, signal.SIGKILL)

    def strike_coordinator(self, place: int) -> None:
        before = count_generations(self.run)
        self.coordinator.kill()
        self.trouble["generations lost with a coordinator"] += max(0, before - count_generations(self.run))
        self.start_coordinator()

    def tick(self) -> None:
        """Look at all processes; start workers again that were turned away."""
        now = time.monotonic()
        self.clock, self.last_tick = self.clock + min(1.0, now - self.last_tick), now
        for place, worker in enumerate(self.workers):
            kind, since = self.wrong.get(place, (None, 0.0))
            code = worker.poll()
            if code is None and kind == "rogue" and self.clock - since > ROGUE_TIME:
                worker.kill()
                code = 0
            if code is not None:
                if kind == "lie":
                    self.trouble["liars turned away"] += code == TURNED_AWAY
                elif kind is None:
                    self.trouble["honest workers that ended"] += 1
                    print(f"an honest worker ended with exit code {code}", flush=True)
                self.wrong.pop(place, None)
                self.workers[place] = self.start_worker(place)
        self.note_memory(now)
        count = count_generations(self.run)
        if count != self.progress[0]:
            self.progress = count, self.clock
        for item in list(self.waiting):
            fault, began, before = item
            if count >= before + 2:
                self.recoveries[fault].append(self.clock - began)
            if count >= before + 2 or count < before:  # it went back, behind a lie
                self.waiting.remove(item)
        if self.coordinator.poll() is not None or self.clock - self.progress[1] > STALLED:
            log = (self.folder / "log.txt").read_text()[-4000:]
            raise SystemExit(
                f"{log}\nThe run has ended or stalled at generation {count}: {self.coordinator.returncode}."
            )

    def note_memory(self, now: float) -> None:
        kinds = {"coordinator": self.coordinator.pid, "scheduler": find_scheduler(self.coordinator.pid)}
        for kind, process in kinds.items():
            if process is not None and now - self.seen.setdefault(process, now) > OLD and (size := memory(process)):
                self.sizes.setdefault(kind, []).append((self.clock, size))

    def go_on(self, seconds: float) -> None:
        """Watch for some seconds."""
        until = self.clock + seconds
        while self.clock < until:
            self.tick()
            time.sleep(0.05)

    def finish(self) -> dict[str, Any]:
        """Wait until there is no liar any more and the run goes on, interrupt it, and return its summary."""
        until = self.clock + LAST_LIARS
        while (self.wrong or self.waiting) and self.clock < until:
            self.go_on(0.5)
        for place in self.wrong:  # it is audited as it leaves, if it was asked for anything at all
            self.workers[place].kill()
        self.go_on(5.0)
        self.coordinator.send_signal(signal.SIGINT)
        if self.coordinator.wait() != INTERRUPTED:
            raise SystemExit((self.folder / "log.txt").read_text()[-4000:])
        summary: dict[str, Any] = json.loads((self.folder / "result.txt").read_text().splitlines()[-1])
        return summary

    def close(self) -> None:
        for process in (self.coordinator, *self.workers):
            process.kill()
        self.nursery.close()


def read_scores(run: Path) -> Any:
    """Return the scores of the last generation of a run."""
    with closing(sqlite3.connect(run / "journal.sqlite")) as connection:
        content = connection.execute("SELECT scores FROM record ORDER BY generation DESC LIMIT 1").fetchone()[0]
    return np.frombuffer(content, np.float32)


def train_alone(folder: Path, settings: list[str], length: int) -> dict[str, Any]:
    """Train as many generations in one process, and return the summary."""
    command = [*GERMLINE, "train", "digits", *settings, "--generations", str(length)]
    done = subprocess.run([*command, "--runs", str(folder / "isolated")], capture_output=True, text=True, check=True)
    summary: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return summary


def report(soak: Soak, summary: dict[str, Any], expected: dict[str, Any]) -> bool:
    """Print what became of the run; return whether it is as it should be."""
    counts = ", ".join(f"{name} {count}" for name, count in soak.counts.items())
    print(f"{sum(soak.counts.values())} faults in {soak.clock / 60:.0f} minutes: {counts}")
    same = summary["theta_sha256"] == expected["theta_sha256"]
    print(f"weights: {summary['theta_sha256'][:12]}, {'the same as' if same else 'NOT those'} of one process")
    with closing(sqlite3.connect(soak.run / "journal.sqlite")) as connection:
        written = [row[0] for row in connection.execute("SELECT generation FROM record ORDER BY generation")]
    whole = [g for g in written if g >= 0] == list(range(summary["generations"]))
    lost = soak.trouble["generations lost with a coordinator"]
    print(f"generations in the journal: {len(written)} of {summary['generations']}; {lost} lost with a coordinator")
    liars, ended = soak.trouble["liars turned away"], soak.trouble["honest workers that ended"]
    print(f"liars turned away: {liars} of {soak.counts['lie']}; honest workers that ended: {ended}")
    for kind, sizes in soak.sizes.items():
        early, late = (
            [size for when, size in sizes if low * soak.clock <= when <= high * soak.clock]
            for low, high in ((0.0, 0.25), (0.75, 1.0))
        )
        if not (early and late):  # in a short run, none of this kind is old enough
            continue
        first, last = statistics.median(early), statistics.median(late)
        print(
            f"memory of {kind}s older than {OLD:.0f} s, first and last quarter of the time:"
            f" {first / 1e6:.0f} MB, {last / 1e6:.0f} MB ({last / first - 1:+.1%})"
        )
    print("recoveries, seconds:")
    for low, high in zip((0.0, *EDGES), (*EDGES, float("inf")), strict=True):
        counts_by_name = {name: sum(low <= t < high for t in times) for name, times in soak.recoveries.items()}
        print(f"  {low:5.1f} to {high:5.1f}  " + "  ".join(f"{name} {n:3}" for name, n in counts_by_name.items()))
    scores = read_scores(soak.run)
    print(f"scores of the last generation: from {scores.min():.4g} to {scores.max():.4g}")
    return same and whole and not lost and not ended and bool(scores.min() < scores.max())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0, help="minutes on real processes (default 30)")
    parser.add_argument("--every", type=float, default=20.0, help="seconds between faults (default 20)")
    parser.add_argument("--faults", type=int, default=0, help="faults in all; the rest comes on a simulated clock")
    parser.add_argument("--workers", type=int, default=4, help="number of workers (default 4)")
    parser.add_argument("--strategy", default="openai-es", help="the strategy (default openai-es)")
    parser.add_argument("--population", type=int, default=64, help="members of a generation (default 64)")
    parser.add_argument("--hidden", type=int, default=64, help="units of the hidden layer (default 64)")
    parser.add_argument("--batch", type=int, default=256, help="examples of a batch (default 256)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the faults (default 0)")
    parser.add_argument("--folder", type=Path, default=None, help="where to keep the run (default: nowhere)")
    options = parser.parse_args()
    settings = ["--strategy", options.strategy, "--population", str(options.population), "--device", "cpu", "--json"]
    settings += ["--set", f"recipe.hidden={options.hidden}", "--set", f"recipe.batch_size={options.batch}"]
    settings += ["--set", "weight_decay=1"] if options.strategy == "openai-es" else []
    nursery, is_right, count = Nursery(), True, 0
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        if options.minutes:
            soak = Soak(folder, nursery, settings, options.workers, random.Random(options.seed))
            try:
                while soak.progress[0] < 2:
                    soak.go_on(0.5)
                soak.clock = 0.0  # the start is not measured
                soak.progress = 0, 0.0
                signal.signal(signal.SIGTERM, lambda *_: setattr(options, "minutes", 0.0))  # then it ends in order
                while soak.clock < 60 * options.minutes:
                    soak.go_on(options.every)
                    soak.strike()
                    if soak.counts.total() >= count + 50:
                        count = soak.counts.total()
                        print(f"{soak.clock:.0f} s: {count} faults, generation {soak.progress[0]}", flush=True)
                count = soak.counts.total()
                summary = soak.finish()
            finally:
                soak.close()
            is_right = report(soak, summary, train_alone(folder, settings, summary["generations"]))
    if options.faults > count:
        from soak_simulated import simulate

        is_right &= simulate(options.faults - count, options.seed)
        print(f"{options.faults} faults in all")
    sys.exit(not is_right)


if __name__ == "__main__":
    main()
