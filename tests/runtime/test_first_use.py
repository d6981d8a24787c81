"""_kernels: the first use in a process compiles nothing and writes no cache."""

from __future__ import annotations

from pathlib import Path

import pytest
from processes import script

CORE = """
import sys
import numpy as np
import splince_fast as sf

rng = np.random.default_rng(0)
z, y = rng.integers(0, 10, 5000), rng.normal(size=5000)
for dtype in (np.float16, np.float32, np.float64):
    X = (rng.normal(size=(5000, 20)) + z[:, None] / 9).astype(dtype)
    moments = sf.Moments().update(X, {"z": z, "y": y}, sample_weight=rng.random(5000))
    sf.Moments(subsample=0.5).update(X, {"z": z}).mean
    for i in range(3):
        moments.update(X[i : i + 1], {"z": z[i : i + 1], "y": y[i : i + 1]})
    for eraser in (
        sf.splince(moments, erase="z", keep="y", shrinkage=0.1),
        sf.leace(moments, erase="y"),
        sf.sal(moments, erase="y"),
    ):
        for rows in (X, np.asfortranarray(X), X[::2], X[:1]):
            eraser(rows)
"""
# The control: work that Numba does.
SPARSE = (
    CORE
    + """
import scipy.sparse

rows = scipy.sparse.csr_matrix(X.astype(np.float64))
sf.Moments(covariance_type="diag").update(rows, {"z": z}).mean
"""
)


@pytest.mark.parametrize(("code", "numba"), [(CORE, False), (SPARSE, True)], ids=["core", "sparse"])
def test_first_use_compiles_nothing(code: str, numba: bool, tmp_path: Path) -> None:
    told = script(code + "\nprint('numba' in sys.modules)", NUMBA_CACHE_DIR=str(tmp_path))
    assert told.split() == [str(numba)]
    assert bool(list(tmp_path.iterdir())) is numba
