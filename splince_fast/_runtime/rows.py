"""Conversion of rows, masks and weights from any container to checked arrays, and names."""

from __future__ import annotations

import operator
import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from splince_fast._kernels import row_kernels
from splince_fast._runtime import threads
from splince_fast.exceptions import InputError, NonFiniteError

_FLOAT32: np.dtype[np.generic] = np.dtype(np.float32)
_FLOAT64: np.dtype[np.generic] = np.dtype(np.float64)

# Byte order of a dtype that spells out the order of this machine, such as "<f4". Such arrays equal
# those of "=f4", but buffers of them have another format, which the kernels refuse.
SPELLED = "<" if sys.byteorder == "little" else ">"

# Weights that a kernel for sparse rows gets if every row has weight 1.
NO_WEIGHT = np.empty(0)

# Machine epsilon by dtype; rows of other dtypes count as exact.
_EPS = {"float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}

# Minimum number of elements per thread: one thread scans smaller arrays faster.
_GRAIN = 1 << 18

# Sources read and moments accumulate rows in blocks of at most this many rows and bytes.
BLOCK_ROWS = 4096
BLOCK_BYTES = 64 << 20
_MOST_ROWS = 1 << 31

# Largest magnitude of sparse numbers: sums of squares of larger ones may overflow float64.
_LARGEST = 1e149


# -- any container to an array -------------------------------------------------------------------


def to_array(X: Any, name: str) -> NDArray[Any]:
    """Convert any container to an array of any dtype in its plain spelling, a view if possible."""
    array: NDArray[Any] = X if type(X) is np.ndarray else _foreign(X, name)
    return array.view(np.dtype(array.dtype.str)) if array.dtype.byteorder == SPELLED else array


def _foreign(X: Any, name: str) -> NDArray[Any]:
    """Convert a tensor, frame or subclass of ndarray by its own methods, others by np.asarray."""
    if is_tensor(X):
        return torch_to_numpy(X)
    refuse_lazy(X, name)
    if X is None:
        raise InputError(f"{name} is None; pass an array of real numbers")
    if isinstance(X, str | bytes | os.PathLike):
        kind = "path" if isinstance(X, os.PathLike) else "string"
        raise InputError(f"{name} is a {kind}; load the file first, for example by np.load(path)")
    if isinstance(X, np.ma.MaskedArray) and np.ma.is_masked(X):
        raise InputError(f"{name} has masked entries; fill them by {name}.filled(value)")
    if is_sparse(X):
        raise InputError(
            f"{name} is sparse; use Moments(covariance_type='diag'), or pass rows reduced by "
            f"TruncatedSVD, or blocks {name}[i:j].toarray()"
        )
    try:
        if hasattr(X, "null_count") and hasattr(X, "to_pylist"):
            X = X.to_numpy(zero_copy_only=False)  # Arrow lists become one array per row
        return np.asarray(X.to_numpy() if hasattr(X, "to_numpy") else X)
    except (ValueError, TypeError, RuntimeError) as error:
        raise InputError(
            f"{name} cannot be read as an array: {cause_text(error)}. Rows of unequal length are a "
            "common cause; pass a 2-D array of numbers"
        ) from error


def torch_to_numpy(tensor: Any) -> NDArray[Any]:
    """Return a torch tensor as a NumPy array, a view if possible; convert bfloat16 to float32."""
    try:
        tensor = tensor.detach().cpu()
        if str(tensor.dtype) == "torch.bfloat16":
            tensor = tensor.float()
        if hasattr(tensor, "resolve_neg"):
            tensor = tensor.resolve_neg()
        return tensor.numpy()  # type: ignore[no-any-return]
    except (TypeError, RuntimeError, NotImplementedError) as error:
        raise InputError(
            f"the tensor gives no NumPy array ({error}); pass a dense one, such as tensor.float()"
        ) from error


def is_sparse(X: object) -> bool:
    """Return whether X is a SciPy sparse matrix or array, without importing SciPy."""
    return hasattr(X, "tocsr") and hasattr(X, "nnz")


def is_tensor(X: object) -> bool:
    """Return whether X is a torch tensor, without importing torch."""
    return hasattr(X, "detach") and hasattr(X, "cpu")


def refuse_lazy(X: object, name: str) -> None:
    """Raise InputError for a dask array or another lazy container."""
    graph = getattr(X, "__dask_graph__", None)
    # __dask_graph__ returns None for an xarray object in memory.
    is_dask = graph is not None and graph() is not None
    if is_dask or (hasattr(X, "collect") and not hasattr(X, "to_numpy")):
        raise InputError(
            f"{name} is a lazy {type(X).__name__}; {'compute' if is_dask else 'collect'}() it, or "
            "accumulate a dask array by Moments.from_blocks(sources.from_dask(X, labels))"
        )


# -- numbers and rows ----------------------------------------------------------------------------


def as_numbers(X: Any, name: str = "X") -> NDArray[Any]:
    """Convert X to real numbers of any dtype and number of dimensions; float64 for objects."""
    array = to_array(X, name)
    if holds_vectors(array):
        array = _stacked(array.reshape(-1), name)
    if array.dtype.kind in "fiub" or array.dtype.name == "bfloat16":
        return array
    if array.dtype != object:
        advice = "real numbers are needed"
        if array.dtype.kind == "c":  # the first sentence is that of scikit-learn
            advice = "Complex data not supported. Pass real and imaginary parts as columns"
        raise InputError(f"{name} has dtype {array.dtype}; {advice}")
    if _has_text(array.flat):
        location = ""
        if array.ndim == 2:
            text_columns = [j for j in range(array.shape[1]) if _has_text(array[:, j])]
            location = f" in {listed_columns(text_columns, column_names(X))}"
        raise InputError(
            f"{name} holds text{location}; real numbers are needed. Drop columns of labels and "
            f"ids, and convert texts of digits by {name}.astype(float)"
        )
    try:
        return array.astype(np.float64)
    except (ValueError, TypeError, OverflowError) as error:
        raise InputError(f"{name} holds values that are not numbers: {error}") from error


def holds_vectors(X: NDArray[np.generic]) -> bool:
    """Return whether X is an object array of vectors, the format of embeddings in data frames."""
    if X.dtype != object or not X.size or X.shape[:1] != (X.size,) or X.ndim > 2:
        return False
    first = X.reshape(-1)[0]
    return hasattr(first, "__len__") and (X.ndim == 1 or not isinstance(first, str | bytes))


def _stacked(column: NDArray[np.generic], name: str) -> NDArray[np.generic]:
    """Stack an object array of vectors into a matrix."""
    try:
        if _has_text(column):
            raise TypeError("text is no vector")
        return to_array(np.stack([np.asarray(vector) for vector in column]), name)
    except (ValueError, TypeError) as error:
        raise InputError(
            f"{name} is a column that cannot be stacked to a matrix: {cause_text(error)}; drop "
            "rows without a vector of the same length"
        ) from error


def _has_text(values: Iterable[object]) -> bool:
    return any(isinstance(value, str | bytes) for value in values)


def as_rows(
    X: object, *, width: int | None = None, name: str = "X", earlier: str = "earlier rows"
) -> NDArray[Any]:
    """Convert X to a numeric array (n, d), with `width` columns, without copying a numeric array.

    `name` and `earlier` name X and the rows that determine `width` in the errors.
    """
    array = as_numbers(X, name)
    if array.ndim != 2:
        hint = "; for a single row pass it as X[None, :]" if array.ndim == 1 else ""
        raise InputError(
            f"{name} has {array.ndim} dimension(s) and shape {array.shape}; it must be 2-D, one "
            f"row per sample and one column per feature{hint}"
        )
    check_columns(array.shape, width, name, earlier)
    return array


def as_reals(values: object, name: str) -> NDArray[np.float64]:
    """Return a copy of an argument as an array of float64."""
    return as_numbers(values, name).astype(np.float64)


def check_columns(
    shape: tuple[int, ...], width: int | None, name: str, earlier: str = "earlier rows"
) -> None:
    """Raise InputError unless a 2-D shape has columns; with `width`, exactly `width` columns."""
    if shape[1] == 0:
        raise InputError(f"{name} has no columns (shape {shape}); at least one is needed")
    if width is not None and shape[1] != width:
        raise InputError(
            f"{name} has {shape[1]} columns, and {width} are expected, as in {earlier}"
        )


@dataclass(slots=True)
class Rows:
    """A block of rows with its working dtype."""

    array: Any  # (n, d) real numbers of any dtype and layout; a CSR matrix in SparseRows
    dtype: np.dtype[np.generic]  # float32 for floats of at most 32 bits, else float64
    direct: bool  # whether the kernels read `array` without a copy: `dtype`, C-contiguous, aligned
    eps: float = 0.0  # machine epsilon of the rows before conversion; 0 for float64 and integers

    @classmethod
    def of(cls, X: object, *, width: int | None = None, name: str = "X") -> Rows:
        """Convert the rows of a caller; parameters and errors are those of :func:`as_rows`."""
        if type(X) is np.ndarray and X.ndim == 2 and X.shape[1]:
            dtype, has_width = X.dtype, width is None or X.shape[1] == width
            if has_width and (dtype is _FLOAT32 or dtype is _FLOAT64):
                direct = bool(X.flags.c_contiguous and X.flags.aligned)
                return cls(X, dtype, direct, _EPS["float32"] if dtype is _FLOAT32 else 0.0)
        return cls.from_array(as_rows(X, width=width, name=name), getattr(X, "dtype", None))

    @classmethod
    def from_array(cls, array: NDArray[np.generic], dtype: object = None) -> Rows:
        """Wrap a 2-D array of real numbers; `dtype` is that of the rows before conversion."""
        work, flags = working_dtype(array.dtype), array.flags
        direct = bool(array.dtype == work and flags.c_contiguous and flags.aligned)
        return cls(array, work, direct, max(eps_of(dtype), eps_of(array.dtype)))

    def __len__(self) -> int:
        return int(self.array.shape[0])

    @property
    def width(self) -> int:
        return int(self.array.shape[1])

    def select(self, index: NDArray[np.intp]) -> Rows:
        """Return the rows with the positions in `index`."""
        rows = Rows.from_array(self.array[index])
        rows.eps = self.eps
        return rows

    def check(self, name: str = "X") -> None:
        """Raise an error unless all numbers are finite and sums of squares fit in float64."""
        X, is_finite = self.array, row_kernels.squares_finite
        if X.dtype.kind in "iub" or not len(X):
            return
        step = max(1, _GRAIN // X.shape[1])

        def scan(start: int, stop: int) -> bool:
            if self.direct:
                return is_finite(X, start, stop)
            pieces = (X[first : min(first + step, stop)] for first in range(start, stop, step))
            copies = (piece.astype(self.dtype, order="C") for piece in pieces)
            return all(is_finite(copy, 0, len(copy)) for copy in copies)

        if all(threads.split(scan, len(X), grain=step)):
            return
        # bfloat16 is not of the dtype kind "f", and is converted.
        finite = np.isfinite(X if X.dtype.kind == "f" else X.astype(np.float32))
        rows, columns = (np.flatnonzero(~finite.all(axis=axis)) for axis in (1, 0))
        self._refuse(rows, columns.tolist(), 0.0 if len(rows) else np.abs(X).max(), name)

    def _refuse(
        self, rows: NDArray[np.intp], columns: Sequence[int], largest: float, name: str
    ) -> None:
        """Raise the error for numbers that are not finite, in these rows and columns, or large."""
        if not len(rows):
            raise InputError(
                f"the squares of {name} (up to {float(largest):.1e}) overflow float64; rescale it"
            )
        location = f", {listed_columns(columns)}" if columns else ""
        error = NonFiniteError(
            f"{name} contains NaN or infinity in {len(rows)} of {len(self)} rows "
            f"({'row' if len(rows) == 1 else 'rows'} {abbreviated(rows)}){location}; drop or "
            "repair them. Half precision overflows to infinity above 65504"
        )
        error.columns = tuple(columns)
        raise error


class SparseRows(Rows):
    """A block of sparse rows; `array` is a CSR matrix (n, d) without duplicate indices."""

    __slots__ = ()

    @classmethod
    def of(cls, X: Any, *, width: int | None = None, name: str = "X") -> SparseRows:
        """Convert a matrix in any format of scipy.sparse; errors are those of `as_rows`."""
        if X.ndim != 2 or X.dtype.kind not in "fiub":
            raise InputError(
                f"{name} has shape {X.shape} and dtype {X.dtype}; pass (n, d) real numbers"
            )
        check_columns(X.shape, width, name)
        array = X.tocsr()
        try:
            array = type(array)((array.data, array.indices, array.indptr), array.shape)
            array.check_format(full_check=True)  # the kernels do not check indices
        except ValueError as error:
            raise InputError(
                f"{name} is a damaged sparse matrix: {cause_text(error)}; make it again"
            ) from error
        if not array.has_canonical_format:
            array = array.copy()
            array.sum_duplicates()
        return cls(array, _FLOAT64, False)

    def select(self, index: NDArray[np.intp]) -> SparseRows:
        """Return the rows with the positions in `index`."""
        return SparseRows(self.array[index], _FLOAT64, False)

    def check(self, name: str = "X") -> None:
        """Check the stored numbers as :meth:`Rows.check` does."""
        data = self.array.data
        if data.dtype.kind == "f" and len(data):
            largest = max(float(data.max()), -float(data.min()))
            if not largest <= _LARGEST:
                entries = np.flatnonzero(~np.isfinite(data))
                rows = np.unique(np.searchsorted(self.array.indptr, entries, side="right") - 1)
                self._refuse(rows, (), largest, name)


def parts(array: Any) -> tuple[NDArray[np.float64], NDArray[Any], NDArray[Any]]:
    """Return the data in float64, the indices and the indptr of a CSR matrix, for the kernels."""
    return array.data.astype(np.float64, copy=False), array.indices, array.indptr


def subtracted(array: Any, shift: NDArray[np.float64]) -> Any:
    """Return array - shift as float64 CSR; columns of nonzero `shift`, (d,), become dense."""
    import scipy.sparse

    columns, n = np.flatnonzero(shift), array.shape[0]
    indptr = np.arange(0, n * len(columns) + 1, max(1, len(columns)))[: n + 1]
    repeated = np.tile(shift[columns], n), np.tile(columns, n), indptr
    return array.astype(np.float64) - scipy.sparse.csr_array(repeated, array.shape)


def working_dtype(dtype: np.dtype[np.generic]) -> np.dtype[np.generic]:
    """Return float32 for floats of at most 32 bits, float64 for other dtypes."""
    is_small = dtype.name == "bfloat16" or (dtype.kind == "f" and dtype.itemsize <= 4)
    return _FLOAT32 if is_small else _FLOAT64


def eps_of(dtype: object) -> float:
    """Return the machine epsilon of a dtype of NumPy or torch; 0 for float64 and integers."""
    name = getattr(dtype, "name", None) or str(dtype).removeprefix("torch.")
    return _EPS.get(name, 0.0)


def check_values(X: NDArray[np.generic], name: str = "X") -> None:
    """Apply :meth:`Rows.check` to an array."""
    Rows.from_array(X).check(name)


# -- names of features ---------------------------------------------------------------------------


def column_names(X: Any) -> list[Any] | None:
    """Return the column names of a data frame or Arrow table; None for other types."""
    if hasattr(X, "columns") and (hasattr(X, "to_numpy") or hasattr(X, "column_names")):
        return list(X.columns if hasattr(X, "to_numpy") else X.column_names)
    return None


def feature_names(X: object, width: int) -> tuple[str, ...] | None:
    """Return the names of the `width` features of a frame as text; None if they have no names.

    The features of a column of vectors, and columns numbered 0, 1, ..., have no names.
    """
    columns = column_names(X) or []
    names, numbers = tuple(map(repr, columns)), tuple(map(str, range(width)))
    if len(names) != width or names == numbers:
        return None
    texts = tuple(map(str, columns))
    return texts if len(set(texts)) == len(set(columns)) else names  # 1 and "1"


def check_feature_names(
    names: Sequence[str] | None, expected: Sequence[str] | None, name: str = "X"
) -> None:
    """Raise InputError unless the feature names of rows equal `expected` in the same order.

    None stands for rows without names; such rows, and rows of another width, are not compared.
    """
    if names is None or expected is None or len(names) != len(expected):
        return
    if set(names) != set(expected):
        new, missing = (sorted(set(a) - set(b)) for a, b in ((names, expected), (expected, names)))
        raise InputError(
            f"the columns of {name} differ from those of earlier rows "
            f"({abbreviated(range(len(new)), new)} new; "
            f"{abbreviated(range(len(missing)), missing)} missing); pass the same features, or "
            f"{name}.to_numpy() where only their names changed"
        )
    for j, (new_name, old_name) in enumerate(zip(names, expected, strict=True)):
        if new_name != old_name:
            raise InputError(
                f"the columns of {name} are in another order than those of earlier rows (column "
                f"{j} is {new_name!r}, and was {old_name!r}); see `feature_names`"
            )


def checked_names(
    X: object, width: int, expected: Sequence[str] | None, *, first: bool = False
) -> tuple[str, ...] | None:
    """Return the feature names of X, compared with those of earlier rows unless X is the first.

    Columns numbered 0, 1, ... are compared only with the same numbers in another order.
    """
    columns = column_names(X)
    names = None if columns is None else feature_names(X, width)
    if not first and columns is not None and len(columns) == width:
        numbers = tuple(map(str, range(width)))
        current, earlier = names or numbers, expected or numbers
        if (names and expected) or set(current) == set(earlier):
            check_feature_names(current, earlier)
    return names


def name_columns(error: NonFiniteError, names: Sequence[object] | None) -> None:
    """Replace column numbers in the text of an error by the column names of a data frame."""
    if names is not None and error.columns:
        numbers, named = listed_columns(error.columns), listed_columns(error.columns, names)
        error.args = (str(error).replace(f"), {numbers};", f"), {named};", 1),)
        error.columns = ()


# -- masks, weights and numbers of rows ----------------------------------------------------------


def as_mask(mask: Any, shape: tuple[int, ...]) -> NDArray[np.bool_]:
    """Convert a mask to booleans; raise InputError unless it has `shape` and holds only 0 and 1."""
    array = to_array(mask, "mask")
    if array.shape != shape:
        raise InputError(
            f"mask has shape {array.shape}; it must have that of X without the features, {shape}"
        )
    if array.dtype.kind not in "biuf" or not ((array == 0) | (array == 1)).all():
        raise InputError("mask must hold True and False, or 1 and 0, such as an attention_mask")
    return array.astype(np.bool_, copy=False)


def as_weights(sample_weight: object, n_rows: int) -> NDArray[np.float64] | None:
    """Convert weights to float64; raise InputError for a wrong shape or invalid values."""
    if sample_weight is None:
        return None
    weight = as_reals(sample_weight, "sample_weight")
    if weight.ndim == 0:
        weight = np.full(n_rows, float(weight))
    if weight.shape != (n_rows,):
        raise InputError(
            f"sample_weight has shape {weight.shape} for {n_rows} rows; pass one weight per row"
        )
    valid = (weight == 0) | ((weight >= 1e-50) & (weight <= 1e50))
    if not valid.all():
        raise InputError(
            f"sample_weight holds {weight[~valid][0]:.1e}; weights must be finite, non-negative, "
            "0 for rows to leave out, others between 1e-50 and 1e50: divide all by their mean"
        )
    return weight


def choose_block_rows(block_rows: int | None, n_features: int, itemsize: int) -> int:
    """Return `block_rows`; for None, 4096, or fewer so that a block stays within 64 MiB."""
    if block_rows is None:
        return max(1, min(BLOCK_ROWS, BLOCK_BYTES // max(1, n_features * itemsize)))
    return check_block_rows(block_rows)


def check_block_rows(block_rows: object) -> int:
    """Return `block_rows` as an int; raise InputError unless it lies between 1 and 2**31."""
    try:
        rows = operator.index(block_rows)  # type: ignore[arg-type]
    except TypeError:
        rows = 0
    if not 1 <= rows <= _MOST_ROWS or isinstance(block_rows, bool):
        raise InputError(
            f"block_rows is {block_rows!r}; it must be a positive integer, at most {_MOST_ROWS:,}"
        )
    return rows


def splitmix64(numbers: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Hash row numbers; the hash of a row decides its fold, and whether it is sampled."""
    # The finaliser of SplitMix64 (Steele, Lea and Flood 2014).
    mixed = (numbers + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray(mixed ^ (mixed >> np.uint64(31)))


# -- parts of messages ---------------------------------------------------------------------------


def cause_text(error: BaseException) -> str:
    """Return the text of an error without its full stop, to be continued in another message."""
    return str(error).rstrip(". \n")


def listed_columns(numbers: Sequence[int], names: Sequence[object] | None = None) -> str:
    """Format a list of columns for an error message, by name if `names` is not None."""
    return f"column{'s' * (len(numbers) > 1)} {abbreviated(numbers, names)}"


def abbreviated(numbers: Iterable[int], names: Sequence[object] | None = None) -> str:
    """Format the first five of `numbers`, or the names at these positions; ", ..." for the rest."""
    items = [str(i) if names is None else repr(names[i]) for i in numbers]
    return ", ".join(items[:5]) + ", ..." * (len(items) > 5)
