"""Measures how fast the noise field is compared with torch's generator doing the same work.

    python benchmarks/noise.py [--parameters N] [--members P] [--repeats R] [--json]

Each pair of timings is interleaved and the best of each is taken, so that other work on the machine affects both alike.
"""

import argparse
import json
import time
from collections.abc import Callable

import torch

from germline.machine import processor_name
from germline.noise import Field

SIGMA = 0.01
BLOCK = 4  # members that are perturbed together, into one buffer


def best_times(work: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Return the best time of each function in seconds, called in turns after one unmeasured call."""
    best = dict.fromkeys(work, float("inf"))
    for turn in range(repeats + 1):
        for name, function in work.items():
            start = time.perf_counter()
            function()
            if turn:
                best[name] = min(best[name], time.perf_counter() - start)
    return best


def with_threads(threads: int, function: Callable[[], object]) -> Callable[[], object]:
    """Return a function that sets torch's number of threads, then calls the given one."""

    def call() -> None:
        torch.set_num_threads(threads)
        function()

    return call


def measure_cpu(parameters: int, members: int, repeats: int) -> list[tuple[str, float, float]]:
    """Return rows of (what is compared, how many times as fast it is, the target)."""
    field = Field(seed=1)
    noise = field.members(range(members), generation=0)
    blocks = [field.members(range(i, i + BLOCK), generation=0) for i in range(0, members, BLOCK)]
    weights = list(range(1 - members, members, 2))
    theta, total, z = torch.zeros(parameters), torch.zeros(parameters), torch.empty(parameters)
    candidates = torch.empty(BLOCK, parameters)

    def torch_perturb() -> None:
        for _ in blocks:
            for row in candidates:
                torch.add(theta, torch.randn(parameters, out=z), alpha=SIGMA, out=row)

    def perturb() -> None:
        for block in blocks:
            block.perturb(theta, SIGMA, out=candidates)

    def torch_accumulate() -> None:
        for weight in weights:
            total.add_(torch.randn(parameters, out=z), alpha=weight)

    ours = {
        "perturb": perturb,
        "accumulate": lambda: noise.accumulate(weights, (0, parameters)),
        "accumulate eps^2 - 4": lambda: noise.accumulate(weights, (0, parameters), power=2),
    }
    cores = min(2, torch.get_num_threads())
    work: dict[str, Callable[[], object]] = {
        "torch perturb": with_threads(1, torch_perturb),
        "torch accumulate": with_threads(1, torch_accumulate),
    }
    for name, function in ours.items():
        for threads in range(1, cores + 1):
            work[f"{name} {threads}"] = with_threads(threads, function)
    times = best_times(work, repeats)
    torch.set_num_threads(cores)

    print(f"CPU: {processor_name()}, torch {torch.__version__}; {members} members x {parameters:,} parameters")
    for name, seconds in times.items():
        print(f"  {name:24} {1e9 * seconds / members / parameters:7.3f} ns per element")
    rows = [
        (
            "perturb, one core, against torch.randn and the same arithmetic",
            times["torch perturb"] / times["perturb 1"],
            5.0,
        ),
        ("accumulate, likewise", times["torch accumulate"] / times["accumulate 1"], 6.0),
    ]
    if cores > 1:
        rows.append(("perturb, two cores against one", times["perturb 1"] / times["perturb 2"], 1.8))
        rows.append(("accumulate, two cores against one", times["accumulate 1"] / times["accumulate 2"], 1.8))
    return rows


def measure_cuda(parameters: int, members: int, repeats: int) -> list[tuple[str, float, float]]:
    """Return rows of (what is compared, how many times as fast it is, the target)."""
    noise = Field(seed=1).members(range(members), generation=0, device="cuda")
    weights = list(range(1 - members, members, 2))
    theta, candidates = torch.zeros(parameters, device="cuda"), torch.empty(64, parameters, device="cuda")
    few = Field(seed=1).members(range(64), generation=0, device="cuda")
    z = torch.empty(64 * parameters, device="cuda")

    def synchronized(function: Callable[[], object]) -> Callable[[], object]:
        def call() -> None:
            function()
            torch.cuda.synchronize()

        return call

    work = {
        "torch.normal_": synchronized(z.normal_),
        "perturb": synchronized(lambda: few.perturb(theta, SIGMA, out=candidates)),
        "accumulate": synchronized(lambda: noise.accumulate(weights, (0, parameters))),
        "accumulate eps^2 - 4": synchronized(lambda: noise.accumulate(weights, (0, parameters), power=2)),
    }
    times = best_times(work, repeats)
    elements = {"torch.normal_": 64 * parameters, "perturb": 64 * parameters}
    rates = {name: elements.get(name, members * parameters) / seconds for name, seconds in times.items()}

    print(f"CUDA: {torch.cuda.get_device_name()}; {members} members x {parameters:,} parameters")
    for name, rate in rates.items():
        print(f"  {name:24} {rate / 1e12:7.3f}e12 elements per second")
    return [("CUDA accumulate against torch.normal_ alone", rates["accumulate"] / rates["torch.normal_"], 2.5)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=int, default=1 << 20)
    parser.add_argument("--members", type=int, default=16, help=f"a multiple of {BLOCK}")
    parser.add_argument("--repeats", type=int, default=25)
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    arguments = parser.parse_args()
    rows = measure_cpu(arguments.parameters, arguments.members, arguments.repeats)
    if torch.cuda.is_available():
        rows += measure_cuda(4 * arguments.parameters, 64 * arguments.members, arguments.repeats)
    print(f"\n{'times as fast':>14} {'target':>7}")
    for name, ratio, target in rows:
        print(f"{ratio:14.2f} {target:7.1f}  {name}{'' if ratio >= target else '  (missed)'}")
    if arguments.json:
        print(json.dumps({name: round(ratio, 3) for name, ratio, _ in rows}))


if __name__ == "__main__":
    main()
