"""Projection: the affine map that erases, as two thin factors, and how it is applied.

Above 400 lines because each public method documents shapes, dtypes and errors in place.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from splince_fast._runtime import files, threads
from splince_fast._runtime.arrays import as_rows, check_out, is_direct, working_dtype
from splince_fast.exceptions import FileFormatError, InputError

if TYPE_CHECKING:
    from splince_fast.report import Report

Float = NDArray[np.float64]

_FORMAT = 1
_KIND = "projection"
# Rows are applied in pieces: small enough for the cache where they must be widened.
_PIECE_BYTES = 1 << 20
_SWEEP_BYTES = 1 << 28


class Projection:
    """The affine map r(x) = mean + P (x - mean), with P = I - left right^T of low co-rank.

    Made by :func:`splince_fast.splince` and its siblings; immutable. On rows it computes
    ``X - ((X - mean) @ right) @ left.T``, equivalently ``X @ P.T + offset``.

    Parameters
    ----------
    left, right : array-like of shape (d, r)
        Factors of I - P.
    mean : array-like of shape (d,)
        Mean of the data that it was fitted on, which it leaves in place.
    method : str
        Name of the method that made it.
    report : Report or callable that makes one, optional
        What is known of how it was made.

    Raises
    ------
    InputError
        Shapes that do not fit together, or numbers that are not finite.

    Examples
    --------
    >>> import numpy as np
    >>> import splince_fast as sf
    >>> rng = np.random.default_rng(0)
    >>> z = rng.integers(0, 2, size=500)
    >>> X = rng.normal(size=(500, 4)) + z[:, None]
    >>> eraser = sf.leace(sf.Moments().update(X, {"z": z}), erase="z")
    >>> clean = eraser(X)
    >>> gap = clean[z == 1].mean(axis=0) - clean[z == 0].mean(axis=0)
    >>> bool(np.abs(gap).max() < 1e-12)
    True
    """

    def __init__(
        self,
        left: ArrayLike,
        right: ArrayLike,
        mean: ArrayLike,
        *,
        method: str = "custom",
        report: Report | Callable[[], Report] | None = None,
    ) -> None:
        factors = [_real(left, "left"), _real(right, "right")]
        centre = _real(mean, "mean")
        if centre.ndim != 1 or any(f.ndim != 2 for f in factors):
            raise InputError(
                "left and right must be 2-D, of shape (d, r), and mean 1-D, of shape (d,)"
            )
        if factors[0].shape != factors[1].shape or len(factors[0]) != len(centre):
            raise InputError(
                f"left {factors[0].shape}, right {factors[1].shape} and mean {centre.shape} do not "
                "fit together; they must be (d, r), (d, r) and (d,)"
            )
        self._set(
            np.ascontiguousarray(factors[0].T),
            np.ascontiguousarray(factors[1].T),
            centre, None, method, report,
        )  # fmt: skip
        if not all(np.isfinite(a).all() for a in (self._left, self._right, self._mean)):
            raise InputError("left, right and mean must be finite")

    def _set(
        self,
        left: Float,
        right: Float,
        mean: Float,
        bias: Float | None,
        method: str,
        report: Report | Callable[[], Report] | None,
    ) -> None:
        """Take over the transposed factors, (r, d) and C-contiguous."""
        self._left, self._right, self._mean = left, right, mean
        self._bias = right @ mean if bias is None else bias
        self._method, self._report = method, report
        for array in (self._left, self._right, self._mean, self._bias):
            array.flags.writeable = False

    @classmethod
    def _make(
        cls,
        left: Float,
        right: Float,
        mean: Float,
        bias: Float | None = None,
        method: str = "custom",
        report: Report | Callable[[], Report] | None = None,
    ) -> Projection:
        """A projection from transposed factors that are known to be valid."""
        new = cls.__new__(cls)
        new._set(left, right, mean, bias, method, report)
        return new

    # -- what it is ------------------------------------------------------------------------

    @property
    def left(self) -> Float:
        """(d, r) float64: P = I - left right^T; its columns span what is removed."""
        return self._left.T

    @property
    def right(self) -> Float:
        """(d, r) float64: the coefficients of what is removed are (x - mean) @ right."""
        return self._right.T

    @property
    def mean(self) -> Float:
        """(d,) float64: mean of the data that it was fitted on."""
        return self._mean

    @cached_property
    def offset(self) -> Float:
        """(d,) float64: the additive constant, r(x) = P x + offset; mean - P mean."""
        offset = np.asarray(self._bias @ self._left)
        offset.flags.writeable = False
        return offset

    @cached_property
    def rank(self) -> int:
        """Dimensions removed: the rank of I - P, at the rounding level of the factors."""
        if not len(self._left):
            return 0
        inner = [np.linalg.qr(factor).R for factor in (self.left, self.right)]
        return int(np.linalg.matrix_rank(inner[0] @ inner[1].T))

    @property
    def n_features(self) -> int:
        """Width d of the rows."""
        return len(self._mean)

    @property
    def method(self) -> str:
        """Name of the method that made it."""
        return self._method

    @property
    def report(self) -> Report | None:
        """What was erased and kept, and at what cost; None for hand-made projections."""
        if callable(self._report):
            self._report = self._report()
        return self._report

    def matrix(self) -> Float:
        """(d, d) float64: P, with r(x) = P x + offset; on rows, X @ P.T + offset."""
        return np.asarray(np.eye(self.n_features) - self.left @ self._right)

    def __repr__(self) -> str:
        return f"Projection({self._method}, {self.n_features} features, rank {self.rank} removed)"

    # -- what it does ----------------------------------------------------------------------

    def __call__(self, X: Any, *, out: Any = None, progress: bool = False) -> Any:
        """Apply to rows.

        Parameters
        ----------
        X : ndarray or torch tensor of shape (n, d), or anything that NumPy reads as one
            Any layout. float16, bfloat16 and float32 are computed with float64 coefficients and
            returned in their own dtype; integers give float64.
        out : array of the shape and dtype of the result, optional
            Where to write; may be X itself, a memmap included. Extra memory is O(block).
        progress : bool
            Show rows/s and the time left on stderr.

        Returns
        -------
        ndarray or torch tensor
            Of the kind, dtype and device of X; `out` if given.

        Raises
        ------
        InputError
            Wrong width, or an `out` that does not fit.
        """
        if hasattr(X, "detach") and hasattr(X, "device"):
            from splince_fast.integrations.torch import apply_to_tensor

            return apply_to_tensor(self, X, out=out, progress=progress)
        rows = as_rows(X, width=self.n_features)
        result_dtype = rows.dtype if rows.dtype.kind not in "iub" else np.dtype(np.float64)
        if out is None:
            out = np.empty(rows.shape, result_dtype)
        else:
            check_out(out, rows, result_dtype)
        self._apply(rows, out, progress)
        return out

    def _apply(self, rows: NDArray[Any], out: NDArray[Any], progress: bool) -> None:
        """Write the result for `rows` into `out`, sweep by sweep."""
        from splince_fast.sources import Progress

        n, d = rows.shape
        work = working_dtype(rows.dtype)
        direct = is_direct(rows) and is_direct(out)
        sweep = max(1, (_SWEEP_BYTES if direct else _PIECE_BYTES) // (d * work.itemsize))
        buffer = None if direct else np.empty((min(sweep, n), d), work)
        with Progress(n, rows.nbytes, enabled=progress) as bar:
            for start in range(0, n, sweep):
                stop = min(n, start + sweep)
                if buffer is None:
                    self._apply_direct(rows[start:stop], out[start:stop])
                else:
                    piece = buffer[: stop - start]
                    np.copyto(piece, rows[start:stop], casting="unsafe")
                    self._apply_direct(piece, piece)
                    with np.errstate(over="ignore"):
                        np.copyto(out[start:stop], piece, casting="unsafe")
                    if out.dtype == np.float16:
                        _check_overflow(piece, out[start:stop], start)
                bar.advance(stop - start, (stop - start) * d * rows.dtype.itemsize)

    def _apply_direct(self, rows: NDArray[Any], out: NDArray[Any]) -> None:
        """The fused pass over C-contiguous float32 or float64 rows, split over threads."""
        from splince_fast._kernels import apply as kernels

        def work(start: int, stop: int) -> None:
            kernels.apply_rows(rows, self._left, self._right, self._bias, start, stop, out)

        if len(rows):
            threads.split(work, len(rows), grain=max(1, (1 << 17) // rows.shape[1]))

    def fold_into(self, weight: Any, bias: Any = None) -> tuple[Any, Any]:
        """Merge this map into the linear layer that follows it.

        The layer ``W x + b`` applied to ``r(x)`` equals ``(W P) x + (b + W offset)``.

        Parameters
        ----------
        weight : array or torch tensor of shape (k, d)
            W.
        bias : array or torch tensor of shape (k,), optional
            The vector b; zero if it is left out.

        Returns
        -------
        (weight, bias)
            New arrays of the kind and dtype of `weight`, computed in float64; the arguments are
            left alone.

        Raises
        ------
        InputError
            Shapes that do not fit.
        """
        tensor = weight if hasattr(weight, "detach") else None
        w = as_rows(weight, width=self.n_features, name="weight").astype(np.float64)
        folded = w - (w @ self.left) @ self._right
        shift = w @ self.offset
        if bias is not None:
            column = bias if hasattr(bias, "shape") else _real(bias, "bias")
            if tuple(column.shape) != (len(w),):
                raise InputError(
                    f"bias has shape {tuple(column.shape)}; it must have one entry per row of "
                    f"weight, ({len(w)},)"
                )
            given = as_rows(column[None, :], width=len(w), name="bias")[0].astype(np.float64)
            shift = given + shift
        if tensor is not None:
            from splince_fast.integrations.torch import like

            return like(tensor, folded), like(tensor, shift)
        dtype = np.result_type(np.asarray(weight).dtype, np.float16)
        return folded.astype(dtype), shift.astype(dtype)

    # An array on the other side of an operator is a mistake that NumPy must not try to resolve.
    __array_ufunc__ = None

    def __matmul__(self, first: Projection) -> Projection:
        """``second @ first``: apply `first`, then `second`, as one map.

        What `second` erases stays erased; what `first` kept may be lost: erase several concepts
        jointly (``erase=[...]``) where that matters.
        """
        if not isinstance(first, Projection):
            return NotImplemented
        if first.n_features != self.n_features:
            widths = f"{self.n_features} features cannot follow one of {first.n_features}"
            raise InputError(f"a projection of {widths}")
        carried = first._left - (first._left @ self.right) @ self._left
        return Projection._make(
            np.concatenate([self._left, carried]),
            np.concatenate([self._right, first._right]),
            first._mean.copy(),
            np.concatenate([self._bias, first._bias]),
            f"{self._method} @ {first._method}",
        )

    def astype(self, dtype: DTypeLike) -> Projection:
        """The map with factors rounded to `dtype` (float32 or float64), as a device holds them.

        Parameters
        ----------
        dtype : float32 or float64
            Of the factors; coefficients are still summed in float64.

        Raises
        ------
        InputError
            Another dtype.
        """
        try:
            known = np.dtype(dtype) in (np.float32, np.float64) and dtype is not None
        except (TypeError, ValueError):
            known = False
        if not known:
            raise InputError(f"factors are held as float32 or float64, not {dtype!r}")
        left, right = (f.astype(dtype).astype(np.float64) for f in (self._left, self._right))
        bias = self._bias + (right - self._right) @ self._mean  # so that the mean stays in place
        return Projection._make(left, right, self._mean.copy(), bias, self._method, self._report)

    # -- persistence -----------------------------------------------------------------------

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a safetensors file: left, right, mean, offset, bias, and the report as metadata.

        Parameters
        ----------
        path : path
            The file; whatever happens, it holds either what it held before or the whole map.
        """
        report = self.report
        tensors = {
            "left": self.left,
            "right": self.right,
            "mean": self._mean,
            "offset": self.offset,
            "bias": self._bias,
        }
        metadata = {
            "method": self._method,
            "report": None if report is None else report.to_dict(),
        }
        files.write(path, _KIND, _FORMAT, tensors, metadata)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Projection:
        """Read a projection back, bit for bit.

        Parameters
        ----------
        path : path
            A file written by :meth:`save`.

        Raises
        ------
        FileFormatError
            Truncated, foreign, inconsistent, or written by a newer version.
        FileNotFoundError
            There is no such file.
        """
        from splince_fast.report import Report

        tensors, metadata = files.read(path, _KIND, _FORMAT)
        try:
            d, r = tensors["left"].shape
            real = np.float64
            files.check_tensors(
                tensors, {"left": (real, (d, r)), "right": (real, (d, r)), "mean": (real, (d,)),
                          "offset": (real, (d,)), "bias": (real, (r,))}
            )  # fmt: skip
            report = metadata["report"]
            new = cls._make(
                np.ascontiguousarray(tensors["left"].T), np.ascontiguousarray(tensors["right"].T),
                tensors["mean"], tensors["bias"], str(metadata["method"]),
                None if report is None else Report.from_dict(report),
            )  # fmt: skip
        except (KeyError, ValueError, TypeError, FileFormatError) as error:
            raise FileFormatError(
                f"{os.fspath(path)} is inconsistent ({error}); it was edited or damaged: fit again"
            ) from error
        eps = float(np.finfo(np.float64).eps)
        size = np.abs(tensors["left"]) @ np.abs(tensors["bias"])
        if (np.abs(new.offset - tensors["offset"]) > 8 * (r + 1) * eps * size).any():
            raise FileFormatError(
                f"{os.fspath(path)} is inconsistent: its offset is not left @ bias; it was edited "
                "or damaged: fit again"
            )
        return new

    def __getstate__(self) -> dict[str, Any]:
        state = dict(self.__dict__)
        state["_report"] = self.report  # not the recipe for it
        state.pop("offset", None)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        for array in (self._left, self._right, self._mean, self._bias):
            array.flags.writeable = False


def _real(values: ArrayLike, name: str) -> Float:
    """An argument of the constructor as float64.

    Raises
    ------
    InputError
        It holds something else than real numbers.
    """
    try:
        array = np.asarray(values)
        if array.dtype.kind not in "fiubO":
            raise TypeError(f"dtype {array.dtype}")
        return array.astype(np.float64)
    except (ValueError, TypeError) as error:
        raise InputError(f"{name} cannot be read as an array of real numbers: {error}") from error


def _check_overflow(wide: NDArray[Any], narrow: NDArray[Any], start: int) -> None:
    """Raise InputError if rounding to float16 made infinities of finite numbers."""
    lost = np.flatnonzero((np.isinf(narrow) & np.isfinite(wide)).any(axis=1))
    if lost.size:
        raise InputError(
            f"row {start + lost[0]} of the result leaves the range of float16 (65504); pass X as "
            "float32. Rows up to there are written already"
        )
