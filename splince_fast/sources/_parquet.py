"""Rows of Parquet files and of Arrow data."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from splince_fast._runtime.arguments import require
from splince_fast._runtime.rows import cause_text
from splince_fast.exceptions import InputError
from splince_fast.sources._arrow import ColumnNames, Piece, piece_source, stream_source
from splince_fast.sources.base import Source, as_paths, describe_files

if TYPE_CHECKING:
    from pyarrow import RecordBatch, Table
    from pyarrow.parquet import ParquetFile

# Size of the read buffer. Without a buffer, pyarrow loads a complete column of a row group before
# it decodes the first rows.
_BUFFER_BYTES = 1 << 20


def from_parquet(
    paths: object,
    embedding: str,
    labels: Sequence[str] | str | None = None,
    *,
    sample_weight: str | None = None,
    block_rows: int | None = None,
) -> Source:
    """Return a source of the rows of Parquet files or of Arrow data.

    Parameters
    ----------
    paths : path, sequence of paths, or Arrow data
        Files, read in this order; a directory stands for the ``*.parquet`` files below it, sorted
        by path. Arrow data are a ``pyarrow.Table`` or RecordBatch, a frame that exports Arrow
        (polars), or a ``RecordBatchReader``, which can be read only once.
    embedding : str
        Column of vectors: fixed_size_list (read without a copy), list or large_list of numbers.
    labels, sample_weight : str or sequence of str, optional
        Columns of labels, and the column of weights.
    block_rows : int, optional
        As for :func:`from_arrays`.

    Returns
    -------
    Source
        Labels of the blocks are Arrow columns. Blocks do not cross row groups, and resuming skips
        earlier row groups.

    Raises
    ------
    MissingExtraError
        pyarrow is not installed.
    InputError
        A file cannot be read or lacks a column, or the embedding column holds no vectors. During
        reading: vectors are missing, ragged or contain nulls; the message names the first such row.

    Examples
    --------
    >>> import pathlib, tempfile
    >>> import pyarrow as pa, pyarrow.parquet as pq
    >>> from splince_fast import sources
    >>> path = pathlib.Path(tempfile.mkdtemp()) / "people.parquet"
    >>> vectors = pa.array([[1.0, 2.0], [3.0, 4.0]], pa.list_(pa.float32(), 2))
    >>> pq.write_table(pa.table({"embedding": vectors, "gender": ["f", "m"]}), path)
    >>> (block,) = sources.from_parquet(path, "embedding", labels="gender")
    >>> block.X.tolist(), block.labels["gender"].to_pylist()
    ([[1.0, 2.0], [3.0, 4.0]], ['f', 'm'])
    """
    pa = require("pyarrow", "parquet")
    columns = ColumnNames.from_arguments(embedding, labels, sample_weight)
    if isinstance(paths, pa.RecordBatchReader):
        name = "RecordBatchReader"
        width = columns.width(paths.schema, f"the {name}")
        return stream_source(iter(paths), iter, columns, block_rows, width, name)
    if hasattr(paths, "__arrow_c_stream__") or hasattr(paths, "__arrow_c_array__"):
        table = paths if isinstance(paths, pa.Table) else _as_table(paths)
        columns.width(table.schema, "the table")
        table = table.select(columns.all())
        name = f"{type(paths).__name__} of {table.num_rows} rows"

        def batches(row: int, size: int) -> Iterator[RecordBatch]:
            return iter(table.slice(row).to_batches(max_chunksize=size))

        return piece_source([Piece(name, table.num_rows, batches)], columns, block_rows, name)
    files = _find_files(paths)
    source = piece_source(_row_groups(files, columns), columns, block_rows, describe_files(files))
    source.files = tuple(files)
    return source


def _as_table(data: object) -> Table:
    pa = require("pyarrow", "parquet")
    try:
        return pa.table(data)
    except (pa.ArrowException, TypeError) as error:
        raise InputError(f"the {type(data).__name__} gives no Arrow table: {error}") from error


def _find_files(paths: object) -> list[str]:
    """Return all files; a directory stands for the *.parquet files below it."""
    # Files and folders whose names begin with "." or "_" are skipped.
    files: list[str] = []
    for path in as_paths(paths, "paths"):
        if not os.path.isdir(path):
            files.append(path)
            continue
        folder = Path(path)
        folder_files = sorted(
            str(file)
            for file in folder.rglob("*.parquet")
            if not any(part.startswith((".", "_")) for part in file.relative_to(folder).parts)
        )
        if not folder_files:
            raise InputError(f"the directory {path!r} holds no file named *.parquet")
        files += folder_files
    return files


def _row_groups(paths: list[str], columns: ColumnNames) -> list[Piece]:
    """Return the row groups of all files; raise InputError if the vectors differ in width."""
    groups: list[Piece] = []
    first: tuple[int, str] | None = None  # width of the first file of vectors of fixed size
    for path in paths:
        with _open(path) as file:
            width = columns.width(file.schema_arrow, repr(path))
            for number in range(file.metadata.num_row_groups):
                n = file.metadata.row_group(number).num_rows
                place = f"row group {number} of {path!r}"
                groups.append(Piece(place, n, partial(_decode, path, number, n, columns, place)))
        if width is not None:
            first = first or (width, path)
            if width != first[0]:
                raise InputError(
                    f"column {columns.embedding!r} has {width} values per row in {path!r} but "
                    f"{first[0]} in {first[1]!r}; all files must hold the same embedding"
                )
    return groups


def _decode(
    path: str, number: int, n_rows: int, columns: ColumnNames, place: str, row: int, size: int
) -> Iterator[RecordBatch]:
    """Yield the rows of a row group from number `row` on, in batches of at most `size` rows."""
    pa = require("pyarrow", "parquet")
    with _open(path) as file:
        metadata = file.metadata
        if number >= metadata.num_row_groups or metadata.row_group(number).num_rows != n_rows:
            raise InputError(f"{place} has changed; make a new source when the files have changed")
        try:
            for batch in file.iter_batches(size, row_groups=[number], columns=columns.all()):
                yield batch.slice(row)
                row = max(0, row - batch.num_rows)
                del batch
        except (pa.ArrowException, OSError) as error:
            raise InputError(f"{place} cannot be read: {cause_text(error)}") from error


def _open(path: str) -> ParquetFile:
    pa, parquet = require("pyarrow", "parquet"), require("pyarrow.parquet", "parquet")
    try:
        return parquet.ParquetFile(path, pre_buffer=False, buffer_size=_BUFFER_BYTES)
    except (pa.ArrowException, OSError) as error:
        raise InputError(f"{path!r} cannot be read as Parquet: {cause_text(error)}") from error
