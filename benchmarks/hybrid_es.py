"""The accuracy tables of the Hybrid-ES paper (Bartolo), run again: variants, intervals and sigmas beside its figures.

    python benchmarks/hybrid_es.py [--seeds 3] [--runs DIR] [--only NAME ...] [--table]

Each row is ``germline train hybrid-es-mnist`` with the settings given, once for each seed; a run that was interrupted
goes on, and one that has ended is not run again, so this can be stopped and started at any time. ``--table`` prints
what there is and runs nothing. Figures are medians of the seeds, train and dev accuracy in percent.
"""

import argparse
import json
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from germline.journal import Journal

STEPS = 1500  # 30 epochs of 50


@dataclass(frozen=True)
class Row:
    name: str
    settings: tuple[str, ...]
    published: tuple[float, float] | None = None  # train and dev


def gated(interval: int, sigma: float = 0.1) -> tuple[str, ...]:
    return ("variant=gated", f"interval={interval}", f"sigma={sigma}")


ROWS = [
    Row("reference", ("interval=1",), (99.54, 96.57)),
    Row("reference-normalized", ("interval=1", "normalize=true"), (93.69, 93.23)),
    Row("assisted", ("variant=assisted",), (99.85, 96.08)),
    Row("gated-2", gated(2), (96.80, 94.21)),
    Row("gated-3", gated(3), (95.34, 93.06)),
    Row("gated-4", gated(4), (94.21, 92.23)),
    Row("gated-2-sigma-0.01", gated(2, 0.01), (96.49, 93.58)),
    Row("gated-2-sigma-0.5", gated(2, 0.5)),
    Row("gated-2-sigma-1", gated(2, 1.0)),
    Row("gated-2-sigma-1.5", gated(2, 1.5), (96.86, 94.21)),
    Row("algorithm2-2", ("interval=2",)),
    Row("algorithm2-3", ("interval=3",)),
    Row("algorithm2-4", ("interval=4",)),
    Row("algorithm2-2-average", ("interval=2", "combine=average")),
    Row("algorithm2-2-dev", ("interval=2", "select_on=dev")),
    Row("algorithm2-2-auto", ("interval=2", "sigma=auto")),
    Row("algorithm2-2-adapted", ("interval=2", "adapt=1.2")),
    Row("algorithm2-2-sign", ("interval=2", "noise=sign")),
    Row("algorithm2-2-uniform", ("interval=2", "noise=uniform")),
    Row("algorithm2-2-tenth", ("interval=2", "fraction=0.1")),
    Row("algorithm2-2-late", ("interval=2", "start=500")),
    Row("algorithm2-2-int8", ("interval=2", "wire=int8")),
    Row("slot-2", ("interval=2", "base=slot")),
    Row("slot-4", ("interval=4", "base=slot")),
    Row("fixed-mean", ("variant=fixed",)),
    Row("fixed-slot", ("variant=fixed", "base=slot")),
]


def path_of(row: Row, seed: int, runs: Path) -> Path:
    return runs / f"{row.name}-{seed}"


def known(path: Path) -> dict[str, Any] | None:
    """What a run came to, if it has ended."""
    if not (path / "journal.sqlite").is_file():
        return None
    journal = Journal.open(path, read_only=True)
    outcome = journal.outcome()
    journal.close()
    return outcome if outcome is not None and outcome["generations"] == STEPS else None


def run(row: Row, seed: int, runs: Path) -> dict[str, Any]:
    path = path_of(row, seed, runs)
    found = known(path)
    if found is None:
        given = [word for setting in row.settings for word in ("--set", setting)]
        new = ["train", "hybrid-es-mnist", *given, "--seed", str(seed), "--runs", str(runs), "--name", path.name]
        command = ["resume", str(path)] if path.exists() else new
        subprocess.run([sys.executable, "-m", "germline", *command, "--json"], check=True, stdout=subprocess.DEVNULL)
        found = known(path)
        assert found is not None
    return found


def line(row: Row, outcomes: list[dict[str, Any]]) -> str:
    parts = [f"{row.name:24}"]
    for name, published in zip(("train_accuracy", "dev_accuracy"), row.published or (None, None), strict=True):
        values = [100 * one["metrics"][name] for one in outcomes]
        said = f"{statistics.median(values):6.2f} ({min(values):.2f} to {max(values):.2f})"
        parts.append(f"{said:26} {f'{published:.2f}' if published else '':>6}")
    parts.append(f"{statistics.median(one['seconds'] for one in outcomes):7.1f} s   {' '.join(row.settings)}")
    return "  ".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--runs", type=Path, default=Path("runs/hybrid-es"))
    parser.add_argument("--only", nargs="+", choices=[row.name for row in ROWS], metavar="NAME")
    parser.add_argument("--table", action="store_true", help="what there is, without running anything")
    parser.add_argument("--json", action="store_true", help="the last line is one JSON object")
    arguments = parser.parse_args()
    rows = [row for row in ROWS if arguments.only is None or row.name in arguments.only]
    print(f"{'':24}  {'train':26} {'paper':>6}  {'dev':26} {'paper':>6}")
    results: dict[str, Any] = {}
    for row in rows:
        seeds = range(arguments.seeds)
        if arguments.table:
            maybe = [known(path_of(row, seed, arguments.runs)) for seed in seeds]
            outcomes = [one for one in maybe if one is not None]
        else:
            outcomes = [run(row, seed, arguments.runs) for seed in seeds]
        if outcomes:
            results[row.name] = [one["metrics"] for one in outcomes]
            print(line(row, outcomes), flush=True)
    if arguments.json:
        print(json.dumps(results))


if __name__ == "__main__":
    main()
