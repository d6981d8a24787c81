"""Label columns of variables, and the restoration of their covariance in errors and reports.

The columns have the order and the units of the rows of the span Cov(x, y).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from splince_fast._runtime.names import listed
from splince_fast._solve import tolerances
from splince_fast._solve.restore import Restoration
from splince_fast._solve.selection import Span
from splince_fast.exceptions import InfeasibleError
from splince_fast.labels import VariableName
from splince_fast.moments.variables import ClassSums, Variable
from splince_fast.report import VariableReport, correlations_of

Float = NDArray[np.float64]

# A message shows at most _TERMS terms of a combination, without terms whose coefficient is at most
# _SMALL times the largest.
_TERMS, _SMALL = 4, 1e-6


class LabelColumns(NamedTuple):
    """Label columns of a variable, without constant columns."""

    # The columns of classes are the indicators of all but the most frequent class.

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
        if isinstance(variable, ClassSums):
            return [f"[{self.name} = {variable.names[c]}]" for c in self.used]
        if variable.n_columns == 1:
            return [str(self.name)]
        return [f"{self.name}[{variable.names[c]}]" for c in self.used]

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


def _combination(weights: Float, columns: Sequence[LabelColumns]) -> str:
    """Return the text of a linear combination of label columns; its largest coefficient is 1."""
    # `weights` belong to label columns of unit standard deviation.
    terms = [term for variable in columns for term in variable.terms]
    coefficients = weights / np.concatenate([variable.deviation for variable in columns])
    coefficients = coefficients / coefficients[np.argmax(np.abs(coefficients))]
    order = np.argsort(-np.abs(coefficients), kind="stable")
    named = [i for i in order if abs(coefficients[i]) > _SMALL]
    text = " ".join(
        f"{'-' if coefficients[i] < 0 else '+'} {abs(coefficients[i]):.3g} {terms[i]}"
        for i in named[:_TERMS]
    ).removeprefix("+ ")
    return text + (" + ..." if len(named) > _TERMS else "")


def unchanged(empty: Float) -> Restoration:
    """Return the identity, which restores nothing; `empty` is (0, d)."""
    return Restoration(empty, 0.0, empty, empty, empty, None, error=empty, lost=empty)


def refuse_lost(
    restoration: Restoration, method: str, columns: Sequence[LabelColumns],
    remedy: Callable[[Float], str],
) -> None:  # fmt: skip
    """Raise InfeasibleError if a combination of labels cannot be restored; the text names it."""
    lost = restoration.lost_combination
    if lost is not None:
        raise InfeasibleError(
            f"{method} cannot restore the covariance with {listed(str(v.name) for v in columns)}: "
            f"the erased rows do not covary with the combination {_combination(lost, columns)} "
            f"(|Cov| {restoration.lost_size:.2g} before erasing). Keep fewer variables, or "
            f"{remedy(lost)}",
            1.0,
        )


def variable_reports(
    role: str, span: Span, whitened: Float, cut: float,
    figures: Callable[[slice], tuple[float, float]], values: Float | None = None,
) -> list[VariableReport]:  # fmt: skip
    """Return the report of each variable of `span`, with `figures`: residual and bound of a slice.

    Its rank is the number of correlations, or of the singular values of `values`, above `cut`.
    """
    reports = []
    for name, part, kind, correlations in correlations_of(span, whitened):
        sizes = np.array(correlations)
        if values is not None:
            sizes = np.linalg.svd(values[part], compute_uv=False)
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
