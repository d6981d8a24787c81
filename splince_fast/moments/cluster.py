"""Accumulation of a source on a dask cluster: one task per group of blocks.

A group consists of consecutive blocks. A wave consists of consecutive groups, whose states are
added in a tree to one state. Groups, waves and the order of additions depend on the data alone.
Therefore the result is bit for bit the same for every number of workers, even if workers are lost.
Waves are added to the total in order. The total therefore always holds the first blocks of the
source, as a checkpoint requires.
"""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Iterator
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

from splince_fast._runtime import threads
from splince_fast._runtime.extras import require
from splince_fast._runtime.keywords import described_type
from splince_fast.exceptions import InputError
from splince_fast.moments.digest import block_digest
from splince_fast.moments.parameters import Parameters
from splince_fast.moments.sampled import arguments_of_part
from splince_fast.sources.base import PieceSource, Source

if TYPE_CHECKING:
    from splince_fast.moments.moments import Moments
    from splince_fast.moments.stream import Run

# A group is full at this number of rows per feature, or at this number of bytes. A group of 16 d
# float32 rows reads 64 d^2 bytes, and its task sends a state of 8 d^2 bytes to another worker.
_ROWS_PER_FEATURE = 16
_GROUP_BYTES = 1 << 29
# Number of states that one cluster task merges into one.
_FAN_IN = 4
# Number of groups per wave, and number of waves on the cluster at a time.
_WAVE = 64
_WAVES_AHEAD = 2
# Number of times that dask runs a failed task again.
_RETRIES = 2
# Largest size, in bytes, of a source in the memory of this process that is sent to the workers.
_MOST_SENT_BYTES = 1 << 26


class Group(NamedTuple):
    """Consecutive blocks, `first` to `stop` - 1, the number of their wave, and their row count."""

    first: int
    stop: int
    wave: int
    rows: int


def check(client: object, source: Source) -> None:
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


def groups_of(source: Source, position: int, width: int) -> Iterator[Group]:
    """Yield the groups of the blocks from number `position` on."""
    # The limits of groups do not depend on `position`, except that the first group begins there.
    sizes = source.block_sizes()
    assert sizes is not None
    per_row = (source.nbytes or 0) / (source.n_rows or 1)
    index, first, rows, stop = 0, 0, 0, 0
    for stop, size in enumerate(sizes, 1):
        rows += size or 0
        full = size is None or rows >= _ROWS_PER_FEATURE * width or rows * per_row >= _GROUP_BYTES
        if full:
            if stop > position:
                yield Group(max(first, position), stop, index // _WAVE, rows)
            index, first, rows = index + 1, stop, 0
    if stop > max(first, position):
        yield Group(max(first, position), stop, index // _WAVE, rows)


# -- functions of tasks --------------------------------------------------------------------


def state_of_part(
    moments_type: type[Moments], part: Any, arguments: dict[str, Any], blocks: str,
    values: Any = None,
) -> Moments:  # fmt: skip
    """Return the moments of a part of a source."""
    # `values` holds the values of the lazy dask collections of the part; None if the part computes
    # them itself.
    worker = require("distributed", "dask").get_worker()
    moments = moments_type(**arguments)
    try:
        with threads.limited(worker.state.nthreads):
            for block in part if values is None else part.insert_values(values):
                moments.update(block.X, block.labels, sample_weight=block.sample_weight)
            moments._flushed()
    except Exception as error:
        error.add_note(f"the error occurred while a worker accumulated {blocks}")
        raise
    return moments.copy()  # without work memory: less to send


def state_of_source_blocks(
    moments_type: type[Moments], source: Source, first: int, stop: int,
    arguments: dict[str, Any], blocks: str,
) -> Moments:  # fmt: skip
    """Return the moments of blocks `first` to `stop` - 1 of a source without a method ``part``."""
    part = islice(source.iter_from(first), stop - first)
    return state_of_part(moments_type, part, arguments, blocks)


def digest_of_part(part: Any, parameters: Parameters, values: Any = None) -> str:
    """Return the digest of the first block of a part."""
    block = next(iter(part if values is None else part.insert_values(values)))
    return block_digest(block.X, block.labels, block.sample_weight, parameters)


def digest_of_source_block(source: Source, number: int, parameters: Parameters) -> str:
    """Return the digest of block `number` of a source without a method ``part``."""
    return digest_of_part(source.iter_from(number), parameters)


# -- tasks ---------------------------------------------------------------------------------


class _ClusterTasks:
    """Submission of tasks on one source to a cluster; methods return dask futures."""

    def __init__(self, client: Any, source: Source, target: Moments) -> None:
        self._client, self._source = client, source
        self._class, self._arguments = type(target), target._arguments()
        self._source_future: object = None
        if not hasattr(source, "part"):
            # A task, and not `scatter`, brings the source to the cluster: if a worker is lost, dask
            # repeats its tasks but restores no scattered data.
            pickled = _pickled(source)
            self._source_future = client.submit(pickle.loads, pickled, pure=False, retries=_RETRIES)

    def _submit(self, function: Any, *arguments: Any) -> Any:
        return self._client.submit(function, *arguments, pure=False, retries=_RETRIES)

    def _part(self, first: int, stop: int) -> tuple[object, object]:
        """Return blocks `first` to `stop` - 1 as a part, and futures of its dask collections."""
        # If the collections depend on no data on the cluster, the futures are None, and the task
        # that reads the part computes the collections.
        futures_of = require("distributed", "dask").futures_of
        part = self._source.part(first, stop)  # type: ignore[attr-defined]
        lazy = list(part.lazy)
        if not futures_of(lazy):
            return part.cull(), None
        part.lazy = ()
        return part, self._client.compute(lazy, retries=_RETRIES)

    def state(self, group: Group) -> Any:
        """Return a future of the moments of a group."""
        arguments = arguments_of_part(self._arguments, group.first)
        blocks = f"blocks {group.first} to {group.stop - 1} of {self._source.name}"
        if self._source_future is not None:
            return self._submit(
                state_of_source_blocks, self._class, self._source_future, group.first, group.stop,
                arguments, blocks,
            )  # fmt: skip
        part, values = self._part(group.first, group.stop)
        return self._submit(state_of_part, self._class, part, arguments, blocks, values)

    def digest(self, number: int, parameters: Parameters) -> Any:
        """Return a future of the digest of a block."""
        if self._source_future is not None:
            return self._submit(digest_of_source_block, self._source_future, number, parameters)
        part, values = self._part(number, number + 1)
        return self._submit(digest_of_part, part, parameters, values)

    def sum_states(self, states: list[Any]) -> Any:
        """Return a future of the sum of `states`, futures of moments; each task adds `_FAN_IN`."""
        while len(states) > 1:
            states = [
                self._submit(self._class._sum_of, states[i : i + _FAN_IN])
                for i in range(0, len(states), _FAN_IN)
            ]
        return states[0]


def _pickled(source: Source) -> bytes:
    pickled: bytes = require("cloudpickle", "dask").dumps(source)
    if len(pickled) > _MOST_SENT_BYTES:
        raise InputError(
            f"the labels of {source.name} take {len(pickled) / 2**20:.0f} MiB of memory, and every "
            "worker would need a copy; pass labels as paths of .npy files, one per shard, or as "
            "columns of parquet files"
        )
    return pickled


def add_remaining(run: Run, source: Source, client: Any, bar: Any, write_if_due: Any) -> None:
    """Add the remaining blocks of a source to `run`, wave by wave and in order."""
    tasks = _ClusterTasks(client, source, run.target)
    width = source.n_features
    if width is None:
        block = next(iter(source), None)
        width = 1 if block is None else int(block.X.shape[1])
    waves = _waves(groups_of(source, run.position, width))
    parameters, checked = run.target.parameters, run.writes_checkpoint
    pending: deque[tuple[list[Group], Any, Any, Any]] = deque()

    def submit() -> None:
        wave = next(waves, None)
        if wave is None:
            return
        first = tasks.digest(0, parameters) if checked and not wave[0].first else None
        last = tasks.digest(wave[-1].stop - 1, parameters) if checked else None
        pending.append(
            (wave, tasks.sum_states([tasks.state(group) for group in wave]), first, last)
        )

    try:
        for _ in range(_WAVES_AHEAD):
            submit()
        while pending:
            wave, state, first, last = pending[0]
            blocks = f"blocks {wave[0].first} to {wave[-1].stop - 1}"
            try:
                total = state.result()
                digests = tuple("" if d is None else d.result() for d in (first, last))
            except Exception as error:
                error.add_note(f"{client} was accumulating {blocks} of {source.name}")
                raise
            pending.popleft()
            run.add_state(total, wave[-1].stop, *digests)
            rows = sum(group.rows for group in wave)
            per_row = (source.nbytes or 0) // (source.n_rows or 1)
            bar.advance(rows, rows * per_row)
            del state, first, last, total
            submit()
            write_if_due()
    finally:
        client.cancel([f for _, *futures in pending for f in futures if f is not None])


def _waves(groups: Iterator[Group]) -> Iterator[list[Group]]:
    wave: list[Group] = []
    for group in groups:
        if wave and group.wave != wave[0].wave:
            yield wave
            wave = []
        wave.append(group)
    if wave:
        yield wave
