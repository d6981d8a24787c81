"""Intervals and differences over the test rows of one split."""

from __future__ import annotations

import base64
import dataclasses
import math
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from splince_fast.evaluation import statistics
from splince_fast.evaluation.scoring import OF_CLASSES, Decisions, scores
from splince_fast.evaluation.statistics import Difference

Codes = NDArray[np.intp]
Float = NDArray[np.float64]


class Resampled:
    """Bootstrap of figures that follow from decisions on test rows, whole groups together."""

    def __init__(self, records: list[dict[str, Any]], truth: dict[str, Any]) -> None:
        def column(name: str) -> Codes | None:
            values = truth[name]
            return None if values is None else np.array(values, dtype=np.intp)

        self._known: dict[tuple[str, str, str], Float] = {}
        self.task: Codes = np.array(truth["task"], dtype=np.intp)
        self.concept, self.cells, self.groups = map(column, ("concept", "cells", "groups"))
        self.decided = {
            (r["eraser"], r["head"]): np.frombuffer(
                base64.b64decode(r["decided"]), dtype="<u2"
            ).astype(np.intp)
            for r in records if "decided" in r
        }  # fmt: skip

    @cached_property
    def draws(self) -> list[Codes]:
        """The same rows for all figures, so that differences are paired."""
        return statistics.bootstrap_indices(len(self.task), self.groups, statistics.N_DRAWS, 0)

    def figure(self, metric: str, decided: Codes, rows: Codes) -> float:
        """A figure on some rows, with repetitions; NaN where it is not one of decisions."""
        if metric not in OF_CLASSES:
            return math.nan
        value = scores({metric: OF_CLASSES[metric]}, self._judged(decided, rows))
        return value.get(metric, math.nan)

    def _judged(self, decided: Codes, rows: Codes) -> Decisions:
        n_concepts = 0 if self.concept is None else int(self.concept.max()) + 1
        return Decisions(
            self.task[rows],
            decided[rows],
            int(self.task.max()) + 1,
            None if self.cells is None else self.cells[rows],
            None if self.concept is None else self.concept[rows],
            n_concepts,
        )

    def values(self, metric: str, eraser: str, head: str) -> Float:
        """A figure of every draw, computed once."""
        where = (metric, eraser, head)
        if where not in self._known:
            decided = self.decided[eraser, head]
            self._known[where] = np.array([self.figure(metric, decided, d) for d in self.draws])
        return self._known[where]

    def can(self, metric: str, eraser: str, head: str) -> bool:
        """Whether a figure follows from decisions that are known."""
        decided = self.decided.get((eraser, head))
        if decided is None:
            return False
        return not math.isnan(self.figure(metric, decided, np.arange(len(decided))))

    def interval(self, metric: str, eraser: str, head: str) -> tuple[float, float] | None:
        """Percentile interval, or None where nothing can be resampled."""
        if not self.can(metric, eraser, head):
            return None
        decided = self.decided[eraser, head]
        return statistics.bootstrap_interval(
            lambda rows: self.figure(metric, decided, rows), len(decided), self.draws,
            bca=False, values=self.values(metric, eraser, head),
        )  # fmt: skip

    def difference(self, metric: str, head: str, plain: Difference) -> Difference:
        """The difference with a paired bootstrap interval and the p value that belongs to it."""
        names = (plain.method, plain.reference)
        if not all(self.can(metric, name, head) for name in names):
            return plain
        ours, theirs = (self.decided[name, head] for name in names)
        values = self.values(metric, names[0], head) - self.values(metric, names[1], head)

        def statistic(rows: Codes) -> float:
            return self.figure(metric, ours, rows) - self.figure(metric, theirs, rows)

        smooth = metric != "worst_group"
        low, high, p = statistics.bootstrap_test(
            statistic, len(ours), self.draws, clusters=self.groups, bca=smooth, values=values
        )
        how = "bootstrap (BCa)" if smooth else "bootstrap (percentile)"
        return dataclasses.replace(plain, low=low, high=high, p=p, how=how)
