"""Results of compare: tables, differences with tests, advice, files."""

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
from splince_fast.evaluation._records import (
    ADVICE,
    ERASER_ROW,
    PATH,
    Context,
    Record,
    from_text,
    to_text,
)
from splince_fast.evaluation.metrics import CellAccuracy
from splince_fast.evaluation.scoring import TableMetric, metric_of
from splince_fast.evaluation.statistics import Interval
from splince_fast.exceptions import FileFormatError, InputError

# A number in a note. Digits inside names do not match.
_NUMBER = re.compile(r"(?<![\w'])\d[\d,.]*(e[+-]?\d+)?")


class Comparison:
    """The result of :func:`splince_fast.evaluation.compare`.

    Parameters
    ----------
    records : list of Record
        One per seed, level, eraser and head.
    context : Context
        Settings of the comparison.

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
        self._resampled = Resampled(records, context.truth) if context.truth else None

    # -- reading ---------------------------------------------------------------------------

    @property
    def metrics(self) -> tuple[str, ...]:
        """Names of all figures, in the order of their first appearance."""
        keys = (key for r in self.records if r.eraser != ADVICE for key in r.values)
        return tuple(dict.fromkeys(keys))

    @property
    def failures(self) -> list[tuple[str, str, str]]:
        """(eraser, head, reason) of every failure, each once."""
        failed = ((r.eraser or "advice", r.head, r.reason) for r in self.records if r.reason)
        return list(dict.fromkeys(failed))

    @property
    def notes(self) -> list[str]:
        """Warnings about the data and about records; those that differ by numbers alone once."""
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
        """Rows for training, validation and test by (seed, level)."""
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
            Without its function.

        Raises
        ------
        InputError
            No such metric.
        """
        if key not in self.metrics:
            raise InputError(f"there is no metric {key!r}; there are {', '.join(self.metrics)}")
        return metric_of(key, self.context.own_metrics)

    def head_of(self, metric: str, head: str | None = None) -> str:
        """The head under which the records hold a figure, "" for figures of the eraser itself.

        Parameters
        ----------
        metric : str
            A figure.
        head : str, optional
            The default is the first head.

        Returns
        -------
        str
            Its name, or "".

        Raises
        ------
        InputError
            No such figure or head.
        """
        if self.metric(metric).of == "eraser":
            return ERASER_ROW
        head = self.context.heads[0] if head is None else head
        if head not in self.context.heads:
            raise InputError(f"there is no head {head!r}; there are {self.context.heads}")
        return head

    def level(self, p: float | None = None) -> float | None:
        """A level of the sweep; the default is the one furthest from .5.

        Parameters
        ----------
        p : float, optional
            The level.

        Returns
        -------
        float or None
            None is the natural split.

        Raises
        ------
        InputError
            No such level.
        """
        levels = self.context.levels
        if p is None:
            return max(levels, key=lambda q: 0.0 if q is None else abs(q - 0.5))
        if p not in levels:
            raise InputError(f"there is no level {p!r}; there are {levels}")
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
        """A figure by seed; seeds at which the cell failed are absent.

        Parameters
        ----------
        metric : str
            Such as "worst_group"; see :attr:`metrics`.
        eraser : str
            Its name.
        head : str, optional
            Of figures that depend on it; the default is the first.
        p : float, optional
            Level; the default is the one furthest from .5.
        alpha : float, optional
            A point of the path of the head "retrained", instead of the selected one.

        Returns
        -------
        dict of int to float
            By seed.
        """
        if eraser not in self.context.erasers:
            raise InputError(f"there is no eraser {eraser!r}; there are {self.context.erasers}")
        if alpha is not None:
            if not is_number(alpha) or alpha not in self.context.alphas:
                raise InputError(f"alpha is {alpha!r}; the comparison has {self.context.alphas}")
            # The path is looked up by hash, in which NumPy's float32 differs from an equal float.
            alpha = self.context.alphas[self.context.alphas.index(alpha)]
        records = self._records_of(self.level(p), self.head_of(metric, head), eraser)
        of_seed = {r.seed: r.values if alpha is None else dict(r.path).get(alpha, {})
                   for r in records}  # fmt: skip
        return {seed: values[metric] for seed, values in of_seed.items() if metric in values}

    def _records_of(self, p: float | None, head: str, eraser: str | None = None) -> list[Record]:
        """Records of a level and head, of one eraser or of all."""
        return [
            r for r in self.records
            if r.head == head and r.p == p and (eraser is None or r.eraser == eraser)
        ]  # fmt: skip

    def interval(self, metric: str, **where: Any) -> Interval:
        """Mean over seeds with its 95 % t interval; of one split a bootstrap interval.

        Parameters
        ----------
        metric : str
            A figure.
        **where
            As for :meth:`values`.

        Returns
        -------
        Interval
            mean, error, low, high, n.
        """
        interval = statistics.t_interval(list(self.values(metric, **where).values()))
        if self._resampled is not None and interval.n == 1 and where.get("alpha") is None:
            head = self.head_of(metric, where.get("head"))
            limits = self._resampled.interval(metric, where["eraser"], head)
            if limits is not None:
                return Interval(interval.mean, math.nan, *limits, 1)
        return interval

    def mean(self, metric: str, **where: object) -> float:
        """Mean of a figure over seeds.

        Parameters
        ----------
        metric : str
            A figure.
        **where
            As for :meth:`values`.

        Returns
        -------
        float
            NaN where every seed failed.
        """
        return self.interval(metric, **where).mean

    def worst_cells(
        self, *, eraser: str, head: str | None = None, p: float | None = None
    ) -> dict[int, CellAccuracy]:
        """The cell of task and concept with the lowest accuracy, by seed.

        Parameters
        ----------
        eraser : str
            Its name.
        head, p
            As for :meth:`values`.

        Returns
        -------
        dict of int to CellAccuracy
            With its name, test rows and Wilson interval; of equal accuracies the cell with most
            rows. Empty where a concept or the task is a quantity.
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
        """Advice from the moments alone, means over seeds.

        ``rho`` and ``threshold`` are those of
        :class:`~splince_fast.evaluation.advice.FrozenHeadAdvice`, ``expected_r2`` and
        ``rows_for_half`` those of :class:`~splince_fast.evaluation.advice.HeldOutTrace`.

        Parameters
        ----------
        p : float, optional
            Level; the default is the one furthest from .5.

        Returns
        -------
        dict
            Empty where task or concept is a quantity or the advice failed.
        """
        records = self._records_of(self.level(p), ERASER_ROW, ADVICE)
        by_seed = [r.values for r in records if r.values]
        return {
            name: math.fsum(values[name] for values in by_seed) / len(by_seed)
            for name in (by_seed[0] if by_seed else ())
        }

    # -- comparing -------------------------------------------------------------------------

    def differences(
        self,
        metric: str = "worst_group",
        *,
        reference: str = "LEACE",
        head: str | None = None,
        p: float | None = None,
        alpha: float | None = None,
    ) -> Differences:
        """Every eraser against a reference, paired by seed.

        Nadeau and Bengio's corrected resampled t test; p values adjusted by Holm's method within
        the table. Below three seeds nothing is tested. For a split of your own: a paired
        bootstrap over test rows (BCa; percentile for a worst group, which is conservative).

        Parameters
        ----------
        metric : str
            A figure.
        reference : str
            An eraser.
        head, p, alpha
            As for :meth:`values`.

        Returns
        -------
        Differences
            A list of :class:`~splince_fast.evaluation.statistics.Difference`.
        """
        theirs = self.values(metric, eraser=reference, head=head, p=p, alpha=alpha)
        head, level = self.head_of(metric, head), self.level(p)
        ratio, resolution = self.test_ratio(p), self._resolution(metric, head, level)
        rows = []
        for eraser in self.context.erasers:
            if eraser == reference:
                continue
            ours = self.values(metric, eraser=eraser, head=head or None, p=p, alpha=alpha)
            row = statistics.paired_difference(eraser, reference, ours, theirs, ratio, resolution)
            if self._resampled is not None and alpha is None:
                row = self._resampled.difference(metric, head, row)
            rows.append(row)
        adjusted = statistics.holm([row.p for row in rows])
        rows = [dataclasses.replace(r, p_holm=q) for r, q in zip(rows, adjusted, strict=True)]
        return Differences(rows, metric, self.metric(metric).label, head, level)

    def test_ratio(self, p: float | None = None) -> float:
        """Test rows per training row, the mean over seeds: n_test / n_train of the corrected t.

        Parameters
        ----------
        p : float, optional
            Level; the default is the one furthest from .5.

        Returns
        -------
        float
            Of the level.
        """
        level = self.level(p)
        sizes = [size for (_, q), size in self.sizes.items() if q == level]
        return math.fsum(test / train for train, _, test in sizes) / len(sizes)

    def _resolution(self, metric: str, head: str, p: float | None) -> int | None:
        """Test rows of which a figure is a fraction or a mean of fractions; None for others."""
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
        """The best eraser and those that the test cannot tell from it.

        Erasers are ordered by their means over the seeds at which all of them have a value; an
        eraser that failed at every seed is left out.

        Parameters
        ----------
        metric : str
            A figure; :meth:`metric` tells whether the largest or the smallest is the best.
        head, p
            As for :meth:`values`.

        Returns
        -------
        list of str
            The best first; one name if it beats all others at 5 %, or if no other eraser has a
            value. Empty if no seed has values of all.

        Raises
        ------
        InputError
            No such metric, or one without a direction.
        """
        return list(self.verdict(metric, head=head, p=p).leaders)

    def verdict(
        self, metric: str = "worst_group", *, head: str | None = None, p: float | None = None
    ) -> Verdict:
        """Order of the erasers by a metric, over the seeds at which all have a value.

        Parameters
        ----------
        metric : str
            A figure.
        head, p
            As for :meth:`values`.

        Returns
        -------
        Verdict
            ``order``, ``leaders``, ``level`` (equal to the best), ``tested``, ``n_seeds`` and
            ``confirmed``.

        Raises
        ------
        InputError
            No such metric, or one without a direction.
        """
        lower = self.metric(metric).lower_is_better
        if lower is None:
            raise InputError(
                f"the metric {metric!r} has no direction, so no eraser is the best by it; pass one "
                f"of your own as metrics={{{metric!r}: Metric(function, lower_is_better=...)}}"
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
        """The eraser to take, with reasons and limits; the report opens with it.

        An eraser is taken if it is significantly better than every other one, and than unerased
        rows. There is no gain where the 95 % interval of the best eraser's gain over unerased
        rows ends below .01. All else is not decided: the sentence names the seeds or rows that
        would narrow the interval, and of erasers that are not significantly different the one
        that changes the rows least.

        Parameters
        ----------
        metric : str, optional
            A figure; the default is the first of the summary, such as the worst group, or the
            accuracy where the worst group has fewer than 20 test rows at some seed.
        head, p
            As for :meth:`values`.

        Returns
        -------
        Decision
            ``outcome``, ``eraser``, ``metric``, ``head`` and ``sentence``, which it prints.

        Raises
        ------
        InputError
            No such metric, or one without a direction.
        """
        return _decision.decision(self, metric, head, p)

    def table(self, metric: str, *, head: str | None = None) -> _tables.Table:
        """A figure by eraser and level.

        Parameters
        ----------
        metric : str
            A figure.
        head : str, optional
            Of figures that depend on it; the default is the first.

        Returns
        -------
        Table
            Rows of cells; prints as text and shows as HTML.
        """
        return _tables.by_level(self, metric, head)

    # -- showing ---------------------------------------------------------------------------

    def __str__(self) -> str:
        return f"{_tables.wrapped(str(self.decision()))}\n\n{_tables.overview(self)}"

    def __repr__(self) -> str:
        c = self.context
        return (
            f"Comparison({len(c.erasers)} erasers, {len(c.heads)} heads, {len(c.levels)} levels, "
            f"{len(c.seeds)} seeds)"
        )

    def _repr_html_(self) -> str:
        return f"<p>{html.escape(str(self.decision()))}</p>{_tables.notebook(self)}"

    def plot(self, kind: str = "association", **options: object) -> Any:
        """Draw a figure with matplotlib.

        Parameters
        ----------
        kind : {"association", "alphas", "covariance", "leakage", "groups", "trade-off", "partial"}
            Figure to show.
        **options
            ``metric``, ``head``, ``p``, ``reference``, where the figure has them.

        Returns
        -------
        matplotlib.figure.Figure
            To show or save.

        Raises
        ------
        InputError
            An unknown kind, or one that the run has nothing for.
        MissingExtraError
            matplotlib is not installed.
        """
        from splince_fast.evaluation import figures

        return figures.draw(self, kind, **options)

    def to_html(self, path: str | os.PathLike[str]) -> Path:
        """Write a report: one file with tables and figures that asks the network for nothing.

        Parameters
        ----------
        path : path
            The file; its folder must exist. It is complete or, after an error, as it was.

        Returns
        -------
        Path
            The file.

        Raises
        ------
        MissingExtraError
            matplotlib or jinja2 is not installed.
        """
        from splince_fast.evaluation import report_html

        write_text(path, report_html.render(self))
        return as_path(path)

    def rows(self) -> Iterator[dict[str, Any]]:
        """The long form: one dictionary per seed, p, eraser, head, alpha and metric."""
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
        """The long form as a frame: seed, p, eraser, head, lambda, metric, value, n, reason.

        Parameters
        ----------
        backend : {"pandas", "polars", "pyarrow"}
            Library of the frame.

        Returns
        -------
        frame
            One row per figure. The head is empty for figures of the eraser itself, and
            "alphas" for the points of the path.

        Raises
        ------
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
        """Write everything to one JSON file.

        Parameters
        ----------
        path : path
            The file; it is complete or absent.
        """
        write_text(path, to_text(self.records, self.context))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Comparison:
        """Read what :meth:`save` wrote.

        Parameters
        ----------
        path : path
            The file.

        Returns
        -------
        Comparison
            With the same tables.

        Raises
        ------
        FileFormatError
            Truncated, foreign, or written by a version with another format.
        """
        try:
            text = as_path(path).read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise FileFormatError(f"{str(path)!r} holds no comparison: it is no text") from error
        return cls(*from_text(text, str(path)))
