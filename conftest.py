"""Without a GPU the CUDA kernels run in Triton's interpreter, which must be chosen before Triton is imported."""

import os
from importlib.util import find_spec
from pathlib import Path

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

data = Path(__file__).parent.parent / "shared" / "data"  # next to the repository, where there is one
if data.is_dir():
    os.environ.setdefault("GERMLINE_DATA", str(data))

collect_ignore_glob = [] if find_spec("triton") else ["germline/kernels/cuda*.py"]
