"""Tables as text and HTML, and the formatting of the numbers in them."""

from __future__ import annotations

import html
import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

from splince_fast.evaluation.statistics import Interval

# Notebooks have no style sheet, so every cell gets its own alignment.
_LEFT, _RIGHT = (f"style='text-align:{side};padding:.25em .6em'" for side in ("left", "right"))


@dataclass(frozen=True, slots=True)
class Table:
    """Table of text; the first entry of a row is its name, and `notes` are lines below."""

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
        head = "".join(
            f"<th scope='col' {_RIGHT if i else _LEFT}>{html.escape(column)}</th>"
            for i, column in enumerate(self.columns)
        )
        body = "".join(
            f"<tr><th scope='row' {_LEFT}>{html.escape(name)}</th>"
            f"{''.join(map(_html_cell, cells))}</tr>"
            for name, *cells in self.rows
        )
        notes = "".join(f"<p class='note'>{html.escape(note)}</p>" for note in self.notes)
        return (
            f"<table><caption {_LEFT}>{html.escape(self.title)}</caption><thead><tr>{head}</tr>"
            f"</thead><tbody>{body}</tbody></table>{notes}"
        )

    _repr_html_ = to_html


def _html_cell(cell: str) -> str:
    return f"<td {_RIGHT}{' class=best' * cell.endswith('*')}>{html.escape(cell)}</td>"


def wrapped(line: str) -> str:
    """Wrap a line at 100 characters; continuation lines are indented."""
    return textwrap.fill(line, 100, subsequent_indent="  ", break_on_hyphens=False)


def interval_text(interval: Interval) -> str:
    """Return the text of a mean with the half width of its 95 % interval, as in ``.748 ±.013``."""
    if math.isnan(interval.mean) or math.isnan(interval.low):
        return number(interval.mean)
    return f"{number(interval.mean)} ±{number((interval.high - interval.low) / 2)}"


def number(value: float) -> str:
    """Return three decimals without a leading zero, as in ".748"; four digits from 10 on."""
    if math.isnan(value):
        return "-"
    text = f"{value:.3f}" if abs(value) < 10 else f"{value:.4g}"
    return text.replace("0.", ".", 1) if text.startswith(("0.", "-0.")) else text


def signed(value: float) -> str:
    """Return the text of a number with its sign; a number that rounds to 0 has the sign +."""
    text = number(value)
    return f"+{text.removeprefix('-')}" if value >= 0 or not text.strip("-.0") else text


def joined(names: Sequence[str]) -> str:
    """Join names to a text: "A", "A and B", "A, B and C"."""
    *first, last = names
    return f"{', '.join(first)} and {last}" if first else last
