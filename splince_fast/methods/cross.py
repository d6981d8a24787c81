"""Effect of an eraser on held-out rows, computed from the moments of folds."""

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
        Label of the method.
    folds : tuple of FoldReport
        Effect on each fold.
    shrinkage : float, str or None
        Shrinkage of the fits; for ``"cv"``, the selected shrinkage.
    eraser : Projection
        Eraser fitted to all folds; its report contains the means over the folds.
    weak_features : tuple of int
        Features whose standard deviation in the fitted rows is below 1 % of that in the held-out
        fold, for at least one fold.
    rows_per_rank : float
        Minimum over the fits of the number of fitted rows divided by the rank of the covariance.
    remedies : tuple of (str, float)
        Other settings with a smaller out-of-fold distortion, each with this distortion; empty
        unless there is a warning.
    warnings : tuple of str
        Texts of the warnings.

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
        """Distortion of the held-out rows, one value per fold."""
        return tuple(fold.distortion for fold in self.folds)

    @property
    def amplification(self) -> tuple[float, ...]:
        """Amplification in the held-out rows, one value per fold."""
        return tuple(fold.amplification for fold in self.folds)

    def to_dict(self) -> dict[str, Any]:
        """Return the results as numbers, strings and lists that JSON can represent."""
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


def cross_report(
    folds: Sequence[Moments],
    *,
    erase: Selection,
    keep: Selection | ArrayLike | None = None,
    method: str | None = None,
    **options: Any,
) -> CrossReport:
    """Evaluate the erasers that are fitted to all folds but one, on the held-out folds.

    The evaluation uses moments only. Let x -> m + P (x - m) with I - P = A B^T be the eraser fitted
    to all other folds, and let m_f and S_f be the mean and the covariance (ddof = 0) of the
    held-out fold. The distortion is::

        E|(P - I)(x - m)|^2 / tr S_f = (tr(A^T A B^T S_f B) + |A B^T (m_f - m)|^2) / tr S_f

    The remaining association is measured by the canonical correlations of the erased rows with the
    concept. With S_f = L L^T, the canonical correlations are those of L^+ x, projected onto the
    orthogonal complement of the span of L^+ A.

    Parameters
    ----------
    folds : sequence of Moments
        Two or more folds of disjoint rows, as ``Moments.from_blocks(source, folds=2)`` returns.
    erase : str, tuple or list of them
        Variables to erase.
    keep : str, tuple, list of them, or array of shape (d, k), optional
        Variables to keep, or directions.
    method : {"splince", "leace", "sal", "mean_projection"}, optional
        Name of the method, case-insensitive. The default is SPLINCE with `keep`, and LEACE without.
    **options
        Options of the method. ``shrinkage="cv"`` selects the intensity (0, 1e-6, ..., 0.1 or "oas")
        with the smallest mean out-of-fold distortion.

    Returns
    -------
    CrossReport
        Report that prints as a table; its `eraser` is fitted to all folds.

    Raises
    ------
    InputError
        There are fewer than two folds, the folds have different numbers of features, or a parameter
        is out of range.
    SplinceError
        A fit fails, as for :func:`splince_fast.splince`.

    Warns
    -----
    UnseenRowsWarning
        The distortion of held-out rows is more than twice that of fitted rows, and larger by more
        than 0.02; or, without shrinkage, there are fewer than two fitted rows per dimension of x.
        The text names the cause, and the settings that reduce the distortion on these folds.

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
    entry = method_of(method, keep)
    if entry.function not in (splince, leace, sal, mean_projection):
        raise InputError(
            f"cross_report cannot evaluate {entry.label} on folds; choose one of "
            + "'splince', 'leace', 'sal', 'mean_projection'"
        )
    check_names(options, entry.options, entry.label)
    call = MethodCall(
        entry.label, entry.whitened, names_of(erase, "erase"), kept_of(keep),
        Options(**options), classes_only=entry.classes_only,
    )  # fmt: skip
    evaluation = evaluate_folds(call, parts)
    evaluation.warn()
    call = call.with_shrinkage(evaluation.shrinkage)
    eraser = call.fit(Moments._sum_of(parts), evaluation.extended)
    return CrossReport(
        entry.label, evaluation.folds, evaluation.shrinkage, eraser, evaluation.weak_features,
        evaluation.rows_per_rank, evaluation.remedies, evaluation.warnings,
    )  # fmt: skip
