"""Data that are larger than the memory of the process: a Dataset reads them example by example."""

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = '''
import os, re, resource, sys
import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
import germline as gl

ROW, ROWS, ALLOWED = 1 << 16, 1 << 15, 512 << 20  # bytes: 2 GiB of data, and half a GiB for the process to use

class Rows(Dataset):
    """Rows of a file: numbers from 0 to 255, of which the first ones are given and all others are 0."""

    def __init__(self, path):
        self.file = os.open(path, os.O_RDONLY)

    def __len__(self):
        return os.fstat(self.file).st_size // ROW

    def __getitem__(self, i):
        row = torch.tensor(np.frombuffer(os.pread(self.file, ROW, i * ROW), np.uint8)[:16].astype(np.float32))
        return row / 255, int(row[0] > row[1])

def used(name):
    return int(re.search(name + r":\\s+(\\d+)", open("/proc/self/status").read())[1]) << 10

path = sys.argv[1]
numbers = np.random.default_rng(0).integers(0, 256, (ROWS, 16), np.uint8)
with open(path, "wb") as file:
    file.truncate(ROW * ROWS)
    for i in range(ROWS):
        os.pwrite(file.fileno(), numbers[i].tobytes(), i * ROW)
data = Rows(path)
model = gl.seeded(0, lambda: nn.Linear(16, 2))
settings = dict(score=gl.accuracy, fleet=gl.Local("cpu", workers=1), seed=1, progress=False)
gl.train(model, DataLoader(data, 64), generations=2, run=False, **settings)  # imports and compiles everything
limit = used("VmData") + ALLOWED
resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
try:
    np.ones(ROW * ROWS, np.uint8)
except MemoryError:
    print("not in memory")
sizes = []
result = gl.train(
    gl.seeded(0, lambda: nn.Linear(16, 2)), DataLoader(data, 64), dev=data, generations=120, evaluate_every=60,
    callbacks=lambda run, row: sizes.append(used("VmRSS")), run=sys.argv[2], **settings,
)
print("accuracy", result.summary["metrics"]["dev_accuracy"])
print("growth", (max(sizes[60:]) - min(sizes[40:60])) >> 20)
resumed = gl.train(
    gl.seeded(0, lambda: nn.Linear(16, 2)), DataLoader(data, 64), dev=data, generations=125, evaluate_every=60,
    resume=sys.argv[2], **{key: value for key, value in settings.items() if key != "seed"},
)
print("generations", len(resumed.history))
os.pwrite(os.open(path, os.O_WRONLY), b"\\xff\\x00", (ROWS - 1) * ROW)  # which is hashed
try:
    gl.train(model, DataLoader(data, 64), dev=data, generations=130, resume=sys.argv[2], score=gl.accuracy)
except ValueError as error:
    print("refused:", error)
'''


@pytest.mark.slow
def test_a_file_larger_than_memory(tmp_path: Path) -> None:
    """Two GiB of data train in a process that may use half a GiB more, whose memory does not grow."""
    command = [sys.executable, "-W", "error", "-c", PROGRAM, str(tmp_path / "rows.bin"), str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = dict(line.split(" ", 1) for line in done.stdout.splitlines())
    assert lines["not"] == "in memory"
    assert float(lines["accuracy"]) > 0.8
    assert int(lines["growth"]) <= 16  # MiB
    assert lines["generations"] == "125"
    assert "data" in lines["refused:"]
