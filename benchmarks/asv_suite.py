"""asv benchmarks made from the jobs: one class per group of jobs, with the job as parameter.

Two values of each job are tracked: the result of splince_fast (a time or a number), and the largest
ratio of a measured value to its target. Only the ratio is comparable between machines. Smaller
values are better. NaN means that a value was not measured.
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
        """Return the result of splince_fast: seconds per unit in every round, or a number."""
        ours = _JOBS[name].build()[OURS]
        if isinstance(ours, Contender):
            return {"samples": interleave({OURS: ours}, budget=_BUDGET)[OURS].tolist(), "number": 1}
        return math.nan if isinstance(ours, Absent) else ours

    def track_target_ratio(self, name: str) -> float:
        """Return the largest measured / limit over the targets (limit / measured for lower limits).

        The ratio is at most 1 if all targets are met.
        """
        targets = compare.measure(_JOBS[name], budget=_BUDGET)["targets"]
        ratios = (
            (target["measured"]["median"] / target["limit"]) ** (-1 if target["at_least"] else 1)
            for target in targets
            if target["measured"]
        )
        return max(ratios, default=math.nan)

    track_target_ratio.unit = "measured / target"  # type: ignore[attr-defined]


for _group, _names in groupby(_JOBS, key=lambda name: name.partition("/")[0]):
    _class = _group.title().replace(" ", "")
    globals()[_class] = type(_class, (_Group,), {"params": tuple(_names)})
