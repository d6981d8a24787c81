"""Results of metrics over groups."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from splince_fast.exceptions import InputError

FEW_ROWS = 20  # a cell of fewer rows says little of its accuracy


@dataclass(frozen=True, slots=True)
class CellAccuracy:
    """Accuracy in one cell.

    Attributes
    ----------
    cell : object
        Name of the group, a tuple for a product of groups.
    n : int
        Rows.
    accuracy : float
        Share of correct decisions, weighted where weights were given.
    low, high : float
        Wilson interval from the counts.
    """

    cell: Any
    n: int
    accuracy: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class GroupAccuracy:
    """Accuracy per cell of groups.

    Attributes
    ----------
    rows : tuple of CellAccuracy
        Cells with at least one row, in the order of their names.
    missing : tuple
        Cells of the product of the groups that have no row.
    n : int
        Rows in all.
    overall : float
        Accuracy of all rows, weighted where weights were given.
    interval : float
        Level of the Wilson intervals.
    """

    rows: tuple[CellAccuracy, ...]
    missing: tuple[Any, ...]
    n: int
    overall: float
    interval: float

    @property
    def worst(self) -> CellAccuracy:
        """The cell of lowest accuracy; a minimum over noisy cells is biased downwards."""
        return min(self.rows, key=lambda row: row.accuracy)

    @property
    def mean(self) -> float:
        """Unweighted mean over cells."""
        return math.fsum(row.accuracy for row in self.rows) / len(self.rows)

    def weighted(self, by: Mapping[Any, float]) -> float:
        """Mean over cells with given shares, such as those of the training rows.

        Parameters
        ----------
        by : mapping of cell to float
            Shares or counts; cells that have no row here must not carry any.

        Returns
        -------
        float
            sum_g by[g] accuracy_g / sum_g by[g].

        Raises
        ------
        InputError
            A negative or non-finite share, a share for a cell without rows, or no share at all.
        """
        known = {row.cell: row.accuracy for row in self.rows}
        bad = [cell for cell, w in by.items() if not (math.isfinite(w) and w >= 0)]
        if bad:
            raise InputError(f"the share of cell {bad[0]!r} must be a finite number of at least 0")
        absent = [cell for cell, w in by.items() if w > 0 and cell not in known]
        if absent:
            raise InputError(
                f"cell {absent[0]!r} has a share but no row here; the cells are {list(known)[:20]}"
            )
        total = math.fsum(by.values())
        if total <= 0:
            raise InputError("the shares add up to 0; pass counts or shares of the cells")
        return math.fsum(known[cell] * w for cell, w in by.items() if w > 0) / total

    def __str__(self) -> str:
        shown = sorted(self.rows, key=lambda row: row.accuracy)[:10]
        lines = [f"accuracy {self.overall:.3f} on {self.n:,} rows, {len(self.rows)} cells"]
        if len(self.rows) > len(shown):
            lines[0] += f" (the {len(shown)} worst)"
        for row in shown:
            few = f"  (fewer than {FEW_ROWS} rows)" if row.n < FEW_ROWS else ""
            lines.append(
                f"  {row.accuracy:.3f} [{row.low:.3f}, {row.high:.3f}]  n = {row.n:<6,} "
                f"{row.cell!r}{few}"
            )
        if self.missing:
            lines.append(f"  without rows: {', '.join(map(repr, self.missing[:10]))}")
        return "\n".join(lines)


class ClassAccuracy(dict[Any, float]):
    """Accuracy per class of the truth, as a dictionary.

    Examples
    --------
    >>> from splince_fast.evaluation import class_accuracy
    >>> class_accuracy([0, 0, 1], [0, 1, 1])
    {0: 0.5, 1: 1.0}
    >>> class_accuracy([0, 0, 1], [0, 1, 1]).mean
    0.75
    """

    @property
    def mean(self) -> float:
        """Unweighted mean over classes: the balanced accuracy."""
        return math.fsum(self.values()) / len(self)
