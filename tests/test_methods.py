"""The four methods on data: guarantees, invariances, degenerate data, policies and errors."""

from __future__ import annotations

import re
import sys
import threading
import warnings
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from naive_model import FUZZ
from numpy.typing import NDArray
from test_oracles import EPS, Data, conditions, draw_data

import splince_fast as sf
from splince_fast.methods import closed_forms

Float = NDArray[np.float64]
many = settings(max_examples=30 * max(FUZZ, 1))
METHODS = ["splince", "leace", "sal", "sal that keeps", "mean_projection"]


def erase(method: str, moments: sf.Moments, z: Any = "z", y: Any = "y", **options: Any) -> Any:
    """Any of the methods by name, with what it erases and, where it can, keeps."""
    if method == "splince":
        return sf.splince(moments, erase=z, keep=y, **options)
    if method == "sal that keeps":
        return sf.sal(moments, erase=z, keep=y, **options)
    plain = {"leace": sf.leace, "sal": sf.sal, "mean_projection": sf.mean_projection}
    return plain[method](moments, erase=z, **options)


def report(eraser: sf.Projection) -> sf.Report:
    assert eraser.report is not None
    return eraser.report


def slack(data: Data, s: Float | None = None) -> float:
    """Relative error of E from the rounding of the covariances of n rows.

    Each covariance errs by gamma = 4 sqrt(n + d) eps (1 + |mean| / std) of its deviations (random
    roundings), whitening multiplies that by kappa, and the projection by q / s^2; d for norms.
    """
    given_s, sz, sy = data.covariances()
    kappa, q, sine = conditions(given_s if s is None else s, sz, sy)
    n, d = data.x.shape
    offset = float(np.max(np.abs(data.x.mean(axis=0)) / data.x.std(axis=0)))
    return 4 * (n + d) ** 0.5 * EPS * (1 + offset) * d * kappa * q / sine**2


def change(eraser: sf.Projection) -> Float:
    return np.eye(eraser.n_features) - eraser.matrix()


def assert_same(found: Float, expected: Float, bound: float) -> None:
    assert np.linalg.norm(found - expected) <= bound * np.linalg.norm(expected)


# --- the guarantee on the data -------------------------------------------------------------------


@many
@given(
    seed=st.integers(0, 2**20),
    d=st.integers(6, 40),
    kz=st.integers(2, 4),
    kappa=st.sampled_from([1.0, 1e4, 1e8, 1e12]),
    dtype=st.sampled_from([np.float64, np.float32]),
)
@pytest.mark.parametrize("method", METHODS)
def test_covariances_of_erased_rows(
    method: str, seed: int, d: int, kz: int, kappa: float, dtype: Any
) -> None:
    if dtype == np.float32:  # products in float32 tell no more of a covariance
        kappa = min(kappa, 1e4)
    data = draw_data(seed, d=d, kz=kz, kappa=kappa)
    x = data.x.astype(dtype)
    before = sf.Moments().update(x, {"z": data.z, "y": data.y})
    eraser = erase(method, before)
    clean = eraser(x.astype(np.float64))
    after = sf.Moments().update(clean, {"z": data.z, "y": data.y})
    # Sums over n rows of x err by gamma of its deviations; P stretches errors by |P|.
    size = np.linalg.norm(eraser.matrix(), 2)
    offset = np.abs(x.mean(axis=0)).max() + x.std()
    gamma = 4 * (len(x) + d) ** 0.5 * EPS * offset * size
    figures = report(eraser)
    q = max(v.bound for v in figures.variables) / (8 * d * EPS * max(size, 1) ** 2)
    assert np.abs(after.cross_covariance("z")).max() <= gamma * q
    if "keep" in method or method == "splince":
        kept = after.cross_covariance("y") - before.cross_covariance("y")
        assert np.abs(kept).max() <= gamma * q * data.y.std()
    assert eraser.rank == kz - 1
    for variable in figures.variables:
        assert variable.residual <= variable.bound


@pytest.mark.parametrize("method", ["splince", "leace", "sal", "sal that keeps"])
def test_distortion_is_the_mean_square_change(method: str) -> None:
    data = draw_data(0, n=2000, d=12)
    eraser = erase(method, data.moments())
    moved = ((eraser(data.x) - data.x) ** 2).sum(axis=1).mean()
    variance = data.x.var(axis=0).sum()
    assert report(eraser).distortion == pytest.approx(moved / variance, rel=slack(data))


@pytest.mark.parametrize("cosine", [0.0, 0.6, 0.99, 1 - 1e-6])
def test_distortion_of_one_direction_each_is_leace_over_squared_sine(cosine: float) -> None:
    """White data, z and y exact linear functions: E|Px - x|^2 = D_L / (1 - c^2)."""
    rng = np.random.default_rng(0)
    x = np.linalg.qr(rng.normal(size=(500, 6)) - 0)[0]
    x = np.linalg.qr(x - x.mean(axis=0))[0]
    z, y = x[:, 0], cosine * x[:, 0] + (1 - cosine**2) ** 0.5 * x[:, 1]
    moments = sf.Moments().update(x, {"z": z, "y": y})
    figures = report(sf.splince(moments, erase="z", keep="y"))
    sine_squared = (1 - cosine) * (1 + cosine)
    # c errs by some eps, so 1 - c^2 by that relative to itself, and D likewise.
    rel = 1e3 * EPS / sine_squared
    assert figures.distortion_leace == pytest.approx(1 / 6, rel=1e-13)
    assert figures.distortion == pytest.approx(1 / 6 / sine_squared, rel=rel)
    for mutant in ((1 + cosine**2) / 6, 1 / 6 / sine_squared**0.5):
        if cosine:
            assert figures.distortion != pytest.approx(mutant, rel=max(rel, 1e-3))


def test_control_sal_keeps_both_constraints_and_costs_more() -> None:
    """What the constraints cannot tell apart, the distortion does."""
    data = draw_data(1, d=10, kappa=1e3)
    moments = data.moments()
    optimal, wrong = (erase(m, moments) for m in ("splince", "sal that keeps"))
    for eraser in (optimal, wrong):
        assert all(v.residual <= v.bound for v in report(eraser).variables)
    assert report(wrong).distortion > 1.01 * report(optimal).distortion


def test_splince_is_leace_where_the_whitened_spans_are_orthogonal() -> None:
    rng = np.random.default_rng(2)
    x = np.linalg.qr(rng.normal(size=(300, 5)))[0]
    x = np.linalg.qr(x - x.mean(axis=0))[0]
    mixed = x @ rng.normal(size=(5, 5))
    moments = sf.Moments().update(mixed, {"z": x[:, 0], "y": x[:, 1]})
    both = [erase(m, moments) for m in ("splince", "leace")]
    np.testing.assert_allclose(both[0].matrix(), both[1].matrix(), atol=1e-12)
    # In the features as they come the spans are not orthogonal: that is not the criterion.
    sz, sy = (moments.cross_covariance(name)[:, 0] for name in "zy")
    assert abs(sz @ sy) > 1e-3 * np.linalg.norm(sz) * np.linalg.norm(sy)


# --- invariances ---------------------------------------------------------------------------------


@given(exponent=st.floats(-12, 12), seed=st.integers(0, 2**20))
@pytest.mark.parametrize("method", METHODS)
def test_units_of_x_do_not_matter(method: str, exponent: float, seed: int) -> None:
    data = draw_data(seed)
    scaled = Data(data.x * 10.0**exponent, data.z, data.y)
    found, expected = (erase(method, d.moments()) for d in (scaled, data))
    # SAL depends on Sz alone: its condition stands in for that of S.
    assert_same(change(found), change(expected), 10 * slack(data))


@given(seed=st.integers(0, 2**20), spread=st.sampled_from([1.0, 6.0, 12.0]))
@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("method", ["splince", "leace"])
def test_units_of_each_feature_do_not_matter(
    method: str, dtype: Any, seed: int, spread: float
) -> None:
    """By powers of two, which round nothing, so that both see the same data."""
    data = draw_data(seed)
    x = data.x.astype(dtype)
    exponents = np.random.default_rng(seed).uniform(-spread, spread, size=8) * 3.3
    scale = (2.0 ** np.round(exponents)).astype(dtype)
    labels = {"z": data.z, "y": data.y}
    expected = erase(method, sf.Moments().update(x, labels))
    found = erase(method, sf.Moments().update(x * scale, labels))
    back = change(found) / scale[:, None] * scale
    assert_same(back, change(expected), 1e-3 if dtype == np.float32 else slack(data))


def test_control_units_of_each_feature_matter_to_sal() -> None:
    data = draw_data(0)
    scale = np.geomspace(1, 100, 8)
    found = erase("sal", Data(data.x * scale, data.z, data.y).moments())
    back = change(found) / scale[:, None] * scale
    assert np.linalg.norm(back - change(erase("sal", data.moments()))) > 0.1


@many
@given(seed=st.integers(0, 2**20), kappa=st.sampled_from([1.0, 30.0, 1e3]))
@pytest.mark.parametrize("method", ["splince", "leace"])
def test_commutes_with_any_affine_map_of_the_features(method: str, seed: int, kappa: float) -> None:
    data = draw_data(seed)
    rng = np.random.default_rng(seed)
    bases = [np.linalg.qr(rng.normal(size=(8, 8)))[0] for _ in range(2)]
    mixing = (bases[0] * np.geomspace(1, kappa, 8)) @ bases[1]
    moved = Data(data.x @ mixing.T + rng.normal(size=8), data.z, data.y)
    expected = mixing @ change(erase(method, data.moments())) @ np.linalg.inv(mixing)
    bound = (slack(data) + slack(moved)) * kappa
    assert_same(change(erase(method, moved.moments())), expected, bound)


@many
@given(seed=st.integers(0, 2**20))
def test_sal_commutes_with_rotations_and_with_nothing_else(seed: int) -> None:
    data = draw_data(seed)
    rng = np.random.default_rng(seed)
    turn = np.linalg.qr(rng.normal(size=(8, 8)))[0]
    stretch = turn * np.geomspace(1, 30, 8)
    plain = change(erase("sal", data.moments()))
    for mixing, same in ((turn, True), (stretch, False)):
        moved = Data(data.x @ mixing.T, data.z, data.y)
        expected = mixing @ plain @ np.linalg.inv(mixing)
        found = change(erase("sal", moved.moments()))
        assert (np.linalg.norm(found - expected) <= slack(data)) == same


@many
@given(
    seed=st.integers(0, 2**20), columns=st.integers(2, 7), exponent=st.integers(-9, 9),
    role=st.sampled_from(["z", "y"]),
)  # fmt: skip
@pytest.mark.parametrize("method", ["splince", "leace", "sal", "sal that keeps"])
def test_recoded_and_redundant_columns_do_not_matter(
    method: str, seed: int, columns: int, exponent: int, role: str
) -> None:
    """Any columns with the same span give the same map: units, offsets, duplicates, surplus."""
    rng = np.random.default_rng(seed)
    data = draw_data(seed, ky=2)
    hot = np.eye(3)[data.z][:, :2]
    codes = {"z": hot, "y": data.y}
    expected = erase(method, sf.Moments().update(data.x, codes))
    basis = [np.linalg.qr(rng.normal(size=(columns, columns)))[0][:, :2],
             np.linalg.qr(rng.normal(size=(2, 2)))[0]]  # fmt: skip
    mixing = (basis[0] * np.array([1.0, 0.1])) @ basis[1].T * 10.0**exponent
    codes[role] = codes[role] @ mixing.T + rng.normal(size=columns) * 10.0**exponent
    found = erase(method, sf.Moments().update(data.x, codes))
    assert found.rank == expected.rank == 2
    # The recoding has condition 10.
    assert_same(change(found), change(expected), 100 * slack(data))


@pytest.mark.parametrize("method", METHODS)
def test_the_form_of_class_labels_does_not_matter(method: str) -> None:
    data = draw_data(3, kz=4)
    hot = np.eye(4)[data.z]
    names = np.array(["b", "d", "a", "c"])[data.z]
    forms: dict[str, Any] = {"classes": data.z, "names": names, "negative": -7 * data.z}
    if method != "mean_projection":
        forms |= {"one-hot": hot, "without one": hot[:, 1:], "twice": np.hstack([hot, hot])}
    maps = [
        change(erase(method, sf.Moments().update(data.x, {"z": form, "y": data.y})))
        for form in forms.values()
    ]
    for other in maps[1:]:
        assert_same(other, maps[0], slack(data))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_order_repetition_and_weight_of_rows_do_not_matter(method: str, dtype: Any) -> None:
    """All rows twice, or of weight 1/8: what a denominator of n - 1 would make differ."""
    data = draw_data(4)
    x = data.x.astype(dtype)
    order = np.random.default_rng(0).permutation(len(x))
    variants = [
        sf.Moments().update(x, {"z": data.z, "y": data.y}),
        sf.Moments(block_rows=7).update(x[order], {"z": data.z[order], "y": data.y[order]}),
        sf.Moments().update(
            np.tile(x, (2, 1)), {"z": np.tile(data.z, 2), "y": np.tile(data.y, (2, 1))}
        ),
        sf.Moments().update(x, {"z": data.z, "y": data.y}, sample_weight=np.full(len(x), 0.125)),
    ]
    maps = [change(erase(method, moments)) for moments in variants]
    bound = slack(data) * (1 if dtype == np.float64 else 2.0**29)  # float32: eps is 2^29 larger
    for other in maps[1:]:
        assert_same(other, maps[0], bound)


@pytest.mark.parametrize("method", METHODS)
def test_offset_of_ten_thousand_deviations(method: str) -> None:
    data = draw_data(5, kappa=10.0)
    far = data.x - data.x.mean(axis=0) + 1e4 * data.x.std()
    far = far.astype(np.float32).astype(np.float64)
    near = far - np.round(far.mean(axis=0))
    moved, still = (erase(method, Data(x, data.z, data.y).moments()) for x in (far, near))
    assert_same(change(moved), change(still), slack(Data(far, data.z, data.y)))
    difference = moved(far) - far - (still(near) - near)
    # A row of size 1e4 is rounded by 1e4 eps in each of a few sums of 8.
    assert np.abs(difference).max() <= 1e3 * slack(Data(near, data.z, data.y)) + 1e4 * 100 * EPS


# --- rank-deficient covariances ------------------------------------------------------------------


def two_labels(rng: np.random.Generator, x: Float) -> dict[str, Any]:
    z = (x[:, 0] + rng.normal(size=len(x)) > 0).astype(int)
    y = (x[:, 1] + 0.5 * z + rng.normal(size=len(x)) > 0).astype(int)
    return {"z": z, "y": y}


def assert_erased(eraser: sf.Projection, x: Any, labels: dict[str, Any]) -> None:
    """The guarantee itself, on rows and class means by two passes."""
    clean = eraser(np.asarray(x, dtype=np.float64))
    assert np.isfinite(clean).all()
    means = [clean[labels["z"] == c].mean(axis=0) for c in np.unique(labels["z"])]
    size = max(np.linalg.norm(eraser.matrix(), 2), 1.0) * np.abs(x).max()
    for mean in means[1:]:
        assert np.abs(mean - means[0]).max() <= 1e3 * EPS * len(means) * size


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("method", ["splince", "leace"])
@pytest.mark.parametrize(
    "kind", ["dead", "nearly dead", "duplicated", "combined", "unit norm", "sums to one", "wide"]
)
def test_rank_deficient_features(method: str, kind: str, dtype: Any) -> None:
    rng = np.random.default_rng(6)
    n, d = (25, 60) if kind == "wide" else (400, 10)
    x = rng.normal(size=(n, d))
    labels = two_labels(rng, x)
    missing = 0
    if kind == "dead":
        x[:, [2, 7]], missing = [0.0, 0.1], 2
    elif kind == "nearly dead":
        x[:, 2] = 1e3 + 1.1e-13 * rng.integers(-2, 3, size=n)  # roundings of its mean
        missing = 1
    elif kind == "duplicated":
        x[:, 8:], missing = x[:, :2], 2
    elif kind == "combined":
        x[:, 8:] = np.round(64 * x[:, :8]) / 64 @ rng.integers(-3, 4, size=(8, 2))
        x[:, :8], missing = np.round(64 * x[:, :8]) / 64, 2
    elif kind == "unit norm":
        x /= np.linalg.norm(x, axis=1, keepdims=True)
    elif kind == "sums to one":
        x = np.exp(x) / np.exp(x).sum(axis=1, keepdims=True)
        missing = 1
    elif kind == "wide":
        missing = d - n + 1
    x = x.astype(dtype)
    moments = sf.Moments().update(x, labels)
    eraser = erase(method, moments)
    assert report(eraser).rank_covariance == d - missing
    assert_erased(eraser, x, labels)
    for variable in report(eraser).variables:
        assert variable.residual <= variable.bound
    # Off the support of x nothing is known, and nothing is done.
    centred = x.astype(np.float64) - x.astype(np.float64).mean(axis=0)
    null = np.linalg.svd(centred / np.linalg.norm(centred, axis=0).clip(1e-12))[2][d - missing :].T
    null = null / np.linalg.norm(centred, axis=0).clip(1e-12)[:, None]
    null /= np.linalg.norm(null, axis=0)
    precision = float(np.finfo(dtype).eps)
    np.testing.assert_allclose(eraser.matrix() @ null, null, atol=1e4 * precision)


@pytest.mark.parametrize("rare", [1e-1, 1e-2, 1e-3, 1e-4])
def test_one_hot_features_with_a_rare_category(rare: float) -> None:
    """The dependency hardly shows in the last feature, and the covariance is singular all the same.

    A held-out row whose shares do not sum to one lies off the support and must stay as it is there.
    """
    rng = np.random.default_rng(1)
    shares = np.array([0.3, 0.25, 0.2, 0.15, 0.1 - rare, rare])
    category = rng.choice(6, size=20_000, p=shares / shares.sum())
    x = np.eye(6)[category] * 5 + rng.gamma(1, size=(20_000, 6)) * np.array([1, 1, 1, 1, 1, rare])
    x /= x.sum(axis=1, keepdims=True)
    labels = {"z": category % 2, "y": category // 2 == 1}
    eraser = sf.splince(sf.Moments().update(x, labels), erase="z", keep="y")
    assert report(eraser).rank_covariance == 5
    np.testing.assert_allclose(eraser.matrix() @ np.ones(6), 1.0, atol=1e-10)


@pytest.mark.parametrize("units", [1.0, 3.0, 6.0, 9.0])
@pytest.mark.parametrize("method", ["splince", "leace"])
def test_rank_deficient_features_in_their_own_units(method: str, units: float) -> None:
    """On the data the map follows powers of two in the units of each feature."""
    rng = np.random.default_rng(7)
    x = rng.normal(size=(400, 12))
    x[:, 7:] = x[:, :7] @ rng.normal(size=(7, 5))
    labels = two_labels(rng, x)
    scale = 2.0 ** np.round(rng.uniform(-units, units, size=12) * 3.3)
    expected = erase(method, sf.Moments().update(x, labels))(x)
    found = erase(method, sf.Moments().update(x * scale, labels))(x * scale) / scale
    # kappa of some hundreds on the support, and 400 rows.
    assert np.linalg.norm(found - expected) <= 1e-10 * np.linalg.norm(expected)


@pytest.mark.parametrize(
    ("dtype", "size"),
    [(np.float64, s) for s in (1e-6, 1e-7, 1e-8, 1e-9)] + [(np.float32, s) for s in (1e-3, 1e-4)],
)
def test_concept_that_lives_in_the_difference_of_two_nearly_equal_features(
    dtype: Any, size: float
) -> None:
    """x0 - x1 tells a class exactly and far above the rounding of the rows, beside another trace.

    The covariance cannot resolve that difference, the cross-covariance can: it must be erased, at a
    distortion that is not far above the optimum, or refused.
    """
    rng = np.random.default_rng(8)
    x = np.tile(rng.normal(size=(1000, 20)).astype(np.float32).astype(np.float64), (3, 1))
    z = np.repeat([0, 1, 2], 1000)
    x[:, 5] += z == 1
    x[:, 1] = x[:, 0] - size * (z == 2)
    x[:, 0] += size * (z == 2)
    x = x.astype(dtype)
    moments = sf.Moments().update(x, {"z": z})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        eraser = sf.leace(moments, erase="z")
    resolved = dtype is np.float64 and size == 1e-6
    assert [w.category for w in caught] == ([] if resolved else [sf.PrecisionWarning])
    assert eraser.rank == 2
    assert report(eraser).variables[0].residual <= max(report(eraser).variables[0].bound, 1e-9)
    wide = x.astype(np.float64)
    clean = eraser(wide)
    # Two directions of twenty, and of them only one with a visible share of the variance.
    moved = ((clean - wide) ** 2).sum() / ((wide - wide.mean(axis=0)) ** 2).sum()
    assert moved < 0.5
    trace = clean[:, 0] - clean[:, 1]
    gap = trace[z == 2].mean() - trace[z != 2].mean()
    assert abs(gap) < 1e-2 * 2 * size


def test_n_below_d_without_noise_interpolates() -> None:
    """With n <= d rows the labels are linear functions of x: LEACE erases them wholly."""
    rng = np.random.default_rng(9)
    x, labels = rng.normal(size=(20, 50)), {"z": np.arange(20) % 2, "y": np.arange(20) // 10}
    figures = report(sf.splince(sf.Moments().update(x, labels), erase="z", keep="y"))
    assert figures.variables[0].singular_values[0] == pytest.approx(1.0, abs=1e-12)
    # Balanced labels are uncorrelated, and then so are their predictions: nothing is paid for y.
    assert figures.cosines[0] == pytest.approx(0.0, abs=1e-12)
    assert figures.distortion == pytest.approx(figures.distortion_leace, rel=1e-12)


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_two_rows(dtype: Any) -> None:
    rng = np.random.default_rng(10)
    x = rng.normal(size=(2, 5)).astype(dtype)
    moments = sf.Moments().update(x, {"z": [0, 1], "y": [0.0, 1.0]})
    for method in ("leace", "sal", "mean_projection"):
        clean = erase(method, moments)(x.astype(np.float64))
        np.testing.assert_allclose(clean, np.tile(clean.mean(axis=0), (2, 1)), atol=1e-6)
        np.testing.assert_allclose(clean.mean(axis=0), x.mean(axis=0), atol=1e-6)
    for method in ("splince", "sal that keeps"):
        with pytest.raises(sf.InfeasibleError):
            erase(method, moments)


@pytest.mark.parametrize("method", METHODS)
def test_one_row_has_no_concept(method: str) -> None:
    moments = sf.Moments().update(np.ones((1, 4)), {"z": [1], "y": [0.5]})
    with pytest.raises(sf.ConstantVariableError, match="'z'"):
        erase(method, moments)


def test_one_feature() -> None:
    rng = np.random.default_rng(11)
    z = rng.integers(0, 2, size=50)
    x = rng.normal(size=(50, 1)) + z[:, None]
    moments = sf.Moments().update(x, {"z": z, "y": rng.integers(0, 2, size=50)})
    for method in ("leace", "sal", "mean_projection"):
        assert abs(erase(method, moments).matrix()[0, 0]) <= 8 * EPS
    for method in ("splince", "sal that keeps"):
        with pytest.raises(sf.InfeasibleError):
            erase(method, moments)


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_more_classes_than_the_support_has_room_for(dtype: Any) -> None:
    """rank z + rank y above rank S: with n < d every function of the rows is linear in x."""
    rng = np.random.default_rng(12)
    x = rng.normal(size=(9, 30)).astype(dtype)
    z, y = np.arange(9) % 5, (np.arange(9) * 2) % 9 % 6
    moments = sf.Moments().update(x, {"z": z, "y": y})
    assert erase("leace", moments).rank == 4
    with pytest.raises(sf.InfeasibleError, match=r"'y'.*'z'"):
        erase("splince", moments)
    with pytest.warns(sf.DroppedDirectionsWarning):
        eraser = erase("splince", moments, on_infeasible="drop")
    joint = np.column_stack([np.eye(5)[z], np.eye(6)[y]])
    shared = 4 + 5 - (np.linalg.matrix_rank(joint) - 1)
    assert shared > 0
    assert report(eraser).dropped == shared
    assert_erased(eraser, x, {"z": z})


@pytest.mark.parametrize("method", METHODS)
def test_constant_data_erase_nothing_and_say_so(method: str) -> None:
    x = np.tile([1.0, -3.0, 1e6], (40, 1))
    moments = sf.Moments().update(x, {"z": np.arange(40) % 2, "y": np.arange(40) % 3})
    with pytest.warns(sf.NothingErasedWarning, match="'z'"):
        eraser = erase(method, moments)
    assert eraser.rank == 0
    np.testing.assert_array_equal(eraser(x), x)
    assert report(eraser).warnings


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("scale", [1e-12, 1.0, 1e12])
def test_no_trace_to_rounding_warns_at_any_scale(method: str, scale: float) -> None:
    """The same rows in both classes: what covariance is left is rounding."""
    rng = np.random.default_rng(13)
    half = rng.normal(size=(300, 6))
    x, z = np.tile(half, (2, 1)) * scale, np.repeat([0, 1], 300)
    order = rng.permutation(600)
    moments = sf.Moments().update(x[order], {"z": z[order], "y": x[order, 0]})
    with pytest.warns(sf.NothingErasedWarning):
        eraser = erase(method, moments)
    np.testing.assert_array_equal(eraser.matrix(), np.eye(6))


def test_a_kept_variable_without_a_trace_costs_nothing() -> None:
    rng = np.random.default_rng(13)
    x, y = np.tile(rng.normal(size=(300, 6)), (2, 1)), np.repeat([0, 1], 300)
    z = (x[:, 0] > 0).astype(int)
    moments = sf.Moments().update(x, {"z": z, "y": y})
    eraser = sf.splince(moments, erase="z", keep="y")
    assert_same(change(eraser), change(sf.leace(moments, erase="z")), 1e-12)
    assert report(eraser).rho == 0.0


# --- solvers -------------------------------------------------------------------------------------


@many
@given(
    seed=st.integers(0, 2**20), d=st.integers(5, 40), kappa=st.sampled_from([1.0, 1e4, 1e8, 1e12])
)
@pytest.mark.parametrize("method", ["splince", "leace"])
def test_solvers_agree(method: str, seed: int, d: int, kappa: float) -> None:
    data = draw_data(seed, d=d, kappa=kappa)
    erasers = [erase(method, data.moments(), solver=s) for s in ("auto", "cholesky", "eigh")]
    np.testing.assert_array_equal(erasers[0].matrix(), erasers[1].matrix())
    assert [report(e).solver for e in erasers] == ["cholesky", "cholesky", "eigh"]
    kappa, q, sine = conditions(*data.covariances())
    # The same moments: only the factorisations differ.
    bound = 16 * d * EPS * (kappa + q) / sine
    assert_same(change(erasers[2]), change(erasers[1]), bound)


@pytest.mark.parametrize("method", ["splince", "leace"])
def test_cholesky_refuses_a_singular_covariance(method: str) -> None:
    data = draw_data(0, n=10, d=20, kz=2, ky=1)
    with pytest.raises(sf.SplinceError, match=r"solver='auto'.*shrinkage"):
        erase(method, data.moments(), solver="cholesky")
    assert erase(method, data.moments(), solver="cholesky", shrinkage=0.1).rank == 1


@pytest.mark.parametrize("method", ["splince", "leace"])
@pytest.mark.parametrize("policy", ["keep", "drop"])
def test_null_space_of_dead_features(method: str, policy: str) -> None:
    rng = np.random.default_rng(14)
    x = rng.normal(size=(200, 6))
    labels = two_labels(rng, x)
    x[:, 3] = 2.5
    eraser = erase(method, sf.Moments().update(x, labels), null_space=policy)
    unit = np.eye(6)[3]
    np.testing.assert_allclose(eraser.matrix() @ unit, unit if policy == "keep" else 0 * unit)
    assert eraser.rank == (1 if policy == "keep" else 2)
    # On the data, where the feature never leaves its mean, the policies agree.
    np.testing.assert_allclose(eraser(x)[:, 3], 2.5)


# --- concepts that are rare, small, constant, repeated ------------------------------------------


@pytest.mark.parametrize("members", [200, 20, 2, 1])
@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("method", METHODS)
def test_rare_concept_far_from_the_rest(method: str, dtype: Any, members: int) -> None:
    """Prevalence down to 5e-5, class means 3.5 deviations apart."""
    rng = np.random.default_rng(15)
    n = 20_000
    z = np.zeros(n, dtype=int)
    z[rng.choice(n, size=members, replace=False)] = 1
    x = (rng.normal(size=(n, 6)) + 3.5 * z[:, None] * np.eye(6)[0]).astype(dtype)
    y = (x[:, 1] + 0.3 * x[:, 0] > 0).astype(int)
    eraser = erase(method, sf.Moments().update(x, {"z": z, "y": y}))
    clean = eraser(x.astype(np.float64))
    gap = clean[z == 1].mean(axis=0) - clean[z == 0].mean(axis=0)
    # Covariances err by eps; the gap divides them by the prevalence.
    assert np.abs(gap).max() <= 1e3 * EPS * n / members * np.linalg.norm(eraser.matrix(), 2)


@pytest.mark.parametrize("unit", [1e-100, 1e-9, 1e-3, 1.0, 1e9, 1e100])
@pytest.mark.parametrize("method", ["splince", "leace", "sal", "sal that keeps"])
def test_units_of_continuous_variables_do_not_matter(method: str, unit: float) -> None:
    rng = np.random.default_rng(16)
    x = rng.normal(size=(300, 5))
    z, y = x[:, 0] + rng.normal(size=300), x[:, 1] + x[:, 0] + rng.normal(size=300)
    found = erase(method, sf.Moments().update(x, {"z": unit * z, "y": y / unit}))
    expected = erase(method, sf.Moments().update(x, {"z": z, "y": y}))
    assert_same(change(found), change(expected), 1e-11)


@pytest.mark.parametrize("value", [0.0, 1.0, 0.1, 1e9, -1e-9])
@pytest.mark.parametrize("classes", [True, False])
def test_constant_variables_are_refused_by_name(value: float, classes: bool) -> None:
    data = draw_data(0)
    constant: Any = np.full(400, value)
    if classes:
        constant = np.full(400, str(value))
    moments = sf.Moments().update(data.x, {"c": constant, "z": data.z, "y": data.y})
    for call in (
        lambda: sf.leace(moments, erase="c"),
        lambda: sf.splince(moments, erase="c", keep="y"),
        lambda: sf.splince(moments, erase="z", keep="c"),
        lambda: sf.splince(moments, erase=["z", "c"], keep="y"),
        lambda: sf.sal(moments, erase="z", keep=["y", "c"]),
    ):
        with pytest.raises(sf.ConstantVariableError, match="'c'"):
            call()


def test_constant_columns_beside_varying_ones_are_no_matter() -> None:
    data = draw_data(0)
    padded = np.column_stack([np.full(400, 0.1), data.y, np.zeros(400)])
    found = sf.Moments().update(data.x, {"z": data.z, "y": padded})
    assert_same(change(erase("splince", found)), change(erase("splince", data.moments())), 1e-12)


FUNCTIONS_OF_Z: dict[str, Any] = {
    "itself": lambda z: z,
    "its negative": lambda z: 3 - 2 * z,
    "as text": lambda z: z.astype(str),
    "as floats": lambda z: 0.3 * z + 0.1,
    "a coarser grouping": lambda z: (z > 1).astype(int),
    "columns, one of them new": lambda z: np.column_stack([z == 0, np.arange(len(z)) % 7]) * 1.0,
}


@pytest.mark.parametrize("n", [60, 5000])
@pytest.mark.parametrize("kappa", [1.0, 1e6, 1e12])
@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("kind", FUNCTIONS_OF_Z)
def test_task_that_is_a_function_of_the_concept(
    kind: str, dtype: Any, kappa: float, n: int
) -> None:
    data = draw_data(17, n=n, d=12, kz=4, kappa=kappa)
    y = FUNCTIONS_OF_Z[kind](data.z)
    moments = sf.Moments().update(data.x.astype(dtype), {"gender": data.z, "job": y})
    with pytest.raises(sf.InfeasibleError) as caught:
        sf.splince(moments, erase="gender", keep="job")
    text = str(caught.value)
    assert "'gender'" in text
    assert "'job'" in text
    assert caught.value.cosine == pytest.approx(1.0, abs=1e-6)
    assert re.search(r"principal cosine 0\.9999\d*|principal cosine 1\b", text)
    amplification = float(re.search(r"amplification ([\d.e+inf]+)", text)[1])  # type: ignore[index]
    assert amplification > 1e5
    for way_out in ("on_infeasible='drop'", "max_amplification=", "leace"):
        assert way_out in text
    with pytest.warns(sf.DroppedDirectionsWarning, match="'job'"):
        eraser = sf.splince(moments, erase="gender", keep="job", on_infeasible="drop")
    assert eraser.rank == 3
    assert report(eraser).variables[0].residual <= report(eraser).variables[0].bound
    assert report(eraser).amplification < 1e5


def test_many_rows_do_not_blur_what_is_infeasible() -> None:
    rng = np.random.default_rng(18)
    z = np.sort(rng.integers(0, 2, size=300_000))
    x = rng.normal(size=(len(z), 3)) + z[:, None] + np.linspace(0, 30, len(z))[:, None]
    moments = sf.Moments().update(x, {"z": z, "y": 0.3 * z + 0.1})
    with pytest.raises(sf.InfeasibleError):
        sf.splince(moments, erase="z", keep="y")


def test_nearly_the_same_variable_is_feasible_and_costly() -> None:
    rng = np.random.default_rng(19)
    x = rng.normal(size=(2000, 6))
    z = x[:, 0]
    moments = sf.Moments().update(x, {"z": z, "y": z + 1e-5 * x[:, 1]})
    with pytest.warns(sf.PrecisionWarning, match="max_amplification"):
        eraser = sf.splince(moments, erase="z", keep="y")
    assert report(eraser).amplification == pytest.approx(1e5, rel=0.2)
    assert all(v.residual <= v.bound for v in report(eraser).variables)


# --- policies ------------------------------------------------------------------------------------


def fan(cosines: tuple[float, ...] = (0.2, 0.9, 0.999)) -> tuple[sf.Moments, Float]:
    """White data with y_j at the given cosines to z_j; the whole problem can be read off."""
    rng = np.random.default_rng(20)
    x = np.linalg.qr(rng.normal(size=(900, 9)))[0]
    x = np.linalg.qr(x - x.mean(axis=0))[0]
    labels: dict[str, Any] = {}
    for j, c in enumerate(cosines):
        labels[f"z{j}"] = x[:, j]
        labels[f"y{j}"] = c * x[:, j] + (1 - c**2) ** 0.5 * x[:, j + 3]
    return sf.Moments().update(x, labels), x


@pytest.mark.parametrize(
    ("cap", "lost"), [(1.0, {0, 1, 2}), (2.0, {1, 2}), (10.0, {2}), (1e3, set()), (np.inf, set())]
)
def test_max_amplification_gives_up_what_lies_above_it_and_no_more(
    cap: float, lost: set[int]
) -> None:
    moments, _ = fan()
    names = {"z": ["z0", "z1", "z2"], "y": ["y0", "y1", "y2"]}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        eraser = erase("splince", moments, names["z"], names["y"], max_amplification=cap)
    kinds = [w.category for w in caught]
    assert kinds == ([sf.DroppedDirectionsWarning] if lost else [])
    figures = report(eraser)
    assert figures.dropped == len(lost)
    assert figures.amplification <= cap
    assert figures.cosines == pytest.approx((0.999, 0.9, 0.2), abs=1e-12)
    for j, variable in enumerate(figures.variables[3:]):
        cosine = (0.2, 0.9, 0.999)[j]
        # What is given up loses exactly its part in the erased direction.
        expected = cosine if j in lost else 0.0
        assert variable.residual == pytest.approx(expected, abs=1e-9)
    assert all(v.residual <= v.bound for v in figures.variables[:3])


def test_dropping_nothing_changes_nothing() -> None:
    data = draw_data(0)
    moments = data.moments()
    plain = erase("splince", moments)
    for options in ({"on_infeasible": "drop"}, {"max_amplification": 1e6}):
        np.testing.assert_array_equal(erase("splince", moments, **options).matrix(), plain.matrix())


@pytest.mark.parametrize("method", ["splince", "sal that keeps"])
def test_what_clashes_is_given_up_and_the_rest_is_kept(method: str) -> None:
    data = draw_data(21, ky=1)
    labels = {"z": data.z, "same": np.where(data.z == 1, "a", "b"), "y": data.y}
    moments = sf.Moments().update(data.x, labels)
    with pytest.raises(sf.InfeasibleError):
        erase(method, moments, y=["same", "y"])
    with pytest.warns(sf.DroppedDirectionsWarning):
        eraser = erase(method, moments, y=["same", "y"], on_infeasible="drop")
    erased, given_up, kept = report(eraser).variables
    assert erased.residual <= erased.bound
    assert given_up.residual == pytest.approx(1.0, abs=1e-6)
    # y is kept up to its share in the direction that was given up: a plane cannot tell them apart.
    assert kept.residual < 1
    alone = report(erase(method, moments)).variables[1]
    assert alone.residual <= alone.bound


def test_tolerance_for_ranks_leaves_weak_directions_alone() -> None:
    rng = np.random.default_rng(22)
    x = np.linalg.qr(rng.normal(size=(500, 5)))[0]
    x = np.linalg.qr(x - x.mean(axis=0))[0]
    noise = np.linalg.qr(np.column_stack([np.ones(500), x, rng.normal(size=500)]))[0][:, -1]
    weak = 1e-3 * x[:, 1] + (1 - 1e-6) ** 0.5 * noise
    moments = sf.Moments().update(x, {"z": np.column_stack([x[:, 0], weak])})
    ranks = [sf.leace(moments, erase="z", rank_tol=t).rank for t in ("auto", 1e-4, 1e-2)]
    assert ranks == [2, 2, 1]


def test_rank_tolerance_does_not_depend_on_units() -> None:
    data = draw_data(23)
    for scale in (1e-12, 1e12):
        moments = Data(data.x * scale, data.z, data.y).moments()
        for method in ("leace", "sal"):
            assert (
                erase(method, moments, rank_tol=0.9).rank
                == erase(method, data.moments(), rank_tol=0.9).rank
            )


@pytest.mark.parametrize(
    "options",
    [
        {"max_amplification": 0.5},
        {"max_amplification": -1},
        {"max_amplification": float("nan")},
        {"max_amplification": "10"},
        {"on_infeasible": "ignore"},
        {"null_space": "identity"},
        {"shrinkage": -0.1},
        {"shrinkage": 1.5},
        {"shrinkage": float("nan")},
        {"shrinkage": "lw"},
        {"rank_tol": 1.0},
        {"rank_tol": -1e-3},
        {"rank_tol": float("nan")},
        {"rank_tol": "tight"},
        {"solver": "svd"},
        {"solver": None},
    ],
)
def test_parameters_out_of_range(options: dict[str, Any]) -> None:
    moments = draw_data(0).moments()
    name = next(iter(options))
    with pytest.raises(sf.InputError, match=name):
        sf.splince(moments, erase="z", keep="y", **options)


# --- what is erased and kept ---------------------------------------------------------------------


@pytest.mark.parametrize("selection", [[], (), None, 3, {"z"}, ["z", 3], np.array([1.0])])
def test_selections_that_name_nothing(selection: Any) -> None:
    moments = draw_data(0).moments()
    with pytest.raises((sf.InputError, sf.UnknownVariableError)):
        sf.leace(moments, erase=selection)


def test_unknown_names_list_the_known_ones() -> None:
    moments = draw_data(0).moments()
    for call in (
        lambda: sf.leace(moments, erase="gender"),
        lambda: sf.splince(moments, erase="z", keep=["y", "gender"]),
        lambda: sf.mean_projection(moments, erase="gender"),
    ):
        with pytest.raises(sf.UnknownVariableError, match=r"'gender'.*'z'.*'y'"):
            call()
    with pytest.raises(sf.UnknownVariableError, match="joint="):
        sf.leace(moments, erase=("z", "y"))


@pytest.mark.parametrize("method", METHODS)
def test_empty_moments(method: str) -> None:
    with pytest.raises((sf.NotEnoughDataError, sf.UnknownVariableError)):
        erase(method, sf.Moments())
    with pytest.raises(sf.InputError, match="Moments"):
        erase("leace", np.zeros((3, 3)))  # type: ignore[arg-type]


def test_continuous_variables_have_no_class_means() -> None:
    moments = draw_data(0).moments()
    with pytest.raises(sf.LabelError, match=r"'y'.*sal"):
        sf.mean_projection(moments, erase="y")


@pytest.mark.parametrize("missing", ["every row", "some rows"])
def test_missing_labels(missing: str) -> None:
    data = draw_data(24)
    z: list[Any] = [
        None if missing == "every row" or i % 3 else int(v) for i, v in enumerate(data.z)
    ]
    moments = sf.Moments().update(data.x, {"z": z, "y": data.y})
    if missing == "every row":
        with pytest.raises(sf.SplinceError, match="'z'"):
            sf.leace(moments, erase="z")
        return
    eraser = sf.leace(moments, erase="z")
    labelled = np.arange(400) % 3 == 0
    assert_erased_in_mean(eraser(data.x)[labelled], data.z[labelled])


def assert_erased_in_mean(clean: Float, z: NDArray[np.int64]) -> None:
    means = np.array([clean[z == c].mean(axis=0) for c in np.unique(z)])
    assert np.ptp(means, axis=0).max() < 1e-11


def test_several_erased_variables_and_their_columns_at_once() -> None:
    data = draw_data(25, d=12)
    rng = np.random.default_rng(0)
    age = data.x[:, 3] + rng.normal(size=400)
    moments = sf.Moments().update(data.x, {"z": data.z, "age": age, "y": data.y})
    eraser = sf.splince(moments, erase=["z", "age"], keep="y")
    assert eraser.rank == 3
    clean = eraser(data.x)
    assert_erased_in_mean(clean, data.z)
    assert np.abs((clean - clean.mean(axis=0)).T @ age).max() / 400 < 1e-11
    reverse = sf.splince(moments, erase=["age", "z"], keep="y")
    assert_same(change(reverse), change(eraser), slack(data))


def test_joint_cells_are_erased_beyond_the_margins() -> None:
    """The interaction of two variables is visible in x, and only their joint cells tell it."""
    rng = np.random.default_rng(26)
    a, b = rng.integers(0, 2, size=4000), rng.integers(0, 2, size=4000)
    x = rng.normal(size=(4000, 6))
    x[:, 0] += a ^ b
    x[:, 1] += a
    moments = sf.Moments(joint=[("a", "b")]).update(x, {"a": a, "b": b})
    margins, cells = sf.leace(moments, erase=["a", "b"]), sf.leace(moments, erase=("a", "b"))
    assert (margins.rank, cells.rank) == (2, 3)

    def spread(eraser: sf.Projection) -> float:
        clean = eraser(x)
        means = [clean[(a == i) & (b == j)].mean(axis=0) for i in (0, 1) for j in (0, 1)]
        return float(np.ptp(means, axis=0).max())

    assert spread(cells) < 1e-11
    assert spread(margins) > 0.5
    both = sf.leace(moments, erase=["a", ("a", "b")])
    assert_same(change(both), change(cells), 1e-11)


def test_a_cascade_must_be_refitted_and_then_equals_the_joint_eraser() -> None:
    data = draw_data(27, d=10, ky=1)
    rng = np.random.default_rng(1)
    other = (data.x @ rng.normal(size=10) + data.z > 0).astype(int)
    labels = {"z": data.z, "o": other, "y": data.y}
    moments = sf.Moments().update(data.x, labels)

    def cascade(method: str, second: str, *, refit: bool) -> sf.Projection:
        first = erase(method, moments)
        seen = sf.Moments().update(first(data.x), labels) if refit else moments
        return erase(second, seen, z="o") @ first

    for method in ("leace", "splince"):
        both = cascade(method, method, refit=True)
        assert_erased_in_mean(both(data.x), data.z)
        assert_erased_in_mean(both(data.x), other)
        joint = erase(method, moments, z=["z", "o"])
        np.testing.assert_allclose(both(data.x), joint(data.x), atol=1e-11)
        # Fitted on the same moments, one brings back what the other erased.
        clean = cascade(method, method, refit=False)(data.x)
        assert (
            np.abs(np.diff([clean[other == c].mean(axis=0) for c in (0, 1)], axis=0)).max() > 0.01
        )
    # Kept in the first stage only, the task is lost in the second.
    half = cascade("splince", "leace", refit=True)
    after = sf.Moments().update(half(data.x), {"y": data.y}).cross_covariance("y")
    assert np.linalg.norm(after - moments.cross_covariance("y")) > 1e-3 * np.linalg.norm(after)


# --- directions ----------------------------------------------------------------------------------


@given(seed=st.integers(0, 2**20), k=st.integers(1, 4), exponent=st.integers(-20, 20))
@pytest.mark.parametrize("method", ["splince", "sal that keeps"])
def test_explicit_directions_stay_fixed(method: str, seed: int, k: int, exponent: int) -> None:
    data = draw_data(seed, d=9)
    directions = np.random.default_rng(seed).normal(size=(9, k)) * 10.0**exponent
    eraser = erase(method, data.moments(), y=directions)
    still = eraser.matrix() @ directions
    size = np.linalg.norm(eraser.matrix(), 2) ** 2 * np.linalg.cond(directions) * slack(data)
    assert np.linalg.norm(still - directions) <= size * np.linalg.norm(directions)
    assert_erased_in_mean(eraser(data.x) / np.abs(eraser(data.x)).max(), data.z)


@pytest.mark.parametrize("scale", [1e-15, 1e-12, 1.0, 1e12, 1e15])
@pytest.mark.parametrize("method", ["splince", "sal that keeps"])
def test_explicit_directions_in_any_units_of_x(method: str, scale: float) -> None:
    data = draw_data(28)
    directions = np.eye(8)[:, :2]
    found = erase(method, Data(data.x * scale, data.z, data.y).moments(), y=directions)
    expected = erase(method, data.moments(), y=directions)
    np.testing.assert_allclose(found.matrix() @ directions, directions, atol=1e-9)
    assert_same(change(found), change(expected), 1e-9)


def test_the_cross_covariance_as_directions_is_the_variable() -> None:
    data = draw_data(29)
    moments = data.moments()
    by_direction = erase("splince", moments, y=moments.cross_covariance("y"))
    assert_same(change(by_direction), change(erase("splince", moments)), slack(data))


@pytest.mark.parametrize(
    "form", [lambda a: a.tolist(), lambda a: a.astype(np.float32), lambda a: np.asfortranarray(a)]
)
def test_forms_of_directions(form: Any) -> None:
    data = draw_data(30)
    array = np.random.default_rng(0).integers(-4, 5, size=(8, 2)).astype(float)
    expected = erase("splince", data.moments(), y=array)
    found = erase("splince", data.moments(), y=form(array))
    np.testing.assert_array_equal(found.matrix(), expected.matrix())
    single = [erase("splince", data.moments(), y=v) for v in (array[:, 0], array[:, :1])]
    np.testing.assert_array_equal(single[0].matrix(), single[1].matrix())


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("writeable", [True, False])
def test_directions_are_read_only(order: Any, writeable: bool) -> None:
    moments = draw_data(30).moments()
    directions = np.array(3 * np.eye(8)[:, :2] + 1, order=order)
    before = directions.copy()
    directions.flags.writeable = writeable
    erase("splince", moments, y=directions)
    erase("sal that keeps", moments, y=directions)
    np.testing.assert_array_equal(directions, before)


@pytest.mark.parametrize("library", ["pandas", "polars"])
def test_directions_from_frames(library: str) -> None:
    frames = pytest.importorskip(library, reason=f"{library} is not installed")
    moments, array = draw_data(30).moments(), 3 * np.eye(8)[:, :2] + 1
    columns = {"a": array[:, 0], "b": array[:, 1]}
    expected = erase("splince", moments, y=array).matrix()
    found = erase("splince", moments, y=frames.DataFrame(columns)).matrix()
    np.testing.assert_array_equal(found, expected)
    expected = erase("splince", moments, y=array[:, 0]).matrix()
    found = erase("splince", moments, y=frames.Series(array[:, 0])).matrix()
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(
    ("directions", "error"),
    [
        ({"y": 1}, sf.InputError),
        ([["a"]] * 8, sf.InputError),
        ([[1.0, 2.0], [3.0]], sf.InputError),
        (3.0, sf.InputError),
        (["y", np.ones(8)], sf.InputError),
        (None, sf.InputError),
        (np.zeros((8, 1)), sf.ConstantVariableError),
        (np.ones((7, 2)), sf.InputError),
        (np.ones((8, 2, 2)), sf.InputError),
        (np.full((8, 1), np.nan), sf.NonFiniteError),
        (np.ones((8, 1)) * 1j, sf.InputError),
        (np.ones((8, 0)), sf.InputError),
    ],
)
def test_directions_that_are_none(directions: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        erase("splince", draw_data(0).moments(), y=directions)


def test_directions_off_the_support_stay_and_cost_nothing() -> None:
    data = draw_data(31, n=10, d=20, kz=2, ky=1)
    moments = data.moments()
    centred = data.x - data.x.mean(axis=0)
    null = np.linalg.svd(centred)[2][9:].T
    eraser = erase("splince", moments, y=null[:, :3])
    assert_same(change(eraser), change(erase("leace", moments)), 1e-10)
    np.testing.assert_allclose(eraser.matrix() @ null, null, atol=1e-10)


# --- shrinkage -----------------------------------------------------------------------------------


@pytest.mark.parametrize("shrinkage", [0.0, 1e-6, 0.3, 1.0, "oas", "ledoit-wolf"])
@pytest.mark.parametrize("n", [400, 15])
def test_constraints_are_exact_under_shrinkage(shrinkage: float | str, n: int) -> None:
    data = draw_data(32, n=n, d=20, kz=3, ky=2)
    moments = sf.Moments(ledoit_wolf=True).update(data.x, {"z": data.z, "y": data.y})
    eraser = sf.splince(moments, erase="z", keep="y", shrinkage=shrinkage)
    assert_erased_in_mean(eraser(data.x), data.z)
    after = sf.Moments().update(eraser(data.x), {"y": data.y}).cross_covariance("y")
    np.testing.assert_allclose(after, moments.cross_covariance("y"), atol=1e-11)


def test_no_shrinkage_is_shrinkage_by_nothing() -> None:
    data = draw_data(33)
    moments = data.moments()
    np.testing.assert_array_equal(
        erase("splince", moments, shrinkage=0.0).matrix(), erase("splince", moments).matrix()
    )


# --- threads -------------------------------------------------------------------------------------


@pytest.fixture
def impatient_threads() -> Any:
    """Threads that change places as often as they can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("impatient_threads")
@pytest.mark.parametrize("shared", [False, True])
def test_solves_from_several_threads_agree(shared: bool) -> None:
    """Also from one and the same moments: a solve reads them, and readers do not disturb."""
    data = draw_data(34)
    expected = erase("splince", data.moments()).matrix()
    found: list[Float] = []
    errors: list[Exception] = []
    common = data.moments()

    def work() -> None:
        own = common if shared else data.moments()
        for _ in range(600):
            try:
                found.append(erase("splince", own).matrix())
            except sf.SplinceError as error:
                errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert len(found) == 2400
    assert all((matrix == expected).all() for matrix in found)


def test_rows_that_come_during_a_solve_do_not_get_into_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second thread gets an error, or its rows wait; the solve never sees half of them."""
    data, more = draw_data(35), draw_data(36)
    moments = sf.Moments(block_rows=50).update(data.x, {"z": data.z, "y": data.y})
    expected = erase("splince", data.moments())
    refused: list[BaseException] = []
    solve = closed_forms.oblique

    def late() -> None:
        try:
            moments.update(1e3 * more.x, {"z": more.z, "y": more.y})
        except sf.SplinceError as error:
            refused.append(error)

    def interrupted(*args: Any, **options: Any) -> Any:
        thread = threading.Thread(target=late)
        thread.start()
        thread.join(timeout=5)
        return solve(*args, **options)

    monkeypatch.setattr(closed_forms, "oblique", interrupted)
    eraser = erase("splince", moments)
    assert_same(change(eraser), change(expected), slack(data))


def test_solving_leaves_the_moments_as_they_were() -> None:
    data = draw_data(37)
    moments = data.moments()
    before = moments.covariance().tobytes(), moments.cross_covariance("y").tobytes()
    for method in METHODS:
        erase(method, moments)
    assert (moments.covariance().tobytes(), moments.cross_covariance("y").tobytes()) == before
    grown = erase("splince", moments)
    figures, matrix = report(grown), grown.matrix()
    moments.update(data.x * 3, {"z": data.z, "y": data.y})
    np.testing.assert_array_equal(grown.matrix(), matrix)
    late = erase("splince", data.moments())
    assert report(late).to_dict()["variables"][0]["rank"] == figures.variables[0].rank
