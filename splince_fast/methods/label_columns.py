"""Label columns of a variable, in the same order and units as the rows of the span Cov(x, y)."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from splince_fast.labels import VariableName
from splince_fast.moments.class_sums import ClassSums
from splince_fast.moments.column_sums import ColumnSums
from splince_fast.moments.variable import Variable

Float = NDArray[np.float64]

# A message shows at most _TERMS terms of a combination, without terms whose coefficient is at most
# _SMALL times the largest.
_TERMS, _SMALL = 4, 1e-6


class LabelColumns(NamedTuple):
    """Label columns y of a variable, without constant columns."""

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
        assert isinstance(variable, ColumnSums)
        deviation = variable.deviations()
        used = np.flatnonzero(deviation > 0)
        return cls(name, variable, used, variable.mean()[used], deviation[used])

    @property
    def terms(self) -> list[str]:
        """Names of the label columns in messages: ``[job = nurse]``, ``age`` or ``pose[2]``."""
        variable = self.variable
        if isinstance(variable, ClassSums):
            return [f"[{self.name} = {variable.names[c]}]" for c in self.used]
        assert isinstance(variable, ColumnSums)
        single = variable.n_columns == 1
        return [
            f"{self.name}" if single else f"{self.name}[{variable.names[c]}]" for c in self.used
        ]

    def correlation(self) -> Float:
        """Return the correlation matrix of the label columns, (k, k)."""
        units = np.outer(self.deviation, self.deviation)
        if isinstance(self.variable, ClassSums):
            return np.asarray((np.diag(self.mean) - np.outer(self.mean, self.mean)) / units)
        assert isinstance(self.variable, ColumnSums)
        return np.asarray(self.variable.variance()[np.ix_(self.used, self.used)] / units)

    def within(self, part: Variable) -> Float:
        """Return Cov(x, y), (d, k), over a part of the rows, in units of `deviation`."""
        cross = part.cross_covariance(0, self.name)
        if isinstance(part, ClassSums):
            assert isinstance(self.variable, ClassSums)
            # Classes without rows in `part` get the appended column -1, which is 0.
            keys = list(self.variable.position_by_key)
            positions = [part.position_by_key.get(keys[c], -1) for c in self.used]
            cross = np.hstack([cross, np.zeros((len(cross), 1))])[:, positions]
        else:
            cross = cross[:, self.used]
        return np.asarray(cross / self.deviation)


def combination(weights: Float, columns: list[LabelColumns]) -> str:
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
