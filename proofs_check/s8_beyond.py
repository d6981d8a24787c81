"""Section 8: beyond the paper. Repair of erased rows."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction

import numpy as np

from proofs_check import _library, _reference
from proofs_check._check import Bench, Verdict, check
from proofs_check._families import Sample, integers, problem, weight
from proofs_check._fits import least_squares, ridge
from proofs_check._heads import Fit, predictions, random_guarded
from proofs_check._library import Fitted
from proofs_check._linalg import (
    Matrix,
    Number,
    beside,
    eye,
    is_zero,
    null_basis,
    pinv,
    rank,
    to_float,
    trace,
)
from proofs_check._rounding import tolerances, whitened_error

# T, Ty, Sy -> B
Repair = Callable[[Matrix, Matrix, Matrix], Matrix]


def _erased_moments(bench: Bench, i: int) -> tuple[Matrix, Matrix, Matrix]:
    """T = F F^T of any rank, Ty = F b, and Sy with ker Ty in ker Sy; redundant columns included."""
    d, k = 3 + i % 3, 1 + (i // 3) % 2
    f = integers(bench.rng, d, d - i % 2)
    ty, sy = f @ integers(bench.rng, f.shape[1], k), integers(bench.rng, d, k)
    if i % 4 == 3:  # a label twice, and a combination
        mix = integers(bench.rng, k, 1)
        ty, sy = beside(ty, ty @ mix), beside(sy, sy @ mix)
    if rank(ty) < k:
        return _erased_moments(bench, i)
    return f @ f.T, ty, sy


def _with_h_of_sy(t: Matrix, ty: Matrix, sy: Matrix) -> Matrix:
    """H of Sy in place of Ty."""
    return eye(len(t)) + (sy - ty) @ pinv(sy.T @ pinv(t) @ sy) @ (pinv(t) @ ty).T


def _cost(t: Matrix, ty: Matrix, sy: Matrix, m: Matrix) -> Number:
    """tr(M X H^+ X^T)."""
    x = sy - ty
    return trace(m @ x @ pinv(ty.T @ pinv(t) @ ty) @ x.T)


def _solvable(ty: Matrix, sy: Matrix) -> bool:
    """Whether some B has B Ty = Sy, by solving for it."""
    try:
        _reference.solve(ty.T, sy.T)
    except ValueError:
        return False
    return True


@check(
    "8.1",
    Verdict.HOLDS,
    mutants={
        "I for T": {"closed": lambda t, ty, sy: _reference.restored(eye(len(t)), ty, sy)},
        "H of Sy": {"closed": _with_h_of_sy},
        "K of Sy": {
            "closed": lambda t, ty, sy: (
                eye(len(t)) + (sy - ty) @ pinv(ty.T @ pinv(t) @ sy) @ (pinv(t) @ sy).T
            )
        },
        "cost with H for its inverse": {
            "cost": lambda t, ty, sy, m: trace(m @ (sy - ty) @ ty.T @ pinv(t) @ ty @ (sy - ty).T)
        },
        "criterion: rank Sy <= rank Ty": {"criterion": lambda ty, sy: rank(sy) <= rank(ty)},
        "library: not repaired": {"fitted": _library.leace},
        "library: half": {"fitted": lambda s: _library.repaired(s, strength=0.5)},
        "library: SAL repaired": {"fitted": lambda s: _library.repaired(s, "sal")},
    },
)
def least_change(
    bench: Bench,
    *,
    closed: Repair = _reference.restored,
    cost: Callable[[Matrix, Matrix, Matrix, Matrix], Number] = _cost,
    criterion: Callable[[Matrix, Matrix], bool] = lambda ty, sy: is_zero(sy @ null_basis(ty)),
    fitted: Fitted = _library.repaired,
) -> None:
    """Exact: the constraint, the certificate, the value against a quadratic programme without T^+,
    the price of random competitors, partial strength. Library: the repair of LEACE against the
    exact SPLINCE. Its rows are erased rows, rounded and accumulated anew: the errors of both
    erasers, with a factor 4 for the second accumulation and the composition."""
    for i in bench.repeats(60, 12):
        t, ty, sy = _erased_moments(bench, i)
        d, b = len(t), closed(t, ty, sy)
        m = weight(bench.rng, d, 1 + i % d)
        change = b - eye(d)
        value = trace(m @ change @ t @ change.T)
        bench.printed(b @ ty - sy)
        bench.printed(change @ t @ null_basis(ty.T))
        bench.printed(value - _reference.constrained_minimum(t, m, ty, sy - ty))
        bench.corrected(value - cost(t, ty, sy, m), label="cost")
        free = null_basis(ty.T)
        n = integers(bench.rng, d, free.shape[1]) @ free.T
        other = change + n
        gap = trace(m @ other @ t @ other.T) - value - trace(m @ n @ t @ n.T)
        bench.corrected(gap, label="price of a competitor")
        half = eye(d) + change / 2
        bench.corrected(half @ ty - (ty + sy) / 2, label="strength 1/2")
        # A combination is lost to Ty; Sy of rank 1 may have lost the same, or another.
        row = integers(bench.rng, 1, 2)
        once = integers(bench.rng, d, 1)
        for lost, wanted in (
            (ty, sy),
            (ty[:, :1] @ row, once @ row),
            (ty[:, :1] @ row, once @ integers(bench.rng, 1, 2)),
        ):
            agrees = criterion(lost, wanted) == _solvable(lost, wanted)
            bench.corrected(int(not agrees), label="feasible iff")
    for i in bench.repeats(40, 10):
        c = problem(bench.rng, 4, 4 - i % 2, 1 + i % 2, 1)
        least = _reference.leace(c)
        b = closed(least @ c.s @ least.T, least @ c.y, c.y)
        bench.corrected((b @ least - _reference.splince(c)) @ c.s, label="repair of LEACE")
        guarded = random_guarded(bench, c)
        if rank(guarded @ c.y) == rank(c.y):
            b = closed(guarded @ c.s @ guarded.T, guarded @ c.y, c.y)
            bench.corrected(b @ guarded @ c.sz, label="guarded before, guarded after")
            bench.corrected(b @ guarded @ c.y - c.y, label="any guarded eraser keeps the task")
    for sample in bench.samples(6, 2, ("full rank", "rank-deficient", "one-hot", "multi-output")):
        c, (tolerance, tol_leace, _, _) = sample.covariances, tolerances(sample)
        error = whitened_error(c, fitted(sample), _reference.splince(c))
        bench.corrected(error, 4 * (tolerance + tol_leace), label=f"library, {sample.family}")


def _ridge_fit(features: Matrix, y: Matrix) -> Matrix:
    """Ridge of strength 1/100 on all coefficients but the intercept."""
    penalty = eye(features.shape[1]) / 100
    penalty[-1, -1] = Fraction(0)
    return ridge(features, y, penalty)


def _crossed(t: Matrix, ty: Matrix, sy: Matrix) -> Matrix:
    """Ty^T T^+ Sy."""
    return ty.T @ pinv(t) @ sy


@check(
    "8.6",
    Verdict.CONDITIONAL,
    mutants={
        "ridge 0.01": {"fit": _ridge_fit},
        "criterion: Ty^T T^+ Ty": {"crossed": lambda t, ty, sy: _crossed(t, ty, ty)},
        "criterion: Ty^T Sy": {"crossed": lambda t, ty, sy: ty.T @ sy},
        "library: LEACE of another concept": {
            "fitted": lambda s: _library.repaired(
                Sample(s.family, s.x, s.y, s.z, s.y_labels, s.z_labels)
            )
        },
    },
)
def refitted_heads(
    bench: Bench,
    *,
    fit: Fit = least_squares,
    crossed: Repair = _crossed,
    fitted: Fitted = _library.repaired,
) -> None:
    """Exact, behind LEACE and SAL. Library: the kernel of its B P against that of P, relative to
    the size of Sz: 8 d eps |B P|^2 for each of the two maps, and 4 for q of these families."""
    for s in bench.samples(8, 2, ("full rank", "multi-output")):
        c = s.covariances
        test, y = integers(bench.rng, 3, c.d, 9), s.y + integers(bench.rng, *s.y.shape)
        for p in (_reference.leace(c), _reference.sal(c)):
            t, ty = p @ c.s @ p.T, p @ c.y
            plain = predictions(p, s, test, y, intercept=True, offset=True, fit=least_squares)
            # What is orthogonal to Ty in the metric T^+ cannot be reached by an invertible map.
            away = t @ null_basis(ty.T)
            for sy in (c.y, away[:, :1] @ integers(bench.rng, 1, ty.shape[1])):
                b = _reference.restored(t, ty, sy)
                regular = rank(crossed(t, ty, sy)) == rank(ty)
                bench.corrected(int((rank(b @ p) == rank(p)) != regular), label="invertible iff")
                got = predictions(b @ p, s, test, y, intercept=True, offset=True, fit=fit)
                if rank(b @ p) == rank(p):
                    bench.printed(got - plain)
                elif not is_zero(got - plain):
                    bench.printed(1, lacking="Ty^T T^+ Sy of full rank")
    for s in bench.samples(6, 2, ("full rank", "one-hot")):
        c = s.covariances
        p = to_float(fitted(s))
        size, unit = np.linalg.norm(p, 2) ** 2, np.finfo(np.float64).eps
        residual = np.linalg.norm(p @ to_float(c.sz)) / np.linalg.norm(to_float(c.sz))
        bench.corrected(residual, 64 * c.d * unit * size, label=f"library, {s.family}")
