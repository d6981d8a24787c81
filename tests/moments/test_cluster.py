"""Accumulating on a dask cluster: the same state as in one process, whatever happens to workers."""

from __future__ import annotations

import os
import pickle
import signal
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from naive_model import flushed, state_bytes
from numpy.typing import NDArray

import splince_fast as sf
from splince_fast import Moments, sources
from splince_fast.exceptions import InputError
from splince_fast.moments import cluster
from splince_fast.sources.base import Block, PieceSource

distributed = pytest.importorskip("distributed", reason="dask.distributed is not installed")
da = pytest.importorskip("dask.array", reason="dask is not installed")
dask = pytest.importorskip("dask", reason="dask is not installed")
pytestmark = [
    pytest.mark.filterwarnings("default::ResourceWarning"),
    pytest.mark.filterwarnings("default::DeprecationWarning"),
]

N, D = 6000, 24
NAMES = np.array(["a", "b", "rare"])


def started(workers: int, **options: Any) -> Any:
    return distributed.LocalCluster(
        n_workers=workers, threads_per_worker=1, dashboard_address=":0", **options
    )


@pytest.fixture(scope="module")
def client() -> Iterator[Any]:
    with started(2) as local, distributed.Client(local) as found:
        yield found


@pytest.fixture(scope="module")
def table() -> tuple[NDArray[np.float64], Any]:
    """Rows whose third class occurs in the last twentieth alone."""
    rng = np.random.default_rng(0)
    z = rng.integers(0, 2, N)
    z[-N // 20 :] = 2
    return rng.normal(size=(N, D)) + z[:, None] + 100.0, NAMES[z]


@pytest.fixture(scope="module")
def paths(table: Any, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("shards")
    found = []
    for i, rows in enumerate(np.array_split(table[0], 3)):
        found.append(str(folder / f"{i}.npy"))
        np.save(found[-1], rows)
    return found


def files_of(paths: list[str], table: Any) -> sources.Source:
    return sources.from_npy(paths, {"z": table[1]}, block_rows=150)


def lazy(table: Any, rows: int = 400) -> tuple[Any, Any]:
    return da.from_array(table[0], chunks=(rows, -1)), da.from_array(table[1], chunks=rows)


def assert_equal(found: Moments, expected: Moments) -> None:
    """To the rounding of sums of N rows about a reference near their mean."""
    assert found.n_rows == expected.n_rows
    assert found.class_counts("z") == expected.class_counts("z")
    scale = np.sqrt(np.diag(expected.covariance()))
    gap = np.abs(found.covariance() - expected.covariance()) / np.outer(scale, scale)
    assert gap.max() < 1e-12
    gap = np.abs(found.cross_covariance("z") - expected.cross_covariance("z"))
    assert (gap / scale[:, None]).max() < 1e-12


def bits(moments: Moments) -> str:
    return str(state_bytes(flushed(moments)))


@pytest.mark.parametrize(
    "parameters", [{}, {"by": "z"}, {"subsample": 0.2, "random_state": 1}], ids=str
)
def test_equals_one_process_and_itself_on_any_number_of_workers(
    client: Any, paths: list[str], table: Any, parameters: dict[str, Any]
) -> None:
    """Every group of blocks draws a sample of its own; other sums are those of all rows."""
    found = Moments.from_blocks(files_of(paths, table), client=client, **parameters)
    with started(1, processes=False) as local, distributed.Client(local) as other:
        again = Moments.from_blocks(files_of(paths, table), client=other, **parameters)
    assert bits(again) == bits(found)
    if "subsample" not in parameters:
        assert_equal(found, Moments.from_blocks(files_of(paths, table), **parameters))
        return
    whole = Moments().update(table[0], {"z": table[1]})
    assert np.allclose(found.cross_covariance("z"), whole.cross_covariance("z"), atol=1e-12)
    report = sf.leace(found, erase="z").report
    assert 4 * D < report.sampling.n_rows < N / 3
    assert max(v.residual for v in report.variables) < 1e-12
    # Control: samples that are alike in every group are others.
    assert cluster.arguments_of_part(parameters, 0) == parameters
    parts = [cluster.arguments_of_part(parameters, i) for i in (3, 4)]
    assert parts[0] != parts[1]


KINDS = ["lazy", "persisted", "labels in memory", "unknown sizes", "memory map", "in memory"]


@pytest.mark.parametrize("kind", KINDS)
def test_dask_arrays(client: Any, table: Any, tmp_path: Path, kind: str) -> None:
    X, z = lazy(table)
    labels: Any = z
    if kind == "memory map":
        np.save(tmp_path / "x.npy", table[0])
        X = da.from_array(np.load(tmp_path / "x.npy", mmap_mode="r"), chunks=(400, -1))
    elif kind == "persisted":
        X, labels = X.persist(), z.persist()
    elif kind == "labels in memory":
        labels = table[1]
    elif kind == "unknown sizes":
        kept = da.ones(N, chunks=400) > 0
        X, labels = X[kept], z[kept]
    source = sources.from_dask(X, {"z": labels})
    if kind == "in memory":  # small arrays may travel
        source = sources.from_arrays(table[0], {"z": table[1]}, block_rows=500)
    expected = Moments().update(table[0], {"z": table[1]})
    assert_equal(Moments.from_blocks(source), expected)
    assert_equal(Moments.from_blocks(source, client=client), expected)


def test_columns_of_a_dask_frame_are_variables(table: Any) -> None:
    frames = pytest.importorskip("dask.dataframe")
    columns = {"z": np.arange(N) % 3, "x": table[0][:, 0]}
    frame = frames.from_dict(columns, npartitions=3)
    X = da.from_array(table[0], chunks=(tuple(map(len, frame.partitions)), -1))
    found = Moments.from_blocks(sources.from_dask(X, frame))
    assert_equal(found, Moments().update(table[0], columns))


def test_weights_and_chunks_without_rows(client: Any, table: Any) -> None:
    X, z = lazy(table)
    weight = da.from_array(np.arange(N) % 3 + 0.0, chunks=400)
    some = (table[0][:, 0] > 1e6) | (np.arange(N) >= 400)  # no row of the first chunk
    few, labels, weights = (da.concatenate([a[:400][some[:400]], a[400:]]) for a in (X, z, weight))
    source = sources.from_dask(few, {"z": labels}, sample_weight=weights)
    expected = float((np.arange(400, N) % 3).sum())
    assert Moments.from_blocks(source, client=client).weight == expected


@pytest.mark.parametrize("kind", ["plain", "map", "inline map", "locked", "transformed map"])
def test_tasks_do_not_carry_more_than_their_chunks(table: Any, tmp_path: Path, kind: str) -> None:
    np.save(tmp_path / "x.npy", table[0])
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    X = da.from_array(
        mapped if "map" in kind else table[0],
        chunks=(400, -1),
        inline_array=kind == "inline map",
        lock=kind == "locked",
    )
    X = X * 2.0 if kind == "transformed map" else X
    source: Any = sources.from_dask(X, {"z": lazy(table)[1]})
    whole = table[0].nbytes
    part = source.part(3, 4)
    assert len(pickle.dumps(dask.optimize(*part))) < whole / 5
    expected = table[0][1200:1600] * (2.0 if kind == "transformed map" else 1.0)
    np.testing.assert_array_equal(part.X.compute(scheduler="synchronous"), expected)
    # The control: the graph as it is holds all rows.
    assert len(pickle.dumps(X.blocks[3])) > whole


def test_an_array_that_is_read_where_it_is_wanted_is_not_read_here() -> None:
    """Rows of a file format's own array type are read by the task, not by the caller."""

    class Stored:
        shape, ndim, dtype = (N, D), 2, np.dtype(np.float64)
        read = 0

        def __getitem__(self, where: Any) -> NDArray[np.float64]:
            self.read += 1
            return np.zeros(self.shape)[where]

    stored = Stored()
    source: Any = sources.from_dask(da.from_array(stored, chunks=(400, -1)))
    before = stored.read  # dask looks at the kind of what it will hold
    part = source.part(0, 1)
    assert stored.read == before
    assert part.X.compute(scheduler="synchronous").shape == (400, D)
    assert stored.read > before


def sent(client: Any) -> int:
    def outgoing(dask_worker: Any) -> int:
        return int(dask_worker.transfer_outgoing_bytes_total)

    return sum(client.run(outgoing).values())


@pytest.mark.slow
def test_only_states_travel(client: Any, tmp_path: Path) -> None:
    """At most 1.2 states per group: 8 d^2 bytes and the sums of the classes, half that packed."""
    d, groups = 256, 12
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(groups * 16 * d, d)).astype(np.float32)
    np.save(tmp_path / "x.npy", rows)
    labels = {"z": rng.integers(0, 2, size=len(rows))}
    source = sources.from_npy(tmp_path / "x.npy", labels, block_rows=16 * d)
    before = sent(client)
    state = Moments.from_blocks(source, client=client)
    travelled = sent(client) - before
    size = state.copy().nbytes  # dask counts objects by their size in memory
    assert len(pickle.dumps(state)) < 0.6 * size  # and a triangle is what is written
    handle = 2 * len(pickle.dumps(labels["z"]))  # the labels, to either worker
    assert travelled <= 1.2 * groups * size + handle
    assert travelled < rows.nbytes / 4  # the control: rows would be more


# --- what may go wrong ---------------------------------------------------------------------------


def source_of(path: str, seconds: float = 0.0, attempts: str = "", failures: int = 0) -> Any:
    """Blocks of 400 rows that take their time; first attempts at row 0 fail."""

    def read(_: int, row: int) -> Iterator[Block]:  # a local function is pickled by value
        rows = np.load(path, mmap_mode="r")
        if row == 0 and attempts:
            with open(attempts, "ab") as file:
                file.write(b".")
            if os.path.getsize(attempts) <= failures:
                raise OSError("the disk is away")
        for start in range(row, len(rows), 400):
            time.sleep(seconds)
            yield Block(rows[start : start + 400], {"z": np.arange(start, start + 400) % 3})

    source = PieceSource("shaky", read, [N], 400, n_features=D, nbytes=None)
    source.files = (path,)
    return source


@pytest.fixture
def one_file(table: Any, tmp_path: Path) -> str:
    path = str(tmp_path / "x.npy")
    np.save(path, table[0])
    return path


def test_a_killed_worker_costs_no_row_and_no_bit(one_file: str) -> None:
    """At 30, 60 and 90 percent of a run, the one worker or the other."""
    seconds = 0.1
    # dask gives up a worker that is away, killed again perhaps, this long after it was lost.
    patience = dask.config.set({"distributed.deploy.lost-worker-timeout": "1 hour"})
    with patience, started(2) as local, distributed.Client(local) as client:
        expected = bits(Moments.from_blocks(source_of(one_file, 0.0), client=client))
        found: list[Moments] = []

        def fit() -> None:
            found.append(Moments.from_blocks(source_of(one_file, seconds), client=client))

        for i, share in enumerate((0.3, 0.6, 0.9)):
            client.wait_for_workers(2)  # what was killed has been started anew
            pids = list(client.run(os.getpid).values())
            run = threading.Thread(target=fit)
            run.start()
            time.sleep(share * seconds * N / 400 / 2)
            assert run.is_alive()
            os.kill(pids[i % 2], signal.SIGKILL)
            run.join(timeout=120)
            assert len(found) == i + 1, "the run did not end"
            assert found[-1].n_rows == N
            assert bits(found[-1]) == expected


def test_a_task_that_fails_twice_is_tried_again(client: Any, one_file: str, tmp_path: Path) -> None:
    attempts = str(tmp_path / "attempts")
    shaky = partial(source_of, one_file, attempts=attempts)
    assert Moments.from_blocks(shaky(failures=2), client=client).n_rows == N
    os.remove(attempts)
    with pytest.raises(OSError, match="the disk is away") as caught:
        Moments.from_blocks(shaky(failures=10), client=client)
    notes = " ".join(caught.value.__notes__)
    assert "a worker accumulated blocks 0 to 0 of shaky" in notes
    assert "was accumulating blocks" in notes


def test_bad_rows_are_refused_by_number_and_type(client: Any, table: Any, tmp_path: Path) -> None:
    spoilt = table[0].copy()
    spoilt[3000, 1] = np.nan
    np.save(tmp_path / "bad.npy", spoilt)
    with pytest.raises(sf.exceptions.NonFiniteError):
        Moments.from_blocks(sources.from_npy(tmp_path / "bad.npy", block_rows=150), client=client)


# --- bad input -----------------------------------------------------------------------------------


def test_sources_that_cannot_be_read_on_workers(client: Any, table: Any) -> None:
    small, big = sources.from_arrays(table[0]), np.broadcast_to(np.float64(1.0), (1 << 20, 64))
    for source, arguments, text in (
        ([(table[0], {"z": table[1]})], {}, "only be read in order"),
        (sources.from_arrays(big), {}, "from_npy"),
        (small, {"client": "tcp://here"}, "Client"),
        (small, {"checkpoint": "state"}, "has no checkpoint"),
        (small, {"folds": 2}, "folds or client"),
    ):
        with pytest.raises(InputError, match=text):
            Moments.from_blocks(source, **{"client": client, **arguments})


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda X, z, t: (X.rechunk({1: 6}), z), "rechunk"),
        (lambda X, z, t: (X, z.rechunk(100)), "has 60 chunks, and X has "),
        (
            lambda X, z, t: (X.rechunk((N // 2, D)), z.rechunk(((N // 2 - 1, N // 2 + 1),))),
            f"a chunk of {N // 2 - 1} rows where X has a chunk of {N // 2} rows",
        ),
        (lambda X, z, t: (X, t[1][:-1]), "rows"),
        (lambda X, z, t: (t[0], z), "dask array"),
        (lambda X, z, t: (X[:, 0], z), "dask array"),
        (lambda X, z, t: (X[X[:, 0] > 0], t[1]), "compute_chunk_sizes"),
        (lambda X, z, t: (X, z[0]), "single dask value"),
        (lambda X, z, t: (X, dask.delayed(t[1])), "single dask value"),
    ],
)
def test_dask_arrays_that_do_not_fit(table: Any, make: Any, text: str) -> None:
    X, labels = make(*lazy(table), table)
    with pytest.raises(InputError, match=text):
        sources.from_dask(X, {"z": labels})


# --- applying ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def eraser(table: Any) -> sf.Projection:
    return sf.leace(Moments().update(table[0], {"z": table[1]}), erase="z")


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "int32"])
def test_an_eraser_maps_chunks(table: Any, eraser: sf.Projection, dtype: str) -> None:
    rows = table[0].astype(dtype)
    expected = eraser(rows)
    for shape, chunks in (((N, D), (700, -1)), ((60, 100, D), (20, 50, -1))):
        X = da.from_array(rows.reshape(shape), chunks=chunks)
        clean = eraser(X)
        assert (clean.chunks, clean.dtype) == (X.chunks, expected.dtype)
        found = clean.compute(scheduler="synchronous")
        np.testing.assert_array_equal(found.reshape(N, D), expected)


def test_dask_arrays_that_an_eraser_refuses(table: Any, eraser: sf.Projection) -> None:
    X, _ = lazy(table)
    for wrong, text in (
        (X[:, :5], "24 features"),
        (X.rechunk({1: 8}), "rechunk"),
        (X[:, 0], "24 features"),
        (X.astype(complex), "real numbers"),
    ):
        with pytest.raises(InputError, match=text):
            eraser(wrong)
    with pytest.raises(InputError, match="lazy"):
        eraser(X, out=np.empty((N, D)))
