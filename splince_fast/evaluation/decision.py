"""Choice of an eraser, what is left of the concept, and the cost: one sentence for each."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from scipy.special import stdtrit

from splince_fast.evaluation import statistics
from splince_fast.evaluation.measurements import Differences, Measurements, has_few_rows
from splince_fast.evaluation.metrics import concept_key, headline
from splince_fast.evaluation.statistics import MIN_SEEDS, Difference
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
    sentence: str  # what to do, in at most 40 words
    reasons: tuple[str, ...] = ()  # tests, and changes of the rows: a sentence each

    def __str__(self) -> str:
        return " ".join((self.sentence, *self.reasons))


def decide(
    result: Measurements, metric: str | None = None, head: str | None = None, p: float | None = None
) -> Decision:
    """Choose one of the compared erasers, as documented in :meth:`Comparison.decision`."""
    if not result.metrics:
        return Decision(NOT_DECIDED, None, "", "", "Not decided: no eraser has a value.")
    metric = _default_metric(result, head, p) if metric is None else metric
    head = result.head_of(metric, head)
    verdict = result.verdict(metric, head=head or None, p=p)
    unerased = result.context.eraser_as("none")
    names = [name for name in verdict.order if name != unerased]
    partial = [name for name in names if is_partial(result, name, p)]
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
    outcome, eraser = choice.outcome, choice.eraser
    return Decision(outcome, eraser, metric, head, choice.sentence(), tuple(reasons))


def _default_metric(result: Measurements, head: str | None, p: float | None) -> str:
    """Return the headline metric, but "accuracy" if a worst group has few rows."""
    metric = headline(result.metrics)
    if metric != "worst_group" or "accuracy" not in result.metrics:
        return metric
    few = any(has_few_rows(result, eraser, head, p) for eraser in result.context.erasers)
    return "accuracy" if few else metric


def _role(result: Measurements, eraser: str) -> str:
    return result.context.eraser_roles[result.context.erasers.index(eraser)]


def is_partial(result: Measurements, eraser: str, p: float | None) -> bool:
    """Whether an eraser leaves more than 1 % of the covariance with a concept, at level `p`.

    INLP and R-LACE do not aim at the covariance, but remove directions that a probe finds. They
    count as complete if they remove at least one direction.
    """
    if "residual" not in result.metrics:
        return False
    searches = _role(result, eraser) in ("INLP", "RLACE")
    if searches and result.mean("rank", eraser=eraser, p=p):
        return False
    return result.mean("residual", eraser=eraser, p=p) > MAX_RESIDUAL


def _distortion(result: Measurements, eraser: str, p: float | None = None) -> float:
    """Return the mean change of the rows by an eraser; NaN if it was not measured."""
    if "distortion" not in result.metrics:
        return math.nan
    return result.mean("distortion", eraser=eraser, p=p)


def needs_labels(result: Measurements, eraser: str) -> bool:
    """Whether an eraser of the library needs the labels of the rows that it is applied to."""
    role = _role(result, eraser)
    key = key_of(role)
    return role == "quadratic" if key is None else METHODS[key].needs_labels


class _Choice:
    """Choice between `erasers`, the best one first; `unerased` is the name of unerased rows.

    Erasers are equal if the interval of their difference lies within `min_gain`. Of those equal to
    the best one, the eraser with the least change of the rows is chosen; without equals, the best
    one, or of those with exactly its mean the one with the least change.
    """

    def __init__(
        self, result: Measurements, metric: str, head: str, p: float | None, unerased: str | None,
        erasers: Sequence[str],
    ) -> None:  # fmt: skip
        entry = result.metric(metric)
        self.result, self.metric, self.head, self.p = result, metric, head, p
        self.erasers, self.best, self.label = erasers, erasers[0], entry.label
        self.sign = -1.0 if entry.lower_is_better else 1.0
        self.min_gain = MIN_GAIN * (1.0 if entry.bounded else abs(self._mean(self.best)))
        tests = self._differences(self.best)
        self.tests = {t.method: t for t in tests if t.method in {*erasers, unerased} and t.n}
        # A difference that none of m rows shows may be 3 / m (rule of three, 95 %).
        self.unseen = 3 / tests.rows if tests.rows else 0.0
        self.unerased = unerased if unerased in self.tests else None
        rivals = [e for e in erasers[1:] if not self._is_worse(e)]
        self.equal = [self.best, *(e for e in rivals if self._is_equal(self.tests.get(e)))]
        tied = [e for e in rivals if self._mean(e) == self._mean(self.best)]
        self.eraser = self._least_change(self.equal if len(self.equal) > 1 else [self.best, *tied])
        self.tested = not self.tests or any(not math.isnan(t.p) for t in self.tests.values())
        no_gain = self.tested and self._max_gain() < self.min_gain
        # Comparisons that are not decided: other erasers, then unerased rows with the chosen one.
        self.open = [e for e in rivals if e not in self.equal]
        if self.unerased is not None:
            own = {test.method: test for test in self._differences(self.eraser)}
            self.tests[self.unerased] = own[self.unerased]
            self.open += [self.unerased] * (not self._is_worse(self.unerased))
        if no_gain:
            self.outcome = NO_GAIN
        elif self.tested and not rivals and not self.open:
            self.outcome = DECIDED
        else:
            self.outcome = NOT_DECIDED

    def _mean(self, eraser: str) -> float:
        return self.result.mean(self.metric, eraser=eraser, head=self.head or None, p=self.p)

    def _differences(self, eraser: str) -> Differences:
        return self.result.differences(
            self.metric, reference=eraser, head=self.head or None, p=self.p
        )

    def _is_worse(self, eraser: str) -> bool:
        """Whether an eraser (or "none") is significantly worse than the one of its test."""
        test = self.tests.get(eraser)
        return test is not None and test.significant and self.sign * test.difference < 0

    def _is_equal(self, test: Difference | None) -> bool:
        """Whether the interval of a difference lies within `min_gain`; False without interval."""
        return test is not None and max(-test.low, test.high, self.unseen) <= self.min_gain

    def _max_gain(self) -> float:
        """Return the upper limit of the gain over unerased rows; infinite without a test."""
        test = self.tests.get(self.unerased or "")
        if test is None or math.isnan(test.p):
            return math.inf
        return max(-self.sign * test.low, -self.sign * test.high)

    def _least_change(self, erasers: list[str]) -> str:
        changes = {e: _distortion(self.result, e, self.p) for e in erasers}
        measured = [e for e in erasers if not math.isnan(changes[e])]
        return min(measured, key=changes.__getitem__) if measured else erasers[0]

    # -- sentences -----------------------------------------------------------------------------

    def sentence(self) -> str:
        """Return what to do, with the reason."""
        value = number(self._mean(self.eraser))
        tie = self.equal if len(self.equal) > 1 else [self.eraser]
        rivals = [e for e in [self.best, *self.open] if e not in (*tie, self.unerased)]
        if self.outcome == NO_GAIN:
            now = " for now" * bool(rivals)
            return (
                f"Erasing does not improve the {self.label}: {value} after {self.eraser}, "
                f"{number(self._mean(str(self.unerased)))} on unerased rows; if the concept must "
                f"be erased, use {self.eraser}{self._labels_text()}{now}."
            )
        use = f"Use {self.eraser}{self._labels_text()}"
        if self.outcome == DECIDED:
            others = [f"{number(self._mean(e))} after {e}" for e in self.erasers[1:2]]
            others += [f"{number(self._mean(e))} on unerased rows" for e in [self.unerased] if e]
            if not others:
                return f"{use}: no other eraser was compared."
            tests = "the difference is" if len(self.tests) == 1 else "each difference is"
            against = joined(others)
            return f"{use}: its {self.label} is {value}, against {against}; {tests} significant."
        if len(tie) > 1:
            within = f"{number(self.min_gain).rstrip('0')} by {self.label}"
            use += " for now" * bool(self.open)
            text = f"{use}: {_named(tie)} are equal within {within}"
        else:
            text = f"{use} for now: best {self.label} so far ({value})"
        text += self._unerased_text()
        if not self.tested:
            return f"{text}; {self._untested_text()}."
        if rivals:
            verb = "is" if len(rivals) == 1 else "are"
            text += f"; {_named(rivals)} {verb} not significantly worse"
        needed = self._needed_text()
        return f"{text}{'; ' * bool(needed)}{needed}."

    def _labels_text(self) -> str:
        if not needs_labels(self.result, self.eraser):
            return ""
        return " (it needs every row's label)"

    def _untested_text(self) -> str:
        n = min(test.n for test in self.tests.values())
        if n < MIN_SEEDS:
            return f"a test needs {MIN_SEEDS} seeds, and {n} {'has' if n == 1 else 'have'} values"
        return "differences that are equal at all seeds cannot be tested"

    def _unerased_text(self) -> str:
        """Return a clause if unerased rows are better by the mean, or not significantly worse."""
        if self.unerased is None:
            return ""
        mean, before = self._mean(self.eraser), self._mean(self.unerased)
        if self.sign * (mean - before) < 0:
            return f", but not erasing is better ({number(before)})"
        if self.unerased not in self.open:
            return ""
        return f", not significantly better than unerased rows ({number(before)})"

    def _needed_text(self) -> str:
        """Return the number of seeds or rows that would decide all open comparisons.

        A difference D is decided if the half width of its interval is below |D|, or, as equality,
        below `min_gain` - |D|. In Holm's method the closest comparison is tested last, at 5 %.
        """
        seeds, rows, apart = 0, 0, True
        for test in (self.tests[e] for e in self.open):
            half, size = max((test.high - test.low) / 2, self.unseen), abs(test.difference)
            if math.isnan(test.low):
                return ""
            target = max(size, self.min_gain - size)
            apart &= size >= self.min_gain - size
            factor = max(1.0, half / target) ** 2
            if test.how.startswith("bootstrap"):
                rows = max(rows, math.ceil(self.result.context.sizes[2] * factor))
                continue
            ratio = self.result.test_ratio(self.p)
            deviation = half / float(stdtrit(test.n - 1, 0.975)) / math.sqrt(1 / test.n + ratio)
            count = statistics.seeds_for(deviation, ratio, target)
            if count is None:
                rows = max(rows, math.ceil(self.result.context.n * factor))
            else:
                seeds = max(seeds, count - test.n, 1)
        would = "would tell them apart" if apart else "would show whether they are equal"
        if rows:
            digits = 10 ** max(0, len(str(rows)) - 2)
            kind = "test rows" if self.result.context.test_labels else "rows"
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
                    f"{test.reference} minus {other} ({setting}): {signed(-test.difference)}, 95 % "
                    f"interval {signed(-test.high)} to {signed(-test.low)}, p = "
                    f"{number(test.p_holm)} after Holm's correction."
                )
        changes = {e: _distortion(self.result, e, self.p) for e in self.erasers}
        if len(changes) > 1 and not any(map(math.isnan, changes.values())):
            listed = joined([f"{100 * change:.3g} % after {e}" for e, change in changes.items()])
            texts.append(f"Change of the rows, of their variance: {listed}.")
        return texts


def _named(erasers: Sequence[str]) -> str:
    """Return the names of erasers, or the number of erasers whose names are over four words."""
    text = joined(erasers)
    return text if len(erasers) == 1 or len(text.split()) <= 4 else f"{len(erasers)} erasers"


def summary(result: Measurements) -> tuple[Decision, str, str]:
    """Return the decision, and a sentence each on what is left of the concept and on the cost."""
    choice, unerased = decide(result), result.context.eraser_as("none")
    eraser = choice.eraser or next((e for e in result.context.erasers if e != unerased), None)
    if eraser is None:
        return choice, "Nothing was erased.", ""
    head = choice.head or (result.context.heads[0] if result.context.heads else "")
    return choice, _left(result, eraser, unerased), _cost(result, eraser, unerased, head)


def _left(result: Measurements, eraser: str, unerased: str | None) -> str:
    """Return the sentence on how well a linear probe guesses each concept after erasing."""
    concepts, texts = result.context.concepts, []
    for name in concepts:
        accuracy, chance, r2 = (
            concept_key(f"probe_{kind}", name, concepts) for kind in ("accuracy", "chance", "r2")
        )
        key = accuracy if accuracy in result.metrics else r2
        after, before = (_percent(result, key, e) for e in (eraser, unerased))
        subject = "the concept" if name == "concept" else name
        earlier = before and f", and {before} before erasing"
        if after and key == accuracy:
            texts.append(
                f"{subject} can still be guessed linearly for {after} of 100 new rows; "
                f"{_percent(result, chance, eraser)} is chance{earlier}"
            )
        elif after:
            texts.append(
                f"{after} % of the variance of {subject} can still be predicted linearly in new "
                f"rows; 0 is chance{earlier}"
            )
    if not texts:
        return f"What {eraser} leaves of {joined(concepts)} was not measured: no probe has a score."
    return f"After {eraser}, {'; '.join(texts)}."


def _cost(result: Measurements, eraser: str, unerased: str | None, head: str) -> str:
    """Return the sentence on the score of the task and the change of the rows."""
    parts = []
    for metric, text in (
        ("accuracy", "the task is predicted for {} of 100 new rows"),
        ("r2", "{} % of the variance of the task can be predicted in new rows"),
    ):
        after, before = (_percent(result, metric, e, head) for e in (eraser, unerased))
        if after:
            parts.append(text.format(after) + (before and f", {before} without erasing"))
    change = _distortion(result, eraser)
    if not math.isnan(change):
        parts.append(f"{eraser} changes {100 * change:.3g} % of the variance of the rows")
    return f"The cost: {'; '.join(parts)}." if parts else "The cost was not measured."


def _percent(result: Measurements, metric: str, eraser: str | None, head: str | None = None) -> str:
    """Return a mean in whole percent, at least 0; "" if there is no value."""
    if eraser is None or metric not in result.metrics:
        return ""
    value = result.mean(metric, eraser=eraser, head=head)
    return "" if math.isnan(value) else f"{100 * max(0.0, value):.0f}"
