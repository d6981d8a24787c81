"""Jobs on a dask cluster with one process per core, compared with one process and with peers.

The jobs need the extra ``dask``, and dask-ml for IncrementalPCA. All contenders of a job read the
same memory-mapped file of float32 rows. The job with 1,048,576 rows reads one file 16 times, as 16
shards. In comparisons with peers, splince_fast accumulates a concept in addition.
"""

from __future__ import annotations

import atexit
import pickle
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import joblib
import numpy as np

import splince_fast as sf
from benchmarks.data import write_rows
from benchmarks.jobs import OURS, SERIAL, Contenders, Numbers, below, faster, job, within
from benchmarks.jobs_numbers import extra_bytes
from benchmarks.peers import DASK_COV, DASK_PCA, needs
from benchmarks.timing import Contender, pick

LAZY = "lazy chunks"
_cluster = partial(job, modules=("dask", "distributed"))


def _file() -> tuple[Path, int, int, int]:
    """Return path, number of rows, number of features, and rows per block of the file."""
    n, d, block = pick((65_536, 2048, 4096), (2000, 16, 250))
    return write_rows(n, d), n, d, block


@cache
def _client() -> Any:
    """Return a client of a local cluster; both are closed when this process exits."""
    from dask.distributed import Client

    client = Client(n_workers=joblib.cpu_count(), threads_per_worker=1, dashboard_address=":0")
    atexit.register(client.close)
    sf.Moments.from_blocks(_source(1), client=client)  # warm up the workers: imports, compilation
    return client


def _source(shards: int) -> sf.sources.Source:
    path, n, _, block = _file()
    labels = {"z": np.arange(shards * n) % 2}
    return sf.sources.from_npy([path] * shards, labels, block_rows=block)


def _ours(shards: int, **options: Any) -> Contender:
    fit = partial(sf.Moments.from_blocks, _source(shards), **options)
    return Contender(fit, shards * _file()[1], answer=sf.Moments.covariance)


def _first_blocks(blocks: int) -> Any:
    """Return a dask array of the first blocks of the file; the workers read the file."""
    path, _, d, block = _file()
    return _dask_array(path, blocks, block, d)


def _dask_array(path: Path, blocks: int, block: int, d: int) -> Any:
    import dask.array as da
    from dask import delayed

    read = delayed(lambda start: np.load(path, mmap_mode="r")[start : start + block])
    parts = [da.from_delayed(read(i * block), (block, d), np.float32) for i in range(blocks)]
    return da.concatenate(parts)


def _narrow_file() -> tuple[Path, int, int, int]:
    """Return the same as `_file`, for a file with fewer features.

    The cluster accumulates the blocks of this file in 16 groups, each by one task. Without graph
    culling, each task would hold the whole array.
    """
    n, d, block = pick((65_536, 256, 1024), (2048, 16, 128))
    return write_rows(n, d), n, d, block


def _array_in_memory() -> Any:
    """Return a dask array made by `from_array`; its chunks are sent to the workers."""
    import dask.array as da

    path, _, _, block = _narrow_file()
    return da.from_array(np.load(path, mmap_mode="r"), chunks=(block, -1))


@_cluster("cluster/array in memory/256", "row", within(LAZY, 1.5))
def _sent_chunks() -> Contenders:
    """Chunks that are sent to the workers, compared with chunks that the workers read."""
    path, n, d, block = _narrow_file()

    def fit(rows: Any) -> Contender:
        source = sf.sources.from_dask(rows)
        accumulate = partial(sf.Moments.from_blocks, source, client=_client())
        return Contender(accumulate, n, answer=sf.Moments.covariance)

    return {OURS: fit(_array_in_memory()), LAZY: fit(_dask_array(path, n // block, block, d))}


def accumulate_array_in_memory() -> Callable[[], object]:
    """Return a task that accumulates the array of `_array_in_memory` on a cluster."""
    source, client = sf.sources.from_dask(_array_in_memory()), _client()

    def fit() -> None:
        with client:  # closes the workers: this child process runs no exit handlers
            sf.Moments.from_blocks(source, client=client)

    return fit


@_cluster("cluster/memory of the caller/256", "times the array", below(2.0))
def _memory_of_the_caller() -> Numbers:
    """Peak memory of the process with array and scheduler, divided by the array's size."""
    _, n, d, _ = _narrow_file()
    return {OURS: extra_bytes(accumulate_array_in_memory, 4 * n * d)}


@_cluster("cluster/1,048,576 rows/2048", "row", faster(SERIAL, 0.9))
def _one_process() -> Contenders:
    shards = pick(16, 2)
    return {OURS: _ours(shards, client=_client()), SERIAL: _ours(shards)}


@_cluster("cluster/65,536 rows/2048", "row", faster(DASK_COV, 3.0), faster(DASK_PCA, 20.0))
def _peers() -> Contenders:
    import dask.array as da

    _, n, d, block = _file()
    client, X = _client(), _first_blocks(n // block)
    cov = Contender(lambda: client.compute(da.cov(X, rowvar=False)).result(), n, answer=np.asarray)
    return {
        OURS: _ours(1, client=client),
        DASK_COV: cov,
        DASK_PCA: _incremental_pca(None),
        f"{DASK_PCA}, 64 components": _incremental_pca(min(64, d)),
    }


@needs("dask_ml")
def _incremental_pca(components: int | None) -> Contender:
    """Return a contender that fits IncrementalPCA to two blocks; every block takes the same time.

    If `components` is None, all components are computed; they determine the covariance.
    """
    from dask_ml.decomposition import IncrementalPCA

    *_, block = _file()
    X = _first_blocks(2)
    return Contender(lambda: IncrementalPCA(components, batch_size=block).fit(X), 2 * block)


@_cluster("cluster/bytes sent/2048", "states per group", below(1.2))
def _bytes_sent() -> Numbers:
    """Bytes sent between workers, divided by the bytes of one state per group of blocks.

    The bytes of the labels do not count.
    """
    from splince_fast.moments.cluster import groups_of

    client, source = _client(), _source(pick(4, 2))

    def outgoing() -> int:
        sent = client.run(lambda dask_worker: dask_worker.transfer_outgoing_bytes_total)
        return sum(sent.values())

    before = outgoing()
    state = sf.Moments.from_blocks(source, client=client)
    labels = len(client.nthreads()) * len(pickle.dumps(np.arange(state.n_rows)))
    groups = len(list(groups_of(source, _file()[2])))
    return {OURS: max(0, outgoing() - before - labels) / (groups * state.copy().nbytes)}
