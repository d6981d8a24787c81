"""Metrics over the cells of groups: accuracies with intervals, gaps of true positive rates.

Every metric takes ``(y_true, y_pred)`` first, so it can stand in ``make_scorer`` and in
fairlearn's ``MetricFrame``; ``sensitive_features=`` is an alias of ``groups=``. Columns belong
together by position: one with the pandas index of ``y_true`` in another order is a LabelError.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from splince_fast._runtime.arrays import as_weights
from splince_fast._runtime.warn import warn
from splince_fast._solve.options import is_integer, is_number
from splince_fast.evaluation._cells import FEW_ROWS, cells_of_groups, class_codes, common
from splince_fast.evaluation.statistics import wilson_interval
from splince_fast.exceptions import InputError, NotEnoughDataError, SplinceWarning
from splince_fast.labels import ClassName, VariableName
from splince_fast.labels.encoded import observed
from splince_fast.labels.positions import check_index
from splince_fast.moments import Moments
from splince_fast.projection import Projection

Float = NDArray[np.float64]
Codes = NDArray[np.intp]


@dataclass(frozen=True, slots=True)
class CellAccuracy:
    """Accuracy in one cell.

    Attributes
    ----------
    cell : object
        Name of the group, a tuple for a product of groups.
    n : int
        Rows.
    accuracy : float
        Fraction of correct decisions, weighted where weights were given.
    low, high : float
        Wilson interval from the counts.
    """

    cell: ClassName
    n: int
    accuracy: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class GroupAccuracy:
    """Accuracy per cell of groups.

    Attributes
    ----------
    rows : tuple of CellAccuracy
        Cells with at least one row of positive weight, in the order of their names.
    missing : tuple
        Cells of the product of the groups that have none.
    n : int
        Rows with a true label.
    overall : float
        Accuracy of all rows, weighted where weights were given.
    interval : float
        Level of the Wilson intervals.
    """

    rows: tuple[CellAccuracy, ...]
    missing: tuple[ClassName, ...]
    n: int
    overall: float
    interval: float

    @property
    def worst(self) -> CellAccuracy:
        """The cell of lowest accuracy; a minimum over noisy cells is biased downwards."""
        return min(self.rows, key=lambda row: row.accuracy)

    @property
    def mean(self) -> float:
        """Unweighted mean over cells."""
        return math.fsum(row.accuracy for row in self.rows) / len(self.rows)

    def weighted(self, by: Mapping[ClassName, float]) -> float:
        """sum_g by[g] accuracy_g / sum_g by[g], such as by fractions of the training rows.

        `by` maps cells to fractions or counts: 0 for cells that have no row here.

        Raises
        ------
        InputError
            A negative or non-finite fraction, one for a cell without rows, or none at all.
        """
        accuracies = {row.cell: row.accuracy for row in self.rows}
        bad = [cell for cell, w in by.items() if not (is_number(w) and math.isfinite(w) and w >= 0)]
        if bad:
            raise InputError(
                f"the fraction of cell {bad[0]!r} must be a finite number of at least 0"
            )
        absent = [cell for cell, w in by.items() if w > 0 and cell not in accuracies]
        if absent:
            raise InputError(
                f"cell {absent[0]!r} has a fraction but no row here; the cells are "
                f"{list(accuracies)[:20]}"
            )
        total = math.fsum(by.values())
        if total <= 0:
            raise InputError("the fractions add up to 0; pass counts or fractions of the cells")
        return math.fsum(accuracies[cell] * w for cell, w in by.items() if w > 0) / total

    def __str__(self) -> str:
        shown = sorted(self.rows, key=lambda row: row.accuracy)[:10]
        lines = [f"accuracy {self.overall:.3f} on {self.n:,} rows, {len(self.rows)} cells"]
        if len(self.rows) > len(shown):
            lines[0] += f" (the {len(shown)} worst)"
        for row in shown:
            few = f"  (fewer than {FEW_ROWS} rows)" if row.n < FEW_ROWS else ""
            lines.append(
                f"  {row.accuracy:.3f} [{row.low:.3f}, {row.high:.3f}]  n = {row.n:<6,} "
                f"{row.cell!r}{few}"
            )
        if self.missing:
            lines.append(f"  without rows: {', '.join(map(repr, self.missing[:10]))}")
        return "\n".join(lines)


class ClassAccuracy(dict[ClassName, float]):
    """Accuracy per true class, as a dictionary.

    Examples
    --------
    >>> from splince_fast.evaluation import class_accuracy
    >>> class_accuracy([0, 0, 1], [0, 1, 1])
    {0: 0.5, 1: 1.0}
    >>> class_accuracy([0, 0, 1], [0, 1, 1]).mean
    0.75
    """

    @property
    def mean(self) -> float:
        """Unweighted mean over classes: the balanced accuracy."""
        return math.fsum(self.values()) / len(self)


def group_accuracy(
    y_true: object,
    y_pred: object,
    *,
    groups: object = None,
    sample_weight: object = None,
    interval: float = 0.95,
    strict: bool = False,
    sensitive_features: object = None,
) -> GroupAccuracy:
    """Accuracy in every cell of the groups, with Wilson intervals.

    Parameters
    ----------
    y_true, y_pred : column of shape (n,)
        Labels of any kind. Rows without a true label are left out; a missing prediction is wrong.
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
    groups = _one_of(groups, sensitive_features)
    if not is_number(interval) or not 0 < interval < 1:
        raise InputError(f"interval is {interval!r}; it must lie between 0 and 1, such as .95")
    check_index(y_true, groups, "groups", of="y_true")
    _, a, b = _read(y_true, y_pred)
    labelled, correct = a >= 0, a == b
    cells = cells_of_groups(groups, len(a))
    weight = np.where(labelled, _weights(sample_weight, len(a)), 0.0)
    codes = np.where(labelled, cells.codes, -1)
    size = len(cells.classes)
    counts, n_correct = counts_per_code(codes, correct, size)
    inside = codes >= 0
    mass = np.bincount(codes[inside], weight[inside], size)
    mass_correct = np.bincount(codes[inside], (weight * correct)[inside], size)
    has_rows = (counts > 0) & (mass > 0)
    present = np.flatnonzero(has_rows)
    if not len(present):
        raise NotEnoughDataError(
            "no row has a true label, a group and a positive weight; check the labels"
        )
    missing = tuple(cells.classes[i] for i in np.flatnonzero(~has_rows))
    if missing:
        text = (
            f"{len(missing)} of {size} cells have no row: {', '.join(map(repr, missing[:10]))}; "
            "the worst group is that of the cells present"
        )
        if strict:
            raise NotEnoughDataError(text)
        warn(text, SplinceWarning)
    rows = []
    for i in present.tolist():
        limits = wilson_interval(float(n_correct[i]), int(counts[i]), level=interval)
        accuracy = float(mass_correct[i] / mass[i])
        rows.append(CellAccuracy(cells.classes[i], int(counts[i]), accuracy, *limits))
    overall = float(np.sum(weight * correct) / np.sum(weight))
    return GroupAccuracy(tuple(rows), missing, int(labelled.sum()), overall, interval)


def worst_group_accuracy(
    y_true: object,
    y_pred: object,
    *,
    groups: object = None,
    min_rows: int = 1,
    sample_weight: object = None,
    sensitive_features: object = None,
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
    groups = _one_of(groups, sensitive_features)
    if not is_integer(min_rows) or min_rows < 1:
        raise InputError(f"min_rows is {min_rows!r}; it must be a positive integer")
    result = group_accuracy(y_true, y_pred, groups=groups, sample_weight=sample_weight)
    large = [row.accuracy for row in result.rows if row.n >= min_rows]
    if not large:
        most = max(row.n for row in result.rows)
        raise NotEnoughDataError(f"no cell has {min_rows} rows; the largest has {most}")
    worst = min(large)
    if worst == 0.0 and _is_constant(y_pred) and not _is_constant(y_true):
        warn(
            "the predictor is constant, so the worst group has accuracy 0 whatever its quality",
            SplinceWarning,
        )
    return worst


def class_accuracy(y_true: object, y_pred: object) -> ClassAccuracy:
    """Fraction of correct decisions for each true class (its true positive rate).

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
    classes, a, b = _read(y_true, y_pred)
    counts, n_correct = counts_per_code(a, a == b, len(classes))
    if not counts.any():
        raise NotEnoughDataError("there are no rows with a true label")
    return ClassAccuracy(
        {classes[i]: float(n_correct[i] / counts[i]) for i in np.flatnonzero(counts).tolist()}
    )


def tpr_gap(
    y_true: object,
    y_pred: object,
    *,
    concept: object = None,
    average: str | None = "rms",
    sensitive_features: object = None,
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
    concept = _one_of(concept, sensitive_features, "concept")
    if average not in ("rms", "mean", "max", None):
        raise InputError(f"average is {average!r}; choose 'rms', 'mean', 'max' or None")
    check_index(y_true, concept, "concept", of="y_true")
    classes, a, b = _read(y_true, y_pred)
    z = observed(cells_of_groups(concept, len(a)))
    gaps = gap_per_class(a, b, z.codes, len(classes), len(z.classes))
    absent = int(np.isnan(gaps).sum())
    if absent:
        warn(
            f"{absent} of {len(gaps)} classes of the task have no row in at least two classes of "
            "the concept: they have no gap and are left out",
            SplinceWarning,
        )
    if average is None:
        return dict(zip(classes, gaps.tolist(), strict=True))
    return average_gap(gaps, average)


def gap_per_class(a: Codes, b: Codes, z: Codes, n_classes: int, n_concepts: int) -> Float:
    """(n_classes,): TPR gap of each class, NaN for a class without rows in two concept classes.

    `a`, `b` and `z` are codes of true class, predicted class and concept.
    """
    cells = np.where((a >= 0) & (z >= 0), a * n_concepts + z, -1)
    shape = n_classes, n_concepts
    counts, n_correct = (
        c.reshape(shape) for c in counts_per_code(cells, a == b, n_classes * n_concepts)
    )
    rates = np.divide(n_correct, counts, out=np.full(shape, np.nan), where=counts > 0)
    several = (counts > 0).sum(axis=1) >= 2
    gaps = np.full(n_classes, np.nan)
    if n_concepts == 2:
        gaps[several] = rates[several, 1] - rates[several, 0]
    else:
        highest = np.nanmax(rates[several], axis=1, initial=0.0)
        gaps[several] = highest - np.nanmin(rates[several], axis=1, initial=1.0)
    return gaps


def average_gap(gaps: Float, average: str) -> float:
    """Root mean square, or mean or maximum of absolute values, NaN left out."""
    sizes = np.abs(gaps[~np.isnan(gaps)])
    if not len(sizes):
        return math.nan
    if average == "rms":
        return float(np.sqrt(np.mean(sizes**2)))
    return float(sizes.mean() if average == "mean" else sizes.max())


def covariance_ratio(eraser: Projection, moments: Moments, name: VariableName) -> float:
    """Fraction of the covariance with a variable that an eraser keeps: |P S|_F^2 / |S|_F^2.

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
    InputError
        The eraser is no Projection, or of another width than the moments.

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
    if not isinstance(moments, Moments):
        raise InputError(f"moments is {type(moments).__name__}; pass the moments of the rows")
    S = moments.cross_covariance(name, ddof=0)
    if not isinstance(eraser, Projection) or eraser.n_features != len(S):
        width = f" of width {eraser.n_features}" if isinstance(eraser, Projection) else ""
        raise InputError(
            f"eraser is a {type(eraser).__name__}{width}; it must be a Projection of width {len(S)}"
        )
    kept = S - eraser.left @ (eraser.right.T @ S)
    whole = float(np.sum(S**2))
    return float(np.sum(kept**2)) / whole if whole else math.nan


def counts_per_code(codes: Codes, correct: NDArray[np.bool_], size: int = 0) -> tuple[Codes, Codes]:
    """Rows of each code from 0 on, and the correct ones among them; code -1 is left out."""
    counts = np.bincount(codes[codes >= 0], minlength=size)
    return counts, np.bincount(codes[correct & (codes >= 0)], minlength=len(counts))


def _read(y_true: object, y_pred: object) -> tuple[tuple[ClassName, ...], Codes, Codes]:
    """Names of the true classes, and codes of the true and the predicted ones."""
    check_index(y_true, y_pred, "y_pred", of="y_true")
    true = class_codes(y_true, "y_true")
    return true.classes, *common(true, class_codes(y_pred, "y_pred", len(true)))


def _one_of(groups: object, sensitive_features: object, name: str = "groups") -> object:
    """The value of an argument that has two names."""
    if (groups is None) == (sensitive_features is None):
        raise InputError(f"pass {name}= (or its alias sensitive_features=), and only one of them")
    return sensitive_features if groups is None else groups


def _is_constant(values: object) -> bool:
    return len(np.unique(class_codes(values, "labels").codes)) == 1


def _weights(values: object, n: int) -> Float:
    weight = as_weights(values, n)
    if weight is None:
        return np.ones(n)
    if not weight.any():
        raise NotEnoughDataError("all sample weights are 0")
    return weight
