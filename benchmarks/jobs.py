"""Definition of jobs: data, contenders and targets.

The contenders of a job are splince_fast, other packages (peers) and a floor. The floor does a part
of the work on the same data by a bare BLAS, LAPACK or copy call. Its time is therefore a lower
bound for the job.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from itertools import product
from typing import Any

from benchmarks.peers import needs
from benchmarks.timing import Absent, Contender

OURS = "splince_fast"
FLOOR = "floor"
NUMPY = "NumPy"
SERIAL = "one process"
_PARTS = ("accumulate", "erase", "numbers", "first_use", "growth", "live", "evaluation", "cluster")

Contenders = Mapping[str, Contender | Absent]
Numbers = Mapping[str, float | Absent]


@dataclass(frozen=True, slots=True)
class Target:
    """Target of a job: a limit for a ratio of times, for a time or for a number."""

    against: str  # contender to compare with; "" if the limit is for splince_fast alone
    limit: float
    at_least: bool


faster = partial(Target, at_least=True)  # time of `against` >= limit * time of splince_fast
within = partial(Target, at_least=False)  # time of splince_fast <= limit * time of `against`
below = partial(within, "")  # time or number of splince_fast <= limit


@dataclass(frozen=True, slots=True)
class Job:
    """A job: its name, the function that returns its contenders or numbers, and its targets."""

    name: str  # group/case
    unit: str  # unit of work of a time ("row", "call"), or unit of the number
    build: Callable[[], Mapping[str, Any]]  # returns Contenders to time, or measured Numbers
    targets: tuple[Target, ...] = ()
    larger_of: tuple[str, ...] = ()  # two contenders; the slower one in a round is the floor


_JOBS: dict[str, Job] = {}
Build = Callable[..., Mapping[str, Any]]


def job(
    name: str,
    unit: str,
    *targets: Target | Callable[..., Target],
    larger_of: tuple[str, ...] = (),
    modules: tuple[str, ...] = (),
    **axes: Iterable[Any],
) -> Callable[[Build], Build]:
    """Define a job for every combination of values of `axes`, by decorating a build function.

    An axis is a name with its values. The build function, and each target that is a function,
    receives one value of each axis as keyword argument; ``{axis}`` in `name` is replaced by the
    value. The job is left out if one of `modules` is not installed. The other arguments are as for
    :class:`Job`.
    """

    def define(build: Build) -> Build:
        make = needs(*modules)(build) if modules else build

        def built(**values: Any) -> Mapping[str, Any]:
            contenders = make(**values)
            return {OURS: contenders} if isinstance(contenders, Absent) else contenders

        for combination in product(*axes.values()):
            values = dict(zip(axes, combination, strict=True))
            job_targets = tuple(t if isinstance(t, Target) else t(**values) for t in targets)
            job_name = name.format(**values)
            _JOBS[job_name] = Job(job_name, unit, partial(built, **values), job_targets, larger_of)
        return build

    return define


def all_jobs() -> list[Job]:
    """Return all jobs in the order of the table.

    Jobs whose child processes stay alive, those of the cluster, are last.
    """
    for part in _PARTS:
        import_module(f"benchmarks.jobs_{part}")
    return list(_JOBS.values())
