"""Erasing rows of any dtype and layout: in pieces, over threads, into memory that is checked."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from splince_fast._kernels import row_kernels
from splince_fast._runtime import threads
from splince_fast._runtime.arrays import as_rows, is_sparse, working_dtype
from splince_fast._runtime.progress import Progress
from splince_fast.exceptions import InputError

Float = NDArray[np.float64]

# Numbers below which a second thread costs more than it saves.
_GRAIN = 1 << 17
# Between two sweeps Ctrl-C is obeyed and the progress shown.
_SWEEP_BYTES = 1 << 28
# A result of so many bytes, in rows of so many, is written past the caches: a store to a line that
# is not there would first read it. New memory is there: the system has just filled it with zeros.
_STREAMED_BYTES, _STREAMED_ROW = 1 << 25, 512
# Fewer bytes are erased in less than two seconds, before a progress bar would appear.
_LONG_BYTES = 1 << 30
# Rows that must be converted are so in pieces that stay in a core's cache.
_PIECE_BYTES = 1 << 18


@dataclass(frozen=True, eq=False)
class Factors:
    """Factors of the map x - left^T (right (x - mean) - shift).

    Attributes
    ----------
    left, right : ndarray of shape (r, d), float64, C-contiguous
    mean : ndarray of shape (d,), float64
    shift : ndarray of shape (r,), float64
    """

    left: Float
    right: Float
    mean: Float
    shift: Float

    @cached_property
    def packed(self) -> row_kernels.PackedFactors:
        """The same as `apply_rows` takes them."""
        return row_kernels.PackedFactors(self.left, self.right, self.mean, self.shift)


def as_stack(X: Any, width: int) -> NDArray[Any]:
    """View X as an array (..., d) of numbers; with two axes as :func:`as_rows` does.

    Raises
    ------
    InputError
        As :func:`as_rows`.
    """
    if not isinstance(X, np.ndarray) and is_sparse(X):
        raise InputError(
            "X is a sparse matrix, and erased rows are dense. Where a linear layer follows, "
            "eraser.fold_into(weight, bias) gives one for the sparse rows as they are; "
            "X @ eraser.right has what would be removed, (n, r); blocks of rows can be made dense: "
            "eraser(X[i:j].toarray())"
        )
    if not isinstance(X, np.ndarray) or X.ndim < 3:
        return as_rows(X, width=width)
    plain = X.dtype.kind in "fiub" and type(X) in (np.ndarray, np.memmap)
    flat = np.empty((0, X.shape[-1]), X.dtype) if plain else X.reshape(-1, X.shape[-1])
    rows = as_rows(flat, width=width)
    return X if plain else rows.reshape(X.shape)


def result_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The dtype of erased rows: that of the rows, float64 for integers and booleans."""
    return np.dtype(np.float64) if dtype.kind in "iub" else dtype


def erase_lazily(eraser: Any, X: Any, width: int) -> Any:
    """Erase a dask array chunk by chunk, when its result is computed.

    Raises
    ------
    InputError
        Wrong width, no numbers, or a row that lies in several chunks.
    """
    if X.ndim < 2 or X.shape[-1] != width:
        raise InputError(
            f"X has shape {tuple(X.shape)}, and the rows of this eraser have {width} features; "
            "pass rows of the same embedding, of shape (..., d)"
        )
    if X.dtype.kind not in "fiub":
        raise InputError(f"X has dtype {X.dtype}; pass real numbers")
    if len(X.chunks[-1]) != 1:
        raise InputError(
            f"a row of X lies in {len(X.chunks[-1])} chunks; pass X.rechunk({{{X.ndim - 1}: -1}})"
        )
    dtype = result_dtype(X.dtype)
    return X.map_blocks(eraser, dtype=dtype, meta=np.empty((0,) * X.ndim, dtype))


def as_mask(mask: Any, shape: tuple[int, ...]) -> NDArray[np.bool_] | None:
    """View a mask as booleans of the leading shape of X.

    Raises
    ------
    InputError
        Another shape, or neither booleans nor integers 0 and 1.
    """
    if mask is None:
        return None
    found = np.asarray(mask.detach().cpu() if hasattr(mask, "detach") else mask)
    if found.shape != shape:
        raise InputError(
            f"mask has shape {found.shape}; it must have an entry per row of X, {shape}: True where"
            " the row is erased"
        )
    whole = found.dtype.kind in "iu" and bool(((found == 0) | (found == 1)).all())
    if found.dtype != np.bool_ and not whole:
        raise InputError(f"mask has dtype {found.dtype}; pass booleans, or integers 0 and 1")
    return found.astype(np.bool_, copy=False)


def check_out(out: Any, rows: NDArray[Any], dtype: np.dtype[Any]) -> None:
    """Raise InputError unless the result for `rows` can be written to `out`."""
    if not isinstance(out, np.ndarray) or out.shape != rows.shape or out.dtype != dtype:
        found = f"{out.dtype} of shape {out.shape}" if isinstance(out, np.ndarray) else type(out)
        raise InputError(f"out is {found}; it must be an array of {dtype} of shape {rows.shape}")
    if not out.flags.writeable:
        raise InputError("out is read-only; open a memmap with mode 'r+', or pass a writable array")
    if meets_itself(out.shape, out.strides, out.itemsize):
        raise InputError(
            f"out has the strides {out.strides}, by which several of its entries share memory, as "
            "in a sliding window or a broadcast array; pass new memory, or a copy"
        )
    if out is rows or not np.may_share_memory(out, rows):
        return
    same = (
        out.__array_interface__["data"] == rows.__array_interface__["data"]
        and out.strides == rows.strides
    )
    if not same and np.shares_memory(out, rows):
        raise InputError("out overlaps X without being the same array; pass X itself or new memory")


def meets_itself(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> bool:
    """Whether an axis advances by less than the extent of the axes below it.

    If not, no two entries share memory: the extent of the axes in order of their strides,
    itemsize + sum (n_i - 1) |s_i|, never reaches the next stride.
    """
    if 0 in shape:
        return False
    extent = itemsize
    for stride, size in sorted((abs(s), n) for s, n in zip(strides, shape, strict=True) if n > 1):
        if stride < extent:
            return True
        extent += (size - 1) * stride
    return False


def erase(
    factors: Factors,
    X: NDArray[Any],
    out: NDArray[Any],
    mask: NDArray[np.bool_] | None = None,
    progress: bool | None = False,
    fresh: bool = False,
) -> None:
    """Write the result for X (..., d) into `out`; rows that the mask leaves out are copied.

    `fresh` says that `out` is new memory, never written to.

    Raises
    ------
    InputError
        Finite results leave the range of float16.
    """
    streamed = out.nbytes >= _STREAMED_BYTES and not fresh
    streamed = streamed and out.shape[-1] * out.itemsize >= _STREAMED_ROW
    if progress is False or (progress is None and X.nbytes < _LONG_BYTES):
        _erase_stack(factors, streamed, X, out, mask, None, 0)
        return
    with Progress(X.size // X.shape[-1], show=progress) as bar:
        _erase_stack(factors, streamed, X, out, mask, bar, 0)


def _erase_stack(
    factors: Factors,
    streamed: bool,
    X: NDArray[Any],
    out: NDArray[Any],
    mask: NDArray[np.bool_] | None,
    bar: Progress | None,
    origin: int,
) -> None:
    """Merge the leading axes where both arrays allow it without a copy; else go through them."""
    if X.ndim > 2:
        pair = [array.reshape(-1, array.shape[-1]) for array in (X, out)]
        views = all(np.may_share_memory(a, b) for a, b in zip(pair, (X, out), strict=True))
        if not (views or X.size == 0):
            per_slab = X.size // (len(X) * X.shape[-1])
            for i in range(len(X)):
                inner = None if mask is None else mask[i]
                _erase_stack(factors, streamed, X[i], out[i], inner, bar, origin + i * per_slab)
            return
        X, out = pair
        mask = None if mask is None else mask.reshape(-1)
    n, d = X.shape
    sweep = max(1, _SWEEP_BYTES // (d * working_dtype(X.dtype).itemsize))
    for start in range(0, n, sweep):
        stop = min(n, start + sweep)
        chosen = None if mask is None else mask[start:stop]
        _erase_rows(factors, streamed, X[start:stop], out[start:stop], chosen, origin + start)
        if bar is not None:
            bar.advance(stop - start, (stop - start) * d * X.dtype.itemsize)


def _erase_rows(
    factors: Factors,
    streamed: bool,
    rows: NDArray[Any],
    out: NDArray[Any],
    mask: NDArray[np.bool_] | None,
    origin: int,
) -> None:
    """One sweep, split over threads; its first row is row `origin` of all."""
    if not len(rows):
        return
    n, d = rows.shape
    halves = rows.dtype.kind == "f" and rows.dtype.itemsize == 2
    work = np.dtype(np.float16) if halves else working_dtype(rows.dtype)
    packed = factors.packed
    step = max(1, _PIECE_BYTES // (d * work.itemsize))
    read, written = (
        mask is None and array.dtype == work and array.flags.aligned for array in (rows, out)
    )

    def erase(start: int, stop: int) -> int:
        """The first row with a finite number that float16 cannot hold, or -1."""
        return row_kernels.apply_rows(packed, rows, out, start, stop, streamed)

    def erase_pieces(start: int, stop: int) -> int:
        """The same by way of copies, where the kernel cannot read or write the rows."""
        for first in range(start, stop, step):
            last = min(first + step, stop)
            source, target = rows[first:last], out[first:last]
            chosen: Any = slice(None) if mask is None else np.flatnonzero(mask[first:last])
            piece = np.array(source[chosen], work, order="C")
            into = target if written else piece
            row = row_kernels.apply_rows(packed, piece, into, 0, len(piece), streamed)
            if mask is not None:
                np.copyto(target, source, casting="unsafe")
            if not written:
                target[chosen] = piece
            if row >= 0:
                return first + (row if mask is None else int(chosen[row]))
        return -1

    grain = max(1, _GRAIN // d)
    for row in threads.split(erase if read and written else erase_pieces, n, grain=grain):
        if row >= 0:
            raise InputError(
                f"row {origin + row} of the result leaves the range of float16 (65504); pass X as "
                "float32. Some rows are written already"
            )
