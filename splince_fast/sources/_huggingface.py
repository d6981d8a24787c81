"""Rows of Hugging Face datasets."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from splince_fast._runtime.arguments import described_type
from splince_fast.exceptions import InputError
from splince_fast.sources._arrow import ColumnNames, Piece, piece_source, stream_source
from splince_fast.sources.base import Source

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset
    from pyarrow import RecordBatch

# Rows per Arrow table that is read from a streamed dataset.
_STREAM_ROWS = 1024


def from_dataset(
    ds: Dataset | IterableDataset,
    embedding: str,
    labels: Sequence[str] | str | None = None,
    *,
    sample_weight: str | None = None,
    block_rows: int | None = None,
) -> Source:
    """Return a source of the rows of a Hugging Face dataset, read in the Arrow format.

    Parameters
    ----------
    ds : datasets.Dataset or datasets.IterableDataset
        Dataset; its format and transform are ignored.
    embedding : str
        Column of vectors, such as ``List(Value("float32"))``. If the type has a ``length``, the
        width of the rows is known before reading.
    labels, sample_weight, block_rows
        As for :func:`from_parquet`; a ClassLabel becomes integers, and its -1 a missing label.

    Returns
    -------
    Source
        A resumed run of a streamed dataset reads the earlier rows and discards them: shuffle with a
        seed or not at all.

    Raises
    ------
    InputError
        As :func:`from_parquet`, or `ds` is no dataset.

    Examples
    --------
    >>> from datasets import Dataset
    >>> from splince_fast import sources
    >>> ds = Dataset.from_dict({"embedding": [[1.0, 2.0], [3.0, 4.0]], "gender": ["f", "m"]})
    >>> (block,) = sources.from_dataset(ds, "embedding", labels="gender")
    >>> block.X.shape, block.labels["gender"].to_pylist()
    ((2, 2), ['f', 'm'])
    """
    if isinstance(ds, Mapping) or not hasattr(ds, "with_format"):
        raise InputError(
            f"ds is {described_type(ds)}, no Dataset; of a DatasetDict pass one split, ds['train']"
        )
    columns = ColumnNames.from_arguments(embedding, labels, sample_weight)
    name = type(ds).__name__
    width = None
    if ds.features is not None:
        width = columns.width(ds.features.arrow_schema, f"the {name}")
    elif ds.column_names is not None:  # None: a stream whose columns are unknown before reading
        columns.check(ds.column_names, f"the {name}")
    data = ds.select_columns(columns.all()).with_format("arrow")
    if not hasattr(ds, "num_rows"):
        return stream_source(data, _streamed_batches, columns, block_rows, width, name)
    n = int(ds.num_rows)
    name = f"{name} of {n} rows"

    def batches(row: int, size: int) -> Iterator[RecordBatch]:
        for start in range(row, n, size):
            yield from data[start : start + size].to_batches()

    return piece_source([Piece(name, n, batches)], columns, block_rows, name)


def _streamed_batches(data: Any) -> Iterator[RecordBatch]:
    for table in data.iter(batch_size=_STREAM_ROWS):
        yield from table.to_batches()
