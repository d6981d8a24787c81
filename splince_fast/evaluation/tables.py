"""Tables of a comparison: summaries per head, a metric by level, and the remarks below them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from splince_fast.evaluation.data import FEW_ROWS
from splince_fast.evaluation.measurements import Measurements, has_few_rows
from splince_fast.evaluation.metrics import SUMMARY, headline
from splince_fast.evaluation.records import ERASER_ROW
from splince_fast.evaluation.statistics import MIN_SEEDS
from splince_fast.evaluation.text_table import Table, interval_text, number

# Order of the columns of the summary tables: that of SUMMARY, except that accuracy comes first.
_COLUMNS = ("accuracy", *(m for m in SUMMARY if m != "accuracy"))
_HEADS = {
    "retrained": "head refitted after erasing",
    "frozen": "head of the unerased rows",
    "unregularised": "head refitted without penalty",
}


def remarks(result: Measurements) -> list[str]:
    """Return a line for each failure, and for the first notes."""
    failed = (
        f"! {eraser}{', ' + head if head else ''}: {reason}"
        for eraser, head, reason in failures(result)
    )
    return [*failed, *(f"note: {note}" for note in result.notes[:8])]


def failures(result: Measurements) -> list[tuple[str, str, str]]:
    """Return the failures, without those of the heads of an eraser that failed itself."""
    rows = result.failures
    return [row for row in rows if not row[1] or (row[0], ERASER_ROW, row[2]) not in rows]


def heading(result: Measurements) -> list[str]:
    """Return the sizes of data and splits, and the meaning of the intervals."""
    c, sizes = result.context, list(result.sizes.values())
    train, validation, test = (_range(counts) for counts in zip(*sizes, strict=True))
    if c.test_labels:
        meaning = (
            "± half a 95 % bootstrap interval over test rows (conservative for the worst group)"
        )
    elif len(c.seeds) < MIN_SEEDS:
        meaning = f"{len(c.seeds)} seed(s): fewer than {MIN_SEEDS}, so nothing is tested"
    else:
        meaning = f"mean ± half a 95 % interval over {len(c.seeds)} resamplings of this data set"
    size = f"{c.n:,} rows, {c.d} features; {train} train, {validation} validation, {test} test"
    return [size, meaning]


def _range(numbers: Sequence[int]) -> str:
    """Return the range of numbers as text, such as "5 to 9", or "5" for equal numbers."""
    low, high = min(numbers), max(numbers)
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def summaries(result: Measurements) -> list[Table]:
    """Return the tables of each head: of metrics at the default level, and over several levels."""
    context, present = result.context, result.metrics
    columns = (
        [m for m in _COLUMNS if m in present],
        [m for m in context.custom_metrics if m in present],
    )
    tables = [
        summary(result, head, result._level(), metrics)
        for head in context.heads
        for i, metrics in enumerate(columns) if metrics or i == 0
    ]  # fmt: skip
    if len(context.levels) > 1 and present:
        tables += [by_level(result, headline(present), head) for head in context.heads]
    return tables


def summary(result: Measurements, head: str, p: float | None, metrics: Sequence[str]) -> Table:
    """Return the table of erasers (rows) by metrics (columns), for a head at a level."""
    # The mark * means that an eraser is significantly better than every other eraser, ? that a
    # worst group has few rows, and ~ that a solver did not converge.
    context = result.context
    entries = {m: result.metric(m) for m in metrics}
    starred = {
        m: result.verdict(m, head=head, p=p).confirmed
        for m, entry in entries.items() if entry.of == "head" and entry.lower_is_better is not None
    }  # fmt: skip
    unreliable = {e for e in context.erasers if has_few_rows(result, e, head, p)}
    rows, fractions = [], ""
    for eraser in context.erasers:
        records = [r for r in result.records if (r.eraser, r.head) == (eraser, head)]
        mark = " ~" if any(not r.converged for r in records) else ""
        fraction = _fraction(sum(bool(r.values) for r in records if r.p == p), len(context.seeds))
        fractions += fraction
        cells = [eraser + mark + fraction]
        for metric, entry in entries.items():
            interval = result.interval(metric, eraser=eraser, head=head, p=p)
            text = interval_text(interval) if entry.of == "head" else number(interval.mean)
            text += "?" * (metric == "worst_group" and eraser in unreliable)
            cells.append(text + "*" * (starred.get(metric) == eraser))
        rows.append(tuple(cells))
    notes = worst_cell_lines(result, head, p) if "worst_group" in metrics else []
    if unreliable and notes:
        notes.append(f"? worst group of fewer than {FEW_ROWS} test rows: not reliable")
    if fractions:
        notes.append(
            f"k/{len(context.seeds)}: k of {len(context.seeds)} seeds have values, the others "
            "failed; erasers are compared over the seeds at which all have values"
        )
    level = "your test rows" if context.test_labels else "natural split"
    if p is not None:
        aligned = f" (aligned: {context.aligned_class})" if context.aligned_class else ""
        level = f"association p = {p:g}{aligned}"
    role = dict(zip(context.heads, context.head_roles, strict=True))[head]
    title = f"{head}: {_HEADS[role]}" if role in _HEADS else head
    columns = ("eraser", *(entry.label for entry in entries.values()))
    return Table(f"{title}; {level}", columns, tuple(rows), tuple(notes))


def _fraction(k: int, n: int) -> str:
    return f" {k}/{n}" if 0 < k < n else ""


def worst_cell_lines(result: Measurements, head: str, p: float | None) -> list[str]:
    """Return one line that lists each worst cell, its rows and its erasers; [] without cells."""
    erasers_of: dict[str, list[str]] = {}
    for eraser in result.context.erasers:
        cells = list(result.worst_cells(eraser=eraser, head=head, p=p).values())
        if cells:
            name, count = Counter(cell.cell for cell in cells).most_common(1)[0]
            text = f"{name} (n = {_range([cell.n for cell in cells if cell.cell == name])})"
            text += f" at {count} of {len(cells)} seeds" if count < len(cells) else ""
            erasers_of.setdefault(text, []).append(eraser)
    text = "; ".join(f"{text}: {', '.join(erasers)}" for text, erasers in erasers_of.items())
    return [f"worst group: {text}"] if text else []


def by_level(result: Measurements, metric: str, head: str | None) -> Table:
    """Return the table of a metric by eraser and association level."""
    context, head_name = result.context, result._head_of(metric, head)
    rows = []
    for eraser in context.erasers:
        intervals = (result.interval(metric, eraser=eraser, head=head, p=p) for p in context.levels)
        cells = (interval_text(i) + _fraction(i.n, len(context.seeds)) for i in intervals)
        rows.append((eraser, *cells))
    levels = ("natural" if p is None else f"p = {p:g}" for p in context.levels)
    title = result.metric(metric).label + (f", {head_name} head" if head_name else "")
    return Table(title, ("eraser", *levels), tuple(rows))
