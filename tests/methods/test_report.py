"""The report: every figure against an independent computation, and every way to show it."""

from __future__ import annotations

import dataclasses
import html
from typing import Any

import numpy as np
import pytest
import scipy.linalg
from hypothesis import given
from hypothesis import strategies as st
from problems import (
    EPS,
    Data,
    Float,
    draw_data,
    erase,
    moved,
    report,
    told,
)

import splince_fast as sf
from splince_fast import exceptions as errors


def whitened(data: Data) -> tuple[Float, Float]:
    """S^{-1/2} Cov(x, v), v in units of its deviations; of classes all but the most frequent."""
    s, sz, sy = data.covariances()
    values, vectors = np.linalg.eigh(s)
    root = vectors / np.sqrt(values) @ vectors.T
    share = np.bincount(data.z) / len(data.z)
    sz, share = (np.delete(a, np.argmax(np.bincount(data.z)), axis=-1) for a in (sz, share))
    return root @ (sz / np.sqrt(share * (1 - share))), root @ (sy / data.y.std(axis=0))


@given(seed=st.integers(0, 2**20), d=st.integers(6, 20), kz=st.integers(2, 4))
def test_figures_of_splince(seed: int, d: int, kz: int) -> None:
    data = draw_data(seed, d=d, kz=kz, kappa=30.0)
    moments = data.moments()
    eraser, leace = (erase(method, moments) for method in ("splince", "leace"))
    # Relative, for figures of whitened spans: kappa and 1 / s^2 are below some thousands.
    found, tol = report(eraser), 1e6 * d * EPS

    assert (found.method, found.solver, found.shrinkage) == ("SPLINCE", "cholesky", 0.0)
    assert (found.n_rows, found.weight, found.n_features) == (400, 400.0, d)
    assert (found.rank_covariance, found.rank) == (d, kz - 1)
    assert (found.dropped, found.warnings) == (0, ())
    angles = np.sort(scipy.linalg.subspace_angles(*whitened(data)))
    assert found.cosines == pytest.approx(tuple(np.cos(angles)), abs=tol)
    assert found.amplification == pytest.approx(1 / np.sin(angles[0]), rel=tol)
    assert found.rho == pytest.approx(np.cos(angles[0]) ** 2, abs=tol)
    assert found.distortion == pytest.approx(moved(eraser(data.x), data.x), rel=tol)
    assert found.distortion_leace == pytest.approx(moved(leace(data.x), data.x), rel=tol)
    z, y = found.variables
    assert (z.name, z.role, z.rank, z.kind) == ("z", "erased", kz - 1, f"classes ({kz})")
    assert (y.name, y.role, y.rank, y.kind) == ("y", "kept", 2, "continuous (2 columns)")
    for variable in (z, y):  # those of `test_correlations_equal_those_of_the_data`
        correlations = sf.concept_strength(moments, variable.name).correlations
        assert variable.singular_values == pytest.approx(correlations, rel=tol)


@given(seed=st.integers(0, 2**20), kappa=st.sampled_from([1.0, 1e4, 1e8]))
@pytest.mark.parametrize("solver", ["cholesky", "eigh"])
def test_residuals_and_their_bound(solver: str, seed: int, kappa: float) -> None:
    data = draw_data(seed, kappa=kappa, kz=3)
    moments = data.moments()
    eraser = sf.splince(moments, erase="z", keep="y", solver=solver)
    scale = data.x.std(axis=0)
    size = np.linalg.norm(eraser.matrix() * scale / scale[:, None], 2)
    expected = 8 * 8 * EPS * max(np.linalg.cond(white) for white in whitened(data)) * size**2
    for variable in report(eraser).variables:
        assert variable.bound == pytest.approx(expected, rel=1e-6)
        assert variable.residual <= variable.bound
    # Units of single columns of z change the residual of rounding, and no more than the bound.
    sz, sy = (moments.cross_covariance(name) for name in "zy")
    for span, left in ((sz, eraser.matrix() @ sz), (sy, eraser.matrix() @ sy - sy)):
        assert np.linalg.norm(left) <= 10 * expected * np.linalg.norm(span)


def test_a_trace_of_rounding_is_within_its_bound() -> None:
    """Balanced by design, a variable has a cross-covariance of rounding errors and no rank."""
    rng = np.random.default_rng(2)
    half, order = rng.normal(size=(300, 6)), rng.permutation(600)
    x, balanced = np.tile(half, (2, 1))[order], np.repeat([0, 1], 300)[order]
    labels = {"z": (x[:, 0] > 0).astype(int), "balanced": balanced, "y": x[:, 1] + x[:, 0]}
    moments = sf.Moments().update(x, labels)
    assert 0 < np.abs(moments.cross_covariance("balanced")).max() < 1e-15
    for z, y in (("z", ["y", "balanced"]), (["balanced", "z"], "y")):
        found = {v.name: v for v in report(erase("splince", moments, z, y)).variables}["balanced"]
        assert found.rank == 0
        assert found.residual <= found.bound
    # Alone it leaves nothing to erase: its residual is itself, and the bound says so.
    with pytest.warns(errors.NothingErasedWarning):
        (alone,) = report(sf.leace(moments, erase="balanced")).variables
    assert (alone.rank, alone.residual) == (0, pytest.approx(1.0))
    assert 1.0 <= alone.bound < 1.1


# --- the other methods ---------------------------------------------------------------------------


def test_figures_of_sal() -> None:
    data = draw_data(5, ky=1)
    found, (_, sz, sy) = report(erase("sal that keeps", data.moments())), data.covariances()
    assert (found.rank_covariance, found.solver) == (None, "none")
    assert found.distortion_leace is found.rho is None
    angles = scipy.linalg.subspace_angles(np.delete(sz, 0, axis=1), sy)
    assert found.cosines == pytest.approx(tuple(np.cos(angles)), abs=1e-10)
    assert found.amplification == pytest.approx(1 / np.sin(angles.min()), rel=1e-9)


def test_weights_and_joint_variables_are_named() -> None:
    data = draw_data(8, ky=1)
    other = (data.x[:, 1] > data.x[:, 1].mean()).astype(int)
    weight = np.where(np.arange(400) < 100, 0.0, 1.5)
    moments = sf.Moments(joint=[("z", "o")]).update(
        data.x, {"z": data.z, "o": other, "y": data.y}, sample_weight=weight
    )
    found = report(sf.splince(moments, erase=["z", ("z", "o")], keep="y"))
    assert (found.n_rows, found.weight, found.rank) == (300, 450.0, 5)
    assert [(v.name, v.rank) for v in found.variables] == [("z", 2), ("('z', 'o')", 5), ("y", 1)]
    directions = report(sf.splince(moments, erase="z", keep=np.eye(8)[:, :2]))
    assert (directions.variables[1].name, directions.variables[1].rank) == ("directions", 2)


# --- what the sentences say ---------------------------------------------------------------------
def example(method: str = "splince") -> sf.Report:
    return report(erase(method, draw_data(9).moments()))


def test_the_verdict_states_a_rounding_error_that_matters() -> None:
    found = example()
    near = [dataclasses.replace(v, bound=1e-3) for v in found.variables]
    text = dataclasses.replace(found, variables=tuple(near)).explain()
    assert "'z' is erased up to rounding (1.0e-03) from these rows" in text
    assert "'y' keeps its covariance with x up to rounding (1.0e-03)" in text
    assert "exactly" not in text


@pytest.mark.parametrize("shrinkage", [None, 0.5])
@pytest.mark.parametrize("strength", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("alpha", [0.1, 1.0])
@pytest.mark.parametrize("ky", [1, 2])
def test_stated_change_of_a_row_is_the_largest(
    strength: float, alpha: float, ky: int, shrinkage: float | None
) -> None:
    """|S^{-1/2} (I - P) S^{1/2}|: largest change of a whitened row of unit length."""
    data = draw_data(12, kz=3, ky=ky)
    options: Any = {"strength": strength, "shrinkage": shrinkage}
    eraser = sf.splince(data.moments(), erase="z", keep="y", **options).scaled(alpha)
    cov, share = np.cov(data.x.T, ddof=0), shrinkage or 0.0
    root = np.linalg.cholesky((1 - share) * cov + share * np.trace(cov) / 8 * np.eye(8))
    size = np.linalg.norm(np.linalg.solve(root, (np.eye(8) - eraser.matrix()) @ root), 2)
    row = "a row, whitened by the shrunk covariance," if shrinkage else "a whitened row"
    assert f"; {row} moves by at most {size:.3g} times its length" in str(report(eraser))
    assert f"(without kept variables: {alpha:.3g})" in str(report(eraser))


def test_partial_residual_of_a_rank_tolerance_is_said_to_be_a_bound() -> None:
    rng = np.random.default_rng(6)
    z = rng.integers(0, 3, 600)
    x = rng.normal(size=(600, 6)) + np.array([np.zeros(6), np.eye(6)[0], 0.8 * np.eye(6)[1]])[z]
    moments = sf.Moments().update(x, {"z": z})
    span = np.delete(moments.cross_covariance("z"), np.argmax(np.bincount(z)), axis=1)
    for rank_tol, words in ((0.99, "keeps at most the fraction"), ("auto", "keeps the fraction")):
        part = sf.leace(moments, erase="z", rank_tol=rank_tol).scaled(0.3)
        left = np.linalg.norm(part.matrix() @ span) / np.linalg.norm(span)
        residual = report(part).variables[0].residual
        assert words in report(part).explain()
        assert (residual > 1.05 * left) == (rank_tol == 0.99)
        assert residual > left - 0.01


# --- showing and storing it ----------------------------------------------------------------------


def test_dictionaries_that_are_no_report() -> None:
    values = example().to_dict()
    edits: list[Any] = [{"surplus": 1}, {"weight": 10**400}, {"distortion": "0.1"}, {"rank": True}]
    without = [{k: v for k, v in values.items() if k != name} for name in ("rank", "variables")]
    for wrong in (*(values | edit for edit in edits), *without):
        with pytest.raises(errors.FileFormatError, match="report"):
            sf.Report.from_dict(wrong)


def test_it_is_made_once_and_when_asked_for() -> None:
    data = draw_data(10)
    moments = data.moments()
    eraser = erase("splince", moments)
    assert moments.update(5 * data.x, {"z": data.z, "y": 3 - data.y**3}).weight  # none waits
    assert eraser.report is eraser.report
    assert report(eraser) == report(erase("splince", data.moments()))


def test_text_of_a_report_states_its_figures() -> None:
    found = example()
    text, (z, y) = str(found), found.variables
    for part in (
        "SPLINCE", "400 rows", "8 features", "rank 8", "cholesky", "removed", "2 of 8",
        f"{100 * found.distortion:.3g} %", f"LEACE: {100 * (found.distortion_leace or 0):.3g} %",
        f"{found.cosines[0]:.4f}", f"{found.amplification:.4g}", f"rho = {found.rho:.4g}",
        "erased", "z: rank 2", "kept", "y: rank 2", f"{z.residual:.1e}", f"{y.bound:.1e}",
    ):  # fmt: skip
        assert part in text, part
    assert max(map(len, text.splitlines())) < 140
    assert "warning" not in text
    assert "not factored" in str(example("sal that keeps"))


@pytest.mark.parametrize("name", ["gender", "<script>alert(1)</script>", "a&b", "x</td>", "'\""])
def test_html_escapes_what_users_name(name: str) -> None:
    data = draw_data(11)
    moments = sf.Moments().update(data.x, {name: data.z, "y": data.y})
    eraser, _ = told(sf.splince, moments, erase=name, keep="y", max_amplification=1.0)
    page = report(eraser)._repr_html_()
    assert html.escape(name) in page
    assert "<script" not in page
    assert "x</td>" not in page
    assert "dropped" in page
    assert "warning" in str(eraser.report)
    assert "  dropped  " in str(eraser.report)


def test_the_readings_of_several_variables_are_told_apart() -> None:
    rng = np.random.default_rng(0)
    z, job = np.where(rng.random(300) < 0.2, None, "a"), rng.choice(["b", "c"], 300)
    z[:100] = "d"
    moments = sf.Moments().update(rng.normal(size=(300, 3)), {"z": z, "job": job})
    lines = str(sf.leace(moments, erase=["z", "job"]).report).splitlines()
    (line,) = (line for line in lines if "read as" in line)
    assert line.endswith("of the rows labelled; job: classes (2)")


@pytest.mark.parametrize("equal", [0.99, 0.7])
def test_a_change_beyond_the_variance_of_the_rows_is_explained(equal: float) -> None:
    """A task that equals the concept in 99 % of the rows; the control is one of 70 %."""
    rng = np.random.default_rng(0)
    z = rng.integers(0, 2, 4000)
    y = np.where(rng.random(4000) < equal, z, 1 - z)
    x = rng.normal(size=(4000, 4)) + np.outer(z, np.eye(4)[0]) + np.outer(y, np.eye(4)[1])
    found = report(sf.splince(sf.Moments().update(x, {"z": z, "y": y}), erase="z", keep="y"))
    assert found.distortion is not None
    assert (found.distortion > 1) == (equal == 0.99)
    assert ("max_amplification=" in found.explain()) == (equal == 0.99)
