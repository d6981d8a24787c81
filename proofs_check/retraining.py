"""The conditions of Theorem 2, each shown to be needed by cases that lack it."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations

import numpy as np

from proofs_check import _reference
from proofs_check._check import Bench, Verdict, check
from proofs_check._families import continuous, integers, sample
from proofs_check._fits import (
    least_squares,
)
from proofs_check._linalg import (
    Matrix,
    beside,
    column_basis,
    eye,
    is_zero,
    null_basis,
    pinv,
    rank,
    rational,
    solve,
)
from proofs_check._reference import Covariances
from proofs_check.theorem1 import Eraser
from proofs_check.theorem2 import constrained, predictions, random_range


def penalty_metric(p: Matrix) -> Matrix:
    """(P^T P)^+: |theta|^2 for theta in range(P) is phi^T (P^T P)^+ phi, phi = P^T theta."""
    return pinv(p.T @ p)


def widest_margin(rows: Matrix, metric: Matrix) -> Matrix | None:
    """Exact minimiser of w^T metric w under rows @ w >= 1, by enumeration of active rows."""
    n, k = rows.shape
    best, least = None, None
    for size in range(1, k + 1):
        for active in combinations(range(n), size):
            f = rows[list(active)]
            bowl = solve(metric, f.T)
            try:
                w = bowl @ solve(f @ bowl, rational(np.ones((size, 1), dtype=int)))
            except ValueError:
                continue
            if all(v >= 1 for v in (rows @ w).flat):
                cost = (w.T @ metric @ w)[0, 0]
                if least is None or cost < least:
                    best, least = w, cost
    return best


def _margins(
    bench: Bench, metric: Callable[[Matrix], Matrix]
) -> tuple[Matrix, list[Matrix]] | None:
    """Signed rows separable after erasure, and the widest margins under SPLINCE and SAL."""
    x = bench.rng.integers(-3, 4, (8, 4))
    z = x[:, :1] + bench.rng.integers(-2, 3, (8, 1))
    s = continuous(x, z, x[:, 1:2] + x[:, :1], "separable")
    c = s.covariances
    if not c.feasible or c.ranks != (4, 1, 1):
        return None
    basis = null_basis(c.z.T)
    rows = (s.x - c.mean.T) @ basis
    side = rows @ integers(bench.rng, 3, 1)
    if any(v == 0 for v in side.flat):
        return None
    signed = rows * np.array([[1 if v > 0 else -1] for v in side.flat], dtype=object)
    found = [
        widest_margin(signed, basis.T @ metric(p) @ basis)
        for p in (_reference.splince(c), _reference.sal(c))
    ]
    return signed, [m for m in found if m is not None]


def _separable(bench: Bench, metric: Callable[[Matrix], Matrix]) -> None:
    """Classes separable after erasure: the margins of SPLINCE and SAL point different ways.

    Three support vectors in three dimensions fix the margin whatever the metric; such draws say
    nothing and are passed over, at most 20 times.
    """
    for _ in bench.repeats(6, 2):
        apart = 0
        for _ in range(20):
            drawn = _margins(bench, metric)
            if drawn is None:
                continue
            signed, margins = drawn
            for m in margins:
                bench.corrected(int(min((signed @ m).flat) < 1), label="separates: no minimiser")
            apart = rank(beside(*margins)) - 1
            if apart:
                break
        bench.printed(apart, lacking="classes separable after erasure")


@check(
    "3.4",
    "Unique minimisers correspond to strictly convex losses",
    source="section 3.2, after Theorem 2",
    convention="strict convexity in the scores",
    expected=Verdict.CONDITIONAL,
    truth=(
        "Strict convexity in the scores is not enough. Needed as well: X restricted to the range "
        "has independent columns, and a minimiser exists. With fewer rows than dimensions the "
        "minimum-norm heads of different ranges differ off the data; with separable classes no "
        "minimiser exists, and what an optimiser (or vanishing penalty) approaches, the widest "
        "margin, depends on the range."
    ),
    meaning=(
        "Theorem 2 does not cover n <= d or separable data, the usual case for last-layer "
        "embeddings with few labels: there the choice of range does change predictions."
    ),
    mutants={
        "one metric for all ranges": {"metric": lambda p: eye(len(p))},
        "enough rows": {"rows": lambda d: 2 * d + 4},
    },
)
def unique_minimiser(
    bench: Bench,
    *,
    metric: Callable[[Matrix], Matrix] = penalty_metric,
    rows: Callable[[int], int] = lambda d: d - 1,
) -> None:
    """Exact. The widest margin minimises |theta|^2 = phi^T (P^T P)^+ phi over the heads of margin
    one; rows and labels are few enough to enumerate the active sets. That ridge heads tend to it
    as the penalty vanishes is Rosset, Zhu and Hastie (NeurIPS 2003), that gradient descent does,
    Soudry et al. (JMLR 19, 2018); only the margins themselves are computed here."""
    for i in bench.repeats(10, 3):
        s = sample(bench.rng, "full rank", 4)
        y, test = integers(bench.rng, len(s.x), 1), integers(bench.rng, 3, 4, 9)
        heads = [
            predictions(p, s, test, y, intercept=True, offset=True, fit=least_squares)
            for p in (_reference.splince(s.covariances), _reference.sal(s.covariances))
        ]
        bench.printed(heads[0] - heads[1])
        d = 5 + i % 2
        while True:
            n = rows(d)
            x = bench.rng.integers(-4, 5, (n, d))
            z = x @ bench.rng.integers(-2, 3, (d, 1))
            s = continuous(x, z, z + x[:, :1], "")
            c = s.covariances
            first, second = random_range(bench, c), random_range(bench, c)
            if c.ranks[1] == 1:
                break
        y, test = integers(bench.rng, n, 1), integers(bench.rng, 3, d, 9)
        heads = [
            predictions(p, s, test, y, intercept=True, offset=True, fit=least_squares)
            for p in (first, second)
        ]
        bench.printed(heads[0] - heads[1], lacking="fewer rows than dimensions")
    _separable(bench, metric)


@check(
    "3.5",
    "Restricting the head to the range is without loss of generality",
    source="section 3.2, after Theorem 2",
    convention="r(x) = Px + b, with and without intercept",
    expected=Verdict.CONDITIONAL,
    truth=(
        "True for r(x) = Px, and for r(x) = Px + b if the head has an unpenalised intercept. "
        "Without one, a head in range(P) reads b differently for different ranges, and the "
        "predictions differ; a free head in R^d uses b as its intercept and they agree again, "
        "unless b = 0 for one of the erasers only."
    ),
    meaning="Refit with an intercept.",
    mutants={
        "no constant": {"offset": lambda: False},
        "with intercept": {"intercept": lambda: True},
    },
)
def restriction_to_range(
    bench: Bench,
    *,
    offset: Callable[[], bool] = lambda: True,
    intercept: Callable[[], bool] = lambda: False,
) -> None:
    """Exact."""
    for _ in bench.repeats(16, 5):
        s = sample(bench.rng, "full rank", 4)
        c = s.covariances
        y, test = integers(bench.rng, len(s.x), 1), integers(bench.rng, 3, 4, 9)
        pair = (_reference.splince(c), _reference.sal(c))
        plain = [
            predictions(p, s, test, y, intercept=False, offset=False, fit=least_squares)
            for p in pair
        ]
        bench.printed(plain[0] - plain[1])
        shifted = [
            predictions(p, s, test, y, intercept=intercept(), offset=offset(), fit=least_squares)
            for p in pair
        ]
        bench.printed(shifted[0] - shifted[1], lacking="a constant b and no intercept")
        free = []
        for p in pair:
            b = (eye(4) - p) @ c.mean
            seen = column_basis(beside(p, b))
            free.append((test @ p.T + b.T) @ seen @ least_squares((s.x @ p.T + b.T) @ seen, y))
            if is_zero(b):
                break
        else:
            bench.corrected(free[0] - free[1], label="free heads")
            bench.corrected(free[0] - constrained(s, test, y), label="free head with b")


@check(
    "3.6",
    "All methods that ensure linear guardedness predict the same after retraining",
    source="section 3.2, second paragraph",
    convention="head refitted without penalty",
    expected=Verdict.CONDITIONAL,
    truth=(
        "True for methods whose kernel is exactly colsp(Sz), such as SPLINCE, LEACE and SAL (S of "
        "full rank, or I - E). Guardedness only needs the kernel to contain colsp(Sz); an eraser "
        "that removes more is guarded too and predicts differently."
    ),
    meaning="An eraser of more than rank(Sz) directions restricts a refitted head further.",
    mutants={
        "the larger kernel is not larger": {"larger": _reference.leace},
        "the larger kernel is no kernel": {"larger": lambda c: eye(c.d)},
    },
)
def guarded_methods(
    bench: Bench,
    *,
    larger: Eraser = lambda c: _reference.sal(
        Covariances(c.s, beside(c.sz, c.s[:, :1]), c.sy, c.mean)
    ),
) -> None:
    """Exact."""
    for _ in bench.repeats(16, 5):
        s = sample(bench.rng, "full rank", 4)
        c = s.covariances
        y, test = integers(bench.rng, len(s.x), 1), integers(bench.rng, 3, 4, 9)
        expected = constrained(s, test, y)
        for p in (_reference.splince(c), _reference.leace(c), _reference.sal(c)):
            got = predictions(p, s, test, y, intercept=True, offset=True, fit=least_squares)
            bench.printed(got - expected)
        p = larger(c)
        bench.corrected(p @ c.sz, label="guarded")
        got = predictions(p, s, test, y, intercept=True, offset=True, fit=least_squares)
        bench.printed(got - expected, lacking="kernel equal to colsp(Sz)")
