"""What this machine has, whether its noise agrees with the definition, and how fast it is."""

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

from germline import noise
from germline.header import processor
from germline.journal import connect
from germline.kernels import Address, home, reference
from germline.noise import VALUES, Field
from germline.version import __version__

SPAN = (777, 777 + 5000)
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
        place = home(device)
        found[f"{device}"] = name if place == device else f"{name}; its noise is made on the {place}"
        found[f"{device} noise"] = "agrees with the definition" if agrees(device) else "DISAGREES with the definition"
        found |= {f"{device} {what}": said for what, said in rates(device).items()}
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
    values = Field(0xF123456789ABCDEF).members([5, 2**32 - 1], 2**32 - 1, device).integers(SPAN).cpu().numpy()
    address = Address(0xF123456789ABCDEF, 0, 2**32 - 1, np.array([5, 2**32 - 1]), SPAN[0])
    expected = reference.slices(address, SPAN[1] - SPAN[0], VALUES["popcount"].reading).astype(np.int8)
    return hashlib.sha256(values.tobytes()).digest() == hashlib.sha256(expected.tobytes()).digest()


def rates(device: torch.device) -> dict[str, str]:
    few = Field(1).members(range(MEMBERS), 0, device)
    theta = torch.zeros(PARAMETERS, device=device)
    weights = list(range(MEMBERS))

    def rate(work: Callable[[], torch.Tensor]) -> str:
        best = float("inf")
        for _ in range(4):
            start = time.perf_counter()
            work()[..., :1].cpu()  # waits for the device
            best = min(best, time.perf_counter() - start)
        return f"{MEMBERS * PARAMETERS / best / 1e9:.2f}e9 elements/s"

    return {
        "perturb": rate(lambda: few.perturb(theta, 0.01)),
        "accumulate": rate(lambda: few.accumulate(weights, (0, PARAMETERS))),
    }


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
