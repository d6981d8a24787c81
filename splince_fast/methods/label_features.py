"""Detection of features that equal a label, that is, determine the label of every row."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from splince_fast._kernels.spans import largest_correlation
from splince_fast._runtime.rows import abbreviated
from splince_fast._solve.selection import Span
from splince_fast._solve.tolerances import CONSTANT, EPS32
from splince_fast.labels import VariableName
from splince_fast.moments.statistics import Statistics
from splince_fast.moments.variables import ClassSums, ColumnSums

Float = NDArray[np.float64]

# A feature equals a label if 1 - (squared correlation) is below this tolerance, for float32 or
# float64 rows. The rounding error is up to 3 EPS32 for float32 rows, and far smaller for float64
# rows. With a larger tolerance, features with outliers would count as labels.
_TOLERANCE32, _TOLERANCE64 = 8.0 * EPS32, 1e-11
# A variable with one label column equals no feature if no squared correlation exceeds this one.
LEAST_CORRELATION = 1.0 - _TOLERANCE32
# Minimum distance between the values of a feature in two classes, in standard deviations within the
# classes.
_MIN_GAP = 4.0
# At least two classes must have this many rows. With fewer rows, a feature with few distinct values
# may agree with the label by chance.
_MIN_ROWS = 10
_EFFECTS = {
    "erase": ", and rows in which they are missing or wrong would not be erased completely",
    "keep": ", from which models read the task",
}


def texts_on_labels(
    stats: Statistics, names: Sequence[VariableName], span: Span, role: str
) -> list[str]:
    """Return warnings of features that equal a label up to offset, scale and coding."""
    # `span` is the span of the variables `names`; those with missing labels are skipped.
    min_squared_correlation = 1.0 - (_TOLERANCE32 if stats.row_eps >= EPS32 else _TOLERANCE64)
    correlated = largest_correlation(span.rows, stats.variances) > min_squared_correlation
    variances = np.maximum(stats.variances, (CONSTANT * stats.mean) ** 2)
    min_variances = min_squared_correlation * variances
    texts = []
    for name in names:
        variable = stats.variable(name)
        if variable.n_rows < max(2 * _MIN_ROWS, stats.n_rows):
            continue
        if isinstance(variable, ClassSums):
            features = _coded(variable, variances, min_variances, correlated)
        else:
            rows = variable.span()[_frequent(variable)]
            features = np.flatnonzero((rows**2 > min_variances).any(axis=0))
        if len(features):
            texts.append(
                f"feature(s) {abbreviated(features, stats.feature_names)} equal the label "
                f"{name!r}, up to offset, scale and coding{_EFFECTS[role]}; drop them"
            )
    return texts


def _frequent(variable: ColumnSums) -> NDArray[np.bool_]:
    """Return a mask of the columns that vary, but not of 0/1 columns with a rare value."""
    deviations = variable.deviations()
    varies = deviations > 0.0
    mean = variable.mean()[varies]
    indicator = np.abs(mean - mean**2 - deviations[varies] ** 2) <= 1e-9 * np.abs(mean)
    rare_rows = variable.n_rows * np.minimum(mean, 1.0 - mean)
    return np.asarray(~indicator | (rare_rows > _MIN_ROWS - 0.5))


def _coded(
    variable: ClassSums, variances: Float, min_variances: Float, correlated: bool
) -> NDArray[np.intp]:
    """Return the features that determine the class: as numbers of the classes, or as indicators."""
    # A feature that numbers the classes is constant within them and differs between all; its
    # variance between classes exceeds `min_variances`. Indicators, which are `correlated` with
    # those of the classes, count if all classes but one have one.
    present = variable.weights > 0.0
    if np.count_nonzero(variable.rows[present] >= _MIN_ROWS) < 2:
        return np.empty(0, np.intp)
    p, sums = variable.weights[present] / variable.weight, variable.sums[present] / variable.weight
    between = np.einsum("kj,kj,k->j", sums, sums, 1.0 / p) - sums.sum(axis=0) ** 2
    features = np.flatnonzero(between > min_variances)
    values = np.sort(sums[:, features] / p[:, None], axis=0)
    gaps = np.diff(values, axis=0).min(axis=0, initial=np.inf)
    # A large variance between classes may come from a single class that is far from the others.
    # Therefore the smallest gap between classes is compared with the variance within classes.
    within = np.maximum(variances - between, (2.0 * EPS32) ** 2 * variances)[features]
    numbers = features[gaps**2 > _MIN_GAP**2 * within]
    if not correlated:
        return np.asarray(numbers)
    covariance = sums - np.outer(p, sums.sum(axis=0))  # of each class indicator and feature
    indicates = covariance**2 > np.outer(p * (1.0 - p), min_variances)
    if np.count_nonzero(indicates.any(axis=1)) < max(2, len(p) - 1):
        return np.asarray(numbers)
    return np.union1d(numbers, np.flatnonzero(indicates.any(axis=0)))
