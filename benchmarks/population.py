"""Compares a whole generation of OpenAI-ES with pure inference on as many samples, and with other libraries.

    python benchmarks/population.py                 all rows, with the peers that are installed (extra bench)
    python benchmarks/population.py --row lenet     one row
    python benchmarks/population.py --threads 1,2   generations per second by the number of threads, with inference's
    python benchmarks/population.py --memory        the peak memory of the process at populations 256 and 4096
    python benchmarks/population.py --device cuda   the rows of population_cuda.py, on a GPU

Pure inference is one network's forward pass on population x batch samples, in one large batch or in batches of the
row's size on both cores, whichever is faster. Times are the best of several rounds that take all candidates in turn.
Before the first round of a row, the tuned torch libraries compile their losses, for a minute or more each; torch keeps
what it has compiled on disk.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent))
import population_cuda
from peers import TUNED, Work, available, batch, build, criterion, start_peer

from germline.engine.session import Session
from germline.fleet import Local
from germline.machine import processor_name
from germline.objective import Batch, Objective
from germline.strategies import OpenAIES

Step = Callable[[], object]


@dataclass(frozen=True)
class Row:
    """A net, and the largest part of the best peer's time, or of inference's, that a generation should take."""

    work: Work
    dense: float | None = None
    low_rank: float | None = None
    low_rank_of_inference: float | None = None


ROWS = {
    "mlp": Row(Work("mlp", 256, 256), 0.5, 0.1),
    "mlp-large-batch": Row(Work("mlp", 64, 1000), 1.0, 0.2),
    "lenet": Row(Work("lenet", 256, 64), 1.0, 0.6),
    "lstm": Row(Work("lstm", 256, 64), 0.8, 0.6),
    "llama": Row(Work("llama", 16, 8), low_rank_of_inference=1.0),
    "encoder": Row(Work("encoder", 16, 8)),
    "unet-large": Row(Work("unet", 16, 16)),
    "resnet": Row(Work("resnet", 8, 8)),
    "mnist-cores": Row(Work("mlp", 512, 512, (784, 64, 10))),
    "mnist-cores-2048": Row(Work("mlp", 2048, 512, (784, 64, 10))),
}
COMPARED = [name for name in ROWS if not name.startswith("mnist")]  # with the peers, unless rows are named
WARM_UP = 1.0  # seconds: a run forks processes after a quarter of a second of work on threads
SCALED = ["mnist-cores", "mnist-cores-2048"]  # over threads, unless rows are named


class Forecaster(nn.Module):
    """An LSTM of 64 units with a linear head."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(1, 64, batch_first=True), nn.Linear(64, 1)

    def forward(self, x: Tensor) -> Tensor:
        out, _ = self.lstm(x)
        last: Tensor = self.head(out[:, -1])
        return last


def make_module(work: Work) -> nn.Module:
    """Return the network that the peers have, with torch's own LSTM, for which Germline has a rule."""
    torch.manual_seed(0)
    return Forecaster() if work.kind == "lstm" else build(work)


def make_batch(work: Work) -> Batch:
    x, y = batch(work)
    return Batch.from_raw((torch.from_numpy(x), torch.from_numpy(y)))


def prepare_generation(work: Work, rank: int | None, dtype: Any) -> Step:
    """Return a function that runs a generation of Germline: scores, utilities, update; all but the journal."""
    strategy = OpenAIES(population=work.population, sigma=0.05, lr=0.01, rank=rank)
    session = Session.create(make_module(work), strategy, Objective(criterion(work)), Local("cpu"), 0, dtype=dtype)
    examples = make_batch(work)
    numbers = iter(range(1 << 30))
    session.prepare(examples)

    def step() -> None:
        session.tell(session.evaluate(next(numbers), examples))

    return step


def prepare_inference(work: Work, dtype: torch.dtype) -> dict[str, Step]:
    """Return the ways to run one network on population x batch samples."""
    module, (x,) = make_module(work).eval().to(dtype), make_batch(work).args
    x = x.to(dtype) if x.is_floating_point() else x
    large = x.repeat(work.population, *(1,) * (x.dim() - 1))
    cores = torch.get_num_threads()
    pool = ThreadPoolExecutor(cores, initializer=torch.set_num_threads, initargs=(1,))

    def run_batch(_: int) -> None:
        with torch.no_grad():
            module(x)

    @torch.no_grad()
    def at_once() -> None:
        module(large)

    def in_batches() -> None:
        torch.set_num_threads(1)
        list(pool.map(run_batch, range(work.population)))
        torch.set_num_threads(cores)

    return {"at once": at_once, "in batches": in_batches}


def measure_best(steps: dict[str, Step], repeats: int) -> dict[str, float]:
    """Return the shortest time of each step, in seconds, after its processes have started."""
    for step in steps.values():
        until = time.perf_counter() + WARM_UP
        step()
        while time.perf_counter() < until:
            step()
    best = dict.fromkeys(steps, float("inf"))
    for _ in range(repeats):
        for name, step in steps.items():
            began = time.perf_counter()
            step()
            best[name] = min(best[name], time.perf_counter() - began)
    return best


def measure(name: str, row: Row, repeats: int, with_peers: bool) -> dict[str, float]:
    """Print and return the times of a row, in seconds."""
    work = row.work
    steps: dict[str, Step] = {}
    for kind in (torch.float32, torch.bfloat16):
        label = str(kind).removeprefix("torch.")
        steps |= {f"inference, {label}, {how}": step for how, step in prepare_inference(work, kind).items()}
    for dtype in ("float32", "bfloat16"):
        steps |= {f"dense, {dtype}": prepare_generation(work, None, dtype)}
        steps |= {f"rank 1, {dtype}": prepare_generation(work, 1, dtype)}
    peers = available(work) if with_peers else []
    steps |= {name: start_peer(name, work) for name in peers}
    times = measure_best(steps, repeats)
    pure = min(seconds for key, seconds in times.items() if key.startswith("inference, float32"))
    print(f"\n{name}: {work.kind}, population {work.population}, batch {work.batch}")
    print(f"  {'':32} {'ms':>8} {'of inference':>13}")
    for key, seconds in times.items():
        print(f"  {key:32} {1e3 * seconds:8.1f} {seconds / pure:13.2f}")
    for form, rivals in (
        ("as documented", [name for name in peers if not name.endswith(TUNED)]),
        ("tuned by hand", [name for name in peers if name.endswith(TUNED)]),
    ):
        for key, goal in (("dense, float32", row.dense), ("rank 1, float32", row.low_rank)):
            if rivals:
                ratio = times[key] / min(times[rival] for rival in rivals)
                print(f"  {key}: {ratio:.3f} of the best peer {form}{judge(ratio, goal)}")
    ratio = times["rank 1, float32"] / pure
    print(f"  rank 1, float32: {ratio:.3f} of inference{judge(ratio, row.low_rank_of_inference)}", flush=True)
    return times


def judge(ratio: float, goal: float | None) -> str:
    """Return a goal, and whether a ratio misses it."""
    return "" if goal is None else f", goal {goal}{'' if ratio <= goal else '  (missed)'}"


def measure_threads(name: str, work: Work, counts: list[int], repeats: int) -> dict[str, float]:
    """Print and return how often a second generations and inference run with each number of threads."""
    print(f"\n{name}: {work.kind}, population {work.population}, batch {work.batch}; per second")
    print(f"  {'threads':>8} {'inference':>10} {'rank 1':>10} {'dense':>10}   times one thread")
    rates: dict[str, float] = {}
    for count in counts:
        torch.set_num_threads(count)
        steps = prepare_inference(work, torch.float32)
        steps |= {"rank 1": prepare_generation(work, 1, "float32"), "dense": prepare_generation(work, None, "float32")}
        times = measure_best(steps, repeats)
        pure = min(times["at once"], times["in batches"])
        rate = {"inference": 1 / pure, "rank 1": 1 / times["rank 1"], "dense": 1 / times["dense"]}
        rates |= {f"{key}, {count} threads": value for key, value in rate.items()}
        first = [rates[f"{key}, {counts[0]} threads"] for key in rate]
        gains = "  ".join(f"{value / one:.2f}" for value, one in zip(rate.values(), first, strict=True))
        print(f"  {count:8} " + " ".join(f"{value:10.2f}" for value in rate.values()) + f"   {gains}", flush=True)
    return rates


def measure_peak_memory(population: int) -> int:
    """Return the peak memory of a new process that runs two generations, in bytes."""
    code = f"""
import sys
import torch
sys.path.insert(0, {str(Path(__file__).parent)!r})
from germline.machine import peak_memory
from population import Work, prepare_generation
for rank in (None, 1):
    step = prepare_generation(Work("mlp", {population}, 256), rank, "float32")
    step(), step()
print(peak_memory(torch.device("cpu")))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return int(done.stdout.split()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument(
        "--row", choices=[*ROWS, *population_cuda.ROWS], action="append", help="several times for several rows"
    )
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--no-peers", action="store_true")
    parser.add_argument("--strategies", action="store_true", help="on a GPU: mu-lambda, ga and pso as well")
    parser.add_argument("--memory", action="store_true")
    parser.add_argument("--json", action="store_true", help="the last line is one JSON object")
    parser.add_argument(
        "--threads", type=lambda text: [int(part) for part in text.split(",")], help="thread counts, such as 1,2,4,8,16"
    )
    arguments = parser.parse_args()
    if arguments.device == "cuda":
        options = {"with_strategies": arguments.strategies, "as_json": arguments.json}
        population_cuda.main(arguments.row, arguments.repeats, with_jax=not arguments.no_peers, **options)
        return
    print(f"CPU: {processor_name()}, {torch.get_num_threads()} threads, torch {torch.__version__}")
    if arguments.memory:
        small, large = measure_peak_memory(256), measure_peak_memory(4096)
        print(f"peak memory: {small / 1e6:.0f} MB at population 256, {large / 1e6:.0f} MB at 4096")
        growth = large / small - 1
        print(f"growth {100 * growth:.1f} %, goal below 10 %{'' if growth < 0.1 else '  (missed)'}")
        return
    if arguments.threads:
        names = arguments.row or SCALED
        rates = {name: measure_threads(name, ROWS[name].work, arguments.threads, arguments.repeats) for name in names}
        if arguments.json:
            print(json.dumps(rates))
        return
    names = arguments.row or COMPARED
    times = {name: measure(name, ROWS[name], arguments.repeats, not arguments.no_peers) for name in names}
    if arguments.json:
        print(json.dumps(times))


if __name__ == "__main__":
    main()
