"""Figures of a comparison, with colours that are safe for colour-blind readers."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from splince_fast._runtime.extras import require
from splince_fast._runtime.keywords import check_keywords
from splince_fast.evaluation.metrics import OF_PROBES
from splince_fast.evaluation.statistics import Interval, cell_interval
from splince_fast.exceptions import InputError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from splince_fast.evaluation.result import Comparison

# Palette of Okabe and Ito, distinct for all common types of colour vision.
_COLOURS = ("#000000", "#E69F00", "#0072B2", "#009E73", "#CC79A7", "#D55E00", "#56B4E9", "#8C8C00")
_MARKERS = "osD^vPX*"
_UNWRITABLE = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")
_MAX_CELLS = 10  # largest number of cells in the figure "groups"
Style = dict[str, Any]  # keyword arguments of a matplotlib artist


def draw(result: Comparison, kind: str, **options: object) -> Figure:
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
    """Return the text with escapes such as ``\\x01`` for control characters and lone surrogates.

    XML, HTML and fonts cannot represent these characters, and UTF-8 cannot encode surrogates.
    """
    return _UNWRITABLE.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def available(result: Comparison) -> list[str]:
    """Return the kinds of figures for which the comparison has data."""
    c, metrics = result.context, result.metrics
    conditions = {
        "association": len(c.levels) > 1,
        "alphas": len(c.alphas) > 1 and len(c.erasers) > 1 and any(r.path for r in result.records),
        "covariance": any(r.values.get("kept_covariance", 0.0) > 0 for r in result.records),
        "leakage": bool(_probe_accuracies(result)),
        "groups": any(r.cells and r.p == result.level() for r in result.records),
        "trade-off": {"probe_accuracy", "worst_group"} <= set(metrics),
        "partial": "probe_accuracy" in metrics and bool(_partial_families(result)),
    }
    return [kind for kind, condition in conditions.items() if condition]


# -- helpers for several figures --------------------------------------------------------------


def _style(result: Comparison, eraser: str) -> Style:
    """Return the colour and marker of an eraser."""
    i = result.context.erasers.index(eraser)
    return {**_colour_and_marker(i), "markersize": 5}


def _colour_and_marker(i: int) -> Style:
    return {"color": _COLOURS[i % len(_COLOURS)], "marker": _MARKERS[i % len(_MARKERS)]}


def _legend(axes: Axes, title: str, **options: Any) -> None:
    """Add a small legend without a frame; the title describes error bars and bands."""
    options = {"alignment": "left"} | options
    axes.legend(title=title, frameon=False, fontsize="small", title_fontsize="small", **options)


def _interval_title(result: Comparison) -> str:
    n = len(result.context.seeds)
    return f"mean and 95 % t interval over {n} resamplings" if n > 1 else "one split"


def _half_widths(intervals: Iterable[Interval]) -> list[float]:
    """Return the half widths of intervals, for error bars; 0 for an interval that is NaN."""
    return [0.0 if math.isnan(i.low) else i.high - i.mean for i in intervals]


def _name_ticks(axis: Any, names: Sequence[str]) -> None:
    axis.set_ticks(range(len(names)), [*map(escape_unwritable, names)])


def _use_plain_ticks(axis: Any) -> None:
    """Label a logarithmic axis with numbers such as 0.01 instead of powers of 10."""
    ticker = require("matplotlib.ticker", "evaluate")
    axis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(ticker.LogFormatter())


def _plot_over_levels(result: Comparison, axes: Axes, metric: str, head: str | None) -> None:
    """Plot a metric against the association level: a line and an interval band per eraser."""
    levels = [p for p in result.context.levels if p is not None]
    if not levels:
        raise InputError(
            "the run has only the natural split; this figure needs association=(.5, ...)"
        )
    for eraser in result.context.erasers:
        intervals = [result.interval(metric, eraser=eraser, head=head, p=p) for p in levels]
        style = _style(result, eraser)
        axes.plot(levels, [i.mean for i in intervals], label=eraser, **style)
        low = [i.mean if math.isnan(i.low) else i.low for i in intervals]
        high = [i.mean if math.isnan(i.high) else i.high for i in intervals]
        axes.fill_between(levels, low, high, color=style["color"], alpha=0.12, linewidth=0)
    axes.set_xlabel("association p of task and concept in the training rows")
    axes.set_xticks(levels)


def _probe_accuracies(result: Comparison) -> list[str]:
    """Return the names of the probe accuracies among the metrics, for all concepts of classes."""
    return [
        m for m in result.metrics
        if (base := m.partition("[")[0]) in OF_PROBES and base.endswith("_accuracy")
    ]  # fmt: skip


def _add_chance_lines(
    result: Comparison,
    axes: Axes,
    p: float | None,
    accuracies: Sequence[str],
    *,
    legend: bool = True,
) -> None:
    """Add a line at the chance level of each concept, and extend the y axis to include the lines.

    `accuracies` are the names of the probe accuracies in the figure.
    """
    label = "majority class" if legend else None
    levels = []
    for key in (name.replace("_accuracy", "_chance", 1) for name in accuracies):
        means = (result.mean(key, eraser=e, p=p) for e in result.context.erasers)
        levels += [level for level in means if not math.isnan(level)][:1]
    for level in dict.fromkeys(levels):  # each distinct level once
        axes.axhline(level, color="#888888", linewidth=1, linestyle="--", label=label)
        label = None
        low, high = axes.get_ylim()
        axes.set_ylim(min(low, level - 0.02 * (1.0 - level)), high)


# -- figures ----------------------------------------------------------------------------------


def _association(
    result: Comparison, axes: Axes, *, metric: str = "worst_group", head: str | None = None
) -> None:
    """Plot a metric against the association level."""
    _plot_over_levels(result, axes, metric, head)
    head = result.head_of(metric, head)
    label = result.metric(metric).label
    axes.set_ylabel(label)
    axes.set_title(f"{label}{f', {head} head' if head else ''}", loc="left")
    _legend(axes, _interval_title(result))


def _alphas(
    result: Comparison,
    axes: Axes,
    *,
    metric: str | None = None,
    reference: str | None = None,
    p: float | None = None,
) -> None:
    """Plot the difference from a reference eraser against alpha, the penalty of the head."""
    metric = metric or ("accuracy" if "accuracy" in result.metrics else "r2")
    erasers = result.context.erasers
    reference = reference or result.context.eraser_as("LEACE") or erasers[0]
    head = result.context.head_as("retrained")
    alphas = sorted(result.context.alphas)
    if head is None or len(alphas) < 2 or not any(r.path for r in result.records):
        raise InputError("this figure needs values of the head 'retrained' at several alphas")
    tables = [
        {d.method: d for d in result.differences(
            metric, reference=reference, head=head, p=p, alpha=alpha
        )}
        for alpha in alphas
    ]  # fmt: skip
    tested = False
    for i, eraser in enumerate(e for e in erasers if e != reference):
        rows = [table[eraser] for table in tables]
        low = [0.0 if math.isnan(d.low) else d.difference - d.low for d in rows]
        high = [0.0 if math.isnan(d.high) else d.high - d.difference for d in rows]
        tested |= not all(math.isnan(d.low) for d in rows)
        axes.errorbar(
            [alpha * 1.08 ** (i - len(erasers) / 2) for alpha in alphas],
            [d.difference for d in rows], yerr=[low, high], label=eraser, linewidth=1, capsize=2,
            **_style(result, eraser),
        )  # fmt: skip
    axes.axhline(0, color="#888888", linewidth=0.8)
    axes.set_xscale("log")
    _use_plain_ticks(axes.xaxis)
    axes.set_xlabel("alpha λ of the penalty (mean log-loss + λ/2 |w|²)")
    label = result.metric(metric).label
    axes.set_ylabel(f"{label} minus that of {reference}")
    axes.set_title(f"{label} by alpha, head refitted after erasing", loc="left")
    _legend(axes, "bars: 95 % interval, corrected t" if tested else "no test")


def _covariance(result: Comparison, axes: Axes) -> None:
    """Plot the kept fraction of the squared covariance with the task, on a logarithmic axis."""
    metric, erasers = "kept_covariance", result.context.erasers
    if len(result.context.levels) > 1:
        _plot_over_levels(result, axes, metric, None)
    else:
        for i, eraser in enumerate(erasers):
            value = result.mean(metric, eraser=eraser)
            axes.plot([i], [value], linestyle="none", label=eraser, **_style(result, eraser))
        _name_ticks(axes.xaxis, erasers)
        axes.margins(x=0.2)
    axes.set_yscale("log")
    _use_plain_ticks(axes.yaxis)
    axes.set_ylabel("|P Cov(x, y)|² / |Cov(x, y)|²")
    axes.set_title("kept fraction of the covariance with the task", loc="left")
    _legend(axes, _interval_title(result))


def _leakage(result: Comparison, axes: Axes, *, p: float | None = None) -> None:
    """Plot the accuracy of each probe on erased test rows, with chance levels."""
    names = _probe_accuracies(result)
    if not names:
        raise InputError("the run has no probes; pass leakage=('linear',)")
    erasers = result.context.erasers
    for k, metric in enumerate(names):
        offset = (k - (len(names) - 1) / 2) * 0.18
        intervals = [result.interval(metric, eraser=e, p=p) for e in erasers]
        axes.errorbar(
            [i + offset for i in range(len(erasers))], [i.mean for i in intervals],
            yerr=_half_widths(intervals), linestyle="none", capsize=3, **_colour_and_marker(k),
            label=metric.replace("probe_accuracy", "linear").replace("_accuracy", ""),
        )  # fmt: skip
    _add_chance_lines(result, axes, p, names)
    _name_ticks(axes.xaxis, erasers)
    axes.set_ylabel("probe accuracy")
    axes.set_title("probe accuracy for the concept on held-out rows", loc="left")
    _legend(axes, f"probes; {_interval_title(result)}")


def _groups(
    result: Comparison, axes: Axes, *, head: str | None = None, p: float | None = None
) -> None:
    """Plot the accuracy in each cell: mean over seeds, interval, and number of test rows.

    The default head is the first head that has values.
    """
    p, heads = result.level(p), result.context.heads
    records = [r for r in result.records if r.cells and r.p == p]
    head = head or min((r.head for r in records), key=heads.index, default=heads[0])
    rates: dict[tuple[int, str], list[float]] = {}  # accuracies over seeds, by (cell, eraser)
    rows: dict[tuple[int, str], list[int]] = {}
    for r in records:
        for cell, n, n_correct in r.cells if r.head == head else ():
            rates.setdefault((cell, r.eraser), []).append(n_correct / n)
            rows.setdefault((cell, r.eraser), []).append(n)
    if not rates:
        raise InputError(
            f"the head {head!r} has no cells: task or concept is a quantity, or the head failed"
        )
    mean = {key: sum(values) / len(values) for key, values in rates.items()}
    mean_rows = {key: sum(values) / len(values) for key, values in rows.items()}
    lowest: dict[int, float] = {}
    most_rows: dict[int, float] = {}
    for (cell, eraser), value in mean.items():
        lowest[cell] = min(value, lowest.get(cell, value))
        most_rows[cell] = max(mean_rows[cell, eraser], most_rows.get(cell, 0.0))
    cells = sorted(sorted(lowest, key=lowest.__getitem__)[:_MAX_CELLS])
    figure: Any = axes.figure
    figure.set_figheight(max(4.0, 1.6 + 0.5 * len(cells)))  # tick labels have two lines
    train, _, test = result.context.sizes
    erasers = result.context.erasers
    for i, eraser in enumerate(erasers):
        style = _style(result, eraser)
        for row, cell in enumerate(cells):
            if (cell, eraser) not in rates:
                continue
            limits = cell_interval(rates[cell, eraser], mean_rows[cell, eraser], test / train)
            y = row + (i - (len(erasers) - 1) / 2) * 0.16
            axes.plot(limits, [y, y], color=style["color"], linewidth=1)
            label = eraser if row == 0 else None
            axes.plot([mean[cell, eraser]], [y], linestyle="none", label=label, **style)
    names = result.context.cells
    _name_ticks(axes.yaxis, [f"{names[c]}\nn = {most_rows[c]:,.0f}" for c in cells])
    axes.invert_yaxis()
    axes.set_xlabel("accuracy on test rows")
    more = f" (the {_MAX_CELLS} worst of {len(lowest)})" if len(lowest) > _MAX_CELLS else ""
    axes.set_title(f"accuracy per cell{more}, {head} head", loc="left")
    _legend(
        axes, "bars: 95 %, corrected for rows that seeds share", loc="upper center",
        bbox_to_anchor=(0.5, -0.16), ncols=min(4, len(erasers)),
    )  # fmt: skip


def _trade_off(
    result: Comparison, axes: Axes, *, head: str | None = None, p: float | None = None
) -> None:
    """Plot the probe accuracy for the concept (lower is better) against worst-group accuracy."""
    heads = result.context.heads if head is None else (head,)
    for k, name in enumerate(heads):
        for eraser in result.context.erasers:
            x = result.mean("worst_group", eraser=eraser, head=name, p=p)
            y = result.mean("probe_accuracy", eraser=eraser, p=p)
            axes.plot(
                [x], [y], linestyle="none", fillstyle="full" if k == 0 else "none",
                label=eraser if k == 0 else None, **_style(result, eraser) | {"markersize": 8},
            )  # fmt: skip
    _add_chance_lines(result, axes, p, ["probe_accuracy"], legend=False)
    axes.set_xlabel("worst-group accuracy (better to the right)")
    axes.set_ylabel("probe accuracy for the concept (better below)")
    axes.set_title("accuracy for the concept, and accuracy for the task", loc="left")
    _legend(axes, f"filled: {heads[0]} head" + (f"; open: {heads[1]}" if len(heads) > 1 else ""))


def _partial_families(result: Comparison) -> dict[str, list[tuple[float, str]]]:
    """Return the partial erasers by base name, as lists of (alpha, name) in ascending order.

    If the complete eraser was compared, its list also holds it, with alpha 1.
    """
    context = result.context
    families: dict[str, list[tuple[float, str]]] = {}
    for eraser, role in zip(context.erasers, context.eraser_roles, strict=True):
        base, star, intensity = role.rpartition("*")
        if star:
            families.setdefault(base, []).append((float(intensity), eraser))
    for base, points in families.items():
        if (complete := context.eraser_as(base)) is not None:
            points.append((1.0, complete))
        points.sort()
    return families


def _partial(
    result: Comparison, axes: Axes, *, metric: str = "probe_accuracy", p: float | None = None
) -> None:
    """Plot a metric of partial erasers against alpha, with one line per base eraser."""
    families = _partial_families(result)
    if not families:
        raise InputError("the run has no partial erasers; pass erasers=('LEACE', 'LEACE*0.9', ...)")
    none = result.context.eraser_as("none")
    for k, (base, points) in enumerate(families.items()):
        points = points if none is None else [(0.0, none), *points]
        intervals = [result.interval(metric, eraser=eraser, p=p) for _, eraser in points]
        axes.errorbar(
            [intensity for intensity, _ in points], [i.mean for i in intervals],
            yerr=_half_widths(intervals), capsize=3, label=base, **_colour_and_marker(k),
        )  # fmt: skip
    label = result.metric(metric).label
    if metric == "probe_accuracy":
        _add_chance_lines(result, axes, p, [metric])
    axes.set_xlabel("intensity alpha: fraction of the change that is applied")
    axes.set_ylabel(label)
    axes.set_title(f"{label} of partial erasers: only alpha = 1 erases", loc="left")
    _legend(axes, _interval_title(result), alignment="center")


KINDS: dict[str, Callable[..., None]] = {
    "association": _association,
    "alphas": _alphas,
    "covariance": _covariance,
    "leakage": _leakage,
    "groups": _groups,
    "trade-off": _trade_off,
    "partial": _partial,
}
