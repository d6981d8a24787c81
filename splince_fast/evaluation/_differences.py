"""Tests of differences between erasers, bootstrap over test rows, and order of the erasers."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from splince_fast.evaluation import statistics
from splince_fast.evaluation._tables import difference_table
from splince_fast.evaluation.metrics import OF_CLASSES, ClassPredictions, scores
from splince_fast.evaluation.records import Record, TestLabels
from splince_fast.evaluation.statistics import Difference, Statistic

Codes = NDArray[np.intp]
Float = NDArray[np.float64]


class Differences(list[Difference]):
    """List of the paired differences of erasers from a reference eraser; prints as a table.

    Attributes
    ----------
    metric, label : str
        Key and label of the metric.
    head : str
        Name of the head; "" for metrics of the eraser itself.
    p : float or None
        Association level; None for the natural split.
    """

    def __init__(
        self, items: Sequence[Difference], metric: str, label: str, head: str, p: float | None
    ):
        super().__init__(items)
        self.metric, self.label, self.head, self.p = metric, label, head, p

    def __str__(self) -> str:
        return str(difference_table(self))


class Resampled:
    """Bootstrap of metrics over the test rows of a fixed split.

    Rows are drawn with replacement; if the rows have groups, groups are drawn instead of rows.
    """

    def __init__(self, records: list[Record], labels: TestLabels) -> None:
        self._values: dict[tuple[str, str, str], Float] = {}
        self.labels = labels
        self.y_pred = {
            (r.eraser, r.head): r.predictions for r in records if r.predictions is not None
        }

    @cached_property
    def draws(self) -> list[Codes]:
        """Row numbers of each draw. All metrics share the draws, so that differences are paired."""
        n, groups = len(self.labels.task), self.labels.groups
        return statistics.bootstrap_indices(n, groups, statistics.N_DRAWS, 0)

    def _statistic(self, metric: str, eraser: str, head: str) -> Statistic | None:
        """Return a metric as a function of row numbers.

        None if predicted classes do not determine the metric, or its value is NaN.
        """
        y_pred = self.y_pred.get((eraser, head))
        if metric not in OF_CLASSES or y_pred is None:
            return None
        table = {metric: OF_CLASSES[metric]}

        def statistic(rows: Codes) -> float:
            predictions = ClassPredictions(self.labels.take(rows), y_pred[rows])
            return scores(table, predictions).get(metric, math.nan)

        return None if math.isnan(statistic(np.arange(len(y_pred)))) else statistic

    def _draw_values(self, statistic: Statistic, metric: str, eraser: str, head: str) -> Float:
        """Return the values of a metric on every draw; the values are cached."""
        key = (metric, eraser, head)
        if key not in self._values:
            self._values[key] = np.array([statistic(draw) for draw in self.draws])
        return self._values[key]

    def interval(self, metric: str, eraser: str, head: str) -> tuple[float, float] | None:
        """Return the percentile interval of a metric; None if `_statistic` returns None."""
        statistic = self._statistic(metric, eraser, head)
        if statistic is None:
            return None
        values = self._draw_values(statistic, metric, eraser, head)
        low, high, _ = statistics.bootstrap_test(
            statistic, len(self.labels.task), values, clusters=self.labels.groups, bca=False
        )
        return low, high

    def difference(self, metric: str, head: str, plain: Difference) -> Difference:
        """Return the difference `plain` with the interval and p value of a paired bootstrap.

        `plain` is returned unchanged if `_statistic` returns None for one of the two erasers.
        """
        names = (plain.method, plain.reference)
        first, second = (self._statistic(metric, name, head) for name in names)
        if first is None or second is None:
            return plain
        values = self._draw_values(first, metric, names[0], head)
        values = values - self._draw_values(second, metric, names[1], head)
        # BCa requires a smooth statistic; a minimum over cells is not smooth.
        smooth = OF_CLASSES[metric].fraction_of != "cell"
        low, high, p = statistics.bootstrap_test(
            lambda rows: first(rows) - second(rows), len(self.labels.task), values,
            clusters=self.labels.groups, bca=smooth,
        )  # fmt: skip
        how = "bootstrap (BCa)" if smooth else "bootstrap (percentile)"
        how = "no test" if math.isnan(p) else how
        return dataclasses.replace(plain, low=low, high=high, p=p, how=how)


@dataclass(frozen=True, slots=True)
class Verdict:
    """Order of the erasers by a metric, over the seeds at which all of them have a value.

    Attributes
    ----------
    order : tuple of str
        Names of the erasers that have values, the best eraser first.
    leaders : tuple of str
        The best eraser, and the erasers that are not significantly worse than it.
    tied : tuple of str
        The best eraser, and the erasers with the same mean as the best eraser.
    tested : bool
        Whether the best eraser was tested against another eraser.
    n_seeds : int
        Number of seeds at which all erasers in `order` have a value.
    """

    order: tuple[str, ...]
    leaders: tuple[str, ...]
    tied: tuple[str, ...]
    tested: bool
    n_seeds: int

    @property
    def confirmed(self) -> str | None:
        """Eraser that is significantly better than every other eraser; None if no eraser is."""
        return self.leaders[0] if len(self.leaders) == 1 and self.tested else None
