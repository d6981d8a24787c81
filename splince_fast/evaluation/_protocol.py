"""The association protocol: cells, their shares, and the rows that each part takes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from splince_fast.evaluation._cells import Coded, check_classes, coded
from splince_fast.evaluation._checks import check_shortage
from splince_fast.exceptions import LabelError, NotEnoughDataError

Rows = NDArray[np.intp]
Float = NDArray[np.float64]
Cell = tuple[int, int]  # codes of task and concept

TEST_SHARE, VALIDATION_SHARE = 0.2, 0.1


@dataclass(frozen=True, slots=True, eq=False)
class Split:
    """Row numbers of three parts that share no row.

    Attributes
    ----------
    train, validation, test : ndarray of intp
        Cell after cell in lexicographic order for :func:`spurious_split`.
    p : float or None
        Association of the training and validation rows; None for the natural split.
    aligned_class : object
        The class of the concept aligned with the second class of the task, or a mapping.
    missing : int
        Rows left out because a label is missing.
    notes : tuple of str
        Adjustments.
    weights, validation_weights : ndarray of float64 or None
        Of the training and validation rows where cells reach their shares by weights; constant
        in a cell, and adding up to (sum w)^2 / sum w^2, the rows of equal weight that would say
        as much. None where every row counts alike.
    """

    train: Rows
    validation: Rows
    test: Rows
    p: float | None
    aligned_class: Any
    missing: int
    notes: tuple[str, ...]
    weights: Float | None = None
    validation_weights: Float | None = None

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Rows for training, validation and test."""
        return len(self.train), len(self.validation), len(self.test)


@dataclass(frozen=True, slots=True, eq=False)
class Protocol:
    """Cells of task and concept, and who is aligned with whom."""

    y: Coded
    z: Coded
    aligned_class: Any
    groups: Rows | None

    @classmethod
    def of(cls, y: Coded, z: Coded, aligned_class: Any, groups: Any) -> Protocol:
        """Check the labels.

        Raises
        ------
        LabelError
            One class only, a class that is not there, or a task of more than two without a map.
        """
        for name, column in (("task", y), ("concept", z)):
            check_classes(name, column)
        codes = None if groups is None else coded(groups, "groups", len(y.codes)).codes
        if isinstance(aligned_class, Mapping):
            for a, b in aligned_class.items():
                if a not in y.names or b not in z.names:
                    raise LabelError(
                        f"aligned_class maps {a!r} to {b!r}; the task has {y.names[:20]}, the "
                        f"concept {z.names[:20]}"
                    )
            if len(aligned_class) < 2:
                raise LabelError("aligned_class must map at least two classes of the task")
            return cls(y, z, dict(aligned_class), codes)
        if len(y.names) > 2:
            raise LabelError(
                f"the task has {len(y.names)} classes; say which class of the concept each is "
                "aligned with: aligned_class={'nurse': 'female', ...}, or leave association=None"
            )
        if aligned_class is None:
            aligned_class = _most_associated(y, z)
        elif aligned_class not in z.names:
            raise LabelError(
                f"aligned_class is {aligned_class!r}; the concept has the classes {z.names[:20]}"
            )
        return cls(y, z, aligned_class, codes)

    def shares(self, p: float) -> dict[Cell, float]:
        """Share of each cell (codes of y, z) in training and validation rows."""
        K = len(self.z.names)
        shares = {}
        if isinstance(self.aligned_class, dict):
            C = len(self.aligned_class)
            for a, name in enumerate(self.y.names):
                if name not in self.aligned_class:
                    continue
                own = self.z.names.index(self.aligned_class[name])
                for b in range(K):
                    shares[a, b] = p / C if b == own else (1 - p) / C / (K - 1)
            return shares
        own = self.z.names.index(self.aligned_class)
        for a in (0, 1):
            for b in range(K):
                together = p / 2 if a == 1 else (1 - p) / 2
                apart = (0.5 - together) / (K - 1)
                shares[a, b] = together if b == own else apart
        return shares

    def cells(self) -> list[Cell]:
        """Cells of the protocol in lexicographic order."""
        return sorted(self.shares(0.5))

    @property
    def usable(self) -> NDArray[np.bool_]:
        """Rows with both labels."""
        return np.asarray((self.y.codes >= 0) & (self.z.codes >= 0))

    def counts(self) -> dict[Cell, int]:
        """Rows of each cell."""
        return {
            (a, b): int(np.sum((self.y.codes == a) & (self.z.codes == b))) for a, b in self.cells()
        }

    def largest_sizes(self, levels: Sequence[float]) -> tuple[int, int, int]:
        """The largest sizes, 70, 10 and 20 %, that the cells allow at all levels."""
        cells, counts = self.cells(), self.counts()
        total = math.inf
        for p in levels:
            shares = self.shares(p)
            for cell in cells:
                need = TEST_SHARE / len(cells) + (1 - TEST_SHARE) * shares[cell]
                total = min(total, max(0, counts[cell] - 3) / need)
        sizes = (
            int(total * (1 - TEST_SHARE - VALIDATION_SHARE)),
            int(total * VALIDATION_SHARE),
            int(total * TEST_SHARE),
        )
        if sizes[2] < len(cells) or sizes[0] < len(cells):
            names = {(self.y.names[a], self.z.names[b]): n for (a, b), n in counts.items()}
            raise NotEnoughDataError(
                f"the cells of task and concept are too small for a split: {names}; add rows, or "
                "merge classes"
            )
        return sizes

    def split(
        self, p: float, sizes: tuple[int, int, int], seed: int, on_shortage: str = "raise"
    ) -> Split:
        """The rule of :func:`spurious_split`."""
        check_shortage(on_shortage)
        shares = self.shares(p)
        cells = self.cells()
        rng = np.random.default_rng(seed)
        pools = self._orders(cells, sizes, rng)
        notes: tuple[str, ...] = ()
        factor = self._feasible(pools, shares, sizes)
        if factor < 1:
            feasible = tuple(int(s * factor) for s in sizes)
            text = f"at p = {p:g} the cells allow sizes {feasible}, not {sizes}: " + self._shortest(
                pools, shares, sizes
            )
            if on_shortage == "raise":
                raise NotEnoughDataError(
                    f"{text}. Pass smaller sizes, or on_shortage='shrink' to make all cells "
                    "smaller alike"
                )
            sizes = (feasible[0], feasible[1], feasible[2])
            notes = (f"made smaller: {text}",)
        parts: tuple[list[Rows], list[Rows], list[Rows]] = ([], [], [])
        for cell, needs in _needs(cells, shares, sizes).items():
            test, validation, train = pools[cell]
            t, v, n = needs
            if validation is None:
                m = test
                chosen = m[t + v : t + v + n], m[t : t + v], m[:t]
            else:
                chosen = train[:n], validation[:v], test[:t]
            for part, rows in zip(parts, chosen, strict=True):
                part.append(rows)
        return self._joined(parts, p, notes)

    def weighted_split(
        self, p: float, sizes: tuple[int, int, int], seed: int, on_shortage: str = "raise"
    ) -> Split:
        """The rule of :func:`spurious_split` with ``method="weights"``."""
        check_shortage(on_shortage)
        shares, cells = self.shares(p), self.cells()
        pools = self._orders(cells, sizes, np.random.default_rng(seed))
        wanted = sizes[2] // len(cells)
        notes: tuple[str, ...] = ()
        fewest = min(cells, key=lambda cell: len(pools[cell][0]))
        per_cell = min(wanted, len(pools[fewest][0]))
        if per_cell < wanted:
            text = (
                f"the cells allow {per_cell * len(cells)} test rows, not {sizes[2]}: "
                f"cell {self._name(fewest)} has {len(pools[fewest][0])} and needs {wanted}"
            )
            if on_shortage == "raise" or not per_cell:
                raise NotEnoughDataError(f"{text}. Pass a smaller test size")
            notes = (f"made smaller: {text}",)
        parts: tuple[list[Rows], list[Rows], list[Rows]] = ([], [], [])
        for cell in cells:
            test, validation, train = pools[cell]
            if validation is None:
                test, rest = test[:per_cell], test[per_cell:]
                count = round(len(rest) * sizes[1] / (sizes[0] + sizes[1]))
                validation, train = rest[:count], rest[count:]
            if shares[cell] > 0 and not len(train):
                raise NotEnoughDataError(
                    f"cell {self._name(cell)} has no training row left beside {per_cell} test "
                    "rows, and weights make none; pass a smaller test size, or a p at which the "
                    "cell has no share"
                )
            used = slice(None) if shares[cell] > 0 else slice(0)
            chosen = train[used], validation[used], test[:per_cell]
            for part, rows in zip(parts, chosen, strict=True):
                part.append(rows)
        return self.weighted(self._joined(parts, p, notes))

    def _joined(
        self, parts: tuple[list[Rows], list[Rows], list[Rows]], p: float, notes: tuple[str, ...]
    ) -> Split:
        """A split of the rows that each cell gives."""
        train, validation, test = (np.concatenate(part) for part in parts)
        if not len(train) or not len(test):
            raise NotEnoughDataError(
                f"a split of {len(train)} training and {len(test)} test rows is none; every one "
                f"of the {len(self.cells())} cells needs at least a row of each"
            )
        missing = len(self.usable) - int(self.usable.sum())
        return Split(train, validation, test, float(p), self.aligned_class, missing, notes)

    def weighted(self, split: Split) -> Split:
        """A split with weights that give the cells of both parts their shares at its p."""
        shares = self.shares(float(split.p or 0.0))
        return replace(
            split,
            weights=self._weights(split.train, shares),
            validation_weights=self._weights(split.validation, shares),
        )

    def _weights(self, rows: Rows, shares: Mapping[Cell, float]) -> Float:
        """w = N share / n of a row's cell; N = 1 / sum share^2 / n is (sum w)^2 / sum w^2.

        Shares are taken relative to those of the cells that have rows.
        """
        weights, total = np.zeros(len(rows)), 0.0
        for (a, b), share in shares.items():
            inside = (self.y.codes[rows] == a) & (self.z.codes[rows] == b)
            count = int(inside.sum())
            if count:
                weights[inside] = share / count
                total += share
        squares = float(np.sum(weights**2))
        return weights * (total / squares) if squares else weights

    def _orders(
        self, cells: list[Cell], sizes: tuple[int, int, int], rng: Any
    ) -> dict[Cell, tuple[Any, Any, Any]]:
        """Per cell its permuted rows; with groups, one order per part."""
        orders: dict[Cell, tuple[Any, Any, Any]] = {}
        if self.groups is None:
            for a, b in cells:
                rows = np.flatnonzero((self.y.codes == a) & (self.z.codes == b))
                orders[a, b] = (rng.permutation(rows), None, None)
            return orders
        total = sum(sizes)
        shares = (sizes[2] / total, sizes[1] / total)
        pool, rank = pools_of(self.groups, np.flatnonzero(self.usable), rng, shares)
        for a, b in cells:
            rows = np.flatnonzero((self.y.codes == a) & (self.z.codes == b))
            rows = rows[np.lexsort((rows, rank[rows]))]
            of = pool[rows]
            orders[a, b] = (rows[of == 0], rows[of == 1], rows[of == 2])
        return orders

    @staticmethod
    def _feasible(
        pools: Mapping[Cell, tuple[Any, Any, Any]],
        shares: Mapping[Cell, float],
        sizes: tuple[int, int, int],
    ) -> float:
        """The largest factor on the sizes, at most 1, that every cell allows."""
        factor = 1.0
        for cell, (t, v, n) in _needs(list(pools), shares, sizes).items():
            first, second, third = pools[cell]
            pairs = (
                [(len(first), t + v + n)]
                if second is None
                else [(len(first), t), (len(second), v), (len(third), n)]
            )
            for there, need in pairs:
                if need > there:
                    # Rounding may take three rows more than the shares say.
                    factor = min(factor, max(0, there - 3) / need)
        return factor

    def _shortest(
        self,
        pools: Mapping[Cell, tuple[Any, Any, Any]],
        shares: Mapping[Cell, float],
        sizes: tuple[int, int, int],
    ) -> str:
        """The cell that lacks most rows, in words."""
        needs = _needs(list(pools), shares, sizes)
        there = {cell: sum(len(part) for part in pools[cell] if part is not None) for cell in pools}
        worst = max(needs, key=lambda cell: sum(needs[cell]) / max(1, there[cell]))
        return f"cell {self._name(worst)} has {there[worst]} rows and needs {sum(needs[worst])}"

    def _name(self, cell: Cell) -> tuple[Any, Any]:
        """Names of the classes of a cell."""
        return self.y.names[cell[0]], self.z.names[cell[1]]


def _needs(
    cells: Sequence[Cell],
    shares: Mapping[Cell, float],
    sizes: tuple[int, int, int],
) -> dict[Cell, tuple[int, int, int]]:
    """Rows of each cell for test, validation and training."""
    train, validation, test = sizes
    return {
        cell: (
            test // len(cells),
            round(validation * shares[cell]),
            round(train * shares[cell]),
        )
        for cell in cells
    }


def pools_of(
    groups: Rows, rows: Rows, rng: np.random.Generator, shares: tuple[float, float]
) -> tuple[Rows, Rows]:
    """Part (0 test, 1 validation, 2 training) and rank of the group of every row."""
    order = rng.permutation(int(groups.max(initial=-1)) + 1)
    place = np.empty(len(order) + 1, dtype=np.intp)
    place[order] = np.arange(len(order))
    place[-1] = len(order)  # rows without a group: the last, in training
    counts = np.bincount(place[groups[rows]], minlength=len(order) + 1)
    before = np.cumsum(counts) - counts
    share = before / max(1, counts.sum())
    part = np.where(share < shares[0], 0, np.where(share < shares[0] + shares[1], 1, 2))
    part[-1] = 2
    return part[place[groups]], place[groups]


def _most_associated(y: Coded, z: Coded) -> Any:
    """The class of z with the largest P(z | second class of y) - P(z | first)."""
    size = len(z.names)
    inside = (y.codes >= 0) & (z.codes >= 0)
    rates = []
    for a in (0, 1):
        counts = np.bincount(z.codes[inside & (y.codes == a)], minlength=size)
        rates.append(counts / max(1, counts.sum()))
    return z.names[int(np.argmax(rates[1] - rates[0]))]
