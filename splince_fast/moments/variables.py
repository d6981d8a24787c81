"""Labelled variables z: the sums from which Cov(x, z) is computed, by kind of variable.

Sums of x are sums of deviations x - r from the reference point r of the state, for full precision
if the data are far from 0. The sums are not divided by the weight sum, so that states are merged by
addition. Methods that both kinds have are described in `ClassSums`.
"""

from __future__ import annotations

import json
from collections.abc import Hashable, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import combinations, repeat
from typing import Any, ClassVar, NoReturn, Self, TypeAlias

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
from splince_fast.moments.block import Codes, Labels, LabelSums
from splince_fast.moments.state import EPS64, not_added

Float = NDArray[np.float64]
Int = NDArray[np.int64]

# A variable with more classes or columns is left out of a `LabelTable`, whose size is quadratic in
# their number. The sums of its earlier rows may remain in the table, but are not read.
_MAX_COLUMNS = 256
# Largest absolute value of a label: sums of squares of larger labels may overflow float64.
_LARGEST_VALUE = 1e140


@dataclass(eq=False)
class _Sums:
    """The sums of one variable. Attributes of the names in `TENSORS` are the tensors of a file."""

    kind: ClassVar[str]
    TENSORS: ClassVar[Layout]
    LINEAR: ClassVar[tuple[str, ...]]  # attributes that are proportional to the weights
    empty: ClassVar[Any]  # function of `width` and `names` that returns sums of zeros

    width: int
    names: tuple[Any, ...]  # of the classes or columns

    @property
    def n_columns(self) -> int:
        return len(self.names)

    @classmethod
    def new(cls, width: int, column: Any) -> Any:
        return cls.empty(width, getattr(column, "columns", ()))

    def empty_like(self) -> Any:
        return self.empty(self.width, self.names)

    def copy(self) -> Self:
        return replace(self, **{name: copy(getattr(self, name)) for name in self.TENSORS})

    def scaled(self, factor: float) -> Self:
        return replace(self, **{name: factor * getattr(self, name) for name in self.LINEAR})

    def tensors(self) -> Tensors:
        return {name: np.atleast_1d(getattr(self, name)) for name in self.TENSORS}


@dataclass(eq=False)
class ClassSums(_Sums):
    # Each array has one row per class. The arrays are shorter than `names` if the last classes
    # occur only in buffered rows.

    kind = "classes"
    TENSORS: ClassVar[Layout] = {
        "rows": (np.int64, ("k",), 0),
        "weights": (np.float64, ("k",), 0),
        "sums": (np.float64, ("k", "d")),
    }
    LINEAR = ("weights", "sums")

    rows: Int  # (k,): number of rows of each class
    weights: Float  # (k,): weight sum of each class
    sums: Float  # (k, d): sum w (x - r) of each class

    # Cache for columns with the same classes: the classes of the last column, and the position of
    # each class in the sums, followed by -1 for a missing label.
    _last_lookup: tuple[tuple[ClassName, ...], Codes] | None = field(default=None, init=False)

    @classmethod
    def empty(cls, width: int, names: Iterable[ClassName] = ()) -> ClassSums:
        return cls(width, tuple(names), np.zeros(0, np.int64), np.zeros(0), np.zeros((0, width)))

    @cached_property
    def position_by_key(self) -> dict[Hashable, int]:
        # The dict is built on first use, since a column may declare many classes that never occur.
        return dict(zip(_keys(self.names), range(len(self.names)), strict=True))

    def encode(self, column: ClassCodes, name: object) -> tuple[Codes | None, ClassSums]:
        """Return the encoded labels (None if all are missing), and the variable with new names."""
        # This variable does not change; the new one shares its sums.
        classes, names = column.classes, self.names
        if not classes:
            return None, self
        if names and type(names[0]) is not type(classes[0]):
            raise LabelError(
                f"the classes of {name!r} were of type {type(names[0]).__name__} in earlier "
                f"blocks (such as {names[0]!r}) and are of type {type(classes[0]).__name__} in "
                f"this one (such as {classes[0]!r}); use one type throughout"
            )
        if self._last_lookup is not None:
            before, lookup = self._last_lookup
            if before is classes or (before == classes and type(classes[0]) is not tuple):
                return lookup.take(column.codes, mode="wrap"), self
        # A missing label has code -1, which indexes the last entry of `lookup`, -1.
        lookup = np.full(len(classes) + 1, -1, np.intp)
        if names:
            positions = map(self.position_by_key.get, _keys(classes), repeat(-1))
            lookup[:-1] = np.fromiter(positions, np.intp, len(classes))
        new = np.flatnonzero(lookup[:-1] < 0)
        variable = self
        if len(new):
            lookup[new] = np.arange(len(names), len(names) + len(new))
            variable = replace(self, names=(*names, *(classes[i] for i in new.tolist())))
        variable._last_lookup = classes, lookup
        return lookup.take(column.codes, mode="wrap"), variable

    def code_of(self, column: object, name: str) -> int:
        """Return the code of the label in an array of one row."""
        # -1: the label is missing, its class is not registered, the column has another number of
        # rows, or it is no array of numbers or strings.
        if (
            type(column) is not np.ndarray
            or column.shape != (1,)
            or column.dtype.kind not in "biuU"
        ):
            return -1
        return self.position_by_key.get(class_key(column.item()), -1)

    def label_sums(self, labels: Codes, weight: Float | None) -> LabelSums:
        """Return the sums of the labels of a block; they name the sums of x that `add` needs."""
        # Class sums only for classes that occur in `labels`; missing labels, -1, have none.
        codes, present, rows, weights, size = row_kernels.count_classes(
            labels, weight, len(self.names)
        )
        return LabelSums(codes, weights, np.empty((0, len(labels))), (present, rows, size))

    def add(self, sums: LabelSums, class_sums: Float, products: Float) -> list[Change]:
        """Return the changes that add the sums of a block; `class_sums` are of x - r."""
        present, rows, size = sums.data
        new = self._padded(size) if size > len(self.rows) else (
            self.rows.copy(), self.weights.copy(), self.sums
        )  # fmt: skip
        new[0][present] += rows
        new[1][present] += sums.weights
        attributes = dict(zip(self.TENSORS, new, strict=True))
        return [Addition(new[2], class_sums, present), Assignment(self, attributes)]

    def merged(self, other: Any, offset: Float, sign: int, name: object) -> ClassSums:
        """Return self + sign other; the reference point of `other` exceeds ours by `offset`."""
        refuse_other_kind(name, self, other)
        ours, theirs = self.names, other.names
        if ours and theirs and type(ours[0]) is not type(theirs[0]):
            raise IncompatibleMomentsError(
                f"the classes of {name!r} are of type {type(ours[0]).__name__} on one side and "
                f"{type(theirs[0]).__name__} on the other; use one type throughout"
            )
        new: list[ClassName] = []
        if not _same_names(ours, theirs):
            keys = zip(theirs, _keys(theirs), strict=True)
            new = [class_name for class_name, key in keys if key not in self.position_by_key]
        if sign < 0 and new:
            raise not_added(
                f"cannot remove rows of {name!r} = {new[0]!r}: no rows of this class were added"
            )
        result = ClassSums(self.width, (*ours, *new), *self._padded(len(ours) + len(new)))
        positions = result.positions_of(other)
        rows, weights, sums = other._padded(len(theirs))
        result.rows[positions] += sign * rows
        result.weights[positions] += sign * weights
        result.sums[positions] += sign * (sums + weights[:, None] * offset)
        if sign < 0:
            result._check_part(name)
        return result

    def _check_part(self, name: object) -> None:
        """Check the sums after a removal; set those of classes without rows to exactly 0."""
        empty = self.rows == 0
        wrong = np.flatnonzero((self.rows < 0) | ~empty & (self.weights <= 0))
        if len(wrong):
            raise not_added(
                f"cannot remove more rows or weight of {name!r} = {self.names[wrong[0]]!r} than "
                "were added"
            )
        self.weights[empty] = 0.0
        self.sums[empty] = 0.0

    def make_constant(self, features: NDArray[np.intp], mean_deviation: Float) -> None:
        """Set the sums as if features were constant: the reference point + `mean_deviation`."""
        self.sums[:, features] = np.outer(self.weights, mean_deviation[features])

    def positions_of(self, other: ClassSums) -> NDArray[np.intp] | slice:
        """Return the position in the sums of each class of `other`; all classes must exist."""
        if _same_names(self.names, other.names):
            return slice(None)
        return np.array([self.position_by_key[key] for key in _keys(other.names)], np.intp)

    @property
    def n_rows(self) -> int:
        return int(self.rows.sum())

    @property
    def weight(self) -> float:
        return float(self.weights.sum())

    @property
    def description(self) -> str:
        return f"{self.n_columns} classes"

    def class_names(self, name: object) -> tuple[ClassName, ...]:
        return self.names

    def cross_covariance(self, ddof: float, name: object) -> Float:
        # (s_c - (w_c / w) s) / (w - ddof), with w = sum_c w_c and s = sum_c s_c
        weight = self.weight
        divisor = denominator(weight, ddof, f"covariance with {name!r}")
        total = self.sums.sum(axis=0)
        fractions = self.weights / weight
        return np.asarray((self.sums - fractions[:, None] * total).T / divisor)

    def span(self) -> Float:
        """Return rows (k', d) that span the columns of Cov(x, z), ddof = 0."""
        # Each row is the covariance of x with the indicator of a class, in its standard deviations.
        # The most frequent class and classes without weight have no row.
        return spans.class_span(self.sums, self.weights)

    def _padded(self, size: int) -> tuple[Int, Float, Float]:
        """Return copies of `rows`, `weights` and `sums`, padded with zeros to `size` classes."""
        # `numpy.zeros` takes physical memory only for zeros that are written, which matters if most
        # declared classes never occur.
        padded = np.zeros(size, np.int64), np.zeros(size), np.zeros((size, self.width))
        for target, source in zip(padded, (self.rows, self.weights, self.sums), strict=True):
            target[: len(source)] = source
        return padded

    def tensors(self) -> Tensors:
        if len(self.rows) == len(self.names):
            return super().tensors()
        return dict(zip(self.TENSORS, self._padded(len(self.names)), strict=True))

    def metadata(self) -> dict[str, Any]:
        return {"kind": self.kind, "names": names_to_json(self.names)}

    @classmethod
    def read(cls, width: int, meta: Mapping[str, Any], tensors: Tensors) -> ClassSums:
        names = tuple(names_from_json(meta["names"]))
        sums = check_tensors(tensors, cls.TENSORS, {"d": width, "k": len(names)})
        return cls(width, names, *sums)

    def read_labels(self, labels: NDArray[Any], n_rows: int, key: str) -> Codes:
        check_tensors({key: labels}, {key: (np.int64, (n_rows,))})
        if n_rows and (labels.min() < -1 or labels.max() >= self.n_columns):
            raise FileFormatError(f"the tensor {key!r} names a class that does not exist")
        return labels.astype(np.intp)


def _same_names(names: tuple[ClassName, ...], others: tuple[ClassName, ...]) -> bool:
    """Return whether classes are the same in the same order; always False for joint classes."""
    # Joint classes are tuples: (True,) == (1,), but they are different classes.
    return names is others or (names == others and not (names and type(names[0]) is tuple))


def _keys(names: Sequence[ClassName]) -> Iterable[Hashable]:
    """Return the `class_key` of each name, faster than single calls; all names have one type."""
    if len(names) and type(names[0]) is tuple:
        return map(class_key, names)
    return zip(map(type, names), names, strict=True)


def denominator(weight: float, ddof: float, covariance: str) -> float:
    """Return weight - ddof; raise NotEnoughDataError unless it is positive."""
    if not is_number(ddof) or not np.isfinite(float(ddof)):
        raise InputError(f"ddof is {ddof!r}; it must be a finite number, such as 0 or 1")
    if weight - ddof <= 0:
        raise NotEnoughDataError(
            f"the {covariance} needs a total weight above ddof = {ddof:g}, and its rows have "
            f"{weight:g}; add rows or pass ddof=0"
        )
    return weight - ddof


def refuse_other_kind(name: object, ours: Any, theirs: Any) -> None:
    """Raise IncompatibleMomentsError unless both variables are of one kind."""
    if type(ours) is not type(theirs):
        raise IncompatibleMomentsError(
            f"the variable {name!r} is {ours.kind} on one side and {theirs.kind} on the other; "
            "accumulate both with the same kinds="
        )


@dataclass(eq=False)
class ColumnSums(_Sums):
    """Sums of the columns of a continuous variable z."""

    kind = "continuous"
    TENSORS: ClassVar[Layout] = {
        "counts": (np.int64, (1,), 0),
        "weight": (np.float64, (1,), 0),
        "reference": (np.float64, ("k",)),
        "x_sum": (np.float64, ("d",)),
        "z_sum": (np.float64, ("k",)),
        "products": (np.float64, ("k", "d")),
        "squares": (np.float64, ("k", "k")),
    }
    LINEAR = ("weight", "x_sum", "z_sum", "products", "squares")

    counts: int  # number of labelled rows
    weight: float  # weight sum of the labelled rows
    reference: Float  # (k,): reference point t of z; arbitrary before the first rows
    x_sum: Float  # (d,): sum w (x - r)
    z_sum: Float  # (k,): sum w (z - t)
    products: Float  # (k, d): sum w (z - t)(x - r)^T
    squares: Float  # (k, k): sum w (z - t)(z - t)^T

    @classmethod
    def empty(cls, width: int, names: Iterable[str]) -> ColumnSums:
        names = tuple(names)
        k = len(names)
        return cls(width, names, 0, 0.0, np.zeros(k), np.zeros(width), np.zeros(k),
                   np.zeros((k, width)), np.zeros((k, k)))  # fmt: skip

    def encode(self, column: Columns, name: object) -> tuple[Float | None, ColumnSums]:
        if column.present is not None and not column.present.any():
            return None, self
        names, values = tuple(column.columns), column.values
        unnamed = is_unnamed(self.names)
        if len(names) != self.n_columns or not (
            names == self.names or unnamed or is_unnamed(names)
        ):
            raise LabelError(
                f"the variable {name!r} had the columns {list(self.names)} in earlier blocks and "
                f"has {list(names)} in this one; pass the same columns in the same order"
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
            "counts": self.counts + n_rows, "weight": self.weight + weight,
            "reference": reference, "x_sum": self.x_sum + products[-1],
            "z_sum": self.z_sum + z_sum, "squares": self.squares + squares,
        }  # fmt: skip
        return [Addition(self.products, products[:-1]), Assignment(self, attributes)]

    def merged(self, other: Any, offset: Float, sign: int, name: object) -> ColumnSums:
        refuse_other_kind(name, self, other)
        self._refuse_other_columns(other, name)
        names = other.names if is_unnamed(self.names) else self.names
        if self.n_rows == other.n_rows and sign < 0:
            return self.empty(self.width, names)
        if sign < 0 and (other.n_rows > self.n_rows or other.weight >= self.weight):
            raise not_added(
                f"cannot remove {other.n_rows} rows labelled with {name!r}, of weight "
                f"{other.weight:g}, from {self.n_rows} of weight {self.weight:g}"
            )
        reference = self.reference if self.n_rows or not other.n_rows else other.reference
        t = other.reference - reference if other.n_rows else np.zeros(len(names))
        z_sum = other.z_sum + other.weight * t
        theirs = {  # the sums of `other` about our reference points
            "counts": other.counts,
            "weight": other.weight,
            "x_sum": other.x_sum + other.weight * offset,
            "z_sum": z_sum,
            "products": other.products + np.outer(t, other.x_sum) + np.outer(z_sum, offset),
            "squares": other.squares + np.outer(t, other.z_sum) + np.outer(z_sum, t),
        }
        sums = {key: getattr(self, key) + sign * value for key, value in theirs.items()}
        result = replace(self, names=names, reference=reference.copy(), **sums)
        if sign < 0 and other.n_rows:
            result._clear_rounding(self)
        return result

    def _refuse_other_columns(self, other: ColumnSums, name: object) -> None:
        difference = ""
        if self.n_columns != other.n_columns:
            difference = f"{self.n_columns} columns on one side and {other.n_columns}"
        elif self.names != other.names and not any(map(is_unnamed, (self.names, other.names))):
            difference = f"the columns {list(self.names)} on one side and {list(other.names)}"
        if difference:
            raise IncompatibleMomentsError(
                f"the variable {name!r} has {difference} on the other; accumulate both from the "
                "same columns"
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

    @property
    def n_rows(self) -> int:
        return self.counts

    @property
    def description(self) -> str:
        return f"continuous ({self.n_columns} column{'s' if self.n_columns > 1 else ''})"

    def class_names(self, name: object) -> NoReturn:
        raise LabelError(f"the variable {name!r} is continuous; it has no classes")

    def cross_covariance(self, ddof: float, name: object) -> Float:
        # (sum w (x-r)(z-t)^T - sum w (x-r) sum w (z-t)^T / W) / (W - ddof), with W = sum w
        divisor = denominator(self.weight, ddof, f"covariance with {name!r}")
        columns = self.products - np.outer(self.z_sum / self.weight, self.x_sum)
        return np.asarray(columns.T / divisor)

    def mean(self) -> Float:
        return np.asarray(self.reference + self.z_sum / self.weight)

    def variance(self) -> Float:
        mean = self.z_sum / self.weight
        return np.asarray(self.squares / self.weight - np.outer(mean, mean))

    def span(self) -> Float:
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
        return cls(width, tuple(names), int(counts[0]), float(weight[0]), *sums)

    def read_labels(self, labels: NDArray[Any], n_rows: int, key: str) -> Float:
        if labels.dtype != np.float64 or labels.shape != (n_rows, self.n_columns):
            raise FileFormatError(f"the tensor {key!r} has the wrong dtype or shape")
        if np.isinf(labels).any():
            raise FileFormatError(f"the tensor {key!r} holds infinity")
        return labels


def is_unnamed(names: tuple[str, ...]) -> bool:
    """Return whether columns have no names of their own, but their numbers "0" to str(k - 1)."""
    return names == tuple(map(str, range(len(names))))


Variable: TypeAlias = ClassSums | ColumnSums

_KIND_OF_COLUMN: dict[type[Any], type[Any]] = {ClassCodes: ClassSums, Columns: ColumnSums}
KINDS: dict[str, type[Any]] = {kind.kind: kind for kind in _KIND_OF_COLUMN.values()}


def encode_column(
    existing: Variable | None, width: int, column: Any, name: object
) -> tuple[Labels | None, Any]:
    """Return `encode` of a column; raise LabelError if its kind is not that of earlier blocks."""
    kind = _KIND_OF_COLUMN[type(column)]
    variable: Any = existing if type(existing) is kind else kind.new(width, column)
    codes, named = variable.encode(column, name)
    if codes is not None and existing is not None and existing is not variable:
        contents = {"classes": "classes", "continuous": "continuous values"}
        raise LabelError(
            f"the variable {name!r} held {contents[existing.kind]} in earlier blocks and holds "
            f"{contents[kind.kind]} in this one; give it one dtype, or fix it with "
            f"Moments(kinds={{{name!r}: {existing.kind!r}}})"
        )
    return codes, named


def look_up(variables: Mapping[VariableName, Variable], name: VariableName) -> Variable:
    """Return the variable of this name; raise UnknownVariableError if there is none."""
    try:
        return variables[name]
    except (KeyError, TypeError):  # TypeError: the name is not hashable
        names, hint = ", ".join(map(repr, variables)) or "none", ""
        if isinstance(name, tuple):
            hint = f"; for a joint variable, pass joint=[{name!r}] to Moments"
        raise UnknownVariableError(
            f"no variable {name!r} was accumulated, or none of its labels is present; the "
            f"variables are: {names}{hint}"
        ) from None


Pair: TypeAlias = tuple[VariableName, VariableName]  # in the order of `repr`
Variables: TypeAlias = Mapping[VariableName, Variable]


@dataclass(frozen=True, slots=True)
class LabelTable:
    """Immutable table of second moments of the label features f and g of every two variables."""

    # The label features of a class-coded variable are the indicators of its classes; those of a
    # continuous variable are its columns minus an origin, and an indicator of presence. In rows
    # where the label is missing, all label features of the variable are 0.

    # sum w f g^T, (k_f, k_g), by the names of f and g; without the last classes, if these have not
    # occurred in an update with labels of both
    cells: Mapping[Pair, Float] = field(default_factory=dict)
    # origin that is subtracted from the columns of each continuous variable
    origins: Mapping[VariableName, Float] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        return sum(cells.nbytes for cells in self.cells.values())

    def scaled(self, factor: float) -> LabelTable:
        cells = {pair: factor * cells for pair, cells in self.cells.items()}
        return LabelTable(cells, self.origins)

    def with_block(
        self, labels: Mapping[VariableName, Labels], variables: Variables, weight: Float | None
    ) -> LabelTable:
        """Return the table with a block, whose labels are encoded with the classes of variables."""
        origins, features = self.origins, dict[VariableName, tuple[Labels, int]]()
        for name in sorted(labels, key=repr):
            variable, column = variables[name], labels[name]
            if len(variable.names) > _MAX_COLUMNS:
                continue
            if isinstance(variable, ClassSums):
                features[name] = column, len(variable.names)
                continue
            present = np.asarray(~np.isnan(column).any(axis=1))
            if present.any():
                if name not in origins:
                    origins = {**origins, name: column[present.argmax()].copy()}
                values = np.where(present[:, None], column - origins[name], 0.0)
                features[name] = np.column_stack([values, present]), 0
        cells = dict(self.cells)
        for pair in combinations(features, 2):
            added = _products(*features[pair[0]], *features[pair[1]], weight)
            if (old := cells.get(pair)) is not None:
                added[: old.shape[0], : old.shape[1]] += old
            cells[pair] = added
        return LabelTable(cells, origins)

    def merged(
        self, other: LabelTable, sign: int, ours: Variables, theirs: Variables
    ) -> LabelTable:
        """Return the sum (sign 1) or difference (sign -1) of two tables."""
        # `ours` are the variables after the merge, and `theirs` are the variables of `other`. The
        # two tables may subtract different origins from a continuous variable, t in this table and
        # t' in `other`: a column f of `other` becomes f + (t' - t) p, with p the indicator of
        # presence.
        origins, cells = {**other.origins, **self.origins}, dict(self.cells)

        def transform(name: VariableName) -> Float:
            variable, other_variable = ours[name], theirs[name]
            if isinstance(variable, ClassSums) and isinstance(other_variable, ClassSums):
                unit = np.eye(len(variable.names))
                return unit[:, variable.positions_of(other_variable)]
            unit = np.eye(len(variable.names) + 1)
            unit[:-1, -1] = other.origins[name] - origins[name]
            return unit

        for pair, theirs_of_pair in other.cells.items():
            if max(len(ours[name].names) for name in pair) <= _MAX_COLUMNS:
                (k, m), first, second = theirs_of_pair.shape, *map(transform, pair)
                added = sign * (first[:, :k] @ theirs_of_pair @ second[:, :m].T)
                if (old := cells.get(pair)) is not None:
                    added[: old.shape[0], : old.shape[1]] += old
                cells[pair] = added
        return LabelTable(cells, origins)

    def _full(self, pair: Pair, variables: Variables) -> Float:
        """Return the sums of a pair for all classes; zeros if there are none."""
        full = np.zeros([_n_features(variables[name]) for name in pair])
        if pair in self.cells:
            k, m = self.cells[pair].shape
            full[:k, :m] = self.cells[pair]
        return full

    def pair_covariance(
        self, a: VariableName, b: VariableName, variables: Variables
    ) -> tuple[Float, float] | None:
        """Return Cov(a, b), (k_a, k_b), and the weight sum, over the rows with both labels."""
        # Return None if no row has both labels, or if a variable is left out of the table.
        first, second = sorted((a, b), key=repr)
        if max(len(variables[name].names) for name in (a, b)) > _MAX_COLUMNS:
            return None
        sums = self._full((first, second), variables)
        if first != a:
            sums = sums.T
        # The presence of a label is the sum of the indicators, or the last feature.
        classes = [isinstance(variables[name], ClassSums) for name in (a, b)]
        first_sums = sums.sum(axis=1) if classes[1] else sums[:, -1]
        second_sums = sums.sum(axis=0) if classes[0] else sums[-1]
        weight = float(first_sums.sum() if classes[0] else first_sums[-1])
        if weight <= 0:
            return None
        covariance = sums / weight - np.outer(first_sums, second_sums) / weight**2
        k, m = (len(variables[name].names) for name in (a, b))
        return covariance[:k, :m], weight

    def tensors(self, variables: Variables) -> Tensors:
        """Return the table as arrays whose names contain the positions of the variables."""
        order = list(variables)
        return {
            ".".join(str(order.index(name)) for name in pair): self._full(pair, variables)
            for pair in self.cells
        } | {f"origin.{order.index(name)}": origin for name, origin in self.origins.items()}

    @classmethod
    def read(cls, tensors: Tensors, names: Sequence[str], variables: Variables) -> LabelTable:
        """Return the table of the tensors `names`; raise FileFormatError if they are invalid."""
        order = list(variables)
        cells, origins = dict[Pair, Float](), dict[VariableName, Float]()
        for name in names:
            first, second = name.split(".")
            b = order[int(second)]
            if first == "origin":
                layout = {name: (np.float64, (len(variables[b].names),))}
                (origins[b],) = check_tensors(tensors, layout)
                continue
            a = order[int(first)]
            shape = _n_features(variables[a]), _n_features(variables[b])
            (cells[a, b],) = check_tensors(tensors, {name: (np.float64, shape)})
        for b in {name for pair in cells for name in pair} - origins.keys():
            if not isinstance(variables[b], ClassSums):
                raise FileFormatError(f"the table of labels has no origin for {b!r}")
        return cls(cells, origins)


def _n_features(variable: Variable) -> int:
    return len(variable.names) + (not isinstance(variable, ClassSums))


def _products(f: Labels, k: int, g: Labels, m: int, weight: Float | None) -> Float:
    """Return sum w f g^T, with f and g class codes below k and m, (n,), or values, (n, ...)."""
    # Codes + 1, so that missing labels, with code -1, are counted in bin 0.
    if f.ndim == g.ndim == 1:
        sums = np.bincount((f + 1) * (m + 1) + g + 1, weight, (k + 1) * (m + 1))
        return sums.reshape(k + 1, m + 1)[1:, 1:].astype(np.float64)
    if f.ndim == 2 and g.ndim == 1:
        return _products(g, m, f, k, weight).T
    weighted = g if weight is None else g * weight[:, None]
    if f.ndim == 2:
        return np.asarray(f.T @ weighted)
    return np.array([np.bincount(f + 1, column, k + 1)[1:] for column in weighted.T]).T
