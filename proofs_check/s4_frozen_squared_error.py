"""Section 4: Theorem 3, the squared error of a frozen head, literal and deployed.

Model: y = beta^T x + noise with E[x noise] = 0, where x is centred with any distribution. So
beta = S^+ Sy on the support of x. A head theta after the eraser x -> P x has the scores
theta^T P x = (P^T theta)^T x. Its excess risk over beta is |S^{1/2} (P^T theta - beta)|^2, because
the noise is uncorrelated with x.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from proofs_check import _library, _reference
from proofs_check._check import Bench, Verdict, check
from proofs_check._families import Sample, integers, problem
from proofs_check._heads import (
    deployed,
    excess_risk,
    head,
    literal,
    random_guarded_matrix,
    whitened_problem,
)
from proofs_check._library import Fitted
from proofs_check._linalg import (
    Matrix,
    Number,
    diagonal,
    eye,
    inverse,
    is_zero,
    rational,
    to_float,
    trace,
    zeros,
)
from proofs_check._reference import Covariances, Eraser
from proofs_check._rounding import tolerances

EXAMPLE = Covariances(eye(2), rational([[1], [0]]), rational([["3/5"], ["4/5"]]), zeros(2, 1))
"""S = I, Sz = (1, 0), beta = Sy = (3/5, 4/5): rho = 9/25."""


@check(
    "4.1",
    Verdict.HOLDS,
    paper=True,
    mutants={
        "x -> Px instead": {"reading": deployed},
        "LEACE for SPLINCE": {"closed": _reference.leace},
        "P^T for P in the covariance with the predictions": {
            "prediction_covariance": lambda c, p: c.sz.T @ p.T @ head(c)
        },
    },
)
def literal_regression(
    bench: Bench,
    *,
    reading: Callable[[Matrix, Matrix], Matrix] = literal,
    closed: Eraser = _reference.splince,
    prediction_covariance: Callable[[Covariances, Matrix], Matrix] = lambda c, p: (
        c.sz.T @ p @ head(c)
    ),
) -> None:
    """Compute excess risks in the literal reading (P applied to the head) exactly."""
    for i in bench.repeats(40, 10):
        c = whitened_problem(bench, 3 + i % 3)
        beta = head(c)
        p = closed(c)
        bench.add_printed(excess_risk(c, reading(p, beta), beta))
        bench.add_printed(int(excess_risk(c, reading(_reference.leace(c), beta), beta)[0, 0] < 0))
        nothing_erased = excess_risk(c, reading(eye(c.d), beta), beta)
        bench.add_corrected(nothing_erased, label="excess risk of the identity")
        bench.add_corrected(
            prediction_covariance(c, p) - c.sz.T @ beta, label="concept in the predictions"
        )
        general = problem(bench.rng, 4, 4)
        beta, p = head(general), closed(general)
        p_general = general.s_pinv @ p @ general.s
        bench.add_corrected(
            excess_risk(general, reading(p_general, beta), beta), label="S^{-1} P S in general"
        )
    c = Covariances(diagonal([1, 4]), EXAMPLE.sz, rational([[1], [4]]), EXAMPLE.mean)
    not_whitened = excess_risk(c, literal(closed(c), head(c)), head(c))[0, 0]
    bench.add_corrected(int(not_whitened == 0), label="the printed reading without whitening")
    bench.require_quoted(not_whitened)
    c = EXAMPLE
    p, beta = _reference.splince(c), head(c)
    bench.require_quoted((c.sz.T @ p @ beta)[0, 0])
    bench.add_corrected((c.sz.T @ p.T @ beta)[0, 0], label="deployed predictions carry no concept")


def _risk_leace(c: Covariances) -> Matrix:
    """Return the excess risk of LEACE, C_yz C_zz^+ C_zy."""
    return c.gram(c.sy, c.z) @ inverse(c.gram(c.z, c.z)) @ c.gram(c.z, c.sy)


def _risk_splince(c: Covariances) -> Matrix:
    """Return the excess risk of SPLINCE, C_yz G^+ C_zy."""
    gain = c.gram(c.z, c.y) @ inverse(c.gram(c.y, c.y)) @ c.gram(c.y, c.z)
    return c.gram(c.sy, c.z) @ inverse(c.gram(c.z, c.z) - gain) @ c.gram(c.z, c.sy)


def _penalty(rho: Number) -> Number:
    """Return the ratio of the excess risks of SPLINCE and LEACE, for a scalar task."""
    return 1 / (1 - rho)


def semidefinite(a: Matrix) -> bool:
    """Return whether a symmetric 2 x 2 matrix has no negative eigenvalue."""
    return bool(a[0, 0] >= 0 and a[1, 1] >= 0 and a[0, 0] * a[1, 1] >= a[0, 1] * a[1, 0])


def _ratio_is_sharp(c: Covariances, risk_leace: Matrix, risk_splince: Matrix) -> bool:
    """Return whether 1 / (1 - rho) is the largest ratio of both risks over combinations of outputs.

    The matrix dR(LEACE) - (1 - t) dR(SPLINCE) must have no negative eigenvalue for t above rho, and
    must have one for t below rho. Two rational values of t, 2^-30 apart, bracket rho, which may be
    irrational.
    """
    explained = inverse(c.gram(c.z, c.z)) @ c.gram(c.z, c.y)
    squared_cosines = explained @ inverse(c.gram(c.y, c.y)) @ c.gram(c.y, c.z)
    rho = Fraction(float(np.linalg.eigvals(to_float(squared_cosines)).real.max()))
    step = Fraction(1, 2**31)
    return semidefinite(risk_leace - (1 - rho - step) * risk_splince) and not semidefinite(
        risk_leace - (1 - rho + step) * risk_splince
    )


@check(
    "4.2",
    Verdict.DEPLOYED,
    mutants={
        "P for its transpose": {"reading": literal},
        "1 + rho for 1 / (1 - rho)": {"penalty": lambda rho: 1 + rho},
        "C_zz for G": {"risk_splince": _risk_leace},
        "C_yy for C_zz": {
            "risk_leace": lambda c: c.gram(c.sy, c.z) @ c.gram(c.z, c.sy) / trace(c.gram(c.y, c.y))
        },
        "library: LEACE for SPLINCE": {"fitted": _library.leace},
        "library: transpose": {"fitted": lambda s: _library.splince(s).T},
    },
)
def deployed_regression(
    bench: Bench,
    *,
    reading: Callable[[Matrix, Matrix], Matrix] = deployed,
    penalty: Callable[[Number], Number] = _penalty,
    risk_leace: Callable[[Covariances], Matrix] = _risk_leace,
    risk_splince: Callable[[Covariances], Matrix] = _risk_splince,
    fitted: Fitted = _library.splince,
) -> None:
    """Compare excess risks in the deployed reading (x -> Px) with their formulas exactly.

    Library: the error of P^T beta in the norm of S is at most the whitened error of P times
    |beta|_S = sqrt(C_yy). The square root of the excess risk has the same bound.
    """
    for i in bench.repeats(60, 12):
        scalar = i % 3 < 2
        if i % 2:
            c = whitened_problem(bench, 4, *((1, 1) if scalar else (2, 2)))
        else:
            c = problem(bench.rng, 4, 4 - i % 4 // 2, 1 + (i // 3) % 2, 1 if scalar else 2)
        beta = head(c)
        p, p_leace = _reference.splince(c), _reference.leace(c)
        risk, low = (excess_risk(c, reading(q, beta), beta) for q in (p, p_leace))
        bench.add_printed(trace(risk), deployed=True)
        if is_zero(c.s - eye(c.d)):
            bench.add_printed(trace(excess_risk(c, literal(p, beta), beta)))
        bench.add_corrected(low - risk_leace(c), label="risk of LEACE")
        bench.add_corrected(risk - risk_splince(c), label="risk of SPLINCE")
        guarded = excess_risk(c, reading(random_guarded_matrix(bench, c), beta), beta)
        bench.add_corrected(int(trace(guarded) < trace(low)), label="LEACE is least")
        if c.y.shape[1] == 1:
            rho = _reference.squared_cosine(c)
            bench.add_corrected(risk - low * penalty(rho), label="ratio")
            bench.add_corrected(
                c.s @ (reading(p, beta) - reading(p_leace, beta) * penalty(rho)),
                label="same scores",
            )
            variance = c.gram(c.y, c.y)[0, 0]
            bench.add_corrected(
                int((risk[0, 0] > variance) != (rho > Fraction(1, 2))), label="worse than the mean"
            )
        else:
            rise = risk - low
            lost = _reference.lost(c)
            x = head(replace(c, sy=c.y)).T @ lost
            bench.add_corrected(
                rise - x @ inverse(_reference.unexplained(c)) @ x.T, label="rise, several outputs"
            )
            bench.add_corrected(int(not semidefinite(rise)), label="rise is not negative")
            bench.add_corrected(
                int(not _ratio_is_sharp(c, low, risk)), label="ratio, several outputs"
            )
    for sample in bench.samples(6, 2):
        c, (tolerance, *_) = sample.covariances, tolerances(sample)
        beta = head(c)
        excess_norm = np.sqrt(float(trace(excess_risk(c, deployed(fitted(sample), beta), beta))))
        exact = np.sqrt(float(trace(_risk_splince(c))))
        size = np.sqrt(float(trace(c.gram(c.sy, c.sy))))
        bench.add_corrected(
            excess_norm - exact, tolerance * size, label=f"library, {sample.family}"
        )
    c, beta = EXAMPLE, head(EXAMPLE)
    p, p_leace = _reference.splince(c), _reference.leace(c)
    bench.require_quoted(
        *(excess_risk(c, deployed(q, beta), beta)[0, 0] for q in (p, p_leace)),
        *(f"({', '.join(map(str, deployed(q, beta).flat))})" for q in (p, p_leace)),
    )


def mse_difference(q: Number, v: Number, h: Number) -> Number:
    """Return MSE(SPLINCE) - MSE(LEACE) for a frozen head theta and scalar y.

    q = theta^T E_L Sy, v = Cov(theta^T x, y) and h = H = (1 - rho) C_yy.
    """
    return q / h * (2 * v - q - 2 * h)


def shrinkage_threshold(rho: Number) -> Number:
    """Return the g below which SPLINCE is better than LEACE for the frozen head g beta."""
    return 2 * (1 - rho) / (2 - rho)


def _library_rho(sample: Sample) -> float:
    """Return rho from the report of the library."""
    rho = _library.report(sample).rho
    if rho is None:
        raise ValueError("the report has no rho")
    return rho


def mse_change(c: Covariances, p: Matrix, theta: Matrix) -> Number:
    """Return E(y - theta^T P x)^2 - Var(y), for a frozen head theta and scalar y."""
    phi = deployed(p, theta)
    return (phi.T @ c.s @ phi - 2 * phi.T @ c.sy)[0, 0]


@check(
    "4.3",
    Verdict.CONDITIONAL,
    mutants={
        "no factor 2": {"difference": lambda q, v, h: q / h * (v - q - h)},
        "C_yy for H": {"difference": lambda q, v, h: q / (2 * h) * (2 * v - q - 4 * h)},
        "threshold 1 - rho": {"limit": lambda rho: 1 - rho},
        "threshold 2 (1 - rho)": {"limit": lambda rho: 2 * (1 - rho)},
        "library: 1 - rho for rho": {"reported": lambda s: 1 - _library_rho(s)},
        "library: the cosine for its square": {"reported": lambda s: _library_rho(s) ** 0.5},
    },
)
def other_heads(
    bench: Bench,
    *,
    difference: Callable[[Number, Number, Number], Number] = mse_difference,
    limit: Callable[[Number], Number] = shrinkage_threshold,
    reported: Callable[[Sample], float] = _library_rho,
) -> None:
    """Compare SPLINCE and LEACE exactly, for frozen heads other than beta.

    Report of the library: rho = 1 - s^2 with s = sin(angle). The error of the angle is below tol
    s^2 / 2 (see ``_rounding``), so |d rho| <= s^3 tol.
    """
    for i in bench.repeats(60, 12):
        c = whitened_problem(bench, 4) if i % 2 else problem(bench.rng, 4, 4 - i % 3 // 2)
        p, p_leace, beta = _reference.splince(c), _reference.leace(c), head(c)
        rho, h = _reference.squared_cosine(c), _reference.unexplained(c)[0, 0]
        theta = integers(bench.rng, 4, 1)
        gap = mse_change(c, p, theta) - mse_change(c, p_leace, theta)
        q, v = (theta.T @ _reference.lost(c))[0, 0], (theta.T @ c.sy)[0, 0]
        bench.add_corrected(gap - difference(q, v, h), label="any head")
        g_limit = limit(rho)
        for g, wins in ((g_limit * 9 / 10, True), (g_limit * 11 / 10, False)):
            gap = mse_change(c, p, g * beta) - mse_change(c, p_leace, g * beta)
            bench.add_corrected(int((gap < 0) != wins), label="shrunk head")
            violates = None if wins else "head shrunk below 2 (1 - rho) / (2 - rho)"
            bench.add_printed(int(gap >= 0), violates=violates)
        gap = mse_change(c, p, g_limit * beta) - mse_change(c, p_leace, g_limit * beta)
        bench.add_corrected(gap, label="equal at the threshold")
        penalty = rho / (2 * (1 - rho))
        bench.add_corrected(g_limit - 1 / (1 + penalty), label="ridge threshold")
    for sample in bench.samples(8, 2, ("full rank", "rank-deficient", "n <= d", "near-infeasible")):
        c, (tolerance, *_) = sample.covariances, tolerances(sample)
        exact = _reference.squared_cosine(c)
        s = float(np.sqrt(float(1 - exact)))
        error = reported(sample) - float(exact)
        bench.add_corrected(error, s**3 * tolerance + 4e-16, label="reported rho")
    c = EXAMPLE
    rho = _reference.squared_cosine(c)
    bench.require_quoted(
        rho,
        *(
            f"{value} = {float(value):.4f}"
            for value in (shrinkage_threshold(rho), rho / (2 * (1 - rho)))
        ),
    )


@check(
    "4.4",
    Verdict.HOLDS,
    mutants={
        "LEACE for SPLINCE": {"closed": _reference.leace},
        "transpose": {"closed": lambda c: _reference.splince(c).T},
        "SPLINCE for LEACE": {"leace_of": _reference.splince},
        "library: LEACE for SPLINCE": {"applied": lambda s: _library.fit("leace", s)(s.features)},
    },
)
def preserved(
    bench: Bench,
    *,
    closed: Eraser = _reference.splince,
    leace_of: Eraser = _reference.leace,
    applied: Callable[[Sample], NDArray[np.float64]] = lambda s: _library.fit("splince", s)(
        s.features
    ),
) -> None:
    """Check exactly that SPLINCE preserves Cov(score, y) and the centroids of the task classes.

    Library: the whitened error of the centroid of n_k of n rows is at most sqrt(n / n_k) times the
    root mean square of r(x) - r_exact(x), which 1.6 bounds.
    """
    for s in bench.samples(8, 3, ("one-hot",)):
        c = s.covariances
        p = closed(c)
        theta = integers(bench.rng, c.d, 1)
        bench.add_printed(theta.T @ (p @ c.sy - c.sy))
        erased = (s.x - c.mean.T) @ p.T + c.mean.T
        for k in range(s.y.shape[1]):
            indicator = s.y[:, k : k + 1]
            bench.add_printed(indicator.T @ (erased - s.x))
        p_leace = leace_of(c)
        for other in (random_guarded_matrix(bench, c), _reference.splince(c), _reference.sal(c)):
            change, extra = (
                (v @ c.s @ v.T)[0, 0]
                for v in (theta.T @ (other - eye(c.d)), theta.T @ (other - p_leace))
            )
            least_change = theta.T @ (p_leace - eye(c.d))
            bench.add_corrected(
                change - extra - (least_change @ c.s @ least_change.T)[0, 0], label="least change"
            )
        tolerance, *_ = tolerances(s)
        gap = rational(applied(s)) - s.x
        for k in range(s.y.shape[1]):
            n_class = sum(s.y[:, k])
            shift = s.y[:, k : k + 1].T @ gap / n_class
            size = np.sqrt(float(trace(shift @ c.s_pinv @ shift.T)))
            bench.add_corrected(
                size, tolerance * np.sqrt(len(s.x) / float(n_class)), label="library centroid"
            )
