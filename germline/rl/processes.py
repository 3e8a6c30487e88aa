"""Environments in other processes, for those whose steps are slow; observations and actions are in shared memory.

Run as a module, this file is such a process. It gets a description of its work through a pipe, then one byte for each
reset or step, and answers each by one byte. It ends when the pipe is closed.
"""

import mmap
import os
import pickle
import subprocess
import sys
import tempfile
import traceback
import weakref
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np

from germline.rl.environments import Array, LocalEnvironments, Made

RESET, STEP, DONE, FAILED = b"r", b"s", b"d", b"f"


class Layout(NamedTuple):
    """The layout of the shared memory, which holds the environments of all processes."""

    capacity: int
    observation: tuple[tuple[int, ...], str]  # shape and type
    action: tuple[tuple[int, ...], str]

    def fields(self) -> dict[str, tuple[tuple[int, ...], str]]:
        """Return the arrays by name: shape and type."""
        n = self.capacity
        return {
            "observations": ((n, *self.observation[0]), self.observation[1]),
            "actions": ((n, *self.action[0]), self.action[1]),
            "rewards": ((n,), "<f8"),
            "seeds": ((n,), "<i8"),
            "active": ((n,), "|b1"),
            "ended": ((n,), "|b1"),
        }

    def arrays(self, memory: mmap.mmap) -> dict[str, Array]:
        """Return the arrays in shared memory."""
        arrays, offset = {}, 0
        for name, (shape, dtype) in self.fields().items():
            count = int(np.prod(shape))
            arrays[name] = np.frombuffer(memory, dtype, count, offset).reshape(shape)
            offset += -(-count * np.dtype(dtype).itemsize // 64) * 64
        return arrays

    @property
    def size(self) -> int:
        """The bytes of the shared memory."""
        sizes = (int(np.prod(shape)) * np.dtype(dtype).itemsize for shape, dtype in self.fields().values())
        return sum(-(-size // 64) * 64 for size in sizes)


class ProcessEnvironments:
    """Environments that are stepped by other processes, each with a part of them."""

    def __init__(self, make: Made, capacity: int, processes: int) -> None:
        import cloudpickle

        probe = make()
        self.capacity, self.space = capacity, probe.action_space
        observations, actions = probe.observation_space, probe.action_space
        kind = "|u1" if observations.dtype == np.uint8 else "<f4"
        layout = Layout(capacity, (observations.shape, kind), (actions.shape, np.dtype(actions.dtype).str))
        probe.close()
        folder = "/dev/shm" if Path("/dev/shm").is_dir() else None
        with tempfile.TemporaryFile(dir=folder) as file:
            file.truncate(layout.size)
            self.memory = mmap.mmap(file.fileno(), layout.size)
            self.arrays = layout.arrays(self.memory)
            content = cloudpickle.dumps((make, layout))
            self.pipes, self.processes = [], []
            for rank in range(processes):
                their_input, ours = os.pipe()
                answers, their_output = os.pipe()
                given = (file.fileno(), their_input, their_output)
                words = [sys.executable, "-m", "germline.rl.processes", *map(str, (*given, rank, processes))]
                quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
                self.processes.append(subprocess.Popen(words, pass_fds=given, **quiet))  # type: ignore[call-overload]
                os.close(their_input)
                os.close(their_output)
                self.pipes.append((ours, answers))
                self._send(ours, len(content).to_bytes(8, "little") + content)
        self.finalizer = weakref.finalize(self, end_processes, self.pipes, self.processes)
        for _, answers in self.pipes:
            self._receive(answers)

    def _send(self, pipe: int, content: bytes) -> None:
        while content:
            content = content[os.write(pipe, content) :]

    def _receive(self, pipe: int) -> None:
        answer = os.read(pipe, 1)
        if answer == DONE:
            return
        reason = b""
        while answer == FAILED and (part := os.read(pipe, 65536)):
            reason += part
        self.close()
        raise RuntimeError(f"A process of environments has ended: {reason.decode(errors='replace') or 'it was killed'}")

    def _run(self, command: bytes, count: int) -> None:
        self.arrays["active"][count:] = False
        for pipe, _ in self.pipes:
            with suppress(BrokenPipeError):  # that the process has ended is noticed when it does not answer
                os.write(pipe, command)
        for _, answers in self.pipes:
            self._receive(answers)

    def reset(self, seeds: Array) -> Array:
        count = len(seeds)
        self.arrays["active"][:count], self.arrays["seeds"][:count] = True, seeds
        self._run(RESET, count)
        return self.arrays["observations"][:count]

    def step(self, actions: Array, active: Array) -> tuple[Array, Array, Array]:
        count, arrays = len(active), self.arrays
        arrays["active"][:count], arrays["actions"][:count] = active, actions
        self._run(STEP, count)
        return arrays["observations"][:count], arrays["rewards"][:count], arrays["ended"][:count]

    def close(self) -> None:
        self.finalizer()


def end_processes(pipes: list[tuple[int, int]], processes: list[subprocess.Popen[bytes]]) -> None:
    """Close the pipes of processes, at which they end, and wait for them."""
    for pair in pipes:
        for pipe in pair:
            os.close(pipe)
    pipes.clear()
    for process in processes:
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def choose_environments(capacity: int, rank: int, processes: int) -> Array:
    """Return the environments of one process, so that the members and the episodes of each are mixed.

    Environments of the same episode follow each other at a fixed distance, and their episodes have similar lengths.

    >>> [choose_environments(8, rank, 2).tolist() for rank in range(2)]
    [[0, 3, 4, 7], [1, 2, 5, 6]]
    """
    numbers = np.arange(capacity)
    return np.flatnonzero((numbers + numbers // processes) % processes == rank)


def serve(memory_file: int, commands: int, answers: int, rank: int, processes: int) -> None:
    """Step the environments of one process in shared memory, as a pipe says."""
    try:
        with os.fdopen(commands, "rb", closefd=False) as pipe:
            make, layout = pickle.loads(pipe.read(int.from_bytes(pipe.read(8), "little")))
            arrays = layout.arrays(mmap.mmap(memory_file, layout.size))
            mine = choose_environments(layout.capacity, rank, processes)
            environments = LocalEnvironments(make, max(1, mine.size))
            os.write(answers, DONE)
            while command := pipe.read(1):
                active = arrays["active"][mine]
                if command == RESET:
                    chosen = mine[active]  # the first ones
                    arrays["observations"][chosen] = environments.reset(arrays["seeds"][chosen])
                elif mine.size:
                    observations, rewards, ended = environments.step(arrays["actions"][mine], active)
                    arrays["observations"][mine], arrays["rewards"][mine] = observations, rewards
                    arrays["ended"][mine] = ended
                os.write(answers, DONE)
    except BaseException:
        os.write(answers, FAILED + traceback.format_exc(limit=-3).encode())


if __name__ == "__main__":
    serve(*map(int, sys.argv[1:]))
