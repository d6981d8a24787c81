"""Differences between erasers: their list, their bootstrap over test rows, and a verdict."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from splince_fast.evaluation import statistics
from splince_fast.evaluation._records import Record, TestLabels
from splince_fast.evaluation._tables import difference_table
from splince_fast.evaluation.scoring import OF_CLASSES, ClassPredictions, scores
from splince_fast.evaluation.statistics import Difference

Codes = NDArray[np.intp]
Float = NDArray[np.float64]


class Differences(list[Difference]):
    """Paired differences to a reference; prints as a table.

    Attributes
    ----------
    metric, label, head : str
    p : float or None
    """

    def __init__(
        self, items: Sequence[Difference], metric: str, label: str, head: str, p: float | None
    ):
        super().__init__(items)
        self.metric, self.label, self.head, self.p = metric, label, head, p

    def __str__(self) -> str:
        return str(difference_table(self))


class Resampled:
    """Bootstrap of metrics of predictions on test rows, whole groups together."""

    def __init__(self, records: list[Record], labels: TestLabels) -> None:
        self._values: dict[tuple[str, str, str], Float] = {}
        self.labels = labels
        self.y_pred = {
            (r.eraser, r.head): r.predictions for r in records if r.predictions is not None
        }

    @cached_property
    def draws(self) -> list[Codes]:
        """The same rows for all metrics, so that differences are paired."""
        n, groups = len(self.labels.task), self.labels.groups
        return statistics.bootstrap_indices(n, groups, statistics.N_DRAWS, 0)

    def _figure(self, metric: str, eraser: str, head: str) -> Callable[[Codes], float] | None:
        """A metric as a function of row numbers; None for one that predictions do not define."""
        y_pred = self.y_pred.get((eraser, head))
        if metric not in OF_CLASSES or y_pred is None:
            return None
        table = {metric: OF_CLASSES[metric]}

        def figure(rows: Codes) -> float:
            predictions = ClassPredictions(self.labels.take(rows), y_pred[rows])
            return scores(table, predictions).get(metric, math.nan)

        return None if math.isnan(figure(np.arange(len(y_pred)))) else figure

    def _draws_of(
        self, figure: Callable[[Codes], float], metric: str, eraser: str, head: str
    ) -> Float:
        """A metric of every draw, computed once."""
        key = (metric, eraser, head)
        if key not in self._values:
            self._values[key] = np.array([figure(draw) for draw in self.draws])
        return self._values[key]

    def interval(self, metric: str, eraser: str, head: str) -> tuple[float, float] | None:
        """Percentile interval; None for a metric that predictions do not define."""
        figure = self._figure(metric, eraser, head)
        if figure is None:
            return None
        values = self._draws_of(figure, metric, eraser, head)
        low, high, _ = statistics.bootstrap_test(
            figure, len(self.labels.task), values, clusters=self.labels.groups, bca=False
        )
        return low, high

    def difference(self, metric: str, head: str, plain: Difference) -> Difference:
        """The difference with a paired bootstrap interval and the p value that belongs to it."""
        names = (plain.method, plain.reference)
        ours, theirs = (self._figure(metric, name, head) for name in names)
        if ours is None or theirs is None:
            return plain
        values = self._draws_of(ours, metric, names[0], head)
        values = values - self._draws_of(theirs, metric, names[1], head)
        # BCa needs a smooth statistic, which a minimum over cells is not.
        smooth = OF_CLASSES[metric].fraction_of != "cell"
        low, high, p = statistics.bootstrap_test(
            lambda rows: ours(rows) - theirs(rows), len(self.labels.task), values,
            clusters=self.labels.groups, bca=smooth,
        )  # fmt: skip
        how = "bootstrap (BCa)" if smooth else "bootstrap (percentile)"
        how = "no test" if math.isnan(p) else how
        return dataclasses.replace(plain, low=low, high=high, p=p, how=how)


@dataclass(frozen=True, slots=True)
class Verdict:
    """Erasers ordered by a metric, over the seeds that all of them have.

    Attributes
    ----------
    order : tuple of str
        Erasers with values, the best first.
    leaders : tuple of str
        The best, and those that the test does not tell from it.
    level : tuple of str
        The best, and those with the same mean.
    tested : bool
        Whether the best was tested against another eraser.
    n_seeds : int
        Seeds at which every one of them has a value.
    """

    order: tuple[str, ...]
    leaders: tuple[str, ...]
    level: tuple[str, ...]
    tested: bool
    n_seeds: int

    @property
    def confirmed(self) -> str | None:
        """The eraser that beats every other one in the test; None if there is none."""
        return self.leaders[0] if len(self.leaders) == 1 and self.tested else None
