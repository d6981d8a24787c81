"""Run every job once at its smallest size, in this process; fail if any of them does.

    python -m benchmarks.smoke [TEXT ...]      only those whose name contains one of the texts

After the jobs come the asv classes that are made of them, and the page, which is written from the
results of this run into a folder that is removed.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from time import perf_counter
from typing import Any

from benchmarks import compare, machine, page
from benchmarks.jobs import Job, all_jobs
from benchmarks.timing import use_smoke


def tasks(folder: Path) -> Iterator[tuple[str, Callable[[], object]]]:
    """Names and calls of all that there is to run."""
    from benchmarks import asv_suite

    found: list[dict[str, Any]] = []

    def measure(job: Job) -> None:
        found.append(compare.measure(job))

    for job in all_jobs():
        yield job.name, partial(measure, job)
    for name, suite in asv_suite.SUITES.items():
        yield f"asv {name}", partial(_run_suite, suite)
    yield "discovery by asv", partial(_discover, set(asv_suite.SUITES))

    def write_page() -> None:
        compare.write({**compare.run([]), "jobs": found}, folder / "smoke.json")
        page.main(["--results", str(folder), "--out", str(folder / "performance.md")])

    yield "page", write_page


def _run_suite(suite: Any) -> None:
    """Every method of an asv class once, with its first case."""
    instance, case = suite(), suite.params[0]
    with contextlib.suppress(NotImplementedError):  # as asv does
        instance.setup(case)
        for name in dir(suite):
            if name.startswith(("time_", "track_")):
                getattr(instance, name)(case)


def _discover(suites: set[str]) -> None:
    """asv finds every class that is made of the jobs."""
    if find_spec("asv_runner"):
        from asv_runner.discovery import disc_benchmarks

        found = {
            benchmark.name.split(".")[1]
            for benchmark in disc_benchmarks(str(machine.ROOT / "benchmarks"))
        }
        if suites - found:
            raise LookupError(f"asv finds no {', '.join(suites - found)}")


def run(wanted: list[str]) -> int:
    """Run what is wanted, report failures on stderr; returns their number."""
    use_smoke()
    failed, count, began = [], 0, perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        for name, work in tasks(Path(folder)):
            if not compare.wanted(name, wanted):
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
