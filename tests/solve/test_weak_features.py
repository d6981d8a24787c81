"""Features that vary too little: constant for the solve, erased all the same; the sensitivity.

The bounds of the constraints are those of `problems.residual`.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from problems import Float, assert_constraints, report

import splince_fast as sf
from splince_fast._solve import tolerances
from splince_fast._solve.oblique import column_norms, sensitivity

EPS32 = 2.0**-23


def rows(n: int = 800, d: int = 8, seed: int = 0) -> tuple[Float, NDArray[Any], Float]:
    """Correlated features, three classes, a task of two columns."""
    rng = np.random.default_rng(seed)
    z = rng.integers(0, 3, n)
    y = rng.normal(size=(n, 2)) + 0.4 * np.eye(3)[z][:, :2]
    x = rng.normal(size=(n, d)) @ (np.eye(d) + 0.3 * rng.normal(size=(d, d)))
    return x + rng.normal(size=(3, d))[z] + y @ rng.normal(size=(2, d)), z, y


def quiet(call: Callable[..., sf.Projection], *args: Any, **options: Any) -> sf.Projection:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "the eraser is sensitive", sf.exceptions.PrecisionWarning)
        return call(*args, **options)


# --- features that count as constant -------------------------------------------------------------


@pytest.mark.parametrize("kind", ["full", "diag"])
@pytest.mark.parametrize("scale", [1e-33, 1e-28])
def test_noise_beside_features_of_any_units_counts_as_constant(scale: float, kind: str) -> None:
    x, z, y = rows()
    x[:, [2, 5]] *= scale
    blocks = [(x, {"z": z, "y": y})]
    moments = sf.Moments(covariance_type=kind).update(*blocks[0])
    # Of the other features it is the eraser that never saw these two.
    others = np.delete(np.arange(8), [2, 5])
    alone = sf.Moments(covariance_type=kind)
    alone.update(x[:, others], {"z": z, "y": y})
    calls: list[tuple[Any, dict[str, Any], Any]] = [
        (sf.splince, {"keep": "y"}, y), (sf.leace, {}, None),
    ]  # fmt: skip
    if kind == "diag":
        calls.append((sf.splince, {"keep": "y", "refine": blocks}, y))
    for call, more, kept in calls:
        eraser = call(moments, erase="z", **more)
        assert eraser.rank == 2
        assert not eraser.right[[2, 5]].any()  # nothing is read from them
        assert_constraints(x, np.eye(3)[z], kept, eraser)
        assert report(eraser).sensitivity < 1e-6
        if kind == "full":
            plain = call(alone, erase="z", **more)
            np.testing.assert_allclose(
                eraser.matrix()[np.ix_(others, others)], plain.matrix(), atol=1e-10
            )
            assert report(eraser).distortion == pytest.approx(report(plain).distortion, rel=1e-9)
            dropped = call(moments, erase="z", null_space="drop", **more).matrix()
            np.testing.assert_array_equal(dropped[[2, 5]], 0.0)
            np.testing.assert_allclose(dropped[np.ix_(others, others)], plain.matrix(), atol=1e-10)


@given(seed=st.integers(0, 2**20))
def test_no_feature_of_the_promised_units_counts_as_constant(seed: int) -> None:
    x, _, _ = rows(n=100, seed=seed)
    scale = 10.0 ** np.random.default_rng(seed).uniform(-12, 12, size=8)
    x *= scale
    assert (x.std(axis=0) > tolerances.floor(x.var(axis=0), x.mean(axis=0), 0.0)).all()


def test_thresholds_of_constant_features() -> None:
    variances, mean = np.array([1.0, 1e-53, 4.0]), np.array([0.0, 0.0, 1e13])
    for factor, constant in ((1.0, [1]), (10.0, [1, 2])):  # 64 eps times 1e13 is 0.14
        floor = tolerances.floor(variances, factor * mean * 2, 0.0)
        assert np.flatnonzero(variances**0.5 <= floor).tolist() == constant


# --- sensitivity ---------------------------------------------------------------------------------


def test_column_norms_of_numbers_that_have_no_squares() -> None:
    left, right = np.array([[1e200, 0.0], [0.0, 0.0]]), np.array([[1e-190, 3.0], [1.0, 1.0]])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = column_norms(left, right)
        assert found[0] == pytest.approx(1e10, rel=1e-12)
        figures = sensitivity(left, right, np.zeros(2), 1.0)
        assert np.isfinite(figures[0])
        figures = sensitivity(left[:1, :1].copy(), right[:1, :1].copy(), np.zeros(1), 1.0)
        assert figures == pytest.approx((EPS32 * 1e10, 1e10))
    assert column_norms(np.empty((0, 3)), np.empty((0, 3))).tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("method", [sf.leace, sf.sal])
@pytest.mark.parametrize("offset", [0.0, 30.0])
def test_the_sensitivity_is_the_change_that_such_noise_makes(method: Any, offset: float) -> None:
    x, z, _ = rows(n=4000)
    x = x * np.array([1, 1, 1, 1, 1, 1, 1, 1e-2]) + offset
    eraser = method(sf.Moments().update(x, {"z": z}), erase="z")
    total = x.var(axis=0).sum() ** 0.5
    size = (x**2).mean() ** 0.5
    change = np.eye(8) - eraser.matrix()
    found = report(eraser).sensitivity
    assert found == pytest.approx(EPS32 * size * np.linalg.norm(change) / total, rel=1e-9)
    noise = EPS32 * size * np.random.default_rng(2).normal(size=(20000, 8))
    measured = ((noise @ change.T) ** 2).sum(axis=1).mean() ** 0.5 / total
    assert found == pytest.approx(measured, rel=0.05)  # 20,000 squares, three at least per row


@pytest.mark.parametrize(("scale", "warned"), [(1e-3, False), (1e-7, True)])
def test_a_sensitive_eraser_names_feature_and_remedy(scale: float, warned: bool) -> None:
    """The remedies keep their word."""
    x, z, y = rows()
    x[:, 6] *= scale
    moments = sf.Moments().update(x, {"z": z, "y": y})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        eraser = sf.splince(moments, erase="z", keep="y")
    texts = [str(w.message) for w in caught]
    assert (report(eraser).sensitivity > 1e-3) == warned  # type: ignore[operator]
    assert bool(texts) == warned
    assert report(eraser).warnings == tuple(texts)
    if not warned:
        return
    assert [w.category for w in caught] == [sf.exceptions.PrecisionWarning]
    assert "of feature(s) 6, with standard dev" in texts[0]
    told = re.search(r"shrinkage=(\S+) \(sensitivity (\S+)\)", texts[0])
    assert told is not None
    better = report(sf.splince(moments, erase="z", keep="y", shrinkage=float(told[1])))
    assert better.sensitivity == pytest.approx(float(told[2]), rel=0.06)
    assert better.sensitivity < 1e-3  # type: ignore[operator]
    with pytest.warns(sf.exceptions.PrecisionWarning, match=r"moments.factored\(1e-06\)"):
        sf.splince(moments.factored(), erase="z", keep="y")


def test_features_of_a_frame_are_named() -> None:
    pandas = pytest.importorskip("pandas")
    x, z, _ = rows()
    x[:, 6] *= 1e-7
    frame = pandas.DataFrame(x, columns=list("abcdefgh"))
    with pytest.warns(
        sf.exceptions.PrecisionWarning, match=r"of feature\(s\) 'g', with standard dev"
    ):
        sf.LEACE().fit(frame, concept=z).projection_  # noqa: B018


def test_an_offset_alone_is_no_fault_of_the_features() -> None:
    x, z, _ = rows()
    eraser = sf.sal(sf.Moments().update(x + 1e5, {"z": z}), erase="z")
    assert report(eraser).sensitivity > 1e-3  # type: ignore[operator]
    assert report(eraser).warnings == ()


# --- sentence embeddings with three dead features ------------------------------------------------


@pytest.mark.parametrize("method", ["leace", "splince"])
def test_sentence_embeddings_bear_rounding_or_name_the_feature(
    method: str, real_data: Callable[[str], Path]
) -> None:
    """Deviations of 6e-33, 9e-33, and 1.2e-9 about a mean of 1e-7, beside a median of .17."""
    folder = real_data("bug_profession_gender")
    x = np.load(folder / "X.npy")
    labels = {"z": np.load(folder / "z.npy"), "y": np.load(folder / "y.npy")}
    moments = sf.Moments().update(x, labels)
    call: Any = sf.leace if method == "leace" else sf.splince
    more: dict[str, Any] = {"erase": "z"} if method == "leace" else {"erase": "z", "keep": "y"}
    with pytest.warns(
        sf.exceptions.PrecisionWarning, match=r"of feature\(s\) 319, with standard dev"
    ):
        eraser = call(moments, **more)
    assert not eraser.right[[127, 223]].any()
    assert all(v.residual <= v.bound < 1e-10 for v in report(eraser).variables)
    robust = call(moments, shrinkage=1e-6, **more)
    assert all(v.residual <= v.bound < 1e-10 for v in report(robust).variables)
    wide = x.astype(np.float64)
    deviation = wide.var(axis=0).sum() ** 0.5

    def moved(dtype: Any, p: sf.Projection) -> float:
        # Rows are float32: their rounding is that of independent noise of the same size.
        noisy = wide + EPS32 / 2 * np.abs(wide).mean() * np.random.default_rng(0).uniform(
            -1, 1, size=wide.shape
        )
        rounded = noisy if dtype is np.float32 else wide.astype(dtype).astype(np.float64)
        return float(((p(rounded) - p(wide)) ** 2).sum(axis=1).mean() ** 0.5 / deviation)

    assert moved(np.float32, robust) < 1e-4
    assert moved(np.float16, robust) < 1e-2
    assert moved(np.float16, eraser) > 1e-2  # the control: hence the warning


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_rounding_of_a_float32_feature_brings_no_concept_back(dtype: Any) -> None:
    """A feature that varies by one unit in the last place is not read from float32 rows."""
    rng = np.random.default_rng(0)
    x, z = rng.normal(size=(5000, 64)).astype(dtype), rng.integers(0, 2, 5000)
    x[:, 0] += z
    x[:, 5] = 1000 + np.spacing(np.float32(1000)) * rng.integers(0, 3, 5000)
    eraser = sf.leace(sf.Moments().update(x, {"z": z}), erase="z")
    assert (eraser.right[5] == 0).all() == (dtype is np.float32)
    erased = eraser(x.astype(dtype)).astype(np.float64)
    assert sf.concept_strength(sf.Moments().update(erased, {"z": z}), "z").r2 < 0.01
    if dtype is np.float64:  # the control: the eraser that reads it fails on float32 rows
        rounded = eraser(x.astype(np.float32)).astype(np.float64)
        assert sf.concept_strength(sf.Moments().update(rounded, {"z": z}), "z").r2 > 0.1
