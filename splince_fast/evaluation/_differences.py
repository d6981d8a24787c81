"""Differences between erasers: their list, and their bootstrap over the test rows of one split."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from splince_fast.evaluation import statistics
from splince_fast.evaluation._records import Record, TestLabels
from splince_fast.evaluation.scoring import OF_CLASSES, ClassPredictions, scores
from splince_fast.evaluation.statistics import Difference

Codes = NDArray[np.intp]
Float = NDArray[np.float64]


class Differences(list[Difference]):
    """Paired differences to a reference; prints as a table.

    Attributes
    ----------
    metric, label : str
    """

    def __init__(
        self, items: Sequence[Difference], metric: str, label: str, head: str, p: float | None
    ):
        super().__init__(items)
        self.metric, self.label, self.head, self.p = metric, label, head, p

    def __str__(self) -> str:
        from splince_fast.evaluation import _tables

        return str(_tables.difference_table(self))


class Resampled:
    """Bootstrap of metrics of predictions on test rows, whole groups together."""

    def __init__(self, records: list[Record], labels: TestLabels) -> None:
        self._computed: dict[tuple[str, str, str], Float] = {}
        self.labels = labels
        self.y_pred = {
            (r.eraser, r.head): r.predictions for r in records if r.predictions is not None
        }

    @cached_property
    def draws(self) -> list[Codes]:
        """The same rows for all metrics, so that differences are paired."""
        n, groups = len(self.labels.task), self.labels.groups
        return statistics.bootstrap_indices(n, groups, statistics.N_DRAWS, 0)

    def figure(self, metric: str, y_pred: Codes, rows: Codes) -> float:
        """A metric on some rows, with repetitions; NaN where it is not one of predictions."""
        if metric not in OF_CLASSES:
            return math.nan
        predictions = ClassPredictions(self.labels.take(rows), y_pred[rows])
        return scores({metric: OF_CLASSES[metric]}, predictions).get(metric, math.nan)

    def values(self, metric: str, eraser: str, head: str) -> Float:
        """A metric of every draw, computed once."""
        where = (metric, eraser, head)
        if where not in self._computed:
            y_pred = self.y_pred[eraser, head]
            self._computed[where] = np.array([self.figure(metric, y_pred, d) for d in self.draws])
        return self._computed[where]

    def can(self, metric: str, eraser: str, head: str) -> bool:
        """Whether a metric follows from predictions that were kept."""
        y_pred = self.y_pred.get((eraser, head))
        if y_pred is None:
            return False
        return not math.isnan(self.figure(metric, y_pred, np.arange(len(y_pred))))

    def interval(self, metric: str, eraser: str, head: str) -> tuple[float, float] | None:
        """Percentile interval, or None where nothing can be resampled."""
        if not self.can(metric, eraser, head):
            return None
        y_pred = self.y_pred[eraser, head]
        return statistics.bootstrap_interval(
            lambda rows: self.figure(metric, y_pred, rows), len(y_pred), self.draws,
            bca=False, values=self.values(metric, eraser, head),
        )  # fmt: skip

    def difference(self, metric: str, head: str, plain: Difference) -> Difference:
        """The difference with a paired bootstrap interval and the p value that belongs to it."""
        names = (plain.method, plain.reference)
        if not all(self.can(metric, name, head) for name in names):
            return plain
        ours, theirs = (self.y_pred[name, head] for name in names)
        values = self.values(metric, names[0], head) - self.values(metric, names[1], head)

        def statistic(rows: Codes) -> float:
            return self.figure(metric, ours, rows) - self.figure(metric, theirs, rows)

        smooth = metric != "worst_group"
        low, high, p = statistics.bootstrap_test(
            statistic, len(ours), self.draws, clusters=self.labels.groups, bca=smooth,
            values=values,
        )  # fmt: skip
        how = "bootstrap (BCa)" if smooth else "bootstrap (percentile)"
        return dataclasses.replace(plain, low=low, high=high, p=p, how=how)
