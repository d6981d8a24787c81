"""Moments of each class of a concept, as arrays in units of the deviations of the features."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import reduce
from operator import add
from typing import Any

import numpy as np
from numpy.typing import NDArray

from splince_fast._runtime.arguments import described_type
from splince_fast._solve import tolerances
from splince_fast._solve.restore import inverse_units
from splince_fast._solve.selection import Selection, Span, names_of, span_of
from splince_fast.exceptions import ConstantVariableError, InputError, LabelError
from splince_fast.labels import ClassName
from splince_fast.labels.names import names_to_json
from splince_fast.methods.label_columns import LabelColumns
from splince_fast.moments import Folds, Moments
from splince_fast.moments.snapshot import statistics

Float = NDArray[np.float64]


def concept_of(erase: object, method: str) -> str:
    """Return the name of the variable to erase; raise InputError unless there is exactly one."""
    names = names_of(erase, "erase")
    if len(names) > 1 or not isinstance(names[0], str):
        raise InputError(
            f"erase is {erase!r}; {method} erases the classes of one variable: make a column of "
            "the joint cells, and pass its name"
        )
    return names[0]


def read_classes(moments: object, name: str, method: str) -> dict[ClassName, Moments]:
    """Return the moments of each class of the variable `name` that has rows.

    Raises InputError for moments of another type, without ``by=name``, or of a diagonal or sample,
    LabelError for a continuous variable, and ConstantVariableError for fewer than two classes.
    """
    if isinstance(moments, Folds):
        moments = moments.total
    if isinstance(moments, Mapping):
        parts = {c.item() if isinstance(c, np.generic) else c: m for c, m in moments.items()}
        names_to_json(parts)  # raises LabelError if a key cannot name a class
        parts = {c: m.total if isinstance(m, Folds) else m for c, m in parts.items()}
        if not all(isinstance(part, Moments) for part in parts.values()):
            raise InputError("a mapping must hold the Moments of each class")
    elif isinstance(moments, Moments):
        parts = _by_class(moments, name, method)
    else:
        raise InputError(
            f"moments is {described_type(moments)}; pass Moments(by={name!r}), or a mapping of "
            "classes to moments"
        )
    parts = {c: part for c, part in parts.items() if part.n_rows}
    if len(parts) < 2:
        raise ConstantVariableError(
            f"the variable {name!r}, to be erased, has {len(parts)} class with rows: there is "
            "no difference to remove; check the labels"
        )
    for part in parts.values():
        if part.parameters.is_diagonal or part.parameters.subsample < 1:
            raise InputError(
                f"{method} needs the covariance of each class from all rows, and these moments "
                "were made with covariance_type='diag' or subsample=; accumulate without them"
            )
    return parts


def _by_class(moments: Moments, name: str, method: str) -> dict[Any, Moments]:
    """Return the moments of each class, from moments made with ``by=name``."""
    by = moments.parameters.by
    if by != name:
        if moments.variables.get(name) == "continuous":
            raise LabelError(
                f"the variable {name!r} is continuous and has no class covariances; bin it into "
                "classes, such as np.digitize(z, np.quantile(z, [0.25, 0.5, 0.75]))"
            )
        raise InputError(
            f"{method} needs the covariance of x in each class of {name!r}, and these moments "
            f"keep {'only that of all rows' if by is None else f'those of {by!r}'}; accumulate "
            f"them with sf.Moments(by={name!r})"
        )
    # The key None stands for the rows without a label of the concept.
    return {c: part for c, part in moments.by_class.items() if c is not None}


@dataclass(frozen=True, slots=True)
class ClassStatistics:
    """Moments of k classes; covariances are in units u in which x has variance one within classes.

    Features that are constant within classes have the covariance 0. Label columns y are those of
    the kept variables, in units of their standard deviations over all rows.
    """

    total: Moments  # of the rows of all classes
    columns: list[LabelColumns]  # y
    span: Span  # Cov(x, y) over all rows, for the report
    names: list[ClassName]
    rows: Float  # (k,): number of rows
    fractions: Float  # (k,): p_c
    means: Float  # (k, d), in units of x
    units: Float  # (d,): u
    deviations: Float  # (d,): standard deviations over all rows, 0 for constant features
    covariances: Float  # (k, d, d): S_c, ddof = 0
    crosses: Float  # (k, d, q): S_cy
    roundoff: float  # unit roundoff of the products that were summed

    @property
    def mean(self) -> Float:
        """Mean of x over all rows, (d,), in units of x."""
        return np.asarray(self.fractions @ self.means)

    @property
    def pooled(self) -> Float:
        """S_w = sum p_c S_c, (d, d)."""
        return np.asarray(np.tensordot(self.fractions, self.covariances, 1))

    @property
    def offsets(self) -> Float:
        """Deviations of the class means from the mean, (k, d), in units of u."""
        return np.asarray((self.means - self.mean) / self.units)


def class_statistics(
    classes: dict[ClassName, Moments], keep: Selection | None, method: str
) -> ClassStatistics:
    """Return the moments of each class as arrays, with the label columns of the variables `keep`.

    Raises InputError if `keep` holds directions, or a row has no label of a kept variable, and
    ConstantVariableError if a kept variable has a single value.
    """
    if keep is not None and not isinstance(keep, str | tuple | list):
        raise InputError(
            f"keep holds directions; {method} keeps the covariance with variables, by name"
        )
    total = reduce(add, classes.values())
    kept, span = [], Span([], np.empty((0, total.n_features or 0)), [], [])
    with statistics(total) as stats:
        names = [] if keep is None else names_of(keep, "keep")
        if names:
            span = span_of(stats, names, "keep", True)
        for name in names:
            variable = stats.variable(name)
            if variable.n_rows != stats.n_rows:
                raise InputError(
                    f"{stats.n_rows - variable.n_rows:,} of {stats.n_rows:,} rows have no "
                    f"label of {name!r}; Cov(x) and the covariance of x with {name!r} must be "
                    "of the same rows: leave the rows without a label out"
                )
            kept.append(LabelColumns.of(name, variable.copy()))
        deviations = np.sqrt(stats.variances)
        constant = tolerances.CONSTANT * np.abs(stats.mean)
    deviations[deviations <= constant] = 0.0
    parts = list(classes.values())
    weights = np.array([part.weight for part in parts])
    fractions, covariances = weights / weights.sum(), [part.covariance(ddof=0) for part in parts]
    within = np.sqrt(sum(p * np.diagonal(s) for p, s in zip(fractions, covariances, strict=True)))
    within[within <= constant] = 0.0
    inverse = inverse_units(within)
    units = np.where(within > 0, within, np.where(deviations > 0, deviations, 1.0))
    crosses = []
    for part in parts:
        columns = [np.zeros((len(within), 0))]
        with statistics(part) as stats:
            columns += [column.within(stats.variable(column.name)) for column in kept]
        crosses.append(np.hstack(columns) * inverse[:, None])
    return ClassStatistics(
        total, kept, span, list(classes), np.array([part.n_rows for part in parts]),
        fractions, np.stack([part.mean for part in parts]), units, deviations,
        np.stack([s * inverse[:, None] * inverse for s in covariances]), np.stack(crosses),
        max(part._state().unit_roundoff for part in parts),
    )  # fmt: skip
