"""Validation and centring of sparse rows, without dense copies."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from splince_fast._runtime.rows import Rows, check_columns, non_finite_error
from splince_fast.exceptions import InputError

# Largest allowed magnitude: sums of squares of larger numbers may overflow float64.
_LARGEST = 1e149
_FLOAT64 = np.dtype(np.float64)


class SparseRows(Rows):
    """A block of sparse rows; `array` is a CSR matrix (n, d) without duplicate indices."""

    __slots__ = ()

    @classmethod
    def of(cls, X: Any, *, width: int | None = None, name: str = "X") -> SparseRows:
        """Convert a matrix in any format of scipy.sparse; errors are those of `as_rows`."""
        if X.ndim != 2:
            raise InputError(f"{name} has shape {X.shape}; it must be 2-D")
        check_columns(X.shape, width, name)
        if X.dtype.kind not in "fiub":
            raise InputError(f"{name} has dtype {X.dtype}; real numbers are needed")
        array = X.tocsr()
        _check_indices(array, name)
        if not array.has_canonical_format:
            array = array.copy() if array is X else array
            array.sum_duplicates()
        return cls(array, _FLOAT64, False)

    def __len__(self) -> int:
        return int(self.array.shape[0])

    def select(self, index: NDArray[np.intp]) -> SparseRows:
        """Return the rows with the positions in `index`."""
        return SparseRows(self.array[index], _FLOAT64, False)

    def check(self, name: str = "X") -> None:
        """Check the stored numbers as :meth:`Rows.check` does."""
        array: Any = self.array
        data = array.data
        if data.dtype.kind != "f" or not len(data):
            return
        largest = max(float(data.max()), -float(data.min()))
        if largest <= _LARGEST:
            return
        non_finite = np.flatnonzero(~np.isfinite(data))
        if len(non_finite):
            rows = np.unique(np.searchsorted(array.indptr, non_finite, side="right") - 1)
            raise non_finite_error(rows, len(self), name)
        raise InputError(
            f"{name} holds numbers as large as {largest:.1e}, whose squares leave the range of "
            "float64; rescale the data"
        )


def _check_indices(array: Any, name: str) -> None:
    """Raise InputError for an index out of bounds; the kernels do not check indices."""
    (n, d), indices, indptr = array.shape, array.indices, array.indptr
    valid = len(indptr) == n + 1 and indptr[0] == 0 and bool((np.diff(indptr) >= 0).all())
    valid = valid and int(indptr[-1]) <= min(len(indices), len(array.data))
    stored = indices[: indptr[-1]] if valid else indices[:0]
    if not valid or (len(stored) and (stored.min() < 0 or stored.max() >= d)):
        raise InputError(
            f"{name} is a damaged sparse matrix: its indices point outside of {n} x {d}; make it "
            "again, or call its check_format() for details"
        )


def parts(array: Any) -> tuple[NDArray[np.float64], NDArray[Any], NDArray[Any]]:
    """Return the data in float64, the indices and the indptr of a CSR matrix, for the kernels."""
    return array.data.astype(np.float64, copy=False), array.indices, array.indptr


def subtracted(array: Any, shift: NDArray[np.float64]) -> Any:
    """Return array - shift as float64 CSR; columns of nonzero `shift`, (d,), become dense."""
    import scipy.sparse

    columns, n = np.flatnonzero(shift), array.shape[0]
    stored = array.indptr[-1]
    indices, data = array.indices[:stored], array.data[:stored]
    position = np.full(len(shift), -1, np.intp)
    position[columns] = np.arange(len(columns))
    row = np.repeat(np.arange(n), np.diff(array.indptr))
    shifted = position[indices] >= 0
    implicit = np.ones((n, len(columns)), bool)
    implicit[row[shifted], position[indices[shifted]]] = False
    zero_rows, zero_columns = np.nonzero(implicit)
    column = np.concatenate([indices, columns[zero_columns]])
    values = np.concatenate([data.astype(np.float64), np.zeros(len(zero_rows))]) - shift[column]
    coordinates = np.concatenate([row, zero_rows]), column
    return scipy.sparse.coo_array((values, coordinates), shape=array.shape).tocsr()
