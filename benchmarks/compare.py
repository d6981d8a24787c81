"""Measure the jobs, judge the targets, print a table, and write the results as JSON.

    python -m benchmarks.compare [TEXT ...] [--json [PATH]] [--budget SECONDS]

Without TEXT all jobs are measured, else those whose name contains one of the texts. ``--json``
without a path writes ``benchmarks/results/PROCESSOR.json``, from which `benchmarks.page` is made;
with TEXT it replaces these jobs there, if the others are of the same commit.
SciPy's BLAS is used, as by the floors, unless SPLINCE_FAST_BLAS asks for another. What the extra
``blas`` brings shows with ``SPLINCE_FAST_BLAS=auto OPENBLAS_CORETYPE=Haswell``, where the processor
has AVX-512: the floors then run narrower kernels than splince_fast.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
from collections.abc import Iterable
from dataclasses import asdict
from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import machine, timing
from benchmarks.jobs import FLOOR, OURS, Job, Target, all_jobs
from benchmarks.timing import Absent, Seconds

RESULTS = machine.ROOT / "benchmarks" / "results"


def measure(job: Job, budget: float = 8.0) -> dict[str, Any]:
    """One job as plain data; an ArithmeticError where a number is not finite.

    ``values`` are seconds per unit, or numbers, of each contender; ``ratios`` the time of each
    other contender over ours, round by round; ``targets`` have what was measured and whether it is
    met (None where nothing is decided), ``left_out`` the reasons.
    """
    ways = job.build()
    present = {name: way for name, way in ways.items() if not isinstance(way, Absent)}
    if job.number:
        timings = {name: np.array([value]) for name, value in present.items()}
    else:
        timings = timing.interleave(present, budget=budget)
    for name, values in timings.items():
        if not np.isfinite(values).all():
            raise ArithmeticError(f"{job.name}: {name} gives {values}")
    if job.larger_of:
        timings[FLOOR] = reduce(np.maximum, (timings[name] for name in job.larger_of))
    timed = timings if OURS in timings and not job.number else {}
    return {
        "name": job.name,
        "unit": job.unit,
        "number": job.number,
        "values": {name: timing.spread(seconds) for name, seconds in timings.items()},
        "ratios": {k: timing.ratio(v, timings[OURS]) for k, v in timed.items() if k != OURS},
        "targets": [_judged(target, timings) for target in job.targets],
        "left_out": {name: way.reason for name, way in ways.items() if isinstance(way, Absent)},
    }


def _judged(target: Target, timings: dict[str, Seconds]) -> dict[str, Any]:
    """What was measured, and whether it is what was promised."""
    ours, other = timings.get(OURS), (timings | {"": np.ones(1)}).get(target.against)
    found = met = None
    if ours is not None and other is not None:
        found = timing.ratio(other, ours) if target.at_least else timing.ratio(ours, other)
        if not timing.smoke():
            middle = found["median"]
            met = middle >= target.limit if target.at_least else middle <= target.limit
    return {**asdict(target), "measured": found, "met": met}


def run(
    jobs: Iterable[Job], budget: float = 8.0, path: Path | None = None, *, some: bool = False
) -> dict[str, Any]:
    """Measure jobs one after the other; what is known is written to `path` after each.

    If these are `some` of all, results of the others stay there, where they are of this commit.
    """
    machine.equal_threads()
    now, load = machine.now()
    results: dict[str, Any] = {
        "command": machine.command(),
        **machine.commit(),
        "began": now,
        "smoke": timing.smoke(),
        "load_average": {"before": load},
        "machine": machine.describe(),
        "jobs": [],
    }
    earlier = json.loads(path.read_text("utf-8")) if some and path and path.exists() else None
    for job in jobs:
        found = measure(job, budget)
        print("|", " | ".join(cells(found)), "|", flush=True)
        results["jobs"].append(found)
        results["ended"], results["load_average"]["after"] = machine.now()
        if path is not None:
            write(again(earlier, results), path)
        gc.collect()  # the data of this job go before those of the next come
    return results


def again(earlier: dict[str, Any] | None, results: dict[str, Any]) -> dict[str, Any]:
    """Earlier results with those of some jobs in their place; these alone, of another commit."""
    if earlier is None or earlier["commit"] != results["commit"]:
        return results
    jobs = {found["name"]: found for found in (*earlier["jobs"], *results["jobs"])}
    command = f"{earlier['command']}; {results['command']}"
    return {**earlier, "command": command, "jobs": list(jobs.values())}


def write(results: dict[str, Any], path: Path) -> None:
    """Store results, numbers to six digits."""
    rounded = json.loads(json.dumps(results), parse_float=lambda text: float(f"{float(text):.6g}"))
    path.write_text(json.dumps(rounded, indent=1) + "\n", encoding="utf-8")


def cells(entry: dict[str, Any]) -> list[str]:
    """A row of the table: name, ours, the others, the targets."""
    number, unit, ours = entry["number"], entry["unit"], entry["values"].get(OURS)
    kind, factor, prefix = ("values", 1.0, "") if number else ("ratios", 1e6, "us/")
    others = {name: interval(found) for name, found in entry[kind].items() if name != OURS}
    others |= dict.fromkeys(entry["left_out"], "-")
    return [
        entry["name"],
        f"{factor * ours['median']:,.4g} {prefix}{unit}" if ours else "-",
        ", ".join(f"{name} {text}" for name, text in others.items()),
        "; ".join(map(verdict, entry["targets"])),
    ]


def verdict(target: dict[str, Any]) -> str:
    """A target, what was measured, and whether it is met."""
    word = {True: "met", False: "MISSED", None: "undecided"}[target["met"]]
    measured = "-" if target["measured"] is None else f"{target['measured']['median']:.3g}"
    return f"{target['against']} {measured} {limit(target)} {word}".strip()


def limit(target: dict[str, Any]) -> str:
    """What is promised."""
    return f"{'>=' if target['at_least'] else '<='} {target['limit']:g}"


def interval(found: dict[str, float]) -> str:
    """Median and quartiles, three digits."""
    median, low, high = (f"{found[key]:.3g}" for key in ("median", "low", "high"))
    return median if low == high else f"{median} [{low}, {high}]"


def table(header: list[str], rows: Iterable[list[str]]) -> str:
    """In Markdown."""
    return "\n".join(f"| {' | '.join(row)} |" for row in [header, ["---"] * len(header), *rows])


def main() -> None:
    """Measure, print, write; exits with 1 if no job has such a name."""
    parser = argparse.ArgumentParser(
        "benchmarks.compare", None, __doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("text", nargs="*", help="part of the names to measure")
    default = RESULTS / f"{machine.short_name()}.json"
    parser.add_argument("--json", nargs="?", type=Path, const=default, help="write the results")
    parser.add_argument("--budget", type=float, default=8.0, help="seconds per job, roughly")
    given = parser.parse_args()
    os.environ.setdefault("SPLINCE_FAST_BLAS", "scipy")  # before the first product, which decides
    jobs = [job for job in all_jobs() if any(text in job.name for text in given.text or [""])]
    if not jobs:
        sys.exit(f"no job has a name with {' or '.join(given.text)}")
    print(table(["job", OURS, "others: time over ours", "targets"], []))
    run(jobs, given.budget, given.json, some=bool(given.text))


if __name__ == "__main__":
    main()
