"""Every job, once: its data, splince_fast's way, the floor, other packages, and the targets.

A floor is the least that any way must do on the same data: a bare BLAS, LAPACK or copy call. It is
no contender, since it does not do the whole job.
"""

from __future__ import annotations

import atexit
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from benchmarks.peers import Absent
from benchmarks.timing import Contender

OURS = "splince_fast"
FLOOR = "floor"
NUMPY = "NumPy"

Ways = Mapping[str, Contender | Absent]


@dataclass(frozen=True, slots=True)
class Target:
    """What is promised of a job.

    Attributes
    ----------
    against : str
        The contender whose time is compared; empty where a number is.
    limit : float
    at_least : bool
        True: `against` takes at least `limit` times as long as splince_fast. False: splince_fast
        takes at most `limit` times as long, or its number is at most `limit`.
    """

    against: str
    limit: float
    at_least: bool


def faster(peer: str, limit: float) -> Target:
    return Target(peer, limit, True)


def within(floor: str, limit: float) -> Target:
    return Target(floor, limit, False)


@dataclass(frozen=True, slots=True)
class Job:
    """One job.

    Attributes
    ----------
    group, case : str
        Together the name, ``group/case``.
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

    group: str
    case: str
    unit: str
    build: Callable[[], Ways]
    targets: tuple[Target, ...] = ()
    larger_of: tuple[str, ...] = ()
    number: bool = False

    @property
    def name(self) -> str:
        return f"{self.group}/{self.case}"


def all_jobs() -> list[Job]:
    """All of them, in the order of the table."""
    from benchmarks import jobs_accumulate, jobs_erase, jobs_numbers

    parts = (jobs_accumulate, jobs_erase, jobs_numbers)
    return [job for part in parts for group in part.GROUPS for job in group()]


@lru_cache(maxsize=1)
def scratch() -> Path:
    """A folder that is removed at the end of the process."""
    folder = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)
