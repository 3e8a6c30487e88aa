"""Environments of Gymnasium as an objective: members play episodes, all in step, one population forward per step."""

import copy
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from germline.errors import BadInput
from germline.noise import ADDRESS_LIMIT, Field, Stream
from germline.normalization import find_normalization
from germline.rl.environments import (
    Array,
    Environments,
    EnvpoolEnvironments,
    LocalEnvironments,
    VectorEnvironments,
    find_maker,
    is_in_envpool,
    make_environment,
)
from germline.rl.processes import ProcessEnvironments
from germline.simulators import SEED_LIMIT, MembersLike, PopulationObjective, SingleMember

SLOW_STEP = 30e-6  # seconds of a step from which environments are stepped by several processes
TIMED_STEPS = 20
HELD_OUT = {"dev": ADDRESS_LIMIT - 2, "test": ADDRESS_LIMIT - 3}  # addresses of the seeds of held-out episodes
NO_LIMIT = 1 << 31  # steps of an episode

Actions = Literal["auto", "argmax", "clip", "squash"] | Callable[[Array], Array]


class Gym(PopulationObjective):
    """The mean return of some episodes, to be maximized, for ``objective=`` in ``gl.train``, ``Search`` and recipes.

    Every member plays the same episodes: their seeds are functions of the run's seed and the generation. The policy
    gets observations of shape (episodes, ...) and returns one row of numbers for each. A recurrent policy takes
    (observations, state) and returns (output, state); its first call in a generation has no state.

    Args:
        environment: The name of an environment, a function that returns one, or a function of ``num_envs`` that returns
            a vectorized one, whose ``reset`` takes a list of seeds.
        episodes: Episodes of each member in a generation.
        max_steps: Steps after which an episode of training ends; the environment's own limit if not given, which
            always holds for held-out episodes.
        actions: How outputs become actions. ``"auto"`` is the largest of the outputs (``"argmax"``) for a discrete
            action and, for a continuous one, the output within the bounds of the action space: ``"clip"``, or
            ``"squash"`` by a hyperbolic tangent. Or a function of the array of outputs.
        action_noise: The standard deviation of noise on continuous actions, the same for all members.
        reward: A function of the arrays (reward, observation, action, ended) that returns the reward to train on.
        dev_episodes: Held-out episodes that the center plays when metrics are measured: ``dev_return``.
        test_episodes: Held-out episodes that the center plays at the end of a run: ``test_return``.
        processes: The number of processes that step environments; by default as many as torch has threads if a step
            is slow, else 1, which is this process.
        block: The most members that play at once.
        envpool: Whether envpool steps the environments; by default if it is installed and is faster, which is so for
            Box2D and those of classic control that gymnasium does not vectorize. Its episodes are not gymnasium's.
        settings: Further keyword arguments of the environment.

    >>> import germline as gl
    >>> policy = gl.seeded(0, lambda: nn.Linear(4, 2))
    >>> strategy = gl.OpenAIES(population=32, sigma=0.5, lr=0.3)
    >>> result = gl.train(policy, objective=gl.Gym("CartPole-v1"), strategy=strategy, generations=10, run=False)
    >>> result.summary["metrics"]["test_return"] > 100
    True
    """

    maximize = True

    def __init__(
        self,
        environment: str | Callable[..., Any],
        *,
        episodes: int = 1,
        max_steps: int | None = None,
        actions: Actions = "auto",
        action_noise: float = 0.0,
        reward: Callable[..., Any] | None = None,
        dev_episodes: int = 20,
        test_episodes: int = 100,
        processes: int | None = None,
        block: int | None = None,
        envpool: bool | None = None,
        **settings: Any,
    ) -> None:
        if episodes < 1:
            raise BadInput(f"A member plays at least one episode, not {episodes}.")
        self.environment, self.settings, self.episodes = environment, settings, episodes
        self.max_steps, self.actions, self.action_noise, self.reward = max_steps, actions, action_noise, reward
        self.held_out = {"dev": dev_episodes, "test": test_episodes}
        self.processes, self.block, self.columns, self.envpool = processes, block, 2, False
        self.splits = tuple(name for name, count in self.held_out.items() if count)
        find_maker(environment, settings)  # reports a name that does not exist
        self.envpool = envpool is not False and is_in_envpool(environment, settings)
        if envpool and not self.envpool:
            raise BadInput(f"envpool is not installed, or does not have {self.name} with these settings.")
        self._pool = Pool(environment, settings, processes, self.envpool)

    @property
    def name(self) -> str:
        """The name of the environment, and of envpool where it steps it."""
        if isinstance(self.environment, str):
            return f"{self.environment} of envpool" if self.envpool else self.environment
        return getattr(self.environment, "__name__", "gym")

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_pool"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._pool = Pool(self.environment, self.settings, self.processes, self.envpool)

    def bind(self, module: nn.Module) -> "Gym":
        """Return the objective that counts what a module's layers need which normalize observations."""
        layers = find_normalization(module)
        bound = copy.copy(self)
        bound._pool, bound.columns = self._pool, 2 + 2 * layers[0].size if layers else 2
        return bound

    def __call__(self, members: MembersLike, seed: int) -> NDArray[np.float64]:
        """Return the mean return of each member, its steps and, if the policy normalizes them, sums of observations."""
        seeds = Field(seed).below(SEED_LIMIT, self.episodes, 0, Stream.BATCH)
        returns, steps, sums = self.play(members, seeds, self.columns // 2 - 1, Field(seed))
        return np.concatenate([returns.mean(1, keepdims=True), steps.sum(1, keepdims=True), sums], 1)

    def measure(self, members: MembersLike, split: str, run_seed: int) -> dict[str, float]:
        """Return the mean return and length of held-out episodes."""
        seeds = Field(run_seed).below(SEED_LIMIT, self.held_out[split], 0, Stream.BATCH, member=HELD_OUT[split])
        returns, steps, _ = self.play(members, seeds, 0)
        return {"return": float(returns.mean()), "steps": float(steps.mean())}

    def play(
        self, members: MembersLike, seeds: Array, observed: int = 0, noise: Field | None = None
    ) -> tuple[NDArray[np.float64], NDArray[np.int64], NDArray[np.float64]]:
        """Let each member play an episode of each seed.

        Args:
            members: The members.
            seeds: The seeds of the episodes.
            observed: The number of observations whose sums are wanted, or 0.
            noise: The noise on actions, in training; there are a limit of steps and the reward hook as well.

        Returns:
            Returns and steps, (members, episodes), and for each member the sums of its observations and of their
            squares.
        """
        count, episodes = len(members), len(seeds)
        returns, steps = np.zeros(count * episodes), np.zeros(count * episodes, np.int64)
        sums, active, state = np.zeros((count, 2 * observed)), np.ones(count * episodes, bool), None
        has_hook = noise is not None and self.reward is not None
        with self._pool.take(count * episodes) as environments, torch.no_grad():
            observations = environments.reset(np.tile(seeds, count))
            x = torch.empty(count, episodes, *observations.shape[1:])  # at an aligned address, used again at every step
            rows = x.numpy().reshape(observations.shape)  # the same memory: numpy copies faster than torch
            limit = self.max_steps if noise is not None else None
            for step in range(limit or NO_LIMIT):
                np.copyto(rows, observations)
                if observed:
                    seen = (rows.astype(np.float64) * active[:, None]).reshape(count, episodes, -1)
                    sums[:, :observed] += seen.sum(1)
                    sums[:, observed:] += np.square(seen).sum(1)
                output = members.map(x) if state is None else members.map(x, state)
                if isinstance(output, tuple):
                    output, state = output
                    x = torch.empty_like(x)  # the state may refer to the old one
                    rows = x.numpy().reshape(observations.shape)
                actions = self.act(output, environments.space, noise, step)
                before = observations.copy() if has_hook else observations
                observations, rewards, ended = environments.step(actions, active)
                if has_hook:
                    assert self.reward is not None
                    rewards = np.asarray(self.reward(rewards, before, actions, ended), np.float64)
                np.add(returns, rewards, out=returns, where=active)
                steps += active
                np.greater(active, ended, out=active)
                if not np.count_nonzero(active):
                    break
        return returns.reshape(count, episodes), steps.reshape(count, episodes), sums

    def act(self, output: Tensor, space: Any, noise: Field | None, step: int) -> Array:
        """Return the actions of outputs, (members, episodes, outputs), one for each environment."""
        episodes = output.shape[1]
        values: Array = output.cpu().numpy().reshape(-1, *output.shape[2:])
        if callable(self.actions):
            return np.asarray(self.actions(values))
        if hasattr(space, "n") and not space.shape:
            if values.ndim == 1 or values.shape[1] == 1:
                return (values.reshape(-1) > 0).astype(np.int64) + int(space.start)
            chosen = values.argmax(1)
            return np.asarray(chosen + int(space.start) if space.start else chosen)
        if hasattr(space, "nvec"):
            parts = np.split(values, np.cumsum(space.nvec)[:-1], 1)
            return np.stack([part.argmax(1) for part in parts], 1)
        if not hasattr(space, "low"):
            return (values > 0).astype(space.dtype)
        values = values.reshape(-1, *space.shape)
        if self.actions == "squash":
            if not np.isfinite(space.low).all() or not np.isfinite(space.high).all():
                raise BadInput(f"Actions of {self.name} have no bounds into which to squash them: use actions='clip'.")
            values = space.low + (np.tanh(values) + 1) / 2 * (space.high - space.low)
        if noise is not None and self.action_noise:
            drawn = noise.members(range(episodes), step).integers((0, int(np.prod(space.shape)))).numpy()
            extra = drawn.astype(np.float32) * np.float32(self.action_noise * noise.unit(None))
            values = values + np.tile(extra, (len(values) // episodes, 1)).reshape(values.shape)
        return np.asarray(np.clip(values, space.low, space.high), space.dtype)

    def draw(self, module: nn.Module, run_seed: int) -> bytes | None:
        """Return an animated picture of an episode that a module plays, or None where it cannot be drawn."""
        from germline.rl.picture import draw_episode

        if not isinstance(self.environment, str):
            return None
        seeds = Field(run_seed).below(SEED_LIMIT, 1, 0, Stream.BATCH, member=HELD_OUT["test"])
        make = partial(make_environment, self.environment, {**self.settings, "render_mode": "rgb_array"})
        return draw_episode(make, lambda x, state: self.act_once(SingleMember(module), x, state), int(seeds[0]))

    def act_once(self, member: SingleMember, observation: Array, state: Any) -> tuple[Array, Any]:
        """Return the action of one member in one environment, and its state."""
        x = torch.from_numpy(np.asarray(observation, np.float32)[None, None])
        with torch.no_grad():
            output = member.map(x) if state is None else member.map(x, state)
        if isinstance(output, tuple):
            output, state = output
        with self._pool.take(1) as environments:
            return self.act(output, environments.space, None, 0)[0], tree_map(lambda s: s, state)


class Pool:
    """Sets of environments that are not in use: a thread takes one, and gives it back."""

    def __init__(self, environment: Any, settings: dict[str, Any], processes: int | None, envpool: bool) -> None:
        self.environment, self.settings, self.processes, self.envpool = environment, settings, processes, envpool
        self.threads = torch.get_num_threads()  # before blocks are evaluated, each by one thread
        self.lock, self.free = threading.Lock(), dict[int, list[Environments]]()

    @contextmanager
    def take(self, count: int) -> Iterator[Environments]:
        """Yield environments of which the first ``count`` are used."""
        make_vector, make = find_maker(self.environment, self.settings)
        with self.lock:
            sizes = [
                size
                for size, sets in self.free.items()
                if sets and (size == count or (size > count and not make_vector))
            ]
            environments = self.free[min(sizes)].pop() if sizes else None
        if environments is None and self.envpool:
            threads = self.processes or self.threads
            environments = EnvpoolEnvironments(self.environment, self.settings, count, threads)
        elif environments is None:
            environments = VectorEnvironments(make_vector, count) if make_vector else self._make(make, count)
        yield environments  # after an error it is not given back: its episodes have not ended
        with self.lock:
            self.free.setdefault(environments.capacity, []).append(environments)

    def _make(self, make: Callable[[], Any], count: int) -> Environments:
        probe = make()
        check_spaces(probe, getattr(self.environment, "__name__", str(self.environment)))
        if self.processes is None:
            self.processes = self.threads if self.threads > 1 and time_step(probe) > SLOW_STEP else 1
        probe.close()
        if self.processes < 2 or count < 2:
            return LocalEnvironments(make, count)
        return ProcessEnvironments(make, count, min(self.processes, count))


def check_spaces(environment: Any, name: str) -> None:
    """Raise an error if the observations or actions of an environment are not arrays or numbers."""
    spaces = {"observations": environment.observation_space, "actions": environment.action_space}
    for what, space in spaces.items():
        if space.shape is None:
            message = f"The {what} of {name} are {type(space).__name__}, and gl.Gym takes arrays and numbers"
            raise BadInput(f"{message}: give it a function that returns the environment with a wrapper around it.")


def time_step(environment: Any) -> float:
    """Return the seconds of a step of an environment."""
    space = environment.action_space
    action = int(space.start) if not space.shape else np.zeros(space.shape, space.dtype)
    environment.reset(seed=0)
    started = time.perf_counter()
    for step in range(TIMED_STEPS):
        *_, terminated, truncated, _ = environment.step(action)
        if terminated or truncated:
            environment.reset(seed=step)
    return (time.perf_counter() - started) / TIMED_STEPS
