"""Facts about this machine: its processor, its memory and its arithmetic, as far as its system says."""

import ctypes
import os
import platform
import sys
from pathlib import Path

import torch


def processor_name() -> str:
    """Return the name of the processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor()


def product_mode() -> str | None:
    """Return MKL's mode of reproducible matrix products in this process, or None where torch has no MKL.

    Importing Germline asks for the mode AUTO by the variable MKL_CBWR. MKL reads it at its first call and cannot be
    told later: a product that comes before leaves the mode OFF, in which last bits depend on the alignment of memory.
    """
    library = next((Path(torch.__file__).parent / "lib").glob("*torch_cpu.[sd]*"), None)
    try:
        branch = ctypes.CDLL(str(library)).mkl_serv_cbwr_get(1)
    except (OSError, AttributeError):
        return None
    return {1: "OFF", 2: "AUTO", 3: "COMPATIBLE"}.get(branch, f"branch {branch}")


def available_memory(device: torch.device) -> int:
    """Return the free bytes of a device's memory, or 0 where the system does not say."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return 0


def resident_memory() -> int:
    """Return the bytes of this process that are in memory now, or 0 where the system does not say."""
    try:
        pages = Path("/proc/self/statm").read_text().split()[1]
    except OSError:
        return 0
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def peak_memory(device: torch.device) -> int:
    """Return the most bytes that this process has used: of a GPU by torch's account, else of the machine's memory."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        import resource
    except ImportError:  # Windows
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
