"""Metrics by group, and the metrics of a comparison in one table, :data:`METRICS`."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy.stats
from numpy.typing import NDArray

from splince_fast._runtime.arguments import warn
from splince_fast._runtime.names import listed
from splince_fast.evaluation.data import (
    Codes,
    Float,
    cells_of_groups,
    class_codes,
    common_codes,
    counts_per_code,
    values_of,
)
from splince_fast.evaluation.records import CellCount, PartLabels, Record
from splince_fast.exceptions import InputError, NotEnoughDataError, SplinceError, SplinceWarning
from splince_fast.labels import ClassName, Encoded, names_array
from splince_fast.labels.containers import check_index


@dataclass(frozen=True, slots=True)
class CellAccuracy:
    """Accuracy in one cell, with the limits of a Wilson interval at level .95."""

    cell: ClassName  # name of the group; a tuple of names for a combination of groups
    n: int
    accuracy: float
    low: float
    high: float

    @classmethod
    def of(cls, cell: ClassName, n: int, n_correct: int) -> CellAccuracy:
        """Return the accuracy of `n_correct` correct rows of the `n` rows of a cell."""
        limits = scipy.stats.binomtest(n_correct, n).proportion_ci(method="wilson")
        return cls(cell, n, n_correct / n, float(limits.low), float(limits.high))


@dataclass(frozen=True, slots=True)
class GroupAccuracy:
    """Accuracy per cell."""

    rows: tuple[CellAccuracy, ...]  # the cells with rows, in order of names
    missing: tuple[ClassName, ...]  # the other cells
    n: int  # number of rows with a true label
    overall: float  # accuracy of these rows

    @property
    def worst(self) -> CellAccuracy:
        """Cell with the lowest accuracy; its accuracy is biased downwards, as any noisy minimum."""
        return min(self.rows, key=lambda row: row.accuracy)


def group_accuracy(y_true: object, y_pred: object, *, groups: object) -> GroupAccuracy:
    """Accuracy of every group, with Wilson intervals at level .95.

    Parameters
    ----------
    y_true, y_pred : column of shape (n,)
        Labels of any kind. Rows without a true label are left out; a missing prediction is wrong.
    groups : column, or tuple, mapping or frame of columns
        Groups, or combinations of columns. Rows without a group count only in ``overall``.

    Returns
    -------
    GroupAccuracy
        The accuracies of the groups are in ``rows``; ``worst`` is the lowest of them.

    Raises
    ------
    NotEnoughDataError
        No row has a true label and a group. A combination without rows is a warning.

    Examples
    --------
    >>> from splince_fast.evaluation import group_accuracy
    >>> result = group_accuracy([1, 1, 0, 0], [1, 0, 0, 0], groups=["a", "b", "a", "b"])
    >>> result.worst.cell, result.worst.accuracy, result.overall
    ('b', 0.5, 0.75)
    """
    check_index(y_true, groups, "groups", of="y_true")
    true, predicted = _encode_labels(y_true, y_pred)
    cells, combinations = cells_of_groups(groups, len(true), "y_true")
    labelled, correct = true >= 0, true == predicted
    counts = counts_per_code(np.where(labelled, cells.codes, -1), correct)
    rows = {cells.classes[i]: CellAccuracy.of(cells.classes[i], n, k) for i, n, k in counts}
    if not rows:
        raise NotEnoughDataError("no row has a true label and a group; check the labels")
    missing = tuple(cell for cell in combinations if cell not in rows)
    if missing:
        text = f"{len(missing)} of {len(combinations)} cells have no row: {listed(missing)}; "
        warn(text + "the worst group is the worst of the other cells", SplinceWarning)
    overall = float(correct[labelled].mean())
    return GroupAccuracy(tuple(rows.values()), missing, int(labelled.sum()), overall)


def worst_group_accuracy(y_true: object, y_pred: object, *, groups: object) -> float:
    """Lowest accuracy over the groups that have rows (Sagawa et al., ICLR 2020).

    Parameters
    ----------
    y_true, y_pred, groups
        As for :func:`group_accuracy`.

    Returns
    -------
    float
        Accuracy of the worst group, in [0, 1].

    Examples
    --------
    >>> from splince_fast.evaluation import worst_group_accuracy
    >>> worst_group_accuracy([1, 1, 0, 0], [1, 0, 0, 0], groups=["a", "b", "a", "b"])
    0.5
    """
    return group_accuracy(y_true, y_pred, groups=groups).worst.accuracy


def tpr_gap(y_true: object, y_pred: object, *, concept: object) -> float:
    """Gap between the true positive rates (TPR) of the classes of the concept.

    TPR(y | z) is the fraction of correct predictions among the rows of class y of the task and
    class z of the concept, and Gap_y = max_z TPR(y | z) - min_z TPR(y | z). The result is the root
    mean square of Gap_y over y, as in De-Arteaga et al. (2019) and Romanov et al. (2019).

    Parameters
    ----------
    y_true, y_pred, concept
        As for :func:`group_accuracy`, with the classes of the concept as groups.

    Returns
    -------
    float
        The gap, over the classes of the task that have rows in two classes of the concept (others
        are a warning); NaN if none has.

    Examples
    --------
    >>> from splince_fast.evaluation import tpr_gap
    >>> tpr_gap([1, 1, 1, 1], [1, 1, 1, 0], concept=["a", "a", "b", "b"])
    0.5
    """
    check_index(y_true, concept, "concept", of="y_true")
    true, predicted = _encode_labels(y_true, y_pred)
    cells, _ = cells_of_groups(concept, len(true), "y_true")
    gaps, n_classes = _gap_per_class(true, predicted, cells.codes), len(np.unique(true[true >= 0]))
    if len(gaps) < n_classes:
        text = f"{n_classes - len(gaps)} of {n_classes} classes of the task have rows in fewer than"
        warn(f"{text} two classes of the concept, and are left out of the average", SplinceWarning)
    return _root_mean_square(gaps)


def _gap_per_class(true: Codes, predicted: Codes, concept: Codes) -> Float:
    """TPR gap of each class of the task that has rows of two classes of the concept."""
    width = int(concept.max(initial=0)) + 1
    cells = np.where((true >= 0) & (concept >= 0), true * width + concept, -1)
    rates: dict[int, list[float]] = {}
    for cell, n, n_correct in counts_per_code(cells, true == predicted):
        rates.setdefault(cell // width, []).append(n_correct / n)
    return np.array([max(values) - min(values) for values in rates.values() if len(values) > 1])


def _root_mean_square(gaps: Float) -> float:
    return float(np.sqrt(np.mean(gaps**2))) if len(gaps) else math.nan


def _encode_labels(y_true: object, y_pred: object) -> tuple[Codes, Codes]:
    """Return the codes of `y_true`, and the codes of `y_pred`."""
    check_index(y_true, y_pred, "y_pred", of="y_true")
    true = class_codes(y_true, "y_true")
    return common_codes(true, class_codes(y_pred, "y_pred", len(true), of="y_true"))


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

    Examples
    --------
    >>> from splince_fast.evaluation import Metric
    >>> Metric(lambda y_true, y_pred: (y_true != y_pred).mean(), True).lower_is_better
    True
    """

    score: Callable[..., Any] | None
    lower_is_better: bool | None = None
    label: str = ""


@dataclass(frozen=True, slots=True)
class TableMetric(Metric):
    """A metric of the library, with properties on which reports, tests and decisions depend."""

    of: str = "head"  # "head" or "eraser": whether the metric describes a head or the eraser
    definition: str = ""  # shown at the end of the report
    # "rows" for a fraction (or a mean of fractions) of the test rows, "cell" for one of the rows of
    # a cell.
    fraction_of: str = ""
    bounded: bool = True  # whether a difference of .01 means the same at every value


def _rates(codes: Codes, labels: PartLabels, y_pred: Codes) -> list[float]:
    """Accuracy among the rows of each code that occurs."""
    return [k / n for _, n, k in counts_per_code(codes, labels.task == y_pred)]


def as_codes(y_pred: NDArray[Any], n: int, classes: Codes) -> Codes:
    """Convert predictions of a head to (n,) codes; `classes` are the codes of its training rows."""
    if y_pred.shape != (n,):
        raise InputError(f"the head predicts shape {y_pred.shape} for {n} rows; it must be ({n},)")
    unknown = y_pred[~np.isin(y_pred, classes)]
    if len(unknown):
        raise InputError(
            f"the head predicts {unknown[0]!s}, which is not a class of its training rows; the "
            "task has classes, so pass a classifier"
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
    """Metrics of an eraser for rows (n, d) before and after erasure."""
    kept = {}
    for name, column in labels.items():
        values = values_of(column)
        values = np.eye(values.max() + 1)[values] if values.ndim == 1 else values
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


def _worst_group(labels: PartLabels, y_pred: Codes) -> float | None:
    cells = labels.cells
    return None if cells is None else min(_rates(cells, labels, y_pred), default=math.nan)


def _tpr_gap(labels: PartLabels, y_pred: Codes) -> float | None:
    if labels.concept is None:
        return None
    return _root_mean_square(_gap_per_class(labels.task, y_pred, labels.concept))


def _r2(labels: PartLabels, y_pred: Float) -> float:
    variance = np.mean((labels.task - labels.task.mean(axis=0)) ** 2)
    return 1 - _ratio(np.mean((labels.task - y_pred) ** 2), variance)


OF_CLASSES: dict[str, TableMetric] = {
    "accuracy": TableMetric(
        lambda labels, y_pred: np.mean(labels.task == y_pred), False, "accuracy",
        fraction_of="rows",
        definition="fraction of test rows that the head predicts correctly",
    ),
    "class_accuracy": TableMetric(
        lambda labels, y_pred: np.mean(_rates(labels.task, labels, y_pred)), False, "acc/class",
        fraction_of="rows",
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
OF_QUANTITIES: dict[str, TableMetric] = {
    "r2": TableMetric(
        _r2, False, "R2",
        definition="1 - mean squared error / variance of the task, on test rows",
    ),
    "mse": TableMetric(
        lambda labels, y_pred: np.mean((labels.task - y_pred) ** 2), True, "MSE", bounded=False,
        definition="mean squared error on test rows",
    ),
}  # fmt: skip
METRICS = OF_CLASSES | OF_QUANTITIES | {
    # Metrics of the linear probe, for each concept (see `concept_key`). Those of a probe that the
    # caller names "forest" have the keys "forest_accuracy", "forest_auc" and "forest_chance".
    **{
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
    },
    **{
        key: TableMetric(None, lower, label, "eraser", f"{text} on the training rows")
        for key, lower, label, text in (
            ("kept_covariance", False, "kept cov", "y the task: |Cov(r(x), y)|^2 / |Cov(x, y)|^2"),
            ("distortion", True, "distortion", "change of a row: E|r(x) - x|^2 / E|x - E x|^2"),
            ("residual", True, "residual", "z the concept: |Cov(r(x), z)| / |Cov(x, z)|"),
        )
    },
    "rank": TableMetric(None, None, "rank", "eraser", "number of removed dimensions"),
}  # fmt: skip
# Columns of a summary: metrics of heads, then metrics of erasers.
SUMMARY = (
    "worst_group", "accuracy", "tpr_gap", "r2", "mse", "probe_accuracy", "probe_auc", "probe_r2",
    "kept_covariance", "distortion",
)  # fmt: skip


def scores(table: Mapping[str, Metric], labels: PartLabels, y_pred: Any) -> dict[str, float]:
    """Values of the metrics in `table` that are defined for predicted codes or quantities."""
    values = {key: metric.score(labels, y_pred) for key, metric in table.items() if metric.score}
    return {key: float(value) for key, value in values.items() if value is not None}


def add_scores(
    record: Record, labels: PartLabels, y_pred: Any, classes: tuple[ClassName, ...],
    custom: Mapping[str, Metric],
) -> Record:  # fmt: skip
    """Return the record with the metrics of predictions on test rows; a quantity has no classes."""
    values = scores(OF_CLASSES if classes else OF_QUANTITIES, labels, y_pred)
    notes, reason = record.notes, record.reason
    if classes and np.ptp(y_pred) == 0:
        worst = ", so its worst group has accuracy 0" * (values.get("worst_group") == 0.0)
        notes += (f"the head predicts the same class for all test rows{worst}",)
    columns: list[NDArray[Any]] = [labels.task, y_pred]
    if classes:
        columns = [names_array(classes)[codes] for codes in columns]
    elif y_pred.shape[1] == 1:
        columns = [column[:, 0] for column in columns]
    for name, metric in custom.items():
        assert metric.score is not None
        try:
            value = float(metric.score(*map(np.copy, columns)))  # copies: score may mutate them
            if math.isinf(value):
                raise InputError(f"the value is {value}; return NaN where the metric is undefined")
            values[name] = value
        except Exception as error:
            reason = f"metric {name!r}: {reason_of(error)}"
    counts = (
        counts_per_code(labels.cells, labels.task == y_pred) if labels.cells is not None else ()
    )
    cells = tuple(CellCount(*count) for count in counts)
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
        if not callable(metric.score) or metric.lower_is_better not in (None, True, False):
            raise InputError(
                f"metrics[{key!r}] is {value!r}; pass a function of (y_true, y_pred), or a Metric "
                "of such a function with lower_is_better=True, False or None"
            )
        if not isinstance(key, str) or key.partition("[")[0] in METRICS:
            raise InputError(
                f"a custom metric is named {key!r}; the name must be a string, and not that of a "
                "metric of compare"
            )
        custom[key] = dataclasses.replace(metric, label=metric.label or key)
    return custom


def headline(present: Sequence[str]) -> str:
    """First metric of SUMMARY among the metrics `present`, or else the first one of `present`."""
    return next(key for key in (*SUMMARY, *present) if key in present)


def concept_key(key: str, concept: str, concepts: Sequence[str]) -> str:
    """Key of a metric for `concept`: "probe_auc", or "probe_auc[gender]" if there are several."""
    return f"{key}[{concept}]" if len(concepts) > 1 else key


def metric_of(key: str, custom: Mapping[str, tuple[str, bool | None]]) -> TableMetric:
    """Return the metric of a key, without its function; probe and concept join the label."""
    base, bracket, name = key.partition("[")
    if key in custom:
        label, lower_is_better = custom[key]
        fraction_of = "rows" if base.endswith("accuracy") else ""
        return TableMetric(
            None, lower_is_better, label, "head", "custom metric", fraction_of, bounded=False
        )
    entry = METRICS.get(base)
    if entry is None:
        probe, _, score = base.rpartition("_")
        entry = METRICS[f"probe_{score}"]
        definition = entry.definition.replace("a linear model", f"the probe {probe!r}")
        label = entry.label.replace("probe", probe, 1)
        entry = dataclasses.replace(entry, label=label, definition=definition)
    label = f"{entry.label} {bracket}{name}".strip()
    return dataclasses.replace(entry, score=None, label=label)
