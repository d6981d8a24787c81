"""From Arrow tables to blocks: an embedding column becomes a matrix without a copy."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from splince_fast._runtime.extras import require
from splince_fast.exceptions import InputError
from splince_fast.sources.base import (
    Block,
    PieceSource,
    Source,
    StreamSource,
    choose_block_rows,
)

# Of a stream of lists, whose width shows only in its rows, a block must be chosen beforehand.
_ASSUMED_WIDTH = 16384

# Says in which file and where in it a row of a block lies.
RowName = Callable[[int], str]


class Columns(NamedTuple):
    """Names of the columns to read."""

    embedding: str
    labels: tuple[str, ...]
    sample_weight: str | None

    @classmethod
    def of(cls, embedding: str, labels: Any, sample_weight: str | None) -> Self:
        """Take one label name or several.

        Raises
        ------
        InputError
            A name is not a string.
        """
        names = () if labels is None else (labels,) if isinstance(labels, str) else tuple(labels)
        columns = cls(embedding, names, sample_weight)
        for name in columns.all():
            if not isinstance(name, str):
                raise InputError(
                    f"{name!r} is no column name; embedding=, labels= and "
                    "sample_weight= take the names of columns as strings"
                )
        return columns

    def all(self) -> list[str]:
        """List each column once."""
        weight = () if self.sample_weight is None else (self.sample_weight,)
        return list(dict.fromkeys((self.embedding, *self.labels, *weight)))

    def check(self, available: Iterable[str], where: str) -> None:
        """Refuse names that are not, or not once, among the columns that there are."""
        names = list(available)
        for name in self.all():
            if names.count(name) != 1:
                found = "no column" if name not in names else "several columns"
                raise InputError(f"{where} has {found} named {name!r}; its columns are {names}")


class Vectors(NamedTuple):
    """Width and dtype of an embedding column, from its type."""

    width: int | None  # None where every row says its own
    itemsize: int


def vectors_of(kind: Any, what: str) -> Vectors:
    """Read the type of an embedding column.

    Raises
    ------
    InputError
        It is not a list of numbers.
    """
    types = require("pyarrow", "parquet").types
    storage = getattr(kind, "storage_type", kind)  # of an extension such as a fixed-shape tensor
    fixed = types.is_fixed_size_list(storage)
    if fixed or types.is_list(storage) or types.is_large_list(storage):
        value = storage.value_type
        numeric = types.is_floating(value) or types.is_integer(value)
        if numeric and not (fixed and storage.list_size == 0):
            return Vectors(storage.list_size if fixed else None, value.bit_width // 8)
    raise InputError(
        f"{what} has the type {kind}, which is no embedding; it must be a list or fixed_size_list "
        "of floats, with one vector per row"
    )


def matrix_of(column: Any, name: str, width: int | None, row_name: RowName) -> NDArray[Any]:
    """View an embedding column as a matrix.

    Parameters
    ----------
    column : pyarrow.ChunkedArray of length n > 0
        Of fixed_size_list, list or large_list, sliced or not. Only several chunks are copied.
    name : str
        Name of the column, for messages.
    width : int or None
        Length that every vector must have, where known.
    row_name : callable
        Names a row of the column, for messages.

    Returns
    -------
    ndarray of shape (n, d)
        Read-only, of the type of the values.

    Raises
    ------
    InputError
        A vector is missing, has a null in it, or has another length than the others.
    """
    array = column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
    if array.null_count:
        row = int(_nulls(array).argmax())
        raise InputError(
            f"column {name!r} has no vector (null) in {row_name(row)}; drop such rows first: "
            f"{array.null_count} of the {len(array)} rows of this block"
        )
    array = getattr(array, "storage", array)
    d = vectors_of(array.type, f"column {name!r} in {row_name(0)}").width
    if d is None:
        lengths = np.diff(array.offsets.to_numpy())
        d = int(lengths[0])
        unlike = np.flatnonzero(lengths != d)
        if unlike.size:
            row = int(unlike[0])
            raise InputError(
                f"column {name!r} is ragged: {lengths[row]} values in {row_name(row)}, but {d} in "
                f"{row_name(0)}; embed every row with the same model"
            )
    if d == 0 or d != (width or d):
        raise InputError(
            f"column {name!r} has {d} values in {row_name(0)}, where "
            f"{width or 'at least 1'} are expected; embed every row with the same model"
        )
    values = array.flatten()  # of the rows of this slice only
    if values.null_count:
        row = int(_nulls(values).argmax()) // d
        raise InputError(
            f"column {name!r} has a null within the vector in {row_name(row)}; drop such rows, or "
            "repair the embedding"
        )
    matrix: NDArray[Any] = values.to_numpy(zero_copy_only=True).reshape(len(array), d)
    return matrix


def _nulls(array: Any) -> NDArray[np.bool_]:
    """Say which entries of an Arrow array are null."""
    return np.asarray(array.is_null().to_numpy(zero_copy_only=False), dtype=np.bool_)


def block_of(table: Any, columns: Columns, width: int | None, row_name: RowName) -> Block:
    """Make a block of a table of n > 0 rows; labels stay Arrow columns."""
    weight = None
    if columns.sample_weight is not None:
        column = table.column(columns.sample_weight)
        if column.null_count:
            row = int(_nulls(column).argmax())
            raise InputError(
                f"column {columns.sample_weight!r}, the sample weight, is null in {row_name(row)}; "
                "fill it, with 0 to leave the row out"
            )
        weight = column.to_numpy()
    return Block(
        matrix_of(table.column(columns.embedding), columns.embedding, width, row_name),
        {name: table.column(name) for name in columns.labels} or None,
        weight,
    )


def rows_in(place: str, start: int) -> RowName:
    """Return what names the rows of a block that begins at row `start` of a place."""
    return lambda row: f"row {start + row} of {place}"


def blocks_of(
    batches: Iterable[Any],
    columns: Columns,
    block_rows: int,
    width: int | None,
    place: str,
    first_row: int = 0,
) -> Iterator[Block]:
    """Cut record batches of any lengths into blocks, from the one at `first_row` onwards.

    While the caller uses a block, nothing else is held; only blocks across batches are copied.
    """
    start = 0
    for table in _cut(batches, block_rows):
        block = None
        if start >= first_row:
            block = block_of(table, columns, width, rows_in(place, start))
            width = block.X.shape[1]
        start += table.num_rows
        del table  # or it would be held while the next one is read
        if block is not None:
            yield block
        del block


def _cut(batches: Iterable[Any], block_rows: int) -> Iterator[Any]:
    """Cut record batches into tables of `block_rows` rows, the last one shorter."""
    table_from = require("pyarrow", "parquet").Table.from_batches
    pending: list[Any] = []
    missing = block_rows
    for batch in batches:
        while batch.num_rows:
            pending.append(batch.slice(0, missing))
            missing -= pending[-1].num_rows
            batch = batch.slice(pending[-1].num_rows)
            if not missing:
                yield table_from(pending)
                pending.clear()
                missing = block_rows
        del batch
    if pending:
        yield table_from(pending)


def stream_source(
    start: Callable[[], Iterator[Any]],
    columns: Columns,
    block_rows: int | None,
    vectors: Vectors,
    name: str,
) -> Source:
    """Make a source of record batches that can only be read in order."""
    size = choose_block_rows(block_rows, vectors.width or _ASSUMED_WIDTH, vectors.itemsize)
    return StreamSource(
        f"{name} in blocks of {size} rows",
        lambda: blocks_of(start(), columns, size, vectors.width, name),
        n_features=vectors.width,
    )


def sliced_source(
    take: Callable[[int, int], Any],
    n: int,
    columns: Columns,
    block_rows: int | None,
    name: str,
) -> Source:
    """Make a source of what gives any range of its n rows as a table, ``take(start, stop)``."""
    width, itemsize = None, 1
    if n:
        first = matrix_of(
            take(0, 1).column(columns.embedding), columns.embedding, None, rows_in(name, 0)
        )
        width, itemsize = first.shape[1], first.itemsize
    size = choose_block_rows(block_rows, width or 1, itemsize)

    def read(_: int, row: int) -> Iterator[Block]:
        for start in range(row, n, size):
            yield block_of(take(start, min(start + size, n)), columns, width, rows_in(name, start))

    return PieceSource(name, read, [n], size, n_features=width, nbytes=n * (width or 0) * itemsize)
