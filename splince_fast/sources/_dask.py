"""Rows of a dask array: chunk by chunk here, or where a cluster holds them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from splince_fast._runtime.extras import require
from splince_fast.exceptions import InputError
from splince_fast.sources._arrays import check_column, map_labels, take_rows
from splince_fast.sources.base import Block, Source, is_matrix, too_few_blocks


def from_dask(X: Any, labels: Any = None, *, sample_weight: Any = None) -> Source:
    """Yield the chunks of a dask array; nothing is computed before it is asked for.

    With ``Moments.from_blocks(source, client=client)`` the chunks are made and accumulated on the
    workers of a cluster, and only states travel. Without a client they are computed one after the
    other in this process.

    Parameters
    ----------
    X : dask.array of shape (n, d)
        Chunked by rows alone; the sizes of its chunks may be unknown.
    labels : mapping of str to column(s), or a single column, optional
        dask arrays or series with the same chunks as the rows of X; or columns in memory, where
        the sizes of the chunks are known.
    sample_weight : array of shape (n,), optional
        Non-negative frequencies of the rows, as a column of labels.

    Returns
    -------
    Source
        Its blocks are the chunks.

    Raises
    ------
    InputError
        X is no dask array of two axes, is chunked by columns, or a column has other chunks.
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
        found = f"a {type(X).__name__}" + ("" if shape is None else f" of shape {tuple(shape)}")
        raise InputError(
            f"X is {found}; pass a dask array of shape (n, d). For arrays in memory take "
            "sources.from_arrays, for a dask data frame its columns' .to_dask_array()"
        )
    if len(X.chunks[1]) != 1:
        raise InputError(
            f"X is chunked by columns, {len(X.chunks[1])} chunks a row; a row must lie in one "
            "chunk: pass X.rechunk({1: -1})"
        )
    sizes = X.chunks[0]
    columns = map_labels(labels, lambda column, what: _column(column, what, sizes))
    weight = None if sample_weight is None else _column(sample_weight, "sample_weight", sizes)
    return DaskSource(X, columns, weight)


def _column(column: Any, what: str, sizes: tuple[float, ...]) -> Any:
    """A column as a dask array with the chunks of X, or in memory where it can be sliced."""
    if hasattr(column, "to_dask_array"):
        column = column.to_dask_array()
    known = not any(math.isnan(size) for size in sizes)
    if not hasattr(column, "__dask_graph__"):
        if not known:
            raise InputError(
                f"{what} lies in memory and the sizes of X's chunks are unknown; call "
                "X.compute_chunk_sizes() first, or pass a dask array of labels"
            )
        check_column(column, int(sum(sizes)), what, "X")
        return column
    found = column.chunks[0]
    both = known and not any(math.isnan(size) for size in found)
    if len(found) != len(sizes) or (both and found != sizes):
        raise InputError(
            f"{what} has {len(found)} chunks of other rows than X, which has {len(sizes)}; pass "
            f"{what}.rechunk(X.chunks[0])"
        )
    return column.rechunk({1: -1}) if len(column.shape) == 2 else column


class DaskSource(Source):
    """The chunks of a dask array with their labels."""

    def __init__(self, X: Any, labels: Any, weight: Any) -> None:
        self._sizes = X.chunks[0]
        known = not any(math.isnan(size) for size in self._sizes)
        n, d = (int(X.shape[0]) if known else None), int(X.shape[1])
        super().__init__(
            f"dask array {X.name} of shape ({'unknown' if n is None else n}, {d})",
            n_rows=n,
            n_features=d,
            nbytes=None if n is None else n * d * X.dtype.itemsize,
        )
        self._X, self._labels, self._weight = X, labels, weight
        self._starts = [0, *itertools.accumulate(self._sizes)] if known else []

    def block_sizes(self) -> Iterator[int | None]:
        """Rows of the chunks; None where a size is unknown."""
        for size in self._sizes:
            yield None if math.isnan(size) else int(size)

    def iter_from(self, first_block: int = 0) -> Iterator[Block]:
        """Yield the chunks from number `first_block` onwards; see :meth:`Source.iter_from`."""
        if first_block > len(self._sizes):
            raise too_few_blocks(self.name, first_block, len(self._sizes))
        for number in range(first_block, len(self._sizes)):
            yield from self.part(number, number + 1)

    def part(self, first: int, stop: int) -> DaskPart:
        """Chunks first..stop."""
        return DaskPart(self.name, [self._chunk(i) for i in range(first, stop)])

    def _chunk(self, i: int) -> Block:
        def cut(column: Any, _: str) -> Any:
            if hasattr(column, "__dask_graph__"):
                return column.blocks[i]
            return take_rows(column, self._starts[i], self._starts[i + 1])

        weight = None if self._weight is None else cut(self._weight, "sample_weight")
        return Block(self._X.blocks[i], map_labels(self._labels, cut), weight)


class DaskPart(Source):
    """Some chunks, lazy; the graph is opaque to whoever ships it."""

    def __init__(self, name: str, chunks: list[Block]) -> None:
        super().__init__(name)
        lazy: list[Any] = []

        def hole(value: Any, _: str = "") -> Any:
            if not hasattr(value, "__dask_graph__"):
                return value
            lazy.append(value)
            return _Hole(len(lazy) - 1)

        self._chunks = [
            Block(hole(c.X), map_labels(c.labels, hole), hole(c.sample_weight)) for c in chunks
        ]
        self.lazy = tuple(lazy)
        self._scheduler: str | None = None

    def culled(self) -> DaskPart:
        """The part itself, with no more of the graph than its chunks need, for a task."""
        self.lazy = require("dask", "dask").optimize(*map(_with_own_rows, self.lazy))
        self._scheduler = "synchronous"  # a worker has given the task one slot
        return self

    def iter_from(self, first_block: int = 0) -> Iterator[Block]:
        """Compute the chunks, one at a time."""
        compute = require("dask", "dask").compute
        for chunk in self._chunks[first_block:]:
            wanted = list(_holes(chunk))
            found = compute(*(self.lazy[i] for i in wanted), scheduler=self._scheduler)
            yield _filled(chunk, dict(zip(wanted, found, strict=True)))

    def filled(self, values: list[Any]) -> list[Block]:
        """The chunks with `values` in place of what was lazy."""
        return [_filled(chunk, dict(enumerate(values))) for chunk in self._chunks]


def _with_own_rows(chunk: Any) -> Any:
    """A chunk of an array in memory with its own rows in its graph, in place of the whole array.

    ``da.from_array`` slices plain arrays itself. Of a memory map, a locked array or another
    subclass the graph holds all rows, and each task would carry them.
    """
    core, nodes = require("dask.array.core", "dask"), require("dask._task_spec", "dask")
    getters = (core.getter, core.getter_inline, core.getter_nofancy)
    culled = chunk.__dask_graph__().cull(chunk.__dask_keys__())
    graph = nodes.convert_legacy_graph(dict(culled))
    changed = False
    for key, node in graph.items():
        if getattr(node, "func", None) not in getters:
            continue
        source = node.args[0]
        if isinstance(source, nodes.TaskRef):
            source = graph.get(source.key)
        whole = getattr(source, "value", source)  # of a DataNode, or the array itself
        if isinstance(whole, np.ndarray):
            rows = node(dict.fromkeys(node.dependencies, whole))
            plain = rows.view(np.ndarray) if isinstance(rows, np.memmap) else rows
            graph[key], changed = nodes.DataNode(key, plain), True
    if not changed:
        return chunk
    rebuild, arguments = chunk.__dask_postpersist__()
    return rebuild(graph, *arguments)


class _Hole(int):
    """The place of a lazy column among all of a part."""


def _holes(chunk: Block) -> Iterator[int]:
    columns = chunk.labels.values() if isinstance(chunk.labels, Mapping) else [chunk.labels]
    yield from (v for v in (chunk.X, *columns, chunk.sample_weight) if isinstance(v, _Hole))


def _filled(chunk: Block, values: Mapping[int, Any]) -> Block:
    def fill(value: Any, _: str = "") -> Any:
        return values[value] if isinstance(value, _Hole) else value

    return Block(fill(chunk.X), map_labels(chunk.labels, fill), fill(chunk.sample_weight))
