"""One factor for many erasers: the same results as from the moments, at a fraction of the cost.

Shrinkage has the intensity of scikit-learn.
"""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from problems import EPS
from sklearn.covariance import oas

import splince_fast as sf
from splince_fast import exceptions as errors
from splince_fast._kernels.factor import STATUS_SINGULAR
from splince_fast._solve.options import MOMENT_OPTIONS
from splince_fast.methods import fit
from splince_fast.methods.table import METHODS

CALLS: list[tuple[str, dict[str, Any]]] = [
    ("splince", {"erase": "z", "keep": "y"}),
    ("splince", {"erase": ["z", "y"], "keep": np.eye(12)[:, :2]}),
    ("splince", {"erase": "z", "keep": "y", "null_space": "drop", "max_amplification": 5}),
    ("leace", {"erase": "y", "rank_tol": 0.5}),
    ("sal", {"erase": "z", "keep": "y"}),
    ("mean_projection", {"erase": "z"}),
]


def moments(n: int = 400, d: int = 12, seed: int = 0, **options: Any) -> sf.Moments:
    rng = np.random.default_rng(seed)
    z = rng.integers(0, 3, n)
    x = rng.normal(size=(n, d)) @ rng.normal(size=(d, d)) + rng.normal(size=(3, d))[z]
    y = np.stack([x[:, 0] + rng.normal(size=n), rng.normal(size=n)], axis=1)
    return sf.Moments(**options).update(x, {"z": z, "y": y})


@pytest.mark.parametrize(("method", "arguments"), CALLS)
@pytest.mark.parametrize(
    ("n", "options"),
    [
        (400, {}),
        (9, {}),
        (400, {"subsample": 0.5}),
        (400, {"covariance_type": "diag"}),
        (400, {"by": "z"}),
    ],
)
def test_every_method_gives_the_same_from_a_snapshot(
    method: str, arguments: dict[str, Any], n: int, options: dict[str, Any]
) -> None:
    whole = moments(n, **options)
    kept = whole.factored()
    call = getattr(sf, method)
    try:
        expected = call(whole, **arguments)
    except errors.InfeasibleError:
        with pytest.raises(errors.InfeasibleError):
            call(kept, **arguments)
        return
    found = call(kept, **arguments)
    np.testing.assert_array_equal(found.left, expected.left)
    np.testing.assert_array_equal(found.right, expected.right)
    a, b = found.report.to_dict(), expected.report.to_dict()
    # The remembered covariance is scaled and back: two roundings an entry.
    for figures in (a, b):
        for name in ("distortion", "distortion_leace"):
            figures[name] = figures[name] and round(figures[name], 9)
    assert a == b
    if not options:
        for name in "zy":
            assert sf.concept_strength(kept, name) == sf.concept_strength(whole, name)


@pytest.mark.parametrize("shrinkage", [0.0, 0.3, 1.0, "oas"])
@pytest.mark.parametrize("solver", ["cholesky", "eigh"])
def test_shrinkage_belongs_to_the_snapshot(shrinkage: float | str, solver: str) -> None:
    whole = moments()
    kept = whole.factored(shrinkage, solver=solver)
    expected = sf.splince(whole, erase="z", keep="y", shrinkage=shrinkage, solver=solver)
    for options in ({}, {"shrinkage": shrinkage}, {"solver": solver}):
        found = sf.splince(kept, erase="z", keep="y", **options)
        np.testing.assert_array_equal(found.left, expected.left)
        assert found.report.shrinkage == expected.report.shrinkage
        assert found.report.distortion == pytest.approx(expected.report.distortion, rel=1e-9)
    other = 0.7 if shrinkage != 0.7 else 0.1
    with pytest.raises(errors.InputError, match=r"factored\(\)"):
        sf.leace(kept, erase="z", shrinkage=other)
    with pytest.raises(errors.InputError, match=r"factored\(\)"):
        sf.leace(kept, erase="z", solver="eigh" if solver == "cholesky" else "cholesky")
    if kept.shrinkage:
        with pytest.raises(errors.InputError, match="changes correlations"):
            sf.concept_strength(kept, "z")


@pytest.mark.parametrize("options", [{}, {"covariance_type": "diag"}, {"subsample": 0.5}])
@pytest.mark.parametrize("block_rows", [16, None])  # rows are merged at once, or wait
def test_later_updates_do_not_change_a_snapshot(
    options: dict[str, Any], block_rows: int | None
) -> None:
    whole = moments(block_rows=block_rows, **options)
    kept = whole.factored()
    sums = {name: whole.cross_covariance(name) for name in ("z", "y")}
    before = [sf.sal(kept, erase=name).matrix() for name in sums]
    rng = np.random.default_rng(9)
    labels = {"z": np.arange(800) % 5, "y": rng.normal(size=(800, 2))}
    whole.update(rng.normal(size=(800, 12)) + 3.0, labels)
    for name, old in sums.items():  # the control: the moments did change
        assert np.abs(whole.cross_covariance(name)[:, : old.shape[1]] - old).max() > 0.01
    for name, matrix in zip(sums, before, strict=True):
        np.testing.assert_array_equal(sf.sal(kept, erase=name).matrix(), matrix)
    assert kept.n_rows == 400
    assert kept.variables == {"z": "classes", "y": "continuous"}
    for array in (kept.mean, kept.variances):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 0.0
    assert "Factored(400 rows, 12 features" in repr(kept)


def test_a_snapshot_costs_one_square_matrix() -> None:
    rng = np.random.default_rng(0)
    kept = sf.Moments().update(rng.normal(size=(900, 300)), {"z": np.arange(900) % 2}).factored()
    assert 8 * 300**2 <= kept.nbytes < 1.1 * 8 * 300**2
    few = sf.Moments().update(rng.normal(size=(100, 300)), {"z": np.arange(100) % 2}).factored()
    assert 2 * 8 * 300**2 <= few.nbytes < 2.1 * 8 * 300**2
    diagonal = sf.Moments(covariance_type="diag")
    diagonal.update(rng.normal(size=(99, 300)), {"z": np.arange(99) % 2})
    assert 8 * 4 * 300 <= diagonal.factored().nbytes < 8 * 8 * 300


def test_a_snapshot_that_leaves_out_a_feature_of_the_test_is_refused() -> None:
    """The factor of float32 rows has no feature that varies by their rounding; the test has."""
    rng = np.random.default_rng(0)
    x, z = rng.normal(size=(400, 4)).astype(np.float32), rng.integers(0, 2, 400)
    x[:, 3] = 1000 + np.spacing(np.float32(1000)) * rng.integers(0, 2, 400)
    moments = sf.Moments().update(x, {"z": z})
    assert sf.concept_strength(moments, "z").rank_x == 4
    with pytest.raises(errors.InputError, match=r"leaves out feature\(s\) 3.*pass the moments"):
        sf.concept_strength(moments.factored(), "z")
    assert sf.leace(moments.factored(), erase="z").rank == 1


# --- the factor itself ---------------------------------------------------------------------------


def test_a_factor_is_free_of_spans_and_admitting_leaves_it_as_it_was() -> None:
    """A concept in the difference of two equal features is admitted for its own solve alone."""
    rng = np.random.default_rng(0)
    x, row = rng.normal(size=(1000, 6)), np.arange(1000)
    labels = {"z": row % 2, "other": row // 2 % 2}  # uncorrelated
    x[:, 1] = x[:, 0] + 1e-9 * labels["z"]
    kept = sf.Moments().update(x, labels).factored()
    before = sf.leace(kept, erase="other").matrix()
    with pytest.warns(errors.PrecisionWarning):
        admitted = sf.leace(kept, erase="z")
    assert (kept.factor.rank, admitted.report.rank_covariance) == (5, 6)
    np.testing.assert_array_equal(sf.leace(kept, erase="other").matrix(), before)


# --- shrinkage by a rule --------------------------------------------------------------------------


@given(
    n=st.integers(4, 300),
    d=st.integers(2, 30),
    cut=st.floats(0, 1),
    seed=st.integers(0, 2**16),
    block_rows=st.sampled_from([1, 7, 64, None]),
)
def test_intensity_equals_scikit_learn(
    n: int, d: int, cut: float, seed: int, block_rows: int | None
) -> None:
    """Of parts that are added, and of rows that weigh two."""
    rng = np.random.default_rng(seed)
    x, k = rng.normal(size=(n, d)) @ rng.normal(size=(d, d)) + rng.normal(size=d), int(cut * n)
    # Sums over n d terms of fourth powers: their relative error is a few hundred eps sqrt(n d);
    # the intensity is a ratio of such sums.
    near = {"abs": 500 * EPS * (2 * n * d) ** 0.5}
    first, other = (sf.Moments(block_rows=block_rows).update(part) for part in (x[:k], x[k:]))
    assert (first + other).factored("oas").shrinkage == pytest.approx(oas(x)[1], **near)
    weighted = sf.Moments().update(x, sample_weight=np.where(np.arange(n) < k, 2.0, 1.0))
    expected = oas(np.concatenate([x, x[:k]]))[1]
    assert weighted.factored("oas").shrinkage == pytest.approx(expected, **near)


def test_intensity_of_white_and_of_isotropic_rows() -> None:
    """White data, where another tool's intensity left [0, 1] and the covariance its cone."""
    x = np.linalg.qr(np.random.default_rng(0).normal(size=(500, 10)))[0] * 500**0.5
    assert 0.0 <= sf.Moments().update(x - x.mean(axis=0)).factored("oas").shrinkage <= 1.0
    x = np.random.default_rng(0).normal(size=(60, 5)) @ np.diag([1.0, 2, 3, 4, 5])
    found = [sf.Moments().update(part).factored("oas").shrinkage for part in (x, x[:20])]
    assert abs(found[0] - found[1]) > 1e-3  # control: rows make a difference
    x = np.array([[1.0], [-1.0], [1.0], [-1.0]])  # its own target
    assert sf.Moments().update(x).factored("oas").shrinkage == 1.0


def test_a_factorisation_that_fails_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    flat = sf.Moments().update(np.ones((5, 3))).update(np.eye(3)[:1])
    with pytest.raises(sf.SplinceError, match="rank deficient"):
        flat.factored(solver="cholesky")
    solve = fit.oblique
    monkeypatch.setattr(fit, "oblique", lambda *a: solve(*a)._replace(status=STATUS_SINGULAR))
    with pytest.raises(sf.SplinceError, match="singular matrix"):
        sf.leace(moments(), erase="z")


# --- one declaration of options ------------------------------------------------------------------


ESTIMATORS = {
    "splince": "SPLINCE", "leace": "LEACE", "sal": "SAL", "mean_projection": "MeanProjection",
}  # fmt: skip


@pytest.mark.parametrize("method", ESTIMATORS)
def test_signatures_and_estimators_have_the_options_of_the_table(method: str) -> None:
    options = {name: option.default for name, option in METHODS[method].options.items()}
    parameters = inspect.signature(getattr(sf, method)).parameters
    given = ("moments", "erase", "keep", "refine", "passes")
    assert {n: p.default for n, p in parameters.items() if n not in given} == options
    reading = {
        name: option.default
        for name, option in MOMENT_OPTIONS.items()
        if name != "passes" or "passes" in METHODS[method].parameters
    }
    found = getattr(sf, ESTIMATORS[method])().get_params()
    own = {"kinds": None, "concept_from": None}
    # Only SPLINCE keeps a task: other estimators have no options for kept directions.
    kept = () if method == "splince" else ("max_amplification", "on_infeasible")
    expected = {n: v for n, v in (options | reading).items() if n not in kept}
    assert found == found | expected
    assert found.keys() <= expected.keys() | own.keys()
