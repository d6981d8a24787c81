"""Label columns of variables: features that equal them, and the repair of their covariance with x.

The columns have the order and the units of the rows of the span Cov(x, y).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from splince_fast._runtime.names import listed
from splince_fast._runtime.rows import abbreviated
from splince_fast._solve import tolerances
from splince_fast._solve.restore import Restoration
from splince_fast._solve.selection import Span
from splince_fast._solve.tolerances import CONSTANT, EPS32
from splince_fast.exceptions import InfeasibleError
from splince_fast.labels import VariableName
from splince_fast.moments.statistics import Statistics
from splince_fast.moments.variables import ClassSums, ColumnSums, Variable
from splince_fast.report import VariableReport, correlations_of

Float = NDArray[np.float64]

# A message shows at most _TERMS terms of a combination, without terms whose coefficient is at most
# _SMALL times the largest.
_TERMS, _SMALL = 4, 1e-6
# A feature equals a label if 1 - (squared correlation) is below this tolerance, for float32 or
# float64 rows. The rounding error is up to 3 EPS32 for float32 rows; outliers allow no more.
_TOLERANCE32, _TOLERANCE64 = 8.0 * EPS32, 1e-11
# A variable with one label column equals no feature if no squared correlation exceeds this value.
LEAST_CORRELATION = 1.0 - _TOLERANCE32
# Least distance between the values of a feature in two classes, in deviations within the classes;
# and number of rows that two classes must have, since a feature with few distinct values may agree
# with the labels of fewer rows by chance.
_MIN_GAP, _MIN_ROWS = 4.0, 10
_EFFECTS = {
    "erase": ", and rows in which they are missing or wrong would not be erased completely",
    "keep": ", from which models read the task",
}


# --- features that equal a label ------------------------------------------------------------------


def texts_on_labels(
    stats: Statistics, names: Sequence[VariableName], largest: float, role: str
) -> list[str]:
    """Return warnings of features that equal a label of all rows, up to offset, scale and coding.

    `largest` is the largest squared correlation of a feature with a label column of `names`.
    """
    least = 1.0 - (_TOLERANCE32 if stats.row_eps >= EPS32 else _TOLERANCE64)
    variances = np.maximum(stats.variances, (CONSTANT * stats.mean) ** 2)
    texts = []
    for name in names:
        variable = stats.variable(name)
        if variable.n_rows < max(2 * _MIN_ROWS, stats.n_rows):
            continue
        if isinstance(variable, ClassSums):
            features = _coded(variable, variances, least, largest > least)
        else:
            features = _equal_to_columns(variable, variances, least)
        if len(features):
            texts.append(
                f"feature(s) {abbreviated(features, stats.feature_names)} equal the label "
                f"{name!r}, up to offset, scale and coding{_EFFECTS[role]}; drop them"
            )
    return texts


def _equal_to_columns(variable: ColumnSums, variances: Float, least: float) -> NDArray[np.intp]:
    """Return the features that equal a column, other than a 0/1 column with a rare value."""
    deviations = variable.deviations()
    varies = deviations > 0.0
    mean = variable.mean()[varies]
    indicator = np.abs(mean - mean**2 - deviations[varies] ** 2) <= 1e-9 * np.abs(mean)
    rare = indicator & (variable.n_rows * np.minimum(mean, 1.0 - mean) <= _MIN_ROWS - 0.5)
    return np.flatnonzero((variable.span()[~rare] ** 2 > least * variances).any(axis=0))


def _coded(
    variable: ClassSums, variances: Float, least: float, correlated: bool
) -> NDArray[np.intp]:
    """Return the features that determine the class: as numbers of the classes, or as indicators."""
    # A feature that numbers the classes is constant within them, and differs between all, by more
    # than the deviation within: a large variance between may come from a single class. Indicators
    # (`correlated`: there may be some) count if they cover all classes but at most one.
    present = variable.weights > 0.0
    numbers = np.empty(0, np.intp)
    if np.count_nonzero(variable.rows[present] >= _MIN_ROWS) < 2:
        return numbers
    p, sums = variable.weights[present] / variable.weight, variable.sums[present] / variable.weight
    total = sums.sum(axis=0)
    between = np.einsum("kj,kj,k->j", sums, sums, 1.0 / p) - total**2
    features = np.flatnonzero(between > least * variances)
    values = np.sort(sums[:, features] / p[:, None], axis=0)
    gaps = np.diff(values, axis=0).min(axis=0, initial=np.inf)
    within = np.maximum(variances - between, (2.0 * EPS32) ** 2 * variances)[features]
    numbers = features[gaps**2 > _MIN_GAP**2 * within]
    if correlated:
        indicates = (sums - np.outer(p, total)) ** 2 > np.outer(p * (1.0 - p), least * variances)
        if np.count_nonzero(indicates.any(axis=1)) >= max(2, len(p) - 1):
            numbers = np.union1d(numbers, np.flatnonzero(indicates.any(axis=0)))
    return numbers


# --- repair of covariances ------------------------------------------------------------------------


class LabelColumns(NamedTuple):
    """Label columns of a variable that vary; of classes, the indicators but for the largest."""

    name: VariableName
    variable: Variable  # sums over all rows
    used: NDArray[np.intp]  # (k,) positions of the columns among all classes or columns
    mean: Float  # (k,)
    deviation: Float  # (k,) standard deviations

    @classmethod
    def of(cls, name: VariableName, variable: Variable) -> LabelColumns:
        """Return the label columns of a variable, in the order of `Variable.span`."""
        if isinstance(variable, ClassSums):
            p = variable.weights / variable.weights.sum()
            used = np.flatnonzero((p > 0) & (np.arange(len(p)) != np.argmax(p)))
            return cls(name, variable, used, p[used], np.sqrt(p[used] * (1 - p[used])))
        deviation = variable.deviations()
        used = np.flatnonzero(deviation > 0)
        return cls(name, variable, used, variable.mean()[used], deviation[used])

    @property
    def terms(self) -> list[str]:
        """Names of the label columns in messages: ``[job = nurse]``, ``age`` or ``pose[2]``."""
        variable = cast(Any, self.variable)
        if not isinstance(variable, ClassSums) and variable.n_columns == 1:
            return [str(self.name)]
        form = "[{} = {}]" if isinstance(variable, ClassSums) else "{}[{}]"
        return [form.format(self.name, variable.names[c]) for c in self.used]

    def correlation(self) -> Float:
        """Return the correlation matrix of the label columns, (k, k)."""
        if isinstance(self.variable, ClassSums):
            covariance = np.diag(self.mean) - np.outer(self.mean, self.mean)
        else:
            covariance = self.variable.variance()[np.ix_(self.used, self.used)]
        return np.asarray(covariance / np.outer(self.deviation, self.deviation))

    def within(self, part: Variable) -> Float:
        """Return Cov(x, y), (d, k), over a part of the rows, in units of `deviation`."""
        cross, positions = part.cross_covariance(0, self.name), self.used
        if isinstance(part, ClassSums):
            # Classes without rows in `part` get the appended column -1, which is 0.
            keys = list(cast(ClassSums, self.variable).position_by_key)
            positions = np.array([part.position_by_key.get(keys[c], -1) for c in self.used])
            cross = np.hstack([cross, np.zeros((len(cross), 1))])
        return np.asarray(cross[:, positions] / self.deviation)


def unchanged(empty: Float) -> Restoration:
    """Return the identity, which restores nothing; `empty` is (0, d)."""
    return Restoration(empty, 0.0, empty, empty, empty, None, error=empty, lost=empty)


def refuse_lost(
    restoration: Restoration, method: str, columns: Sequence[LabelColumns], remedy: str
) -> None:
    """Raise InfeasibleError if a combination of labels cannot be restored; the text names it."""
    lost = restoration.lost_combination
    if lost is None:
        return
    terms = [term for variable in columns for term in variable.terms]
    # `lost` belongs to label columns of unit standard deviation.
    coefficients = lost / np.concatenate([variable.deviation for variable in columns])
    coefficients /= coefficients[np.argmax(np.abs(coefficients))]
    order = np.argsort(-np.abs(coefficients), kind="stable")
    named = [i for i in order if abs(coefficients[i]) > _SMALL]
    combination = " ".join(
        f"{'-' if coefficients[i] < 0 else '+'} {abs(coefficients[i]):.3g} {terms[i]}"
        for i in named[:_TERMS]
    ).removeprefix("+ ")
    raise InfeasibleError(
        f"{method} cannot restore the covariance with {listed(str(v.name) for v in columns)}: "
        f"the erased rows do not covary with the combination {combination}"
        f"{' + ...' if len(named) > _TERMS else ''} (|Cov| {restoration.lost_size:.2g} before "
        f"erasing). Keep fewer variables, or {remedy}",
        1.0,
    )


def variable_reports(
    role: str, span: Span, whitened: Float, cut: float,
    figures: Callable[[slice], tuple[float, float]],
) -> list[VariableReport]:  # fmt: skip
    """Return the report of each variable of `span`, with residual and bound from `figures`."""
    reports = []
    for name, part, kind, correlations in correlations_of(span, whitened):
        sizes = np.linalg.svd(whitened[part], compute_uv=False)
        rank = int(np.count_nonzero(sizes > cut))
        reports.append(VariableReport(name, role, rank, correlations, *figures(part), kind))
    return reports


def precision_notes(
    variables: list[VariableReport], amplification: float, cause: str, remedy: str
) -> list[str]:
    """Return warnings of a large amplification, and of a residual that is not rounding error."""
    notes = []
    if amplification > tolerances.AMPLIFICATION:
        notes.append(
            f"{cause}: the map enlarges deviations, with their rounding errors and noise, up to "
            f"{amplification:.1e} times; {remedy}"
        )
    worst = max(variables, key=lambda v: v.residual - v.bound)
    if worst.bound >= 1 or worst.residual > worst.bound:
        notes.append(
            f"rounding errors may undo the constraint on {worst.name!r}: residual "
            f"{worst.residual:.1e}, bound {worst.bound:.1e} (relative to the covariance)"
        )
    return notes
