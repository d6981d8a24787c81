"""Settings of a comparison, and its lists of differences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from splince_fast.evaluation.statistics import Difference

# Names that no eraser or head has: of the eraser of a record of advice, of the head of a record of
# an eraser itself; and of the points of a path in the long form.
ADVISER, ERASER_ROW, PATH = "", "", "alphas"


@dataclass(frozen=True, slots=True)
class Context:
    """Erasers, heads and data of a comparison.

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
    aligned_class : str
    association_method : str
        How rows reach a level: "subsample" or "weights".
    alphas : tuple of float
    select : str
    probes, concepts, cells : tuple of str
    fingerprint, version : str
        Of the data and of the library.
    notes : tuple of str
        Warnings.
    truth : dict
        Codes of the test rows where the split was the caller's own, for the bootstrap.
    eraser_roles, head_roles : tuple of str
        "LEACE", "frozen" and so on for those of the library, whatever their names; "" for the
        caller's own.
    own_metrics : dict of str to list
        [label, lower_is_better] of the caller's own metrics.
    same_test : bool
        Whether a seed has the same test rows at every level.
    """

    n: int
    d: int
    erasers: tuple[str, ...]
    heads: tuple[str, ...]
    levels: tuple[float | None, ...]
    seeds: tuple[int, ...]
    sizes: tuple[int, int, int]
    aligned_class: str
    association_method: str
    alphas: tuple[float, ...]
    select: str
    probes: tuple[str, ...]
    concepts: tuple[str, ...]
    cells: tuple[str, ...]
    fingerprint: str
    version: str
    notes: tuple[str, ...]
    truth: dict[str, Any]
    eraser_roles: tuple[str, ...]
    head_roles: tuple[str, ...]
    own_metrics: dict[str, Any]
    same_test: bool

    def eraser_as(self, role: str) -> str | None:
        """Name of the first eraser of the library that is `role`, such as "LEACE"."""
        return dict(zip(self.eraser_roles[::-1], self.erasers[::-1], strict=True)).get(role)

    def head_as(self, role: str) -> str | None:
        """Name of the first head of the library that is `role`, such as "frozen"."""
        return dict(zip(self.head_roles[::-1], self.heads[::-1], strict=True)).get(role)


class Differences(list[Difference]):
    """Paired differences to a reference; prints as a table.

    Attributes
    ----------
    metric, label : str
    """

    def __init__(
        self, items: Sequence[Difference], metric: str, label: str, head: str, p: float | None
    ):
        super().__init__(items)
        self.metric, self.label, self.head, self.p = metric, label, head, p

    def __str__(self) -> str:
        from splince_fast.evaluation import _tables

        return str(_tables.difference_table(self))
