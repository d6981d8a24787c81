"""The report: one self-contained HTML file with tables and inline figures."""

from __future__ import annotations

import io
import platform
import re
from importlib.resources import files
from typing import TYPE_CHECKING

import numpy as np
import scipy
import sklearn

from splince_fast._runtime.extras import require
from splince_fast._runtime.version import library_version
from splince_fast.evaluation import _tables, figures
from splince_fast.evaluation._decision import cards

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from splince_fast.evaluation.result import Comparison

_TEMPLATE = "report.html.jinja"
# The report starts with the first two of these figures that the comparison has.
_FIRST = ("association", "trade-off", "groups", "leakage")
_CAPTIONS = {
    "association": "Test rows are decorrelated and the same at every p; training rows differ.",
    "alphas": "With a weak penalty, heads refitted after SAL, LEACE and SPLINCE agree (Theorem 2).",
    "covariance": "1: the covariance with the task is unchanged, as by construction of SPLINCE.",
    "leakage": "Probes are trained and scored within test rows. Dashed: the chance level.",
    "groups": "The cells of task and concept; n is their number of test rows per seed.",
    "trade-off": "Lower right is best: accurate, with a probe at chance level (dashed line).",
    "partial": "Below alpha = 1 the map is invertible: a linear probe that is fitted to its output "
    "still predicts the concept. Only alpha = 1 erases the concept.",
}


def render(result: Comparison) -> str:
    """Render the report as a complete HTML document.

    Raises
    ------
    MissingExtraError
        matplotlib or jinja2 is not installed.
    """
    jinja2 = require("jinja2", "evaluate")
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    source = files("splince_fast.evaluation").joinpath(_TEMPLATE).read_text(encoding="utf-8")
    markup = require("markupsafe", "evaluate").Markup
    drawn = {
        kind: (kind, markup(_svg(figures.draw(result, kind), kind)), caption(result, kind))
        for kind in figures.available(result)
    }
    first = [drawn.pop(kind) for kind in [k for k in _FIRST if k in drawn][:2]]
    page: str = environment.from_string(source).render(
        title=f"Erasing {', '.join(result.context.concepts)}: which eraser, at which cost",
        summary=_summary(result),
        cards=cards(result),
        definitions=definitions(result),
        first=first,
        tables=[markup(table.to_html()) for table in _tables.summaries(result)],
        differences=[markup(table.to_html()) for table in _difference_tables(result)],
        figures=list(drawn.values()),
        advice=[line.removeprefix("advice: ") for line in _tables.advice_lines(result)],
        failures=_tables.failures(result),
        notes=result.notes,
        settings=settings(result),
        versions=_versions(),
    )
    return figures.escape_unwritable(page)


def caption(result: Comparison, kind: str) -> str:
    """Caption of the figure of a kind, such as "association"."""
    if kind == "association" and not result.context.same_test:
        return (
            "Test rows are decorrelated, but differ between levels, because groups are not "
            "divided: compare erasers at the same p. The settings list the rows of every split."
        )
    return _CAPTIONS[kind]


def _summary(result: Comparison) -> str:
    """Text at the top of the report: sizes, meaning of the intervals, default association level."""
    heading, p = _tables.heading(result), result.level()
    if p is None:
        return heading
    association = _tables.association(result.context, p)
    return f"{heading}; {association} in training where no other p is named"


def _difference_tables(result: Comparison) -> list[_tables.Table]:
    """One table per head and metric of the differences from LEACE (or else the first eraser)."""
    c = result.context
    reference = c.eraser_as("LEACE") or c.erasers[0]
    metrics = [m for m in ("worst_group", "accuracy", "r2") if m in result.metrics][:2]
    if len(c.erasers) < 2:
        return []
    return [
        _tables.difference_table(result.differences(m, reference=reference, head=head))
        for head in c.heads for m in metrics
    ]  # fmt: skip


def definitions(result: Comparison) -> list[tuple[str, str]]:
    """Return (label, definition) of each column in the tables of the report."""
    entries = map(result.metric, result.metrics)
    return [
        *{entry.label: entry.definition for entry in entries}.items(),
        ("difference", "mean over seeds of the value of the eraser minus that of the reference"),
        ("t, p", "of the paired test over seeds, corrected for splits that share rows"),
        ("p (Holm)", "p adjusted for all differences of the table; * below .05"),
        ("higher in", "numbers of seeds at which the eraser, and the reference, is higher"),
    ]


def settings(result: Comparison) -> list[tuple[str, str]]:
    """Return (name, value) of each setting of the comparison."""
    c = result.context
    levels = ", ".join("natural split" if p is None else f"{p:g}" for p in c.levels)
    return [
        ("rows, features", f"{c.n:,}, {c.d:,}"),
        *(("rows of the splits", line) for line in _tables.split_sizes(result)),
        ("association", levels + (f", aligned: {c.aligned_class}" if c.aligned_class else "")),
        ("seeds", ", ".join(map(str, c.seeds))),
        ("erasers", ", ".join(c.erasers)),
        ("heads", ", ".join(c.heads)),
        ("alphas", ", ".join(f"{alpha:g}" for alpha in c.alphas) + f"; selected by {c.select}"),
        ("probes", ", ".join(c.probes) or "none"),
        ("data fingerprint", c.fingerprint),
    ]


def _versions() -> list[tuple[str, str]]:
    """Return (name, version) of the libraries and of Python."""
    modules = [(module.__name__, module.__version__) for module in (np, scipy, sklearn)]
    return [("splince_fast", library_version()), *modules, ("Python", platform.python_version())]


def _svg(figure: Figure, kind: str) -> str:
    """Convert a figure to a scalable, labelled SVG element without external references."""
    buffer = io.StringIO()
    matplotlib = require("matplotlib", "evaluate")
    style = {"svg.fonttype": "none", "svg.hashsalt": kind, "font.family": "sans-serif"}
    with matplotlib.rc_context({**style, "text.parse_math": False}):
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'<svg([^>]*?) width="[^"]*"', r"<svg\1", text, count=1)
    text = re.sub(r'<svg([^>]*?) height="[^"]*"', r"<svg\1", text, count=1)
    text = re.sub(r'\s(xmlns(:\w+)?)="[^"]*"', "", text)
    text = text.replace("xlink:href", "href")
    # Ids must be unique in the document: prefix the ids of the SVG with the kind of figure.
    text = re.sub(r'id="', f'id="{kind}-', text)
    text = re.sub(r'href="#', f'href="#{kind}-', text)
    text = re.sub(r"url\(#", f"url(#{kind}-", text)
    return text.replace("<svg", f"<svg role='img' aria-label='figure: {kind}'", 1)
