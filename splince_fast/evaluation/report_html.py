"""The report: one HTML file with tables and inline figures that asks the network for nothing."""

from __future__ import annotations

import io
import platform
import re
from importlib.resources import files
from typing import TYPE_CHECKING, Any

import numpy as np
import scipy
import sklearn

from splince_fast._runtime.extras import require
from splince_fast.evaluation import _tables, figures
from splince_fast.evaluation._decision import cards
from splince_fast.evaluation.scoring import METRICS

if TYPE_CHECKING:
    from splince_fast.evaluation.result import Comparison

_TEMPLATE = "report.html.jinja"
_FIRST = ("association", "trade-off", "groups", "leakage")  # the first two open the report
_CAPTIONS = {
    "association": "Test rows are decorrelated and the same at every p; only training changes.",
    "alphas": "With a weak penalty every guarded eraser gives the same head (Theorem 2).",
    "covariance": "1 is untouched. SPLINCE keeps it by construction.",
    "leakage": "Probes are trained and scored within test rows. Chance is the dashed line.",
    "groups": "The cells of task and concept; n is their number of test rows per seed.",
    "trade-off": "The lower right corner has neither leakage nor loss.",
}


def render(result: Comparison) -> str:
    """The report as text.

    Parameters
    ----------
    result : Comparison
        Result of compare.

    Returns
    -------
    str
        A complete HTML document below 1 MB.

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
    safe = require("markupsafe", "evaluate").Markup
    drawn = {}
    for kind in figures.available(result):
        drawn[kind] = kind, safe(_svg(figures.draw(result, kind), kind)), _caption(result, kind)
    first = [drawn.pop(kind) for kind in [k for k in _FIRST if k in drawn][:2]]
    page: str = environment.from_string(source).render(
        title=_title(result),
        summary=_summary(result),
        cards=cards(result),
        definitions=definitions(result),
        first=first,
        tables=[safe(table.to_html()) for table in _tables.summaries(result)],
        differences=[safe(table.to_html()) for table in _difference_tables(result)],
        figures=list(drawn.values()),
        advice=[line.removeprefix("advice: ") for line in _tables.advice_lines(result)],
        failures=result.failures,
        notes=result.notes,
        settings=settings(result),
        versions=versions(),
    )
    return figures.visible(page)


def _caption(result: Comparison, kind: str) -> str:
    """Caption of a figure, for this run."""
    if kind == "association" and not result.context.same_test:
        return (
            "Test rows are decorrelated, but differ between levels, as groups stay whole: compare "
            "erasers at one p. The settings list the rows of every split."
        )
    return _CAPTIONS[kind]


def _title(result: Comparison) -> str:
    return f"Erasing {', '.join(result.context.concepts)}: which eraser, at which cost"


def _summary(result: Comparison) -> str:
    """Cards of the first screen."""
    p = result.level()
    if p is None:
        return _tables.heading(result)
    where = _tables.association(result.context, p)
    return f"{_tables.heading(result)}; {where} in training where no other p is named"


def _difference_tables(result: Comparison) -> list[_tables.Table]:
    """Against LEACE, or the first eraser, per head."""
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
    """Definition of each column of the tables.

    Parameters
    ----------
    result : Comparison
        Result of compare.

    Returns
    -------
    list of tuple of str
        (label, definition).
    """
    found = {}
    for key in result.metrics:
        label = result.metric(key).label
        base = key.partition("[")[0]
        text = (
            "a metric of yours" if key in result.context.own_metrics else METRICS[base].definition
        )
        found[label] = text or METRICS[base].label
    return [
        *found.items(),
        ("difference", "mean over seeds of the eraser's figure minus that of the reference"),
        ("t, p", "of the paired test over seeds, corrected for splits that share rows"),
        ("p (Holm)", "p adjusted for all differences of the table; * below .05"),
        ("higher in", "seeds in which the eraser, and the reference, has the larger figure"),
    ]


def settings(result: Comparison) -> list[tuple[str, str]]:
    """Settings of the run.

    Parameters
    ----------
    result : Comparison
        Result of compare.

    Returns
    -------
    list of tuple of str
        (name, value).
    """
    c = result.context
    levels = ", ".join("natural split" if p is None else f"{p:g}" for p in c.levels)
    return [
        ("rows, features", f"{c.n:,}, {c.d:,}"),
        *(("rows of the splits", line) for line in _tables.sizes_told(result)),
        ("association", levels + (f", aligned: {c.aligned_class}" if c.aligned_class else "")),
        (
            "reached by",
            "weights of cells" if c.association_method == "weights" else "choice of rows",
        ),
        ("seeds", ", ".join(map(str, c.seeds))),
        ("erasers", ", ".join(c.erasers)),
        ("heads", ", ".join(c.heads)),
        ("alphas", ", ".join(f"{s:g}" for s in c.alphas) + f"; chosen by {c.select}"),
        ("probes", ", ".join(c.probes) or "none"),
        ("data fingerprint", c.fingerprint),
    ]


def versions() -> list[tuple[str, str]]:
    """Versions of what computed the report.

    Returns
    -------
    list of tuple of str
        (name, version).
    """
    import splince_fast

    modules: list[Any] = [splince_fast, np, scipy, sklearn]
    found = [(module.__name__, str(module.__version__)) for module in modules]
    return [*found, ("Python", platform.python_version())]


def _svg(figure: Any, kind: str) -> str:
    """A figure as an SVG element that scales, is named, and refers to nothing outside."""
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
    # Names are unique in the whole document.
    text = re.sub(r'id="', f'id="{kind}-', text)
    text = re.sub(r'href="#', f'href="#{kind}-', text)
    text = re.sub(r"url\(#", f"url(#{kind}-", text)
    return text.replace("<svg", f"<svg role='img' aria-label='figure: {kind}'", 1)
