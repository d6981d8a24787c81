"""Columns of labels that span the covariance with x, in the order and units of its spans."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from splince_fast.labels import VariableName
from splince_fast.moments.class_sums import ClassSums
from splince_fast.moments.column_sums import ColumnSums
from splince_fast.moments.variable import Variable

Float = NDArray[np.float64]

# A message names this many terms of a combination, with coefficients of at least this fraction of
# the largest.
_TERMS, _SMALL = 4, 1e-6


class LabelColumns(NamedTuple):
    """Columns of a variable that vary: its numbers, or indicators of all but the largest class.

    Attributes
    ----------
    name : VariableName
    variable : Variable
        Of all rows.
    used : (k,) intp
        Positions of the columns among those of the variable.
    mean, deviation : (k,) float64
    """

    name: VariableName
    variable: Variable
    used: NDArray[np.intp]
    mean: Float
    deviation: Float

    @classmethod
    def of(cls, name: VariableName, variable: Variable) -> LabelColumns:
        """The columns of a variable, in the order of its span."""
        if isinstance(variable, ClassSums):
            p = variable.weights / variable.weights.sum()
            used = np.flatnonzero((p > 0) & (np.arange(len(p)) != np.argmax(p)))
            return cls(name, variable, used, p[used], np.sqrt(p[used] * (1 - p[used])))
        assert isinstance(variable, ColumnSums)
        deviation = variable.deviations()
        used = np.flatnonzero(deviation > 0)
        return cls(name, variable, used, variable.reference_mean()[used], deviation[used])

    @property
    def terms(self) -> list[str]:
        """The columns as messages name them: ``[job = nurse]``, ``age``, ``pose[2]``."""
        variable = self.variable
        if isinstance(variable, ClassSums):
            return [f"[{self.name} = {variable.names[c]}]" for c in self.used]
        assert isinstance(variable, ColumnSums)
        single = variable.n_columns == 1
        return [
            f"{self.name}" if single else f"{self.name}[{variable.names[c]}]" for c in self.used
        ]

    def correlation(self) -> Float:
        """(k, k): their correlations."""
        units = np.outer(self.deviation, self.deviation)
        if isinstance(self.variable, ClassSums):
            return np.asarray((np.diag(self.mean) - np.outer(self.mean, self.mean)) / units)
        assert isinstance(self.variable, ColumnSums)
        return np.asarray(self.variable.variance()[np.ix_(self.used, self.used)] / units)

    def within(self, part: Variable) -> tuple[Float, Float]:
        """(d, k) Cov(x, y) and (k,) mean of y among some of the rows, y in units of `deviation`.

        Parameters
        ----------
        part : Variable
            The variable of these rows.
        """
        cross = part.cross_covariance(0, self.name)
        if isinstance(part, ClassSums):
            assert isinstance(self.variable, ClassSums)
            # A class that does not occur in these rows has the indicator 0 there.
            keys = list(self.variable.position_by_key)
            places = [part.position_by_key.get(keys[c], -1) for c in self.used]
            columns = np.hstack([cross, np.zeros((len(cross), 1))])[:, places]
            means = np.append(part.weights / part.weights.sum(), 0.0)[places]
        else:
            assert isinstance(part, ColumnSums)
            columns, means = cross[:, self.used], part.reference_mean()[self.used]
        return columns / self.deviation, means / self.deviation


def combination(weights: Float, columns: list[LabelColumns]) -> str:
    """A combination of labels in words.

    Parameters
    ----------
    weights : (k,) float64
        Coefficients of the columns in units of their deviations.
    columns : list of LabelColumns
    """
    terms = [term for own in columns for term in own.terms]
    coefficients = weights / np.concatenate([own.deviation for own in columns])
    coefficients = coefficients / coefficients[np.argmax(np.abs(coefficients))]
    order = np.argsort(-np.abs(coefficients), kind="stable")
    named = [i for i in order if abs(coefficients[i]) > _SMALL]
    text = " ".join(
        f"{'-' if coefficients[i] < 0 else '+'} {abs(coefficients[i]):.3g} {terms[i]}"
        for i in named[:_TERMS]
    ).removeprefix("+ ")
    return text + (" + ..." if len(named) > _TERMS else "")
