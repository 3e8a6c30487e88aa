"""Many environments that are stepped together: in this process, in a vectorized one, by envpool, or in other processes.

A set of environments has four methods. ``reset(seeds)`` begins an episode in each of the first ``len(seeds)``
environments, and returns the observations. ``step(actions, active)`` returns observations, rewards, and which episodes
have ended; those that are not active are not stepped, and what is returned of them means nothing. ``close()`` ends it.
"""

import importlib.util
import inspect
import warnings
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from germline.errors import BadInput

Array = NDArray[Any]
Made = Callable[[], Any]  # returns one environment
# envpool's MuJoCo is no faster, and a run with it aborted; its Atari games have other observations
FASTER_IN_ENVPOOL = ("gymnasium.envs.classic_control", "gymnasium.envs.box2d")


class Environments(Protocol):
    """A set of environments; ``space`` is the action space of one."""

    capacity: int
    space: Any

    def reset(self, seeds: Array) -> Array: ...

    def step(self, actions: Array, active: Array) -> tuple[Array, Array, Array]: ...

    def close(self) -> None: ...


def load_gymnasium() -> Any:
    """Return the package gymnasium, with the environments of ale-py registered."""
    try:
        import gymnasium
    except ImportError:
        raise BadInput("gl.Gym needs gymnasium: pip install 'germline[rl]'.") from None
    return gymnasium


def make_environment(name: str, settings: dict[str, Any]) -> Any:
    """Return an environment by its name, without the wrappers that check how it is used."""
    gymnasium = load_gymnasium()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # packages of environments warn while they are imported
        if name.startswith("ALE/"):
            import ale_py

            ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)
            gymnasium.register_envs(ale_py)
        environment = gymnasium.make(name, disable_env_checker=True, **settings)
    wrappers = gymnasium.wrappers
    if isinstance(environment, wrappers.TimeLimit):
        limit, environment = environment._max_episode_steps, environment.env
        while isinstance(environment, wrappers.OrderEnforcing | wrappers.PassiveEnvChecker):
            environment = environment.env
        return Limited(environment, limit)
    return environment


class Limited:
    """An environment whose episodes are cut off after a number of steps, as gymnasium's TimeLimit does."""

    def __init__(self, environment: Any, limit: int) -> None:
        self.environment, self.limit, self.steps = environment, limit, 0
        self.action_space, self.observation_space = environment.action_space, environment.observation_space
        self.render, self.close = environment.render, environment.close

    def reset(self, *, seed: int) -> Any:
        self.steps = 0
        return self.environment.reset(seed=seed)

    def step(self, action: Any) -> Any:
        observation, reward, terminated, truncated, info = self.environment.step(action)
        self.steps += 1
        return observation, reward, terminated, truncated or self.steps >= self.limit, info


class LocalEnvironments:
    """Environments that this process steps one after the other."""

    def __init__(self, make: Made, capacity: int) -> None:
        self.environments, self.capacity = [make() for _ in range(capacity)], capacity
        first = self.environments[0]
        self.space, shape = first.action_space, first.observation_space.shape
        dtype = np.dtype(np.uint8 if first.observation_space.dtype == np.uint8 else np.float32)
        self.observations = np.zeros((capacity, *shape), dtype)
        self.rewards, self.ended = np.zeros(capacity), np.zeros(capacity, bool)

    def reset(self, seeds: Array) -> Array:
        for i, seed in enumerate(seeds.tolist()):
            self.observations[i] = self.environments[i].reset(seed=seed)[0]
        return self.observations[: len(seeds)]

    def step(self, actions: Array, active: Array) -> tuple[Array, Array, Array]:
        observations, rewards, ended = self.observations, self.rewards, self.ended
        is_discrete = actions.ndim == 1
        for i in np.flatnonzero(active).tolist():
            action = int(actions[i]) if is_discrete else actions[i]
            observations[i], rewards[i], terminated, truncated, _ = self.environments[i].step(action)
            ended[i] = terminated or truncated
        count = len(active)
        return observations[:count], rewards[:count], ended[:count]

    def close(self) -> None:
        for environment in self.environments:
            environment.close()


class VectorEnvironments:
    """A vectorized environment, which steps all of its environments at once, those that have ended too."""

    def __init__(self, make: Callable[[int], Any], capacity: int) -> None:
        self.environment, self.capacity = make(capacity), capacity
        self.space = self.environment.single_action_space
        self.single = make(1) if takes_one_seed(self.environment) else None

    def reset(self, seeds: Array) -> Array:
        if self.single is None:
            return np.asarray(self.environment.reset(seed=seeds.tolist())[0])
        # its environments share one generator: their states are those of single environments, each with its seed
        observation = np.asarray(self.environment.reset(seed=int(seeds[0]))[0])
        unique, place = np.unique(seeds, return_inverse=True)
        states, first = [], []
        for seed in unique.tolist():
            first.append(self.single.reset(seed=seed)[0][0])
            states.append(self.single.state[..., 0])
        self.environment.state = np.stack(states, -1)[..., place]
        return np.stack(first)[place].astype(observation.dtype)

    def step(self, actions: Array, active: Array) -> tuple[Array, Array, Array]:
        observations, rewards, terminated, truncated, _ = self.environment.step(actions)
        return np.asarray(observations), np.asarray(rewards), np.logical_or(terminated, truncated)

    def close(self) -> None:
        self.environment.close()


class EnvpoolEnvironments:
    """Environments of envpool, which steps them in threads."""

    def __init__(self, name: str, settings: dict[str, Any], capacity: int, threads: int) -> None:
        self.capacity, self.name, self.settings, self.threads = capacity, name, settings, threads
        self.pool = self._make([0])

    def _make(self, seeds: list[int]) -> Any:
        import envpool

        settings = {"num_envs": len(seeds), "num_threads": min(self.threads, len(seeds)), "seed": seeds}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # gymnasium warns of the types of its spaces
            pool = envpool.make(self.name, env_type="gymnasium", **settings, **self.settings)
            self.space, _ = pool.single_action_space, pool.single_observation_space
        return pool

    def reset(self, seeds: Array) -> Array:
        self.pool = self._make(seeds.tolist())  # a pool keeps the seeds that it was made with
        self.observations = np.array(self.pool.reset()[0], np.float32)
        self.rewards, self.ended = np.zeros(len(seeds)), np.zeros(len(seeds), bool)
        return self.observations

    def step(self, actions: Array, active: Array) -> tuple[Array, Array, Array]:
        chosen = np.flatnonzero(active).astype(np.int32)
        observations, rewards, terminated, truncated, info = self.pool.step(actions[chosen], chosen)
        place = info["env_id"]
        self.observations[place], self.rewards[place] = observations, rewards
        self.ended[place] = np.logical_or(terminated, truncated)
        return self.observations, self.rewards, self.ended

    def close(self) -> None:
        self.pool.close()


def is_in_envpool(environment: Any, settings: dict[str, Any]) -> bool:
    """Return whether envpool is installed and steps an environment faster than gymnasium, with the same settings."""
    if not isinstance(environment, str) or set(settings) - {"max_episode_steps"}:
        return False
    spec = load_gymnasium().spec(environment)
    if spec.vector_entry_point is not None or not str(spec.entry_point).startswith(FASTER_IN_ENVPOOL):
        return False
    if importlib.util.find_spec("envpool") is None:
        return False
    import envpool

    return environment in envpool.list_all_envs()


def takes_one_seed(environment: Any) -> bool:
    """Return whether a vectorized environment has one generator for all environments, and its state as an array."""
    gymnasium = load_gymnasium()
    has_list = isinstance(environment, gymnasium.vector.SyncVectorEnv | gymnasium.vector.AsyncVectorEnv)
    return not has_list and hasattr(environment, "state")


def find_maker(environment: Any, settings: dict[str, Any]) -> tuple[Callable[[int], Any] | None, Made]:
    """Return how a vectorized environment is made, if there is one, and how a single one is made.

    Args:
        environment: The name of an environment, a function that returns one, or a function of ``num_envs`` that returns
            a vectorized one.
        settings: Keyword arguments for the function, or for ``gymnasium.make``.
    """
    if callable(environment):
        if "num_envs" in inspect.signature(environment).parameters:
            return lambda count: environment(num_envs=count, **settings), lambda: environment(num_envs=1, **settings)
        return None, lambda: environment(**settings)
    gymnasium = load_gymnasium()

    def make() -> Any:
        return make_environment(environment, settings)

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if environment.startswith("ALE/"):
                import ale_py

                gymnasium.register_envs(ale_py)
            spec = gymnasium.spec(environment)
    except Exception as error:
        raise BadInput(f"There is no environment {environment!r}: {error}") from error
    if spec.vector_entry_point is None or "render_mode" in settings:
        return None, make

    def make_vector(count: int) -> Any:
        return gymnasium.make_vec(environment, count, vectorization_mode="vector_entry_point", **settings)

    return make_vector, make
