"""Base of sources of shards: widths, labels by shard, and where to resume."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from splince_fast._runtime.arrays import torch_to_numpy
from splince_fast.exceptions import InputError
from splince_fast.sources._arrays import check_column, map_labels, take_block, take_rows
from splince_fast.sources.base import Block, PieceSource, Source, choose_block_rows, files_name


class Shard(NamedTuple):
    """A file, and what it said of itself when the source was made.

    Attributes
    ----------
    path : str
        By what messages call it.
    shape : tuple of int
    dtype : numpy.dtype
    open : callable
        ``open()`` gives the rows, and raises InputError where they are no longer those.
    check : callable
        ``check(rows)`` is called before each block, for what may happen while it is read.
    """

    path: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    open: Callable[[], Any]
    check: Callable[[Any], None] = lambda rows: None


# Gives for a column and its name in messages what gives the part that belongs to a shard.
ByShard = Callable[[Any, str], Callable[[int], Any]]


def sharded_source(
    shards: Sequence[Shard],
    labels: Any = None,
    *,
    sample_weight: Any = None,
    block_rows: int | None = None,
    by_shard: ByShard | None = None,
) -> Source:
    """Make a source of shards, read in order, one open at a time; blocks do not cross them.

    Parameters
    ----------
    shards : sequence of Shard
        Matrices of numbers of one width.
    labels, sample_weight
        Columns over all rows together, or what `by_shard` knows.
    block_rows : int, optional
        Rows per block; the default is that of :func:`choose_block_rows`.
    by_shard : callable, optional
        How a column is cut; the default slices it.

    Raises
    ------
    InputError
        A shard that is no matrix of numbers or has another width, or a column of another length.
    """
    _check_shards(shards)
    d = shards[0].shape[1]
    counts = [shard.shape[0] for shard in shards]
    name = files_name([shard.path for shard in shards])
    cut = by_shard or (lambda column, what: sliced(column, what, counts, name))
    label_readers = map_labels(labels, cut)
    weight_reader = None if sample_weight is None else cut(sample_weight, "sample_weight")
    size = choose_block_rows(block_rows, d, max(shard.dtype.itemsize for shard in shards))

    def read(piece: int, row: int) -> Iterator[Block]:
        for index in range(piece, len(shards)):
            yield from read_shard(index, row)
            row = 0

    def read_shard(index: int, row: int) -> Iterator[Block]:
        rows = shards[index].open()
        columns = map_labels(label_readers, lambda reader, _: reader(index))
        weight = None if weight_reader is None else weight_reader(index)
        for start in range(row, len(rows), size):
            shards[index].check(rows)
            plain = rows.view(np.ndarray) if isinstance(rows, np.ndarray) else rows
            yield take_block(plain, columns, weight, start, min(start + size, len(rows)))

    return PieceSource(
        name,
        read,
        counts,
        size,
        n_features=d,
        nbytes=sum(n * d * shard.dtype.itemsize for n, shard in zip(counts, shards, strict=True)),
    )


def sliced(values: Any, what: str, counts: Sequence[int], rows_of: str) -> Callable[[int], Any]:
    """Check a column over all rows, and return what slices the part of a shard."""
    check_column(values, sum(counts), what, rows_of)
    bounds = [0, *itertools.accumulate(counts)]
    return lambda index: take_rows(values, bounds[index], bounds[index + 1])


def host_rows(X: Any, path: str) -> NDArray[Any]:
    """Rows of a file as a NumPy array; tensors are widened where NumPy lacks their dtype.

    Raises
    ------
    InputError
        They are no array.
    """
    found = torch_to_numpy(X) if hasattr(X, "detach") else X
    if not isinstance(found, np.ndarray):
        raise InputError(f"{path!r} holds a {type(X).__name__} where rows are expected")
    return found


def _check_shards(shards: Sequence[Shard]) -> None:
    """Refuse shards that are no matrices of numbers of one width."""
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
