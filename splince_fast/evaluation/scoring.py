"""Metrics of a comparison: computation, label and direction of each, in one table.

A new metric is one entry of :data:`METRICS`; tables, plots, ranking and bootstrap read it there.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from splince_fast.evaluation._records import CellCount, Record, TestLabels
from splince_fast.evaluation.metrics import average_gap, covariance_ratio, gap_per_class
from splince_fast.exceptions import InputError, SplinceError
from splince_fast.labels import ClassName, names_array
from splince_fast.moments import Moments
from splince_fast.projection import Projection

Float = NDArray[np.float64]
Codes = NDArray[np.intp]


@dataclass(frozen=True, slots=True)
class Metric:
    """A metric of :func:`compare`, with the direction in which it is better.

    Parameters
    ----------
    score : callable or None
        ``score(y_true, y_pred)`` returns a float, for a metric that is passed to
        :func:`compare`.
    lower_is_better : bool, optional
        Without it the metric is shown, but no eraser is called the best by it.
    label : str
        Of tables and plots; the default is the key in ``metrics=``.
    of : {"head", "eraser"}
        Whose metric it is; a metric that is passed to :func:`compare` is one of heads.
    definition : str
        Of the column, for the end of the report.

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


@dataclass(frozen=True, slots=True, eq=False)
class ClassPredictions:
    """Predicted classes of rows, beside the labels that they are scored by.

    Attributes
    ----------
    labels : TestLabels
    y_pred : (n,) codes of classes
    """

    labels: TestLabels
    y_pred: Codes

    def counts(self, codes: Codes) -> tuple[Codes, Codes, Codes]:
        """Codes that occur, their numbers of rows, and of rows that are predicted correctly."""
        inside = codes >= 0
        counts = np.bincount(codes[inside])
        correct = inside & (self.labels.task == self.y_pred)
        n_correct = np.bincount(codes[correct], minlength=len(counts))
        present = np.flatnonzero(counts)
        return present, counts[present], n_correct[present]


@dataclass(frozen=True, slots=True, eq=False)
class QuantityPredictions:
    """Predicted quantities, beside the values that they are scored by.

    Attributes
    ----------
    y_true, y_pred : (n, k)
    concept : (n,) or None
        None where the concept is no single quantity or pair of classes.
    """

    y_true: Float
    y_pred: Float
    concept: Float | None


@dataclass(frozen=True, slots=True, eq=False)
class Erasure:
    """An eraser beside the moments of the training rows.

    Attributes
    ----------
    projection : Projection or None
        None for a map that depends on labels, which has `erased` and `change` instead.
    moments : Moments
    covariance : (d, d)
        Of the rows, ddof 0.
    task : str
    concepts : tuple of str
    erased : Moments or None
        Of the erased training rows.
    change : float
        E |r(x) - x|^2 of the training rows.
    """

    projection: Projection | None
    moments: Moments
    covariance: Float
    task: str
    concepts: tuple[str, ...]
    erased: Moments | None = None
    change: float = math.nan

    def covariance_ratio(self, name: str) -> float:
        """|Cov(r(x), v)|_F^2 / |Cov(x, v)|_F^2 for a variable v."""
        if self.projection is not None:
            return covariance_ratio(self.projection, self.moments, name)
        assert self.erased is not None
        left, whole = (
            float(np.sum(moments.cross_covariance(name, ddof=0) ** 2))
            for moments in (self.erased, self.moments)
        )
        return left / whole if whole else math.nan


def _accuracy(found: ClassPredictions) -> float:
    return float(np.mean(found.labels.task == found.y_pred))


def _class_accuracy(found: ClassPredictions) -> float:
    _, counts, correct = found.counts(found.labels.task)
    return float(np.mean(correct / counts))


def _worst_group(found: ClassPredictions) -> float | None:
    if found.labels.cells is None:
        return None
    _, counts, correct = found.counts(found.labels.cells)
    return float(np.min(correct / counts)) if len(counts) else math.nan


def _tpr_gap(found: ClassPredictions) -> float | None:
    task, concept = found.labels.task, found.labels.concept
    if concept is None:
        return None
    n_classes, n_concepts = (int(codes.max(initial=0)) + 1 for codes in (task, concept))
    gaps = gap_per_class(task, found.y_pred, concept, n_classes, n_concepts)
    return average_gap(gaps, "rms")


def _mse(found: QuantityPredictions) -> float:
    return float(np.mean((found.y_true - found.y_pred) ** 2))


def _r2(found: QuantityPredictions) -> float:
    variance = float(np.mean((found.y_true - found.y_true.mean(axis=0)) ** 2))
    return 1 - _mse(found) / variance if variance else math.nan


def _concept_correlation(found: QuantityPredictions) -> float | None:
    first = found.y_pred[:, 0]
    if found.concept is None or not np.ptp(found.concept) > 0 or not np.ptp(first) > 0:
        return None
    return abs(float(np.corrcoef(first, found.concept)[0, 1]))


def _kept_covariance(found: Erasure) -> float:
    return found.covariance_ratio(found.task)


def _distortion(found: Erasure) -> float:
    """E |P (x - m) + m - x|^2 / E |x - E x|^2, with m the mean of the eraser."""
    S = found.covariance
    if found.projection is None:
        return found.change / float(np.trace(S))
    left, right = found.projection.left, found.projection.right
    moved = float(np.sum((left.T @ left) * (right.T @ S @ right).T))
    shift = left @ (right.T @ (found.moments.mean - found.projection.mean))
    return (moved + float(shift @ shift)) / float(np.trace(S))


def _residual(found: Erasure) -> float:
    return max(math.sqrt(found.covariance_ratio(name)) for name in found.concepts)


def _rank(found: Erasure) -> float | None:
    return None if found.projection is None else float(found.projection.rank)


OF_CLASSES: dict[str, Metric] = {
    "accuracy": Metric(
        _accuracy, False, "accuracy", definition="fraction of test rows that the head gets right"
    ),
    "class_accuracy": Metric(
        _class_accuracy,
        False,
        "acc/class",
        definition="mean over classes of the task of their accuracy",
    ),
    "worst_group": Metric(
        _worst_group,
        False,
        "worst group",
        definition="lowest accuracy of a cell, the test rows of one class of task and concept each",
    ),
    "tpr_gap": Metric(
        _tpr_gap,
        True,
        "TPR gap",
        definition="root mean square over classes of the task of the difference between the true "
        "positive rates of the classes of the concept",
    ),
}
# For two classes of the task; the key of a rate ends in "[class of the concept]".
OF_FAIRNESS: dict[str, Metric] = {
    "demographic_parity": Metric(
        None, True, "DP difference",
        definition="demographic parity difference: largest minus smallest selection rate",
    ),
    "equalized_odds": Metric(
        None, True, "EO difference",
        definition="equalized odds difference: the larger of the gaps of true and false positive "
        "rates between classes of the concept",
    ),
    "selection_rate": Metric(
        None, None, "selected",
        definition="selection rate: fraction of the test rows of a class of the concept for which "
        "the head predicts the second class of the task",
    ),
}  # fmt: skip
OF_QUANTITIES: dict[str, Metric] = {
    "r2": Metric(_r2, False, "R2", definition="1 - mean squared error / variance, on test rows"),
    "mse": Metric(_mse, True, "MSE", definition="mean squared error on test rows"),
    "concept_correlation": Metric(
        _concept_correlation,
        True,
        "|corr concept|",
        definition="absolute correlation of prediction and concept on test rows",
    ),
}
OF_ERASERS: dict[str, Metric] = {
    "kept_covariance": Metric(
        _kept_covariance,
        False,
        "kept cov",
        "eraser",
        "|Cov(r(x), y)|^2 / |Cov(x, y)|^2 on the training rows, y the task",
    ),
    "distortion": Metric(
        _distortion,
        True,
        "distortion",
        "eraser",
        "E|r(x) - x|^2 / E|x - E x|^2 on the training rows, the part of the variance that changes",
    ),
    "residual": Metric(
        _residual,
        True,
        "residual",
        "eraser",
        "|Cov(r(x), z)| / |Cov(x, z)| on the training rows, z the concept: 0 but for rounding",
    ),
    "rank": Metric(_rank, None, "rank", "eraser", "dimensions that are removed"),
}
# Those of the probes come with the probe itself, for each concept: the key ends in "[name]"
# where there are several.
OF_PROBES: dict[str, Metric] = {
    f"{probe}_{figure}": Metric(
        None, lower, f"{probe} {label}", "eraser", f"{text} of a probe for the concept: {kind}"
    )
    for probe, kind in (
        ("probe", "a linear model that is trained and scored within test rows"),
        ("quadratic", "a linear model of the features and their products"),
        ("mlp", "a small neural network"), ("boosting", "gradient-boosted trees"),
    )
    for figure, lower, label, text in (
        ("accuracy", True, "acc", "accuracy"), ("auc", True, "AUC", "area under the ROC curve"),
        ("r2", True, "R2", "R^2"), ("chance", None, "chance", "fraction of the largest class"),
    )
}  # fmt: skip
METRICS = OF_CLASSES | OF_FAIRNESS | OF_QUANTITIES | OF_PROBES | OF_ERASERS
# Columns of a summary, heads before erasers; the first one that a run has is its headline.
SUMMARY = (
    "worst_group", "accuracy", "tpr_gap", "r2", "mse", "concept_correlation", "probe_accuracy",
    "probe_auc", "probe_r2", "kept_covariance", "distortion",
)  # fmt: skip


def scores(table: Mapping[str, Metric], found: Any) -> dict[str, float]:
    """Every metric of a table that is defined for the predictions or the eraser."""
    values = {key: metric.score(found) for key, metric in table.items() if metric.score}
    return {key: value for key, value in values.items() if value is not None}


def fairness(found: ClassPredictions, names: Sequence[str]) -> dict[str, float]:
    """Fairness metrics for two classes of the task, as fairlearn defines them.

    Rates of a group without rows of the class do not count. Formulas: fairlearn's
    ``demographic_parity_difference`` and ``equalized_odds_difference``.

    Parameters
    ----------
    found : ClassPredictions
    names : sequence of str
        Of the classes of the concept, by code.
    """
    concept, task = found.labels.concept, found.labels.task
    if concept is None or set(task) != {0, 1}:
        return {}
    present = concept >= 0
    selected = (found.y_pred == 1).astype(np.intp)
    n, positive = np.bincount(concept[present]), np.bincount(concept[present], selected[present])
    rates = {g: positive[g] / n[g] for g in np.flatnonzero(n)}
    gaps = gap_per_class(task, selected, concept, 2, len(names))
    return {
        "demographic_parity": max(rates.values()) - min(rates.values()),
        "equalized_odds": average_gap(gaps, "max"),
        **{f"selection_rate[{names[int(g)]}]": float(rate) for g, rate in rates.items()},
    }


def add_scores(
    record: Record,
    predictions: ClassPredictions | QuantityPredictions,
    own: Mapping[str, Metric],
    classes: tuple[ClassName, ...],
    concept_classes: Sequence[str] = (),
) -> Record:
    """A record with the metrics of predictions on the test rows.

    Parameters
    ----------
    record : Record
    predictions : ClassPredictions or QuantityPredictions
    own : mapping of str to Metric
        The caller's own; one that fails is a reason beside the other values.
    classes : tuple
        Names of the classes of the task; empty for a quantity.
    concept_classes : sequence of str
        Names of the classes of the concept; empty where there is no single one.
    """
    cells: tuple[CellCount, ...] = ()
    notes = record.notes
    if isinstance(predictions, ClassPredictions):
        values = scores(OF_CLASSES, predictions)
        if len(classes) == 2 and concept_classes:
            values |= fairness(predictions, concept_classes)
        y_true: Any = predictions.labels.task
        y_pred: Any = predictions.y_pred
        if (y_pred == y_pred[0]).all():
            notes += (
                "the head decides the same class everywhere, so its worst group has accuracy 0",
            )
        if predictions.labels.cells is not None:
            counts = (c.tolist() for c in predictions.counts(predictions.labels.cells))
            cells = tuple(map(CellCount._make, zip(*counts, strict=True)))
        if own:
            names = names_array(classes)
            y_true, y_pred = names[y_true], names[y_pred]
    else:
        values = scores(OF_QUANTITIES, predictions)
        y_true, y_pred = (
            c[:, 0] if c.shape[1] == 1 else c for c in (predictions.y_true, predictions.y_pred)
        )
    reason = record.reason
    for name, metric in own.items():
        assert metric.score is not None
        try:
            values[name] = float(metric.score(y_true, y_pred))
        except Exception as error:
            reason = f"metric {name!r}: {reason_of(error)}"
    return dataclasses.replace(record, values=values, cells=cells, notes=notes, reason=reason)


def reason_of(error: Exception) -> str:
    """Why something failed; the type's name where the text is not of this package."""
    return str(error) if isinstance(error, SplinceError) else f"{type(error).__name__}: {error}"


def own_metrics(metrics: Any) -> dict[str, Metric]:
    """The caller's own metrics, each with its label.

    Raises
    ------
    InputError
        No mapping of names to functions or :class:`Metric`, or the name of one in the table.
    """
    if metrics is None:
        return {}
    if not isinstance(metrics, Mapping):
        raise InputError("metrics must map names to functions of (y_true, y_pred), or to Metric")
    found = {}
    for key, given in metrics.items():
        metric = given if isinstance(given, Metric) else Metric(given)
        if not callable(metric.score):
            raise InputError(
                f"metrics[{key!r}] is {given!r}; pass a function of (y_true, y_pred), or a Metric "
                "of one"
            )
        if metric.of != "head" or metric.lower_is_better not in (None, True, False):
            raise InputError(
                f"metrics[{key!r}] has of={metric.of!r} and lower_is_better="
                f"{metric.lower_is_better!r}; a metric of (y_true, y_pred) is one of heads, and "
                "its direction is True, False or None"
            )
        if not isinstance(key, str) or key.partition("[")[0] in METRICS:
            raise InputError(
                f"a metric of your own is named {key!r}, which is no text or a metric of compare "
                "itself; pass it under another name"
            )
        found[key] = Metric(metric.score, metric.lower_is_better, metric.label or key)
    return found


def headline(present: Sequence[str]) -> str:
    """The metric that a report opens with."""
    return next(key for key in (*SUMMARY, *present) if key in present)


def metric_of(key: str, own: Mapping[str, Metric]) -> Metric:
    """The entry of a metric; that of a probe for one concept of several has it in its label."""
    if key in own:
        return own[key]
    base, bracket, concept = key.partition("[")
    found = METRICS[base]
    return Metric(
        None, found.lower_is_better, f"{found.label} {bracket}{concept}".strip(), found.of
    )
