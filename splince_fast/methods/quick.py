"""Erasing in one call: rows and labels in, clean rows and their eraser out."""

from __future__ import annotations

from typing import Any

from splince_fast._runtime.keywords import check_keywords
from splince_fast.exceptions import InputError
from splince_fast.labels.positions import check_index
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
    **options: object,
) -> tuple[Any, Projection]:
    """Fit an eraser to rows and apply it to them.

    A shorthand for :class:`Moments`, one of the methods, and the call of what it returns; use
    these where rows come in blocks, or where several erasers are wanted of the same rows.

    Parameters
    ----------
    X : array-like of shape (n, d)
        Rows; NumPy, torch, pandas or polars.
    concept : column, or mapping or frame of columns
        Variables to erase, n labels each; several columns are erased jointly. Strings, booleans,
        integers and categoricals are classes, floats are numbers (:mod:`splince_fast.labels`).
    keep : column, or mapping or frame of columns, optional
        Variables whose covariance with the rows is kept.
    method : {"splince", "leace", "sal", "mean_projection", "oracle", "none"} or callable, optional
        Name in any case, or a function ``f(moments, *, erase, keep)``. The default is SPLINCE where
        `keep` is given, and LEACE otherwise.
    sample_weight : array-like of shape (n,), optional
        Non-negative frequencies.
    **options
        Passed on to :func:`splince`, :func:`leace`, :func:`sal` or :func:`mean_projection`.

    Returns
    -------
    clean : ndarray or torch tensor of shape (n, d)
        Of the kind and dtype of X.
    eraser : Projection
        For other rows; its :attr:`~Projection.report` says what was done.

    Raises
    ------
    InputError
        An unknown method or option, `keep` for a method that keeps nothing, or none for SPLINCE.
    SplinceError
        As :meth:`Moments.update` and the methods raise.

    Examples
    --------
    >>> import numpy as np
    >>> import splince_fast as sf
    >>> rng = np.random.default_rng(0)
    >>> z = rng.integers(0, 2, size=500)
    >>> X = rng.normal(size=(500, 4)) + z[:, None]
    >>> clean, eraser = sf.erase(X, z)
    >>> gap = clean[z == 1].mean(axis=0) - clean[z == 0].mean(axis=0)
    >>> bool(np.abs(gap).max() < 1e-12), eraser.method
    (True, 'LEACE')
    """
    chosen = method_of(method, keep)
    check_keywords(options, chosen.function, without=("moments", "erase", "keep"))
    check_index(X, concept, "concept")
    check_index(X, keep, "keep")
    erased, kept = _named(concept, "concept"), {} if keep is None else _named(keep, "keep")
    both = sorted(set(erased) & set(kept))
    if both:
        raise InputError(f"{both[0]!r} is to be erased and to be kept; give the columns two names")
    kinds = dict.fromkeys(erased, "classes") if chosen.classes_only else {}
    moments = Moments(kinds=kinds).update(X, {**erased, **kept}, sample_weight=sample_weight)
    names, keeping = list(erased), list(kept)
    if keep is not None:
        options["keep"] = keeping
    eraser = chosen.function(moments, erase=names, **options)
    return eraser(X, erased), eraser


def _named(columns: object, default_name: str) -> dict[str, Any]:
    """Columns by name: those of a mapping or frame, or one under `default_name`."""
    from splince_fast.labels.containers import variables_of

    return {str(name): column for name, column in variables_of(columns, default_name).items()}
