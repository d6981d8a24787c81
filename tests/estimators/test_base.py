"""Rows as estimators read them: frames, columns of vectors, errors that name a place; Identity."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
from sklearn.exceptions import NotFittedError

import splince_fast as sf

pd = pytest.importorskip("pandas")
pl = pytest.importorskip("polars")


def problem() -> tuple[Any, Any, Any]:
    rng = np.random.default_rng(0)
    z, y = rng.integers(0, 2, (2, 60))
    return rng.normal(size=(60, 3)) + z[:, None], y, z


@pytest.mark.parametrize("library", ["pandas", "polars"])
def test_text_columns_are_named(library: str) -> None:
    X, _, z = problem()
    frame = pd.DataFrame(X, columns=["a", "b", "c"])
    text = frame.assign(job="clerk", town="Ghent")
    make = pl.from_pandas if library == "polars" else (lambda f: f)
    words = r"holds text in columns 'job', 'town'.*Drop columns of labels"
    with pytest.raises(sf.exceptions.InputError, match=words):
        sf.LEACE().fit(make(text), concept=z)
    with pytest.raises(sf.exceptions.InputError, match=words):
        sf.Moments().update(make(text), z)
    with pytest.raises(sf.exceptions.InputError, match=words):
        sf.baselines.INLP().fit(make(text), concept=z)
    eraser = sf.LEACE().fit(make(frame), concept=z)
    with pytest.raises(sf.exceptions.InputError, match="column 'c'"):
        eraser.transform(make(frame.assign(c="x")))
    with pytest.raises(sf.exceptions.InputError, match="holds text in column 1"):
        sf.Moments().update(text[["a", "job"]].to_numpy(), z)


@pytest.mark.parametrize("library", ["pandas", "polars"])
def test_nan_is_located_by_row_and_column(library: str) -> None:
    X, _, z = problem()
    X[7, 1] = np.nan
    frame = pd.DataFrame(X, columns=["a", "b", "c"])
    frame = pl.from_pandas(frame) if library == "polars" else frame
    words = r"\(row 7\), column 'b'"
    for attempt in (
        lambda: sf.LEACE().fit(frame, concept=z),
        lambda: sf.LEACE().partial_fit(frame, concept=z),
        lambda: sf.Identity().fit(frame),
        lambda: sf.Moments().update(frame, z),
        lambda: sf.Moments.from_blocks([sf.sources.Block(X, {"z": z})], folds=2),
    ):
        with pytest.raises(sf.exceptions.NonFiniteError, match=r"\(row 7\), column"):
            attempt()
    for named in (
        lambda: sf.LEACE().fit(frame, concept=z),
        lambda: sf.Identity().fit(frame),
        lambda: sf.Moments().update(frame, z),
    ):
        with pytest.raises(sf.exceptions.NonFiniteError, match=words):
            named()
    clean = frame.with_columns(b=pl.lit(0.0)) if library == "polars" else frame.assign(b=0.0)
    eraser = sf.LEACE().fit(clean, concept=z)
    with pytest.raises(sf.exceptions.NonFiniteError, match=words):
        eraser.transform(frame)


def test_columns_of_vectors() -> None:
    X, _, z = problem()
    expected = sf.LEACE().fit(X, concept=z).transform(X)
    column = pd.Series(list(X), name="embedding")
    for rows in (
        column,
        column.to_frame(),
        column.to_numpy(),
        pl.Series("embedding", X.tolist()),
        pl.DataFrame({"embedding": X.tolist()}),
        pl.DataFrame({"embedding": list(X)}),
    ):
        eraser = sf.LEACE().fit(rows, concept=z)
        assert not hasattr(eraser, "feature_names_in_")
        np.testing.assert_array_equal(eraser.transform(rows), expected)
        np.testing.assert_array_equal(eraser.projection_(rows), expected)
        assert sf.Moments().update(rows, z).n_features == 3
    ragged = pd.Series([np.zeros(3), np.zeros(2)])
    with pytest.raises(sf.exceptions.InputError, match="same length"):
        sf.LEACE().fit(ragged, concept=[0, 1])
    with pytest.raises(sf.exceptions.InputError, match="holds text in column 'embedding'"):
        sf.LEACE().fit(pd.DataFrame({"embedding": ["[1, 2]", "[3, 4]"]}), concept=[0, 1])
    with pytest.raises(sf.exceptions.InputError, match=r"1D array|2-dimensional"):
        sf.LEACE().fit(pd.Series([1.0, 2.0]), concept=[0, 1])


# --- the estimator that erases nothing ------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16])
def test_rows_come_back_as_they_are(dtype: Any) -> None:
    X, y, z = problem()
    X = X.astype(dtype)
    eraser = sf.Identity().fit(X, y, concept=z)
    clean = eraser.transform(X)
    assert clean.dtype == dtype
    np.testing.assert_array_equal(clean, X)
    assert not np.shares_memory(clean, X)
    sparse = sp.csr_array(X.astype(float))
    np.testing.assert_array_equal(eraser.transform(sparse).toarray(), X.astype(float))
    frame = pd.DataFrame(X, columns=list("abc"))
    framed = sf.Identity().set_output(transform="pandas").fit_transform(frame)
    pd.testing.assert_frame_equal(framed, frame)


def test_a_fit_that_fails_changes_nothing() -> None:
    X, _, _ = problem()
    eraser = sf.Identity().fit(X)
    bad = X.copy()
    bad[3, 2] = np.nan
    for attempt in (eraser.fit, eraser.transform):
        with pytest.raises(sf.exceptions.NonFiniteError, match=r"row 3\), column 2"):
            attempt(bad)
    with pytest.raises(sf.exceptions.NonFiniteError, match="row 3"):
        eraser.fit(sp.csr_array(np.c_[bad, bad]))
    with pytest.raises(sf.exceptions.InputError, match="sample_weight"):
        eraser.fit(np.c_[X, X], sample_weight=-np.ones(60))
    with pytest.raises(sf.exceptions.NotEnoughDataError, match="every sample_weight is zero"):
        eraser.fit(np.c_[X, X], sample_weight=np.zeros(60))
    assert eraser.n_features_in_ == 3
    with pytest.raises(NotFittedError):
        sf.Identity().transform(X)
