"""Tables of a comparison, as text of at most 100 columns and as HTML."""

from __future__ import annotations

import html
import math
import textwrap
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from splince_fast.evaluation._cells import FEW_ROWS
from splince_fast.evaluation.scoring import OF_FAIRNESS, SUMMARY, headline
from splince_fast.evaluation.statistics import MIN_SEEDS, Interval

if TYPE_CHECKING:
    from splince_fast.evaluation._differences import Differences
    from splince_fast.evaluation._records import Context
    from splince_fast.evaluation.result import Comparison


@dataclass(frozen=True, slots=True)
class Table:
    """A table of text.

    Attributes
    ----------
    title : str
    columns : tuple of str
    rows : tuple of tuple of str
        The first entry names the row.
    notes : tuple of str
        Lines below it.
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
        """The same as an HTML table.

        Returns
        -------
        str
            A table element with a caption, escaped.
        """
        head = "".join(f"<th scope='col'>{html.escape(c)}</th>" for c in self.columns)
        body = "".join(
            "<tr>"
            + f"<th scope='row'>{html.escape(row[0])}</th>"
            + "".join(_html_cell(cell) for cell in row[1:])
            + "</tr>"
            for row in self.rows
        )
        notes = "".join(f"<p class='note'>{html.escape(note)}</p>" for note in self.notes)
        return (
            f"<table><caption>{html.escape(self.title)}</caption><thead><tr>{head}</tr></thead>"
            f"<tbody>{body}</tbody></table>{notes}"
        )

    def _repr_html_(self) -> str:
        # Notebooks align as they please; without a style sheet every cell carries its own.
        page = self.to_html()
        sides = {"<td": "right", "<th scope='col'": "right", "<th scope='row'": "left",
                 "<caption": "left"}  # fmt: skip
        for start, side in sides.items():
            page = page.replace(start, f"{start} style='text-align:{side};padding:.15em .6em'")
        return page


def _html_cell(cell: str) -> str:
    best = cell.endswith("*")
    return f"<td{' class=best' if best else ''}>{html.escape(cell)}</td>"


def wrapped(line: str) -> str:
    """A line in at most 100 columns, continued with an indent."""
    return textwrap.fill(line, 100, subsequent_indent="  ", break_on_hyphens=False)


def figure_text(interval: Interval) -> str:
    """Mean, and half the 95 % interval where there is one: ``.748 ±.013``."""
    if math.isnan(interval.mean):
        return "-"
    text = number(interval.mean)
    if math.isnan(interval.low):
        return text
    return f"{text} ±{number((interval.high - interval.low) / 2)}"


def number(value: float) -> str:
    """Three decimals without a leading zero; two where it is large."""
    if math.isnan(value):
        return "-"
    text = f"{value:.3f}" if abs(value) < 10 else f"{value:.4g}"
    return text.replace("0.", ".", 1) if text.startswith(("0.", "-0.")) else text


def head_title(result: Comparison, head: str) -> str:
    """Definition of a head, in a line."""
    role = dict(zip(result.context.heads, result.context.head_roles, strict=True))[head]
    meaning = {
        "retrained": "head refitted after erasing",
        "frozen": "head of the unerased rows",
        "unregularised": "head refitted without penalty",
    }
    return f"{head}: {meaning[role]}" if role in meaning else head


def overview(result: Comparison) -> str:
    """Text of print, in at most 100 columns."""
    parts = [heading(result), *map(str, summaries(result))]
    remarks = [wrapped(line) for line in remarks_of(result)]
    return "\n\n".join([*parts, "\n".join(remarks)] if remarks else parts)


def remarks_of(result: Comparison) -> list[str]:
    """Failures, the first notes, and the advice, a line each."""
    failed = [
        f"! {eraser}{', ' + head if head else ''}: {reason}"
        for eraser, head, reason in result.failures
    ]
    return [*failed, *(f"note: {note}" for note in result.notes[:8]), *advice_lines(result)]


def notebook(result: Comparison) -> str:
    """HTML of `overview`, for notebooks."""
    items = "".join(f"<li>{html.escape(line)}</li>" for line in remarks_of(result))
    return (
        f"<p style='white-space:pre-line'>{html.escape(heading(result))}</p>"
        + "".join(table._repr_html_() for table in summaries(result))
        + (f"<ul>{items}</ul>" if items else "")
    )


def heading(result: Comparison) -> str:
    """Settings of the comparison, and definition of a figure."""
    c = result.context
    sizes = list(result.sizes.values())
    train, validation, test = (_range([size[k] for size in sizes]) for k in range(3))
    lines = [
        f"{c.n:,} rows, {c.d} features; {train} train, {validation} validation, {test} test",
        f"mean ± half a 95 % interval over {len(c.seeds)} resamplings of this data set"
        if not c.truth
        else "± half a 95 % bootstrap interval over test rows (conservative for the worst group)",
    ]
    if len(c.seeds) < MIN_SEEDS and not c.truth:
        lines[1] = f"{len(c.seeds)} seed(s): fewer than {MIN_SEEDS}, so nothing is tested"
    if len(set(sizes)) > 1:
        lines += map(wrapped, sizes_told(result))
    return "\n".join(lines)


def sizes_told(result: Comparison) -> list[str]:
    """The sizes of the splits of every level, with the fraction of all rows that they use."""
    lines = []
    for p in result.context.levels:
        seeds: dict[tuple[int, int, int], list[str]] = {}
        for (seed, q), size in result.sizes.items():
            if q == p:
                seeds.setdefault(size, []).append(str(seed))
        told = "; ".join(
            f"{train:,} + {validation:,} + {test:,}, "
            f"{(train + validation + test) / result.context.n:.0%} of the rows"
            + (f" (seed{'s' * (len(of) > 1)} {', '.join(of)})" if len(seeds) > 1 else "")
            for (train, validation, test), of in seeds.items()
        )
        level = "natural split" if p is None else f"p = {p:g}"
        lines.append(f"{level}: training + validation + test = {told}")
    return lines


def _range(numbers: Sequence[int]) -> str:
    """A number, or the smallest and the largest of several."""
    low, high = min(numbers), max(numbers)
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


# Accuracy first, beside which the worst group is read.
_COLUMNS = ("accuracy", *(m for m in SUMMARY if m != "accuracy"))


def summaries(result: Comparison) -> list[Table]:
    """One table per head at the main level; with several levels a table over them."""
    c = result.context
    p = result.level()
    tables = []
    present = result.metrics
    fair = [m for m in present if m.partition("[")[0] in OF_FAIRNESS]
    own = [m for m in c.own_metrics if m in present]
    for head in c.heads:
        tables.append(summary(result, head, p, [m for m in _COLUMNS if m in present]))
        tables += [summary(result, head, p, more) for more in (fair, own) if more]
    if len(c.levels) > 1 and present:
        metric = headline(present)
        tables += [by_level(result, metric, head) for head in c.heads]
    return tables


def summary(result: Comparison, head: str, p: float | None, metrics: Sequence[str]) -> Table:
    """Erasers by metrics for a head at a level; * where the test says so."""
    of_heads = [m for m in metrics if result.metric(m).of == "head"]
    starred = {
        m: result.verdict(m, head=head, p=p).confirmed
        for m in of_heads if result.metric(m).lower_is_better is not None
    }  # fmt: skip
    unreliable = {e for e in result.context.erasers if _few_rows(result, e, head, p)}
    rows = []
    for eraser in result.context.erasers:
        cells = [eraser + _marks(result, eraser, head, p)]
        for metric in metrics:
            text = figure_text(result.interval(metric, eraser=eraser, head=head, p=p))
            if metric not in of_heads:
                text = text.split(" ")[0]
            if metric == "worst_group" and eraser in unreliable:
                text += "?"
            cells.append(text + ("*" if starred.get(metric) == eraser else ""))
        rows.append(tuple(cells))
    level = "natural split" if p is None else association(result.context, p)
    if result.context.truth:
        level = "your test rows"
    columns = ("eraser", *(result.metric(m).label for m in metrics))
    notes = worst_cell_lines(result, head, p) if "worst_group" in metrics else []
    if unreliable and notes:
        notes.append(f"? worst group of fewer than {FEW_ROWS} test rows: not reliable")
    names = [row[0] for row in rows]
    if any("/" in n.removeprefix(e) for n, e in zip(names, result.context.erasers, strict=True)):
        notes.append(
            f"k/{len(result.context.seeds)}: k seeds have values, the others failed; erasers are "
            "compared over common seeds"
        )
    return Table(f"{head_title(result, head)}; {level}", columns, tuple(rows), tuple(notes))


def _marks(result: Comparison, eraser: str, head: str, p: float | None) -> str:
    """~ for a solver that did not converge, and the seeds that have values where some failed."""
    of = [r for r in result.records if (r.eraser, r.head) == (eraser, head)]
    there = sum(bool(r.values) for r in of if r.p == p)
    text = " ~" if any(not r.converged for r in of) else ""
    return text + (f" {there}/{len(result.context.seeds)}" if 0 < there < _seeds(result) else "")


def _seeds(result: Comparison) -> int:
    return len(result.context.seeds)


def _few_rows(result: Comparison, eraser: str, head: str, p: float | None) -> bool:
    """Whether the worst group of a seed has too few rows."""
    cells = result.worst_cells(eraser=eraser, head=head, p=p).values()
    return any(cell.n < FEW_ROWS for cell in cells)


def worst_cell_text(result: Comparison, eraser: str, head: str, p: float | None) -> str:
    """The cell that is the worst one at most seeds, with its rows; "" where there is none."""
    cells = list(result.worst_cells(eraser=eraser, head=head, p=p).values())
    if not cells:
        return ""
    name, count = Counter(cell.cell for cell in cells).most_common(1)[0]
    text = f"{name} (n = {_range([cell.n for cell in cells if cell.cell == name])})"
    return text if count == len(cells) else f"{text} at {count} of {len(cells)} seeds"


def worst_cell_lines(result: Comparison, head: str, p: float | None) -> list[str]:
    """The worst cell of every eraser, those with the same one together."""
    found: dict[str, list[str]] = {}
    for eraser in result.context.erasers:
        text = worst_cell_text(result, eraser, head, p)
        if text:
            found.setdefault(text, []).append(eraser)
    told = "; ".join(f"{text}: {', '.join(erasers)}" for text, erasers in found.items())
    return [f"worst group: {told}"] if told else []


def association(context: Context, p: float) -> str:
    """A level, how it was reached, and who is aligned with whom."""
    text = f"association p = {p:g}" + (
        " by weights" if context.association_method == "weights" else ""
    )
    return text + (f" (aligned: {context.aligned_class})" if context.aligned_class else "")


def by_level(result: Comparison, metric: str, head: str | None) -> Table:
    """A figure by eraser and level."""
    chosen = result.head_of(metric, head)
    rows = []
    for eraser in result.context.erasers:
        found = [
            result.interval(metric, eraser=eraser, head=head, p=p) for p in result.context.levels
        ]
        cells = [
            figure_text(f) + (f" {f.n}/{_seeds(result)}" if 0 < f.n < _seeds(result) else "")
            for f in found
        ]
        rows.append((eraser, *cells))
    levels = tuple("natural" if p is None else f"p = {p:g}" for p in result.context.levels)
    title = result.metric(metric).label + (f", {chosen} head" if chosen else "")
    return Table(title, ("eraser", *levels), tuple(rows))


def difference_table(found: Differences) -> Table:
    """Differences with intervals, corrected t and Holm-adjusted p."""
    rows = []
    for d in found:
        rows.append(
            (
                d.method,
                signed(d.difference),
                "-" if math.isnan(d.low) else f"[{signed(d.low)}, {signed(d.high)}]",
                "-" if math.isnan(d.t) else f"{d.t:.2f}",
                "-" if math.isnan(d.p) else f"{d.p:.3f}",
                "-" if math.isnan(d.p_holm) else f"{d.p_holm:.3f}" + "*" * d.significant,
                f"{d.favours_method}:{d.favours_reference} of {d.n}",
            )
        )
    reference = found[0].reference if found else ""
    head = f", {found.head} head" if found.head else ""
    level = "" if found.p is None else f", p = {found.p:g}"
    how = found[0].how if found else "no test"
    columns = ("eraser", "difference", "95 % interval", "t", "p", "p (Holm)", "higher in")
    title = f"{found.label} minus that of {reference}{head}{level}; {how}"
    return Table(title, columns, tuple(rows))


def signed(value: float) -> str:
    """A number with its sign; that of a rounded 0 is +."""
    text = number(value)
    return f"+{text.removeprefix('-')}" if value >= 0 or not text.strip("-.0") else text


def advice_lines(result: Comparison) -> list[str]:
    """Advice from the moments beside the measured figures."""
    found = result.advice()
    if not found:
        return []
    rho, threshold = found["rho"], found["threshold"]
    lines = [
        f"advice: overlap of concept and task rho = {rho:.3f}; a frozen head shrunk below "
        f"{threshold:.2f} of the least-squares head has the smaller squared error after SPLINCE, "
        "above after LEACE"
    ]
    ends = found["squared_error_strong"], found["squared_error_weak"]
    if not any(map(math.isnan, ends)):
        strong, weak = max(result.context.alphas), min(result.context.alphas)
        lines[0] += (
            f" (measured, frozen ridge heads: SPLINCE minus LEACE {ends[0]:+.2g} at alpha "
            f"{strong:g}, {ends[1]:+.2g} at {weak:g})"
        )
    if found["task_classes"] == 2:
        lines[0] += "; for two classes of like size both decide alike"
    for name in result.context.concepts:
        suffix = f"[{name}]" if len(result.context.concepts) > 1 else ""
        if f"expected_r2{suffix}" in found:
            lines.append(
                f"advice: on new rows like the training rows R2 {found[f'expected_r2{suffix}']:.3f}"
                f" of {name} is expected after erasing ({found[f'trace_before{suffix}']:.3f} "
                f"before, trace); half of it takes {found[f'rows_for_half{suffix}']:,.0f} rows"
            )
    return lines
