"""The estimator that erases nothing, and searches over erasers that contain it."""

from __future__ import annotations

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
    sparse = sp.csr_array(X.astype(float))
    np.testing.assert_array_equal(eraser.transform(sparse).toarray(), X.astype(float))
    frame = pd.DataFrame(X, columns=list("abcdef"))
    framed = sf.Identity().set_output(transform="pandas").fit_transform(frame)
    pd.testing.assert_frame_equal(framed, frame)


def test_a_fit_that_fails_changes_nothing() -> None:
    X, _, _ = problem(50)
    eraser = sf.Identity().fit(X)
    bad = X.copy()
    bad[3, 2] = np.nan
    for attempt in (eraser.fit, eraser.transform):
        with pytest.raises(sf.NonFiniteError, match=r"row 3\), column 2"):
            attempt(bad)
    with pytest.raises(sf.NonFiniteError, match="row 3"):
        eraser.fit(sp.csr_array(np.c_[bad, bad]))
    with pytest.raises(sf.InputError, match="sample_weight"):
        eraser.fit(np.c_[X, X], sample_weight=-np.ones(50))
    with pytest.raises(sf.NotEnoughDataError, match="every sample_weight is zero"):
        eraser.fit(np.c_[X, X], sample_weight=np.zeros(50))
    assert eraser.n_features_in_ == 6
    with pytest.raises(NotFittedError):
        sf.Identity().transform(X)
