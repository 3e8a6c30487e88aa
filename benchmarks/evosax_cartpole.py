"""Run evosax's example of CartPole, in an environment of its own: gymnax and Germline need different gymnasiums.

    python -m venv peers && peers/bin/pip install evosax==0.3.2 gymnax==1.0.1 six
    peers/bin/python benchmarks/evosax_cartpole.py SEED

It is the example "Reinforcement Learning - Evolving MLP" (``examples/02_rl.ipynb``): SNES with Adam, a population of
128, two hidden layers of 64, 16 episodes of at most 200 steps, 64 generations. It runs all steps of episodes that have
ended. The example plots the best score of each generation; printed are, as one line of JSON, the returns of the mean
of the search distribution and of the best member that was ever seen, on 100 other episodes, the seconds of training,
and the steps.
"""

import importlib
import json
import sys
import time
from typing import Any

POPULATION, EPISODES, STEPS, GENERATIONS = 128, 16, 200, 64


def run_example(seed: int) -> dict[str, float]:
    """Train with a seed, and return the returns, the seconds and the steps."""
    jax, optax, algorithms = (importlib.import_module(name) for name in ("jax", "optax", "evosax.algorithms"))
    problems, networks = (importlib.import_module(f"evosax.problems{name}") for name in ("", ".networks"))
    key, started = jax.random.key(seed), time.perf_counter()
    policy = networks.MLP(layer_sizes=(64, 64, 2), output_fn=networks.categorical_output_fn)
    settings = {"env_name": "CartPole-v1", "policy": policy, "episode_length": STEPS, "use_normalize_obs": True}
    problem = problems.GymnaxProblem(num_rollouts=EPISODES, **settings)
    problem_state, solution = problem.init(key), problem.sample(key)
    strategy = algorithms.SNES(population_size=POPULATION, solution=solution, optimizer=optax.adam(learning_rate=0.01))
    params = strategy.default_params

    def step(carry: Any, key: Any) -> Any:
        state, problem_state = carry
        first, second, third = jax.random.split(key, 3)
        population, state = strategy.ask(first, state, params)
        fitness, problem_state, _ = problem.eval(second, population, problem_state)
        state, _ = strategy.tell(third, population, -fitness, state, params)
        return (state, problem_state), None

    begin = strategy.init(key, solution, params), problem_state
    (state, problem_state), _ = jax.lax.scan(step, begin, jax.random.split(key, GENERATIONS))
    jax.block_until_ready(state)
    seconds = time.perf_counter() - started
    best = strategy._unravel_solution(state.best_solution)
    two = jax.tree.map(lambda *arrays: jax.numpy.stack(arrays), strategy.get_mean(state), best)
    held_out = problems.GymnaxProblem(num_rollouts=100, **settings)
    fitness, _, _ = held_out.eval(jax.random.key(1000 + seed), two, problem_state)
    steps = GENERATIONS * POPULATION * EPISODES * STEPS
    return {"mean": float(fitness[0]), "best": float(fitness[1]), "seconds": seconds, "steps": steps}


if __name__ == "__main__":
    print(json.dumps(run_example(int(sys.argv[1]))))
