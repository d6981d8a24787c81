"""The asv benchmarks, made from the jobs: a class per group, its jobs as the parameter.

Of a job are tracked its time or number as it is, and what can be compared between machines: how far
it is from its targets. Both are better when they are smaller, as asv takes them. NaN is left out.
"""

from __future__ import annotations

import math
from itertools import groupby
from typing import Any

from benchmarks import compare
from benchmarks.jobs import OURS, all_jobs
from benchmarks.timing import Absent, Contender, interleave

_JOBS = {job.name: job for job in all_jobs()}
_BUDGET = 2.0


class _Group:
    params: tuple[str, ...] = ()
    param_names = ("job",)
    timeout = 300.0
    unit = "seconds per unit, or the number"

    def track_ours(self, name: str) -> Any:
        """Seconds per unit, in every round, or the number."""
        ours = _JOBS[name].build()[OURS]
        if isinstance(ours, Contender):
            return {"samples": interleave({OURS: ours}, budget=_BUDGET)[OURS].tolist(), "number": 1}
        return math.nan if isinstance(ours, Absent) else ours

    def track_promised(self, name: str) -> float:
        """Largest ratio of a measured value to its target; at most 1 if every target is met."""
        targets = compare.measure(_JOBS[name], budget=_BUDGET)["targets"]
        quotients = (
            (target["measured"]["median"] / target["limit"]) ** (-1 if target["at_least"] else 1)
            for target in targets
            if target["measured"]
        )
        return max(quotients, default=math.nan)

    track_promised.unit = "measured / target"  # type: ignore[attr-defined]


for _group, _names in groupby(_JOBS, key=lambda name: name.partition("/")[0]):
    _class = _group.title().replace(" ", "")
    globals()[_class] = type(_class, (_Group,), {"params": tuple(_names)})
