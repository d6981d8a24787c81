"""Metrics over the cells of groups: accuracies with intervals, gaps of true positive rates.

Every metric takes ``(y_true, y_pred)`` first, so it can stand in ``make_scorer`` and in
fairlearn's ``MetricFrame``; ``sensitive_features=`` is an alias of ``groups=``.
"""

from __future__ import annotations

import math
import warnings
from typing import Any

import numpy as np
from numpy.typing import NDArray

from splince_fast._solve.options import is_integer
from splince_fast.evaluation._cells import (
    CellAccuracy,
    ClassAccuracy,
    GroupAccuracy,
    alias,
    coded,
    common,
    group_cells,
)
from splince_fast.evaluation.statistics import wilson_interval
from splince_fast.exceptions import InputError, NotEnoughDataError, SplinceWarning
from splince_fast.moments import Moments
from splince_fast.projection import Projection

Float = NDArray[np.float64]


def group_accuracy(
    y_true: Any,
    y_pred: Any,
    *,
    groups: Any = None,
    sample_weight: Any = None,
    interval: float = 0.95,
    strict: bool = False,
    sensitive_features: Any = None,
) -> GroupAccuracy:
    """Accuracy in every cell of the groups, with Wilson intervals.

    Parameters
    ----------
    y_true, y_pred : column of shape (n,)
        Labels of any kind.
    groups : column, or tuple, mapping or frame of columns
        Several columns give the cells of their product. Rows without a group count in
        ``overall`` alone.
    sample_weight : array-like of shape (n,), optional
        Non-negative weights of the accuracies; the intervals come from counts.
    interval : float
        Level of the intervals, between 0 and 1.
    strict : bool
        Raise, not warn, where a cell of the product has no row.
    sensitive_features : column or columns, optional
        Alias of `groups`.

    Returns
    -------
    GroupAccuracy
        Rows per cell, ``worst``, ``mean`` and ``weighted(by)``.

    Raises
    ------
    InputError
        Columns of different lengths, an interval or weights out of range.
    NotEnoughDataError
        No row has a group; or a cell has no row and `strict` is set.

    Warns
    -----
    SplinceWarning
        Cells of the product have no row.

    Examples
    --------
    >>> from splince_fast.evaluation import group_accuracy
    >>> result = group_accuracy([1, 1, 0, 0], [1, 0, 0, 0], groups=["a", "b", "a", "b"])
    >>> result.worst.cell, result.worst.accuracy, result.overall
    ('b', 0.5, 0.75)
    """
    groups = alias(groups, sensitive_features)
    if not 0 < interval < 1:
        raise InputError(f"interval is {interval!r}; it must lie between 0 and 1, such as .95")
    truth = coded(y_true, "y_true")
    n = len(truth.codes)
    _, a, b = common(truth, coded(y_pred, "y_pred", n))
    cells = group_cells(groups, n)
    weight = _weights(sample_weight, n)
    correct = (a == b) & (a >= 0)
    inside = cells.codes >= 0
    size = len(cells.names)
    counts = np.bincount(cells.codes[inside], minlength=size)
    mass = np.bincount(cells.codes[inside], weight[inside], size)
    hits = np.bincount(cells.codes[inside], (weight * correct)[inside], size)
    right = np.bincount(cells.codes[inside], correct[inside], size)
    found = np.flatnonzero((counts > 0) & (mass > 0))
    if not len(found):
        raise NotEnoughDataError("no row has a group and a positive weight; check the labels")
    missing = tuple(cells.names[i] for i in np.flatnonzero(counts == 0))
    if missing:
        text = (
            f"{len(missing)} of {size} cells have no row: {', '.join(map(repr, missing[:10]))}; "
            "the worst group is that of the cells present"
        )
        if strict:
            raise NotEnoughDataError(text)
        warnings.warn(text, SplinceWarning, stacklevel=2)
    rows = []
    for i in found.tolist():
        low, high = wilson_interval(float(right[i]), int(counts[i]), level=interval)
        rows.append(
            CellAccuracy(cells.names[i], int(counts[i]), float(hits[i] / mass[i]), low, high)
        )
    overall = float(np.sum(weight * correct) / np.sum(weight))
    return GroupAccuracy(tuple(rows), missing, n, overall, interval)


def worst_group_accuracy(
    y_true: Any,
    y_pred: Any,
    *,
    groups: Any = None,
    min_rows: int = 1,
    sample_weight: Any = None,
    sensitive_features: Any = None,
) -> float:
    """Lowest accuracy over the cells of the groups that are present.

    min_g mean(y_pred = y_true | g), as in Sagawa et al., "Distributionally robust neural
    networks for group shifts" (ICLR 2020).

    Parameters
    ----------
    y_true, y_pred : column of shape (n,)
        Labels of any kind.
    groups : column, or tuple, mapping or frame of columns
        Several columns give the cells of their product.
    min_rows : int
        Cells of fewer rows are left out.
    sample_weight : array-like of shape (n,), optional
        Non-negative weights of the rows.
    sensitive_features : column or columns, optional
        Alias of `groups`.

    Returns
    -------
    float
        In [0, 1].

    Raises
    ------
    InputError
        Columns of different lengths, or `min_rows` below 1.
    NotEnoughDataError
        No cell has `min_rows` rows.

    Warns
    -----
    SplinceWarning
        A cell of the product has no row; or the predictor is constant, so that the figure is 0
        by definition.

    Examples
    --------
    >>> from splince_fast.evaluation import worst_group_accuracy
    >>> worst_group_accuracy([1, 1, 0, 0], [1, 0, 0, 0], groups=["a", "b", "a", "b"])
    0.5
    """
    groups = alias(groups, sensitive_features)
    if not is_integer(min_rows) or min_rows < 1:
        raise InputError(f"min_rows is {min_rows!r}; it must be a positive integer")
    result = group_accuracy(y_true, y_pred, groups=groups, sample_weight=sample_weight)
    large = [row.accuracy for row in result.rows if row.n >= min_rows]
    if not large:
        most = max(row.n for row in result.rows)
        raise NotEnoughDataError(f"no cell has {min_rows} rows; the largest has {most}")
    worst = min(large)
    if worst == 0.0 and _is_constant(y_pred) and not _is_constant(y_true):
        warnings.warn(
            "the predictor is constant, so the worst group has accuracy 0 whatever its quality",
            SplinceWarning,
            stacklevel=2,
        )
    return worst


def class_accuracy(y_true: Any, y_pred: Any) -> ClassAccuracy:
    """Share of correct decisions for each class of the truth (its true positive rate).

    Parameters
    ----------
    y_true, y_pred : column of shape (n,)
        Labels of any kind.

    Returns
    -------
    ClassAccuracy
        A dictionary from class to accuracy; its ``mean`` is the balanced accuracy.

    Raises
    ------
    InputError
        Columns of different lengths.
    NotEnoughDataError
        No rows.

    Examples
    --------
    >>> from splince_fast.evaluation import class_accuracy
    >>> class_accuracy(["x", "x", "y", "y"], ["x", "y", "y", "y"])
    {'x': 0.5, 'y': 1.0}
    """
    truth = coded(y_true, "y_true")
    _, a, b = common(truth, coded(y_pred, "y_pred", len(truth.codes)))
    size = len(truth.names)
    inside = a >= 0
    counts = np.bincount(a[inside], minlength=size)
    right = np.bincount(a[inside & (a == b)], minlength=size)
    if not counts.any():
        raise NotEnoughDataError("there are no rows with a true label")
    return ClassAccuracy(
        {truth.names[i]: float(right[i] / counts[i]) for i in np.flatnonzero(counts).tolist()}
    )


def tpr_gap(
    y_true: Any,
    y_pred: Any,
    *,
    concept: Any = None,
    average: str | None = "rms",
    sensitive_features: Any = None,
) -> Any:
    """Gap of the true positive rates between the classes of the concept.

    For two classes a, b of the concept, in sorted order, Gap_y = TPR(y | b) - TPR(y | a); for
    more Gap_y = max_z TPR(y | z) - min_z TPR(y | z). The root mean square over the classes y is
    the figure of De-Arteaga et al. (2019) and of Romanov et al. (2019).

    Parameters
    ----------
    y_true, y_pred : column of shape (n,)
        Labels of any kind.
    concept : column, or tuple, mapping or frame of columns
        Classes of the concept; several columns give the cells of their product.
    average : {"rms", "mean", "max"} or None
        Over the classes of the task: root mean square; mean or maximum of the absolute gaps;
        None gives the gap of every class, signed where the concept has two.
    sensitive_features : column or columns, optional
        Alias of `concept`.

    Returns
    -------
    float or dict
        NaN where no class of the task has rows in two classes of the concept.

    Raises
    ------
    InputError
        Columns of different lengths, or an unknown `average`.

    Warns
    -----
    SplinceWarning
        Classes of the task without rows in two classes of the concept are left out; their
        number is given.

    Examples
    --------
    >>> from splince_fast.evaluation import tpr_gap
    >>> tpr_gap([1, 1, 1, 1], [1, 1, 1, 0], concept=["a", "a", "b", "b"])
    0.5
    >>> tpr_gap([1, 1, 1, 1], [1, 1, 1, 0], concept=["a", "a", "b", "b"], average=None)
    {1: -0.5}
    """
    concept = alias(concept, sensitive_features, "concept")
    if average not in ("rms", "mean", "max", None):
        raise InputError(f"average is {average!r}; choose 'rms', 'mean', 'max' or None")
    truth = coded(y_true, "y_true")
    n = len(truth.codes)
    _, a, b = common(truth, coded(y_pred, "y_pred", n))
    z = group_cells(concept, n)
    gaps = gap_per_class(a, b, z.codes, len(truth.names), len(z.names))
    absent = int(np.isnan(gaps).sum())
    if absent:
        warnings.warn(
            f"{absent} of {len(gaps)} classes of the task have no row in at least two classes of "
            "the concept: they have no gap and are left out",
            SplinceWarning,
            stacklevel=2,
        )
    if average is None:
        return dict(zip(truth.names, gaps.tolist(), strict=True))
    return average_gap(gaps, average)


def gap_per_class(a: Any, b: Any, z: Any, n_classes: int, n_concepts: int) -> Float:
    """(n_classes,): gap of each class from codes of truth, prediction and concept; NaN if none."""
    inside = (a >= 0) & (z >= 0)
    place = (a * n_concepts + z)[inside]
    size = n_classes * n_concepts
    counts = np.bincount(place, minlength=size).reshape(n_classes, n_concepts)
    right = np.bincount(place, (a == b)[inside], size).reshape(n_classes, n_concepts)
    with np.errstate(invalid="ignore"):
        rates = right / counts
    known = counts > 0
    several = known.sum(axis=1) >= 2
    if n_concepts == 2:
        gaps = rates[:, 1] - rates[:, 0]
    else:
        highest = np.where(known, rates, -np.inf).max(axis=1, initial=-np.inf)
        lowest = np.where(known, rates, np.inf).min(axis=1, initial=np.inf)
        gaps = np.where(several, highest, np.nan) - np.where(several, lowest, 0.0)
    return np.asarray(np.where(several, gaps, np.nan), dtype=np.float64)


def average_gap(gaps: Float, average: str) -> float:
    """Root mean square, or mean or maximum of absolute values, NaN left out."""
    known = np.abs(gaps[~np.isnan(gaps)])
    if not len(known):
        return math.nan
    if average == "rms":
        return float(np.sqrt(np.mean(known**2)))
    return float(known.mean() if average == "mean" else known.max())


def covariance_ratio(eraser: Projection, moments: Moments, name: Any) -> float:
    """Share of the covariance with a variable that an eraser keeps: |P S|_F^2 / |S|_F^2.

    S = Cov(x, v) with a column for every class of v (none left out), from moments alone.

    Parameters
    ----------
    eraser : Projection
        The map x -> P (x - mean) + mean.
    moments : Moments
        Of the rows that the covariance is taken over.
    name : str or tuple of str
        The variable.

    Returns
    -------
    float
        1 where it is kept whole, 0 where nothing is left; NaN where there is none to keep.

    Raises
    ------
    UnknownVariableError
        No such variable was accumulated.

    Examples
    --------
    >>> import numpy as np
    >>> import splince_fast as sf
    >>> from splince_fast.evaluation import covariance_ratio
    >>> rng = np.random.default_rng(0)
    >>> z = rng.integers(0, 2, size=500)
    >>> moments = sf.Moments().update(rng.normal(size=(500, 4)) + z[:, None], {"z": z})
    >>> covariance_ratio(sf.leace(moments, erase="z"), moments, "z") < 1e-20
    True
    """
    S = moments.cross_covariance(name, ddof=0)
    kept = S - eraser.left @ (eraser.right.T @ S)
    whole = float(np.sum(S**2))
    return float(np.sum(kept**2)) / whole if whole else math.nan


def _is_constant(values: Any) -> bool:
    return len(np.unique(coded(values, "labels").codes)) == 1


def _weights(values: Any, n: int) -> Float:
    if values is None:
        return np.ones(n)
    weight = np.asarray(values, dtype=np.float64)
    if weight.shape != (n,) or not np.isfinite(weight).all() or (weight < 0).any():
        raise InputError(
            f"sample_weight has shape {weight.shape}; it must hold {n} finite numbers of at least 0"
        )
    if not weight.any():
        raise NotEnoughDataError("all sample weights are 0")
    return weight
