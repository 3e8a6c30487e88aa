"""Forked processes that evaluate blocks of members, so that the Python code of several blocks runs at the same time.

The Python code of a block holds the interpreter lock, so threads keep about two cores busy. A forked process has the
module, the objective and the first generation's inputs from the start. What later generations need (the center, the
batch) is copied to memory that all processes share. A child takes the number of a block from a pipe, writes the scores
to the shared memory and takes the next number.

Children sleep between generations, until an event counter that all of them watch is raised. One call wakes them, so
that none of those that are awake takes the parent's core while others still sleep.
"""

import gc
import io
import mmap
import os
import pickle
import select
import signal
import struct
import sys
import threading
import time
import warnings
import weakref
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from germline.clock import clock
from germline.fleet.gradients import Scores
from germline.objective import seeded_generators
from germline.population import ALIGNMENT, Evaluator, Generation

CAN_FORK = sys.platform == "linux"  # elsewhere there is no fork, or system libraries fail in a forked process
FORK_AFTER = 0.25  # seconds of work on threads, after which processes are worth their start
IDLE_SECONDS = 30.0  # after which a child without work ends
ROOM = 2  # the size of the shared memory, in sizes of the first generation's inputs
MAX_SHARED_BYTES = 1 << 30  # larger inputs are not copied: threads share them
SCORE_BYTES = 4
MAX_TICKETS = 4096  # they fit into a pipe
TICKET, END = struct.Struct("i"), -1  # END follows the numbers of all blocks, once for each child
SIGNALS = {signal.SIGINT, signal.SIGTERM}
# what torch says in a child whose parent has used a GPU, or has only asked whether there is one
NO_CUDA_AFTER_FORK = ("CUDA in forked subprocess", "CUDA error: initialization error")

Bytes = NDArray[np.uint8]
Blocks = NDArray[np.int64]  # the members of each block: (blocks, members)


class LostChildError(Exception):
    """A child has ended in the middle of a generation."""


class NeedsParentError(Exception):
    """A block's code needs what only the process has that was not forked."""


@dataclass
class Report:
    """A child's report of its part of a generation."""

    seconds: dict[str, float]
    warnings: list[tuple[Any, ...]]  # arguments of warn_explicit
    failure: tuple[int, BaseException] | None  # the number of a block, and what its evaluation raised


class Part(NamedTuple):
    """A part of what children need, and its place in the shared memory."""

    start: int
    content: Bytes


@dataclass(eq=False)
class Pool:
    """The children that evaluate blocks for one evaluator; they are forked when they are first needed."""

    seconds: float = 0.0  # of work on threads, before there are children
    children: dict[Connection, int] = field(default_factory=dict)  # process ids by connection
    bells: tuple[int, ...] = ()  # two event counters, which are raised in turn
    turn: int = 0
    ticket_pipe: tuple[int, ...] = ()
    memory: memoryview = field(default_factory=lambda: memoryview(b""))  # shared with the children
    last_used: float = 0.0
    is_broken: bool = False  # whether children cannot do the work
    shown: dict[Any, Any] = field(default_factory=dict)  # the registry of the children's warnings
    lock: threading.Lock = field(default_factory=threading.Lock)

    def score(self, evaluator: Evaluator, generation: Generation, blocks: Blocks, size: int) -> Scores | None:
        """Return the scores of some blocks, one block after the other, or None if children cannot compute them.

        Args:
            evaluator: evaluates a block; the same one in all calls.
            generation: what the blocks share.
            blocks: the members of each block.
            size: the number of children.
        """
        with self.lock:
            try:
                for _ in range(2):
                    parts = lay_out(generation, blocks)
                    if parts is None:
                        break
                    with suppress(LostChildError):
                        return self._score(evaluator, generation, blocks, min(size, len(blocks)), parts)
                    self.close()
            except NeedsParentError:
                self.close()
                self.is_broken = True
                return None
            except BaseException:  # raised by a block, or an interrupt in the middle of the children's work
                self.close()
                raise
            self.is_broken = True
        if parts is not None:
            message = "Processes that evaluate members have died, twice in one generation"
            warnings.warn(f"{message}: threads evaluate them from now on.", RuntimeWarning, stacklevel=2)
        return None

    def _score(
        self, evaluator: Evaluator, generation: Generation, blocks: Blocks, size: int, parts: list[Part]
    ) -> Scores:
        needed = parts[-1].start + parts[-1].content.size
        is_alive = len(self.children) >= size and time.monotonic() - self.last_used < IDLE_SECONDS / 2
        if is_alive and needed <= len(self.memory):
            for part in parts:
                np.frombuffer(self.memory, np.uint8, part.content.size, part.start)[:] = part.content
            message = pickle.dumps([(part.start, part.content.size) for part in parts])
            for connection in self.children:
                with suppress(BrokenPipeError):  # that it has died is noticed when it does not answer
                    connection.send_bytes(message)
            self.write_tickets(len(blocks))
            bell = self.bells[self.turn]
            os.eventfd_write(bell, 1)
        else:
            self.close()
            try:
                self.fork(evaluator, generation, blocks, size, ROOM * needed)
            except OSError:  # too many processes or files, or too little memory
                raise LostChildError from None
            bell = None
            self.write_tickets(len(blocks))
        reports = self.collect_reports()
        if bell is not None:  # all have seen it, and watch the other one
            os.eventfd_read(bell)
            self.turn = 1 - self.turn
        self.last_used = time.monotonic()
        for report in reports:
            clock.add(report.seconds)
            for message, category, filename, line in report.warnings:
                warnings.warn_explicit(message, category, filename, line, registry=self.shown)
        failures = [report.failure for report in reports if report.failure is not None]
        if any(text in str(error) for _, error in failures for text in NO_CUDA_AFTER_FORK):
            raise NeedsParentError
        if failures:
            raise min(failures, key=lambda failure: failure[0])[1]  # as threads do: that of the first block
        return np.frombuffer(self.memory, np.float32, blocks.size).copy()

    def write_tickets(self, blocks: int) -> None:
        """Write the numbers of the blocks for the children, which take them in order."""
        step = -(-blocks // MAX_TICKETS)
        tickets = [*range(0, blocks, step), *[END] * len(self.children)]
        os.write(self.ticket_pipe[1], b"".join(map(TICKET.pack, tickets)))

    def collect_reports(self) -> list[Report]:
        """Return the reports of all children, or raise LostChildError as soon as one of them has ended."""
        reports: list[Report] = []
        waiting: set[Any] = set(self.children)
        while waiting:
            for connection in wait(waiting):
                waiting.remove(connection)
                try:
                    reports.append(pickle.loads(connection.recv_bytes()))  # type: ignore[union-attr]
                except (EOFError, ConnectionResetError):
                    raise LostChildError from None
        return reports

    def fork(self, evaluator: Evaluator, generation: Generation, blocks: Blocks, size: int, room: int) -> None:
        """Fork the children, which start with the generation that they inherit."""
        parent = os.getpid()
        flush_output()
        with forking:
            # in a child nothing belongs to this object: see forget_pools
            memory, (reader, writer) = memoryview(mmap.mmap(-1, max(room, mmap.PAGESIZE))), os.pipe()
            children: dict[Connection, int] = {}
            bells = os.eventfd(0), os.eventfd(0)
            for _ in range(size):
                ours, theirs = Pipe()
                before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
                try:
                    children[ours] = fork_quietly()
                    if children[ours] == 0:
                        for connection in children:
                            connection.close()
                        os.close(writer)
                        Child(evaluator, memory, reader, theirs, bells, parent).serve(generation, blocks)
                finally:
                    if os.getpid() != parent:  # whatever happens: a child never returns into the user's program
                        os._exit(1)
                    signal.pthread_sigmask(signal.SIG_SETMASK, before)
                    theirs.close()
            self.children, self.bells, self.ticket_pipe, self.memory = children, bells, (reader, writer), memory

    def close(self) -> None:
        """End the children, whatever they do; they have nothing to lose."""
        for pid in self.children.values():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for pid in self.children.values():
            with suppress(ChildProcessError):  # other code has waited for it
                os.waitpid(pid, 0)
        self.release()

    def release(self) -> None:
        """Forget the children and close what belongs to them."""
        for connection in self.children:
            connection.close()
        for descriptor in (*self.ticket_pipe, *self.bells):
            os.close(descriptor)
        self.children, self.ticket_pipe, self.bells, self.turn, self.memory = {}, (), (), 0, memoryview(b"")


@dataclass(frozen=True)
class Child:
    """The work of a child.

    Attributes:
        evaluator: Evaluates blocks.
        memory: The memory that all processes share.
        tickets: The pipe with the numbers of the blocks.
        connection: To the parent.
        bells: Two event counters, by which the parent says in turn that there is a message.
        parent: The id of the parent's process.
    """

    evaluator: Evaluator
    memory: memoryview
    tickets: int
    connection: Connection
    bells: tuple[int, int]
    parent: int

    def serve(self, generation: Generation, blocks: Blocks) -> None:
        """Evaluate blocks, those of one generation first, until the parent ends or has no more work."""
        renew_output()
        signal.set_wakeup_fd(-1)
        for number in SIGNALS:  # the parent decides what they mean, and a child ends when the parent does
            signal.signal(number, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        gc.freeze()  # or the first collection would copy the pages of all objects
        torch.set_num_threads(1)
        clock.pop_seconds()
        turn = 0
        caught: list[tuple[Any, ...]] = []
        warnings.showwarning = lambda message, category, filename, line, *_: caught.append(
            (message, category, filename, line)
        )
        while True:
            failure = self.evaluate(generation, blocks)
            flush_output()
            self.connection.send_bytes(pack_report(Report(clock.pop_seconds(), caught, failure)))
            caught.clear()
            if not self.wait_for_bell(self.bells[turn]):
                os._exit(0)
            turn = 1 - turn
            places = pickle.loads(self.connection.recv_bytes())
            pieces = [self.memory[start : start + size] for start, size in places]
            candidates, batch, numbers = Unpacker(pieces).load()
            blocks = numbers.numpy()
            generation = self.evaluator.generation(candidates, batch)

    def wait_for_bell(self, bell: int) -> bool:
        """Return True as soon as an event counter is raised, or False if the parent ends or has no more work."""
        waiting = select.poll()
        waiting.register(bell, select.POLLIN)
        waiting.register(self.connection, 0)  # of which it learns nothing but that the other end is closed
        return any(descriptor == bell for descriptor, _ in waiting.poll(1e3 * IDLE_SECONDS))

    def evaluate(self, generation: Generation, blocks: Blocks) -> tuple[int, BaseException] | None:
        """Evaluate the blocks whose numbers this child takes from the pipe; return the first failure."""
        scores = np.frombuffer(self.memory, np.float32, blocks.size).reshape(blocks.shape)
        step, failure = -(-len(blocks) // MAX_TICKETS), None
        with seeded_generators(0):
            while (ticket := os.read(self.tickets, TICKET.size)) and (first := TICKET.unpack(ticket)[0]) != END:
                for number in range(first, min(first + step, len(blocks))):
                    if os.getppid() != self.parent:
                        os._exit(0)
                    if failure is None:  # otherwise there is nothing left to do but to take the other tickets
                        try:
                            scores[number] = self.evaluator.score_block(generation, blocks[number])
                        except BaseException as error:
                            failure = number, error
        return failure


class Packer(pickle.Pickler):
    """Pickles all but the contents of tensors, which are copied once, to the shared memory.

    Attributes:
        contents: The bytes of the tensors.
    """

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.contents: list[Bytes] = []

    def persistent_id(self, value: Any) -> Any:
        """Return what a tensor is made of, with its strides, on which the last bits of results may depend."""
        if type(value) is not Tensor or value.device.type != "cpu" or value.layout != torch.strided:
            return None
        if not value.numel() or value.requires_grad or value.is_conj() or value.is_neg():
            return None
        length = 1 + sum((size - 1) * step for size, step in zip(value.shape, value.stride(), strict=True))
        self.contents.append(value.as_strided((length,), (1,)).view(torch.uint8).numpy())
        return len(self.contents), value.dtype, tuple(value.shape), value.stride()


class Unpacker(pickle.Unpickler):
    """Restores what a Packer has pickled, with the tensors in the shared memory.

    Attributes:
        pieces: Of the shared memory: first what the Packer has written, then the contents of the tensors.
    """

    def __init__(self, pieces: list[memoryview]) -> None:
        super().__init__(io.BytesIO(pieces[0]))
        self.pieces = pieces

    def persistent_load(self, description: Any) -> Tensor:
        """Return a tensor."""
        number, dtype, shape, stride = description
        return torch.frombuffer(self.pieces[number], dtype=dtype).as_strided(shape, stride)


def lay_out(generation: Generation, blocks: Blocks) -> list[Part] | None:
    """Return what children need of a generation, or None if it cannot be pickled or is too large."""
    head = io.BytesIO()
    packer = Packer(head)
    try:
        packer.dump((generation.candidates, generation.batch, torch.from_numpy(blocks)))
    except Exception:
        return None
    parts, end = [], SCORE_BYTES * blocks.size  # the scores come first
    for content in (np.frombuffer(head.getvalue(), np.uint8), *packer.contents):
        parts.append(Part(-(-end // ALIGNMENT) * ALIGNMENT, content))
        end = parts[-1].start + content.size
    return parts if end <= MAX_SHARED_BYTES else None


def pack_report(report: Report) -> bytes:
    """Return a report as bytes, with the text of an exception that cannot be pickled."""
    try:
        packed = pickle.dumps(report)
        pickle.loads(packed)
        return packed
    except Exception:
        failure, error = None, report.failure
        if error is not None:
            failure = error[0], RuntimeError(f"{type(error[1]).__name__}: {error[1]}")
        shown = [(str(message), UserWarning, *place) for message, _, *place in report.warnings]
        return pickle.dumps(Report(report.seconds, shown, failure))


def renew_output() -> None:
    """Have a child write to new streams.

    A thread of the parent, such as that of a progress line, may have been writing to the old ones at the time of the
    fork. Then their locks are held forever in the child.
    """
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        with suppress(OSError):  # it is closed
            setattr(sys, name, open(descriptor, "w", errors="backslashreplace", closefd=False))  # noqa: SIM115


def flush_output() -> None:
    """Write out what is printed, which a child would print again, or never."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):  # there is none, or it is closed
            stream.flush()


def fork_quietly() -> int:
    """Fork, without the warning of Python 3.12 and later that other threads may hold locks.

    A child uses none of those locks: it evaluates blocks, whose code takes no lock of another thread but those that are
    made anew after a fork.
    """
    if sys.version_info < (3, 12):
        return os.fork()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


forking = threading.Lock()
pools: dict[int, Pool] = {}  # by the identity of their evaluator


def find_pool(evaluator: Evaluator) -> Pool:
    """Return the pool of an evaluator, whose children end with it."""
    if id(evaluator) not in pools:
        pools[id(evaluator)] = Pool()
        weakref.finalize(evaluator, end_pool, id(evaluator), os.getpid())
    return pools[id(evaluator)]


def end_pool(key: int, owner: int) -> None:
    """End the children of an evaluator that is no longer used."""
    if os.getpid() == owner and key in pools:
        pools.pop(key).close()


def forget_pools() -> None:
    """Let go of the children of the parent: in a process that was forked, by whatever code."""
    global forking
    forking = threading.Lock()
    for pool in pools.values():
        pool.release()
    pools.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=forget_pools)
