"""The remarks: when the range matters, frozen heads, and what SAL and mean projection are."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from proofs_check import _library, _reference
from proofs_check._check import Bench, Verdict, check
from proofs_check._families import Rng, Sample, classes, integers, problem
from proofs_check._fits import range_coordinates
from proofs_check._linalg import (
    Matrix,
    Number,
    beside,
    equal,
    eye,
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
from proofs_check.retraining import penalty_metric
from proofs_check.theorem1 import Fitted, tolerances
from proofs_check.theorem2 import random_range
from proofs_check.theorem3 import excess, head, whitened_problem

Metric = Callable[[Matrix], Matrix]


def ridge_head(c: Covariances, p: Matrix, strength: Number) -> Matrix:
    """Effective head phi = P^T theta of a ridge fit on P x: theta in range(P), from moments."""
    basis = range_coordinates(p)
    seen = p.T @ basis
    eta = inverse(seen.T @ c.s @ seen + strength * (basis.T @ basis)) @ seen.T @ c.sy
    return seen @ eta


def _by_metric(c: Covariances, p: Matrix, strength: Number, metric: Metric) -> Matrix:
    """The same head as a fit on raw x under Sz^T phi = 0 with penalty phi^T metric phi."""
    n = null_basis(c.z.T)
    return n @ inverse(n.T @ (c.s + strength * metric(p)) @ n) @ n.T @ c.sy


def _mirrored(c: Covariances, p: Matrix) -> Matrix:
    """The projector of the same kernel whose range is that of P mirrored at ker(P)^perp."""
    orthogonal = _reference.sal(c)
    return 2 * orthogonal - p


@check(
    "6.1",
    "With regularisation, projections of one kernel and different ranges predict differently",
    source="section 3.3, item 1; appendix 'different levels of regularization'",
    convention="ridge head refitted on Px, any two ranges",
    expected=Verdict.CONDITIONAL,
    truth=(
        "A ridge head on P x is a ridge head on raw x under Sz^T phi = 0 with penalty "
        "phi^T (P^T P)^+ phi. So two ranges agree on all data iff P_A^T P_A = P_B^T P_B: the "
        "ranges are equal, or for scalar z mirror images at colsp(Sz)^perp. Otherwise the heads "
        "differ by lambda [(S + lambda M_B)^{-1} M_B - (S + lambda M_A)^{-1} M_A] phi* on "
        "colsp(Sz)^perp, exactly: of order lambda, which is why the paper's figure fades as "
        "lambda does."
    ),
    meaning=(
        "The penalty is cheap in directions that P stretches. SAL stretches none and is shrunk "
        "most. Compare erasers at a tuned penalty, not at a common one."
    ),
    mutants={
        "P^T P for its inverse": {"metric": lambda p: p.T @ p},
        "P P^T for P^T P": {"metric": lambda p: pinv(p @ p.T)},
        "one metric for all": {"metric": lambda p: eye(len(p))},
        "not mirrored": {"twin": lambda c, p: 3 * _reference.sal(c) - 2 * p},
    },
)
def ridge_ranges(
    bench: Bench,
    *,
    metric: Metric = penalty_metric,
    twin: Callable[[Covariances, Matrix], Matrix] = _mirrored,
) -> None:
    """Exact."""
    for i in bench.repeats(24, 8):
        c = problem(bench.rng, 4, 4)
        strength = rational([[f"1/{10 ** (i % 4)}"]])[0, 0]
        p, other = _reference.splince(c), random_range(bench, c)
        heads = [ridge_head(c, q, strength) for q in (p, other)]
        for q, phi in zip((p, other), heads, strict=True):
            bench.corrected(phi - _by_metric(c, q, strength, metric), label="metric")
        if not equal(p.T @ p, other.T @ other):
            bench.printed(int(equal(heads[0], heads[1])))
        n = null_basis(c.z.T)
        s = n.T @ c.s @ n
        free = inverse(s) @ n.T @ c.sy
        steps = [
            inverse(s + strength * m) @ m @ free for m in (n.T @ metric(q) @ n for q in (p, other))
        ]
        bench.corrected(
            heads[0] - heads[1] - strength * n @ (steps[1] - steps[0]), label="order lambda"
        )
        mirror = twin(c, p)
        if equal(mirror, p):
            continue
        bench.corrected(beside(mirror @ c.z, (mirror @ mirror - mirror)), label="a projector")
        same = equal(heads[0], ridge_head(c, mirror, strength))
        bench.printed(int(same), lacking="P_A^T P_A different from P_B^T P_B")


def _effective(rho: Number, strength: Number) -> Number:
    """Penalty at which LEACE equals SPLINCE at ``strength``, whitened features."""
    return strength * (1 - rho)


@check(
    "6.2",
    "With regularisation SPLINCE is expected to outperform LEACE",
    source="section 3.3, last paragraph",
    convention="ridge head refitted on Px, squared error, scalar y",
    expected=Verdict.CONDITIONAL,
    truth=(
        "For whitened features it is a theorem: SPLINCE at penalty lambda is LEACE (and SAL) at "
        "lambda (1 - rho), head for head. At a common lambda > 0 SPLINCE then has the smaller "
        "fitting risk whenever rho > 0; at each eraser's best lambda they are equal. For general "
        "S either can win at a common lambda."
    ),
    meaning=(
        "With a strongly penalised refit SPLINCE protects the task, which is what the paper's "
        "experiments show. On whitened features the same is had from LEACE with a smaller penalty."
    ),
    mutants={
        "lambda / (1 - rho)": {"effective": lambda rho, strength: strength / (1 - rho)},
        "lambda (1 - sqrt rho) squared": {
            "effective": lambda rho, strength: strength * (1 - rho) ** 2
        },
        "LEACE for SPLINCE": {"closed": _reference.leace},
    },
)
def ridge_whitened(
    bench: Bench,
    *,
    effective: Callable[[Number, Number], Number] = _effective,
    closed: Callable[[Covariances], Matrix] = _reference.splince,
) -> None:
    """Exact. With u the part of Sy orthogonal to Sz, P_S u = Sy, so |P_S u|^2 = |u|^2/(1 - rho):
    the metric of 6.1 is (1 - rho) along u, and along u alone the fit moves."""
    for i in bench.repeats(30, 8):
        c = whitened_problem(bench, 3 + i % 3)
        rho, strength = _reference.squared_cosine(c), rational([[f"{1 + i % 5}/{1 + i % 3}"]])[0, 0]
        first = ridge_head(c, closed(c), strength)
        for q in (_reference.leace(c), _reference.sal(c)):
            second = ridge_head(c, q, effective(rho, strength))
            bench.corrected(first - second, label="equal heads")
        risks = [
            excess(c, ridge_head(c, q, strength), head(c))[0, 0]
            for q in (_reference.splince(c), _reference.leace(c))
        ]
        bench.printed(int(not risks[0] < risks[1]))
    s = rational([[2, 1], [1, 2]])
    texts = []
    for sy in ("0", "1"):
        c = Covariances(s, rational([[1], [0]]), rational([[sy], [1]]), zeros(2, 1))
        risks = [
            excess(c, ridge_head(c, q, rational([[1]])[0, 0]), head(c))[0, 0]
            for q in (_reference.splince(c), _reference.leace(c))
        ]
        texts.append(f"Sy = ({sy}, 1): SPLINCE {risks[0]}, LEACE {risks[1]}")
        if sy == "0":
            bench.printed(int(not risks[0] < risks[1]), lacking="whitened features")
        else:
            bench.corrected(int(not risks[0] < risks[1]), label="the other way round")
    bench.example("Ridge 1, S = [[2, 1], [1, 2]], Sz = (1, 0), excess risk: " + "; ".join(texts))


@check(
    "6.3",
    "Frozen heads agree only if the head lies in the orthogonal complement of both projections",
    source="section 3.3, item 2",
    convention="scores theta^T P_A x and theta^T P_B x",
    expected=Verdict.FALSE,
    truth=(
        "The displayed formula is right: they agree iff (P_A - P_B)^T theta = 0 on the support. "
        "That is not the orthogonal complement of the ranges. Since P_A - P_B maps into "
        "colsp(Sz), every theta with Sz^T theta = 0 agrees, whatever its length along the ranges; "
        "for scalar z and P_A != P_B these are all. For SPLINCE and LEACE: iff "
        "theta^T E_L Sy = 0."
    ),
    meaning="A head that ignores the concept direction is not touched by the choice of range.",
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
    """Exact."""
    for i in bench.repeats(40, 10):
        k_z = 1 + i % 2
        c = problem(bench.rng, 4, 4 - i % 2, k_z, 1)
        p, least, other = _reference.splince(c), _reference.leace(c), random_range(bench, c)
        theta = agreeing(bench, c)
        if is_zero(theta):
            continue
        for q in (p, other):
            bench.corrected(theta.T @ (q - least) @ c.s, label="same scores")
        bench.printed(projector(p) @ theta)
        bench.printed(projector(least) @ theta)
        for probe in (theta, integers(bench.rng, 4, 1), null_basis(c.sy.T)[:, :1]):
            agrees = is_zero(probe.T @ (p - least) @ c.s)
            bench.corrected(int(agrees != criterion(c, probe)), label="SPLINCE and LEACE")
            if k_z == 1:
                bench.corrected(
                    int(agrees != is_zero(probe.T @ c.sz)), label="scalar z: iff Sz^T theta = 0"
                )
    c = Covariances(eye(2), rational([[1], [0]]), rational([[1], [1]]), zeros(2, 1))
    theta = rational([[0], [1]])
    p, least = _reference.splince(c), _reference.leace(c)
    bench.corrected(theta.T @ (p - least), label="example")
    bench.example(
        "S = I, Sz = (1, 0), Sy = (1, 1), theta = (0, 1): both score x_2, while theta has "
        f"component ({', '.join(map(str, (projector(p) @ theta).flat))}) along the range of "
        "SPLINCE."
    )


def _binary(rng: Rng, d: int) -> Sample:
    """Two concept classes, three task classes."""
    while True:
        n = 4 * d
        z, y = rng.integers(0, 2, n), rng.integers(0, 3, n)
        x = rng.integers(-4, 5, (n, d)) + np.outer(z, rng.integers(-2, 3, d))
        out = classes(x, z, y, "binary")
        if out.covariances.ranks[1] == 1:
            return out


def _along_means(s: Sample) -> Matrix:
    """I - w w^T / |w|^2 with w the difference of the two class means."""
    first, second = (s.z[:, k : k + 1].T @ s.x / sum(s.z[:, k]) for k in (0, 1))
    w = (first - second).T
    return eye(len(w)) - w @ inverse(w.T @ w) @ w.T


@check(
    "6.5",
    "Mean projection equals SAL for a binary concept",
    source="section 2",
    convention="x -> Px",
    expected=Verdict.HOLDS,
    truth=(
        "True: Cov(x, z) = p (1 - p) times the difference of the class means. For k classes the "
        "differences of the means span colsp(Sz), k - 1 dimensions at most. SAL projects off the "
        "left singular vectors of the d x k matrix Cov(x, z) (it has no eigenvectors), and all "
        "rank(Sz) of them, or guardedness is lost."
    ),
    meaning="Do not choose the number of directions by hand.",
    mutants={
        "means taken together": {
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
    """Exact. Library: the tolerance of SAL in ``_rounding``."""
    for i in bench.repeats(20, 5):
        s = _binary(bench.rng, 4 + i % 2)
        bench.printed(along(s) - _reference.sal(s.covariances))
        _, _, tolerance, _ = tolerances(s)
        for exact, got in ((along(s), fitted(s)), (along(s), _library.sal(s))):
            size = np.sqrt(float(trace((got - exact).T @ (got - exact))))
            bench.corrected(size, tolerance, label="library")
    for s in bench.samples(8, 3, ("one-hot",)):
        c = s.covariances
        p = spectral(c)
        bench.corrected(p @ c.sz, label="guarded")
        bench.corrected(rank(p) - (c.d - c.ranks[1]), label="no more than rank Sz removed")
