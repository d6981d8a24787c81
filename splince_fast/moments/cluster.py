"""Accumulation of a source on a dask cluster: one task per group of consecutive blocks.

The states of the groups are added in a tree. Groups and tree depend on the data alone. Therefore
the result is bit for bit the same for every number of workers, even if workers are lost.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import islice
from typing import Any, NamedTuple, TypeAlias

from splince_fast._runtime import threads
from splince_fast._runtime.arguments import described_type, require
from splince_fast._runtime.progress import Progress
from splince_fast.exceptions import InputError
from splince_fast.moments.scatters import arguments_of_part
from splince_fast.sources.base import PieceSource, Source

Moments: TypeAlias = Any  # `splince_fast.Moments`, whose module imports this one

# A group is full at this number of rows per feature, or at this number of bytes. A group of 16 d
# float32 rows reads 64 d^2 bytes, and its task sends a state of 8 d^2 bytes to another worker.
_ROWS_PER_FEATURE = 16
_GROUP_BYTES = 1 << 29
# Number of states that one cluster task merges into one.
_FAN_IN = 4
# Number of consecutive groups whose sum is sent to this process.
_WAVE = 64
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
    if (width := source.n_features) is None:
        first = next(iter(source), None)
        width = 1 if first is None else int(first.X.shape[1])
    shared = None
    if not hasattr(source, "part"):
        # A task, and not `scatter`, brings the source to the cluster: if a worker is lost, dask
        # repeats its tasks but restores no scattered data.
        shared = client.submit(_same, source, pure=False, retries=_RETRIES)
    groups = list(groups_of(source, width))
    waves = [groups[i : i + _WAVE] for i in range(0, len(groups), _WAVE)]
    sums = [_sum_of(wave, client, source, shared, empty) for wave in waves]
    with Progress(source.n_rows, show=progress) as bar:
        try:
            for wave, future in zip(waves, sums, strict=True):
                empty += future.result()
                future.release()
                rows = sum(group.rows for group in wave)
                bar.advance(rows, rows * ((source.nbytes or 0) // (source.n_rows or 1)))
        except Exception as error:
            blocks = f"blocks {wave[0].first} to {wave[-1].stop - 1}"
            error.add_note(f"{client} was accumulating {blocks} of {source.name}")
            raise
        finally:
            client.cancel(sums)
    return empty


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


def _sum_of(wave: list[Group], client: Any, source: Any, shared: Any, empty: Moments) -> Any:
    # Earlier groups precede later ones, so that few states are in memory.
    options = {"retries": _RETRIES, "priority": -wave[0].first}
    submit, states = partial(client.submit, pure=False, **options), []
    for first, stop, _ in wave:
        blocks: Any = None
        if shared is None:
            delayed = require("dask", "dask").delayed(tuple(source.part(first, stop)))
            blocks = [client.compute(delayed, **options)]
        arguments = arguments_of_part(empty._arguments(), first)
        states.append(
            submit(_state_of, blocks, shared, first, stop, type(empty), arguments, source.name)
        )
    while len(states) > 1:
        parts = (states[i : i + _FAN_IN] for i in range(0, len(states), _FAN_IN))
        states = [submit(type(empty)._sum_of, part) for part in parts]
    return states[0]


def _state_of(
    blocks: Any, source: Any, first: int, stop: int, kind: Any, arguments: Any, name: str
) -> Moments:
    """Return the moments of `blocks`, or of blocks of the source, in a task on a worker."""
    worker = require("distributed", "dask").get_worker()
    moments = kind(**arguments)
    try:
        with threads.limited(worker.state.nthreads):
            for X, labels, sample_weight in blocks or islice(source.iter_from(first), stop - first):
                moments.update(X, labels, sample_weight=sample_weight)
            return moments._merged_copy()  # without work memory: less to send
    except Exception as error:
        error.add_note(
            f"the error occurred while a worker accumulated blocks {first} to {stop - 1} of {name}"
        )
        raise


def _same(source: Source) -> Source:
    return source
