"""Moments of each class of a concept, for methods that use class covariances."""

from __future__ import annotations

from collections.abc import Mapping
from functools import reduce
from operator import add
from typing import Any, NamedTuple, NoReturn, TypeAlias

import numpy as np
from numpy.typing import NDArray

from splince_fast._runtime.arrays import abbreviated
from splince_fast._runtime.keywords import described_type
from splince_fast._solve.class_covariances import ClassStatistics
from splince_fast._solve.selection import Selection, Span, names_of, span_of
from splince_fast.exceptions import (
    ConstantVariableError,
    InfeasibleError,
    InputError,
    LabelError,
    NotEnoughDataError,
)
from splince_fast.labels import ClassName, VariableName, class_key
from splince_fast.labels.names import listed, names_to_json
from splince_fast.methods.label_columns import LabelColumns, combination
from splince_fast.moments import Folds, Moments
from splince_fast.moments.snapshot import statistics

Float = NDArray[np.float64]
# Mapping is invariant in its keys: with ClassName, a dict[str, Moments] would be refused.
Classes: TypeAlias = Mapping[Any, Moments]

# A larger variance of a feature is an error, because sums of millions of squared variances may
# overflow.
_LARGEST = 1e140


class ClassMoments(NamedTuple):
    """Moments of each class, over all rows and in each fold."""

    all_rows: dict[ClassName, Moments]
    folds: list[dict[ClassName, Moments]]  # empty if the moments are not split into folds
    groups: str | None  # variable that defines the clusters of rows kept in one fold


def concept_of(erase: object, method: str) -> str:
    """Return the name of the variable to erase; raise InputError unless there is exactly one."""
    names = names_of(erase, "erase")
    if len(names) > 1 or not isinstance(names[0], str):
        raise InputError(
            f"erase is {erase!r}; {method} erases the classes of one variable: make a column of "
            "the joint cells, and pass its name"
        )
    return names[0]


def read_classes(moments: object, name: str, method: str) -> ClassMoments:
    """Return the moments of each class of the variable `name`.

    Parameters
    ----------
    moments : Moments, Folds, or mapping of class to Moments or Folds
        Moments or folds made with ``by=name``, or the moments or folds of each class.
    name : str
        Variable to erase.
    method : str
        Name of the method, for messages.

    Raises
    ------
    InputError
        `moments` has another type, keeps no moments per class, or was made with a sketch or
        sample.
    LabelError
        A key of the mapping cannot be the name of a class, or the variable is continuous.
    ConstantVariableError
        Fewer than two classes have rows.
    NotEnoughDataError
        A fold has no row of a class.
    """
    groups: str | None = None
    if isinstance(moments, Mapping):
        moments = {c.item() if isinstance(c, np.generic) else c: m for c, m in moments.items()}
        names_to_json(moments)  # raises LabelError if a key cannot name a class
        kinds = {type(part) for part in moments.values()}
        if kinds == {Folds}:
            counts = {len(part) for part in moments.values()}
            if len(counts) > 1:
                raise InputError("the classes have different numbers of folds; use the same number")
            groups = next(iter(moments.values()))._groups
            count = counts.pop()
            folds = [{c: part[i] for c, part in moments.items()} for i in range(count)]
        elif kinds == {Moments}:
            folds = [dict(moments)]
        else:
            raise InputError(
                "a mapping must hold the Moments of each class, or the Folds of each class"
            )
    elif isinstance(moments, Folds):
        groups = moments._groups
        folds = [_by_class(part, name, method) for part in moments]
    elif isinstance(moments, Moments):
        folds = [_by_class(moments, name, method)]
    else:
        raise InputError(
            f"moments is {described_type(moments)}; pass Moments(by={name!r}), Folds of them, or a "
            "mapping of classes to moments"
        )
    classes: dict[Any, ClassName] = {}
    for fold in folds:
        classes |= {class_key(c): c for c, part in fold.items() if part.n_rows}
    for part in (part for fold in folds for part in fold.values()):
        parameters = part.parameters
        if parameters.sketch_size is not None or parameters.subsample < 1:
            raise InputError(
                f"{method} needs the covariance of each class from all rows, and these moments "
                "were made with sketch_size= or subsample=; accumulate without them"
            )
    if len(classes) < 2:
        raise ConstantVariableError(
            f"the variable {name!r}, to be erased, has {len(classes)} class with rows: there is "
            "no difference to remove; check the labels"
        )
    aligned_folds = []  # moments of each class in each fold, classes in one order
    for fold in folds:
        by_key = {class_key(c): part for c, part in fold.items() if part.n_rows}
        for key, c in classes.items():
            if key not in by_key:
                raise NotEnoughDataError(
                    f"a fold has no row of the class {c!r} of {name!r}; use fewer folds, or leave "
                    "the class out"
                )
        aligned_folds.append({c: by_key[key] for key, c in classes.items()})
    if len(aligned_folds) == 1:
        return ClassMoments(aligned_folds[0], [], groups)
    all_rows = {c: reduce(add, (fold[c] for fold in aligned_folds)) for c in aligned_folds[0]}
    return ClassMoments(all_rows, aligned_folds, groups)


def _by_class(moments: Moments, name: str, method: str) -> dict[ClassName, Moments]:
    """Return the moments of each class of `name`, from moments made with ``by=name``.

    Raises
    ------
    LabelError
        The variable is continuous.
    InputError
        `moments` was made without ``by=name``.
    """
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


class Coding(NamedTuple):
    """Label columns of the kept variables, with the same coding in all classes and folds.

    Attributes
    ----------
    kept : list of LabelColumns
        Columns of each kept variable, with their standard deviations over all rows.
    span : Span
        Rows that span Cov(x, y) over all rows, for the report.
    total : Moments
        Moments of all rows.
    """

    kept: list[LabelColumns]
    span: Span
    total: Moments

    @classmethod
    def of(cls, classes: Classes, keep: Selection | None, method: str) -> Coding:
        """Return the coding of the variables `keep`, determined from the rows of all classes.

        Raises
        ------
        InputError
            `keep` holds directions, or a row has no label of a kept variable.
        ConstantVariableError
            A kept variable has a single value.
        """
        total = reduce(add, classes.values())
        if keep is None:
            return cls([], Span([], np.empty((0, total.n_features or 0)), [], []), total)
        if not isinstance(keep, str | tuple | list):
            raise InputError(
                f"keep holds directions; {method} keeps the covariance with variables, by name"
            )
        kept = []
        with statistics(total) as stats:
            names = names_of(keep, "keep")
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
        return cls(kept, span, total)


def class_statistics(classes: Classes, coding: Coding) -> ClassStatistics:
    """Return the moments of each class as arrays.

    Raises
    ------
    InputError
        A variance is so large that sums of squared variances may overflow float64.
    """
    crosses, task_means = [], []
    for part in classes.values():
        columns, means = [np.zeros((part.n_features or 0, 0))], [np.zeros(0)]
        with statistics(part) as stats:
            for kept in coding.kept:
                cross, mean = kept.within(stats.variable(kept.name))
                columns.append(cross)
                means.append(mean)
        crosses.append(np.hstack(columns))
        task_means.append(np.concatenate(means))
    parts = list(classes.values())
    covariances = np.stack([part.covariance(ddof=0) for part in parts])
    variances = np.einsum("kii->ki", covariances).max(axis=0)
    feature = int(np.argmax(variances))
    if variances[feature] > _LARGEST:
        raise InputError(
            f"feature {abbreviated([feature], coding.total.feature_names)} has the standard "
            f"deviation {variances[feature] ** 0.5:.1e}, and squares of class covariances would "
            "overflow: rescale the data"
        )
    return ClassStatistics(
        np.array([part.weight for part in parts]), np.array([part.n_rows for part in parts]),
        np.stack([part.mean for part in parts]),
        covariances, np.stack(crosses), np.stack(task_means),
    )  # fmt: skip


def refuse_combination(name: VariableName, coding: Coding, weights: Float, method: str) -> NoReturn:
    """Raise InfeasibleError for a combination of kept labels that no map can keep.

    The combination covaries with x over all rows, but within no class; the message names it.

    Parameters
    ----------
    name : VariableName
        Variable to erase.
    coding : Coding
        Kept label columns.
    weights : (k,) float64
        Coefficients of the combination, one per kept label column.
    method : str
        Name of the method.
    """
    kept = listed([str(columns.name) for columns in coding.kept])
    raise InfeasibleError(
        f"{method} cannot keep {kept} while it erases {name!r}: in no class of {name!r} does x "
        f"covary with the combination {combination(weights, coding.kept)}, but over all rows it "
        "does. Typically the combination is a function of the concept. Keep fewer variables, or "
        "leave keep= out",
        1.0,
    )
