"""Result of :func:`compare`: the public class, which reads records and shows views of them."""

from __future__ import annotations

import html
import os
from pathlib import Path
from typing import Any

from splince_fast._runtime.arguments import require
from splince_fast._runtime.files import as_path, write_text
from splince_fast.evaluation import figures, report_html, tables
from splince_fast.evaluation.decision import Decision, decide, summary
from splince_fast.evaluation.measurements import Measurements
from splince_fast.evaluation.records import PATH, from_text, to_text
from splince_fast.evaluation.text_table import Table, wrapped
from splince_fast.exceptions import InputError


class Comparison(Measurements):
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
    >>> y, z = np.random.default_rng(0).integers(0, 2, (2, 600))
    >>> X = np.stack([y + z, y, z], axis=1) + np.random.default_rng(1).normal(size=(600, 3))
    >>> result = ev.compare(X, task=y, concept=z, n_seeds=3, alphas=(0.01,), progress=False)
    >>> [row.method for row in result.differences("accuracy", reference="none")]
    ['SAL', 'LEACE', 'SPLINCE']
    """

    def decision(
        self, metric: str | None = None, *, head: str | None = None, p: float | None = None
    ) -> Decision:
        """Recommend an eraser by one metric; printed, a sentence with its reasons.

        The outcome is "decided" if one eraser is significantly better than all others and than
        unerased rows, "no gain" if the 95 % interval of the best one's gain over unerased rows lies
        below .01, and otherwise "not decided". Erasers that leave more than 1 % of the covariance
        with the concept are not considered.

        Parameters
        ----------
        metric : str, optional
            One of :attr:`metrics`; by default the first of the summary, such as "worst_group", or
            "accuracy" if the worst group has fewer than 20 test rows at a seed.
        head, p
            As for :meth:`values`.
        """
        return decide(self, metric, head, p)

    def table(self, metric: str, *, head: str | None = None) -> Table:
        """Table of a metric, by eraser and association level.

        Parameters
        ----------
        metric, head
            As for :meth:`values`.
        """
        return tables.by_level(self, metric, head)

    def _blocks(self) -> list[list[str] | Table]:
        """Return the lines and tables that are shown: the three sentences come first."""
        first, *others = summary(self)
        shown: list[list[str] | Table] = [[first.sentence, *others, *first.reasons]]
        shown += [tables.heading(self), *tables.summaries(self), tables.remarks(self)]
        return [block for block in shown if block]

    def __str__(self) -> str:
        return "\n\n".join(
            str(block) if isinstance(block, Table) else "\n".join(map(wrapped, block))
            for block in self._blocks()
        )

    def __repr__(self) -> str:
        counts = {name: len(getattr(self.context, f"{name}s"))
                  for name in ("eraser", "head", "level", "seed")}  # fmt: skip
        texts = (f"{n} {name}{'s' * (n != 1)}" for name, n in counts.items())
        return f"Comparison({', '.join(texts)})"

    def _repr_html_(self) -> str:
        return "".join(
            block._repr_html_() if isinstance(block, Table)
            else "".join(f"<p>{html.escape(line)}</p>" for line in block)
            for block in self._blocks()
        )  # fmt: skip

    def plot(self, kind: str = "association", **options: object) -> Any:
        """Draw a matplotlib figure, not attached to a window.

        Parameters
        ----------
        kind : {"association", "trade-off"}
            A metric by association level, or the task score against the score of a probe.
        **options
            ``metric``, ``head`` and ``p``, for the kinds that have these options.
        """
        return figures.draw(self, kind, **options)

    def to_html(self, path: str | os.PathLike[str]) -> Path:
        """Write a self-contained HTML report with tables and figures, and return its path.

        Parameters
        ----------
        path : path
            Path of the file, in an existing folder. After an error the file is unchanged.
        """
        write_text(path, report_html.render(self))
        return as_path(path)

    def to_frame(self, backend: str = "pandas") -> Any:
        """Convert to a frame: seed, p, eraser, head, alpha, metric, value, n, reason.

        Parameters
        ----------
        backend : {"pandas", "polars", "pyarrow"}
            Library of the frame.

        Returns
        -------
        frame
            A row per value of a metric, and per failure. "head" is "" for metrics of the eraser
            itself, and "alphas" for the head "retrained" at each alpha.
        """
        import narwhals

        if backend not in ("pandas", "polars", "pyarrow"):
            raise InputError(f"backend is {backend!r}; choose 'pandas', 'polars' or 'pyarrow'")
        require(backend, "evaluate")
        kinds = {"i": narwhals.Int64, "f": narwhals.Float64, "s": narwhals.String}
        names = ("seed", "p", "eraser", "head", "alpha", "metric", "value", "n", "reason")
        schema = {name: kinds[kind] for name, kind in zip(names, "ifssfsfis", strict=True)}
        rows = []
        for r in self.records:
            start, n = {"seed": r.seed, "p": r.p, "eraser": r.eraser}, r.sizes[2]
            if r.reason:
                rows.append({**start, "head": r.head, "n": n, "reason": r.reason})
            for head, alpha, values in ((r.head, r.alpha, r.values), *((PATH, *q) for q in r.path)):
                rows += [
                    {**start, "head": head, "alpha": alpha, "metric": metric, "value": v, "n": n}
                    for metric, v in values.items()
                ]
        columns = {name: [row.get(name) for row in rows] for name in schema}
        from_dict: Any = narwhals.from_dict
        return from_dict(columns, schema, backend=backend).to_native()

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

        Raises
        ------
        FileFormatError
            The file is truncated, is not a comparison, or has another version of the format.
        """
        return cls(*from_text(as_path(path).read_bytes(), str(path)))
