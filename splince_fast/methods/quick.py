"""Erasure in one call: fit an eraser to rows and labels, and apply it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from splince_fast._runtime.keywords import check_keywords
from splince_fast.exceptions import InputError, LabelError
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
    kinds: Mapping[str, str] | None = None,
    **options: object,
) -> tuple[Any, Projection]:
    """Fit an eraser to rows and apply it to them.

    This function is a shorthand for :class:`Moments`, one of the methods, and a call of the eraser.
    Call these directly if rows come in blocks, or to fit several erasers to the same rows.

    Parameters
    ----------
    X : array-like of shape (n, d)
        Rows, as a NumPy array, torch tensor, pandas or polars frame.
    concept : column, or mapping or frame of columns
        Variables to erase, each with n labels; several columns are erased jointly. Strings,
        booleans, integers and categoricals are classes, floats are numbers
        (:mod:`splince_fast.labels`). Rows without a label (None, NaN) are erased, too; the report
        states which fraction of the rows is labelled.
    keep : column, or mapping or frame of columns, optional
        Variables whose covariance with the rows is kept.
    method : {"splince", "leace", "sal", "mean_projection", "oracle", "none"} or callable, optional
        Name of the method, ignoring case, or a function ``f(moments, *, erase, keep)``. The default
        is SPLINCE with `keep`, and LEACE without.
    sample_weight : array-like of shape (n,), optional
        Non-negative weights of the rows, which count as frequencies.
    kinds : mapping, optional
        "classes" or "continuous" by name of a variable, as in :class:`Moments`; a single column is
        named "concept" or "keep".
    **options
        Options of :func:`splince`, :func:`leace`, :func:`sal`, :func:`mean_projection` or
        :func:`oracle`.

    Returns
    -------
    clean : ndarray or torch tensor of shape (n, d)
        Erased rows, of the type and dtype of X.
    eraser : Projection
        Eraser for other rows; :attr:`~Projection.report` describes its effect.

    Raises
    ------
    InputError
        The method or an option is unknown, `keep` is passed to a method that keeps nothing, or
        `keep` is missing for SPLINCE.
    SplinceError
        As :meth:`Moments.update` and the methods.

    Examples
    --------
    >>> import numpy as np
    >>> import splince_fast as sf
    >>> rng = np.random.default_rng(0)
    >>> z = rng.integers(0, 2, size=500)
    >>> X = rng.normal(size=(500, 4)) + z[:, None]
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
        raise InputError(
            f"{shared_names[0]!r} is to be erased and to be kept; give the columns two names"
        )
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
    from splince_fast.labels.containers import variables_of

    by_name: dict[str, Any] = {}
    for name, column in variables_of(columns, default_name).items():
        if str(name) in by_name:
            raise LabelError(f"two columns have the name {str(name)!r}; rename one of them")
        by_name[str(name)] = column
    return by_name
