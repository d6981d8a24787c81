"""Accumulation of a source on a dask cluster: one task per group of consecutive blocks.

The states of the groups are added in a tree. Groups and tree depend on the data alone. Therefore
the result is bit for bit the same for every number of workers, even if workers are lost.
"""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

from splince_fast._runtime import threads
from splince_fast._runtime.extras import require
from splince_fast._runtime.keywords import described_type
from splince_fast._runtime.progress import Progress
from splince_fast.exceptions import InputError
from splince_fast.moments.sampled import arguments_of_part
from splince_fast.sources.base import Block, PieceSource, Source

if TYPE_CHECKING:
    from splince_fast.moments.moments import Moments

# A group is full at this number of rows per feature, or at this number of bytes. A group of 16 d
# float32 rows reads 64 d^2 bytes, and its task sends a state of 8 d^2 bytes to another worker.
_ROWS_PER_FEATURE = 16
_GROUP_BYTES = 1 << 29
# Number of states that one cluster task merges into one.
_FAN_IN = 4
# A wave consists of this number of consecutive groups, whose tasks dask gets in one graph. Two
# waves are on the cluster at a time, so that no worker waits for the end of a wave.
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
    groups, task_of = groups_of(source, width), _tasks(source, empty, client)

    def submit(wave: list[Group]) -> tuple[list[Group], Any]:
        return wave, client.compute(_tree_sum(type(empty), map(task_of, wave)), retries=_RETRIES)

    waves = map(submit, iter(lambda: list(islice(groups, _WAVE)), []))
    pending = deque(islice(waves, _WAVES_AHEAD))
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
                pending.extend(islice(waves, 1))
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


def _tasks(source: Source, empty: Moments, client: Any) -> Any:
    """Return a function from a group to the dask task of its moments."""
    delayed = require("dask", "dask").delayed
    arguments, part, shared = empty._arguments(), getattr(source, "part", None), None
    if part is None:
        # A task, and not `scatter`, brings the source to the cluster: if a worker is lost, dask
        # repeats its tasks but restores no scattered data.
        load = delayed(pickle.loads, pure=False)(_pickled(source))
        shared = client.persist(load, retries=_RETRIES)

    def task_of(group: Group) -> Any:
        first, stop, _ = group
        rest = (
            type(empty), arguments_of_part(arguments, first),
            f"blocks {first} to {stop - 1} of {source.name}",
        )  # fmt: skip
        if part is None:
            return delayed(_state_of_range, pure=False)(shared, first, stop, *rest)
        return delayed(_state_of_blocks, pure=False)([tuple(part(first, stop))], *rest)

    return task_of


def _tree_sum(moments_type: type[Moments], tasks: Iterable[Any]) -> Any:
    """Return the task of the sum of the moments of one or more tasks."""
    add = require("dask", "dask").delayed(moments_type._sum_of, pure=False)
    states = list(tasks)
    while len(states) > 1:
        states = [add(states[i : i + _FAN_IN]) for i in range(0, len(states), _FAN_IN)]
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
