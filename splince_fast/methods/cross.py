"""What an eraser does to rows that it was not fitted on, from the moments of folds alone.

Above 400 lines because the figures, their table and the warning are documented in place.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from splince_fast._solve.options import Options
from splince_fast._solve.selection import Selection, Span, names_of, span_of
from splince_fast.exceptions import InputError, SplinceWarning, UnseenRowsWarning
from splince_fast.methods import leace, mean_projection, sal, splince
from splince_fast.moments import Moments
from splince_fast.moments.factored import Factored, Live, statistics
from splince_fast.projection import Projection

Float = NDArray[np.float64]

# Intensities that `shrinkage="cv"` tries, beside "oas".
_INTENSITIES = (None, 1e-6, 1e-4, 1e-3, 1e-2, 1e-1)
# Unseen rows fare worse if they are changed so many times as much as fitted ones, and more than
# by chance, which is of the order of the share of the variance that is removed.
_WORSE, _EXCESS = 2.0, 0.02
# With fewer fitted rows per dimension a covariance is mostly noise, unless it is shrunk.
_FEW_ROWS = 2.0
# A feature is nearly dead where it varies this many times less than where it was not seen.
_DEAD = 1e-2
_SHOWN = 5


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
class CrossReport:
    """What an eraser does to rows that it was not fitted on.

    Attributes
    ----------
    method : str
    folds : tuple of FoldReport
    shrinkage : float, str or None
        What the erasers were fitted with; what was chosen, for ``"cv"``.
    eraser : Projection
        Fitted to all folds; the means of the figures below stand in its report.
    weak_features : tuple of int
        Features that vary 100 times less in the rows of some fit than in the fold left out.
    rows_per_rank : float
        Rows that an eraser was fitted to, over the rank of their covariance; the smallest.
    remedies : tuple of (str, float)
        Out-of-fold distortion with other settings, where unseen rows fare worse.
    warnings : tuple of str

    Examples
    --------
    >>> import numpy as np
    >>> import splince_fast as sf
    >>> rng = np.random.default_rng(0)
    >>> z = rng.integers(0, 2, size=400)
    >>> X = rng.normal(size=(400, 4)) + np.outer(z, np.eye(4)[0])
    >>> folds = [sf.Moments().update(X[i::2], {"z": z[i::2]}) for i in range(2)]
    >>> report = sf.cross_report(folds, erase="z")
    >>> report.method, len(report.folds), report.eraser.rank
    ('splince', 2, 1)
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
        """Out-of-fold distortion, one figure per fold."""
        return tuple(fold.distortion for fold in self.folds)

    @property
    def amplification(self) -> tuple[float, ...]:
        """Out-of-fold amplification, one figure per fold."""
        return tuple(fold.amplification for fold in self.folds)

    def to_dict(self) -> dict[str, Any]:
        """The figures as plain numbers, strings and lists, ready for JSON."""
        return {
            "method": self.method,
            "folds": [dataclasses.asdict(fold) for fold in self.folds],
            "shrinkage": self.shrinkage,
            "weak_features": list(self.weak_features),
            "rows_per_rank": self.rows_per_rank,
            "remedies": [list(pair) for pair in self.remedies],
            "warnings": list(self.warnings),
        }

    def __str__(self) -> str:
        lines = [
            f"{self.method} on rows not seen (shrinkage {self.shrinkage})",
            f"  {'fold':>4} {'rows':>9} {'changed':>9} {'fitted':>9} {'R^2 left':>9} "
            f"{'chance':>9} {'kept':>7} {'amplif.':>8}",
        ]
        for i, f in enumerate(self.folds):
            kept = "" if f.kept is None else f"{f.kept:.4f}"
            lines.append(
                f"  {i:>4} {f.n_rows:>9,} {100 * f.distortion:>8.3g}% "
                f"{100 * f.distortion_fitted:>8.3g}% {f.concept:>9.3g} {f.chance:>9.3g} "
                f"{kept:>7} {f.amplification:>8.3g}"
            )
        lines += [f"  with {name}: changed {100 * value:.3g} %" for name, value in self.remedies]
        return "\n".join([*lines, *(f"  warning: {text}" for text in self.warnings)])


def cross_report(
    folds: Sequence[Moments],
    *,
    erase: Selection,
    keep: Selection | ArrayLike | None = None,
    method: str = "splince",
    **options: Any,
) -> CrossReport:
    """Fit an eraser without each fold in turn, and evaluate it on that fold, from moments alone.

    With r(x) = m + P (x - m), I - P = l r^T fitted to the other folds, and m_f, S_f the mean and
    the covariance (ddof = 0) of the fold::

        E|r(x) - x|^2 = tr(l^T l r^T S_f r) + |l r^T (m_f - m)|^2

    which is divided by tr S_f. What is left of the concept are the canonical correlations of r(x)
    with it, found in coordinates in which the fold is white: with S_f = L L^T, those of x without
    what lies in the span of L^+ l.

    Parameters
    ----------
    folds : sequence of Moments
        Two or more, of disjoint rows, such as ``Moments.from_blocks(source, folds=2)`` gives.
    erase : str, tuple or list of them
        Variables to erase.
    keep : str, tuple, list of them, or array of shape (d, k), optional
        What is kept; "splince" without it is LEACE.
    method : {"splince", "leace", "sal", "mean_projection"}
        Which eraser.
    **options
        Of the method. ``shrinkage="cv"`` takes the intensity (0, 1e-6, ..., 0.1 or "oas") of the
        least mean out-of-fold distortion.

    Returns
    -------
    CrossReport
        Prints as a table; its `eraser` is fitted to all folds.

    Raises
    ------
    InputError
        Fewer than two folds, or a parameter out of range.
    SplinceError
        As :func:`splince_fast.splince`, of the rows of any fit.

    Warns
    -----
    UnseenRowsWarning
        Unseen rows are changed more than twice as much as fitted ones, or there are fewer than two
        fitted rows per dimension of x and no shrinkage; names the cause and the settings that
        help on these folds.

    Examples
    --------
    >>> import numpy as np
    >>> import splince_fast as sf
    >>> rng = np.random.default_rng(0)
    >>> z = rng.integers(0, 2, size=2000)
    >>> X = rng.normal(size=(2000, 5)) + z[:, None]
    >>> folds = [sf.Moments().update(X[i::2], {"z": z[i::2]}) for i in range(2)]
    >>> report = sf.cross_report(folds, erase="z")
    >>> max(report.distortion) < 0.7
    True
    """
    fit = _method(method, keep)
    parts = list(folds) if not isinstance(folds, Moments) else []
    if len(parts) < 2 or not all(isinstance(part, Moments) for part in parts):
        raise InputError(
            "folds must be a sequence of two or more Moments, of disjoint rows; "
            "Moments.from_blocks(source, folds=2) makes them"
        )
    names_of(erase, "erase")
    # Sums of the others, not total - part: nothing cancels.
    rest = [_merged([p for j, p in enumerate(parts) if j != i]) for i in range(len(parts))]
    whitened = method in ("splince", "leace")
    share = options.pop("shrinkage", None) if whitened else None

    def erasers(shrinkage: float | str | None) -> list[Projection]:
        given = dict(options) if not whitened else {**options, "shrinkage": shrinkage}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SplinceWarning)
            return [fit(moments, erase, given) for moments in rest]

    def unseen(found: list[Projection]) -> list[float]:
        return [_change(eraser, part) for eraser, part in zip(found, parts, strict=True)]

    if share == "cv":
        tried = {a: float(np.mean(unseen(erasers(a)))) for a in (*_INTENSITIES, "oas")}
        share = min(tried, key=lambda a: tried[a])
    fitted = erasers(share)
    figures = tuple(
        _evaluate(eraser, moments, part, erase, keep, whitened)
        for eraser, moments, part in zip(fitted, rest, parts, strict=True)
    )
    given = dict(options) if not whitened else {**options, "shrinkage": share}
    eraser = fit(_merged(parts), erase, given)
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
        if whitened:
            remedies = [
                (f"shrinkage={a!r}", float(np.mean(unseen(erasers(a)))))
                for a in (1e-3, "oas")
                if a != share
            ]
            plain = _method("sal", keep)
            others = [plain(m, erase, {}) for m in rest]
            remedies.append(("SAL", float(np.mean(unseen(others)))))
            remedies = [(name, value) for name, value in remedies if value < mean_unseen]
        rounded = _rank_of_rounding(fitted, rest) if whitened else None
        notes = (_text(mean_unseen, mean_fitted, weak, rows_per_rank, rounded, remedies),)
        warnings.warn(notes[0], UnseenRowsWarning, stacklevel=2)
    if eraser.report is not None:
        kept = [f.kept for f in figures if f.kept is not None]
        eraser = Projection._make(
            eraser.left.T, eraser.right.T, eraser.mean, method=eraser.method,
            report=dataclasses.replace(
                eraser.report,
                unseen_distortion=mean_unseen,
                unseen_concept=float(np.mean([f.concept for f in figures])),
                unseen_chance=float(np.mean([f.chance for f in figures])),
                unseen_kept=float(np.mean(kept)) if kept else None,
                warnings=eraser.report.warnings + notes,
            ),
        )  # fmt: skip
    return CrossReport(
        method, figures, share, eraser, weak, float(rows_per_rank), tuple(remedies), notes
    )


def _method(name: str, keep: Any) -> Callable[[Any, Any, dict[str, Any]], Projection]:
    """The method as a function of moments, what is erased, and options."""
    if name == "splince" and keep is not None:
        return lambda m, erase, options: splince(m, erase=erase, keep=keep, **options)
    if name == "sal":
        return lambda m, erase, options: sal(m, erase=erase, keep=keep, **options)
    plain = {"splince": leace, "leace": leace, "mean_projection": mean_projection}
    if name not in plain:
        raise InputError(
            f"method is {name!r}; it must be 'splince', 'leace', 'sal' or 'mean_projection'"
        )
    if keep is not None:
        raise InputError(f"{name} keeps nothing; leave out keep=, or use 'splince'")
    return lambda m, erase, options: plain[name](m, erase=erase, **options)


def _merged(parts: Sequence[Moments]) -> Moments:
    total = parts[0].copy()
    for part in parts[1:]:
        total = total + part
    return total


def _changed(eraser: Projection, known: Live | Factored) -> float:
    """E|r(x) - x|^2 over tr Cov(x), on the rows of these moments."""
    left, right = eraser.left.T, np.ascontiguousarray(eraser.right.T)
    total = float(known.variances.sum())
    if not len(left) or not total:
        return 0.0
    shift = right @ (known.mean - eraser.mean)
    square = left @ left.T
    spread = float(np.sum(square * known.gram(right)))
    return (spread + float(shift @ square @ shift)) / total


def _change(eraser: Projection, part: Moments) -> float:
    with statistics(part) as known:
        return _changed(eraser, known)


def _evaluate(
    eraser: Projection, rest: Moments, part: Moments, erase: Any, keep: Any, whitened: bool
) -> FoldReport:
    """All figures of one fold."""
    with statistics(part) as known, known.memory(True) as memory:
        factor = known.factored(Options(), True, memory)
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
    for count, metric in zip(span.counts, span.metrics, strict=True):
        matrix = metric()
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
) -> str:  # fmt: skip
    """Cause and remedy, each with its figure."""
    causes = []
    if weak:
        shown = ", ".join(map(str, weak[:_SHOWN])) + (", ..." if len(weak) > _SHOWN else "")
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
        f"rows not seen are changed by {100 * unseen:.3g} % of their variance, fitted ones by "
        f"{100 * fitted:.3g} %: " + " and ".join(causes)
        + (f". On these folds it helps to use: {advice}" if advice else ". Add rows")
    )  # fmt: skip
