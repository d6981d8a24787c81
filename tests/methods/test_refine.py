"""Passes over the rows once more: never worse, exact in what they report, dense in the limit.

Modules: `methods.refine`, `_solve.ritz`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
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


METHODS: list[tuple[Any, dict[str, Any]]] = [
    (sf.leace, {"erase": "z"}), (sf.splince, {"erase": "z", "keep": "y"}),
]  # fmt: skip


@pytest.mark.parametrize(("method", "what"), METHODS)
@pytest.mark.parametrize("rank", [0, 1, 12])
@pytest.mark.parametrize("sparse", [False, True])
def test_passes_measure_what_they_never_increase(
    method: Any, what: Any, rank: int, sparse: bool
) -> None:
    X, labels = rows()
    S = np.cov(X.T, ddof=0)
    given = scipy.sparse.csr_array(X) if sparse else X
    source = sf.sources.from_arrays(given, labels, block_rows=200)
    moments = sf.Moments.from_blocks(source, sketch_size=rank)
    exact = method(sf.Moments().update(X, labels), **what)
    least, found = distortion(exact, S), [distortion(method(moments, **what), S)]
    diagonal = distortion(method(sf.Moments(sketch_size=0).update(X, labels), **what), S)
    for passes in (1, 2, 4):
        eraser = method(moments, **what, refine=source, passes=passes)
        report = eraser.report
        found.append(distortion(eraser, S))
        # B^T S B = I to eps / 1e-10, the smallest eigenvalue that a basis is made from.
        assert report.distortion == pytest.approx(found[-1], rel=1e-5)
        assert found[-1] <= min(found[-2], diagonal) * (1 + 1e-6)
        assert found[-1] >= least * (1 - 1e-6)
        assert (report.sketch.passes, report.solver) == (passes, "refined")
        assert all(v.residual <= v.bound for v in report.variables)
        if passes == 1:
            assert report.sketch.gain == pytest.approx(1 - found[1] / found[0], abs=1e-5)
            assert "after 1 pass (" in str(report)
    assert found[0] > 1.05 * least  # control: there was something to gain
    assert found[-1] - least < 0.3 * (found[0] - least)


@pytest.mark.parametrize("method", [sf.leace, sf.splince, sf.sal])
@pytest.mark.parametrize("rank", [0, 12])
def test_a_sketch_states_no_distortion_before_it_is_measured(method: Any, rank: int) -> None:
    """That of its stand-in for the covariance may be below the least possible."""
    X, labels = rows()
    what = {"erase": "z"} if method is sf.leace else {"erase": "z", "keep": "y"}
    report = method(sf.Moments(sketch_size=rank).update(X, labels), **what).report
    assert report.distortion is report.distortion_leace is None
    assert "not measured; pass refine=" in str(report)
    assert "not measured" in report.explain()
    assert type(report).from_dict(report.to_dict()) == report
    measured = method(sf.Moments().update(X, labels), **what).report  # control
    assert measured.distortion is not None
    assert "not measured" not in str(measured) + measured.explain()


def test_a_sketch_that_erases_nothing_changes_nothing() -> None:
    X, labels = rows()
    with pytest.warns(sf.exceptions.NothingErasedWarning):
        report = sf.leace(sf.Moments(sketch_size=3).update(X * 0.0 + 1.0, labels), erase="z").report
    assert report.distortion == 0.0


@pytest.mark.parametrize("rank", [1, 2, 4])
def test_one_pass_is_no_worse_than_the_variances_alone(rank: int) -> None:
    """The sketch of a few strong factors is far from a covariance that is diagonal but for them."""
    rng = np.random.default_rng(0)
    n, d = 2000, 30
    scale = np.geomspace(1.0, 1e3, d)
    z = rng.integers(0, 2, n)
    X = (rng.normal(size=(n, d)) + 0.3 * z[:, None]) * scale
    labels = {"z": z}
    X = X + 5.0 * rng.normal(size=(n, 1)) * rng.normal(size=d) * scale**0.5
    S = np.cov(X.T, ddof=0)
    diagonal = distortion(sf.leace(sf.Moments(sketch_size=0).update(X, labels), erase="z"), S)
    moments = sf.Moments(sketch_size=rank).update(X, labels)
    found = distortion(sf.leace(moments, erase="z", refine=[(X, labels)]), S)
    assert found <= diagonal * (1 + 1e-6)


@pytest.mark.parametrize(("method", "what"), METHODS)
def test_many_passes_give_the_eraser_of_the_covariance(method: Any, what: Any) -> None:
    X, labels = rows(d=12)
    moments = sf.Moments(sketch_size=2).update(X, labels)
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
    moments = sf.Moments.from_blocks(source, sketch_size=3)
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
    eraser = sf.leace(sf.Moments.from_blocks(source, sketch_size=0), erase="z", refine=source)
    # eps |mean| / deviation is 1e-8 for the smallest one, and its square times n 1e-4.
    assert eraser.report.distortion == pytest.approx(distortion(eraser, np.cov(X.T)), rel=1e-6)


def test_folds_refine_as_their_total() -> None:
    X, labels = rows()
    source = sf.sources.from_arrays(X, labels)
    folds = sf.Moments.from_blocks(source, sketch_size=4, folds=2)
    eraser = sf.leace(folds, erase="z", refine=source)
    assert eraser.report.sketch.passes == 1


def _change_a_feature(X: Float) -> Float:
    return X * (1 + 1e-6 * (np.arange(X.shape[1]) == 3))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda X: X[:-1], "rows"),
        (lambda X: np.concatenate([X, X[:1]]), "rows"),
        (lambda X: X[:, :-1], "features"),
        (lambda X: X + 1e-6, "mean"),
        (_change_a_feature, "feature 3"),
        (lambda X: np.where(np.arange(X.shape[1]) == 2, -X + 2 * X.mean(axis=0) + 1e-7, X), "mean"),
        (lambda X: X.mean(axis=0) + (X - X.mean(axis=0)) * 1.001, "variance"),
    ],
)
def test_another_source_is_refused(change: Callable[[Float], Float], text: str) -> None:
    X, labels = rows()
    moments = sf.Moments(sketch_size=4).update(X, labels)
    with pytest.raises(InputError, match=f"does not have the accumulated rows: .*{text}"):
        sf.leace(moments, erase="z", refine=sf.sources.from_arrays(change(X)))
    order = np.random.default_rng(0).permutation(len(X))  # control: the same rows in another order
    assert sf.leace(moments, erase="z", refine=[(X[order[:100]],), (X[order[100:]],)]).rank == 2


@pytest.mark.parametrize("convert", [np.asarray, scipy.sparse.csr_array])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_shuffled_column_is_refused(convert: Any, dtype: Any) -> None:
    """Its mean and variance are the same: products with other features are not."""
    X, labels = rows()
    X = X.astype(dtype)
    X[:, 7] += 1e4
    moments = sf.Moments(sketch_size=2).update(convert(X), labels)
    order = np.random.default_rng(0).permutation(len(X))
    for feature in (0, 7, 39):  # deviations from .02 to 2
        shuffled = X.copy()
        shuffled[:, feature] = X[order, feature]
        with pytest.raises(InputError, match=f"covariances of feature {feature} .*shuffled"):
            sf.leace(moments, erase="z", refine=[convert(shuffled)])
    # Control: the same rows in another order, in other blocks.
    blocks = [convert(X[order[:100]]), convert(X[order[100:]])]
    assert sf.leace(moments, erase="z", refine=blocks).rank == 2


def test_other_weights_are_refused() -> None:
    X, labels = rows()
    moments = sf.Moments(sketch_size=4).update(X, labels)
    with pytest.raises(InputError, match="weigh"):
        sf.leace(moments, erase="z", refine=[(X, None, np.full(len(X), 2.0))])


def test_what_cannot_be_refined_is_refused_before_a_row_is_read() -> None:
    X, labels = rows()

    def unread() -> Iterator[Any]:
        raise AssertionError("a row was read")
        yield

    moments = sf.Moments(sketch_size=4).update(X, labels)
    full = sf.Moments().update(X, labels)
    short = sf.sources.from_arrays(X[:10])
    for known, options, text in (
        (full, {}, "sketch_size="), (moments.factored(), {}, "not a snapshot"),
        (full.factored(), {}, "leave it out"), (moments, {"shrinkage": 0.1}, "shrinkage"),
        (moments, {"passes": 2}, "only once"), (moments, {"passes": 0}, "passes"),
        (moments, {"passes": 1.5}, "passes"), (moments, {"refine": None, "passes": 2}, "source"),
        (moments, {"refine": short}, "10 rows"), (moments, {"refine": X}, "not blocks"),
    ):  # fmt: skip
        with pytest.raises(InputError, match=text):
            sf.leace(known, **{"erase": "z", "refine": unread(), **options})


@pytest.mark.filterwarnings("ignore:the eraser is sensitive:splince_fast.PrecisionWarning")
def test_sentence_embeddings_at_rank_32(real_data: Callable[[str], Path]) -> None:
    """MiniLM: the sketch alone changes half as much again as the least; one pass ends that."""
    where = real_data("bug_profession_gender")
    X, labels = np.load(where / "X.npy"), {"z": np.load(where / "z.npy")}
    full = sf.Moments().update(X, labels)
    S = full.covariance(ddof=0)
    least = distortion(sf.leace(full, erase="z"), S)
    source = sf.sources.from_arrays(X, labels)
    moments = sf.Moments.from_blocks(source, sketch_size=32)
    before = distortion(sf.leace(moments, erase="z"), S) / least - 1
    after = distortion(sf.leace(moments, erase="z", refine=source), S) / least - 1
    print(f"excess {before:.3f}, after a pass {after:.3f}")
    assert after < 0.1
    assert before > 0.2  # control
