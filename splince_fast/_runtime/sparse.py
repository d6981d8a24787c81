"""Sparse rows as they come in: compressed, looked at once, and never made dense."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from splince_fast._runtime.arrays import Rows, check_columns, non_finite
from splince_fast.exceptions import InputError

# Squares of larger numbers leave the range of float64 when they are summed.
_LARGEST = 1e149
_FLOAT64: np.dtype[Any] = np.dtype(np.float64)


class SparseRows(Rows):
    """A block of sparse rows.

    Attributes
    ----------
    array : scipy.sparse CSR matrix or array of shape (n, d)
        Real numbers without duplicates.
    """

    __slots__ = ()

    @classmethod
    def of(cls, X: Any, *, width: int | None = None, name: str = "X") -> SparseRows:
        """Look at what a caller passed, in any format of scipy.sparse; it is not changed.

        Raises
        ------
        InputError
            Not 2-D, no columns, not real numbers, or not `width` columns.
        """
        if X.ndim != 2:
            raise InputError(f"{name} has shape {X.shape}; it must be 2-D")
        check_columns(X.shape, width, name)
        if X.dtype.kind not in "fiub":
            raise InputError(f"{name} has dtype {X.dtype}; real numbers are needed")
        found = X.tocsr()
        _check_indices(found, name)
        if not found.has_canonical_format:
            found = found.copy() if found is X else found
            found.sum_duplicates()
        return cls(found, _FLOAT64, False)

    def __len__(self) -> int:
        return int(self.array.shape[0])

    def taken(self, index: NDArray[np.intp]) -> SparseRows:
        """Some rows, by position."""
        return SparseRows(self.array[index], _FLOAT64, False)

    def check(self, name: str = "X") -> None:
        """As :meth:`Rows.check`, of what is stored."""
        array: Any = self.array
        data = array.data
        if data.dtype.kind != "f" or not len(data):
            return
        largest = max(float(data.max()), -float(data.min()))
        if largest <= _LARGEST:
            return
        bad = np.flatnonzero(~np.isfinite(data))
        if len(bad):
            rows = np.unique(np.searchsorted(array.indptr, bad, side="right") - 1)
            raise non_finite(rows, len(self), name)
        raise InputError(
            f"{name} holds numbers as large as {largest:.1e}, whose squares leave the range of "
            "float64; rescale the data"
        )


def _check_indices(array: Any, name: str) -> None:
    """Raise InputError where an index points outside: the kernels do not look at it again."""
    (n, d), indices, indptr = array.shape, array.indices, array.indptr
    sound = len(indptr) == n + 1 and indptr[0] == 0 and bool((np.diff(indptr) >= 0).all())
    sound = sound and int(indptr[-1]) <= min(len(indices), len(array.data))
    stored = indices[: indptr[-1]] if sound else indices[:0]
    if not sound or (len(stored) and (stored.min() < 0 or stored.max() >= d)):
        raise InputError(
            f"{name} is a damaged sparse matrix: its indices point outside of {n} x {d}; make it "
            "again, or see what its check_format() says"
        )


def parts(array: Any) -> tuple[NDArray[np.float64], NDArray[Any], NDArray[Any]]:
    """data in float64, indices and indptr of a CSR matrix, as the kernels take them."""
    return array.data.astype(np.float64, copy=False), array.indices, array.indptr


def subtracted(array: Any, shift: NDArray[np.float64]) -> Any:
    """array - shift of a CSR matrix, sparse, float64; columns of a shift are stored throughout.

    Parameters
    ----------
    shift : (d,) float64
        0 but for columns that have few implicit zeros, which become stored numbers.
    """
    import scipy.sparse

    columns, n = np.flatnonzero(shift), array.shape[0]
    stored = array.indptr[-1]
    indices, data = array.indices[:stored], array.data[:stored]
    position = np.full(len(shift), -1, np.intp)
    position[columns] = np.arange(len(columns))
    row = np.repeat(np.arange(n), np.diff(array.indptr))
    there = position[indices] >= 0
    absent = np.ones((n, len(columns)), bool)
    absent[row[there], position[indices[there]]] = False
    rows, missing = np.nonzero(absent)
    column = np.concatenate([indices, columns[missing]])
    numbers = np.concatenate([data.astype(np.float64), np.zeros(len(rows))]) - shift[column]
    where = np.concatenate([row, rows]), column
    return scipy.sparse.coo_array((numbers, where), shape=array.shape).tocsr()
