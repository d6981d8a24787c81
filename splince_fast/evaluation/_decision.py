"""The cards of a report: which eraser, why, and what would change it; the concept; the cost.

Every sentence follows from a figure or a test of the report.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from splince_fast.evaluation import statistics
from splince_fast.evaluation._cells import FEW_ROWS
from splince_fast.evaluation._tables import (
    association,
    number,
    signed,
    worst_cell_text,
)
from splince_fast.evaluation.scoring import SUMMARY, headline
from splince_fast.evaluation.statistics import MIN_SEEDS, Difference

if TYPE_CHECKING:
    from splince_fast.evaluation.result import Comparison

DECIDED, OPEN, NO_HELP = "decided", "not decided", "erasing does not help"
# Differences below this are of no use to most: of accuracies and R2, and of other metrics
# relative to their value.
LEAST = 0.01
# |Cov(r(x), z)| over |Cov(x, z)| above which an eraser is partial.
LEFT = 0.01


@dataclass(frozen=True, slots=True)
class Decision:
    """What a comparison says about the choice of an eraser, by one metric and one head.

    Attributes
    ----------
    outcome : {"decided", "not decided", "erasing does not help"}
    eraser : str or None
        The eraser to take; of those that are not significantly different the one that changes the
        rows least. None where no eraser has a value.
    metric, head : str
    sentence : str
        Outcome, reason, and what would change it.
    """

    outcome: str
    eraser: str | None
    metric: str
    head: str
    sentence: str

    def __str__(self) -> str:
        return self.sentence


@dataclass(frozen=True, slots=True)
class Card:
    """A figure in large type, and its meaning."""

    title: str
    figure: str
    text: str


def decision(
    result: Comparison, metric: str | None = None, head: str | None = None, p: float | None = None
) -> Decision:
    """Decide between the erasers that were compared.

    An eraser is taken if it is significantly better than every other one (corrected t test or
    bootstrap, Holm, 5 %), and than unerased rows. Erasing does not help where the 95 % interval of
    the best eraser's gain over unerased rows ends below .01. All else is not decided.

    Parameters
    ----------
    result : Comparison
    metric : str, optional
        The default is the first of the summary; accuracy in place of a worst group that has fewer
        than 20 test rows at some seed.
    head : str, optional
        The default is the first.
    p : float, optional
        Level; the default is the one furthest from .5.

    Raises
    ------
    InputError
        No such metric, head or level, or a metric without a direction.
    """
    if not result.metrics:
        return Decision(OPEN, None, "", "", "Not decided: no eraser has a value.")
    metric = _metric_of(result, head, p) if metric is None else metric
    head = result.head_of(metric, head)
    found = result.verdict(metric, head=head or None, p=p)
    order, none = found.order, result.context.eraser_as("none")
    partial = [name for name in order if name != none and leaves(result, name)]
    erasers = [name for name in order if name != none and name not in partial]
    if not erasers:
        why = "no eraser has a value"
        if partial:
            why = f"{_joined(partial)} leave the concept in the rows"
        return Decision(OPEN, None, metric, head, f"Not decided: {why}.")
    made = _Chooser(result, metric, head, p, none if none in order else None, erasers).decide()
    if found.n_seeds < len(result.context.seeds):
        text = f"{made.sentence} Ordered over the {found.n_seeds} seeds that all have."
        made = dataclasses.replace(made, sentence=text)
    if partial:
        text = "Left out, as more than 1 % of the covariance with the concept stays: "
        text += f"{_joined(partial)}."
        made = dataclasses.replace(made, sentence=f"{made.sentence} {text}")
    return made


def _metric_of(result: Comparison, head: str | None, p: float | None) -> str:
    """The headline; accuracy where it is a worst group of too few rows."""
    metric = headline(result.metrics)
    if metric != "worst_group" or "accuracy" not in result.metrics:
        return metric
    cells = (
        cell
        for eraser in result.context.erasers
        for cell in result.worst_cells(eraser=eraser, head=head, p=p).values()
    )
    return "accuracy" if any(cell.n < FEW_ROWS for cell in cells) else metric


def leaves(result: Comparison, eraser: str) -> bool:
    """Whether an eraser leaves the concept in the training rows: more than 1 % of the covariance.

    INLP and R-LACE remove what a probe finds, not the covariance, and are no such erasers.
    """
    roles = dict(zip(result.context.erasers, result.context.eraser_roles, strict=True))
    if roles[eraser].startswith(("INLP", "RLACE")) or "residual" not in result.metrics:
        return False
    return result.mean("residual", eraser=eraser) > LEFT


class _Chooser:
    """One decision: its differences, and its sentences."""

    def __init__(
        self, result: Comparison, metric: str, head: str, p: float | None, none: str | None,
        erasers: list[str],
    ) -> None:  # fmt: skip
        self.result, self.metric, self.head, self.p = result, metric, head, p
        self.none, self.erasers, self.best = none, erasers, erasers[0]
        self.where: dict[str, Any] = {"head": head or None, "p": p}
        self.label = result.metric(metric).label
        self.sign = -1.0 if result.metric(metric).lower_is_better else 1.0
        found = result.differences(metric, reference=self.best, **self.where)
        self.rows = {row.method: row for row in found if row.method in {*erasers, none}}
        self.least = LEAST
        if metric not in SUMMARY or metric == "mse":
            self.least = LEAST * abs(result.mean(metric, eraser=self.best, **self.where))

    def decide(self) -> Decision:
        """Outcome, eraser and sentence."""
        tested = {e: row for e, row in self.rows.items() if not math.isnan(row.p)}
        level = [e for e in self.erasers[1:] if not self._worse(e)]
        unerased = self.rows.get(self.none or "")
        gain = None if unerased is None else -self.sign * unerased.difference
        most = math.nan  # of the gain over unerased rows
        if unerased is not None and self.none in tested:
            most = max(-self.sign * unerased.low, -self.sign * unerased.high)
        taken = self._least_change([self.best, *level])
        if not tested and len(self.rows):
            outcome, text = OPEN, self._untested(taken)
        elif most < self.least:
            outcome = NO_HELP
            text = (
                f"Erasing does not help here: {self._value(self.best)} after {self.best}, the "
                f"best eraser, {self._value(self.none)} on unerased rows ({self._gap(unerased)}). "
                f"If the concept has to go, take {taken}{self._change(taken)}."
            )
        elif level or (unerased is not None and not self._worse(self.none)):
            outcome, text = OPEN, self._open(level, taken, unerased)
        else:
            outcome, taken = DECIDED, self.best
            others = "".join(f"{self._value(e)} after {e}" for e in self.erasers[1:2])
            base = "" if gain is None else f"{self._value(self.none)} on unerased rows"
            against = _joined([part for part in (others, base) if part])
            text = f"Take {self.best}: {self._value(self.best)} ({self._setting()})"
            text += f", against {against}; " if against else "; "
            text += (
                "each difference is significant." if len(self.rows) > 1
                else "the difference is significant." if self.rows
                else "no other eraser was compared."
            )  # fmt: skip
        return Decision(outcome, taken, self.metric, self.head, f"{text} {self._other()}".strip())

    # -- parts of the sentence -----------------------------------------------------------------

    def _worse(self, eraser: str | None) -> bool:
        """Whether an eraser is significantly worse than the best."""
        row = self.rows.get(eraser or "")
        return row is not None and row.significant and self.sign * row.difference < 0

    def _value(self, eraser: str | None) -> str:
        return number(self.result.mean(self.metric, eraser=str(eraser), **self.where))

    def _setting(self) -> str:
        return f"{self.label}, {self.head} head" if self.head else self.label

    def _gap(self, row: Difference | None) -> str:
        """The gain of the best eraser over the other side of a difference, with its interval."""
        assert row is not None
        low, high = sorted((-row.low, -row.high))
        if row.difference == row.low == row.high == 0.0:
            return f"{self._setting()}: equal at every seed"
        text = f"{self._setting()}: difference {signed(-row.difference)}"
        return text if math.isnan(low) else f"{text}, 95 % interval {signed(low)} to {signed(high)}"

    def _distortion(self, eraser: str) -> float:
        if "distortion" not in self.result.metrics:
            return math.nan
        return self.result.mean("distortion", eraser=eraser, p=self.p)

    def _least_change(self, erasers: list[str]) -> str:
        """The first of those that change the rows least."""
        known = [e for e in erasers if not math.isnan(self._distortion(e))]
        return min(known, key=self._distortion) if known else erasers[0]

    def _change(self, eraser: str) -> str:
        value = self._distortion(eraser)
        if math.isnan(value):
            return ""
        return f", which changes the rows least ({100 * value:.3g} % of their variance)"

    def _untested(self, taken: str) -> str:
        n = min((row.n for row in self.rows.values()), default=0)
        why = f"{n} seed(s), and a test takes {MIN_SEEDS} (n_seeds=)" if n < MIN_SEEDS else (
            "the differences are equal at all seeds, so that no test can be made"
        )  # fmt: skip
        return (
            f"Not decided: {why}. {self.best} has the best figure so far ({self._setting()}: "
            f"{self._value(self.best)}); {taken} changes the rows least."
        )

    def _open(self, level: list[str], taken: str, unerased: Difference | None) -> str:
        """Several erasers are level, or the best is not better than unerased rows."""
        parts = ["Not decided:"]
        if level:
            rest = self._distortion(next(e for e in (self.best, *level) if e != taken))
            more = "" if math.isnan(rest) else f" against {100 * rest:.3g} %"
            row = self.rows[level[0]]
            nearest = f" to {level[0]}" if len(level) > 1 else ""
            change = self._change(taken).removesuffix(")")
            parts += [
                f"{_joined([self.best, *level])} are not significantly different "
                f"({self._gap(row)}{nearest}).",
                f"Take {taken}{change}{more}{')' if change else ''}.",
                self._seeds(row),
            ]
        if unerased is not None:
            better = "" if self._worse(self.none) else "not significantly "
            parts.append(
                f"{self.best} is {better}better than unerased rows ({self._gap(unerased)})."
            )
            parts += [] if level else [self._seeds(unerased)]
        return " ".join(part for part in parts if part)

    def _seeds(self, row: Difference) -> str:
        """Seeds after which the interval of a difference is +- LEAST wide."""
        half = (row.high - row.low) / 2
        if math.isnan(half) or half <= self.least:
            return ""
        if row.how.startswith("bootstrap"):
            rows = math.ceil(self.result.context.sizes[2] * (half / self.least) ** 2)
            return f"About {rows:,} test rows would narrow the interval to ±{number(self.least)}."
        deviation = row.error * row.n**0.5
        count = statistics.seeds_for(deviation, self.result.test_ratio(self.p), self.least)
        if count is None:
            return (
                f"No number of seeds narrows the interval to ±{number(self.least)}: the splits "
                "share rows; that takes more rows."
            )
        return f"About {count} seeds would narrow the interval to ±{number(self.least)}."

    def _other(self) -> str:
        """Other metrics and heads by which another eraser leads: they would change the choice."""
        by: dict[str, list[str]] = {}
        places = [(m, self.head) for m in SUMMARY if self._may_lead(m)]
        places += [(self.metric, head) for head in self.result.context.heads if head != self.head]
        for metric, head in places:
            order = self.result.verdict(metric, head=head or None, p=self.p).order
            leader = next((e for e in order if e != self.none), None)
            if leader is not None and leader != self.best:
                own = metric == self.metric
                text = f"with the {head} head" if own else f"by {self.result.metric(metric).label}"
                by.setdefault(leader, []).append(text)
        return " ".join(f"{leader} leads {_joined(texts)}." for leader, texts in by.items())

    def _may_lead(self, metric: str) -> bool:
        result = self.result
        if metric == self.metric or metric not in result.metrics:
            return False
        found = result.metric(metric)
        return found.of == "head" and found.lower_is_better is not None


def _joined(names: list[str]) -> str:
    """Names in a sentence: "A", "A and B", "A, B and C"."""
    *first, last = names or [""]
    return f"{', '.join(first)} and {last}" if first else last


def cards(result: Comparison) -> list[Card]:
    """The decision, the concepts, and the cost."""
    found = decision(result)
    title = {DECIDED: "Decided", OPEN: "Not decided", NO_HELP: "Erasing does not help"}
    figure = "no gain" if found.outcome == NO_HELP else found.eraser or "-"
    eraser = found.eraser or next(
        (e for e in result.context.erasers if e != result.context.eraser_as("none")), None
    )
    start = [Card(title[found.outcome], figure, found.sentence)]
    if eraser is None:
        return start
    return [*start, *_concepts(result, eraser), *_costs(result, eraser, found.head)]


def _concepts(result: Comparison, eraser: str) -> list[Card]:
    """What a linear probe finds on new rows, and why it is not at chance."""
    context, cards = result.context, []
    for name in context.concepts:
        suffix = f"[{name}]" if len(context.concepts) > 1 else ""
        key, chance_key = f"probe_accuracy{suffix}", f"probe_chance{suffix}"
        kind, text = "accuracy", ""
        if key not in result.metrics:
            key, chance_key, kind = f"probe_r2{suffix}", "", "R2"
        if key not in result.metrics:
            continue
        found = result.interval(key, eraser=eraser)
        chance = result.mean(chance_key, eraser=eraser) if chance_key in result.metrics else 0.0
        none = context.eraser_as("none")
        before = "" if none is None else f", unerased {number(result.mean(key, eraser=none))}"
        text = (
            f"{kind} of a linear probe for {name} on new rows after {eraser} (chance "
            f"{number(chance)}{before}). "
        )
        if found.mean - chance < LEAST:
            text += "It is at chance."
        else:
            if found.low <= chance:
                text += "Its interval over seeds includes chance. "
            text += _why(
                result, eraser, name, suffix, found.mean, chance if kind == "accuracy" else math.nan
            )
        title = "The concept" if name == "concept" else f"The concept: {name}"
        cards.append(Card(title, number(found.mean), text))
    return cards


def _why(
    result: Comparison, eraser: str, name: str, suffix: str, found: float, chance: float
) -> str:
    """Sampling and shift: the reasons for a probe above chance."""
    residual = result.mean("residual", eraser=eraser) if "residual" in result.metrics else 0.0
    if residual > LEFT:
        return f"The fraction {number(residual)} of the covariance with the concept stays."
    text = (
        "The covariance with the concept is zero on the training rows; new rows differ from them. "
    )
    expected = result.advice().get(f"expected_r2{suffix}", math.nan)
    equal = sampling_accuracy(expected, chance)
    if not math.isnan(expected):
        text += f"Sampling of the training rows alone leaves R2 {number(expected)}" + (
            "" if math.isnan(equal)
            else f" to the best linear predictor, an accuracy of about {number(equal)}"
        ) + ". "  # fmt: skip
    if equal >= found:
        return text + "That explains it."
    p = result.level()
    if p is None or p == 0.5:
        return text + "Anything beyond that is a difference between training and test rows."
    return text + (
        f"Anything beyond that is shift: {association(result.context, p)} of task and {name} in "
        "the training rows, .5 in the test rows."
    )


def sampling_accuracy(r2: float, chance: float) -> float:
    """Accuracy of the best linear rule for two normal classes, of R^2 r2 and majority `chance`.

    With p the fraction of the majority and D = sqrt(r2 / ((1 - r2) p (1 - p))) the distance of the
    class means in units of the deviation within classes, Phi(D / 2 + c) p + Phi(D / 2 - c) (1 - p)
    with c = log(p / (1 - p)) / D. NaN below 1/2, where there are more classes.
    """
    from scipy.special import ndtr

    if math.isnan(chance) or not 0.5 <= chance < 1 or not 0 < r2 < 1:
        return math.nan
    distance = math.sqrt(r2 / ((1 - r2) * chance * (1 - chance)))
    shift = math.log(chance / (1 - chance)) / distance
    sides = ndtr(distance / 2 + shift) * chance, ndtr(distance / 2 - shift) * (1 - chance)
    return float(sum(sides))


def _costs(result: Comparison, eraser: str, head: str) -> list[Card]:
    """Change of the rows, the task, and the worst group."""
    parts, figure = [], "-"
    if "distortion" in result.metrics:
        value = result.mean("distortion", eraser=eraser)
        figure = f"{100 * value:.3g} %"
        parts.append(f"of the variance of the rows is changed by {eraser}.")
    if "kept_covariance" in result.metrics:
        kept = result.mean("kept_covariance", eraser=eraser)
        parts.append(f"It keeps {100 * kept:.3g} % of the squared covariance with the task.")
    none = result.context.eraser_as("none")
    for metric in ("accuracy", "r2"):
        if metric in result.metrics and none is not None:
            before, after = (
                result.mean(metric, eraser=e, head=head or None) for e in (none, eraser)
            )
            parts.append(
                f"The task: {result.metric(metric).label} {number(after)}, unerased "
                f"{number(before)} ({head} head)."
            )
    cell = worst_cell_text(result, eraser, head, result.level()) if head else ""
    if cell:
        cells = result.worst_cells(eraser=eraser, head=head).values()
        few = any(c.n < FEW_ROWS for c in cells)
        caution = f"; fewer than {FEW_ROWS} rows, not reliable" if few else ""
        parts.append(f"Worst group: {cell}{caution}.")
    return [Card("The cost", figure, " ".join(parts))] if parts else []
