"""Rows of a dask array, read chunk by chunk in this process or on a cluster."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from splince_fast._runtime.arguments import described_type, require
from splince_fast.exceptions import InputError
from splince_fast.labels.containers import map_labels
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
        compute = require("dask", "dask").compute
        if first_block > len(self._sizes):
            raise too_few_blocks(self.name, first_block, len(self._sizes))
        for number in range(first_block, len(self._sizes)):
            yield Block(*compute(*self.part(number, number + 1)))

    def part(self, first: int, stop: int) -> Block:
        """Return the rows of chunks `first` to `stop` - 1, not yet computed, as one block."""

        def select(column: Any, _: str = "") -> Any:
            if hasattr(column, "__dask_graph__"):
                return _remove_other_rows(column.blocks[first:stop])
            return slice_rows(column, self._starts[first], self._starts[stop])

        weight = None if self._weight is None else select(self._weight)
        return Block(select(self._X), map_labels(self._labels, select), weight)


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
