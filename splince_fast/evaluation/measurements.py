"""Values of a comparison by metric, eraser, head and level; their intervals, tests and order."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from splince_fast._runtime.names import listed
from splince_fast._solve.options import is_number
from splince_fast.evaluation import statistics
from splince_fast.evaluation.data import FEW_ROWS, Codes, Float
from splince_fast.evaluation.metrics import (
    OF_CLASSES,
    CellAccuracy,
    TableMetric,
    metric_of,
    scores,
)
from splince_fast.evaluation.records import ERASER_ROW, Context, Record
from splince_fast.evaluation.statistics import Difference, Interval
from splince_fast.evaluation.text_table import Table, signed
from splince_fast.exceptions import InputError

# Matches the numbers in a note or reason, but not digits inside names.
_NUMBER = re.compile(r"(?<![\w'])(\d[\d,.]*(e[+-]?\d+)?|inf\b)")


class Differences(list[Difference]):
    """Paired differences of erasers from a reference eraser by one metric; prints as a table."""

    def __init__(
        self, items: Iterable[Difference], label: str, head: str, p: float | None,
        rows: float | None,
    ) -> None:  # fmt: skip
        super().__init__(items)
        self.label, self.head, self.p = label, head, p
        self.rows = rows  # independent test rows that a metric is a fraction of, over all seeds

    def table(self) -> Table:
        """Return the table of differences, with intervals, t statistics and p values."""
        rows = []
        for d in self:
            interval = "-" if math.isnan(d.low) else f"[{signed(d.low)}, {signed(d.high)}]"
            texts = (f"{d.t:.2f}", f"{d.p:.3f}", f"{d.p_holm:.3f}" + "*" * d.significant)
            tests = ("-" if text == "nan" else text for text in texts)
            rows.append((d.method, signed(d.difference), interval, *tests, str(d.n)))
        reference, how = (self[0].reference, self[0].how) if self else ("", "no test")
        head = f", {self.head} head" if self.head else ""
        level = "" if self.p is None else f", p = {self.p:g}"
        columns = ("eraser", "difference", "95 % interval", "t", "p", "p (Holm)", "seeds")
        return Table(
            f"{self.label} minus that of {reference}{head}{level}; {how}", columns, tuple(rows)
        )

    def __str__(self) -> str:
        return str(self.table())


class Verdict(NamedTuple):
    """Order of the erasers by a metric, over the seeds at which all of them have a value."""

    order: tuple[str, ...] = ()  # the erasers that have values, the best one first
    leaders: tuple[str, ...] = ()  # the best one, and those that are not significantly worse
    confirmed: str | None = None  # the eraser that is significantly better than all others
    n_seeds: int = 0  # seeds at which all erasers in `order` have a value


def _check_name(kind: str, name: object, names: Sequence[object]) -> None:
    if name not in names:
        raise InputError(f"there is no {kind} {name!r}; the {kind}s are {listed(names)}")


class Measurements:
    """Records of a comparison, read as values by metric, eraser, head and level."""

    def __init__(self, records: list[Record], context: Context) -> None:
        self.records, self.context = records, context
        self._bootstrapped: dict[tuple[str, str, str], Float | None] = {}

    @property
    def metrics(self) -> tuple[str, ...]:
        """Names of all metrics, in order of first appearance in the records."""
        return tuple(dict.fromkeys(key for r in self.records for key in r.values))

    @property
    def failures(self) -> list[tuple[str, str, str]]:
        """(eraser, head, reason) of failures; those that differ only in numbers appear once."""
        failed: dict[tuple[str, str, str], str] = {}
        for r in self.records:
            if r.reason:
                failed.setdefault((r.eraser, r.head, _NUMBER.sub("", r.reason)), r.reason)
        return [(eraser, head, text) for (eraser, head, _), text in failed.items()]

    @property
    def notes(self) -> list[str]:
        """Notes on the data and on the records; notes that differ only in numbers appear once."""
        of_records: dict[str, str] = {}
        for r in self.records:
            source = f"{r.eraser}{', ' + r.head if r.head else ''}: "
            unconverged = ("the solver did not converge (marked ~)",) * (not r.converged)
            for note in r.notes + unconverged:
                of_records.setdefault(source + _NUMBER.sub("", note), source + note)
        return [*self.context.notes, *of_records.values()]

    @property
    def sizes(self) -> dict[tuple[int, float | None], tuple[int, int, int]]:
        """Numbers of training, validation and test rows by (seed, level)."""
        return {(r.seed, r.p): r.sizes for r in self.records}

    def metric(self, key: str) -> TableMetric:
        """Label and direction of a metric, without its function.

        Parameters
        ----------
        key : str
            One of :attr:`metrics`.
        """
        _check_name("metric", key, self.metrics)
        return metric_of(key, self.context.custom_metrics)

    def _head_of(self, metric: str, head: str | None = None) -> str:
        """Name of the head of a metric, the first head by default; "" for metrics of erasers."""
        if self.metric(metric).of == "eraser":
            return ERASER_ROW
        head = self.context.heads[0] if head is None else head
        _check_name("head", head, self.context.heads)
        return head

    def _level(self, p: float | None = None) -> float | None:
        """Association level, by default the one furthest from .5; None for the natural split."""
        levels = self.context.levels
        if p is None:
            return max(levels, key=lambda q: 0.0 if q is None else abs(q - 0.5))
        if levels == (None,):
            raise InputError("this comparison has only the natural split; leave p out")
        _check_name("level", p, levels)
        return p

    def values(
        self, metric: str, *, eraser: str, head: str | None = None, p: float | None = None,
        alpha: float | None = None,
    ) -> dict[int, float]:  # fmt: skip
        """Values of a metric by seed; seeds without a value are absent.

        Parameters
        ----------
        metric, eraser : str
            One of :attr:`metrics`, such as "worst_group", and the name of an eraser.
        head, p, alpha : optional
            Name of a head, for metrics of heads (default: the first), association level (default:
            the one furthest from .5), and penalty of the head "retrained" (default: the selected).
        """
        _check_name("eraser", eraser, self.context.erasers)
        alphas = self.context.alphas
        if alpha is not None:
            _check_name("alpha", alpha, alphas if is_number(alpha) else ())
            # np.float32(.1) == .1, but their hashes differ: look the equal float up.
            alpha = alphas[alphas.index(alpha)]
        records = self._records_of(self._level(p), self._head_of(metric, head), eraser)
        of_seed = {r.seed: r.values if alpha is None else dict(r.path).get(alpha, {})
                   for r in records}  # fmt: skip
        return {seed: values[metric] for seed, values in of_seed.items() if metric in values}

    def _records_of(self, p: float | None, head: str, eraser: str | None = None) -> list[Record]:
        found = (r for r in self.records if r.head == head and r.p == p)
        return [r for r in found if eraser in (None, r.eraser)]

    def interval(self, metric: str, **where: Any) -> Interval:
        """Mean over seeds with a 95 % t interval; of a fixed split (`test`), a bootstrap interval.

        Parameters
        ----------
        metric, **where
            Arguments of :meth:`values`.
        """
        interval = statistics.t_interval(list(self.values(metric, **where).values()))
        if interval.n == 1 and where.get("alpha") is None:
            head = self._head_of(metric, where.get("head"))
            if (found := self._bootstrap(metric, head, where["eraser"])) is not None:
                return interval._replace(low=found[0], high=found[1])
        return interval

    def mean(self, metric: str, **where: Any) -> float:
        """Mean of a metric over seeds; NaN if no seed has a value.

        Parameters
        ----------
        metric, **where
            Arguments of :meth:`values`.
        """
        return statistics.t_interval(list(self.values(metric, **where).values())).mean

    def _bootstrap(
        self, metric: str, head: str, *erasers: str
    ) -> tuple[float, float, float] | None:
        """Return limits and p of a metric or a difference; None if it has no bootstrap values."""
        found = []
        for eraser in erasers:
            if (key := (metric, head, eraser)) not in self._bootstrapped:
                self._bootstrapped[key] = self._bootstrap_values(*key)
            if (values := self._bootstrapped[key]) is None:
                return None
            found.append(values)
        return statistics.bootstrap_interval(found[0] - sum(found[1:]))

    def _bootstrap_values(self, metric: str, head: str, eraser: str) -> Float | None:
        labels, found = self.context.test_labels, self._records_of(None, head, eraser)
        if labels is None or metric not in OF_CLASSES or not found or not found[0].y_pred:
            return None
        y_pred, table = np.array(found[0].y_pred), {metric: OF_CLASSES[metric]}

        def statistic(rows: Codes) -> float:
            return scores(table, labels.take(rows), y_pred[rows]).get(metric, math.nan)

        if math.isnan(statistic(np.arange(len(y_pred)))):
            return None
        return statistics.bootstrap_values(statistic, len(y_pred), labels.groups)

    def worst_cells(
        self, *, eraser: str, head: str | None = None, p: float | None = None
    ) -> dict[int, CellAccuracy]:
        """Cell of task and concept with the lowest accuracy, by seed; none for quantities.

        Of equally bad cells, the one with most rows is taken. The interval is Wilson's.

        Parameters
        ----------
        eraser, head, p
            As for :meth:`values`.
        """
        if "worst_group" not in self.metrics:
            return {}
        seeds = self.values("worst_group", eraser=eraser, head=head, p=p)
        worst = {}
        for r in self._records_of(self._level(p), self._head_of("worst_group", head), eraser):
            if r.seed in seeds:
                code, n, n_correct = min(r.cells, key=lambda c: (c.n_correct / c.n, -c.n))
                worst[r.seed] = CellAccuracy.of(self.context.cells[code], n, n_correct)
        return worst

    def test_ratio(self, p: float | None = None) -> float:
        """Mean of n_test / n_train over the seeds of a level, as the corrected t test uses it.

        Parameters
        ----------
        p : float, optional
            As for :meth:`values`.
        """
        level = self._level(p)
        sizes = [size for (_, q), size in self.sizes.items() if q == level]
        return math.fsum(test / train for train, _, test in sizes) / len(sizes)

    def _resolution(self, metric: str, head: str, p: float | None) -> int | None:
        """Return the number of test rows of which a metric is a fraction."""
        match self.metric(metric).fraction_of:
            case "rows":
                return self.context.sizes[2]
            case "cell":
                cells = (cell for r in self._records_of(p, head) for cell in r.cells)
                return min((cell.n for cell in cells), default=None)
        return None

    def differences(
        self, metric: str = "worst_group", *, reference: str = "LEACE", head: str | None = None,
        p: float | None = None, alpha: float | None = None,
    ) -> Differences:  # fmt: skip
        """Test the difference of every eraser from a reference, paired by seed.

        The test is Nadeau and Bengio's corrected resampled t test over three seeds or more, and for
        a fixed split a paired bootstrap over test rows. Holm's method adjusts the p values.

        Parameters
        ----------
        metric, reference, head, p, alpha
            As for :meth:`values`; the reference is an eraser.
        """
        reference_values = self.values(metric, eraser=reference, head=head, p=p, alpha=alpha)
        head, level = self._head_of(metric, head), self._level(p)
        ratio, resolution = self.test_ratio(p), self._resolution(metric, head, level)
        rows = []
        for eraser in self.context.erasers:
            if eraser == reference:
                continue
            values = self.values(metric, eraser=eraser, head=head or None, p=p, alpha=alpha)
            row = statistics.paired_difference(
                eraser, reference, values, reference_values, ratio, resolution
            )
            found = None if alpha is not None else self._bootstrap(metric, head, eraser, reference)
            if found is not None and not math.isnan(found[2]):
                low, high, p_value = found
                row = dataclasses.replace(row, low=low, high=high, p=p_value, how="bootstrap")
            rows.append(row)
        adjusted = statistics.holm([row.p for row in rows])
        tests = (dataclasses.replace(r, p_holm=q) for r, q in zip(rows, adjusted, strict=True))
        independent = resolution and resolution / (1 / max(1, len(reference_values)) + ratio)
        return Differences(tests, self.metric(metric).label, head, level, independent)

    def verdict(
        self, metric: str = "worst_group", *, head: str | None = None, p: float | None = None
    ) -> Verdict:
        """Order the erasers by a metric, over the seeds at which all of them have a value.

        Parameters
        ----------
        metric, head, p
            As for :meth:`values`.
        """
        lower = self.metric(metric).lower_is_better
        if lower is None:
            raise InputError(
                f"the metric {metric!r} has no direction, so no eraser is the best; for a custom "
                f"metric, pass metrics={{{metric!r}: Metric(function, lower_is_better=...)}}"
            )
        values = {}
        for eraser in self.context.erasers:
            by_seed = self.values(metric, eraser=eraser, head=head, p=p)
            if finite := {seed: v for seed, v in by_seed.items() if not math.isnan(v)}:
                values[eraser] = finite
        seeds = set.intersection(*map(set, values.values())) if values else set()
        if not seeds:
            return Verdict()
        sign = -1.0 if lower else 1.0
        sums = {e: math.fsum(by_seed[s] for s in seeds) for e, by_seed in values.items()}
        order = sorted(sums, key=lambda e: -sign * sums[e])
        rows = self.differences(metric, reference=order[0], head=head, p=p)
        worse = {row.method for row in rows if row.significant and sign * row.difference < 0}
        leaders = tuple(e for e in order if e not in worse)
        confirmed = leaders[0] if len(leaders) == 1 and worse else None
        return Verdict(tuple(order), leaders, confirmed, len(seeds))


def has_few_rows(result: Measurements, eraser: str, head: str | None, p: float | None) -> bool:
    """Whether the worst group at any seed has fewer than `FEW_ROWS` test rows."""
    cells = result.worst_cells(eraser=eraser, head=head, p=p).values()
    return any(cell.n < FEW_ROWS for cell in cells)
