"""Conversion of Arrow data to blocks; X is a view of the embedding column."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Any, NamedTuple, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from splince_fast._runtime.arguments import as_names, require
from splince_fast._runtime.names import listed
from splince_fast._runtime.rows import choose_block_rows
from splince_fast.exceptions import InputError
from splince_fast.labels.containers import MISSING_CLASS
from splince_fast.sources.base import Block, PieceSource, Source, StreamSource

if TYPE_CHECKING:
    from pyarrow import Array, ChunkedArray, DataType, RecordBatch, Schema, Table

T = TypeVar("T")

# Length of vectors that determines the block size of a stream of lists: the true length is unknown
# before a row is read. Streams count 8 bytes per number.
_ASSUMED_WIDTH = 8192

RowName = Callable[[int], str]  # names a row of a block in messages


class ColumnNames(NamedTuple):
    """Names of the columns of the embedding, the labels and the weights."""

    embedding: str
    labels: tuple[str, ...]
    sample_weight: str | None

    @classmethod
    def from_arguments(
        cls, embedding: object, labels: Sequence[str] | str | None, sample_weight: str | None
    ) -> Self:
        """Return the names of one or several columns; raise InputError unless all are strings."""
        if not isinstance(embedding, str):
            raise InputError(
                f"embedding is {embedding!r}; name a column of vectors. Where you have one column "
                "per feature, write a column of vectors: list(df[columns].to_numpy())"
            )
        names = () if labels is None else as_names(labels, "labels")
        if not isinstance(sample_weight, str | None):
            raise InputError(f"sample_weight is {sample_weight!r}; it must name one column")
        return cls(embedding, names, sample_weight)

    def all(self) -> list[str]:
        """Return all names, each once."""
        weight = () if self.sample_weight is None else (self.sample_weight,)
        return list(dict.fromkeys((self.embedding, *self.labels, *weight)))

    def check(self, available: Sequence[str], place: str) -> None:
        """Raise InputError unless each name occurs exactly once among the available columns."""
        for name in self.all():
            if available.count(name) != 1:
                problem = "no column" if name not in available else "several columns"
                raise InputError(
                    f"{place} has {problem} named {name!r}; its columns are {listed(available)}"
                )

    def width(self, schema: Schema, place: str) -> int | None:
        """Return the length of the vectors; raise InputError unless the schema has all columns."""
        self.check(schema.names, place)
        arrow_type = schema.field(self.embedding).type
        return _list_size(arrow_type, f"column {self.embedding!r} of {place}")


def _list_size(arrow_type: DataType, name: str) -> int | None:
    """Return the length of fixed-size lists, None for other lists; raise InputError otherwise."""
    types = require("pyarrow", "parquet").types
    # An extension type, such as a fixed-shape tensor, stores its values in another type.
    storage = getattr(arrow_type, "storage_type", arrow_type)
    width = storage.list_size if types.is_fixed_size_list(storage) else None
    if width or types.is_list(storage) or types.is_large_list(storage):
        value_type = storage.value_type
        if types.is_floating(value_type) or types.is_integer(value_type):
            return width
    raise InputError(
        f"{name} has the type {arrow_type}, which is no embedding; pass lists of floats"
    )


# -- tables to blocks ----------------------------------------------------------------------------


def column_matrix(
    column: ChunkedArray, name: str, width: int | None, row_name: RowName
) -> NDArray[Any]:
    """Return a column of n > 0 vectors as a read-only (n, d) matrix; d = `width` unless None."""
    # A single chunk is not copied; the column may be a slice.
    array = column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
    if array.null_count:
        raise _vector_error(name, f"has no vector (null) in {row_name(_first_null(array))}")
    array = getattr(array, "storage", array)
    d = _list_size(array.type, f"column {name!r} in {row_name(0)}")
    if d is None:
        lengths = np.diff(array.offsets.to_numpy())
        d = int(lengths[0])
        row = int((lengths != d).argmax())
        if lengths[row] != d:
            places = f"{row_name(row)}, but {d} in {row_name(0)}"
            raise _vector_error(name, f"is ragged: {lengths[row]} values in {places}")
    if d == 0 or d != (width or d):
        expected = width or "at least 1"
        raise _vector_error(name, f"has {d} values in {row_name(0)}, where {expected} are expected")
    values = array.flatten()  # of the slice only, unlike ``array.values``
    if values.null_count:
        row = _first_null(values) // d
        raise _vector_error(name, f"has a null within the vector in {row_name(row)}")
    matrix: NDArray[np.generic] = values.to_numpy(zero_copy_only=True).reshape(len(array), d)
    return matrix


def _vector_error(name: str, problem: str) -> InputError:
    remedy = "drop rows without a vector, and embed all rows with the same model"
    return InputError(f"column {name!r} {problem}; {remedy}")


def _first_null(array: Array | ChunkedArray) -> int:
    return int(np.argmax(array.is_null().to_numpy(zero_copy_only=False)))


def table_to_block(
    table: Table, columns: ColumnNames, width: int | None, row_name: RowName
) -> Block:
    """Convert a table of n > 0 rows to a block; labels stay Arrow columns."""
    weight = None
    if columns.sample_weight is not None:
        column = table.column(columns.sample_weight)
        if column.null_count:
            place = row_name(_first_null(column))
            raise InputError(
                f"column {columns.sample_weight!r}, the sample weight, is null in {place}; fill it"
            )
        weight = column.to_numpy()
    return Block(
        column_matrix(table.column(columns.embedding), columns.embedding, width, row_name),
        {name: label_column(table, name) for name in columns.labels} or None,
        weight,
    )


def label_column(table: Table, name: str) -> ChunkedArray:
    """Return a column of labels; -1 becomes null in a ClassLabel of Hugging Face datasets."""
    column = table.column(name)
    if name not in _class_labels((table.schema.metadata or {}).get(b"huggingface", b"{}")):
        return column
    compute = require("pyarrow.compute", "parquet")
    return compute.if_else(compute.equal(column, MISSING_CLASS), None, column)


@functools.lru_cache(maxsize=8)
def _class_labels(info: bytes) -> frozenset[str]:
    """Return the names of the ClassLabel columns that the metadata of a schema declare."""
    features = json.loads(info).get("info", {}).get("features", {})
    return frozenset(name for name, f in features.items() if f.get("_type") == "ClassLabel")


def row_namer(place: str, start: int) -> RowName:
    """Return a function that names a row of the block that starts at row `start` of `place`."""
    return lambda row: f"row {start + row} of {place}"


# -- sources -------------------------------------------------------------------------------------


def _to_blocks(
    batches: Iterable[RecordBatch],
    columns: ColumnNames,
    block_rows: int,
    width: int | None,
    place: str,
    start: int = 0,
) -> Generator[Block, None, None]:
    """Regroup record batches, whose first row is row `start` of `place`, into blocks."""
    # Only the record batches of the block in use are in memory; only blocks that span several are
    # copied.
    for table in _regroup(batches, block_rows):
        block = table_to_block(table, columns, width, row_namer(place, start))
        width = block.X.shape[1]
        start += table.num_rows
        del table  # so that its memory is freed before the next table is read
        yield block
        del block


def _regroup(batches: Iterable[RecordBatch], block_rows: int) -> Iterator[Table]:
    """Regroup record batches into tables of `block_rows` rows; the last one may be shorter."""
    table_from = require("pyarrow", "parquet").Table.from_batches
    pending: list[RecordBatch] = []
    n_missing = block_rows
    for batch in batches:
        while batch.num_rows:
            pending.append(batch.slice(0, n_missing))
            n_missing -= pending[-1].num_rows
            batch = batch.slice(pending[-1].num_rows)
            if not n_missing:
                yield table_from(pending)
                pending.clear()
                n_missing = block_rows
        del batch
    if pending:
        yield table_from(pending)


def stream_source(
    items: Iterable[T],
    batches_of: Callable[[Iterable[T]], Iterable[RecordBatch]],
    columns: ColumnNames,
    block_rows: int | None,
    width: int | None,
    name: str,
) -> Source:
    """Return a source of record batches that can only be read in order."""
    size = choose_block_rows(block_rows, width or _ASSUMED_WIDTH, 8)
    return StreamSource(
        f"{name} in blocks of {size} rows",
        items,
        lambda items: _to_blocks(batches_of(items), columns, size, width, name),
        n_features=width,
    )


class Piece(NamedTuple):
    """Rows of Arrow data; blocks do not cross pieces."""

    place: str  # name in messages
    n_rows: int
    # ``batches(row, size)`` yields the rows from number `row` on in batches of at most `size` rows.
    batches: Callable[[int, int], Iterator[RecordBatch]]


def piece_source(
    pieces: Sequence[Piece], columns: ColumnNames, block_rows: int | None, name: str
) -> PieceSource:
    """Return a source of the rows of several pieces; the first row determines the width."""
    width, itemsize = None, 1
    for piece in pieces:
        if piece.n_rows:
            with closing(_to_blocks(piece.batches(0, 1), columns, 1, None, piece.place)) as blocks:
                first = next(blocks).X
            width, itemsize = first.shape[1], first.itemsize
            break
    size = choose_block_rows(block_rows, width or 1, itemsize)

    def read(index: int, row: int) -> Iterator[Block]:
        place, _, batches = pieces[index]
        return _to_blocks(batches(row, size), columns, size, width, place, row)

    counts = [piece.n_rows for piece in pieces]
    nbytes = sum(counts) * (width or 0) * itemsize
    return PieceSource(name, read, counts, size, n_features=width, nbytes=nbytes)
