"""Interleaved timing: contenders alternate, so that drift of the machine cancels in ratios.

Every round runs each contender once, in rotating order. A sample repeats a short call until it
lasts long enough for the clock. A pause before each sample lets the thread pool of the previous
contender go to sleep (OpenBLAS and OpenMP threads spin for some milliseconds after a product; on a
machine with few cores they would slow the next contender down).
"""

from __future__ import annotations

import gc
import os
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from time import perf_counter, sleep
from typing import Any, TypeVar

SIZE = "SPLINCE_FAST_BENCH"
_LEAST_SECONDS = 0.02
_PAUSE_SECONDS = 0.06
# A first call touches new memory and is not counted, unless it takes this long and the budget.
_LONG_SECONDS = 2.0
_BUDGET_SECONDS = 8.0
_ROUNDS = (3, 9)

T = TypeVar("T")


def smoke() -> bool:
    """Whether sizes are tiny: everything runs, and no number means anything."""
    chosen = os.environ.get(SIZE, "full")
    if chosen not in ("smoke", "full"):
        raise SystemExit(f"{SIZE} is {chosen!r}; it must be 'smoke' or 'full'")
    return chosen == "smoke"


def use_smoke() -> None:
    """Tiny sizes and single threads from now on, in child processes as well.

    At tiny sizes several threads would only wait for each other, for long on a busy machine.
    """
    os.environ[SIZE] = "smoke"
    os.environ.setdefault("SPLINCE_FAST_NUM_THREADS", "1")


def pick(full: T, tiny: T) -> T:
    """One of two sizes, by the switch."""
    return tiny if smoke() else full


@dataclass(frozen=True, slots=True)
class Contender:
    """A way to do a job.

    Attributes
    ----------
    run : callable
        Does the job, and returns its result.
    units : float
        How much of the job one call does (rows, solves); times are seconds per unit.
    before : callable, optional
        Runs before every call, outside the clock.
    answer : callable, optional
        Turns the result of the first call into an array that all contenders of the job must agree
        on; None where a contender does less than the whole job, as a floor does.
    """

    run: Callable[[], Any]
    units: float = 1.0
    before: Callable[[], object] | None = None
    answer: Callable[[Any], Any] | None = None


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds per unit of one contender, one number per round."""

    seconds: tuple[float, ...]

    def spread(self) -> Spread:
        return spread(self.seconds)


@dataclass(frozen=True, slots=True)
class Spread:
    """Median and quartiles over rounds."""

    median: float
    low: float
    high: float


def spread(values: tuple[float, ...]) -> Spread:
    """Median and quartiles; a single value is all three."""
    if len(values) == 1:
        return Spread(values[0], values[0], values[0])
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return Spread(statistics.median(values), low, high)


def ratio(numerator: Timing, denominator: Timing) -> Spread:
    """How many times longer the first takes than the second, round by round."""
    above, below = numerator.seconds, denominator.seconds
    if len(above) == 1:  # too long to be repeated: compared with every round of the other
        above *= len(below)
    elif len(below) == 1:
        below *= len(above)
    rounds = min(len(above), len(below))
    return spread(tuple(a / b for a, b in zip(above[-rounds:], below[-rounds:], strict=True)))


def slowest(timings: list[Timing]) -> Timing:
    """The larger of several times, round by round."""
    rounds = min(len(timing.seconds) for timing in timings)
    columns = zip(*(timing.seconds[-rounds:] for timing in timings), strict=True)
    return Timing(tuple(max(column) for column in columns))


def interleave(
    contenders: Mapping[str, Contender], *, budget: float = _BUDGET_SECONDS
) -> dict[str, Timing]:
    """Time all contenders alternately.

    Parameters
    ----------
    contenders : mapping of str to Contender
    budget : float
        Seconds to spend, roughly: as many rounds as fit into it, between 3 and 9, after a first
        call that is not counted. A contender whose first call alone takes longer is not called
        again.

    Returns
    -------
    dict
        The timings, in the order of the contenders.
    """
    least, pause = (0.0, 0.0) if smoke() else (_LEAST_SECONDS, _PAUSE_SECONDS)
    if not smoke():
        gc.collect()  # now, not in the middle of a sample
    samples: dict[str, list[float]] = {}
    counts: dict[str, int] = {}
    repeated: list[str] = []
    cost = 0.0
    for name, contender in contenders.items():
        first = _sample(contender, 1)
        samples[name] = []
        if first >= max(budget, _LONG_SECONDS):
            samples[name].append(first / contender.units)
            continue
        if first < least:  # the first call may have compiled or loaded something
            first = _sample(contender, 1)
        repeated.append(name)
        counts[name] = max(1, min(100_000, round(least / max(first, 1e-7))))
        cost += first * counts[name] + pause
    most = 1 if smoke() else _ROUNDS[1]
    rounds = max(min(_ROUNDS[0], most), min(most, int(budget / max(cost, 1e-9))))
    for number in range(rounds):
        shift = number % max(1, len(repeated))
        for name in repeated[shift:] + repeated[:shift]:
            sleep(pause)
            seconds = _sample(contenders[name], counts[name])
            samples[name].append(seconds / (counts[name] * contenders[name].units))
    return {name: Timing(tuple(values)) for name, values in samples.items()}


def _sample(contender: Contender, count: int) -> float:
    """Seconds that `count` calls take; what runs before them is not counted."""
    total = 0.0
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        for _ in range(count):
            if contender.before is not None:
                contender.before()
            start = perf_counter()
            contender.run()
            total += perf_counter() - start
    finally:
        if was_enabled:
            gc.enable()
    return total
