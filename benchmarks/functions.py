"""The strategies on functions whose minimum is known, compared with the same algorithms of other libraries.

    python benchmarks/functions.py [--seeds 11] [--evaluations 20000] [--json]

Sphere, Rosenbrock and Rastrigin in 100 dimensions, each with its minimum, 0, at a place drawn from -2 to 2. All
algorithms begin at the origin, with the same spread, population and number of evaluations. The table has medians and
quartiles over the seeds of the value that an algorithm ends with: at its mean if it has one, else at its best point.
The peers are those of evosax, and for mu-lambda the better of two evolution strategies of nevergrad; they need
``pip install 'germline[bench]'``.
"""

import argparse
import json
import time
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from torch import nn

from germline.genome import Genome
from germline.strategies import GA, PSO, SNES, AnyStrategy, GenerationResult, MuLambda, OpenAIES

DIMENSIONS, POPULATION = 100, 50
SIGMA = 0.5  # of algorithms that adapt it, and of the first swarm
FIXED, RATE, MUTATION = 0.1, 0.05, 0.1  # sigma and learning rate of OpenAI-ES, mutation of the genetic algorithms
Function = Callable[[Any, Any], Any]  # of points, (..., D), and a library of arrays


def sphere(z: Any, lib: Any) -> Any:
    return (z**2).sum(-1)


def rosenbrock(z: Any, lib: Any) -> Any:
    z = z + 1
    return (100 * (z[..., 1:] - z[..., :-1] ** 2) ** 2 + (1 - z[..., :-1]) ** 2).sum(-1)


def rastrigin(z: Any, lib: Any) -> Any:
    return 10 * DIMENSIONS + (z**2 - 10 * lib.cos(2 * np.pi * z)).sum(-1)


FUNCTIONS: dict[str, Function] = {"sphere": sphere, "rosenbrock": rosenbrock, "rastrigin": rastrigin}
STRATEGIES: dict[str, AnyStrategy] = {
    "openai-es": OpenAIES(population=POPULATION, sigma=FIXED, lr=RATE),
    "snes": SNES(population=POPULATION, sigma=SIGMA).bind(Genome.from_module(torch.nn.Linear(DIMENSIONS - 1, 1))),
    "mu-lambda": MuLambda(population=POPULATION, parents=12, sigma=SIGMA, plus=False),
    "ga": GA(population=POPULATION, parents=12, elites=2, sigma=MUTATION),
    "pso": PSO(population=POPULATION, sigma=SIGMA),
}


def minimum_of(seed: int) -> Any:
    """Return the place of the minimum."""
    return np.random.default_rng(seed).uniform(-2, 2, DIMENSIONS)


def germline(strategy: AnyStrategy, function: Function, seed: int, generations: int) -> float:
    """Return the value that a strategy of this package ends with."""
    genome = Genome.from_module(nn.Linear(DIMENSIONS, 1, bias=False))
    field, state = strategy.field(seed, genome), strategy.init(torch.zeros(DIMENSIONS))
    minimum, members = torch.from_numpy(minimum_of(seed)), np.arange(strategy.population)
    for generation in range(generations):
        values = strategy.values(state, generation)
        points = strategy.ask(state, field, generation, values).weights(members, 0, DIMENSIONS)
        scores = function(points.double() - minimum, torch).float().numpy()
        state = strategy.tell(state, GenerationResult(generation, scores, values), field, maximize=False)
    return float(function(state.theta.double() - minimum, torch))


def evosax(name: str, function: Function, seed: int, generations: int) -> float:
    """Return the value that evosax's algorithm ends with."""
    jax, jnp, optax = import_module("jax"), import_module("jax.numpy"), import_module("optax")
    algorithms = import_module("evosax.algorithms")
    origin, minimum = jnp.zeros(DIMENSIONS), jnp.asarray(minimum_of(seed))
    key = jax.random.key(seed)

    def value(x: Any) -> Any:
        return function(x - minimum, jnp)

    if name == "openai-es":
        schedule = optax.constant_schedule(FIXED)
        search = algorithms.Open_ES(POPULATION, origin, optimizer=optax.adam(RATE), std_schedule=schedule)
    elif name == "snes":
        search = algorithms.SNES(POPULATION, origin)
    elif name == "ga":
        search = algorithms.SimpleGA(POPULATION, origin, std_schedule=optax.constant_schedule(MUTATION))
    else:
        search = algorithms.PSO(POPULATION, origin)
    settings = search.default_params
    if name == "snes":
        settings = settings.replace(std_init=SIGMA)
    if name in ("openai-es", "snes"):
        state = search.init(key, origin, settings)
    else:
        first = SIGMA * jax.random.normal(jax.random.key(seed + 1000), (POPULATION, DIMENSIONS))
        state = search.init(key, first, value(first), settings)

    def step(state: Any, key: Any) -> Any:
        key_ask, key_tell = jax.random.split(key)
        points, state = search.ask(key_ask, state, settings)
        state, _ = search.tell(key_tell, points, value(points), state, settings)
        return state, None

    state, _ = jax.lax.scan(step, state, jax.random.split(key, generations))
    return float(value(state.mean)) if name in ("openai-es", "snes") else float(state.best_fitness)


def nevergrad(name: str, function: Function, seed: int, generations: int) -> float:
    """Return the better of the values that nevergrad's two evolution strategies end with."""
    library = import_module("nevergrad")
    minimum, values = minimum_of(seed), []
    for kind in ("ES", "RecES"):
        parameter = library.p.Array(init=np.zeros(DIMENSIONS)).set_mutation(sigma=SIGMA)
        parameter.random_state.seed(seed)
        search = library.optimizers.registry[kind](parametrization=parameter, budget=generations * POPULATION)
        best = search.minimize(lambda x: float(function(x - minimum, np)))
        values.append(float(function(best.value - minimum, np)))
    return min(values)


def find_peer(name: str) -> tuple[str, Callable[..., float]] | None:
    """Return the library that has the same algorithm, and the function that runs it, if it is installed."""
    library, run = ("nevergrad", nevergrad) if name == "mu-lambda" else ("evosax", evosax)
    return (library, run) if find_spec(library) else None


def format_quartiles(values: list[float]) -> str:
    """Return the median and the quartiles as text."""
    low, middle, high = np.quantile(values, [0.25, 0.5, 0.75])
    return f"{middle:.4g} ({low:.3g} to {high:.3g})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=11, help="number of seeds (default 11)")
    parser.add_argument("--evaluations", type=int, default=20_000, help="evaluations of each run (default 20000)")
    parser.add_argument(
        "--strategy", choices=STRATEGIES, action="append", help="a strategy; give it several times for more"
    )
    parser.add_argument("--no-peers", action="store_true", help="run no other library")
    parser.add_argument("--json", action="store_true", help="print all values as one JSON object in the last line")
    arguments = parser.parse_args()
    generations = arguments.evaluations // POPULATION
    print(f"{DIMENSIONS} dimensions, {arguments.evaluations} evaluations, medians of {arguments.seeds} seeds")
    print(f"{'':12} {'function':12} {'here':>30} {'peer':>30} {'ratio':>8}")
    results: dict[str, Any] = {}
    for name in arguments.strategy or STRATEGIES:
        strategy, peer, wins = STRATEGIES[name], None if arguments.no_peers else find_peer(name), 0
        for label, function in FUNCTIONS.items():
            began, seeds = time.perf_counter(), range(arguments.seeds)
            values = [germline(strategy, function, seed, generations) for seed in seeds]
            line, row = f"{name:12} {label:12} {format_quartiles(values):>30}", {"here": values}
            if peer is not None:
                others = [peer[1](name, function, seed, generations) for seed in seeds]
                ratio = float(np.median(values) / np.median(others))
                wins += ratio <= 1
                row |= {"peer": others}
                line += f" {format_quartiles(others):>30} {ratio:8.2f}  {peer[0]}"
            results[f"{name} {label}"] = row
            print(f"{line}   ({time.perf_counter() - began:.0f} s)", flush=True)
        if peer is not None:
            print(f"{name:12} at least as good on {wins} of 3, goal 2{'' if wins >= 2 else '  (missed)'}")
    if arguments.json:
        print(json.dumps(results))


if __name__ == "__main__":
    main()
