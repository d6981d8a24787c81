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
from splince_fast.evaluation.metrics import average_gap, gap_per_class
from splince_fast.evaluation.statistics import Difference

Codes = NDArray[np.intp]


class Resampled:
    """Bootstrap of figures that follow from decisions on test rows, whole groups together."""

    def __init__(self, records: list[dict[str, Any]], truth: dict[str, Any]) -> None:
        def column(name: str) -> Codes | None:
            values = truth[name]
            return None if values is None else np.array(values, dtype=np.intp)

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
        truth, guess = self.task[rows], decided[rows]
        correct = truth == guess
        if metric == "accuracy":
            return float(correct.mean())
        size = int(self.task.max()) + 1
        if metric == "class_accuracy":
            return _smallest(truth, correct, np.mean)
        if metric == "worst_group" and self.cells is not None:
            return _smallest(self.cells[rows], correct, np.min)
        if metric == "tpr_gap" and self.concept is not None:
            z = self.concept[rows]
            gaps = gap_per_class(truth, guess, z, size, int(self.concept.max()) + 1)
            return average_gap(gaps, "rms")
        return math.nan

    def interval(self, metric: str, eraser: str, head: str) -> tuple[float, float] | None:
        """Percentile interval, or None where nothing can be resampled."""
        decided = self.decided.get((eraser, head))
        if decided is None or math.isnan(self.figure(metric, decided, np.arange(len(decided)))):
            return None
        return statistics.bootstrap_interval(
            lambda rows: self.figure(metric, decided, rows), len(decided), self.draws, bca=False
        )

    def difference(self, metric: str, head: str, plain: Difference) -> Difference:
        """The difference with a paired bootstrap interval; p is twice the smaller tail."""
        ours = self.decided.get((plain.method, head))
        theirs = self.decided.get((plain.reference, head))
        if ours is None or theirs is None:
            return plain

        def statistic(rows: Codes) -> float:
            return self.figure(metric, ours, rows) - self.figure(metric, theirs, rows)

        n = len(ours)
        if math.isnan(statistic(np.arange(n))):
            return plain
        smooth = metric != "worst_group"
        low, high = statistics.bootstrap_interval(
            statistic, n, self.draws, clusters=self.groups, bca=smooth
        )
        values = np.array([statistic(draw) for draw in self.draws])
        tail = min(float(np.mean(values <= 0)), float(np.mean(values >= 0)))
        p = min(1.0, 2 * (tail * len(values) + 1) / (len(values) + 1))
        how = "bootstrap (BCa)" if smooth else "bootstrap (percentile)"
        return dataclasses.replace(plain, low=low, high=high, p=p, how=how)


def _smallest(cells: Codes, correct: NDArray[np.bool_], reduce: Any) -> float:
    """Mean or minimum of the accuracies of the cells present."""
    inside = cells >= 0
    counts = np.bincount(cells[inside])
    right = np.bincount(cells[inside], correct[inside], len(counts))
    present = counts > 0
    return float(reduce(right[present] / counts[present])) if present.any() else math.nan
