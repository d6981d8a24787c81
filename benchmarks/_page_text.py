"""The sections of the page on performance; every measured number comes from the results."""

from __future__ import annotations

import inspect
import statistics
import textwrap
from collections.abc import Iterable, Iterator

from benchmarks import _machine, _model, _tables, growth, peers, profiles
from benchmarks._page_runs import PROGRAMS, Runs
from benchmarks._peers import FLOOR, OTHER, OURS
from benchmarks._profile import REST, Profile
from benchmarks._timing import Ratio

_VERDICTS = {True: "met", False: "**MISSED**", None: "-"}


def page(runs: Runs, figure: str | None) -> str:
    """The whole page.

    Parameters
    ----------
    figure : str, optional
        Address of the figure, relative to the page.
    """
    blocks = [
        "# Performance", *_opening(runs),
        "## How fast", *_fast(runs),
        "## What is not fast, and why", *_slow(runs),
        "## Targets", *_targets(runs),
        "## Other packages", *_peers(runs, figure),
        "## How cost grows", *_growth(runs),
        "## Large jobs", *_large(runs),
        "## Where the time goes", *_profiles(runs),
        "## Which kernels the BLAS runs", *_kernels(runs),
        "## Keeping a history", *_history(),
    ]  # fmt: skip
    return "\n\n".join(blocks) + "\n"


# --- how it was measured --------------------------------------------------------------------------


def _opening(runs: Runs) -> Iterator[str]:
    hardware, software = _machine.lines(runs.machine)[:2]
    pools = _machine.pool_names(runs.heads["peers"]["machine"])
    yield _paragraph(
        f"Measured on {hardware}, with {software}"
        + (f"; with all packages loaded the thread pools are {pools}" if pools else "")
        + ". Contenders take turns within one run; a ratio is the median over rounds, with its "
        "quartiles in brackets. Numbers on this page, those in sentences included, are written by "
        "`python -m benchmarks.page` from the results of these commands:"
    )
    header = ["command", "date", "BLAS of splince_fast", "kernels", "environment"]
    body = []
    for program in PROGRAMS:
        head = runs.heads[program]
        machine = head["machine"]
        variables = " ".join(f"{k}={v}" for k, v in machine["environment"].items())
        body.append([f"`{head['command']}`", machine["date"], machine["blas"]["name"],
                     machine["blas"]["core"], f"`{variables}`" if variables else ""])  # fmt: skip
    yield _tables.markdown(header, body)
    if names := sorted({n for h in runs.heads.values() for n in _machine.overridden(h["machine"])}):
        yield _paragraph(
            f"**{', '.join(names)} was set in the environment: these are not the kernels that the "
            "BLAS would choose for this processor.**"
        )
    if runs.heads["targets"]["smoke"]:
        yield "**Smoke sizes: everything ran, but no number on this page means anything.**"


# --- what is fast, and what is not ----------------------------------------------------------------


def _fast(runs: Runs) -> Iterator[str]:
    rates, solves, applied, errors = (
        _measured(runs, start)
        for start in (
            "rate against bare SYRK, ", "splince against potrf and two solves, ",
            "apply against np.copyto, ", "relative error of S, ",
        )
    )  # fmt: skip
    yield _items(
        [
            f"**Accumulating**, labels included, runs at {_range(rates.values())} of the rate of "
            f"the bare symmetric product (SYRK) of SciPy's BLAS: {_each(rates)}.",
            f"**Solving** for a SPLINCE eraser takes {_each(solves)} times as long as a bare "
            "Cholesky factorisation with two triangular solves.",
            f"**Applying** an eraser runs at {_each(applied)} of the rate of `np.copyto`.",
            "**Rounding**: the largest error of an entry of the covariance, relative to its two "
            f"standard deviations, is {_each(errors)}.",
        ]
    )
    yield _paragraph(
        f"Times of other packages over those of {OURS}, over all jobs that both do; the jobs are "
        "listed under [Other packages](#other-packages):"
    )
    yield _tables.markdown(
        ["package", "jobs", "least", "median", "most", f"{OURS} faster in"],
        (
            [name, str(len(values)), _short(min(values)), _short(statistics.median(values)),
             _short(max(values)), str(sum(value > 1 for value in values))]
            for name, values in _by_package(runs).items()
        ),
    )  # fmt: skip


def _slow(runs: Runs) -> Iterator[str]:
    known = [(row, met) for row, met in runs.targets if met is not None]
    missed = [f"{row.what}: {row.measured}, target {row.sense} {row.target:g}"
              for row, met in known if not met]  # fmt: skip
    absent = len(runs.targets) - len(known)
    yield _paragraph(
        f"{len(known) - len(missed)} of {len(known)} targets with a verdict are met"
        + (f" (without one: {absent})" if absent else "")
        + (". These are missed:" if missed else ".")
    )
    if missed:
        yield _items(missed)
    slower = [
        f"{job.group}, {job.what}: {name} takes {ratio} of its time"
        for job in runs.jobs
        for name, ratio in job.others.items()
        if name not in (FLOOR, OTHER) and ratio.median < 1
    ]
    compared = sum(len(values) for values in _by_package(runs).values())
    yield _paragraph(
        f"In {len(slower)} of {compared} comparisons with other packages {OURS} is slower"
        + (":" if slower else ".")
    )
    if slower:
        yield _items(slower)
    yield "What the profiles say of it:"
    yield _items(_reasons(runs))


def _reasons(runs: Runs) -> Iterator[str]:
    """What stands between each job and its floor."""
    updates = _group(runs, "accumulate")
    shares = ", ".join(f"{_percent(p.shares['product'])} ({p.what})" for p in updates)
    least = min(updates, key=lambda p: p.shares["product"])
    others = sorted(((share, label) for label, share in least.shares.items()), reverse=True)
    next_two = [f"{label} ({_percent(share)})" for share, label in others if label != "product"][:2]
    yield (
        f"The product's share of an update is {shares}. Where it is smallest, the largest other "
        f"shares are {' and '.join(next_two)}. Per row, the product grows with d^2, and the passes "
        "over the rows with d."
    )
    solves = _group(runs, "solve")
    small, large = solves[0], solves[-1]
    yield (
        f"A solve at {small.what} takes {_tables.seconds(small.untimed)}, "
        f"{_percent(1 - small.shares['kernel'])} of it outside the compiled kernel; one at "
        f"{large.what} takes {_tables.seconds(large.untimed)}, "
        f"{_percent(1 - large.shares['kernel'])} of it outside. The bare factorisation (POTRF) "
        f"takes {_percent(small.floor_seconds / small.untimed)} and "
        f"{_percent(large.floor_seconds / large.untimed)} of the whole."
    )
    times = " and ".join(
        f"{_short(p.untimed / p.floor_seconds)} times as long ({p.what})"
        for p in _group(runs, "apply")
    )
    yield f"Applying an eraser takes {times} as copying the rows."
    for one in _group(runs, "fit an estimator"):
        yield (
            f"Fitting an estimator ({one.what}) takes {_tables.seconds(one.untimed)}, "
            f"{_short(one.untimed / one.floor_seconds)} times as long as the functions behind it; "
            f"scikit-learn's validation is {_percent(one.shares['validation'])} of it."
        )


# --- tables ---------------------------------------------------------------------------------------


def _targets(runs: Runs) -> Iterator[str]:
    yield _paragraph(
        "Ratios promised beside ratios measured, missed ones included. Those with >= say how many "
        "times faster than something else, those with <= how much is taken at most."
    )
    yield _tables.markdown(
        ["what", "target", "measured", "", "note"],
        (
            [
                row.what,
                f"{row.sense} {row.target:g}",
                str(row.measured or "not measured"),
                _VERDICTS[met],
                row.note,
            ]
            for row, met in runs.targets
        ),
    )


def _peers(runs: Runs, figure: str | None) -> Iterator[str]:
    yield _paragraph(
        f"Time over that of {OURS}, [quartiles]: above 1 {OURS} is faster. {peers.COLUMNS} What "
        "each package does, and what it leaves out, is said in `benchmarks/_peers.py`."
    )
    if figure is not None:
        yield f"![Times of other packages over those of {OURS}, job by job]({figure})"
    yield peers.table_of_times(runs.jobs)
    for group, table in peers.tables_of_facts(runs.facts):
        yield f"### {group[0].upper()}{group[1:]}"
        yield "Smaller is better."
        yield table
    if left_out := list(peers.omissions([*runs.jobs, *runs.facts])):
        yield "### Left out"
        yield _items(left_out)


def _growth(runs: Runs) -> Iterator[str]:
    far = max(runs.growth, key=lambda one: abs(one.exponent - one.promised))
    yield _paragraph(
        f"The machine's own rates: {_rates(runs.rates)}. An exponent is the slope of log time over "
        "log size over the larger sizes, beside what the algorithm promises once sizes are large; "
        f"the largest difference is that of {far.what}, {far.exponent:.2f} in {far.axis} for "
        f"{far.promised:g}. The floors are the bare product, the bare factorisation and a copy; "
        "the share is that of the largest size."
    )
    yield growth.growth_table(runs.growth)


def _large(runs: Runs) -> Iterator[str]:
    yield inspect.cleandoc(_model.__doc__ or "").replace("::", ":")
    quotients = [check.measured / check.predicted for check in runs.checks]
    yield f"Its check at small sizes, measured over predicted {_range(quotients)}:"
    yield growth.check_table(runs.checks)
    large, size = runs.large, 4 * runs.large.n * runs.large.d
    needed = size / large.seconds["accumulate"]
    yield _paragraph(
        f"For n = {large.n:.3g} float32 rows of d = {large.d:g}, {size / 1e12:.3g} TB, at "
        f"{_rates(large.rates)}, it predicts the times below. Reading does not slow accumulation "
        f"down as long as it delivers {needed / 1e9:.2g} GB/s."
    )
    yield _tables.markdown(
        ["part", "predicted"],
        ([part, _tables.duration(seconds)] for part, seconds in large.seconds.items()),
    )


def _profiles(runs: Runs) -> Iterator[str]:
    yield _paragraph(
        "The library's functions, timed from outside on the thread that runs the job. Shares are "
        f'of the whole and sum to it; "{REST}" is what no other column accounts for. Beside them '
        "stand the time without timers, and what the job is held against, on the same data."
    )
    for group, table in profiles.tables(runs.profiles):
        yield f"### {group[0].upper()}{group[1:]}"
        yield table
    yield _items(profiles.legend(runs.profiles))


# --- advice ---------------------------------------------------------------------------------------


def _kernels(runs: Runs) -> Iterator[str]:
    yield _paragraph(
        "OpenBLAS, which SciPy brings, chooses its kernels by the processor when it is loaded. "
        "`splince-fast doctor` says which it runs, how fast they are, and what to do where the "
        "processor has wider instructions than they use. There are two causes:"
    )
    yield _items(
        [
            "`OPENBLAS_CORETYPE` is set in the environment and asks for narrower kernels than the "
            "processor has: unset it. To set it is right only for repeating what another processor "
            "would do.",
            "The library does not know the processor. Then `pip install "
            '"splince-fast[blas]"` brings a private copy that is told to use the wide kernels, in '
            "this package alone, and only where a short measurement shows a gain. "
            "`SPLINCE_FAST_BLAS=scipy` keeps SciPy's.",
        ]
    )
    reasons = dict.fromkeys(head["machine"]["blas"]["reason"] for head in runs.heads.values())
    yield _paragraph(f"Reasons of the choice in these runs: {'; '.join(reasons)}.")
    wide = [row for row, _ in runs.targets if row.what.startswith("wide kernels: ")]
    yield _paragraph(
        "What the extra brings here, in a process where `OPENBLAS_CORETYPE=Haswell` asks SciPy's "
        "BLAS for narrower kernels:"
    )
    yield _items(
        dict.fromkeys(
            f"not measured: {row.note}" if row.measured is None else f"{row.what}: {row.measured}"
            for row in wide
        )
    )


def _history() -> Iterator[str]:
    yield _paragraph(
        "The benchmarks that asv tracks are the modules of `benchmarks/` named after what they "
        "measure; it builds every commit in an environment of its own, with the dependencies that "
        "`asv.conf.json` pins. From the root of a checkout, with the extra `bench`:"
    )
    commands = [
        ("asv machine --yes", "once: names the machine"),
        ("asv run HEAD^!", "measures one commit"),
        ("asv run --quick HEAD^!", "every benchmark once, to see whether it runs"),
        ("asv continuous main HEAD", "measures two commits, and says what changed"),
        ("asv compare A B", "the same for commits that are measured"),
        ("asv publish && asv preview", "the pages"),
    ]
    lines = "\n".join(f"{command:<27} # {what}" for command, what in commands)
    yield f"```sh\n{lines}\n```"
    yield _paragraph(
        "`--bench TEXT` restricts any of them to some benchmarks. What is tracked beside times are "
        "ratios and errors, which can be compared between machines; results lie under `.asv/`."
    )


# --- numbers in words -----------------------------------------------------------------------------


def _measured(runs: Runs, start: str) -> dict[str, Ratio]:
    """Measured ratios of the targets whose name begins so, by the rest of it."""
    found = {
        row.what.removeprefix(start): row.measured
        for row, _ in runs.targets
        if row.what.startswith(start) and row.measured is not None
    }
    if not found:
        raise SystemExit(
            f"the results of benchmarks.targets have no measured row that begins with {start!r}; "
            "run all its groups"
        )
    return found


def _by_package(runs: Runs) -> dict[str, list[float]]:
    """Median times over ours, by package."""
    found: dict[str, list[float]] = {}
    for job in runs.jobs:
        for name, ratio in job.others.items():
            if name not in (FLOOR, OTHER):
                found.setdefault(name, []).append(ratio.median)
    return found


def _group(runs: Runs, name: str) -> list[Profile]:
    found = [one for one in runs.profiles if one.group == name]
    if not found:
        raise SystemExit(f"the results of benchmarks.profiles have no group {name!r}")
    return found


def _rates(rates: _model.Rates) -> str:
    disk = "" if rates.disk == float("inf") else f", disk {rates.disk / 1e9:.2g} GB/s"
    return (
        f"SYRK in float32 {rates.syrk / 1e9:.0f} GFLOP/s, POTRF in float64 "
        f"{rates.potrf / 1e9:.0f} GFLOP/s, copy {rates.copy / 1e9:.2g} GB/s of what is read{disk}"
    )


def _each(ratios: dict[str, Ratio]) -> str:
    return ", ".join(f"{_short(ratio.median)} ({where})" for where, ratio in ratios.items())


def _range(values: Iterable[float | Ratio]) -> str:
    numbers = [value.median if isinstance(value, Ratio) else value for value in values]
    least, most = _short(min(numbers)), _short(max(numbers))
    return least if least == most else f"{least} to {most}"


def _short(value: float) -> str:
    return f"{value:.3g}" if value < 1000 else f"{value:,.0f}"


def _percent(share: float) -> str:
    return f"{share:.0%}" if share >= 0.1 or share == 0 else f"{share:.1%}"


def _paragraph(text: str) -> str:
    return textwrap.fill(text, 110, break_long_words=False, break_on_hyphens=False)


def _items(texts: Iterable[str]) -> str:
    return "\n".join(
        textwrap.fill(
            text, 110, initial_indent="- ", subsequent_indent="  ", break_long_words=False,
            break_on_hyphens=False,
        )
        for text in texts
    )  # fmt: skip
