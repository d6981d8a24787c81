"""Extra passes over the rows: the distortion never increases, is exact, and reaches its limit."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import scipy.sparse
from numpy.typing import NDArray

import splince_fast as sf
from splince_fast.exceptions import InputError

Float = NDArray[np.float64]


def rows(n: int = 900, d: int = 40, seed: int = 0) -> tuple[Float, dict[str, NDArray[Any]]]:
    """Rows of a covariance with condition number about 1e4, off the axes."""
    rng = np.random.default_rng(seed)
    mix = np.geomspace(0.02, 2, d)[:, None] * np.linalg.qr(rng.normal(size=(d, d)))[0]
    z = rng.integers(0, 3, n)
    y = np.where(rng.random(n) < 0.6, z, rng.integers(0, 3, n))
    X = rng.normal(size=(n, d)) @ mix + 3.0
    X += 0.1 * (np.eye(3)[z] @ rng.normal(size=(3, d)) + np.eye(3)[y] @ rng.normal(size=(3, d)))
    return X, {"z": z, "y": y}


def distortion(eraser: sf.Projection, S: Float) -> float:
    """E|P x - x|^2 over the variance of x."""
    gram = eraser.right.T @ S @ eraser.right
    return float(np.sum((eraser.left.T @ eraser.left) * gram) / np.trace(S))


def variances(X: Any, labels: Any) -> sf.Moments:
    return sf.Moments(covariance_type="diag").update(X, labels)


METHODS: list[tuple[Any, dict[str, Any]]] = [
    (sf.leace, {"erase": "z"}),
    (sf.splince, {"erase": "z", "keep": "y"}),
]


def test_a_source_may_read_the_moments_that_its_passes_refine() -> None:
    """Blocks are read in another thread, which needs the lock of the moments."""
    X, labels = rows()
    moments = variances(X, labels)

    class Reading:
        def __iter__(self) -> Iterator[Any]:
            yield X + 0.0 * moments.mean, labels

    found: list[sf.Projection] = []
    thread = threading.Thread(
        target=lambda: found.append(sf.leace(moments, erase="z", refine=Reading())), daemon=True
    )
    thread.start()
    thread.join(timeout=60)
    assert not thread.is_alive()
    assert found[0].rank == 2


@pytest.mark.parametrize(("method", "what"), METHODS)
@pytest.mark.parametrize("sparse", [False, True])
def test_passes_measure_what_they_never_increase(method: Any, what: Any, sparse: bool) -> None:
    X, labels = rows()
    S = np.cov(X.T, ddof=0)
    given = scipy.sparse.csr_array(X) if sparse else X
    source = sf.sources.from_arrays(given, labels, block_rows=200)
    moments = sf.Moments.from_blocks(source, covariance_type="diag")
    exact = method(sf.Moments().update(X, labels), **what)
    least, found = distortion(exact, S), [distortion(method(moments, **what), S)]
    # Without whitening: the other end of the first subspace.
    plain = distortion(method(sf.Moments().update(X, labels), **what, shrinkage=1.0), S)
    for passes in (1, 2, 4):
        eraser = method(moments, **what, refine=source, passes=passes)
        report = eraser.report
        found.append(distortion(eraser, S))
        # B^T S B = I to eps / 1e-10, the smallest eigenvalue that a basis is made from.
        assert report.distortion == pytest.approx(found[-1], rel=1e-5)
        assert found[-1] <= min(found[-2], plain) * (1 + 1e-6)
        assert found[-1] >= least * (1 - 1e-6)
        assert (report.diagonal.passes, report.solver) == (passes, "refined")
        assert report.distortion_leace is None
        assert "(LEACE:" not in str(report) + report.explain()
        assert all(v.residual <= v.bound for v in report.variables)
        if passes == 1:
            assert report.diagonal.gain == pytest.approx(1 - found[1] / found[0], abs=1e-5)
            assert "after 1 pass (" in str(report)
    assert found[0] > 1.05 * least  # control: there was something to gain
    assert found[-1] - least < 0.3 * (found[0] - least)


@pytest.mark.parametrize("method", [sf.leace, sf.splince, sf.sal])
def test_variances_state_no_distortion_before_it_is_measured(method: Any) -> None:
    """That of its stand-in for the covariance may be below the least possible."""
    X, labels = rows()
    what = {"erase": "z"} if method is sf.leace else {"erase": "z", "keep": "y"}
    report, measured = (
        method(moments, **what).report
        for moments in (variances(X, labels), sf.Moments().update(X, labels))
    )
    assert report.distortion is report.distortion_leace is None
    assert "not measured; pass refine=" in str(report)
    assert "not measured" in report.explain()
    assert "not measured" not in str(measured) + measured.explain()  # control


@pytest.mark.parametrize(("method", "what"), METHODS)
def test_many_passes_give_the_eraser_of_the_covariance(method: Any, what: Any) -> None:
    X, labels = rows(d=12)
    moments = variances(X, labels)
    exact = method(sf.Moments().update(X, labels), **what).matrix()
    found = method(moments, **what, refine=[(X, labels)], passes=8).matrix()
    np.testing.assert_allclose(found, exact, atol=1e-6 * np.abs(exact).max())
    before = method(moments, **what).matrix()
    assert np.abs(before - exact).max() > 1e-2 * np.abs(exact).max()  # control


def test_weights_constants_and_dropped_rows() -> None:
    X, labels = rows(d=12)
    X[:, 4] = 7.0
    weight = np.random.default_rng(0).integers(0, 3, len(X)).astype(float)
    source = sf.sources.from_arrays(X.astype(np.float32), labels, sample_weight=weight)
    moments = sf.Moments.from_blocks(source, covariance_type="diag")
    eraser = sf.leace(moments, erase="z", refine=source, passes=6)
    exact = sf.leace(sf.Moments.from_blocks(source), erase="z")
    # Products of float32 rows in the covariance: 1e-7 of deviations, times its condition number.
    np.testing.assert_allclose(eraser.matrix(), exact.matrix(), atol=2e-3)
    assert not eraser.right[4].any()
    assert not eraser.left[4].any()


def test_sparse_rows_far_from_zero_measure_as_dense_ones() -> None:
    """A mean of 1e6 deviations costs images of rows that digit of them once, and not twice."""
    X, labels = rows(d=12)
    X += 1e6 * (np.arange(12) < 3)
    source = sf.sources.from_arrays(scipy.sparse.csr_array(X), labels, block_rows=200)
    folds = sf.Moments.from_blocks(
        source, covariance_type="diag", folds=2
    )  # refined as their total
    eraser = sf.leace(folds, erase="z", refine=source)
    assert eraser.report.diagonal.passes == 1
    # eps |mean| / deviation is 1e-8 for the smallest one, and its square times n 1e-4.
    assert eraser.report.distortion == pytest.approx(distortion(eraser, np.cov(X.T)), rel=1e-6)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda X: (X[:-1],), "rows"),
        (lambda X: (np.concatenate([X, X[:1]]),), "rows"),
        (lambda X: (X[:, :-1],), "features"),
        (lambda X: (X + 1e-6,), "mean"),
        (lambda X: (X * (1 + 1e-6 * (np.arange(40) == 3)),), "feature 3"),
        (lambda X: (np.where(np.arange(40) == 2, 2 * X.mean(axis=0) + 1e-7 - X, X),), "mean"),
        (lambda X: (X.mean(axis=0) + (X - X.mean(axis=0)) * 1.001,), "variance"),
        (lambda X: (X, None, np.full(len(X), 2.0)), "weigh"),
    ],
)
def test_another_source_is_refused(change: Callable[[Float], Any], text: str) -> None:
    X, labels = rows()
    moments, blocks = variances(X, labels), change(X)
    source = [blocks] if len(blocks) == 3 else sf.sources.from_arrays(*blocks)
    with pytest.raises(InputError, match=f"does not have the accumulated rows: .*{text}"):
        sf.leace(moments, erase="z", refine=source)
    order = np.random.default_rng(0).permutation(len(X))  # control: the same rows in another order
    assert sf.leace(moments, erase="z", refine=[(X[order[:100]],), (X[order[100:]],)]).rank == 2
