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
from splince_fast.evaluation._cells import FEW_ROWS
from splince_fast.evaluation.scoring import headline
from splince_fast.evaluation.statistics import MIN_SEEDS

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
        findings=findings(result),
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


def findings(result: Comparison) -> list[tuple[str, str]]:
    """The first screen: a figure and what it says, in words of the data.

    Parameters
    ----------
    result : Comparison
        Result of compare.

    Returns
    -------
    list of tuple of str
        (large text, sentence).
    """
    found = []
    c = result.context
    none = c.eraser_as("none")
    for head in c.heads:
        leading = _leading(result, head, none)
        if leading is not None:
            found.append(leading)
    probed = _ordered(result, "probe_accuracy", none)
    if probed:
        lowest = probed[0]
        before = (
            f"{_tables.number(result.mean('probe_accuracy', eraser=none))} unerased, "
            if none else ""
        )  # fmt: skip
        chance = result.mean("probe_chance", eraser=lowest)
        found.append((
            _tables.number(result.mean("probe_accuracy", eraser=lowest)),
            f"accuracy of a linear probe for {', '.join(c.concepts)} on new rows after {lowest}"
            f"{', the lowest' * (len(probed) > 1)} ({before}majority class "
            f"{_tables.number(chance)}).",
        ))  # fmt: skip
    kept = _ordered(result, "kept_covariance", none)
    if len(kept) > 1:
        most, least = (
            _tables.number(result.mean("kept_covariance", eraser=e)) for e in (kept[0], kept[-1])
        )
        found.append((
            most,
            f"of the squared covariance with the task is kept by {kept[0]}, {least} by {kept[-1]}.",
        ))  # fmt: skip
    return found


def _leading(result: Comparison, head: str, none: str | None) -> tuple[str, str] | None:
    """The leading eraser of a head by the headline metric, and what the test says of it."""
    if not result.metrics:
        return None
    metric = headline(result.metrics)
    found = result.verdict(metric, head=head)
    if not found.order:
        return None
    best, p = found.order[0], result.level()
    value = _tables.figure_text(result.interval(metric, eraser=best, head=head))
    text = f"{result.metric(metric).label}, {head} head: "
    if len(found.level) > 1:
        text += f"{', '.join(found.level)} are level"
    else:
        text += "unerased rows lead" if best == none else f"{best} leads"
    if none in found.order and none not in found.level:
        text += f" ({_tables.number(result.mean(metric, eraser=none, head=head))} unerased)"
    if len(found.order) == 1:
        text += "; no other eraser has a value."
    elif not found.tested:
        text += "; no test was made" + (
            f", which takes {MIN_SEEDS} seeds." if found.n_seeds < MIN_SEEDS else "."
        )
    elif found.confirmed:
        text += "; the corrected test confirms it."
    else:
        rest = [e for e in found.leaders if e not in found.level]
        text += f"; the corrected test cannot tell {', '.join(rest)} from it." if rest else "."
    if 0 < found.n_seeds < len(result.context.seeds):
        text += f" Ordered over the {found.n_seeds} seeds that all have."
    cell = _tables.worst_cell_text(result, best, head, p) if metric == "worst_group" else ""
    few = any(c.n < FEW_ROWS for c in result.worst_cells(eraser=best, head=head).values())
    if cell:
        text += f" Worst group: {cell}" + (
            f"; fewer than {FEW_ROWS} rows, not reliable." if few else "."
        )
    return value, text


def _ordered(result: Comparison, metric: str, none: str | None) -> list[str]:
    """Erasers but "none", the best first; empty where there is no such metric."""
    if metric not in result.metrics:
        return []
    return [e for e in result.verdict(metric).order if e != none]


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
