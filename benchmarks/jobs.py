"""The jobs: data, splince_fast, the floor, peers, and targets.

A floor is a lower bound of the work on the same data: a bare BLAS, LAPACK or copy call. It does not
do the whole job.
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
    """A promised ratio, time or number of a job."""

    against: str  # the contender whose time is compared; empty for a limit of ours itself
    limit: float
    at_least: bool


faster = partial(Target, at_least=True)  # a peer takes at least `limit` times as long as ours
within = partial(Target, at_least=False)  # ours takes at most `limit` times as long as a floor
below = partial(within, "")  # the time or number of ours itself is at most `limit`


@dataclass(frozen=True, slots=True)
class Job:
    """A job: its name, its contenders or numbers, and its targets."""

    name: str  # group/case
    unit: str  # what times are for ("row", "call"), or what a number counts
    build: Callable[
        [], Mapping[str, Any]
    ]  # gives Contenders to be timed, or Numbers that it measured
    targets: tuple[Target, ...] = ()
    larger_of: tuple[str, ...] = ()  # contenders of which the slower, in each round, is the floor


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
    """Define a job, or one for every combination of values.

    The function that is decorated takes the values of the axes by name, and builds the job; a
    target may be a function of them, and the name has them in braces. Without one of the modules
    the job is left out. The rest is as for :class:`Job`.
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
    """All of them, in the order of the table; those that leave processes behind come last."""
    for part in _PARTS:
        import_module(f"benchmarks.jobs_{part}")
    return list(_JOBS.values())
