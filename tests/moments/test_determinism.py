"""The same blocks give the same bytes, and a pass takes memory for blocks only."""

from __future__ import annotations

import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from entangled import drawn, normal
from naive_model import state_bytes
from processes import script

import splince_fast as sf
from splince_fast import Moments, sources

EPS = float(np.finfo(np.float64).eps)


def _bytes_of_a_run(seed: int = 0) -> tuple[Any, bytes]:
    X, z, y = drawn(3000, 70, seed)
    moments = Moments(block_rows=512)
    for start in range(0, 3000, 700):
        rows = slice(start, start + 700)
        moments.update(X[rows].astype(np.float32), {"z": z[rows], "y": y[rows]})
    P = sf.splince(moments, erase="z", keep="y")
    return state_bytes(moments), P.left.tobytes() + P.right.tobytes() + P(X).tobytes()


def test_the_same_blocks_give_the_same_bytes() -> None:
    assert _bytes_of_a_run() == _bytes_of_a_run()
    assert _bytes_of_a_run(1)[1] != _bytes_of_a_run()[1], "the control: other rows, other bytes"


THREADS = """
import sys
import numpy as np
import splince_fast as sf
X = np.random.default_rng(0).normal(size=(3000, 300))
z = np.arange(3000) % 3
X[:, 0] += z
moments = sf.Moments().update(X, {"z": z})
np.savez(sys.argv[1], covariance=moments.covariance(), matrix=sf.leace(moments, erase="z").matrix())
"""


def test_blas_threads_agree_to_rounding(tmp_path: Path) -> None:
    found = []
    for threads in ("1", "2"):
        path = tmp_path / f"{threads}.npz"
        script(THREADS, str(path), OPENBLAS_NUM_THREADS=threads)
        found.append(dict(np.load(path)))
    for name, scale in (("covariance", np.abs(found[0]["covariance"]).max()), ("matrix", 1.0)):
        # Sums of n products in another order differ by a few sqrt(n) eps; solving adds d eps.
        assert np.abs(found[0][name] - found[1][name]).max() < 300 * 8 * EPS * scale, name


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_memory_of_a_pass_over_a_file_does_not_grow_with_its_rows(
    tmp_path: Path, dtype: Any
) -> None:
    """At most three d x d matrices of doubles and three blocks, as NumPy's allocations show."""
    d, block_rows = 256, 512
    peaks = []
    for n in (4096, 16384):
        path = tmp_path / f"{n}.npy"
        np.save(path, np.zeros((n, d), dtype) + normal(1, d).astype(dtype))
        Moments(block_rows=8).update(np.ones((16, d), dtype))  # compiles
        tracemalloc.start()
        try:
            source = sources.from_npy(path, block_rows=block_rows)
            moments = Moments.from_blocks(source, block_rows=block_rows)
            peaks.append(tracemalloc.get_traced_memory()[1])
        finally:
            tracemalloc.stop()
        assert moments.n_rows == n
    block = block_rows * d * np.dtype(dtype).itemsize
    # Besides: vectors of length d and Python's own objects.
    assert max(peaks) < 3 * 8 * d * d + 3.5 * block + 64 * 8 * d + 200_000, peaks
    assert peaks[1] < peaks[0] + 1.5 * block
