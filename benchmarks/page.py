"""Write docs/performance.md and its figure from the stored results.

    python -m benchmarks.page [--results benchmarks/results] [--out docs/performance.md]

Every number of the page is read from the JSON files in the folder, one per processor, as
`benchmarks.compare --json` writes them. A result that lacks something is an error.
"""

from __future__ import annotations

import argparse
import json
import textwrap
from pathlib import Path
from typing import Any

from benchmarks import compare, jobs_growth, machine
from benchmarks.jobs import FLOOR, NUMPY, OURS, SERIAL
from benchmarks.peers import CE, DASK_COV, ONEDAL
from splince_fast.moments.sampled import rate_for

Results = dict[str, Any]
Line = tuple[str, str, str]  # of a table: a job, a contender, and what it is called there


_RATES = (
    *((f"accumulate/float32/{d}", FLOOR, f"accumulate, d = {d}: rate over bare SYRK")
      for d in (768, 2048, 4096)),
    ("sampled/sums alone/4096", FLOOR, "sums and variances, d = 4096: rate over a copy"),
    ("splince/4096", FLOOR, "solve, d = 4096: rate over bare copy, POTRF and TRSM"),
    ("apply/given array/float32/768/rank 1", FLOOR, "apply, rank 1: rate over a copy"),
)  # fmt: skip
_PEERS = (
    ("accumulate/float32/2048", CE, "accumulate, d = 2048: concept-erasure"),
    ("accumulate/float32/2048", ONEDAL, "accumulate, d = 2048: oneDAL, without labels"),
    ("cluster/65,536 rows/2048", DASK_COV, "cluster of two processes, d = 2048: dask.array.cov"),
    ("leace/2048", CE, "solve LEACE, d = 2048: concept-erasure"),
    ("splince/2048", NUMPY, "solve SPLINCE, d = 2048: the paper's formula in NumPy"),
    ("apply/new array/float32/768/rank 1", CE, "apply, rank 1: concept-erasure"),
)
# Why a target of a group can be missed against a contender.
_PER_CALL = "Every row comes by a Python call of its own"
_REASONS = {
    ("accumulate", FLOOR): "Beside the product, of O(n d^2), the rows are checked, centred and "
    "sorted by class, in O(n d)",
    ("accumulate", CE): "GEMM / SYRK of the table above bounds this ratio",
    ("stream", "in blocks"): _PER_CALL,
    ("stream", CE): _PER_CALL,
    ("file", FLOOR): "Rows are centred between the read and the product, on the same cores",
    ("apply", FLOOR): "The eraser multiplies every row by two factors in float64; a copy does not",
}
_KERNELS = """## Kernels of the BLAS

OpenBLAS, which SciPy brings, chooses its kernels when it is loaded; `splince-fast doctor` shows
them and their rate. Where `OPENBLAS_CORETYPE` asks for narrower ones, or the library does not know
the processor, `pip install "splince-fast[blas]"` brings a private copy with wide kernels. It is
used only where a short measurement shows a gain; `SPLINCE_FAST_BLAS=scipy` keeps SciPy's."""


def read(folder: Path) -> list[Results]:
    """All results, newest processor family first.

    Raises
    ------
    SystemExit
        There are none, a file lacks a key, or its sizes are tiny beside others that are not.
    """
    found = []
    for path in sorted(folder.glob("*.json")):
        results = json.loads(path.read_text(encoding="utf-8"))
        lacking = {"commit", "began", "machine", "jobs", "load_average", "smoke"} - set(results)
        if lacking:
            raise SystemExit(f"{path.name} has no {', '.join(sorted(lacking))}")
        found.append(results)
    if not found:
        raise SystemExit(f"no results in {folder}; run python -m benchmarks.compare --json")
    if len({results["smoke"] for results in found}) > 1:
        raise SystemExit("results of smoke sizes cannot stand beside others")
    return sorted(found, key=lambda results: -int(results["machine"]["family"]))


def stored(results: Results, job: str, kind: str, name: str) -> dict[str, float] | None:
    """The value or ratio (`kind`) of a contender of a job; None where it was not measured."""
    for entry in results["jobs"]:
        if entry["name"] == job:
            found: dict[str, float] | None = entry[kind].get(name)
            return found
    return None


def title(results: Results) -> str:
    facts = results["machine"]
    return f"{facts['processor']}, {machine.architecture(facts)}"


def load_before(results: Results) -> float | None:
    """Mean number of processes that wanted to run when the run began; None if not recorded."""
    load = results["load_average"]["before"]
    return None if load is None else load[0]


def machines(every: list[Results]) -> str:
    """What was measured on what."""
    header = ["processor", "threads", "kernels", "GEMM / SYRK, float32", "the same, float64",
              "commit", "began", "load before"]  # fmt: skip
    rows = []
    for results in every:
        facts, load = results["machine"], load_before(results)
        bounds = [
            ", ".join(f"{name} {value:g}" for name, value in products.items()) or "not measured"
            for products in (facts["gemm_over_syrk"].get(t, {}) for t in ("float32", "float64"))
        ]
        rows.append([
            title(results), f"{facts['threads']} of {facts['cores']}",
            facts["blas"]["kernels"], *bounds,
            (results["commit"] or "not recorded")[:12] + " changed" * bool(results["changed"]),
            results["began"][:16],
            "not recorded" if load is None else f"{load:g}",
        ])  # fmt: skip
    return compare.table(header, rows)


def ratios(every: list[Results], lines: tuple[Line, ...], head: str) -> str:
    """A table with a column per processor."""
    rows = []
    for job, against, text in lines:
        found = [stored(results, job, "ratios", against) for results in every]
        rows.append([text, *(compare.interval(ratio) if ratio else "-" for ratio in found)])
    return compare.table([head, *map(title, every)], rows)


def missed(results: Results) -> list[str]:
    """What is missed, and why; cases of a group against the same contender together."""
    cases: dict[tuple[str, str], list[str]] = {}
    for job in results["jobs"]:
        group, _, case = job["name"].partition("/")
        for target in job["targets"]:
            if target["met"] is False:
                text = f"{case} {target['measured']['median']:.3g} ({compare.limit(target)})"
                cases.setdefault((group, target["against"]), []).append(text)
    return [
        f"{', '.join(filter(None, pair))}: {'; '.join(found)}"
        + (f". {_REASONS[pair]}." if pair in _REASONS else "")
        for pair, found in cases.items()
    ]


def page(every: list[Results], figure: str | None) -> str:
    """The whole text."""
    parts = ["# Performance", _fill(
        "Written by `python -m benchmarks.page` from `benchmarks/results/`, where every number of "
        "every job stands as JSON. Contenders run alternately within one process, with equal "
        "threads; a ratio is the median over rounds, with its quartiles in brackets. Ratios "
        "depend on the processor: a package that multiplies in general where a symmetric product "
        "will do is slower by the ratio GEMM / SYRK below, more where its BLAS runs narrower "
        "kernels."
    ), machines(every)]  # fmt: skip
    for results in every:
        load, cores = load_before(results), results["machine"]["cores"]
        if results["smoke"]:
            parts.append("**Smoke sizes: the numbers mean nothing.**")
        if load is not None and load > 0.5 * cores:
            parts.append(_fill(
                f"**{title(results)}: other processes were running (load average {load:g} on "
                f"{cores} cores). These numbers are provisional, and what is "
                "missed may be missed for that alone.**"
            ))  # fmt: skip
        if "note" in results:
            parts.append(_fill(f"{title(results)}: {results['note']}"))
    parts += [
        "## Against the machine",
        "Time of the floor, the least that any way must do, over that of splince_fast: 1 is ideal.",
        ratios(every, _RATES, "float32 rows, float64 solves"),
        "## Against other packages",
        "Time of the other package over that of splince_fast.",
        ratios(every, _PEERS, "job"),
    ]
    if figure is not None:
        parts.append(f"![The ratios of both tables, by processor]({figure})")
    parts.append("## Missed")
    for results in every:
        decided = [t["met"] for job in results["jobs"] for t in job["targets"]]
        verdicts = len(decided) - decided.count(None)
        parts.append(f"{title(results)}: {decided.count(True)} of {verdicts} targets are met.")
        parts.append("\n".join(_fill(line, mark="- ") for line in missed(results)))
    if grown := [_fill(text, mark="- ") for results in every if (text := _growth(results))]:
        heading = _fill(
            "Measured exponents of the time, with those of the algorithm in brackets; and by the "
            "latter, from d = 4096, the time for 10^9 float32 rows of 8,192 features in memory:"
        )
        parts += ["## Growth", heading, "\n".join(grown)]
    return "\n\n".join(filter(None, [*parts, _KERNELS])) + "\n"


def _growth(results: Results) -> str:
    """Exponents beside what the algorithm has, and what follows for a large job."""
    shown = [
        f"{g['what']} in {g['axis']} {g['exponent']:.2f} ({g['expected']:g})"
        for g in results.get("scaling", [])  # as results were written until November 2026
    ]
    for job in results["jobs"]:
        group, _, case = job["name"].partition("/")
        if group == "growth":
            name, _, expected = case.replace("/", " in ").partition("^")
            measured = jobs_growth.exponent(job["ratios"]["quarter"]["median"])
            shown.append(f"{name} {measured:.2f} ({expected})")
    return f"{title(results)}: {'; '.join(shown)}.{_large(results)}" if shown else ""


def _large(results: Results) -> str:
    """Hours for a billion rows, of all of them, of a sample, and on machines like this one."""
    whole = stored(results, "accumulate/float32/4096", "values", OURS)
    sums = stored(results, "sampled/sums alone/4096", "values", OURS)
    pair = stored(results, "cluster/1,048,576 rows/2048", "ratios", SERIAL)
    if not whole or not sums:
        return ""
    rows = 1e9 / 3600
    every_row = rows * 4 * whole["median"]
    share = rate_for("auto", 10**9, 8192, "the rows", folds=1)
    sampled = rows * 2 * sums["median"] + share * every_row
    text = f' A billion rows: {every_row:.1f} h; scatter="auto" {sampled:.1f} h'
    if pair:
        text += f"; on 16 such machines {every_row / 16 / pair['median']:.1f} h"
    return f"{text}."


def draw(every: list[Results], path: Path) -> None:
    """Every ratio of the two tables on a logarithmic axis, a colour per processor."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    lines = [*_RATES, *_PEERS]
    figure, axes = plt.subplots(figsize=(7.5, 3.4), layout="constrained")
    for index, results in enumerate(every):
        points = [
            (found, place + 0.2 * index)
            for place, (job, against, _) in enumerate(lines)
            if (found := stored(results, job, "ratios", against))
        ]
        middle = [value["median"] for value, _ in points]
        ends = [[abs(v[end] - v["median"]) for v, _ in points] for end in ("low", "high")]
        axes.errorbar(
            middle, [place for _, place in points], xerr=ends, label=title(results),
            linestyle="none", marker="os^D"[index % 4], markersize=4, elinewidth=0.8,
        )  # fmt: skip
    axes.axvline(1.0, color="black", linewidth=1.0)
    axes.set(xscale="log", xlabel=f"time over that of {OURS}")
    axes.set_yticks(range(len(lines)), [text for *_, text in lines], fontsize=7)
    axes.invert_yaxis()
    axes.grid(axis="x", which="both", linewidth=0.3)
    axes.legend(fontsize=7)
    # Text as text, and no date: the file is small, and the same results draw the same file.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "splince_fast"}):
        figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def _fill(text: str, mark: str = "") -> str:
    return textwrap.fill(
        mark + text, 100, subsequent_indent=" " * len(mark), break_long_words=False,
        break_on_hyphens=False,
    )  # fmt: skip


def main(arguments: list[str] | None = None) -> None:
    """Read, write, draw."""
    parser = argparse.ArgumentParser(prog="benchmarks.page", description=__doc__)
    parser.add_argument("--results", type=Path, default=compare.RESULTS)
    parser.add_argument("--out", type=Path, default=machine.ROOT / "docs" / "performance.md")
    given = parser.parse_args(arguments)
    every = read(given.results)
    figure = given.out.with_suffix(".svg")
    try:
        draw(every, figure)
    except ImportError:  # the page without the figure, where matplotlib is not installed
        figure = None
    given.out.write_text(page(every, figure and figure.name), encoding="utf-8")


if __name__ == "__main__":
    main()
