"""Moments from sums that were taken elsewhere, and as parts of a file that holds several."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from splince_fast.labels import VariableName
from splince_fast.moments.accumulator import Accumulator
from splince_fast.moments.format import from_tensors
from splince_fast.moments.moments import Moments
from splince_fast.moments.parameters import Parameters
from splince_fast.moments.scatter import EPS32, EPS64, Scatter
from splince_fast.moments.state import State
from splince_fast.moments.variable import Variable

Float = NDArray[np.float64]


def from_sums(
    *,
    n_rows: int,
    weight: float,
    reference: Float,
    deviation: Float,
    scatter: Float,
    variables: Mapping[VariableName, Variable],
    kinds: Mapping[str, str],
    joint: Sequence[tuple[str, ...]],
    float32_products: bool,
) -> Moments:
    """Moments whose sums were taken elsewhere; the arrays are taken over.

    Parameters
    ----------
    n_rows, weight : int, float
        The number of rows and sum w.
    reference : (d,) float64
        The point r that deviations are taken from.
    deviation : (d,) float64
        sum w (x - r).
    scatter : (d, d) float64, C-ordered
        The upper triangle of sum w (x - mean)(x - mean)^T; what is below does not matter.
    variables : mapping of names to ClassSums or ColumnSums
        With sums about r.
    kinds, joint
        As for Moments.
    float32_products : bool
        Whether a product of the scatter was rounded to float32.
    """
    accumulator = Accumulator(Parameters.of(None, kinds, joint, False))
    second = Scatter(scatter.T, EPS32 if float32_products else EPS64)
    accumulator.state = State(reference, n_rows, weight, deviation, second, None)
    accumulator.variables.update(variables)
    return Moments._around(accumulator)


def to_record(moments: Moments) -> tuple[dict[str, NDArray[Any]], dict[str, Any]]:
    """Named tensors and JSON metadata of the whole state, consistent while others update it."""
    state = moments.__getstate__()
    return state["tensors"], state["metadata"]


def from_record(tensors: Mapping[str, NDArray[Any]], metadata: Mapping[str, Any]) -> Moments:
    """The inverse of `to_record`, with the errors of `from_tensors`."""
    return Moments._around(from_tensors(tensors, metadata))
