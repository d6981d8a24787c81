"""Labels left among the features: columns of x that give the label of every row."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from splince_fast._kernels.spans import largest_correlation
from splince_fast._runtime.arrays import abbreviated
from splince_fast._solve.selection import Span
from splince_fast._solve.tolerances import CONSTANT, EPS32
from splince_fast.labels import VariableName
from splince_fast.moments.class_sums import ClassSums
from splince_fast.moments.snapshot import Statistics

Float = NDArray[np.float64]

# Least squared correlation that counts as 1: sums of float32 rows round it by up to 3 EPS32.
_EQUAL = 1.0 - 8.0 * EPS32
# Least rows of each of two classes: below it a feature of few values may agree by chance.
_ROWS = 10


def may_be_label(stats: Statistics, span: Span) -> bool:
    """Whether `label_features` may find any; exact where each variable has one row."""
    rows = span.rows
    return len(rows) > len(span.counts) or largest_correlation(rows, stats.variances) > _EQUAL


def label_features(
    stats: Statistics, names: Sequence[VariableName]
) -> list[tuple[VariableName, str]]:
    """Variables that features give up to offset, scale and coding of classes, and these features.

    Parameters
    ----------
    stats : Statistics
        Of the data.
    names : sequence of VariableName
        The variables; those with missing labels are not compared.
    """
    least = _EQUAL * np.maximum(stats.variances, (CONSTANT * stats.mean) ** 2)
    found = []
    for name in names:
        variable = stats.variable(name)
        if variable.n_rows < max(2 * _ROWS, stats.n_rows):
            continue
        if isinstance(variable, ClassSums):
            features = _coded(variable, least)
        else:
            features = np.flatnonzero((variable.span() ** 2 > least).any(axis=0))
        if len(features):
            found.append((name, abbreviated(features, stats.feature_names)))
    return found


def _coded(variable: ClassSums, least: Float) -> NDArray[np.intp]:
    """Features with one value per class, another one for each, of the variance above `least`."""
    present = variable.weights > 0.0
    if np.count_nonzero(variable.rows[present] >= _ROWS) < 2:
        return np.empty(0, np.intp)
    p, sums = variable.weights[present] / variable.weight, variable.sums[present]
    between = np.einsum("kj,kj,k->j", sums, sums, 1.0 / p) - sums.sum(axis=0) ** 2
    features = np.flatnonzero(between > least * variable.weight**2)
    values = np.sort(sums[:, features] / p[:, None], axis=0)
    gaps = np.diff(values, axis=0).min(axis=0, initial=np.inf)
    sizes = variable.weight * np.sqrt(least[features])
    return np.asarray(features[gaps > (1.0 - _EQUAL) * sizes])
