"""Other frozen heads than least squares: when SPLINCE wins, and what it preserves for all."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from proofs_check import _library, _reference
from proofs_check._check import Bench, Verdict, check
from proofs_check._families import Sample, integers, problem
from proofs_check._linalg import (
    Matrix,
    Number,
    eye,
    rational,
    trace,
)
from proofs_check._reference import Covariances
from proofs_check.theorem1 import Eraser, tolerances
from proofs_check.theorem3 import EXAMPLE, deployed, head, random_guarded, whitened_problem


def advantage(q: Number, v: Number, h: Number) -> Number:
    """MSE(SPLINCE) - MSE(LEACE) for a frozen head theta, scalar y.

    q = theta^T E_L Sy, v = Cov(theta^T x, y), h = H = (1 - rho) C_yy.
    """
    return q / h * (2 * v - q - 2 * h)


def threshold(rho: Number) -> Number:
    """Shrinkage of the least-squares head below which SPLINCE wins."""
    return 2 * (1 - rho) / (2 - rho)


def _library_report(sample: Sample) -> tuple[float, float, float]:
    """rho, penalty and threshold from the library's report."""
    made = _library.report(sample)
    figures = (made.rho, made.frozen_head_penalty, made.head_shrinkage_threshold)
    if any(value is None for value in figures):
        raise ValueError("the report lacks the figures of the choice rule")
    rho, penalty, edge = (float(value or 0.0) for value in figures)
    return rho, penalty, edge


def mean_square(c: Covariances, p: Matrix, theta: Matrix) -> Number:
    """E(y - theta^T P x)^2 - Var(y) for scalar y, from moments."""
    read = deployed(p, theta)
    return (read.T @ c.s @ read - 2 * read.T @ c.sy)[0, 0]


@check(
    "4.3",
    "SPLINCE is guaranteed to outperform LEACE when the head is frozen and the data whitened",
    source="section 5 (Discussion)",
    convention="deployed, squared error, any frozen head theta, scalar y",
    expected=Verdict.CONDITIONAL,
    truth=(
        "It depends on the head. With q = theta^T E_L Sy, v = Cov(theta^T x, y) and H = "
        "(1 - rho) C_yy, MSE_SPLINCE - MSE_LEACE = (q / H)(2 v - q - 2 H), for every S. For the "
        "least-squares head times g: SPLINCE wins iff g < 2 (1 - rho) / (2 - rho). For a ridge "
        "head on whitened data, g = 1 / (1 + lambda): iff lambda > rho / (2 (1 - rho))."
    ),
    meaning=(
        "SPLINCE pays where the frozen head is weaker than least squares: strongly regularised, "
        "or trained for something else. Measure q and v on data and decide; the library's report "
        "gives rho and the threshold."
    ),
    mutants={
        "no factor 2": {"difference": lambda q, v, h: q / h * (v - q - h)},
        "C_yy for H": {"difference": lambda q, v, h: q / (2 * h) * (2 * v - q - 4 * h)},
        "threshold 1 - rho": {"limit": lambda rho: 1 - rho},
        "threshold 2 (1 - rho)": {"limit": lambda rho: 2 * (1 - rho)},
        "library: threshold 1 - rho": {
            "reported": lambda s: (
                _library_report(s)[0],
                _library_report(s)[1],
                1 - _library_report(s)[0],
            )
        },
        "library: penalty 1 + rho": {
            "reported": lambda s: (
                _library_report(s)[0],
                1 + _library_report(s)[0],
                _library_report(s)[2],
            )
        },
    },
)
def other_heads(
    bench: Bench,
    *,
    difference: Callable[[Number, Number, Number], Number] = advantage,
    limit: Callable[[Number], Number] = threshold,
    reported: Callable[[Sample], tuple[float, float, float]] = _library_report,
) -> None:
    """Exact. Library's report: rho = 1 - s^2 with s = sin(theta) in error by twice the angle
    error, which is below tol s^2 / 2 (see ``_rounding``): |d rho| <= s tol s^2; then 1 / (1 - rho)
    changes relatively by at most s tol, and the threshold by 2 s^3 tol."""
    for i in bench.repeats(60, 12):
        c = whitened_problem(bench, 4) if i % 2 else problem(bench.rng, 4, 4 - i % 3 // 2)
        p, least, beta = _reference.splince(c), _reference.leace(c), head(c)
        rho, h = _reference.squared_cosine(c), _reference.unexplained(c)[0, 0]
        theta = integers(bench.rng, 4, 1)
        gap = mean_square(c, p, theta) - mean_square(c, least, theta)
        q, v = (theta.T @ _reference.lost(c))[0, 0], (theta.T @ c.sy)[0, 0]
        bench.corrected(gap - difference(q, v, h), label="any head")
        edge = limit(rho)
        for g, wins in ((edge * 9 / 10, True), (edge * 11 / 10, False)):
            gap = mean_square(c, p, g * beta) - mean_square(c, least, g * beta)
            bench.corrected(int((gap < 0) != wins), label="shrunk head")
            lacking = None if wins else "head shrunk below 2 (1 - rho) / (2 - rho)"
            bench.printed(int(gap >= 0), lacking=lacking)
        level = mean_square(c, p, edge * beta) - mean_square(c, least, edge * beta)
        bench.corrected(level, label="equal at the threshold")
        penalty = rho / (2 * (1 - rho))
        bench.corrected(edge - 1 / (1 + penalty), label="ridge threshold")
    for sample in bench.samples(8, 2, ("full rank", "rank-deficient", "n <= d", "near-infeasible")):
        c, (tolerance, *_) = sample.covariances, tolerances(sample)
        exact = _reference.squared_cosine(c)
        s = float(np.sqrt(float(1 - exact)))
        rho, penalty, edge = reported(sample)
        bench.corrected(rho - float(exact), s**3 * tolerance + 4e-16, label="reported rho")
        relative = penalty * float(1 - exact) - 1
        bench.corrected(relative, s * tolerance + 4e-16 / s**2, label="reported penalty")
        slack = 2 * s**3 * tolerance + 4e-16
        bench.corrected(edge - float(threshold(exact)), slack, label="reported threshold")
    c = EXAMPLE
    rho = _reference.squared_cosine(c)
    bench.example(
        f"rho = {rho}: SPLINCE wins for g < {threshold(rho)} = {float(threshold(rho)):.4f}, and "
        f"for ridge heads with lambda > {rho / (2 * (1 - rho))} = "
        f"{float(rho / (2 * (1 - rho))):.4f}."
    )


@check(
    "4.4",
    "What SPLINCE does preserve for every frozen head",
    source="derived here from the range constraint",
    convention="deployed, r(x) = Px + b, any head",
    expected=Verdict.HOLDS,
    truth=(
        "For every theta the covariance of the score with y, and for class labels the centroid "
        "E[r(x) | y = k] of every class, so the mean score per class. LEACE changes them by "
        "Sz C_zz^+ C_zy. LEACE, for every theta, minimises the change of the score "
        "E(theta^T(Px - x))^2 among guarded maps (any other adds E(theta^T(Px - P_LEACE x))^2); "
        "that is change, not risk."
    ),
    meaning=(
        "Choose SPLINCE where what follows relies on class means or on the covariance with the "
        "task: nearest-centroid rules, steering vectors, mean log-odds per group."
    ),
    mutants={
        "LEACE for SPLINCE": {"closed": _reference.leace},
        "transpose": {"closed": lambda c: _reference.splince(c).T},
        "SPLINCE for LEACE": {"least": _reference.splince},
        "library: LEACE for SPLINCE": {"applied": lambda s: _library.fit("leace", s)(s.features)},
    },
)
def preserved(
    bench: Bench,
    *,
    closed: Eraser = _reference.splince,
    least: Eraser = _reference.leace,
    applied: Callable[[Sample], NDArray[np.float64]] = lambda s: _library.fit("splince", s)(
        s.features
    ),
) -> None:
    """Exact. Library: the centroid of n_k of n rows moves by at most
    sqrt(n / n_k) times the root mean square of r(x) - r_exact(x), whitened (tolerance of 1.6)."""
    for s in bench.samples(8, 3, ("one-hot",)):
        c = s.covariances
        p = closed(c)
        theta = integers(bench.rng, c.d, 1)
        bench.printed(theta.T @ (p @ c.sy - c.sy))
        moved = (s.x - c.mean.T) @ p.T + c.mean.T
        for k in range(s.y.shape[1]):
            mine = s.y[:, k : k + 1]
            bench.printed(mine.T @ (moved - s.x))
        low = least(c)
        for other in (random_guarded(bench, c), _reference.splince(c), _reference.sal(c)):
            change, extra = (
                (v @ c.s @ v.T)[0, 0]
                for v in (theta.T @ (other - eye(c.d)), theta.T @ (other - low))
            )
            least_change = theta.T @ (low - eye(c.d))
            bench.corrected(
                change - extra - (least_change @ c.s @ least_change.T)[0, 0], label="least change"
            )
        tolerance, *_ = tolerances(s)
        gap = rational(applied(s)) - s.x
        for k in range(s.y.shape[1]):
            share = sum(s.y[:, k])
            shift = s.y[:, k : k + 1].T @ gap / share
            size = np.sqrt(float(trace(shift @ c.s_pinv @ shift.T)))
            bench.corrected(
                size, tolerance * np.sqrt(len(s.x) / float(share)), label="library centroid"
            )
