"""The same jobs done by the packages that a user would pick instead: time, memory, accuracy.

Contenders take turns on the same arrays in one run, with as many threads each. Numbers in the
first table are how many times longer than splince_fast each takes (median over rounds and
quartiles): above 1 splince_fast is faster. What each tool does, and what it leaves out, is said in
the docstrings of `benchmarks._peers`.

    python -m benchmarks.peers [--smoke] [--json PATH] [--figure PATH]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from benchmarks import _machine, _peers, _tables
from benchmarks._peers import OURS
from benchmarks._rows import Fact, Job
from benchmarks._sizes import smoke, use_smoke

COLUMNS = (
    "Floor: a bare SYRK without labels where covariances are accumulated, a bare copy where an "
    "eraser is applied. NumPy: numpy.cov; the explicit formula of the paper; "
    "X - ((X - mean) @ right) @ left.T. Other form: fitting or solving SPLINCE beside LEACE, or "
    "returning a new array."
)


def measure() -> dict[str, Any]:
    """Run everything, print the tables; returns machine, times and facts."""
    from benchmarks import _peers_facts, _peers_times

    _machine.equal_threads()
    jobs: list[Job] = []
    for job in _peers_times.jobs():
        shown = ", ".join(f"{name} {value.median:.2g}" for name, value in job.others.items())
        print(f"  {job.group}, {job.what}: {shown}", file=sys.stderr, flush=True)
        jobs.append(job)
    facts: list[Fact] = []
    for fact in _peers_facts.facts():
        shown = ", ".join(f"{name} {value:.2g}" for name, value in fact.values.items())
        print(f"  {fact.group}, {fact.what}: {shown}", file=sys.stderr, flush=True)
        facts.append(fact)
    machine = _machine.describe()
    print("\n".join(_machine.lines(machine)))
    print(f"\nTime over that of {OURS}, [quartiles]: above 1 {OURS} is faster. {COLUMNS}\n")
    print(table_of_times(jobs))
    for group, table in tables_of_facts(facts):
        print(f"\n{group[0].upper()}{group[1:]}, smaller is better\n\n{table}")
    for line in omissions([*jobs, *facts]):
        print(f"\n{line}")
    if smoke():
        print("\nSmoke sizes: everything ran, but the numbers mean nothing.")
    return {
        "machine": machine,
        "smoke": smoke(),
        "times": [asdict(job) for job in jobs],
        "facts": [asdict(fact) for fact in facts],
    }


def table_of_times(jobs: list[Job]) -> str:
    """How many times longer each contender takes, job by job."""
    names = list(dict.fromkeys(name for job in jobs for name in job.others))
    body = [
        [
            job.group,
            job.what,
            "" if job.ours is None else f"{_tables.seconds(job.ours)}/{job.unit}",
            *(str(job.others[name]) if name in job.others else "" for name in names),
        ]
        for job in jobs
    ]
    return _tables.markdown(["job", "size", OURS, *names], body)


def tables_of_facts(facts: list[Fact]) -> Iterator[tuple[str, str]]:
    """A heading and a table for each group of facts."""
    for group in dict.fromkeys(fact.group for fact in facts):
        yield group, _table_of_facts([fact for fact in facts if fact.group == group])


def _table_of_facts(facts: list[Fact]) -> str:
    names = list(dict.fromkeys(name for fact in facts for name in fact.values))
    body = [
        [
            f"{fact.what} ({fact.unit})",
            *(f"{fact.values[name]:.2g}" if name in fact.values else "" for name in names),
        ]
        for fact in facts
    ]
    return _tables.markdown(["what", *names], body)


def omissions(entries: list[Job | Fact]) -> Iterator[str]:
    """Why a cell is empty, once for each reason."""
    reasons: dict[tuple[str, str], list[str]] = {}
    for entry in entries:
        for name, reason in entry.left_out.items():
            reasons.setdefault((name, reason), []).append(f"{entry.group} {entry.what}")
    for (name, reason), places in reasons.items():
        where = places[0] if len(places) == 1 else f"{len(places)} rows"
        yield f"{name} left out of {where}: {reason}"


def draw(results: dict[str, Any], path: str) -> None:
    """Every ratio as a dot on a logarithmic axis, one line per job."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    jobs = [job for job in results["times"] if job["others"]]
    names = list(dict.fromkeys(name for job in jobs for name in job["others"]))
    markers = "osD^vP*Xh<>d"
    figure, axes = plt.subplots(figsize=(8.5, 1.6 + 0.23 * len(jobs)), layout="constrained")
    for index, name in enumerate(names):
        points = [
            (job["others"][name], line) for line, job in enumerate(jobs) if name in job["others"]
        ]
        middle = [ratio["median"] for ratio, _ in points]
        spread = [
            [ratio["median"] - ratio["low"] for ratio, _ in points],
            [ratio["high"] - ratio["median"] for ratio, _ in points],
        ]
        axes.errorbar(
            middle, [line for _, line in points], xerr=spread, label=name, linestyle="none",
            marker=markers[index % len(markers)], markersize=4.5, elinewidth=0.8, color=f"C{index}",
        )  # fmt: skip
    axes.axvline(1.0, color="black", linewidth=1.0)
    axes.set_xscale("log")
    axes.set_xlabel(f"time over that of {OURS} (right of the line: {OURS} is faster)")
    axes.set_yticks(
        range(len(jobs)), [f"{job['group']}: {job['what']}" for job in jobs], fontsize=7
    )
    axes.invert_yaxis()
    axes.grid(axis="x", which="both", linewidth=0.3)
    figure.legend(loc="outside lower center", ncols=3, fontsize=7)
    # Text as text, and no date: the file is small, and the same results draw the same file.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "splince_fast"}):
        figure.savefig(path, dpi=150, metadata={"Date": None} if path.endswith("svg") else None)
    plt.close(figure)


def main(arguments: list[str] | None = None) -> None:
    """Measure, print, write, draw."""
    parser = argparse.ArgumentParser(prog="benchmarks.peers", description=__doc__)
    parser.add_argument("--smoke", action="store_true", help="tiny sizes")
    parser.add_argument("--json", metavar="PATH", help="write the results there")
    parser.add_argument("--figure", metavar="PATH", help="draw the ratios (PNG or SVG)")
    given = parser.parse_args(arguments)
    if given.figure and (missing := _peers.absent("matplotlib")):
        parser.error(f"--figure needs matplotlib ({missing.reason})")
    if given.smoke:
        use_smoke()
    results = measure()
    _tables.write_json(given.json, {"command": _machine.command(parser.prog, arguments), **results})
    if given.figure:
        draw(results, given.figure)


if __name__ == "__main__":
    main()
