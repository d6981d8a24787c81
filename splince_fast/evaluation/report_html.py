"""The report: one self-contained HTML file with tables and inline figures."""

from __future__ import annotations

import io
import platform
import re
from importlib.metadata import version
from importlib.resources import files
from typing import TYPE_CHECKING

from splince_fast._runtime.arguments import library_version, require
from splince_fast.evaluation import figures, tables
from splince_fast.evaluation.decision import summary
from splince_fast.evaluation.measurements import Measurements
from splince_fast.evaluation.text_table import Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_TEMPLATE = "report.html.jinja"
_CAPTIONS = {
    "association": "Test rows are decorrelated. Training rows differ between levels; where groups "
    "are kept together, test rows differ, too: compare erasers at the same p.",
    "trade-off": "The best eraser has a probe at chance level (dashed line) and a good task score.",
}


def render(result: Measurements) -> str:
    """Render the report as a complete HTML document."""
    jinja2 = require("jinja2", "evaluate")
    markup = require("markupsafe", "evaluate").Markup
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    source = files("splince_fast.evaluation").joinpath(_TEMPLATE).read_text(encoding="utf-8")
    decision, *others = summary(result)
    entries = map(result.metric, result.metrics)
    page: str = environment.from_string(source).render(
        title=f"Erasing {', '.join(result.context.concepts)}: which eraser, at which cost",
        sentences=[decision.sentence, *others],
        reasons=decision.reasons,
        heading=tables.heading(result),
        figures=[
            (markup(_svg(figures.draw(result, kind), kind)), _CAPTIONS[kind])
            for kind in figures.available(result)
        ],
        tables=[markup(table.to_html()) for table in tables.summaries(result)],
        differences=[markup(table.to_html()) for table in _difference_tables(result)],
        failures=tables.failures(result),
        notes=result.notes,
        definitions=[
            *{entry.label: entry.definition for entry in entries}.items(),
            ("t, p", "of the paired test over seeds, corrected for splits that share rows"),
        ],
        settings=settings(result),
    )
    return figures.escape_unwritable(page)


def _difference_tables(result: Measurements) -> list[Table]:
    """One table per head and metric of the differences from LEACE (or else the first eraser)."""
    c = result.context
    reference = c.eraser_as("LEACE") or c.erasers[0]
    metrics = [m for m in ("worst_group", "accuracy", "r2") if m in result.metrics][:2]
    if len(c.erasers) < 2:
        return []
    return [
        result.differences(m, reference=reference, head=head).table()
        for head in c.heads for m in metrics
    ]  # fmt: skip


def settings(result: Measurements) -> list[tuple[str, str]]:
    """Return (name, value) of each setting of the comparison, and of the versions of libraries."""
    c, libraries = result.context, ("numpy", "scipy", "scikit-learn")
    levels = ", ".join("natural split" if p is None else f"{p:g}" for p in c.levels)
    return [
        ("rows, features", f"{c.n:,}, {c.d:,}"),
        ("association", levels + (f", aligned: {c.aligned_class}" if c.aligned_class else "")),
        ("seeds", ", ".join(map(str, c.seeds))),
        ("erasers", ", ".join(c.erasers)),
        ("heads", ", ".join(c.heads)),
        ("alphas", ", ".join(f"{alpha:g}" for alpha in c.alphas)),
        ("probes", ", ".join(c.probes) or "none"),
        ("data fingerprint", c.fingerprint),
        ("splince_fast", library_version()),
        *((name, version(name)) for name in libraries),
        ("Python", platform.python_version()),
    ]


def _svg(figure: Figure, kind: str) -> str:
    """Convert a figure to a scalable, labelled SVG element without external references."""
    buffer = io.StringIO()
    matplotlib = require("matplotlib", "evaluate")
    style = {"svg.fonttype": "none", "svg.hashsalt": kind, "font.family": "sans-serif"}
    with matplotlib.rc_context({**style, "text.parse_math": False}):
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    for pattern, replacement in (
        (r"<metadata>.*?</metadata>", ""),
        (r'(?<=^<svg)([^>]*?) width="[^"]*"', r"\1"),
        (r'(?<=^<svg)([^>]*?) height="[^"]*"', r"\1"),
        (r'\s(xmlns(:\w+)?)="[^"]*"', ""),
        ("xlink:href", "href"),
        # Ids must be unique in the document: prefix the ids of the SVG with the kind of figure.
        (r'id="|href="#|url\(#', rf"\g<0>{kind}-"),
        ("^<svg", f"<svg role='img' aria-label='figure: {kind}'"),
    ):
        text = re.sub(pattern, replacement, text, flags=re.DOTALL)
    return text
