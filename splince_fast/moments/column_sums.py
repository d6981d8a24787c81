"""Sums over the labelled rows of a continuous variable z.

The sums are the number of rows, the weight sum, sum w (x - r), sum w (z - t),
sum w (z - t)(x - r)^T and sum w (z - t)(z - t)^T, with the reference points r of x and t of z.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NoReturn

import numpy as np
from numpy.typing import NDArray

from splince_fast._kernels import spans
from splince_fast._kernels.row_kernels import Addition, Assignment, Change
from splince_fast._runtime.files import Layout, Tensors, check_tensors
from splince_fast.exceptions import FileFormatError, IncompatibleMomentsError, LabelError
from splince_fast.labels import Columns
from splince_fast.moments.block import LabelSums
from splince_fast.moments.class_sums import denominator, refuse_other_kind
from splince_fast.moments.state import EPS64

Float = NDArray[np.float64]

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
