"""Evaluates public architectures by Germline, each in a separate process, and compares members with plain copies.

    python benchmarks/zoo.py                          every architecture of the installed packages (extra zoo)
    python benchmarks/zoo.py --package timm           those of one package; may be repeated
    python benchmarks/zoo.py --sample 60              a random sample of this many, over all packages
    python benchmarks/zoo.py --out zoo.jsonl          keep the results as they come, and skip what the file already has
    python benchmarks/zoo.py --summary zoo.jsonl      the summary of a file

Architectures are built small, with random weights (zoo_models.py). Each is put through one generation with default
settings. A row tells by which method members were evaluated, and why not by a faster one; the time of a generation in
forward passes of the plain module, one for each member; and the largest difference between a member's score and that of
a plain copy of the module with the member's weights. Where that exceeds 1e-4, it is compared with how far the score of
a plain copy moves if its weights are shaken by 2e-7 of their size, which is the rounding of float32.
"""

import argparse
import copy
import json
import multiprocessing
import random
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
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
LARGEST = 1e-4  # difference of scores, relative to their size
SHAKE = 2e-7  # of weights, relative to their size
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


def measure(package: str, name: str) -> Row:
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
        plain = make_evaluation_copy(module)
        with torch.no_grad():
            scores = [float(mean_square(plain(*copy.deepcopy(inputs[0]), **copy.deepcopy(inputs[1])))) for _ in "ab"]
        if not np.isfinite(scores).all() or not scores[0]:
            return row | {"reason": f"its outputs are {scores[0]}"}
    except Exception as error:
        return row | {"reason": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}
    try:
        return row | evaluate(module, inputs)
    except Exception as error:
        return row | {"status": "error", "reason": repr(error)[:300], "traceback": traceback.format_exc()[-3000:]}


def evaluate(module: nn.Module, inputs: tuple[tuple[Any, ...], dict[str, Any]]) -> Row:
    """Return what one generation of a module shows."""
    args, kwargs = inputs
    raw: Any = (
        dict(kwargs) | {"target": torch.zeros(zoo_models.BATCH)} if kwargs else (*args, torch.zeros(zoo_models.BATCH))
    )
    batch = Batch.from_raw(raw)
    session = Session.create(
        module, OpenAIES(population=POPULATION, sigma=SIGMA), Objective(mean_square), Local("cpu"), 1, dtype="float32"
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        began = time.perf_counter()
        session.prepare(batch)
        seconds = time.perf_counter() - began
        result = session.evaluate(0, batch)
    slow = [str(w.message) for w in caught if issubclass(w.category, SlowPath)]
    plan = session.scorer.chosen_plan  # in float32, since differences are to be seen
    row: Row = {"status": plan.method, "vectorized": plan.vectorized, "prepare_s": round(seconds, 2)}
    row["reason"] = slow[0].partition("because ")[2] if slow else None
    row["looped"] = len(plan.looped)
    candidates = session.strategy.ask(session.state, session.noise, 0, result.values)
    weights = candidates.weights(np.arange(POPULATION), 0, session.scorer.genome.size)
    genome = Genome.from_module(module)

    def score_plain(theta: Tensor, timed: bool = False) -> tuple[float, float]:
        score = 0.0
        plain = make_evaluation_copy(module)
        genome.write(theta, plain)
        some, times = batch.copy(), []
        with isolated_generators(candidates):  # which members that draw random numbers have, too
            for _ in range(2 if timed else 1):
                began = time.perf_counter()
                result = mean_square(plain(*some.args, **some.kwargs))
                times.append(time.perf_counter() - began)
                score = score if times[1:] else float(result)
        return score, min(times)

    with torch.no_grad(), single_threaded_torch(), exact_arithmetic(torch.device("cpu")):
        scored = [score_plain(theta, timed=True) for theta in weights]
        expected, plain_s = np.array([s for s, _ in scored]), min(s for _, s in scored)
        times = []
        for _ in range(3):
            began = time.perf_counter()
            session.scorer.evaluator.scores(candidates, POPULATION, batch)
            times.append(time.perf_counter() - began)
        row["forwards"] = round(min(times) / (POPULATION * plain_s), 3)
        row["plain_ms"] = round(1e3 * plain_s, 3)
        row["difference"] = float(np.max(np.abs(result.scores - expected) / np.abs(expected)))
        if not row["difference"] <= LARGEST:
            generator = torch.Generator().manual_seed(0)
            moved = 0.0
            for theta, score in zip(weights, expected, strict=True):
                noise = torch.randn(theta.shape, generator=generator)
                moved = max(moved, abs(score_plain(theta * (1 + SHAKE * noise))[0] - score) / abs(score))
            row["shaken"] = moved
    return row


def run_one(package: str, name: str, pipe: Any) -> None:
    """Measure one architecture in this process, and send its row."""
    torch.set_num_threads(1)
    with open("/dev/null", "w") as nothing:
        sys.stdout = sys.stderr = nothing
        warnings.simplefilter("ignore")
        pipe.send(measure(package, name))


def run_in_process(package: str, name: str, timeout: float) -> Row:
    """Measure one architecture in a process that ends, whatever the architecture does."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    process = context.Process(target=run_one, args=(package, name, theirs))
    process.start()
    theirs.close()
    row: Row = {"package": package, "name": name, "status": "timeout"}
    try:
        if ours.poll(timeout):
            row = ours.recv()
    except EOFError:
        row["status"] = "died"
    if process.is_alive():
        process.join(2)
        process.kill()
    process.join()
    return row


def judge(row: Row) -> str:
    """Return whether the scores of a row are right."""
    if row["difference"] <= LARGEST:
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
    return "\n".join(lines)


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--package", action="append", choices=list(zoo_models.PACKAGES), help="a package")
    parser.add_argument("--sample", type=int, help="the size of a random sample")
    parser.add_argument("--seed", type=int, default=0, help="the seed of the sample")
    parser.add_argument("--name", help="only architectures whose name contains this")
    parser.add_argument("--timeout", type=float, default=180, help="seconds for an architecture")
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
    names = [
        (package, name)
        for package in options.package or zoo_models.PACKAGES
        for name in zoo_models.list_architectures(package)
    ]
    if options.name:
        names = [(package, name) for package, name in names if options.name in name]
    if options.sample:
        names = spread_sample(names, options.sample, options.seed)
    for package, name in names:
        if (package, name) in done:
            continue
        row = run_in_process(package, name, options.timeout)
        rows.append(row)
        print(describe(row), flush=True)
        if options.out:
            with options.out.open("a") as file:
                file.write(json.dumps(row) + "\n")
    print(summarize(rows))


def spread_sample(names: list[tuple[str, str]], size: int, seed: int) -> list[tuple[str, str]]:
    """Return a sample that takes from all packages in turn, grouped by package."""
    generator = random.Random(seed)
    by_package: dict[str, list[tuple[str, str]]] = {}
    for item in names:
        by_package.setdefault(item[0], []).append(item)
    for items in by_package.values():
        generator.shuffle(items)
    sample: list[tuple[str, str]] = []
    while len(sample) < size and any(by_package.values()):
        for items in by_package.values():
            if items and len(sample) < size:
                sample.append(items.pop())
    order = list(by_package)
    return sorted(sample, key=lambda item: order.index(item[0]))


if __name__ == "__main__":
    main()
