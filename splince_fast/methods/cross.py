"""Effect of an eraser on held-out rows, from the moments of folds alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from numpy.typing import ArrayLike

from splince_fast._runtime.keywords import check_names
from splince_fast._solve.options import Options
from splince_fast._solve.selection import Selection, kept_of, names_of
from splince_fast.exceptions import InputError
from splince_fast.methods.closed_forms import leace, mean_projection, sal, splince
from splince_fast.methods.folds import FoldReport, evaluate_folds
from splince_fast.methods.method_call import MethodCall
from splince_fast.methods.table import method_of
from splince_fast.moments import Moments
from splince_fast.projection import Projection


@dataclass(frozen=True, slots=True)
class CrossReport:
    """Effect of an eraser on held-out rows.

    Attributes
    ----------
    method : str
    folds : tuple of FoldReport
    shrinkage : float, str or None
        Intensity of the fits; the chosen one for ``"cv"``.
    eraser : Projection
        Fitted to all folds; the means of the figures below stand in its report.
    weak_features : tuple of int
        Features whose deviation in the rows of some fit is below 1 % of that in the fold left out.
    rows_per_rank : float
        Rows that an eraser was fitted to, over the rank of their covariance; the smallest.
    remedies : tuple of (str, float)
        Out-of-fold distortion with other settings, where held-out rows fare worse.
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
    ('LEACE', 2, 1)
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
            f"{self.method} on held-out rows (shrinkage {self.shrinkage})",
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
    method: str | None = None,
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
        Variables to keep, or directions.
    method : {"splince", "leace", "sal", "mean_projection"}, optional
        Name in any case. The default is SPLINCE where `keep` is given, and LEACE otherwise.
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
        Fewer than two folds, folds of unlike widths, or a parameter out of range.
    SplinceError
        As :func:`splince_fast.splince`, of the rows of any fit.

    Warns
    -----
    UnseenRowsWarning
        Held-out rows are changed more than twice as much as fitted ones, or there are fewer than
        two fitted rows per dimension of x and no shrinkage; names the cause and the settings that
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
    parts = list(folds) if isinstance(folds, Iterable) else []
    if len(parts) < 2 or not all(isinstance(part, Moments) for part in parts):
        raise InputError(
            "folds must be a sequence of two or more Moments, of disjoint rows; "
            "Moments.from_blocks(source, folds=2) makes them"
        )
    widths = sorted({part.n_features for part in parts if part.n_features is not None})
    if len(widths) > 1:
        raise InputError(
            f"the folds have rows of {widths[0]} and of {widths[-1]} features; accumulate all of "
            "them from the same features"
        )
    chosen = method_of(method, keep)
    if chosen.function not in (splince, leace, sal, mean_projection):
        raise InputError(
            f"cross_report solves on folds, which {chosen.label} does not; choose one of "
            + "'splince', 'leace', 'sal', 'mean_projection'"
        )
    check_names(options, chosen.options, chosen.label)
    call = MethodCall(
        chosen.label, chosen.whitened, names_of(erase, "erase"), kept_of(keep),
        Options(**options), classes_only=chosen.classes_only,
    )  # fmt: skip
    found = evaluate_folds(call, parts)
    found.warn()
    eraser = call.with_shrinkage(found.shrinkage).fit(Moments._merged(parts), found.added_to)
    return CrossReport(
        chosen.label, found.folds, found.shrinkage, eraser, found.degenerate,
        found.rows_per_rank, found.remedies, found.warnings,
    )  # fmt: skip
