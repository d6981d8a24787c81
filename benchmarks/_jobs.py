"""Jobs whose peak memory is measured in processes of their own; see `benchmarks._memory`.

Each prepares its data, runs once on a few rows so that libraries are loaded and compiled, and
returns the job.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import splince_fast as sf
from benchmarks import _data, _machine, _peers


def accumulate_file(path: str) -> Callable[[], object]:
    """`Moments.from_blocks` over a .npy file of rows, with a binary concept."""
    n = len(np.load(path, mmap_mode="r"))
    z = np.arange(n, dtype=np.int64) % 2
    few = np.load(path, mmap_mode="r")[:9000]
    sf.Moments.from_blocks(sf.sources.from_arrays(few, {"z": z[:9000]}))
    source = sf.sources.from_npy(path, {"z": z})
    return lambda: sf.Moments.from_blocks(source)


def apply_in_place(n: int, d: int, dtype: str) -> Callable[[], object]:
    """`eraser(X, out=X)`."""
    few = _data.problem(2000, d)
    eraser = sf.leace(few.moments(), erase="z")
    X = np.ones((n, d), dtype)
    eraser(X[:2000], out=X[:2000])
    return lambda: eraser(X, out=X)


def erase(name: str, n: int, d: int) -> Callable[[], object]:
    """Fit and apply by one of the contenders of `_peers.erasers`, float32 rows, binary concept."""
    _machine.equal_threads()
    few = _peers.erasers(_data.problem(4 * d, d))[name]
    if not callable(few):
        raise SystemExit(few.reason)
    few()
    work: Any = _peers.erasers(_data.problem(n, d))[name]
    return lambda: work()
