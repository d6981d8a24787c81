"""The estimator that erases nothing, and searches over erasers that contain it."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
from sklearn.exceptions import NotFittedError

import splince_fast as sf


def problem(n: int = 600) -> tuple[Any, Any, Any]:
    """Rows, a task, and a concept that is entangled with it."""
    rng = np.random.default_rng(0)
    z = rng.integers(0, 2, n)
    y = np.where(rng.random(n) < 0.8, z, 1 - z)
    X = rng.normal(size=(n, 6)) + np.outer(z, np.eye(6)[0]) + np.outer(y, np.eye(6)[1])
    return X, y, z


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16])
def test_rows_come_back_as_they_are(dtype: Any) -> None:
    X, y, z = problem(50)
    X = X.astype(dtype)
    eraser = sf.Identity().fit(X, y, concept=z)
    clean = eraser.transform(X)
    assert clean.dtype == dtype
    np.testing.assert_array_equal(clean, X)
    assert not np.shares_memory(clean, X)
    assert eraser.projection_.rank == 0
    np.testing.assert_array_equal(eraser.transform(sp.csr_array(X.astype(float))), X.astype(float))


def test_report_of_identity_removes_nothing() -> None:
    X, _, _ = problem(50)
    weight = np.arange(50.0)
    eraser = sf.Identity().fit(X, sample_weight=weight)
    report = eraser.report_
    assert (eraser.n_samples_seen_, report.n_rows, report.weight) == (49, 49, weight.sum())
    assert (report.rank, report.distortion, report.n_features) == (0, 0.0, 6)
    assert "removes 0 of 6 dimension" in report.explain()
    assert sf.Report.from_dict(report.to_dict()) == report
    assert pickle.loads(pickle.dumps(eraser)).report_ == report


def test_identity_of_parts_equals_one_fit() -> None:
    X, _, z = problem(50)
    parts = sf.Identity()
    for start in range(0, 50, 20):
        parts.partial_fit(X[start : start + 20], concept=z[start : start + 20])
    assert parts.report_ == sf.Identity().fit(X, concept=z).report_
    both = sf.Identity().fit(X[:20]).merge(sf.Identity().fit(X[20:]))
    assert both.report_ == parts.report_
    assert both.fit(X[:20]).n_samples_seen_ == 20
    frame = pd.DataFrame(X, columns=list("abcdef"))
    for other in (X[:, :5], frame, frame.rename(columns={"a": "g"})):
        named = sf.Identity().fit(frame if other is not frame else X)
        with pytest.raises(sf.IncompatibleMomentsError, match="fitted to different features"):
            named.merge(sf.Identity().fit(other))
        assert named.n_samples_seen_ == 50
    with pytest.raises(sf.IncompatibleMomentsError, match="cannot merge LEACE"):
        both.merge(sf.LEACE().fit(X, concept=z))  # type: ignore[arg-type]
    assert both.n_samples_seen_ == 20


def test_a_fit_that_fails_changes_nothing() -> None:
    X, _, _ = problem(50)
    eraser = sf.Identity().fit(X)
    bad = X.copy()
    bad[3, 2] = np.nan
    for attempt in (eraser.fit, eraser.partial_fit, eraser.transform):
        with pytest.raises(sf.NonFiniteError, match=r"row 3\), column 2"):
            attempt(bad)
    with pytest.raises(sf.NonFiniteError, match="row 3"):
        eraser.fit(sp.csr_array(bad))
    with pytest.raises(sf.InputError, match="sample_weight"):
        eraser.fit(X, sample_weight=-np.ones(50))
    with pytest.raises(sf.NotEnoughDataError, match="every sample_weight is zero"):
        eraser.fit(X, sample_weight=np.zeros(50))
    assert eraser.n_samples_seen_ == 50
    for use in (lambda e: e.report_, lambda e: e.transform(X)):
        with pytest.raises(NotFittedError):
            use(sf.Identity())
