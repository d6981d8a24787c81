"""Metrics of a comparison: computation, label and direction of each, in one table.

A new metric is one entry of :data:`METRICS`; tables, plots, ranking and bootstrap read it there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from splince_fast.evaluation.metrics import average_gap, covariance_ratio, gap_per_class
from splince_fast.exceptions import InputError
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


@dataclass(frozen=True, slots=True, eq=False)
class Decisions:
    """Decided classes of rows, beside what they are judged by.

    Attributes
    ----------
    truth, decided : (n,) codes of classes
    n_classes : int
    cells : (n,) codes or None
        Cells of task and concept, -1 for none; None where a concept is a quantity.
    concept : (n,) codes or None
    n_concepts : int
    """

    truth: Codes
    decided: Codes
    n_classes: int
    cells: Codes | None
    concept: Codes | None
    n_concepts: int

    def counted(self, codes: Codes) -> tuple[Codes, Codes, Codes]:
        """Codes that occur, their numbers of rows, and of rows that are decided correctly."""
        inside = codes >= 0
        counts = np.bincount(codes[inside])
        right = np.bincount(codes[inside & (self.truth == self.decided)], minlength=len(counts))
        present = np.flatnonzero(counts)
        return present, counts[present], right[present]


@dataclass(frozen=True, slots=True, eq=False)
class Predictions:
    """Predicted quantities, beside what they are judged by.

    Attributes
    ----------
    truth, predicted : (n, k)
    concept : (n,) or None
        None where the concept is no single quantity or pair of classes.
    """

    truth: Float
    predicted: Float
    concept: Float | None


@dataclass(frozen=True, slots=True, eq=False)
class Erasure:
    """An eraser beside the moments of the training rows.

    Attributes
    ----------
    projection : Projection
    moments : Moments
    covariance : (d, d)
        Of the rows, ddof 0.
    task : str
    concepts : tuple of str
    """

    projection: Projection
    moments: Moments
    covariance: Float
    task: str
    concepts: tuple[str, ...]


def _accuracy(found: Decisions) -> float:
    return float(np.mean(found.truth == found.decided))


def _class_accuracy(found: Decisions) -> float:
    _, counts, right = found.counted(found.truth)
    return float(np.mean(right / counts))


def _worst_group(found: Decisions) -> float | None:
    if found.cells is None:
        return None
    _, counts, right = found.counted(found.cells)
    return float(np.min(right / counts)) if len(counts) else math.nan


def _tpr_gap(found: Decisions) -> float | None:
    if found.concept is None:
        return None
    gaps = gap_per_class(
        found.truth, found.decided, found.concept, found.n_classes, found.n_concepts
    )
    return average_gap(gaps, "rms")


def _mse(found: Predictions) -> float:
    return float(np.mean((found.truth - found.predicted) ** 2))


def _r2(found: Predictions) -> float:
    spread = float(np.mean((found.truth - found.truth.mean(axis=0)) ** 2))
    return 1 - _mse(found) / spread if spread else math.nan


def _concept_correlation(found: Predictions) -> float | None:
    first = found.predicted[:, 0]
    if found.concept is None or not np.ptp(found.concept) > 0 or not np.ptp(first) > 0:
        return None
    return abs(float(np.corrcoef(first, found.concept)[0, 1]))


def _kept_covariance(found: Erasure) -> float:
    return covariance_ratio(found.projection, found.moments, found.task)


def _distortion(found: Erasure) -> float:
    """E |P (x - m) + m - x|^2 / E |x - E x|^2, with m the mean of the eraser."""
    left, right, S = found.projection.left, found.projection.right, found.covariance
    moved = float(np.sum((left.T @ left) * (right.T @ S @ right).T))
    shift = left @ (right.T @ (found.moments.mean - found.projection.mean))
    return (moved + float(shift @ shift)) / float(np.trace(S))


def _residual(found: Erasure) -> float:
    ratios = [covariance_ratio(found.projection, found.moments, name) for name in found.concepts]
    return max(map(math.sqrt, ratios))


def _rank(found: Erasure) -> float:
    return float(found.projection.rank)


OF_CLASSES: dict[str, Metric] = {
    "accuracy": Metric(_accuracy, False, "accuracy"),
    "class_accuracy": Metric(_class_accuracy, False, "acc/class"),
    "worst_group": Metric(_worst_group, False, "worst group"),
    "tpr_gap": Metric(_tpr_gap, True, "TPR gap"),
}
OF_QUANTITIES: dict[str, Metric] = {
    "r2": Metric(_r2, False, "R2"),
    "mse": Metric(_mse, True, "MSE"),
    "concept_correlation": Metric(_concept_correlation, True, "|corr concept|"),
}
OF_ERASERS: dict[str, Metric] = {
    "kept_covariance": Metric(_kept_covariance, False, "kept cov", "eraser"),
    "distortion": Metric(_distortion, True, "distortion", "eraser"),
    "residual": Metric(_residual, True, "residual", "eraser"),
    "rank": Metric(_rank, None, "rank", "eraser"),
}
# Those of the probes come with the probe itself, for each concept: the key ends in "[name]"
# where there are several.
OF_PROBES: dict[str, Metric] = {
    f"{probe}_{figure}": Metric(None, lower, f"{probe} {label}", "eraser")
    for probe in ("probe", "quadratic", "mlp", "boosting")
    for figure, lower, label in (
        ("accuracy", True, "acc"), ("auc", True, "AUC"), ("r2", True, "R2"),
        ("chance", None, "chance"),
    )
}  # fmt: skip
METRICS = OF_CLASSES | OF_QUANTITIES | OF_PROBES | OF_ERASERS
# Columns of a summary, heads before erasers; the first one that a run has is its headline.
SUMMARY = (
    "worst_group", "accuracy", "tpr_gap", "r2", "mse", "concept_correlation", "probe_accuracy",
    "probe_auc", "probe_r2", "kept_covariance", "distortion",
)  # fmt: skip


def scores(table: Mapping[str, Metric], found: Any) -> dict[str, float]:
    """Every metric of a table that is defined for what was found."""
    values = {key: metric.score(found) for key, metric in table.items() if metric.score}
    return {key: value for key, value in values.items() if value is not None}


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
