"""Figures of a comparison, colour-blind safe; every legend says what a mark is."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from splince_fast._runtime.extras import require
from splince_fast._runtime.keywords import check_keywords
from splince_fast.evaluation.scoring import OF_PROBES
from splince_fast.evaluation.statistics import cell_interval
from splince_fast.exceptions import InputError

if TYPE_CHECKING:
    from splince_fast.evaluation.result import Comparison

# Okabe and Ito's colours, told apart under every common colour vision; markers differ, too.
_COLOURS = ("#000000", "#E69F00", "#0072B2", "#009E73", "#CC79A7", "#D55E00", "#56B4E9", "#8C8C00")
_MARKERS = "osD^vPX*"
_UNWRITABLE = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")


def draw(result: Comparison, kind: str, **options: Any) -> Any:
    """Draw one figure.

    Parameters
    ----------
    result : Comparison
        Result of compare.
    kind : str
        One of :data:`KINDS`.
    **options
        ``metric``, ``head``, ``p`` and ``reference``, where the figure has them.

    Returns
    -------
    matplotlib.figure.Figure
        Not attached to any window.

    Raises
    ------
    InputError
        An unknown kind, or one that the run has nothing for.
    MissingExtraError
        matplotlib is not installed.
    """
    if kind not in KINDS:
        raise InputError(f"there is no figure {kind!r}; choose from {', '.join(KINDS)}")
    check_keywords(options, KINDS[kind], without=("result", "axes"), where=f"the figure {kind!r}")
    module, matplotlib = require("matplotlib.figure", "evaluate"), require("matplotlib", "evaluate")
    with matplotlib.rc_context({"text.parse_math": False}):  # a "$" in a label is a "$"
        figure = module.Figure(figsize=(6.4, 4.0), layout="constrained")
        axes = figure.add_subplot()
        axes.spines[["top", "right"]].set_visible(False)
        KINDS[kind](result, axes, **options)
        for text in figure.findobj(require("matplotlib.text", "evaluate").Text):
            text.set_text(visible(text.get_text()))
    return figure


def visible(text: str) -> str:
    """Text with escapes such as ``\\x01`` for control characters and lone surrogates.

    XML and HTML have no way to write them, UTF-8 none for surrogates, and fonts no glyphs.
    """
    return _UNWRITABLE.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def _plain_ticks(axis: Any) -> None:
    """Numbers such as 0.01 on a logarithmic axis, where powers would be formulas."""
    ticker = require("matplotlib.ticker", "evaluate")
    axis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(ticker.LogFormatter())


def available(result: Comparison) -> list[str]:
    """The kinds of figures that a run has something for."""
    c, metrics = result.context, result.metrics
    sweep = len(c.levels) > 1
    wanted = {
        "association": sweep,
        "alphas": len(c.alphas) > 1 and bool(c.head_as("retrained")) and len(c.erasers) > 1,
        "covariance": "kept_covariance" in metrics,
        "leakage": "probe_accuracy" in metrics,
        "groups": "worst_group" in metrics,
        "trade-off": {"probe_accuracy", "worst_group"} <= set(metrics),
        "partial": "probe_accuracy" in metrics and bool(_partial_families(result)),
    }
    return [kind for kind, there in wanted.items() if there]


def _style(result: Comparison, eraser: str) -> dict[str, Any]:
    i = result.context.erasers.index(eraser)
    return {
        "color": _COLOURS[i % len(_COLOURS)],
        "marker": _MARKERS[i % len(_MARKERS)],
        "markersize": 5,
    }


def _seeds(result: Comparison) -> str:
    n = len(result.context.seeds)
    return f"mean and 95 % t interval over {n} resamplings" if n > 1 else "one split"


def _over(result: Comparison, axes: Any, metric: str, head: str | None) -> None:
    """A line with a band per eraser over the levels."""
    levels = [p for p in result.context.levels if p is not None]
    if not levels:
        raise InputError("the run has one natural split; this figure needs association=(.5, ...)")
    for eraser in result.context.erasers:
        found = [result.interval(metric, eraser=eraser, head=head, p=p) for p in levels]
        style = _style(result, eraser)
        axes.plot(levels, [f.mean for f in found], label=eraser, **style)
        low = [f.mean if math.isnan(f.low) else f.low for f in found]
        high = [f.mean if math.isnan(f.high) else f.high for f in found]
        axes.fill_between(levels, low, high, color=style["color"], alpha=0.12, linewidth=0)
    axes.set_xlabel("association p of task and concept in the training rows")
    axes.set_xticks(levels)


def _association(
    result: Comparison, axes: Any, *, metric: str = "worst_group", head: str | None = None
) -> None:
    """A metric over the association, one line per eraser, with bands."""
    _over(result, axes, metric, head)
    head = result.head_of(metric, head)
    label = result.metric(metric).label
    axes.set_ylabel(label)
    axes.set_title(f"{label}{f', {head} head' if head else ''}", loc="left")
    axes.legend(
        title=_seeds(result),
        frameon=False,
        fontsize="small",
        title_fontsize="small",
        alignment="left",
    )


def _strengths(
    result: Comparison,
    axes: Any,
    *,
    metric: str = "accuracy",
    reference: str | None = None,
    p: float | None = None,
) -> None:
    """The difference to a reference over alpha, the penalty of the head."""
    erasers = result.context.erasers
    reference = reference or result.context.eraser_as("LEACE") or erasers[0]
    head = result.context.head_as("retrained")
    alphas = sorted(result.context.alphas)
    if head is None or len(alphas) < 2:
        raise InputError("this figure needs the head 'retrained' and several alphas")
    tested = False
    for i, eraser in enumerate(e for e in erasers if e != reference):
        x, middle, low, high = [], [], [], []
        for alpha in alphas:
            found = result.differences(metric, reference=reference, head=head, p=p, alpha=alpha)
            row = next(d for d in found if d.method == eraser)
            x.append(alpha * 1.08 ** (i - len(erasers) / 2))
            middle.append(row.difference)
            low.append(0.0 if math.isnan(row.low) else row.difference - row.low)
            high.append(0.0 if math.isnan(row.high) else row.high - row.difference)
            tested |= not math.isnan(row.low)
        style = _style(result, eraser)
        axes.errorbar(x, middle, yerr=[low, high], label=eraser, linewidth=1, capsize=2, **style)
    axes.axhline(0, color="#888888", linewidth=0.8)
    axes.set_xscale("log")
    _plain_ticks(axes.xaxis)
    axes.set_xlabel("alpha λ of the penalty (mean log-loss + λ/2 |w|²)")
    label = result.metric(metric).label
    axes.set_ylabel(f"{label} minus that of {reference}")
    axes.set_title(f"{label} by alpha, head refitted after erasing", loc="left")
    axes.legend(
        title="bars: 95 % interval, corrected t" if tested else "no test", frameon=False,
        fontsize="small", title_fontsize="small", alignment="left",
    )  # fmt: skip


def _covariance(result: Comparison, axes: Any) -> None:
    """The share of the covariance with the task that is kept, on a logarithmic axis."""
    metric = "kept_covariance"
    if len(result.context.levels) > 1:
        _over(result, axes, metric, None)
    else:
        for i, eraser in enumerate(result.context.erasers):
            value = result.mean(metric, eraser=eraser)
            axes.plot([i], [value], linestyle="none", label=eraser, **_style(result, eraser))
        axes.set_xticks(range(len(result.context.erasers)), [*map(visible, result.context.erasers)])
        axes.margins(x=0.2)
    axes.set_yscale("log")
    _plain_ticks(axes.yaxis)
    axes.set_ylabel("|P Cov(x, y)|² / |Cov(x, y)|²")
    axes.set_title("covariance with the task that is kept", loc="left")
    axes.legend(
        title=_seeds(result),
        frameon=False,
        fontsize="small",
        title_fontsize="small",
        alignment="left",
    )


def _leakage(result: Comparison, axes: Any, *, p: float | None = None) -> None:
    """Accuracy of the probes on rows that the eraser has not seen, beside chance."""
    names = [m for m in result.metrics if _is_probe_accuracy(result, m)]
    if not names:
        raise InputError("the run has no probes; pass leakage=('linear',)")
    erasers = result.context.erasers
    for k, metric in enumerate(names):
        shift = (k - (len(names) - 1) / 2) * 0.18
        found = [result.interval(metric, eraser=e, p=p) for e in erasers]
        error = [0.0 if math.isnan(f.low) else f.high - f.mean for f in found]
        axes.errorbar(
            [i + shift for i in range(len(erasers))], [f.mean for f in found], yerr=error,
            linestyle="none", capsize=3, color=_COLOURS[k], marker=_MARKERS[k],
            label=metric.replace("probe_accuracy", "linear").replace("_accuracy", ""),
        )  # fmt: skip
    _from_chance(result, axes, p)
    axes.set_xticks(range(len(erasers)), [*map(visible, erasers)])
    axes.set_ylabel("probe accuracy")
    axes.set_title("concept found by probes in rows not used for erasing", loc="left")
    axes.legend(
        title=f"probes; {_seeds(result)}",
        frameon=False,
        fontsize="small",
        title_fontsize="small",
        alignment="left",
    )


def _is_probe_accuracy(result: Comparison, key: str) -> bool:
    base = key.partition("[")[0]
    return key not in result.context.own_metrics and base in OF_PROBES and base.endswith("accuracy")


def _groups(
    result: Comparison, axes: Any, *, head: str | None = None, p: float | None = None
) -> None:
    """Accuracy per cell, its mean over the seeds, with intervals and numbers of rows."""
    head, p = head or result.context.heads[0], result.level(p)
    found: dict[int, dict[str, list[tuple[int, int]]]] = {}
    for r in result.records:
        if (r.head, r.p) == (head, p):
            for cell, n, right in r.cells:
                found.setdefault(cell, {}).setdefault(r.eraser, []).append((n, right))
    if not found:
        raise InputError(f"the head {head!r} has no cells: task or concept is a quantity")

    def rates(cell: int, eraser: str) -> list[float]:
        return [right / n for n, right in found[cell][eraser]]

    def rows_of(cell: int, eraser: str) -> float:
        counts = [n for n, _ in found[cell][eraser]]
        return sum(counts) / len(counts)

    def worst(cell: int) -> float:
        return min(sum(rates(cell, e)) / len(rates(cell, e)) for e in found[cell])

    cells = sorted(sorted(found, key=worst)[:10])
    axes.figure.set_figheight(max(4.0, 1.6 + 0.5 * len(cells)))  # two lines of text for a cell
    train, _, test = result.context.sizes
    erasers = result.context.erasers
    for i, eraser in enumerate(erasers):
        style = _style(result, eraser)
        for row, cell in enumerate(cells):
            if eraser not in found[cell]:
                continue
            values = rates(cell, eraser)
            low, high = cell_interval(values, rows_of(cell, eraser), test / train)
            y = row + (i - (len(erasers) - 1) / 2) * 0.16
            axes.plot([low, high], [y, y], color=style["color"], linewidth=1)
            axes.plot(
                [sum(values) / len(values)],
                [y],
                linestyle="none",
                label=eraser if row == 0 else None,
                **style,
            )
    names = result.context.cells
    labels = [f"{names[c]}\nn = {max(rows_of(c, e) for e in found[c]):,.0f}" for c in cells]
    axes.set_yticks(range(len(cells)), [*map(visible, labels)])
    axes.invert_yaxis()
    axes.set_xlabel("accuracy on test rows")
    more = f" (the 10 worst of {len(found)})" if len(found) > 10 else ""
    axes.set_title(f"accuracy per cell{more}, {head} head", loc="left")
    axes.legend(
        title="bars: 95 %, corrected for rows that seeds share", frameon=False, fontsize="small",
        title_fontsize="small", alignment="left", loc="upper center", bbox_to_anchor=(0.5, -0.16),
        ncols=min(4, len(erasers)),
    )  # fmt: skip


def _trade_off(
    result: Comparison, axes: Any, *, head: str | None = None, p: float | None = None
) -> None:
    """Probe of the concept against score of the task: down and right is better."""
    heads = result.context.heads if head is None else (head,)
    for k, each in enumerate(heads):
        for eraser in result.context.erasers:
            x = result.interval("worst_group", eraser=eraser, head=each, p=p)
            y = result.interval("probe_accuracy", eraser=eraser, p=p)
            style = _style(result, eraser) | {"markersize": 8}
            axes.plot(
                [x.mean], [y.mean], linestyle="none", fillstyle="full" if k == 0 else "none",
                label=eraser if k == 0 else None, **style,
            )  # fmt: skip
    _from_chance(result, axes, p, legend=False)
    axes.set_xlabel("worst-group accuracy (better to the right)")
    axes.set_ylabel("probe accuracy for the concept (better below)")
    axes.set_title("concept left, and task kept", loc="left")
    title = f"filled: {heads[0]} head" + (f"; open: {heads[1]}" if len(heads) > 1 else "")
    axes.legend(
        title=title, frameon=False, fontsize="small", title_fontsize="small", alignment="left"
    )


def _partial_families(result: Comparison) -> dict[str, list[tuple[float, str]]]:
    """Erasers with fractions of them: (alpha, name) in ascending order, with the whole one."""
    found: dict[str, list[tuple[float, str]]] = {}
    for eraser in result.context.erasers:
        base, star, alpha = eraser.rpartition("*")
        if star:
            found.setdefault(base, []).append((float(alpha), eraser))
    for base, points in found.items():
        if base in result.context.erasers:
            points.append((1.0, base))
        points.sort()
    return found


def _partial(
    result: Comparison, axes: Any, *, metric: str = "probe_accuracy", p: float | None = None
) -> None:
    """A figure over the fraction alpha of the change, a line per eraser."""
    families = _partial_families(result)
    if not families:
        raise InputError("the run has no partial erasers; pass erasers=('LEACE', 'LEACE*0.9', ...)")
    none = result.context.eraser_as("none")
    for k, (base, points) in enumerate(families.items()):
        start = [] if none is None else [(0.0, none)]
        found = [(a, result.interval(metric, eraser=e, p=p)) for a, e in [*start, *points]]
        error = [0.0 if math.isnan(f.low) else f.high - f.mean for _, f in found]
        axes.errorbar(
            [a for a, _ in found], [f.mean for _, f in found], yerr=error, capsize=3, label=base,
            color=_COLOURS[k % len(_COLOURS)], marker=_MARKERS[k % len(_MARKERS)],
        )  # fmt: skip
    label = result.metric(metric).label
    if metric == "probe_accuracy":
        _from_chance(result, axes, p)
    axes.set_xlabel("alpha, the fraction of the change that is made")
    axes.set_ylabel(label)
    axes.set_title(f"{label} of partial erasers: below 1 nothing is erased", loc="left")
    axes.legend(title=_seeds(result), frameon=False, fontsize="small", title_fontsize="small")


def _from_chance(result: Comparison, axes: Any, p: float | None, *, legend: bool = True) -> None:
    """An axis of probe accuracy that begins at chance, with a line there."""
    chance = [m for m in result.metrics if m.startswith("probe_chance")]
    if not chance:
        return
    level = result.mean(chance[0], eraser=result.context.erasers[0], p=p)
    label = "majority class" if legend else None
    axes.axhline(level, color="#888888", linewidth=1, linestyle="--", label=label)
    low, high = axes.get_ylim()
    axes.set_ylim(min(low, level - 0.02 * (1.0 - level)), high)


KINDS: dict[str, Callable[..., None]] = {
    "association": _association,
    "alphas": _strengths,
    "covariance": _covariance,
    "leakage": _leakage,
    "groups": _groups,
    "trade-off": _trade_off,
    "partial": _partial,
}
