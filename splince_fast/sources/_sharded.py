"""Rows of several files, which are the shards of one matrix."""

from __future__ import annotations

import itertools
import mmap
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from splince_fast._runtime.arguments import described_type
from splince_fast._runtime.rows import choose_block_rows, is_tensor, torch_to_numpy
from splince_fast.exceptions import InputError
from splince_fast.sources._arrays import check_columns, take_block
from splince_fast.sources.base import Block, PieceSource, Source, describe_files


def sharded_source(
    paths: Sequence[str],
    open_rows: Callable[[str], NDArray[Any]],
    labels: object = None,
    *,
    sample_weight: object = None,
    block_rows: int | None = None,
) -> Source:
    """Return a source of the rows of files, which `open_rows` opens in order, one at a time."""
    shapes = [checked_shape(path, open_rows(path)) for path in paths]
    counts, d = [shape[0] for shape, _ in shapes], shapes[0][0][1]
    for path, (shape, _) in zip(paths, shapes, strict=True):
        if shape[1] != d:
            raise InputError(
                f"{path!r} has {shape[1]} columns but {paths[0]!r} has {d}; all must agree"
            )
    name = describe_files(paths)
    check_columns(labels, sample_weight, sum(counts), name)
    first_rows = [0, *itertools.accumulate(counts)]
    sizes = [dtype.itemsize for _, dtype in shapes]
    size = choose_block_rows(block_rows, d, max(sizes))

    def read(index: int, row: int) -> Iterator[Block]:
        path, offset = paths[index], first_rows[index]
        rows = open_rows(path)
        check_unchanged(path, rows, *shapes[index])
        for start in range(row, counts[index], size):
            stop = min(start + size, counts[index])
            if isinstance(rows, np.memmap):
                _check_size(rows, path)
            part = rows[start:stop].view(np.ndarray)
            yield take_block(part, labels, sample_weight, offset + start, offset + stop)

    nbytes = sum(n * d * itemsize for n, itemsize in zip(counts, sizes, strict=True))
    source = PieceSource(name, read, counts, size, n_features=d, nbytes=nbytes)
    source.files = tuple(paths)
    return source


def host_rows(X: object, path: str) -> NDArray[Any]:
    """Convert rows of a file to a NumPy array; raise InputError unless X is an array or tensor."""
    rows = torch_to_numpy(X) if is_tensor(X) else X
    if not isinstance(rows, np.ndarray):
        raise InputError(f"{path!r} holds {described_type(X)} where rows are expected")
    return rows


def checked_shape(path: str, rows: NDArray[Any]) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Return the shape and dtype of the rows of a file; raise InputError unless it is a matrix."""
    if rows.ndim != 2 or rows.shape[1] == 0:
        raise InputError(f"{path!r} has shape {rows.shape}; it must be (n, d), with d > 0")
    if rows.dtype.kind not in "fiub":
        raise InputError(f"{path!r} has dtype {rows.dtype}; save it as float16, float32 or float64")
    return rows.shape, rows.dtype


def check_unchanged(
    path: str, array: NDArray[Any], shape: tuple[int, ...], dtype: np.dtype[Any]
) -> None:
    """Raise InputError if a file has another shape or dtype than when the source was made."""
    if (array.shape, array.dtype) != (shape, dtype):
        raise InputError(
            f"{path!r} held {dtype} of shape {shape} and now holds {array.dtype} of shape "
            f"{array.shape}; make a new source when the files have changed"
        )


def _check_size(array: np.memmap[Any, Any], path: str) -> None:
    """Raise InputError if a memory-mapped file has become shorter than its array."""
    size = cast(mmap.mmap, array.base).size()
    if size < array.offset + array.nbytes:
        raise InputError(
            f"{path!r} became shorter while it was read: {size} bytes where its array needs "
            f"{array.offset + array.nbytes}; start again when it is complete"
        )
