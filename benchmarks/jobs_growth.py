"""How cost grows: the same job at a size, at half and at a quarter of it.

A case ends in the exponent that the algorithm has once the size is large, ``solve/features^3``;
`benchmarks.page` sets the measured one beside it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import log

import numpy as np

from benchmarks.data import problem
from benchmarks.jobs import FLOOR, OURS, Ways, job
from benchmarks.jobs_accumulate import accumulate, block_rows, copying, syrk
from benchmarks.jobs_erase import apply_into, lapack, orthogonal, splince_of
from benchmarks.timing import Absent, pick

_PARTS = {OURS: 1, "half": 2, "quarter": 4}


def _whole(size: int, build: Callable[[int], Ways]) -> Ways:
    """Whole calls at every size, and the floor at the largest."""
    found = {name: build(size // part) for name, part in _PARTS.items()}
    ways = {name: found[name][OURS] for name in _PARTS} | {FLOOR: found[OURS][FLOOR]}
    return {
        name: way if isinstance(way, Absent) else replace(way, units=1.0, answer=None)
        for name, way in ways.items()
    }


def exponent(quarter: float) -> float:
    """Growth of the time from a quarter of a size, which took this part of it, to the whole."""
    return log(quarter) / log(1 / _PARTS["quarter"])


@job("growth/accumulate/{axis}", "call", axis=("rows^1", "features^2", "classes^0"))
def _accumulate(axis: str) -> Ways:
    rows, features = block_rows(), pick(1024, 16)

    def ways(n: int = rows, d: int = features, classes: int = 2) -> Ways:
        data = problem(n, d, classes=classes)
        return {OURS: accumulate(data), FLOOR: syrk(data)}

    if axis == "rows^1":
        return _whole(pick(32_768, 512), ways)
    if axis == "features^2":
        return _whole(pick(4096, 64), lambda d: ways(d=d))
    return _whole(pick(2000, 8), lambda classes: ways(classes=classes))


@job("growth/sampled at 1 %/features^1", "call")
def _sampled() -> Ways:
    def ways(d: int) -> Ways:
        data = problem(pick(8192, 128), d)
        return {OURS: accumulate(data, scatter=0.01), FLOOR: copying(data.X)}

    return _whole(pick(4096, 32), ways)


@job("growth/solve/{axis}", "call", axis=("features^3", "classes^1"))
def _solve(axis: str) -> Ways:
    def ways(d: int, classes: int = 2) -> Ways:
        moments = problem(max(4096, 2 * d), d, "float64", classes=classes).moments()
        return {OURS: splince_of(moments), FLOOR: lapack(moments, "z", "y")}

    if axis == "features^3":
        return _whole(pick(2048, 32), ways)
    return _whole(pick(128, 8), lambda classes: ways(pick(1024, 16), classes))


@job("growth/apply/{axis}", "call", axis=("rows^1", "features^1", "rank^1"))
def _apply(axis: str) -> Ways:
    rows, features = pick((25_000, 768), (100, 16))

    def ways(n: int = rows, d: int = features, rank: int = 1) -> Ways:
        return apply_into(np.ones((n, d), np.float32), orthogonal(d, rank))

    if axis == "rows^1":
        return _whole(pick(100_000, 400), ways)
    if axis == "features^1":
        return _whole(pick(4096, 32), lambda d: ways(d=d))
    return _whole(pick(64, 4), lambda rank: ways(rank=rank))
