"""Theorem 4, deployed reading: log-loss of a frozen head behind x -> Px, Gaussian features."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction

import mpmath  # type: ignore[import-untyped]
import numpy as np

from proofs_check import _reference
from proofs_check._check import Bench, Verdict, check
from proofs_check._linalg import (
    Number,
    eye,
    rational,
    zeros,
)
from proofs_check._logloss import (
    FAMILIES,
    LOGISTIC,
    Drop,
    Reading,
    drop_leace,
    drop_splince,
    excess,
    in_plane,
    number,
)
from proofs_check._reference import Covariances
from proofs_check.theorem3 import deployed, literal

GRID = [
    (a, v, rho)
    for a in ("0", "-1", "-4")
    for v in ("1/4", "1", "4", "16")
    for rho in ("1/100", "9/25", "9/10")
]


def _grid(bench: Bench) -> list[tuple[Number, Number, Number]]:
    """Intercepts, score variances and squared cosines, as exact mpf at 40 digits."""
    chosen = GRID[::5] if bench.quick else GRID
    a, v, rho = (
        [number(Fraction(value)) for value in column] for column in zip(*chosen, strict=True)
    )
    return list(zip(a, v, rho, strict=True))


@check(
    "5.3",
    "Deployed reading: excess log-loss positive for LEACE and 0 for SPLINCE",
    source="Theorem 4",
    convention="deployed: features x -> Px, frozen true head, Gaussian x",
    expected=Verdict.FALSE,
    truth=(
        "The order is reversed, for any S, any intercept and any canonical model (logistic, "
        "Poisson, Gaussian, ...): with v = Var(beta^T x), Delta(LEACE) = L((1 - rho) v) - L(v) + "
        "rho v C(v) and Delta(SPLINCE) = L(v / (1 - rho)) - L(v); 0 <= Delta(LEACE) <= "
        "Delta(SPLINCE), both strict iff 0 < rho < 1 and v > 0. Proof: with K = 1 / (1 - rho) the "
        "difference has derivative (v / 2K)(K^2 C(vK) + C(v/K) - 2 C(v)) in log K, and "
        "sqrt(w) C(w) is log-convex in 1 / w (a Laplace transform of A'' >= 0), so the bracket is "
        "at least (sqrt(K)(K + 1) - 2) C(v)."
    ),
    meaning=(
        "A well-fitted frozen classifier on roughly Gaussian features: LEACE has the smaller "
        "log-loss, with the same ranking and, where the mean score is 0, the same decisions. "
        "SPLINCE makes the same centred scores larger by 1 / (1 - rho), that is over-confident."
    ),
    mutants={
        "literal head for the deployed one": {"reading": literal},
        "(1 - rho) v for v / (1 - rho)": {
            "splince_drop": lambda f, a, v, rho: drop_splince(f, a, v * (1 - rho) ** 2, rho)
        },
        "LEACE formula for SPLINCE": {"splince_drop": drop_leace},
        "LEACE without the Stein term": {
            "leace_drop": lambda f, a, v, rho: drop_splince(f, a, v, 1 - 1 / (1 - rho))
        },
        "1/4 for C": {
            "leace_drop": lambda f, a, v, rho: (
                f.mean(a, (1 - rho) * v)[0] - f.mean(a, v)[0] + rho * v / 4,
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
    leace_drop: Drop = drop_leace,
    splince_drop: Drop = drop_splince,
    bracket: Callable[[Number, Number, Number, Number], Number] = lambda k, high, low, base: (
        k * k * high + low - 2 * base
    ),
) -> None:
    """Quadrature at 30 digits with the bound of ``_quadrature``, closed forms elsewhere; the
    problem in R^2 is S = I, Sz = e1, beta at the angle that makes rho. Tolerance: the bounds of
    both sides; an order counts only beyond them. The plane integral has its own bound."""
    with mpmath.workdps(40):
        for a, v, rho in _grid(bench):
            beta = np.array([[mpmath.sqrt(rho * v)], [mpmath.sqrt((1 - rho) * v)]], dtype=object)
            c = Covariances(eye(2), rational([[1], [0]]), beta, zeros(2, 1))
            heads = [reading(p, beta) for p in (_reference.leace(c), _reference.splince(c))]
            for family in FAMILIES:
                deltas = [excess(family, a, beta, phi, c.s) for phi in heads]
                slack = float(deltas[0][1] + deltas[1][1]) * 10
                for (delta, _), drop in zip(deltas, (leace_drop, splince_drop), strict=True):
                    value, error = drop(family, a, v, rho)
                    bench.corrected(
                        delta - value, slack + float(error), label=f"{family.name} formula"
                    )
                least, most = deltas[0][0], deltas[1][0]
                bench.printed(most, slack)
                bench.corrected(int(not slack < least < most - slack), label=f"{family.name} order")
                k = 1 / (1 - rho)
                high, low, base = (family.curvature(a, w)[0] for w in (v * k, v / k, v))
                rise = bracket(k, high, low, base)
                floor = (mpmath.sqrt(k) * (k + 1) - 2) * base
                bench.corrected(int(rise < floor - slack), label=f"{family.name} derivative")
        for scale in (1, 2, 4):
            c = Covariances(
                eye(2), rational([[1], [0]]), scale * rational([["3/5"], ["4/5"]]), zeros(2, 1)
            )
            values = []
            for p in (_reference.leace(c), _reference.splince(c)):
                phi = deployed(p, c.sy)
                delta, error = excess(LOGISTIC, mpmath.mpf(0), c.sy, phi, c.s)
                direct, slack_plane = in_plane(0.0, c.sy, phi, c.s)
                bench.corrected(
                    float(delta) - direct, slack_plane + float(error), label="plane integral"
                )
                values.append(mpmath.nstr(delta, 10))
            bench.example(
                f"S = I, Sz = e1, beta = {scale} (0.6, 0.8), logistic: LEACE {values[0]}, "
                f"SPLINCE {values[1]}, literal reading 0."
            )


@check(
    "5.4",
    "Bounds on the deployed excess log-loss",
    source="derived here, after the proof of Theorem 4",
    convention="deployed, logistic loss, Gaussian x",
    expected=Verdict.HOLDS,
    truth=(
        "Delta(LEACE) <= rho v / 8 and Delta(SPLINCE) <= rho v / (8 (1 - rho)), for any "
        "intercept; without intercept also Delta(LEACE) <= rho v C(v) / 2 and Delta(SPLINCE) <= "
        "rho v C(v) / (2 (1 - rho)), because C then decreases. LEACE is not the best guarded map "
        "for log-loss: a head shrunk a little further is better. For a shrunk head g beta SPLINCE "
        "wins for small g, as in 4.3."
    ),
    meaning="At rho = 0.1 both losses are small and close; the choice matters for large rho.",
    mutants={
        "bound without 1 / (1 - rho)": {"factor": lambda rho: mpmath.mpf(1) - rho},
        "16 for 8": {"eighth": lambda: mpmath.mpf(1) / 16},
        "C(v) / 4 for C(v) / 2": {"half": lambda: mpmath.mpf(1) / 4},
    },
)
def logistic_bounds(
    bench: Bench,
    *,
    factor: Callable[[Number], Number] = lambda rho: 1 / (1 - rho),
    eighth: Callable[[], Number] = lambda: mpmath.mpf(1) / 8,
    half: Callable[[], Number] = lambda: mpmath.mpf(1) / 2,
) -> None:
    """Quadrature at 30 digits. L' = C / 2 <= 1 / 8 gives the first pair, C decreasing the second.
    The grid includes small v, where the bounds are sharp: a factor 2 less fails there."""
    rows = [*_grid(bench), *(tuple(map(mpmath.mpf, ("0", "0.01", r))) for r in ("0.01", "0.9"))]
    with mpmath.workdps(40):
        for a, v, rho in rows:
            curve, _ = LOGISTIC.curvature(a, v)
            low, low_error = drop_leace(LOGISTIC, a, v, rho)
            high, high_error = drop_splince(LOGISTIC, a, v, rho)
            bench.printed(int(low > rho * v * eighth() + low_error))
            bench.printed(int(high > rho * v * eighth() * factor(rho) + high_error))
            if a == 0:
                bench.corrected(int(low > rho * v * curve * half() + low_error), label="C, LEACE")
                bench.corrected(
                    int(high > rho * v * curve * half() * factor(rho) + high_error),
                    label="C, SPLINCE",
                )
        v, rho = mpmath.mpf(4), mpmath.mpf(9) / 25
        base = drop_leace(LOGISTIC, 0, v, rho)[0]

        def shrunk(scale: Number, keep: Number) -> Number:
            """Delta of the head whose score is ``scale`` times LEACE's, ``keep`` = (1 - rho) v."""
            curve = LOGISTIC.curvature(0, v)[0]
            moved = LOGISTIC.mean(0, scale * scale * keep)[0]
            return moved - LOGISTIC.mean(0, v)[0] - (scale * keep - v) * curve

        keep = (1 - rho) * v
        better = shrunk(mpmath.mpf("0.95"), keep)
        bench.corrected(int(not better < base - mpmath.mpf(10) ** -20), label="LEACE not best")
        gaps = {
            g: shrunk(number(Fraction(g)) / (1 - rho), keep) - shrunk(number(Fraction(g)), keep)
            for g in ("6/10", "7/10")
        }
        bench.corrected(int(not gaps["6/10"] < 0 < gaps["7/10"]), label="shrunk head")
        bench.example(
            f"v = 4, rho = 9/25, head g beta: SPLINCE - LEACE is {mpmath.nstr(gaps['6/10'], 3)} at "
            f"g = 0.6 and {mpmath.nstr(gaps['7/10'], 3)} at g = 0.7; at g = 1 a further factor "
            f"0.95 takes LEACE from {mpmath.nstr(base, 6)} to {mpmath.nstr(better, 6)}."
        )
