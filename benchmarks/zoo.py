"""Evaluates public architectures by Germline, each in a separate process, and compares members with plain copies.

    python benchmarks/zoo.py                          every architecture of the installed packages (extra zoo)
    python benchmarks/zoo.py --package timm           those of one package; may be repeated
    python benchmarks/zoo.py --sample 60              a random sample of this many, over all packages
    python benchmarks/zoo.py --jobs 2                 two at the same time, by one thread each
    python benchmarks/zoo.py --out zoo.jsonl          keep the results as they come, and skip what the file already has
    python benchmarks/zoo.py --summary zoo.jsonl      the summary of a file
    python benchmarks/zoo.py --device cuda            on a GPU, in bfloat16 where that is chosen; paths as on the CPU?

Architectures are built small, with random weights (zoo_models.py). Each is put through one generation with default
settings. A row tells by which method members were evaluated, and why not by a faster one; the processor time of a
generation by one thread, in forward passes of the plain module, one for each member; and the largest difference between
a member's score and that of a plain copy of the module with the member's weights. Where that exceeds 1e-4, it is
compared with how far the score of a plain copy moves if its weights are shaken by 2e-7 of their size, which is the
rounding of float32. Architectures are taken from all packages in turn, those of a package in random order. Every second
one of a package's list is held out: it is counted separately, and nothing is to be mended by looking at it.
"""

import argparse
import json
import multiprocessing
import random
import resource
import signal
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from itertools import zip_longest
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent))
import zoo_models

from germline.engine.session import Session
from germline.fleet import Local
from germline.genome import Genome
from germline.objective import Batch, Objective
from germline.population import SlowPath, exact_arithmetic, make_evaluation_copy, single_threaded_torch
from germline.population.isolation import isolated_generators
from germline.strategies import OpenAIES

POPULATION, SIGMA = 16, 0.01
TIMED = 4  # members whose plain copies are timed
LARGEST = {"float32": 1e-4, "bfloat16": 2e-2}  # difference of scores, relative to their size
SHAKE = {"float32": 2e-7, "bfloat16": 2e-3}  # of weights, relative to their size
PATIENCE = 20  # by how much more time than processor time an architecture may take, for instance on a busy machine
MAX_PARAMETERS = 12_000_000

Row = dict[str, Any]


def mean_square(output: Any, target: Any = None) -> Any:
    """Return the sum of the mean squares of all floating-point tensors of an output."""
    return sum(tensor.float().square().mean() for tensor in iterate_floats(output))


def iterate_floats(output: Any) -> Iterator[Tensor]:
    """Yield the floating-point tensors of nested mappings, sequences and dataclasses."""
    if isinstance(output, Tensor):
        if output.is_floating_point() and output.numel():
            yield output
    elif isinstance(output, Mapping):
        for item in output.values():
            yield from iterate_floats(item)
    elif isinstance(output, list | tuple):
        for item in output:
            yield from iterate_floats(item)
    elif is_dataclass(output) and not isinstance(output, type):
        for item in fields(output):
            yield from iterate_floats(getattr(output, item.name))


def measure(package: str, name: str, device: str) -> Row:
    """Return the row of one architecture."""
    torch.manual_seed(0)
    row: Row = {"package": package, "name": name, "status": "not built"}
    try:
        module, inputs = zoo_models.build(package, name)
        row["parameters"] = sum(p.numel() for p in module.parameters() if p.requires_grad)
        if row["parameters"] > MAX_PARAMETERS:
            return row | {"reason": "it is too large"}
        if not row["parameters"]:
            return row | {"reason": "it has no parameters to train"}
        plain, batch = make_evaluation_copy(module).to(device), make_batch(inputs, device)
        with torch.no_grad():
            scores = [float(mean_square(plain(*some.args, **some.kwargs))) for some in (batch.copy(), batch.copy())]
        if not np.isfinite(scores).all() or not scores[0]:
            return row | {"reason": f"its outputs are {scores[0]}"}
    except Exception as error:
        return row | {"reason": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}
    try:
        row |= evaluate(module, inputs, device)
        if device != "cpu":
            row["cpu_method"] = prepare(module, inputs, "cpu")[0].scorer.chosen_plan.method
        return row
    except Exception as error:
        return row | {"status": "error", "reason": repr(error)[:300], "traceback": traceback.format_exc()[-3000:]}


def make_batch(inputs: zoo_models.Inputs, device: str) -> Batch:
    """Return the inputs of an architecture as a batch on a device."""
    args, kwargs = inputs
    target = torch.zeros(zoo_models.BATCH)
    return Batch.from_raw(dict(kwargs) | {"target": target} if kwargs else (*args, target), device)


def prepare(module: nn.Module, inputs: zoo_models.Inputs, device: str) -> tuple[Session, Batch, list[str], float]:
    """Return a session whose plan is chosen, a batch on its device, the reasons of a slow plan, and the seconds."""
    batch = make_batch(inputs, device)
    strategy, fleet = OpenAIES(population=POPULATION, sigma=SIGMA), Local(device)
    dtype: Any = "float32" if device == "cpu" else "auto"  # on the CPU small differences are to be seen
    session = Session.create(module, strategy, Objective(mean_square), fleet, 1, dtype=dtype)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        began = time.perf_counter()
        session.prepare(batch)
        seconds = time.perf_counter() - began
    return session, batch, [str(w.message) for w in caught if issubclass(w.category, SlowPath)], seconds


def evaluate(module: nn.Module, inputs: zoo_models.Inputs, device: str) -> Row:
    """Return what one generation of a module shows."""
    session, batch, slow, seconds = prepare(module, inputs, device)
    result = session.evaluate(0, batch)
    plan = session.scorer.chosen_plan
    row: Row = {"status": plan.method, "vectorized": plan.vectorized, "prepare_s": round(seconds, 2)}
    row["reason"] = slow[0].partition("because ")[2] if slow else None
    row |= {"looped": len(plan.looped), "dtype": plan.dtype}
    candidates = session.strategy.ask(session.state, session.noise, 0, result.values)
    weights = candidates.weights(np.arange(POPULATION), 0, session.scorer.genome.size)
    genome = Genome.from_module(module)
    read_clock = time.thread_time if device == "cpu" else time.perf_counter

    def score_plain(theta: Tensor, timed: bool = False) -> tuple[float, float]:
        score = 0.0
        plain = make_evaluation_copy(module).to(device)
        genome.write(theta, plain)
        some, times = batch.copy(), []
        with isolated_generators(candidates):  # which members that draw random numbers have, too
            for _ in range(2 if timed else 1):
                began = read_clock()
                result = float(mean_square(plain(*some.args, **some.kwargs)))
                times.append(read_clock() - began)
                score = score if times[1:] else result
        return score, min(times)

    with torch.no_grad(), single_threaded_torch(), exact_arithmetic(torch.device(device)):
        scored = [score_plain(theta, timed=member < TIMED) for member, theta in enumerate(weights)]
        expected, plain_s = np.array([s for s, _ in scored]), min(s for _, s in scored[:TIMED])
        times = []
        for _ in range(2):
            began = read_clock()
            session.scorer.evaluator.scores(candidates, POPULATION, batch).cpu()
            times.append(read_clock() - began)
        row["forwards"] = round(min(times) / (POPULATION * plain_s), 3)
        row["plain_ms"] = round(1e3 * plain_s, 3)
        row["difference"] = float(np.max(np.abs(result.scores - expected) / np.abs(expected)))
        if not row["difference"] <= LARGEST[plan.dtype]:
            generator = torch.Generator().manual_seed(0)
            moved = 0.0
            for theta, score in zip(weights, expected, strict=True):
                noise = torch.randn(theta.shape, generator=generator).to(device)
                moved = max(moved, abs(score_plain(theta * (1 + SHAKE[plan.dtype] * noise))[0] - score) / abs(score))
            row["shaken"] = moved
    row["cpu_s"] = round(time.process_time(), 1)
    return row


def run_one(package: str, name: str, device: str, limit: int, pipe: Connection) -> None:
    """Measure one architecture in this process, and send its row; the system ends it if it takes too long."""
    resource.setrlimit(resource.RLIMIT_CPU, (limit, limit + 10))
    torch.set_num_threads(1)
    with open("/dev/null", "w") as nothing:
        sys.stdout = sys.stderr = nothing
        warnings.simplefilter("ignore")
        pipe.send(measure(package, name, device))


def run_in_processes(names: list[tuple[str, str]], device: str, limit: int, jobs: int) -> Iterator[Row]:
    """Yield the rows of architectures as they come, each of a process that ends, whatever the architecture does."""
    context: Any = multiprocessing.get_context("fork" if device == "cpu" else "spawn")  # CUDA does not survive a fork
    if device == "cpu":  # what every process needs is loaded once
        torch.set_num_threads(1)
        evaluate(nn.Linear(2, 2), ((torch.randn(zoo_models.BATCH, 2),), {}), device)
    waiting, running = names[::-1], dict[Any, tuple[Any, float, Row]]()
    while waiting or running:
        while waiting and len(running) < jobs:
            package, name = waiting.pop()
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=run_one, args=(package, name, device, limit, theirs))
            process.start()
            theirs.close()
            running[ours] = process, time.monotonic() + PATIENCE * limit, {"package": package, "name": name}
        ready = wait(list(running), 1.0)
        for pipe, (process, end, row) in list(running.items()):
            if pipe not in ready and time.monotonic() < end:
                continue
            row["status"] = "timeout"
            try:
                if pipe in ready:
                    row = pipe.recv()
            except EOFError:
                process.join()
                is_timeout = process.exitcode in (-signal.SIGXCPU, -signal.SIGKILL)
                row |= {"status": "timeout" if is_timeout else "died", "reason": f"exit code {process.exitcode}"}
            process.join(2)
            process.kill()
            process.join()
            del running[pipe]
            yield row


def judge(row: Row) -> str:
    """Return whether the scores of a row are right."""
    if row["difference"] <= LARGEST[row["dtype"]]:
        return "right"
    return "ill-conditioned" if row.get("shaken", 0.0) >= row["difference"] / 2 else "wrong"


def describe(row: Row) -> str:
    """Return a row as a line."""
    line = f"{row['package']:>12} {row['name'][:44]:44} {row['status']:10}"
    if "difference" in row:
        line += f" {row['forwards']:7.2f} forwards  differs by {row['difference']:.1e} {judge(row)}"
    return line + (f"  {row['reason'][:160]}" if row.get("reason") else "")


def summarize(rows: list[Row]) -> str:
    """Return the summary of all rows."""
    built = [row for row in rows if row["status"] != "not built"]
    done = [row for row in built if "difference" in row]
    lines = ["", f"{len(built)} architectures of {len({row['package'] for row in built})} packages"]
    lines[-1] += f" ({len(rows) - len(built)} more could not be built or run at a small size)"
    for package in sorted({row["package"] for row in built}):
        counts = Counter(row["status"] for row in built if row["package"] == package)
        lines.append(f"{package:>14}: " + ", ".join(f"{count} {status}" for status, count in counts.most_common()))
    counts = Counter(row["status"] for row in built)
    lines += [f"{status:>14}: {count:4} ({100 * count / len(built):.1f} %)" for status, count in counts.most_common()]
    for status in dict.fromkeys(row["status"] for row in done):
        forwards = [row["forwards"] for row in done if row["status"] == status]
        quartiles = np.quantile(forwards, [0.25, 0.5, 0.75, 1])
        lines.append(f"{status:>14}: " + "{:.2f}, {:.2f}, {:.2f}, {:.2f} plain forwards (quartiles)".format(*quartiles))
    lines.append("       answers: " + ", ".join(f"{count} {word}" for word, count in Counter(map(judge, done)).items()))
    held_out = [row["status"] for row in built if row.get("held_out")]
    if held_out:
        fast = 100 * held_out.count("population") / len(held_out)
        lines.append(f"      held out: {len(held_out)}, of which {fast:.1f} % population")
    elsewhere = [row["cpu_method"] == row["status"] for row in done if "cpu_method" in row]
    if elsewhere:
        lines.append(f" as on the CPU: {sum(elsewhere)} of {len(elsewhere)} by the same method")
    return "\n".join(lines)


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--package", action="append", choices=list(zoo_models.PACKAGES), help="a package")
    parser.add_argument("--sample", type=int, help="the size of a random sample")
    parser.add_argument("--seed", type=int, default=0, help="the seed of the sample")
    parser.add_argument("--name", help="only architectures whose name contains this")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--jobs", type=int, default=1, help="architectures at the same time")
    parser.add_argument("--timeout", type=int, default=180, help="seconds of processor time for an architecture")
    parser.add_argument("--out", type=Path, help="a file of JSON lines")
    parser.add_argument("--summary", type=Path, help="print the summary of such a file, and end")
    options = parser.parse_args()
    if options.summary:
        print(summarize([json.loads(line) for line in options.summary.read_text().splitlines()]))
        return
    rows: list[Row] = []
    if options.out and options.out.exists():
        rows = [json.loads(line) for line in options.out.read_text().splitlines()]
    done = {(row["package"], row["name"]) for row in rows}
    listed = {package: zoo_models.list_architectures(package) for package in options.package or zoo_models.PACKAGES}
    held_out = {(package, name) for package, names in listed.items() for name in names[1::2]}
    names = take_in_turn(listed, options.seed)
    if options.name:
        names = [(package, name) for package, name in names if options.name in name]
    names = [item for item in names[: options.sample] if item not in done]
    for row in run_in_processes(names, options.device, options.timeout, options.jobs):
        rows.append(row | {"held_out": (row["package"], row["name"]) in held_out})
        print(describe(rows[-1]), flush=True)
        if options.out:
            with options.out.open("a") as file:
                file.write(json.dumps(rows[-1]) + "\n")
    print(summarize(rows))


def take_in_turn(listed: dict[str, list[str]], seed: int) -> list[tuple[str, str]]:
    """Return the names of all packages' architectures, one of each package in turn, those of a package shuffled."""
    generator = random.Random(seed)
    shuffled = [[(package, name) for name in generator.sample(names, len(names))] for package, names in listed.items()]
    return [item for items in zip_longest(*shuffled) for item in items if item is not None]


if __name__ == "__main__":
    main()
