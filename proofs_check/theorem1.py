"""Theorem 1: the closed form, its optimality and its assumption."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction

import numpy as np

import splince_fast as sf
from proofs_check import _library, _reference
from proofs_check._check import Bench, Verdict, check
from proofs_check._families import (
    Sample,
    continuous,
    integers,
    problem,
    rooted,
    weight,
)
from proofs_check._linalg import (
    Matrix,
    Number,
    beside,
    diagonal,
    eye,
    inverse,
    kron,
    null_basis,
    rank,
    rational,
    solve,
    to_float,
    trace,
    zeros,
)
from proofs_check._reference import Covariances
from proofs_check._rounding import rounding

Eraser = Callable[[Covariances], Matrix]
Fitted = Callable[[Sample], Matrix]


def whitened_error(c: Covariances, p: Matrix, exact: Matrix) -> float:
    """|S^{-1/2} (P - P_exact) S^{1/2}|_F, formed without rounding before the square root."""
    gap = p - exact
    return float(np.sqrt(float(trace(c.s_pinv @ gap @ c.s @ gap.T))))


def tolerances(sample: Sample) -> tuple[float, float, float, float]:
    """Tolerances for SPLINCE, LEACE and SAL on one sample, and cond(S)."""
    r = rounding(sample.features, to_float(sample.z), to_float(sample.y))
    return r.splince, r.leace, r.sal, r.cond


def _unwhitened(c: Covariances) -> Matrix:
    """SPLINCE with the identity in place of S: it keeps both constraints."""
    return _reference.splince(replace(c, s=eye(c.d)))


def _no_gain(c: Covariances) -> Matrix:
    """C_zz in place of G."""
    gain = inverse(c.gram(c.y, c.y)) @ c.gram(c.y, c.z)
    r = c.s_pinv @ (c.z - c.y @ gain)
    return eye(c.d) - c.z @ inverse(c.gram(c.z, c.z)) @ r.T


def _plus(c: Covariances) -> Matrix:
    """A plus sign in R."""
    gain = inverse(c.gram(c.y, c.y)) @ c.gram(c.y, c.z)
    g = c.gram(c.z, c.z) - c.gram(c.z, c.y) @ gain
    return eye(c.d) - c.z @ inverse(g) @ (c.s_pinv @ (c.z + c.y @ gain)).T


def _transposed(c: Covariances) -> Matrix:
    return _reference.splince(c).T


def _rounded_to_single(sample: Sample) -> Matrix:
    """The library's SPLINCE with its entries rounded to float32."""
    single = to_float(_library.splince(sample)).astype(np.float32)
    return rational(single.astype(np.float64))


def library_unwhitened(sample: Sample) -> Matrix:
    """What a library that forgot to whiten would return."""
    return rational(to_float(_unwhitened(sample.covariances)))


@check(
    "1.1",
    "W^+ V (U^T V)^-1 U^T W satisfies both constraints",
    source="Theorem 1, the displayed solution",
    convention="x -> Px, centred x",
    expected=Verdict.HOLDS,
    truth=(
        "P = W^+ V (U^T V)^{-1} U^T W is a projection with P Sz = 0 and P Sy = Sy, for any rank "
        "of S, any number of concept and task columns, redundant ones included. Without roots: "
        "P = I - Sz G^+ R^T on the support of x, with G = C_zz - C_zy C_yy^+ C_yz, "
        "R = S^+ Sz - S^+ Sy C_yy^+ C_yz and C_ab = Sa^T S^+ Sb."
    ),
    meaning="The method does what it promises.",
    mutants={
        "transpose of P": {"closed": _transposed},
        "I for S": {"closed": _unwhitened},
        "C_zz for G": {"closed": _no_gain},
        "plus for minus in R": {"closed": _plus},
        "library without whitening": {"fitted": library_unwhitened},
        "library output transposed": {"fitted": lambda s: _library.splince(s).T},
        "library returns LEACE": {"fitted": _library.leace},
        "library in single precision": {"fitted": _rounded_to_single},
        "library: SAL for LEACE": {"fitted_leace": _library.sal},
        "library: LEACE for SAL": {"fitted_sal": _library.leace},
    },
)
def closed_form(
    bench: Bench,
    *,
    closed: Eraser = _reference.splince,
    fitted: Fitted = _library.splince,
    fitted_leace: Fitted = _library.leace,
    fitted_sal: Fitted = _library.sal,
) -> None:
    """Exact on problems with a rational root of S; the library against the exact eraser of its own
    data, within the whitened tolerance of ``_rounding`` (and, S singular, off the support too:
    there the whitened norm is blind, and the Euclidean one costs a factor sqrt(cond S))."""
    for _ in bench.repeats(60, 12):
        m = int(bench.rng.integers(3, 6))
        d = m + int(bench.rng.integers(0, 3))
        k_y = int(bench.rng.integers(1, m - 1))
        root, c = rooted(bench.rng, d, m, int(bench.rng.integers(1, m - k_y + 1)), k_y)
        p = _reference.printed_splince(root, c)
        bench.printed(p @ c.sz)
        bench.printed(p @ c.sy - c.sy)
        bench.corrected(p @ p - p, label="idempotency")
        bench.corrected(p - closed(c) @ c.support, label="closed form against printed form")
        least = _reference.printed_leace(root, c) - _reference.leace_drop(c)
        bench.corrected(least, label="LEACE, closed form against printed form")
    for sample in bench.samples(12, 3):
        c, (tolerance, tol_leace, tol_sal, cond) = sample.covariances, tolerances(sample)
        p, exact = fitted(sample), _reference.splince(c)
        least = whitened_error(c, fitted_leace(sample), _reference.leace(c))
        bench.corrected(least, tol_leace, label=f"library LEACE, {sample.family}")
        plain = np.linalg.norm(to_float(fitted_sal(sample) - _reference.sal(c)))
        bench.corrected(plain, tol_sal, label=f"library SAL, {sample.family}")
        bench.corrected(whitened_error(c, p, exact), tolerance, label=f"library, {sample.family}")
        if rank(c.s) < c.d:
            size = np.linalg.norm(to_float(p - exact))
            bench.corrected(size, tolerance * np.sqrt(cond), label="library off the support")


def null_space_minimum(c: Covariances, m: Matrix) -> Number:
    """Smallest tr(M E S E^T) over all feasible E, from a particular solution and a null space.

    Uses neither S^+ nor whitening. E = E0 + N Z^T with Z a basis of colsp[Sz, Sy]^perp; the normal
    equations for N read M N (Z^T S Z) = -M E0 S Z, one linear system in vec(N).
    """
    constraints = beside(c.z, c.y)
    e0 = solve(constraints.T, beside(c.z, zeros(*c.y.shape)).T).T
    basis = null_basis(constraints.T)
    inner = basis.T @ c.s @ basis
    target = -(m @ e0 @ c.s @ basis)
    step = solve(kron(inner.T, m), target.T.reshape(-1, 1))
    e = e0 + step.reshape(basis.shape[1], c.d).T @ basis.T
    return trace(m @ e @ c.s @ e.T)


def _feasible_direction(bench: Bench, c: Covariances) -> Matrix:
    """Random N with N [Sz, Sy] = 0."""
    basis = null_basis(beside(c.z, c.y).T)
    return integers(bench.rng, c.d, basis.shape[1]) @ basis.T


@check(
    "1.2",
    "The solution minimises E|Px - x|_M^2 under the constraints",
    source="Theorem 1",
    convention="x -> Px, centred x",
    expected=Verdict.HOLDS,
    truth=(
        "True for every positive semi-definite M at once, definite or not, and for every rank of "
        "S: the optimum does not depend on M. A feasible P = P* + N costs exactly "
        "tr(M N S N^T) more. Certificate: the rows of (I - P*) S lie in colsp[Sz, Sy]."
    ),
    meaning="Whatever norm measures the damage, no feasible eraser does less of it.",
    mutants={
        "I for S": {"closed": _unwhitened},
        "diagonal of S for S": {
            "closed": lambda c: _reference.splince(
                replace(c, s=diagonal([max(c.s[i, i], Fraction(1)) for i in range(c.d)]))
            )
        },
        "LEACE for SPLINCE": {"closed": _reference.leace},
        "gap without S": {"gap": lambda c, m, n: trace(m @ n @ n.T)},
        "library without whitening": {"fitted": library_unwhitened},
    },
)
def optimality(
    bench: Bench,
    *,
    closed: Eraser = _reference.splince,
    gap: Callable[[Covariances, Matrix, Matrix], Number] = lambda c, m, n: trace(m @ n @ c.s @ n.T),
    fitted: Fitted = _library.splince,
) -> None:
    """Exact: the value against an independent quadratic programme, the gap of random feasible
    competitors, the certificate. Library: E_float = E + D moves the certificate D S B, B an
    orthonormal basis of colsp[Sz, Sy]^perp, by at most |D S^{1/2}| |S^{1/2}|: with rows measured
    by S^+, the whitened tolerance times |S^{1/2}|_2."""
    for i in bench.repeats(60, 12):
        m = 3 + i % 2
        c = problem(bench.rng, m + (i // 2) % 2, m, 1, 1 + i % 2)
        w = weight(bench.rng, c.d, 1 + i % c.d)
        p = closed(c)
        value = _reference.distortion(c, p, w)
        bench.printed(beside(p @ c.sz, p @ c.sy - c.sy))
        bench.printed(value - null_space_minimum(c, w))
        n = _feasible_direction(bench, c)
        bench.corrected(
            _reference.distortion(c, p + n, w) - value - gap(c, w, n), label="cost of a competitor"
        )
        other = null_basis(beside(c.z, c.y).T)
        bench.corrected((eye(c.d) - p) @ c.s @ other, label="certificate")
    for sample in bench.samples(6, 2):
        c, (tolerance, *_) = sample.covariances, tolerances(sample)
        basis = null_basis(beside(c.z, c.y).T)
        unit = np.linalg.qr(to_float(basis))[0] if basis.size else np.zeros((c.d, 0))
        rows = (eye(c.d) - fitted(sample)) @ c.s @ rational(unit) if unit.size else zeros(c.d, 1)
        size = float(np.sqrt(float(trace(c.s_pinv @ rows @ rows.T))))
        scale = float(np.sqrt(np.linalg.norm(to_float(c.s), 2)))
        bench.corrected(size, tolerance * scale, label=f"library certificate, {sample.family}")


def _solvable(c: Covariances) -> bool:
    """True iff some E has E [Sz, Sy] = [Sz, 0]: the rows of the right side are row combinations."""
    left = beside(c.sz, c.sy)
    right = beside(c.sz, zeros(*c.sy.shape))
    return rank(np.vstack([left, right])) == rank(left)


def _overlapping(bench: Bench, d: int) -> Sample:
    """Data whose task is, up to noise outside the features' reach, a combination of the concept."""
    rng = bench.rng
    x = rng.integers(-3, 4, (3 * d, d))
    z = x @ rng.integers(-2, 3, (d, 2))
    z[:, 0] += 1 + x[:, 0]
    y = z @ np.array([[2], [-1]]) if rng.random() < 0.5 else z[:, :1] - 3 * z[:, 1:]
    extra = x @ rng.integers(-2, 3, (d, 1))
    y = np.hstack([y, extra]) if rng.random() < 0.5 else y
    return continuous(x, z, y, "overlapping")


def _raises(sample: Sample) -> bool:
    """True iff the library refuses the problem."""
    try:
        _library.fit("splince", sample)
    except sf.InfeasibleError:
        return True
    return False


@check(
    "1.3",
    "The assumption: whitened concept and task spaces meet in 0 only",
    source="Theorem 1 and the paragraph after it",
    convention="x -> Px, centred x",
    expected=Verdict.HOLDS,
    truth=(
        "The assumption is not only sufficient but necessary: feasible iff "
        "rank[Sz, Sy] = rank Sz + rank Sy, and whitening does not matter for it. For scalar z and "
        "y this is linear independence of the two covariance vectors, as the paper says; with "
        "several columns 'do not perfectly overlap' is too weak, one shared direction is enough "
        "to fail. The other assumption, non-zero covariances, is not needed: Sz = 0 gives the "
        "identity, Sy = 0 gives LEACE."
    ),
    meaning=(
        "A task that is a linear function of the concept (or the reverse, such as erasing a "
        "superclass of the kept classes) has no SPLINCE; the library raises an error."
    ),
    mutants={
        "criterion: rank Sz + rank Sy <= rank S": {
            "criterion": lambda c: sum(c.ranks[1:]) <= c.ranks[0]
        },
        "criterion: Sz and Sy not orthogonal": {
            "criterion": lambda c: any(v != 0 for v in (c.sz.T @ c.sy).flat)
        },
        "library answers anyway": {"refuses": lambda s: False},
        "library refuses always": {"refuses": lambda s: True},
    },
)
def assumption(
    bench: Bench,
    *,
    criterion: Callable[[Covariances], bool] = lambda c: c.feasible,
    refuses: Callable[[Sample], bool] = _raises,
) -> None:
    """Exact: solvability of the linear system against the rank criterion, on problems of both
    kinds. Library: it refuses iff the exact problem is infeasible."""
    for i in bench.repeats(60, 12):
        d = 4 + i % 2
        c = problem(bench.rng, d, d - i % 2, 1 + i % 2, 1)
        bench.printed(int(not (criterion(c) and _solvable(c))))
        shared = replace(c, sy=beside(c.sy, c.sz @ integers(bench.rng, c.sz.shape[1], 1)))
        touching = rank(shared.sy) > rank(c.sy)
        bench.printed(int(_solvable(shared) != criterion(shared)))
        bench.corrected(int(touching and _solvable(shared)), label="infeasible yet solvable")
        for empty in (replace(c, sz=zeros(d, 1)), replace(c, sy=zeros(d, 1))):
            p = _reference.splince(empty)
            bench.corrected(p @ empty.sz, label="zero covariance, kernel")
            bench.corrected(p @ empty.sy - empty.sy, label="zero covariance, range")
        bench.corrected(
            _reference.splince(replace(c, sy=zeros(d, 1))) - _reference.leace(c),
            label="no task gives LEACE",
        )
    for sample in bench.samples(4, 1):
        bench.corrected(int(refuses(sample)), label=f"refused, {sample.family}")
    for i in bench.repeats(20, 4):
        sample = _overlapping(bench, 4 + i % 3)
        bench.corrected(int(not refuses(sample)), label="infeasible, yet answered")
