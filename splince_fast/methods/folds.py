"""Erasers fitted to folds, with an evaluation on held-out rows from the moments of the folds.

The eraser is fitted to all rows. For the evaluation, one more eraser per fold is fitted to all
other folds and evaluated on that fold.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from splince_fast._runtime.rows import abbreviated
from splince_fast._runtime.warn import warn
from splince_fast._solve.factor import Factor
from splince_fast._solve.options import INTENSITIES, Options
from splince_fast._solve.selection import Span, span_of
from splince_fast.exceptions import InputError, SplinceError, UnseenRowsWarning
from splince_fast.methods.method_call import FEW_ROWS, MethodCall, Solved
from splince_fast.moments import Folds, Moments
from splince_fast.moments.snapshot import Factored, Statistics
from splince_fast.projection import Projection
from splince_fast.report import HeldOut, Report

Float = NDArray[np.float64]
Shrinkage: TypeAlias = float | str | None

# A warning is issued if the distortion of held-out rows exceeds that of fitted rows by this factor
# and by this difference. Random differences are of the order of the removed fraction of the
# variance.
_WORSE, _EXCESS = 2.0, 0.02
# A feature is weak if its standard deviation in the fitted rows is below this fraction of
# its standard deviation in the held-out rows.
_WEAK = 1e-2


@dataclass(frozen=True, slots=True)
class FoldReport:
    """Effect on one fold of an eraser r that was fitted to all other folds.

    Attributes
    ----------
    n_rows : int
        Number of rows of the fold.
    distortion : float
        E|r(x) - x|^2 over the fold, as a fraction of its total variance.
    distortion_fitted : float
        The same distortion over the rows that the eraser was fitted to.
    concept : float
        Remaining R^2 of the concept in the fold: the mean squared canonical correlation with r(x).
    chance : float
        Mean of `concept` for random labels: the rank of r(x) divided by n - 1.
    kept : float or None
        1 - |P Cov(x, y) - Cov(x, y)| / |Cov(x, y)| for features scaled to unit standard deviation;
        None if nothing is kept.
    amplification : float
        Spectral norm of I - P for x whitened by the covariance of the fold.

    Examples
    --------
    >>> import numpy as np
    >>> import splince_fast as sf
    >>> rng = np.random.default_rng(0)
    >>> z = rng.integers(0, 2, size=400)
    >>> X = rng.normal(size=(400, 4)) + np.outer(z, np.eye(4)[0])
    >>> folds = [sf.Moments().update(X[i::2], {"z": z[i::2]}) for i in range(2)]
    >>> report = sf.cross_report(folds, erase="z")
    >>> fold = report.folds[0]
    >>> fold.n_rows, fold.kept is None, fold.concept < 0.1
    (200, True, True)
    """

    n_rows: int
    distortion: float
    distortion_fitted: float
    concept: float
    chance: float
    kept: float | None
    amplification: float


@dataclass(frozen=True, slots=True)
class FoldEvaluation:
    """Evaluation of one eraser per fold, fitted to all other folds."""

    folds: tuple[FoldReport, ...]
    shrinkage: Shrinkage  # shrinkage of the fits; for "cv", the selected shrinkage
    # features whose standard deviation in the fitted rows is below 1 % of that in the held-out
    # fold, for at least one fold
    weak_features: tuple[int, ...]
    # minimum over the fits of the number of fitted rows divided by the rank of the covariance
    rows_per_rank: float
    # (str, float): other settings with a smaller distortion of held-out rows, each with this
    # distortion
    remedies: tuple[tuple[str, float], ...]
    warnings: tuple[str, ...]

    def warn(self) -> None:
        for note in self.warnings:
            warn(note, UnseenRowsWarning)

    def extended(self, report: Report) -> Report:
        """Return `report`, that of the eraser fitted to all rows, with the means over the folds."""
        kept = [fold.kept for fold in self.folds if fold.kept is not None]
        return dataclasses.replace(
            report,
            held_out=HeldOut(
                float(np.mean([fold.distortion for fold in self.folds])),
                float(np.mean([fold.concept for fold in self.folds])),
                float(np.mean([fold.chance for fold in self.folds])),
                float(np.mean(kept)) if kept else None,
            ),
            warnings=report.warnings + self.warnings,
        )


def eraser_of(moments: Moments | Factored | Folds, call: MethodCall) -> Projection:
    """Return the eraser fitted to all rows, with its report."""
    # If `moments` are folds, the report includes the effect on held-out rows.
    # `isinstance(moments, Folds)` is slow, because `Folds` is an abstract Sequence.
    if isinstance(moments, Moments) or not isinstance(moments, Folds):
        return call.fit(moments)
    evaluation = None
    try:
        evaluation = evaluate_folds(call, moments)
    except SplinceError as error:
        # A fit may fail, for example if a fold lacks a class. The report then omits the effect on
        # held-out rows.
        if call.options.shrinkage == "cv":
            error.add_note("while shrinkage='cv' was chosen on the folds")
            raise
    if evaluation is None:
        return call.fit(moments._total())
    evaluation.warn()
    call = call.with_shrinkage(evaluation.shrinkage)
    return call.fit(moments._total(), evaluation.extended)


def evaluate_folds(call: MethodCall, folds: Sequence[Moments]) -> FoldEvaluation:
    """Evaluate the erasers that are fitted to all folds but one, on the held-out folds."""
    if folds[0].parameters.is_diagonal:
        raise InputError(
            "the effect on held-out rows needs their covariance, which moments made with "
            "covariance_type='diag' do not keep; accumulate the folds with 'full'"
        )
    with ExitStack() as locks:

        def read(parts: Iterable[Moments]) -> list[Statistics]:
            return [locks.enter_context(part._statistics()) for part in parts]

        tests, parts = read(folds), list(folds)
        if len(parts) == 2:
            training = tests[::-1]
        else:  # merging the other folds avoids the cancellation of total - part
            training = read(Moments._sum_of(parts[:i] + parts[i + 1 :]) for i in range(len(parts)))
        return _evaluated(call, training, tests)


def _evaluated(
    call: MethodCall, training: Sequence[Statistics], tests: Sequence[Statistics]
) -> FoldEvaluation:
    options, whitened = call.options, call.whitened
    unshrunk = Options(solver=options.solver, min_scale=options.min_scale)
    # With two folds, each fold is training data for one eraser and test data for the other eraser:
    # one factor per fold is sufficient.
    factors = [test.factored(unshrunk, 0.0, None) for test in tests] if len(tests) == 2 else None

    def solve_all(call: MethodCall, shrinkage: Shrinkage) -> list[Solved]:
        call = call.with_shrinkage(shrinkage)
        existing = factors[::-1] if factors and shrinkage is None else [None] * len(training)
        solutions = []
        for stats, factor in zip(training, existing, strict=True):
            with stats.memory(call.whitened and factor is None) as memory:
                solutions.append(call.solve(stats, memory, factor))
        return solutions

    def distortion(erasers: Sequence[Solved]) -> float:
        pairs = zip(erasers, tests, strict=True)
        return float(np.mean([_distortion(e, test, test.gram(e.right)) for e, test in pairs]))

    shrinkage = options.shrinkage if whitened else None
    if shrinkage == "cv":
        distortions = {a: distortion(solve_all(call, a)) for a in (*INTENSITIES, "oas")}
        shrinkage = min(distortions, key=lambda a: distortions[a])
    erasers = solve_all(call, shrinkage)
    reports = []
    for i, (eraser, stats, test) in enumerate(zip(erasers, training, tests, strict=True)):
        if factors:  # the other eraser was fitted to fold i and has the spans of fold i
            factor, other = factors[i], erasers[1 - i]
            span_z, span_y = other.span_z, other.span_y
        else:
            # Keep one factor at a time, because a factor takes d x d numbers.
            factor = test.factored(Options(), 0.0, None)
            span_z = span_of(test, call.erase, "erase", whitened)
            span_y = span_of(test, call.keep, "keep", whitened)
        reports.append(_evaluate(eraser, stats, test, factor, span_z, span_y))
    fitted_deviations, held_out_deviations = (
        np.sqrt([stats.variances for stats in group]) for group in (training, tests)
    )
    low_variance = (fitted_deviations < _WEAK * held_out_deviations).any(axis=0)
    weak_features = tuple(np.flatnonzero(low_variance).tolist())
    held_out = float(np.mean([fold.distortion for fold in reports]))
    in_sample = float(np.mean([fold.distortion_fitted for fold in reports]))
    ranks = [
        eraser.solution.rank_covariance if whitened else min(len(stats.mean), stats.n_rows - 1)
        for eraser, stats in zip(erasers, training, strict=True)
    ]
    rows_per_rank = min(s.n_rows / max(1, rank) for s, rank in zip(training, ranks, strict=True))
    too_few = whitened and not shrinkage and rows_per_rank < FEW_ROWS
    remedies: list[tuple[str, float]] = []
    notes: tuple[str, ...] = ()
    if too_few or held_out > max(_WORSE * in_sample, in_sample + _EXCESS):
        reduced = None
        if whitened:
            sal = call._replace(method="SAL", whitened=False, classes_only=False, options=Options())
            candidates: list[tuple[str, MethodCall, Shrinkage]] = [
                (f"shrinkage={a!r}", call, a) for a in (1e-3, "oas") if a != shrinkage
            ]
            candidates.append(("SAL", sal, None))
            values = [(name, distortion(solve_all(other, a))) for name, other, a in candidates]
            remedies = [(name, value) for name, value in values if value < held_out]
            reduced = _rank_reduced_by_rounding(ranks, training)
        names = tests[0].feature_names
        notes = (
            _warning_text(
                held_out, in_sample, weak_features, rows_per_rank, reduced, remedies, names
            ),
        )
    return FoldEvaluation(
        tuple(reports), shrinkage, weak_features, rows_per_rank, tuple(remedies), notes
    )


def _distortion(eraser: Solved, stats: Statistics, gram: Float) -> float:
    """Return the distortion E|r(x) - x|^2 / tr Cov(x) of the eraser r over the rows of `stats`."""
    # `gram` is R Cov(x) R^T, where R is `eraser.right`, (r, d).
    left, right = eraser.left, eraser.right
    total = float(stats.variances.sum())
    if not len(left) or not total:
        return 0.0
    shift = right @ (stats.mean - eraser.mean)
    square = left @ left.T
    of_rows = float(np.sum(square * gram))
    return (of_rows + float(shift @ square @ shift)) / total


def _evaluate(
    eraser: Solved, fitted: Statistics, test: Statistics, factor: Factor, span_z: Span, span_y: Span
) -> FoldReport:
    """Evaluate an eraser, which was fitted to the rows of `fitted`, on the fold `test`."""
    # `factor` factors Cov(x) of the fold; `span_z` and `span_y` are its erased and its kept span.
    left, right = eraser.left, eraser.right
    removed = factor.whiten(np.ascontiguousarray(left))
    outside = (left - factor.unwhiten(removed)) * factor.inverse_scale
    inside = _combinations_inside(outside, left * factor.inverse_scale)
    basis = _orthonormal_rows(inside @ removed)
    trace, rank_z = _pillai(factor.whiten(span_z.rows), span_z, basis)
    kept = None
    if span_y.names:
        cross = span_y.rows
        change = ((cross @ right.T) @ left) * factor.inverse_scale
        size = float(np.linalg.norm(cross * factor.inverse_scale))
        kept = 1.0 - float(np.linalg.norm(change)) / size if size else 1.0
    gram = test.gram(right)
    squares = (removed @ removed.T) @ gram
    norm = np.abs(np.linalg.eigvals(squares)).max(initial=1.0)
    return FoldReport(
        n_rows=test.n_rows,
        distortion=_distortion(eraser, test, gram),
        distortion_fitted=_distortion(eraser, fitted, fitted.gram(right)),
        concept=trace / rank_z,
        chance=min(1.0, (factor.rank - len(basis)) / (max(2, round(test.weight)) - 1)),
        kept=kept,
        amplification=float(norm) ** 0.5,
    )


def _combinations_inside(outside: Float, scaled: Float) -> Float:
    """Return the combinations of the rows of `left` that lie in the support of the fold."""
    # `scaled` holds the rows of `left`, and `outside` their components off the support, both for
    # features scaled to unit standard deviation.
    if not len(outside):
        return np.zeros((0, 0))
    u, sizes, _ = np.linalg.svd(outside, full_matrices=False)
    inside = sizes <= 1e-6 * np.linalg.norm(scaled, axis=1).max()
    return np.asarray(u[:, inside].T)


def _orthonormal_rows(rows: Float) -> Float:
    if not len(rows):
        return rows
    _, sizes, vt = np.linalg.svd(rows, full_matrices=False)
    return np.asarray(vt[sizes > 1e-12 * max(float(sizes[0]), 1e-300)])


def _pillai(white: Float, span: Span, basis: Float) -> tuple[float, int]:
    """Return sum and number of the squared canonical correlations of x with the variables."""
    # `white` is the whitened `span` of the variables. Its component in the span of the rows of
    # `basis`, the directions that erasure removed, does not count.
    residual = white - (white @ basis.T) @ basis
    total, rank, start = 0.0, 0, 0
    for count, interpretation in zip(span.counts, span.interpretations, strict=True):
        matrix = interpretation().whitener
        total += float(np.sum((matrix @ residual[start : start + count]) ** 2))
        rank += min(matrix.shape)
        start += count
    return total, max(1, rank)


def _rank_reduced_by_rounding(
    ranks: Sequence[int], training: Sequence[Statistics]
) -> tuple[int, int] | None:
    """Return the smallest rank of Cov(x) that rounding error reduced, and its possible maximum."""
    # The maximum follows from the numbers of rows and of features that vary. The result is None if
    # the rank is the maximum in every fit.
    max_ranks = [min(int(np.count_nonzero(s.variances)), s.n_rows - 1) for s in training]
    pairs = [pair for pair in zip(ranks, max_ranks, strict=True) if pair[0] < pair[1]]
    return min(pairs) if pairs else None


def _warning_text(
    held_out: float, in_sample: float, weak_features: tuple[int, ...], rows_per_rank: float,
    ranks: tuple[int, int] | None, remedies: Sequence[tuple[str, float]],
    names: Sequence[str] | None,
) -> str:  # fmt: skip
    """Return the text of the warning: distortions, causes, and remedies with their distortions."""
    causes = []
    if weak_features:
        shown = abbreviated(weak_features, names)
        causes.append(f"{len(weak_features)} feature(s) hardly vary in the fitted rows ({shown})")
    if rows_per_rank < FEW_ROWS:
        causes.append(f"there are only {rows_per_rank:.2g} fitted rows per dimension of x")
    if ranks is not None:
        causes.append(
            f"the rank of the covariance, {ranks[0]} where {ranks[1]} features vary, depends on "
            "the rounding of the rows"
        )
    if not causes:
        causes.append("the covariance has directions that few rows determine")
    best = sorted(remedies, key=lambda pair: pair[1])
    settings = ", ".join(f"{name} {100 * value:.3g} %" for name, value in best)
    advice = f"Settings with less distortion on these folds: {settings}" if best else "Add rows"
    return (
        f"held-out rows are changed by {100 * held_out:.3g} % of the variance, fitted rows by "
        f"{100 * in_sample:.3g} %: " + " and ".join(causes)
        + f". {advice}"
    )  # fmt: skip
