"""The solve kernel on given covariances: exact constraints, least change, statuses.

With kappa = cond(S), A and B the whitened cross-covariances, q = max(cond A, cond B), s the sine of
the smallest principal angle between their spans and d the width, a float64 evaluation that is
backward stable in every step (whitening, orthonormal bases, k x k algebra) obeys

    |P Sz| <= 8 d eps q |P|^2 |Sz|,   |P Sy - Sy| <= 8 d eps q |P|^2 |Sy|,
    |P^2 - P| <= 8 d eps q |P|^3,     |E - E_exact| <= 8 d eps (kappa + q) / s |E_exact|,

where d covers the lengths of the sums and 8 the handful of steps. The first three hold for every
factor L, exact or not, so kappa does not occur in them, and so they cannot tell a wrong S. The
last one, against 60 digits, is checked with the theorems (proofs_check 7.2).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from naive_model import FUZZ
from numpy.typing import NDArray

from splince_fast._kernels import factor as kernel
from splince_fast._kernels import oblique as oblique_kernel
from splince_fast._solve import tolerances
from splince_fast._solve.oblique import Solution

Float = NDArray[np.float64]
EPS = float(np.finfo(np.float64).eps)
many = settings(max_examples=60 * max(FUZZ, 1))


# --- problems ------------------------------------------------------------------------------------


class Problem(NamedTuple):
    """Covariances as the kernel takes them."""

    s: Float
    sz: Float
    sy: Float

    @property
    def d(self) -> int:
        return len(self.s)

    def scaled(self, scale: Float) -> Problem:
        scale = scale[:, None]
        return Problem(scale * self.s * scale.T, scale * self.sz, scale * self.sy)


def problem(
    rng: np.random.Generator, d: int, rz: int, ry: int, kappa: float, cosine: float,
    spread: float = 1.0,
) -> Problem:  # fmt: skip
    """S of condition kappa, and spans whose largest principal cosine is the given one."""
    basis = np.linalg.qr(rng.normal(size=(d, d)))[0]
    root = (basis * np.geomspace(1.0, kappa**-0.5, d)) @ basis.T
    frame = np.linalg.qr(rng.normal(size=(d, rz + ry)))[0]
    qz, qy = frame[:, :rz], frame[:, rz:].copy()
    angles = min(rz, ry)
    cosines = cosine * np.concatenate([[1.0], rng.uniform(size=max(angles - 1, 0))])[:angles]
    qy[:, :angles] = cosines * qz[:, :angles] + np.sqrt(1 - cosines**2) * qy[:, :angles]

    def mixed(q: Float, r: int) -> Float:
        turn = [np.linalg.qr(rng.normal(size=(r, r)))[0] for _ in range(2)]
        return q @ (turn[0] * np.geomspace(1.0, 1.0 / spread, r)) @ turn[1]

    return Problem(root @ root.T, root @ mixed(qz, rz), root @ mixed(qy, ry))


def solved(
    p: Problem, whitened: bool = True, drop_below: float = 0.0, may_drop: bool = False,
    **options: Any,
) -> dict[str, Any]:  # fmt: skip
    """Factor as the public functions do for float64 rows, admit and solve; figures by name."""
    erased, kept = np.ascontiguousarray(p.sz.T), np.ascontiguousarray(p.sy.T)
    if whitened:
        defaults = {"per_weight": 1.0, "ridge": 0.0, "max_rank": p.d, "tolerance": 4 * p.d * EPS,
                    "force_eigh": False, "allow_eigh": True}  # fmt: skip
        factor = kernel.dense(np.asfortranarray(p.s), np.zeros(p.d), **(defaults | options))
        if factor.status != kernel.STATUS_OK:
            return {"status": factor.status}
        factor = factor.admit(np.concatenate([erased, kept]))
        noise = tolerances.noise(p.d, factor.smallest)
    else:
        factor = kernel.identity(np.diag(p.s).copy(), 1.0)
        noise = tolerances.noise(factor.variance)
    found = oblique_kernel.oblique(
        factor, erased, kept, noise=noise, relative=tolerances.relative(p.d, "auto"),
        drop_below=drop_below, may_drop=may_drop,
    )  # fmt: skip
    figures = {"solver": factor.solver, "null_basis": factor.null_basis}
    return dict(zip(Solution._fields, found, strict=False)) | figures


def factors(p: Problem, **options: Any) -> tuple[Float, Float]:
    """left and right, (d, r), of a solve that must succeed."""
    raw = solved(p, **options)
    assert raw["status"] == kernel.STATUS_OK
    return raw["left"].T, raw["right"].T


def whitened_condition(p: Problem) -> float:
    """q, from a symmetric square root."""
    values, vectors = np.linalg.eigh(p.s)
    kept = values > 4 * p.d * EPS * values[-1]
    root = vectors[:, kept] / np.sqrt(values[kept])
    q = 1.0
    for span in (p.sz, p.sy):
        if span.shape[1]:
            sizes = np.linalg.svd(root.T @ span, compute_uv=False)
            q = max(q, float(sizes[0] / sizes[-1]))
    return q


# --- the constraints -----------------------------------------------------------------------------


def excesses(p: Problem, left: Float, right: Float) -> dict[str, float]:
    """Each residual over its bound: at most 1 for a right answer.

    In units where S has unit diagonal, in which the kernel works and no feature outweighs another.
    """
    scale = np.sqrt(np.diag(p.s))[:, None]
    left, right = left / scale, right * scale
    size = np.linalg.norm(np.eye(p.d) - left @ right.T, 2)
    unit = 8 * p.d * EPS * whitened_condition(p) * size**2
    wide_left, wide_right = left.astype(np.longdouble), right.astype(np.longdouble)

    def removed(span: Float) -> Float:
        product = wide_left @ (wide_right.T @ span.astype(np.longdouble))
        return np.asarray(product, np.float64)

    sz, sy = p.sz / scale, p.sy / scale
    gram = np.asarray(wide_right.T @ wide_left, np.float64) - np.eye(left.shape[1])
    found = {
        "kernel": np.linalg.norm(sz - removed(sz)) / np.linalg.norm(sz) / unit,
        "idempotent": np.linalg.norm(left @ gram @ right.T, 2) / (unit * size),
    }
    if sy.shape[1]:
        found["range"] = np.linalg.norm(removed(sy)) / np.linalg.norm(sy) / unit
    return {name: float(value) for name, value in found.items()}


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    d = draw(st.sampled_from([2, 3, 5, 9, 17, 40, 100, 300]))
    rz = draw(st.integers(1, min(40, d - 1)))
    ry = draw(st.integers(0, min(40, d - rz)))
    return problem(
        np.random.default_rng(draw(st.integers(0, 2**20))), d, rz, ry,
        kappa=10.0 ** draw(st.integers(0, 14)),
        cosine=draw(st.sampled_from([0.0, 0.5, 0.9, 0.999, 1 - 1e-6])),
        spread=draw(st.sampled_from([1.0, 30.0])),
    )  # fmt: skip


@many
@given(p=problems(), force_eigh=st.booleans(), units=st.sampled_from([0.0, 3.0, 12.0]))
def test_constraints_hold_to_rounding_at_any_condition_number(
    p: Problem, force_eigh: bool, units: float
) -> None:
    p = p.scaled(10.0 ** np.random.default_rng(p.d).uniform(-units, units, size=p.d))
    for name, excess in excesses(p, *factors(p, force_eigh=force_eigh)).items():
        assert excess <= 1, name


def closed_form(p: Problem, mutant: str = "") -> tuple[Float, Float]:
    """The textbook formula E = Sz G^-1 R^T, or one of its plausible misprints."""
    s = np.eye(p.d) if mutant == "I for S" else p.s
    whitened_z, whitened_y = np.linalg.solve(s, p.sz), np.linalg.solve(s, p.sy)
    czz, czy, cyy = p.sz.T @ whitened_z, p.sz.T @ whitened_y, p.sy.T @ whitened_y
    sign = -1.0 if mutant == "+ for -" else 1.0
    right = whitened_z - sign * whitened_y @ np.linalg.solve(cyy, czy.T)
    if mutant == "dropped term":
        right = whitened_z
    gap = czz - czy @ np.linalg.solve(cyy, czy.T)
    left = p.sz @ np.linalg.inv(czz if mutant == "Czz for G" else gap)
    return (right, left) if mutant == "transpose" else (left, right)


MUTANTS = ["transpose", "dropped term", "Czz for G", "+ for -"]


@pytest.mark.parametrize("mutant", ["", *MUTANTS])
def test_control_the_constraint_check_tells_wrong_formulas(mutant: str) -> None:
    p = problem(np.random.default_rng(5), 8, 2, 3, kappa=100.0, cosine=0.7)
    worst = max(excesses(p, *closed_form(p, mutant)).values())
    # The textbook formula squares q and 1/s, both small here.
    assert worst > 1e6 if mutant else worst <= 1


# --- optimality, which the constraints cannot see ------------------------------------------------


def optimality_gap(p: Problem, left: Float, right: Float) -> float:
    """How far the rows of E S leave colsp[Sz, Sy], relative: 0 for the minimiser (stationarity)."""
    gradient = p.s @ right
    spans = np.linalg.qr(np.concatenate([p.sz, p.sy], axis=1))[0]
    outside = gradient - spans @ (spans.T @ gradient)
    return float(np.linalg.norm(left @ outside.T) / np.linalg.norm(left @ gradient.T))


@many
@given(p=problems(), force_eigh=st.booleans())
def test_the_answer_is_stationary(p: Problem, force_eigh: bool) -> None:
    values = np.linalg.eigvalsh(p.s)
    kappa = values[-1] / max(values[0], EPS)
    q, sine = whitened_condition(p), 1.0
    if p.sy.shape[1]:
        sine = float(solved(p)["sines"].min())
    # The error of E by the bound above, seen through S, which can only shrink it.
    bound = 8 * p.d * EPS * (kappa + q) / sine
    assert optimality_gap(p, *factors(p, force_eigh=force_eigh)) <= bound


def test_control_identity_for_the_covariance_passes_the_constraints_and_not_optimality() -> None:
    p = problem(np.random.default_rng(5), 8, 2, 3, kappa=100.0, cosine=0.7)
    wrong = closed_form(p, "I for S")
    assert max(excesses(p, *wrong).values()) <= 1
    assert optimality_gap(p, *wrong) > 1e-3


# --- the plain twin, the switches, the shapes ----------------------------------------------------


@pytest.mark.parametrize("k", [1, 2, 4, 5])
def test_spans_whose_squares_leave_the_range_of_float64(k: int) -> None:
    """A power of two changes no digit of the projection, however many columns are decomposed."""
    p = problem(np.random.default_rng(k), 12, k, k, kappa=1.0, cosine=0.5, spread=10.0)
    size = 2.0**520
    assert size > np.finfo(np.float64).max ** 0.5
    large = Problem(p.s, p.sz * size, p.sy * size)
    pairs = (factors(q, whitened=False) for q in (p, large))
    plain, found = (left @ right.T for left, right in pairs)
    np.testing.assert_allclose(found, plain, atol=8 * p.d * EPS * 10.0 * np.abs(plain).max())


@pytest.mark.parametrize("whitened", [True, False])
def test_spans_that_fill_the_space_and_one_more(whitened: bool) -> None:
    rng = np.random.default_rng(1)
    p = problem(rng, 5, 2, 3, kappa=10.0, cosine=0.5)
    left, right = factors(p, whitened=whitened)
    P = np.eye(5) - left @ right.T
    assert np.linalg.matrix_rank(P, tol=1e-8) == 3
    too_many = Problem(p.s, p.sz, np.concatenate([p.sy, rng.normal(size=(5, 1))], axis=1))
    raw = solved(too_many, whitened=whitened)
    assert raw["status"] == kernel.STATUS_INFEASIBLE
    assert raw["cosines"][0] == pytest.approx(1.0, abs=1e-12)


# --- rank-deficient covariances ------------------------------------------------------------------


def deficient(rng: np.random.Generator, d: int, rank: int) -> Problem:
    """S of the given rank, exactly but for rounding, with spans inside its range."""
    root = rng.normal(size=(d, rank))
    return Problem(root @ root.T, *(root @ rng.normal(size=(rank, k)) for k in (2, 1)))


@given(
    seed=st.integers(0, 2**20),
    units=st.sampled_from([0.0, 2.0, 5.0, 9.0, 12.0]),
    missing=st.sampled_from([1, 5]),
)
@example(seed=0, units=12.0, missing=5)  # needs the rows of the null basis sorted by size
@example(seed=0, units=12.0, missing=1)
def test_rank_deficient_covariance_in_any_units(seed: int, units: float, missing: int) -> None:
    """Powers of two rescale S without rounding, so the map must follow them on the support."""
    d = 12
    plain = deficient(np.random.default_rng(seed), d, d - missing)
    scale = 2.0 ** np.round(np.random.default_rng(seed).uniform(-units, units, d) * 3.3)
    left, right = factors(plain)
    scaled_left, scaled_right = factors(plain.scaled(scale))
    values, vectors = np.linalg.eigh(plain.s)
    support = vectors[:, missing:] * np.sqrt(values[missing:])
    expected = left @ (right.T @ support)
    found = (scaled_left / scale[:, None]) @ ((scaled_right * scale[:, None]).T @ support)
    sine = float(solved(plain)["sines"].min())
    kappa = values[-1] / values[missing]
    bound = 16 * d * EPS * (kappa + whitened_condition(plain)) / sine**2
    rows = np.linalg.norm(found - expected, axis=1)
    assert (rows <= bound * np.linalg.norm(expected, axis=1)).all()


# --- conduct -------------------------------------------------------------------------------------


@pytest.mark.parametrize("force_eigh", [False, True])
def test_the_lower_triangle_is_read_and_inputs_are_left_as_they_are(force_eigh: bool) -> None:
    p = problem(np.random.default_rng(8), 20, 3, 3, kappa=1e3, cosine=0.5)
    lower = np.where(np.tri(20, dtype=bool), p.s, np.nan)
    arrays = [np.asfortranarray(a) for a in (lower, p.sz, p.sy)]
    before = [a.tobytes() for a in arrays]
    found, expected = (factors(q, force_eigh=force_eigh) for q in (Problem(*arrays), p))
    np.testing.assert_array_equal(found, expected)
    assert [a.tobytes() for a in arrays] == before
