"""Measures how long a user waits: for the import, for the help text, and for the first generation of digits.

    python benchmarks/startup.py [--against CHECKOUT] [--repeats 5]

Each number is the least of several runs, in seconds of wall-clock time and, in parentheses, of processor time, which
depends less on what else the machine does. Cold is the first run after an installation, which compiles Germline's
modules and kernels. The packages are copied to a temporary folder: caches of earlier runs play no part, and none are
left behind.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

HERE = Path(__file__).parent.parent
IMPORT = """import time, torch
wall, processor = time.perf_counter(), time.process_time()
{}
print(time.perf_counter() - wall, time.process_time() - processor)"""
Seconds = tuple[float, float]  # by the clock, and of the processor


def environment(package: Path) -> dict[str, str]:
    """Return the environment of a process that uses a copy of the package, and caches next to it."""
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return variables | {"PYTHONPATH": str(package)}


def time_import(package: Path, statement: str) -> Seconds:
    """Return the seconds of an import statement after torch has been imported."""
    words = [sys.executable, "-c", IMPORT.format(statement)]
    output = subprocess.run(
        words, env=environment(package), cwd=package, check=True, capture_output=True, text=True
    ).stdout
    wall, processor = map(float, output.split())
    return wall, processor


def time_help(package: Path) -> Seconds:
    """Return the seconds of ``germline --help``."""
    began, words = time.perf_counter(), [sys.executable, "-m", "germline", "--help"]
    process = subprocess.Popen(words, env=environment(package), cwd=package, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    assert status == 0
    return time.perf_counter() - began, usage.ru_utime + usage.ru_stime


def time_first_generation(package: Path) -> Seconds:
    """Return the seconds from the command to the line that reports the first generation, which is then on disk."""
    words = [sys.executable, "-m", "germline", "train", "digits", "--device", "cpu", "--generations", "1000000"]
    with tempfile.TemporaryDirectory() as runs:
        words += ["--runs", runs]
        began = time.perf_counter()
        process = subprocess.Popen(words, env=environment(package), cwd=package, stderr=subprocess.PIPE, text=True)
        assert process.stderr is not None
        lines: list[str] = []
        for line in process.stderr:
            lines.append(line)
            if line.startswith("gen"):
                break
        wall = time.perf_counter() - began
        process.kill()
        _, _, usage = os.wait4(process.pid, 0)
    assert lines[-1].startswith("gen"), "".join(lines)
    return wall, usage.ru_utime + usage.ru_stime


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", type=Path, help="another checkout, to compare with")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    checkouts = [HERE, *([options.against] if options.against else [])]
    cases: dict[str, Callable[[Path], Seconds]] = {
        "import germline, after torch": lambda package: time_import(package, "import germline"),
        "from germline import train, after torch": lambda package: time_import(package, "from germline import train"),
        "germline --help": time_help,
        "first generation of digits": time_first_generation,
    }
    with tempfile.TemporaryDirectory() as folder:
        packages = [Path(folder) / str(i) for i in range(len(checkouts))]
        for checkout, package in zip(checkouts, packages, strict=True):
            ignore = shutil.ignore_patterns("__pycache__")
            shutil.copytree(checkout / "germline", package / "germline", ignore=ignore)
        print(f"{'seconds (of the processor)':44}" + "".join(f"{c.resolve()!s:>24}" for c in checkouts))
        show("first generation of digits, cold", [time_first_generation(package) for package in packages])
        for name, measure in cases.items():
            rounds = [[measure(package) for package in packages] for _ in range(options.repeats)]
            best = [(min(w for w, _ in runs), min(c for _, c in runs)) for runs in zip(*rounds, strict=True)]
            show(name, best)


def show(name: str, times: list[Seconds]) -> None:
    """Print a row: the times of each checkout, and the ratio of the first to the second."""
    cells = "".join(f"{f'{wall:.2f} ({processor:.2f})':>24}" for wall, processor in times)
    ratios = [a / b for a, b in zip(*times, strict=True)] if len(times) == 2 else []
    print(f"{name:44}{cells}" + (f"{f'x {ratios[0]:.2f} ({ratios[1]:.2f})':>18}" if ratios else ""), flush=True)


if __name__ == "__main__":
    main()
