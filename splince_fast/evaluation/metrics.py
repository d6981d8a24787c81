"""Metrics by group, and the metrics of a comparison in one table, :data:`METRICS`.

Every metric of predictions takes ``(y_true, y_pred)`` as its first arguments, as ``make_scorer`` of
scikit-learn and ``MetricFrame`` of fairlearn require. ``sensitive_features=`` is an alias of
``groups=``. Rows of different columns are matched by position. A cell is a group, or a combination
of groups if there are several columns of groups. To add a metric to comparisons, add one entry to
:data:`METRICS`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from splince_fast._runtime.keywords import described_type
from splince_fast._runtime.rows import as_weights
from splince_fast._runtime.warn import warn
from splince_fast._solve.options import is_number
from splince_fast.evaluation.data import (
    FEW_ROWS,
    cells_of_groups,
    class_codes,
    common_codes,
    counts_per_code,
)
from splince_fast.evaluation.records import CellCount, CustomMetric, Record, TestLabels
from splince_fast.evaluation.statistics import wilson_interval
from splince_fast.exceptions import InputError, NotEnoughDataError, SplinceError, SplinceWarning
from splince_fast.labels import ClassCodes, ClassName, Encoded, VariableName, names_array
from splince_fast.labels.encoded import observed
from splince_fast.labels.positions import check_index
from splince_fast.moments import Moments
from splince_fast.projection import Projection

Float = NDArray[np.float64]
Codes = NDArray[np.intp]


@dataclass(frozen=True, slots=True)
class CellAccuracy:
    """Accuracy in one cell, with the limits of a Wilson interval from unweighted counts."""

    cell: ClassName  # name of the group; a tuple of names for a combination of groups
    n: int
    accuracy: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class GroupAccuracy:
    """Accuracy per cell."""

    rows: tuple[CellAccuracy, ...]  # the cells with a row of positive weight, in order of names
    missing: tuple[ClassName, ...]  # the other cells
    n: int  # number of rows with a true label
    overall: float  # accuracy of these rows, weighted if weights were passed
    interval: float  # level of the intervals

    @property
    def worst(self) -> CellAccuracy:
        """Cell with the lowest accuracy; its accuracy is biased downwards, as any noisy minimum."""
        return min(self.rows, key=lambda row: row.accuracy)

    @property
    def mean(self) -> float:
        """Unweighted mean of the accuracies over cells."""
        return math.fsum(row.accuracy for row in self.rows) / len(self.rows)

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
    """Dictionary from true class to accuracy."""

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
    sensitive_features : column or columns, optional
        Alias of `groups`.

    Returns
    -------
    GroupAccuracy
        The accuracies of the groups are in ``rows``; ``worst`` and ``mean`` summarise them.

    Raises
    ------
    InputError
        Columns have different lengths, or the interval or weights are out of range.
    NotEnoughDataError
        No row has a group.

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
    weight = as_weights(sample_weight, len(true))
    weight = np.where(labelled, 1.0 if weight is None else weight, 0.0)
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
        warn(
            f"{len(missing)} of {size} cells have no row: {', '.join(map(repr, missing[:10]))}; "
            "the worst group is the worst of the other cells",
            SplinceWarning,
        )
    rows = []
    for i in present.tolist():
        limits = wilson_interval(int(n_correct[i]), int(counts[i]), level=interval)
        accuracy = float(correct_sums[i] / weight_sums[i])
        rows.append(CellAccuracy(cells.classes[i], int(counts[i]), accuracy, *limits))
    overall = float(np.sum(weight * correct) / np.sum(weight))
    return GroupAccuracy(tuple(rows), missing, int(labelled.sum()), overall, interval)


def worst_group_accuracy(
    y_true: object,
    y_pred: object,
    *,
    groups: object = None,
    sample_weight: object = None,
    sensitive_features: object = None,
) -> float:
    """Lowest accuracy over the groups that have rows.

    The result is min_g mean(y_pred = y_true | g) over groups g, as in Sagawa et al.,
    "Distributionally robust neural networks for group shifts" (ICLR 2020).

    Parameters
    ----------
    y_true, y_pred, groups, sample_weight, sensitive_features
        As for :func:`group_accuracy`.

    Returns
    -------
    float
        Accuracy of the worst group, in [0, 1].

    Warns
    -----
    SplinceWarning
        A combination of groups has no row.

    Examples
    --------
    >>> from splince_fast.evaluation import worst_group_accuracy
    >>> worst_group_accuracy([1, 1, 0, 0], [1, 0, 0, 0], groups=["a", "b", "a", "b"])
    0.5
    """
    groups = _groups_or_alias(groups, sensitive_features)
    return group_accuracy(y_true, y_pred, groups=groups, sample_weight=sample_weight).worst.accuracy


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

    Examples
    --------
    >>> from splince_fast.evaluation import class_accuracy
    >>> class_accuracy(["x", "x", "y", "y"], ["x", "y", "y", "y"])
    {'x': 0.5, 'y': 1.0}
    """
    rows = group_accuracy(y_true, y_pred, groups=y_true).rows
    return ClassAccuracy({row.cell: row.accuracy for row in rows})


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
    """TPR gap of each class of the task; NaN without rows of two classes of the concept."""
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
    """Return the "rms", "mean" or "max" of the absolute gaps; NaN if all gaps are NaN."""
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


# An erased feature counts as constant if its standard deviation is below this fraction of the root
# mean variance of the unerased features. A prediction counts as constant if its range is below this
# fraction of the range of the task.
ROUNDING = 2.0**-32


@dataclass(frozen=True, slots=True)
class Metric:
    """A metric of :func:`compare`, with its direction.

    Parameters
    ----------
    score : callable or None
        Function ``score(y_true, y_pred)`` that returns a float, for a custom metric.
    lower_is_better : bool, optional
        Direction: True if lower values are better, False if higher values are better. None, the
        default, is no direction: the metric is shown, but no eraser is marked as the best.
    label : str
        Label in tables and plots; the default is the key in ``metrics=``.
    of : {"head", "eraser"}
        Whether the metric describes a head or the eraser itself; "head" for a custom metric.
    definition : str
        Definition of the metric, shown at the end of the report.

    Examples
    --------
    >>> import numpy as np
    >>> from splince_fast import evaluation as ev
    >>> def error_rate(y_true, y_pred):
    ...     return np.mean(y_true != y_pred)
    >>> rng = np.random.default_rng(0)
    >>> y, z = rng.integers(0, 2, 600), rng.integers(0, 2, 600)
    >>> X = rng.normal(size=(600, 4)) + y[:, None] * np.eye(4)[1] + z[:, None] * np.eye(4)[0]
    >>> result = ev.compare(
    ...     X, task=y, concept=z, n_seeds=3, alphas=(0.01,), progress=False,
    ...     metrics={"error": ev.Metric(error_rate, lower_is_better=True, label="error rate")},
    ... )
    >>> means = [result.mean("error", eraser=eraser) for eraser in result.verdict("error").leaders]
    >>> means == sorted(means)
    True
    """

    score: Callable[..., Any] | None
    lower_is_better: bool | None = None
    label: str = ""
    of: str = "head"
    definition: str = ""


@dataclass(frozen=True, slots=True)
class TableMetric(Metric):
    """A metric of the library, with properties on which tests and decisions depend."""

    # "rows" for a fraction (or a mean of fractions) of the test rows, "cell" for one of the rows of
    # a cell.
    fraction_of: str = ""
    bounded: bool = True  # whether a difference of .01 means the same at every value


@dataclass(frozen=True, slots=True, eq=False)
class ClassPredictions:
    """Predicted classes and true labels of test rows."""

    labels: TestLabels
    y_pred: Codes  # (n,) codes of predicted classes of the task
    classes: tuple[ClassName, ...] = ()  # classes of the task
    concept_classes: tuple[str, ...] = ()  # joint classes of the concepts; () for a quantity

    def counts(self, codes: Codes) -> tuple[Codes, Codes, Codes]:
        """Return the codes that occur, (n,), their row counts and numbers of correct rows."""
        counts, n_correct = counts_per_code(codes, self.labels.task == self.y_pred)
        present = np.flatnonzero(counts)
        return present, counts[present], n_correct[present]

    def cells(self) -> tuple[CellCount, ...]:
        """Number of test rows, and of correct test rows, of each cell that has test rows."""
        if self.labels.cells is None:
            return ()
        columns = (counts.tolist() for counts in self.counts(self.labels.cells))
        return tuple(map(CellCount._make, zip(*columns, strict=True)))

    def scores(self) -> dict[str, float]:
        """Values of the library's metrics for classes; undefined metrics are left out."""
        return scores(OF_CLASSES, self) | self._fairness()

    def _fairness(self) -> dict[str, float]:
        """Fairness metrics for a task of two classes; {} for other tasks."""
        # As `demographic_parity_difference` and `equalized_odds_difference` of fairlearn, but true
        # (false) positive rates are compared only where there are positive (negative) test rows.
        task, concept, names = self.labels.task, self.labels.concept, self.concept_classes
        if concept is None or not names or len(self.classes) != 2 or set(task) != {0, 1}:
            return {}
        selected = (self.y_pred == 1).astype(np.intp)
        n, n_selected = counts_per_code(concept, selected == 1)
        rates = {names[g]: float(n_selected[g] / n[g]) for g in np.flatnonzero(n).tolist()}
        gaps = gap_per_class(task, selected, concept, 2, len(names))
        return {
            "demographic_parity": max(rates.values()) - min(rates.values()),
            "equalized_odds": average_gap(gaps, "max"),
            **{f"selection_rate[{name}]": rate for name, rate in rates.items()},
        }

    def columns(self) -> tuple[NDArray[Any], NDArray[Any]]:
        """Arguments of custom metrics: names of the true and the predicted classes, (n,) each."""
        names = names_array(self.classes)
        return names[self.labels.task], names[self.y_pred]


@dataclass(frozen=True, slots=True, eq=False)
class QuantityPredictions:
    """Predictions of a quantity on test rows, and its true values."""

    y_true: Float  # (n, k)
    y_pred: Float  # (n, k)
    concept: Float | None  # (n,) a concept of one column or two classes; None for others

    def cells(self) -> tuple[CellCount, ...]:
        """Return no cells, because cells are combinations of classes."""
        return ()

    def scores(self) -> dict[str, float]:
        """Values of the library's metrics for quantities; undefined metrics are left out."""
        return scores(OF_QUANTITIES, self)

    def columns(self) -> tuple[NDArray[Any], NDArray[Any]]:
        """Arguments of custom metrics: copies of `y_true` and `y_pred`, (n,) if k = 1."""
        y_true, y_pred = (c[:, 0] if c.shape[1] == 1 else c for c in (self.y_true, self.y_pred))
        return y_true.copy(), y_pred.copy()


Predictions = ClassPredictions | QuantityPredictions


def as_codes(y_pred: NDArray[Any], n: int, classes: Codes) -> Codes:
    """Convert predictions of a head to (n,) codes; `classes` are the codes of its training rows."""
    if y_pred.shape != (n,):
        raise InputError(f"the head predicts shape {y_pred.shape} for {n} rows; it must be ({n},)")
    unknown = np.flatnonzero(~np.isin(y_pred, classes))
    if len(unknown):
        raise InputError(
            f"the head predicts {y_pred[unknown[0]]!s}, which is not a class of its training rows; "
            "the task has classes, so pass a classifier"
        )
    return y_pred.astype(np.intp)


def as_quantities(y_pred: NDArray[Any], shape: tuple[int, ...]) -> Float:
    """Convert predictions of a head to a float64 array of `shape`, the shape (n, k) of the task."""
    if y_pred.shape != shape and (*y_pred.shape, 1) != shape:
        raise InputError(f"the head predicts shape {y_pred.shape}; the task has shape {shape}")
    return np.asarray(y_pred, dtype=np.float64).reshape(shape)


def erasure_scores(
    before: Float, after: Float, labels: Mapping[str, Encoded], task: str, rank: int | None
) -> dict[str, float]:
    """Values of OF_ERASERS for rows (n, d) before and after erasure."""
    kept = {}
    for name, column in labels.items():
        if isinstance(column, ClassCodes):
            values = np.eye(len(column.classes))[column.codes]
        else:
            values = column.values
        values = values - values.mean(axis=0)
        kept[name] = _ratio(np.sum((values.T @ after) ** 2), np.sum((values.T @ before) ** 2))
    spread = np.sum((before - before.mean(axis=0)) ** 2)
    scores = {
        "kept_covariance": kept.pop(task),
        "distortion": _ratio(np.sum((after - before) ** 2), spread),
        "residual": max(math.sqrt(ratio) for ratio in kept.values()),
    }
    return scores if rank is None else scores | {"rank": float(rank)}


def _ratio(part: np.floating[Any], whole: np.floating[Any]) -> float:
    return float(part / whole) if whole else math.nan


def _accuracy(predictions: ClassPredictions) -> float:
    return float(np.mean(predictions.labels.task == predictions.y_pred))


def _class_accuracy(predictions: ClassPredictions) -> float:
    _, counts, n_correct = predictions.counts(predictions.labels.task)
    return float(np.mean(n_correct / counts))


def _worst_group(predictions: ClassPredictions) -> float | None:
    if predictions.labels.cells is None:
        return None
    _, counts, n_correct = predictions.counts(predictions.labels.cells)
    return float(np.min(n_correct / counts)) if len(counts) else math.nan


def _tpr_gap(predictions: ClassPredictions) -> float | None:
    task, concept = predictions.labels.task, predictions.labels.concept
    if concept is None:
        return None
    n_classes, n_concepts = (int(codes.max(initial=0)) + 1 for codes in (task, concept))
    gaps = gap_per_class(task, predictions.y_pred, concept, n_classes, n_concepts)
    return average_gap(gaps, "rms")


def _mse(predictions: QuantityPredictions) -> float:
    return float(np.mean((predictions.y_true - predictions.y_pred) ** 2))


def _r2(predictions: QuantityPredictions) -> float:
    y_true = predictions.y_true
    variance = float(np.mean((y_true - y_true.mean(axis=0)) ** 2))
    return 1 - _mse(predictions) / variance if variance else math.nan


def _concept_correlation(predictions: QuantityPredictions) -> float | None:
    concept = predictions.concept
    if concept is None or not np.ptp(concept) > 0:
        return None
    # The correlation with a constant is undefined: leave out predictions that are constant up to
    # rounding error.
    varied = np.ptp(predictions.y_pred, axis=0) > ROUNDING * np.ptp(predictions.y_true, axis=0)
    columns = predictions.y_pred.T[varied]
    return max((abs(float(np.corrcoef(c, concept)[0, 1])) for c in columns), default=None)


OF_CLASSES: dict[str, TableMetric] = {
    "accuracy": TableMetric(
        _accuracy, False, "accuracy", fraction_of="rows",
        definition="fraction of test rows that the head predicts correctly",
    ),
    "class_accuracy": TableMetric(
        _class_accuracy, False, "acc/class", fraction_of="rows",
        definition="balanced accuracy: that within each class of the task, averaged over classes",
    ),
    "worst_group": TableMetric(
        _worst_group, False, "worst group", fraction_of="cell",
        definition="lowest accuracy of a cell: test rows of one class of task and one of concept",
    ),
    "tpr_gap": TableMetric(
        _tpr_gap, True, "TPR gap", fraction_of="rows",
        definition="root mean square over classes of the task of the difference between the true "
        "positive rates of the classes of the concept",
    ),
}  # fmt: skip
# Metrics for a task of two classes. There is one selection rate per class of the concept, with the
# key "selection_rate[CLASS]".
OF_FAIRNESS: dict[str, TableMetric] = {
    "demographic_parity": TableMetric(
        None, True, "DP difference",
        definition="demographic parity difference: largest minus smallest selection rate",
    ),
    "equalized_odds": TableMetric(
        None, True, "EO difference",
        definition="equalized odds difference: the larger of the gaps of true and false positive "
        "rates between classes of the concept",
    ),
    "selection_rate": TableMetric(
        None, None, "selected",
        definition="selection rate: fraction of the test rows of a class of the concept for which "
        "the head predicts the second class of the task",
    ),
}  # fmt: skip
OF_QUANTITIES: dict[str, TableMetric] = {
    "r2": TableMetric(
        _r2, False, "R2",
        definition="1 - mean squared error / variance of the task, on test rows",
    ),
    "mse": TableMetric(
        _mse, True, "MSE", bounded=False, definition="mean squared error on test rows"
    ),
    "concept_correlation": TableMetric(
        _concept_correlation, True, "|corr concept|",
        definition="absolute correlation of prediction and concept on test rows; the largest over "
        "columns for a task of several columns",
    ),
}  # fmt: skip
OF_ERASERS: dict[str, TableMetric] = {
    "kept_covariance": TableMetric(
        None, False, "kept cov", "eraser",
        "|Cov(r(x), y)|^2 / |Cov(x, y)|^2 on the training rows, y the task",
    ),
    "distortion": TableMetric(
        None, True, "distortion", "eraser",
        "E|r(x) - x|^2 / E|x - E x|^2 on the training rows: mean squared change of a row over the "
        "total variance",
    ),
    "residual": TableMetric(
        None, True, "residual", "eraser",
        "|Cov(r(x), z)| / |Cov(x, z)| on the training rows, z the concept: 0 up to rounding error",
    ),
    "rank": TableMetric(None, None, "rank", "eraser", "number of removed dimensions"),
}  # fmt: skip
# Metrics of the linear probe, for each concept (see `concept_key`). Those of a probe that the
# caller names "forest" have the keys "forest_accuracy", "forest_auc" and "forest_chance".
OF_PROBES: dict[str, TableMetric] = {
    f"probe_{score}": TableMetric(
        None, lower, f"probe {label}", "eraser",
        f"{text} of a linear model for the concept that is trained and scored within test rows",
        fraction_of="rows" if score == "accuracy" else "",
    )
    for score, lower, label, text in (
        ("accuracy", True, "acc", "accuracy"), ("auc", True, "AUC", "area under the ROC curve"),
        ("r2", True, "R2", "R^2 (0 for predicting the mean of the training rows)"),
        ("chance", None, "chance", "chance level (fraction of the most frequent class)"),
    )
}  # fmt: skip
METRICS = OF_CLASSES | OF_FAIRNESS | OF_QUANTITIES | OF_PROBES | OF_ERASERS
# Columns of a summary: metrics of heads, then metrics of erasers.
SUMMARY = (
    "worst_group", "accuracy", "tpr_gap", "r2", "mse", "concept_correlation", "probe_accuracy",
    "probe_auc", "probe_r2", "kept_covariance", "distortion",
)  # fmt: skip


def scores(table: Mapping[str, Metric], subject: Predictions) -> dict[str, float]:
    """Values of the metrics in `table` that are defined for `subject`."""
    values = {key: metric.score(subject) for key, metric in table.items() if metric.score}
    return {key: float(value) for key, value in values.items() if value is not None}


def add_scores(record: Record, predictions: Predictions, custom: Mapping[str, Metric]) -> Record:
    """Return the record with the metrics of the predictions on the test rows."""
    values, notes, reason = predictions.scores(), record.notes, record.reason
    if isinstance(predictions, ClassPredictions) and np.ptp(predictions.y_pred) == 0:
        worst = ", so its worst group has accuracy 0" * (values.get("worst_group") == 0.0)
        notes += (f"the head predicts the same class for all test rows{worst}",)
    for name, metric in custom.items():
        assert metric.score is not None
        try:
            value = float(metric.score(*predictions.columns()))  # copies: score may mutate them
            if math.isinf(value):
                raise InputError(f"the value is {value}; return NaN where the metric is undefined")
            values[name] = value
        except Exception as error:
            reason = f"metric {name!r}: {reason_of(error)}"
    cells = predictions.cells()
    return dataclasses.replace(record, values=values, cells=cells, notes=notes, reason=reason)


def reason_of(error: Exception) -> str:
    """Text of an error, preceded by the name of its type unless it is a SplinceError."""
    return str(error) if isinstance(error, SplinceError) else f"{type(error).__name__}: {error}"


def check_metrics(metrics: object) -> dict[str, Metric]:
    """Validate the custom metrics, and give each a label."""
    if metrics is None:
        return {}
    if not isinstance(metrics, Mapping):
        raise InputError("metrics must map names to functions of (y_true, y_pred), or to Metric")
    custom = {}
    for key, value in metrics.items():
        metric = value if isinstance(value, Metric) else Metric(value)
        if not callable(metric.score):
            raise InputError(
                f"metrics[{key!r}] is {value!r}; pass a function of (y_true, y_pred), or a Metric "
                "of such a function"
            )
        if metric.of != "head" or metric.lower_is_better not in (None, True, False):
            raise InputError(
                f"metrics[{key!r}] has of={metric.of!r} and lower_is_better="
                f"{metric.lower_is_better!r}; a custom metric has of='head', and lower_is_better "
                "is True, False or None"
            )
        if not isinstance(key, str) or key.partition("[")[0] in METRICS:
            raise InputError(
                f"a custom metric is named {key!r}; the name must be a string, and not that of a "
                "metric of compare"
            )
        custom[key] = Metric(metric.score, metric.lower_is_better, metric.label or key)
    return custom


def headline(present: Sequence[str]) -> str:
    """First metric of SUMMARY among the metrics `present`, or else the first one of `present`."""
    return next(key for key in (*SUMMARY, *present) if key in present)


def concept_key(key: str, concept: str, concepts: Sequence[str]) -> str:
    """Key of a metric for `concept`: "probe_auc", or "probe_auc[gender]" if there are several."""
    return f"{key}[{concept}]" if len(concepts) > 1 else key


def metric_of(key: str, custom: Mapping[str, CustomMetric]) -> TableMetric:
    """Return the metric of a key, without its function; probe and concept join the label."""
    base, bracket, name = key.partition("[")
    if key in custom:
        metric = custom[key]
        return TableMetric(
            None, metric.lower_is_better, metric.label, definition="custom metric",
            fraction_of="rows" if base.endswith("accuracy") else "", bounded=False,
        )  # fmt: skip
    entry = METRICS.get(base)
    if entry is None:
        probe, _, score = base.rpartition("_")
        entry = METRICS[f"probe_{score}"]
        definition = entry.definition.replace("a linear model", f"the probe {probe!r}")
        label = entry.label.replace("probe", probe, 1)
        entry = dataclasses.replace(entry, label=label, definition=definition)
    label = f"{entry.label} {bracket}{name}".strip()
    return dataclasses.replace(entry, score=None, label=label)
