"""Figures of a comparison, with colours that are safe for colour-blind readers."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from splince_fast._runtime.arguments import check_keywords, require
from splince_fast.evaluation.measurements import Measurements
from splince_fast.evaluation.metrics import headline
from splince_fast.exceptions import InputError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Palette of Okabe and Ito, distinct for all common types of colour vision.
_COLOURS = ("#000000", "#E69F00", "#0072B2", "#009E73", "#CC79A7", "#D55E00", "#56B4E9", "#8C8C00")
_MARKERS = "osD^vPX*"
_UNWRITABLE = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")


def draw(result: Measurements, kind: str, **options: object) -> Figure:
    """Return one figure without a window, as documented in :meth:`Comparison.plot`."""
    if kind not in KINDS:
        raise InputError(f"there is no figure {kind!r}; choose from {', '.join(KINDS)}")
    check_keywords(options, KINDS[kind], without=("result", "axes"), where=f"the figure {kind!r}")
    module, matplotlib = require("matplotlib.figure", "evaluate"), require("matplotlib", "evaluate")
    with matplotlib.rc_context({"text.parse_math": False}):  # show "$" in labels as text
        figure: Figure = module.Figure(figsize=(6.4, 4.0), layout="constrained")
        axes = figure.add_subplot()
        axes.spines[["top", "right"]].set_visible(False)
        KINDS[kind](result, axes, **options)
        for text in figure.findobj(require("matplotlib.text", "evaluate").Text):
            text.set_text(escape_unwritable(text.get_text()))
    return figure


def escape_unwritable(text: str) -> str:
    """Return the text with escapes such as ``\\x01`` for characters that XML cannot represent."""
    return _UNWRITABLE.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def available(result: Measurements) -> list[str]:
    """Return the kinds of figures for which the comparison has data."""
    if not any(r.head and r.values for r in result.records):
        return []
    trade_off = ["trade-off"] if _probe_scores(result) else []
    return trade_off + (["association"] if len(result.context.levels) > 1 else [])


def _style(result: Measurements, eraser: str) -> dict[str, Any]:
    """Return the colour and marker of an eraser."""
    i = result.context.erasers.index(eraser)
    colour, marker = _COLOURS[i % len(_COLOURS)], _MARKERS[i % len(_MARKERS)]
    return {"color": colour, "marker": marker, "markersize": 5}


def _legend(axes: Axes, title: str, erasers: Sequence[str]) -> None:
    """Add a legend below the axes; the title describes bars, bands or marks."""
    figure: Any = axes.figure
    columns = 84 // (max(map(len, erasers)) + 6)  # a line of the figure has about 84 characters
    figure.legend(
        title=title, frameon=False, fontsize="small", title_fontsize="small",
        loc="outside lower center", ncols=max(1, min(4, columns)),
    )  # fmt: skip


def _association(
    result: Measurements, axes: Axes, *, metric: str | None = None, head: str | None = None
) -> None:
    """Plot a metric against the association level: a line and an interval band per eraser."""
    levels = [p for p in result.context.levels if p is not None]
    if not levels:
        raise InputError("the run has only the natural split; the figure needs association=")
    metric = headline(result.metrics) if metric is None else metric
    for eraser in result.context.erasers:
        intervals = [result.interval(metric, eraser=eraser, head=head, p=p) for p in levels]
        style = _style(result, eraser)
        axes.plot(levels, [i.mean for i in intervals], label=eraser, **style)
        low = [i.mean if math.isnan(i.low) else i.low for i in intervals]
        high = [i.mean if math.isnan(i.high) else i.high for i in intervals]
        axes.fill_between(levels, low, high, color=style["color"], alpha=0.12, linewidth=0)
    axes.set_xlabel("association p of task and concept in the training rows")
    axes.set_xticks(levels)
    head, label = result._head_of(metric, head), result.metric(metric).label
    axes.set_ylabel(label)
    axes.set_title(f"{label}{f', {head} head' if head else ''}", loc="left")
    n = len(result.context.seeds)
    title = f"mean and 95 % t interval over {n} resamplings" if n > 1 else "one split"
    _legend(axes, title, result.context.erasers)


def _probe_scores(result: Measurements) -> list[str]:
    """Return the names of accuracies and R2 of linear probes, one per concept."""
    return [m for m in result.metrics if m.partition("[")[0] in ("probe_accuracy", "probe_r2")]


def _trade_off(
    result: Measurements, axes: Axes, *, metric: str | None = None, head: str | None = None,
    p: float | None = None,
) -> None:  # fmt: skip
    """Plot the score of a probe for the first concept (lower is better) against a task metric."""
    probes = _probe_scores(result)
    if not probes:
        raise InputError("the run has no probes; pass leakage=('linear',)")
    probe, context = probes[0], result.context
    metric = headline(result.metrics) if metric is None else metric
    entry = result.metric(metric)
    heads: Sequence[str] = context.heads if head is None else (head,)
    for k, name in enumerate(heads[:2]):
        for eraser in context.erasers:
            x = result.mean(metric, eraser=eraser, head=name, p=p)
            y = result.mean(probe, eraser=eraser, p=p)
            axes.plot(
                [x], [y], linestyle="none", fillstyle="full" if k == 0 else "none",
                label=eraser if k == 0 else None, **_style(result, eraser) | {"markersize": 8},
            )  # fmt: skip
    chance = "probe_chance" + probe.partition("[")[1] + probe.partition("[")[2]  # 0 for an R2
    levels = (result.mean(chance, eraser=e, p=p) for e in context.erasers)
    level = next((level for level in levels if not math.isnan(level)), math.nan)
    axes.axhline(level, color="#888888", linewidth=1, linestyle="--")
    side = "left" if entry.lower_is_better else "right"
    axes.set_xlabel(f"{entry.label} (better to the {side})")
    axes.set_ylabel(f"{result.metric(probe).label} (better below)")
    axes.set_title("the concept, and the task; dashed: chance", loc="left")
    marks = f"filled: {heads[0]} head" + (f"; open: {heads[1]}" if len(heads) > 1 else "")
    _legend(axes, marks, context.erasers)


KINDS: dict[str, Callable[..., None]] = {"association": _association, "trade-off": _trade_off}
