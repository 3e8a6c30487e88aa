"""Calls a user's reward for many texts, in this process or in others."""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

from germline.errors import BadInput

Reward = Callable[[str, Any], float]  # of a text and of the row whose prompt it continues
Task = tuple[str, Any]
CHUNKS = 4  # for each process: texts are not equally long


class Rewards:
    """A reward as a function of many texts.

    Args:
        reward: The user's function.
        processes: The number of processes that call it; 1 is this process. With more, the function is pickled.
    """

    def __init__(self, reward: Reward, processes: int = 1) -> None:
        self.reward, self.processes = reward, processes
        self.pool: ProcessPoolExecutor | None = None
        self.owner = 0  # the process that has started the pool: a fork of it cannot use it

    def __getstate__(self) -> dict[str, Any]:
        return {"reward": self.reward, "processes": self.processes, "pool": None, "owner": 0}

    def __call__(self, tasks: Sequence[Task]) -> list[float]:
        """Return the reward of each text.

        Raises:
            BadInput: The reward fails, or is not a number.
        """
        if self.processes < 2:
            return [call_reward(self.reward, task) for task in tasks]
        if self.pool is None or self.owner != os.getpid():
            import cloudpickle

            content = cloudpickle.dumps(self.reward)  # functions of a program or a notebook, too
            self.pool = ProcessPoolExecutor(self.processes, get_context("spawn"), set_reward, (content,))
            self.owner = os.getpid()
        size = -(-len(tasks) // (CHUNKS * self.processes))
        return list(self.pool.map(call_own_reward, tasks, chunksize=max(1, size)))


own_reward: list[Reward] = []  # of a process of a pool


def set_reward(content: bytes) -> None:
    """Keep the reward that this process of a pool will call."""
    import cloudpickle

    own_reward[:] = [cloudpickle.loads(content)]


def call_own_reward(task: Task) -> float:
    """Call the reward of this process of a pool."""
    return call_reward(own_reward[0], task)


def call_reward(reward: Reward, task: Task) -> float:
    """Return the reward of a text as a number."""
    try:
        return float(reward(*task))
    except Exception as error:
        message = f"The reward fails on the text {task[0][:200]!r}: {type(error).__name__}: {error}"
        raise BadInput(message) from error
