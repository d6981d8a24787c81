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
from splince_fast.evaluation.statistics import MIN_SEEDS

if TYPE_CHECKING:
    from splince_fast.evaluation.result import Comparison

_TEMPLATE = "report.html.jinja"
_FIRST = ("association", "trade-off", "groups", "leakage")  # the first two open the report
_CAPTIONS = {
    "association": "Test rows are the same at every p and decorrelated; only training changes.",
    "strengths": "With a weak penalty every guarded eraser gives the same head (Theorem 2).",
    "covariance": "1 is untouched. SPLINCE keeps it by construction.",
    "leakage": "Probes are trained and scored within test rows. Chance is the dashed line.",
    "groups": "The cells of task and concept; a small n makes a wide bar.",
    "trade-off": "The lower right corner has neither leakage nor loss.",
}


def render(result: Comparison) -> str:
    """The report as text.

    Parameters
    ----------
    result : Comparison
        What compare found.

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
        drawn[kind] = kind, safe(_svg(figures.draw(result, kind), kind)), _CAPTIONS[kind]
    first = [drawn.pop(kind) for kind in [k for k in _FIRST if k in drawn][:2]]
    text: str = environment.from_string(source).render(
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
    return text


def _title(result: Comparison) -> str:
    return f"Erasing {', '.join(result.context.concepts)}: which eraser, at which cost"


def _summary(result: Comparison) -> str:
    """What the first screen is about."""
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
        What compare found.

    Returns
    -------
    list of tuple of str
        (large text, sentence).
    """
    found = []
    c = result.context
    for head in c.heads:
        metric = "worst_group" if "worst_group" in result.metrics else result.metrics[0]
        best = result.best(metric, head=head)
        if not best:
            continue
        value = _tables.figure_text(result.interval(metric, eraser=best[0], head=head))
        label = _tables.LABELS.get(metric, metric) + " accuracy" * (metric == "worst_group")
        text = f"{label}, {head} head: {best[0]} leads"
        if "none" in c.erasers and best[0] != "none":
            text += f" ({_tables.number(result.mean(metric, eraser='none', head=head))} unerased)"
        if len(c.seeds) < MIN_SEEDS and not c.truth:
            text += "; too few seeds to test."
        elif len(best) == 1:
            text += "; the corrected test confirms it."
        else:
            text += f"; the corrected test cannot tell {', '.join(best[1:])} from it."
        found.append((value, text))
    erased = [e for e in c.erasers if e != "none"]
    values = _means(result, "probe_accuracy", erased)
    if values:
        lowest = min(values, key=lambda e: values[e])
        before = (
            f"{_tables.number(result.mean('probe_accuracy', eraser='none'))} unerased, "
            if "none" in c.erasers else ""
        )  # fmt: skip
        chance = result.mean("probe_chance", eraser=lowest)
        found.append((
            _tables.number(values[lowest]),
            f"accuracy of a linear probe for {', '.join(c.concepts)} on new rows after {lowest}, "
            f"the lowest ({before}majority class {_tables.number(chance)}).",
        ))  # fmt: skip
    kept = _means(result, "kept_covariance", erased)
    if len(kept) > 1:
        most, least = (pick(kept, key=lambda e: kept[e]) for pick in (max, min))
        found.append((
            _tables.number(kept[most]),
            f"of the squared covariance with the task is kept by {most}, "
            f"{_tables.number(kept[least])} by {least}.",
        ))  # fmt: skip
    return found


def _means(result: Comparison, metric: str, erasers: list[str]) -> dict[str, float]:
    """Means by eraser; empty where there is no such figure."""
    if metric not in result.metrics:
        return {}
    values = {e: result.mean(metric, eraser=e) for e in erasers}
    return {e: v for e, v in values.items() if v == v}


def _difference_tables(result: Comparison) -> list[_tables.Table]:
    """Against LEACE, or the first eraser, per head."""
    c = result.context
    reference = "LEACE" if "LEACE" in c.erasers else c.erasers[0]
    metrics = [m for m in ("worst_group", "accuracy", "r2") if m in result.metrics][:2]
    if len(c.erasers) < 2:
        return []
    return [
        _tables.difference_table(result.differences(m, reference=reference, head=head))
        for head in c.heads for m in metrics
    ]  # fmt: skip


def settings(result: Comparison) -> list[tuple[str, str]]:
    """What was run.

    Parameters
    ----------
    result : Comparison
        What compare found.

    Returns
    -------
    list of tuple of str
        (name, value).
    """
    c = result.context
    levels = ", ".join("natural split" if p is None else f"{p:g}" for p in c.levels)
    train, validation, test = c.sizes
    return [
        ("rows, features", f"{c.n:,}, {c.d:,}"),
        ("training, validation, test rows", f"{train:,}, {validation:,}, {test:,}"),
        ("association", levels + (f", tied: {c.tied}" if c.tied else "")),
        ("reached by", "weights of cells" if c.by == "weights" else "choice of rows"),
        ("seeds", ", ".join(map(str, c.seeds))),
        ("erasers", ", ".join(c.erasers)),
        ("heads", ", ".join(c.heads)),
        ("strengths", ", ".join(f"{s:g}" for s in c.strengths) + f"; chosen by {c.select}"),
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
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": kind,
                                "font.family": "sans-serif"}):  # fmt: skip
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
