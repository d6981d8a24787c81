"""Spans of the variables and directions in the arguments `erase=` and `keep=`.

The span of variables is the cross-covariance of x with their label columns, each scaled to unit
standard deviation, with one row per label column. The span of explicit directions has one row per
direction.
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from splince_fast._runtime.arguments import described_type
from splince_fast._runtime.names import VariableName
from splince_fast._runtime.rows import as_numbers, as_rows, listed_columns
from splince_fast._solve import tolerances
from splince_fast.exceptions import ConstantVariableError, InputError, NonFiniteError

Float = NDArray[np.float64]
Selection: TypeAlias = VariableName | Sequence[VariableName]
Kept: TypeAlias = list[VariableName] | NDArray[Any] | None


class Interpretation(NamedTuple):
    """How one variable was interpreted (as classes, numbers or directions), for the report."""

    kind: str  # description of the interpretation, such as "classes (4)"
    # (q, k): M such that the singular values of M W, with W the whitened span, are the canonical
    # correlations of x and the variable over all rows; a missing label counts as the mean.
    whitener: Float
    # square of the largest standardised value of a class indicator; None for other variables
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
    items = [selection] if isinstance(selection, (str, tuple)) else selection
    if isinstance(items, list) and items and all(isinstance(x, (str, tuple)) for x in items):
        return items
    text = reprlib.repr(selection)
    if shape := getattr(selection, "shape", ()):
        text = f"{described_type(selection)} of shape {tuple(shape)}"
    raise InputError(
        f"{role} is {text}; it must be the name of a variable, a tuple of names for joint cells, "
        "or a non-empty list of these"
    )


def kept_of(selection: Any) -> Kept:
    """Return `keep=` as a list of names, as an array with directions as columns, or as None."""
    if selection is None:
        return None
    # A list without names holds directions; `names_of` refuses an empty list.
    items = selection if isinstance(selection, list) else [selection]
    if not items or any(isinstance(x, (str, tuple)) for x in items):
        return names_of(selection, "keep")
    array = as_numbers(selection, "keep")
    return as_rows(array[:, None] if array.ndim == 1 else array, name="keep")


def span_of(statistics: Any, selection: Kept, role: str, whitened: bool) -> Span:
    """Return the span of the named variables or of the directions in `selection`."""
    if selection is None:
        return Span([], np.empty((0, len(statistics.mean))), [], [])
    if isinstance(selection, np.ndarray):
        return _directions(statistics.variances, selection, whitened)
    blocks: list[Float] = []
    interpretations: list[Callable[[], Interpretation]] = []
    for name in selection:
        variable = statistics.variable(name)
        blocks.append(variable.span())
        if not len(blocks[-1]):
            raise ConstantVariableError(
                f"the variable {name!r}, to be {'kept' if role == 'keep' else 'erased'}, takes a "
                "single value (or carries no label); check the labels, or leave it out"
            )
        if variable.kind == "classes":
            interpret = partial(interpretation_of_classes, variable.weights.copy())
        else:
            interpret = partial(_interpret_columns, variable.copy())
        interpretations.append(partial(interpret, statistics.weight))
    rows = blocks[0] if len(blocks) == 1 else np.concatenate(blocks)
    return Span(list(map(str, selection)), rows, list(map(len, blocks)), interpretations)


def interpretation_of_classes(weights: Float, total: float) -> Interpretation:
    """Return the interpretation of a class-coded variable, from the weights of its classes."""
    # The span has one row per class but the most frequent one: the covariance of x with the class
    # indicator, scaled to unit standard deviation. The whitener follows from two facts: indicators
    # divided by sqrt(p), for the fraction p of the class, are orthonormal, and the covariances of x
    # with all indicators sum to zero.
    p = weights[weights > 0] / weights.sum()
    most_frequent, rarest = int(np.argmax(p)), float(p.min())
    others = np.delete(p, most_frequent)
    last = -np.sqrt(others * (1 - others) / p[most_frequent])
    whitener = np.concatenate([np.diag(np.sqrt(1 - others)), last[None]])
    return _labelled(
        f"classes ({len(p)})", whitener, (1 - rarest) / rarest, float(weights.sum()) / total
    )


def _interpret_columns(variable: Any, total: float) -> Interpretation:
    """Return the interpretation of a continuous variable, from its correlation matrix."""
    deviations, count = variable.deviations(), variable.n_columns
    varies = deviations > 0
    units = deviations[varies]
    correlations = variable.variance()[np.ix_(varies, varies)] / np.outer(units, units)
    values, vectors = np.linalg.eigh(correlations)
    squares = np.diag(variable.squares)[varies] / variable.weight
    cancelled = float(np.max(squares / units**2))
    kept = values > tolerances.eigenvalue_of_columns(len(units), variable.n_rows, cancelled)
    whitener = (vectors[:, kept] / values[kept] ** 0.5).T
    kind = f"continuous ({count} column{'' if count == 1 else 's'})"
    return _labelled(kind, whitener, None, variable.weight / total)


def _labelled(
    kind: str, whitener: Float, largest_square: float | None, fraction: float
) -> Interpretation:
    """Return the interpretation of a variable with labels for a fraction of the rows."""
    fraction = min(1.0, fraction)
    if fraction < 1.0:
        kind += f", {fraction:.3g} of the rows labelled"
    return Interpretation(kind, fraction**0.5 * whitener, largest_square, fraction)


def _directions(variances: Float, array: NDArray[Any], whitened: bool) -> Span:
    """Return the span of explicit directions, the columns of a (d, k) array, scaled to norm 1."""
    width, count = len(variances), array.shape[1]
    if len(array) != width:
        raise InputError(f"keep has shape {array.shape}; directions are columns of ({width}, k)")
    rows = np.array(array.T, dtype=np.float64, order="C")  # a copy, which is scaled below
    largest = np.abs(rows).max(axis=1, keepdims=True)
    if not np.isfinite(largest).all():
        columns = np.flatnonzero(~np.isfinite(largest))
        raise NonFiniteError(
            f"keep contains NaN or infinity in {len(columns)} of {count} directions "
            f"({listed_columns(columns.tolist())}); pass finite directions"
        )
    if (largest == 0).any():
        raise ConstantVariableError("keep holds a direction of zeros; leave it out")
    rows /= largest
    # Norms, like ranks, refer to features in units of their standard deviations, or, if x is not
    # whitened, of the total standard deviation of x. Constant features are excluded.
    units = np.sqrt(variances if whitened else np.full(width, variances.sum()))
    scaled = np.divide(rows, units, out=np.zeros_like(rows), where=units > 0)
    sizes = np.linalg.norm(scaled, axis=1, keepdims=True)
    rows /= np.where(sizes > 0, sizes, 1.0)
    interpretation = Interpretation(f"directions ({count})", np.eye(count))
    return Span(["directions"], rows, [count], [lambda: interpretation])
