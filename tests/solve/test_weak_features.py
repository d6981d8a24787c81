"""Features that vary too little: left out of the whitening, erased all the same; the sensitivity.

The bounds of the constraints are those of `problems.residual`.
"""

from __future__ import annotations

import html
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from problems import EPS, Float, assert_constraints, report

import splince_fast as sf
from splince_fast._solve.factor import weak_features
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
        warnings.filterwarnings("ignore", "the eraser is sensitive", sf.PrecisionWarning)
        return call(*args, **options)


# --- features that are left out ------------------------------------------------------------------


@pytest.mark.parametrize("null_space", ["keep", "drop"])
@pytest.mark.parametrize("scale", [1e-33, 1e-28])
def test_noise_beside_features_of_any_units_is_left_out(scale: float, null_space: str) -> None:
    x, z, y = rows()
    x[:, [2, 5]] *= scale
    moments = sf.Moments().update(x, {"z": z, "y": y})
    for eraser, kept in (
        (sf.splince(moments, erase="z", keep="y", null_space=null_space), y),
        (sf.leace(moments, erase="z", null_space=null_space), None),
    ):
        assert report(eraser).left_out == (2, 5)
        assert eraser.rank == 2
        assert not eraser.right[[2, 5]].any()  # nothing is read from them
        assert_constraints(x, np.eye(3)[z], kept, eraser)
        assert report(eraser).sensitivity < 1e-6  # type: ignore[operator]
        assert "2 feature(s) (2, 5), of tiny" in str(report(eraser))
        # Of the other features it is the eraser that never saw these two.
        others = np.delete(np.arange(8), [2, 5])
        alone = sf.Moments().update(x[:, others], {"z": z, "y": y})
        plain = sf.leace(alone, erase="z") if kept is None else sf.splince(
            alone, erase="z", keep="y"
        )  # fmt: skip
        np.testing.assert_allclose(
            eraser.matrix()[np.ix_(others, others)], plain.matrix(), atol=1e-10
        )
        assert report(eraser).distortion == pytest.approx(report(plain).distortion, rel=1e-9)


def test_control_without_it_they_get_full_weight() -> None:
    x, z, _ = rows()
    x[:, [2, 5]] *= 1e-33
    moments = sf.Moments().update(x, {"z": z})
    with pytest.warns(sf.PrecisionWarning, match=r"feature\(s\) (2, 5|5, 2), with standard dev"):
        eraser = sf.leace(moments, erase="z", min_scale=0.0)
    assert report(eraser).left_out == ()
    assert np.abs(eraser.matrix()).max() > 1e25
    assert report(eraser).sensitivity > 1e20  # type: ignore[operator]
    assert_constraints(x, np.eye(3)[z], None, eraser)


@given(
    seed=st.integers(0, 2**20), exponent=st.floats(-12, 2), min_scale=st.sampled_from([1e-3, 0.1])
)
@pytest.mark.parametrize("solver", ["auto", "eigh"])
def test_constraints_stay_exact_whatever_is_left_out(
    solver: str, seed: int, exponent: float, min_scale: float
) -> None:
    """Constant features, and copies of others, stand beside."""
    x, z, y = rows(seed=seed)
    rng = np.random.default_rng(seed)
    weak = rng.random(8) < 0.4
    weak[:3] = False  # three dimensions for two of the concept and ...
    x[:, weak] *= 10.0**exponent
    x = np.hstack([x, x[:, :1], np.full((len(x), 1), 3.0)])
    moments = sf.Moments().update(x, {"z": z, "y": y})
    if solver == "eigh":
        moments = moments.factored(solver="eigh", min_scale=min_scale)  # type: ignore[assignment]
    options: dict[str, Any] = {"min_scale": min_scale, "on_infeasible": "drop"}
    eraser = quiet(sf.splince, moments, erase="z", keep="y", **options)
    deviations = x.std(axis=0)[:9]
    below = deviations < min_scale * x.var(axis=0).mean() ** 0.5
    assert report(eraser).left_out == tuple(np.flatnonzero(below))
    varying = x[:, :9]
    narrow = sf.Projection(eraser.left[:9], eraser.right[:9], eraser.mean[:9])
    assert_constraints(varying, np.eye(3)[z], y, narrow)
    assert report(eraser).dropped == 0
    assert all(v.residual <= v.bound for v in report(eraser).variables)
    moved = ((eraser(x) - x) ** 2).sum(axis=1).mean() / x.var(axis=0).sum()
    assert report(eraser).distortion == pytest.approx(moved, rel=1e-9)


@pytest.mark.parametrize("keep", [False, True])
def test_directions_of_the_concept_in_left_out_features_alone_are_erased(keep: bool) -> None:
    """One large feature for two directions of the concept: the small ones are read, too."""
    x, z, y = rows()
    x[:, 1:] *= 1e-4
    y = y[:, :1]
    moments = sf.Moments().update(x, {"z": z, "y": y})
    call, more = (sf.splince, {"keep": "y"}) if keep else (sf.leace, {})
    eraser = quiet(call, moments, erase="z", min_scale=0.01, **more)
    assert report(eraser).left_out == tuple(range(1, 8))
    assert eraser.rank == 2
    assert_constraints(x, np.eye(3)[z], y if keep else None, eraser)
    moved = ((eraser(x) - x) ** 2).sum(axis=1).mean() / x.var(axis=0).sum()
    assert report(eraser).distortion == pytest.approx(moved, rel=1e-9)


def test_noise_of_the_rounding_of_float32_is_left_out() -> None:
    """A column that flips its last bit, in rows of float32, in float64, and with shrinkage."""
    x, z, _ = rows()
    x[:, 3] = 1.0 + 2.0**-23 * (np.random.default_rng(1).random(len(x)) < 0.3)
    for dtype, options, left_out in (
        (np.float32, {}, (3,)),
        (np.float64, {}, ()),
        (np.float32, {"shrinkage": 1e-6}, ()),
        (np.float32, {"min_scale": 0.0}, ()),
    ):
        moments = sf.Moments().update(x.astype(dtype), {"z": z})
        assert report(quiet(sf.leace, moments, erase="z", **options)).left_out == left_out


@given(seed=st.integers(0, 2**20))
def test_units_of_the_promise_leave_out_none(seed: int) -> None:
    x, _, _ = rows(n=100, seed=seed)
    scale = 10.0 ** np.random.default_rng(seed).uniform(-12, 12, size=8)
    x *= scale
    assert not len(weak_features(x.var(axis=0), x.mean(axis=0), "auto", EPS32, 0.0))


def test_thresholds_of_what_is_left_out() -> None:
    variances, mean = np.array([1.0, 1e-6, 0.0, 4.0]), np.array([0.0, 0.0, 5.0, 1e3])
    unit = variances.mean() ** 0.5
    for ratio, expected in ((0.99e-3 / unit, []), (1.01e-3 / unit, [1]), (0.5, [1])):
        assert weak_features(variances, mean, ratio, EPS, 0.0).tolist() == expected
    # Of its own magnitude: a deviation of 2 about 1e8 is below 2^-23 of it, and not of 1e7.
    for offset, expected in ((1e7, []), (1e8, [3])):
        mean[3] = offset
        assert weak_features(variances, mean, "auto", EPS32, 0.0).tolist() == expected
        assert weak_features(variances, mean, "auto", EPS, 0.0).tolist() == []
        assert weak_features(variances, mean, "auto", EPS32, 1e-6).tolist() == []


def test_moments_without_a_covariance_leave_them_out_as_well() -> None:
    x, z, y = rows()
    x[:, [2, 5]] *= 1e-33
    blocks = [(x, {"z": z, "y": y})]
    moments = sf.Moments(covariance_type="diag").update(*blocks[0])
    for again in ({}, {"refine": blocks}):
        eraser = sf.splince(moments, erase="z", keep="y", **again)
        assert report(eraser).left_out == (2, 5)
        assert not eraser.right[[2, 5]].any()
        assert_constraints(x, np.eye(3)[z], y, eraser)


def test_folds_and_snapshots_leave_out_the_same() -> None:
    x, z, y = rows()
    x[:, 4] *= 1e-6
    moments = sf.Moments().update(x, {"z": z, "y": y})
    plain = sf.splince(moments, erase="z", keep="y", min_scale=1e-3)
    kept = moments.factored(min_scale=1e-3)
    np.testing.assert_array_equal(sf.splince(kept, erase="z", keep="y").matrix(), plain.matrix())
    assert kept.gram(np.eye(8)) == pytest.approx(moments.covariance(ddof=0), rel=1e-12)
    with pytest.raises(sf.InputError, match=r"min_scale is 0.5.*factored with 0.001"):
        sf.splince(kept, erase="z", keep="y", min_scale=0.5)
    folds = [sf.Moments().update(x[i::2], {"z": z[i::2], "y": y[i::2]}) for i in range(2)]
    found = sf.cross_report(folds, erase="z", keep="y", min_scale=1e-3).eraser
    assert report(found).left_out == (4,)
    fitted = sf.SPLINCE(min_scale=1e-3).fit(x, y, concept=z)
    assert fitted.report_.left_out == (4,)
    _, eraser = sf.erase(x, z, min_scale=1e-3)
    assert report(eraser).left_out == (4,)


@pytest.mark.filterwarnings("ignore:the eraser is sensitive:splince_fast.PrecisionWarning")
@pytest.mark.parametrize("method", ["leace", "repair"])
def test_features_left_out_are_named(method: str, tmp_path: Path) -> None:
    x, z, y = rows()
    x[:, 1:] *= 1e-5
    frame = pd.DataFrame(x, columns=[f"<{j}>" for j in range(8)])
    moments = sf.Moments().update(frame, {"z": z, "y": y[:, 0]})
    if method == "repair":
        eraser = sf.repair(moments.factored(min_scale=1e-3), before=moments, keep="y")
    else:
        eraser = sf.leace(moments, erase="z", min_scale=1e-3)
    eraser.save(tmp_path / "eraser")
    for found in (report(eraser), report(sf.Projection.load(tmp_path / "eraser"))):
        assert found.left_out_names == tuple(f"<{j}>" for j in range(1, 8))
        for text in (str(found), found.explain(), html.unescape(found._repr_html_())):
            assert "7 feature(s) ('<1>', '<2>', '<3>', '<4>', '<5>', ...)" in text


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
    assert [w.category for w in caught] == [sf.PrecisionWarning]
    assert "of feature(s) 6, with standard dev" in texts[0]
    for option in ("min_scale", "shrinkage"):
        told = re.search(rf"{option}=(\S+) \(sensitivity (\S+)\)", texts[0])
        assert told is not None
        better = report(sf.splince(moments, erase="z", keep="y", **{option: float(told[1])}))
        assert better.sensitivity == pytest.approx(float(told[2]), rel=0.06)
        assert better.sensitivity < 1e-3  # type: ignore[operator]
    with pytest.warns(sf.PrecisionWarning, match=r"moments.factored\(min_scale=1e-0\d\)"):
        sf.splince(moments.factored(), erase="z", keep="y")


def test_features_of_a_frame_are_named() -> None:
    pandas = pytest.importorskip("pandas")
    x, z, _ = rows()
    x[:, 6] *= 1e-7
    frame = pandas.DataFrame(x, columns=list("abcdefgh"))
    with pytest.warns(sf.PrecisionWarning, match=r"of feature\(s\) 'g', with standard dev"):
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
    with pytest.warns(sf.PrecisionWarning, match=r"of feature\(s\) 319, with standard dev"):
        eraser = call(moments, **more)
    assert report(eraser).left_out == (127, 223)
    assert all(v.residual <= v.bound < 1e-10 for v in report(eraser).variables)
    robust = call(moments, min_scale=1e-8, **more)
    assert report(robust).left_out == (127, 223, 319)
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
