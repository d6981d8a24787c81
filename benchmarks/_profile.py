"""Time by stage: functions are replaced by timed ones for a while, and put back."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from threading import get_ident
from time import perf_counter
from typing import Any, NamedTuple

from benchmarks._timing import Contender, interleave

REST = "rest (Python)"


class Stage(NamedTuple):
    """A function by the place where its callers look it up; several may share a label."""

    label: str
    owner: Any
    name: str


class Stopwatch:
    """Seconds by label on the thread that made it; those of a nested stage count there alone.

    Calls on other threads run untimed: the thread that waits for them is the one to watch.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._nested: list[float] = []  # of the calls in progress, what their stages have taken
        self._thread = get_ident()

    def timed(self, label: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, with its time added to that of the label."""

        def call(*arguments: Any, **options: Any) -> Any:
            if get_ident() != self._thread:
                return function(*arguments, **options)
            self._nested.append(0.0)
            start = perf_counter()
            try:
                return function(*arguments, **options)
            finally:
                whole = perf_counter() - start
                own = whole - self._nested.pop()
                self.seconds[label] = self.seconds.get(label, 0.0) + own
                if self._nested:
                    self._nested[-1] += whole

        return call


@contextmanager
def watched(stages: Sequence[Stage]) -> Iterator[Stopwatch]:
    """Time the stages while the block runs; whatever happens, everything is put back."""
    watch = Stopwatch()
    with ExitStack() as undo:
        for label, owner, name in stages:
            original = getattr(owner, name)
            undo.callback(setattr, owner, name, original)
            setattr(owner, name, watch.timed(label, original))
        yield watch


@dataclass(frozen=True, slots=True)
class Profile:
    """Where the time of one job goes.

    Attributes
    ----------
    group, what : str
    stages : list of (str, float)
        Median seconds of every stage, and last of all the rest.
    untimed : float
        Median seconds of the whole job without timers.
    floor : str
    floor_seconds : float
        What it is held against, on the same data: no part of the whole.
    """

    group: str
    what: str
    stages: list[tuple[str, float]]
    untimed: float
    floor: str
    floor_seconds: float

    @property
    def seconds(self) -> float:
        """The whole: the sum of its stages."""
        return sum(seconds for _, seconds in self.stages)

    @property
    def shares(self) -> dict[str, float]:
        """Part of the whole by stage."""
        return {label: seconds / self.seconds for label, seconds in self.stages}


def profile(
    group: str,
    what: str,
    job: Contender,
    stages: Sequence[Stage],
    floor: str,
    bare: Contender,
) -> Profile:
    """Time a job beside its floor without timers, and then by stage."""
    plain = interleave(
        {"job": Contender(job.run), "floor": Contender(bare.run, before=bare.before)}
    )
    calls: list[dict[str, float]] = []
    with watched(stages) as watch:
        whole = watch.timed(REST, job.run)

        def run() -> None:
            watch.seconds = {}
            whole()
            calls.append(watch.seconds)

        interleave({"job": Contender(run)})
    medians = [
        (label, statistics.median(call.get(label, 0.0) for call in calls))
        for label in [*dict.fromkeys(stage.label for stage in stages), REST]
    ]
    untimed, alone = plain["job"].median, plain["floor"].median
    return Profile(group, what, medians, untimed, floor, alone)
