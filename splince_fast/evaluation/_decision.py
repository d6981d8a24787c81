"""Choice of an eraser, and the summary cards at the top of a report.

The cards state the decision, the probe score for each concept, and the cost of erasing. Every
sentence follows from a value or a test in the report.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from scipy.special import ndtr

from splince_fast.evaluation import statistics
from splince_fast.evaluation._tables import (
    association,
    has_few_rows,
    number,
    signed,
    worst_cell_text,
)
from splince_fast.evaluation.data import FEW_ROWS
from splince_fast.evaluation.metrics import SUMMARY, concept_key, headline
from splince_fast.evaluation.statistics import MIN_SEEDS, Difference

if TYPE_CHECKING:
    from splince_fast.evaluation.result import Comparison

DECIDED, NOT_DECIDED, NO_GAIN = "decided", "not decided", "no gain"
_TITLES = {DECIDED: "Decided", NOT_DECIDED: "Not decided", NO_GAIN: "No gain"}
# Smallest difference of practical use: absolute for bounded metrics such as accuracy, and a
# fraction of the value of the best eraser for other metrics and custom ones.
MIN_GAIN = 0.01
# An eraser r is partial if |Cov(r(x), z)| / |Cov(x, z)| exceeds this value, z the concept.
MAX_RESIDUAL = 0.01


@dataclass(frozen=True, slots=True)
class Decision:
    """Choice of an eraser by one metric and one head.

    Attributes
    ----------
    outcome : {"decided", "not decided", "no gain"}
        "no gain" if erasing does not improve the metric; `eraser` is then the recommendation for
        a concept that must be erased.
    eraser : str or None
        Name of the recommended eraser; None if no eraser has a value, or if every eraser with a
        value leaves the concept in the rows.
    metric, head : str
        Key of the metric, and name of the head; "" for metrics of the eraser itself.
    sentence : str
        Outcome, reason, and the number of seeds or rows that could change the outcome.
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
    """Summary box of a report: title, headline `value` and explanation `text`."""

    title: str
    value: str
    text: str


def decision(
    result: Comparison, metric: str | None = None, head: str | None = None, p: float | None = None
) -> Decision:
    """Choose one of the compared erasers, as documented in :meth:`Comparison.decision`.

    The tests are the corrected t test over seeds, or the bootstrap for a fixed split, at the 5 %
    level after Holm's correction. Erasers that leave more than 1 % of the covariance with the
    concept are not candidates.
    """
    if not result.metrics:
        return Decision(NOT_DECIDED, None, "", "", "Not decided: no eraser has a value.")
    metric = _default_metric(result, head, p) if metric is None else metric
    head = result.head_of(metric, head)
    verdict = result.verdict(metric, head=head or None, p=p)
    order, unerased = verdict.order, result.context.eraser_as("none")
    partial = [name for name in order if name != unerased and is_partial(result, name, p)]
    erasers = [name for name in order if name != unerased and name not in partial]
    if not erasers:
        reason = "no eraser has a value"
        if partial:
            reason = "more than 1 % of the covariance with the concept remains after "
            reason += _join_names(partial)
        return Decision(NOT_DECIDED, None, metric, head, f"Not decided: {reason}.")
    unerased = unerased if unerased in order else None
    choice = _Choice(result, metric, head, p, unerased, erasers).decide()
    sentence = choice.sentence
    if verdict.n_seeds < len(result.context.seeds):
        sentence += f" Order over the {verdict.n_seeds} seeds at which all erasers have values."
    if partial:
        sentence += (
            " Not considered, because more than 1 % of the covariance with the concept remains: "
            f"{_join_names(partial)}."
        )
    return dataclasses.replace(choice, sentence=sentence)


def _default_metric(result: Comparison, head: str | None, p: float | None) -> str:
    """Return the headline metric, but "accuracy" if a worst group has few rows."""
    metric = headline(result.metrics)
    if metric != "worst_group" or "accuracy" not in result.metrics:
        return metric
    few = any(has_few_rows(result, eraser, head, p) for eraser in result.context.erasers)
    return "accuracy" if few else metric


def is_partial(result: Comparison, eraser: str, p: float | None) -> bool:
    """Whether an eraser leaves more than 1 % of the covariance with a concept, at level `p`.

    INLP and R-LACE do not aim at the covariance, but remove directions that a probe finds. They
    count as complete if they remove at least one direction, at full intensity.
    """
    role = dict(zip(result.context.erasers, result.context.eraser_roles, strict=True))[eraser]
    if "residual" not in result.metrics:
        return False
    searches = role.startswith(("INLP", "RLACE"))
    if searches and result.mean("rank", eraser=eraser, p=p):
        return False
    return result.mean("residual", eraser=eraser, p=p) > MAX_RESIDUAL


class _Choice:
    """Choice between erasers by one metric and one head.

    `erasers` are the candidates, the best one first, and `unerased` is the name of unerased rows.
    """

    def __init__(
        self, result: Comparison, metric: str, head: str, p: float | None, unerased: str | None,
        erasers: Sequence[str],
    ) -> None:  # fmt: skip
        entry = result.metric(metric)
        self.result, self.metric, self.head, self.p = result, metric, head, p
        self.unerased, self.erasers, self.best = unerased, erasers, erasers[0]
        self.label = entry.label
        self.sign = -1.0 if entry.lower_is_better else 1.0
        self.tests = self._tests_against(self.best)
        self.min_gain = MIN_GAIN
        if not entry.bounded:
            self.min_gain *= abs(self._mean(self.best))

    def decide(self) -> Decision:
        """Return the decision: outcome, eraser and sentence."""
        similar = [e for e in self.erasers[1:] if not self._is_worse(e)]
        eraser = self._least_change([self.best, *similar])
        unerased_test = self.tests.get(self.unerased or "")
        if self.tests and all(math.isnan(test.p) for test in self.tests.values()):
            outcome, text = NOT_DECIDED, self._untested(eraser)
        elif unerased_test is not None and self._max_gain(unerased_test) < self.min_gain:
            outcome, text = NO_GAIN, self._no_gain(eraser, unerased_test)
        elif similar or (unerased_test is not None and not self._is_worse(self.unerased)):
            outcome, text = NOT_DECIDED, self._undecided(similar, eraser, unerased_test)
        else:
            outcome, eraser, text = DECIDED, self.best, self._decided(unerased_test)
        text = f"{text} {self._other_leaders()}".strip()
        return Decision(outcome, eraser, self.metric, self.head, text)

    def _tests_against(self, eraser: str) -> dict[str, Difference]:
        """Return the tests of the other erasers, and of unerased rows, against one eraser."""
        tests = self.result.differences(
            self.metric, reference=eraser, head=self.head or None, p=self.p
        )
        names = {*self.erasers, self.unerased}
        return {test.method: test for test in tests if test.method in names}

    def _max_gain(self, unerased_test: Difference) -> float:
        """Return the upper limit of the interval of the best eraser's gain over unerased rows.

        The limit is NaN if the difference was not tested.
        """
        if math.isnan(unerased_test.p):
            return math.nan
        return max(-self.sign * unerased_test.low, -self.sign * unerased_test.high)

    def _is_worse(self, eraser: str | None) -> bool:
        """Whether an eraser (or "none") is significantly worse than the best eraser."""
        test = self.tests.get(eraser or "")
        return test is not None and test.significant and self.sign * test.difference < 0

    def _mean(self, eraser: str) -> float:
        return self.result.mean(self.metric, eraser=eraser, head=self.head or None, p=self.p)

    def _distortion(self, eraser: str) -> float:
        if "distortion" not in self.result.metrics:
            return math.nan
        return self.result.mean("distortion", eraser=eraser, p=self.p)

    def _least_change(self, erasers: list[str]) -> str:
        """Return the eraser with the smallest distortion, or the first if none was measured."""
        measured = [e for e in erasers if not math.isnan(self._distortion(e))]
        return min(measured, key=self._distortion) if measured else erasers[0]

    # -- sentences -----------------------------------------------------------------------------

    def _value_text(self, eraser: str | None) -> str:
        return number(self._mean(str(eraser)))

    def _setting_text(self) -> str:
        return f"{self.label}, {self.head} head" if self.head else self.label

    def _difference_text(self, test: Difference, of: str = "") -> str:
        """Return the text of the value of the reference minus the method, with its interval.

        `of` names the method in the text.
        """
        low, high = sorted((-test.low, -test.high))
        if test.difference == test.low == test.high == 0.0:
            return f"{self._setting_text()}: equal{f' to {of}' if of else ''} at every seed"
        text = f"{self._setting_text()}: difference{f' from {of}' if of else ''} "
        text += signed(-test.difference)
        if math.isnan(low):
            return text
        text += f", 95 % interval {signed(low)} to {signed(high)}"
        # The test is corrected for the number of comparisons, but the interval is not. A difference
        # that is not significant can therefore have an interval without 0.
        if not test.significant and low * high > 0:
            text += f", p = {number(test.p)} after Holm's correction"
        return text

    def _change_text(self, eraser: str, erasers: Sequence[str] = ()) -> str:
        """Return the text of the distortion of an eraser, against that of another of `erasers`."""
        if math.isnan(distortion := self._distortion(eraser)):
            return ""
        text, against = f"{100 * distortion:.3g} %", ""
        other = next((e for e in erasers if e != eraser), None)
        if other is not None and not math.isnan(distortion := self._distortion(other)):
            other_text = f"{100 * distortion:.3g} %"
            if other_text == text:
                return f"; {other} changes the rows as much ({text} of their variance)"
            against = f" against {other_text}"
        return f", which changes the rows least ({text} of their variance{against})"

    def _decided(self, unerased_test: Difference | None) -> str:
        others = [f"{self._value_text(e)} after {e}" for e in self.erasers[1:2]]
        if unerased_test is not None:
            others.append(f"{self._value_text(self.unerased)} on unerased rows")
        against = f", against {_join_names(others)}" if others else ""
        match len(self.tests):
            case 0:
                conclusion = "no other eraser was compared"
            case 1:
                conclusion = "the difference is significant"
            case _:
                conclusion = "each difference is significant"
        value = f"{self._value_text(self.best)} ({self._setting_text()})"
        return f"Take {self.best}: {value}{against}; {conclusion}."

    def _no_gain(self, eraser: str, unerased_test: Difference) -> str:
        return (
            f"Erasing does not improve this metric: {self._value_text(self.best)} after "
            f"{self.best}, the best eraser, {self._value_text(self.unerased)} on unerased rows "
            f"({self._difference_text(unerased_test)}). If the concept must be erased, take "
            f"{eraser}{self._change_text(eraser)}."
        )

    def _untested(self, eraser: str) -> str:
        n = min(test.n for test in self.tests.values())
        reason = "the differences are equal at all seeds, so they cannot be tested"
        if n < MIN_SEEDS:
            have = "has" if n == 1 else "have"
            reason = f"a test needs at least {MIN_SEEDS} seeds, and {n} {have} values"
        least = "it" if eraser == self.best else eraser
        return (
            f"Not decided: {reason}. {self.best} has the best mean so far "
            f"({self._setting_text()}: {self._value_text(self.best)}); {least} changes the rows "
            "least."
        )

    def _undecided(self, similar: list[str], eraser: str, unerased_test: Difference | None) -> str:
        """Return the sentences for the outcome "not decided".

        `similar` are the erasers that are not significantly worse than the best one.
        `unerased_test` is the test of unerased rows against the best eraser, if they were compared.
        """
        parts = ["Not decided:"]
        if similar:
            test = self.tests[similar[0]]
            nearest = similar[0] if len(similar) > 1 else ""
            parts += [
                f"{_join_names([self.best, *similar])} are not significantly different "
                f"({self._difference_text(test, nearest)}).",
                f"Take {eraser}{self._change_text(eraser, [self.best, *similar])}.",
                self._sample_size_text(test),
            ]
        if unerased_test is not None:
            test = self._tests_against(eraser).get(self.unerased or "", unerased_test)
            gain = -self.sign * test.difference
            better = "" if test.significant and gain > 0 else "not significantly "
            parts.append(
                f"{eraser} is {better}better than unerased rows ({self._difference_text(test)})."
            )
            parts += [] if similar else [self._sample_size_text(test)]
        return " ".join(filter(None, parts))

    def _sample_size_text(self, test: Difference) -> str:
        """Return a sentence with the number of seeds or rows for an interval of +- `min_gain`.

        The sentence is empty if the interval is narrow enough, or if there is no interval.
        """
        half_width, target = (test.high - test.low) / 2, f"±{number(self.min_gain)}"
        if math.isnan(half_width) or half_width <= self.min_gain:
            return ""
        if test.how.startswith("bootstrap"):
            rows = math.ceil(self.result.context.sizes[2] * (half_width / self.min_gain) ** 2)
            return f"About {rows:,} test rows would narrow the interval to {target}."
        deviation = test.error * test.n**0.5
        count = statistics.seeds_for(deviation, self.result.test_ratio(self.p), self.min_gain)
        if count is None:
            return (
                f"More seeds cannot narrow the interval to {target}, because the splits share "
                "rows; more rows are needed."
            )
        return f"About {count} seeds would narrow the interval to {target}."

    def _other_leaders(self) -> str:
        """Return sentences that name other metrics and heads by which another eraser is best."""
        result = self.result
        entries = {m: result.metric(m) for m in SUMMARY if m in result.metrics and m != self.metric}
        settings = [
            (m, self.head, f"by {entry.label}")
            for m, entry in entries.items()
            if entry.of == "head" and entry.lower_is_better is not None
        ] + [
            (self.metric, head, f"with the {head} head")
            for head in result.context.heads if head != self.head
        ]  # fmt: skip
        texts: dict[str, list[str]] = {}
        for metric, head, text in settings:
            order = result.verdict(metric, head=head or None, p=self.p).order
            leader = next((e for e in order if e in self.erasers), None)
            if leader is not None and leader != self.best:
                texts.setdefault(leader, []).append(text)
        return " ".join(f"{leader} is best {_join_names(by)}." for leader, by in texts.items())


def _join_names(names: Sequence[str]) -> str:
    """Join names to a text: "A", "A and B", "A, B and C"."""
    *first, last = names
    return f"{', '.join(first)} and {last}" if first else last


def cards(result: Comparison) -> list[Card]:
    """Return the cards of a report: the decision, the probe score of each concept, and the cost."""
    choice, unerased = decision(result), result.context.eraser_as("none")
    value = "no gain" if choice.outcome == NO_GAIN else choice.eraser or "-"
    first = Card(_TITLES[choice.outcome], value, choice.sentence)
    eraser = choice.eraser or next((e for e in result.context.erasers if e != unerased), None)
    if eraser is None:
        return [first]
    return [first, *_concept_cards(result, eraser), *_cost_cards(result, eraser, choice.head)]


def _concept_cards(result: Comparison, eraser: str) -> list[Card]:
    """Return a card per concept: score of a linear probe, and why it exceeds chance level."""
    context, cards = result.context, []
    unerased = context.eraser_as("none")
    sizes = dict(zip(context.concepts, context.concept_sizes, strict=False))
    for name in context.concepts:
        kind, key = "accuracy", concept_key("probe_accuracy", name, context.concepts)
        chance_key = concept_key("probe_chance", name, context.concepts)
        if key not in result.metrics:
            kind, key = "R2", concept_key("probe_r2", name, context.concepts)
        if key not in result.metrics:
            continue
        interval = result.interval(key, eraser=eraser)
        chance = 0.0
        if kind == "accuracy" and chance_key in result.metrics:
            chance = result.mean(chance_key, eraser=eraser)
        before = ""
        if unerased is not None:
            before = f", unerased {number(result.mean(key, eraser=unerased))}"
        text = (
            f"{kind} of a linear probe for {name} on new rows after {eraser} (chance "
            f"{number(chance)}{before}). "
        )
        if interval.mean - chance < MIN_GAIN:
            text += "The probe is at chance level."
        else:
            if interval.low <= chance:
                text += "The interval over seeds includes the chance level. "
            two_classes = sizes.get(name, 2) == 2
            majority = chance if kind == "accuracy" and two_classes else math.nan
            text += _excess_text(result, eraser, name, interval.mean, majority)
        title = "The concept" if name == "concept" else f"The concept: {name}"
        cards.append(Card(title, number(interval.mean), text))
    return cards


def _excess_text(result: Comparison, eraser: str, name: str, accuracy: float, chance: float) -> str:
    """Return the text that says why a probe is above chance level.

    The causes are incomplete erasure, the sampling of the training rows, and a difference between
    training and test rows. `accuracy` is the score of the probe, R2 for a quantity; `chance` is
    the chance level of the accuracy of two classes, else NaN.
    """
    residual = result.mean("residual", eraser=eraser) if "residual" in result.metrics else 0.0
    if residual > MAX_RESIDUAL:
        return f"The fraction {number(residual)} of the covariance with the concept remains."
    text = "The covariance with the concept is zero on the training rows, but not on new rows. "
    key = concept_key("expected_r2", name, result.context.concepts)
    r2 = result.advice().get(key, math.nan)
    expected = sampling_accuracy(r2, chance)
    if not math.isnan(r2):
        text += "From the sampling error of the training rows alone, the best linear predictor has "
        text += f"an expected R2 of {number(r2)}"
        if not math.isnan(expected):
            text += f" and an accuracy of about {number(expected)}"
        text += ". "
    if expected >= accuracy:
        return text + "The sampling error explains the accuracy."
    p = result.level()
    if p is None or p == 0.5:
        return text + "A higher probe score comes from a difference between training and test rows."
    return text + (
        "A higher probe score comes from a shift of distribution: "
        f"{association(result.context, p)} of task and {name} in the training rows, p = .5 in the "
        "test rows."
    )


def sampling_accuracy(r2: float, chance: float) -> float:
    """Return the accuracy of the best linear rule for two normal classes with R^2 = `r2`.

    p = `chance` is the fraction of the larger class, and D = sqrt(r2 / ((1 - r2) p (1 - p))) is the
    distance between the class means in standard deviations within classes. With
    c = log(p / (1 - p)) / D and the normal distribution function Phi, the accuracy is
    Phi(D / 2 + c) p + Phi(D / 2 - c) (1 - p). The result is NaN if `r2` or p is NaN, if `r2` is
    not between 0 and 1, or if p < 1/2, which occurs only for more than two classes.
    """
    if math.isnan(chance) or not 0.5 <= chance < 1 or not 0 < r2 < 1:
        return math.nan
    distance = math.sqrt(r2 / ((1 - r2) * chance * (1 - chance)))
    shift = math.log(chance / (1 - chance)) / distance
    sides = ndtr(distance / 2 + shift) * chance, ndtr(distance / 2 - shift) * (1 - chance)
    return float(sum(sides))


def _cost_cards(result: Comparison, eraser: str, head: str) -> list[Card]:
    """Return the card of the cost of erasing: distortion, task score and worst group."""
    parts, value = [], "-"
    if "distortion" in result.metrics:
        value = f"{100 * result.mean('distortion', eraser=eraser):.3g} %"
        parts.append(f"of the variance of the rows is changed by {eraser}.")
    if "kept_covariance" in result.metrics:
        kept = result.mean("kept_covariance", eraser=eraser)
        parts.append(f"{eraser} keeps {100 * kept:.3g} % of the squared covariance with the task.")
    unerased = result.context.eraser_as("none")
    for metric in ("accuracy", "r2"):
        if metric in result.metrics and unerased is not None:
            before, after = (
                number(result.mean(metric, eraser=e, head=head or None)) for e in (unerased, eraser)
            )
            label = result.metric(metric).label
            parts.append(f"The task: {label} {after}, unerased {before} ({head} head).")
    cell = worst_cell_text(result, eraser, head, result.level()) if head else ""
    if cell:
        few = has_few_rows(result, eraser, head, None)
        caution = f"; fewer than {FEW_ROWS} rows, not reliable" if few else ""
        parts.append(f"Worst group: {cell}{caution}.")
    return [Card("The cost", value, " ".join(parts))] if parts else []
