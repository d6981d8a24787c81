"""Interleaved timing: contenders alternate, so that drift of the machine cancels in ratios.

Every round runs each contender once, in rotating order and with equal threads. A sample repeats a
short call until it lasts long enough for the clock. Before each sample the thread pool of the
previous contender goes to sleep: threads of OpenBLAS wait for more work in a loop, a tenth of a
second on some machines, and where cores are few they would slow the next contender down.
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

_LEAST_SECONDS = 0.02
_PAUSE_SECONDS = 0.1  # about as long as the threads of a pool run on
# A first call touches new memory and is not counted, unless it takes this long and the budget.
_LONG_SECONDS = 2.0
_ROUNDS = (3, 9)

config = cache(sf.show_config)  # measured once

T = TypeVar("T")
Call = Callable[..., Any]
Seconds = NDArray[np.float64]  # per unit of the job: a number per round, or that of the only call


def smoke() -> bool:
    """Whether sizes are tiny: everything runs, and no number means anything."""
    return os.environ.get("SPLINCE_FAST_BENCH") == "smoke"


def pick(full: T, tiny: T) -> T:
    """One of two sizes, by the switch."""
    return tiny if smoke() else full


@dataclass(frozen=True, slots=True)
class Contender:
    """One implementation of a job."""

    run: Callable[[], Any]
    units: float = 1.0  # how much of the job a call does (rows, solves)
    # Gives the array, of a result, on which all contenders of the job must agree; None where a
    # contender does less than the whole job, as a floor does.
    answer: Call | None = None


def each(blocks: Sequence[Any], work: Call, answer: Call | None = None) -> Contender:
    """The same work on every block, whose first item is its rows; gives the last result."""
    rows = sum(len(block[0]) for block in blocks)
    return Contender(lambda: deque(starmap(work, blocks), maxlen=1).pop(), rows, answer)


@dataclass(frozen=True, slots=True)
class Absent:
    """A contender left out, and why."""

    reason: str


def spread(values: Iterable[float]) -> dict[str, float]:
    """Median and quartiles over rounds, to six digits; a single value is all three."""
    quantiles = np.quantile(list(values), (0.25, 0.5, 0.75))
    low, middle, high = (float(f"{value:.6g}") for value in quantiles)
    return {"median": middle, "low": low, "high": high}


def ratio(numerator: Seconds, denominator: Seconds) -> dict[str, float]:
    """How many times longer the first takes than the second, round by round."""
    return spread(np.divide(numerator, denominator))


def interleave(contenders: Mapping[str, Contender], *, budget: float = 8.0) -> dict[str, Seconds]:
    """Time all contenders alternately.

    There are as many rounds as fit into `budget` seconds, roughly, between 3 and 9, after a first
    call that is not counted. A contender whose first call alone takes longer, and compiles
    nothing, is not called again.
    """
    equal_threads()
    least, pause, most = (0.0, 0.0, 1) if smoke() else (_LEAST_SECONDS, _PAUSE_SECONDS, _ROUNDS[1])
    samples: dict[str, list[float]] = {name: [] for name in contenders}
    counts: dict[str, int] = {}
    cost = 0.0
    for name, contender in contenders.items():
        with event.install_recorder("numba:compile") as compiled:
            first = _sample(contender, 1)
        if first < least or compiled.buffer:  # a first call may also have loaded something
            first = _sample(contender, 1)
        if first >= max(budget, _LONG_SECONDS):
            samples[name].append(first)
            continue
        counts[name] = max(1, min(100_000, round(least / max(first, 1e-7))))
        cost += first * counts[name] + pause
    order = deque(counts)
    for _ in range(min(most, max(_ROUNDS[0], int(budget / max(cost, 1e-9))))):
        for name in order:
            _rest(pause / 5)
            samples[name].append(_sample(contenders[name], counts[name]))
        order.rotate(-1)
    return {name: np.array(seconds) / contenders[name].units for name, seconds in samples.items()}


def equal_threads() -> None:
    """Give every thread pool that is loaded by now as many threads as splince_fast uses."""
    count = config().threads
    threadpoolctl.threadpool_limits(count)
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(count)
    if "daal4py" in sys.modules:
        sys.modules["daal4py"].daalinit(count)


def _rest(step: float) -> None:
    """Wait until no thread of this process takes a tenth of a core; 25 steps at most."""
    for _ in range(25 if step else 0):
        before = process_time()
        sleep(step)
        if process_time() - before < 0.1 * step:
            return


def _sample(contender: Contender, count: int) -> float:
    """Mean seconds of `count` calls, without the garbage collector."""
    return timeit(contender.run, timer=perf_counter, number=count) / count
