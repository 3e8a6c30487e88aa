"""The operations that the ranks of a fleet do together: gather, add, trade, broadcast. Bytes are counted here."""

import atexit
import copy
import json
import os
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Literal, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from germline.errors import BadInput, FleetLostError
from germline.fleet.spmd.launch import Launch

T = TypeVar("T")
Backend = Literal["auto", "gloo", "nccl", "mpi"]
PIECE = 1 << 19  # bytes that gloo gathers at once: in one piece it reaches half the rate of a slow link
LONGEST = 1 << 26  # bytes of a message in JSON
ARRIVAL_SECONDS = 120.0  # for all ranks to arrive, if the timeout is shorter: they load their libraries first


@dataclass
class Traffic:
    """Bytes and messages that this rank has sent and received."""

    sent: int = 0
    received: int = 0
    messages: int = 0

    def count(self, sent: int, received: int, messages: int) -> None:
        self.sent += sent
        self.received += received
        self.messages += messages


class Operations(Protocol):
    """The interface of a backend: operations on tensors of one shape and type in every rank."""

    def gather(self, tensor: Tensor) -> Tensor: ...

    def add(self, tensor: Tensor) -> None: ...

    def trade(self, sent: Tensor, sent_sizes: list[int], sizes: list[int]) -> Tensor: ...

    def broadcast(self, tensor: Tensor, root: int) -> None: ...

    def beat(self, flag: Tensor, root: int) -> None: ...

    def team(self, width: int) -> "Operations": ...


@dataclass
class Collective:
    """The ranks of a fleet, as one of them sees them."""

    rank: int
    size: int
    operations: Operations
    timeout: float
    traffic: Traffic = field(default_factory=Traffic)

    def gather(self, tensor: Tensor) -> Tensor:
        """Return the tensors of all ranks, which have one shape: (ranks, ...)."""
        gathered = self._call(self.operations.gather, tensor.contiguous())
        others = tensor.nbytes * (self.size - 1)
        self.traffic.count(others, others, self.size - 1)
        return gathered

    def gather_parts(self, part: Tensor, lengths: list[int]) -> list[Tensor]:
        """Return the tensors of all ranks, whose last axes have these lengths; they travel padded to the longest."""
        padded = torch.nn.functional.pad(part, (0, max(lengths) - part.shape[-1]))
        return [row[..., :length] for row, length in zip(self.gather(padded), lengths, strict=True)]

    def add(self, tensor: Tensor) -> Tensor:
        """Add the tensors of all ranks in place, twice around a ring in equal parts; exact for integers."""
        self._call(self.operations.add, tensor)
        moved = 2 * tensor.nbytes * (self.size - 1) // self.size
        self.traffic.count(moved, moved, 2 * (self.size - 1))
        return tensor

    def trade(self, parts: list[Tensor], sizes: list[int]) -> list[Tensor]:
        """Send a part, in bytes, to each rank; return the parts that the ranks send to this one, of the given sizes."""
        sent_sizes, own = [part.numel() for part in parts], self.rank
        received = self._call(self.operations.trade, torch.cat(parts), sent_sizes, sizes)
        self.traffic.count(sum(sent_sizes) - sent_sizes[own], sum(sizes) - sizes[own], self.size - 1)
        return list(torch.split(received, sizes))

    def broadcast(self, tensor: Tensor, root: int) -> Tensor:
        """Return the tensor of one rank, in place, passed on along a tree."""
        self._call(self.operations.broadcast, tensor, root)
        number = (self.rank - root) % self.size
        children = len(children_of(number, self.size))
        parents = int(number != 0)
        self.traffic.count(children * tensor.nbytes, parents * tensor.nbytes, children + parents)
        return tensor

    def team(self, width: int) -> "Collective":
        """Return the team of ``width`` neighboring ranks that this one belongs to; all ranks must call this."""
        operations = self._call(self.operations.team, width)
        return Collective(self.rank % width, width, operations, self.timeout, self.traffic)

    def exchange(self, value: Any) -> list[Any]:
        """Return the values of all ranks, as JSON."""
        content = json.dumps(value).encode()
        longest = check_length(int(self.gather(torch.tensor([len(content)])).max()))
        rows = self.gather(as_bytes(content, longest)).numpy()
        return [parse_message(row.tobytes()) for row in rows]

    def run_with_heartbeat(self, work: Callable[[], T], root: int) -> T | None:
        """Do some work in one rank, which may take longer than the timeout: it sends signs of life meanwhile."""
        if self.rank != root:
            flag = torch.zeros(1)
            while not flag.item():
                self._call(self.operations.beat, flag, root)
            return None
        ended = threading.Event()

        def beat() -> None:
            with suppress(RuntimeError, OSError):  # the main thread will notice
                while not ended.wait(self.timeout / 4):
                    self.operations.beat(torch.zeros(1), root)

        beats = threading.Thread(target=beat, name="germline-beat", daemon=True)
        beats.start()
        try:
            return work()
        finally:
            ended.set()
            beats.join()
            self._call(self.operations.beat, torch.ones(1), root)

    def say(self, value: Any, root: int) -> Any:
        """Return the value of one rank, as JSON."""
        content = json.dumps(value).encode() if self.rank == root else b""
        size = check_length(int(self.broadcast(torch.tensor([len(content)]), root)))
        return parse_message(self.broadcast(as_bytes(content, size), root).numpy().tobytes())

    def broadcast_arrays(self, about: Any, arrays: dict[str, Tensor], root: int, device: torch.device) -> Any:
        """Return a value, as JSON, and some arrays of one rank, by name; the other ranks may know none of them."""
        layout = {name: [list(x.shape), str(x.dtype).removeprefix("torch.")] for name, x in arrays.items()}
        message = self.say([about, layout], root)
        try:
            about, layout = message
            sent = {name: (shape, getattr(torch, dtype)) for name, (shape, dtype) in layout.items()}
            received = {name: torch.empty(shape, dtype=dtype, device=device) for name, (shape, dtype) in sent.items()}
        except (RuntimeError, TypeError, ValueError, AttributeError) as error:
            raise FleetLostError(f"What rank {root} of the fleet sends cannot be read ({error}).") from error
        for name, empty in received.items():
            array = arrays[name].detach().to(device).contiguous() if self.rank == root else empty
            received[name] = self.broadcast(array, root)
        return about, received

    def _call(self, operation: Callable[..., T], *arguments: Any) -> T:
        """Call a backend; turn what it raises when a rank has died or does not answer into a sentence."""
        try:
            return operation(*arguments)
        except (RuntimeError, OSError) as error:
            first = " ".join(str(error).split())[:160]
            message = f"Another rank of the fleet has died, or has not answered within {self.timeout:g} s ({first})."
            raise FleetLostError(f"{message} Every finished generation is in the journal.") from error


def check_length(length: int) -> int:
    """Return the length of a message, or raise an error if no message is as long."""
    if not 1 <= length <= LONGEST:
        raise FleetLostError(f"Another rank of the fleet has sent a message of {length} bytes, which cannot be right.")
    return length


def parse_message(content: bytes) -> Any:
    """Return what a rank has sent as JSON."""
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        raise FleetLostError(f"A message of another rank of the fleet cannot be read ({error}).") from error


def as_bytes(text: bytes, size: int) -> Tensor:
    """Return a text as a tensor, filled up with blanks, which JSON ignores."""
    return torch.frombuffer(bytearray(text.ljust(size)), dtype=torch.uint8)


def children_of(number: int, size: int) -> list[int]:
    """Return the ranks to which a rank passes on a broadcast of rank 0, along a binomial tree.

    >>> [children_of(i, 6) for i in range(6)]
    [[4, 2, 1], [], [3], [], [5], []]
    """
    children, bit = [], 1 << (size - 1).bit_length() >> 1
    while bit:
        if number % (2 * bit) == 0 and number + bit < size:
            children.append(number + bit)
        bit >>= 1
    return children


class Torch:
    """torch.distributed: gloo for tensors in memory, nccl for those on GPUs."""

    def __init__(self, launch: Launch, backend: str, timeout: float) -> None:
        self.wait = timedelta(seconds=timeout)
        self.kinds = "cpu:gloo,cuda:nccl" if backend == "nccl" else "gloo"
        self.is_owner = not dist.is_initialized()  # otherwise the user's own program has done it
        if self.is_owner:
            interface = interface_to(launch.address)
            if interface is not None:  # gloo would take the address of the host's name, which is often wrong
                os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
            store = open_store(launch, max(timeout, ARRIVAL_SECONDS))
            dist.init_process_group(
                self.kinds, store=store, rank=launch.rank, world_size=launch.size, timeout=self.wait
            )
            atexit.register(self.close)
        self.group: Any = dist.group.WORLD if self.is_owner else dist.new_group(timeout=self.wait, backend=self.kinds)
        self.beats: Any = dist.new_group(timeout=self.wait, backend="gloo")  # a second thread uses it

    def gather(self, tensor: Tensor) -> Tensor:
        size = dist.get_world_size(self.group)
        out = tensor.new_empty(size, *tensor.shape)
        operation = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        rows, flat = out.view(size, -1), tensor.view(-1)
        step = flat.numel() if tensor.device.type == "cuda" else max(1, PIECE // tensor.element_size())
        if flat.numel() <= step:
            operation(rows.view(-1), flat, group=self.group)
            return out
        for start in range(0, flat.numel(), step):
            piece = flat[start : start + step]
            gathered = tensor.new_empty(size * piece.numel())
            operation(gathered, piece, group=self.group)
            rows[:, start : start + step] = gathered.view(size, -1)
        return out

    def add(self, tensor: Tensor) -> None:
        dist.all_reduce(tensor, group=self.group)

    def trade(self, sent: Tensor, sent_sizes: list[int], sizes: list[int]) -> Tensor:
        out = sent.new_empty(sum(sizes))
        dist.all_to_all_single(out, sent, sizes, sent_sizes, group=self.group)
        return out

    def broadcast(self, tensor: Tensor, root: int) -> None:
        dist.broadcast(tensor, dist.get_global_rank(self.group, root), group=self.group)

    def beat(self, flag: Tensor, root: int) -> None:
        dist.broadcast(flag, dist.get_global_rank(self.beats, root), group=self.beats)

    def team(self, width: int) -> "Torch":
        ranks = dist.get_process_group_ranks(self.group)
        team = copy.copy(self)
        for first in range(0, len(ranks), width):  # every rank makes all groups
            group = dist.new_group(ranks[first : first + width], timeout=self.wait, backend=self.kinds)
            if dist.get_rank(self.group) // width == first // width:
                team.group = group
        return team

    def close(self) -> None:
        if self.is_owner and dist.is_initialized():
            self.group = self.beats = None  # their threads end with the last reference
            dist.destroy_process_group()


class MPI:
    """mpi4py, for MPI libraries that know their fabric. A process that dies ends the job."""

    def __init__(self) -> None:
        try:
            from mpi4py import MPI
        except ImportError as error:
            raise BadInput("The backend mpi needs mpi4py: pip install 'germline[mpi]'.") from error
        self.mpi, self.beats = MPI, MPI.COMM_WORLD.Dup()
        self.world: Any = MPI.COMM_WORLD
        before = sys.excepthook

        def end_the_job(*error: Any) -> None:
            before(*error)
            self.world.Abort(1)  # the other ranks would wait forever

        sys.excepthook = end_the_job

    def gather(self, tensor: Tensor) -> Tensor:
        here = tensor.cpu()
        out = here.new_empty(self.world.Get_size(), *here.shape)
        self.world.Allgather(self._bytes(here), self._bytes(out))
        return out.to(tensor.device)

    def add(self, tensor: Tensor) -> None:
        here = tensor.cpu()
        self.world.Allreduce(self.mpi.IN_PLACE, here.numpy())
        tensor.copy_(here)

    def trade(self, sent: Tensor, sent_sizes: list[int], sizes: list[int]) -> Tensor:
        out = torch.empty(sum(sizes), dtype=sent.dtype)
        self.world.Alltoallv([sent.cpu().numpy(), sent_sizes, self.mpi.BYTE], [out.numpy(), sizes, self.mpi.BYTE])
        return out.to(sent.device)

    def broadcast(self, tensor: Tensor, root: int) -> None:
        here = tensor.cpu()
        self.world.Bcast(self._bytes(here), root)
        tensor.copy_(here)

    def beat(self, flag: Tensor, root: int) -> None:
        self.beats.Bcast(self._bytes(flag), root)

    def team(self, width: int) -> "MPI":
        team = copy.copy(self)
        team.world = self.world.Split(self.world.Get_rank() // width)
        return team

    def _bytes(self, tensor: Tensor) -> Any:
        return [tensor.reshape(-1).view(torch.uint8).numpy(), self.mpi.BYTE]


def connect(launch: Launch, backend: str, timeout: float) -> Collective:
    """Connect the ranks that were launched together; return when all of them are there."""
    if backend == "mpi":
        mpi = MPI()
        return Collective(mpi.world.Get_rank(), mpi.world.Get_size(), mpi, timeout)
    try:
        operations = Torch(launch, backend, timeout)
    except (RuntimeError, OSError, ValueError) as error:
        first = " ".join(str(error).split())[:200]
        where = f"rank {launch.rank} of {launch.size}, by way of {launch.address}:{launch.port}"
        raise FleetLostError(f"The ranks of the fleet did not find each other ({where}): {first}.") from error
    return Collective(dist.get_rank(operations.group), dist.get_world_size(operations.group), operations, timeout)


def open_store(launch: Launch, patience: float) -> Any:
    """Open the store by which ranks find each other; it is new at every start.

    torchrun offers the store of its agent, which outlives a restart with all that dead processes have written to it, so
    that new ones would follow their addresses. It is used only to say where the new store is.
    """
    if launch.address is None:
        return dist.HashStore()  # a single process
    waits, end = timedelta(seconds=patience), time.monotonic() + patience
    if not launch.agent_store:
        store = dist.TCPStore(launch.address, launch.port, launch.size, launch.rank == 0, timeout=waits)
        return dist.PrefixStore("germline", store)
    board = dist.TCPStore(launch.address, launch.port, None, False, timeout=waits)
    if launch.rank == 0:
        host = address_towards(launch.address)
        store = dist.TCPStore(host, 0, launch.size, True, timeout=waits, wait_for_workers=False)
        board.set("germline/store", f"{host} {store.port}")
        store.wait([f"arrived/{rank}" for rank in range(1, launch.size)], waits)  # from here on the timeout counts
        return dist.PrefixStore("germline", store)
    while True:
        host, port = board.get("germline/store").decode().split()
        if is_listening(host, int(port)):  # otherwise it belongs to a process that has died
            store = dist.TCPStore(host, int(port), launch.size, False, timeout=waits)
            store.set(f"arrived/{launch.rank}", "")
            return dist.PrefixStore("germline", store)
        if time.monotonic() > end:
            raise RuntimeError(f"no process listens at {host}:{port}")
        time.sleep(0.05)


def is_listening(host: str, port: int) -> bool:
    """Return whether a process accepts connections at an address."""
    with suppress(OSError), socket.create_connection((host, port), timeout=2):
        return True
    return False


def address_towards(host: str) -> str:
    """Return this machine's address as another sees it: that of the interface by which the other is reached."""
    try:
        family, _, _, _, where = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(where)  # nothing is sent
            address = str(probe.getsockname()[0])
        # others do not know this machine by a name that stands for a loopback address
        return host if is_loopback(address) and not is_loopback(host) else address
    except OSError:
        return host


def is_loopback(host: str) -> bool:
    """Return whether a host is this machine's loopback interface."""
    return host.startswith("127.") or host in ("localhost", "::1")


def interface_to(host: str | None) -> str | None:
    """Return the name of the network interface by which a machine is reached, where the system says so."""
    if host is None or not sys.platform.startswith("linux"):
        return None
    import fcntl

    address = address_towards(host)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(probe, 0x8915, struct.pack("256s", name.encode()[:15]))  # SIOCGIFADDR
            except OSError:
                continue
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return None
