"""gl.Gym against episodes that plain copies of the policy play one by one in Gymnasium's own environments."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from torch import Tensor, nn

import germline as gl
from germline.engine import opening
from germline.engine.journal import Journal
from germline.engine.replay import verify
from germline.errors import BadInput
from germline.genome import Genome
from germline.noise import Field, Stream
from germline.rl.environments import Environments, LocalEnvironments, find_maker
from germline.rl.processes import ProcessEnvironments
from germline.simulators import SEED_LIMIT, draw_seed

GERMLINE = [sys.executable, "-m", "germline"]


class Memory(nn.Module):
    """A recurrent policy."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.GRUCell(4, 6), nn.Linear(6, 2)

    def forward(self, x: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        state = self.cell(x, state)
        return self.head(state), state


def play_alone(
    make: Callable[[], Any], module: nn.Module, seed: int, act: Callable[[Tensor], Any]
) -> tuple[float, int]:
    """Return the return and the steps of one episode, by gymnasium's own environment."""
    environment, total, steps, state = make(), 0.0, 0, None
    observation, _ = environment.reset(seed=seed)
    while True:
        x = torch.from_numpy(np.asarray(observation, np.float32))[None]
        output = module(x) if state is None else module(x, state)
        if isinstance(output, tuple):
            output, state = output
        observation, reward, terminated, truncated, _ = environment.step(act(output[0]))
        total, steps = total + float(reward), steps + 1
        if terminated or truncated:
            return total, steps


def member_scores(search: gl.Search, make: Callable[[], Any], episodes: int, act: Callable[[Tensor], Any]) -> Any:
    """Return the mean return of each member of the first generation, and the steps of all."""
    session = search._session
    seed = draw_seed(session.seed, session.generation)
    seeds = Field(seed).below(SEED_LIMIT, episodes, 0, Stream.BATCH).tolist()
    values = session.values(session.generation)
    candidates = session.strategy.ask(session.state, session.noise, session.generation, values)
    genome, module, scores, steps = session.scorer.genome, search._module, [], 0
    assert isinstance(genome, Genome)
    for member in range(session.strategy.population):
        genome.write(candidates.weights(np.array([member]), 0, genome.size)[0], module)
        with torch.no_grad():
            played = [play_alone(make, module, seed, act) for seed in seeds]
        scores.append(np.mean([total for total, _ in played]))
        steps += sum(count for _, count in played)
    return np.array(scores, np.float32), steps


@pytest.mark.parametrize("make_policy", [lambda: nn.Linear(4, 2), Memory])
def test_cartpole_is_that_of_gymnasium(make_policy: Callable[[], nn.Module]) -> None:
    """The vectorized CartPole begins each episode as the single one does, and ends it at the same step."""
    objective = gl.Gym("CartPole-v1", episodes=3)
    search = gl.Search(gl.seeded(1, make_policy), gl.OpenAIES(population=6, sigma=0.5), objective=objective)
    expected, steps = member_scores(search, lambda: gymnasium.make("CartPole-v1"), 3, lambda y: int(y.argmax()))
    np.testing.assert_allclose(search.step(), expected, rtol=1e-6)
    assert search._session.samples == steps


@pytest.mark.parametrize("actions", ["clip", "squash"])
def test_pendulum_is_that_of_gymnasium(actions: Any) -> None:
    def act(y: Tensor) -> Any:
        return (2 * torch.tanh(y) if actions == "squash" else y.clamp(-2, 2)).numpy()

    objective = gl.Gym("Pendulum-v1", actions=actions, max_steps=30)
    search = gl.Search(gl.seeded(1, lambda: nn.Linear(3, 1)), gl.OpenAIES(population=4), objective=objective)
    expected, _ = member_scores(search, lambda: gymnasium.make("Pendulum-v1", max_episode_steps=30), 1, act)
    np.testing.assert_allclose(search.step(), expected, rtol=1e-4)


def test_a_factory_of_vectorized_environments() -> None:
    def make(num_envs: int) -> Any:
        return gymnasium.vector.SyncVectorEnv([lambda: gymnasium.make("CartPole-v1")] * num_envs)

    scores = []
    for environment in (make, "CartPole-v1", lambda: gymnasium.make("CartPole-v1")):
        search = gl.Search(nn.Linear(4, 2), gl.OpenAIES(population=4), objective=gl.Gym(environment, episodes=2))
        for parameter in search._module.parameters():
            nn.init.zeros_(parameter)
        search = gl.Search(search._module, gl.OpenAIES(population=4), objective=gl.Gym(environment, episodes=2))
        scores.append(search.step().tolist())
    assert scores[0] == scores[1] == scores[2]


def test_envpool_is_taken_where_it_is_faster_and_keeps_the_bits() -> None:
    """Any number of environments and threads gives the same episodes; CI does not have envpool, which is large."""
    pytest.importorskip("envpool")
    hashes, metrics = set(), []
    for block, processes in ((None, 2), (3, 1)):
        objective = gl.Gym("LunarLander-v3", max_steps=50, dev_episodes=2, block=block, processes=processes)
        assert objective.name == "LunarLander-v3 of envpool"
        model = gl.seeded(0, lambda: nn.Linear(8, 4))
        result = gl.train(
            model, objective=objective, strategy=gl.OpenAIES(population=8), generations=2, run=False, progress=False
        )
        hashes.add(result.summary["theta_sha256"])
        metrics.append(result.summary["metrics"])
    assert len(hashes) == 1
    assert metrics[0] == metrics[1]
    assert gl.Gym("HalfCheetah-v5").name == "HalfCheetah-v5"


def test_a_run_goes_on_with_its_simulator_only(tmp_path: Path) -> None:
    train(tmp_path / "run", 1)
    objective = gl.Gym("Pendulum-v1", max_steps=20)
    objective.environment = lambda: gymnasium.make("Pendulum-v1")  # as on a machine that takes another simulator
    with pytest.raises(BadInput, match="The simulator is not that of"):
        gl.train(policy(), objective=objective, resume=tmp_path / "run", generations=2)


def policy() -> nn.Module:
    return gl.seeded(0, lambda: nn.Sequential(gl.Normalize(3), nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)))


def train(run: Path, generations: int, **more: Any) -> gl.Result:
    objective = gl.Gym("Pendulum-v1", max_steps=20, dev_episodes=2, test_episodes=3, action_noise=0.1)
    strategy = gl.OpenAIES(population=8, sigma=0.1)
    return gl.train(
        policy(), objective=objective, strategy=strategy, generations=generations, evaluate_every=2, run=run, **more
    )


def test_statistics_of_observations_are_resumed_and_replayed_without_a_simulator(tmp_path: Path) -> None:
    straight = train(tmp_path / "straight", 6)
    train(tmp_path / "resumed", 3)
    objective = gl.Gym("Pendulum-v1", max_steps=20, dev_episodes=2, test_episodes=3, action_noise=0.1)
    resumed = gl.train(policy(), objective=objective, resume=tmp_path / "resumed", generations=6)
    assert resumed.summary["theta_sha256"] == straight.summary["theta_sha256"]
    assert torch.equal(resumed.model[0].mean, straight.model[0].mean)  # type: ignore[index]
    journal = Journal.open(tmp_path / "straight")
    sums = np.sum([record.info["observations"] for record in journal.records()], 0)
    assert sums[0] == 6 * 8 * 20 == straight.summary["samples"]
    mean = sums[1:4] / sums[0]
    np.testing.assert_allclose(straight.model[0].mean, mean, rtol=1e-6)  # type: ignore[index]
    assert verify(opening.open_for_replay(journal))["theta_sha256"] == straight.summary["theta_sha256"]
    metrics = straight.summary["metrics"]
    assert {"dev_return", "test_return", "test_steps"} <= set(metrics)
    report = (tmp_path / "straight" / "report.html").read_text()
    assert "steps of the simulator" in report
    assert "data:image/gif" in report


def test_interactions_are_a_limit() -> None:
    objective = gl.Gym("Pendulum-v1", max_steps=20, dev_episodes=0, test_episodes=0)
    result = gl.train(policy(), objective=objective, strategy=gl.OpenAIES(population=8), interactions=400, run=False)
    assert result.summary["samples"] == 480
    assert result.summary["stopped_by"] == "interactions"


def test_the_reward_hook_is_for_training_alone() -> None:
    def reward(rewards: Any, observations: Any, actions: Any, ended: Any) -> Any:
        return np.zeros_like(rewards) + 2.0

    objective = gl.Gym("Pendulum-v1", max_steps=20, dev_episodes=2, test_episodes=2, reward=reward)
    result = gl.train(policy(), objective=objective, strategy=gl.OpenAIES(population=8), generations=1, run=False)
    assert result.history[0]["best"] == 40.0
    assert result.summary["metrics"]["test_return"] < 0


@pytest.mark.slow
def test_an_environment_that_could_not_be_drawn_is_not_drawn_again() -> None:
    """MuJoCo without OpenGL raises an error at first, and aborts the process when it is asked once more."""
    program = (
        "import warnings; warnings.simplefilter('ignore')\n"
        "from germline.rl.environments import make_environment\n"
        "from germline.rl.picture import draw_episode\n"
        "settings = {'render_mode': 'rgb_array', 'max_episode_steps': 3}\n"
        "for name in ('Swimmer-v5', 'Swimmer-v5', 'HalfCheetah-v5'):\n"
        "    action = make_environment(name, settings).action_space.sample()\n"
        "    drawn = draw_episode(lambda: make_environment(name, settings), lambda x, state: (action, None), 0)\n"
        "    print(drawn is not None)\n"
    )
    environment = {key: value for key, value in os.environ.items() if key != "DISPLAY"} | {"MUJOCO_GL": "glfw"}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert len(set(done.stdout.split())) == 1, done.stdout


def test_mistakes_are_sentences() -> None:
    with pytest.raises(BadInput, match="There is no environment 'CartPool-v1'"):
        gl.Gym("CartPool-v1")
    with pytest.raises(BadInput, match="at least one episode"):
        gl.Gym("CartPole-v1", episodes=0)
    with pytest.raises(BadInput, match="envpool is not installed, or does not have HalfCheetah-v5"):
        gl.Gym("HalfCheetah-v5", envpool=True)
    with pytest.raises(BadInput, match="counts them"):
        gl.train(nn.Linear(2, 1), objective=lambda net: 0.0, interactions=10, run=False)
    with pytest.raises(BadInput, match="cannot be run on inputs of shape"):
        gl.train(nn.Linear(5, 2), objective=gl.Gym("CartPole-v1"), generations=1, run=False)


def test_spaces_that_cannot_be_used_are_sentences() -> None:
    def make() -> Any:
        environment = gymnasium.make("Pendulum-v1")
        environment.observation_space = gymnasium.spaces.Dict({"angle": environment.observation_space})
        return environment

    with pytest.raises(BadInput, match="The observations of make are Dict"):
        gl.train(policy(), objective=gl.Gym(make), generations=1, run=False)

    def make_unbounded() -> Any:
        environment = gymnasium.make("Pendulum-v1")
        environment.action_space = gymnasium.spaces.Box(-np.inf, np.inf, (1,))
        return environment

    with pytest.raises(BadInput, match="no bounds into which to squash"):
        gl.train(policy(), objective=gl.Gym(make_unbounded, actions="squash"), generations=1, run=False)


@pytest.mark.slow
def test_environments_in_processes_are_those_of_this_process() -> None:
    _, make = find_maker("LunarLander-v3", {})
    sets: list[Environments] = [LocalEnvironments(make, 5), ProcessEnvironments(make, 5, 2)]
    seeds, actions = np.array([3, 1, 4, 1, 5]), np.random.default_rng(0).integers(0, 4, (60, 5))
    histories = []
    for environments in sets:
        history, active = [environments.reset(seeds).copy()], np.ones(5, bool)
        for row in actions:
            observations, rewards, ended = environments.step(row, active)
            history += [np.where(active[:, None], observations, 0), np.where(active, rewards, 0), ended & active]
            active = active & ~ended
        histories.append(history)
        environments.close()
    assert all(np.array_equal(a, b) for a, b in zip(*histories, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("has_ended", [False, True])
def test_a_process_that_ends_is_an_error(has_ended: bool) -> None:
    environments = ProcessEnvironments(find_maker("Pendulum-v1", {})[1], 2, 2)
    environments.reset(np.array([1, 2]))
    environments.processes[1].kill()
    if has_ended:
        environments.processes[1].wait()
    with pytest.raises(RuntimeError, match="A process of environments has ended"):
        environments.step(np.zeros((2, 1)), np.ones(2, bool))


def run_command(*words: str) -> dict[str, Any]:
    done = subprocess.run([*GERMLINE, *words, "--json"], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    summary: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return summary


@pytest.mark.slow
def test_every_fleet_has_one_hash(tmp_path: Path) -> None:
    fleets = {
        "local": (),
        "spmd-2": ("--fleet", "spmd", "--workers", "2"),
        "spmd-3": ("--fleet", "spmd", "--workers", "3"),
        "elastic": ("--fleet", "elastic", "--workers", "2"),
    }
    words = ("train", "cartpole", "--generations", "6", "--name")
    hashes = {name: run_command(*words, str(tmp_path / name), *fleet)["theta_sha256"] for name, fleet in fleets.items()}
    assert len(set(hashes.values())) == 1, hashes


@pytest.mark.slow
def test_a_killed_run_goes_on(tmp_path: Path) -> None:
    straight = run_command("train", "cartpole", "--generations", "12", "--name", str(tmp_path / "straight"))
    run = tmp_path / "killed"
    words = [*GERMLINE, "train", "cartpole", "--generations", "12", "--name", str(run)]
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while process.poll() is None and time.monotonic() < deadline:
        if (run / "journal.sqlite").is_file() and count_records(run) >= 3:
            os.kill(process.pid, signal.SIGKILL)
            break
        time.sleep(0.01)
    process.wait()
    assert count_records(run) < 12
    assert run_command("resume", str(run))["theta_sha256"] == straight["theta_sha256"]
    assert run_command("verify", str(run))["theta_sha256"] == straight["theta_sha256"]


def count_records(run: Path) -> int:
    journal = Journal.open(run, read_only=True)
    try:
        return sum(1 for _ in journal.records())
    finally:
        journal.close()
