"""What keeping the task costs beside LEACE, and when it costs nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction

import numpy as np

from proofs_check import _library, _reference
from proofs_check._check import Bench, Verdict, check
from proofs_check._families import Sample, continuous, integers, ordinary, problem, weight
from proofs_check._linalg import (
    Matrix,
    Number,
    diagonal,
    equal,
    eye,
    inverse,
    is_zero,
    null_basis,
    rational,
    to_float,
    trace,
    zeros,
)
from proofs_check._reference import Covariances
from proofs_check.theorem1 import Fitted, tolerances, whitened_error


def _residual_gram(c: Covariances) -> Matrix:
    """G = C_zz - C_zy C_yy^+ C_yz."""
    return c.gram(c.z, c.z) - c.gram(c.z, c.y) @ inverse(c.gram(c.y, c.y)) @ c.gram(c.y, c.z)


def _minimum(c: Covariances, m: Matrix) -> Number:
    """tr(M Sz G^+ Sz^T)."""
    return trace(m @ c.z @ inverse(_residual_gram(c)) @ c.z.T)


def _surplus(c: Covariances, m: Matrix) -> Number:
    """tr(M X H^+ X^T), X the task covariance that LEACE destroys."""
    x = _reference.lost(c)
    return trace(m @ x @ inverse(_reference.unexplained(c)) @ x.T)


def _inflation(rho: Number) -> Number:
    """Distortion of SPLINCE over that of LEACE for scalar z and y."""
    return 1 / (1 - rho)


def _reported(sample: Sample) -> tuple[float, float, float]:
    """Amplification, and distortion as a share of tr S with and without the task."""
    report = _library.report(sample)
    if report.distortion_leace is None:
        raise ValueError("the report gives no distortion of LEACE")
    return report.amplification, report.distortion, report.distortion_leace


@check(
    "1.7",
    "The minimum distortion, and its excess over LEACE",
    source="derived here (the paper gives no value)",
    convention="x -> Px, centred x",
    expected=Verdict.HOLDS,
    truth=(
        "D_SPLINCE = tr(M Sz G^+ Sz^T) and D_SPLINCE - D_LEACE = tr(M X H^+ X^T), with X = E_L Sy "
        "the task covariance LEACE destroys and H = C_yy - C_yz C_zz^+ C_zy. Measured by "
        "M = S^+ it is sum_i 1 / sin^2(theta_i) against rank Sz, theta_i the angles between the "
        "whitened spaces. Scalar z and y: D_SPLINCE = D_LEACE / (1 - rho), rho = cos^2(theta)."
    ),
    meaning=(
        "One figure, computable from moments alone, tells the price beforehand: at rho = 0.5 twice "
        "the distortion of LEACE, at rho = 0.99 a hundred times. rho compares the best linear "
        "predictions of z and y, not z and y themselves."
    ),
    mutants={
        "C_zz for G": {"minimum": lambda c, m: trace(m @ c.z @ inverse(c.gram(c.z, c.z)) @ c.z.T)},
        "C_yy for H": {
            "surplus": lambda c, m: trace(
                m @ _reference.lost(c) @ inverse(c.gram(c.y, c.y)) @ _reference.lost(c).T
            )
        },
        "Sy for X": {
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
    """Exact. Library: |M^{1/2} E S^{1/2}|_F moves by at most |M^{1/2} S^{1/2}|_2 times the whitened
    error: by the tolerance itself at M = S^+, by |S|_2^{1/2} times it at M = I, which is what the
    report divides by tr S. The reported 1 / s, the norm of the whitened projector, moves by the
    tolerance."""
    for i in bench.repeats(60, 12):
        d = 4 + i % 2
        c = problem(bench.rng, d, d - i % 2, 1 + i % 2, 1 + (i // 2) % 2)
        w = weight(bench.rng, d, d - i % 3)
        for m in (w, c.s_pinv):
            value = _reference.distortion(c, _reference.splince_drop(c) + eye(d) - c.support, m)
            bench.printed(value - minimum(c, m))
            least = _reference.distortion(c, _reference.leace(c), m)
            bench.corrected(value - least - surplus(c, m), label="excess over LEACE")
            if c.ranks[1:] == (1, 1):
                rho = _reference.squared_cosine(c)
                bench.corrected(value - least * inflation(rho), label="scalar z and y")
    for sample in bench.samples(6, 2):
        c, (tolerance, *_) = sample.covariances, tolerances(sample)
        size = float(np.sqrt(float(_reference.distortion(c, fitted(sample), c.s_pinv))))
        exact = float(np.sqrt(float(minimum(c, c.s_pinv))))
        bench.corrected(size - exact, tolerance, label=f"library, {sample.family}")
        amplification, *shares = reported(sample)
        if c.ranks[1:] == (1, 1):
            exact = float(inflation(_reference.squared_cosine(c))) ** 0.5
            bench.corrected(amplification - exact, tolerance, label="reported amplification")
        total, top = (float(v) for v in (trace(c.s), np.linalg.norm(to_float(c.s), 2)))
        for share, p in zip(shares, (_reference.splince(c), _reference.leace(c)), strict=True):
            exact = float(_reference.distortion(c, p, eye(c.d))) ** 0.5
            moved = np.sqrt(share * total) - exact
            bench.corrected(moved, tolerance * np.sqrt(top), label="reported distortion")


def _orthogonal_after_whitening(bench: Bench, d: int) -> Sample:
    """Data with a^T S b = 0 for z = X a and y = X b, all integers: then C_zy = 0 exactly."""
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
            return continuous(x, z, y, "orthogonal after whitening")


def _orthogonal_before_whitening(bench: Bench, d: int) -> Covariances:
    """Problem with Sz^T Sy = 0 but C_zy != 0."""
    while True:
        c = problem(bench.rng, d, d)
        sy = null_basis(c.sz.T) @ integers(bench.rng, d - 1, 1)
        out = replace(c, sy=sy)
        if not is_zero(sy) and ordinary(out):
            return out


def _whitened_orthogonal(c: Covariances) -> bool:
    """True iff the whitened spaces are orthogonal."""
    return is_zero(c.gram(c.z, c.y))


@check(
    "1.8",
    "SPLINCE equals LEACE only if the spaces are orthogonal after whitening",
    source="section 3.1, last paragraph",
    convention="x -> Px, on the support of x",
    expected=Verdict.HOLDS,
    truth=(
        "True, and 'if' as well: equal on the support iff C_zy = Sz^T S^+ Sy = 0. Precisely, "
        "P_SPLINCE = P_LEACE + X H^+ K^T with K = S^+ Sy - S^+ Sz C_zz^+ C_zy: a repair that acts "
        "through what of the predicted task the concept does not predict. Orthogonality before "
        "whitening decides nothing, as the paper says; it makes SAL keep the task. Where a linear "
        "model interpolates the fitting rows (n <= d), C_zy is the plain label covariance "
        "Cov(z, y): with balanced labels SPLINCE is LEACE."
    ),
    meaning="Compute rho first. At 0 the two erasers are one and nothing is left to choose.",
    mutants={
        "criterion: orthogonal before whitening": {
            "orthogonal": lambda c: is_zero(c.z.T @ c.y),
        },
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
    """Exact. Library: on data with C_zy = 0 exactly, SPLINCE - LEACE within both tolerances."""
    for i in bench.repeats(40, 10):
        d = 4 + i % 2
        general = problem(bench.rng, d, d - i % 2, 1 + i % 2, 1 + (i // 2) % 2)
        before = _orthogonal_before_whitening(bench, d)
        after = _orthogonal_after_whitening(bench, d).covariances
        for c in (general, before, after):
            p, least = _reference.splince(c), _reference.leace(c)
            bench.printed(int(is_zero((p - least) @ c.s) != orthogonal(c)))
            bench.corrected((p - least - repair(c)) @ c.s, label="repair")
        kept = _reference.sal(before) @ before.sy - before.sy
        bench.corrected(kept, label="SAL keeps a task that is orthogonal to the concept")
    for sample in bench.samples(20, 4, ("n <= d",)):
        c = sample.covariances
        if c.ranks[0] == len(sample.x) - 1:
            zc, yc = (v - v.sum(axis=0, keepdims=True) / len(v) for v in (sample.z, sample.y))
            bench.corrected(
                c.gram(c.sz, c.sy) - zc.T @ yc / len(zc), label="interpolation: C_zy = Cov(z, y)"
            )
    for i in bench.repeats(12, 3):
        sample = _orthogonal_after_whitening(bench, 4 + i % 3)
        tolerance = sum(tolerances(sample)[:2])
        gap = whitened_error(sample.covariances, fitted(sample), _library.leace(sample))
        bench.corrected(gap, tolerance, label="library, equality with LEACE")
    c = Covariances(
        rational([[2, 1], [1, 2]]), rational([[1], [0]]), rational([[0], [1]]), zeros(2, 1)
    )
    p, least = _reference.splince(c), _reference.leace(c)
    bench.corrected(int(equal(p, least)), label="the two-dimensional example")
    bench.example(
        f"S = [[2, 1], [1, 2]], Sz = (1, 0), Sy = (0, 1) are orthogonal before whitening, yet "
        f"LEACE sends Sy to ({', '.join(map(str, (least @ c.sy).flat))})."
    )


def _ratio(c: Covariances, p: Matrix) -> Number:
    """|P Sy|^2 / |Sy|^2."""
    kept = p @ c.sy
    return trace(kept.T @ kept) / trace(c.sy.T @ c.sy)


@check(
    "6.4",
    "The covariance ratio |P Sy|^2 / |Sy|^2 is 1 for SPLINCE",
    source="appendix 'Removal of covariance', figure removal_cov",
    convention="x -> Px",
    expected=Verdict.HOLDS,
    truth=(
        "An identity, for SPLINCE and for any other P with P Sy = Sy, including the rank-one map "
        "that deletes everything but Sy. For SAL the ratio is 1 - cos^2 of the angle between the "
        "raw covariance vectors (scalar z and y); for LEACE it is |Sy - Sz C_zz^+ C_zy|^2 / "
        "|Sy|^2, which can exceed 1."
    ),
    meaning=(
        "The figure shows what LEACE and SAL lose; the flat line of SPLINCE is its definition, "
        "not a measurement."
    ),
    mutants={
        "LEACE for SPLINCE": {"closed": _reference.leace},
        "transpose of P": {"closed": lambda c: _reference.splince(c).T},
        "LEACE ratio from whitened angle": {
            "leace_ratio": lambda c: 1 - _reference.squared_cosine(c)
        },
        "library returns LEACE": {"fitted": _library.leace},
    },
)
def covariance_ratio(
    bench: Bench,
    *,
    closed: Callable[[Covariances], Matrix] = _reference.splince,
    leace_ratio: Callable[[Covariances], Number] | None = None,
    fitted: Fitted = _library.splince,
) -> None:
    """Exact. Library: |sqrt(ratio) - 1| <= |D Sy| / |Sy| with D the error of P, and
    |D Sy| <= |S^{1/2}|_2 |S^{-1/2} D S^{1/2}| |S^{-1/2} Sy| <= sqrt(cond S) |Sy| x tolerance."""

    def direct(c: Covariances) -> Number:
        kept = c.sy - c.z @ inverse(c.gram(c.z, c.z)) @ c.gram(c.z, c.sy)
        return trace(kept.T @ kept) / trace(c.sy.T @ c.sy)

    formula = leace_ratio or direct
    above = Fraction(0)
    for i in bench.repeats(60, 12):
        c = problem(bench.rng, 4, 4 - i % 2)
        bench.printed(_ratio(c, closed(c)) - 1)
        only = c.sy @ inverse(c.sy.T @ c.sy) @ c.sy.T
        bench.corrected(_ratio(c, only) - 1, label="the rank-one map has ratio 1 too")
        bench.corrected(_ratio(c, _reference.leace(c)) - formula(c), label="ratio of LEACE")
        raw = trace(c.sz.T @ c.sy) ** 2 / (trace(c.sz.T @ c.sz) * trace(c.sy.T @ c.sy))
        bench.corrected(_ratio(c, _reference.sal(c)) - (1 - raw), label="ratio of SAL")
        above = max(above, _ratio(c, _reference.leace(c)))
    c = Covariances(diagonal([25, 1]), rational([[5], [1]]), rational([[0], [1]]), zeros(2, 1))
    bench.corrected(int(_ratio(c, _reference.leace(c)) <= 1), label="LEACE above 1")
    bench.example(
        f"S = diag(25, 1), Sz = (5, 1), Sy = (0, 1): the ratio of LEACE is "
        f"{_ratio(c, _reference.leace(c))}."
    )
    for sample in bench.samples(4, 1):
        p, (tolerance, _, _, cond) = fitted(sample), tolerances(sample)
        ratio = np.sqrt(float(_ratio(sample.covariances, p))) - 1
        bench.corrected(ratio, tolerance * np.sqrt(cond), label=f"library, {sample.family}")
