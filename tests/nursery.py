"""Child processes with runs that the tests kill.

    python nursery.py     reads requests as lines of JSON from standard input, forks a child for each, and prints the
                          child's process id and, once the child has ended, its exit status

Python, torch and the kernels are loaded once. Each child is a separate process, which may be killed at any instant.
"""

import json
import os
import signal
import sys
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from germline import OpenAIES, Recipe
from germline.engine import loop, opening
from germline.engine.journal import Journal
from germline.engine.stopping import Stop
from germline.fleet import Local
from germline.genome import Genome, theta_sha256
from germline.recipes.recipe import seeded
from germline.strategies import GA, PESGD, PSO, SNES, AnyStrategy, Gradient, HybridES, MuLambda

STRATEGIES: dict[str, AnyStrategy] = {
    "openai-es": OpenAIES(population=16, sigma=0.1, lr=0.05),
    "auto": OpenAIES(population=16, sigma="auto", lr=0.05, rank=1, weight_decay=0.01),
    "gradient": Gradient(lr=0.01),
    "hybrid-es": HybridES(population=6, lr=0.5, sigma=0.5, interval=3, adapt=1.2),
    "pesgd": PESGD(population=4, lr=0.1, optimizer="adam", sigma=0.01),
    "hybrid-es, slots": HybridES(population=6, lr=0.5, variant="fixed", base="slot", epoch=4),
    "snes": SNES(population=16, sigma=0.1),
    "mu-lambda": MuLambda(population=16, parents=4, rank=1),
    "ga": GA(population=16, parents=4, crossover="one-point", mutation=0.5),
    "pso": PSO(population=8, decay=0.9),
}


def make_recipe(strategy: str) -> Recipe:
    """Return a small recipe, with one of the strategies by name."""
    x = torch.linspace(-1, 1, 160).reshape(32, 5)
    return Recipe(
        model=seeded(0, lambda: nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))),
        data=(x, x[:, :3].argmax(1)),
        loss=F.cross_entropy,
        strategy=STRATEGIES[strategy],
        batch_size=8,
        evaluate_every=5,
        snapshot_every=7,
    )


def run_to_end(path: Path, strategy: str, generations: int, dies_at: int | None) -> None:
    """Start or resume a run and take it to its end, or kill this process at the n-th step of writing to disk."""
    recipe = make_recipe(strategy)
    steps = 0

    def count_step(*_: object) -> int:
        nonlocal steps
        steps += 1
        if steps == dies_at:
            os.kill(os.getpid(), signal.SIGKILL)
        return 0

    if dies_at is not None:
        fsync = os.fsync
        os.fsync = lambda handle: (count_step(), fsync(handle), count_step())[1]  # type: ignore[assignment]
    if path.exists():
        session = opening.resume(recipe, Journal.open(path), Local("cpu"))
    else:
        session = opening.start(recipe, path, seed=5, fleet=Local("cpu"), about={})
    journal = session.require_journal()
    if dies_at is not None:
        journal.connection.set_progress_handler(count_step, 1)  # every operation of SQLite, commits included
    loop.run(session, Stop(generations=generations))
    journal.close()
    (path / "hash").write_text(theta_sha256(session.state.theta))


def main() -> None:
    torch.set_num_threads(1)
    strategy = STRATEGIES["openai-es"]
    genome = Genome.from_module(make_recipe("openai-es").model)
    state = strategy.init(torch.zeros(genome.size))
    field = strategy.field(0, genome)
    strategy.ask(state, field, 0, {"sigma": 0.1}).weights(np.arange(4), 0, genome.size)
    field.members(range(4), 0).weighted_sum([1, 2, 3, 4], (0, genome.size))  # compiles both kernels before any fork
    print("ready", flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        child = os.fork()
        if child == 0:
            try:
                run_to_end(Path(request["path"]), request["strategy"], request["generations"], request["dies_at"])
            except BaseException as error:
                print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
                os._exit(3)
            os._exit(0)
        print(child, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


if __name__ == "__main__":
    main()
