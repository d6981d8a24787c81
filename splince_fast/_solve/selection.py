"""Spans of the variables and directions in the arguments `erase=` and `keep=`.

The span of variables is the cross-covariance of x with their label columns, each scaled to unit
standard deviation, with one row per label column. The span of explicit directions has one row per
direction.
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from splince_fast._runtime.arguments import described_type
from splince_fast._runtime.rows import as_rows, listed_columns
from splince_fast._solve import tolerances
from splince_fast.exceptions import ConstantVariableError, InputError, NonFiniteError
from splince_fast.labels import VariableName

Float = NDArray[np.float64]
Selection: TypeAlias = VariableName | Sequence[VariableName]
Kept: TypeAlias = list[VariableName] | NDArray[Any] | None


class Statistics(Protocol):
    """Moments that :func:`span_of` reads."""

    @property
    def weight(self) -> float:
        """Total weight of x."""

    @property
    def mean(self) -> Float:
        """Means of the features, (d,)."""

    @property
    def variances(self) -> Float:
        """Variances of the features, (d,)."""

    def variable(self, name: VariableName) -> Any:
        """Return the sums of one variable, or raise UnknownVariableError for an unknown name."""


class Interpretation(NamedTuple):
    """How one variable was interpreted (as classes, numbers or directions), for the report."""

    kind: str  # description of the interpretation, such as "classes (4)"
    # (q, k): matrix M such that the singular values of M W, where the rows of W are the whitened
    # span, are the canonical correlations of x and the variable over all rows. Rows without a label
    # count as rows whose label is the mean.
    whitener: Float
    # square of the largest standardised value of a class indicator, which is that of the rarest
    # class; None for other variables
    largest_square: float | None = None
    labelled_fraction: float = 1.0  # fraction of the rows with a label


@dataclass(slots=True)
class Span:
    """Span of several variables: the spans of the variables, stacked by rows."""

    names: list[str]
    rows: Float  # (k, d)
    counts: list[int]  # number of rows of the span per variable
    interpretations: list[Callable[[], Interpretation]]  # one per variable, made on call


def names_of(selection: object, role: str) -> list[VariableName]:
    """Return the argument `erase=` or `keep=`, one name or a list of names, as a list of names."""
    if isinstance(selection, (str, tuple)):
        return [selection]
    items = selection if isinstance(selection, list) else []
    if items and all(isinstance(item, (str, tuple)) for item in items):
        return items
    text = reprlib.repr(selection)
    if shape := getattr(selection, "shape", ()):
        text = f"{described_type(selection)} of shape {tuple(shape)}"
    raise InputError(
        f"{role} is {text}; it must be the name of a variable, a tuple of names for joint "
        "cells, or a non-empty list of these. Labels are passed to Moments.update with their "
        "names"
    )


def kept_of(selection: object) -> Kept:
    """Return `keep=` as a list of names, as an array with directions as columns, or as None."""
    if selection is None:
        return None
    # A list without names holds directions; `names_of` refuses an empty list.
    if isinstance(selection, (str, tuple)) or (
        isinstance(selection, list)
        and (not selection or any(isinstance(item, (str, tuple)) for item in selection))
    ):
        return names_of(selection, "keep")
    return as_rows(_as_columns(selection), name="keep")


def span_of(statistics: Statistics, selection: Kept, role: str, whitened: bool) -> Span:
    """Return the span of the named variables or of the directions in `selection`."""
    if selection is None:
        return Span([], np.empty((0, len(statistics.mean))), [], [])
    if isinstance(selection, np.ndarray):
        return _directions(statistics.variances, selection, whitened)
    blocks, counts = [], []
    interpretations: list[Callable[[], Interpretation]] = []
    for name in selection:
        variable = statistics.variable(name)
        columns = variable.span()
        if not len(columns):
            raise ConstantVariableError(
                f"the variable {name!r}, to be {'erased' if role == 'erase' else 'kept'}, takes a "
                "single value (or carries no label), so x has no covariance with it; check the "
                "labels, or leave the variable out"
            )
        blocks.append(columns)
        counts.append(len(columns))
        if variable.kind == "classes":
            interpretations.append(
                partial(_interpret_classes, variable.weights.copy(), statistics.weight)
            )
        else:
            interpretations.append(partial(_interpret_columns, variable.copy(), statistics.weight))
    rows = blocks[0] if len(blocks) == 1 else np.concatenate(blocks)
    return Span(list(map(str, selection)), rows, counts, interpretations)


def _interpret_classes(weights: Float, total: float) -> Interpretation:
    """Return the interpretation of a class-coded variable, from the weights of its classes."""
    # The span has one row for each class other than the most frequent class: the covariance of x
    # with the class indicator, scaled to unit standard deviation. `Interpretation.whitener` follows
    # from two facts. The class indicators divided by sqrt(p), where p is the fraction of the class,
    # are orthonormal, and the covariances of x with all indicators sum to zero.
    fraction = min(1.0, float(weights.sum()) / total)
    p = weights[weights > 0] / weights.sum()
    most_frequent = int(np.argmax(p))
    others = np.delete(p, most_frequent)
    last = -np.sqrt(others * (1 - others) / p[most_frequent])
    whitener = fraction**0.5 * np.concatenate([np.diag(np.sqrt(1 - others)), last[None]])
    rarest = float(p.min())
    kind = f"classes ({len(p)}){_labelled_text(fraction)}"
    return Interpretation(kind, whitener, (1 - rarest) / rarest, fraction)


def _interpret_columns(variable: Any, total: float) -> Interpretation:
    """Return the interpretation of a continuous variable, from its correlation matrix."""
    fraction = min(1.0, variable.weight / total)
    deviations = variable.deviations()
    varies = deviations > 0
    units = deviations[varies]
    correlations = variable.variance()[np.ix_(varies, varies)] / np.outer(units, units)
    values, vectors = np.linalg.eigh(correlations)
    squares = np.diag(variable.squares)[varies] / variable.weight
    cancelled = float(np.max(squares / units**2))
    tolerance = tolerances.eigenvalue_of_columns(len(units), variable.n_rows, cancelled)
    kept = values > tolerance
    count = variable.n_columns
    kind = "continuous (1 column)" if count == 1 else f"continuous ({count} columns)"
    whitener = (vectors[:, kept] * (fraction / values[kept]) ** 0.5).T
    return Interpretation(kind + _labelled_text(fraction), whitener, labelled_fraction=fraction)


def _labelled_text(fraction: float) -> str:
    """Return a text for the fraction of labelled rows, empty if all rows have a label."""
    return "" if fraction == 1.0 else f", {fraction:.3g} of the rows labelled"


def _interpret_directions(count: int) -> Interpretation:
    return Interpretation(f"directions ({count})", np.eye(count))


def _directions(variances: Float, array: NDArray[Any], whitened: bool) -> Span:
    """Return the span of explicit directions, the columns of a (d, k) array."""
    # The span has one direction per row, scaled to unit norm. The norm is taken with features in
    # units of their standard deviations, or, if x is not whitened, in units of the total standard
    # deviation of x.
    width = len(variances)
    if len(array) != width:
        raise InputError(
            f"keep has shape {array.shape}; directions are the columns of an array of shape "
            f"({width}, k)"
        )
    rows = np.array(array.T, dtype=np.float64, order="C")  # a copy, which is scaled below
    largest = np.abs(rows).max(axis=1, keepdims=True)
    if not np.isfinite(largest).all():
        columns = np.flatnonzero(~np.isfinite(largest))
        raise NonFiniteError(
            f"keep contains NaN or infinity in {len(columns)} of {len(rows)} directions "
            f"({listed_columns(columns.tolist())}); pass finite directions"
        )
    if (largest == 0).any():
        raise ConstantVariableError("keep holds a direction of zeros; leave it out")
    rows /= largest
    # Ranks refer to scaled features, hence the norm does, too. The norm excludes constant features,
    # which the projection does not change.
    units = np.sqrt(variances if whitened else np.full(width, variances.sum()))
    scaled = np.divide(rows, units, out=np.zeros_like(rows), where=units > 0)
    sizes = np.linalg.norm(scaled, axis=1, keepdims=True)
    rows = rows / np.where(sizes > 0, sizes, 1.0)
    return Span(["directions"], rows, [len(rows)], [partial(_interpret_directions, len(rows))])


def _as_columns(selection: Any) -> Any:
    """Return an array with directions as columns; a single direction, (d,), becomes (d, 1)."""
    if isinstance(selection, Mapping):
        raise InputError("keep is a mapping; pass names of variables, or an array of shape (d, k)")
    if hasattr(selection, "to_numpy"):
        selection = selection.to_numpy()
    elif not hasattr(selection, "ndim"):
        try:
            selection = np.asarray(selection, dtype=np.float64)
        except (TypeError, ValueError) as error:
            raise InputError(
                f"keep is neither names of variables nor an array of directions: {error}"
            ) from error
    return selection[:, None] if selection.ndim == 1 else selection
