"""Write docs/performance.md and its figure from the stored results: python -m benchmarks.page

All numbers of the page come from the JSON files in benchmarks/results/, one per processor, written
by `benchmarks.compare --json`. An incomplete file raises an error.
"""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import compare, jobs_growth, machine
from benchmarks.jobs import FLOOR, NUMPY, OURS, SERIAL
from benchmarks.peers import CE, DASK_COV, ONEDAL
from splince_fast.moments.scatters import subsample_for

Results = dict[str, Any]

# Rows of the tables: (job, contender, label of the row).
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
_FIRST_USE = "first use/first eraser"
# Reasons for missed targets, by (group of jobs, contender).
_PER_CALL = "Every row needs its own Python call"
_REASONS = {
    ("accumulate", FLOOR): "In addition to the product, O(n d^2), the rows are checked, centred "
    "and sorted by class, O(n d)",
    ("accumulate", CE): "The ratio GEMM / SYRK in the table above is an upper bound",
    ("stream", "in blocks"): _PER_CALL,
    ("stream", CE): _PER_CALL,
    ("stream", "one kind"): "Each call converts a column of pandas, or rows of another dtype",
    ("splince", "scipy.linalg"): "Checks and report take most of the time of a solve this small",
    ("file", FLOOR): "Rows are centred between the read and the product, on the same cores",
    ("apply", FLOOR): "The eraser multiplies every row by two factors in float64; a copy does not",
}
_PAGE = """# Performance

{headline}

{processors}

## Against other packages

Time of the other package over that of splince_fast.

{peers}

## Against the machine

Time of the floor, a lower bound by bare BLAS or a copy, over that of splince_fast: 1 is ideal.

{rates}

![The ratios of both tables, by processor](performance.svg)

## Growth

Measured exponents of the time, with the theoretical exponents in brackets. The time for 10^9
float32 rows of 8,192 features in memory is extrapolated from d = 4096 with the theoretical
exponents.

{growth}

## Machines

Ratios depend on the processor. A package that uses a general matrix product (GEMM) where a
symmetric one (SYRK) suffices is slower by the ratio GEMM / SYRK below, or by more if its BLAS runs
narrower kernels.

{machines}

{remarks}

The OpenBLAS library of SciPy chooses its kernels when it is loaded; `splince-fast doctor` prints
the kernels and their rate. The environment variable `OPENBLAS_CORETYPE` forces other kernels: unset
it.

## Targets that are missed

Jobs have targets, such as 0.85 times the speed of the floor. These targets are missed:

{missed}

Written by `python -m benchmarks.page` from the JSON files in `benchmarks/results/`, which hold the
results of all jobs.
"""
_fill = partial(textwrap.fill, width=100, break_long_words=False, break_on_hyphens=False)
_item = partial(_fill, initial_indent="- ", subsequent_indent="  ")


def read(folder: Path) -> list[Results]:
    """Read all results, newest processor family first, and add "title" and "load" to each.

    Raises SystemExit if there are no results, or if smoke sizes and full sizes are mixed.
    """
    runs = []
    for path in sorted(folder.glob("*.json")):
        results = json.loads(path.read_text(encoding="utf-8"))
        results["title"] = machine.title(results["machine"])
        results["load"] = results["load_average"]["before"][0]
        results["jobs"] = {entry["name"]: entry for entry in results["jobs"]}
        runs.append(results)
    if len({results["smoke"] for results in runs}) != 1:
        raise SystemExit(
            f"{folder} has no results, or mixes smoke sizes and full sizes: "
            "run python -m benchmarks.compare --json"
        )
    return sorted(runs, key=lambda results: -results["machine"]["family"])


def stored(results: Results, job: str, kind: str, name: str) -> Any:
    """Return the entry of contender `name` in the "values" or "ratios" (`kind`) of a job.

    Returns None if the contender was not measured.
    """
    return results["jobs"].get(job, {kind: {}})[kind].get(name)


def machines(runs: list[Results]) -> str:
    """Return the table of processors."""
    header = ["processor", "threads", "kernels", "GEMM / SYRK, float32", "GEMM / SYRK, float64",
              "commit", "start", "load before"]  # fmt: skip
    rows = []
    for results in runs:
        facts, load = results["machine"], results["load"]
        bounds = [facts["gemm_over_syrk"].get(dtype, {}) for dtype in ("float32", "float64")]
        rows.append([
            results["title"], f"{facts['threads']} of {facts['cores']}", facts["blas"]["kernels"],
            *(", ".join(f"{k} {v:g}" for k, v in b.items()) or "not measured" for b in bounds),
            results["commit"][:12] + " changed" * bool(results["changed"]),
            results["began"][:16], f"{load:g}",
        ])  # fmt: skip
    return compare.table(header, rows)


def remarks(results: Results) -> Iterator[str]:
    """Yield warnings: that sizes are smoke sizes, or that other processes were running."""
    name, load, cores = results["title"], results["load"], results["machine"]["cores"]
    if results["smoke"]:
        yield "**Smoke sizes: the numbers mean nothing.**"
    if load > 0.5 * cores:
        yield _fill(
            f"**{name}: other processes were running (load average {load:g} on {cores} cores). "
            "These numbers are provisional: targets may be missed for this reason alone.**"
        )


def headline(runs: list[Results]) -> str:
    """Return a list: speed ratios to peers (range over processors), and the time of first use."""
    lines = []
    for job, against, text in _PEERS:
        values = [stored(results, job, "ratios", against) for results in runs]
        medians = [ratio["median"] for ratio in values if ratio]
        task, _, peer = text.partition(": ")
        if medians:
            low, high = (f"{v:.2g}" for v in (min(medians), max(medians)))
            times = low if low == high else f"{low} to {high}"
            lines.append(_item(f"{task[0].upper()}{task[1:]}: {times} times as fast as {peer}."))
    first = [stored(results, _FIRST_USE, "values", OURS) for results in runs]
    seconds = [value["median"] for value in first if value]
    if seconds:
        lines.append(_item(
            f"The first eraser in a new Python process, with imports: {max(seconds):.2g} "
            "seconds of processor time."
        ))  # fmt: skip
    return "\n".join(lines)


def ratios(runs: list[Results], lines: Iterable[tuple[str, str, str]], head: str) -> str:
    """Return a table of the ratios in `lines`, with one column per processor."""
    rows = []
    for job, against, text in lines:
        values = [stored(results, job, "ratios", against) for results in runs]
        rows.append([text, *(compare.interval(ratio) if ratio else "-" for ratio in values)])
    return compare.table([head, *(results["title"] for results in runs)], rows)


def missed(results: Results) -> str:
    """Return the number of targets met, and the missed targets with reasons.

    Missed targets have one line per group of jobs and contender.
    """
    cases: dict[tuple[str, str], list[str]] = {}
    decisions = []
    for name, job in results["jobs"].items():
        group, _, case = name.partition("/")
        for target in job["targets"]:
            decisions += [target["met"]] * (target["met"] is not None)
            if target["met"] is False:
                text = f"{case} {target['measured']['median']:.3g} ({compare.limit(target)})"
                cases.setdefault((group, target["against"]), []).append(text)
    lines = [f"{results['title']}: {sum(decisions)} of {len(decisions)} targets are met.\n"]
    for pair, texts in cases.items():
        reason = f". {_REASONS[pair]}." if pair in _REASONS else ""
        lines.append(_item(f"{', '.join(filter(None, pair))}: {'; '.join(texts)}{reason}"))
    return "\n".join(lines)


def growth(results: Results) -> Iterator[str]:
    """Yield one line: measured and theoretical exponents, and the time of a large job."""
    exponents = []
    for name, job in results["jobs"].items():
        if name.startswith("growth/"):
            _, task, axis, expected = re.split(r"[/^]", name)
            measured = jobs_growth.exponent(job["ratios"]["quarter"]["median"])
            exponents.append(f"{task} in {axis} {measured:.2f} ({expected})")
    if exponents:
        yield _item(f"{results['title']}: {'; '.join(exponents)}.{_time_of_large_job(results)}")


def _time_of_large_job(results: Results) -> str:
    """Return a text with the hours for 10^9 rows: all rows, a subsample, and 16 machines.

    The text is empty if the times were not measured.
    """
    all_rows = stored(results, "accumulate/float32/4096", "values", OURS)
    sums = stored(results, "sampled/sums alone/4096", "values", OURS)
    pair = stored(results, "cluster/1,048,576 rows/2048", "ratios", SERIAL)
    if not all_rows or not sums:
        return ""
    rows = 1e9 / 3600
    every_row = rows * 4 * all_rows["median"]
    rate = subsample_for("auto", 10**9, 8192, "the rows", folds=1)
    sampled = rows * 2 * sums["median"] + rate * every_row
    cluster = f"; on 16 such machines {every_row / 16 / pair['median']:.1f} h" if pair else ""
    return f' A billion rows: {every_row:.1f} h; subsample="auto" {sampled:.1f} h{cluster}.'


def page(runs: list[Results]) -> str:
    """Return the text of the page."""
    text = _PAGE.format(
        headline=headline(runs),
        processors=_fill(
            f"Measured on {' and '.join(results['title'] for results in runs)}. Contenders run "
            "alternately within one process, with equal threads; a ratio is the median over "
            "rounds, with its quartiles in brackets."
        ),
        machines=machines(runs),
        remarks="\n\n".join(text for results in runs for text in remarks(results)),
        rates=ratios(runs, _RATES, "float32 rows, float64 solves"),
        peers=ratios(runs, _PEERS, "job"),
        missed="\n\n".join(map(missed, runs)),
        growth="\n".join(text for results in runs for text in growth(results)),
    )
    return re.sub("\n{3,}", "\n\n", text)


def draw(runs: list[Results], path: Path) -> None:
    """Draw all ratios of both tables on a logarithmic axis, with one colour per processor."""
    import matplotlib  # imported here: asv imports this module without matplotlib
    from matplotlib.figure import Figure

    lines = [*_RATES, *_PEERS]
    figure = Figure(figsize=(7.5, 3.4), layout="constrained")
    axes = figure.subplots()
    for index, results in enumerate(runs):
        values = [stored(results, job, "ratios", against) for job, against, _ in lines]
        points = {place + 0.2 * index: ratio for place, ratio in enumerate(values) if ratio}
        middle = [ratio["median"] for ratio in points.values()]
        ends = [[abs(r[end] - r["median"]) for r in points.values()] for end in ("low", "high")]
        axes.errorbar(
            middle, list(points), xerr=ends, label=results["title"], linestyle="none",
            marker="os^D"[index % 4], markersize=4, elinewidth=0.8,
        )  # fmt: skip
    axes.axvline(1.0, color="black", linewidth=1.0)
    axes.set(xscale="log", xlabel=f"time over that of {OURS}")
    axes.set_yticks(range(len(lines)), [text for *_, text in lines], fontsize=7)
    axes.invert_yaxis()
    axes.grid(axis="x", which="both", linewidth=0.3)
    axes.legend(fontsize=7)
    # With text elements and without a date, the file is small and depends only on the results.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "splince_fast"}):
        figure.savefig(path, metadata={"Date": None})


def write(results: Path, out: Path) -> None:
    """Write the page and its figure to the folder `out`, from the results in folder `results`."""
    runs = read(results)
    (out / "performance.md").write_text(page(runs), encoding="utf-8")
    draw(runs, out / "performance.svg")


if __name__ == "__main__":
    write(compare.RESULTS, machine.ROOT / "docs")
