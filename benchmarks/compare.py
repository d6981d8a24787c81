"""Measure the jobs, compare them with their targets, print a table, and write the results as JSON.

    python -m benchmarks.compare [TEXT ...] [--json [PATH]] [--budget SECONDS]

With TEXT, only jobs whose name contains one of the texts are measured. ``--json`` without a path
writes ``benchmarks/results/PROCESSOR.json``, which `benchmarks.page` reads. With TEXT, results of
other jobs in this file are kept if they were measured at the same commit.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import machine, timing
from benchmarks.jobs import FLOOR, OURS, Job, Target, all_jobs
from benchmarks.timing import Absent, Contender, Seconds

RESULTS = machine.ROOT / "benchmarks" / "results"


def select_jobs(texts: list[str]) -> list[Job]:
    """Return the jobs whose name contains one of the texts, all jobs if `texts` is empty.

    Raises SystemExit if no name matches.
    """
    jobs = [job for job in all_jobs() if any(text in job.name for text in texts or [""])]
    return jobs or sys.exit(f"no job name contains {' or '.join(texts)}")


def measure(job: Job, budget: float = 8.0) -> dict[str, Any]:
    """Measure one job; return its results as plain data.

    ``values`` holds the seconds per unit of each contender, or its number. ``ratios`` holds the
    time of each other contender, divided by the time of splince_fast in the same round. ``targets``
    holds the measured ratios and whether each target is met (None if undecided). ``left_out`` holds
    the reasons for absent contenders. Raises ArithmeticError if a value is not finite.
    """
    entries = job.build()
    left_out = {name: entry.reason for name, entry in entries.items() if isinstance(entry, Absent)}
    numbers = {
        name: np.array([entry]) for name, entry in entries.items() if isinstance(entry, float)
    }
    contenders = {name: entry for name, entry in entries.items() if isinstance(entry, Contender)}
    timings = numbers or timing.interleave(contenders, budget=budget)
    for name, values in timings.items():
        if not np.isfinite(values).all():
            raise ArithmeticError(f"{job.name}: {name} gives {values}")
    if job.larger_of:
        timings[FLOOR] = np.maximum(*(timings[name] for name in job.larger_of))
    others = [] if numbers else [name for name in timings if name != OURS]
    return {
        "name": job.name,
        "unit": job.unit,
        "number": bool(numbers),
        "values": {name: timing.quartiles(seconds) for name, seconds in timings.items()},
        "ratios": {name: timing.ratio(timings[name], timings[OURS]) for name in others},
        "targets": [_measured_target(target, timings) for target in job.targets],
        "left_out": left_out,
    }


def _measured_target(target: Target, timings: dict[str, Seconds]) -> dict[str, Any]:
    """Return a target with its measured ratio, and whether it is met.

    Both are None if a contender was not measured; in smoke mode, the second is None.
    """
    ours, reference = timings.get(OURS), (timings | {"": np.ones(1)}).get(target.against)
    measured = met = None
    if ours is not None and reference is not None:
        measured = (
            timing.ratio(reference, ours) if target.at_least else timing.ratio(ours, reference)
        )
        if not timing.smoke():
            middle = measured["median"]
            met = middle >= target.limit if target.at_least else middle <= target.limit
    return {**asdict(target), "measured": measured, "met": met}


def run(jobs: list[Job], path: Path | None, budget: float = 8.0, *, subset: bool = False) -> None:
    """Measure the jobs one by one, print a table, and write the results to `path` after each job.

    If `subset` is True, `jobs` is a subset of all jobs. Results of other jobs in `path` are then
    kept if they were measured at the same commit.
    """
    began, load = machine.now()
    results: dict[str, Any] = {
        "command": machine.command(),
        **machine.commit(),
        "began": began,
        "smoke": timing.smoke(),
        "load_average": {"before": load},
        "machine": machine.describe(),
        "jobs": [],
    }
    if subset and path and path.exists():
        earlier = json.loads(path.read_text("utf-8"))
        if earlier["commit"] == results["commit"]:
            results = {**earlier, "command": f"{earlier['command']}; {results['command']}"}
    entries = {entry["name"]: entry for entry in results["jobs"]}
    print(table(["job", OURS, f"others (times: relative to {OURS})", "targets"]))
    for job in jobs:
        entries[job.name] = measure(job, budget)
        print("|", " | ".join(table_row(entries[job.name])), "|", flush=True)
        results["jobs"] = list(entries.values())
        results["ended"], results["load_average"]["after"] = machine.now()
        if path:
            path.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
        gc.collect()  # free the data of this job before the next job makes its data


def table_row(entry: dict[str, Any]) -> list[str]:
    """Return a row of the table: job, value of splince_fast, ratios of the others, targets."""
    number, unit, ours = entry["number"], entry["unit"], entry["values"].get(OURS)
    kind, factor, prefix = ("values", 1.0, "") if number else ("ratios", 1e6, "us/")
    others = {name: interval(values) for name, values in entry[kind].items() if name != OURS}
    others |= dict.fromkeys(entry["left_out"], "-")
    return [
        entry["name"],
        f"{factor * ours['median']:,.4g} {prefix}{unit}" if ours else "-",
        ", ".join(f"{name} {text}" for name, text in others.items()),
        "; ".join(map(verdict, entry["targets"])),
    ]


def verdict(target: dict[str, Any]) -> str:
    """Return a text with a target, the measured value, and whether the target is met."""
    word = {True: "met", False: "MISSED", None: "undecided"}[target["met"]]
    measured = "-" if target["measured"] is None else f"{target['measured']['median']:.3g}"
    return f"{target['against']} {measured} {limit(target)} {word}".strip()


def limit(target: dict[str, Any]) -> str:
    """Return the limit of a target as text, with >= or <= in front."""
    return f"{'>=' if target['at_least'] else '<='} {target['limit']:g}"


def interval(values: dict[str, float]) -> str:
    """Format a median and its quartiles with three digits."""
    median, low, high = (f"{values[key]:.3g}" for key in ("median", "low", "high"))
    return median if low == high else f"{median} [{low}, {high}]"


def table(header: list[str], rows: Iterable[list[str]] = ()) -> str:
    """Return a Markdown table."""
    return "\n".join(f"| {' | '.join(row)} |" for row in [header, ["---"] * len(header), *rows])


def main() -> None:
    """Run the command line; exit with status 1 if no job name contains one of the texts."""
    parser = argparse.ArgumentParser(
        "benchmarks.compare", None, __doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("text", nargs="*", help="part of the names to measure")
    default = RESULTS / f"{machine.short_name()}.json"
    parser.add_argument("--json", nargs="?", type=Path, const=default, help="write the results")
    parser.add_argument("--budget", type=float, default=8.0, help="seconds per job, roughly")
    args = parser.parse_args()
    run(select_jobs(args.text), args.json, args.budget, subset=bool(args.text))


if __name__ == "__main__":
    main()
