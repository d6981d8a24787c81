"""How every Numba kernel is compiled: for the host, cached, without the GIL."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba


def kernel(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile `function` with the one set of options that all kernels share."""
    # Reassociation and contraction let sums use SIMD; NaN and infinity keep their meaning.
    options: dict[str, Any] = {
        "nogil": True,
        "fastmath": {"reassoc", "contract"},
        "error_model": "numpy",
    }
    try:
        compiled: Callable[..., Any] = numba.njit(cache=True, **options)(function)
    except RuntimeError:  # no writable place for the cache: compile once in each process
        compiled = numba.njit(**options)(function)
    return compiled
