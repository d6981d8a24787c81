"""Theorem 2: heads retrained without penalty on erasers of a common kernel predict the same."""

from __future__ import annotations

from collections.abc import Callable

import mpmath  # type: ignore[import-untyped]
import numpy as np
from numpy.typing import NDArray

from proofs_check import _library, _reference
from proofs_check._check import Bench, Verdict, check
from proofs_check._families import Sample, integers, sample
from proofs_check._fits import (
    DIGITS,
    least_squares,
    range_coordinates,
    ridge,
    softmax,
    with_ones,
)
from proofs_check._linalg import (
    Matrix,
    beside,
    eye,
    high_precision,
    null_basis,
    oblique,
    rank,
    rational,
    to_float,
    trace,
)
from proofs_check._reference import Covariances
from proofs_check._rounding import UNIT
from proofs_check.theorem1 import Eraser, tolerances

Fit = Callable[[Matrix, Matrix], Matrix]


def random_range(bench: Bench, c: Covariances) -> Matrix:
    """Random projector with kernel colsp(Sz)."""
    while True:
        onto = integers(bench.rng, c.d, c.d - c.ranks[1])
        if rank(beside(onto, c.z)) == c.d:
            return oblique(onto, c.z)


def other_kernel(c: Covariances) -> Matrix:
    """LEACE for another concept: z + y."""
    return _reference.leace(Covariances(c.s, c.sz + c.sy[:, :1], c.sy, c.mean))


def predictions(
    p: Matrix, sample: Sample, test: Matrix, y: Matrix, *, intercept: bool, offset: bool, fit: Fit
) -> Matrix:
    """Head theta in range(P) fitted on r(x) = Px + b, read at the rows of ``test``.

    ``offset`` chooses b = E x - P E x instead of 0; ``fit`` maps (features, y) to coefficients.
    """
    shift = (eye(len(p)) - p) @ sample.covariances.mean if offset else 0 * sample.covariances.mean
    basis = range_coordinates(p)

    def seen(x: Matrix) -> Matrix:
        rows = (x @ p.T + shift.T) @ basis
        return with_ones(rows) if intercept else rows

    return seen(test) @ fit(seen(sample.x), y)


def _ridge_fit(features: Matrix, y: Matrix) -> Matrix:
    """Ridge of strength 1/100 on all coefficients but the intercept."""
    penalty = eye(features.shape[1]) / 100
    penalty[-1, -1] = 0 * penalty[-1, -1]
    return ridge(features, y, penalty)


def constrained(sample: Sample, test: Matrix, y: Matrix) -> Matrix:
    """The reference: phi fitted on raw rows under Sz^T phi = 0, with intercept."""
    basis = null_basis(sample.covariances.z.T)
    return with_ones(test @ basis) @ least_squares(with_ones(sample.x @ basis), y)


REGULAR = ("full rank", "multi-output", "one-hot")


@check(
    "3.1",
    "Same kernel, least squares without penalty: same predictions",
    source="Theorem 2",
    convention="head refitted on r(x) = Px + b, with intercept",
    expected=Verdict.HOLDS,
    truth=(
        "True for SPLINCE, LEACE, SAL and any other range, at every x in R^d. The reason: "
        "theta -> P^T theta maps range(P) one to one onto ker(P)^perp, so each fit is the same "
        "fit of phi on raw x under Sz^T phi = 0."
    ),
    meaning="Refit a head without penalty and the choice between the three does not matter.",
    mutants={
        "other kernel": {"eraser": other_kernel},
        "ridge 0.01": {"fit": _ridge_fit},
        "transpose of P": {"eraser": lambda c: _reference.splince(c).T},
        "library: SPLINCE transposed": {
            "fitted": lambda s: to_float(_library.splince(s)).T,
        },
    },
)
def retrained_least_squares(
    bench: Bench,
    *,
    eraser: Eraser = _reference.splince,
    fit: Fit = least_squares,
    fitted: Callable[[Sample], NDArray[np.float64]] = lambda s: to_float(_library.splince(s)),
) -> None:
    """Exact. Library, in whitened coordinates where the features have n times the identity as
    Gram matrix: an error e of P (whitened) changes them by sqrt(n) e, hence the fitted
    coefficients by at most 2 e times the norm of y over sqrt(n) plus that of the coefficients
    (both at most std(y)); a test row of whitened norm t then by 4 e t std(y). The QR of the
    refit adds a relative n d UNIT cond(S)^(1/2) of the same."""
    for s in bench.samples(12, 3, REGULAR):
        c = s.covariances
        test = integers(bench.rng, 3, c.d, 9)
        y = s.y + integers(bench.rng, *s.y.shape)
        expected = constrained(s, test, y)
        for p in (eraser(c), _reference.leace(c), _reference.sal(c), random_range(bench, c)):
            bench.printed(
                predictions(p, s, test, y, intercept=True, offset=True, fit=fit) - expected
            )
        tolerance, _, _, cond = tolerances(s)
        p_float = fitted(s)
        u = np.linalg.svd(p_float)[0]
        basis = u[:, : c.d - c.ranks[1]]
        rows, new = (
            np.hstack([to_float(x) @ p_float.T @ basis, np.ones((len(x), 1))]) for x in (s.x, test)
        )
        got = new @ np.linalg.lstsq(rows, to_float(y))[0]
        centred = test - c.mean.T
        reach = np.sqrt(1 + float(trace(centred @ c.s_pinv @ centred.T)))
        error = tolerance + len(s.x) * c.d * UNIT * np.sqrt(cond)
        spread = float(np.linalg.norm(to_float(y).std(0)) + np.abs(to_float(y).mean(0)).max())
        bench.corrected(got - to_float(expected), 4 * error * reach * spread, label="library")


def _class_data(bench: Bench, classes: int) -> tuple[Sample, Matrix]:
    """Data whose classes overlap, and class indicators without the reference."""
    while True:
        s = sample(bench.rng, "full rank", 4)
        labels = bench.rng.integers(0, classes, len(s.x))
        if len(np.unique(labels)) == classes:
            return s, rational((labels[:, None] == np.arange(1, classes)).astype(int))


def _library_slack(scores: Matrix, s: Sample, rows: Matrix, error: float) -> float:
    """Bound on the scores where P carries a whitened error; see ``_classifier``."""
    values = to_float(scores)
    powers = np.hstack([np.ones((len(values), 1)), np.exp(values)])
    curve = float((powers / powers.sum(1, keepdims=True)).min()) / powers.shape[1]
    size = float(np.linalg.norm(values.std(0)))
    centred = rows - s.covariances.mean.T
    reach = np.sqrt(1 + float(trace(centred @ s.covariances.s_pinv @ centred.T)))
    return float(2 * error * reach * ((2 + size / 2) / curve + size))


def _classifier(
    bench: Bench,
    classes: int,
    *,
    eraser: Eraser = _reference.splince,
    penalty: float = 0.0,
    fitted: Callable[[Sample], Matrix] = _library.splince,
) -> None:
    """Scores of refitted heads at 40 digits, held against phi fitted on raw x with Sz^T phi = 0.

    Tolerance: the two certificates, and 1e-30 for rounding at 40 digits. Library: its P is taken
    as exact and V spans the exact range, so only the error e of P (whitened) counts. Whitened, the
    features have Gram matrix n I and change by sqrt(n) e (P^T does not shrink range(P)). The
    Hessian is at least n times the smallest curvature of the log-loss, which is at least
    (smallest class probability) / classes, so a test row of whitened norm t moves by at most
    e t ((2 + |w| / 2) / curvature + |w|), |w| the standard deviation of the scores; times 2.
    """
    with mpmath.workdps(DIGITS):
        certified, wanted = 0, len(bench.repeats(6, 1))
        while certified < wanted:
            s, y = _class_data(bench, classes)
            c, target = s.covariances, high_precision(y)
            test = np.vstack([s.x, integers(bench.rng, 4, c.d, 9)])

            def refit(
                weights: Matrix,
                ridge: float = 0.0,
                s: Sample = s,
                test: Matrix = test,
                target: Matrix = target,
            ) -> tuple[Matrix, float]:
                """Scores and certificate; infinite scores where no minimiser can be certified."""
                rows, new = (high_precision(with_ones(x @ weights)) for x in (s.x, test))
                try:
                    head = softmax(rows, target, new, ridge=ridge)
                except ValueError:
                    return np.full((len(test), classes - 1), np.inf), 0.0
                return head.scores, float(max(head.error))

            expected, slack = refit(null_basis(c.z.T))
            if expected[0, 0] == np.inf:
                continue  # separable by chance: no minimiser, outside the hypotheses
            certified += 1
            for p in (eraser(c), _reference.leace(c), _reference.sal(c), random_range(bench, c)):
                scores, more = refit(p.T @ range_coordinates(p), penalty)
                bench.printed(scores - expected, slack + more + 1e-30)
            basis = range_coordinates(_reference.splince(c))
            scores, _ = refit(fitted(s).T @ basis)
            tolerance = _library_slack(expected[: len(s.x)], s, test, tolerances(s)[0])
            bench.corrected(scores - expected, tolerance, label="library")


@check(
    "3.2",
    "Same kernel, logistic regression without penalty: same predictions",
    source="Theorem 2",
    convention="head refitted on r(x) = Px + b, with intercept",
    expected=Verdict.HOLDS,
    truth=(
        "True wherever the likelihood has a minimiser (classes not linearly separable after "
        "erasure) and it is unique (independent features on the range)."
    ),
    meaning="As for least squares; with separable classes see 3.4.",
    mutants={
        "other kernel": {"eraser": other_kernel},
        "ridge 0.01": {"penalty": lambda: 0.01},
        "transpose of P": {"eraser": lambda c: _reference.splince(c).T},
        "library: SPLINCE transposed": {"fitted": lambda s: _library.splince(s).T},
    },
)
def retrained_logistic(
    bench: Bench,
    *,
    eraser: Eraser = _reference.splince,
    penalty: Callable[[], float] = lambda: 0.0,
    fitted: Callable[[Sample], Matrix] = _library.splince,
) -> None:
    """See ``_classifier``."""
    _classifier(bench, 2, eraser=eraser, penalty=penalty(), fitted=fitted)


@check(
    "3.3",
    "Same kernel, three-class softmax without penalty: same predictions",
    source="Theorem 2",
    convention="head refitted on r(x) = Px + b, with intercept",
    expected=Verdict.HOLDS,
    truth=(
        "True under the conditions of 3.2, with one class as reference: the full parameter matrix "
        "is never unique, the probabilities are."
    ),
    mutants={
        "other kernel": {"eraser": other_kernel},
        "ridge 0.01": {"penalty": lambda: 0.01},
        "library: SPLINCE transposed": {"fitted": lambda s: _library.splince(s).T},
    },
)
def retrained_softmax(
    bench: Bench,
    *,
    eraser: Eraser = _reference.splince,
    penalty: Callable[[], float] = lambda: 0.0,
    fitted: Callable[[Sample], Matrix] = _library.splince,
) -> None:
    """See ``_classifier``."""
    _classifier(bench, 3, eraser=eraser, penalty=penalty(), fitted=fitted)
