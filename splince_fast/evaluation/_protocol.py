"""The association protocol: cells, their shares, and the rows that each part takes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from splince_fast.evaluation._cells import Coded, coded
from splince_fast.exceptions import InputError, LabelError, NotEnoughDataError

Rows = NDArray[np.intp]

TEST_SHARE, VALIDATION_SHARE = 0.2, 0.1


@dataclass(frozen=True, slots=True, eq=False)
class Split:
    """Row numbers of three parts that share no row.

    Attributes
    ----------
    train, validation, test : ndarray of intp
        Cell after cell in lexicographic order for :func:`associated_split`.
    p : float or None
        Association of the training and validation rows; None for the natural split.
    tied : object
        The class of the concept that is tied to the second class of the task, or a mapping.
    missing : int
        Rows left out because a label is missing.
    notes : tuple of str
        What was adjusted.
    """

    train: Rows
    validation: Rows
    test: Rows
    p: float | None
    tied: Any
    missing: int
    notes: tuple[str, ...]

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Rows for training, validation and test."""
        return len(self.train), len(self.validation), len(self.test)


def check_p(p: Any) -> None:
    """Refuse an association that is no number in [0, 1]."""
    if isinstance(p, bool) or not isinstance(p, int | float | np.floating) or not 0 <= p <= 1:
        raise InputError(
            f"the association p is {p!r}; it is a probability P(z = tied | y = 1) in [0, 1]: .5 "
            "is none, 1 complete"
        )


def check_sizes(sizes: Any) -> tuple[int, int, int]:
    """Three non-negative integers, those of training and test positive."""
    whole = isinstance(sizes, Sequence) and len(sizes) == 3
    if not whole or not all(isinstance(s, int | np.integer) and s >= 0 for s in sizes):
        raise InputError(f"sizes is {sizes!r}; pass (training, validation, test) numbers of rows")
    if sizes[0] < 1 or sizes[2] < 1:
        raise InputError(f"sizes is {sizes!r}; training and test need at least one row")
    return int(sizes[0]), int(sizes[1]), int(sizes[2])


@dataclass(frozen=True, slots=True, eq=False)
class Protocol:
    """Cells of task and concept, and who is tied to whom."""

    y: Coded
    z: Coded
    tied: Any
    groups: Rows | None

    @classmethod
    def of(cls, y: Coded, z: Coded, tied: Any, groups: Any) -> Protocol:
        """Check the labels.

        Raises
        ------
        LabelError
            One class only, a class that is not there, or a task of more than two without a map.
        """
        for name, column in (("task", y), ("concept", z)):
            seen = len(np.unique(column.codes[column.codes >= 0]))
            if seen < 2:
                raise LabelError(
                    f"the {name} has {seen} class(es) among its rows; at least two are needed"
                )
        codes = None if groups is None else coded(groups, "groups", len(y.codes)).codes
        if isinstance(tied, Mapping):
            for a, b in tied.items():
                if a not in y.names or b not in z.names:
                    raise LabelError(
                        f"tied maps {a!r} to {b!r}; the task has {y.names[:20]}, the concept "
                        f"{z.names[:20]}"
                    )
            if len(tied) < 2:
                raise LabelError("tied must map at least two classes of the task")
            return cls(y, z, dict(tied), codes)
        if len(y.names) > 2:
            raise LabelError(
                f"the task has {len(y.names)} classes; say which class of the concept each is "
                "tied to: tied={'nurse': 'female', ...}, or leave association=None"
            )
        if tied is None:
            tied = _most_associated(y, z)
        elif tied not in z.names:
            raise LabelError(f"tied is {tied!r}; the concept has the classes {z.names[:20]}")
        return cls(y, z, tied, codes)

    def shares(self, p: float) -> dict[tuple[int, int], float]:
        """Share of each cell (codes of y, z) in training and validation rows."""
        K = len(self.z.names)
        shares = {}
        if isinstance(self.tied, dict):
            C = len(self.tied)
            for a, name in enumerate(self.y.names):
                if name not in self.tied:
                    continue
                own = self.z.names.index(self.tied[name])
                for b in range(K):
                    shares[a, b] = p / C if b == own else (1 - p) / C / (K - 1)
            return shares
        own = self.z.names.index(self.tied)
        for a in (0, 1):
            for b in range(K):
                together = p / 2 if a == 1 else (1 - p) / 2
                apart = (0.5 - together) / (K - 1)
                shares[a, b] = together if b == own else apart
        return shares

    def cells(self) -> list[tuple[int, int]]:
        """Cells of the protocol in lexicographic order."""
        return sorted(self.shares(0.5))

    @property
    def usable(self) -> NDArray[np.bool_]:
        """Rows with both labels."""
        return np.asarray((self.y.codes >= 0) & (self.z.codes >= 0))

    def counts(self) -> dict[tuple[int, int], int]:
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
        """The rule of :func:`associated_split`."""
        if on_shortage not in ("raise", "shrink"):
            raise InputError(f"on_shortage is {on_shortage!r}; choose 'raise' or 'shrink'")
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
        joined = [np.concatenate(part) for part in parts]
        missing = len(self.usable) - int(self.usable.sum())
        return Split(joined[0], joined[1], joined[2], float(p), self.tied, missing, notes)

    def _orders(
        self, cells: list[tuple[int, int]], sizes: tuple[int, int, int], rng: Any
    ) -> dict[tuple[int, int], tuple[Any, Any, Any]]:
        """Per cell its permuted rows; with groups, one order per part."""
        orders: dict[tuple[int, int], tuple[Any, Any, Any]] = {}
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
        pools: Mapping[tuple[int, int], tuple[Any, Any, Any]],
        shares: Mapping[tuple[int, int], float],
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
        pools: Mapping[tuple[int, int], tuple[Any, Any, Any]],
        shares: Mapping[tuple[int, int], float],
        sizes: tuple[int, int, int],
    ) -> str:
        """The cell that lacks most rows, in words."""
        needs = _needs(list(pools), shares, sizes)
        there = {cell: sum(len(part) for part in pools[cell] if part is not None) for cell in pools}
        worst = max(needs, key=lambda cell: sum(needs[cell]) / max(1, there[cell]))
        names = self.y.names[worst[0]], self.z.names[worst[1]]
        return f"cell {names} has {there[worst]} rows and needs {sum(needs[worst])}"


def _needs(
    cells: Sequence[tuple[int, int]],
    shares: Mapping[tuple[int, int], float],
    sizes: tuple[int, int, int],
) -> dict[tuple[int, int], tuple[int, int, int]]:
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
