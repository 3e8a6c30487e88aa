"""What this machine has, whether its noise agrees with the definition, and how fast it is."""

import copy
import hashlib
import platform
import sqlite3
import tempfile
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from germline import noise
from germline.core import Core
from germline.fleet import Local
from germline.header import processor
from germline.journal import connect
from germline.kernels import Address, kernel_device, reference
from germline.noise import VALUES, Field
from germline.objective import Batch, Objective
from germline.strategies import OpenAIES
from germline.version import __version__

PARAMETERS, MEMBERS = 1 << 20, 16


def examine() -> dict[str, Any]:
    found: dict[str, Any] = {
        "germline": __version__,
        "noise version": noise.VERSION,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numba": bool(find_spec("numba")),
        "triton": bool(find_spec("triton")),
        "processor": f"{processor()}, {torch.get_num_threads()} threads",
    }
    for device in devices():
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
        place = kernel_device(device)
        found[f"{device}"] = name if place == device else f"{name}; its noise is made on the {place}"
        found[f"{device} noise"] = "agrees with the definition" if agrees(device) else "DISAGREES with the definition"
        found |= {f"{device} {what}": said for what, said in rates(device).items()}
        found |= {f"{device} {what}": said for what, said in fractions(device).items()}
    try:
        found["journal commit"] = f"{1e3 * commit_time():.2f} ms"
    except OSError as error:
        found["journal commit"] = f"cannot be measured here: {error.strerror}"
    return found


def devices() -> list[torch.device]:
    found = [torch.device("cpu"), *(torch.device("cuda", i) for i in range(torch.cuda.device_count()))]
    return [*found, torch.device("mps")] if torch.backends.mps.is_available() else found


def agrees(device: torch.device) -> bool:
    """A slice of the field, made on the device and by the definition."""
    low, high = noise.DIGEST_SPAN
    address = Address(0xF123456789ABCDEF, 0, 2**32 - 1, np.array([5, 2**32 - 1]), low)
    expected = reference.draw_integers(address, high - low, VALUES["popcount"].reading).astype(np.int8)
    return noise.field_digest(device) == hashlib.sha256(expected.tobytes()).hexdigest()


def rates(device: torch.device) -> dict[str, str]:
    few = Field(1).members(range(MEMBERS), 0, device)
    theta = torch.zeros(PARAMETERS, device=device)
    weights = list(range(MEMBERS))

    def rate(work: Callable[[], torch.Tensor]) -> str:
        best = best_of(lambda: work()[..., :1].cpu(), 4)  # waits for the device
        return f"{MEMBERS * PARAMETERS / best / 1e9:.2f}e9 elements/s"

    return {
        "perturb": rate(lambda: few.perturb(theta, 0.01)),
        "accumulate": rate(lambda: few.accumulate(weights, (0, PARAMETERS))),
    }


def fractions(device: torch.device) -> dict[str, str]:
    """How fast a population is evaluated, beside one network's inference on as many examples in the same arithmetic."""
    population, batch = (4096, 256) if device.type == "cuda" else (64, 64)
    module = nn.Sequential(nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 10)).to(device)
    examples = Batch.from_raw((torch.randn(batch, 784), torch.randint(0, 10, (batch,))), device)
    large = examples.args[0].repeat(population, 1)
    found = {}
    for name, rank in (("dense noise", None), ("noise of rank 1", 1)):
        core = Core(
            module, OpenAIES(population=population, rank=rank), Objective(F.cross_entropy), Local(str(device)), 0
        )
        core.prepare(examples)
        assert core.plan is not None
        kind = torch.bfloat16 if core.plan.dtype == "bfloat16" else torch.float32
        plain, x = copy.deepcopy(module).to(kind), large.to(kind)
        with torch.no_grad():
            pure = best_of(lambda: plain(x)[:1].cpu())  # noqa: B023
        numbers = iter(range(2, 100))
        whole = best_of(lambda: core.tell(core.evaluate(next(numbers), examples)))  # noqa: B023
        found[name] = f"a generation at {pure / whole:.2f} of the speed of inference, {core.plan.dtype}"
    return found


def best_of(work: Callable[[], object], times: int = 8) -> float:
    best = float("inf")
    for _ in range(times):
        start = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - start)
    return best


def commit_time() -> float:
    """Of a record that survives a power cut, on the disk of the current directory."""
    with tempfile.TemporaryDirectory(dir=".") as directory:
        connection = connect(Path(directory) / "try.sqlite")
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("CREATE TABLE t (x BLOB)")
        start = time.perf_counter()
        for _ in range(20):
            connection.execute("INSERT INTO t VALUES (?)", (sqlite3.Binary(bytes(1024)),))
        seconds = (time.perf_counter() - start) / 20
        connection.close()
    return seconds
