"""Section 5: Theorem 4, the log-loss of a frozen head, literal and deployed."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction

import mpmath  # type: ignore[import-untyped]
import numpy as np

from proofs_check import _reference
from proofs_check._check import Bench, Verdict, check
from proofs_check._families import integers
from proofs_check._heads import deployed, literal, whitened_problem
from proofs_check._linalg import (
    Matrix,
    Number,
    equal,
    eye,
    high_precision,
    inverse,
    is_zero,
    mpf,
    null_basis,
    projector,
    rational,
    zeros,
)
from proofs_check._logloss import (
    CORRELATED,
    LOGISTIC,
    LOSSES,
    CanonicalLoss,
    ExcessFormula,
    Reading,
    excess_loss,
    excess_loss_by_plane,
    leace_excess_loss,
    splince_excess_loss,
)
from proofs_check._reference import Covariances


@check(
    "5.1",
    Verdict.FALSE,
    paper=True,
    mutants={
        "S^{-1} P S for P": {"reading": lambda p, b: inverse(CORRELATED) @ p @ CORRELATED @ b},
        "I for S in the variance": {
            "formula": lambda f, a, b, phi, s: excess_loss(f, a, b, phi, eye(2))
        },
    },
)
def literal_logistic(
    bench: Bench,
    *,
    reading: Reading = literal,
    formula: Callable[
        [CanonicalLoss, Number, Matrix, Matrix, Matrix], tuple[Number, Number]
    ] = excess_loss,
) -> None:
    """Compute the excess log-loss in the literal reading for counterexamples.

    The quadrature has 30 digits and the error bound of ``_quadrature``. It is compared with an
    integral over the plane in float64, which has its own error bound and does not use Stein's
    lemma.
    """
    a = mpmath.mpf(0)
    for i in bench.repeats(3, 1):
        beta = rational([[3 - i], [0]])
        sy = CORRELATED @ beta
        p = projector(sy)
        sz = rational([[sy[1, 0]], [-sy[0, 0]]])
        bench.add_corrected(p @ sz, label="kernel constraint")
        bench.add_corrected(p @ sy - sy, label="range constraint")
        c = Covariances(CORRELATED, sz, sy, zeros(2, 1))
        bench.add_corrected(p - _reference.splince(c), label="it is the SPLINCE projector")
        phi = reading(p, beta)
        delta, error = formula(LOGISTIC, a, beta, phi, CORRELATED)
        bench.add_printed(delta, float(error))
        direct, slack = excess_loss_by_plane(0.0, beta, phi, CORRELATED)
        bench.add_corrected(float(delta) - direct, slack + float(error), label="plane integral")
        if i == 0:
            delta_leace, _ = excess_loss(
                LOGISTIC, a, beta, deployed(_reference.leace(c), beta), CORRELATED
            )
            bench.require_quoted(
                mpmath.nstr(delta, 15), f"{direct:.15f}", mpmath.nstr(delta_leace, 12)
            )
    for i in bench.repeats(8, 3):
        c = whitened_problem(bench, 3 + i % 2)
        p = _reference.splince(c)
        bench.add_corrected(p @ c.sy - c.sy, label="S = I: P beta = beta")


def _bound(s: Matrix, p_z: Matrix, beta: Matrix) -> Number:
    """Return beta^T P_z S P_z beta / 8."""
    return (beta.T @ p_z @ s @ p_z @ beta)[0, 0] / 8


@check(
    "5.2",
    Verdict.CONDITIONAL,
    paper=True,
    mutants={
        "bound 1 / 80": {"bound": lambda s, p, b: _bound(s, p, b) / 10},
        "k(v) for k(v)^2 in the last line": {"power": lambda: 1},
        "never strict": {"strict": lambda p, b: False},
    },
)
def literal_leace(
    bench: Bench,
    *,
    bound: Callable[[Matrix, Matrix, Matrix], Number] = _bound,
    power: Callable[[], int] = lambda: 2,
    strict: Callable[[Matrix, Matrix], bool] = lambda p, b: not is_zero(p @ b),
) -> None:
    """Check bounds on the excess log-loss of the head (I - P_z) beta, by quadrature at 30 digits.

    Differences within the error bound do not decide an inequality.
    """
    a = mpmath.mpf(0)

    def last_line(s: Matrix, beta: Matrix, p_z: Matrix) -> Number:
        """Return the last line of the printed proof, |P_z Sy|^2 / (8 k(v)^2), Sy = k(v) S beta."""
        curvature, _ = LOGISTIC.curvature(a, mpf((beta.T @ s @ beta)[0, 0]))
        sy_z = p_z @ s @ beta
        return curvature ** (2 - power()) * mpf((sy_z.T @ sy_z)[0, 0]) / 8

    for i in bench.repeats(24, 8):
        white = i % 2 == 0
        s = eye(2) if white else CORRELATED
        while True:
            beta, sz = integers(bench.rng, 2, 1), integers(bench.rng, 2, 1)
            if not is_zero(beta) and not is_zero(sz):
                break
        p_z = projector(sz)
        delta, error = excess_loss(LOGISTIC, a, beta, (eye(2) - p_z) @ beta, s)
        upper = mpf(bound(s, p_z, beta))
        bench.add_corrected(int(delta > upper + error), label="upper bound")
        bench.add_corrected(int((delta > error) != strict(p_z, beta)), label="strict")
        if strict(p_z, beta):
            bench.add_printed(int(not error < delta <= upper + error))
        if white:
            claimed = last_line(s, beta, p_z)
            bench.add_corrected(int(delta > claimed + error), label="last line at S = I")
    for i in bench.repeats(20, 6):
        c = whitened_problem(bench, 3)
        if i % 2:
            c = Covariances(c.s, c.sz, null_basis(c.sz.T)[:, :1], c.mean)
        p = _reference.splince(c)
        unbiased = is_zero(projector(c.sz) @ c.sy)
        bench.add_corrected(int(equal(p, p.T) != unbiased), label="P orthogonal iff P_z beta = 0")
    beta = rational([[3], [0]])
    sy = CORRELATED @ beta
    sz = rational([[sy[1, 0]], [-sy[0, 0]]])
    p_z = projector(sz)
    c = Covariances(CORRELATED, sz, sy, zeros(2, 1))
    delta, error = excess_loss(LOGISTIC, a, beta, (eye(2) - p_z) @ beta, CORRELATED)
    claimed = last_line(CORRELATED, beta, p_z)
    bench.add_printed(int(delta > claimed + error), violates="S = I (last line of the proof)")
    bench.add_corrected(int(equal(eye(2) - p_z, _reference.leace(c))), label="I - P_z is not LEACE")
    orthogonal_projector = projector(rational([[0], [1]]))
    delta_orthogonal, error = excess_loss(
        LOGISTIC, a, beta, (eye(2) - orthogonal_projector) @ beta, eye(2)
    )
    bench.add_printed(int(delta_orthogonal <= error), violates="P_z beta different from 0")
    bench.require_quoted(mpmath.nstr(delta, 12), mpmath.nstr(claimed, 3))


GRID = [
    (a, v, rho)
    for a in ("0", "-1", "-4")
    for v in ("1/4", "1", "4", "16")
    for rho in ("1/100", "9/25", "9/10")
]


def _grid(bench: Bench) -> list[tuple[Number, Number, Number]]:
    """Return triples of intercept, score variance and squared cosine, as 40-digit mpf."""
    chosen = GRID[::5] if bench.quick else GRID
    a, v, rho = ([mpf(Fraction(value)) for value in column] for column in zip(*chosen, strict=True))
    return list(zip(a, v, rho, strict=True))


@check(
    "5.3",
    Verdict.DEPLOYED,
    paper=True,
    mutants={
        "literal head for the deployed one": {"reading": literal},
        "(1 - rho) v for v / (1 - rho)": {
            "splince_formula": lambda f, a, v, rho: splince_excess_loss(
                f, a, v * (1 - rho) ** 2, rho
            )
        },
        "LEACE formula for SPLINCE": {"splince_formula": leace_excess_loss},
        "LEACE without the Stein term": {
            "leace_formula": lambda f, a, v, rho: splince_excess_loss(f, a, v, 1 - 1 / (1 - rho))
        },
        "1/4 for k(v)": {
            "leace_formula": lambda f, a, v, rho: (
                f.expected_loss(a, (1 - rho) * v)[0] - f.expected_loss(a, v)[0] + rho * v / 4,
                mpmath.mpf(0),
            )
        },
        "derivative without K^2": {"bracket": lambda k, high, low, base: high + low - 2 * base},
    },
)
def deployed_logistic(
    bench: Bench,
    *,
    reading: Reading = deployed,
    leace_formula: ExcessFormula = leace_excess_loss,
    splince_formula: ExcessFormula = splince_excess_loss,
    bracket: Callable[[Number, Number, Number, Number], Number] = lambda k, high, low, base: (
        k * k * high + low - 2 * base
    ),
) -> None:
    """Compare the excess log-loss in the deployed reading with its formulas, for LEACE and SPLINCE.

    The problem in R^2 is S = I, Sz = e1, with rho the squared cosine of the angle between beta and
    Sz. The losses are closed forms, or quadratures at 30 digits with the error bound of
    ``_quadrature``. The tolerance is the sum of the error bounds of both sides; LEACE and SPLINCE
    must differ by more. The plane integral has its own error bound.
    """
    with mpmath.workdps(40):
        for a, v, rho in _grid(bench):
            beta = np.array([[mpmath.sqrt(rho * v)], [mpmath.sqrt((1 - rho) * v)]], dtype=object)
            white, sz = high_precision(eye(2)), high_precision(rational([[1], [0]]))
            c = Covariances(white, sz, beta, 0 * beta)
            heads = [reading(p, beta) for p in (_reference.leace(c), _reference.splince(c))]
            for loss in LOSSES:
                deltas = [excess_loss(loss, a, beta, phi, c.s) for phi in heads]
                slack = float(deltas[0][1] + deltas[1][1]) * 10
                for (delta, _), formula in zip(
                    deltas, (leace_formula, splince_formula), strict=True
                ):
                    value, error = formula(loss, a, v, rho)
                    bench.add_corrected(
                        delta - value, slack + float(error), label=f"{loss.name} formula"
                    )
                delta_leace, delta_splince = deltas[0][0], deltas[1][0]
                bench.add_printed(delta_splince, slack, deployed=True)
                as_printed, error = excess_loss(
                    loss, a, beta, literal(_reference.splince(c), beta), c.s
                )
                bench.add_printed(as_printed, float(error))
                bench.add_corrected(
                    int(not slack < delta_leace < delta_splince - slack),
                    label=f"{loss.name} order",
                )
                k = 1 / (1 - rho)
                high, low, base = (loss.curvature(a, w)[0] for w in (v * k, v / k, v))
                rise = bracket(k, high, low, base)
                least_rise = (mpmath.sqrt(k) * (k + 1) - 2) * base
                bench.add_corrected(int(rise < least_rise - slack), label=f"{loss.name} derivative")
        for scale in (1, 2, 4):
            c = Covariances(
                eye(2), rational([[1], [0]]), scale * rational([["3/5"], ["4/5"]]), zeros(2, 1)
            )
            values = []
            for p in (_reference.leace(c), _reference.splince(c)):
                phi = deployed(p, c.sy)
                delta, error = excess_loss(LOGISTIC, mpmath.mpf(0), c.sy, phi, c.s)
                direct, slack_plane = excess_loss_by_plane(0.0, c.sy, phi, c.s)
                bench.add_corrected(
                    float(delta) - direct, slack_plane + float(error), label="plane integral"
                )
                values.append(mpmath.nstr(delta, 10))
            bench.require_quoted(*values)


@check(
    "5.4",
    Verdict.HOLDS,
    paper=True,
    mutants={
        "bound without 1 / (1 - rho)": {"factor": lambda rho: mpmath.mpf(1) - rho},
        "16 for 8": {"eighth": lambda: mpmath.mpf(1) / 16},
        "k(v) / 4 for k(v) / 2": {"half": lambda: mpmath.mpf(1) / 4},
    },
)
def logistic_bounds(
    bench: Bench,
    *,
    factor: Callable[[Number], Number] = lambda rho: 1 / (1 - rho),
    eighth: Callable[[], Number] = lambda: mpmath.mpf(1) / 8,
    half: Callable[[], Number] = lambda: mpmath.mpf(1) / 2,
) -> None:
    """Check upper bounds on the excess log-loss, by quadrature at 30 digits.

    The first two bounds follow from l' = k / 2 <= 1 / 8. The other two hold for a = 0, because k
    decreases in v. The grid includes small v, where the bounds are sharp: with half the factor they
    fail.
    """
    rows = [*_grid(bench), *(tuple(map(mpmath.mpf, ("0", "0.01", r))) for r in ("0.01", "0.9"))]
    with mpmath.workdps(40):
        for a, v, rho in rows:
            curvature, _ = LOGISTIC.curvature(a, v)
            low, low_error = leace_excess_loss(LOGISTIC, a, v, rho)
            high, high_error = splince_excess_loss(LOGISTIC, a, v, rho)
            bench.add_printed(int(low > rho * v * eighth() + low_error))
            bench.add_printed(int(high > rho * v * eighth() * factor(rho) + high_error))
            if a == 0:
                bench.add_corrected(
                    int(low > rho * v * curvature * half() + low_error), label="bound by k, LEACE"
                )
                bench.add_corrected(
                    int(high > rho * v * curvature * half() * factor(rho) + high_error),
                    label="bound by k, SPLINCE",
                )
        v, rho = mpmath.mpf(4), mpmath.mpf(9) / 25
        base = leace_excess_loss(LOGISTIC, 0, v, rho)[0]

        def shrunk(scale: Number, variance: Number) -> Number:
            """Return Delta of the head whose score is ``scale`` times the score of LEACE.

            ``variance`` is (1 - rho) v.
            """
            curvature = LOGISTIC.curvature(0, v)[0]
            expected = LOGISTIC.expected_loss(0, scale * scale * variance)[0]
            return expected - LOGISTIC.expected_loss(0, v)[0] - (scale * variance - v) * curvature

        variance = (1 - rho) * v
        better = shrunk(mpmath.mpf("0.95"), variance)
        bench.add_corrected(int(not better < base - mpmath.mpf(10) ** -20), label="LEACE not best")
        gaps = {
            g: shrunk(mpf(Fraction(g)) / (1 - rho), variance) - shrunk(mpf(Fraction(g)), variance)
            for g in ("6/10", "7/10")
        }
        bench.add_corrected(int(not gaps["6/10"] < 0 < gaps["7/10"]), label="shrunk head")
        bench.require_quoted(*(mpmath.nstr(gap, 3) for gap in gaps.values()))
        bench.require_quoted(mpmath.nstr(base, 6), mpmath.nstr(better, 6))
