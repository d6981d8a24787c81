"""Application of a low-rank affine map to rows of any dtype and layout."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
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
    check_out(out, rows, dtype)
    return rows, selected, out


def _as_stack(X: Any, width: int, names: tuple[str, ...] | None) -> NDArray[Any]:
    """Convert X to a numeric array of shape (..., d); errors are those of :func:`as_rows`."""
    if is_sparse(X):
        raise InputError(
            "X is sparse, and erased rows are dense; pass X[i:j].toarray(), or use "
            "eraser.fold_into(weight, bias) before a linear layer, or X @ eraser.right, the erased "
            "coordinates"
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


def check_out(out: object, rows: NDArray[np.generic], dtype: np.dtype[np.generic]) -> None:
    """Raise InputError unless the result for `rows` can be written to `out`."""
    if not isinstance(out, np.ndarray) or out.shape != rows.shape or out.dtype != dtype:
        actual = (
            f"{out.dtype} of shape {out.shape}"
            if isinstance(out, np.ndarray)
            else described_type(out)
        )
        raise InputError(f"out is {actual}; it must be an array of {dtype} of shape {rows.shape}")
    if not out.flags.writeable:
        raise InputError("out is read-only; open a memmap with mode 'r+', or pass a writable array")
    if self_overlaps(out.shape, out.strides, out.itemsize):
        raise InputError(
            f"out has the strides {out.strides}, by which several of its entries share memory, as "
            "in a sliding window or a broadcast array; pass new memory, or a copy"
        )
    if out is rows or not np.may_share_memory(out, rows):
        return
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
    X: NDArray[np.generic],
    out: NDArray[np.generic],
    mask: Mask = None,
    progress: bool | None = False,
    uninitialised: bool = False,
) -> None:
    """Write the erased rows of X, (..., d), to `out`; copy the rows where `mask` is False."""
    # `uninitialised` tells that the memory of `out` was never written. Raises InputError if a
    # finite result is out of range of float16.
    if out.dtype.byteorder == SPELLED:
        out = to_array(out, "out")
    streamed = (
        not uninitialised
        and out.nbytes >= _STREAMED_BYTES
        and out.shape[-1] * out.itemsize >= _STREAMED_ROW
    )
    hidden = progress is False or (progress is None and X.nbytes < _LONG_BYTES)
    bar_context = nullcontext() if hidden else Progress(X.size // X.shape[-1], show=progress)
    work = X.dtype if X.dtype.isnative else X.dtype.newbyteorder("=")
    if work.kind != "f" or work.itemsize > 8:
        work = working_dtype(work)
    step = max(1, _CHUNK_BYTES // (X.shape[-1] * work.itemsize))
    with bar_context as bar:
        matrices = ((X, out, mask, 0),) if X.ndim == 2 else _matrices(X, out, mask, 0)
        for rows, target, selected, first in matrices:
            for start in range(0, len(rows), step):
                chunk = slice(start, start + step)
                part = None if selected is None else selected[chunk]
                row = _erase_chunk(factors.packed, streamed, work, rows[chunk], target[chunk], part)
                if row >= 0:
                    raise InputError(
                        f"row {first + start + row} of the result leaves the range of float16 "
                        "(65504); pass X as float32. Some rows are written already"
                    )
                if bar is not None:
                    bar.advance(len(rows[chunk]), rows[chunk].nbytes)


def _matrices(
    X: NDArray[Any], out: NDArray[Any], mask: Mask, first: int
) -> Iterator[tuple[NDArray[Any], NDArray[Any], Mask, int]]:
    """Yield 2-D views of X and `out`, each with its mask and the index of its first row in X."""
    if X.ndim > 2:
        flat = [array.reshape(-1, array.shape[-1]) for array in (X, out)]
        if X.size and not all(map(np.may_share_memory, flat, (X, out))):  # these are copies
            for i, (rows, target) in enumerate(zip(X, out, strict=True)):
                inner = None if mask is None else mask[i]
                yield from _matrices(rows, target, inner, first + i * (rows.size // X.shape[-1]))
            return
        X, out = flat
        mask = None if mask is None else mask.reshape(-1)
    yield X, out, mask, first


def _erase_chunk(
    packed: row_kernels.PackedFactors,
    streamed: bool,
    work: np.dtype[np.generic],
    rows: NDArray[Any],
    out: NDArray[Any],
    mask: Mask,
) -> int:
    """Erase rows on several threads in dtype `work`; return a row that overflows, or -1."""
    n, d = rows.shape
    step = max(1, _PIECE_BYTES // (d * work.itemsize))
    rows_are_direct, out_is_direct = (
        mask is None and array.dtype == work and array.flags.aligned for array in (rows, out)
    )

    def erase_range(start: int, stop: int) -> int:
        """Erase rows, in converted pieces if need be; return the first that overflows, or -1."""
        if rows_are_direct and out_is_direct:
            return row_kernels.apply_rows(packed, rows, out, start, stop, streamed)
        for first in range(start, stop, step):
            last = min(first + step, stop)
            source, target = rows[first:last], out[first:last]
            selected: Any = slice(None) if mask is None else np.flatnonzero(mask[first:last])
            piece = np.array(source[selected], work, order="C")
            destination = target if out_is_direct else piece
            row = row_kernels.apply_rows(packed, piece, destination, 0, len(piece), streamed)
            if mask is not None:
                np.copyto(target, source, casting="unsafe")
            if not out_is_direct:
                target[selected] = piece
            if row >= 0:
                return first + (row if mask is None else int(selected[row]))
        return -1

    overflows = threads.split(erase_range, n, grain=_GRAIN // d)
    return next((row for row in overflows if row >= 0), -1)
