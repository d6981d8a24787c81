"""Application of a low-rank affine map to rows of any dtype and layout."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from splince_fast._kernels import row_kernels
from splince_fast._runtime import threads
from splince_fast._runtime.arguments import described_type
from splince_fast._runtime.progress import Progress
from splince_fast._runtime.rows import (
    SPELLED,
    as_mask,
    as_numbers,
    as_rows,
    check_columns,
    checked_names,
    is_sparse,
    to_array,
    working_dtype,
)
from splince_fast.exceptions import InputError

Float = NDArray[np.float64]
Mask = NDArray[np.bool_] | None

# Minimum number of elements per thread: one thread erases smaller arrays faster.
_GRAIN = 1 << 17
# Size of a chunk. KeyboardInterrupt and updates of the progress bar wait for the end of a chunk.
_CHUNK_BYTES = 1 << 28
# Minimum bytes of the result, and of a row, for non-temporal stores, which do not first read each
# cache line as ordinary stores do. Uninitialised memory is written with ordinary stores, because
# the operating system has just zeroed the memory, which is therefore in the cache.
_STREAMED_BYTES, _STREAMED_ROW = 1 << 25, 512
# By default, a progress bar needs this many bytes of rows: fewer take less than two seconds.
_LONG_BYTES = 1 << 30
# Size of the pieces in which rows are converted to another dtype; a piece fits in the cache of a
# core.
_PIECE_BYTES = 1 << 18
_FITTED = "the rows of the fit"  # source of the width in error messages


@dataclass(frozen=True, eq=False)
class Factors:
    """Factors of the map x -> x - left^T (right (x - mean) - shift)."""

    left: Float  # (r, d), C-contiguous, as `right`
    right: Float
    mean: Float  # (d,)
    shift: Float  # (r,), 0 for a projection about the mean

    @cached_property
    def packed(self) -> row_kernels.PackedFactors:
        """The factors in the format of the kernel `apply_rows`."""
        return row_kernels.PackedFactors(self.left, self.right, self.mean, self.shift)


# -- arguments of an eraser ------------------------------------------------------------------------


def rows_mask_and_out(
    X: Any, width: int, names: tuple[str, ...] | None, mask: Any, out: Any
) -> tuple[NDArray[Any], Mask, NDArray[Any]]:
    """Return valid rows of shape (..., d), their mask, and `out` or a new array for the result."""
    is_plain = type(X) is np.ndarray and X.dtype.kind == "f" and X.dtype.byteorder != SPELLED
    if is_plain and X.ndim > 1 and X.shape[-1] == width:
        rows, dtype = X, X.dtype
    else:
        rows = _as_stack(X, width, names)
        dtype = result_dtype(rows.dtype)
    selected = None if mask is None else as_mask(mask, rows.shape[:-1])
    if out is None:
        return rows, selected, np.empty(rows.shape, dtype)
    _check_out(out, rows, dtype)
    return rows, selected, out


def _as_stack(X: Any, width: int, names: tuple[str, ...] | None) -> NDArray[Any]:
    """Convert X to a numeric array of shape (..., d); errors are those of :func:`as_rows`."""
    if is_sparse(X):
        raise InputError(
            "X is sparse, and erased rows are dense; pass X[i:j].toarray(), or use "
            "eraser.fold_into(weight, bias) before a linear layer"
        )
    rows = as_numbers(X)
    if rows.ndim < 3:
        rows = as_rows(rows, width=width, earlier=_FITTED)
    else:
        check_columns(rows.shape[-2:], width, "X", _FITTED)
    if hasattr(X, "columns"):
        checked_names(X, width, names)
    return rows


def result_dtype(dtype: np.dtype[np.generic]) -> np.dtype[np.generic]:
    """Return the dtype of erased rows: float64 for integers and booleans, else `dtype`."""
    return np.dtype(np.float64) if dtype.kind in "iub" else dtype


def erase_lazily(eraser: Any, X: Any, width: int) -> Any:
    """Return a dask array that applies an eraser to each chunk of X."""
    if X.ndim < 2 or X.shape[-1] != width or X.dtype.kind not in "fiub":
        raise InputError(
            f"X is {X.dtype} of shape {tuple(X.shape)}; pass real numbers of {width} features"
        )
    if len(X.chunks[-1]) != 1:
        raise InputError(
            f"a row of X lies in {len(X.chunks[-1])} chunks; pass X.rechunk({{{X.ndim - 1}: -1}})"
        )
    dtype = result_dtype(X.dtype)
    return X.map_blocks(eraser, dtype=dtype, meta=np.empty((0,) * X.ndim, dtype))


def _check_out(out: object, rows: NDArray[np.generic], dtype: np.dtype[np.generic]) -> None:
    """Raise InputError unless the result for `rows` can be written to `out`."""
    if not isinstance(out, np.ndarray) or out.shape != rows.shape or out.dtype != dtype:
        actual = described_type(out)
        if isinstance(out, np.ndarray):
            actual = f"{out.dtype} of shape {out.shape}"
        raise InputError(f"out is {actual}; it must be an array of {dtype} of shape {rows.shape}")
    if not out.flags.writeable:
        raise InputError("out is read-only; open a memmap with mode 'r+', or pass a writable array")
    if self_overlaps(out.shape, out.strides, out.itemsize):
        raise InputError(
            f"several entries of out share memory (strides {out.strides}); pass new memory"
        )
    same_start = out.__array_interface__["data"] == rows.__array_interface__["data"]
    if not (same_start and out.strides == rows.strides) and np.shares_memory(out, rows):
        raise InputError("out overlaps X without being the same array; pass X itself or new memory")


def self_overlaps(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> bool:
    """Return whether several entries of a strided array may share memory."""
    # Let the axes be in order of increasing stride, with lengths n_i and strides s_i. The entries
    # are disjoint if every |s_k| is at least itemsize + sum_{i < k} (n_i - 1) |s_i|, the extent of
    # the axes before axis k. If not, the function returns True.
    if 0 in shape:
        return False
    extent = itemsize
    for stride, size in sorted((abs(s), n) for s, n in zip(strides, shape, strict=True) if n > 1):
        if stride < extent:
            return True
        extent += (size - 1) * stride
    return False


# -- application -----------------------------------------------------------------------------------


def erase(
    factors: Factors,
    X: NDArray[Any],
    out: NDArray[Any],
    mask: Mask = None,
    progress: bool | None = False,
    uninitialised: bool = False,
) -> None:
    """Write the erased rows of X, (..., d), to `out`; copy the rows where `mask` is False."""
    # `uninitialised` tells that the memory of `out` was never written. Raises InputError if a
    # finite result is out of range of float16.
    if out.dtype.byteorder == SPELLED:
        out = to_array(out, "out")
    d, packed = X.shape[-1], factors.packed
    streamed = (
        not uninitialised and out.nbytes >= _STREAMED_BYTES and d * out.itemsize >= _STREAMED_ROW
    )
    work = X.dtype if X.dtype.isnative else X.dtype.newbyteorder("=")
    if work.kind != "f" or work.itemsize > 8:
        work = working_dtype(work)
    row_bytes = d * work.itemsize
    chunk, step = max(1, _CHUNK_BYTES // row_bytes), max(1, _PIECE_BYTES // row_bytes)
    is_direct = mask is None and out.dtype == work and out.flags.aligned

    def erase_range(
        rows: NDArray[Any], target: NDArray[Any], selected: Mask, first: int, last: int
    ) -> int:
        """Erase rows, in converted pieces if need be; return the first that overflows, or -1."""
        if is_direct and rows.dtype == work and rows.flags.aligned:
            return row_kernels.apply_rows(packed, rows, target, first, last, streamed)
        for start in range(first, last, step):
            stop = min(start + step, last)
            source, result = rows[start:stop], target[start:stop]
            index: Any = slice(None) if selected is None else np.flatnonzero(selected[start:stop])
            piece = np.array(source[index], work, order="C")
            destination = result if is_direct else piece
            row = row_kernels.apply_rows(packed, piece, destination, 0, len(piece), streamed)
            if selected is not None:
                np.copyto(result, source, casting="unsafe")
            if not is_direct:
                result[index] = piece
            if row >= 0:
                return start + (row if selected is None else int(index[row]))
        return -1

    hidden = progress is False or (progress is None and X.nbytes < _LONG_BYTES)
    with nullcontext() if hidden else Progress(X.size // d, show=progress) as bar:
        matrices = ((X, out, mask, 0),) if X.ndim == 2 else _matrices(X, out, mask)
        for rows, target, selected, number in matrices:
            for first in range(0, len(rows), chunk):
                part = slice(first, first + chunk)
                chosen = None if selected is None else selected[part]
                work_on = partial(erase_range, rows[part], target[part], chosen)
                n = len(rows[part])
                for row in threads.split(work_on, n, grain=_GRAIN // d):
                    if row >= 0:
                        raise InputError(
                            f"row {number + first + row} of the result leaves the range of float16 "
                            "(65504); pass X as float32. Some rows are written already"
                        )
                if bar is not None:
                    bar.advance(n, n * d * X.itemsize)


def _matrices(
    X: NDArray[Any], out: NDArray[Any], mask: Any, first: int = 0
) -> Iterator[tuple[NDArray[Any], NDArray[Any], Any, int]]:
    """Yield 2-D views of X and `out`, each with its mask and the index of its first row in X."""
    if X.ndim > 2:
        flat, target = (array.reshape(-1, array.shape[-1]) for array in (X, out))
        if X.size and not (np.may_share_memory(flat, X) and np.may_share_memory(target, out)):
            for i, (rows, part) in enumerate(zip(X, out, strict=True)):
                selected = None if mask is None else mask[i]
                yield from _matrices(rows, part, selected, first + i * (rows.size // X.shape[-1]))
            return
        X, out, mask = flat, target, None if mask is None else mask.reshape(-1)
    yield X, out, mask, first
