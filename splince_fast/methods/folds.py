"""Effect of erasers on held-out rows, from the moments of folds.

For each fold, an eraser is fitted to the sum of the other folds and evaluated on the fold. The
eraser that is returned is fitted to all rows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from splince_fast._kernels.factor import Factor
from splince_fast._runtime.arguments import warn
from splince_fast._runtime.rows import abbreviated
from splince_fast._solve.options import INTENSITIES, Options
from splince_fast._solve.selection import Span, span_of
from splince_fast.exceptions import InputError, SplinceError, UnseenRowsWarning
from splince_fast.methods.fit import FEW_ROWS, MethodCall, Solved
from splince_fast.moments import Folds, Moments
from splince_fast.moments.statistics import Statistics
from splince_fast.projection import Projection
from splince_fast.report import HeldOut, Report, parts_of

Float = NDArray[np.float64]
Pairs = Sequence[tuple[Statistics, Statistics]]  # statistics of the other folds, and of the fold

# A warning is issued if the distortion of held-out rows exceeds that of fitted rows by this factor
# and by this difference. A feature is weak below this fraction of its held-out deviation.
_WORSE, _EXCESS, _WEAK = 2.0, 0.02, 1e-2


@dataclass(frozen=True, slots=True)
class FoldReport:
    """Effect on one fold of an eraser r that was fitted to all other folds.

    Attributes
    ----------
    n_rows : int
        Number of rows of the fold.
    distortion, distortion_fitted : float
        E|r(x) - x|^2 over the fold and over the fitted rows, relative to the total variance.
    concept : float
        Remaining R^2 of the concept in the fold: the mean squared canonical correlation with r(x).
    chance : float
        Mean of `concept` for random labels: the rank of r(x) divided by n - 1.
    kept : float or None
        1 - |P Cov(x, y) - Cov(x, y)| / |Cov(x, y)| for features scaled to unit standard deviation;
        None if nothing is kept.
    amplification : float
        Spectral norm of I - P for x whitened by the covariance of the fold.
    """

    n_rows: int
    distortion: float
    distortion_fitted: float
    concept: float
    chance: float
    kept: float | None
    amplification: float


@dataclass(frozen=True, slots=True)
class CrossReport:
    """Effect of an eraser on held-out rows.

    Attributes
    ----------
    method : str
        Label of the method.
    folds : tuple of FoldReport
        Effect on each fold.
    shrinkage : float, str or None
        Shrinkage of the fits; for ``"cv"``, the selected one.
    eraser : Projection
        Eraser fitted to all folds; its report contains the means over the folds.
    weak_features : tuple of int
        Features whose standard deviation in the fitted rows is below 1 % of that in some fold.
    rows_per_rank : float
        Least number of fitted rows divided by the rank of their covariance.
    remedies, warnings : tuple
        Texts of the warnings, and settings with less distortion in the folds, each with it.
    """

    method: str
    folds: tuple[FoldReport, ...]
    shrinkage: float | str | None
    eraser: Projection
    weak_features: tuple[int, ...]
    rows_per_rank: float
    remedies: tuple[tuple[str, float], ...]
    warnings: tuple[str, ...]

    @property
    def distortion(self) -> tuple[float, ...]:
        """Distortion of the held-out rows, one value per fold."""
        return tuple(fold.distortion for fold in self.folds)

    def to_dict(self) -> dict[str, Any]:
        """Return the results, without the eraser, as values that JSON can represent."""
        values = dataclasses.asdict(dataclasses.replace(self, eraser=cast(Any, None)))
        return {name: value for name, value in values.items() if name != "eraser"}

    def __str__(self) -> str:
        lines = [
            f"{self.method} on held-out rows (shrinkage {self.shrinkage})",
            f"  {'fold':>4} {'rows':>9} {'changed':>9} {'fitted':>9} {'remaining R^2':>13} "
            f"{'chance':>9} {'kept':>7} {'amplif.':>8}",
        ]
        for i, f in enumerate(self.folds):
            kept = "" if f.kept is None else f"{f.kept:.4f}"
            lines.append(
                f"  {i:>4} {f.n_rows:>9,} {100 * f.distortion:>8.3g}% "
                f"{100 * f.distortion_fitted:>8.3g}% {f.concept:>13.3g} {f.chance:>9.3g} "
                f"{kept:>7} {f.amplification:>8.3g}"
            )
        lines += [f"  with {name}: changed {100 * value:.3g} %" for name, value in self.remedies]
        return "\n".join([*lines, *(f"  warning: {text}" for text in self.warnings)])


def eraser_of_folds(folds: Folds, call: MethodCall) -> Projection:
    """Return the eraser of all rows; its report includes the effect on held-out rows."""
    total = folds.total
    try:
        return report_on(call, folds, total).eraser
    except SplinceError as error:
        if call.options.shrinkage == "cv":
            error.add_note("while shrinkage='cv' was chosen on the folds")
            raise
    return call.fit(total)  # without held-out figures, for example because a fold lacks a class


def report_on(call: MethodCall, folds: Sequence[Moments], total: Moments) -> CrossReport:
    """Evaluate erasers fitted to all folds but one on the held-out fold; fit one to the total."""
    if total.parameters.is_diagonal:
        raise InputError(
            "the effect on held-out rows needs their covariance; accumulate the folds with "
            "covariance_type='full'"
        )
    parts = list(folds)
    with ExitStack() as locks:
        enter = locks.enter_context
        tests = {  # sorted to avoid a deadlock
            id(part): enter(part._statistics()) for part in sorted(parts, key=lambda p: id(p._lock))
        }
        # Sums of the other folds avoid the cancellation of total - part.
        others = [Moments._sum_of(parts[:i] + parts[i + 1 :]) for i in range(len(parts))]
        pairs = [
            (enter(other._statistics()), tests[id(part)])
            for other, part in zip(others, parts, strict=True)
        ]
        if call.options.shrinkage == "cv":
            candidates = [call.with_shrinkage(a) for a in (*INTENSITIES, "oas")]
            call = min(candidates, key=lambda candidate: _mean_distortion(candidate, pairs))
        fits = [(call.solve(fitted), fitted, test) for fitted, test in pairs]
        reports = tuple(_fold_report(call, *fit) for fit in fits)
        deviations = np.sqrt([[stats.variances for stats in pair] for pair in pairs])
        weak = (deviations[:, 0] < _WEAK * deviations[:, 1]).any(axis=0)
        weak_features = tuple(np.flatnonzero(weak).tolist())
        ranks = [
            eraser.solution.rank_covariance
            if call.whitened
            else min(len(fitted.mean), fitted.n_rows - 1)
            for eraser, fitted, _ in fits
        ]
        rows_per_rank = min(f.n_rows / max(1, r) for (f, _), r in zip(pairs, ranks, strict=True))
        remedies, notes = _advice(call, pairs, reports, weak_features, rows_per_rank)
    for note in notes:
        warn(note, UnseenRowsWarning)
    eraser = call.fit(total, partial(_with_means, reports, notes))
    return CrossReport(
        call.method, reports, call.options.shrinkage, eraser, weak_features, rows_per_rank,
        remedies, notes,
    )  # fmt: skip


def _with_means(reports: Sequence[FoldReport], notes: tuple[str, ...], report: Report) -> Report:
    """Return the report of the eraser of all rows, with the means over the folds."""
    kept = [fold.kept for fold in reports if fold.kept is not None]
    distortion, concept, chance = (
        float(np.mean([getattr(fold, name) for fold in reports]))
        for name in ("distortion", "concept", "chance")
    )
    held_out = HeldOut(distortion, concept, chance, float(np.mean(kept)) if kept else None)
    return dataclasses.replace(report, held_out=held_out, warnings=report.warnings + notes)


def _mean_distortion(call: MethodCall, pairs: Pairs) -> float:
    return float(np.mean([_distortion(call.solve(fitted), test) for fitted, test in pairs]))


def _distortion(eraser: Solved, stats: Statistics) -> float:
    """Return E|r(x) - x|^2 / tr Cov(x) of the eraser r over the rows of `stats`."""
    left, right, total = eraser.left, eraser.right, float(stats.variances.sum())
    if not len(left) or not total:
        return 0.0
    square, shift = left @ left.T, right @ (stats.mean - eraser.mean)
    return float(np.sum(square * stats.gram(right)) + shift @ square @ shift) / total


def _fold_report(
    call: MethodCall, eraser: Solved, fitted: Statistics, test: Statistics
) -> FoldReport:
    """Evaluate an eraser, which was fitted to the rows of `fitted`, on the fold `test`."""
    left, right = eraser.left, eraser.right
    factor = test.factored(Options(), 0.0)
    span_z = span_of(test, call.erase, "erase", call.whitened)
    span_y = span_of(test, call.keep, "keep", call.whitened)
    removed = factor.whiten(np.ascontiguousarray(left))
    basis = _removed_directions(factor, left, removed)
    kept = None
    if span_y.names:
        change = ((span_y.rows @ right.T) @ left) * factor.inverse_scale
        size = float(np.linalg.norm(span_y.rows * factor.inverse_scale))
        kept = 1.0 - float(np.linalg.norm(change)) / size if size else 1.0
    # |I - P|^2 is the largest eigenvalue of (L^+ A)^T (L^+ A) B^T S B, for S = L L^T.
    squares = np.linalg.eigvals((removed @ removed.T) @ test.gram(right))
    return FoldReport(
        n_rows=test.n_rows,
        distortion=_distortion(eraser, test),
        distortion_fitted=_distortion(eraser, fitted),
        concept=_association(factor.whiten(span_z.rows), span_z, basis),
        chance=min(1.0, (factor.rank - len(basis)) / (max(2, round(test.weight)) - 1)),
        kept=kept,
        amplification=float(np.abs(squares).max(initial=1.0)) ** 0.5,
    )


def _removed_directions(factor: Factor, left: Float, removed: Float) -> Float:
    """Return an orthonormal basis of the whitened directions that erasure removed from a fold."""
    # Of the rows of `left`, only the combinations in the support of the fold restrict erased rows.
    # Both are compared for features scaled to unit standard deviation.
    outside = (left - factor.unwhiten(removed)) * factor.inverse_scale
    norms = np.linalg.norm(left * factor.inverse_scale, axis=1)
    u, sizes, _ = np.linalg.svd(outside, full_matrices=False)
    inside = u[:, sizes <= 1e-6 * norms.max(initial=0.0)].T
    _, sizes, vt = np.linalg.svd(inside @ removed, full_matrices=False)
    return np.asarray(vt[sizes > 1e-12 * sizes.max(initial=1e-300)])


def _association(white: Float, span: Span, basis: Float) -> float:
    """Return the mean squared canonical correlation of erased rows with the variables."""
    # `white` is the whitened `span`; its component in the removed directions does not count.
    residual, total, rank = white - (white @ basis.T) @ basis, 0.0, 0
    for _, part, interpretation in parts_of(span):
        total += float(np.sum((interpretation.whitener @ residual[part]) ** 2))
        rank += min(interpretation.whitener.shape)
    return total / max(1, rank)


def _advice(
    call: MethodCall, pairs: Pairs, reports: Sequence[FoldReport], weak_features: tuple[int, ...],
    rows_per_rank: float,
) -> tuple[tuple[tuple[str, float], ...], tuple[str, ...]]:  # fmt: skip
    """Return settings with less distortion, each with it, and the texts of the warnings."""
    held_out = float(np.mean([fold.distortion for fold in reports]))
    in_sample = float(np.mean([fold.distortion_fitted for fold in reports]))
    shrinkage, few = call.options.shrinkage, rows_per_rank < FEW_ROWS
    too_few = call.whitened and not shrinkage and few
    if not too_few and held_out <= max(_WORSE * in_sample, in_sample + _EXCESS):
        return (), ()
    remedies: list[tuple[str, float]] = []
    if call.whitened:
        sal = call._replace(method="SAL", whitened=False, classes_only=False, options=Options())
        candidates = {f"shrinkage={a!r}": call.with_shrinkage(a) for a in (1e-3, "oas")}
        candidates.pop(f"shrinkage={shrinkage!r}", None)
        values = [(n, _mean_distortion(c, pairs)) for n, c in {**candidates, "SAL": sal}.items()]
        remedies = [(name, value) for name, value in values if value < held_out]
    causes = []
    if weak_features:
        shown = abbreviated(weak_features, pairs[0][1].feature_names)
        causes.append(f"{len(weak_features)} feature(s) hardly vary in the fitted rows ({shown})")
    if few:
        causes.append(f"there are only {rows_per_rank:.2g} fitted rows per dimension of x")
    if not causes:
        causes.append("the covariance has directions that few rows determine")
    settings = ", ".join(
        f"{name} {100 * value:.3g} %" for name, value in sorted(remedies, key=itemgetter(1))
    )
    advice = f"Settings with less distortion on these folds: {settings}" if remedies else "Add rows"
    note = (
        f"held-out rows are changed by {100 * held_out:.3g} % of the variance, fitted rows by "
        f"{100 * in_sample:.3g} %: {' and '.join(causes)}. {advice}"
    )
    return tuple(remedies), (note,)
