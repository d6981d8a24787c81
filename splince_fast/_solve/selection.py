"""What `erase=` and `keep=` select: cross-covariances of variables, or explicit directions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from splince_fast._runtime.arrays import as_rows, check_values
from splince_fast.exceptions import ConstantVariableError, InputError
from splince_fast.labels import VariableName
from splince_fast.moments.accumulator import Accumulator
from splince_fast.moments.state import State

Float = NDArray[np.float64]
Selection: TypeAlias = VariableName | Sequence[VariableName]


@dataclass(slots=True)
class Span:
    """Cross-covariances of several variables, stacked: rows in units of deviations."""

    names: list[str]
    rows: Float  # (k, d)
    counts: list[int]


def names_of(selection: object, role: str) -> list[VariableName]:
    """One variable or a list of them, as a list."""
    if isinstance(selection, (str, tuple)):
        return [selection]
    if (
        isinstance(selection, list)
        and selection
        and all(isinstance(name, (str, tuple)) for name in selection)
    ):
        return selection
    raise InputError(
        f"{role} is {selection!r}; it must be the name of a variable, a tuple of names for joint "
        "cells, or a non-empty list of these"
    )


def span_of(held: Accumulator, selection: object, role: str, whitened: bool) -> Span:
    """The cross-covariances that `selection` names, or the directions that it holds."""
    if selection is None and role == "keep":
        return Span([], np.empty((0, held.seen().width)), [])
    is_names = isinstance(selection, (str, tuple)) or (
        isinstance(selection, list) and any(isinstance(v, (str, tuple)) for v in selection)
    )
    if role == "keep" and not is_names and not (isinstance(selection, list) and not selection):
        return _directions(held.seen(), selection, whitened)
    names, blocks, counts = names_of(selection, role), [], []
    for name in names:
        columns = held.variable(name).span()
        if not len(columns):
            raise ConstantVariableError(
                f"the variable {name!r}, to be {'erased' if role == 'erase' else 'kept'}, takes a "
                "single value (or carries no label), so x has no covariance with it; check the "
                "labels, or leave the variable out"
            )
        blocks.append(columns)
        counts.append(len(columns))
    rows = blocks[0] if len(blocks) == 1 else np.concatenate(blocks)
    return Span([str(name) for name in names], rows, counts)


def _directions(state: State, selection: Any, whitened: bool) -> Span:
    """Explicit directions, one per column of a (d, k) array, in units of x's deviations."""
    array = as_rows(_as_columns(selection), name="keep")
    if len(array) != state.width:
        raise InputError(
            f"keep has shape {array.shape}; directions are the columns of an array of shape "
            f"({state.width}, k)"
        )
    check_values(array, "keep")
    rows = np.array(array.T, dtype=np.float64, order="C")  # a copy: the caller keeps the array
    largest = np.abs(rows).max(axis=1, keepdims=True)
    if (largest == 0).any():
        raise ConstantVariableError("keep holds a direction of zeros; leave it out")
    rows /= largest
    # The kernel judges ranks in these units; constant features, which P leaves alone, have none.
    variance = np.einsum("ii->i", state.scatter) / state.weight
    units = np.sqrt(variance if whitened else np.full(state.width, variance.sum()))
    scaled = np.divide(rows, units, out=np.zeros_like(rows), where=units > 0)
    sizes = np.linalg.norm(scaled, axis=1, keepdims=True)
    return Span(["directions"], rows / np.where(sizes > 0, sizes, 1.0), [len(rows)])


def _as_columns(selection: Any) -> Any:
    """A single direction, (d,), as the one column of an array; anything else as it is."""
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
