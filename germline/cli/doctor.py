"""The examination of a machine: its devices, whether their noise agrees with the definition, and how fast they are."""

import copy
import hashlib
import platform
import tempfile
from collections.abc import Callable
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from timeit import repeat, timeit
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from germline import noise
from germline.engine.journal import connect
from germline.engine.session import Session
from germline.fleet import Local
from germline.kernels import Address, kernel_device, reference
from germline.machine import processor_name
from germline.objective import Batch, Objective
from germline.strategies import OpenAIES
from germline.version import __version__

PARAMETERS, MEMBERS = 1 << 20, 16
RANKS = {"dense noise": None, "noise of rank 1": 1}


def examine() -> dict[str, Any]:
    """Return what is known and measured of this machine, by names for people."""
    report: dict[str, Any] = {
        "germline": __version__,
        "noise version": noise.VERSION,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numba": bool(find_spec("numba")),
        "triton": bool(find_spec("triton")),
    }
    for device in list_devices():
        name = name_device(device)
        place = kernel_device(device)
        report[f"{device}"] = name if place == device else f"{name}; its noise is made on the {place}"
        agrees = "agrees" if has_exact_noise(device) else "DISAGREES"
        report[f"{device} noise"] = f"{agrees} with the definition"
        report |= {f"{device} {what}": rate for what, rate in measure_noise(device).items()}
        report |= {f"{device} {what}": measure_generation(device, rank) for what, rank in RANKS.items()}
    try:
        report["journal commit"] = f"{1e3 * commit_seconds():.2f} ms"
    except OSError as error:
        report["journal commit"] = f"cannot be measured here: {error.strerror}"
    return report


def name_device(device: torch.device) -> str:
    """Return the name that the maker gave a device."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if device.type == "cpu":
        return f"{processor_name()}, {torch.get_num_threads()} threads"
    return "Apple GPU"


def list_devices() -> list[torch.device]:
    """Return the devices of this machine."""
    devices = [torch.device("cpu"), *(torch.device("cuda", i) for i in range(torch.cuda.device_count()))]
    return [*devices, torch.device("mps")] if torch.backends.mps.is_available() else devices


def has_exact_noise(device: torch.device) -> bool:
    """Return whether a slice of the noise field has the same bits on a device as by the definition."""
    low, high = noise.DIGEST_SPAN
    address = Address(0xF123456789ABCDEF, 0, 2**32 - 1, np.array([5, 2**32 - 1]), low)
    expected = reference.draw_integers(address, high - low, noise.VALUES["popcount"].reading).astype(np.int8)
    return noise.field_digest(device) == hashlib.sha256(expected.tobytes()).hexdigest()


def measure_noise(device: torch.device) -> dict[str, str]:
    """Return how fast a device perturbs parameters, and sums the noise of members."""
    few = noise.Field(1).members(range(MEMBERS), 0, device)
    theta = torch.zeros(PARAMETERS, device=device)

    def rate(work: Callable[[], Tensor]) -> str:
        seconds = least_seconds(lambda: work()[..., :1].cpu(), 4)  # waits for the device
        return f"{MEMBERS * PARAMETERS / seconds / 1e9:.2f}e9 elements/s"

    accumulate = rate(lambda: few.accumulate(list(range(MEMBERS)), (0, PARAMETERS)))
    return {"perturb": rate(lambda: few.perturb(theta, 0.01)), "accumulate": accumulate}


def measure_generation(device: torch.device, rank: int | None) -> str:
    """Return how fast a generation is, compared with one network's inference on as many examples in the same dtype."""
    population, size = (4096, 256) if device.type == "cuda" else (64, 64)
    module = nn.Sequential(nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 10)).to(device)
    batch = Batch.from_raw((torch.randn(size, 784), torch.randint(0, 10, (size,))), device)
    strategy, objective = OpenAIES(population=population, rank=rank), Objective(F.cross_entropy)
    session = Session.create(module, strategy, objective, Local(str(device)), 0)
    session.prepare(batch)
    kind = session.scorer.chosen_plan.dtype
    dtype = torch.bfloat16 if kind == "bfloat16" else torch.float32
    plain, x = copy.deepcopy(module).to(dtype), batch.args[0].repeat(population, 1).to(dtype)
    with torch.no_grad():
        inference = least_seconds(lambda: plain(x)[:1].cpu())
    numbers = count(2)
    generation = least_seconds(lambda: session.tell(session.evaluate(next(numbers), batch)))
    return f"a generation at {inference / generation:.2f} of the speed of inference, {kind}"


def least_seconds(work: Callable[[], object], times: int = 8) -> float:
    """Return the shortest time that some work takes."""
    return min(repeat(work, number=1, repeat=times))


def commit_seconds() -> float:
    """Return the seconds of a commit that survives a power cut, on the disk of the current directory."""
    with tempfile.TemporaryDirectory(dir=".") as directory:
        connection = connect(Path(directory) / "try.sqlite")
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("CREATE TABLE t (x BLOB)")
        seconds = timeit(lambda: connection.execute("INSERT INTO t VALUES (?)", (bytes(1024),)), number=20)
        connection.close()
    return seconds / 20
