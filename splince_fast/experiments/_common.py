"""Shared parts of the experiments: options, findings, claims of the paper and tables."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from splince_fast.evaluation import compare
from splince_fast.evaluation.result import Comparison
from splince_fast.evaluation.statistics import MIN_SEEDS, Interval, corrected_t
from splince_fast.evaluation.text_table import Table, interval_text, number
from splince_fast.experiments import erasers
from splince_fast.experiments.dataset import Dataset

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ERASERS = ("none", *erasers.ERASERS)
LEVELS = (0.5, 0.6, 0.7, 0.8, 0.9)


@dataclass(frozen=True, slots=True)
class RunOptions:
    """Options of an experiment.

    Attributes
    ----------
    data : {"offline", "paper"}
        Use the offline stand-in, or the data set of the paper.
    seeds : int or None
        Number of seeds; None uses the default of the experiment.
    quick : bool
        Use the smallest settings with which every step still runs.
    n_jobs : int
        Number of processes.
    progress : bool, optional
        Show a progress bar on stderr. By default, the bar appears after two seconds, in a terminal
        or notebook only.
    """

    data: str = "offline"
    seeds: int | None = None
    quick: bool = False
    n_jobs: int = 1
    progress: bool | None = None

    def n_seeds(self, default: int) -> int:
        """Return `seeds` if it is set; otherwise 1 for a quick run, else `default`."""
        return self.seeds if self.seeds is not None else (1 if self.quick else default)


@dataclass(frozen=True, slots=True)
class Claim:
    """A statement of the paper, and whether the results agree with it.

    Attributes
    ----------
    text : str
        The statement.
    agrees : bool or None
        Whether the results agree; None if the test is not significant.
    evidence : str
        Text with the results and the test.
    """

    text: str
    agrees: bool | None
    evidence: str


class Bounds(NamedTuple):
    """Limits of a 95 % interval; both are NaN if there is no test."""

    low: float
    high: float

    def above(self, value: float = 0.0) -> bool | None:
        """Return True if the interval lies above `value`, False if it lies below, else None."""
        return True if self.low > value else False if self.high < value else None

    def below(self, value: float) -> bool | None:
        """Return True if the interval lies below `value`, False if it lies above, else None."""
        above = self.above(value)
        return None if above is None else not above

    def within(self, margin: float) -> bool | None:
        """Return True if the interval lies inside [-margin, margin], False if it lies outside.

        The result is None if the interval contains -margin or margin.
        """
        return combine_verdicts([self.above(-margin), self.below(margin)])

    def __str__(self) -> str:
        if math.isnan(self.low):
            return "no test"
        return f"95 % interval {self.low:+.3f} to {self.high:+.3f}"


def combine_verdicts(verdicts: Sequence[bool | None]) -> bool | None:
    """Return the verdict on a claim from the verdicts on its parts.

    The result is False if any part is False, True if all parts are True, and None otherwise.
    """
    if any(verdict is False for verdict in verdicts):
        return False
    return True if all(verdict is True for verdict in verdicts) else None


def corrected_bounds(values: Sequence[float] | NDArray[np.float64], ratio: float) -> Bounds:
    """Return the 95 % interval of a mean over seeds by the corrected resampled t-test.

    The limits are NaN if there are fewer than three seeds, or if all values are equal and not 0.

    Parameters
    ----------
    values : sequence of float
        One value per seed.
    ratio : float
        Number of test rows divided by the number of training rows.
    """
    if len(values) < MIN_SEEDS:
        return Bounds(math.nan, math.nan)
    return Bounds(*corrected_t(list(map(float, values)), ratio)[2:])


@dataclass(slots=True)
class Findings:
    """Results of an experiment.

    Attributes
    ----------
    title : str
    data : Dataset
    tables : list of Table
        Tables of results.
    claims : list of Claim
    paper : list of Table
        Values printed in the paper. The title contains the label of the paper's table.
    figures : dict of str to matplotlib figure
        Figures by file name without suffix.
    notes : list of str
        Remarks printed after the claims.
    values : dict
        Results by name, for tests and for the JSON file.
    """

    title: str
    data: Dataset
    tables: list[Table]
    claims: list[Claim]
    paper: list[Table] = field(default_factory=list)
    figures: dict[str, Figure] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    values: Mapping[str, object] = field(default_factory=dict)

    def verdicts(self) -> str:
        """Return three lines: the confirmed, the contradicted and the undecided claims."""
        lines = []
        for heading, verdict in (("agrees", True), ("differs", False), ("not decided", None)):
            claims = [
                f"{c.text} ({c.evidence})" for c in self.claims
                if (None if c.agrees is None else bool(c.agrees)) is verdict
            ]  # fmt: skip
            lines.append(f"{heading:<8}: {'; '.join(claims) or 'nothing'}")
        return "\n".join(lines)

    def __str__(self) -> str:
        parts = [
            f"{self.title}\ndata    : {self.data.name}; {self.data.provenance}\n"
            f"licence : {self.data.licence}",
            *map(str, self.tables),
            *map(str, self.paper),
            self.verdicts(),
        ]
        if self.notes:
            parts.append("\n".join(f"note    : {text}" for text in self.notes))
        return "\n\n".join(parts)


def compare_erasers(
    data: Dataset, options: RunOptions, n_seeds: int, **settings: Any
) -> Comparison:
    """Compare erasers on a data set; `settings` are further arguments of :func:`compare`."""
    return compare(
        data.X, task=data.labels["task"], concept=data.labels["concept"],
        aligned_class=data.aligned_class, sizes=data.sizes, n_seeds=options.n_seeds(n_seeds),
        n_jobs=options.n_jobs, progress=options.progress, **settings,
    )  # fmt: skip


def cell_texts(*values: Interval | float) -> tuple[str, ...]:
    """Format numbers and intervals as the cells of a table."""
    return tuple(interval_text(v) if isinstance(v, Interval) else number(float(v)) for v in values)


def head_table(result: Comparison, head: str, p: float | None, title: str) -> Table:
    """Return a table of the erasers: accuracies and TPR gap of one head at association `p`.

    If `p` is None, the data keep their own association.
    """
    metrics = ("accuracy", "class_accuracy", "worst_group", "tpr_gap")
    rows = [
        (e, *cell_texts(*(result.interval(m, eraser=e, head=head, p=p) for m in metrics)))
        for e in result.context.erasers
    ]
    columns = (head, "accuracy", "acc/class", "worst group", "TPR gap")
    return Table(title, columns, tuple(rows), (interval_note(len(result.context.seeds)),))


def eraser_table(result: Comparison, p: float | None, title: str) -> Table:
    """Return a table of the erasers: probe scores, kept covariance and distortion at `p`.

    `p` is the association of task and concept; if it is None, the data keep their own association.
    """
    metrics = ("probe_accuracy", "probe_auc", "kept_covariance", "distortion")
    rows = [
        (e, *cell_texts(*(result.interval(m, eraser=e, p=p) for m in metrics)))
        for e in result.context.erasers
    ]
    columns = ("eraser", "probe acc", "probe AUC", "kept cov", "distortion")
    return Table(title, columns, tuple(rows))


def interval_note(n_seeds: int) -> str:
    """Return the definition of the intervals in a table."""
    if n_seeds == 1:
        return "one seed"
    return f"± is half a 95 % interval over {n_seeds} resamplings of one data set"


def means(result: Comparison) -> dict[str, float]:
    """Return all finite means over seeds, with keys ``metric/eraser/head/level``."""
    values = {}
    for metric in result.metrics:
        for head in result.context.heads:
            for eraser in result.context.erasers:
                for p in result.context.levels:
                    mean = result.mean(metric, eraser=eraser, head=head, p=p)
                    if np.isfinite(mean):
                        values[f"{metric}/{eraser}/{head}/{p}"] = mean
    return values


def best_claim(
    result: Comparison, metric: str, head: str, p: float | None, text: str, *, best: str = "SPLINCE"
) -> Claim:
    """Return a claim with the statement `text`: `best` has a larger metric than all other erasers.

    One test compares `best` with each other eraser; p values are adjusted by Holm's method.
    """
    means = {e: result.mean(metric, eraser=e, head=head, p=p) for e in result.context.erasers}
    second = max((e for e in means if e != best), key=lambda e: means[e])
    rows = result.differences(metric, reference=best, head=head, p=p)
    largest = max(row.p_holm for row in rows)
    test = "no test" if math.isnan(largest) else f"largest p = {largest:.2g} (Holm)"
    evidence = f"{best} {number(means[best])}, {second} {number(means[second])}, {test}"
    verdicts = [row.difference < 0 if row.significant else None for row in rows]
    return Claim(text, combine_verdicts(verdicts), evidence)


def seed_differences(
    result: Comparison, metric: str, eraser: str, reference: str, **selection: Any
) -> dict[int, float]:
    """Return the metric of an eraser minus the metric of a reference eraser, by seed.

    Seeds without a value of both erasers are absent. `selection` are the arguments `head`, `p` and
    `alpha` of :meth:`Comparison.values`.
    """
    values = result.values(metric, eraser=eraser, **selection)
    reference_values = result.values(metric, eraser=reference, **selection)
    return {s: values[s] - reference_values[s] for s in values if s in reference_values}


def difference_bounds(
    result: Comparison, metric: str, eraser: str, reference: str, **selection: Any
) -> Bounds:
    """Return the 95 % interval of the mean of :func:`seed_differences`."""
    differences = seed_differences(result, metric, eraser, reference, **selection)
    return corrected_bounds([*differences.values()], result.test_ratio(selection.get("p")))


def paper_table(label: str, columns: Sequence[str], rows: Mapping[str, Sequence[str]]) -> Table:
    """Return a table of values printed in the paper; `label` is that of the paper's table."""
    return Table(f"the paper ({label})", tuple(columns), tuple((k, *v) for k, v in rows.items()))
