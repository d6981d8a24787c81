"""The asv benchmarks, made from the jobs: a class per group, its cases as the parameter.

Times are tracked as they are, and beside them what can be compared between machines: by how much
the targets of a job are kept.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import groupby
from typing import Any, ClassVar

from benchmarks import compare, machine
from benchmarks.jobs import OURS, all_jobs
from benchmarks.timing import Contender

_JOBS = {job.name: job for job in all_jobs()}


class _Suite:
    """Settings of every benchmark, and the preparation of one case."""

    group: ClassVar[str]
    params: ClassVar[list[str]]
    param_names: ClassVar[list[str]] = ["case"]
    timeout: ClassVar[float] = 300.0
    rounds: ClassVar[int] = 1
    repeat: ClassVar[tuple[int, int, float]] = (3, 9, 2.0)
    warmup_time: ClassVar[float] = 0.05

    def setup(self, case: str) -> None:
        machine.equal_threads()
        self.job = _JOBS[f"{self.group}/{case}"]


class _Timed(_Suite):
    def setup(self, case: str) -> None:
        super().setup(case)
        way = self.job.build()[OURS]
        if not isinstance(way, Contender):
            raise NotImplementedError(way.reason)  # asv skips the case
        self.ours: Callable[[], Any] = way.run
        self.ours()

    def time_ours(self, case: str) -> None:
        self.ours()


class _Promised(_Suite):
    def track_worst_margin(self, case: str) -> float:
        """Smallest quotient of what is measured and what is promised: 1 or more keeps it."""
        margins = []
        for target in compare.measure(self.job, budget=2.0)["targets"]:
            if target["measured"]:
                margin = target["measured"]["median"] / target["limit"]
                margins.append(margin if target["at_least"] else 1 / max(margin, 1e-9))
        return min(margins, default=math.nan)

    track_worst_margin.unit = "measured / promised"  # type: ignore[attr-defined]


SUITES: dict[str, type[_Suite]] = {}
for _group, _found in groupby(_JOBS.values(), key=lambda job: job.group):
    _jobs = list(_found)
    for _base, _cases in (
        (_Timed, [job.case for job in _jobs if not job.number]),
        (_Promised, [job.case for job in _jobs if job.targets]),
    ):
        if _cases:
            _name = _group.title().replace(" ", "") + _base.__name__.strip("_")
            _members = {"__module__": __name__, "group": _group, "params": _cases}
            SUITES[_name] = type(_name, (_base,), _members)
globals().update(SUITES)
