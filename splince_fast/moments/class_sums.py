"""Sums over the rows of each class of a class-coded variable.

The sums of class c are the number of rows n_c, the weight sum w_c = sum w_i and
s_c = sum w_i (x_i - r), where r is the reference point of the state of x.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from itertools import repeat
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from splince_fast._kernels import row_kernels, spans
from splince_fast._kernels.row_kernels import Addition, Assignment, Change
from splince_fast._runtime.files import Layout, Tensors, check_tensors
from splince_fast._solve.options import is_number
from splince_fast.exceptions import (
    FileFormatError,
    IncompatibleMomentsError,
    InputError,
    LabelError,
    NotEnoughDataError,
)
from splince_fast.labels import ClassCodes, ClassName, class_key, names_from_json, names_to_json
from splince_fast.labels.containers import read_declared
from splince_fast.moments.block import Codes, LabelSums

Float = NDArray[np.float64]
Int = NDArray[np.int64]


class ClassSums:
    """Sums per class of a class-coded variable."""

    # Each array has one row per class. The arrays are shorter than `names` if the last classes
    # occur only in buffered rows.

    __slots__ = (
        "_last_lookup", "_names", "_positions", "n_columns", "rows", "sums", "weights", "width",
    )  # fmt: skip

    kind: ClassVar[str] = "classes"
    TENSORS: ClassVar[Layout] = {
        "rows": (np.int64, ("k",), 0),
        "weights": (np.float64, ("k",), 0),
        "sums": (np.float64, ("k", "d")),
    }

    def __init__(
        self,
        width: int,
        names: Sequence[ClassName] = (),
        rows: Int | None = None,
        weights: Float | None = None,
        sums: Float | None = None,
    ) -> None:
        k = self.n_columns = len(names)
        self.width = width
        self._names = list(names)
        self._positions: dict[Hashable, int] = {}
        self.rows = np.zeros(k, np.int64) if rows is None else rows
        self.weights = np.zeros(k) if weights is None else weights  # (k,): weight sum of each class
        # (k, d): sum w (x - r) of each class
        self.sums = np.zeros((k, width)) if sums is None else sums
        # Cache for columns with the same classes: the classes of the last column, and the position
        # of each class in the sums, followed by -1 for a missing label.
        self._last_lookup: tuple[tuple[ClassName, ...], Codes] | None = None

    @property
    def names(self) -> list[ClassName]:
        return self._names.copy()

    @property
    def position_by_key(self) -> dict[Hashable, int]:
        """Position of each class in the sums, by class key."""
        # The dict is built on first use, since a column may declare many classes that never occur.
        positions, names = self._positions, self._names
        if len(positions) < len(names):
            # Assign only the complete dict, since other threads may read the attribute.
            positions = dict(zip(_keys(names), range(len(names)), strict=True))
            self._positions = positions
        return positions

    # -- filling ---------------------------------------------------------------------------

    @classmethod
    def new(cls, width: int, column: ClassCodes) -> ClassSums:
        return cls(width)

    def encode(self, column: ClassCodes, name: object) -> tuple[Codes | None, ClassSums]:
        classes, n_registered = column.classes, len(self._names)
        if not classes:
            return None, self
        if n_registered and type(self._names[0]) is not type(classes[0]):
            first = self._names[0]
            raise LabelError(
                f"the classes of {name!r} were of type {type(first).__name__} in earlier "
                f"blocks (such as {first!r}) and are of type {type(classes[0]).__name__} in "
                f"this one (such as {classes[0]!r}); use one type throughout"
            )
        if self._last_lookup is not None:
            before, lookup = self._last_lookup
            # Equality does not suffice for joint classes, which are tuples: (True,) == (1,), but
            # they are different classes.
            if before is classes or (before == classes and type(classes[0]) is not tuple):
                return lookup.take(column.codes, mode="wrap"), self
        # A missing label has code -1, which indexes the last entry of `lookup`, -1.
        lookup = np.full(len(classes) + 1, -1, np.intp)
        if n_registered:
            positions = map(self.position_by_key.get, _keys(classes), repeat(-1))
            lookup[:-1] = np.fromiter(positions, np.intp, len(classes))
        new = np.flatnonzero(lookup[:-1] < 0)
        variable = self
        if len(new):
            lookup[new] = np.arange(n_registered, n_registered + len(new))
            names = [*self._names, *(classes[i] for i in new.tolist())]
            variable = ClassSums(self.width, names, self.rows, self.weights, self.sums)
            if len(self._positions) == n_registered > 0:
                added = zip(
                    _keys(names[n_registered:]), range(n_registered, len(names)), strict=True
                )
                variable._positions = self._positions | dict(added)
        variable._last_lookup = classes, lookup
        return lookup.take(column.codes, mode="wrap"), variable

    def code_of(self, column: object, name: str) -> int:
        """Return the code of the label in a column of one row."""
        # -1: the label is missing, its class is not registered, the column has another number of
        # rows, or the fast path does not support the column.
        if type(column) is np.ndarray:
            if column.shape != (1,) or column.dtype.kind not in "biuU":
                return -1
            return self.position_by_key.get(class_key(column.item()), -1)
        declared = read_declared(column, name)
        if declared is None or self._last_lookup is None or len(declared) != 1:
            return -1
        classes, lookup = self._last_lookup
        return int(lookup[declared.codes[0]]) if declared.classes is classes else -1

    def label_sums(self, labels: Codes, weight: Float | None) -> LabelSums:
        # Class sums only for classes that occur in `labels`; missing labels, -1, have none.
        codes, present, rows, weights, size = row_kernels.count_classes(
            labels, weight, len(self._names)
        )
        return LabelSums(codes, weights, np.empty((0, len(labels))), (present, rows, size))

    def add(self, sums: LabelSums, class_sums: Float, products: Float) -> list[Change]:
        present, rows, size = sums.data
        new = self._padded_to(size) if size > len(self.rows) else (
            self.rows.copy(), self.weights.copy(), self.sums
        )  # fmt: skip
        new[0][present] += rows
        new[1][present] += sums.weights
        attributes = dict(zip(("rows", "weights", "sums"), new, strict=True))
        return [Addition(new[2], class_sums, present), Assignment(self, attributes)]

    # -- algebra ---------------------------------------------------------------------------

    def empty_like(self) -> ClassSums:
        return ClassSums(self.width)

    def copy(self) -> ClassSums:
        return ClassSums(
            self.width, self._names, self.rows.copy(), self.weights.copy(), self.sums.copy()
        )

    def scale(self, factor: float) -> None:
        self.weights *= factor
        self.sums *= factor

    def merged(self, other: Any, offset: Float, sign: int, name: object) -> ClassSums:
        refuse_other_kind(name, self, other)
        ours, theirs = self._names, other._names
        if ours and theirs and type(ours[0]) is not type(theirs[0]):
            raise IncompatibleMomentsError(
                f"the classes of {name!r} are of type {type(ours[0]).__name__} on one side and "
                f"{type(theirs[0]).__name__} on the other; use one type throughout"
            )
        names = ours
        same = self._has_names_of(other)
        if not same:
            our_keys = self.position_by_key
            others = zip(theirs, _keys(theirs), strict=True)
            names = [*ours, *(name for name, key in others if key not in our_keys)]
        if sign < 0 and len(names) > len(ours):
            raise IncompatibleMomentsError(
                f"cannot remove rows of {name!r} = {names[len(ours)]!r}: no rows of this class "
                "were added; subtract only moments that were added"
            )
        result = ClassSums(self.width, names, *self._padded_to(len(names)))
        positions = slice(None) if same else result.positions(theirs)
        rows, weights, sums = other._padded()
        result.rows[positions] += sign * rows
        result.weights[positions] += sign * weights
        result.sums[positions] += sign * (sums + weights[:, None] * offset)
        if sign < 0:
            result._check_part(name)
        return result

    def _check_part(self, name: object) -> None:
        """Check the sums after a removal; set those of classes without rows to exactly 0."""
        if (self.rows < 0).any():
            worst = self.names[int(np.argmin(self.rows))]
            raise IncompatibleMomentsError(
                f"cannot remove more rows of {name!r} = {worst!r} than were added; subtract only "
                "moments that were added"
            )
        empty = self.rows == 0
        if (self.weights[~empty] <= 0).any():
            raise IncompatibleMomentsError(
                f"cannot remove these moments: rows of a class of {name!r} would remain without "
                "weight; subtract only moments that were added"
            )
        self.weights[empty] = 0.0
        self.sums[empty] = 0.0

    def make_constant(self, features: NDArray[np.intp], mean_deviation: Float) -> None:
        self.sums[:, features] = np.outer(self.weights, mean_deviation[features])

    def positions(self, names: list[ClassName]) -> NDArray[np.intp]:
        """Return the position in the sums of each class in `names`; all classes must exist."""
        positions = self.position_by_key
        return np.array([positions[key] for key in _keys(names)], np.intp)

    def positions_of(self, other: ClassSums) -> NDArray[np.intp] | slice:
        """Return the position in the sums of each class of `other`; all classes must exist."""
        return slice(None) if self._has_names_of(other) else self.positions(other._names)

    def _has_names_of(self, other: ClassSums) -> bool:
        """Return whether `other` has the same classes in order; always False for joint classes."""
        names = self._names
        tuples = bool(names) and type(names[0]) is tuple  # joint classes: (True,) == (1,)
        return names == other._names and not tuples

    def in_order(self, names: list[ClassName]) -> ClassSums:
        """Return a copy with the classes `names`, in this order; they may include new classes."""
        result = ClassSums(self.width, names)
        index = result.positions(self._names)
        result.rows[index], result.weights[index], result.sums[index] = self._padded()
        return result

    # -- reading ---------------------------------------------------------------------------

    @property
    def n_rows(self) -> int:
        return int(self.rows.sum())

    @property
    def weight(self) -> float:
        return float(self.weights.sum())

    @property
    def description(self) -> str:
        return f"{self.n_columns} classes"

    def class_names(self, name: object) -> list[ClassName]:
        return self.names

    def cross_covariance(self, ddof: float, name: object) -> Float:
        """Return the covariance of x with the indicator of each class c, (d, k)."""
        # It is Cov(x, 1[z = c]) = (s_c - (w_c / w) s) / (w - ddof), with w = sum_c w_c and s =
        # sum_c s_c.
        weight = self.weight
        divisor = denominator(weight, ddof, name)
        total = self.sums.sum(axis=0)
        fractions = self.weights / weight
        return np.asarray((self.sums - fractions[:, None] * total).T / divisor)

    def span(self) -> Float:
        """Return rows (k', d) that span the columns of Cov(x, z), ddof = 0."""
        # Each row is the covariance of x with the indicator of a class, divided by the standard
        # deviation of the indicator. The most frequent class and classes without weight have no
        # row.
        return spans.class_span(self.sums, self.weights)

    # -- storing ---------------------------------------------------------------------------

    def _padded(self) -> tuple[Int, Float, Float]:
        """Return `rows`, `weights` and `sums`, with zeros for classes that have no sums yet."""
        if len(self._names) == len(self.rows):
            return self.rows, self.weights, self.sums
        return self._padded_to(len(self._names))

    def _padded_to(self, size: int) -> tuple[Int, Float, Float]:
        """Return copies of `rows`, `weights` and `sums`, padded with zeros to `size` classes."""
        # `numpy.zeros` takes physical memory only for zeros that are written, which matters if most
        # declared classes never occur.
        padded = np.zeros(size, np.int64), np.zeros(size), np.zeros((size, self.width))
        for target, source in zip(padded, (self.rows, self.weights, self.sums), strict=True):
            target[: len(source)] = source
        return padded

    def tensors(self) -> Tensors:
        return dict(zip(self.TENSORS, self._padded(), strict=True))

    def metadata(self) -> dict[str, Any]:
        return {"kind": self.kind, "names": names_to_json(tuple(self.names))}

    @classmethod
    def read(cls, width: int, meta: Mapping[str, Any], tensors: Tensors) -> ClassSums:
        names = list(names_from_json(meta["names"]))
        sums = check_tensors(tensors, cls.TENSORS, {"d": width, "k": len(names)})
        return cls(width, names, *sums)

    def read_labels(self, labels: NDArray[Any], n_rows: int, key: str) -> Codes:
        check_tensors({key: labels}, {key: (np.int64, (n_rows,))})
        if n_rows and (labels.min() < -1 or labels.max() >= self.n_columns):
            raise FileFormatError(f"the tensor {key!r} names a class that does not exist")
        return labels.astype(np.intp)


def _keys(names: Sequence[ClassName]) -> Iterable[Hashable]:
    """Return the `class_key` of each name, faster than single calls; all names have one type."""
    if len(names) and type(names[0]) is tuple:
        return map(class_key, names)
    return zip(map(type, names), names, strict=True)


def check_ddof(ddof: object) -> None:
    if not is_number(ddof) or not np.isfinite(float(ddof)):
        raise InputError(f"ddof is {ddof!r}; it must be a finite number, such as 0 or 1")


def denominator(weight: float, ddof: float, name: object) -> float:
    """Return weight - ddof; raise NotEnoughDataError unless it is positive."""
    check_ddof(ddof)
    if weight - ddof <= 0:
        raise NotEnoughDataError(
            f"the covariance with {name!r} needs a total weight above ddof = {ddof:g}, and its "
            f"labelled rows have {weight:g}; add rows or pass ddof=0"
        )
    return weight - ddof


def refuse_other_kind(name: object, ours: Any, theirs: Any) -> None:
    """Raise IncompatibleMomentsError unless both variables are of one kind."""
    if type(ours) is not type(theirs):
        raise IncompatibleMomentsError(
            f"the variable {name!r} is {ours.kind} on one side and {theirs.kind} on the other; "
            "accumulate both with the same kinds="
        )
