"""Rows of .npy files, memory-mapped."""

from __future__ import annotations

import itertools
import mmap
import os
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, cast

import numpy as np

from splince_fast.exceptions import InputError
from splince_fast.sources.arrays import check_column, map_labels, take_block, take_rows
from splince_fast.sources.base import (
    Block,
    PieceSource,
    Source,
    as_paths,
    choose_block_rows,
    files_name,
)


class _Shard(NamedTuple):
    """What a file said of itself when the source was made."""

    path: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]


def from_npy(
    paths: Any,
    labels: Any = None,
    *,
    sample_weight: Any = None,
    block_rows: int | None = None,
) -> Source:
    """Yield the rows of one .npy file or of several shards, as views of a memory map.

    Parameters
    ----------
    paths : path or sequence of paths
        Shards are read in the order given, one open at a time. Blocks do not cross shards.
    labels : mapping of str to column(s), frame, or a single column, optional
        Labels of all rows together; or, in place of any column, the path of a .npy file of labels
        or a sequence of such paths, one per shard.
    sample_weight : array of shape (n,), path, or sequence of paths, optional
        Non-negative frequencies of the rows.
    block_rows : int, optional
        Rows per block; the default is 4096, fewer where a block would exceed 64 MiB.

    Returns
    -------
    Source
        Its blocks are views of the mapped files.

    Raises
    ------
    InputError
        Names the path of a file that is missing, truncated, not a .npy file, holds objects, is
        not two-dimensional or has another width, or the column of another length. While reading:
        a file has changed or become shorter.

    Notes
    -----
    Reading a map beyond the end of a file that became shorter kills the process, so the size is
    checked before every block. Do not write to the files meanwhile.
    """
    shards = [_describe(path) for path in as_paths(paths, "paths")]
    _check_shards(shards)
    d = shards[0].shape[1]
    counts = [shard.shape[0] for shard in shards]
    name = files_name([shard.path for shard in shards])
    label_readers = map_labels(labels, lambda column, what: _by_shard(column, what, shards, name))
    weight_reader = (
        None if sample_weight is None else _by_shard(sample_weight, "sample_weight", shards, name)
    )
    itemsize = max(shard.dtype.itemsize for shard in shards)
    size = choose_block_rows(block_rows, d, itemsize)

    def read(piece: int, row: int) -> Iterator[Block]:
        for index in range(piece, len(shards)):
            yield from read_shard(index, row)
            row = 0

    def read_shard(index: int, row: int) -> Iterator[Block]:
        array = _reopen(shards[index])
        rows = array.view(np.ndarray)
        columns = map_labels(label_readers, lambda reader, _: reader(index))
        weight = None if weight_reader is None else weight_reader(index)
        for start in range(row, len(rows), size):
            _check_size(array, shards[index].path)
            yield take_block(rows, columns, weight, start, min(start + size, len(rows)))

    source = PieceSource(
        name,
        read,
        counts,
        size,
        n_features=d,
        nbytes=sum(n * d * shard.dtype.itemsize for n, shard in zip(counts, shards, strict=True)),
    )
    source.files = tuple(shard.path for shard in shards)
    return source


def _check_shards(shards: list[_Shard]) -> None:
    """Refuse shards that are no matrices of numbers of one width."""
    for path, shape, dtype in shards:
        if len(shape) != 2 or shape[1] == 0:
            raise InputError(
                f"{path!r} has shape {shape}; it must be (n, d), one row per sample, d > 0"
            )
        if dtype.kind not in "fiub":
            raise InputError(
                f"{path!r} has dtype {dtype}; save it as float16, float32 or float64 (bfloat16 is "
                "no type of .npy files: widen it first)"
            )
        if shape[1] != shards[0].shape[1]:
            raise InputError(
                f"{path!r} has {shape[1]} columns but {shards[0].path!r} has {shards[0].shape[1]}; "
                "all shards must hold the same embedding"
            )


def _by_shard(values: Any, what: str, shards: list[_Shard], rows_of: str) -> Callable[[int], Any]:
    """Check one column, and return what gives the part of it that belongs to a shard."""
    counts = [shard.shape[0] for shard in shards]
    if not _are_paths(values):
        check_column(values, sum(counts), what, rows_of)
        bounds = [0, *itertools.accumulate(counts)]
        return lambda index: take_rows(values, bounds[index], bounds[index + 1])
    files = [_describe(path) for path in as_paths(values, what)]
    if len(files) != len(shards):
        raise InputError(
            f"{what} names {len(files)} files but X has {len(shards)}; pass one per shard, or one "
            "array over all rows"
        )
    for file, shard in zip(files, shards, strict=True):
        if file.shape[:1] != shard.shape[:1]:
            raise InputError(
                f"{what}: {file.path!r} has shape {file.shape} but {shard.path!r} has "
                f"{shard.shape[0]} rows; pass the labels of that shard, one per row"
            )
    return lambda index: np.array(_reopen(files[index]))


def _are_paths(values: Any) -> bool:
    """Tell paths from a column of strings: a sequence of paths names .npy files throughout."""
    if isinstance(values, str | os.PathLike):
        return True
    return (
        isinstance(values, list | tuple)
        and len(values) > 0
        and all(
            isinstance(v, os.PathLike) or (isinstance(v, str) and v.endswith(".npy"))
            for v in values
        )
    )


def _describe(path: str) -> _Shard:
    """Read the header of a file."""
    array = _open(path)
    return _Shard(path, array.shape, array.dtype)


def _open(path: str) -> np.memmap[Any, Any]:
    """Map a .npy file for reading."""
    try:
        return np.lib.format.open_memmap(path, mode="r")
    except (OSError, ValueError, EOFError, OverflowError) as error:
        raise InputError(
            f"{path!r} cannot be read as a .npy array: {error}. It may be missing, truncated, "
            "another format, or hold Python objects; write it with numpy.save and a numeric dtype"
        ) from error


def _reopen(shard: _Shard) -> np.memmap[Any, Any]:
    """Map a file whose header was read before."""
    array = _open(shard.path)
    if (array.shape, array.dtype) != (shard.shape, shard.dtype):
        raise InputError(
            f"{shard.path!r} held {shard.dtype} of shape {shard.shape} and now holds {array.dtype} "
            f"of shape {array.shape}; make a new source when the files have changed"
        )
    return array


def _check_size(array: np.memmap[Any, Any], path: str) -> None:
    """Refuse a mapped file that no longer reaches to the end of its array."""
    size = cast(mmap.mmap, array.base).size()
    if size < array.offset + array.nbytes:
        raise InputError(
            f"{path!r} became shorter while it was read: {size} bytes where its array needs "
            f"{array.offset + array.nbytes}; another process may be writing it: start again when "
            "it is complete"
        )
