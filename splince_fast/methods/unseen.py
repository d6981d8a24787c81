"""Figures of rows that an eraser was not fitted on, from the moments of folds."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias, cast

import numpy as np
from numpy.typing import NDArray

from splince_fast._runtime.arrays import abbreviated
from splince_fast._solve.options import INTENSITIES, Options
from splince_fast._solve.selection import Span, span_of
from splince_fast.exceptions import InputError, SplinceWarning, UnseenRowsWarning
from splince_fast.moments import Moments
from splince_fast.moments.factored import Factored, Statistics, statistics
from splince_fast.projection import Projection
from splince_fast.report import HeldOut, Report

Float = NDArray[np.float64]
Source: TypeAlias = Moments | Factored
Shrinkage: TypeAlias = float | str | None
Fit: TypeAlias = Callable[[Source, Shrinkage], Projection]

# Unseen rows fare worse if they are changed so many times as much as fitted ones, and more than
# by chance, which is of the order of the share of the variance that is removed.
_WORSE, _EXCESS = 2.0, 0.02
# With fewer fitted rows per dimension a covariance is mostly noise, unless it is shrunk.
_FEW_ROWS = 2.0
# A feature is nearly dead where it varies this many times less than where it was not seen.
_DEAD = 1e-2


@dataclass(frozen=True, slots=True)
class FoldReport:
    """An eraser fitted to all other folds, on the rows of one fold.

    Attributes
    ----------
    n_rows : int
        Of the fold.
    distortion : float
        E|r(x) - x|^2 over the fold, as a share of its total variance.
    distortion_fitted : float
        The same of the rows that the eraser was fitted to.
    concept : float
        R^2 left of the concept: mean squared canonical correlation with r(x), in the fold.
    chance : float
        Its mean where labels are dealt at random: rank of r(x) / (n - 1).
    kept : float or None
        1 - |P Cov(x, y) - Cov(x, y)| / |Cov(x, y)| in units of deviations; None if nothing is kept.
    amplification : float
        Spectral norm of I - P in coordinates in which the fold is white.

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
class Unseen:
    """Held-out figures of the erasers that are fitted to all other folds.

    Attributes
    ----------
    folds : tuple of FoldReport
    shrinkage : float, str or None
        Requested intensity; the chosen one for "cv".
    weak_features : tuple of int
    rows_per_rank : float
    remedies : tuple of (str, float)
    warnings : tuple of str
    """

    folds: tuple[FoldReport, ...]
    shrinkage: Shrinkage
    weak_features: tuple[int, ...]
    rows_per_rank: float
    remedies: tuple[tuple[str, float], ...]
    warnings: tuple[str, ...]

    def told(self, eraser: Projection) -> Projection:
        """The eraser of all rows, with a report that holds the means of these figures."""
        return Projection._make(
            eraser.left.T, eraser.right.T, eraser.mean, method=eraser.method,
            report=partial(self._report, eraser),
        )  # fmt: skip

    def _report(self, eraser: Projection) -> Report:
        report = cast(Report, eraser.report)  # every method writes one
        kept = [f.kept for f in self.folds if f.kept is not None]
        return dataclasses.replace(
            report,
            held_out=HeldOut(
                float(np.mean([f.distortion for f in self.folds])),
                float(np.mean([f.concept for f in self.folds])),
                float(np.mean([f.chance for f in self.folds])),
                float(np.mean(kept)) if kept else None,
            ),
            warnings=report.warnings + self.warnings,
        )


def judge(
    parts: Sequence[Moments], fit: Fit, erase: Any, keep: Any, options: Options, *,
    whitened: bool, plain: Fit, names: Sequence[str] | None = None,
) -> Unseen:  # fmt: skip
    """Fit without each part in turn, and evaluate on that part.

    Parameters
    ----------
    parts : sequence of Moments
        Two or more.
    fit : callable
        ``fit(moments, shrinkage)`` gives an eraser.
    erase, keep
        What `fit` erases and keeps.
    options : Options
        Of `fit`.
    whitened : bool
        Whether `fit` factors Cov(x).
    plain : callable
        The same without whitening, as a remedy.
    names : sequence of str, optional
        Of the features.
    """
    if parts[0].parameters.sketch_size is not None:
        raise InputError(
            "figures of held-out rows need their covariance, which moments made with sketch_size= "
            "do not keep; accumulate the folds without it"
        )
    count = len(parts)
    # Sums of the others, not total - part: nothing cancels.
    rest = [parts[1 - i] for i in range(2)] if count == 2 else [
        merged([p for j, p in enumerate(parts) if j != i]) for i in range(count)
    ]  # fmt: skip
    own: list[Factored] | None = None
    known: list[Source] = list(rest)
    if count == 2:  # what one eraser is fitted to is what the other is evaluated on
        own = [part.factored(solver=options.solver, min_scale=options.min_scale) for part in parts]
        known = list(reversed(own))

    def erasers(make: Fit, shrinkage: Shrinkage) -> list[Projection]:
        sources = known if shrinkage is None else rest
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SplinceWarning)
            return [make(source, shrinkage) for source in sources]

    def changed(found: list[Projection]) -> float:
        return float(np.mean([_change(e, part) for e, part in zip(found, parts, strict=True)]))

    share = options.shrinkage if whitened else None
    if share == "cv":
        tried = {a: changed(erasers(fit, a)) for a in (*INTENSITIES, "oas")}
        share = min(tried, key=lambda a: tried[a])
    fitted = erasers(fit, share)
    figures = tuple(
        _evaluate(
            fitted[i], known[i], parts[i].factored() if own is None else own[i], erase, keep,
            whitened,
        )
        for i in range(count)
    )  # fmt: skip
    ranks = [
        e.report.rank_covariance or min(e.n_features, m.n_rows - 1)
        for e, m in zip(fitted, rest, strict=True)
        if e.report is not None
    ]
    rows_per_rank = min(m.n_rows / max(1, r) for m, r in zip(rest, ranks, strict=True))
    weak = _weak_features(rest, parts)
    mean_unseen = float(np.mean([f.distortion for f in figures]))
    mean_fitted = float(np.mean([f.distortion_fitted for f in figures]))
    remedies: list[tuple[str, float]] = []
    notes: tuple[str, ...] = ()
    worse = mean_unseen > max(_WORSE * mean_fitted, mean_fitted + _EXCESS)
    if worse or (whitened and not share and rows_per_rank < _FEW_ROWS):
        rounded = None
        if whitened:
            tries: list[tuple[str, Fit, Shrinkage]] = [
                (f"shrinkage={a!r}", fit, a) for a in (1e-3, "oas") if a != share
            ]
            tries.append(("SAL", plain, None))
            found = [(name, changed(erasers(make, a))) for name, make, a in tries]
            remedies = [(name, value) for name, value in found if value < mean_unseen]
            rounded = _rank_of_rounding(fitted, rest)
        notes = (_text(mean_unseen, mean_fitted, weak, rows_per_rank, rounded, remedies, names),)
    return Unseen(figures, share, weak, float(rows_per_rank), tuple(remedies), notes)


def warn(notes: Sequence[str], stacklevel: int) -> None:
    """Warn of what folds show."""
    for note in notes:
        warnings.warn(note, UnseenRowsWarning, stacklevel=stacklevel + 1)


def few_rows(eraser: Projection) -> Projection:
    """Warn, and note it, where an eraser that no folds judge was fitted to few rows.

    Parameters
    ----------
    eraser : Projection
        Fitted to all rows.
    """
    report = eraser.report
    rank = None if report is None or report.shrinkage else report.rank_covariance
    if report is None or not rank or report.n_rows >= _FEW_ROWS * rank:
        return eraser
    note = (
        f"there are only {report.n_rows / rank:.2g} rows per dimension of x (rank {rank}): the "
        "covariance is mostly noise, and held-out rows may be changed far more than fitted ones. "
        "Add rows, pass shrinkage='oas', or use SAL"
    )
    warn([note], 2)
    return Projection._make(
        eraser.left.T, eraser.right.T, eraser.mean, method=eraser.method,
        report=dataclasses.replace(report, warnings=(*report.warnings, note)),
    )  # fmt: skip


def merged(parts: Sequence[Moments]) -> Moments:
    """(new) moments of all parts together."""
    total = parts[0].copy()
    for part in parts[1:]:
        total += part
    return total


def _changed(eraser: Projection, known: Statistics) -> float:
    """E|r(x) - x|^2 over tr Cov(x), on the rows of these moments."""
    left, right = eraser.left.T, np.ascontiguousarray(eraser.right.T)
    total = float(known.variances.sum())
    if not len(left) or not total:
        return 0.0
    shift = right @ (known.mean - eraser.mean)
    square = left @ left.T
    spread = float(np.sum(square * known.gram(right)))
    return (spread + float(shift @ square @ shift)) / total


def _change(eraser: Projection, part: Source) -> float:
    with statistics(part) as known:
        return _changed(eraser, known)


def _evaluate(
    eraser: Projection, rest: Source, part: Factored, erase: Any, keep: Any, whitened: bool
) -> FoldReport:
    """All figures of one fold."""
    with statistics(part) as known:
        factor = part.factor
        span = span_of(known, erase, "erase", whitened)
        left, right = eraser.left.T, np.ascontiguousarray(eraser.right.T)
        gone = factor.whiten(np.ascontiguousarray(left))
        outside = (left - factor.unwhiten(gone)) * factor.inverse_scale
        lost = _combinations_inside(outside, left * factor.inverse_scale) @ gone
        basis = _orthonormal_rows(lost)
        trace, rank_z = _pillai(factor.whiten(span.rows), span, basis)
        n = max(2, round(known.weight))
        kept = None
        if keep is not None:
            wanted = span_of(known, keep, "keep", whitened).rows
            removed = ((wanted @ right.T) @ left) * factor.inverse_scale
            size = float(np.linalg.norm(wanted * factor.inverse_scale))
            kept = 1.0 - float(np.linalg.norm(removed)) / size if size else 1.0
        norm = np.linalg.eigvals((gone @ gone.T) @ known.gram(right)) if len(left) else np.zeros(1)
        return FoldReport(
            n_rows=part.n_rows,
            distortion=_changed(eraser, known),
            distortion_fitted=_change(eraser, rest),
            concept=trace / rank_z,
            chance=min(1.0, (factor.rank - len(basis)) / (n - 1)),
            kept=kept,
            amplification=float(max(1.0, np.abs(norm).max())) ** 0.5,
        )


def _combinations_inside(outside: Float, scaled: Float) -> Float:
    """Combinations of the columns of `left` that lie in the support: only these are lost there."""
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
    """Sum of squared canonical correlations with what is orthogonal to `basis`, and their rank."""
    left_over = white - (white @ basis.T) @ basis
    total, rank, start = 0.0, 0, 0
    for count, reading in zip(span.counts, span.readings, strict=True):
        _, matrix, _ = reading()
        total += float(np.sum((matrix @ left_over[start : start + count]) ** 2))
        rank += min(matrix.shape)
        start += count
    return total, max(1, rank)


def _weak_features(rest: Sequence[Moments], parts: Sequence[Moments]) -> tuple[int, ...]:
    """Features that hardly vary in the rows of a fit but do in the fold left out."""
    weak: set[int] = set()
    for moments, part in zip(rest, parts, strict=True):
        with statistics(moments) as fitted, statistics(part) as unseen:
            deviation, new = np.sqrt(fitted.variances), np.sqrt(unseen.variances)
        weak |= set(map(int, np.flatnonzero(deviation < _DEAD * new)))
    return tuple(sorted(weak))


def _rank_of_rounding(
    erasers: Sequence[Projection], rest: Sequence[Moments]
) -> tuple[int, int] | None:
    """Rank, and what it would be but for rounding: the least over folds, where they differ."""
    found = []
    for eraser, moments in zip(erasers, rest, strict=True):
        with statistics(moments) as known:
            most = min(int(np.count_nonzero(known.variances)), known.n_rows - 1)
        rank = None if eraser.report is None else eraser.report.rank_covariance
        if rank is not None and rank < most:
            found.append((rank, most))
    return min(found) if found else None


def _text(
    unseen: float, fitted: float, weak: tuple[int, ...], rows_per_rank: float,
    rounded: tuple[int, int] | None, remedies: Sequence[tuple[str, float]],
    names: Sequence[str] | None,
) -> str:  # fmt: skip
    """Cause and remedy, each with its figure."""
    causes = []
    if weak:
        shown = abbreviated(weak, names)
        causes.append(f"{len(weak)} feature(s) hardly vary in the fitted rows ({shown})")
    if rows_per_rank < _FEW_ROWS:
        causes.append(f"there are only {rows_per_rank:.2g} fitted rows per dimension of x")
    if rounded is not None:
        causes.append(
            f"the rank of the covariance, {rounded[0]} where {rounded[1]} features vary, rests on "
            "the rounding of the rows"
        )
    if not causes:
        causes.append("the covariance has directions that few rows determine")
    best = sorted(remedies, key=lambda pair: pair[1])
    advice = ", ".join(f"{name} {100 * value:.3g} %" for name, value in best)
    return (
        f"held-out rows are changed by {100 * unseen:.3g} % of their variance, fitted ones by "
        f"{100 * fitted:.3g} %: " + " and ".join(causes)
        + (f". On these folds it helps to use: {advice}" if advice else ". Add rows")
    )  # fmt: skip
