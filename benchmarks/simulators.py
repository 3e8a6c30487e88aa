"""Policy steps per second of gl.Gym, and how fast its recipes learn.

    python benchmarks/simulators.py speed      # gl.Gym, a loop by hand with one bmm per step, and EvoTorch's GymNE
    python benchmarks/simulators.py train cartpole --seeds 5 [--first-seed 3] [--results FILE]
    python benchmarks/simulators.py peers --seeds 3 --evosax peers/bin/python
    python benchmarks/simulators.py wire       # bytes of a generation of 1,000 chains of mutations

``speed`` runs CartPole with one population on the same environments; the figures are medians of rounds in one run. A
step is one step of one environment by one member. ``train`` prints the steps and seconds of training at which the
center first reached a return on held-out episodes, and its return on 100 other held-out episodes at that point.
``peers`` runs EvoTorch's and evosax's examples of CartPole, and ours on as many steps; ``evosax_cartpole.py`` says what
evosax needs.
"""

import argparse
import importlib
import json
import logging
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import torch
from torch import nn

import germline as gl
from germline.engine.journal import Journal
from germline.recipes import make_recipe
from germline.simulators import SingleMember

POPULATION, EPISODES, STEPS = 64, 4, 200
GOALS = {"cartpole": 475.0, "lunar-lander": 200.0, "swimmer": 128.0, "half-cheetah": 2386.0}
LIMITS = {"cartpole": 2_000_000, "lunar-lander": 3_000_000, "swimmer": 1_390_000, "half-cheetah": 2_880_000}


def keep_up(members: int) -> nn.Module:
    """Return a policy that balances the pole for long, so that all loops run the same number of steps."""
    policy = nn.Linear(4, 2)
    with torch.no_grad():
        policy.weight.copy_(torch.tensor([[-0.1, -0.3, -2.0, -1.5], [0.1, 0.3, 2.0, 1.5]]))
        policy.bias.zero_()
    return policy


def time_germline(hidden: int) -> Callable[[], float]:
    """Return a function that plays a generation by gl.Gym and returns its steps per second."""
    objective = gl.Gym("CartPole-v1", episodes=EPISODES, max_steps=STEPS, dev_episodes=0, test_episodes=0)
    strategy = gl.OpenAIES(population=POPULATION, sigma=0.02, lr=1e-6)
    search = gl.Search(make_policy(hidden), strategy, objective=objective)

    def run() -> float:
        before, started = search._session.samples, time.perf_counter()
        search.step()
        return (search._session.samples - before) / (time.perf_counter() - started)

    return run


def make_policy(hidden: int) -> nn.Module:
    """Return the policy of all loops: linear, or with one hidden layer."""
    policy = keep_up(POPULATION)
    return policy if not hidden else gl.seeded(0, lambda: widen(policy, hidden))


def widen(policy: nn.Module, hidden: int) -> nn.Module:
    """Return a policy with a hidden layer of small weights next to nothing else, which does the same."""
    first, last = nn.Linear(4, hidden), nn.Linear(hidden, 2)
    with torch.no_grad():
        first.weight.mul_(0.01)
        first.weight[:4] = 0.1 * torch.eye(4)
        last.weight[:, :4] = 10 * policy.weight  # type: ignore[operator]
        last.weight[:, 4:].mul_(0.01)
        first.bias.zero_()
        last.bias.zero_()
    return nn.Sequential(first, nn.Tanh(), last)


def time_by_hand(hidden: int) -> Callable[[], float]:
    """Return a function that plays as many episodes by one vectorized environment and one product per layer."""
    environment = gymnasium.make_vec("CartPole-v1", POPULATION * EPISODES, vectorization_mode="vector_entry_point")
    policy = make_policy(hidden)
    layers = [part for part in policy.modules() if isinstance(part, nn.Linear)]
    weights = [
        (layer.weight.detach().T.expand(POPULATION, -1, -1), layer.bias.detach().expand(POPULATION, 1, -1))
        for layer in layers
    ]
    generator = torch.Generator().manual_seed(0)

    def run() -> float:
        noisy = [tuple(x + 0.02 * torch.randn(x.shape, generator=generator) for x in pair) for pair in weights]
        started, total = time.perf_counter(), 0
        observations, _ = environment.reset(seed=0)
        active, returns = np.ones(POPULATION * EPISODES, bool), np.zeros(POPULATION * EPISODES)
        with torch.no_grad():
            for _ in range(STEPS):
                x = torch.from_numpy(observations).view(POPULATION, EPISODES, 4)
                for i, (weight, bias) in enumerate(noisy):
                    x = torch.baddbmm(bias, x.tanh() if i else x, weight)
                actions = x.view(-1, 2).numpy().argmax(1)
                observations, rewards, terminated, truncated, _ = environment.step(actions)
                returns += np.where(active, rewards, 0)
                total += int(active.sum())
                active &= ~(terminated | truncated)
                if not active.any():
                    break
        return total / (time.perf_counter() - started)

    return run


def time_evotorch(hidden: int, vectorized: bool) -> Callable[[], float]:
    """Return a function that evaluates a generation by EvoTorch and returns its steps per second."""
    problems = importlib.import_module("evotorch.neuroevolution")
    settings: dict[str, Any] = {"num_episodes": EPISODES, "observation_normalization": False}
    policy = make_policy(hidden)
    if vectorized:
        settings["env"] = lambda num_envs, **kwargs: gymnasium.make_vec(
            "CartPole-v1", num_envs, max_episode_steps=STEPS
        )
    else:
        settings["env"] = lambda **kwargs: gymnasium.make("CartPole-v1", max_episode_steps=STEPS)
    problem: Any = (problems.VecGymNE if vectorized else problems.GymNE)(network=policy, **settings)
    center = torch.nn.utils.parameters_to_vector(policy.parameters()).detach()
    generator = torch.Generator().manual_seed(0)

    def run() -> float:
        batch = problem.generate_batch(POPULATION)
        batch.set_values(center + 0.02 * torch.randn(POPULATION, center.numel(), generator=generator))
        started = time.perf_counter()
        problem.evaluate(batch)
        seconds = time.perf_counter() - started
        return float(batch.evals.sum()) * EPISODES / seconds  # every step has the reward 1

    return run


def measure_speed(rounds: int) -> None:
    torch.set_num_threads(1)
    for hidden in (0, 32):
        kinds: dict[str, Callable[[], float]] = {"gl.Gym": time_germline(hidden), "by hand": time_by_hand(hidden)}
        for name, vectorized in (("EvoTorch GymNE", False), ("EvoTorch VecGymNE", True)):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                try:
                    kinds[name] = time_evotorch(hidden, vectorized)
                    kinds[name]()
                except Exception as error:
                    kinds.pop(name, None)
                    print(f"{name} does not run here: {type(error).__name__}: {str(error).splitlines()[0][:120]}")
        speeds: dict[str, list[float]] = {name: [] for name in kinds}
        for name in ("gl.Gym", "by hand"):
            for _ in range(3):
                kinds[name]()
        for _ in range(rounds):
            for name in ("gl.Gym", "by hand"):
                speeds[name].append(kinds[name]())
        for name in [name for name in kinds if "EvoTorch" in name]:
            speeds[name] = [kinds[name]() for _ in range(3)]
        ours = statistics.median(speeds["gl.Gym"])
        print(f"CartPole, population {POPULATION} x {EPISODES} episodes, hidden {hidden}:")
        for name, values in speeds.items():
            median = statistics.median(values)
            print(f"  {name:18s} {median:12,.0f} steps/s   gl.Gym is {ours / median:.2f} times as fast")


def train_recipe(name: str, seeds: int, first: int, file: Path | None) -> None:
    """Train a recipe with some seeds, and print the medians of these and of those that a file holds already."""
    stored = json.loads(file.read_text()) if file is not None and file.is_file() else {}
    results: dict[str, Any] = stored.setdefault(name, {})
    for seed in range(first, first + seeds):
        parts = make_recipe(name, {}, seed)
        with tempfile.TemporaryDirectory() as folder:
            result = gl.train(
                parts.model,
                objective=parts.objective,
                strategy=parts.strategy,
                evaluate_every=parts.evaluate_every,
                target=("dev_return", GOALS[name] * (1.05 if name != "cartpole" else 1.0)),
                interactions=LIMITS[name],
                seed=seed,
                run=f"{folder}/run",
                progress=False,
            )
        summary = result.summary
        test, steps, seconds = (
            summary["metrics"]["test_return"],
            summary["samples"],
            result.history[-1]["total_seconds"],
        )
        results[str(seed)] = test, steps, seconds
        if file is not None:
            file.write_text(json.dumps(stored))
        print(
            f"{name}, seed {seed}: return {test:.1f} on 100 held-out episodes after {steps:,} steps, {seconds:.1f} s",
            flush=True,
        )
    test, steps, seconds = (statistics.median(column) for column in zip(*results.values(), strict=True))
    figures = f"return {test:.1f} (goal {GOALS[name]:g}), {steps:,.0f} steps, {seconds:.1f} s"
    print(f"{name}, medians of {len(results)}: {figures}")


def run_evotorch(seed: int) -> tuple[float, float, int]:
    """Run EvoTorch's example of CartPole and return its center's return on held-out episodes, its seconds and steps.

    It is "Solving reinforcement learning tasks using functional evolutionary algorithms" in EvoTorch's documentation:
    PGPE with ClipUp, a population of 100, a hidden layer of 16, 40 generations.
    """
    functional = importlib.import_module("evotorch.algorithms.functional")
    problems = importlib.import_module("evotorch.neuroevolution")
    torch.manual_seed(seed)
    started = time.perf_counter()
    network = "Linear(obs_length, 16) >> Tanh() >> Linear(16, act_length)"
    problem: Any = problems.GymNE("CartPole-v1", network, observation_normalization=True)
    evaluate, speed = problem.make_callable_evaluator(), 0.15
    state = functional.pgpe(
        center_init=problem.make_zeros(num_solutions=1)[0],
        radius_init=15 * speed,
        center_learning_rate=0.75 * speed,
        stdev_learning_rate=0.1,
        stdev_max_change=0.2,
        ranking_method="centered",
        optimizer="clipup",
        optimizer_config={"max_speed": speed},
        symmetric=True,
        objective_sense="max",
    )
    for _ in range(40):
        population = functional.pgpe_ask(state, popsize=100)
        state = functional.pgpe_tell(state, population, evaluate(population))
    seconds, policy = time.perf_counter() - started, problem.to_policy(state.optimizer_state.center)
    test = gl.Gym("CartPole-v1").measure(SingleMember(policy), "test", seed)["return"]
    return test, seconds, int(problem.interaction_count)


def run_evosax(python: str, seed: int) -> tuple[float, float, int]:
    """Run evosax's example of CartPole by another interpreter, and return what ``run_evotorch`` returns.

    The return is that of the better one of its mean and of the best member that it has seen.
    """
    script = Path(__file__).with_name("evosax_cartpole.py")
    done = subprocess.run([python, script, str(seed)], capture_output=True, text=True)
    if done.returncode:
        raise ImportError(done.stderr.strip().splitlines()[-1])
    figures = json.loads(done.stdout.splitlines()[-1])
    print("evosax: mean {mean:.1f}, best member {best:.1f}".format(**figures))
    return max(figures["mean"], figures["best"]), figures["seconds"], figures["steps"]


def run_like_evotorch(seed: int, steps: int) -> tuple[float, float, int]:
    """Run EvoTorch's example rewritten: the same policy, population and number of steps."""
    layers = lambda: nn.Sequential(gl.Normalize(4), nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 2))  # noqa: E731
    return run_germline(layers, gl.Gym("CartPole-v1", dev_episodes=0), 100, seed, steps)


def run_like_evosax(seed: int, steps: int) -> tuple[float, float, int]:
    """Run evosax's example rewritten: the same policy, population, episodes and number of steps."""
    layers = lambda: nn.Sequential(  # noqa: E731
        gl.Normalize(4), nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2)
    )
    objective = gl.Gym("CartPole-v1", episodes=16, dev_episodes=0, max_episode_steps=200)
    return run_germline(layers, objective, 128, seed, steps)


def run_germline(
    layers: Callable[[], nn.Module], objective: gl.Gym, population: int, seed: int, steps: int
) -> tuple[float, float, int]:
    result = gl.train(
        gl.seeded(seed, layers),
        objective=objective,
        strategy=gl.OpenAIES(population=population, sigma=0.2, lr=0.1),
        interactions=steps,
        seed=seed,
        run=False,
        progress=False,
    )
    return result.summary["metrics"]["test_return"], result.history[-1]["total_seconds"], result.summary["samples"]


def compare_peers(seeds: int, evosax: str) -> None:
    """Print the returns of two libraries' examples of CartPole, and those of their Germline forms after as many steps.

    The peers' settings are those of their examples, ours were chosen once for both.
    """
    pairs: list[tuple[str, Callable[[int], Any], Callable[[int, int], Any]]] = [
        ("EvoTorch", run_evotorch, run_like_evotorch),
        ("evosax", partial(run_evosax, evosax), run_like_evosax),
    ]
    for name, run_original, run_ours in pairs:
        rows = []
        for seed in range(seeds):
            try:
                theirs = run_original(seed)
            except ImportError as error:
                print(f"{name} does not run here: {error}")
                break
            rows.append((*theirs, *run_ours(seed, theirs[2])))
            print(f"{name}, seed {seed}:", *(f"{value:,.1f}" for value in rows[-1]), flush=True)
        if rows:
            values = [statistics.median(column) for column in zip(*rows, strict=True)]
            print(f"CartPole as in the example of {name}, medians of {seeds} seeds, on 100 held-out episodes:")
            for who, (test, seconds, steps) in ((name, values[:3]), ("Germline", values[3:])):
                print(f"  {who:9s} return {test:6.1f} after {steps:,.0f} steps, {seconds:6.1f} s")


def recipe(*, seed: int = 0) -> gl.Recipe:
    """Return the recipe of ``measure_wire``, which its workers load from this file."""
    return gl.Recipe(
        model=gl.seeded(seed, lambda: nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 2))),
        objective=gl.Gym("CartPole-v1", max_steps=100, dev_episodes=1, test_episodes=1, block=250),
        strategy=gl.DeepGA(population=1000, parents=20, sigma=0.1),
    )


def measure_wire(generations: int) -> None:
    """Print the bytes that an elastic fleet sends and receives in a generation of 1,000 chains."""
    fleet, parts = gl.Elastic(workers=2, recipe=str(Path(__file__).resolve())), recipe()
    with tempfile.TemporaryDirectory() as folder:
        try:
            gl.train(
                parts.model,
                objective=parts.objective,
                strategy=parts.strategy,
                generations=generations,
                fleet=fleet,
                run=f"{folder}/run",
                progress=False,
            )
        finally:
            with suppress(Exception):
                fleet.close(ended=True)
        traffic = [record.info["bytes"] for record in Journal.open(Path(folder, "run")).records()]
    sent, received = (statistics.median(column) / 1000 for column in zip(*traffic, strict=True))
    print(f"deep-ga, 1,000 members, 2 workers, median of {generations} generations: ", end="")
    print(f"{sent:.1f} kB sent, {received:.1f} kB received; {sum(map(sum, traffic)) / 1e6:.2f} MB in all, with joining")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("speed", "train", "wire", "peers"))
    parser.add_argument("recipe", nargs="?", choices=tuple(GOALS))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--results", type=Path, help="file to which the results of train are added")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--evosax", default=sys.executable, help="interpreter with evosax and gymnax, for peers")
    options = parser.parse_args()
    logging.getLogger("evotorch").setLevel(logging.WARNING)
    if options.what == "speed":
        measure_speed(options.rounds)
    elif options.what == "peers":
        compare_peers(options.seeds, options.evosax)
    elif options.what == "wire":
        measure_wire(10)
    else:
        train_recipe(options.recipe or "cartpole", options.seeds, options.first_seed, options.results)


if __name__ == "__main__":
    main()
