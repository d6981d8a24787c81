"""Tables of a comparison as text, with notes wrapped at 100 characters, and as HTML."""

from __future__ import annotations

import html
import math
import textwrap
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from splince_fast.evaluation.advice import FrozenHeadAdvice
from splince_fast.evaluation.data import FEW_ROWS
from splince_fast.evaluation.metrics import OF_FAIRNESS, SUMMARY, concept_key, headline
from splince_fast.evaluation.records import ERASER_ROW
from splince_fast.evaluation.statistics import MIN_SEEDS, Interval

if TYPE_CHECKING:
    from splince_fast.evaluation._differences import Differences
    from splince_fast.evaluation.records import Context
    from splince_fast.evaluation.result import Comparison


@dataclass(frozen=True, slots=True)
class Table:
    """A table of text.

    Attributes
    ----------
    title : str
        Title, which may be empty.
    columns : tuple of str
        Column names.
    rows : tuple of tuple of str
        Entries of each row; the first entry is the name of the row.
    notes : tuple of str
        Lines below the table.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        lines = [self.columns, *self.rows]
        widths = [max(len(line[i]) for line in lines) for i in range(len(self.columns))]
        text = [self.title] if self.title else []
        for line in lines:
            cells = [line[0].ljust(widths[0])]
            cells += [cell.rjust(w) for cell, w in zip(line[1:], widths[1:], strict=True)]
            text.append("  ".join(cells).rstrip())
        return "\n".join([*text, *map(wrapped, self.notes)])

    def to_html(self) -> str:
        """Return an HTML table element with the title as its caption; all text is escaped."""
        head = "".join(f"<th scope='col'>{html.escape(c)}</th>" for c in self.columns)
        body = "".join(
            f"<tr><th scope='row'>{html.escape(name)}</th>{''.join(map(_html_cell, cells))}</tr>"
            for name, *cells in self.rows
        )
        notes = "".join(f"<p class='note'>{html.escape(note)}</p>" for note in self.notes)
        return (
            f"<table><caption>{html.escape(self.title)}</caption><thead><tr>{head}</tr></thead>"
            f"<tbody>{body}</tbody></table>{notes}"
        )

    def _repr_html_(self) -> str:
        # Notebooks lack the style sheet of the report, so every cell gets its own alignment.
        page = self.to_html()
        sides = {"<td": "right", "<th scope='col'": "right", "<th scope='row'": "left",
                 "<caption": "left"}  # fmt: skip
        for start, side in sides.items():
            page = page.replace(start, f"{start} style='text-align:{side};padding:.15em .6em'")
        return page


def _html_cell(cell: str) -> str:
    return f"<td{' class=best' * cell.endswith('*')}>{html.escape(cell)}</td>"


def wrapped(line: str) -> str:
    """Wrap a line at 100 characters; continuation lines are indented."""
    return textwrap.fill(line, 100, subsequent_indent="  ", break_on_hyphens=False)


def interval_text(interval: Interval) -> str:
    """Return the text of a mean with the half width of its 95 % interval, as in ``.748 ±.013``.

    Without an interval, the text is the mean; without a mean, "-".
    """
    if math.isnan(interval.mean):
        return "-"
    text = number(interval.mean)
    if math.isnan(interval.low):
        return text
    return f"{text} ±{number((interval.high - interval.low) / 2)}"


def number(value: float) -> str:
    """Return the text of a number, "-" for NaN.

    The text has three decimals and no zero before the decimal point, such as ".748"; if
    |value| >= 10, it has four significant digits.
    """
    if math.isnan(value):
        return "-"
    text = f"{value:.3f}" if abs(value) < 10 else f"{value:.4g}"
    return text.replace("0.", ".", 1) if text.startswith(("0.", "-0.")) else text


def head_title(result: Comparison, head: str) -> str:
    """Return the name of a head, followed by its definition for a head of the library."""
    role = dict(zip(result.context.heads, result.context.head_roles, strict=True))[head]
    meaning = {
        "retrained": "head refitted after erasing",
        "frozen": "head of the unerased rows",
        "unregularised": "head refitted without penalty",
    }
    return f"{head}: {meaning[role]}" if role in meaning else head


def overview(result: Comparison) -> str:
    """Return the tables and notes of a comparison as text."""
    remarks = "\n".join(map(wrapped, remark_lines(result)))
    return "\n\n".join(filter(None, [heading(result), *map(str, summaries(result)), remarks]))


def failures(result: Comparison) -> list[tuple[str, str, str]]:
    """Return the failures, without those of the heads of an eraser that failed itself."""
    rows = result.failures
    return [row for row in rows if not row[1] or (row[0], ERASER_ROW, row[2]) not in rows]


def remark_lines(result: Comparison) -> list[str]:
    """Return the lines with the failures, the first eight notes, and the advice."""
    failed = [
        f"! {eraser}{', ' + head if head else ''}: {reason}"
        for eraser, head, reason in failures(result)
    ]
    return [*failed, *(f"note: {note}" for note in result.notes[:8]), *advice_lines(result)]


def notebook(result: Comparison) -> str:
    """Return the content of `overview` as HTML, for notebooks."""
    items = "".join(f"<li>{html.escape(line)}</li>" for line in remark_lines(result))
    return (
        f"<p style='white-space:pre-line'>{html.escape(heading(result))}</p>"
        + "".join(table._repr_html_() for table in summaries(result))
        + (f"<ul>{items}</ul>" if items else "")
    )


def heading(result: Comparison) -> str:
    """Return the text of the sizes of data and splits, and the meaning of the intervals."""
    c = result.context
    sizes = list(result.sizes.values())
    train, validation, test = (_range(counts) for counts in zip(*sizes, strict=True))
    if c.test_labels:
        meaning = (
            "± half a 95 % bootstrap interval over test rows (conservative for the worst group)"
        )
    elif len(c.seeds) < MIN_SEEDS:
        meaning = f"{len(c.seeds)} seed(s): fewer than {MIN_SEEDS}, so nothing is tested"
    else:
        meaning = f"mean ± half a 95 % interval over {len(c.seeds)} resamplings of this data set"
    first = f"{c.n:,} rows, {c.d} features; {train} train, {validation} validation, {test} test"
    lines = [first, meaning]
    if len(set(sizes)) > 1:
        lines += map(wrapped, split_sizes(result))
    return "\n".join(lines)


def split_sizes(result: Comparison) -> list[str]:
    """Return a line per level: sizes of its splits, and fraction of all rows in each split."""
    lines = []
    for p in result.context.levels:
        seeds: dict[tuple[int, int, int], list[str]] = {}
        for (seed, q), size in result.sizes.items():
            if q == p:
                seeds.setdefault(size, []).append(str(seed))
        sizes = "; ".join(
            f"{train:,} + {validation:,} + {test:,}, "
            f"{(train + validation + test) / result.context.n:.0%} of the rows"
            + (f" (seed{'s' * (len(names) > 1)} {', '.join(names)})" if len(seeds) > 1 else "")
            for (train, validation, test), names in seeds.items()
        )
        level = "natural split" if p is None else f"p = {p:g}"
        lines.append(f"{level}: training + validation + test = {sizes}")
    return lines


def _range(numbers: Sequence[int]) -> str:
    """Return the range of numbers as text, such as "5 to 9", or "5" for equal numbers."""
    low, high = min(numbers), max(numbers)
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


# Order of the columns of the summary tables: that of SUMMARY, except that accuracy comes first.
_COLUMNS = ("accuracy", *(m for m in SUMMARY if m != "accuracy"))


def summaries(result: Comparison) -> list[Table]:
    """Return the tables of the metrics for each head, at the default level.

    With several levels, each head also has a table of the headline metric over the levels.
    """
    context, present = result.context, result.metrics
    p = result.level()
    columns = (
        [m for m in _COLUMNS if m in present],
        [m for m in present if m.partition("[")[0] in OF_FAIRNESS],
        [m for m in context.custom_metrics if m in present],
    )
    tables = [
        summary(result, head, p, metrics)
        for head in context.heads
        for i, metrics in enumerate(columns) if metrics or i == 0
    ]  # fmt: skip
    if len(context.levels) > 1 and present:
        tables += [by_level(result, headline(present), head) for head in context.heads]
    return tables


def summary(result: Comparison, head: str, p: float | None, metrics: Sequence[str]) -> Table:
    """Return the table of erasers (rows) by metrics (columns), for a head at a level.

    The mark * means that an eraser is significantly better than every other eraser, ? that a worst
    group has few rows, and ~ that a solver did not converge.
    """
    context = result.context
    entries = {m: result.metric(m) for m in metrics}
    starred = {
        m: result.verdict(m, head=head, p=p).confirmed
        for m, entry in entries.items() if entry.of == "head" and entry.lower_is_better is not None
    }  # fmt: skip
    unreliable = {e for e in context.erasers if has_few_rows(result, e, head, p)}
    fractions = {e: _seed_fraction(result, e, head, p) for e in context.erasers}
    rows = []
    for eraser in context.erasers:
        records = [r for r in result.records if (r.eraser, r.head) == (eraser, head)]
        mark = " ~" if any(not r.converged for r in records) else ""
        cells = [eraser + mark + fractions[eraser]]
        for metric, entry in entries.items():
            interval = result.interval(metric, eraser=eraser, head=head, p=p)
            text = interval_text(interval) if entry.of == "head" else number(interval.mean)
            if metric == "worst_group" and eraser in unreliable:
                text += "?"
            cells.append(text + "*" * (starred.get(metric) == eraser))
        rows.append(tuple(cells))
    notes = worst_cell_lines(result, head, p) if "worst_group" in metrics else []
    if unreliable and notes:
        notes.append(f"? worst group of fewer than {FEW_ROWS} test rows: not reliable")
    if any(fractions.values()):
        notes.append(
            f"k/{len(context.seeds)}: k of {len(context.seeds)} seeds have values, the others "
            "failed; erasers are compared over the seeds at which all have values"
        )
    if context.test_labels:
        level = "your test rows"
    else:
        level = "natural split" if p is None else association(context, p)
    columns = ("eraser", *(entry.label for entry in entries.values()))
    return Table(f"{head_title(result, head)}; {level}", columns, tuple(rows), tuple(notes))


def _seed_fraction(result: Comparison, eraser: str, head: str, p: float | None) -> str:
    """Return " k/J" if k of J seeds have values, 0 < k < J; otherwise ""."""
    of_level = (r for r in result.records if (r.eraser, r.head, r.p) == (eraser, head, p))
    return _fraction(sum(bool(r.values) for r in of_level), len(result.context.seeds))


def _fraction(k: int, n: int) -> str:
    return f" {k}/{n}" if 0 < k < n else ""


def has_few_rows(result: Comparison, eraser: str, head: str | None, p: float | None) -> bool:
    """Whether the worst group at any seed has fewer than `FEW_ROWS` test rows."""
    cells = result.worst_cells(eraser=eraser, head=head, p=p).values()
    return any(cell.n < FEW_ROWS for cell in cells)


def worst_cell_text(result: Comparison, eraser: str, head: str, p: float | None) -> str:
    """Return the text of the cell that is most often the worst over seeds; "" without cells."""
    cells = list(result.worst_cells(eraser=eraser, head=head, p=p).values())
    if not cells:
        return ""
    name, count = Counter(cell.cell for cell in cells).most_common(1)[0]
    text = f"{name} (n = {_range([cell.n for cell in cells if cell.cell == name])})"
    return text if count == len(cells) else f"{text} at {count} of {len(cells)} seeds"


def worst_cell_lines(result: Comparison, head: str, p: float | None) -> list[str]:
    """Return one line that lists each worst cell and its erasers; [] without cells."""
    erasers_of: dict[str, list[str]] = {}
    for eraser in result.context.erasers:
        text = worst_cell_text(result, eraser, head, p)
        if text:
            erasers_of.setdefault(text, []).append(eraser)
    text = "; ".join(f"{text}: {', '.join(erasers)}" for text, erasers in erasers_of.items())
    return [f"worst group: {text}"] if text else []


def association(context: Context, p: float) -> str:
    """Return the text of an association level, its method, and the aligned class."""
    aligned = f" (aligned: {context.aligned_class})" if context.aligned_class else ""
    return f"association p = {p:g}{aligned}"


def by_level(result: Comparison, metric: str, head: str | None) -> Table:
    """Return the table of a metric by eraser and association level."""
    context, head_name = result.context, result.head_of(metric, head)
    rows = []
    for eraser in context.erasers:
        intervals = (result.interval(metric, eraser=eraser, head=head, p=p) for p in context.levels)
        cells = (interval_text(i) + _fraction(i.n, len(context.seeds)) for i in intervals)
        rows.append((eraser, *cells))
    levels = ("natural" if p is None else f"p = {p:g}" for p in context.levels)
    title = result.metric(metric).label + (f", {head_name} head" if head_name else "")
    return Table(title, ("eraser", *levels), tuple(rows))


def difference_table(differences: Differences) -> Table:
    """Return the table of differences, with intervals, t statistics and p values."""

    def text(value: float, shown: str) -> str:
        return "-" if math.isnan(value) else shown

    rows = tuple(
        (
            d.method,
            signed(d.difference),
            text(d.low, f"[{signed(d.low)}, {signed(d.high)}]"),
            text(d.t, f"{d.t:.2f}"),
            text(d.p, f"{d.p:.3f}"),
            text(d.p_holm, f"{d.p_holm:.3f}" + "*" * d.significant),
            f"{d.favours_method}:{d.favours_reference} of {d.n}",
        )
        for d in differences
    )
    reference, how = "", "no test"
    if differences:
        reference, how = differences[0].reference, differences[0].how
    head = f", {differences.head} head" if differences.head else ""
    level = "" if differences.p is None else f", p = {differences.p:g}"
    columns = ("eraser", "difference", "95 % interval", "t", "p", "p (Holm)", "higher in")
    title = f"{differences.label} minus that of {reference}{head}{level}; {how}"
    return Table(title, columns, rows)


def signed(value: float) -> str:
    """Return the text of a number with its sign; a number that rounds to 0 has the sign +."""
    text = number(value)
    return f"+{text.removeprefix('-')}" if value >= 0 or not text.strip("-.0") else text


def advice_lines(result: Comparison) -> list[str]:
    """Return the lines of advice: one on frozen heads, and one per concept."""
    values, context = result.advice(), result.context
    if not values:
        return []
    first = f"advice: {FrozenHeadAdvice(values['rho'], values['threshold'])}"
    differences = {
        max(context.alphas): values["squared_error_strong"],
        min(context.alphas): values["squared_error_weak"],
    }
    if not any(map(math.isnan, differences.values())):
        text = " and ".join(f"{e:+.2g} at alpha {alpha:g}" for alpha, e in differences.items())
        first += (
            ". The squared error of ridge heads on the test rows, after SPLINCE minus after LEACE, "
            f"is {text}"
        )
    if values["task_classes"] == 2:
        first += (
            ". For two classes of about equal size, a frozen head predicts nearly the same classes "
            "after both erasers"
        )
    lines = [first]
    for name in context.concepts:
        r2, before, rows = (
            values.get(concept_key(key, name, context.concepts), math.nan)
            for key in ("expected_r2", "trace_before", "rows_for_half")
        )
        if not math.isnan(r2) and round(before, 3) == 0:
            lines.append(
                f"advice: the training rows have no linear association with {name} before erasing "
                f"(Pillai trace {before:.3f}); are they erased already?"
            )
        elif not math.isnan(r2):
            lines.append(
                f"advice: after erasing, a linear probe is expected to find R2 {r2:.3f} of {name} "
                "in new rows like the training rows (Pillai trace before erasing: "
                f"{before:.3f}); {rows:,.0f} training rows would halve this R2"
            )
    return lines
