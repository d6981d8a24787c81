"""Conversion of Arrow tables to blocks; X is a view of the embedding column."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from splince_fast._runtime.arguments import require
from splince_fast._runtime.names import listed
from splince_fast._runtime.rows import choose_block_rows
from splince_fast.exceptions import InputError
from splince_fast.labels.containers import MISSING_CLASS
from splince_fast.sources.base import Block, PieceSource, Source, StreamSource

if TYPE_CHECKING:
    from pyarrow import Array, ChunkedArray, DataType, RecordBatch, Schema, Table

# Length of vectors that determines the block size of a stream of lists: the true length is unknown
# before a row is read.
_ASSUMED_WIDTH = 16384

RowName = Callable[[int], str]  # names a row of a block in messages


class VectorType(NamedTuple):
    """Type of the vectors of an embedding column."""

    width: int | None  # length of the vectors; None for lists, which may differ in length
    itemsize: int  # bytes per number


class ColumnNames(NamedTuple):
    """Names of the columns of the embedding, the labels and the weights."""

    embedding: str
    labels: tuple[str, ...]
    sample_weight: str | None

    @classmethod
    def from_arguments(
        cls, embedding: str, labels: Sequence[str] | str | None, sample_weight: str | None
    ) -> Self:
        """Return the names of one or several columns; raise InputError unless all are strings."""
        single = isinstance(labels, str) or not isinstance(labels, Iterable)
        names: tuple[Any, ...] = () if labels is None else (labels,) if single else tuple(labels)
        for name in (embedding, *names, "" if sample_weight is None else sample_weight):
            if not isinstance(name, str):
                raise InputError(
                    f"{name!r} is no column name; embedding=, labels= and "
                    "sample_weight= take the names of columns as strings. For one column per "
                    "feature, write a column of vectors: df['embedding'] = "
                    "list(df[columns].to_numpy())"
                )
        return cls(embedding, names, sample_weight)

    def all(self) -> list[str]:
        """Return all names, each once."""
        weight = () if self.sample_weight is None else (self.sample_weight,)
        return list(dict.fromkeys((self.embedding, *self.labels, *weight)))

    def check(self, available: Iterable[str], place: str) -> None:
        """Raise InputError unless each name occurs exactly once among the available columns."""
        names = list(available)
        for name in self.all():
            if names.count(name) != 1:
                problem = "no column" if name not in names else "several columns"
                raise InputError(
                    f"{place} has {problem} named {name!r}; its columns are {listed(names)}"
                )

    def vectors(self, schema: Schema, place: str) -> VectorType:
        """Return the type of the vectors; raise InputError unless the schema has all columns."""
        self.check(schema.names, place)
        field = schema.field(self.embedding)
        return vector_type(field.type, f"column {self.embedding!r} of {place}")


def vector_type(arrow_type: DataType, name: str) -> VectorType:
    """Convert an Arrow type to a vector type; raise InputError unless it is a list of numbers."""
    types = require("pyarrow", "parquet").types
    # An extension type, such as a fixed-shape tensor, stores its values in another type.
    storage = getattr(arrow_type, "storage_type", arrow_type)
    is_fixed_size = types.is_fixed_size_list(storage)
    if is_fixed_size or types.is_list(storage) or types.is_large_list(storage):
        value_type = storage.value_type
        numeric = types.is_floating(value_type) or types.is_integer(value_type)
        if numeric and not (is_fixed_size and storage.list_size == 0):
            return VectorType(
                storage.list_size if is_fixed_size else None, value_type.bit_width // 8
            )
    raise InputError(
        f"{name} has the type {arrow_type}, which is no embedding; it must be a list or "
        "fixed_size_list of floats, with one vector per row"
    )


def column_matrix(
    column: ChunkedArray, name: str, width: int | None, row_name: RowName
) -> NDArray[Any]:
    """Return a column of n > 0 vectors as a read-only (n, d) matrix; d = `width` unless None."""
    # A single chunk is not copied; the column may be a slice.
    array = column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
    if array.null_count:
        row = int(_nulls(array).argmax())
        raise InputError(
            f"column {name!r} has no vector (null) in {row_name(row)}; drop such rows first: "
            f"{array.null_count} of the {len(array)} rows of this block"
        )
    array = getattr(array, "storage", array)
    d = vector_type(array.type, f"column {name!r} in {row_name(0)}").width
    if d is None:
        lengths = np.diff(array.offsets.to_numpy())
        d = int(lengths[0])
        ragged = np.flatnonzero(lengths != d)
        if ragged.size:
            row = int(ragged[0])
            raise InputError(
                f"column {name!r} is ragged: {lengths[row]} values in {row_name(row)}, but {d} in "
                f"{row_name(0)}; embed every row with the same model"
            )
    if d == 0 or d != (width or d):
        raise InputError(
            f"column {name!r} has {d} values in {row_name(0)}, where "
            f"{width or 'at least 1'} are expected; embed every row with the same model"
        )
    values = array.flatten()  # of the slice only, unlike ``array.values``
    if values.null_count:
        row = int(_nulls(values).argmax()) // d
        raise InputError(
            f"column {name!r} has a null within the vector in {row_name(row)}; drop such rows, or "
            "repair the embedding"
        )
    matrix: NDArray[np.generic] = values.to_numpy(zero_copy_only=True).reshape(len(array), d)
    return matrix


def _nulls(array: Array | ChunkedArray) -> NDArray[np.bool_]:
    return np.asarray(array.is_null().to_numpy(zero_copy_only=False), dtype=np.bool_)


def table_to_block(
    table: Table, columns: ColumnNames, width: int | None, row_name: RowName
) -> Block:
    """Convert a table of n > 0 rows to a block; labels stay Arrow columns."""
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


def batches_to_blocks(
    batches: Iterable[RecordBatch],
    columns: ColumnNames,
    block_rows: int,
    width: int | None,
    place: str,
    first_row: int = 0,
) -> Iterator[Block]:
    """Regroup record batches into blocks, and yield those from row `first_row` onwards."""
    # Only the record batches of the block in use are in memory; only blocks that span several are
    # copied.
    start = 0
    for table in _regroup(batches, block_rows):
        block = None
        if start >= first_row:
            block = table_to_block(table, columns, width, row_namer(place, start))
            width = block.X.shape[1]
        start += table.num_rows
        del table  # so that its memory is freed before the next table is read
        if block is not None:
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
    start: Callable[[], Iterator[RecordBatch]],
    columns: ColumnNames,
    block_rows: int | None,
    vectors: VectorType,
    name: str,
) -> Source:
    """Return a source of the record batches of ``start()``, which can only be read in order."""
    size = choose_block_rows(block_rows, vectors.width or _ASSUMED_WIDTH, vectors.itemsize)
    return StreamSource(
        f"{name} in blocks of {size} rows",
        lambda: batches_to_blocks(start(), columns, size, vectors.width, name),
        n_features=vectors.width,
    )


def sliced_source(
    read_rows: Callable[[int, int], Table],
    n: int,
    columns: ColumnNames,
    block_rows: int | None,
    name: str,
) -> Source:
    """Return a source of n rows; ``read_rows(start, stop)`` returns rows `start` to `stop` - 1."""
    width, itemsize = None, 1
    if n:
        column = read_rows(0, 1).column(columns.embedding)
        first_vector = column_matrix(column, columns.embedding, None, row_namer(name, 0))
        width, itemsize = first_vector.shape[1], first_vector.itemsize
    size = choose_block_rows(block_rows, width or 1, itemsize)

    def read(_: int, row: int) -> Iterator[Block]:
        for start in range(row, n, size):
            table = read_rows(start, min(start + size, n))
            yield table_to_block(table, columns, width, row_namer(name, start))

    return PieceSource(name, read, [n], size, n_features=width, nbytes=n * (width or 0) * itemsize)
