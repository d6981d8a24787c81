"""Growth of the cost: the same job at full size, at half and at a quarter of the size.

The name of a case ends with the theoretical exponent of the algorithm, as in ``solve/features^3``;
`benchmarks.page` prints this exponent beside the measured exponent.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import log

import numpy as np

from benchmarks.data import problem
from benchmarks.jobs import FLOOR, OURS, Contenders, job
from benchmarks.jobs_accumulate import accumulate, block_rows, copying, syrk
from benchmarks.jobs_erase import applied, lapack, orthogonal, splince_of
from benchmarks.timing import Contender, pick

_DIVISORS = {OURS: 1, "half": 2, "quarter": 4}


def _accumulate(rows: int = 0, features: int = 0, classes: int = 2) -> dict[str, Contender]:
    data = problem(rows or block_rows(), features or pick(1024, 16), classes=classes)
    return {OURS: accumulate(data), FLOOR: syrk(data)}


def _sampled(features: int) -> dict[str, Contender]:
    data = problem(pick(8192, 128), features)
    return {OURS: accumulate(data, subsample=0.01), FLOOR: copying(data.X)}


def _solve(features: int = 0, classes: int = 2) -> dict[str, Contender]:
    d = features or pick(1024, 16)
    moments = problem(max(4096, 2 * d), d, "float64", classes=classes).moments()
    return {OURS: splince_of(moments), FLOOR: lapack(moments, "z", "y")}


def _apply(rows: int = 0, features: int = 0, rank: int = 1) -> dict[str, Contender]:
    n, d = rows or pick(25_000, 100), features or pick(768, 16)
    X = np.ones((n, d), np.float32)
    return applied(X, orthogonal(d, rank), X.copy())


# case: (function from the size to contenders, full size, size in smoke mode)
_CASES: dict[str, tuple[Callable[..., dict[str, Contender]], int, int]] = {
    "accumulate/rows^1": (_accumulate, 32_768, 512),
    "accumulate/features^2": (_accumulate, 4096, 64),
    "accumulate/classes^0": (_accumulate, 2000, 8),
    "sampled at 1 %/features^1": (_sampled, 4096, 32),
    "solve/features^3": (_solve, 2048, 32),
    "solve/classes^1": (_solve, 128, 8),
    "apply/rows^1": (_apply, 100_000, 400),
    "apply/features^1": (_apply, 4096, 32),
    "apply/rank^1": (_apply, 64, 4),
}


@job("growth/{case}", "call", case=_CASES)
def _growth(case: str) -> Contenders:
    """Time per call of splince_fast at each size, and of the floor at the full size."""
    build, *largest = _CASES[case]
    axis, size = case.partition("/")[2].partition("^")[0], pick(*largest)
    cases = {name: build(**{axis: size // divisor}) for name, divisor in _DIVISORS.items()}
    contenders = {name: cases[name][OURS] for name in _DIVISORS} | {FLOOR: cases[OURS][FLOOR]}
    return {
        name: replace(contender, units=1.0, answer=None) for name, contender in contenders.items()
    }


def exponent(quarter: float) -> float:
    """Return the exponent of growth; `quarter` is (time at a quarter of the size) / (full time)."""
    return log(quarter) / log(1 / _DIVISORS["quarter"])
