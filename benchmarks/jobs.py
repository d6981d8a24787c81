"""What a job is, and the list of all: data, splince_fast's way, the floor, peers, and targets.

A floor is the least that any way must do on the same data: a bare BLAS, LAPACK or copy call. It is
no contender, since it does not do the whole job.
"""

from __future__ import annotations

import atexit
import shutil
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from importlib import import_module
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.peers import absent
from benchmarks.timing import Absent, Contender

OURS = "splince_fast"
FLOOR = "floor"
NUMPY = "NumPy"
SERIAL = "one process"
_PARTS = ("accumulate", "erase", "numbers", "growth", "live", "evaluation", "cluster")

Ways = Mapping[str, Contender | Absent]


@dataclass(frozen=True, slots=True)
class Target:
    """What is promised of a job.

    Attributes
    ----------
    against : str
        The contender whose time is compared; empty where ours itself is, a time or a number.
    limit : float
    at_least : bool
        True: `against` takes at least `limit` times as long as splince_fast. False: splince_fast
        takes at most `limit` times as long, or its own value is at most `limit`.
    """

    against: str
    limit: float
    at_least: bool


def faster(peer: str, limit: float) -> Target:
    return Target(peer, limit, True)


def within(floor: str, limit: float) -> Target:
    return Target(floor, limit, False)


def below(limit: float) -> Target:
    return Target("", limit, False)


@dataclass(frozen=True, slots=True)
class Job:
    """One job.

    Attributes
    ----------
    name : str
        ``group/case``.
    unit : str
        What times are for ("row", "call"), or what a number counts.
    build : callable
        Prepares the data, and returns the contenders.
    targets : tuple of Target
    larger_of : tuple of str
        Contenders of which the slower, in each round, is the floor.
    number : bool
        Contenders return a number that is judged itself, not timed; smaller is better.
    """

    name: str
    unit: str
    build: Callable[[], Ways]
    targets: tuple[Target, ...] = ()
    larger_of: tuple[str, ...] = ()
    number: bool = False

    @property
    def group(self) -> str:
        return self.name.partition("/")[0]

    @property
    def case(self) -> str:
        return self.name.partition("/")[2]


_JOBS: dict[str, Job] = {}


def job(
    name: str,
    unit: str,
    *targets: Target | Callable[..., Target],
    larger_of: tuple[str, ...] = (),
    number: bool = False,
    modules: tuple[str, ...] = (),
    **axes: Iterable[Any],
) -> Callable[[Callable[..., Ways]], Callable[..., Ways]]:
    """Define a job, or one for every combination of values.

    Parameters
    ----------
    name : str
        With the names of axes in braces.
    unit : str
    *targets : Target, or function of the axes that gives one
    larger_of, number
        As for :class:`Job`.
    modules : tuple of str
        Without them the job is left out.
    **axes : values
        Passed by name to the function that is decorated, which builds the contenders.
    """

    def define(build: Callable[..., Ways]) -> Callable[..., Ways]:
        def built(**values: Any) -> Ways:
            missing = absent(*modules)
            return {OURS: missing} if missing else build(**values)

        for chosen in product(*axes.values()):
            values = dict(zip(axes, chosen, strict=True))
            wanted = tuple(t if isinstance(t, Target) else t(**values) for t in targets)
            named = name.format(**values)
            _JOBS[named] = Job(named, unit, partial(built, **values), wanted, larger_of, number)
        return build

    return define


def all_jobs() -> list[Job]:
    """All of them, in the order of the table; those that leave processes behind come last."""
    for part in _PARTS:
        import_module(f"benchmarks.jobs_{part}")
    return list(_JOBS.values())


@lru_cache(maxsize=1)
def scratch() -> Path:
    """A folder that is removed at the end of the process."""
    folder = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)
