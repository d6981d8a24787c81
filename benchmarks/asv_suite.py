"""The asv benchmarks, made from the jobs: two classes per group, its jobs as the parameter.

Times are tracked as they are, and beside them what can be compared between machines: by how much
the targets of a job are kept.
"""

from __future__ import annotations

import math
from itertools import groupby

from benchmarks import compare, machine
from benchmarks.jobs import OURS, all_jobs
from benchmarks.timing import Absent

_JOBS = {job.name: job for job in all_jobs()}


class _Suite:
    """Settings of every benchmark, and the job of one case."""

    params: tuple[str, ...] = ()
    param_names = ("job",)
    timeout = 300.0
    rounds = 1
    repeat = (3, 9, 2.0)
    warmup_time = 0.05

    def setup(self, name: str) -> None:
        machine.equal_threads()
        self.job = _JOBS[name]


class _Timed(_Suite):
    def setup(self, name: str) -> None:
        super().setup(name)
        self.ours = self.job.build()[OURS]
        if isinstance(self.ours, Absent):
            raise NotImplementedError(self.ours.reason)  # asv skips the case
        self.ours.run()

    def time_ours(self, name: str) -> None:
        self.ours.run()


class _Promised(_Suite):
    def track_worst_margin(self, name: str) -> float:
        """Smallest quotient of what is measured and what is promised: 1 or more keeps it."""
        margins = []
        for target in compare.measure(self.job, budget=2.0)["targets"]:
            if target["measured"]:
                margin = target["measured"]["median"] / target["limit"]
                margins.append(margin if target["at_least"] else 1 / max(margin, 1e-9))
        return min(margins, default=math.nan)

    track_worst_margin.unit = "measured / promised"  # type: ignore[attr-defined]


SUITES: dict[str, type[_Suite]] = {}
for _base, _chosen in (
    (_Timed, [job for job in _JOBS.values() if not job.number]),
    (_Promised, [job for job in _JOBS.values() if job.targets]),
):
    for _group, _found in groupby(_chosen, key=lambda job: job.name.partition("/")[0]):
        _name = _group.title().replace(" ", "") + _base.__name__.strip("_")
        _members = {"__module__": __name__, "params": tuple(job.name for job in _found)}
        SUITES[_name] = type(_name, (_base,), _members)
globals().update(SUITES)
