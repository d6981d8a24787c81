"""Rows as estimators read them: frames, columns of vectors, sparse rows, samples; refusals."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pytest
import scipy.sparse
from numpy.typing import NDArray
from sklearn.exceptions import NotFittedError
from test_estimators import CLASSES, EPS, keep, make_data

import splince_fast as sf
from splince_fast import LEACE, SPLINCE, Identity
from splince_fast.exceptions import InputError, NonFiniteError, NotEnoughDataError

N, D = 2000, 12
Data = tuple[NDArray[np.float64], NDArray[Any], NDArray[Any]]


@pytest.fixture
def data() -> Data:
    """Rows of which a third of the entries is zero."""
    X, y, z = make_data(N, d=D)
    X[np.random.default_rng(1).random((N, D)) < 1 / 3] = 0.0
    return X, y, z


@pytest.fixture
def small() -> Data:
    return make_data(60, d=3)


@pytest.mark.parametrize("library", ["pandas", "polars"])
def test_text_and_nan_are_located_by_the_names_of_columns(library: str, small: Data) -> None:
    X, _, z = small
    make = pl.from_pandas if library == "polars" else (lambda frame: frame)
    frame = pd.DataFrame(X, columns=list("abc"))
    broken = frame.copy()
    broken.iloc[7, 1] = np.nan
    eraser = LEACE().fit(make(frame), concept=z)
    text, missing = frame.assign(job="clerk", town="Ghent"), r"\(row 7\), column 'b'"
    for fit in (
        *(lambda rows, verb=verb: verb(rows, concept=z)
          for verb in (LEACE().fit, LEACE().partial_fit, sf.baselines.INLP().fit, Identity().fit)),
        lambda rows: sf.Moments().update(rows, z),
    ):  # fmt: skip
        with pytest.raises(
            InputError, match=r"holds text in columns 'job', 'town'.*Drop columns of labels"
        ):
            fit(make(text))
        with pytest.raises(NonFiniteError, match=missing):
            fit(make(broken))
    with pytest.raises(InputError, match="column 'c'"):
        eraser.transform(make(frame.assign(c="x")))
    with pytest.raises(NonFiniteError, match=missing):
        eraser.transform(make(broken))
    with pytest.raises(InputError, match="holds text in column 1"):
        sf.Moments().update(text[["a", "job"]].to_numpy(), z)
    with pytest.raises(NonFiniteError, match=r"\(row 7\), column 1"):
        sf.Moments.from_blocks([sf.sources.Block(broken.to_numpy(), {"z": z})], folds=2)


def test_columns_of_vectors(small: Data) -> None:
    X, _, z = small
    expected = LEACE().fit(X, concept=z).transform(X)
    column = pd.Series(list(X), name="embedding")
    for rows in (
        column.to_frame(),
        column.to_numpy(),
        pl.Series("embedding", X.tolist()),
        pl.DataFrame({"embedding": X.tolist()}),
        pl.DataFrame({"embedding": list(X)}),
    ):
        eraser = LEACE().fit(rows, concept=z)
        assert not hasattr(eraser, "feature_names_in_")
        np.testing.assert_array_equal(eraser.transform(rows), expected)
        np.testing.assert_array_equal(eraser.projection_(rows), expected)
    for bad, text in (
        (pd.Series([np.zeros(3), np.zeros(2)]), "same length"),
        (pd.DataFrame({"embedding": ["[1, 2]", "[3, 4]"]}), "holds text in column 'embedding'"),
        (pd.Series([1.0, 2.0]), r"1D array|2-dimensional"),
    ):
        with pytest.raises(InputError, match=text):
            LEACE().fit(bad, concept=[0, 1])


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16])
def test_identity_gives_rows_back_as_they_are(dtype: Any, small: Data) -> None:
    X, y, z = small
    X = X.astype(dtype)
    eraser = Identity().fit(X, y, concept=z)
    clean = eraser.transform(X)
    assert clean.dtype == dtype
    np.testing.assert_array_equal(clean, X)
    assert not np.shares_memory(clean, X)
    sparse = scipy.sparse.csr_array(X.astype(float))
    np.testing.assert_array_equal(eraser.transform(sparse).toarray(), X.astype(float))
    frame = pd.DataFrame(X, columns=list("abc"))
    framed = Identity().set_output(transform="pandas").fit_transform(frame)
    pd.testing.assert_frame_equal(framed, frame)


def test_a_fit_of_identity_that_fails_changes_nothing(small: Data) -> None:
    X, _, _ = small
    eraser, bad, wide = Identity().fit(X), X.copy(), np.c_[X, X]
    bad[3, 2] = np.nan
    for attempt in (eraser.fit, eraser.transform):
        with pytest.raises(NonFiniteError, match=r"row 3\), column 2"):
            attempt(bad)
    with pytest.raises(NonFiniteError, match="row 3"):
        eraser.fit(scipy.sparse.csr_array(np.c_[bad, bad]))
    with pytest.raises(InputError, match="sample_weight"):
        eraser.fit(wide, sample_weight=-np.ones(60))
    with pytest.raises(NotEnoughDataError, match="every sample_weight is zero"):
        eraser.fit(wide, sample_weight=np.zeros(60))
    assert eraser.n_features_in_ == 3
    with pytest.raises(NotFittedError):
        Identity().transform(X)


def test_auto_takes_what_the_rows_call_for(data: Data) -> None:
    X, _, z = data
    fitted = LEACE(subsample="auto").fit(X, concept=z)
    assert fitted.moments_.parameters.subsample == 0.25  # 2000 / 4 rows, and 22 * 12 are needed
    assert 400 < fitted.report_.sampling.n_rows < 700
    assert LEACE(subsample="auto").fit(X[:300], concept=z[:300]).moments_.parameters.subsample == 1
    # Of two folds each has to be enough.
    chosen = LEACE(subsample="auto", shrinkage="cv").fit(X, concept=z, groups=np.arange(N) % 7)
    assert chosen.moments_.parameters.subsample == 0.5
    assert chosen.report_.held_out is not None
    with pytest.raises(InputError, match=r"48 are needed; pass at least 0\.024, or 'auto'"):
        LEACE(subsample=0.01).fit(X, concept=z)


@pytest.mark.parametrize("kind", [SPLINCE, LEACE])
@pytest.mark.parametrize("sparse", [False, True])
def test_passes_read_the_same_rows_again(kind: Any, sparse: bool, data: Data) -> None:
    X, y, z = data
    weight = np.random.default_rng(1).integers(0, 3, N).astype(float)
    rows = scipy.sparse.csr_array(X) if sparse else X

    def fit(rows: Any, **options: Any) -> Any:
        return kind(**options).fit(rows, y, concept=z, sample_weight=weight)

    fitted, exact = fit(rows, covariance_type="diag", passes=2), fit(X)
    report, covariance = fitted.report_, exact.moments_.covariance(ddof=0)
    assert report.diagonal.passes == 2
    assert report.diagonal.gain >= 0

    def changed(estimator: Any) -> float:
        removed = np.eye(D) - estimator.projection_.matrix()
        return float(np.trace(removed @ covariance @ removed.T))

    assert changed(exact) <= changed(fitted) * (1 + 1e6 * EPS)
    assert changed(fitted) < changed(fit(rows, covariance_type="diag"))
    assert report.distortion * np.trace(covariance) == pytest.approx(changed(fitted), rel=1e-9)


@pytest.mark.parametrize("kind", CLASSES)
@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.int64])
def test_sparse_rows_are_their_dense_twins(kind: Any, dtype: Any, data: Data) -> None:
    X, y, z = data
    X = np.round(X).astype(dtype) if dtype is np.int64 else X.astype(dtype)
    # Sums of N rows in another order.
    bound = 1e5 * float(np.finfo(np.float32 if dtype is np.float32 else np.float64).eps)
    dense = kind(covariance_type="diag").fit(X, y, concept=z)
    for make in (scipy.sparse.csr_array, scipy.sparse.csr_matrix, scipy.sparse.coo_array):
        rows = make(X)
        before = rows.toarray()
        sparse = kind(covariance_type="diag").fit(rows, y, concept=z)
        clean = sparse.transform(rows)
        assert type(clean) is np.ndarray
        assert clean.dtype == (np.float64 if dtype is np.int64 else dtype)
        assert np.array_equal(clean, sparse.transform(X))  # to the last bit: it is the same map
        assert np.array_equal(rows.toarray(), before)
        np.testing.assert_allclose(
            sparse.projection_.matrix(), dense.projection_.matrix(), atol=bound
        )
    parts = kind(covariance_type="diag")
    for chosen in np.array_split(np.arange(N), 3):
        parts.partial_fit(scipy.sparse.csr_array(X[chosen]), y[chosen], concept=z[chosen])
    np.testing.assert_allclose(parts.projection_.matrix(), dense.projection_.matrix(), atol=bound)
    again = kind.from_moments(parts.moments_, erase="concept", **keep(kind))
    np.testing.assert_array_equal(again.transform(scipy.sparse.csr_array(X)), parts.transform(X))


def test_sparse_rows_that_cannot_be_used(data: Data) -> None:
    X, _, z = data
    rows = scipy.sparse.csr_array(X)
    for verb in ("fit", "partial_fit"):
        with pytest.raises(InputError, match=r"[Ss]parse.*covariance_type='diag'") as caught:
            getattr(LEACE(), verb)(rows, concept=z)
        assert isinstance(caught.value, TypeError)  # as scikit-learn's
    with pytest.raises(InputError, match=r"[Ss]parse"):
        LEACE().fit(X, concept=z).transform(rows)
    fitted = LEACE(covariance_type="diag").fit(rows, concept=z)
    with pytest.raises(InputError, match="11 features"):
        fitted.transform(rows[:, :-1])
    bad = rows.copy()
    bad.data[5] = np.nan
    for use in (fitted.transform, lambda rows: LEACE(covariance_type="diag").fit(rows, concept=z)):
        with pytest.raises(NonFiniteError):
            use(bad)
    assert fitted.transform(rows[:0]).shape == (0, D)


DIAG = {"covariance_type": "diag"}


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"subsample": 0}, "at most 1"),
        ({"subsample": 1.5}, "at most 1"),
        ({"subsample": "half"}, "'auto'"),
        ({"subsample": None}, "'auto'"),
        ({"covariance_type": "tied"}, "'full', 'diag'"),
        ({"covariance_type": None}, "'full', 'diag'"),
        ({"passes": -1}, "passes is -1"),
        ({"passes": True}, "passes is True"),
        ({"passes": 1}, "need covariance_type='diag'"),
        (DIAG | {"subsample": 0.5}, "exclude each other"),
        (DIAG | {"subsample": "auto"}, "exclude each other"),
        (DIAG | {"shrinkage": "cv"}, r"pass a number in \[0, 1\]"),
        (DIAG | {"shrinkage": "oas"}, r"pass a number in \[0, 1\]"),
        (DIAG | {"solver": "eigh"}, "at 'auto'"),
        (DIAG | {"shrinkage": 0.1, "passes": 1}, "leave one of them out"),
        ({"solver": "SPLINCE"}, "'auto', 'cholesky', 'eigh'"),
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", [SPLINCE, LEACE])
@pytest.mark.parametrize("verb", ["fit", "partial_fit"])
def test_parameters_are_refused_before_a_row_is_read(
    kind: Any, verb: str, wrong: dict[str, Any], named: str
) -> None:
    """The constructor only stores parameters; the error of the fit lists the valid values."""
    with pytest.raises(InputError, match=named):
        getattr(kind(**wrong), verb)("no data", [0, 1], concept=[0, 1])


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"subsample": "auto"}, "pass a number, such as 22"),
        (DIAG | {"passes": 1}, "refine="),
        ({"shrinkage": "cv"}, "is chosen on folds"),
    ],
)
def test_what_only_a_whole_fit_knows(given: dict[str, Any], text: str, data: Data) -> None:
    X, _, z = data
    with pytest.raises(InputError, match=text):
        LEACE(**given).partial_fit("no data", concept=z)
    fitted = LEACE(**given).fit(X, concept=z)
    with pytest.raises(InputError, match=text):
        LEACE.from_moments(fitted.moments_, erase="concept", **given)
    if "shrinkage" not in given:
        with pytest.raises(InputError, match="leave groups out"):
            LEACE(**given).fit("no data", concept=z, groups=z)
