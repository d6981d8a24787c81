"""Many label columns, such as indicators of classes."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from entangled import normal
from naive_model import U64, Rows, check, state_bytes
from numpy.typing import NDArray

import splince_fast as sf
from splince_fast import Moments
from splince_fast.moments.column_sums import ColumnSums

Float = NDArray[Any]
N, D, K = 1300, 40, 12

CASES = ("every row", "rows of zeros", "missing rows")


def indicators(case: str, n: int = N, k: int = K) -> Float:
    """Indicators of classes, of which the last has no rows and the first has many."""
    rng = np.random.default_rng(5)
    codes = rng.integers(0, k - 1, n) * rng.integers(0, 2, n)
    Z: Float = np.eye(k)[codes]
    if case == "rows of zeros":  # a first dummy that was dropped
        Z[:, 0] = 0.0
    if case == "missing rows":
        Z[::7] = np.nan
    return Z


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_indicators_equal_two_passes_over_the_rows(case: str, weighted: bool, dtype: Any) -> None:
    """Columns of indicators, of float32 rows too, keep the digits that class codes keep."""
    Z, X = indicators(case), normal(N, D, dtype, seed=1)
    weight = np.random.default_rng(3).random(N) + 0.2 if weighted else None
    given = [tuple(map(float, row)) if not np.isnan(row[0]) else None for row in Z]
    w = np.ones(N) if weight is None else weight
    rows = Rows(X.astype(np.float64), w, {"z": given}, narrow=dtype is np.float32)
    moments = Moments(block_rows=300).update(X, {"z": Z}, sample_weight=weight)
    check(moments, rows)
    first, second = (
        Moments(block_rows=300).update(
            X[cut], {"z": Z[cut]}, sample_weight=None if weight is None else weight[cut]
        )
        for cut in (slice(801), slice(801, None))
    )
    check(first + second, rows)
    check(moments - second, rows.take(slice(801)), rows)


def test_constant_columns_have_no_deviation() -> None:
    Z = np.zeros((N, K))
    Z[:, 4] = 1.0
    weight = np.random.default_rng(0).random(N) + 1e-3
    X = normal(N, D, seed=1).astype(np.float32)
    moments = Moments().update(X[:700], {"z": Z[:700]}, sample_weight=weight[:700])
    moments.update(X[700:], {"z": Z[700:]}, sample_weight=weight[700:])
    assert moments.mean.shape == (D,)  # merges the rows that wait
    sums = cast(ColumnSums, moments._accumulator.variables["z"])
    for name in ("z_sum", "squares", "products"):
        assert (getattr(sums, name) == 0.0).all(), name
    assert (sums.deviations() == 0.0).all()


def test_a_stretch_of_missing_labels_fills_a_block(tmp_path: Path) -> None:
    X, Z = normal(90, 5), np.eye(9)[np.arange(90) % 9]
    Z[30:60] = np.nan
    moments = Moments(block_rows=30).update(X, {"z": Z})
    given = [None if np.isnan(row[0]) else tuple(map(float, row)) for row in Z]
    check(moments, Rows(X, np.ones(90), {"z": given}))
    moments.save(tmp_path / "m.safetensors")
    assert state_bytes(Moments.load(tmp_path / "m.safetensors")) == state_bytes(moments)


def test_threads_do_not_change_the_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    X, Z = normal(4000, 600).astype(np.float32), indicators("rows of zeros", 4000)
    found = []
    for count in "123":
        monkeypatch.setenv("SPLINCE_FAST_NUM_THREADS", count)
        found.append(state_bytes(Moments(block_rows=1500).update(X, {"z": Z})))
    assert found[0] == found[1] == found[2]


def test_erasers_are_those_of_class_codes() -> None:
    Z, X = indicators("every row"), normal(N, D, seed=1)
    codes = Z.argmax(axis=1)
    X[:, 0] += codes
    by_columns = sf.leace(Moments().update(X, {"z": Z}), erase="z").matrix()
    by_codes = sf.leace(Moments().update(X, {"z": codes}), erase="z").matrix()
    # Both solve the same problem of condition below 1e3.
    assert np.abs(by_columns - by_codes).max() <= 1e3 * 8 * N * U64
    assert np.abs(by_codes - np.eye(D)).max() > 0.1
