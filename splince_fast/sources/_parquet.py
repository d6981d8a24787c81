"""Rows of Parquet files and of Arrow data."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from splince_fast._runtime.arguments import require
from splince_fast._runtime.rows import cause_text, choose_block_rows
from splince_fast.exceptions import InputError
from splince_fast.sources._arrow import (
    ColumnNames,
    batches_to_blocks,
    sliced_source,
    stream_source,
    vector_type,
)
from splince_fast.sources.base import (
    Block,
    PieceSource,
    Source,
    as_paths,
    describe_files,
    iterator_factory,
)  # fmt: skip

if TYPE_CHECKING:
    from pyarrow import RecordBatch, Table
    from pyarrow.parquet import ParquetFile

# Size of the read buffer. Without a buffer, pyarrow loads a complete column of a row group before
# it decodes the first rows.
_BUFFER_BYTES = 1 << 20


class _RowGroup(NamedTuple):
    """A row group of a Parquet file; blocks do not cross row groups."""

    path: str
    number: int  # index of the row group in the file
    n_rows: int
    n_values: int  # number of values in the embedding column; 0 if unknown
    itemsize: int  # bytes per value


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
    labels : str or sequence of str, optional
        Columns that become labels.
    sample_weight : str, optional
        Column of weights.
    block_rows : int, optional
        Rows per block; the default is 4096, or fewer if a block would exceed 64 MiB. Blocks do not
        cross row groups. Resuming skips earlier row groups; it decodes and discards the earlier
        rows of the row group in which it resumes.

    Returns
    -------
    Source
        Labels of the blocks are Arrow columns.

    Raises
    ------
    MissingExtraError
        pyarrow is not installed.
    InputError
        A file cannot be read or lacks a column, or the embedding column holds no vectors. During
        reading: vectors are missing, ragged or contain nulls; the message names the file, the row
        group and the first invalid row.

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
        columns.check(paths.schema.names, "the RecordBatchReader")
        vectors = vector_type(paths.schema.field(embedding).type, f"column {embedding!r}")
        start = iterator_factory(iter(paths), "RecordBatchReader")
        return stream_source(start, columns, block_rows, vectors, "RecordBatchReader")
    if hasattr(paths, "__arrow_c_stream__") or hasattr(paths, "__arrow_c_array__"):
        table = paths if isinstance(paths, pa.Table) else _as_table(paths)
        columns.check(table.column_names, "the table")
        vector_type(table.schema.field(embedding).type, f"column {embedding!r}")
        table = table.select(columns.all())
        return sliced_source(
            lambda start, stop: table.slice(start, stop - start),
            table.num_rows,
            columns,
            block_rows,
            f"{type(paths).__name__} of {table.num_rows} rows",
        )
    return _files_source(_find_files(paths), columns, block_rows)


def _as_table(data: object) -> Table:
    pa = require("pyarrow", "parquet")
    try:
        return pa.table(data)
    except (pa.ArrowException, TypeError) as error:
        raise InputError(
            f"the {type(data).__name__} gave no Arrow table ({error}); pass a table of columns"
        ) from error


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


def _files_source(paths: list[str], columns: ColumnNames, block_rows: int | None) -> Source:
    groups: list[_RowGroup] = []
    widths: dict[int, str] = {}
    for path in paths:
        with _open(path) as file:
            file_groups, width = _read_footer(file, path, columns)
        groups += file_groups
        if width is not None:
            widths.setdefault(width, path)
    if len(widths) > 1:
        (first, first_path), (second, path) = list(widths.items())[:2]
        raise InputError(
            f"column {columns.embedding!r} has {second} values per row in {path!r} but {first} in "
            f"{first_path!r}; all files must hold the same embedding"
        )
    typed_width = next(iter(widths), None)
    width = typed_width or _width_of_lists(groups)
    n = sum(group.n_rows for group in groups)
    mean_width = -(-sum(group.n_values for group in groups) // n) if n else 1
    itemsize = max((group.itemsize for group in groups), default=1)
    size = choose_block_rows(block_rows, width or mean_width, itemsize)
    source = PieceSource(
        describe_files(paths),
        lambda piece, row: _read(groups[piece:], row, columns, size, typed_width),
        [group.n_rows for group in groups],
        size,
        n_features=width,
        nbytes=None if width is None else sum(g.n_rows * width * g.itemsize for g in groups),
    )
    source.files = tuple(paths)
    return source


def _read_footer(
    file: ParquetFile, path: str, columns: ColumnNames
) -> tuple[list[_RowGroup], int | None]:
    """Return the row groups of a file, and the width of its vectors (None for lists)."""
    columns.check(file.schema_arrow.names, repr(path))
    arrow_type = file.schema_arrow.field(columns.embedding).type
    width, itemsize = vector_type(arrow_type, f"column {columns.embedding!r} of {path!r}")
    prefix = f"{columns.embedding}."
    leaves = [i for i in range(len(file.schema)) if file.schema.column(i).path.startswith(prefix)]
    groups = []
    for number in range(file.metadata.num_row_groups):
        group = file.metadata.row_group(number)
        n_values = group.column(leaves[0]).num_values if len(leaves) == 1 else 0
        groups.append(_RowGroup(path, number, group.num_rows, n_values, itemsize))
    return groups, width


def _width_of_lists(groups: list[_RowGroup]) -> int | None:
    """Return the number of values per row if it is the same integer in all groups, else None."""
    # This is the width of the vectors, unless vectors are missing or ragged: reading then fails.
    widths = {divmod(group.n_values, group.n_rows) for group in groups if group.n_rows}
    width, remainder = widths.pop() if len(widths) == 1 else (0, 0)
    return width if width and not remainder else None


def _read(
    groups: list[_RowGroup],
    first_row: int,
    columns: ColumnNames,
    block_rows: int,
    width: int | None,
) -> Iterator[Block]:
    """Yield blocks from row `first_row` of the first group onwards; one file is open at a time."""
    for path, same_file in itertools.groupby(groups, key=lambda group: group.path):
        with _open(path) as file:
            for group in same_file:
                place = f"row group {group.number} of {path!r}"
                batches = _decode(file, group, columns, block_rows, place)
                for block in batches_to_blocks(
                    batches, columns, block_rows, width, place, first_row
                ):
                    width = block.X.shape[1]
                    yield block
                    del block
                first_row = 0


def _decode(
    file: ParquetFile, group: _RowGroup, columns: ColumnNames, block_rows: int, place: str
) -> Iterator[RecordBatch]:
    pa = require("pyarrow", "parquet")
    metadata = file.metadata
    if (
        group.number >= metadata.num_row_groups
        or metadata.row_group(group.number).num_rows != group.n_rows
    ):
        raise InputError(f"{place} has changed; make a new source when the files have changed")
    try:
        yield from file.iter_batches(block_rows, row_groups=[group.number], columns=columns.all())
    except (pa.ArrowException, OSError) as error:
        raise InputError(
            f"{place} cannot be read: {cause_text(error)}. The file may be damaged; write it again"
        ) from error


def _open(path: str) -> ParquetFile:
    pa, parquet = require("pyarrow", "parquet"), require("pyarrow.parquet", "parquet")
    try:
        return parquet.ParquetFile(path, pre_buffer=False, buffer_size=_BUFFER_BYTES)
    except (pa.ArrowException, OSError) as error:
        raise InputError(
            f"{path!r} cannot be read as Parquet: {cause_text(error)}. It may be missing, "
            "truncated or of another format"
        ) from error
