"""Decision of a comparison: a sentence each on eraser, remaining association, and cost."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from scipy.special import stdtrit

from splince_fast.evaluation import statistics
from splince_fast.evaluation.measurements import Measurements, has_few_rows
from splince_fast.evaluation.metrics import concept_key, headline
from splince_fast.evaluation.statistics import MIN_SEEDS
from splince_fast.evaluation.text_table import joined, number, signed
from splince_fast.methods.table import METHODS, key_of

DECIDED, NOT_DECIDED, NO_GAIN = "decided", "not decided", "no gain"
# Smallest difference of practical use: absolute for bounded metrics such as accuracy, and a
# fraction of the value of the best eraser for other metrics and custom ones.
MIN_GAIN = 0.01
# An eraser r is partial if |Cov(r(x), z)| / |Cov(x, z)| exceeds this value, z the concept.
MAX_RESIDUAL = 0.01


@dataclass(frozen=True, slots=True)
class Decision:
    """Choice of an eraser by one metric and one head."""

    outcome: str  # "decided", "not decided" or "no gain" (erasing does not improve the metric)
    eraser: str | None  # eraser to use; None if no eraser is a candidate
    metric: str
    head: str  # "" for metrics of the eraser itself
    sentence: str  # recommendation, in at most 40 words
    reasons: tuple[str, ...] = ()  # tests, and changes of the rows: a sentence each

    def __str__(self) -> str:
        return " ".join((self.sentence, *self.reasons))


def decide(
    result: Measurements, metric: str | None = None, head: str | None = None, p: float | None = None
) -> Decision:
    """Choose one of the compared erasers, as documented in :meth:`Comparison.decision`."""
    if not result.metrics:
        return Decision(NOT_DECIDED, None, "", "", "Not decided: no eraser has a value.")
    if metric is None:
        few = any(has_few_rows(result, e, head, p) for e in result.context.erasers)
        metric = "accuracy" if few else headline(result.metrics)
    head = result._head_of(metric, head)
    verdict = result.verdict(metric, head=head or None, p=p)
    unerased = result.context.eraser_as("none")
    names = [name for name in verdict.order if name != unerased]
    partial = [e for e in names if _mean(result, "residual", e, p=p) > MAX_RESIDUAL]
    erasers = [name for name in names if name not in partial]
    remains = "more than 1 % of the covariance with the concept remains after "
    if not erasers:
        reason = remains + joined(partial) if partial else "no eraser has a value"
        return Decision(NOT_DECIDED, None, metric, head, f"Not decided: {reason}.")
    choice = _Choice(result, metric, head, p, unerased, erasers)
    reasons = choice.reasons()
    if verdict.n_seeds < len(result.context.seeds):
        reasons.append(f"Order over the {verdict.n_seeds} seeds at which all erasers have values.")
    if partial:
        reasons.append(f"Not considered, because {remains}it: {joined(partial)}.")
    sentence = choice.sentence()
    return Decision(choice.outcome, choice.eraser, metric, head, sentence, tuple(reasons))


def _mean(result: Measurements, metric: str, eraser: str | None, **where: Any) -> float:
    """Return a mean over seeds; NaN if it was not measured."""
    if eraser is None or metric not in result.metrics:
        return math.nan
    return result.mean(metric, eraser=eraser, **where)


class _Choice:
    """Choice between `erasers`, the best one first; `unerased` is the name of unerased rows."""

    def __init__(
        self, result: Measurements, metric: str, head: str, p: float | None, unerased: str | None,
        erasers: Sequence[str],
    ) -> None:  # fmt: skip
        entry = result.metric(metric)
        where: dict[str, Any] = {"head": head or None, "p": p}
        self.result, self.p, self.erasers, self.best = result, p, erasers, erasers[0]
        self.label, self.head = entry.label, head
        self.sign = -1.0 if entry.lower_is_better else 1.0
        self.mean = {e: _mean(result, metric, e, **where) for e in (*erasers, unerased) if e}
        self.change = {e: _mean(result, "distortion", e, p=p) for e in erasers}
        self.min_gain = MIN_GAIN * (1.0 if entry.bounded else abs(self.mean[self.best]))
        tests = result.differences(metric, reference=self.best, **where)
        self.tests = {t.method: t for t in tests if t.method in self.mean and t.n}
        # A difference that none of m rows shows may be 3 / m (rule of three, 95 %).
        self.unseen = 3 / tests.rows if tests.rows else 0.0
        self.unerased = unerased if unerased in self.tests else None
        rivals = [e for e in erasers[1:] if not self._is_worse(e)]
        self.equal = [self.best, *filter(self._is_equal, rivals)]
        # Of equal erasers, or else of those with exactly the best mean, the least change is chosen.
        tied = [e for e in rivals if self.mean[e] == self.mean[self.best]]
        self.eraser = min(
            self.equal if len(self.equal) > 1 else [self.best, *tied],
            key=lambda e: (math.isnan(self.change[e]), self.change[e]),
        )
        self.tested = not self.tests or any(not math.isnan(t.p) for t in self.tests.values())
        # Comparisons that are not decided: other erasers, then unerased rows with the chosen one.
        self.open = [e for e in rivals if e not in self.equal]
        max_gain = math.inf
        if self.unerased is not None:
            test = self.tests[self.unerased]
            max_gain = max(-self.sign * test.low, -self.sign * test.high)
            own = result.differences(metric, reference=self.eraser, **where)
            self.tests |= {t.method: t for t in own if t.method == self.unerased}
            self.open += [self.unerased] * (not self._is_worse(self.unerased))
        if self.tested and max_gain < self.min_gain:
            self.outcome = NO_GAIN
        else:
            is_decided = self.tested and not rivals and not self.open
            self.outcome = DECIDED if is_decided else NOT_DECIDED

    def _is_worse(self, eraser: str) -> bool:
        """Whether an eraser (or "none") is significantly worse than the one of its test."""
        test = self.tests.get(eraser)
        return test is not None and test.significant and self.sign * test.difference < 0

    def _is_equal(self, eraser: str) -> bool:
        """Whether the interval of a difference lies within `min_gain`; False without interval."""
        test = self.tests.get(eraser)
        return test is not None and max(-test.low, test.high, self.unseen) <= self.min_gain

    def sentence(self) -> str:
        """Return the recommendation, with its reason."""
        mean = {e: number(value) for e, value in self.mean.items()}
        tie = self.equal if len(self.equal) > 1 else [self.eraser]
        rivals = [e for e in [self.best, *self.open] if e not in (*tie, self.unerased)]
        context = self.result.context
        role = dict(zip(context.erasers, context.eraser_roles, strict=True))[self.eraser]
        key = key_of(role)
        needs_labels = role == "quadratic" if key is None else METHODS[key].needs_labels
        chosen = self.eraser + " (it needs every row's label)" * needs_labels
        own, unerased = mean[self.eraser], mean.get(str(self.unerased), "")
        if self.outcome == NO_GAIN:
            return (
                f"Erasing does not improve the {self.label}: {own} after {self.eraser}, {unerased} "
                f"on unerased rows; if the concept must be erased, use {chosen}"
                f"{' for now' * bool(rivals)}."
            )
        if self.outcome == DECIDED:
            others = [f"{mean[e]} after {e}" for e in self.erasers[1:2]]
            others += [f"{unerased} on unerased rows"] * bool(unerased)
            if not others:
                return f"Use {chosen}: no other eraser was compared."
            tests = "the difference is" if len(self.tests) == 1 else "each difference is"
            score = f"its {self.label} is {own}, against {joined(others)}"
            return f"Use {chosen}: {score}; {tests} significant."
        text = f"Use {chosen} for now: best {self.label} so far ({own})"
        if len(tie) > 1:
            chosen += " for now" * bool(self.open)
            within = number(self.min_gain).rstrip("0")
            text = f"Use {chosen}: {_named(tie)} are equal within {within} by {self.label}"
        if self.unerased and self.sign * (self.mean[self.eraser] - self.mean[self.unerased]) < 0:
            text += f", but not erasing is better ({unerased})"
        elif self.unerased in self.open:
            text += f", not significantly better than unerased rows ({unerased})"
        n = min((test.n for test in self.tests.values()), default=0)
        if not self.tested and n < MIN_SEEDS:
            have = f"{n} {'has' if n == 1 else 'have'} values"
            return f"{text}; a test needs {MIN_SEEDS} seeds, and {have}."
        if not self.tested:
            return f"{text}; differences that are equal at all seeds cannot be tested."
        if rivals:
            verb = "is" if len(rivals) == 1 else "are"
            text += f"; {_named(rivals)} {verb} not significantly worse"
        return f"{'; '.join(filter(None, [text, self._needed_text()]))}."

    def _needed_text(self) -> str:
        """Return the number of seeds or rows that would decide all open comparisons."""
        # A difference D is decided if the half width of its interval is below |D|, or, as equality,
        # below `min_gain` - |D|. Holm's method tests the closest comparison last, at 5 %.
        seeds, rows, apart = 0, 0, True
        context, ratio = self.result.context, self.result.test_ratio(self.p)
        for test in (self.tests[e] for e in self.open):
            half, size = max((test.high - test.low) / 2, self.unseen), abs(test.difference)
            if math.isnan(test.low):
                return ""
            target = max(size, self.min_gain - size)
            apart &= size >= self.min_gain - size
            factor = max(1.0, half / target) ** 2
            if test.how == "bootstrap":
                rows = max(rows, math.ceil(context.sizes[2] * factor))
                continue
            deviation = half / float(stdtrit(test.n - 1, 0.975)) / math.sqrt(1 / test.n + ratio)
            count = statistics.seeds_for(deviation, ratio, target)
            if count is None:
                rows = max(rows, math.ceil(context.n * factor))
            else:
                seeds = max(seeds, count - test.n, 1)
        would = "would tell them apart" if apart else "would show whether they are equal"
        if rows:
            digits = 10 ** max(0, len(str(rows)) - 2)
            kind = "test rows" if context.test_labels else "rows"
            return f"about {-(-rows // digits) * digits:,} {kind} {would}"
        return f"about {seeds} more seed{'s' * (seeds != 1)} {would}" if seeds else ""

    def reasons(self) -> list[str]:
        """Return sentences on the open comparisons, and on the changes of the rows."""
        setting = f"{self.label}, {self.head} head" if self.head else self.label
        compared = [self.unerased] if self.outcome == NO_GAIN else self.open
        texts = []
        for test in (self.tests[name] for name in compared if name is not None):
            other = "unerased rows" if test.method == self.unerased else test.method
            if not math.isnan(test.low):
                texts.append(
                    f"{test.reference} minus {other} ({setting}): {signed(-test.difference)}, "
                    f"95 % interval {signed(-test.high)} to {signed(-test.low)}, p = "
                    f"{number(test.p_holm)} after Holm's correction."
                )
        if len(self.change) > 1 and not any(map(math.isnan, self.change.values())):
            listed = joined([f"{100 * c:.3g} % after {e}" for e, c in self.change.items()])
            texts.append(f"Change of the rows, of their variance: {listed}.")
        return texts


def _named(erasers: Sequence[str]) -> str:
    """Return the names of erasers, or the number of erasers whose names are over four words."""
    text = joined(erasers)
    return text if len(erasers) == 1 or len(text.split()) <= 4 else f"{len(erasers)} erasers"


def summary(result: Measurements) -> tuple[Decision, str, str]:
    """Return the decision, a sentence on the remaining association, and one on the cost."""
    choice, unerased = decide(result), result.context.eraser_as("none")
    eraser = choice.eraser or next((e for e in result.context.erasers if e != unerased), None)
    if eraser is None:
        return choice, "Nothing was erased.", ""
    head = choice.head or result.context.heads[0]

    def percent(metric: str, name: str | None, of: str | None = None) -> str:
        value = _mean(result, metric, name, head=of)
        return "" if math.isnan(value) else f"{100 * max(0.0, value):.0f}"

    concepts, left, cost = result.context.concepts, [], []
    for name in concepts:
        accuracy, chance, r2 = (
            concept_key(f"probe_{kind}", name, concepts) for kind in ("accuracy", "chance", "r2")
        )
        subject = "the concept" if name == "concept" else name
        for metric, text, level in (
            (accuracy, "{} can still be guessed linearly for {} of 100 new rows",
             percent(chance, eraser)),
            (r2, "{1} % of the variance of {0} can still be predicted linearly in new rows", "0"),
        ):  # fmt: skip
            if after := percent(metric, eraser):
                before = percent(metric, unerased)
                earlier = before and f", and {before} before erasing"
                left.append(f"{text.format(subject, after)}; {level} is chance{earlier}")
    for metric, text in (
        ("accuracy", "the task is predicted for {} of 100 new rows"),
        ("r2", "{} % of the variance of the task can be predicted in new rows"),
    ):
        if after := percent(metric, eraser, head):
            before = percent(metric, unerased, head)
            cost.append(text.format(after) + (before and f", {before} without erasing"))
    change = _mean(result, "distortion", eraser)
    if not math.isnan(change):
        cost.append(f"{eraser} changes {100 * change:.3g} % of the variance of the rows")
    linear = (
        f"After {eraser}, {'; '.join(left)}." if left
        else f"The linear signal of {joined(concepts)} after {eraser} was not measured: no probe "
        "has a score."
    )  # fmt: skip
    return choice, linear, f"The cost: {'; '.join(cost)}." if cost else "The cost was not measured."
