"""Section 6: the remarks on regularisation, frozen heads, covariance ratios and SAL."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from proofs_check import _library, _reference
from proofs_check._check import Bench, Verdict, check
from proofs_check._families import Rng, Sample, class_sample, integers, problem
from proofs_check._heads import (
    excess_risk,
    head,
    penalty_metric,
    random_projector,
    ridge_head,
    whitened_problem,
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
    null_basis,
    pinv,
    projector,
    rank,
    rational,
    trace,
    zeros,
)
from proofs_check._reference import Covariances
from proofs_check._rounding import tolerances

Metric = Callable[[Matrix], Matrix]


def _by_metric(c: Covariances, p: Matrix, alpha: Number, metric: Metric) -> Matrix:
    """Return the ridge head phi on x under Sz^T phi = 0.

    The penalty is ``alpha`` times phi^T metric(P) phi.
    """
    n = null_basis(c.z.T)
    return n @ inverse(n.T @ (c.s + alpha * metric(p)) @ n) @ n.T @ c.sy


def _mirrored(c: Covariances, p: Matrix) -> Matrix:
    """Return the projector with the kernel of P and the range of P reflected at ker(P)^perp.

    A reflection at a subspace changes the sign of the orthogonal component.
    """
    orthogonal = _reference.sal(c)
    return 2 * orthogonal - p


@check(
    "6.1",
    Verdict.CONDITIONAL,
    paper=True,
    mutants={
        "P^T P for its inverse": {"metric": lambda p: p.T @ p},
        "P P^T for P^T P": {"metric": lambda p: pinv(p @ p.T)},
        "one metric for all": {"metric": lambda p: eye(len(p))},
        "not mirrored": {"mirror_of": lambda c, p: 3 * _reference.sal(c) - 2 * p},
    },
)
def ridge_ranges(
    bench: Bench,
    *,
    metric: Metric = penalty_metric,
    mirror_of: Callable[[Covariances, Matrix], Matrix] = _mirrored,
) -> None:
    """Compare ridge heads behind projectors of one kernel and several ranges exactly."""
    for i in bench.repeats(24, 8):
        c = problem(bench.rng, 4, 4)
        alpha = rational([[f"1/{10 ** (i % 4)}"]])[0, 0]
        p, other = _reference.splince(c), random_projector(bench, c)
        heads = [ridge_head(c, q, alpha) for q in (p, other)]
        for q, phi in zip((p, other), heads, strict=True):
            bench.add_corrected(phi - _by_metric(c, q, alpha, metric), label="metric")
        if not equal(p.T @ p, other.T @ other):
            bench.add_printed(int(equal(heads[0], heads[1])))
        n = null_basis(c.z.T)
        s = n.T @ c.s @ n
        head = inverse(s) @ n.T @ c.sy
        steps = [
            inverse(s + alpha * m) @ m @ head for m in (n.T @ metric(q) @ n for q in (p, other))
        ]
        bench.add_corrected(
            heads[0] - heads[1] - alpha * n @ (steps[1] - steps[0]), label="order lambda"
        )
        mirror = mirror_of(c, p)
        if equal(mirror, p):
            continue
        bench.add_corrected(hstack(mirror @ c.z, (mirror @ mirror - mirror)), label="a projector")
        is_equal = equal(heads[0], ridge_head(c, mirror, alpha))
        bench.add_printed(int(is_equal), violates="P_A^T P_A different from P_B^T P_B")


def _effective(rho: Number, alpha: Number) -> Number:
    """Return the penalty at which LEACE has the ridge head that SPLINCE has at ``alpha``.

    The features are whitened, S = I.
    """
    return alpha * (1 - rho)


@check(
    "6.2",
    Verdict.CONDITIONAL,
    paper=True,
    mutants={
        "lambda / (1 - rho)": {"effective": lambda rho, alpha: alpha / (1 - rho)},
        "lambda (1 - sqrt rho) squared": {"effective": lambda rho, alpha: alpha * (1 - rho) ** 2},
        "LEACE for SPLINCE": {"closed": _reference.leace},
    },
)
def ridge_whitened(
    bench: Bench,
    *,
    effective: Callable[[Number, Number], Number] = _effective,
    closed: Callable[[Covariances], Matrix] = _reference.splince,
) -> None:
    """Compare ridge heads behind SPLINCE and LEACE exactly, for whitened features.

    Let u be the part of Sy orthogonal to Sz. Then P_S u = Sy and |P_S u|^2 = |u|^2 / (1 - rho). So
    the penalty metric of 6.1 is (1 - rho) along u, and the head has a component only along u.
    """
    for i in bench.repeats(30, 8):
        c = whitened_problem(bench, 3 + i % 3)
        rho, alpha = _reference.squared_cosine(c), rational([[f"{1 + i % 5}/{1 + i % 3}"]])[0, 0]
        first = ridge_head(c, closed(c), alpha)
        for q in (_reference.leace(c), _reference.sal(c)):
            second = ridge_head(c, q, effective(rho, alpha))
            bench.add_corrected(first - second, label="equal heads")
        risks = [
            excess_risk(c, ridge_head(c, q, alpha), head(c))[0, 0]
            for q in (_reference.splince(c), _reference.leace(c))
        ]
        bench.add_printed(int(not risks[0] < risks[1]))
    s = rational([[2, 1], [1, 2]])
    for sy in ("0", "1"):
        c = Covariances(s, rational([[1], [0]]), rational([[sy], [1]]), zeros(2, 1))
        risks = [
            excess_risk(c, ridge_head(c, q, rational([[1]])[0, 0]), head(c))[0, 0]
            for q in (_reference.splince(c), _reference.leace(c))
        ]
        bench.require_quoted(*risks)
        if sy == "0":
            bench.add_printed(int(not risks[0] < risks[1]), violates="whitened features")
        else:
            bench.add_corrected(int(not risks[0] < risks[1]), label="SPLINCE has the larger risk")


@check(
    "6.3",
    Verdict.FALSE,
    paper=True,
    mutants={
        "theta along Sz": {"agreeing": lambda bench, c: c.z},
        "theta orthogonal to Sy": {
            "agreeing": lambda bench, c: null_basis(c.sy.T) @ integers(bench.rng, c.d - 1, 1)
        },
        "criterion theta^T Sy = 0": {"criterion": lambda c, theta: is_zero(theta.T @ c.sy)},
    },
)
def frozen_heads(
    bench: Bench,
    *,
    agreeing: Callable[[Bench, Covariances], Matrix] = lambda bench, c: (
        null_basis(c.z.T) @ integers(bench.rng, c.d - c.z.shape[1], 1)
    ),
    criterion: Callable[[Covariances, Matrix], bool] = lambda c, theta: is_zero(
        theta.T @ _reference.lost(c)
    ),
) -> None:
    """Compare the scores of frozen heads behind several erasers exactly."""
    for i in bench.repeats(40, 10):
        k_z = 1 + i % 2
        c = problem(bench.rng, 4, 4 - i % 2, k_z, 1)
        p, p_leace, other = _reference.splince(c), _reference.leace(c), random_projector(bench, c)
        theta = agreeing(bench, c)
        if is_zero(theta):
            continue
        for q in (p, other):
            bench.add_corrected(theta.T @ (q - p_leace) @ c.s, label="same scores")
        bench.add_printed(projector(p) @ theta)
        bench.add_printed(projector(p_leace) @ theta)
        for probe in (theta, integers(bench.rng, 4, 1), null_basis(c.sy.T)[:, :1]):
            agrees = is_zero(probe.T @ (p - p_leace) @ c.s)
            bench.add_corrected(int(agrees != criterion(c, probe)), label="SPLINCE and LEACE")
            if k_z == 1:
                bench.add_corrected(
                    int(agrees != is_zero(probe.T @ c.sz)), label="scalar z: iff Sz^T theta = 0"
                )
    c = Covariances(eye(2), rational([[1], [0]]), rational([[1], [1]]), zeros(2, 1))
    theta = rational([[0], [1]])
    p, p_leace = _reference.splince(c), _reference.leace(c)
    bench.add_corrected(theta.T @ (p - p_leace), label="example")
    bench.require_quoted(f"({', '.join(map(str, (projector(p) @ theta).flat))})")


def _ratio(c: Covariances, p: Matrix) -> Number:
    """Return |P Sy|^2 / |Sy|^2."""
    covariance = p @ c.sy
    return trace(covariance.T @ covariance) / trace(c.sy.T @ c.sy)


@check(
    "6.4",
    Verdict.HOLDS,
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
    """Compare the ratio |P Sy|^2 / |Sy|^2 of several erasers with formulas exactly.

    Library: |sqrt(ratio) - 1| <= |D Sy| / |Sy|, where D is the error of P, and
    |D Sy| <= |S^{1/2}|_2 |S^{-1/2} D S^{1/2}| |S^{-1/2} Sy| <= sqrt(cond S) |Sy| x tolerance.
    """

    def direct(c: Covariances) -> Number:
        covariance = c.sy - c.z @ inverse(c.gram(c.z, c.z)) @ c.gram(c.z, c.sy)
        return trace(covariance.T @ covariance) / trace(c.sy.T @ c.sy)

    formula = leace_ratio or direct
    for i in bench.repeats(60, 12):
        c = problem(bench.rng, 4, 4 - i % 2)
        bench.add_printed(_ratio(c, closed(c)) - 1)
        rank_one = c.sy @ inverse(c.sy.T @ c.sy) @ c.sy.T
        bench.add_corrected(_ratio(c, rank_one) - 1, label="the rank-one map has ratio 1 too")
        bench.add_corrected(_ratio(c, _reference.leace(c)) - formula(c), label="ratio of LEACE")
        squared_cosine = trace(c.sz.T @ c.sy) ** 2 / (trace(c.sz.T @ c.sz) * trace(c.sy.T @ c.sy))
        bench.add_corrected(
            _ratio(c, _reference.sal(c)) - (1 - squared_cosine), label="ratio of SAL"
        )
    c = Covariances(diagonal([25, 1]), rational([[5], [1]]), rational([[0], [1]]), zeros(2, 1))
    bench.add_corrected(int(_ratio(c, _reference.leace(c)) <= 1), label="LEACE above 1")
    bench.require_quoted(_ratio(c, _reference.leace(c)))
    for sample in bench.samples(4, 1):
        p, (tolerance, _, _, cond) = fitted(sample), tolerances(sample)
        ratio = np.sqrt(float(_ratio(sample.covariances, p))) - 1
        bench.add_corrected(ratio, tolerance * np.sqrt(cond), label=f"library, {sample.family}")


def _binary(rng: Rng, d: int) -> Sample:
    """Draw data with two concept classes and three task classes."""
    while True:
        n = 4 * d
        z, y = rng.integers(0, 2, n), rng.integers(0, 3, n)
        x = rng.integers(-4, 5, (n, d)) + np.outer(z, rng.integers(-2, 3, d))
        out = class_sample(x, z, y, "binary")
        if out.covariances.ranks[1] == 1:
            return out


def _along_means(s: Sample) -> Matrix:
    """Return I - w w^T / |w|^2, where w is the difference of the two class means."""
    first, second = (s.z[:, k : k + 1].T @ s.x / sum(s.z[:, k]) for k in (0, 1))
    w = (first - second).T
    return eye(len(w)) - w @ inverse(w.T @ w) @ w.T


@check(
    "6.5",
    Verdict.HOLDS,
    mutants={
        "mean of all rows for the difference of class means": {
            "along": lambda s: _reference.sal(
                Covariances(
                    s.covariances.s, s.covariances.mean, s.covariances.sy, s.covariances.mean
                )
            )
        },
        "one singular vector only": {
            "spectral": lambda c: _reference.sal(Covariances(c.s, c.sz[:, :1], c.sy, c.mean))
        },
        "library: LEACE for mean projection": {"fitted": _library.leace},
    },
)
def mean_projection(
    bench: Bench,
    *,
    along: Callable[[Sample], Matrix] = _along_means,
    spectral: Callable[[Covariances], Matrix] = _reference.sal,
    fitted: Fitted = _library.mean_projection,
) -> None:
    """Compare mean projection and SAL exactly; the library has SAL's tolerance."""
    for i in bench.repeats(20, 5):
        s = _binary(bench.rng, 4 + i % 2)
        bench.add_printed(along(s) - _reference.sal(s.covariances))
        _, _, tolerance, _ = tolerances(s)
        for exact, computed in ((along(s), fitted(s)), (along(s), _library.sal(s))):
            size = np.sqrt(float(trace((computed - exact).T @ (computed - exact))))
            bench.add_corrected(size, tolerance, label="library")
    for s in bench.samples(8, 3, ("one-hot",)):
        c = s.covariances
        p = spectral(c)
        bench.add_corrected(p @ c.sz, label="guarded")
        bench.add_corrected(rank(p) - (c.d - c.ranks[1]), label="no more than rank Sz removed")
