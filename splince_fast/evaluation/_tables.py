"""Tables of a comparison, as text of at most 100 columns and as HTML."""

from __future__ import annotations

import html
import math
import textwrap
from dataclasses import dataclass
from typing import TYPE_CHECKING

from splince_fast.evaluation.statistics import MIN_SEEDS, Interval

if TYPE_CHECKING:
    from splince_fast.evaluation._context import Context, Differences
    from splince_fast.evaluation.result import Comparison

LABELS = {
    "accuracy": "accuracy",
    "worst_group": "worst group",
    "tpr_gap": "TPR gap",
    "class_accuracy": "acc/class",
    "probe_accuracy": "probe acc",
    "probe_auc": "probe AUC",
    "probe_r2": "probe R2",
    "kept_covariance": "kept cov",
    "distortion": "distortion",
    "r2": "R2",
    "mse": "MSE",
    "concept_correlation": "corr concept",
}
_OF_HEADS = ("accuracy", "worst_group", "tpr_gap", "r2", "mse", "concept_correlation")
_OF_ERASERS = ("probe_accuracy", "probe_auc", "probe_r2", "kept_covariance", "distortion")


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
        return "\n".join([*text, *self.notes])

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


def head_title(head: str) -> str:
    """What a head means, in a line."""
    meaning = {
        "retrained": "head refitted after erasing",
        "frozen": "head of the unerased rows",
        "unregularised": "head refitted without penalty",
    }
    return f"{head}: {meaning[head]}" if head in meaning else head


def overview(result: Comparison) -> str:
    """What print shows, in at most 100 columns."""
    parts = [heading(result), *map(str, summaries(result))]
    remarks = [
        textwrap.fill(line, 100, subsequent_indent="  ", break_on_hyphens=False)
        for line in remarks_of(result)
    ]
    return "\n\n".join([*parts, "\n".join(remarks)] if remarks else parts)


def remarks_of(result: Comparison) -> list[str]:
    """What failed, the first notes, and the advice, a line each."""
    failed = [
        f"! {eraser}{', ' + head if head else ''}: {reason}"
        for eraser, head, reason in result.failures
    ]
    return [*failed, *(f"note: {note}" for note in result.notes[:8]), *advice_lines(result)]


def notebook(result: Comparison) -> str:
    """What a notebook shows: as `overview`, in HTML."""
    items = "".join(f"<li>{html.escape(line)}</li>" for line in remarks_of(result))
    return (
        f"<p style='white-space:pre-line'>{html.escape(heading(result))}</p>"
        + "".join(table._repr_html_() for table in summaries(result))
        + (f"<ul>{items}</ul>" if items else "")
    )


def heading(result: Comparison) -> str:
    """What was compared, and what a figure is."""
    c = result.context
    train, validation, test = c.sizes
    lines = [
        f"{c.n:,} rows, {c.d} features; {train:,} train, {validation:,} validation, {test:,} test",
        f"mean ± half a 95 % interval over {len(c.seeds)} resamplings of this data set"
        if not c.truth
        else "± half a 95 % bootstrap interval over test rows (conservative for the worst group)",
    ]
    if len(c.seeds) < MIN_SEEDS and not c.truth:
        lines[1] = f"{len(c.seeds)} seed(s): fewer than {MIN_SEEDS}, so nothing is tested"
    return "\n".join(lines)


def summaries(result: Comparison) -> list[Table]:
    """One table per head at the main level; with several levels a table over them."""
    c = result.context
    p = result.level()
    tables = []
    for head in c.heads:
        tables.append(summary(result, head, p))
    if len(c.levels) > 1:
        metric = "worst_group" if "worst_group" in result.metrics else "accuracy"
        tables += [by_level(result, metric, head) for head in c.heads]
    return tables


def summary(result: Comparison, head: str, p: float | None) -> Table:
    """Erasers by figures for a head at a level; * where the test says so."""
    present = result.metrics
    metrics = [m for m in (*_OF_HEADS, *_OF_ERASERS) if m in present]
    starred = {m: _starred(result, m, head, p) for m in metrics if m in _OF_HEADS}
    rows = []
    for eraser in result.context.erasers:
        slow = any(
            not r["converged"] for r in result.records if (r["eraser"], r["head"]) == (eraser, head)
        )
        cells = [eraser + (" ~" if slow else "")]
        for metric in metrics:
            text = figure_text(result.interval(metric, eraser=eraser, head=head, p=p))
            if metric in _OF_ERASERS:
                text = text.split(" ")[0]
            cells.append(text + ("*" if starred.get(metric) == eraser else ""))
        rows.append(tuple(cells))
    level = "natural split" if p is None else association(result.context, p)
    if result.context.truth:
        level = "your test rows"
    columns = ("eraser", *(LABELS.get(m, m) for m in metrics))
    return Table(f"{head_title(head)}; {level}", columns, tuple(rows))


def association(context: Context, p: float) -> str:
    """A level, how it was reached, and who is tied to whom."""
    text = f"association p = {p:g}" + (" by weights" if context.by == "weights" else "")
    return text + (f" (tied: {context.tied})" if context.tied else "")


def _starred(result: Comparison, metric: str, head: str, p: float | None) -> str | None:
    """The eraser that beats every other one in the corrected test, if there is one."""
    best = result.best(metric, head=head, p=p)
    return best[0] if len(best) == 1 and len(result.context.erasers) > 1 else None


def by_level(result: Comparison, metric: str, head: str | None) -> Table:
    """A figure by eraser and level."""
    chosen = result.head_of(metric, head)
    rows = []
    for eraser in result.context.erasers:
        cells = [
            figure_text(result.interval(metric, eraser=eraser, head=head, p=p))
            for p in result.context.levels
        ]
        rows.append((eraser, *cells))
    levels = tuple("natural" if p is None else f"p = {p:g}" for p in result.context.levels)
    title = LABELS.get(metric, metric) + (f", {chosen} head" if chosen else "")
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
    label = LABELS.get(found.metric, found.metric)
    head = f", {found.head} head" if found.head else ""
    level = "" if found.p is None else f", p = {found.p:g}"
    how = found[0].how if found else "no test"
    columns = ("eraser", "difference", "95 % interval", "t", "p", "p (Holm)", "higher in")
    title = f"{label} minus that of {reference}{head}{level}; {how}"
    return Table(title, columns, tuple(rows))


def signed(value: float) -> str:
    """A number with its sign."""
    return ("+" if value >= 0 else "") + number(value)


def advice_lines(result: Comparison) -> list[str]:
    """What the moments say, beside what was measured."""
    found = result.advice()
    if not found:
        return []
    rho, threshold = found["rho"], found["threshold"]
    lines = [
        f"advice: overlap of concept and task rho = {rho:.3f}; a frozen head shrunk below "
        f"{threshold:.2f} of the least-squares head is served better by SPLINCE, above by LEACE"
    ]
    both = {"LEACE", "SPLINCE"} <= set(result.context.erasers)
    if both and "frozen" in result.context.heads and "accuracy" in result.metrics:
        gap = [result.mean("accuracy", eraser=e, head="frozen") for e in ("SPLINCE", "LEACE")]
        if not any(map(math.isnan, gap)):
            lines[0] += f" (measured: SPLINCE minus LEACE {signed(gap[0] - gap[1])} accuracy)"
    for name in result.context.concepts:
        suffix = f"[{name}]" if len(result.context.concepts) > 1 else ""
        if f"expected_r2{suffix}" in found:
            lines.append(
                f"advice: on new rows like the training rows R2 {found[f'expected_r2{suffix}']:.3f}"
                f" of {name} is expected after erasing ({found[f'trace_before{suffix}']:.3f} "
                f"before, trace); half of it takes {found[f'rows_for_half{suffix}']:,.0f} rows"
            )
    return lines
