"""Rows, weights and results as they come in: looked at once, on entry, and known from then on."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from splince_fast._kernels import row_kernels
from splince_fast._runtime import threads
from splince_fast.exceptions import InputError, NonFiniteError

_FLOAT32: np.dtype[Any] = np.dtype(np.float32)
_FLOAT64: np.dtype[Any] = np.dtype(np.float64)

# Arguments of kernels for unit weights, and for all rows in their order.
NO_WEIGHT, ALL_ROWS = np.empty(0), np.empty(0, np.intp)

# Elements below which a second thread costs more than it saves.
_GRAIN = 1 << 18


@dataclass(slots=True)
class Rows:
    """A block of rows, and all that has to be known of them.

    Attributes
    ----------
    array : ndarray of shape (n, d)
        Real numbers of any dtype and layout.
    dtype : dtype
        In which they are computed with: float32 for floats of at most 32 bits, else float64.
    direct : bool
        The kernels can read `array` where it lies: of that dtype, C-contiguous and aligned.
    """

    array: NDArray[Any]
    dtype: np.dtype[Any]
    direct: bool

    @classmethod
    def of(cls, X: Any, *, width: int | None = None, name: str = "X") -> Rows:
        """Look at what a caller passed; arguments and errors as for :func:`as_rows`."""
        if type(X) is np.ndarray and X.ndim == 2 and X.shape[1] == width:
            dtype = X.dtype
            if dtype is _FLOAT32 or dtype is _FLOAT64:
                flags = X.flags
                return cls(X, dtype, bool(flags.c_contiguous and flags.aligned))
        return cls.known(as_rows(X, width=width, name=name))

    @classmethod
    def known(cls, array: NDArray[Any]) -> Rows:
        """Look at a 2-D array of real numbers."""
        return cls(array, working_dtype(array.dtype), is_direct(array))

    def __len__(self) -> int:
        return len(self.array)

    def taken(self, index: NDArray[np.intp]) -> Rows:
        """Some rows, by position."""
        return Rows.known(self.array[index])

    @property
    def width(self) -> int:
        return int(self.array.shape[1])

    def check(self, name: str = "X") -> None:
        """Raise unless every number is finite and the squares of each row sum in float64.

        Raises
        ------
        NonFiniteError
            NaN or infinity; names the first rows.
        InputError
            Magnitudes above about 1e149.
        """
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
            wide = (piece.astype(self.dtype, order="C") for piece in pieces)
            if all(row_kernels.squares_finite(piece, 0, len(piece)) for piece in wide):
                return
        _raise_non_finite(X, name)
        raise InputError(
            f"{name} holds numbers as large as {np.abs(X).max():.1e}, whose squares leave the "
            "range of float64; rescale the data (an eraser of rescaled data differs only in its "
            "units)"
        )


def as_rows(X: Any, *, width: int | None = None, name: str = "X") -> NDArray[Any]:
    """View X as a 2-D numeric array, without a copy where it is one already.

    Parameters
    ----------
    X : array, torch tensor, frame, or nested sequence of shape (n, d)
    width : int, optional
        The number of columns it must have.

    Raises
    ------
    InputError
        Not 2-D, no columns, not real numbers, not `width` columns, or lazy.
    """
    found = as_numbers(X, name)
    if found.ndim != 2:
        hint = " for a single row pass it as X[None, :]" if found.ndim == 1 else ""
        raise InputError(
            f"{name} has {found.ndim} dimension(s) and shape {found.shape}; it must be 2-D, one "
            f"row per sample and one column per feature;{hint}".rstrip(";")
        )
    if found.shape[1] != width:  # else there is no call: every application passes here
        check_columns(found.shape, width, name)
    return found


def check_columns(shape: tuple[int, ...], width: int | None, name: str) -> None:
    """Raise InputError unless rows of this 2-D shape have columns, and `width` if it is known."""
    if shape[1] == 0:
        raise InputError(f"{name} has no columns (shape {shape}); at least one is needed")
    if width is not None and shape[1] != width:
        raise InputError(
            f"{name} has {shape[1]} columns, and {width} are expected, as in the data seen "
            "before; pass rows of the same embedding"
        )


def as_numbers(X: Any, name: str = "X") -> NDArray[Any]:
    """View X as a numeric array of any dimensions; parameters and errors as for `as_rows`."""
    if isinstance(X, np.matrix):
        X = np.asarray(X)
    if isinstance(X, np.ma.MaskedArray):
        if np.ma.is_masked(X):
            raise InputError(
                f"{name} is a masked array with masked entries; fill them, or drop their rows: "
                f"{name}.filled(value), or np.ma.compress_rows({name})"
            )
        X = X.data
    columns = None
    if not isinstance(X, np.ndarray):
        columns = column_names(X)
        X = _foreign_rows(X, name)
    if holds_vectors(X):
        X = _stacked(X.reshape(-1), name)
    if X.dtype.kind not in "fiub" and X.dtype.name != "bfloat16":
        X = _cast_rows(X, name, columns)
    return X  # type: ignore[no-any-return]


def column_names(X: Any) -> list[Any] | None:
    """Names of the columns of a data frame; None of anything else."""
    if hasattr(X, "columns") and hasattr(X, "to_numpy"):
        return list(X.columns)
    return None


def holds_vectors(X: NDArray[Any]) -> bool:
    """Whether X is a column of vectors, as data frames hold embeddings."""
    if X.dtype != object or not X.size or X.shape[:1] != (X.size,) or X.ndim > 2:
        return False
    first = X.reshape(-1)[0]
    return hasattr(first, "__len__") and (X.ndim == 1 or not isinstance(first, str | bytes))


def _foreign_rows(X: Any, name: str) -> NDArray[Any]:
    """X as an array: torch tensors and frames by their own conversion, the rest by NumPy's."""
    if is_tensor(X):
        return torch_to_numpy(X)
    if is_sparse(X):
        raise InputError(
            f"{name} is a sparse matrix, whose covariance is dense; accumulate it as it is with "
            "Moments(sketch_size=0), which keeps no d x d matrix, reduce it first, as "
            f"sklearn.decomposition.TruncatedSVD does, or pass {name}[i:j].toarray() block by block"
        )
    refuse_lazy(X, name)
    if hasattr(X, "type") and hasattr(X, "null_count") and hasattr(X, "to_pylist"):
        X = X.to_numpy(zero_copy_only=False)  # an Arrow column of lists: an array per row
    try:
        return np.asarray(X.to_numpy() if hasattr(X, "to_numpy") else X)
    except (ValueError, TypeError) as error:
        raise InputError(
            f"{name} cannot be read as an array: {error}. Rows of unequal length are a common "
            "cause; pass a 2-D array of numbers"
        ) from error


def is_sparse(X: object) -> bool:
    """Whether X is a matrix or array of scipy.sparse; SciPy is not imported for it."""
    return hasattr(X, "tocsr") and hasattr(X, "nnz")


def is_tensor(X: Any) -> bool:
    """Whether X is a torch tensor; torch is not imported for it."""
    return hasattr(X, "detach") and hasattr(X, "cpu")


def refuse_lazy(X: Any, name: str) -> None:
    """Raise InputError for a dask array or another lazy container: its rows lie elsewhere."""
    graph = getattr(X, "__dask_graph__", None)
    # An xarray has the method, and no graph unless it is lazy.
    verb = "compute" if graph is not None and graph() is not None else None
    if verb is None and hasattr(X, "collect") and not hasattr(X, "to_numpy"):
        verb = "collect"
    if verb is not None:
        raise InputError(
            f"{name} is a lazy {type(X).__name__}, which would be pulled into memory as a whole; "
            f"accumulate a dask array by Moments.from_blocks(sources.from_dask(X, labels)), which "
            f"from_moments turns into an estimator, pass others block by block to Moments.update, "
            f"or {verb}() it first where it fits"
        )


def _stacked(column: NDArray[Any], name: str) -> NDArray[Any]:
    """A column whose entries are vectors, as data frames hold embeddings, as a matrix."""
    try:
        if any(isinstance(vector, str | bytes) for vector in column):
            raise TypeError("text is no vector")
        return np.stack([np.asarray(vector) for vector in column])
    except (ValueError, TypeError) as error:
        raise InputError(
            f"{name} is a column that cannot be stacked to a matrix: {error}. Every entry must be "
            "a vector of the same length; drop rows without one"
        ) from error


def _cast_rows(X: NDArray[Any], name: str, columns: list[Any] | None = None) -> NDArray[Any]:
    """Object arrays of numbers become float64; anything else is refused."""
    if X.dtype == object:
        if any(isinstance(value, str | bytes) for value in X.flat):
            where = ""
            if X.ndim == 2:
                text = [j for j in range(X.shape[1]) if _has_text(X[:, j])]
                where = f" in {listed_columns(text, columns)}"
            raise InputError(
                f"{name} holds text{where}; real numbers are needed. Where digits stand for "
                f"numbers, {name}.astype(float) says so; an id or a postal code is a label, not "
                "a feature"
            )
        try:
            return X.astype(np.float64)
        except (ValueError, TypeError, OverflowError) as error:
            raise InputError(f"{name} holds values that are not numbers: {error}") from error
    if X.dtype.kind == "c":
        raise InputError(
            f"{name}: Complex data not supported (dtype {X.dtype}); stack real and imaginary parts "
            "as columns"
        )
    raise InputError(f"{name} has dtype {X.dtype}; real numbers are needed")


def _has_text(column: NDArray[Any]) -> bool:
    return any(isinstance(value, str | bytes) for value in column)


def listed_columns(numbers: Sequence[int], names: Sequence[Any] | None = None) -> str:
    """Columns of an error message, by name where there are names."""
    return f"column{'s' * (len(numbers) > 1)} {abbreviated(numbers, names)}"


def abbreviated(numbers: Iterable[int], names: Sequence[Any] | None = None) -> str:
    """The first five numbers, or the names that they index, and an ellipsis for the rest."""
    every = [str(i) if names is None else repr(names[i]) for i in numbers]
    return ", ".join(every[:5]) + ", ..." * (len(every) > 5)


def torch_to_numpy(tensor: Any) -> NDArray[Any]:
    """A NumPy view of a torch tensor; bfloat16, which NumPy lacks, widened to float32."""
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


def working_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """float32 for floats of at most 32 bits, float64 for everything else."""
    if dtype.kind == "f":
        return _FLOAT32 if dtype.itemsize <= 4 else _FLOAT64
    return _FLOAT32 if dtype.name == "bfloat16" else _FLOAT64


def is_direct(X: NDArray[Any]) -> bool:
    """Whether the kernels can read X where it lies: in their dtype, C-contiguous and aligned."""
    flags = X.flags
    return X.dtype in (_FLOAT32, _FLOAT64) and flags.c_contiguous and flags.aligned


def check_values(X: NDArray[Any], name: str = "X") -> None:
    """As :meth:`Rows.check`, for an array."""
    Rows.known(X).check(name)


def _raise_non_finite(X: NDArray[Any], name: str) -> None:
    """Raise NonFiniteError that names the first rows of X that hold NaN or infinity, if any."""
    wide = X if X.dtype.kind == "f" else X.astype(np.float32)
    finite = np.isfinite(wide)
    bad = np.flatnonzero(~finite.all(axis=1))
    if bad.size:
        example = f", e.g. {name} = {name}[np.isfinite({name}).all(axis=1)]"
        raise non_finite(bad, len(X), name, example, np.flatnonzero(~finite.all(axis=0)).tolist())


def non_finite(
    bad: NDArray[np.intp], n: int, name: str, example: str = "", columns: Sequence[int] = ()
) -> NonFiniteError:
    """The error of n rows of which those that `bad` numbers hold NaN or infinity."""
    listed = ", ".join(map(str, bad[:5])) + (", ..." if len(bad) > 5 else "")
    where = f", {listed_columns(columns)}" if columns else ""
    error = NonFiniteError(
        f"{name} contains NaN or infinity in {len(bad)} of {n} rows (rows {listed}){where}; drop "
        f"or repair them first{example}, and their labels alike. Half precision overflows to "
        "infinity above 65504"
    )
    error.columns = tuple(columns)
    return error


def name_columns(error: NonFiniteError, names: Sequence[Any] | None) -> None:
    """Replace the numbers of columns in the text by the names that a data frame has for them."""
    if names is not None and error.columns:
        numbers, named = listed_columns(error.columns), listed_columns(error.columns, names)
        error.args = (str(error).replace(f"), {numbers};", f"), {named};", 1),)
        error.columns = ()


def as_weights(sample_weight: Any, n_rows: int) -> NDArray[np.float64] | None:
    """Weights as float64, or None.

    Raises
    ------
    InputError
        Wrong length, negative, or not finite.
    """
    if sample_weight is None:
        return None
    if isinstance(sample_weight, np.ma.MaskedArray) and np.ma.is_masked(sample_weight):
        raise InputError("sample_weight has masked entries; fill them, with 0 to leave rows out")
    if is_tensor(sample_weight):
        sample_weight = torch_to_numpy(sample_weight)
    try:
        given = np.asarray(sample_weight)
        if given.dtype.kind == "c":
            raise TypeError("they are complex")
        weight = np.array(given, dtype=np.float64)
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
