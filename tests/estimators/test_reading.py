"""Estimators of a sampled covariance, of variances alone, and of sparse rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import scipy.sparse
from numpy.typing import NDArray
from sklearn.base import clone
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline

import splince_fast as sf
from splince_fast import LEACE, SAL, SPLINCE, MeanProjection
from splince_fast import transformer as base
from splince_fast.exceptions import InputError

CLASSES = (SPLINCE, LEACE, SAL, MeanProjection)
METHODS: dict[Any, Callable[..., sf.Projection]] = {
    SPLINCE: sf.splince, LEACE: sf.leace, SAL: sf.sal, MeanProjection: sf.mean_projection,
}  # fmt: skip
EPS = float(np.finfo(np.float64).eps)
N, D = 2000, 12
Data = tuple[NDArray[np.float64], NDArray[Any], NDArray[Any]]


@pytest.fixture
def data() -> Data:
    """Rows of which a third is zero, with a concept and a task that goes along with it."""
    rng = np.random.default_rng(0)
    z = rng.integers(0, 3, N)
    y = np.where(rng.random(N) < 0.7, z % 2, rng.integers(0, 2, N))
    X = rng.normal(size=(N, D)) @ (np.eye(D) + 0.3 * rng.normal(size=(D, D)))
    X += rng.normal(size=(3, D))[z] + rng.normal(size=(2, D))[y]
    X[rng.random((N, D)) < 1 / 3] = 0.0
    return X, y, z


def by_hand(kind: Any, data: Data, moments: sf.Moments, **again: Any) -> sf.Projection:
    X, y, z = data
    labels = {"concept": z, "task": y} if kind is SPLINCE else {"concept": z}
    keep = {"keep": "task"} if kind is SPLINCE else {}
    return METHODS[kind](moments.update(X, labels), erase="concept", **keep, **again)


def same_bits(a: sf.Projection, b: sf.Projection) -> bool:
    return np.array_equal(a.left, b.left) and np.array_equal(a.right, b.right)


EVERY = {
    SPLINCE: {"max_amplification": 50, "shrinkage": 0.1, "solver": "eigh"},
    LEACE: {"null_space": "drop", "shrinkage": "oas", "rank_tol": 1e-3},
    SAL: {"rank_tol": 0.999},
    MeanProjection: {"rank_tol": 0.999},
}


@pytest.mark.parametrize("kind", CLASSES)
@pytest.mark.parametrize(
    "given", ["every option", {"subsample": 0.2}, {"covariance_type": "diag"}], ids=str
)
def test_each_is_its_method(kind: Any, given: Any, data: Data) -> None:
    X, y, z = data
    options = EVERY[kind] if given == "every option" else {}
    accumulation = {} if options else given
    fitted = kind(**options, **accumulation).fit(X, y, concept=z)
    expected = by_hand(kind, data, sf.Moments(**accumulation), **options)
    assert same_bits(fitted.projection_, expected)
    assert np.array_equal(fitted.transform(X), expected(X))
    assert fitted.report_ == expected.report
    assert fitted.report_.method == kind.__name__
    if options or kind in (SPLINCE, LEACE):  # control: the parameters have an effect
        plain = kind().fit(X, y, concept=z)
        assert np.abs(plain.projection_.matrix() - fitted.projection_.matrix()).max() > 1e-6
    assert clone(fitted).get_params() == fitted.get_params()
    parts = kind(**options, **accumulation)
    for rows in np.array_split(np.arange(N), 3):
        parts.partial_fit(X[rows], y[rows], concept=z[rows])
    # Sums of N rows in another order.
    np.testing.assert_allclose(
        parts.projection_.matrix(), fitted.projection_.matrix(), atol=1e5 * EPS
    )


def test_auto_takes_what_the_rows_call_for(data: Data) -> None:
    X, _, z = data
    fitted = LEACE(subsample="auto").fit(X, concept=z)
    assert fitted.moments_.parameters.subsample == 0.25  # 2000 / 4 rows, and 22 * 12 are needed
    assert 400 < fitted.report_.sampling.n_rows < 700
    assert LEACE(subsample="auto").fit(X[:300], concept=z[:300]).moments_.parameters.subsample == 1
    # Of two folds each has to be enough.
    chosen = LEACE(subsample="auto", shrinkage="cv").fit(X, concept=z)
    assert chosen.moments_.parameters.subsample == 0.5
    assert chosen.report_.held_out is not None


@pytest.mark.parametrize("kind", [SPLINCE, LEACE])
@pytest.mark.parametrize("sparse", [False, True])
def test_passes_read_the_same_rows_again(kind: Any, sparse: bool, data: Data) -> None:
    X, y, z = data
    weight = np.random.default_rng(1).integers(0, 3, N).astype(float)
    rows = scipy.sparse.csr_array(X) if sparse else X
    fitted = kind(covariance_type="diag", passes=2).fit(rows, y, concept=z, sample_weight=weight)
    report = fitted.report_
    assert report.diagonal.passes == 2
    assert report.diagonal.gain >= 0
    exact = kind().fit(X, y, concept=z, sample_weight=weight)
    once = kind(covariance_type="diag").fit(rows, y, concept=z, sample_weight=weight)
    covariance = exact.moments_.covariance(ddof=0)

    def changed(estimator: Any) -> float:
        removed = np.eye(D) - estimator.projection_.matrix()
        return float(np.trace(removed @ covariance @ removed.T))

    assert changed(exact) <= changed(fitted) * (1 + 1e6 * EPS)
    assert changed(fitted) < changed(once)
    assert report.distortion * np.trace(covariance) == pytest.approx(changed(fitted), rel=1e-9)


@pytest.mark.parametrize("kind", CLASSES)
@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.int64])
def test_sparse_rows_are_their_dense_twins(kind: Any, dtype: Any, data: Data) -> None:
    X, y, z = data
    X = np.round(X).astype(dtype) if dtype is np.int64 else X.astype(dtype)
    eps = float(np.finfo(np.float32 if dtype is np.float32 else np.float64).eps)
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
            sparse.projection_.matrix(), dense.projection_.matrix(), atol=1e5 * eps
        )
    parts = kind(covariance_type="diag")
    for chosen in np.array_split(np.arange(N), 3):
        parts.partial_fit(scipy.sparse.csr_array(X[chosen]), y[chosen], concept=z[chosen])
    np.testing.assert_allclose(
        parts.projection_.matrix(), dense.projection_.matrix(), atol=1e5 * eps
    )
    again = kind.from_moments(
        parts.moments_, erase="concept", **({"keep": "task"} if kind is SPLINCE else {})
    )
    np.testing.assert_array_equal(again.transform(scipy.sparse.csr_array(X)), parts.transform(X))


def test_text_in_a_pipeline() -> None:
    rng = np.random.default_rng(0)
    z, y = rng.integers(0, 2, (2, 300))
    words = [
        [("he", "she")[a], ("sued", "cured")[b], *rng.choice(["the", "old", "day"], 2)]
        for a, b in zip(z, y, strict=True)
    ]
    texts = [" ".join(row) for row in words]
    pipe = make_pipeline(TfidfVectorizer(), SPLINCE(covariance_type="diag"), LogisticRegression())
    pipe.fit(texts, y, splince__concept=z)
    assert pipe.score(texts, y) == 1.0
    clean = pipe[:-1].transform(texts)
    gap = clean[z == 1].mean(axis=0) - clean[z == 0].mean(axis=0)
    assert np.abs(gap).max() < 1e3 * EPS
    control = pipe[:1].transform(texts).toarray()
    assert np.abs(control[z == 1].mean(axis=0) - control[z == 0].mean(axis=0)).max() > 0.1


# --- what is refused -----------------------------------------------------------------------------


def test_sparse_rows_that_cannot_be_used(data: Data, monkeypatch: pytest.MonkeyPatch) -> None:
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
    for use in (
        lambda: fitted.transform(bad),
        lambda: LEACE(covariance_type="diag").fit(bad, concept=z),
    ):
        with pytest.raises(sf.exceptions.NonFiniteError):
            use()
    assert fitted.transform(rows[:0]).shape == (0, D)
    monkeypatch.setattr(base, "total_memory", lambda: N * D * 8 - 1)
    with pytest.raises(InputError, match=r"dense.*fewer rows.*fold_into"):
        fitted.transform(rows)
    assert fitted.transform(rows[1:]).shape == (N - 1, D)


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
        ({"covariance_type": "diag", "subsample": 0.5}, "exclude each other"),
        ({"covariance_type": "diag", "subsample": "auto"}, "exclude each other"),
        ({"covariance_type": "diag", "shrinkage": "cv"}, r"pass a number in \[0, 1\]"),
        ({"covariance_type": "diag", "shrinkage": "oas"}, r"pass a number in \[0, 1\]"),
        ({"covariance_type": "diag", "solver": "eigh"}, "at 'auto'"),
        ({"covariance_type": "diag", "shrinkage": 0.1, "passes": 1}, "leave one of them out"),
        ({"solver": "SPLINCE"}, "'auto', 'cholesky', 'eigh'"),
        ({"null_space": "erase"}, "'keep', 'drop'"),
        ({"on_infeasible": "leace"}, "'raise', 'drop'"),
        ({"shrinkage": "ledoit"}, "'oas'"),
        ({"rank_tol": 1.5}, r"\[0, 1\)"),
        ({"max_amplification": 0.5}, "at least 1"),
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", [SPLINCE, LEACE])
@pytest.mark.parametrize("verb", ["fit", "partial_fit"])
def test_parameters_are_refused_before_a_row_is_read(
    kind: Any, verb: str, wrong: dict[str, Any], named: str, data: Data
) -> None:
    """With the choices listed; the constructor only stores."""
    _, y, z = data
    if kind is LEACE and wrong.keys() & {"on_infeasible", "max_amplification"}:
        kind = SPLINCE  # LEACE keeps nothing, and has neither
    with pytest.raises(InputError, match=named):
        getattr(kind(**wrong), verb)("no data", y, concept=z)


def test_what_only_a_whole_fit_knows(data: Data) -> None:
    X, _, z = data
    for given, text in (
        ({"subsample": "auto"},
            "pass a number, such as 22"), ({"covariance_type": "diag", "passes": 1}, "refine="),
    ):  # fmt: skip
        with pytest.raises(InputError, match=text):
            LEACE(**given).partial_fit("no data", concept=z)
        fitted = LEACE(**given).fit(X, concept=z)
        with pytest.raises(InputError, match=text):
            LEACE.from_moments(fitted.moments_, erase="concept", **given)
    for given in ({}, {"subsample": 0.5}, {"covariance_type": "diag"}):
        with pytest.raises(InputError, match="leave groups out"):
            LEACE(**given).fit("no data", concept=z, groups=z)
    groups = np.arange(N) % 7
    chosen = LEACE(subsample=0.5, shrinkage="cv").fit(X, concept=z, groups=groups)
    assert chosen.report_.held_out is not None
    with pytest.raises(InputError, match=r"48 are needed; pass at least 0\.024, or 'auto'"):
        LEACE(subsample=0.01).fit(X, concept=z)
