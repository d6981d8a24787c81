"""Metrics by group: accuracies with intervals, and gaps between true positive rates.

Every metric of predictions takes ``(y_true, y_pred)`` as its first arguments, as ``make_scorer`` of
scikit-learn and ``MetricFrame`` of fairlearn require. ``sensitive_features=`` is an alias of
``groups=``. Rows of different columns are matched by position. A column whose pandas index is that
of ``y_true`` in another order raises LabelError. A cell is a group, or a combination of groups if
there are several columns of groups.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from splince_fast._runtime.arrays import as_weights
from splince_fast._runtime.keywords import described_type
from splince_fast._runtime.warn import warn
from splince_fast._solve.options import is_integer, is_number
from splince_fast.evaluation._cells import FEW_ROWS, cells_of_groups, class_codes, common_codes
from splince_fast.evaluation.statistics import wilson_interval
from splince_fast.exceptions import InputError, NotEnoughDataError, SplinceWarning
from splince_fast.labels import ClassName, VariableName
from splince_fast.labels.encoded import observed
from splince_fast.labels.names import listed
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
        Name of the group; a tuple of names for a combination of groups.
    n : int
        Number of rows.
    accuracy : float
        Fraction of correct predictions, weighted if weights were passed.
    low, high : float
        Limits of the Wilson interval, computed from unweighted counts.
    """

    cell: ClassName
    n: int
    accuracy: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class GroupAccuracy:
    """Accuracy per cell.

    Attributes
    ----------
    rows : tuple of CellAccuracy
        Accuracy of each cell with at least one row of positive weight, in the order of cell names.
    missing : tuple
        Names of the cells without a row of positive weight.
    n : int
        Number of rows with a true label.
    overall : float
        Accuracy of all rows with a true label, weighted if weights were passed.
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
        """Cell with the lowest accuracy; its accuracy is biased downwards, as any noisy minimum."""
        return min(self.rows, key=lambda row: row.accuracy)

    @property
    def mean(self) -> float:
        """Unweighted mean of the accuracies over cells."""
        return math.fsum(row.accuracy for row in self.rows) / len(self.rows)

    def weighted(self, by: Mapping[Any, float]) -> float:
        """Weighted mean sum_g by[g] accuracy_g / sum_g by[g] over cells g.

        `by` maps cells to weights, such as their fractions or counts among the training rows. The
        weight of a cell that is not in `rows` must be 0.

        Raises
        ------
        InputError
            A weight is negative or not finite, the weight of a cell that is not in `rows` is
            positive, or all weights are 0.
        """
        accuracies = {row.cell: row.accuracy for row in self.rows}
        bad = [cell for cell, w in by.items() if not (is_number(w) and math.isfinite(w) and w >= 0)]
        if bad:
            raise InputError(f"the weight of cell {bad[0]!r} must be a finite number of at least 0")
        absent = [cell for cell, w in by.items() if w > 0 and cell not in accuracies]
        if absent:
            raise InputError(
                f"cell {absent[0]!r} has a weight but no rows; the cells with rows are "
                f"{listed(accuracies)}"
            )
        total = math.fsum(by.values())
        if total <= 0:
            raise InputError("the weights add up to 0; pass counts or fractions of the cells")
        return math.fsum(accuracies[cell] * w for cell, w in by.items() if w > 0) / total

    def __str__(self) -> str:
        shown = sorted(self.rows, key=lambda row: row.accuracy)[:10]
        lines = [f"accuracy {self.overall:.3f} on {self.n:,} rows, {len(self.rows)} cells"]
        if len(self.rows) > len(shown):
            lines[0] += f" (the {len(shown)} worst)"
        for row in shown:
            caution = f"  (fewer than {FEW_ROWS} rows)" if row.n < FEW_ROWS else ""
            lines.append(
                f"  {row.accuracy:.3f} [{row.low:.3f}, {row.high:.3f}]  n = {row.n:<6,} "
                f"{row.cell!r}{caution}"
            )
        if self.missing:
            lines.append(f"  without rows: {', '.join(map(repr, self.missing[:10]))}")
        return "\n".join(lines)


class ClassAccuracy(dict[ClassName, float]):
    """Dictionary from true class to accuracy.

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
        """Balanced accuracy: unweighted mean over classes."""
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
    """Accuracy of every group, with Wilson intervals.

    Parameters
    ----------
    y_true, y_pred : column of shape (n,)
        Labels of any kind. Rows without a true label are left out; a missing prediction counts as
        wrong.
    groups : column, or tuple, mapping or frame of columns
        Groups of the rows; the groups of several columns are their combinations. Rows without a
        group count only in ``overall``.
    sample_weight : array-like of shape (n,), optional
        Non-negative weights of the rows in accuracies. The intervals are computed from unweighted
        counts.
    interval : float
        Level of the intervals, between 0 and 1.
    strict : bool
        Raise an error, instead of a warning, if a combination of groups has no row.
    sensitive_features : column or columns, optional
        Alias of `groups`.

    Returns
    -------
    GroupAccuracy
        The accuracies of the groups are in ``rows``; ``worst``, ``mean`` and ``weighted(by)``
        summarise them.

    Raises
    ------
    InputError
        Columns have different lengths, or the interval or weights are out of range.
    NotEnoughDataError
        No row has a group; or, with `strict`, a combination of groups has no row.

    Warns
    -----
    SplinceWarning
        A combination of groups has no row.

    Examples
    --------
    >>> from splince_fast.evaluation import group_accuracy
    >>> result = group_accuracy([1, 1, 0, 0], [1, 0, 0, 0], groups=["a", "b", "a", "b"])
    >>> result.worst.cell, result.worst.accuracy, result.overall
    ('b', 0.5, 0.75)
    """
    groups = _groups_or_alias(groups, sensitive_features)
    if not is_number(interval) or not 0 < interval < 1:
        raise InputError(f"interval is {interval!r}; it must lie between 0 and 1, such as .95")
    check_index(y_true, groups, "groups", of="y_true")
    _, true, predicted = _encode_labels(y_true, y_pred)
    labelled, correct = true >= 0, true == predicted
    cells = cells_of_groups(groups, len(true), "y_true")
    weight = np.where(labelled, _weights(sample_weight, len(true)), 0.0)
    codes = np.where(labelled, cells.codes, -1)
    size = len(cells.classes)
    counts, n_correct = counts_per_code(codes, correct, size)
    in_cell = codes >= 0
    weight_sums = np.bincount(codes[in_cell], weight[in_cell], size)
    correct_sums = np.bincount(codes[in_cell], (weight * correct)[in_cell], size)
    has_rows = (counts > 0) & (weight_sums > 0)
    present = np.flatnonzero(has_rows)
    if not len(present):
        raise NotEnoughDataError(
            "no row has a true label, a group and a positive weight; check the labels"
        )
    missing = tuple(cells.classes[i] for i in np.flatnonzero(~has_rows))
    if missing:
        text = (
            f"{len(missing)} of {size} cells have no row: {', '.join(map(repr, missing[:10]))}; "
            "the worst group is the worst of the other cells"
        )
        if strict:
            raise NotEnoughDataError(text)
        warn(text, SplinceWarning)
    rows = []
    for i in present.tolist():
        limits = wilson_interval(float(n_correct[i]), int(counts[i]), level=interval)
        accuracy = float(correct_sums[i] / weight_sums[i])
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
    """Lowest accuracy over the groups that have rows.

    The result is min_g mean(y_pred = y_true | g) over groups g, as in Sagawa et al.,
    "Distributionally robust neural networks for group shifts" (ICLR 2020).

    Parameters
    ----------
    y_true, y_pred : column of shape (n,)
        Labels of any kind.
    groups : column, or tuple, mapping or frame of columns
        Groups of the rows; the groups of several columns are their combinations.
    min_rows : int
        Groups with fewer rows are left out.
    sample_weight : array-like of shape (n,), optional
        Non-negative weights of the rows.
    sensitive_features : column or columns, optional
        Alias of `groups`.

    Returns
    -------
    float
        Accuracy of the worst group, in [0, 1].

    Raises
    ------
    InputError
        Columns have different lengths, or `min_rows` is below 1.
    NotEnoughDataError
        No group has `min_rows` rows.

    Warns
    -----
    SplinceWarning
        A combination of groups has no row; or predictions are constant and the result is 0.

    Examples
    --------
    >>> from splince_fast.evaluation import worst_group_accuracy
    >>> worst_group_accuracy([1, 1, 0, 0], [1, 0, 0, 0], groups=["a", "b", "a", "b"])
    0.5
    """
    groups = _groups_or_alias(groups, sensitive_features)
    if not is_integer(min_rows) or min_rows < 1:
        raise InputError(f"min_rows is {min_rows!r}; it must be a positive integer")
    result = group_accuracy(y_true, y_pred, groups=groups, sample_weight=sample_weight)
    accuracies = [row.accuracy for row in result.rows if row.n >= min_rows]
    if not accuracies:
        largest = max(row.n for row in result.rows)
        raise NotEnoughDataError(f"no cell has {min_rows} rows; the largest has {largest}")
    worst = min(accuracies)
    if worst == 0.0 and _is_constant(y_pred) and not _is_constant(y_true):
        warn(
            "all predictions are equal, so a group of another class has accuracy 0",
            SplinceWarning,
        )
    return worst


def class_accuracy(y_true: object, y_pred: object) -> ClassAccuracy:
    """Accuracy for each true class (true positive rate, recall).

    Parameters
    ----------
    y_true, y_pred : column of shape (n,)
        Labels of any kind.

    Returns
    -------
    ClassAccuracy
        Dictionary from class to accuracy; ``mean`` is the balanced accuracy.

    Raises
    ------
    InputError
        Columns have different lengths.
    NotEnoughDataError
        No row has a true label.

    Examples
    --------
    >>> from splince_fast.evaluation import class_accuracy
    >>> class_accuracy(["x", "x", "y", "y"], ["x", "y", "y", "y"])
    {'x': 0.5, 'y': 1.0}
    """
    classes, true, predicted = _encode_labels(y_true, y_pred)
    counts, n_correct = counts_per_code(true, true == predicted, len(classes))
    if not counts.any():
        raise NotEnoughDataError("no row has a true label; check y_true")
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
    """Gap between the true positive rates (TPR) of the classes of the concept.

    TPR(y | z) is the fraction of correct predictions among the rows of class y of the task and
    class z of the concept. For two classes a, b of the concept, in sorted order,
    Gap_y = TPR(y | b) - TPR(y | a); for more classes, Gap_y = max_z TPR(y | z) - min_z TPR(y | z).
    De-Arteaga et al. (2019) and Romanov et al. (2019) report the root mean square of Gap_y over y.

    Parameters
    ----------
    y_true, y_pred : column of shape (n,)
        Labels of any kind.
    concept : column, or tuple, mapping or frame of columns
        Classes of the concept; the classes of several columns are their combinations.
    average : {"rms", "mean", "max"} or None
        Summary of the gaps over the classes of the task: the root mean square, or the mean or
        maximum of the absolute gaps. None returns the gap of every class of the task; the gaps are
        signed if the concept has two classes.
    sensitive_features : column or columns, optional
        Alias of `concept`.

    Returns
    -------
    float or dict
        Average gap, or a dictionary from class of the task to gap. The gap of a class of the task
        is NaN if its rows are in fewer than two classes of the concept.

    Raises
    ------
    InputError
        Columns have different lengths, or `average` is unknown.

    Warns
    -----
    SplinceWarning
        The rows of a class of the task are in fewer than two classes of the concept; the class is
        left out of the average.

    Examples
    --------
    >>> from splince_fast.evaluation import tpr_gap
    >>> tpr_gap([1, 1, 1, 1], [1, 1, 1, 0], concept=["a", "a", "b", "b"])
    0.5
    >>> tpr_gap([1, 1, 1, 1], [1, 1, 1, 0], concept=["a", "a", "b", "b"], average=None)
    {1: -0.5}
    """
    concept = _groups_or_alias(concept, sensitive_features, "concept")
    if average not in ("rms", "mean", "max", None):
        raise InputError(f"average is {average!r}; choose 'rms', 'mean', 'max' or None")
    check_index(y_true, concept, "concept", of="y_true")
    classes, true, predicted = _encode_labels(y_true, y_pred)
    z = observed(cells_of_groups(concept, len(true), "y_true"))
    gaps = gap_per_class(true, predicted, z.codes, len(classes), len(z.classes))
    absent = int(np.isnan(gaps).sum())
    if absent:
        warn(
            f"{absent} of {len(gaps)} classes of the task have rows in fewer than two classes of "
            "the concept; these classes have no gap and are left out of the average",
            SplinceWarning,
        )
    if average is None:
        return dict(zip(classes, gaps.tolist(), strict=True))
    return average_gap(gaps, average)


def gap_per_class(
    true: Codes, predicted: Codes, concept: Codes, n_classes: int, n_concepts: int
) -> Float:
    """TPR gap of each class of the task, (n_classes,).

    `true`, `predicted` and `concept`, (n,) each, hold the codes of the true class, the predicted
    class and the class of the concept; -1 is a missing label. The gap of a class is NaN if its rows
    are in fewer than two classes of the concept.
    """
    cells = np.where((true >= 0) & (concept >= 0), true * n_concepts + concept, -1)
    shape = n_classes, n_concepts
    counts, n_correct = (
        c.reshape(shape) for c in counts_per_code(cells, true == predicted, n_classes * n_concepts)
    )
    rates = np.divide(n_correct, counts, out=np.full(shape, np.nan), where=counts > 0)
    comparable = (counts > 0).sum(axis=1) >= 2
    gaps = np.full(n_classes, np.nan)
    if n_concepts == 2:
        gaps[comparable] = rates[comparable, 1] - rates[comparable, 0]
    else:
        highest = np.nanmax(rates[comparable], axis=1, initial=0.0)
        gaps[comparable] = highest - np.nanmin(rates[comparable], axis=1, initial=1.0)
    return gaps


def average_gap(gaps: Float, average: str) -> float:
    """Return the "rms", "mean" or "max" of the absolute gaps that are not NaN.

    "rms" is the root mean square. The result is NaN if all gaps are NaN.
    """
    absolute = np.abs(gaps[~np.isnan(gaps)])
    if not len(absolute):
        return math.nan
    if average == "rms":
        return float(np.sqrt(np.mean(absolute**2)))
    return float(absolute.mean() if average == "mean" else absolute.max())


def covariance_ratio(eraser: Projection, moments: Moments, name: VariableName) -> float:
    """Fraction of the squared covariance with a variable that an eraser keeps: |P S|^2 / |S|^2.

    S = Cov(x, v) is computed from `moments` and has one column per class of the variable v (or per
    column of a quantity). P is the matrix of the eraser. Norms are Frobenius norms.

    Parameters
    ----------
    eraser : Projection
        The map x -> P (x - mean) + mean.
    moments : Moments
        Moments of the rows on which the covariance is computed.
    name : str or tuple of str
        Name of the variable v.

    Returns
    -------
    float
        1 if the covariance is unchanged, 0 if it is removed, NaN if S = 0.

    Raises
    ------
    UnknownVariableError
        The moments have no such variable.
    InputError
        The eraser is not a Projection, or its number of features differs from the moments.

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
        raise InputError(f"moments is {described_type(moments)}; pass the moments of the rows")
    S = moments.cross_covariance(name, ddof=0)
    if not isinstance(eraser, Projection) or eraser.n_features != len(S):
        width = f" of width {eraser.n_features}" if isinstance(eraser, Projection) else ""
        raise InputError(
            f"eraser is {described_type(eraser)}{width}; it must be a Projection of width {len(S)}"
        )
    kept = S - eraser.left @ (eraser.right.T @ S)
    total = float(np.sum(S**2))
    return float(np.sum(kept**2)) / total if total else math.nan


def counts_per_code(codes: Codes, correct: NDArray[np.bool_], size: int = 0) -> tuple[Codes, Codes]:
    """Return, for each code 0, 1, ..., the number of rows and the number of correct rows.

    `codes` and `correct` are (n,); rows of code -1 are left out. `size` is the minimum length of
    both results.
    """
    counts = np.bincount(codes[codes >= 0], minlength=size)
    return counts, np.bincount(codes[correct & (codes >= 0)], minlength=len(counts))


def _encode_labels(y_true: object, y_pred: object) -> tuple[tuple[ClassName, ...], Codes, Codes]:
    """Return the names of the true classes, the codes of `y_true`, and the codes of `y_pred`."""
    check_index(y_true, y_pred, "y_pred", of="y_true")
    true = class_codes(y_true, "y_true")
    predicted = class_codes(y_pred, "y_pred", len(true), of="y_true")
    return true.classes, *common_codes(true, predicted)


def _groups_or_alias(groups: object, sensitive_features: object, name: str = "groups") -> object:
    """Return the argument that is not None; raise InputError for none or two such arguments."""
    if (groups is None) == (sensitive_features is None):
        raise InputError(f"pass exactly one of {name}= and its alias sensitive_features=")
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
