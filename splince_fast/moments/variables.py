"""Labelled variables z: the sums from which Cov(x, z) is computed, by kind of variable.

Sums of x are sums of deviations x - r from the reference point r of the state, for full precision
if the data are far from 0. The sums are not divided by the weight sum, so that states are merged by
addition. Every kind has these methods:

==============  ====================================================================================
encode          encoded labels of a column (None if all are missing), and the variable with the new
                names of the column, which shares the sums; changes nothing
label_sums      sums of the labels of a block, and the sums of x that they need
add             changes that add the sums of a block, with sums of x - r; changes nothing
merged          self + sign other, for a reference point of `other` that exceeds ours by `offset`
make_constant   set the sums as if features were constant: the reference point + `mean_deviation`
span            vectors that span the columns of Cov(x, z), ddof = 0, with z in standard units
tensors, read   named arrays of a file; `read` and `read_labels` raise FileFormatError
==============  ====================================================================================

The sums of class c are the number of rows n_c, the weight sum w_c = sum w_i and
s_c = sum w_i (x_i - r). Those of a continuous variable are the number of labelled rows, the weight
sum, sum w (x - r), sum w (z - t), sum w (z - t)(x - r)^T and sum w (z - t)(z - t)^T, with the
reference point t of z.
"""

from __future__ import annotations

import json
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import repeat
from typing import Any, ClassVar, NoReturn, TypeAlias

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
    UnknownVariableError,
)
from splince_fast.labels import (
    ClassCodes,
    ClassName,
    Columns,
    VariableName,
    class_key,
    names_from_json,
    names_to_json,
)
from splince_fast.labels.containers import read_declared
from splince_fast.moments.block import Codes, LabelSums
from splince_fast.moments.state import EPS64

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


# Largest absolute value of a label: sums of squares of larger labels may overflow float64.
_LARGEST_VALUE = 1e140


@dataclass(slots=True)
class ColumnSums:
    """Sums of the columns of a continuous variable z."""

    kind: ClassVar[str] = "continuous"
    TENSORS: ClassVar[Layout] = {
        "counts": (np.int64, (1,), 0),
        "weight": (np.float64, (1,), 0),
        "reference": (np.float64, ("k",)),
        "x_sum": (np.float64, ("d",)),
        "z_sum": (np.float64, ("k",)),
        "products": (np.float64, ("k", "d")),
        "squares": (np.float64, ("k", "k")),
    }

    width: int
    names: list[str]
    n_rows: int  # number of labelled rows
    weight: float  # weight sum of the labelled rows
    reference: Float  # (k,): reference point t of z; arbitrary before the first rows
    x_sum: Float  # (d,): sum w (x - r)
    z_sum: Float  # (k,): sum w (z - t)
    products: Float  # (k, d): sum w (z - t)(x - r)^T
    squares: Float  # (k, k): sum w (z - t)(z - t)^T

    @classmethod
    def _empty(cls, width: int, names: list[str]) -> ColumnSums:
        k = len(names)
        return cls(width, names, 0, 0.0, np.zeros(k), np.zeros(width), np.zeros(k),
                   np.zeros((k, width)), np.zeros((k, k)))  # fmt: skip

    # -- filling ---------------------------------------------------------------------------

    @classmethod
    def new(cls, width: int, column: Columns) -> ColumnSums:
        return cls._empty(width, list(column.columns))

    def encode(self, column: Columns, name: object) -> tuple[Float | None, ColumnSums]:
        if column.present is not None and not column.present.any():
            return None, self
        names, values = list(column.columns), column.values
        unnamed = self.unnamed
        if len(names) != self.n_columns or not (names == self.names or unnamed or _unnamed(names)):
            raise LabelError(
                f"the variable {name!r} had the columns {self.names} in earlier blocks and "
                f"has {names} in this one; pass the same columns in the same order"
            )
        largest = max(float(values.max()), -float(values.min())) if values.size else 0.0
        if largest > _LARGEST_VALUE:
            raise LabelError(
                f"the variable {name!r} holds numbers as large as {largest:.1e}, whose squares "
                "exceed the range of float64; rescale the variable"
            )
        if column.present is not None:
            values = np.where(column.present[:, None], values, np.nan)
        if not unnamed or names == self.names:
            return values, self
        return values, replace(self, names=names)

    def label_sums(self, labels: Float, weight: Float | None) -> LabelSums:
        import splince_fast._kernels.blas as blas_kernels

        n, k = labels.shape
        missing = np.asarray(np.isnan(labels).any(axis=1))
        w = np.ones(n) if weight is None else weight
        n_present = n - int(np.count_nonzero(missing))
        if n_present < n:
            w = np.where(missing, 0.0, w)
            labels = np.where(missing[:, None], 0.0, labels)
        reference = self.reference
        if not self.n_rows and n_present:
            values = labels[~missing]
            # Deviations from the first row keep the mean of a constant column exact.
            reference = values[0] + (w[~missing] @ (values - values[0])) / w.sum()
        # The columns are z - t and 1. They are multiplied by sqrt(w) for `squares`, and then by
        # sqrt(w) again, for the products with x.
        columns = np.empty((n, k + 1))
        np.subtract(labels, reference, out=columns[:, :k])
        columns[:, k] = 1.0
        sqrt_weight = None if weight is None and n_present == n else np.sqrt(w)[:, None]
        if sqrt_weight is not None:
            columns *= sqrt_weight
        squares = np.zeros((k + 1, k + 1), order="F")
        blas_kernels.syrk_f64_into(columns, squares)
        blas_kernels.mirror_lower(squares)
        if sqrt_weight is not None:
            columns *= sqrt_weight
            columns[:, k] = w
        data = n_present, float(w.sum()), reference, squares[:k, k], squares[:k, :k]
        return LabelSums(None, np.empty(0), columns.T, data)

    def add(self, sums: LabelSums, class_sums: Float, products: Float) -> list[Change]:
        n_rows, weight, reference, z_sum, squares = sums.data
        attributes = {
            "n_rows": self.n_rows + n_rows, "weight": self.weight + weight,
            "reference": reference, "x_sum": self.x_sum + products[-1],
            "z_sum": self.z_sum + z_sum, "squares": self.squares + squares,
        }  # fmt: skip
        return [Addition(self.products, products[:-1]), Assignment(self, attributes)]

    # -- algebra ---------------------------------------------------------------------------

    def empty_like(self) -> ColumnSums:
        return self._empty(self.width, list(self.names))

    def copy(self) -> ColumnSums:
        return replace(self, names=list(self.names), reference=self.reference.copy(),
                       x_sum=self.x_sum.copy(), z_sum=self.z_sum.copy(),
                       products=self.products.copy(), squares=self.squares.copy())  # fmt: skip

    def scale(self, factor: float) -> None:
        self.weight *= factor
        for sums in (self.x_sum, self.z_sum, self.products, self.squares):
            sums *= factor

    def merged(self, other: Any, offset: Float, sign: int, name: object) -> ColumnSums:
        refuse_other_kind(name, self, other)
        self._refuse_other_columns(other, sign, name)
        names = list(other.names) if self.unnamed else list(self.names)
        if self.n_rows == other.n_rows and sign < 0:
            return self._empty(self.width, names)
        result = self.copy()
        result.names = names
        if not other.n_rows:
            return result
        if not self.n_rows:
            result.reference = other.reference.copy()
        z_offset = other.reference - result.reference
        z_sum = other.z_sum + other.weight * z_offset
        x_sum = other.x_sum + other.weight * offset
        products = (
            other.products
            + np.outer(z_offset, other.x_sum)
            + np.outer(other.z_sum, offset)
            + other.weight * np.outer(z_offset, offset)
        )
        squares = (
            other.squares
            + np.outer(z_offset, other.z_sum)
            + np.outer(other.z_sum, z_offset)
            + other.weight * np.outer(z_offset, z_offset)
        )
        result.n_rows += sign * other.n_rows
        result.weight += sign * other.weight
        result.x_sum += sign * x_sum
        result.z_sum += sign * z_sum
        result.products += sign * products
        result.squares += sign * squares
        if result.weight <= 0:
            raise IncompatibleMomentsError(
                f"cannot remove these moments: rows labelled with {name!r} would remain without "
                "weight; subtract only moments that were added"
            )
        if sign < 0:
            result._clear_rounding(self)
        return result

    def _refuse_other_columns(self, other: ColumnSums, sign: int, name: object) -> None:
        """Raise IncompatibleMomentsError if columns differ, or a removed part has too many rows."""
        if self.n_columns != other.n_columns:
            raise IncompatibleMomentsError(
                f"the variable {name!r} has {self.n_columns} columns on one side and "
                f"{other.n_columns} on the other; accumulate both from the same columns"
            )
        if self.names != other.names and not (self.unnamed or other.unnamed):
            raise IncompatibleMomentsError(
                f"the variable {name!r} has the columns {self.names} on one side and "
                f"{other.names} on the other; accumulate both from the same columns"
            )
        if sign < 0 and other.n_rows > self.n_rows:
            raise IncompatibleMomentsError(
                f"cannot remove {other.n_rows} rows labelled with {name!r} from {self.n_rows}; "
                "subtract only moments that were added"
            )

    def _clear_rounding(self, before: ColumnSums) -> None:
        """Make columns constant if their variance after a removal is within rounding error."""
        # `before` holds the sums before the removal. The reference point of a constant column
        # becomes the value of the column, because rounding errors of sums about a distant point
        # would hide that the column is constant.
        squares = np.einsum("ii->i", before.squares)
        rounding = EPS64 * (64 + 8 * before.n_rows**0.5) * squares
        squares_of_mean = self.z_sum**2 / self.weight
        constant = np.flatnonzero(np.einsum("ii->i", self.squares) - squares_of_mean <= rounding)
        self.reference[constant] += self.z_sum[constant] / self.weight
        self.z_sum[constant] = 0.0
        self.products[constant] = 0.0
        self.squares[constant, :] = 0.0
        self.squares[:, constant] = 0.0

    def make_constant(self, features: NDArray[np.intp], mean_deviation: Float) -> None:
        self.x_sum[features] = self.weight * mean_deviation[features]
        self.products[:, features] = np.outer(self.z_sum, mean_deviation[features])

    # -- reading ---------------------------------------------------------------------------

    @property
    def n_columns(self) -> int:
        return len(self.names)

    @property
    def unnamed(self) -> bool:
        """Whether the columns have no names of their own, but their numbers "0" to str(k - 1)."""
        return _unnamed(self.names)

    @property
    def description(self) -> str:
        return f"continuous ({self.n_columns} column{'s' if self.n_columns > 1 else ''})"

    def class_names(self, name: object) -> NoReturn:
        raise LabelError(f"the variable {name!r} is continuous; it has no classes")

    def cross_covariance(self, ddof: float, name: object) -> Float:
        """Return Cov(x, z) over the labelled rows, (d, k)."""
        # It is (sum w (x-r)(z-t)^T - sum w (x-r) sum w (z-t)^T / W) / (W - ddof), with W = sum w.
        divisor = denominator(self.weight, ddof, name)
        columns = self.products - np.outer(self.z_sum / self.weight, self.x_sum)
        return np.asarray(columns.T / divisor)

    def mean(self) -> Float:
        """Return the mean of z over the labelled rows, (k,)."""
        return np.asarray(self.reference + self.z_sum / self.weight)

    def variance(self) -> Float:
        """Return Cov(z, z), (k, k), with ddof = 0."""
        mean = self.z_sum / self.weight
        return np.asarray(self.squares / self.weight - np.outer(mean, mean))

    def span(self) -> Float:
        """Return rows (k', d) that span the columns of Cov(x, z), ddof = 0."""
        # Each row is the covariance of x with a column of z, divided by the standard deviation of
        # the column. Constant columns have no row.
        if self.weight == 0:
            return np.zeros((0, self.width))
        return spans.column_span(
            self.products, self.z_sum, self.x_sum, self.squares, self.reference, self.weight
        )

    def deviations(self) -> Float:
        """Return the standard deviations of z, (k,), ddof = 0; exactly 0 for constant columns."""
        return spans.column_deviations(self.z_sum, self.squares, self.reference, self.weight)

    # -- storing ---------------------------------------------------------------------------

    def tensors(self) -> Tensors:
        counts, weight = np.array([self.n_rows], np.int64), np.array([self.weight])
        sums = (self.reference, self.x_sum, self.z_sum, self.products, self.squares)
        return dict(zip(self.TENSORS, (counts, weight, *sums), strict=True))

    def metadata(self) -> dict[str, Any]:
        return {"kind": self.kind, "names": list(self.names)}

    @classmethod
    def read(cls, width: int, meta: Mapping[str, Any], tensors: Tensors) -> ColumnSums:
        names = meta["names"]
        if not isinstance(names, list) or not all(isinstance(n, str) for n in names):
            raise FileFormatError(f"column names are not a list of strings: {json.dumps(names)}")
        counts, weight, *sums = check_tensors(tensors, cls.TENSORS, {"d": width, "k": len(names)})
        if (np.diag(tensors["squares"]) < 0).any():
            raise FileFormatError("a continuous variable has a negative sum of squares")
        return cls(width, names, int(counts[0]), float(weight[0]), *sums)

    def read_labels(self, labels: NDArray[Any], n_rows: int, key: str) -> Float:
        if labels.dtype != np.float64 or labels.shape != (n_rows, self.n_columns):
            raise FileFormatError(f"the tensor {key!r} has the wrong dtype or shape")
        if np.isinf(labels).any():
            raise FileFormatError(f"the tensor {key!r} holds infinity")
        return labels


def _unnamed(names: list[str]) -> bool:
    return names == [str(i) for i in range(len(names))]


Variable: TypeAlias = ClassSums | ColumnSums

KIND_OF_COLUMN: dict[type[Any], type[Any]] = {ClassCodes: ClassSums, Columns: ColumnSums}
KINDS: dict[str, type[Any]] = {kind.kind: kind for kind in KIND_OF_COLUMN.values()}


def check_column(variable: Variable, column: Any, name: object) -> None:
    """Raise LabelError if a column differs from earlier blocks in kind, type or columns."""
    kind = KIND_OF_COLUMN[type(column)]
    if type(variable) is kind:
        variable.encode(column, name)
    elif kind.new(variable.width, column).encode(column, name)[0] is not None:
        raise contradiction(name, variable.kind, kind.kind)


def look_up(variables: Mapping[VariableName, Variable], name: VariableName) -> Variable:
    """Return the variable of this name; raise UnknownVariableError if there is none."""
    try:
        return variables[name]
    except (KeyError, TypeError):  # TypeError: the name is not hashable
        names = ", ".join(map(repr, variables)) or "none"
        hint = (
            f"; for a joint variable, pass joint=[{name!r}] to Moments"
            if isinstance(name, tuple)
            else ""
        )
        raise UnknownVariableError(
            f"no variable {name!r} was accumulated, or none of its labels is present; the "
            f"variables are: {names}{hint}"
        ) from None


def contradiction(name: object, ours: str, theirs: str) -> LabelError:
    """Return the error for a variable whose kind differs from earlier blocks."""
    held = {"classes": "classes", "continuous": "continuous values"}
    return LabelError(
        f"the variable {name!r} held {held[ours]} in earlier blocks and holds {held[theirs]} in "
        f"this one; give it one dtype, or fix it with Moments(kinds={{{name!r}: {ours!r}}})"
    )
