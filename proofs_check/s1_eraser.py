"""Section 1: Theorem 1, its closed form, optimality, assumption and distortion."""

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
    continuous_sample,
    integers,
    is_nondegenerate,
    problem,
    problem_with_root,
    weight_matrix,
)
from proofs_check._library import Fitted
from proofs_check._linalg import (
    Matrix,
    Number,
    diagonal,
    equal,
    eye,
    hstack,
    inverse,
    is_zero,
    kron,
    null_basis,
    rank,
    rational,
    to_float,
    trace,
    zeros,
)
from proofs_check._reference import Covariances, Eraser, null_space_minimum
from proofs_check._rounding import tolerances, whitened_error


def _unwhitened(c: Covariances) -> Matrix:
    """Return SPLINCE with I in place of S; it meets both constraints, at a higher cost."""
    return _reference.splince(replace(c, s=eye(c.d)))


def _no_gain(c: Covariances) -> Matrix:
    """Return SPLINCE with C_zz in place of G."""
    gain = inverse(c.gram(c.y, c.y)) @ c.gram(c.y, c.z)
    r = c.s_pinv @ (c.z - c.y @ gain)
    return eye(c.d) - c.z @ inverse(c.gram(c.z, c.z)) @ r.T


def _plus_in_r(c: Covariances) -> Matrix:
    """Return SPLINCE with a plus sign in R."""
    gain = inverse(c.gram(c.y, c.y)) @ c.gram(c.y, c.z)
    g = c.gram(c.z, c.z) - c.gram(c.z, c.y) @ gain
    return eye(c.d) - c.z @ inverse(g) @ (c.s_pinv @ (c.z + c.y @ gain)).T


def _transposed(c: Covariances) -> Matrix:
    return _reference.splince(c).T


def _rounded_to_single(sample: Sample) -> Matrix:
    """Return SPLINCE of the library, rounded to float32."""
    single = to_float(_library.splince(sample)).astype(np.float32)
    return rational(single.astype(np.float64))


def library_unwhitened(sample: Sample) -> Matrix:
    """Return SPLINCE without whitening, rounded to float64."""
    return rational(to_float(_unwhitened(sample.covariances)))


@check(
    "1.1",
    Verdict.HOLDS,
    mutants={
        "transpose of P": {"closed": _transposed},
        "I for S": {"closed": _unwhitened},
        "C_zz for G": {"closed": _no_gain},
        "plus for minus in R": {"closed": _plus_in_r},
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
    """Compare the printed formula with the closed form, and the library with the exact eraser.

    The formulas are compared exactly, for S with a rational square root. The library's error is
    compared with the whitened tolerance of ``_rounding``. The whitened norm is 0 off the support of
    x; for singular S the Euclidean norm is therefore compared, too, with a tolerance larger by the
    factor sqrt(cond S).
    """
    for _ in bench.repeats(60, 12):
        m = int(bench.rng.integers(3, 6))
        d = m + int(bench.rng.integers(0, 3))
        k_y = int(bench.rng.integers(1, m - 1))
        root, c = problem_with_root(bench.rng, d, m, int(bench.rng.integers(1, m - k_y + 1)), k_y)
        p = _reference.printed_splince(root, c)
        bench.add_printed(p @ c.sz)
        bench.add_printed(p @ c.sy - c.sy)
        bench.add_corrected(p @ p - p, label="idempotency")
        bench.add_corrected(p - closed(c) @ c.support, label="closed form against printed form")
        error_leace = _reference.printed_leace(root, c) - _reference.leace_drop(c)
        bench.add_corrected(error_leace, label="LEACE, closed form against printed form")
    for sample in bench.samples(12, 3):
        c, (tolerance, tol_leace, tol_sal, cond) = sample.covariances, tolerances(sample)
        p, exact = fitted(sample), _reference.splince(c)
        error_leace = whitened_error(c, fitted_leace(sample), _reference.leace(c))
        bench.add_corrected(error_leace, tol_leace, label=f"library LEACE, {sample.family}")
        error_sal = np.linalg.norm(to_float(fitted_sal(sample) - _reference.sal(c)))
        bench.add_corrected(error_sal, tol_sal, label=f"library SAL, {sample.family}")
        bench.add_corrected(
            whitened_error(c, p, exact), tolerance, label=f"library, {sample.family}"
        )
        if rank(c.s) < c.d:
            size = np.linalg.norm(to_float(p - exact))
            bench.add_corrected(size, tolerance * np.sqrt(cond), label="library off the support")


def _feasible_direction(bench: Bench, c: Covariances) -> Matrix:
    """Draw N with N [Sz, Sy] = 0."""
    basis = null_basis(hstack(c.z, c.y).T)
    return integers(bench.rng, c.d, basis.shape[1]) @ basis.T


@check(
    "1.2",
    Verdict.HOLDS,
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
    """Check that SPLINCE has the least distortion among feasible erasers.

    Exact: compare the distortion with an independent quadratic programme and with random feasible
    erasers; check the certificate E S B = 0, where the columns of B are a basis of
    colsp[Sz, Sy]^perp.

    Library: let D be the error of E, and B orthonormal. The certificate is then D S B, of norm at
    most |D S^{1/2}| |S^{1/2}|. In the metric S^+ this is at most the whitened tolerance times
    |S^{1/2}|_2.
    """
    for i in bench.repeats(60, 12):
        m = 3 + i % 2
        c = problem(bench.rng, m + (i // 2) % 2, m, 1, 1 + i % 2)
        w = weight_matrix(bench.rng, c.d, 1 + i % c.d)
        p = closed(c)
        value = _reference.distortion(c, p, w)
        bench.add_printed(hstack(p @ c.sz, p @ c.sy - c.sy))
        bench.add_printed(value - null_space_minimum(c, w))
        n = _feasible_direction(bench, c)
        bench.add_corrected(
            _reference.distortion(c, p + n, w) - value - gap(c, w, n), label="cost of a competitor"
        )
        basis = null_basis(hstack(c.z, c.y).T)
        bench.add_corrected((eye(c.d) - p) @ c.s @ basis, label="certificate")
    for sample in bench.samples(6, 2):
        c, (tolerance, *_) = sample.covariances, tolerances(sample)
        basis = null_basis(hstack(c.z, c.y).T)
        orthonormal = np.linalg.qr(to_float(basis))[0] if basis.size else np.zeros((c.d, 0))
        rows = (
            (eye(c.d) - fitted(sample)) @ c.s @ rational(orthonormal)
            if orthonormal.size
            else zeros(c.d, 1)
        )
        size = float(np.sqrt(float(trace(c.s_pinv @ rows @ rows.T))))
        scale = float(np.sqrt(np.linalg.norm(to_float(c.s), 2)))
        bench.add_corrected(size, tolerance * scale, label=f"library certificate, {sample.family}")


def _solvable(c: Covariances) -> bool:
    """Return whether E [Sz, Sy] = [Sz, 0] has a solution E."""
    left = hstack(c.sz, c.sy)
    right = hstack(c.sz, zeros(*c.sy.shape))
    return rank(np.vstack([left, right])) == rank(left)


def _overlapping(bench: Bench, d: int) -> Sample:
    """Draw data with a task column that is a linear combination of concept columns."""
    rng = bench.rng
    x = rng.integers(-3, 4, (3 * d, d))
    z = x @ rng.integers(-2, 3, (d, 2))
    z[:, 0] += 1 + x[:, 0]
    y = z @ np.array([[2], [-1]]) if rng.random() < 0.5 else z[:, :1] - 3 * z[:, 1:]
    extra = x @ rng.integers(-2, 3, (d, 1))
    y = np.hstack([y, extra]) if rng.random() < 0.5 else y
    return continuous_sample(x, z, y, "overlapping")


def _raises(sample: Sample) -> bool:
    """Return whether the library raises InfeasibleError."""
    try:
        _library.fit("splince", sample)
    except sf.exceptions.InfeasibleError:
        return True
    return False


@check(
    "1.3",
    Verdict.HOLDS,
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
    """Check that SPLINCE exists if and only if colsp(Sz) and colsp(Sy) intersect in 0 only.

    Exact: compare the solvability of the linear system for E with the rank criterion, on feasible
    and infeasible problems. Library: it must raise an error if and only if the problem is
    infeasible.
    """
    for i in bench.repeats(60, 12):
        d = 4 + i % 2
        c = problem(bench.rng, d, d - i % 2, 1 + i % 2, 1)
        bench.add_printed(int(not (criterion(c) and _solvable(c))))
        overlapping = replace(c, sy=hstack(c.sy, c.sz @ integers(bench.rng, c.sz.shape[1], 1)))
        independent = rank(overlapping.sy) > rank(c.sy)
        bench.add_printed(int(_solvable(overlapping) != criterion(overlapping)))
        bench.add_corrected(
            int(independent and _solvable(overlapping)), label="infeasible yet solvable"
        )
        for empty in (replace(c, sz=zeros(d, 1)), replace(c, sy=zeros(d, 1))):
            p = _reference.splince(empty)
            bench.add_corrected(p @ empty.sz, label="zero covariance, kernel")
            bench.add_corrected(p @ empty.sy - empty.sy, label="zero covariance, range")
        bench.add_corrected(
            _reference.splince(replace(c, sy=zeros(d, 1))) - _reference.leace(c),
            label="no task gives LEACE",
        )
    for sample in bench.samples(4, 1):
        bench.add_corrected(int(refuses(sample)), label=f"refused, {sample.family}")
    for i in bench.repeats(20, 4):
        sample = _overlapping(bench, 4 + i % 3)
        bench.add_corrected(int(not refuses(sample)), label="infeasible, yet answered")


def _dimension(d: int, m: int, r: int, weight_rank: int) -> int:
    """Return the dimension of the set of minimisers E.

    m is rank S, r is rank Sz + rank Sy, and ``weight_rank`` is the rank of the weight matrix M.
    """
    return d * (d - r) - weight_rank * (m - r)


@check(
    "1.4",
    Verdict.CONDITIONAL,
    paper=True,
    mutants={
        "m instead of m - r": {"dimension": lambda d, m, r, q: d * (d - r) - q * m},
        "M taken as definite": {"dimension": lambda d, m, r, q: d * (d - r) - d * (m - r)},
        "S taken as regular": {"dimension": lambda d, m, r, q: d * (d - r) - q * (d - r)},
    },
)
def uniqueness(
    bench: Bench, *, dimension: Callable[[int, int, int, int], int] = _dimension
) -> None:
    """Compare the formula for the dimension with the nullity of the distortion's quadratic form.

    On feasible directions the form is (Z^T S Z) kron M, where Z is a basis of colsp[Sz, Sy]^perp.
    The problems have 3 to 6 features, of which up to two are redundant, r = 2, 3 and 4, and M of
    rank d, d - 1 and d - 2.
    """
    sizes = [
        (d, d - gap, k_z, k_y)
        for d in (3, 4, 5, 6)
        for gap in (0, 1, 2)
        for k_z, k_y in ((1, 1), (2, 1), (1, 2), (2, 2))
        if k_z + k_y <= d - gap
    ]
    for i, (d, m, k_z, k_y) in enumerate(sizes[:: 3 if bench.quick else 1] * 2):
        c = problem(bench.rng, d, m, k_z, k_y)
        r = k_z + k_y
        w = weight_matrix(bench.rng, d, d - i % 3 if i % 2 else d)
        basis = null_basis(hstack(c.z, c.y).T)
        nullity = 0
        if basis.size:
            free = kron(basis.T @ c.s @ basis, w)
            nullity = free.shape[1] - rank(free)
        bench.add_corrected(nullity - dimension(d, m, r, rank(w)), label="dimension")
        violates = "S of full rank" if m < d else "M definite" if rank(w) < d and m > r else None
        bench.add_printed(nullity, violates=violates)
    c = Covariances(diagonal([1, 1, 0]), rational([[1], [0], [0]]), rational([[1], [1], [0]]), c.sz)
    keep, drop = _reference.splince(c), _reference.splince_drop(c)
    for p in (keep, drop):
        bench.add_corrected(hstack(p @ c.sz, p @ c.sy - c.sy), label="both are feasible")
        bench.add_corrected(_reference.distortion(c, p, eye(3)) - 2, label="both reach the minimum")


def _kernel_is_concept(c: Covariances, p: Matrix) -> bool:
    """Return whether ker P = colsp(Sz), given P Sz = 0."""
    return c.d - rank(p) == c.ranks[1]


@check(
    "1.5",
    Verdict.CONDITIONAL,
    mutants={
        "zero off the support for identity": {"keep": _reference.splince_drop},
        "identity off the support for zero": {"drop": _reference.splince},
        "library: keep for drop": {"fitted_drop": _library.splince},
    },
)
def kernel(
    bench: Bench,
    *,
    keep: Eraser = _reference.splince,
    drop: Eraser = _reference.splince_drop,
    fitted_drop: Fitted = lambda s: _library.splince(s, null_space="drop"),
) -> None:
    """Check by exact ranks when ker P = colsp(Sz); off the support of x, P is zero or the identity.

    The library with ``null_space="drop"`` is compared in the Euclidean norm. The tolerance is that
    of 1.1 times sqrt(cond S).
    """
    for i in bench.repeats(40, 10):
        d = 4 + i % 2
        c = problem(bench.rng, d, d - i % 3, 1, 1)
        violates = "S of full rank" if i % 3 else None
        bench.add_printed(int(not _kernel_is_concept(c, drop(c))), violates=violates)
        bench.add_corrected(int(not _kernel_is_concept(c, keep(c))), label="kernel of I - E")
        value = _reference.distortion(c, keep(c), eye(d))
        bench.add_corrected(
            value - _reference.distortion(c, drop(c), eye(d)), label="equal distortion"
        )
    for sample in bench.samples(6, 2, ("full rank", "rank-deficient", "n <= d")):
        c, (tolerance, _, _, cond) = sample.covariances, tolerances(sample)
        gap = np.linalg.norm(to_float(fitted_drop(sample) - _reference.splince_drop(c)))
        bench.add_corrected(gap, tolerance * np.sqrt(cond), label="library, null_space='drop'")


def _constant(p: Matrix, mean: Matrix) -> Matrix:
    """Return b = E x - P E x."""
    return mean - p @ mean


def _library_map(sample: Sample, x: Matrix) -> Matrix:
    """Apply SPLINCE of the library to rows."""
    return rational(_library.fit("splince", sample)(to_float(x)))


@check(
    "1.6",
    Verdict.HOLDS,
    mutants={
        "no constant": {"constant": lambda p, mean: zeros(len(p), 1)},
        "opposite sign": {"constant": lambda p, mean: p @ mean - mean},
        "transpose of P": {"constant": lambda p, mean: mean - p.T @ mean},
        "library without the mean": {
            "applied": lambda s, x: rational(to_float(x @ _library.splince(s).T))
        },
    },
)
def constant_term(
    bench: Bench,
    *,
    constant: Callable[[Matrix, Matrix], Matrix] = _constant,
    applied: Callable[[Sample, Matrix], Matrix] = _library_map,
) -> None:
    """Check that b = E x - P E x is the best constant term.

    Exact: E|Px + b - x|_M^2 = D(P) + |(P - I) mu + b|_M^2 has the gradient 2 M ((P - I) mu + b)
    with respect to b.

    Library: r(x) - r_exact(x) = D (x - mu), where D is the error of P. Over the fitted rows, its
    root mean square in the metric S^+ is the whitened norm of D S^{1/2}, bounded as in 1.1. The
    rounding error of x - mu is much smaller than this bound.
    """
    for i in bench.repeats(40, 10):
        c = problem(bench.rng, 4, 4 - i % 2)
        p, w = _reference.splince(c), weight_matrix(bench.rng, 4, 4 - i % 3)
        b = constant(p, c.mean)
        bench.add_printed(w @ ((p - eye(4)) @ c.mean + b))
        step = integers(bench.rng, 4, 1)
        second_moment = c.s + c.mean @ c.mean.T

        def cost(
            b: Matrix, e: Matrix, w: Matrix = w, c: Covariances = c, raw: Matrix = second_moment
        ) -> Number:
            """Return E|(P - I) x + b|_M^2 from raw second moments; ``e`` is I - P."""
            return trace(w @ (e @ raw @ e.T - 2 * e @ c.mean @ b.T + b @ b.T))

        e = eye(4) - p
        bench.add_corrected(
            cost(b + step, e) - cost(b, e) - (step.T @ w @ step)[0, 0], label="cost of another b"
        )
    for sample in bench.samples(6, 2):
        c, (tolerance, *_) = sample.covariances, tolerances(sample)
        p = _reference.splince(c)
        exact = sample.x @ p.T + _constant(p, c.mean).T
        gap = applied(sample, sample.x) - exact
        variance = float(trace(c.s_pinv @ gap.T @ gap)) / len(gap)
        bench.add_corrected(np.sqrt(variance), tolerance, label=f"library, {sample.family}")


def _residual_gram(c: Covariances) -> Matrix:
    """Return G = C_zz - C_zy C_yy^+ C_yz."""
    return c.gram(c.z, c.z) - c.gram(c.z, c.y) @ inverse(c.gram(c.y, c.y)) @ c.gram(c.y, c.z)


def _minimum(c: Covariances, m: Matrix) -> Number:
    """Return the distortion of SPLINCE, tr(M Sz G^+ Sz^T)."""
    return trace(m @ c.z @ inverse(_residual_gram(c)) @ c.z.T)


def _surplus(c: Covariances, m: Matrix) -> Number:
    """Return the excess distortion over LEACE, tr(M T H^+ T^T) with T = E_L Sy."""
    x = _reference.lost(c)
    return trace(m @ x @ inverse(_reference.unexplained(c)) @ x.T)


def _inflation(rho: Number) -> Number:
    """Return the ratio of the distortions of SPLINCE and LEACE, for scalar z and y."""
    return 1 / (1 - rho)


def _reported(sample: Sample) -> tuple[float, float, float]:
    """Return the reported amplification, and the reported distortions of SPLINCE and LEACE.

    The distortions are fractions of tr S.
    """
    report = _library.report(sample)
    if report.distortion is None or report.distortion_leace is None:
        raise ValueError("the report lacks a distortion")
    return report.amplification, report.distortion, report.distortion_leace


@check(
    "1.7",
    Verdict.HOLDS,
    mutants={
        "C_zz for G": {"minimum": lambda c, m: trace(m @ c.z @ inverse(c.gram(c.z, c.z)) @ c.z.T)},
        "C_yy for H": {
            "surplus": lambda c, m: trace(
                m @ _reference.lost(c) @ inverse(c.gram(c.y, c.y)) @ _reference.lost(c).T
            )
        },
        "Sy for T": {
            "surplus": lambda c, m: trace(m @ c.y @ inverse(_reference.unexplained(c)) @ c.y.T)
        },
        "1 + rho for 1 / (1 - rho)": {"inflation": lambda rho: 1 + rho},
        "the power of 1 / (1 - rho) doubled": {"inflation": lambda rho: 1 / (1 - rho) ** 2},
        "library returns LEACE": {"fitted": _library.leace},
        "library reports 1 / sin^2 for 1 / sin": {
            "reported": lambda s: (_reported(s)[0] ** 2, *_reported(s)[1:])
        },
        "library reports its own distortion for LEACE's": {
            "reported": lambda s: (*_reported(s)[:2], _reported(s)[1])
        },
    },
)
def minimum_distortion(
    bench: Bench,
    *,
    minimum: Callable[[Covariances, Matrix], Number] = _minimum,
    surplus: Callable[[Covariances, Matrix], Number] = _surplus,
    inflation: Callable[[Number], Number] = _inflation,
    fitted: Fitted = _library.splince,
    reported: Callable[[Sample], tuple[float, float, float]] = _reported,
) -> None:
    """Compare formulas of the distortion with its definition, and with the library's report.

    The formulas are compared exactly. Library: the error of |M^{1/2} E S^{1/2}|_F is at most
    |M^{1/2} S^{1/2}|_2 times the whitened tolerance. The factor is 1 for M = S^+, and |S|_2^{1/2}
    for M = I. The report gives the distortion for M = I, divided by tr S. The reported
    amplification 1 / s is the norm of the whitened projector; its error is at most the whitened
    tolerance.
    """
    for i in bench.repeats(60, 12):
        d = 4 + i % 2
        c = problem(bench.rng, d, d - i % 2, 1 + i % 2, 1 + (i // 2) % 2)
        w = weight_matrix(bench.rng, d, d - i % 3)
        for m in (w, c.s_pinv):
            value = _reference.distortion(c, _reference.splince_drop(c) + eye(d) - c.support, m)
            bench.add_printed(value - minimum(c, m))
            cost_leace = _reference.distortion(c, _reference.leace(c), m)
            bench.add_corrected(value - cost_leace - surplus(c, m), label="excess over LEACE")
            if c.ranks[1:] == (1, 1):
                rho = _reference.squared_cosine(c)
                bench.add_corrected(value - cost_leace * inflation(rho), label="scalar z and y")
    for sample in bench.samples(6, 2):
        c, (tolerance, *_) = sample.covariances, tolerances(sample)
        size = float(np.sqrt(float(_reference.distortion(c, fitted(sample), c.s_pinv))))
        exact = float(np.sqrt(float(minimum(c, c.s_pinv))))
        bench.add_corrected(size - exact, tolerance, label=f"library, {sample.family}")
        amplification, *fractions = reported(sample)
        if c.ranks[1:] == (1, 1):
            exact = float(inflation(_reference.squared_cosine(c))) ** 0.5
            bench.add_corrected(amplification - exact, tolerance, label="reported amplification")
        total, top = (float(v) for v in (trace(c.s), np.linalg.norm(to_float(c.s), 2)))
        for fraction, p in zip(
            fractions, (_reference.splince(c), _reference.leace(c)), strict=True
        ):
            exact = float(_reference.distortion(c, p, eye(c.d))) ** 0.5
            error = np.sqrt(fraction * total) - exact
            bench.add_corrected(error, tolerance * np.sqrt(top), label="reported distortion")


def _orthogonal_after_whitening(bench: Bench, d: int) -> Sample:
    """Draw integer data z = X a, y = X b with a^T S b = 0, so that C_zy = 0 exactly."""
    while True:
        x = bench.rng.integers(-3, 4, (2 * d, d))
        exact = rational(x)
        centred = exact - exact.sum(axis=0, keepdims=True) / len(x)
        s = centred.T @ centred
        a = integers(bench.rng, d, 1)
        if is_zero(s @ a):
            continue
        basis = null_basis((s @ a).T)
        b = basis @ integers(bench.rng, basis.shape[1], 1)
        b = b * np.lcm.reduce([value.denominator for value in b.flat])
        if not is_zero(s @ b):
            z, y = (to_float(exact @ v).astype(np.int64) for v in (a, b))
            return continuous_sample(x, z, y, "orthogonal after whitening")


def _orthogonal_before_whitening(bench: Bench, d: int) -> Covariances:
    """Draw a problem with Sz^T Sy = 0 and C_zy != 0."""
    while True:
        c = problem(bench.rng, d, d)
        sy = null_basis(c.sz.T) @ integers(bench.rng, d - 1, 1)
        out = replace(c, sy=sy)
        if not is_zero(sy) and is_nondegenerate(out):
            return out


def _whitened_orthogonal(c: Covariances) -> bool:
    """Return whether the whitened spaces of concept and task are orthogonal."""
    return is_zero(c.gram(c.z, c.y))


@check(
    "1.8",
    Verdict.HOLDS,
    mutants={
        "criterion: orthogonal before whitening": {"orthogonal": lambda c: is_zero(c.z.T @ c.y)},
        "repair without H": {
            "repair": lambda c: (
                _reference.lost(c)
                @ (c.s_pinv @ (c.y - c.z @ inverse(c.gram(c.z, c.z)) @ c.gram(c.z, c.y))).T
            )
        },
        "repair with S^+ Sy for K": {
            "repair": lambda c: (
                _reference.lost(c) @ inverse(_reference.unexplained(c)) @ (c.s_pinv @ c.y).T
            )
        },
        "library output halved": {"fitted": lambda s: _library.splince(s) / 2},
    },
)
def repair_of_leace(
    bench: Bench,
    *,
    orthogonal: Callable[[Covariances], bool] = _whitened_orthogonal,
    repair: Callable[[Covariances], Matrix] = _reference.repair,
    fitted: Fitted = _library.splince,
) -> None:
    """Compare SPLINCE - LEACE with its formula exactly; it is 0 if and only if C_zy = 0.

    Library: if C_zy = 0, SPLINCE - LEACE must be within the sum of both tolerances.
    """
    for i in bench.repeats(40, 10):
        d = 4 + i % 2
        general = problem(bench.rng, d, d - i % 2, 1 + i % 2, 1 + (i // 2) % 2)
        before = _orthogonal_before_whitening(bench, d)
        after = _orthogonal_after_whitening(bench, d).covariances
        for c in (general, before, after):
            p, p_leace = _reference.splince(c), _reference.leace(c)
            bench.add_printed(int(is_zero((p - p_leace) @ c.s) != orthogonal(c)))
            bench.add_corrected((p - p_leace - repair(c)) @ c.s, label="repair")
        change = _reference.sal(before) @ before.sy - before.sy
        bench.add_corrected(change, label="SAL keeps a task that is orthogonal to the concept")
    for sample in bench.samples(20, 4, ("n <= d",)):
        c = sample.covariances
        if c.ranks[0] == len(sample.x) - 1:
            zc, yc = (v - v.sum(axis=0, keepdims=True) / len(v) for v in (sample.z, sample.y))
            bench.add_corrected(
                c.gram(c.sz, c.sy) - zc.T @ yc / len(zc), label="interpolation: C_zy = Cov(z, y)"
            )
    for i in bench.repeats(12, 3):
        sample = _orthogonal_after_whitening(bench, 4 + i % 3)
        tolerance = sum(tolerances(sample)[:2])
        gap = whitened_error(sample.covariances, fitted(sample), _library.leace(sample))
        bench.add_corrected(gap, tolerance, label="library, equality with LEACE")
    c = Covariances(
        rational([[2, 1], [1, 2]]), rational([[1], [0]]), rational([[0], [1]]), zeros(2, 1)
    )
    p, p_leace = _reference.splince(c), _reference.leace(c)
    bench.add_corrected(int(equal(p, p_leace)), label="the two-dimensional example")
    bench.require_quoted(f"({', '.join(map(str, (p_leace @ c.sy).flat))})")
