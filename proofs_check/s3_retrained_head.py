"""Section 3: Theorem 2 on heads retrained without penalty, and each of its conditions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import mpmath  # type: ignore[import-untyped]
import numpy as np
from numpy.typing import NDArray

from proofs_check import _library, _reference
from proofs_check._check import Bench, Verdict, check
from proofs_check._families import Sample, continuous_sample, integers, is_nondegenerate, sample
from proofs_check._fits import (
    DIGITS,
    least_squares,
    range_coordinates,
    ridge_unpenalised_intercept,
    softmax,
    widest_margin,
    with_ones,
)
from proofs_check._heads import (
    Fit,
    constrained_predictions,
    other_kernel,
    penalty_metric,
    predictions,
    random_projector,
)
from proofs_check._linalg import (
    Matrix,
    column_basis,
    eye,
    high_precision,
    hstack,
    is_zero,
    null_basis,
    pinv,
    projector,
    rank,
    rational,
    to_float,
    trace,
)
from proofs_check._reference import Covariances, Eraser
from proofs_check._rounding import UNIT, tolerances

REGULAR = ("full rank", "multi-output", "one-hot")


@check(
    "3.1",
    Verdict.HOLDS,
    mutants={
        "other kernel": {"eraser": other_kernel},
        "ridge 0.01": {"fit": ridge_unpenalised_intercept},
        "transpose of P": {"eraser": lambda c: _reference.splince(c).T},
        "library: SPLINCE transposed": {"fitted": lambda s: to_float(_library.splince(s)).T},
    },
)
def retrained_least_squares(
    bench: Bench,
    *,
    eraser: Eraser = _reference.splince,
    fit: Fit = least_squares,
    fitted: Callable[[Sample], NDArray[np.float64]] = lambda s: to_float(_library.splince(s)),
) -> None:
    """Compare retrained least-squares heads behind several erasers with the constrained fit.

    The exact erasers must agree exactly. Library: let e be the whitened error of P, t the norm of a
    whitened test row with a 1 appended, and q = std(y) + |mean(y)|. In whitened coordinates the
    Gram matrix of the features is n I. The features change by sqrt(n) e, hence the coefficients by
    at most 2 e q, and the prediction of the test row by at most 4 e t q. The QR factorisation of
    the refit adds n d UNIT cond(S)^(1/2) to e.
    """
    for s in bench.samples(12, 3, REGULAR):
        c = s.covariances
        test = integers(bench.rng, 3, c.d, 9)
        y = s.y + integers(bench.rng, *s.y.shape)
        expected = constrained_predictions(s, test, y)
        for p in (eraser(c), _reference.leace(c), _reference.sal(c), random_projector(bench, c)):
            bench.add_printed(
                predictions(p, s, test, y, intercept=True, offset=True, fit=fit) - expected
            )
        tolerance, _, _, cond = tolerances(s)
        p_float = fitted(s)
        u = np.linalg.svd(p_float)[0]
        basis = u[:, : c.d - c.ranks[1]]
        rows, new = (
            np.hstack([to_float(x) @ p_float.T @ basis, np.ones((len(x), 1))]) for x in (s.x, test)
        )
        y_pred = new @ np.linalg.lstsq(rows, to_float(y))[0]
        centred = test - c.mean.T
        row_norm = np.sqrt(1 + float(trace(centred @ c.s_pinv @ centred.T)))
        error = tolerance + len(s.x) * c.d * UNIT * np.sqrt(cond)
        label_norm = float(np.linalg.norm(to_float(y).std(0)) + np.abs(to_float(y).mean(0)).max())
        bench.add_corrected(
            y_pred - to_float(expected), 4 * error * row_norm * label_norm, label="library"
        )


def _class_data(bench: Bench, classes: int) -> tuple[Sample, Matrix]:
    """Draw features and random classes.

    Returns a sample with the features, and class indicators without the reference class.
    """
    while True:
        s = sample(bench.rng, "full rank", 4)
        labels = bench.rng.integers(0, classes, len(s.x))
        if len(np.unique(labels)) == classes:
            return s, rational((labels[:, None] == np.arange(1, classes)).astype(int))


def _library_tolerance(scores: Matrix, s: Sample, rows: Matrix, error: float) -> float:
    """Return the bound on the change of scores by a whitened error of P.

    ``_classifier`` derives the bound.
    """
    values = to_float(scores)
    exponentials = np.hstack([np.ones((len(values), 1)), np.exp(values)])
    curvature = (
        float((exponentials / exponentials.sum(1, keepdims=True)).min()) / exponentials.shape[1]
    )
    score_norm = float(np.linalg.norm(values.std(0)))
    centred = rows - s.covariances.mean.T
    row_norm = np.sqrt(1 + float(trace(centred @ s.covariances.s_pinv @ centred.T)))
    return float(2 * error * row_norm * ((2 + score_norm / 2) / curvature + score_norm))


def _classifier(
    bench: Bench,
    classes: int,
    *,
    eraser: Eraser = _reference.splince,
    penalty: float = 0.0,
    fitted: Callable[[Sample], Matrix] = _library.splince,
) -> None:
    """Compare the scores of refitted heads with those of a head phi fitted on x under Sz^T phi = 0.

    All heads are computed to 40 digits. The tolerance is the sum of the two certificates, plus
    1e-30 for rounding errors.

    Library: the entries of its P are taken as exact numbers, and the head is restricted to a basis
    of the exact range. So the only error is the whitened error e of P. The Gram matrix of the
    whitened features is n I, and the features change by sqrt(n) e, as P^T does not shrink range(P).
    The Hessian is at least n times the smallest curvature of the log-loss, which is at least
    (smallest class probability) / classes. The score of a test row of whitened norm t changes by at
    most e t ((2 + |w| / 2) / curvature + |w|), where |w| is the standard deviation of the scores.
    The tolerance is twice this bound.
    """
    with mpmath.workdps(DIGITS):
        certified, n_needed = 0, len(bench.repeats(6, 1))
        while certified < n_needed:
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
                """Return the scores of a refitted head and their certificate.

                The scores are infinite if no minimiser is certified.
                """
                rows, new = (high_precision(with_ones(x @ weights)) for x in (s.x, test))
                try:
                    head = softmax(rows, target, new, ridge=ridge)
                except ValueError:
                    return np.full((len(test), classes - 1), np.inf), 0.0
                return head.scores, float(max(head.error))

            expected, error_expected = refit(null_basis(c.z.T))
            if expected[0, 0] == np.inf:
                continue  # separable classes: no minimiser exists, Theorem 2 does not apply
            certified += 1
            for p in (
                eraser(c),
                _reference.leace(c),
                _reference.sal(c),
                random_projector(bench, c),
            ):
                scores, error = refit(p.T @ range_coordinates(p), penalty)
                bench.add_printed(scores - expected, error_expected + error + 1e-30)
            basis = range_coordinates(_reference.splince(c))
            scores, _ = refit(fitted(s).T @ basis)
            tolerance = _library_tolerance(expected[: len(s.x)], s, test, tolerances(s)[0])
            bench.add_corrected(scores - expected, tolerance, label="library")


@check(
    "3.2",
    Verdict.HOLDS,
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
    """Compare retrained logistic heads with a constrained fit; see ``_classifier``."""
    _classifier(bench, 2, eraser=eraser, penalty=penalty(), fitted=fitted)


@check(
    "3.3",
    Verdict.HOLDS,
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
    """Compare retrained softmax heads (3 classes) with a constrained fit; see ``_classifier``."""
    _classifier(bench, 3, eraser=eraser, penalty=penalty(), fitted=fitted)


def _margins(
    bench: Bench, metric: Callable[[Matrix], Matrix]
) -> tuple[Matrix, list[Matrix]] | None:
    """Draw rows that are separable after erasure; return them and their widest-margin heads.

    The rows are multiplied by the sign of their class. The two heads are those behind SPLINCE and
    behind SAL. Returns None if the draw is not suitable.
    """
    x = bench.rng.integers(-3, 4, (8, 4))
    z = x[:, :1] + bench.rng.integers(-2, 3, (8, 1))
    s = continuous_sample(x, z, x[:, 1:2] + x[:, :1], "separable")
    c = s.covariances
    if not c.feasible or c.ranks != (4, 1, 1):
        return None
    basis = null_basis(c.z.T)
    rows = (s.x - c.mean.T) @ basis
    side = rows @ integers(bench.rng, 3, 1)
    if any(v == 0 for v in side.flat):
        return None
    signed = rows * np.array([[1 if v > 0 else -1] for v in side.flat], dtype=object)
    margins = [
        widest_margin(signed, basis.T @ metric(p) @ basis)
        for p in (_reference.splince(c), _reference.sal(c))
    ]
    return signed, [m for m in margins if m is not None]


def _separable(bench: Bench, metric: Callable[[Matrix], Matrix]) -> None:
    """Check that the widest margins behind SPLINCE and SAL differ if the classes are separable.

    If three support vectors determine the margin in three dimensions, both margins agree whatever
    the metric. Such draws are repeated, up to 20 draws in all.
    """
    for _ in bench.repeats(6, 2):
        rank_difference = 0
        for _ in range(20):
            drawn = _margins(bench, metric)
            if drawn is None:
                continue
            signed, margins = drawn
            for m in margins:
                bench.add_corrected(
                    int(min((signed @ m).flat) < 1), label="separates: no minimiser"
                )
            rank_difference = rank(hstack(*margins)) - 1
            if rank_difference:
                break
        bench.add_printed(rank_difference, violates="classes that are not separable after erasure")


def _few_rows(bench: Bench, rows: Callable[[int], int], d: int) -> Sample:
    """Draw integer data with ``rows(d)`` rows, a scalar concept and a scalar task."""
    while True:
        x = bench.rng.integers(-4, 5, (rows(d), d)) + bench.rng.integers(-3, 4, d)
        z = x @ bench.rng.integers(-2, 3, (d, 1))
        s = continuous_sample(x, z, z + x[:, :1], "few rows")
        if is_nondegenerate(s.covariances) and s.covariances.ranks[1:] == (1, 1):
            return s


def _least_norm_predictions(
    s: Sample, y: Matrix, test: Matrix, p: Matrix, subspace: Matrix | None
) -> Matrix:
    """Return predictions of the least-squares head of smallest |theta| on Px + b.

    The intercept is not penalised; centring the rows eliminates it, and b as well. ``subspace``
    restricts theta to the column space of a matrix.
    """
    mean = s.covariances.mean.T
    rows = (s.x - mean) @ p.T
    theta = pinv(rows if subspace is None else rows @ projector(subspace)) @ (y - y.sum() / len(y))
    return (test - mean) @ p.T @ theta + y.sum() / len(y)


def _library_erasers(s: Sample) -> list[tuple[Matrix, float]]:
    """Return SPLINCE, LEACE and SAL of the library, each with its Euclidean tolerance."""
    splince, leace, sal, cond = tolerances(s)
    root = float(np.sqrt(cond))
    return [
        (_library.splince(s), splince * root),
        (_library.leace(s), leace * root),
        (_library.sal(s), sal),
    ]


@check(
    "3.4",
    Verdict.CONDITIONAL,
    mutants={
        "one metric for all ranges": {"metric": lambda p: eye(len(p))},
        "enough rows": {"rows": lambda d: 2 * d + 4},
        "SPLINCE with a generic range": {"eraser": lambda bench, c: random_projector(bench, c)},
        "SPLINCE transposed": {"eraser": lambda bench, c: _reference.splince(c).T},
        "library: SPLINCE transposed": {
            "fitted": lambda s: [(p.T, size) for p, size in _library_erasers(s)]
        },
        "library: another concept": {
            "fitted": lambda s: _library_erasers(replace(s, z_labels=s.y_labels + s.z_labels))
        },
    },
)
def unique_minimiser(
    bench: Bench,
    *,
    metric: Callable[[Matrix], Matrix] = penalty_metric,
    rows: Callable[[int], int] = lambda d: d - 2,
    eraser: Callable[[Bench, Covariances], Matrix] = lambda bench, c: _reference.splince(c),
    fitted: Callable[[Sample], list[tuple[Matrix, float]]] = _library_erasers,
) -> None:
    """Check that retrained heads agree if the minimiser is unique, and can differ otherwise.

    Without a unique minimiser, the heads are of least norm (few rows) or of widest margin
    (separable classes). The widest margin minimises |theta|^2 = phi^T (P^T P)^+ phi over all heads
    of margin one; it is computed exactly, by enumeration of the active sets. Penalised heads
    converge to it as the penalty vanishes (Rosset, Zhu and Hastie, NeurIPS 2003), and so does
    gradient descent (Soudry et al., JMLR 19, 2018); neither is computed here.

    Library: theta is fitted in the exact space P supp(x), where the fit is unique. A Euclidean
    error e of P changes the erased rows by e |X|, and theta relatively by at most 2 e |X| / sigma,
    where sigma is the smallest singular value of the exact erased rows. The prediction of a test
    row changes by its norm times the change of theta, plus its norm times e |theta|. The tolerance
    is twice this bound.
    """
    for _ in bench.repeats(10, 3):
        s = sample(bench.rng, "full rank", 4)
        y, test = integers(bench.rng, len(s.x), 1), integers(bench.rng, 3, 4, 9)
        heads = [
            predictions(p, s, test, y, intercept=True, offset=True, fit=least_squares)
            for p in (_reference.splince(s.covariances), _reference.sal(s.covariances))
        ]
        bench.add_printed(heads[0] - heads[1])
    for i in bench.repeats(15, 4):
        d = 5 + i % 2
        s = _few_rows(bench, rows, d)
        c, n = s.covariances, len(s.x)
        test = integers(bench.rng, 3, d, 9)
        while True:  # a zero head would agree for all ranges
            y = integers(bench.rng, n, 1)
            expected = _least_norm_predictions(s, y, test, _reference.leace(c), None)
            if not is_zero(expected - y.sum() / n):
                break
        for p in (eraser(bench, c), _reference.sal(c), _reference.splince_drop(c)):
            bench.add_printed(_least_norm_predictions(s, y, test, p, None) - expected)
        generic = _least_norm_predictions(s, y, test, random_projector(bench, c), None)
        bench.add_printed(
            generic - expected, violates="n > d, or a range that maps supp(x) into itself"
        )
        penalised_intercept = []
        for p in (_reference.splince(c), _reference.sal(c)):
            rows_train, rows_test = (with_ones(_reference.erased(c, p, v)) for v in (s.x, test))
            penalised_intercept.append(rows_test @ least_squares(rows_train, y))
        bench.add_printed(
            penalised_intercept[0] - penalised_intercept[1],
            violates="n > d, or an intercept outside the norm",
        )
        erasers = (_reference.splince(c), _reference.leace(c), _reference.sal(c))
        for (p, error), exact_p in zip(fitted(s), erasers, strict=True):
            exact = (s.x - c.mean.T) @ exact_p.T
            sizes = np.linalg.svd(to_float(exact), compute_uv=False)
            data_norm = float(np.linalg.norm(to_float(s.x - c.mean.T), 2))
            theta = float(np.linalg.norm(to_float(pinv(exact) @ (y - y.sum() / n))))
            row_norm = float(np.linalg.norm(to_float(test - c.mean.T), axis=1).max())
            sigma = sizes[c.ranks[0] - c.ranks[1] - 1]
            tolerance = 2 * error * theta * row_norm * (1 + 2 * data_norm / sigma)
            gap = _least_norm_predictions(s, y, test, p, exact_p @ c.s) - expected
            bench.add_corrected(to_float(gap), tolerance, label="library")
    _separable(bench, metric)


@check(
    "3.5",
    Verdict.CONDITIONAL,
    paper=True,
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
    """Compare heads behind SPLINCE and SAL exactly, with and without b and an intercept.

    b is the constant of r(x) = Px + b.
    """
    for _ in bench.repeats(16, 5):
        s = sample(bench.rng, "full rank", 4)
        c = s.covariances
        y, test = integers(bench.rng, len(s.x), 1), integers(bench.rng, 3, 4, 9)
        projectors = (_reference.splince(c), _reference.sal(c))
        plain = [
            predictions(p, s, test, y, intercept=False, offset=False, fit=least_squares)
            for p in projectors
        ]
        bench.add_printed(plain[0] - plain[1])
        shifted = [
            predictions(p, s, test, y, intercept=intercept(), offset=offset(), fit=least_squares)
            for p in projectors
        ]
        bench.add_printed(shifted[0] - shifted[1], violates="an intercept, or b = 0")
        heads = []
        for p in projectors:
            b = (eye(4) - p) @ c.mean
            range_basis = column_basis(hstack(p, b))
            heads.append(
                (test @ p.T + b.T) @ range_basis @ least_squares((s.x @ p.T + b.T) @ range_basis, y)
            )
            if is_zero(b):
                break
        else:
            bench.add_corrected(heads[0] - heads[1], label="free heads")
            bench.add_corrected(
                heads[0] - constrained_predictions(s, test, y), label="free head with b"
            )


@check(
    "3.6",
    Verdict.CONDITIONAL,
    paper=True,
    mutants={
        "the larger kernel is not larger": {"larger": _reference.leace},
        "the larger kernel is no kernel": {"larger": lambda c: eye(c.d)},
    },
)
def guarded_methods(
    bench: Bench,
    *,
    larger: Eraser = lambda c: _reference.sal(
        Covariances(c.s, hstack(c.sz, c.s[:, :1]), c.sy, c.mean)
    ),
) -> None:
    """Compare retrained heads behind guarded erasers exactly.

    The heads agree if the kernel of the eraser is colsp(Sz), and differ if it is larger.
    """
    for _ in bench.repeats(16, 5):
        s = sample(bench.rng, "full rank", 4)
        c = s.covariances
        y, test = integers(bench.rng, len(s.x), 1), integers(bench.rng, 3, 4, 9)
        expected = constrained_predictions(s, test, y)
        for p in (_reference.splince(c), _reference.leace(c), _reference.sal(c)):
            y_pred = predictions(p, s, test, y, intercept=True, offset=True, fit=least_squares)
            bench.add_printed(y_pred - expected)
        p = larger(c)
        bench.add_corrected(p @ c.sz, label="guarded")
        y_pred = predictions(p, s, test, y, intercept=True, offset=True, fit=least_squares)
        bench.add_printed(y_pred - expected, violates="kernel equal to colsp(Sz)")
