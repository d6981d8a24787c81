"""Both constraints at any condition number, in any units, and a report that says where digits end.

Features that vary too little count as constant, and are erased all the same. The bounds are those
of `problems.residual`.
"""

from __future__ import annotations

import re
import warnings
from contextlib import nullcontext
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from problems import (
    EPS,
    Float,
    assert_constraints,
    cross,
    ignored,
    indicators,
    removed,
    report,
    residual,
    sensitive,
    told,
)

import splince_fast as sf
from splince_fast._kernels.factor import STATUS_INFEASIBLE, STATUS_OK
from splince_fast._solve import tolerances
from splince_fast._solve.oblique import oblique
from splince_fast._solve.options import Options
from splince_fast.exceptions import InfeasibleError, NothingErasedWarning, PrecisionWarning

EPS32 = 2.0**-23

pytestmark = sensitive
sensitive_is_an_error = pytest.mark.filterwarnings(
    "error:the eraser is sensitive:splince_fast.exceptions.PrecisionWarning"
)


def silently(call: Any, *args: Any, **options: Any) -> sf.Projection:
    """A solve whose precision warnings are not the subject."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PrecisionWarning)
        eraser = call(*args, **options)
    assert isinstance(eraser, sf.Projection)
    return eraser


def relative_trace(eraser: sf.Projection, span: NDArray[np.longdouble], kept: bool) -> float:
    """Norm of the part of a span that is left (or lost, if it is kept), relative to its norm."""
    lost = removed(eraser, span)
    parts = ((lost if kept else span - lost), span)
    left, whole = (np.linalg.norm(np.asarray(part, np.float64)) for part in parts)
    return float(left / whole)


# --- float32 rows with one direction far above the others ----------------------------------------


def spiked(
    factor: float, n: int = 2000, d: int = 64, related: bool = True
) -> tuple[NDArray[np.float32], NDArray[Any], NDArray[Any]]:
    """Noise, class means, and a common direction `factor` times as large, in float32."""
    rng = np.random.default_rng(0)
    z, y = rng.integers(0, 2, n), rng.integers(0, 2, n)
    x = rng.normal(size=(n, d)) + factor * np.outer(rng.normal(size=n), rng.normal(size=d))
    if related:
        y = np.where(rng.random(n) < 0.7, z, 1 - z)
        x += 0.5 * np.outer(z, rng.normal(size=d)) + 0.5 * np.outer(y, rng.normal(size=d))
    return x.astype(np.float32), z, y


@pytest.mark.parametrize("null_space", ["keep", "drop"])
@pytest.mark.parametrize(
    ("factor", "n", "d", "related"),
    [(300, 2000, 64, True), (1000, 2000, 64, True), (3000, 2000, 64, True),
     (1e3, 100, 6, False), (1e4, 100, 6, False), (1.0, 20, 64, False)],
)  # fmt: skip
def test_float32_rows_with_a_large_common_direction(
    factor: float, n: int, d: int, related: bool, null_space: str
) -> None:
    x, z, y = spiked(factor, n, d, related)
    x[:, -1] = 0.5  # a constant beside directions that are nearly so
    moments = sf.Moments().update(x, {"z": z, "y": y})
    hot_z, hot_y = indicators(z), indicators(y)
    eraser = silently(sf.splince, moments, erase="z", keep="y", null_space=null_space)
    assert_constraints(x, hot_z, hot_y, eraser)
    assert report(eraser).solver == "eigh"
    P = eraser.matrix()
    assert np.linalg.norm(P @ P - P) <= 64 * d * EPS * np.linalg.norm(P, 2) ** 3
    leace = silently(sf.leace, moments, erase="z", null_space=null_space)
    assert_constraints(x, hot_z, None, leace)


def test_control_factors_side_by_side_leave_the_concept() -> None:
    """I - l r^T - N N^T in place of the composed map: N N^T Cov(x, z) stays."""
    x, z, _ = spiked(1000)
    moments = sf.Moments().update(x, {"z": z})
    plain = silently(sf.leace, moments, erase="z")
    null = silently(sf.leace, moments, erase="z", null_space="drop").left[:, plain.rank :]
    left, right = (np.concatenate([a, null], axis=1) for a in (plain.left, plain.right))
    found, bound = residual(x, indicators(z), sf.Projection(left, right, plain.mean))
    assert found > 1e6 * bound


# --- several classes, condition numbers, units ---------------------------------------------------


def graded(exponents: Float, k: int, seed: int = 0) -> tuple[Float, NDArray[Any]]:
    """Rows of k classes, features in units of these powers of ten."""
    rng = np.random.default_rng(seed)
    z = rng.integers(0, k, 600)
    d = len(exponents)
    return (rng.normal(size=(600, d)) + rng.normal(size=(k, d))[z]) * 10.0**exponents, z


def largest_trace(x: Float, z: NDArray[Any], eraser: sf.Projection) -> tuple[float, float]:
    """Largest residual of Cov(x_j, z) relative to its size, and its bound for sums of n rows."""
    span = cross(x, indicators(z))
    rest = span - removed(eraser, span)
    own = np.linalg.norm(np.asarray(span, np.float64), axis=1)
    sums = 8 * len(x) ** 0.5 * EPS * float(np.linalg.norm(indicators(z).std(axis=0)))
    found = np.linalg.norm(np.asarray(rest, np.float64), axis=1)
    return float(np.max(found / own)), float(np.max(sums * x.std(axis=0) / own))


@given(k=st.sampled_from([2, 3, 4, 7]), d=st.sampled_from([16, 40]), seed=st.integers(0, 2**20))
@pytest.mark.parametrize("method", [sf.leace, sf.sal, sf.mean_projection])
def test_the_bound_holds_for_each_feature_in_its_own_unit(
    method: Any, k: int, d: int, seed: int
) -> None:
    """With far more features than classes no direction is given up in any of these units."""
    exponents = np.random.default_rng(seed).uniform(-7, 7, size=d)
    x, z = graded(exponents, k, seed)
    eraser = silently(method, sf.Moments().update(x, {"z": z}), erase="z")
    assert eraser.rank == k - 1
    found, sums = largest_trace(x, z, eraser)
    assert found <= report(eraser).variables[0].bound + sums


@pytest.mark.parametrize("k", [3, 4])
def test_control_rounding_in_the_norm_leaves_the_smallest_features(k: int) -> None:
    """A map that is as exact in the norm as any, and not for features of 1e-7."""
    x, z = graded(np.linspace(7, -7, 16), k)
    eraser = sf.sal(sf.Moments().update(x, {"z": z}), erase="z")
    noise = EPS * np.random.default_rng(0).normal(size=eraser.left.shape)
    other = sf.Projection(eraser.left + noise, eraser.right, eraser.mean)
    assert relative_trace(other, cross(x, indicators(z)), kept=False) < 16 * EPS
    assert sum(largest_trace(x, z, eraser)) < 1e-12
    assert largest_trace(x, z, other)[0] > 1e6 * report(eraser).variables[0].bound


# --- where digits end, somebody says so ----------------------------------------------------------


@pytest.mark.parametrize("method", [sf.sal, sf.mean_projection])
def test_a_trace_left_in_tiny_features_warns(method: Any) -> None:
    """Two directions of three classes, and one feature so large that one of them is rounding."""
    x, z = graded(np.array([7.0] + 7 * [-9.0]), 3)
    moments = sf.Moments().update(x, {"z": z})
    with pytest.warns(PrecisionWarning, match="covariance with 'z' is left, in features"):
        eraser = method(moments, erase="z")
    assert eraser.rank == 1
    assert largest_trace(x, z, eraser)[0] > 0.1
    # In like units, where the caller cuts, and for LEACE there is no such warning.
    method(sf.Moments().update(x / x.std(axis=0), {"z": z}), erase="z")
    method(moments, erase="z", rank_tol=1e-3)
    sf.leace(moments, erase="z")
    # A fraction of 3e-4 counts: rows without a trace in the sample, and class means so large.
    means = np.stack([x[z == c].mean(axis=0) for c in range(3)])[z]
    within = x - means
    for strength, warned in ((1e-4, False), (1e-3, True)):
        rows = within + np.array([1.0] + 7 * [strength]) * means
        rows[:, 7] = 1e3  # constants have no share
        expected = pytest.warns(PrecisionWarning, match="is left, in features")
        with expected if warned else nullcontext():
            assert method(sf.Moments().update(rows, {"z": z}), erase="z").rank == 1
    # Where nothing is erased, that is all there is to say; also where no feature varies.
    for rows in (np.hstack([within[:, :1], means[:, 1:]]), np.ones_like(x)):
        with pytest.warns(NothingErasedWarning) as seen:
            method(sf.Moments().update(rows, {"z": z}), erase="z")
        assert len(seen) == 1


@pytest.mark.parametrize("noise", [1e-2, 1e-4, 1e-6, 1e-10])
def test_a_large_amplification_warns_and_a_moderate_one_does_not(noise: float) -> None:
    rng = np.random.default_rng(0)
    z = rng.normal(size=500)
    x = rng.normal(size=(500, 8)) + z[:, None]
    moments = sf.Moments().update(x, {"z": z, "y": z + noise * rng.normal(size=500)})
    eraser, caught = told(sf.splince, moments, erase="z", keep="y")
    figures, texts = report(eraser), " ".join(map(str, caught))
    assert (figures.amplification > 1e4) == (noise < 1e-2)
    assert ("max_amplification" in texts) == bool(caught) == (noise < 1e-2)
    assert {type(entry) for entry in caught} <= {PrecisionWarning}
    assert figures.amplification > 100
    # A bound of 1 or more promises nothing, and is a warning of its own.
    assert (figures.variables[0].bound >= 1) == ("rounding errors may undo" in texts)
    assert all(str(entry) in figures.warnings for entry in caught)
    assert ("times as far as without kept variables" in texts) == (noise < 1e-2)
    none = told(sf.splince, moments, erase="z", keep="y", strength=0)[1]
    assert not any("times as far" in str(entry) for entry in none)


# --- thresholds, each from both sides ------------------------------------------------------------


@ignored("LabelFeatureWarning")
@pytest.mark.parametrize("spread", [2e-13, 1e-9])
def test_a_feature_of_few_quanta_varies(spread: float) -> None:
    """Deviations of thousands of roundings of the mean are data; a few roundings are none."""
    rng = np.random.default_rng(4)
    z = rng.integers(0, 2, 4000)
    x = rng.normal(size=(4000, 3))
    x[:, 2] = 1.0 + spread * (rng.normal(size=4000) + 2 * z)
    moments = sf.Moments().update(x, {"z": z, "y": x[:, 2]})
    eraser = sf.leace(moments, erase="z")
    assert report(eraser).rank_covariance == 3
    clean = (eraser(x)[:, 2] - 1.0) / spread
    # Quanta of 1 are 1.1e-3 deviations at the smaller spread, and each row is rounded to them.
    assert abs(clean[z == 1].mean() - clean[z == 0].mean()) < 0.02
    assert sf.sal(moments, erase="y").rank == 1  # and such a label is not constant
    constant = x.copy()
    constant[:, 2] = 1.0 + 2 * EPS * rng.integers(0, 2, 4000)
    assert report(sf.leace(sf.Moments().update(constant, {"z": z}), erase="z")).rank_covariance == 2


@pytest.mark.parametrize(("sine", "feasible"), [(1e-3, True), (1e-6, False)])
def test_a_faint_kept_trace_raises_the_least_angle(sine: float, feasible: bool) -> None:
    """A kept trace of 1e-9 is known to noise / 1e-9: angles below that are rounding."""
    d = 4
    factor = sf.Moments().update(np.random.default_rng(0).normal(size=(50, d))).factored().factor
    frame = factor.unwhiten(np.eye(d))
    noise = tolerances.noise(d, factor.smallest)
    erased = frame[:1]
    strength = noise / 1e-4  # so that the least sine is 1e-4 for what is kept
    kept = strength * (np.sqrt(1 - sine**2) * frame[:1] + sine * frame[1:2])
    assert noise < sine  # what is erased alone would allow it
    status = oblique(factor, erased, kept, Options()).status
    assert status == (STATUS_OK if feasible else STATUS_INFEASIBLE)


def test_as_many_rows_as_features_leave_one_rank_less() -> None:
    """Centred rows are one short of full rank, in any units."""
    for seed in range(300):
        rng = np.random.default_rng(seed)
        n = int(rng.integers(3, 9))
        x = rng.normal(size=(n, n)) * 10.0 ** rng.uniform(-8, 8, size=n)
        kept = sf.Moments().update(x).factored()
        assert kept.factor.rank == n - 1


# --- a search over problems ----------------------------------------------------------------------


def random_problem(rng: np.random.Generator) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
    """Rows of any condition, offset, units and dtype, with labels of any kind."""
    n, d = int(rng.integers(10, 400)), int(rng.integers(2, 24))
    x = rng.normal(size=(n, d)) @ rng.normal(size=(d, d)) * 10.0 ** rng.uniform(0, 3)
    x *= 10.0 ** rng.uniform(-1, 1, size=d) ** int(rng.integers(1, 8))
    k = int(rng.choice([2, 3, 5]))
    z = rng.integers(0, k, n)
    x += x.std(axis=0) * rng.normal(size=(k, d))[z] * 10.0 ** rng.uniform(-3, 1)
    if rng.random() < 0.3:
        x += 10.0 ** rng.uniform(1, 4) * np.outer(rng.normal(size=n), rng.normal(size=d))
    if rng.random() < 0.3:
        x[:, -1] = x[:, 0] * (1 + 10.0 ** -rng.uniform(0, 12) * rng.normal(size=n))
    y = np.where(rng.random(n) < rng.uniform(0.2, 1.0), z % 2, rng.integers(0, 2, n))
    x += 10.0 ** rng.uniform(-2, 4) * rng.normal(size=d)
    return x.astype(rng.choice([np.float32, np.float64])), z, y


@pytest.mark.parametrize("block", range(4))
def test_no_report_is_dishonest(block: int) -> None:
    """The true residual is within ten times what is stated, its bound, or a warning."""
    solved = 0
    for seed in range(100):
        rng = np.random.default_rng(1000 * block + seed)
        x, z, y = random_problem(rng)
        if len(np.unique(z)) < 2 or len(np.unique(y)) < 2:
            continue
        moments = sf.Moments().update(x, {"z": z, "y": y})
        method, keep = [(sf.splince, {"keep": "y"}), (sf.leace, {}), (sf.sal, {"keep": "y"})][
            seed % 3
        ]
        options = {} if method is sf.sal else {"null_space": str(rng.choice(["keep", "drop"]))}
        try:
            eraser = silently(method, moments, erase="z", **keep, **options)
        except InfeasibleError:
            continue
        solved += 1
        for variable, labels in zip(report(eraser).variables, (z, y), strict=False):
            span = cross(x, indicators(labels))
            truth = relative_trace(eraser, span, variable.role == "kept")
            # The span itself is known to sqrt(n) roundings of the largest deviation.
            sums = 8 * len(x) ** 0.5 * EPS * float(x.std(axis=0).max())
            slack = sums * max(1.0, float(np.linalg.norm(eraser.matrix(), 2)))
            slack /= float(np.linalg.norm(np.asarray(span, np.float64)))
            assert truth <= 10 * max(variable.residual, variable.bound) + slack, seed
    assert solved > 60


def test_columns_count_from_the_rounding_of_their_sums_on() -> None:
    """Two columns apart by `gap` deviations: their correlations have an eigenvalue gap^2 / 2."""
    rng = np.random.default_rng(0)
    x, (z, other) = rng.normal(size=(400, 6)), rng.normal(size=(2, 400))
    for gap, rank in ((3e-6, 2), (2e-8, 1)):  # 16 eps k sqrt(n) is 1.4e-13
        moments = sf.Moments().update(x, {"z": np.stack([z, z + gap * other], axis=1)})
        assert sf.concept_strength(moments, "z").rank_z == rank


def test_a_trace_counts_from_sixteen_roundings_on() -> None:
    """Signs that are orthogonal to the labels, plus an association of a given power of two."""
    sign, z = np.tile([1.0, 1.0, -1.0, -1.0], 16), np.tile([1.0, -1.0, 1.0, -1.0], 16)
    for exponent, rank in ((-43, 1), (-51, 0)):  # 16 eps is 2^-48
        x = (sign + 2.0**exponent * z)[:, None]
        moments = sf.Moments().update(x, {"z": z > 0})
        with nullcontext() if rank else pytest.warns(NothingErasedWarning):
            assert sf.leace(moments, erase="z").rank == rank


METHODS = {"leace": sf.leace, "sal": sf.sal, "mean_projection": sf.mean_projection}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("n", "d"), [(300, 8), (2000, 64), (20_000, 32)])
@pytest.mark.parametrize(
    ("dtype", "offset"), [("float32", 0), ("float32", 30), ("float16", 0), (">f2", 0)]
)
def test_rows_erased_in_few_digits_have_nothing_left_to_erase(
    method: str, n: int, d: int, dtype: str, offset: float
) -> None:
    rng = np.random.default_rng([n, d])
    z = rng.integers(0, 3, n)
    x = rng.normal(size=(n, d)) @ rng.normal(size=(d, d)) + offset
    x = (x + rng.normal(size=(3, d))[z]).astype(dtype)
    solve = METHODS[method]
    clean = solve(sf.Moments().update(x, {"z": z}), erase="z")(x).astype(dtype)
    with pytest.warns(NothingErasedWarning):
        again = solve(sf.Moments().update(clean, {"z": z}), erase="z")
    assert again.rank == 0
    # The control: in float64, the rounding of the rows is an association.
    wide = sf.Moments().update(clean.astype(np.float64), {"z": z})
    assert silently(solve, wide, erase="z").rank > 0


@given(st.integers(4, 10_000), st.integers(1, 64), st.floats(0, 1e8), st.floats(1e-12, 1))
def test_no_association_near_chance_counts_as_rounding_of_rows(
    n: int, d: int, mean: float, smallest: float
) -> None:
    error = 2.0**-23 * (d * (1 + mean**2)) ** 0.5
    chance = (d / n) ** 0.5
    assert tolerances.row_rounding(error, d**0.5, smallest, n) <= 0.01 * chance * (1 + 4 * EPS)


# --- features that count as constant --------------------------------------------------------------


def rows(n: int = 800, d: int = 8, seed: int = 0) -> tuple[Float, NDArray[Any], Float]:
    """Correlated features, three classes, a task of two columns."""
    rng = np.random.default_rng(seed)
    z = rng.integers(0, 3, n)
    y = rng.normal(size=(n, 2)) + 0.4 * np.eye(3)[z][:, :2]
    x = rng.normal(size=(n, d)) @ (np.eye(d) + 0.3 * rng.normal(size=(d, d)))
    return x + rng.normal(size=(3, d))[z] + y @ rng.normal(size=(2, d)), z, y


@sensitive_is_an_error
@pytest.mark.parametrize("kind", ["full", "diag"])
@pytest.mark.parametrize("scale", [1e-33, 1e-28])
def test_noise_beside_features_of_any_units_counts_as_constant(scale: float, kind: str) -> None:
    x, z, y = rows()
    x[:, [2, 5]] *= scale
    labels, others = {"z": z, "y": y}, np.delete(np.arange(8), [2, 5])
    # Of the other features it is the eraser that never saw these two.
    moments, alone = (
        sf.Moments(covariance_type=kind).update(part, labels) for part in (x, x[:, others])
    )
    calls: list[tuple[Any, dict[str, Any], Any]] = [
        (sf.splince, {"keep": "y"}, y),
        (sf.leace, {}, None),
        (sf.splince, {"keep": "y", "refine": [(x, labels)]}, y),
    ]
    for call, more, kept in calls[: 2 if kind == "full" else 3]:
        eraser = call(moments, erase="z", **more)
        assert eraser.rank == 2
        assert not eraser.right[[2, 5]].any()  # nothing is read from them
        assert_constraints(x, np.eye(3)[z], kept, eraser)
        assert report(eraser).sensitivity < 1e-6
        if kind == "full":
            plain = call(alone, erase="z", **more)
            dropped = call(moments, erase="z", null_space="drop", **more).matrix()
            for P in (eraser.matrix(), dropped):
                np.testing.assert_allclose(P[np.ix_(others, others)], plain.matrix(), atol=1e-10)
            np.testing.assert_array_equal(dropped[[2, 5]], 0.0)
            assert report(eraser).distortion == pytest.approx(report(plain).distortion, rel=1e-9)


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


# --- sensitivity ----------------------------------------------------------------------------------


@sensitive_is_an_error
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
    eraser, caught = told(sf.splince, moments, erase="z", keep="y")
    texts = list(map(str, caught))
    assert (report(eraser).sensitivity > 1e-3) == bool(texts) == warned  # type: ignore[operator]
    assert report(eraser).warnings == tuple(texts)
    if not warned:
        return
    assert [type(entry) for entry in caught] == [PrecisionWarning]
    assert "of feature(s) 6, with standard dev" in texts[0]
    found = re.search(r"shrinkage=(\S+) \(sensitivity (\S+)\)", texts[0])
    assert found is not None
    better = report(sf.splince(moments, erase="z", keep="y", shrinkage=float(found[1])))
    assert better.sensitivity == pytest.approx(float(found[2]), rel=0.06)
    assert better.sensitivity < 1e-3  # type: ignore[operator]
    with pytest.warns(PrecisionWarning, match=r"moments.factored\(1e-06\)"):
        sf.splince(moments.factored(), erase="z", keep="y")
    frame = pd.DataFrame(x, columns=list("abcdefgh"))
    with pytest.warns(PrecisionWarning, match=r"of feature\(s\) 'g', with standard dev"):
        sf.LEACE().fit(frame, concept=z).projection_  # noqa: B018


@sensitive_is_an_error
def test_an_offset_alone_is_no_fault_of_the_features() -> None:
    x, z, _ = rows()
    eraser = sf.sal(sf.Moments().update(x + 1e5, {"z": z}), erase="z")
    assert report(eraser).sensitivity > 1e-3  # type: ignore[operator]
    assert report(eraser).warnings == ()


@sensitive_is_an_error
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
