"""Theorem 4, literal reading: log-loss of P applied to the head of a Gaussian model."""

from __future__ import annotations

from collections.abc import Callable

import mpmath  # type: ignore[import-untyped]

from proofs_check import _reference
from proofs_check._check import Bench, Verdict, check
from proofs_check._families import integers
from proofs_check._linalg import (
    Matrix,
    Number,
    equal,
    eye,
    inverse,
    is_zero,
    null_basis,
    projector,
    rational,
    zeros,
)
from proofs_check._logloss import (
    CORRELATED,
    LOGISTIC,
    Family,
    Reading,
    excess,
    in_plane,
    number,
)
from proofs_check._reference import Covariances
from proofs_check.theorem3 import deployed, literal, whitened_problem


@check(
    "5.1",
    "Literal reading: an orthogonal projector with Sy in its range has excess risk 0",
    source="Theorem 4, item 2",
    convention="as printed: score x^T P beta, any S, P orthogonal",
    expected=Verdict.FALSE,
    truth=(
        "True iff P S beta = S beta makes P beta = beta, so for S = I (any projector with "
        "P Sy = Sy); in general S^{-1} P S must take the place of P. As in 4.1 nothing is erased "
        "from the predictions then. With S != I the excess is L(phi^T S phi) - L(v) > 0 for "
        "phi = P beta != beta, and since the example's P is symmetric, the deployed reading "
        "gives the same number."
    ),
    meaning="The statement cannot support a choice between the two erasers.",
    mutants={
        "S^{-1} P S for P": {"reading": lambda p, b: inverse(CORRELATED) @ p @ CORRELATED @ b},
        "I for S in the variance": {
            "formula": lambda f, a, b, phi, s: excess(f, a, b, phi, eye(2))
        },
    },
)
def literal_logistic(
    bench: Bench,
    *,
    reading: Reading = literal,
    formula: Callable[[Family, Number, Matrix, Matrix, Matrix], tuple[Number, Number]] = excess,
) -> None:
    """Quadrature at 30 digits with the bound of ``_quadrature``; the plane integral, in float64
    with its own bound, is independent of Stein's lemma."""
    a = mpmath.mpf(0)
    for i in bench.repeats(3, 1):
        beta = rational([[3 - i], [0]])
        sy = CORRELATED @ beta
        p = projector(sy)
        sz = rational([[sy[1, 0]], [-sy[0, 0]]])
        bench.corrected(p @ sz, label="kernel constraint")
        bench.corrected(p @ sy - sy, label="range constraint")
        c = Covariances(CORRELATED, sz, sy, zeros(2, 1))
        bench.corrected(p - _reference.splince(c), label="it is the SPLINCE projector")
        phi = reading(p, beta)
        delta, error = formula(LOGISTIC, a, beta, phi, CORRELATED)
        bench.printed(delta, float(error))
        direct, slack = in_plane(0.0, beta, phi, CORRELATED)
        bench.corrected(float(delta) - direct, slack + float(error), label="plane integral")
        if i == 0:
            least, _ = excess(LOGISTIC, a, beta, deployed(_reference.leace(c), beta), CORRELATED)
            bench.example(
                "S = [[1, 0.8], [0.8, 1]], beta = (3, 0), Sz = (-0.8, 1), P the orthogonal "
                f"projector on S beta: excess {mpmath.nstr(delta, 15)}, claimed 0 "
                f"(plane integral {direct:.15f}; deployed LEACE {mpmath.nstr(least, 12)})."
            )
    for i in bench.repeats(8, 3):
        c = whitened_problem(bench, 3 + i % 2)
        p = _reference.splince(c)
        bench.corrected(p @ c.sy - c.sy, label="S = I: P beta = beta")


def _bound(s: Matrix, p_z: Matrix, beta: Matrix) -> Number:
    """beta^T P_z S P_z beta / 8."""
    return (beta.T @ p_z @ s @ p_z @ beta)[0, 0] / 8


@check(
    "5.2",
    "Literal reading: 0 < Delta(LEACE) <= beta^T P_z S P_z beta / 8",
    source="Theorem 4, item 1, and its proof",
    convention="as printed: I - P_z orthogonal, score x^T (I - P_z) beta",
    expected=Verdict.CONDITIONAL,
    truth=(
        "The upper bound holds for every S. The lower one is strict iff P_z beta != 0 (the proof "
        "calls the exception degenerate). The last line of the proof, |P_z Sy|^2 / (8 C^2), needs "
        "S = I. For S != I the orthogonal I - P_z is SAL, not LEACE; LEACE is oblique. With "
        "S = I and P orthogonal, kernel and range constraint force Sz^T Sy = 0, hence P_z beta "
        "= 0: strict item 1 and item 2 never hold together."
    ),
    mutants={
        "bound 1 / 80": {"bound": lambda s, p, b: _bound(s, p, b) / 10},
        "C for C^2 in the last line": {"power": lambda: 1},
        "never strict": {"touches": lambda p, b: False},
    },
)
def literal_leace(
    bench: Bench,
    *,
    bound: Callable[[Matrix, Matrix, Matrix], Number] = _bound,
    power: Callable[[], int] = lambda: 2,
    touches: Callable[[Matrix, Matrix], bool] = lambda p, b: not is_zero(p @ b),
) -> None:
    """Quadrature at 30 digits; an inequality counts only where it exceeds the error bound."""
    a = mpmath.mpf(0)

    def last_line(s: Matrix, beta: Matrix, p_z: Matrix) -> Number:
        """|P_z Sy|^2 / (8 C^2) with Sy = C S beta."""
        curve, _ = LOGISTIC.curvature(a, number((beta.T @ s @ beta)[0, 0]))
        moved = p_z @ s @ beta
        return curve ** (2 - power()) * number((moved.T @ moved)[0, 0]) / 8

    for i in bench.repeats(24, 8):
        white = i % 2 == 0
        s = eye(2) if white else CORRELATED
        while True:
            beta, sz = integers(bench.rng, 2, 1), integers(bench.rng, 2, 1)
            if not is_zero(beta) and not is_zero(sz):
                break
        p_z = projector(sz)
        delta, error = excess(LOGISTIC, a, beta, (eye(2) - p_z) @ beta, s)
        upper = number(bound(s, p_z, beta))
        bench.corrected(int(delta > upper + error), label="upper bound")
        bench.corrected(int((delta > error) != touches(p_z, beta)), label="strict")
        if touches(p_z, beta):
            bench.printed(int(not error < delta <= upper + error))
        if white:
            claimed = last_line(s, beta, p_z)
            bench.corrected(int(delta > claimed + error), label="last line at S = I")
    for i in bench.repeats(20, 6):
        c = whitened_problem(bench, 3)
        if i % 2:
            c = Covariances(c.s, c.sz, null_basis(c.sz.T)[:, :1], c.mean)
        p = _reference.splince(c)
        unbiased = is_zero(projector(c.sz) @ c.sy)
        bench.corrected(int(equal(p, p.T) != unbiased), label="P orthogonal iff P_z beta = 0")
    beta = rational([[3], [0]])
    sy = CORRELATED @ beta
    sz = rational([[sy[1, 0]], [-sy[0, 0]]])
    p_z = projector(sz)
    c = Covariances(CORRELATED, sz, sy, zeros(2, 1))
    delta, error = excess(LOGISTIC, a, beta, (eye(2) - p_z) @ beta, CORRELATED)
    claimed = last_line(CORRELATED, beta, p_z)
    bench.printed(int(delta > claimed + error), lacking="S = I (last line of the proof)")
    bench.corrected(int(equal(eye(2) - p_z, _reference.leace(c))), label="I - P_z is not LEACE")
    apart = projector(rational([[0], [1]]))
    missed, error = excess(LOGISTIC, a, beta, (eye(2) - apart) @ beta, eye(2))
    bench.printed(int(missed <= error), lacking="P_z beta different from 0")
    bench.example(
        "S = [[1, 0.8], [0.8, 1]], beta = (3, 0), Sz = (-0.8, 1): Delta = "
        f"{mpmath.nstr(delta, 12)} although |P_z Sy|^2 / (8 C^2) = {mpmath.nstr(claimed, 3)}."
    )
