"""Run every job once at its smallest size, in this process; fail if any of them does.

    python -m benchmarks.smoke [TEXT ...]      only those whose name contains one of the texts

After the jobs come the asv classes that are made of them, and the page, which is written from the
results of this run into a folder that is removed.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import math
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from time import perf_counter
from typing import Any

from benchmarks import compare, page
from benchmarks.jobs import Job, all_jobs
from benchmarks.timing import use_smoke


def tasks(folder: Path) -> Iterator[tuple[str, Callable[[], object]]]:
    """Names and calls of all that there is to run."""
    from benchmarks import asv_suite

    found: list[dict[str, Any]] = []
    for job in all_jobs():
        yield job.name, partial(_measure, job, found)
    for suite in vars(asv_suite).values():
        if isinstance(suite, type) and hasattr(suite, "params"):
            yield f"asv {suite.__name__}", partial(_run_suite, suite)
    yield "discovery by asv", _discover

    def write_page() -> None:
        compare.write({**compare.run([]), "jobs": found}, folder / "smoke.json")
        page.main(["--results", str(folder), "--out", str(folder / "performance.md")])

    yield "page", write_page


def _measure(job: Job, found: list[dict[str, Any]]) -> None:
    """Measure a job; every number must be finite, and everything left out explained."""
    entry = compare.measure(job)
    found.append(entry)
    for name, value in entry["values"].items():
        if not math.isfinite(value["median"]):
            raise ValueError(f"{job.name}: {name} gives {value['median']}, not a finite number")
    if not entry["values"] and not entry["left_out"]:
        raise ValueError(f"{job.name} has no contenders")


def _run_suite(suite: Any) -> None:
    """Every method of an asv class once, with its first case."""
    instance, case = suite(), suite.params[0]
    with contextlib.suppress(NotImplementedError):  # as asv does
        instance.setup(case)
        for name in dir(suite):
            if name.startswith(("time_", "track_")):
                getattr(instance, name)(case)


def _discover() -> None:
    """asv finds a benchmark for every group of jobs."""
    if not find_spec("asv_runner"):
        return
    from asv_runner.discovery import disc_benchmarks

    found = {benchmark.name for benchmark in disc_benchmarks(str(Path(__file__).parent))}
    for job in all_jobs():
        group = job.group.title().replace(" ", "")
        if (not job.number or job.targets) and not any(f".{group}" in name for name in found):
            raise LookupError(f"asv finds no benchmark of {job.name}")


def run(wanted: list[str]) -> int:
    """Run what is wanted, report failures on stderr; returns their number."""
    use_smoke()
    failed, count, began = [], 0, perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        for name, work in tasks(Path(folder)):
            if wanted and not any(text in name for text in wanted):
                continue
            count += 1
            said = io.StringIO()
            try:
                with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
                    work()
            except (Exception, SystemExit):
                failed.append(name)
                print(f"{name} failed\n{said.getvalue()}", file=sys.stderr)
                traceback.print_exc()
    for name in failed:
        print(f"FAILED {name}", file=sys.stderr)
    print(f"{count} benchmarks ran in {perf_counter() - began:.0f} s, {len(failed)} failed")
    if not count:
        print(f"no benchmark has a name with {' or '.join(wanted)}", file=sys.stderr)
    return len(failed) if count else 1


def main(arguments: list[str] | None = None) -> None:
    """Run and exit with 1 if anything failed."""
    parser = argparse.ArgumentParser(prog="benchmarks.smoke", description=__doc__)
    parser.add_argument("text", nargs="*", help="part of the names to run; everything without")
    sys.exit(1 if run(parser.parse_args(arguments).text) else 0)


if __name__ == "__main__":
    main()
