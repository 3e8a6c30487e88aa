"""Functions on a GPU that are recorded once as a CUDA graph, then launched without Python between their kernels."""

import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache

import torch

from germline.kernels import cached_arrays

TRUSTED_FOR = 100  # launches of a function that is doubted, before it is checked again

recording = threading.RLock()  # a recording begins by waiting for the GPU, which spoils one that is under way


class Recorded:
    """A recorded function takes tensors on a GPU and returns a tensor; from its second or third call on it is a graph.

    The first call runs the function, on inputs that are copied to where all later ones will be, and records it. A
    function that is ``doubted`` is both run and launched at the second call, and again after every hundred launches,
    and both must give the same bits. A function that cannot be recorded, or whose bits differ, is run each time. The
    result stays valid until the next call.

    Args:
        function: a function of tensors that are all on one GPU.
        doubted: whether the function runs code of the user, which may compute something else at another call.
    """

    def __init__(self, function: Callable[..., torch.Tensor], *, doubted: bool = False) -> None:
        self.function = function
        self.doubted = doubted
        self.failed = False
        self.trusted = False
        self.launches = 0
        self.graph: torch.cuda.CUDAGraph | None = None
        self.inputs: list[torch.Tensor] = []  # the memory that the graph reads

    def __call__(self, *inputs: torch.Tensor) -> torch.Tensor:
        if self.failed:
            return self.function(*inputs)
        with torch.cuda.device(inputs[0].device):  # graphs are recorded and launched on the current device
            return self._run(inputs)

    def _run(self, inputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
        self._copy_inputs(inputs)
        if self.trusted:
            assert self.graph is not None
            self.graph.replay()
            self.launches += 1
            self.trusted = not (self.doubted and self.launches % TRUSTED_FOR == 0)
            return self.output
        result = self.function(*self.inputs)
        if self.graph is None:
            self._record()
            self.trusted = not self.failed and not self.doubted
        else:
            self.graph.replay()
            self.trusted = has_same_bits(result, self.output)
            self.failed = not self.trusted
        if self.failed:
            self.graph, self.inputs = None, []
        return result

    def _copy_inputs(self, inputs: tuple[torch.Tensor, ...]) -> None:
        """Copy the inputs to where the graph reads them."""
        if not self.inputs:
            self.inputs = [x.detach().clone() for x in inputs]
        else:
            for target, source in zip(self.inputs, inputs, strict=True):
                target.copy_(source)

    def _record(self) -> None:
        graph = torch.cuda.CUDAGraph()
        try:
            stream = recording_stream(self.inputs[0].device)
            capture = torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local")
            with recording, no_garbage_collection(), capture:
                self.output = self.function(*self.inputs)
        except Exception:  # the function waits for the GPU, or needs memory of the host
            with recording:
                torch.cuda.synchronize()
            self.failed = True
            return
        self.graph = graph
        self.cached_arrays = list(cached_arrays.values())  # arrays that the graph reads must outlive it


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Suspend garbage collection: an older graph that is destroyed would spoil the one that is being recorded."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@cache
def recording_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the stream on which a GPU records; by default torch would use one stream for all GPUs."""
    stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    return stream


def has_same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether two tensors have the same shape and bits, so that NaN equals NaN."""
    return a.shape == b.shape and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
