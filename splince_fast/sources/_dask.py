"""Rows of a dask array, read chunk by chunk in this process or on a cluster."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from splince_fast._runtime.arguments import require
from splince_fast.exceptions import InputError
from splince_fast.labels.containers import map_labels
from splince_fast.sources._arrays import check_length, slice_rows
from splince_fast.sources.base import Block, Source, describe, is_matrix, too_few_blocks

if TYPE_CHECKING:
    from dask.array import Array


def from_dask(X: Array, labels: Any = None, *, sample_weight: object = None) -> Source:
    """Return a source of the chunks of a dask array, each computed when it is read.

    With ``Moments.from_blocks(source, client=client)``, the workers of a cluster compute and
    accumulate the chunks, and only sums are sent.

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
        raise InputError(
            f"X is {describe(X)}; pass a dask array of shape (n, d). For arrays in memory take "
            "sources.from_arrays, for a dask data frame its columns' .to_dask_array()"
        )
    if len(X.chunks[1]) != 1:
        raise InputError(
            f"X is chunked by columns, {len(X.chunks[1])} chunks a row; a row must lie in one "
            "chunk: pass X.rechunk({1: -1})"
        )
    if hasattr(labels, "to_dask_array") and hasattr(labels, "columns"):
        labels = {name: labels[name] for name in labels.columns}
    columns = map_labels(labels, lambda column, name: _check_column(column, name, X))
    weight = None if sample_weight is None else _check_column(sample_weight, "sample_weight", X)
    return DaskSource(X, columns, weight)


def _check_column(column: Any, name: str, X: Array) -> Any:
    """Return a column as it is, or a dask column as an array with the row chunks of X."""
    sizes = X.chunks[0]
    if hasattr(column, "to_dask_array"):
        column = column.to_dask_array()
    if not hasattr(column, "__dask_graph__"):
        if math.isnan(sum(sizes)):
            raise InputError(
                f"{name} lies in memory and the sizes of X's chunks are unknown; call "
                "X.compute_chunk_sizes() first, or pass a dask array of labels"
            )
        check_length(column, int(sum(sizes)), name, "X")
        return column
    if not isinstance(column, require("dask.array", "dask").Array) or not column.ndim:
        raise InputError(f"{name} is a single dask value; pass one entry per row of X")
    chunks, difference = column.chunks[0], ""
    if len(chunks) != len(sizes):
        difference = f"has {len(chunks)} chunks, and X has {len(sizes)}"
    elif other := [(a, b) for a, b in zip(chunks, sizes, strict=True) if abs(a - b) > 0]:  # not NaN
        difference = "has a chunk of {} rows where X has a chunk of {} rows".format(*other[0])
    if difference:
        raise InputError(
            f"{name} must be chunked like the rows of X, but {difference}; pass "
            f"{name}.rechunk(X.chunks[0])"
        )
    return column.rechunk({1: -1}) if len(column.shape) == 2 else column


class DaskSource(Source):
    """Source whose blocks are the chunks of a dask array."""

    def __init__(self, X: Array, labels: object, weight: object) -> None:
        self._X, self._labels, self._weight = X, labels, weight
        self._sizes, d = X.chunks[0], int(X.shape[1])
        self._starts = [0, *itertools.accumulate(self._sizes)]
        n = None if math.isnan(X.shape[0]) else int(X.shape[0])
        super().__init__(
            f"dask array {X.name} of shape ({'unknown' if n is None else n}, {d})",
            n_rows=n,
            n_features=d,
            nbytes=None if n is None else n * d * X.dtype.itemsize,
        )

    def block_sizes(self) -> Iterator[int | None]:
        """Yield the number of rows of each chunk; None for a chunk of unknown size."""
        return (None if math.isnan(size) else int(size) for size in self._sizes)

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
    """Return the chunk with a graph that holds no rows of other chunks."""
    # `da.from_array` slices plain arrays at once. For a memory map, another subclass of ndarray or
    # an array with a lock, the graph of every chunk holds the complete array.
    core, nodes = require("dask.array.core", "dask"), require("dask._task_spec", "dask")
    getters = (core.getter, core.getter_inline, core.getter_nofancy)
    culled_graph = chunk.__dask_graph__().cull(chunk.__dask_keys__())
    graph = nodes.convert_legacy_graph(dict(culled_graph))
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
            graph[key] = nodes.DataNode(key, own_rows)
    rebuild, arguments = chunk.__dask_postpersist__()
    return rebuild(graph, *arguments)
