"""Scatters other than the full one: the variances alone, and a sample of the rows."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import scipy.sparse
from naive_model import fed_in_parts, flushed, part, squares_of, state_bytes
from numpy.typing import NDArray
from processes import script

import splince_fast as sf
from splince_fast._runtime.rows import splitmix64
from splince_fast.exceptions import (
    DroppedDirectionsWarning,
    InputError,
    NonFiniteError,
    NotEnoughDataError,
    SampledScatterWarning,
)
from splince_fast.moments import block, scatters

Float = NDArray[np.float64]
Find = Callable[[str], Path]
EPS = float(np.finfo(np.float64).eps)
DIAG: dict[str, Any] = {"covariance_type": "diag"}


def rows(n: int = 700, d: int = 24, seed: int = 0) -> tuple[Float, dict[str, NDArray[Any]]]:
    """Correlated rows of unlike scales, mostly zeros where they are to be sparse."""
    rng = np.random.default_rng(seed)
    mix = rng.normal(size=(d, d)) / d**0.5 + np.diag(np.geomspace(0.1, 3, d))
    z = rng.integers(0, 3, n)
    y = np.where(rng.random(n) < 0.6, z, rng.integers(0, 3, n))
    X = rng.normal(size=(n, d)) @ mix + np.eye(3)[z] @ mix[:3] + np.eye(3)[y] @ mix[3:6]
    X[rng.random(X.shape) < 0.7] = 0.0
    t = X[:, :2] @ rng.normal(size=(2, 1)) + rng.normal(size=(n, 1))
    return X, {"z": z, "y": y, "t": t}


def gaussian(
    n: int, d: int, strength: float, seed: int = 0
) -> tuple[Float, dict[str, NDArray[Any]]]:
    """Correlated Gaussian rows with a concept z and a task y that go together."""
    rng = np.random.default_rng(seed)
    mix = rng.normal(size=(d, d)) / d**0.5 + np.eye(d)
    z = rng.integers(0, 2, n)
    y = np.where(rng.random(n) < 0.7, z, 1 - z)
    X = rng.normal(size=(n, d)) @ mix
    X += strength * np.outer(z, mix[0]) + 0.5 * strength * np.outer(y, mix[1])
    return X, {"z": z, "y": y}


def sample_size(moments: sf.Moments) -> int:
    return int(moments._accumulator.state.second.sample.n_rows)  # type: ignore[union-attr]


def same_bits(a: sf.Moments, b: sf.Moments) -> bool:
    return state_bytes(flushed(a)) == state_bytes(flushed(b))


def distortion(eraser: sf.Projection, covariance: Float) -> float:
    """tr(E S E^T) of the removed part E = left right^T."""
    left, right = eraser.left, eraser.right
    return float(np.sum((left.T @ left) * (right.T @ covariance @ right)))


leace = partial(sf.leace, erase="z")
splince = partial(sf.splince, erase="z", keep="y")


# --- sums of the variances ------------------------------------------------------------------------


def test_sparse_and_dense_rows_mix_with_late_classes_and_constants() -> None:
    X, labels = rows()
    X[:, 5] = 3.0
    order = np.argsort(labels["z"], kind="stable")
    X, z = X[order], labels["z"][order]
    mixed = sf.Moments(**DIAG).update(X[:250], {"z": z[:250]})
    mixed.update(scipy.sparse.coo_array(X[250:]), {"z": z[250:]})
    full = sf.Moments().update(X, {"z": z})
    assert mixed.classes("z") == (0, 1, 2)
    variances = full.covariance(ddof=0).diagonal()
    np.testing.assert_allclose(squares_of(mixed) / 700, variances, rtol=1e-12)
    np.testing.assert_allclose(mixed.cross_covariance("z"), full.cross_covariance("z"), atol=1e-13)
    eraser = sf.leace(mixed, erase="z")
    assert not eraser.right[5].any()
    assert not eraser.left[5].any()


def test_duplicates_of_a_sparse_matrix_are_summed_and_the_caller_keeps_his() -> None:
    X = scipy.sparse.csr_array(
        (np.array([1.0, 2.0, 4.0]), np.array([1, 1, 0]), np.array([0, 2, 3])), shape=(2, 3)
    )
    moments = sf.Moments(**DIAG).update(X)
    assert X.nnz == 3
    np.testing.assert_allclose(moments.mean, [2.0, 1.5, 0.0])
    np.testing.assert_allclose(squares_of(moments), [8.0, 4.5, 0.0])


@pytest.mark.filterwarnings("ignore:the eraser is sensitive")  # which the offset makes it
@pytest.mark.parametrize("zeros", [0, 1, 3])
@pytest.mark.parametrize("weights", ["none", "integers", "fractions"])
@pytest.mark.parametrize("offset", [2000.0, 1.7e9, 1e12])
def test_a_stored_column_of_sparse_rows_far_from_zero_loses_no_digits(
    offset: float, weights: str, zeros: int
) -> None:
    """A year or a time stamp beside words; a few rows may lack it, which is an implicit 0.

    Fractions sum to the whole but for rounding, and that times the square of a mean is much.
    """
    X, labels = rows()
    rng = np.random.default_rng(2)
    X[:, 5] = offset + np.round(rng.normal(size=len(X)) * 10 + 5 * labels["z"])
    X[[1, 300, 600][:zeros], 5] = 0.0
    X[:, 6] = offset  # a constant
    weight = {
        "none": None, "integers": rng.integers(1, 4, len(X)) * 1.0, "fractions": rng.random(len(X)),
    }[weights]  # fmt: skip
    source = sf.sources.from_arrays(
        scipy.sparse.csr_array(X), labels, sample_weight=weight, block_rows=256
    )
    moments = sf.Moments.from_blocks(source, **DIAG)
    w = np.ones(len(X)) if weight is None else weight
    exact = X.astype(np.longdouble)
    exact -= w @ exact / w.sum()
    wanted = np.asarray((w * exact.T**2).sum(axis=1) / w.sum(), float)
    squares = squares_of(moments)
    scale = np.sqrt(wanted)
    assert squares[6] == 0.0
    # n eps of the sums of n terms of the size of deviations; offsets are rounded to eps of theirs.
    np.testing.assert_allclose(squares / w.sum(), wanted, rtol=1e-12, atol=1e-24 * offset**2)
    z = np.eye(3)[labels["z"]]
    cross = np.asarray(exact.T @ (w[:, None] * (z - w @ z / w.sum())) / w.sum(), float)
    gap = np.abs(moments.cross_covariance("z", ddof=0) - cross)[scale > 0]
    assert (gap / scale[scale > 0, None]).max() < 1e-12
    for eraser in (
        sf.leace(moments, erase="z"),
        sf.leace(moments, erase="z", refine=source, passes=2),
    ):
        left = cross - eraser.left @ (eraser.right.T @ cross)
        (report,) = eraser.report.variables  # type: ignore[union-attr]
        units = np.where(scale > 0, scale, np.inf)[:, None]
        residual = np.linalg.norm(left / units) / np.linalg.norm(cross / units)
        assert residual <= report.bound < 1e-9


@pytest.mark.parametrize("part", ["indices", "indptr"])
def test_a_damaged_sparse_matrix_is_refused(part: str) -> None:
    for value in (-1, 4, 1_000_000):
        X = scipy.sparse.csr_array(np.eye(4))
        getattr(X, part)[2] = value
        if part == "indptr" and value == 4:
            continue
        with pytest.raises(InputError, match="damaged"):
            sf.Moments(**DIAG).update(X)
    for bad in (scipy.sparse.csr_array(np.eye(4) * 1j), scipy.sparse.csr_array((4, 0))):
        with pytest.raises(InputError):
            sf.Moments(**DIAG).update(bad)
    assert sf.Moments(**DIAG).update(scipy.sparse.csr_array((0, 4))).n_rows == 0


# --- solves with variances ------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["splince", "leace", "sal", "mean_projection"])
def test_constraints_of_variances_hold_to_rounding(method: str) -> None:
    X, labels = rows()
    full = sf.Moments().update(X, labels)
    keeps: dict[str, Any] = {"keep": ["y", "t"]} if method == "splince" else {}
    for moments in (m := sf.Moments(**DIAG).update(X, labels), m.factored()):
        eraser = getattr(sf, method)(moments, erase="z", **keeps)
        after = sf.Moments().update(eraser(X), labels)
        bound = eraser.report.variables[0].bound
        assert bound < 1e-9
        gone = np.linalg.norm(after.cross_covariance("z"))
        assert gone < bound * np.linalg.norm(full.cross_covariance("z"))
        if keeps:
            for name in ("y", "t"):
                gap = after.cross_covariance(name) - full.cross_covariance(name)
                assert np.linalg.norm(gap) < bound * np.linalg.norm(full.cross_covariance(name))
        assert eraser.report.diagonal is not None
        assert eraser.report.rho is None


@pytest.mark.parametrize("intensity", [0.0, 0.3])
def test_the_metric_is_that_of_the_variances(intensity: float) -> None:
    X, labels = rows()
    X[:, 5] = 3.0  # a constant
    kept = sf.Moments(**DIAG).update(X, labels).factored(shrinkage=intensity or None)
    target = (1 - intensity) * X.var(axis=0) + intensity * X.var(axis=0).mean()
    b = np.random.default_rng(0).normal(size=(3, 24))
    expected = np.divide(b, target, out=np.zeros_like(b), where=target > 0)
    np.testing.assert_allclose(kept.factor.solve(b), expected, rtol=1e-12)
    np.testing.assert_allclose(kept._copy.gram(b), (b * X.var(axis=0)) @ b.T, rtol=1e-12)
    assert abs(kept._copy.gram(b) - b @ np.cov(X.T, ddof=0) @ b.T).max() > 0.1  # control


@pytest.mark.parametrize(
    "use",
    [
        lambda moments: moments.covariance(),
        lambda moments: sf.leace(moments, erase="z", solver="eigh"),
        lambda moments: sf.leace(moments, erase="z", shrinkage="oas"),
        lambda moments: sf.leace(moments, erase="z", shrinkage="cv"),
        lambda moments: moments.factored("oas"),
    ],
)
def test_uses_of_a_covariance_that_is_not_stored_are_refused(use: Any) -> None:
    with pytest.raises(InputError, match="covariance_type="):
        use(sf.Moments(**DIAG).update(*rows()))


def test_sparse_rows_of_a_full_covariance_are_refused_with_the_ways_out() -> None:
    X, labels = rows()
    csr = scipy.sparse.csr_array(X)
    with pytest.raises(InputError, match=r"covariance_type='diag'.*TruncatedSVD.*toarray"):
        sf.Moments().update(csr, labels)
    eraser = sf.leace(sf.Moments(**DIAG).update(csr, labels), erase="z")
    with pytest.raises(InputError, match=r"toarray.*fold_into"):
        eraser(csr)
    # And the ways out are ways: a linear head on the rows as they are.
    head = np.random.default_rng(0).normal(size=(2, 24))
    weight, bias = eraser.fold_into(head, np.zeros(2))
    np.testing.assert_allclose(csr @ weight.T + bias, eraser(X) @ head.T, atol=1e-10)


# --- which rows are sampled -----------------------------------------------------------------------


def chosen_rows(n: int, fraction: float, seed: int) -> NDArray[np.intp]:
    """The rows that are sampled, from the definition: a hash of the position alone."""
    key = splitmix64(np.array([seed], np.uint64))[0]
    hashed = splitmix64(np.arange(n, dtype=np.uint64) + key)
    return np.flatnonzero(hashed.astype(np.float64) / 2.0**64 < fraction)


@pytest.mark.parametrize("step", [9000, 1000])
def test_the_rows_are_those_of_the_definition(step: int) -> None:
    """Also where the moments are read between the updates."""
    X, _ = gaussian(9000, 5, 0.0)
    chosen = chosen_rows(len(X), 0.1, 4)
    moments = sf.Moments(subsample=0.1, random_state=4)
    for start in range(0, len(X), step):
        moments.update(X[start : start + step])
        assert moments.covariance().shape == (5, 5)
    expected = np.cov(X[chosen].T, ddof=0)
    np.testing.assert_allclose(moments.covariance(ddof=0), expected, atol=1e3 * EPS)
    assert sample_size(moments) == len(chosen)
    assert len(chosen) != len(chosen_rows(len(X), 0.1, 5))


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16])
def test_any_size_of_update_gives_the_same_bits(dtype: Any) -> None:
    X, labels = gaussian(1500, 6, 1.0)
    X = X.astype(dtype)
    # Classes are numbered as they come: here in their order, whatever the size of the updates.
    for name in labels:
        labels[name][:2] = 0, 1
    given: dict[str, Any] = {"subsample": 0.2, "block_rows": 256}
    whole = fed_in_parts(sf.Moments(**given), X, labels, len(X))
    assert all(
        same_bits(whole, fed_in_parts(sf.Moments(**given), X, labels, step))
        for step in (1, 77, 256, 777)
    )
    half = sf.Moments(**given).update(X[:700], part(labels, slice(700)))
    rest = X[700:], part(labels, slice(700, None))
    assert same_bits(whole, pickle.loads(pickle.dumps(half)).update(*rest))
    # Control: a stream that forgets where it stood takes other rows.
    half._accumulator.state.second.position = 0  # type: ignore[union-attr]
    assert not same_bits(whole, half.update(*rest))


def test_weights_of_a_sample_are_frequencies() -> None:
    """The scatter in expectation: a variance of m rows has the relative error sqrt(2 / m)."""
    X, labels = gaussian(5000, 6, 1.0)
    weight = np.random.default_rng(3).integers(0, 3, 5000)
    twice, row = sf.Moments(subsample=0.3), np.repeat(np.arange(5000), weight)
    twice.update(X[row], part(labels, row))
    weighted = sf.Moments(subsample=0.3).update(X, labels, sample_weight=weight)
    np.testing.assert_allclose(weighted.mean, twice.mean, atol=1e-12)
    ratio = weighted.covariance().diagonal() / twice.covariance().diagonal()
    assert np.abs(ratio - 1).max() < 6 * (2 * 2 / 1200) ** 0.5


def test_subsample_of_one_has_the_bits_of_the_full_covariance() -> None:
    X, labels = gaussian(5000, 6, 1.0)
    plain, given = (
        sf.Moments(**p).update(X, labels) for p in ({}, {"subsample": 1, "random_state": 5})
    )
    assert np.array_equal(plain.covariance(), given.covariance())
    assert np.array_equal(splince(plain).left, splince(given).left)
    assert splince(given).report == splince(plain).report
    assert splince(plain).report.sampling is None  # type: ignore[union-attr]


def test_a_sample_for_other_methods() -> None:
    X, labels = gaussian(8000, 6, 1.0)
    moments, plain = (sf.Moments(**p).update(X, labels) for p in ({"subsample": 0.1}, {}))
    np.testing.assert_allclose(
        sf.sal(moments, erase="z").left, sf.sal(plain, erase="z").left, atol=1e-12
    )
    report = leace(moments).report
    assert f"of {report.sampling.n_rows:,} sampled rows (expected excess" in str(report)
    assert type(report).from_dict(report.to_dict()) == report
    # Kept directions that are all dropped are regressors again, as LEACE has them.
    with pytest.warns(DroppedDirectionsWarning):
        dropped = sf.splince(moments, erase="z", keep="y", max_amplification=1.0).report
    assert dropped.sampling.expected_excess == pytest.approx(
        report.sampling.expected_excess, rel=1e-9
    )
    for policy in ("oas", 0.1):
        shrunk = sf.leace(moments, erase="z", shrinkage=policy).report
        assert 0 < shrunk.shrinkage <= 0.2
        assert shrunk.sampling.expected_excess is None


def test_parts_of_other_fractions_count_by_their_rows() -> None:
    """Wide rows of which few are sampled, and narrow ones. Control: sampled rows count alike."""
    rng = np.random.default_rng(0)
    wide, narrow = 3 * rng.normal(size=(10_000, 8)), rng.normal(size=(10_000, 8))
    whole = float(np.trace(sf.Moments().update(np.concatenate([wide, narrow])).covariance()))
    weighted, plain = [], []
    for seed in range(30):
        few, many = (
            sf.Moments(subsample=fraction, random_state=seed).update(some)
            for some, fraction in ((wide, 0.02), (narrow, 0.2))
        )
        weighted.append(np.trace((few + many).covariance(ddof=0)))
        rows = wide[chosen_rows(10_000, 0.02, seed)], narrow[chosen_rows(10_000, 0.2, seed)]
        plain.append(float(np.concatenate(rows).var(axis=0).sum()))
    assert errors_from(np.array(weighted), np.array([whole])) < 4
    assert errors_from(np.array(plain), np.array([whole])) > 8


def test_auto_takes_what_five_percent_need() -> None:
    X, labels = gaussian(4096, 8, 1.0)
    source = sf.sources.from_arrays(X, labels)
    moments = sf.Moments.from_blocks(source, subsample="auto")
    assert moments.parameters.subsample == 1 / 16  # 4096 / 16 = 256 rows, and 22 * 8 = 176
    small = sf.Moments.from_blocks(sf.sources.from_arrays(X[:200], None), subsample="auto")
    assert small.parameters.subsample == 1.0
    with pytest.raises(InputError, match="needs the number of rows"):
        sf.Moments.from_blocks(iter([(X, labels)]), subsample="auto")
    for n, d in ((6000, None), (None, 24)):
        with pytest.raises(InputError, match="unknown for blocks"):
            scatters.subsample_for("auto", n, d, "blocks", 2)
        assert scatters.subsample_for(1e-3, n, d, "blocks", 2) == 1e-3
    with pytest.raises(InputError, match=r"pass at least 0\.0078"):
        sf.Moments.from_blocks(source, subsample=0.001)


def test_too_few_rows_for_a_solve() -> None:
    X, labels = gaussian(2000, 20, 1.0)
    moments = sf.Moments(subsample=0.02).update(X, labels)
    with pytest.raises(NotEnoughDataError, match="80 are needed"):
        leace(moments)
    assert sf.leace(moments, erase="z", shrinkage="oas").rank == 1
    nothing = sf.Moments(subsample=1e-9).update(X, labels)
    with pytest.raises(NotEnoughDataError, match="0 sampled rows"):
        sf.leace(nothing, erase="z", shrinkage="oas")


# --- the excess of a sample -----------------------------------------------------------------------


def residuals(eraser: sf.Projection, full: sf.Moments) -> tuple[float, float]:
    """|P Cov(x, z)| and |P Cov(x, y) - Cov(x, y)|, relative, with Cov of all rows."""
    out = []
    for name in ("z", "y"):
        span = full.cross_covariance(name).T
        removed = (span @ eraser.right) @ eraser.left.T
        out.append(np.linalg.norm(span - removed if name == "z" else removed))
        out[-1] = float(out[-1] / np.linalg.norm(span))
    return out[0], out[1]


@pytest.mark.parametrize("seed", range(6))
def test_constraints_hold_to_rounding_at_a_hundredth(seed: int) -> None:
    X, labels = gaussian(40_000, 8, 1.0)
    full = sf.Moments().update(X, labels)
    moments = sf.Moments(subsample=0.01, random_state=seed).update(X, labels)
    eraser = splince(moments)
    report = eraser.report
    assert report is not None
    assert 250 < report.sampling.n_rows < 800
    assert all(v.residual <= v.bound for v in report.variables)
    # Sums over n rows carry sqrt(n) roundings, of x over the size of its cross-covariance.
    assert max(residuals(eraser, full)) < 200 * 100 * EPS
    # Control: class means of the sampled rows alone.
    chosen = chosen_rows(len(X), 0.01, seed)
    alone = splince(sf.Moments().update(X[chosen], {k: v[chosen] for k, v in labels.items()}))
    assert max(residuals(alone, full)) > 1e-3


def draws(
    X: Any, labels: Any, rate: float, count: int, fit: Callable[[sf.Moments], sf.Projection]
) -> tuple[Float, Float, Float, Float]:
    """Of `count` samples: excess, that of the formula, and two distortions over the true one.

    The latter are that of the report, and that of the sample to which the eraser was fitted.
    """
    full = sf.Moments().update(np.asarray(X, np.float64), labels)
    covariance = full.covariance(ddof=0)
    least, total = distortion(fit(full), covariance), float(np.trace(covariance))
    figures = np.empty((4, count))
    for seed in range(count):
        moments = sf.Moments(subsample=rate, random_state=seed).update(X, labels)
        eraser = fit(moments)
        report: Any = eraser.report
        found, naive = (distortion(eraser, c) for c in (covariance, moments.covariance(ddof=0)))
        expected, stated = report.sampling.expected_excess, report.distortion * total
        figures[:, seed] = found / least - 1, expected, stated / found, naive / found
    return tuple(figures)  # type: ignore[return-value]


def errors_from(found: Float, expected: Float) -> float:
    """Distance of the means in standard errors of the first."""
    return float(abs(found.mean() - expected.mean()) / (found.std() / len(found) ** 0.5))


# Rows, features, strength, sampled fraction, draws, method, and the factor of a wrong formula: n
# rows for the m sampled ones; no factor 1 - f for a sample of the very rows that are erased.
CASES = [
    (6000, 32, strength, m * 32 / 6000, 40, fit, m * 32 / 6000)
    for strength in (0.3, 4.0) for m in (5, 20) for fit in (leace, splince)
] + [(1500, 24, 0.3, 0.5, 60, leace, 2.0)]  # fmt: skip


@pytest.mark.parametrize(("n", "d", "strength", "rate", "count", "fit", "wrong"), CASES)
def test_excess_is_that_of_the_formula(
    n: int, d: int, strength: float, rate: float, count: int, fit: Any, wrong: float
) -> None:
    X, labels = gaussian(n, d, strength)
    excess, formula, reported, naive = draws(X, labels, rate, count, fit)
    assert errors_from(excess, formula) < 4
    # The report's distortion is that of all rows: 40 draws scatter by a few percent.
    assert abs(reported.mean() - 1) < 0.03 + 4 * reported.std() / count**0.5
    # Controls: a wrong formula, and the distortion in a small sample itself.
    assert errors_from(excess, formula * wrong) > 4
    assert rate * n > 5 * d or naive.mean() < 0.8


@pytest.mark.parametrize("strength", [0.3, 4.0])
@pytest.mark.parametrize("fit", [leace, splince])
def test_21_rows_per_feature_cost_at_most_five_percent(strength: float, fit: Any) -> None:
    n, d = 12_000, 24
    X, labels = gaussian(n, d, strength)
    assert draws(X, labels, 21 * d / n, 25, fit)[0].mean() < 0.05
    # Control: half of these rows cost more.
    assert draws(X, labels, 10.5 * d / n, 25, fit)[0].mean() > 0.05


@pytest.mark.filterwarnings(
    "ignore:the eraser is sensitive:splince_fast.exceptions.PrecisionWarning"
)
@pytest.mark.filterwarnings("ignore::splince_fast.exceptions.WholeNumbersWarning")
@pytest.mark.filterwarnings("ignore::splince_fast.exceptions.SampledScatterWarning")
@pytest.mark.parametrize("fit", [leace, splince])
@pytest.mark.parametrize(
    ("folder", "z", "y", "rows"),
    [
        ("bug_profession_gender", "z", "y", 4.5),
        ("bug_profession_gender", "z", "y", 8),
        ("professions_smollm2", "z_stereotype", "y_fact", 4.5),
    ],
)
def test_excess_on_real_embeddings(
    real_data: Find, folder: str, z: str, y: str, rows: float, fit: Any
) -> None:
    where = real_data(folder)
    X = np.load(where / "X.npy")
    labels = {"z": np.load(where / f"{z}.npy"), "y": np.load(where / f"{y}.npy")}
    excess, formula, reported, _ = draws(X, labels, rows * X.shape[1] / len(X), 4, fit)
    # Real rows have heavier tails: a uniform sample misses some rows that alone have a direction.
    assert 1 / 1.6 < excess.mean() / formula.mean() < 2.5
    assert abs(reported.mean() - 1) < 0.15


def test_exact_variances_repair_a_rare_feature(monkeypatch: pytest.MonkeyPatch) -> None:
    """One row in a thousand is a hundred times as long, along one feature, which is named."""
    n, d = 6000, 32
    X, labels = gaussian(n, d, 0.8)
    rng = np.random.default_rng(7)
    giant = rng.random(n) < 1e-3
    X[giant, 3] += 100 * d**0.5 * rng.choice([-1.0, 1.0], giant.sum())
    frame = pd.DataFrame(X, columns=[f"f{j}" for j in range(d)])
    with pytest.warns(SampledScatterWarning, match=r"1 feature\(s\) \('f3'\)"):
        repaired = draws(frame, labels, 5 * d / n, 60, leace)[0]
    assert repaired.max() < 1.0
    monkeypatch.setattr(scatters, "_STANDARD_ERRORS", 1e300)
    assert draws(X, labels, 5 * d / n, 60, leace)[0].max() > 10


def test_too_few_rows_for_the_formula_state_no_excess() -> None:
    """excess = (1 - f) p / (m - p - 2), of m = 10 rows and p regressors."""
    sample = scatters.SampleStatistics(10, 10.0, 0.1)
    one = np.array([[1.0, 0.0]])
    assert sample.distortion(one, np.eye(1), 8)[1] is None
    assert sample.distortion(one, np.eye(1), 7)[1] == pytest.approx(0.9 * 7)


# --- rows that are refused ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("first", "offset", "weight"), [(0, 3e152, 1.0), (300, 3e152, 1.0), (300, 3e149, 1e-50)]
)
def test_rows_that_are_too_large_are_refused_though_none_is_sampled(
    first: int, offset: float, weight: float
) -> None:
    """An offset that all rows have, which deviations do not show; and deviations of light rows."""
    X, labels = gaussian(4096, 5, 1.0)
    moments = sf.Moments(subsample=1e-9)
    large = X.copy()
    large[first:] += offset
    with pytest.raises(InputError, match="rescale"):
        moments.update(large, labels, sample_weight=np.full(len(X), weight))
    assert not moments.n_rows
    assert moments.update(X, labels).n_rows == len(X)  # control
    assert not sample_size(moments)


def test_infinities_in_two_segments_are_refused() -> None:
    """Their sum has no value; an error says so, and no warning (the tests make it an error)."""
    X, labels = gaussian(4096, 300, 1.0)
    assert len(X) > 2 * block._segment_rows(len(X), 300, 6)
    moments = sf.Moments(subsample=0.5).update(X, labels)
    before = moments.copy()
    X[[100, 4000], 5] = np.inf, -np.inf
    with pytest.raises(NonFiniteError, match="100"):
        moments.update(X, labels)
    assert same_bits(moments, before)


# --- memory ---------------------------------------------------------------------------------------


MEASURE = """
import numpy as np, scipy.sparse
import splince_fast as sf
def peak():  # of this process: ru_maxrss would begin at what its parent took
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) / 1024
rng = np.random.default_rng(0)
z = rng.integers(0, 2, 200)
warm = rng.normal(size=(200, 64)).astype(np.float32)
for rows in (warm, scipy.sparse.csr_array(warm * (warm > 1))):
    sf.leace(sf.Moments(covariance_type="diag").update(rows, {"z": z}), erase="z")
"""
TEXT = """
n, d = 3700, 40_000
terms, starts = rng.integers(0, d, 31 * n), np.arange(0, 31 * n + 1, 31)
X = scipy.sparse.csr_array((np.ones(31 * n), terms, starts), shape=(n, d))
before = peak()
"""
proc = pytest.mark.skipif(
    not Path("/proc/self/status").exists(), reason="the peak is read from /proc, which is not here"
)


def megabytes(body: str) -> float:
    """Growth of the peak memory of a process that runs `body`, which sets `before`."""
    return float(script(f"{MEASURE}{body}\nprint(peak() - before)"))


@pytest.mark.slow
@proc
def test_dense_rows_of_100_000_features_fit_in_500_megabytes() -> None:
    """One block of 64 MiB beside it; the covariance would take 75 GiB."""
    grown = megabytes("""
block = rng.standard_normal((160, 100_000), dtype=np.float32)
block[:80] += 1.0
before = peak()
moments = sf.Moments(covariance_type="diag")
for _ in range(2):
    moments.update(block, {"z": np.arange(160) < 80})
assert sf.leace(moments, erase="z").report.variables[0].residual < 1e-9
""")
    assert grown < 500


@proc
def test_sparse_text_is_never_made_dense() -> None:
    """3,700 documents of 40,000 terms: dense they take 1,184 MB, and the moments 2 MB."""
    grown = megabytes(f"""{TEXT}
moments = sf.Moments(covariance_type="diag").update(X, {{"z": rng.integers(0, 2, n)}})
assert sf.leace(moments, erase="z", refine=[(X,)]).report.variables[0].residual < 1e-9
""")
    assert grown < 60
    assert megabytes(f"{TEXT}X[:370].toarray().sum()") > 100  # control: a tenth of the rows
