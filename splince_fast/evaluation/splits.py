"""Splits into training, validation and test rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from splince_fast._solve.options import is_integer, is_number
from splince_fast.evaluation.data import Rows, class_codes, occurring_classes
from splince_fast.exceptions import InputError, LabelError, NotEnoughDataError
from splince_fast.labels import ClassCodes, ClassName
from splince_fast.labels.containers import check_index
from splince_fast.moments.parameters import check_random_state

Cell = tuple[int, int]  # code of a class of the task, code of a class of the concept
Sizes = tuple[int, int, int]
# Permuted row numbers of a cell: one permutation, from which test, validation and training rows are
# taken in this order; with groups, three: of the rows in test, validation and training groups.
Pool = tuple[Rows, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Split:
    """Row numbers of three disjoint parts."""

    train: Rows  # for `spurious_split`, cell by cell in lexicographic order
    validation: Rows
    test: Rows
    # Class of the concept that is aligned with the second class of the task, or a mapping from
    # classes of the task to classes of the concept.
    aligned_class: object  # None for the natural split
    notes: tuple[str, ...]  # on smaller sizes, and on an aligned class that chance may have chosen

    def __post_init__(self) -> None:
        if not len(self.train) or not len(self.test):
            raise NotEnoughDataError(
                f"the split has {len(self.train)} training and {len(self.test)} test rows, and "
                "needs both; check sizes=, test= and groups= (all rows of a group, and all rows "
                "without a group, are in one part)"
            )

    @property
    def sizes(self) -> Sizes:
        """Numbers of training, validation and test rows."""
        return len(self.train), len(self.validation), len(self.test)


@dataclass(frozen=True, slots=True, eq=False)
class Protocol:
    """Association protocol for the task `y` and the concept `z`, see :func:`spurious_split`."""

    y: ClassCodes
    z: ClassCodes
    aligned_class: object  # as in `Split`
    groups: Rows | None  # codes (n,) of groups
    notes: tuple[str, ...] = ()

    @classmethod
    def of(cls, y: ClassCodes, z: ClassCodes, aligned_class: Any, groups: object) -> Protocol:
        """Validate the labels and the aligned class (None: the most associated class)."""
        for name, column in (("task", y), ("concept", z)):
            occurring_classes(name, column)
        codes = None if groups is None else class_codes(groups, "groups", len(y), of="task").codes
        is_mapping = isinstance(aligned_class, Mapping)
        notes: tuple[str, ...] = ()
        if len(y.classes) > 2 and not is_mapping:
            raise LabelError(
                f"the task has {len(y.classes)} classes; pass the aligned class of the concept for "
                "each of them, as aligned_class={'nurse': 'female', ...}"
            )
        if aligned_class is None:
            aligned_class, notes = _most_associated(y, z)
        pairs: Any = aligned_class.items() if is_mapping else [(y.classes[1], aligned_class)]
        if len(pairs) < 1 + is_mapping or any(
            a not in y.classes or b not in z.classes for a, b in pairs
        ):
            raise LabelError(
                f"aligned_class is {aligned_class!r}; pass a class of the concept, or map at least "
                f"two classes of the task to one each: the task has {y.classes[:20]}, the concept "
                f"{z.classes[:20]}"
            )
        return cls(y, z, dict(pairs) if is_mapping else aligned_class, codes, notes)

    def fractions(self, p: float) -> dict[Cell, float]:
        """Fraction of each cell, in lexicographic order, in the training and validation rows."""
        if isinstance(self.aligned_class, dict):
            aligned = {a: (p, self.aligned_class[a]) for a in self.aligned_class}
        else:
            first, second = self.y.classes
            aligned = {first: (1 - p, self.aligned_class), second: (p, self.aligned_class)}
        fractions = {}
        for a, name in enumerate(self.y.classes):
            for b, other in enumerate(self.z.classes):
                if name in aligned:
                    share, target = aligned[name]
                    rest = (1 - share) / len(aligned) / (len(self.z.classes) - 1)
                    fractions[a, b] = share / len(aligned) if other == target else rest
        return fractions

    @property
    def usable(self) -> NDArray[np.bool_]:
        """Mask (n,) of the rows with both labels."""
        return np.asarray((self.y.codes >= 0) & (self.z.codes >= 0))

    def _rows_of_cells(self) -> dict[Cell, Rows]:
        """Row numbers of each cell of the protocol."""
        return {
            (a, b): np.flatnonzero((self.y.codes == a) & (self.z.codes == b))
            for a, b in self.fractions(0.5)
        }

    def largest_sizes(self, levels: Sequence[float]) -> Sizes:
        """Largest sizes, 70:10:20, that are feasible at all levels; groups are not considered."""
        counts = {cell: len(rows) for cell, rows in self._rows_of_cells().items()}
        total = min(
            max(0, counts[cell] - 3) / (0.2 / len(counts) + 0.8 * fraction)
            for p in levels for cell, fraction in self.fractions(p).items()
        )  # fmt: skip
        train, validation, test = (int(total * fraction) for fraction in (1 - 0.2 - 0.1, 0.1, 0.2))
        if min(train, test) < len(counts):
            raise NotEnoughDataError(
                "the cells of task and concept are too small for a split: "
                f"{ {self._class_names(cell): n for cell, n in counts.items()} }; add rows, or "
                "merge classes"
            )
        return train, validation, test

    def split(self, p: float, sizes: Sizes, random_state: int) -> Split:
        """Split as documented in :func:`spurious_split`; with groups, sizes may be reduced."""
        pools = self._pools(sizes, np.random.default_rng(random_state))
        required = self._required_rows(p, sizes)
        notes = self.notes
        factor = min(_feasible_factor(pools[cell], counts) for cell, counts in required.items())
        if factor < 1:
            smaller = (int(sizes[0] * factor), int(sizes[1] * factor), int(sizes[2] * factor))
            n_rows = {cell: sum(map(len, pool)) for cell, pool in pools.items()}
            cell = max(required, key=lambda c: sum(required[c]) / max(1, n_rows[c]))
            text = (
                f"at p = {p:g} the cells allow sizes {smaller}, not {sizes}: cell "
                f"{self._class_names(cell)} has {n_rows[cell]} rows and needs {sum(required[cell])}"
            )
            if self.groups is None:
                raise NotEnoughDataError(f"{text}. Pass smaller sizes")
            required = self._required_rows(p, smaller)
            notes = (*notes, f"sizes reduced: {text}")
        parts = [_take(pools[cell], counts) for cell, counts in required.items()]
        test, validation, train = map(np.concatenate, zip(*parts, strict=True))
        return Split(train, validation, test, self.aligned_class, notes)

    def _pools(self, sizes: Sizes, rng: np.random.Generator) -> dict[Cell, Pool]:
        """Return the permuted rows of each cell; with groups, one array for each part."""
        rows_of = self._rows_of_cells()
        if self.groups is None:
            return {cell: (rng.permutation(rows),) for cell, rows in rows_of.items()}
        total = sum(sizes)
        fractions = (sizes[2] / total, sizes[1] / total)
        part, rank = parts_of_groups(self.groups, np.flatnonzero(self.usable), rng, fractions)
        ordered = {cell: rows[np.lexsort((rows, rank[rows]))] for cell, rows in rows_of.items()}
        return {
            cell: tuple(rows[part[rows] == k] for k in range(3)) for cell, rows in ordered.items()
        }

    def _required_rows(self, p: float, sizes: Sizes) -> dict[Cell, Sizes]:
        """Return the required numbers of test, validation and training rows of each cell at p."""
        train, validation, test = sizes
        fractions = self.fractions(p)
        return {
            cell: (test // len(fractions), round(validation * f), round(train * f))
            for cell, f in fractions.items()
        }

    def _class_names(self, cell: Cell) -> tuple[ClassName, ClassName]:
        return self.y.classes[cell[0]], self.z.classes[cell[1]]


def _feasible_factor(pool: Pool, required: Sizes) -> float:
    """Return a factor f such that a cell has f times the required rows; 1 if it has all."""
    counts = required if len(pool) > 1 else (sum(required),)
    # Rounding may raise the numbers of test, validation and training rows by one row each.
    pairs = zip(map(len, pool), counts, strict=True)
    return min((max(0, n - 3) / count for n, count in pairs if count > n), default=1.0)


def _take(pool: Pool, required: Sizes) -> list[Rows]:
    """Take test, validation and training rows, as many as `_required_rows` returns."""
    parts = pool if len(pool) > 1 else np.split(pool[0], np.cumsum(required)[:2])
    return [rows[:n] for rows, n in zip(parts, required, strict=True)]


def parts_of_groups(
    groups: Rows, rows: Rows, rng: np.random.Generator, fractions: tuple[float, float]
) -> tuple[Rows, Rows]:
    """Divide groups at random; return 0 (test), 1 or 2 (train) and the group's rank by row."""
    # Rows without a group (code -1) are training rows.
    order = rng.permutation(int(groups.max(initial=-1)) + 1)
    rank = np.empty(len(order) + 1, dtype=np.intp)
    rank[order] = np.arange(len(order))
    rank[-1] = len(order)  # for rows without a group (code -1)
    counts = np.bincount(rank[groups[rows]], minlength=len(order) + 1)
    preceding = (np.cumsum(counts) - counts) / max(1, counts.sum())
    test, validation = fractions
    part = np.where(preceding < test, 0, np.where(preceding < test + validation, 1, 2))
    part[-1] = 2
    return part[rank[groups]], rank[groups]


def _most_associated(y: ClassCodes, z: ClassCodes) -> tuple[ClassName, tuple[str, ...]]:
    """Return the class of z with the largest P(z | y = 1) - P(z | y = 0), and a note on chance."""
    labelled = (y.codes >= 0) & (z.codes >= 0)
    table = np.zeros((2, len(z.classes)))
    np.add.at(table, (y.codes[labelled], z.codes[labelled]), 1)
    n = np.maximum(1, table.sum(axis=1, keepdims=True))
    rates = table / n
    differences = rates[1] - rates[0]
    errors = np.sqrt(np.sum(rates * (1 - rates) / n, axis=0))
    best = int(np.argmax(differences))
    name = z.classes[best]
    if differences[best] > 2 * errors[best]:
        return name, ()
    return name, (
        f"chance may have chosen the aligned class {name!r}: its association with the task is "
        f"{differences[best]:.3f}, within two standard errors ({errors[best]:.3f} each) of none; "
        "pass aligned_class=",
    )


def check_p(p: object) -> None:
    """Raise InputError unless an association is a number in [0, 1]."""
    if not is_number(p) or not 0 <= p <= 1:
        raise InputError(
            f"the association p is {p!r}; it must be a probability in [0, 1], where .5 is no "
            "association of two classes, and 1 is complete"
        )


def check_sizes(sizes: Any) -> Sizes:
    """Validate (training, validation, test) sizes; only the validation size may be 0."""
    is_triple = isinstance(sizes, Sequence) and len(sizes) == 3 and all(map(is_integer, sizes))
    if not is_triple or sizes[0] < 1 or sizes[1] < 0 or sizes[2] < 1:
        raise InputError(
            f"sizes is {sizes!r}; pass (training, validation, test) numbers of rows, with at least "
            "one training and one test row"
        )
    return int(sizes[0]), int(sizes[1]), int(sizes[2])


def spurious_split(
    task: object,
    concept: object,
    *,
    p: float,
    sizes: tuple[int, int, int] | None = None,
    random_state: int = 0,
    aligned_class: object = None,
) -> Split:
    """Draw training and validation rows with a given association, and decorrelated test rows.

    All cells, pairs (y, z) of classes of task and concept, have the same number of test rows. For a
    mapping a from C classes of the task to classes of the concept, the cell (y, a[y]) has the
    fraction p / C of the training and of the validation rows, and the other cells of y divide
    (1 - p) / C equally. For a task of two classes (y = 0, 1) and one aligned class a,
    p = P(z = a | y = 1) = P(z != a | y = 0): C = 2, with 1 - p instead of p for y = 0.

    *Rule*: ``rng = default_rng(random_state)``; for each cell, in lexicographic order of (y, z),
    ``m = rng.permutation(rows of the cell)``. The first ``n_test // n_cells`` entries of m are test
    rows, the next ``round(n_validation * fraction)`` are validation rows, and the next
    ``round(n_train * fraction)`` are training rows. The test rows are the same at every p.

    Parameters
    ----------
    task, concept : column of shape (n,)
        Classes; rows that lack one of the labels are left out.
    p : float
        Association, in [0, 1].
    sizes : tuple of three int, optional
        Numbers of training, validation and test rows. The default is the largest sizes, in the
        ratio 70:10:20, for which every cell has enough rows.
    random_state : int
        Seed of the permutations.
    aligned_class : class, or mapping of task class to concept class, optional
        Class of the concept that is aligned with the second class of the task, or the mapping a;
        by default the class z with the largest P(z | second class) - P(z | first class).

    Returns
    -------
    Split
        Row numbers, and notes.

    Raises
    ------
    InputError, LabelError, NotEnoughDataError
        A parameter is out of range; the task or the concept has one class or is a quantity, or
        `aligned_class` does not fit; a cell has too few rows (the message has the feasible sizes).

    Examples
    --------
    >>> import numpy as np
    >>> from splince_fast.evaluation import spurious_split
    >>> rng = np.random.default_rng(0)
    >>> y, z = rng.integers(0, 2, 1000), rng.integers(0, 2, 1000)
    >>> split = spurious_split(y, z, p=0.9, sizes=(200, 40, 100), random_state=0, aligned_class=1)
    >>> float(np.mean(z[split.train][y[split.train] == 1] == 1))
    0.9
    """
    check_p(p)
    check_random_state(random_state)
    check_index(task, concept, "concept", of="task")
    y = class_codes(task, "task")
    z = class_codes(concept, "concept", len(y), of="task")
    protocol = Protocol.of(y, z, aligned_class, None)
    sizes = protocol.largest_sizes([p]) if sizes is None else check_sizes(sizes)
    return protocol.split(p, sizes, random_state)


def natural_split(
    usable: NDArray[np.bool_], *, random_state: int, groups: Rows | None = None
) -> Split:
    """Split the n usable rows at random: n // 4 test rows, n // 10 validation rows, the rest."""
    rows = np.flatnonzero(usable)
    test, validation, train = random_parts(rows, groups, random_state, (0.25, 0.1))
    return Split(train, validation, test, None, ())


def random_parts(
    rows: Rows, groups: Rows | None, random_state: int, fractions: tuple[float, float]
) -> list[Rows]:
    """Divide rows at random into test, validation and training rows, without dividing groups."""
    rng = np.random.default_rng(random_state)
    if groups is None:
        counts = [int(len(rows) * fraction) for fraction in fractions]
        return np.split(rng.permutation(rows), np.cumsum(counts))
    part, rank = parts_of_groups(groups, rows, rng, fractions)
    order = rows[np.lexsort((rows, rank[rows]))]
    return [order[part[order] == k] for k in range(3)]
