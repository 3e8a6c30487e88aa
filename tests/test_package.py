"""The package as a whole."""

import re
import subprocess
import sys
from pathlib import Path

SCRIPT = """
import sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"numba", "llvmlite", "triton", "sklearn", "matplotlib", "rich", "typer"}:
            raise ImportError(name)

sys.meta_path.insert(0, Refuse())
import germline, germline.noise, germline.genome, germline.optim
assert all(hasattr(germline, name) for name in germline.__all__)  # which imports them
assert "numba" not in sys.modules
assert "transformers" not in sys.modules
"""


def test_imports_with_torch_and_numpy_alone() -> None:
    subprocess.run([sys.executable, "-c", SCRIPT], check=True)


def test_the_example_of_the_readme_runs(tmp_path: Path) -> None:
    readme = (Path(__file__).parent.parent / "README.md").read_text()
    (example,) = re.findall(r"```python\n(.*?)```", readme, flags=re.DOTALL)
    subprocess.run([sys.executable, "-c", example], check=True, cwd=tmp_path)


FORK = """
import os, warnings
import numpy as np, torch
from germline.noise import Field

warnings.simplefilter("ignore")
torch.set_num_threads(2)
noise = Field(1).members(range(64), 0)
before = noise.accumulate([1] * 64, (0, 100_000))  # starts threads
child = os.fork()
if child == 0:
    os._exit(0 if torch.equal(noise.accumulate([1] * 64, (0, 100_000)), before) else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
"""


def test_kernels_run_in_a_forked_child() -> None:
    subprocess.run([sys.executable, "-c", FORK], check=True, timeout=60)
