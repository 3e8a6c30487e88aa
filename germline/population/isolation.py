"""Everything that an evaluation changes for its thread or for the whole process, and how it is restored.

Settings of torch (``exact_arithmetic``), its number of threads (``single_threaded_torch``) and the global random
generators (``isolated_generators``) are restored. The allocator's settings (``keep_memory``) are not: the C library
offers no way to read them. A module that writes to itself writes to a copy of its thread (``ThreadModule``).
"""

import copy
import ctypes
import os
import sys
import threading
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import cache
from typing import Any, cast

import numpy as np
import torch
from torch import nn
from torch.func import vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from germline.genome import Genome, Slot, copy_module
from germline.noise import ADDRESS_LIMIT, Field, Stream
from germline.objective import iterate_tensors, seeded_generators
from germline.population.block import Block, current_block
from germline.population.buffers import release_arrays
from germline.strategies.candidates import Candidates

MALLOPT = {-8: 1, -3: 1 << 28, -1: (1 << 31) - 1}  # glibc: arenas, the size returned at once, and what is retained
AT_ONCE = 1 << 22  # numbers of a member that are generated at once, unless a parameter has more
FLEX_WITHOUT_COMPILER = "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG"
generators_lock = threading.Lock()  # there is one set of global generators for all threads
settings_lock = threading.Lock()
holders: Counter[str] = Counter()  # threads in exact_arithmetic, by the type of device
restore: defaultdict[str, ExitStack] = defaultdict(ExitStack)  # what the last of them does


def renew_locks() -> None:
    """Make the locks anew in a forked process: a thread that it does not have may have held them."""
    global generators_lock, settings_lock
    generators_lock, settings_lock = threading.Lock(), threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=renew_locks)


@contextmanager
def exact_arithmetic(device: torch.device) -> Iterator[None]:
    """Switch off TF32, kernels that are chosen by timing, autocast and the fast path of attention.

    These are settings of the whole process, except for autocast: enter it around all blocks, not around each. Several
    threads may be in it at the same time; the last one to leave restores the settings.

    Args:
        device: the device that evaluates members.
    """
    kind = device.type
    with settings_lock:
        if not holders[kind]:
            restore[kind].enter_context(set_exact(kind))
        holders[kind] += 1
    try:
        with torch.autocast(kind, enabled=False):
            yield
    finally:
        with settings_lock:
            holders[kind] -= 1
            if not holders[kind]:
                restore[kind].close()


def is_only_thread(device: torch.device) -> bool:
    """Return whether no other thread is in ``exact_arithmetic`` for this kind of device."""
    return holders[device.type] <= 1


@contextmanager
def set_exact(device_type: str) -> Iterator[None]:
    """Set what ``exact_arithmetic`` sets for the whole process."""
    flags: list[tuple[Any, str, bool]] = []
    if torch.cuda.is_available():
        names = [(torch.backends.cuda.matmul, "allow_tf32"), (torch.backends.cudnn, "allow_tf32")]
        flags = [(owner, name, False) for owner, name in [*names, (torch.backends.cudnn, "benchmark")]]
    flex_attention = sys.modules.get("torch.nn.attention.flex_attention")  # if the user's code has imported it
    if hasattr(flex_attention, FLEX_WITHOUT_COMPILER):
        flags.append((flex_attention, FLEX_WITHOUT_COMPILER, True))
    before = [getattr(owner, name) for owner, name, _ in flags]
    fast_path = torch.backends.mha.get_fastpath_enabled()
    # Where vmap has no rule for an operation it loops over the members, and warns at every call. The check decides
    # whether the result is right; there is nothing for the user to do.
    enable_warnings: Any = getattr(torch._C._functorch, "_set_vmap_fallback_warning_enabled", lambda enabled: None)
    had_warnings = vmap_warns()
    try:
        for owner, name, value in flags:
            setattr(owner, name, value)
        torch.backends.mha.set_fastpath_enabled(False)
        enable_warnings(False)
        flash = [SDPBackend.FLASH_ATTENTION] if device_type == "cuda" else []
        with quick_checks(), forward_only(), sdpa_kernel([*flash, SDPBackend.MATH]):  # the two that vmap has rules for
            yield
    finally:
        enable_warnings(had_warnings)
        torch.backends.mha.set_fastpath_enabled(fast_path)
        for (owner, name, _), original in zip(flags, before, strict=True):
            setattr(owner, name, original)


@contextmanager
def quick_checks() -> Iterator[None]:
    """Let checks in torch's Python code that pass import nothing: the first would import sympy, for half a second."""
    owner: Any = torch
    original: Any = getattr(owner, "_check_with", None)

    def check(error: Any, passed: Any, message: Any) -> None:
        if passed is not True:
            original(error, passed, message)

    if original is None:
        yield
        return
    owner._check_with = check
    try:
        yield
    finally:
        owner._check_with = original


@contextmanager
def forward_only() -> Iterator[None]:
    """Let autograd functions that know nothing of vmap run under it: members need their forward alone."""
    owner: Any = torch.autograd.Function
    original = owner.__dict__["apply"]

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        is_simple = cls.setup_context is owner.setup_context  # has a forward that takes a context
        if current_block.block is None or torch.is_grad_enabled() or not is_simple:
            return original.__get__(None, cls)(*args, **kwargs)
        context: Any = torch.autograd.function.FunctionCtx()
        context.needs_input_grad = (False,) * len(args)
        return cls.forward(context, *args, **kwargs)

    owner.apply = classmethod(apply)
    try:
        yield
    finally:
        owner.apply = original


@cache
def vmap_warns() -> bool:
    """Return whether vmap warned of loops at the first evaluation: torch can set that, but not read it.

    It is asked once: each time the filters of warnings change, Python shows warnings again that it shows once.
    """
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        x = torch.zeros(1, 2, dtype=torch.float32, device="cpu")  # whatever the defaults of the user are
        vmap(lambda row: torch.histc(row, 2))(x)  # an operation for which vmap has no rule
    return bool(caught)


def single_threaded_torch() -> AbstractContextManager[None]:
    """Have torch use one thread, as every block does: sums over a batch differ between one thread and two."""
    return limited_torch_threads(1)


@contextmanager
def limited_torch_threads(count: int) -> Iterator[None]:
    """Have torch use so many threads at most."""
    before = torch.get_num_threads()
    torch.set_num_threads(min(before, count))
    try:
        yield
    finally:
        torch.set_num_threads(before)


@cache
def keep_memory() -> None:
    """Have the C library reuse freed memory for large arrays, instead of new pages of the system.

    Every block allocates such arrays anew. It is done once for the process, where the C library is glibc and no
    environment variable MALLOC_* sets it up in another way; it cannot be undone.
    """
    if sys.platform == "linux" and not any(name.startswith("MALLOC_") for name in os.environ):
        mallopt = getattr(ctypes.CDLL(None), "mallopt", lambda option, value: 0)
        for option, value in MALLOPT.items():
            mallopt(option, value)


def release_memory() -> None:
    """Return freed memory to the system: call this when other work begins than that which used it."""
    release_arrays()
    if sys.platform == "linux":
        getattr(ctypes.CDLL(None), "malloc_trim", lambda padding: 0)(0)  # only glibc has it


@contextmanager
def isolated_generators(candidates: Candidates) -> Iterator[None]:
    """Set the global random generators to a function of seed and generation: all members draw the same numbers."""
    field, generation = Field(candidates.field.seed), int(candidates.generation)
    seed = int(field.below(ADDRESS_LIMIT, 1, generation, Stream.DROPOUT, member=ADDRESS_LIMIT - 1)[0])
    with generators_lock, seeded_generators(seed):
        yield


class ThreadModule(threading.local):
    """A copy of a module for each thread, for what the module's code writes to the module."""

    def __init__(self, original: nn.Module) -> None:  # called in every thread that uses the object
        self.original = original
        self.copied: nn.Module | None = None
        self.member: MemberModule | None = None

    def get(self) -> nn.Module:
        """Return the copy of this thread."""
        if self.copied is None:
            self.copied = copy_with_flat_weights(self.original)
        return self.copied

    def get_member(self, genome: Genome) -> "MemberModule":
        """Return the copy of this thread as a module into which members are written."""
        if self.member is None:
            self.member = MemberModule(self.get(), genome)
        return self.member


class MemberModule:
    """A plain module into which one member after the other is written; what its code does to its buffers is undone."""

    def __init__(self, module: nn.Module, genome: Genome) -> None:
        self.module = module
        self.parameters: list[torch.Tensor] = [*genome.parameters(module)]
        self.groups = list(group_slots(genome, AT_ONCE))
        size = max(group[-1].stop - group[0].start for group in self.groups)
        self.is_small = len(self.groups) == 1
        self.rows = torch.empty(1 + self.is_small, size, dtype=genome.dtype, device=self.parameters[0].device)
        slots = genome.slots if self.is_small else ()
        self.views = [[row[slot.start : slot.stop].view(slot.shape) for slot in slots] for row in self.rows]
        self.pair: tuple[Candidates, int] | None = None  # the pair of members whose weights the rows hold
        owners = [
            (part._buffers, name) for part in module.modules() for name, x in part._buffers.items() if x is not None
        ]
        self.buffers = [(owner, name, cast(torch.Tensor, owner[name])) for owner, name in owners]
        self.used: list[tuple[torch.Tensor, int]] = []  # copies of the buffers, and how often each had been changed

    @torch.no_grad()
    def write(self, candidates: Candidates, member: int) -> nn.Module:
        """Return the module with a member's weights, and with buffers as they were at first."""
        if self.is_small and candidates.field.mirrored:
            self.write_one_of_pair(candidates, member)
        else:
            self.write_groups(candidates, member)
        used = self.used or [(original, -1) for _, _, original in self.buffers]
        self.used = []
        for (owner, name, original), (buffer, version) in zip(self.buffers, used, strict=True):
            if owner.get(name) is not buffer or buffer._version != version:
                owner[name] = buffer = original.clone()
            self.used.append((buffer, buffer._version))
        return self.module

    def write_one_of_pair(self, candidates: Candidates, member: int) -> None:
        """Write a member; its noise is drawn together with that of the member that has the opposite noise."""
        if self.pair is None or self.pair[0] is not candidates or self.pair[1] != member >> 1:
            candidates.weights(np.array([member & ~1, member | 1]), 0, self.rows.shape[1], self.rows)
            self.pair = candidates, member >> 1
        torch._foreach_copy_(self.parameters, self.views[member & 1])

    def write_groups(self, candidates: Candidates, member: int) -> None:
        """Write a member, some of its parameters at a time."""
        parameters = iter(self.parameters)
        for group in self.groups:
            start, stop = group[0].start, group[-1].stop
            row = candidates.weights(np.array([member]), start, stop, self.rows[:1, : stop - start])[0]
            views = [row[slot.start - start : slot.stop - start].view(slot.shape) for slot in group]
            torch._foreach_copy_([next(parameters) for _ in group], views)


def group_slots(genome: Genome, size: int) -> Iterator[list[Slot]]:
    """Yield the parameters of a genome in groups of at most ``size`` numbers, or of one larger parameter."""
    group: list[Slot] = []
    for slot in genome.slots:
        if group and slot.stop - group[0].start > size:
            yield group
            group = []
        group.append(slot)
    yield group


def copy_with_flat_weights(module: nn.Module) -> nn.Module:
    """Return a deep copy whose recurrent layers have their weights in one piece of memory, as cuDNN expects them."""
    module = copy_module(module)
    for part in module.modules():
        if isinstance(part, nn.RNNBase):
            part.flatten_parameters()
    return module


@contextmanager
def restored_attributes(module: nn.Module) -> Iterator[None]:
    """Restore the attributes of all parts of a module afterwards: what its code adds, replaces or puts into a list."""
    before = [
        (vars(part), {name: shallow_copy(value) for name, value in vars(part).items()}) for part in module.modules()
    ]
    try:
        yield
    finally:
        for attributes, saved in before:
            attributes.clear()
            attributes.update(saved)


def shallow_copy(value: Any) -> Any:
    """Return a copy of a list or a dict, and any other value itself."""
    return copy.copy(value) if type(value) in (list, dict) else value


class PrivateTensors(TorchFunctionMode):
    """Expands each new tensor that code makes to one for each member, so that members can write to it."""

    def __init__(self, block: Block) -> None:
        super().__init__()
        self.block = block

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function, and expand what it writes to or returns if that is a tensor that all members share."""
        if is_in_place(function) and self.is_shared(args[0]) and not args[0]._is_view():
            values = iterate_tensors([args[1:], kwargs or {}])
            if not all(map(self.is_shared, values)):  # the tensor that the code refers to becomes another one
                torch._C._swap_tensor_impl(args[0], self.expand(args[0]))
        output = function(*args, **(kwargs or {}))
        return self.expand(output) if function in FACTORIES and self.is_shared(output) else output

    def is_shared(self, value: Any) -> bool:
        """Return whether a value is a tensor that all members share, in code that runs for all of them."""
        functorch = torch._C._functorch
        if type(value) is not torch.Tensor or self.block.single_member is not None:
            return False
        return functorch.maybe_current_level() is not None and not functorch.is_batchedtensor(value)

    def expand(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor that all members share as one for each member."""
        size = self.block.size
        return self.block.call_once(
            [tensor], lambda inputs, batched: [inputs[0].expand(size, *inputs[0].shape).clone()]
        )[0]


def is_in_place(function: Any) -> bool:
    """Return whether a function writes to its first argument, by its name."""
    name = getattr(function, "__name__", "")
    return name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))


FACTORIES = {getattr(torch, f"{name}{like}") for name in ("zeros", "ones", "empty", "full") for like in ("", "_like")}
FACTORIES |= {getattr(torch.Tensor, f"new_{name}") for name in ("zeros", "ones", "empty", "full", "tensor")}
FACTORIES |= {torch.clone, torch.Tensor.clone, torch.arange, torch.tensor, torch.eye, torch.Tensor.repeat}
