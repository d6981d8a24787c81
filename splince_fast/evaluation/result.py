"""Result of :func:`compare`: tables, tests of differences, advice, reports and files."""

from __future__ import annotations

import dataclasses
import html
import math
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from splince_fast._runtime.extras import require
from splince_fast._runtime.files import as_path, write_text
from splince_fast._solve.options import is_number
from splince_fast.evaluation import _decision, _tables, statistics
from splince_fast.evaluation._differences import Differences, Resampled, Verdict
from splince_fast.evaluation.metrics import CellAccuracy, TableMetric, metric_of
from splince_fast.evaluation.records import (
    ADVICE,
    ERASER_ROW,
    PATH,
    Context,
    Record,
    from_text,
    to_text,
)
from splince_fast.evaluation.statistics import Interval
from splince_fast.exceptions import FileFormatError, InputError
from splince_fast.labels.names import listed

# Matches the numbers in a note or reason, but not digits inside names.
_NUMBER = re.compile(r"(?<![\w'])(\d[\d,.]*(e[+-]?\d+)?|inf\b)")


class Comparison:
    """The result of :func:`splince_fast.evaluation.compare`.

    Parameters
    ----------
    records : list of Record
        One record per seed, level, eraser and head.
    context : Context
        Settings and data of the comparison.

    Examples
    --------
    >>> import numpy as np
    >>> from splince_fast import evaluation as ev
    >>> rng = np.random.default_rng(0)
    >>> y, z = rng.integers(0, 2, 600), rng.integers(0, 2, 600)
    >>> X = rng.normal(size=(600, 4)) + y[:, None] + z[:, None] * np.eye(4)[0]
    >>> result = ev.compare(X, task=y, concept=z, n_seeds=3, alphas=(0.01,), progress=False)
    >>> [row.method for row in result.differences("accuracy", reference="none")]
    ['SAL', 'LEACE', 'SPLINCE']
    """

    def __init__(self, records: list[Record], context: Context) -> None:
        self.records, self.context = records, context
        self._resampled = Resampled(records, context.test_labels) if context.test_labels else None

    # -- values ----------------------------------------------------------------------------

    @property
    def metrics(self) -> tuple[str, ...]:
        """Names of all metrics, in order of first appearance in the records."""
        keys = (key for r in self.records if r.eraser != ADVICE for key in r.values)
        return tuple(dict.fromkeys(keys))

    @property
    def failures(self) -> list[tuple[str, str, str]]:
        """(eraser, head, reason) of failures; those that differ only in numbers appear once."""
        failed: dict[tuple[str, str, str], str] = {}
        for r in self.records:
            if r.reason:
                failed.setdefault((r.eraser, r.head, _NUMBER.sub("", r.reason)), r.reason)
        return [(eraser or "advice", head, text) for (eraser, head, _), text in failed.items()]

    @property
    def notes(self) -> list[str]:
        """Notes on the data and on the records; notes that differ only in numbers appear once."""
        of_records: dict[str, str] = {}
        for r in self.records:
            source = f"{r.eraser or 'advice'}{', ' + r.head if r.head else ''}: "
            for note in r.notes:
                of_records.setdefault(source + _NUMBER.sub("", note), source + note)
        unconverged = (
            f"{r.eraser}, {r.head}: the solver did not converge (marked ~)"
            for r in self.records if not r.converged
        )  # fmt: skip
        return [*self.context.notes, *of_records.values(), *dict.fromkeys(unconverged)]

    @property
    def sizes(self) -> dict[tuple[int, float | None], tuple[int, int, int]]:
        """Numbers of training, validation and test rows by (seed, level)."""
        return {(r.seed, r.p): r.sizes for r in self.records}

    def metric(self, key: str) -> TableMetric:
        """Label and direction of a metric.

        Parameters
        ----------
        key : str
            One of :attr:`metrics`.

        Returns
        -------
        Metric
            The metric, without its function.

        Raises
        ------
        InputError
            The comparison has no such metric.
        """
        if key not in self.metrics:
            raise InputError(
                f"there is no metric {key!r}; the metrics are {', '.join(self.metrics)}"
            )
        return metric_of(key, self.context.custom_metrics)

    def head_of(self, metric: str, head: str | None = None) -> str:
        """Validate a metric and a head; return the head, or "" for metrics of the eraser itself.

        Parameters
        ----------
        metric : str
            One of :attr:`metrics`.
        head : str, optional
            Name of a head; the default is the first head.

        Returns
        -------
        str
            Name of the head, or "".

        Raises
        ------
        InputError
            The comparison has no such metric or head.
        """
        if self.metric(metric).of == "eraser":
            return ERASER_ROW
        head = self.context.heads[0] if head is None else head
        if head not in self.context.heads:
            raise InputError(
                f"there is no head {head!r}; the heads are {listed(self.context.heads)}"
            )
        return head

    def level(self, p: float | None = None) -> float | None:
        """Validate and return an association level; by default, return the one furthest from .5.

        Parameters
        ----------
        p : float, optional
            Association level.

        Returns
        -------
        float or None
            The level; None for the natural split.

        Raises
        ------
        InputError
            The comparison has no such level.
        """
        levels = self.context.levels
        if p is None:
            return max(levels, key=lambda q: 0.0 if q is None else abs(q - 0.5))
        if levels == (None,):
            raise InputError("this comparison has only the natural split; leave p out")
        if p not in levels:
            raise InputError(f"there is no level {p!r}; the levels are {listed(levels)}")
        return p

    def values(
        self,
        metric: str,
        *,
        eraser: str,
        head: str | None = None,
        p: float | None = None,
        alpha: float | None = None,
    ) -> dict[int, float]:
        """Values of a metric by seed; seeds without a value are absent.

        Parameters
        ----------
        metric : str
            One of :attr:`metrics`, such as "worst_group".
        eraser : str
            Name of an eraser.
        head : str, optional
            Name of a head, for metrics of heads; the default is the first head.
        p : float, optional
            Association level; the default is the level furthest from .5.
        alpha : float, optional
            Penalty of the head "retrained"; the default is the selected alpha.

        Returns
        -------
        dict of int to float
            Value by seed.
        """
        if eraser not in self.context.erasers:
            raise InputError(
                f"there is no eraser {eraser!r}; the erasers are {listed(self.context.erasers)}"
            )
        if alpha is not None:
            if not is_number(alpha) or alpha not in self.context.alphas:
                raise InputError(
                    f"there is no alpha {alpha!r}; the alphas are {listed(self.context.alphas)}"
                )
            # np.float32(.1) == .1, but their hashes differ: look the equal float up.
            alpha = self.context.alphas[self.context.alphas.index(alpha)]
        records = self._records_of(self.level(p), self.head_of(metric, head), eraser)
        of_seed = {r.seed: r.values if alpha is None else dict(r.path).get(alpha, {})
                   for r in records}  # fmt: skip
        return {seed: values[metric] for seed, values in of_seed.items() if metric in values}

    def _records_of(self, p: float | None, head: str, eraser: str | None = None) -> list[Record]:
        """Records at an association level with a head, for one eraser or for all erasers."""
        return [
            r for r in self.records
            if r.head == head and r.p == p and (eraser is None or r.eraser == eraser)
        ]  # fmt: skip

    def interval(self, metric: str, **where: Any) -> Interval:
        """Mean over seeds with a 95 % t interval, or a bootstrap interval for a fixed split.

        The argument `test` of :func:`compare` fixes the split.

        Parameters
        ----------
        metric : str
            One of :attr:`metrics`.
        **where
            Arguments of :meth:`values`.

        Returns
        -------
        Interval
            ``mean``, ``error``, ``low``, ``high`` and ``n``.
        """
        interval = statistics.t_interval(list(self.values(metric, **where).values()))
        if self._resampled is not None and interval.n == 1 and where.get("alpha") is None:
            head = self.head_of(metric, where.get("head"))
            limits = self._resampled.interval(metric, where["eraser"], head)
            if limits is not None:
                return Interval(interval.mean, math.nan, *limits, 1)
        return interval

    def mean(self, metric: str, **where: object) -> float:
        """Mean of a metric over seeds.

        Parameters
        ----------
        metric : str
            One of :attr:`metrics`.
        **where
            Arguments of :meth:`values`.

        Returns
        -------
        float
            Mean; NaN if no seed has a value.
        """
        return self.interval(metric, **where).mean

    def worst_cells(
        self, *, eraser: str, head: str | None = None, p: float | None = None
    ) -> dict[int, CellAccuracy]:
        """Cell of task and concept with the lowest accuracy, by seed.

        Parameters
        ----------
        eraser : str
            Name of an eraser.
        head, p
            As for :meth:`values`.

        Returns
        -------
        dict of int to CellAccuracy
            For each seed, the name, number of test rows, accuracy and Wilson interval of the worst
            cell. If cells tie, it is the cell with the most rows. The dictionary is empty if the
            task or a concept is a quantity.
        """
        if "worst_group" not in self.metrics:
            return {}
        seeds = self.values("worst_group", eraser=eraser, head=head, p=p)
        worst = {}
        for r in self._records_of(self.level(p), self.head_of("worst_group", head), eraser):
            if r.seed in seeds:
                code, n, n_correct = min(r.cells, key=lambda c: (c.n_correct / c.n, -c.n))
                limits = statistics.wilson_interval(n_correct, n)
                worst[r.seed] = CellAccuracy(self.context.cells[code], n, n_correct / n, *limits)
        return worst

    def advice(self, p: float | None = None) -> dict[str, float]:
        """Values of the advice that is computed from the training moments, averaged over seeds.

        ``rho`` and ``threshold`` are the attributes of
        :class:`~splince_fast.evaluation.advice.FrozenHeadAdvice`. ``expected_r2`` is the attribute
        ``r2`` of :class:`~splince_fast.evaluation.advice.HeldOutTrace`, and ``rows_for_half`` is
        the number of training rows at which this ``r2`` is half as large.

        Parameters
        ----------
        p : float, optional
            Association level; the default is the level furthest from .5.

        Returns
        -------
        dict
            Values by name. Empty if the task is a quantity, or if the advice could not be computed.
        """
        records = self._records_of(self.level(p), ERASER_ROW, ADVICE)
        by_seed = [r.values for r in records if r.values]
        return {
            name: math.fsum(values[name] for values in by_seed) / len(by_seed)
            for name in (by_seed[0] if by_seed else ())
        }

    # -- tests and decision ----------------------------------------------------------------

    def differences(
        self,
        metric: str = "worst_group",
        *,
        reference: str = "LEACE",
        head: str | None = None,
        p: float | None = None,
        alpha: float | None = None,
    ) -> Differences:
        """Test the difference of every eraser from a reference, paired by seed.

        The test is Nadeau and Bengio's corrected resampled t test; fewer than three seeds have no
        test. For a fixed split (`test` of :func:`compare`), the test is instead a paired bootstrap
        over test rows: BCa, or for the worst group the percentile bootstrap, which is conservative.
        The p values are adjusted by Holm's method within the table.

        Parameters
        ----------
        metric : str
            One of :attr:`metrics`.
        reference : str
            Name of an eraser.
        head, p, alpha
            As for :meth:`values`.

        Returns
        -------
        Differences
            A list of :class:`~splince_fast.evaluation.statistics.Difference`.
        """
        reference_values = self.values(metric, eraser=reference, head=head, p=p, alpha=alpha)
        head, level = self.head_of(metric, head), self.level(p)
        ratio, resolution = self.test_ratio(p), self._resolution(metric, head, level)
        rows = []
        for eraser in self.context.erasers:
            if eraser == reference:
                continue
            values = self.values(metric, eraser=eraser, head=head or None, p=p, alpha=alpha)
            row = statistics.paired_difference(
                eraser, reference, values, reference_values, ratio, resolution
            )
            if self._resampled is not None and alpha is None:
                row = self._resampled.difference(metric, head, row)
            rows.append(row)
        adjusted = statistics.holm([row.p for row in rows])
        rows = [dataclasses.replace(r, p_holm=q) for r, q in zip(rows, adjusted, strict=True)]
        return Differences(rows, metric, self.metric(metric).label, head, level)

    def test_ratio(self, p: float | None = None) -> float:
        """Mean of n_test / n_train over the seeds of a level; the corrected t test uses this ratio.

        Parameters
        ----------
        p : float, optional
            Association level; the default is the level furthest from .5.

        Returns
        -------
        float
            Test rows per training row.
        """
        level = self.level(p)
        sizes = [size for (_, q), size in self.sizes.items() if q == level]
        return math.fsum(test / train for train, _, test in sizes) / len(sizes)

    def _resolution(self, metric: str, head: str, p: float | None) -> int | None:
        """Return the denominator of a metric that is a fraction of test rows, else None.

        The denominator is the number of test rows, or for a metric of one cell the number of test
        rows of the smallest cell.
        """
        match self.metric(metric).fraction_of:
            case "rows":
                return self.context.sizes[2]
            case "cell":
                cells = (cell for r in self._records_of(p, head) for cell in r.cells)
                return min((cell.n for cell in cells), default=None)
        return None

    def best(
        self, metric: str = "worst_group", *, head: str | None = None, p: float | None = None
    ) -> list[str]:
        """Best eraser by a metric, followed by the erasers that are not significantly worse.

        Erasers are ordered by their mean over the seeds at which all of them have a value. An
        eraser that has no value at any seed is left out.

        Parameters
        ----------
        metric : str
            One of :attr:`metrics`; :meth:`metric` gives the direction.
        head, p
            As for :meth:`values`.

        Returns
        -------
        list of str
            Names of erasers, the best one first. The list has one name if the best eraser is
            significantly better than all others (5 % level), or if no other eraser has a value. It
            is empty if there is no seed at which all erasers have a value.

        Raises
        ------
        InputError
            The comparison has no such metric, or the metric has no direction.
        """
        return list(self.verdict(metric, head=head, p=p).leaders)

    def verdict(
        self, metric: str = "worst_group", *, head: str | None = None, p: float | None = None
    ) -> Verdict:
        """Order the erasers by a metric, over the seeds at which all of them have a value.

        Parameters
        ----------
        metric : str
            One of :attr:`metrics`.
        head, p
            As for :meth:`values`.

        Returns
        -------
        Verdict
            ``order`` (all erasers, the best first), ``leaders`` (as returned by :meth:`best`),
            ``tied`` (erasers whose mean equals the best mean), ``tested`` (whether the best eraser
            was tested against another one), ``n_seeds`` (number of these seeds) and ``confirmed``
            (the eraser that is significantly better than every other one, or None).

        Raises
        ------
        InputError
            The comparison has no such metric, or the metric has no direction.
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
            return Verdict((), (), (), False, 0)
        means = {
            e: math.fsum(by_seed[s] for s in seeds) / len(seeds) for e, by_seed in values.items()
        }
        sign = -1.0 if lower else 1.0
        order = sorted(means, key=lambda e: -sign * means[e])
        best = order[0]
        rows = self.differences(metric, reference=best, head=head, p=p)
        worse = {row.method for row in rows if row.significant and sign * row.difference < 0}
        return Verdict(
            tuple(order),
            tuple(e for e in order if e not in worse),
            tuple(e for e in order if math.isclose(means[e], means[best], abs_tol=1e-12)),
            any(not math.isnan(row.p) for row in rows),
            len(seeds),
        )

    def decision(
        self, metric: str | None = None, *, head: str | None = None, p: float | None = None
    ) -> _decision.Decision:
        """Recommend an eraser by one metric, with reasons.

        The outcome is "decided" if one eraser is significantly better than every other eraser and
        than unerased rows; this eraser is recommended. The outcome is "no gain" if the 95 %
        interval of the best eraser's gain over unerased rows lies below .01, and otherwise "not
        decided". For "no gain" and "not decided", the recommended eraser is the one that changes
        the rows least, among the best eraser and the erasers that are not significantly worse. For
        "not decided", the sentence says how many seeds or rows would narrow the interval. Partial
        erasers, which leave more than 1 % of the covariance with the concept, are not considered.

        Parameters
        ----------
        metric : str, optional
            One of :attr:`metrics`. The default is the first metric of the summary, such as
            "worst_group", but "accuracy" if the worst group has fewer than 20 test rows at a seed.
        head, p
            As for :meth:`values`.

        Returns
        -------
        Decision
            ``outcome``, ``eraser``, ``metric``, ``head`` and ``sentence``; ``print`` shows the
            sentence.

        Raises
        ------
        InputError
            The comparison has no such metric, or the metric has no direction.
        """
        return _decision.decision(self, metric, head, p)

    def table(self, metric: str, *, head: str | None = None) -> _tables.Table:
        """Table of a metric, by eraser and association level.

        Parameters
        ----------
        metric : str
            One of :attr:`metrics`.
        head : str, optional
            Name of a head, for metrics of heads; the default is the first head.

        Returns
        -------
        Table
            Prints as text, and shows as HTML in notebooks.
        """
        return _tables.by_level(self, metric, head)

    # -- text, figures and reports ---------------------------------------------------------

    def __str__(self) -> str:
        return f"{_tables.wrapped(str(self.decision()))}\n\n{_tables.overview(self)}"

    def __repr__(self) -> str:
        counts = {name: len(getattr(self.context, f"{name}s"))
                  for name in ("eraser", "head", "level", "seed")}  # fmt: skip
        texts = (f"{n} {name}{'s' * (n != 1)}" for name, n in counts.items())
        return f"Comparison({', '.join(texts)})"

    def _repr_html_(self) -> str:
        return f"<p>{html.escape(str(self.decision()))}</p>{_tables.notebook(self)}"

    def plot(self, kind: str = "association", **options: object) -> Any:
        """Draw a figure with matplotlib.

        Parameters
        ----------
        kind : {"association", "alphas", "covariance", "leakage", "groups", "trade-off", "partial"}
            Kind of figure.
        **options
            ``metric``, ``head``, ``p`` and ``reference``, for the kinds that have these options.

        Returns
        -------
        matplotlib.figure.Figure
            The figure, not attached to a window.

        Raises
        ------
        InputError
            The kind is unknown, or the comparison has no data for it.
        MissingExtraError
            matplotlib is not installed.
        """
        from splince_fast.evaluation import figures

        return figures.draw(self, kind, **options)

    def to_html(self, path: str | os.PathLike[str]) -> Path:
        """Write a report: one self-contained HTML file with tables and figures.

        Parameters
        ----------
        path : path
            Path of the file, in an existing folder. After an error the file is unchanged.

        Returns
        -------
        Path
            Path of the file.

        Raises
        ------
        MissingExtraError
            matplotlib or jinja2 is not installed.
        """
        from splince_fast.evaluation import report_html

        write_text(path, report_html.render(self))
        return as_path(path)

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yield one dictionary per seed, p, eraser, head, alpha and metric (long format)."""
        for r in self.records:
            if r.eraser == ADVICE:
                continue
            start = {"seed": r.seed, "p": r.p, "eraser": r.eraser}
            if r.reason:
                yield {**start, "head": r.head, "alpha": None, "metric": None, "value": None,
                       "n": r.sizes[2], "reason": r.reason}  # fmt: skip
            for head, alpha, values in ((r.head, r.alpha, r.values), *((PATH, *q) for q in r.path)):
                for metric, value in values.items():
                    yield {**start, "head": head, "alpha": alpha, "metric": metric,
                           "value": value, "n": r.sizes[2], "reason": None}  # fmt: skip

    def to_frame(self, backend: str = "pandas") -> Any:
        """Convert to a frame: seed, p, eraser, head, alpha, metric, value, n, reason.

        Parameters
        ----------
        backend : {"pandas", "polars", "pyarrow"}
            Library of the frame.

        Returns
        -------
        frame
            One row per value of a metric, and one per failure. The column "head" is "" for metrics
            of the eraser itself. It is "alphas" for the head "retrained" at each of the alphas.

        Raises
        ------
        InputError
            The backend is unknown.
        MissingExtraError
            The library is not installed.
        """
        import narwhals

        if backend not in ("pandas", "polars", "pyarrow"):
            raise InputError(f"backend is {backend!r}; choose 'pandas', 'polars' or 'pyarrow'")
        require(backend, "evaluate")
        schema = {
            "seed": narwhals.Int64, "p": narwhals.Float64, "eraser": narwhals.String,
            "head": narwhals.String, "alpha": narwhals.Float64, "metric": narwhals.String,
            "value": narwhals.Float64, "n": narwhals.Int64, "reason": narwhals.String,
        }  # fmt: skip
        rows = list(self.rows())
        columns = {name: [row[name] for row in rows] for name in schema}
        from_dict: Any = narwhals.from_dict
        return from_dict(columns, schema, backend=backend).to_native()

    # -- files -----------------------------------------------------------------------------

    def save(self, path: str | os.PathLike[str]) -> None:
        """Save the comparison as one JSON file.

        Parameters
        ----------
        path : path
            Path of the file. After an error the file is unchanged.
        """
        write_text(path, to_text(self.records, self.context))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Comparison:
        """Load a comparison that :meth:`save` wrote.

        Parameters
        ----------
        path : path
            Path of the file.

        Returns
        -------
        Comparison
            The saved comparison.

        Raises
        ------
        FileFormatError
            The file is truncated, is not a comparison, or has another version of the format.
        """
        try:
            text = as_path(path).read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise FileFormatError(
                f"{str(path)!r} is not a comparison: the file is not text"
            ) from error
        return cls(*from_text(text, str(path)))
