"""Common parts of the experiments: options, findings, columns of a comparison, the reading."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from splince_fast.evaluation._tables import Table, figure_text, number
from splince_fast.evaluation.result import Comparison
from splince_fast.evaluation.statistics import MIN_SEEDS, Interval, corrected_t, t_interval
from splince_fast.experiments.dataset import Dataset

ERASERS = ("none", "SAL", "LEACE", "SPLINCE")
LEVELS = (0.5, 0.6, 0.7, 0.8, 0.9)


@dataclass(frozen=True, slots=True)
class Options:
    """How an experiment is run.

    Attributes
    ----------
    data : {"offline", "paper"}
    seeds : int or None
        Number of seeds; None is the experiment's own.
    quick : bool
        The smallest setting that still runs every step.
    n_jobs : int
    progress : bool, optional
    """

    data: str = "offline"
    seeds: int | None = None
    quick: bool = False
    n_jobs: int = 1
    progress: bool | None = None

    def n_seeds(self, usual: int) -> int:
        """Seeds to run."""
        return self.seeds if self.seeds is not None else (1 if self.quick else usual)


@dataclass(frozen=True, slots=True)
class Claim:
    """Something that the paper says, and what came out here.

    Attributes
    ----------
    text : str
    agrees : bool or None
        None where the test decides neither way.
    ours : str
        The figures, and the test.
    """

    text: str
    agrees: bool | None
    ours: str


def decided(low: float, high: float, bound: float = 0.0) -> bool | None:
    """Whether a figure is above a bound, by its 95 % interval; None where that holds the bound."""
    return True if low > bound else False if high < bound else None


def all_of(verdicts: Sequence[bool | None]) -> bool | None:
    """Whether a claim of several parts holds: it differs where one of them does."""
    if any(verdict is False for verdict in verdicts):
        return False
    return True if all(verdict is True for verdict in verdicts) else None


def reverse(verdict: bool | None) -> bool | None:
    """Whether the opposite holds."""
    return None if verdict is None else not verdict


def limits(
    values: Mapping[int, float] | Sequence[float] | NDArray[Any], ratio: float
) -> tuple[float, float]:
    """95 % interval of a mean over seeds by the corrected resampled t test.

    NaN below three seeds, and where all values are equal and not 0.

    Parameters
    ----------
    values : mapping of seed to float, sequence of float, or ndarray of shape (J,)
    ratio : float
        n_test / n_train.
    """
    known = [float(v) for v in (values.values() if isinstance(values, Mapping) else values)]
    if len(known) < MIN_SEEDS:
        return math.nan, math.nan
    return corrected_t(known, ratio)[2:]


def in_words(low: float, high: float) -> str:
    """An interval beside a figure."""
    return "no test" if math.isnan(low) else f"95 % interval {low:+.3f} to {high:+.3f}"


@dataclass(slots=True)
class Findings:
    """Findings of an experiment.

    Attributes
    ----------
    title : str
    data : Dataset
    tables : list of Table
        Ours.
    paper : list of Table
        Figures of the paper, with the label of its table.
    claims : list of Claim
    figures : dict of str to matplotlib figure
    notes : list of str
    values : dict
        Figures by name, for tests and for the JSON file.
    """

    title: str
    data: Dataset
    tables: list[Table]
    claims: list[Claim]
    paper: list[Table] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    values: dict[str, Any] = field(default_factory=dict)

    def reading(self) -> str:
        """Three lines: where we agree with the paper, where not, and where no test decides."""
        lines = []
        for start, wanted in (("agrees", True), ("differs", False), ("not decided", None)):
            found = [
                f"{c.text} ({c.ours})" for c in self.claims
                if (None if c.agrees is None else bool(c.agrees)) is wanted
            ]  # fmt: skip
            lines.append(f"{start:<8}: {'; '.join(found) or 'nothing'}")
        return "\n".join(lines)

    def __str__(self) -> str:
        parts = [
            f"{self.title}\ndata    : {self.data.name}; {self.data.provenance}\n"
            f"licence : {self.data.licence}",
            *map(str, self.tables),
            *map(str, self.paper),
            self.reading(),
        ]
        if self.notes:
            parts.append("\n".join(f"note    : {text}" for text in self.notes))
        return "\n\n".join(parts)


def over_seeds(values: Sequence[float]) -> Interval:
    """Mean with its 95 % t interval over seeds."""
    return t_interval(list(values))


def texts(*values: Interval | float) -> tuple[str, ...]:
    """Cells of a table."""
    return tuple(figure_text(v) if isinstance(v, Interval) else number(float(v)) for v in values)


def head_table(result: Comparison, head: str, p: float | None, title: str) -> Table:
    """Accuracy, worst cell and gap of one head at one level."""
    metrics = ("accuracy", "class_accuracy", "worst_group", "tpr_gap")
    rows = [
        (e, *texts(*(result.interval(m, eraser=e, head=head, p=p) for m in metrics)))
        for e in result.context.erasers
    ]
    columns = (head, "accuracy", "acc/class", "worst group", "TPR gap")
    return Table(title, columns, tuple(rows), (over(result),))


def eraser_table(result: Comparison, p: float | None, title: str) -> Table:
    """Probe, kept covariance and distortion at one level."""
    metrics = ("probe_accuracy", "probe_auc", "kept_covariance", "distortion")
    rows = [
        (e, *texts(*(result.interval(m, eraser=e, p=p) for m in metrics)))
        for e in result.context.erasers
    ]
    columns = ("eraser", "probe acc", "probe AUC", "kept cov", "distortion")
    return Table(title, columns, tuple(rows))


def over(result: Comparison) -> str:
    """Units that an interval is over."""
    n = len(result.context.seeds)
    return (
        f"± is half a 95 % interval over {n} resamplings of one data set" if n > 1 else "one seed"
    )


def summary(result: Comparison) -> dict[str, float]:
    """Every mean by ``metric/eraser/head/level``, for files and tests."""
    found = {}
    for metric in result.metrics:
        for head in result.context.heads:
            for eraser in result.context.erasers:
                for p in result.context.levels:
                    mean = result.mean(metric, eraser=eraser, head=head, p=p)
                    if np.isfinite(mean):
                        found[f"{metric}/{eraser}/{head}/{p}"] = mean
    return found


def ahead(
    result: Comparison, metric: str, head: str, p: float | None, text: str, *, best: str = "SPLINCE"
) -> Claim:
    """The claim that `best` is ahead of every other eraser, by the corrected test against each."""
    means = {e: result.mean(metric, eraser=e, head=head, p=p) for e in result.context.erasers}
    rival = max((e for e in means if e != best), key=lambda e: means[e])
    rows = result.differences(metric, reference=best, head=head, p=p)
    largest = max(row.p_holm for row in rows)
    tested = "no test" if math.isnan(largest) else f"p = {largest:.2g} against the least certain"
    ours = f"{best} {number(means[best])}, {rival} {number(means[rival])}, {tested}"
    verdicts = [row.difference < 0 if row.significant else None for row in rows]
    return Claim(text, all_of(verdicts), ours)


def by_seed(
    result: Comparison, metric: str, eraser: str, reference: str, **where: Any
) -> dict[int, float]:
    """Differences of two erasers at the seeds that both have."""
    ours = result.values(metric, eraser=eraser, **where)
    theirs = result.values(metric, eraser=reference, **where)
    return {seed: ours[seed] - theirs[seed] for seed in ours if seed in theirs}


def ratio_of(result: Comparison) -> float:
    """n_test / n_train, which the corrected test needs."""
    train, _, test = result.context.sizes
    return test / train


def paper_table(label: str, columns: Sequence[str], rows: Mapping[str, Sequence[str]]) -> Table:
    """Numbers that the paper prints."""
    return Table(f"the paper ({label})", tuple(columns), tuple((k, *v) for k, v in rows.items()))
