"""The package as a whole."""

import subprocess
import sys

SCRIPT = """
import sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"numba", "llvmlite", "triton", "sklearn", "matplotlib", "rich", "typer"}:
            raise ImportError(name)

sys.meta_path.insert(0, Refuse())
import germline, germline.noise, germline.genome, germline.optim
assert "numba" not in sys.modules
"""


def test_imports_with_torch_and_numpy_alone() -> None:
    subprocess.run([sys.executable, "-c", SCRIPT], check=True)
