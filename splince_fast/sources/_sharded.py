"""Rows of several files, which are the shards of one matrix."""

from __future__ import annotations

import itertools
import mmap
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from splince_fast._runtime.arguments import described_type
from splince_fast._runtime.rows import choose_block_rows, torch_to_numpy
from splince_fast.exceptions import InputError
from splince_fast.labels.containers import map_labels
from splince_fast.sources._arrays import check_length, slice_rows, take_block
from splince_fast.sources.base import Block, PieceSource, Source, describe_files


class Shard(NamedTuple):
    """A file, with the shape and dtype that it had when the source was created."""

    path: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    read: Callable[[str], Any]  # opens the file at `path`, and returns the rows

    def rows(self) -> Any:
        """Open the file; raise InputError if its shape or dtype has changed."""
        rows = self.read(self.path)
        if (rows.shape, rows.dtype) != (self.shape, self.dtype):
            raise InputError(
                f"{self.path!r} held {self.dtype} of shape {self.shape} and now holds {rows.dtype} "
                f"of shape {rows.shape}; make a new source when the files have changed"
            )
        return rows


def make_shard(path: str, read: Callable[[str], Any]) -> Shard:
    """Return a file of rows as a shard."""
    rows = read(path)
    return Shard(path, rows.shape, rows.dtype, read)


# Function that takes a column and its name. It returns a second function, which maps the index of a
# shard to the shard's part of the column.
SplitColumn = Callable[[Any, str], Callable[[int], Any]]


def sharded_source(
    shards: Sequence[Shard],
    labels: object = None,
    *,
    sample_weight: object = None,
    block_rows: int | None = None,
    split_column: SplitColumn | None = None,
) -> Source:
    """Return a source of the rows of several shards, which are read in order, one at a time."""
    # `split_column` reads columns of other forms than one entry per row of all shards.
    _check_shards(shards)
    d = shards[0].shape[1]
    counts = [shard.shape[0] for shard in shards]
    name = describe_files([shard.path for shard in shards])
    split = split_column or (
        lambda column, column_name: split_array(column, column_name, counts, name)
    )
    label_readers = map_labels(labels, split)
    weight_reader = None if sample_weight is None else split(sample_weight, "sample_weight")
    size = choose_block_rows(block_rows, d, max(shard.dtype.itemsize for shard in shards))

    def read(index: int, row: int) -> Iterator[Block]:
        rows = shards[index].rows()
        columns = map_labels(label_readers, lambda reader, _: reader(index))
        weight = None if weight_reader is None else weight_reader(index)
        array = rows.view(np.ndarray) if isinstance(rows, np.ndarray) else rows
        for start in range(row, len(rows), size):
            if isinstance(rows, np.memmap):
                _check_size(rows, shards[index].path)
            yield take_block(array, columns, weight, start, min(start + size, len(rows)))

    return PieceSource(
        name,
        read,
        counts,
        size,
        n_features=d,
        nbytes=sum(n * d * shard.dtype.itemsize for n, shard in zip(counts, shards, strict=True)),
    )


def split_array(
    values: object, name: str, counts: Sequence[int], rows_of: str
) -> Callable[[int], Any]:
    """Return a function from a shard to its part of a column with one entry per row of all."""
    verb = "has" if len(counts) == 1 else "have"
    check_length(values, sum(counts), name, rows_of, verb)
    bounds = [0, *itertools.accumulate(counts)]
    return lambda index: slice_rows(values, bounds[index], bounds[index + 1])


def host_rows(X: object, path: str) -> NDArray[Any]:
    """Convert rows of a file to a NumPy array; raise InputError unless X is an array or tensor."""
    rows = torch_to_numpy(X) if hasattr(X, "detach") else X
    if not isinstance(rows, np.ndarray):
        raise InputError(f"{path!r} holds {described_type(X)} where rows are expected")
    return rows


def _check_shards(shards: Sequence[Shard]) -> None:
    """Raise InputError unless all shards are numeric matrices of one width."""
    for path, shape, dtype, *_ in shards:
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


def _check_size(array: np.memmap[Any, Any], path: str) -> None:
    """Raise InputError if a memory-mapped file has become shorter than its array."""
    size = cast(mmap.mmap, array.base).size()
    if size < array.offset + array.nbytes:
        raise InputError(
            f"{path!r} became shorter while it was read: {size} bytes where its array needs "
            f"{array.offset + array.nbytes}; another process may be writing it: start again when "
            "it is complete"
        )
