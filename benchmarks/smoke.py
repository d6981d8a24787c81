"""Run every job once at its smallest size, in this process; fail if any of them does.

    python -m benchmarks.smoke [TEXT ...]      only those whose name contains one of the texts

After the jobs come the asv classes that are made of them, and the page, which is written from the
results of this run into a folder that is removed.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from time import perf_counter
from typing import Any

from benchmarks import asv_suite, compare, machine, page
from benchmarks.jobs import Job, all_jobs


def tasks(folder: Path) -> Iterator[tuple[str, Callable[[], object]]]:
    """Names and calls of all that there is to run."""
    found: list[dict[str, Any]] = []

    def measure(job: Job) -> None:
        found.append(compare.measure(job))

    def write_page() -> None:
        compare.write({**compare.run([]), "jobs": found}, folder / "smoke.json")
        page.write(folder, folder / "performance.md")

    for job in all_jobs():
        yield job.name, partial(measure, job)
    for name, suite in asv_suite.SUITES.items():
        yield f"asv {name}", partial(_run_suite, suite)
    yield "discovery by asv", _discover
    yield "page", write_page


def _run_suite(suite: Any) -> None:
    """Every method of an asv class once, with its first case."""
    instance, case = suite(), suite.params[0]
    with contextlib.suppress(NotImplementedError):  # as asv does
        instance.setup(case)
        for name in dir(suite):
            if name.startswith(("time_", "track_")):
                getattr(instance, name)(case)


def _discover() -> None:
    """asv, where it is installed, finds every class that is made of the jobs."""
    if find_spec("asv_runner"):
        from asv_runner.discovery import disc_benchmarks

        benchmarks = disc_benchmarks(str(machine.ROOT / "benchmarks"))
        if lost := set(asv_suite.SUITES) - {found.name.split(".")[1] for found in benchmarks}:
            raise LookupError(f"asv finds no {', '.join(lost)}")


def run(wanted: list[str]) -> int:
    """Run what is wanted, report failures on stderr; returns their number, 1 if nothing ran.

    Threads are single: at tiny sizes several would only wait for each other.
    """
    os.environ["SPLINCE_FAST_BENCH"] = "smoke"  # of child processes, too
    os.environ.setdefault("SPLINCE_FAST_NUM_THREADS", "1")
    failed, count, began = [], 0, perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        for name, work in tasks(Path(folder)):
            if any(text in name for text in wanted or [""]):
                count += 1
                try:
                    work()
                except (Exception, SystemExit):
                    failed.append(name)
                    traceback.print_exc()
    for name in failed:
        print(f"FAILED {name}", file=sys.stderr)
    print(f"{count} benchmarks ran in {perf_counter() - began:.0f} s, {len(failed)} failed")
    return len(failed) if count else 1


if __name__ == "__main__":
    sys.exit(1 if run(sys.argv[1:]) else 0)
