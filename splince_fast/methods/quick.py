"""Functions that take the name of a method: erasure of rows, and a report on held-out rows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from numpy.typing import ArrayLike

from splince_fast._runtime.arguments import check_keywords, check_names
from splince_fast._solve.options import Options
from splince_fast._solve.selection import Selection, kept_of, names_of
from splince_fast.exceptions import InputError, LabelError
from splince_fast.labels.containers import check_index, variables_of
from splince_fast.methods.closed_forms import leace, mean_projection, sal, splince
from splince_fast.methods.fit import MethodCall
from splince_fast.methods.folds import CrossReport, report_on
from splince_fast.methods.table import Function, method_of
from splince_fast.moments import Moments
from splince_fast.projection import Projection


def erase(
    X: object,
    concept: object,
    keep: object = None,
    method: str | Function | None = None,
    *,
    sample_weight: object = None,
    kinds: Mapping[str, str] | None = None,
    **options: object,
) -> tuple[Any, Projection]:
    """Fit an eraser to rows and apply it to them.

    A shorthand for :class:`Moments`, one of the methods, and a call of the eraser.

    Parameters
    ----------
    X : array-like of shape (n, d)
        Rows, as a NumPy array, torch tensor, pandas or polars frame.
    concept, keep : column, or mapping or frame of columns
        Variables to erase jointly, and variables whose covariance with the rows is kept, each with
        n labels (:mod:`splince_fast.labels`). Rows without a label are erased, too.
    method : str or callable, optional
        Name of the method, ignoring case ("splince", "leace", "sal", "mean_projection", "fair_pca",
        "oracle", "none"), or a function ``f(moments, *, erase, keep)``. The default is SPLINCE with
        `keep`, and LEACE without.
    sample_weight, kinds
        As for :class:`Moments` and its :meth:`~Moments.update`; a single column is named "concept"
        or "keep".
    **options
        Options of the method.

    Returns
    -------
    clean : ndarray or torch tensor of shape (n, d)
        Erased rows, of the type and dtype of X.
    eraser : Projection
        Eraser for other rows; :attr:`~Projection.report` describes its effect.

    Raises
    ------
    SplinceError
        As :meth:`Moments.update` and the methods, or for an unknown method or option.

    Examples
    --------
    >>> import numpy as np
    >>> import splince_fast as sf
    >>> z = np.arange(500) % 2
    >>> X = np.random.default_rng(0).normal(size=(500, 4)) + z[:, None]
    >>> clean, eraser = sf.erase(X, z)
    >>> difference = clean[z == 1].mean(axis=0) - clean[z == 0].mean(axis=0)
    >>> bool(np.abs(difference).max() < 1e-12), eraser.method
    (True, 'LEACE')
    """
    entry = method_of(method, keep)
    check_keywords(options, entry.function, without=("moments", "erase", "keep"))
    check_index(X, concept, "concept")
    check_index(X, keep, "keep")
    erased, kept = _named(concept, "concept"), {} if keep is None else _named(keep, "keep")
    shared_names = sorted(set(erased) & set(kept))
    if shared_names:
        raise InputError(f"{shared_names[0]!r} is to be erased and to be kept; give it two names")
    read_as = dict.fromkeys(erased, "classes") if entry.classes_only else {}
    moments = Moments(kinds=read_as | dict(kinds or {})).update(
        X, {**erased, **kept}, sample_weight=sample_weight
    )
    if keep is not None:
        options["keep"] = list(kept)
    eraser = entry.function(moments, erase=list(erased), **options)
    return eraser(X, erased), eraser


def _named(columns: object, default_name: str) -> dict[str, Any]:
    """Return the columns of a mapping or frame by name, or a single column as `default_name`."""
    by_name: dict[str, Any] = {}
    for name, column in variables_of(columns, default_name).items():
        if by_name.setdefault(str(name), column) is not column:
            raise LabelError(f"two columns have the name {str(name)!r}; rename one of them")
    return by_name


def cross_report(
    folds: Sequence[Moments],
    *,
    erase: Selection,
    keep: Selection | ArrayLike | None = None,
    method: str | None = None,
    **options: Any,
) -> CrossReport:
    """Evaluate the erasers that are fitted to all folds but one, on the held-out folds.

    With x -> m + P (x - m), I - P = A B^T, fitted to all other folds, and the mean m_f and
    covariance S_f of the fold, distortion = (tr(A^T A B^T S_f B) + |A B^T (m_f - m)|^2) / tr S_f:
    only moments are needed. The remaining association is that of the erased rows with the concept.

    Parameters
    ----------
    folds : sequence of Moments
        Two or more folds of disjoint rows, as ``Moments.from_blocks(source, folds=2)`` returns.
    erase, keep
        As for :func:`splince`; `keep` is optional.
    method : {"splince", "leace", "sal", "mean_projection"}, optional
        Name of the method; by default, SPLINCE with `keep`, and LEACE without.
    **options
        Options of the method, such as ``shrinkage="cv"``.

    Returns
    -------
    CrossReport
        Report that prints as a table; its `eraser` is fitted to all folds.

    Raises
    ------
    SplinceError
        There are fewer than two folds, of other features, or a fit fails, as for :func:`splince`.

    Warns
    -----
    UnseenRowsWarning
        The distortion of held-out rows is more than twice that of fitted rows, and larger by more
        than 0.02; or, without shrinkage, there are fewer than two fitted rows per dimension of x.
        The text names the cause, and settings with less distortion on these folds.

    Examples
    --------
    >>> import numpy as np
    >>> import splince_fast as sf
    >>> z = np.arange(2000) // 2 % 2
    >>> X = np.random.default_rng(0).normal(size=(2000, 5)) + z[:, None]
    >>> folds = [sf.Moments().update(X[i::2], {"z": z[i::2]}) for i in range(2)]
    >>> report = sf.cross_report(folds, erase="z")
    >>> max(report.distortion) < 0.7
    True
    """
    parts = list(folds) if isinstance(folds, Iterable) else []
    if len(parts) < 2 or not all(isinstance(part, Moments) for part in parts):
        raise InputError("folds must be a sequence of two or more Moments, of disjoint rows")
    entry = method_of(method, keep)
    if entry.function not in (splince, leace, sal, mean_projection):
        raise InputError(
            f"cross_report cannot evaluate {entry.label} on folds; choose one of 'splince', "
            "'leace', 'sal', 'mean_projection'"
        )
    check_names(options, entry.options, entry.label)
    call = MethodCall(
        entry.label, names_of(erase, "erase"), kept_of(keep), Options(**options).checked(),
        entry.whitened, entry.classes_only,
    )  # fmt: skip
    return report_on(call, parts, Moments._sum_of(parts))
