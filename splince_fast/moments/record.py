"""Moments from an accumulator, and as parts of a file that holds several."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from splince_fast.moments.accumulator import Accumulator
from splince_fast.moments.format import from_tensors
from splince_fast.moments.moments import Moments
from splince_fast.moments.parameters import Parameters

Float = NDArray[np.float64]


def from_accumulator(accumulator: Accumulator, parameters: Parameters) -> Moments:
    """Moments that take over the state of an accumulator whose rows are all merged.

    They have work memory of their own, and `parameters` in the place of the accumulator's.
    """
    own = Accumulator(parameters)
    own.state, own.variables = accumulator.state, accumulator.variables
    own.pairs = accumulator.pairs
    return Moments._around(own)


def to_record(moments: Moments) -> tuple[dict[str, NDArray[Any]], dict[str, Any]]:
    """Named tensors and JSON metadata of the whole state, consistent while others update it."""
    state = moments.__getstate__()
    return state["tensors"], state["metadata"]


def from_record(tensors: Mapping[str, NDArray[Any]], metadata: Mapping[str, Any]) -> Moments:
    """The inverse of `to_record`, with the errors of `from_tensors`."""
    return Moments._around(from_tensors(tensors, metadata))
