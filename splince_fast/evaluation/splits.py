"""Splits: the association protocol, whose rule is documented to the row, and the natural split."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from splince_fast._solve.options import is_integer, is_number
from splince_fast.evaluation._cells import check_classes, class_codes
from splince_fast.exceptions import InputError, LabelError, NotEnoughDataError
from splince_fast.labels import ClassCodes, ClassName
from splince_fast.labels.positions import check_index
from splince_fast.moments.parameters import check_random_state

Rows = NDArray[np.intp]
Float = NDArray[np.float64]
Cell = tuple[int, int]  # codes of task and concept
Sizes = tuple[int, int, int]
RowParts = tuple[Rows, Rows, Rows]

TEST_FRACTION, VALIDATION_FRACTION = 0.2, 0.1
METHODS = ("subsample", "weights")


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
        Of the training and validation rows with ``method="weights"``: constant in a cell, and
        adding up to (sum w)^2 / sum w^2, the effective number of rows. None for equal weights.
    """

    train: Rows
    validation: Rows
    test: Rows
    p: float | None
    aligned_class: object
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
    """The association protocol of two columns: its cells, and the classes that are aligned."""

    y: ClassCodes
    z: ClassCodes
    aligned_class: object
    groups: Rows | None

    @classmethod
    def of(cls, y: ClassCodes, z: ClassCodes, aligned_class: object, groups: object) -> Protocol:
        """Check the labels.

        Raises
        ------
        LabelError
            One class only, an unknown class, or a task of more than two classes without a mapping.
        """
        for name, column in (("task", y), ("concept", z)):
            check_classes(name, column)
        codes = None if groups is None else class_codes(groups, "groups", len(y)).codes
        if isinstance(aligned_class, Mapping):
            for a, b in aligned_class.items():
                if a not in y.classes or b not in z.classes:
                    raise LabelError(
                        f"aligned_class maps {a!r} to {b!r}; the task has {y.classes[:20]}, the "
                        f"concept {z.classes[:20]}"
                    )
            if len(aligned_class) < 2:
                raise LabelError("aligned_class must map at least two classes of the task")
            return cls(y, z, dict(aligned_class), codes)
        if len(y.classes) > 2:
            raise LabelError(
                f"the task has {len(y.classes)} classes; say which class of the concept each is "
                "aligned with: aligned_class={'nurse': 'female', ...}, or leave association=None"
            )
        if aligned_class is None:
            aligned_class = _most_associated(y, z)
        elif aligned_class not in z.classes:
            raise LabelError(
                f"aligned_class is {aligned_class!r}; the concept has the classes {z.classes[:20]}"
            )
        return cls(y, z, aligned_class, codes)

    def fractions(self, p: float) -> dict[Cell, float]:
        """Fraction of each cell (codes of y, z) among training and validation rows."""
        K = len(self.z.classes)
        fractions = {}
        if isinstance(self.aligned_class, dict):
            C = len(self.aligned_class)
            for a, name in enumerate(self.y.classes):
                if name not in self.aligned_class:
                    continue
                own = self.z.classes.index(self.aligned_class[name])
                for b in range(K):
                    fractions[a, b] = p / C if b == own else (1 - p) / C / (K - 1)
            return fractions
        own = self.z.classes.index(self.aligned_class)
        for a, aligned in ((0, (1 - p) / 2), (1, p / 2)):
            for b in range(K):
                fractions[a, b] = aligned if b == own else (0.5 - aligned) / (K - 1)
        return fractions

    def cells(self) -> list[Cell]:
        """Cells of the protocol in lexicographic order."""
        return sorted(self.fractions(0.5))

    @property
    def usable(self) -> NDArray[np.bool_]:
        """Rows with both labels."""
        return np.asarray((self.y.codes >= 0) & (self.z.codes >= 0))

    def _inside(self, cell: Cell, rows: Rows | slice = slice(None)) -> NDArray[np.bool_]:
        """Mask of the given rows, all by default, that are in a cell."""
        a, b = cell
        return np.asarray((self.y.codes[rows] == a) & (self.z.codes[rows] == b))

    def largest_sizes(self, levels: Sequence[float]) -> Sizes:
        """Largest sizes of the parts (70, 10, 20 %) that the cells allow at all levels."""
        counts = {cell: int(self._inside(cell).sum()) for cell in self.cells()}
        total = math.inf
        for p in levels:
            for cell, fraction in self.fractions(p).items():
                need = TEST_FRACTION / len(counts) + (1 - TEST_FRACTION) * fraction
                total = min(total, max(0, counts[cell] - 3) / need)
        sizes = (
            int(total * (1 - TEST_FRACTION - VALIDATION_FRACTION)),
            int(total * VALIDATION_FRACTION),
            int(total * TEST_FRACTION),
        )
        if sizes[2] < len(counts) or sizes[0] < len(counts):
            raise NotEnoughDataError(
                "the cells of task and concept are too small for a split: "
                f"{ {self._name(cell): n for cell, n in counts.items()} }; add rows, or merge "
                "classes"
            )
        return sizes

    def split(
        self,
        p: float,
        sizes: Sizes,
        random_state: int,
        *,
        method: str = "subsample",
        on_shortage: str = "raise",
    ) -> Split:
        """The split that :func:`spurious_split` documents."""
        if on_shortage not in ("raise", "shrink"):
            raise InputError(f"on_shortage is {on_shortage!r}; choose 'raise' or 'shrink'")
        pools = self._pools(sizes, np.random.default_rng(random_state))
        if method == "weights":
            return self.weighted(self._all_rows(p, sizes, pools, on_shortage))
        return self._subsample(p, sizes, pools, on_shortage)

    def _subsample(
        self, p: float, sizes: Sizes, pools: Mapping[Cell, Pool], on_shortage: str
    ) -> Split:
        """A split in which cells lose rows until they have their fractions."""
        needs = self._needs(p, sizes)
        notes: tuple[str, ...] = ()
        factor = min(pools[cell].feasible(need) for cell, need in needs.items())
        if factor < 1:
            train, validation, test = (int(s * factor) for s in sizes)
            cell = max(needs, key=lambda c: sum(needs[c]) / max(1, pools[c].n_rows))
            text = (
                f"at p = {p:g} the cells allow sizes {(train, validation, test)}, not {sizes}: "
                f"cell {self._name(cell)} has {pools[cell].n_rows} rows and needs "
                f"{sum(needs[cell])}"
            )
            if on_shortage == "raise":
                raise NotEnoughDataError(
                    f"{text}. Pass smaller sizes, or on_shortage='shrink' to make all cells "
                    "smaller alike"
                )
            needs = self._needs(p, (train, validation, test))
            notes = (f"made smaller: {text}",)
        return self._joined([pools[cell].take(need) for cell, need in needs.items()], p, notes)

    def _all_rows(
        self, p: float, sizes: Sizes, pools: Mapping[Cell, Pool], on_shortage: str
    ) -> Split:
        """A split in which every row that is not a test row is a training or validation row."""
        fractions, cells = self.fractions(p), self.cells()
        need = sizes[2] // len(cells)
        notes: tuple[str, ...] = ()
        smallest = min(cells, key=lambda cell: len(pools[cell].orders[0]))
        available = len(pools[smallest].orders[0])
        n_test = min(need, available)
        if n_test < need:
            text = (
                f"the cells allow {n_test * len(cells)} test rows, not {sizes[2]}: "
                f"cell {self._name(smallest)} has {available} and needs {need}"
            )
            if on_shortage == "raise" or not n_test:
                raise NotEnoughDataError(f"{text}. Pass a smaller test size")
            notes = (f"made smaller: {text}",)
        parts = []
        for cell in cells:
            train, validation, test = pools[cell].take_all(n_test, sizes)
            if fractions[cell] == 0:
                train = validation = train[:0]
            elif not len(train):
                raise NotEnoughDataError(
                    f"cell {self._name(cell)} has no training row left beside {n_test} test "
                    "rows, and weights make none; pass a smaller test size, or a p at which the "
                    "fraction of the cell is 0"
                )
            parts.append((train, validation, test))
        return self._joined(parts, p, notes)

    def _joined(self, parts: list[RowParts], p: float, notes: tuple[str, ...]) -> Split:
        """A split of the rows taken from each cell."""
        train, validation, test = map(np.concatenate, zip(*parts, strict=True))
        if not len(train) or not len(test):
            raise NotEnoughDataError(
                f"a split of {len(train)} training and {len(test)} test rows is none; every one "
                f"of the {len(self.cells())} cells needs at least a row of each"
            )
        missing = len(self.usable) - int(self.usable.sum())
        return Split(train, validation, test, float(p), self.aligned_class, missing, notes)

    def weighted(self, split: Split) -> Split:
        """The split with weights that give the cells of both parts their fractions at its p."""
        fractions = self.fractions(float(split.p or 0.0))
        return replace(
            split,
            weights=self._weights(split.train, fractions),
            validation_weights=self._weights(split.validation, fractions),
        )

    def _weights(self, rows: Rows, fractions: Mapping[Cell, float]) -> Float:
        """w = N fraction / n for a row of a cell of n rows; N = (sum w)^2 / sum w^2.

        Fractions are relative to the sum over cells that have rows.
        """
        weights, total = np.zeros(len(rows)), 0.0
        for cell, fraction in fractions.items():
            inside = self._inside(cell, rows)
            if count := int(inside.sum()):
                weights[inside] = fraction / count
                total += fraction
        squares = float(np.sum(weights**2))
        return weights * (total / squares) if squares else weights

    def _pools(self, sizes: Sizes, rng: np.random.Generator) -> dict[Cell, Pool]:
        """Permuted rows of each cell; with groups, one order per part."""
        rows_of = {cell: np.flatnonzero(self._inside(cell)) for cell in self.cells()}
        if self.groups is None:
            return {cell: Pool((rng.permutation(rows),)) for cell, rows in rows_of.items()}
        total = sum(sizes)
        fractions = (sizes[2] / total, sizes[1] / total)
        part, rank = parts_of_groups(self.groups, np.flatnonzero(self.usable), rng, fractions)
        pools = {}
        for cell, rows in rows_of.items():
            ordered = rows[np.lexsort((rows, rank[rows]))]
            pools[cell] = Pool(tuple(ordered[part[ordered] == k] for k in range(3)))
        return pools

    def _needs(self, p: float, sizes: Sizes) -> dict[Cell, Sizes]:
        """Numbers of test, validation and training rows of each cell, at a level."""
        train, validation, test = sizes
        fractions, cells = self.fractions(p), self.cells()
        return {
            c: (test // len(cells), round(validation * fractions[c]), round(train * fractions[c]))
            for c in cells
        }

    def _name(self, cell: Cell) -> tuple[ClassName, ClassName]:
        """Names of the classes of a cell."""
        return self.y.classes[cell[0]], self.z.classes[cell[1]]


class Pool(NamedTuple):
    """Permuted rows of a cell.

    `orders` holds one order, from which test, validation and training rows are taken in turn; with
    groups one order for each of these parts.
    """

    orders: tuple[Rows, ...]

    @property
    def n_rows(self) -> int:
        """Rows of the cell."""
        return sum(map(len, self.orders))

    def feasible(self, needs: Sizes) -> float:
        """Largest factor, at most 1, at which the scaled needs fit the rows of the cell."""
        counts = needs if len(self.orders) > 1 else (sum(needs),)
        # The rounded needs of a cell may exceed its fractions by three rows.
        factors = (
            max(0, len(rows) - 3) / need
            for rows, need in zip(self.orders, counts, strict=True) if need > len(rows)
        )  # fmt: skip
        return min(factors, default=1.0)

    def take(self, needs: Sizes) -> RowParts:
        """Training, validation and test rows; `needs` are (test, validation, training) numbers."""
        t, v, n = needs
        if len(self.orders) == 1:
            (m,) = self.orders
            return m[t + v : t + v + n], m[t : t + v], m[:t]
        test, validation, train = self.orders
        return train[:n], validation[:v], test[:t]

    def take_all(self, n_test: int, sizes: Sizes) -> RowParts:
        """Training, validation and test rows: n_test test rows, the rest in the ratio of sizes."""
        if len(self.orders) > 1:
            test, validation, train = self.orders
            return train, validation, test[:n_test]
        test, rest = np.split(self.orders[0], [n_test])
        count = round(len(rest) * sizes[1] / (sizes[0] + sizes[1]))
        return rest[count:], rest[:count], test


def parts_of_groups(
    groups: Rows, rows: Rows, rng: np.random.Generator, fractions: tuple[float, float]
) -> tuple[Rows, Rows]:
    """Part (0 test, 1 validation, 2 training) of each row's group, and its place in random order.

    `fractions` are those of test and validation rows among the given rows.
    """
    order = rng.permutation(int(groups.max(initial=-1)) + 1)
    place = np.empty(len(order) + 1, dtype=np.intp)
    place[order] = np.arange(len(order))
    place[-1] = len(order)  # rows without a group come last, in training
    counts = np.bincount(place[groups[rows]], minlength=len(order) + 1)
    before = (np.cumsum(counts) - counts) / max(1, counts.sum())
    first, second = fractions
    part = np.where(before < first, 0, np.where(before < first + second, 1, 2))
    part[-1] = 2
    return part[place[groups]], place[groups]


def _most_associated(y: ClassCodes, z: ClassCodes) -> ClassName:
    """The class of z with the largest P(z | second class of y) - P(z | first)."""
    size = len(z.classes)
    inside = (y.codes >= 0) & (z.codes >= 0)
    rates = []
    for a in (0, 1):
        counts = np.bincount(z.codes[inside & (y.codes == a)], minlength=size)
        rates.append(counts / max(1, counts.sum()))
    return z.classes[int(np.argmax(rates[1] - rates[0]))]


def check_p(p: object) -> None:
    """Raise InputError for an association that is no number in [0, 1]."""
    if not is_number(p) or not 0 <= p <= 1:
        raise InputError(
            f"the association p is {p!r}; it is a probability P(z = aligned_class | y = 1) in [0, "
            "1]: .5 is none, 1 complete"
        )


def check_sizes(sizes: object) -> Sizes:
    """Numbers of training, validation and test rows; the first and the last are positive."""
    if not (
        isinstance(sizes, Sequence)
        and len(sizes) == 3
        and all(is_integer(s) and s >= 0 for s in sizes)
    ):
        raise InputError(f"sizes is {sizes!r}; pass (training, validation, test) numbers of rows")
    if sizes[0] < 1 or sizes[2] < 1:
        raise InputError(f"sizes is {sizes!r}; training and test need at least one row")
    return int(sizes[0]), int(sizes[1]), int(sizes[2])


def check_method(method: object, name: str = "method") -> None:
    """Raise InputError for an unknown method to reach an association."""
    if method not in METHODS:
        raise InputError(
            f"{name} is {method!r}; choose 'subsample' (cells lose rows) or 'weights' "
            "(cells are weighted)"
        )


def spurious_split(
    task: object,
    concept: object,
    *,
    p: float,
    sizes: tuple[int, int, int] | None = None,
    random_state: int = 0,
    aligned_class: object = None,
    groups: object = None,
    on_shortage: str = "raise",
    method: str = "subsample",
) -> Split:
    """Draw training and validation rows with a given association, and decorrelated test rows.

    With two classes of the task and a the aligned class, p = P(z = a | y = 1) = P(z != a | y = 0)
    and the task balanced: the cells (1, a), (0, a) have fractions p / 2 and (1 - p) / 2, the other
    K - 1 classes divide (1 - p) / 2 of y = 1 and p / 2 of y = 0 equally. With a mapping a of C
    classes of the task to classes of the concept, (y, a[y]) has the fraction p / C and the others
    divide (1 - p) / C equally.

    *The rule, by which figures are reproducible to the row*: ``rng = default_rng(random_state)``;
    for the cells in lexicographic order (y, z), ``m = rng.permutation(rows of the cell)``; the
    first ``n_test // n_cells`` of m are test rows, the next ``round(n_validation * fraction)``
    validation rows, the next ``round(n_train * fraction)`` training rows. The test rows are the
    same at every p.

    *With* ``method="weights"`` *no training row is dropped*: the test rows are those of the
    rule; of the r other rows of a cell, the first ``round(r n_validation / (n_validation +
    n_train))`` are validation rows and the rest training rows, and in either part the n_g rows
    of cell g have the weight w_g = N fraction_g / n_g each, with N = 1 / sum_g fraction_g^2 / n_g.
    The weights have the fractions of the cells, and add up to N = (sum w)^2 / sum w^2, Kish's
    effective number of rows. A cell of fraction 0, as at p = 1, has test rows alone.

    Parameters
    ----------
    task, concept : column of shape (n,)
        Classes; rows that lack one of them are left out.
    p : float
        In [0, 1].
    sizes : tuple of three int, optional
        Rows for training, validation and test; the default is the largest that the cells allow
        at 70, 10 and 20 %.
    random_state : int
        Of the permutations.
    aligned_class : class, or mapping of task class to concept class, optional
        The default is the class of the concept that is most frequent, relative to the other
        class of the task, among rows of the second one.
    groups : column of shape (n,), optional
        Rows of one group (a person, a document) stay in one part: ``rng`` permutes the groups
        first, and they are assigned to test, validation and training by the ratio of the sizes.
    on_shortage : {"raise", "shrink"}
        Where a cell has too few rows: an error, or all cells alike are made smaller.
    method : {"subsample", "weights"}
        How training and validation rows reach p: cells lose rows, or all rows stay and cells are
        weighted. Of `sizes`, "weights" takes the test rows and the ratio of the others.

    Returns
    -------
    Split
        Row numbers, and adjustments; with ``method="weights"`` the weights of training and
        validation rows.

    Raises
    ------
    InputError
        A parameter out of range.
    LabelError
        A task or concept with one class, or with quantities; a class that is not there; a column
        with the pandas index of `task` in another order.
    NotEnoughDataError
        A cell has too few rows; the text names the largest feasible size.

    Examples
    --------
    >>> import numpy as np
    >>> from splince_fast.evaluation import spurious_split
    >>> rng = np.random.default_rng(0)
    >>> y, z = rng.integers(0, 2, 1000), rng.integers(0, 2, 1000)
    >>> split = spurious_split(y, z, p=0.9, sizes=(200, 40, 100), random_state=0, aligned_class=1)
    >>> split.sizes
    (200, 40, 100)
    >>> float(np.mean(z[split.train][y[split.train] == 1] == 1))
    0.9
    >>> whole = spurious_split(y, z, p=0.9, sizes=(200, 40, 100), aligned_class=1, method="weights")
    >>> whole.sizes, round(whole.weights.sum())
    ((750, 150, 100), 437)
    >>> same = whole.weights * (z[whole.train] == y[whole.train])
    >>> round(float(same.sum() / whole.weights.sum()), 6)
    0.9
    """
    check_p(p)
    check_method(method)
    check_random_state(random_state)
    check_index(task, concept, "concept", of="task")
    check_index(task, groups, "groups", of="task")
    y = class_codes(task, "task")
    protocol = Protocol.of(y, class_codes(concept, "concept", len(y)), aligned_class, groups)
    sizes = protocol.largest_sizes([p]) if sizes is None else check_sizes(sizes)
    return protocol.split(p, sizes, random_state, method=method, on_shortage=on_shortage)


def natural_split(
    usable: NDArray[np.bool_], *, random_state: int, groups: Rows | None = None
) -> Split:
    """The split without a protocol, of the n rows that are usable.

    ``r = default_rng(random_state).permutation(usable rows)``; test = the first n // 4, validation
    the next n // 10, training the rest. With codes of groups the permutation is over groups.
    """
    rows = np.flatnonzero(usable)
    rng = np.random.default_rng(random_state)
    if groups is None:
        order = rng.permutation(rows)
        test, rest = order[: len(rows) // 4], order[len(rows) // 4 :]
        validation, train = rest[: len(rows) // 10], rest[len(rows) // 10 :]
    else:
        part, rank = parts_of_groups(groups, rows, rng, (0.25, 0.1))
        order = rows[np.lexsort((rows, rank[rows]))]
        test, validation, train = (order[part[order] == k] for k in range(3))
    return Split(train, validation, test, None, None, len(usable) - len(rows), ())
