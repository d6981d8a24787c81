"""Metrics of a comparison: function, label and direction of each, in one table.

To add a metric, add one entry to :data:`METRICS`: tables, plots and tests read it from there.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from splince_fast.evaluation._records import CellCount, CustomMetric, Record, TestLabels
from splince_fast.evaluation.metrics import (
    average_gap,
    counts_per_code,
    covariance_ratio,
    gap_per_class,
)
from splince_fast.exceptions import InputError, SplinceError
from splince_fast.labels import ClassName, names_array
from splince_fast.moments import Moments
from splince_fast.projection import Projection

Float = NDArray[np.float64]
Codes = NDArray[np.intp]

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
    >>> means = [result.mean("error", eraser=eraser) for eraser in result.best("error")]
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
    """A metric of the library, with properties on which tests and decisions depend.

    `fraction_of` is "rows" for a metric that is a fraction (or a mean of fractions) of the test
    rows, "cell" for a fraction of the test rows of one cell, and "" for other metrics. `bounded` is
    True if a difference of .01 means the same at every value of the metric, as for accuracies.
    """

    fraction_of: str = ""
    bounded: bool = True


@dataclass(frozen=True, slots=True, eq=False)
class ClassPredictions:
    """Predicted classes and true labels of test rows.

    `y_pred`, (n,), holds the codes of the predicted classes of the task, and `classes` their names.
    `concept_classes` holds the names of the joint classes of the concepts; it is empty if a concept
    is a quantity.
    """

    labels: TestLabels
    y_pred: Codes
    classes: tuple[ClassName, ...] = ()
    concept_classes: tuple[str, ...] = ()

    def counts(self, codes: Codes) -> tuple[Codes, Codes, Codes]:
        """Return the codes that occur in `codes`, their row counts and numbers of correct rows.

        `codes`, (n,), holds one code per test row. A row is correct if the prediction is.
        """
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
        """Fairness metrics for a task of two classes; {} for other tasks.

        The definitions are ``demographic_parity_difference`` and ``equalized_odds_difference`` of
        fairlearn. The true (false) positive rates are compared only between classes of the concept
        that have positive (negative) test rows.
        """
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
    """Predictions `y_pred` (n, k) of a quantity on test rows, and its true values `y_true`.

    `concept`, (n,), holds the values of a concept that is a quantity of one column, or the codes of
    a concept of two classes. It is None for other concepts, and for several concepts.
    """

    y_true: Float
    y_pred: Float
    concept: Float | None

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
    """Convert predictions of a head to (n,) codes; `classes` are the codes of its training rows.

    Raises
    ------
    InputError
        The shape is not (n,), or a prediction is not in `classes`, such as that of a regressor.
    """
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
    """Convert predictions of a head to a float64 array of `shape`, the shape (n, k) of the task.

    Raises
    ------
    InputError
        The shape is neither (n, k) nor, for k = 1, (n,).
    """
    if y_pred.shape != shape and (*y_pred.shape, 1) != shape:
        raise InputError(f"the head predicts shape {y_pred.shape}; the task has shape {shape}")
    return np.asarray(y_pred, dtype=np.float64).reshape(shape)


@dataclass(frozen=True, slots=True, eq=False)
class Erasure:
    """Effect of an eraser r on the training rows.

    `ratios` maps the name of each variable v (the task and every concept) to
    |Cov(r(x), v)|_F^2 / |Cov(x, v)|_F^2, and `task` is the name of the task. `distortion` is
    E|r(x) - x|^2 / E|x - E x|^2, or NaN if all rows are equal. `rank` is the number of removed
    dimensions, or None if r depends on labels.
    """

    ratios: dict[str, float]
    task: str
    distortion: float
    rank: int | None

    @classmethod
    def of_projection(
        cls, projection: Projection, moments: Moments, S: Float, task: str, concepts: Sequence[str]
    ) -> Erasure:
        """Effect of an affine eraser on rows with `moments`; S = Cov(x), (d, d), with ddof 0."""
        left, right = projection.left, projection.right
        change_variance = float(np.sum((left.T @ left) * (right.T @ S @ right).T))
        mean_change = left @ (right.T @ (moments.mean - projection.mean))
        variance = float(np.trace(S))
        mean_square = change_variance + float(mean_change @ mean_change)
        distortion = mean_square / variance if variance else math.nan
        ratios = {v: covariance_ratio(projection, moments, v) for v in (task, *concepts)}
        return cls(ratios, task, distortion, projection.rank)

    @classmethod
    def of_rows(
        cls, before: Moments, after: Moments, change: float, task: str, concepts: Sequence[str]
    ) -> Erasure:
        """Effect of any eraser r, from moments before and after it; `change` is E|r(x) - x|^2."""
        ratios = {}
        for v in (task, *concepts):
            squares_after, squares_before = (
                float(np.sum(m.cross_covariance(v, ddof=0) ** 2)) for m in (after, before)
            )
            ratios[v] = squares_after / squares_before if squares_before else math.nan
        variance = float(np.trace(before.covariance(ddof=0)))
        return cls(ratios, task, change / variance if variance else math.nan, None)


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


def _residual(erasure: Erasure) -> float:
    return max(math.sqrt(ratio) for v, ratio in erasure.ratios.items() if v != erasure.task)


OF_CLASSES: dict[str, TableMetric] = {
    "accuracy": TableMetric(
        _accuracy, False, "accuracy", fraction_of="rows",
        definition="fraction of test rows that the head predicts correctly",
    ),
    "class_accuracy": TableMetric(
        _class_accuracy, False, "acc/class", fraction_of="rows",
        definition="accuracy within each class of the task, averaged over classes",
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
        lambda erasure: erasure.ratios[erasure.task], False, "kept cov", "eraser",
        "|Cov(r(x), y)|^2 / |Cov(x, y)|^2 on the training rows, y the task",
    ),
    "distortion": TableMetric(
        lambda erasure: erasure.distortion, True, "distortion", "eraser",
        "E|r(x) - x|^2 / E|x - E x|^2 on the training rows: mean squared change of a row over the "
        "total variance",
    ),
    "residual": TableMetric(
        _residual, True, "residual", "eraser",
        "|Cov(r(x), z)| / |Cov(x, z)| on the training rows, z the concept: 0 up to rounding error",
    ),
    "rank": TableMetric(
        lambda erasure: erasure.rank, None, "rank", "eraser", "number of removed dimensions"
    ),
}  # fmt: skip
# Metrics of probes. They are computed for each concept; `concept_key` returns the keys.
OF_PROBES: dict[str, TableMetric] = {
    f"{probe}_{score}": TableMetric(
        None, lower, f"{probe} {label}", "eraser", f"{text} of a probe for the concept: {kind}",
        fraction_of="rows" if score == "accuracy" else "",
    )
    for probe, kind in (
        ("probe", "a linear model that is trained and scored within test rows"),
        ("quadratic", "quadratic discriminant analysis"),
        ("mlp", "a small neural network"), ("boosting", "gradient-boosted trees"),
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


def scores(table: Mapping[str, Metric], subject: Predictions | Erasure) -> dict[str, float]:
    """Values of the metrics in `table` that are defined for `subject`."""
    values = {key: metric.score(subject) for key, metric in table.items() if metric.score}
    return {key: float(value) for key, value in values.items() if value is not None}


def add_scores(record: Record, predictions: Predictions, custom: Mapping[str, Metric]) -> Record:
    """Return the record with the metrics of the predictions on the test rows.

    If a custom metric raises an error or returns infinity, the record stores the reason and has no
    value of this metric.
    """
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
    """Validate the custom metrics, and give each a label.

    Raises
    ------
    InputError
        `metrics` is not a mapping of names to functions or :class:`Metric`, or a metric of the
        library has the same name.
    """
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
    """Main metric of a comparison that has the metrics `present`.

    This is the first metric of SUMMARY that is present or, if there is none, the first one of
    `present`.
    """
    return next(key for key in (*SUMMARY, *present) if key in present)


def concept_key(key: str, concept: str, concepts: Sequence[str]) -> str:
    """Key of a metric for `concept`: "probe_auc", or "probe_auc[gender]" if there are several."""
    return f"{key}[{concept}]" if len(concepts) > 1 else key


def metric_of(key: str, custom: Mapping[str, CustomMetric]) -> TableMetric:
    """Return the metric of a key, without its function.

    The name in the brackets of a key such as "probe_auc[gender]" becomes part of the label.
    """
    base, bracket, name = key.partition("[")
    if key in custom:
        metric = custom[key]
        return TableMetric(
            None, metric.lower_is_better, metric.label, definition="custom metric",
            fraction_of="rows" if base.endswith("accuracy") else "", bounded=False,
        )  # fmt: skip
    label = f"{METRICS[base].label} {bracket}{name}".strip()
    return dataclasses.replace(METRICS[base], score=None, label=label)
