"""What a comparison was made of, and its lists of differences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from splince_fast.evaluation.statistics import Difference

ERASER_ROW, ADVICE, PATH = "", "advice", "strengths"
LOWER_IS_BETTER = ("tpr_gap", "mse", "distortion", "residual")


@dataclass(frozen=True, slots=True)
class Context:
    """What was compared, and on what.

    Attributes
    ----------
    n, d : int
        Rows and features.
    erasers, heads : tuple of str
    levels : tuple of float or None
        Associations; (None,) is the natural split.
    seeds : tuple of int
    sizes : tuple of int
        Rows for training, validation and test of the first split.
    tied : str
    by : str
        How rows reach a level: "rows" or "weights".
    strengths : tuple of float
    select : str
    probes, concepts, cells : tuple of str
    fingerprint, version : str
        Of the data and of the library.
    notes : tuple of str
        What was warned of.
    truth : dict
        Codes of the test rows where the split was the caller's own, for the bootstrap.
    """

    n: int
    d: int
    erasers: tuple[str, ...]
    heads: tuple[str, ...]
    levels: tuple[float | None, ...]
    seeds: tuple[int, ...]
    sizes: tuple[int, int, int]
    tied: str
    by: str
    strengths: tuple[float, ...]
    select: str
    probes: tuple[str, ...]
    concepts: tuple[str, ...]
    cells: tuple[str, ...]
    fingerprint: str
    version: str
    notes: tuple[str, ...]
    truth: dict[str, Any]


class Differences(list[Difference]):
    """Paired differences to a reference; prints as a table.

    Attributes
    ----------
    metric : str
    """

    def __init__(self, items: Sequence[Difference], metric: str, head: str, p: float | None):
        super().__init__(items)
        self.metric, self.head, self.p = metric, head, p

    def __str__(self) -> str:
        from splince_fast.evaluation import _tables

        return str(_tables.difference_table(self))


def is_lower_better(metric: str) -> bool:
    """Whether a smaller figure is the better one."""
    probe = metric.split("[")[0].endswith(("_auc", "_accuracy")) and metric != "class_accuracy"
    return metric in LOWER_IS_BETTER or probe
