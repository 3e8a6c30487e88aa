"""Settings of all tests: kernels, data, and imports that do not outlive a test.

Without a GPU the CUDA kernels run in Triton's interpreter, which must be chosen before Triton is imported.
"""

import os
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

data = Path(__file__).parent.parent / "shared" / "data"  # next to the repository, where there is one
if data.is_dir():
    os.environ.setdefault("GERMLINE_DATA", str(data))

collect_ignore_glob = [] if find_spec("triton") else ["germline/kernels/cuda*.py"]


@pytest.fixture(autouse=True)
def forget_imports(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Forget the files that a test imported from its own folder: the next one may have others of the same names."""
    path = list(sys.path)
    yield
    sys.path[:] = path
    folder = str(tmp_path_factory.getbasetemp())
    for name, module in list(sys.modules.items()):
        if (getattr(module, "__file__", None) or "").startswith(folder):
            del sys.modules[name]
