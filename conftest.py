"""Without a GPU the CUDA kernels run in Triton's interpreter, which must be chosen before Triton is imported."""

import os
from importlib.util import find_spec

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

collect_ignore = [] if find_spec("triton") else ["germline/kernels/cuda.py"]
