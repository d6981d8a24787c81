"""Interleaved timing: contenders alternate, so that drift of the machine cancels in ratios.

Each round takes one sample of each contender, in rotating order and with equal numbers of threads.
A sample repeats short calls until it is long enough for the clock. Samples are separated by a wait
until thread pools are idle: threads of OpenBLAS spin for up to a tenth of a second after their last
task, and would slow down the next contender.
"""

from __future__ import annotations

import os
import sys
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import starmap
from time import perf_counter, process_time, sleep
from timeit import timeit
from typing import Any, TypeVar

import numpy as np
import threadpoolctl
from numba.core import event
from numpy.typing import NDArray

import splince_fast as sf

_MIN_SECONDS = 0.02  # minimum duration of a sample
_PAUSE_SECONDS = 0.1  # idle BLAS threads spin for this time
# If the first call takes at least this time and the budget, it is the only sample of a contender.
_LONG_SECONDS = 2.0
_ROUNDS = (3, 9)  # smallest and largest number of rounds

config = cache(sf.show_config)  # cached, because show_config measures rates

T = TypeVar("T")
Call = Callable[..., Any]
Seconds = NDArray[np.float64]  # seconds per unit of work, one value per round


def smoke() -> bool:
    """Return whether this is a test run at tiny sizes, whose timings mean nothing."""
    return os.environ.get("SPLINCE_FAST_BENCH") == "smoke"


def pick(full: T, tiny: T) -> T:
    """Return `tiny` in smoke mode, else `full`."""
    return tiny if smoke() else full


@dataclass(frozen=True, slots=True)
class Contender:
    """One implementation of the work of a job."""

    run: Callable[[], Any]
    units: float = 1.0  # units of work per call (rows, solves)
    # Function from the result to an array. These arrays must be equal for all contenders of a job.
    # None for contenders that do only a part of the job, such as floors.
    answer: Call | None = None


def each(blocks: Sequence[Any], work: Call, answer: Call | None = None) -> Contender:
    """Return a contender that calls `work` on the items of each block.

    The first item of a block is its rows. The result of the contender is that of the last call.
    """
    rows = sum(len(block[0]) for block in blocks)
    return Contender(lambda: deque(starmap(work, blocks), maxlen=1).pop(), rows, answer)


@dataclass(frozen=True, slots=True)
class Absent:
    """A contender that cannot be measured, with the reason."""

    reason: str


def quartiles(values: Iterable[float]) -> dict[str, float]:
    """Return median and quartiles of values, rounded to six digits."""
    quantiles = np.quantile(list(values), (0.25, 0.5, 0.75))
    low, middle, high = (float(f"{value:.6g}") for value in quantiles)
    return {"median": middle, "low": low, "high": high}


def ratio(numerator: Seconds, denominator: Seconds) -> dict[str, float]:
    """Return median and quartiles, over rounds, of numerator / denominator."""
    return quartiles(np.divide(numerator, denominator))


def interleave(contenders: Mapping[str, Contender], *, budget: float = 8.0) -> dict[str, Seconds]:
    """Time all contenders alternately; return the seconds per unit of work in each round.

    Each contender first makes a warm-up call; the call is repeated if it compiled code or was very
    short. Then 3 to 9 rounds run, about as many as fit into `budget` seconds. A warm-up call that
    exceeds both the budget and 2 seconds is the only sample of its contender.
    """
    equal_threads()
    min_seconds, pause, max_rounds = (
        (0.0, 0.0, 1) if smoke() else (_MIN_SECONDS, _PAUSE_SECONDS, _ROUNDS[1])
    )
    samples: dict[str, list[float]] = {name: [] for name in contenders}
    counts: dict[str, int] = {}
    cost = 0.0
    for name, contender in contenders.items():
        with event.install_recorder("numba:compile") as compiled:
            first = _sample(contender, 1)
        # the first call may include imports or compilation
        if first < min_seconds or compiled.buffer:
            first = _sample(contender, 1)
        if first >= max(budget, _LONG_SECONDS):
            samples[name].append(first)
            continue
        counts[name] = max(1, min(100_000, round(min_seconds / max(first, 1e-7))))
        cost += first * counts[name] + pause
    order = deque(counts)
    for _ in range(min(max_rounds, max(_ROUNDS[0], int(budget / max(cost, 1e-9))))):
        for name in order:
            _wait_until_idle(pause / 5)
            samples[name].append(_sample(contenders[name], counts[name]))
        order.rotate(-1)
    return {name: np.array(seconds) / contenders[name].units for name, seconds in samples.items()}


def equal_threads() -> None:
    """Give all loaded thread pools as many threads as splince_fast uses."""
    count = config().threads
    threadpoolctl.threadpool_limits(count)
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(count)
    if "daal4py" in sys.modules:
        sys.modules["daal4py"].daalinit(count)


def _wait_until_idle(step: float) -> None:
    """Wait, at most 25 steps, until this process uses less than a tenth of a core."""
    for _ in range(25 if step else 0):
        before = process_time()
        sleep(step)
        if process_time() - before < 0.1 * step:
            return


def _sample(contender: Contender, count: int) -> float:
    """Return the mean seconds of `count` calls, with garbage collection disabled."""
    return timeit(contender.run, timer=perf_counter, number=count) / count
