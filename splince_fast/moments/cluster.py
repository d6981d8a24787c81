"""Accumulation of a source on a dask cluster: one task per group of consecutive blocks.

The states of the groups are added in a tree. Groups and tree depend on the data alone. Therefore
the result is bit for bit the same for every number of workers, even if workers are lost.
"""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any, NamedTuple, TypeAlias

from splince_fast._runtime import threads
from splince_fast._runtime.arguments import described_type, require
from splince_fast._runtime.progress import Progress
from splince_fast.exceptions import InputError
from splince_fast.moments.sampled import arguments_of_part
from splince_fast.sources.base import Block, PieceSource, Source

Moments: TypeAlias = Any  # `splince_fast.Moments`, whose module imports this one

# A group is full at this number of rows per feature, or at this number of bytes. A group of 16 d
# float32 rows reads 64 d^2 bytes, and its task sends a state of 8 d^2 bytes to another worker.
_ROWS_PER_FEATURE = 16
_GROUP_BYTES = 1 << 29
# Number of states that one cluster task merges into one.
_FAN_IN = 4
# Number of consecutive groups per wave, and number of waves on the cluster at a time: no worker
# waits for the end of a wave.
_WAVE = 64
_WAVES_AHEAD = 2
# Number of times that dask runs a failed task again.
_RETRIES = 2
# Largest size, in bytes, of a source in the memory of this process that is sent to the workers.
_MOST_SENT_BYTES = 1 << 26


class Group(NamedTuple):
    """Consecutive blocks, `first` to `stop` - 1, and their row count."""

    first: int
    stop: int
    rows: int


def accumulate(source: Source, empty: Moments, client: Any, *, progress: bool | None) -> Moments:
    """Return `empty` plus the moments of a source, whose blocks the workers of `client` read."""
    _check(client, source)
    width, total = source.n_features, empty
    if width is None:
        first = next(iter(source), None)
        width = 1 if first is None else int(first.X.shape[1])
    groups, tasks = groups_of(source, width), _Tasks(client, source, empty)
    waves = iter(lambda: list(islice(groups, _WAVE)), [])
    sums = ((wave, tasks.sum_of(map(tasks.state_of, wave))) for wave in waves)
    pending = deque(islice(sums, _WAVES_AHEAD))
    with Progress(source.n_rows, show=progress) as bar:
        try:
            while pending:
                wave, future = pending[0]
                try:
                    total += future.result()
                except Exception as error:
                    blocks = f"blocks {wave[0].first} to {wave[-1].stop - 1}"
                    error.add_note(f"{client} was accumulating {blocks} of {source.name}")
                    raise
                del pending[0], future
                rows = sum(group.rows for group in wave)
                bar.advance(rows, rows * ((source.nbytes or 0) // (source.n_rows or 1)))
                pending.extend(islice(sums, 1))
        finally:
            client.cancel([future for _, future in pending])
    return total


def _check(client: object, source: Source) -> None:
    """Raise InputError unless the workers of `client` can read the blocks of `source`."""
    require("distributed", "dask")
    if not hasattr(client, "submit") or not hasattr(client, "compute"):
        raise InputError(f"client is {described_type(client)}; pass a dask.distributed.Client")
    if source.block_sizes() is None:
        raise InputError(
            f"{source.name} can only be read in order, by one process; pass sources.from_npy, "
            "from_parquet or from_dask, or omit client="
        )
    in_memory = isinstance(source, PieceSource) and not source.files
    if in_memory and (source.nbytes is None or source.nbytes > _MOST_SENT_BYTES):
        raise InputError(
            f"{source.name} lies in the memory of this process, and every worker would need a "
            "copy; save it with numpy.save and pass sources.from_npy(path), or omit client="
        )


def groups_of(source: Source, width: int) -> Iterator[Group]:
    """Yield the groups of the blocks of a source with `width` features."""
    per_row = (source.nbytes or 0) / (source.n_rows or 1)
    first, rows, stop = 0, 0, 0
    for stop, size in enumerate(source.block_sizes() or (), 1):
        rows += size or 0
        if size is None or rows >= _ROWS_PER_FEATURE * width or rows * per_row >= _GROUP_BYTES:
            yield Group(first, stop, rows)
            first, rows = stop, 0
    if stop > first:
        yield Group(first, stop, rows)


class _Tasks:
    """Submission of tasks on one source to a cluster; methods return dask futures."""

    def __init__(self, client: Any, source: Source, empty: Moments) -> None:
        self._client, self._source = client, source
        self._type, self._arguments = type(empty), empty._arguments()
        self._part = getattr(source, "part", None)
        if self._part is None:
            # A task, and not `scatter`, brings the source to the cluster: if a worker is lost, dask
            # repeats its tasks but restores no scattered data.
            self._shared = self._submit(pickle.loads, _pickled(source))

    def _submit(self, function: Any, *arguments: Any) -> Any:
        return self._client.submit(function, *arguments, pure=False, retries=_RETRIES)

    def state_of(self, group: Group) -> Any:
        """Return a future of the moments of a group."""
        first, stop, _ = group
        arguments = arguments_of_part(self._arguments, first)
        rest = self._type, arguments, f"blocks {first} to {stop - 1} of {self._source.name}"
        if self._part is None:
            return self._submit(_state_of_range, self._shared, first, stop, *rest)
        block = require("dask", "dask").delayed(tuple(self._part(first, stop)))
        block = self._client.compute(block, retries=_RETRIES)
        return self._submit(_state_of_blocks, [block], *rest)

    def sum_of(self, states: Iterable[Any]) -> Any:
        """Return a future of the sum of the moments of one or more futures."""
        states = list(states)
        while len(states) > 1:
            parts = (states[i : i + _FAN_IN] for i in range(0, len(states), _FAN_IN))
            states = [self._submit(self._type._sum_of, part) for part in parts]
        return states[0]


def _state_of_blocks(
    blocks: Iterable[Block], moments_type: type[Moments], arguments: dict[str, Any], name: str
) -> Moments:
    """Return the moments of blocks, in a task on a worker."""
    worker = require("distributed", "dask").get_worker()
    moments = moments_type(**arguments)
    try:
        with threads.limited(worker.state.nthreads):
            for X, labels, sample_weight in blocks:
                moments.update(X, labels, sample_weight=sample_weight)
            return moments._merged_copy()  # without work memory: less to send
    except Exception as error:
        error.add_note(f"the error occurred while a worker accumulated {name}")
        raise


def _state_of_range(source: Source, first: int, stop: int, *rest: Any) -> Moments:
    """Return the moments of blocks `first` to `stop` - 1 of a source."""
    return _state_of_blocks(islice(source.iter_from(first), stop - first), *rest)


def _pickled(source: Source) -> bytes:
    pickled: bytes = require("cloudpickle", "dask").dumps(source)
    if len(pickled) > _MOST_SENT_BYTES:
        raise InputError(
            f"the labels of {source.name} take {len(pickled) / 2**20:.0f} MiB of memory, and every "
            "worker would need a copy; pass labels as paths of .npy files, one per shard, or as "
            "columns of parquet files"
        )
    return pickled
