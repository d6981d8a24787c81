"""Interleaved timing: contenders take turns, so that drift of the machine cancels in ratios.

Every round runs each contender once, in rotating order. A sample repeats a short call until it
lasts long enough for the clock. Before each sample there is a pause, in which the thread pool of
the contender before stops spinning (OpenBLAS and OpenMP threads wait actively for some
milliseconds; on a machine with few cores they would slow the next contender down).
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from time import perf_counter, sleep

from benchmarks._sizes import smoke

_LEAST_SECONDS = 0.02
_PAUSE_SECONDS = 0.06
# A first call this long needs no other to warm up: it counts as a round.
_LONG_SECONDS = 2.0
_BUDGET_SECONDS = 8.0
_ROUNDS = (3, 9)


@dataclass(frozen=True, slots=True)
class Contender:
    """A way to do a job.

    Attributes
    ----------
    run : callable
    units : float
        How much of the job one call does (rows, solves); results are seconds per unit.
    before : callable, optional
        Runs before every call, outside the clock.
    """

    run: Callable[[], object]
    units: float = 1.0
    before: Callable[[], object] | None = None


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds per unit of one contender, one number per round."""

    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)


@dataclass(frozen=True, slots=True)
class Ratio:
    """Median and quartiles of a quotient taken round by round."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{_short(self.median)} [{_short(self.low)}, {_short(self.high)}]"


def ratio(numerator: Timing, denominator: Timing) -> Ratio:
    """How many times longer the first takes than the second, round by round."""
    above, below = numerator.seconds, denominator.seconds
    if len(above) == 1:  # too long to be repeated: beside every round of the other
        above *= len(below)
    elif len(below) == 1:
        below *= len(above)
    rounds = min(len(above), len(below))
    quotients = [a / b for a, b in zip(above[-rounds:], below[-rounds:], strict=True)]
    if rounds == 1:
        return Ratio(quotients[0], quotients[0], quotients[0])
    low, _, high = statistics.quantiles(quotients, n=4, method="inclusive")
    return Ratio(statistics.median(quotients), low, high)


def interleave(
    contenders: Mapping[str, Contender], *, budget: float = _BUDGET_SECONDS
) -> dict[str, Timing]:
    """Time all contenders in turn.

    Parameters
    ----------
    contenders : mapping of str to Contender
    budget : float
        Seconds to spend, roughly: as many rounds as fit into it, between 3 and 9. A contender
        whose first call alone takes longer is not called again.

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
        samples[name] = [first / contender.units] if first >= _LONG_SECONDS else []
        if first >= max(budget, _LONG_SECONDS):
            continue
        if first < least:  # the first call may have compiled or loaded something
            first = _sample(contender, 1)
        repeated.append(name)
        counts[name] = max(1, min(100_000, round(least / max(first, 1e-7))))
        cost += first * counts[name] + pause
    most = 1 if smoke() else _ROUNDS[1]
    rounds = max(min(_ROUNDS[0], most), min(most, int(budget / max(cost, 1e-9))))
    for turn in range(rounds):
        shift = turn % max(1, len(repeated))
        for name in repeated[shift:] + repeated[:shift]:
            if len(samples[name]) < rounds:
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
        if contender.before is None:
            start = perf_counter()
            for _ in range(count):
                contender.run()
            total = perf_counter() - start
        else:
            for _ in range(count):
                contender.before()
                start = perf_counter()
                contender.run()
                total += perf_counter() - start
    finally:
        if was_enabled:
            gc.enable()
    return total


def _short(value: float) -> str:
    """Three significant digits."""
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"
