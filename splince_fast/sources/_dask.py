"""Rows of a dask array, read chunk by chunk in this process or on a cluster."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from splince_fast._runtime.extras import require
from splince_fast._runtime.keywords import described_type
from splince_fast.exceptions import InputError
from splince_fast.labels.positions import map_labels
from splince_fast.sources._arrays import check_length, slice_rows
from splince_fast.sources.base import Block, Source, is_matrix, too_few_blocks

if TYPE_CHECKING:
    from dask.array import Array


def from_dask(X: Array, labels: Any = None, *, sample_weight: object = None) -> Source:
    """Return a source of the chunks of a dask array, each computed when it is read.

    With ``Moments.from_blocks(source, client=client)``, the workers of a cluster compute the chunks
    and accumulate the sums over their rows; only the sums are sent. Without a client, this process
    computes the chunks one by one.

    Parameters
    ----------
    X : dask.array of shape (n, d)
        Chunked along the rows only; chunk sizes may be unknown.
    labels : mapping of str to column(s), frame, or a single column, optional
        dask arrays or series, chunked like the rows of X; or columns in memory, if the chunk
        sizes of X are known.
    sample_weight : array of shape (n,), optional
        Non-negative frequencies of the rows, in a container as for `labels`.

    Returns
    -------
    Source
        Each chunk is a block.

    Raises
    ------
    InputError
        X is no 2-D dask array or is chunked along the columns, or labels are chunked
        differently.
    MissingExtraError
        dask is not installed.

    Examples
    --------
    >>> import numpy as np
    >>> import splince_fast as sf
    >>> import dask.array as da
    >>> rng = np.random.default_rng(0)
    >>> X = da.from_array(rng.normal(size=(1000, 4)), chunks=(250, -1))
    >>> z = da.from_array(rng.integers(0, 2, size=1000), chunks=250)
    >>> sf.Moments.from_blocks(sf.sources.from_dask(X, {"z": z})).n_rows
    1000
    """
    require("dask.array", "dask")
    if not is_matrix(X) or not hasattr(X, "__dask_graph__") or not hasattr(X, "chunks"):
        shape = getattr(X, "shape", None)
        description = described_type(X) + ("" if shape is None else f" of shape {tuple(shape)}")
        raise InputError(
            f"X is {description}; pass a dask array of shape (n, d). For arrays in memory take "
            "sources.from_arrays, for a dask data frame its columns' .to_dask_array()"
        )
    if len(X.chunks[1]) != 1:
        raise InputError(
            f"X is chunked by columns, {len(X.chunks[1])} chunks a row; a row must lie in one "
            "chunk: pass X.rechunk({1: -1})"
        )
    sizes = X.chunks[0]
    if hasattr(labels, "to_dask_array") and hasattr(labels, "columns"):
        labels = {name: labels[name] for name in labels.columns}
    columns = map_labels(labels, lambda column, name: _check_column(column, name, sizes))
    weight = None if sample_weight is None else _check_column(sample_weight, "sample_weight", sizes)
    return DaskSource(X, columns, weight)


def _check_column(column: Any, name: str, sizes: tuple[float, ...]) -> Any:
    """Return a column as it is, or a dask column as an array with the row chunks of X."""
    if hasattr(column, "to_dask_array"):
        column = column.to_dask_array()
    sizes_known = not any(math.isnan(size) for size in sizes)
    if not hasattr(column, "__dask_graph__"):
        if not sizes_known:
            raise InputError(
                f"{name} lies in memory and the sizes of X's chunks are unknown; call "
                "X.compute_chunk_sizes() first, or pass a dask array of labels"
            )
        check_length(column, int(sum(sizes)), name, "X")
        return column
    if not isinstance(column, require("dask.array", "dask").Array) or not column.ndim:
        raise InputError(f"{name} is a single dask value; pass one entry per row of X")
    chunks = column.chunks[0]
    comparable = sizes_known and not any(math.isnan(size) for size in chunks)
    difference = ""
    if len(chunks) != len(sizes):
        difference = f"has {len(chunks)} chunks, and X has {len(sizes)}"
    elif comparable and chunks != sizes:
        own, other = next(pair for pair in zip(chunks, sizes, strict=True) if pair[0] != pair[1])
        difference = f"has a chunk of {own} rows where X has a chunk of {other} rows"
    if difference:
        raise InputError(
            f"{name} must be chunked like the rows of X, but {difference}; pass "
            f"{name}.rechunk(X.chunks[0])"
        )
    return column.rechunk({1: -1}) if len(column.shape) == 2 else column


class DaskSource(Source):
    """Source whose blocks are the chunks of a dask array."""

    def __init__(self, X: Array, labels: object, weight: object) -> None:
        self._sizes = X.chunks[0]
        sizes_known = not any(math.isnan(size) for size in self._sizes)
        n, d = (int(X.shape[0]) if sizes_known else None), int(X.shape[1])
        super().__init__(
            f"dask array {X.name} of shape ({'unknown' if n is None else n}, {d})",
            n_rows=n,
            n_features=d,
            nbytes=None if n is None else n * d * X.dtype.itemsize,
        )
        self._X, self._labels, self._weight = X, labels, weight
        self._starts = [0, *itertools.accumulate(self._sizes)] if sizes_known else []

    def block_sizes(self) -> Iterator[int | None]:
        """Yield the number of rows of each chunk; None for a chunk of unknown size."""
        for size in self._sizes:
            yield None if math.isnan(size) else int(size)

    def iter_from(self, first_block: int = 0) -> Iterator[Block]:
        """Yield the chunks from number `first_block` onwards; see :meth:`Source.iter_from`."""
        if first_block > len(self._sizes):
            raise too_few_blocks(self.name, first_block, len(self._sizes))
        for number in range(first_block, len(self._sizes)):
            yield from self.part(number, number + 1)

    def part(self, first: int, stop: int) -> DaskPart:
        """Return a source of chunks `first` to `stop` - 1."""
        return DaskPart(self.name, [self._chunk(i) for i in range(first, stop)])

    def _chunk(self, i: int) -> Block:
        def select(column: Any, _: str = "") -> Any:
            if hasattr(column, "__dask_graph__"):
                return column.blocks[i]
            return slice_rows(column, self._starts[i], self._starts[i + 1])

        weight = None if self._weight is None else select(self._weight)
        return Block(self._X.blocks[i], map_labels(self._labels, select), weight)


class DaskPart(Source):
    """Source of chunks that are not computed yet; it can be sent to a worker.

    The tuple `lazy` holds the dask collections of all chunks, and the chunks hold placeholders for
    them. A client can thus compute the collections on the cluster and pass the values to
    :meth:`insert_values`.
    """

    def __init__(self, name: str, chunks: list[Block]) -> None:
        super().__init__(name)
        lazy: list[Array] = []

        def placeholder(value: object) -> Any:
            if not hasattr(value, "__dask_graph__"):
                return value
            lazy.append(value)
            return _Placeholder(len(lazy) - 1)

        self._chunks = [_map_block(placeholder, chunk) for chunk in chunks]
        self.lazy = tuple(lazy)
        self._scheduler: str | None = None

    def cull(self) -> DaskPart:
        """Remove unneeded tasks and rows from the graphs of the chunks; return the part itself."""
        self.lazy = require("dask", "dask").optimize(*map(_remove_other_rows, self.lazy))
        self._scheduler = "synchronous"  # compute in the thread of the worker's task
        return self

    def iter_from(self, first_block: int = 0) -> Iterator[Block]:
        """Compute and yield the chunks from number `first_block` onwards, one at a time."""
        compute = require("dask", "dask").compute
        for chunk in self._chunks[first_block:]:
            indices = list(_placeholders(chunk))
            values = compute(*(self.lazy[i] for i in indices), scheduler=self._scheduler)
            yield _replace_placeholders(chunk, dict(zip(indices, values, strict=True)))

    def insert_values(self, values: list[Any]) -> list[Block]:
        """Return the chunks with `values` in place of the collections in `lazy`."""
        return [_replace_placeholders(chunk, dict(enumerate(values))) for chunk in self._chunks]


def _remove_other_rows(chunk: Array) -> Array:
    """Return the chunk with a graph that holds no rows of other chunks.

    ``da.from_array`` slices plain arrays at once. For a memory map, another subclass of ndarray or
    an array with a lock, the graph of every chunk holds the complete array, which would be sent
    with each task.
    """
    core, nodes = require("dask.array.core", "dask"), require("dask._task_spec", "dask")
    getters = (core.getter, core.getter_inline, core.getter_nofancy)
    culled_graph = chunk.__dask_graph__().cull(chunk.__dask_keys__())
    graph = nodes.convert_legacy_graph(dict(culled_graph))
    changed = False
    for key, node in graph.items():
        if getattr(node, "func", None) not in getters:
            continue
        source = node.args[0]
        if isinstance(source, nodes.TaskRef):
            source = graph.get(source.key)
        array = getattr(source, "value", source)  # a DataNode holds the array in `value`
        if isinstance(array, np.ndarray):
            rows = node(dict.fromkeys(node.dependencies, array))
            own_rows = rows.view(np.ndarray) if isinstance(rows, np.memmap) else rows
            graph[key], changed = nodes.DataNode(key, own_rows), True
    if not changed:
        return chunk
    rebuild, arguments = chunk.__dask_postpersist__()
    return rebuild(graph, *arguments)


class _Placeholder(int):
    """Placeholder for a dask collection: the index of the collection in `DaskPart.lazy`."""


def _map_block(function: Callable[[Any], Any], block: Block) -> Block:
    """Return a block whose X, columns of labels and weights are the results of a function."""
    labels = map_labels(block.labels, lambda column, _: function(column))
    return Block(function(block.X), labels, function(block.sample_weight))


def _placeholders(chunk: Block) -> Iterator[int]:
    columns = chunk.labels.values() if isinstance(chunk.labels, Mapping) else [chunk.labels]
    values = (chunk.X, *columns, chunk.sample_weight)
    yield from (value for value in values if isinstance(value, _Placeholder))


def _replace_placeholders(chunk: Block, values: Mapping[int, object]) -> Block:
    return _map_block(lambda v: values[v] if isinstance(v, _Placeholder) else v, chunk)
