"""The kinds of accumulator, by what the parameters ask for."""

from __future__ import annotations

from splince_fast.moments.accumulator import Accumulator
from splince_fast.moments.by_class import ClassAccumulator
from splince_fast.moments.parameters import Parameters
from splince_fast.moments.sampled import SampledAccumulator
from splince_fast.moments.sketch import SketchAccumulator


def accumulator_of(parameters: Parameters) -> Accumulator:
    """An empty accumulator of the kind that the parameters ask for."""
    if parameters.by is not None:
        return ClassAccumulator(parameters)
    if parameters.sketch_size is not None:
        return SketchAccumulator(parameters)
    return SampledAccumulator(parameters) if parameters.subsample < 1 else Accumulator(parameters)
