"""The one conversion of rows, masks and weights: any container to an array, names and checks."""

from __future__ import annotations

import operator
import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
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


# -- any container to an array -------------------------------------------------------------------


def to_array(X: Any, name: str) -> NDArray[Any]:
    """Convert any container to an array of any dtype in its plain spelling, a view if possible."""
    array: NDArray[Any] = X if type(X) is np.ndarray else _foreign(X, name)
    return array.view(np.dtype(array.dtype.str)) if array.dtype.byteorder == SPELLED else array


def _foreign(X: Any, name: str) -> NDArray[Any]:
    """Convert a tensor, frame or subclass of ndarray by its own methods, others by np.asarray."""
    if X is None:
        raise InputError(f"{name} is None; pass an array of real numbers")
    if isinstance(X, str | bytes | os.PathLike):
        kind = "path" if isinstance(X, os.PathLike) else "string"
        raise InputError(f"{name} is a {kind}; load the file first, for example by np.load(path)")
    if isinstance(X, np.ma.MaskedArray):
        if np.ma.is_masked(X):
            raise InputError(
                f"{name} is a masked array with masked entries; fill them, or drop their rows: "
                f"{name}.filled(value), or np.ma.compress_rows({name})"
            )
        return X.data
    if isinstance(X, np.ndarray):
        return np.asarray(X) if isinstance(X, np.matrix) else X
    if is_tensor(X):
        return torch_to_numpy(X)
    if is_sparse(X):
        raise InputError(
            f"{name} is a sparse matrix, whose covariance is dense; accumulate it with "
            "Moments(covariance_type='diag'), which keeps no d x d matrix, reduce it first, as "
            f"sklearn.decomposition.TruncatedSVD does, or pass {name}[i:j].toarray() block by block"
        )
    refuse_lazy(X, name)
    if hasattr(X, "type") and hasattr(X, "null_count") and hasattr(X, "to_pylist"):
        X = X.to_numpy(zero_copy_only=False)  # an Arrow column of lists becomes an array per row
    try:
        return np.asarray(X.to_numpy() if hasattr(X, "to_numpy") else X)
    except (ValueError, TypeError) as error:
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
            f"the tensor gives no NumPy array ({error}); pass a dense one of a dtype that NumPy "
            "has, such as tensor.to(torch.float32), and not on the meta device"
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
    verb = "compute" if graph is not None and graph() is not None else None
    if verb is None and hasattr(X, "collect") and not hasattr(X, "to_numpy"):
        verb = "collect"
    if verb is not None:
        raise InputError(
            f"{name} is a lazy {type(X).__name__}, which would be loaded into memory completely; "
            f"accumulate a dask array by Moments.from_blocks(sources.from_dask(X, labels)), which "
            f"from_moments turns into an estimator, pass others block by block to Moments.update, "
            f"or {verb}() it first where it fits"
        )


# -- numbers and rows ----------------------------------------------------------------------------


def as_numbers(X: Any, name: str = "X") -> NDArray[Any]:
    """Convert X to real numbers of any dtype and number of dimensions; float64 for objects."""
    array = to_array(X, name)
    if holds_vectors(array):
        array = _stacked(array.reshape(-1), name)
    if array.dtype.kind not in "fiub" and array.dtype.name != "bfloat16":
        array = _cast_rows(array, name, column_names(X))
    return array


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
            f"{name} is a column that cannot be stacked to a matrix: {cause_text(error)}. Every "
            "entry must be a vector of the same length; drop rows without one"
        ) from error


def _cast_rows(X: NDArray[np.generic], name: str, columns: list[Any] | None) -> NDArray[Any]:
    """Convert an object array of numbers to float64; raise InputError for other dtypes."""
    if X.dtype == object:
        if _has_text(X.flat):
            location = ""
            if X.ndim == 2:
                text_columns = [j for j in range(X.shape[1]) if _has_text(X[:, j])]
                location = f" in {listed_columns(text_columns, columns)}"
            raise InputError(
                f"{name} holds text{location}; real numbers are needed. Drop columns of labels and "
                f"ids, and convert texts of digits by {name}.astype(float)"
            )
        try:
            return X.astype(np.float64)
        except (ValueError, TypeError, OverflowError) as error:
            raise InputError(f"{name} holds values that are not numbers: {error}") from error
    if X.dtype.kind == "c":
        raise InputError(  # scikit-learn's estimator checks require "Complex data not supported"
            f"{name} is complex ({X.dtype}). Complex data not supported; pass real numbers, such "
            "as real and imaginary parts stacked as columns"
        )
    raise InputError(f"{name} has dtype {X.dtype}; real numbers are needed")


def _has_text(values: Iterable[object]) -> bool:
    return any(isinstance(value, str | bytes) for value in values)


def as_rows(
    X: object, *, width: int | None = None, name: str = "X", earlier: str = "earlier rows"
) -> NDArray[Any]:
    """Convert X to a numeric array (n, d) without copying a numeric array.

    Raises InputError unless X holds real numbers in two dimensions and, with `width`, has so many
    columns. `name` and `earlier` name X and the rows that determine `width` in messages.
    """
    array = as_numbers(X, name)
    if array.ndim != 2:
        hint = " for a single row pass it as X[None, :]" if array.ndim == 1 else ""
        raise InputError(
            f"{name} has {array.ndim} dimension(s) and shape {array.shape}; it must be 2-D, one "
            f"row per sample and one column per feature;{hint}".rstrip(";")
        )
    if array.shape[1] != width:
        check_columns(array.shape, width, name, earlier)
    return array


def as_reals(values: object, name: str) -> NDArray[np.float64]:
    """Convert an argument to an array of float64; raise InputError unless it holds real numbers."""
    try:
        array = np.asarray(values)
        if array.dtype.kind not in "fiubO":
            raise TypeError(f"dtype {array.dtype}")
        return array.astype(np.float64)
    except (ValueError, TypeError) as error:
        raise InputError(f"{name} cannot be read as an array of real numbers: {error}") from error


def check_columns(
    shape: tuple[int, ...], width: int | None, name: str, earlier: str = "earlier rows"
) -> None:
    """Raise InputError unless a 2-D shape has columns; with `width`, exactly `width` columns."""
    if shape[1] == 0:
        raise InputError(f"{name} has no columns (shape {shape}); at least one is needed")
    if width is not None and shape[1] != width:
        raise InputError(
            f"{name} has {shape[1]} columns, and {width} are expected, as in {earlier}; pass rows "
            "of the same embedding"
        )


@dataclass(slots=True)
class Rows:
    """A block of rows with its working dtype."""

    array: NDArray[Any]  # (n, d) real numbers of any dtype and layout
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
        return len(self.array)

    def select(self, index: NDArray[np.intp]) -> Rows:
        """Return the rows with the positions in `index`."""
        rows = Rows.from_array(self.array[index])
        rows.eps = self.eps
        return rows

    @property
    def width(self) -> int:
        return int(self.array.shape[1])

    def check(self, name: str = "X") -> None:
        """Raise an error unless all numbers are finite and sums of squares fit in float64."""
        X = self.array
        if X.dtype.kind in "iub" or not len(X):
            return
        step = max(1, _GRAIN // X.shape[1])
        if self.direct:
            if len(X) <= step:
                if row_kernels.squares_finite(X, 0, len(X)):
                    return
            elif all(threads.split(partial(row_kernels.squares_finite, X), len(X), grain=step)):
                return
        else:
            pieces = (X[start : start + step] for start in range(0, len(X), step))
            converted = (piece.astype(self.dtype, order="C") for piece in pieces)
            if all(row_kernels.squares_finite(piece, 0, len(piece)) for piece in converted):
                return
        _raise_non_finite(X, name)
        raise InputError(
            f"{name} holds numbers as large as {np.abs(X).max():.1e}, whose squares leave the "
            "range of float64; rescale the data (an eraser of rescaled data differs only in its "
            "units)"
        )


def working_dtype(dtype: np.dtype[np.generic]) -> np.dtype[np.generic]:
    """Return float32 for floats of at most 32 bits, float64 for other dtypes."""
    if dtype.kind == "f":
        return _FLOAT32 if dtype.itemsize <= 4 else _FLOAT64
    return _FLOAT32 if dtype.name == "bfloat16" else _FLOAT64


def eps_of(dtype: object) -> float:
    """Return the machine epsilon of a dtype of NumPy or torch; 0 for float64 and integers."""
    name = getattr(dtype, "name", None) or str(dtype).removeprefix("torch.")
    return _EPS.get(name, 0.0)


def check_values(X: NDArray[np.generic], name: str = "X") -> None:
    """Apply :meth:`Rows.check` to an array."""
    Rows.from_array(X).check(name)


def _raise_non_finite(X: NDArray[np.generic], name: str) -> None:
    """Raise NonFiniteError if X holds NaN or infinity; the text names the first affected rows."""
    # bfloat16 is not of the dtype kind "f", and is converted.
    finite = np.isfinite(X if X.dtype.kind == "f" else X.astype(np.float32))
    rows = np.flatnonzero(~finite.all(axis=1))
    if rows.size:
        example = f", e.g. {name} = {name}[np.isfinite({name}).all(axis=1)]"
        columns = np.flatnonzero(~finite.all(axis=0)).tolist()
        raise non_finite_error(rows, len(X), name, example, columns)


def non_finite_error(
    rows: NDArray[np.intp], n: int, name: str, example: str = "", columns: Sequence[int] = ()
) -> NonFiniteError:
    """Return the error for NaN or infinity in the rows with the numbers `rows`, of `n` rows."""
    location = f", {listed_columns(columns)}" if columns else ""
    error = NonFiniteError(
        f"{name} contains NaN or infinity in {len(rows)} of {n} rows "
        f"({'row' if len(rows) == 1 else 'rows'} {abbreviated(rows)}){location}; drop these rows "
        f"and their labels, or repair them{example}. Half precision overflows to infinity above "
        "65504"
    )
    error.columns = tuple(columns)
    return error


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
    names = column_names(X)
    if names is None or len(names) != width:
        return None
    if all(isinstance(name, str) for name in names):
        return tuple(names)
    if all(type(name) is int and name == j for j, name in enumerate(names)):
        return None
    texts = tuple(map(str, names))
    distinct = len(set(texts)) == len(set(names))
    return texts if distinct else tuple(map(repr, names))  # such as 1 and "1"


def check_feature_names(
    names: Sequence[str] | None, expected: Sequence[str] | None, name: str = "X"
) -> None:
    """Raise InputError unless the feature names of rows equal `expected` in the same order.

    None stands for rows without names; such rows, and rows of another width, are not compared.
    """
    if names is None or expected is None or len(names) != len(expected):
        return
    if tuple(names) == tuple(expected):
        return
    added, missing = sorted(set(names) - set(expected)), sorted(set(expected) - set(names))
    if added or missing:
        differences = [
            f"{abbreviated(range(len(group)), group)} {change}"
            for group, change in ((added, "new"), (missing, "missing"))
            if group
        ]
        raise InputError(
            f"the columns of {name} differ from those of earlier rows ({'; '.join(differences)}); "
            f"pass the same features, or {name}.to_numpy() where only their names changed"
        )
    j = next(j for j, pair in enumerate(zip(names, expected, strict=True)) if pair[0] != pair[1])
    raise InputError(
        f"the columns of {name} are in another order than those of earlier rows (column {j} is "
        f"{names[j]!r}, and was {expected[j]!r}), so that features would be mixed up; pass them in "
        "the order of `feature_names`"
    )


def checked_names(
    X: object, width: int, expected: Sequence[str] | None, *, first: bool = False
) -> tuple[str, ...] | None:
    """Return the feature names of X, compared with those of earlier rows unless X is the first.

    Columns numbered 0, 1, ... are compared only with the same numbers in another order.
    """
    names, columns = feature_names(X, width), column_names(X)
    if first or columns is None or len(columns) != width:
        return names
    if (names is None) != (expected is None):
        numbers = [str(j) for j in range(width)]
        if sorted(names or expected or ()) == sorted(numbers):
            check_feature_names(names or numbers, expected or numbers)
    check_feature_names(names, expected)
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
        raise InputError(
            "mask must hold True and False, or 1 and 0, such as a tokeniser's attention_mask"
        )
    return array.astype(np.bool_, copy=False)


def as_weights(sample_weight: object, n_rows: int) -> NDArray[np.float64] | None:
    """Convert weights to float64; raise InputError for a wrong shape or invalid values."""
    if sample_weight is None:
        return None
    array = to_array(sample_weight, "sample_weight")
    try:
        if array.dtype.kind == "c":
            raise TypeError("they are complex")
        weight = np.array(array, dtype=np.float64)
    except (ValueError, TypeError, OverflowError) as error:
        raise InputError(f"sample_weight cannot be read as numbers: {error}") from error
    if weight.ndim == 0:
        weight = np.full(n_rows, float(weight))
    if weight.shape != (n_rows,):
        raise InputError(
            f"sample_weight has shape {weight.shape} for {n_rows} rows; pass one weight per row"
        )
    if not np.isfinite(weight).all() or (weight < 0).any():
        raise InputError("sample_weight must be finite and non-negative; 0 leaves a row out")
    extreme = (weight > 1e50) | ((weight > 0) & (weight < 1e-50))
    if extreme.any():
        raise InputError(
            f"sample_weight holds {weight[extreme][0]:.1e}; positive weights must lie between "
            "1e-50 and 1e50: divide them all by their mean"
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
            f"block_rows is {block_rows!r}; it must be a positive integer, at most "
            f"{_MOST_ROWS:,} (a block lies in memory)"
        )
    return rows


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
