"""Options by which Numba compiles the CPU kernels, and where it keeps them."""

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any, cast

import numba
from numba.np import linalg

Function = Callable[..., Any]

if find_spec("scipy") is not None:  # Numba would import SciPy, which takes longer than Numba, to see if it is there
    ensure_blas, linalg.ensure_blas = linalg.ensure_blas, lambda: None
    try:
        import numba.np.arraymath
    finally:
        linalg.ensure_blas = ensure_blas


def compile_kernel(function: Function) -> Function:
    """Return a function compiled by Numba at its first call, or loaded from Numba's cache on disk.

    Numba caches in ``NUMBA_CACHE_DIR``, in ``__pycache__`` next to the function's file or, where that cannot be
    written, in the user's cache folder. Where none of them can be written, every process compiles.
    """
    try:
        return cast(Function, numba.njit(nogil=True, cache=True, boundscheck=False)(function))
    except RuntimeError:
        return cast(Function, numba.njit(nogil=True, boundscheck=False)(function))
