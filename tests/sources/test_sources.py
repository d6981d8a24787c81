"""Sources: equal rows from every container, resuming, reading ahead, errors that name a place."""

from __future__ import annotations

import gc
import io
import mmap
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import scipy.sparse
from hypothesis import given
from hypothesis import strategies as st

from splince_fast._runtime.rows import choose_block_rows
from splince_fast.cli.labels import read_label_files
from splince_fast.exceptions import InputError, MissingExtraError
from splince_fast.moments import Moments
from splince_fast.sources import (
    Block,
    Source,
    as_source,
    from_arrays,
    from_dataset,
    from_npy,
    from_parquet,
)
from splince_fast.sources.base import StreamSource, prefetched


class Data:
    """Rows that differ everywhere, with labels and weights that follow the row number."""

    def __init__(self, n: int, d: int, dtype: Any = np.float32) -> None:
        self.X = (np.arange(n * d, dtype=np.float64).reshape(n, d) / 8).astype(dtype)
        self.z = np.arange(n) % 3
        self.name = np.array([f"group {i % 4}" for i in range(n)], dtype="U8")
        self.weight = 1.0 + np.arange(n) / 16

    @property
    def labels(self) -> dict[str, Any]:
        return {"z": self.z, "name": self.name}


def bounds(n: int, pieces: int) -> list[tuple[int, int]]:
    """Cut n rows into pieces of unequal length, some of them empty."""
    cuts = [0, *(n * i * i // (pieces * pieces) for i in range(1, pieces)), n]
    return list(pairwise(cuts))


def column(values: Any) -> np.ndarray:
    """Read a column of any container."""
    return np.asarray(values.to_numpy() if hasattr(values, "to_numpy") else values)


def assert_same_block(found: Block, expected: Block) -> None:
    found_rows = np.asarray(found.X)
    assert found_rows.dtype == expected.X.dtype
    np.testing.assert_array_equal(found_rows, expected.X)
    assert set(found.labels) == set(expected.labels)
    for name in expected.labels:
        np.testing.assert_array_equal(column(found.labels[name]), expected.labels[name])
    np.testing.assert_array_equal(column(found.sample_weight), expected.sample_weight)


def naive_blocks(data: Data, pieces: list[tuple[int, int]], block_rows: int) -> list[Block]:
    """Cut every piece by a plain loop."""
    blocks = []
    for first, last in pieces:
        for row in range(first, last, block_rows):
            rows = slice(row, min(row + block_rows, last))
            labels = {name: values[rows] for name, values in data.labels.items()}
            blocks.append(Block(data.X[rows], labels, data.weight[rows]))
    return blocks


# --- the kinds of sources ------------------------------------------------------------------------


class Case(NamedTuple):
    """Data, the pieces by which files and chunks hold them, rows of a block, and a folder."""

    data: Data
    pieces: list[tuple[int, int]]
    block_rows: int
    folder: Path


Make = Callable[[Case], Source]
LAYOUTS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "c": lambda X: X,
    "fortran": np.asfortranarray,
    "strided": lambda X: np.repeat(np.repeat(X, 2, axis=0), 3, axis=1)[::2, ::3],
    "reversed": lambda X: np.ascontiguousarray(X[::-1])[::-1],
}


def arrays(make: Callable[[np.ndarray], Any], make_column: Callable[[np.ndarray], Any]) -> Make:
    def source(case: Case) -> Source:
        data = case.data
        labels = {"z": make_column(data.z), "name": data.name}
        weight = make_column(data.weight)
        return from_arrays(make(data.X), labels, sample_weight=weight, block_rows=case.block_rows)

    return source


def tensor(array: np.ndarray) -> Any:
    return pytest.importorskip("torch", reason="torch is not installed").from_numpy(array)


def npy_files(labels_in_files: bool, order: Any) -> Make:
    def make(case: Case) -> Source:
        paths, label_paths = (
            [str(case.folder / f"{name}{i}.npy") for i in range(len(case.pieces))] for name in "xz"
        )
        data = case.data
        for path, label_path, (first, last) in zip(paths, label_paths, case.pieces, strict=True):
            np.save(path, np.array(data.X[first:last], order=order))
            np.save(label_path, data.z[first:last])
        labels = data.labels | ({"z": label_paths} if labels_in_files else {})
        return from_npy(paths, labels, sample_weight=data.weight, block_rows=case.block_rows)

    return make


def arrow_table(data: Data, kind: str) -> Any:
    """Make a table with the embedding as one of the three list types."""
    n, d = data.X.shape
    values = pa.array(np.ascontiguousarray(data.X).ravel())
    if kind == "fixed":
        vectors = pa.FixedSizeListArray.from_arrays(values, d)
    else:
        cls, index = (pa.ListArray, np.int32) if kind == "list" else (pa.LargeListArray, np.int64)
        vectors = cls.from_arrays(pa.array(np.arange(n + 1, dtype=index) * d), values)
    names = pa.array(data.name.tolist(), pa.string())
    return pa.table({"e": vectors, "z": data.z, "unread": data.z, "name": names, "w": data.weight})


def arrow_pieces(case: Case, kind: str) -> list[Any]:
    table = arrow_table(case.data, kind)
    return [table.slice(first, last - first) for first, last in case.pieces]


LISTS = ("fixed", "list", "large")
COLUMNS: dict[str, Any] = {"embedding": "e", "labels": ["z", "name"], "sample_weight": "w"}


def parquet(make: Callable[[Case], Any]) -> Make:
    """A source of Parquet files or of Arrow data."""
    return lambda case: from_parquet(make(case), **COLUMNS, block_rows=case.block_rows)


def parquet_files(case: Case, kind: str) -> Path:
    """Two row groups of one file, then a file each."""
    parts = arrow_pieces(case, kind)
    with pq.ParquetWriter(case.folder / "a.parquet", parts[0].schema) as writer:
        for part in parts[:2]:
            writer.write_table(part, row_group_size=max(1, len(part)))
    for i, part in enumerate(parts[2:]):
        pq.write_table(part, case.folder / f"b{i}.parquet")
    return case.folder


def sliced_table(case: Case, kind: str) -> Any:
    """A table that lies within a longer one, in one chunk."""
    ends = arrow_table(Data(4, 3), kind)
    longer = pa.concat_tables([ends, arrow_table(case.data, kind), ends]).combine_chunks()
    return longer.slice(4, len(case.data.X))


def polars_frame(case: Case) -> Any:
    return pl.DataFrame({"e": case.data.X, **case.data.labels, "w": case.data.weight})


def batch_reader(case: Case) -> Any:
    parts = arrow_pieces(case, "list")
    batches = [batch for part in parts for batch in part.to_batches()]
    return pa.RecordBatchReader.from_batches(parts[0].schema, batches)


def torch_loader(case: Case) -> Source:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    data = case.data
    samples = [
        (x, {"z": z, "name": name}, w)
        for x, z, name, w in zip(data.X, data.z, data.name.tolist(), data.weight, strict=True)
    ]
    return as_source(torch.utils.data.DataLoader(samples, batch_size=case.block_rows))


def hugging_face(streamed: bool) -> Make:
    def make(case: Case) -> Source:
        datasets = pytest.importorskip("datasets", reason="Hugging Face datasets is not installed")
        ds = datasets.Dataset(arrow_table(case.data, "fixed"))
        if streamed:
            ds = ds.to_iterable_dataset(num_shards=min(2, len(ds)) or 1)
        return from_dataset(ds, **COLUMNS, block_rows=case.block_rows)

    return make


def any_iterable(case: Case) -> Source:
    return as_source(naive_blocks(case.data, [(0, len(case.data.X))], case.block_rows))


KINDS: dict[str, Make] = {
    **{f"{name} array": arrays(lay_out, lambda v: v) for name, lay_out in LAYOUTS.items()},
    "npy": npy_files(False, "C"),
    "npy, fortran, labels in files": npy_files(True, "F"),
    **{f"parquet {kind}": parquet(lambda c, kind=kind: parquet_files(c, kind)) for kind in LISTS},
    **{
        f"sliced table {kind}": parquet(lambda c, kind=kind: sliced_table(c, kind))
        for kind in LISTS
    },
    "polars frame": parquet(polars_frame),
    "chunked table": parquet(lambda case: pa.concat_tables(arrow_pieces(case, "fixed"))),
    "record batch reader": parquet(batch_reader),
    "torch tensor": arrays(tensor, tensor),
    "torch DataLoader": torch_loader,
    "dataset": hugging_face(False),
    "streamed dataset": hugging_face(True),
    "iterable": any_iterable,
}
# datasets refuses to make a stream of a table without rows
SIZES = [(kind, n) for kind in KINDS for n in (0, 1, 23) if n or kind != "streamed dataset"]


@pytest.mark.parametrize("block_rows", [1, 4, 100])
@pytest.mark.parametrize(("kind", "n"), SIZES)
def test_every_source_gives_the_same_rows_and_resumes(
    kind: str, block_rows: int, n: int, tmp_path: Path
) -> None:
    case = Case(Data(n, 3), bounds(n, 4), block_rows, tmp_path)
    by_piece = kind.startswith(("npy", "parquet"))
    expected = naive_blocks(case.data, case.pieces if by_piece else [(0, n)], block_rows)
    n_blocks, source = len(expected), KINDS[kind](case)
    assert source.n_rows in (n, None)
    assert source.n_features in (3, None)
    assert source.nbytes in (case.data.X.nbytes, None)
    for first in (0, min(1, n_blocks), n_blocks // 2, n_blocks):
        found = list(source.iter_from(first))
        for block, twin in zip(found, expected[first:], strict=True):
            assert_same_block(block, twin)
        if kind == "record batch reader":  # is read once only
            source = KINDS[kind](case)
    with pytest.raises(InputError, match=f"only {n_blocks} blocks"):
        list(source.iter_from(n_blocks + 1))


# --- blocks --------------------------------------------------------------------------------------


@given(n_features=st.integers(1, 1 << 26), itemsize=st.sampled_from([1, 2, 4, 8]))
def test_default_block_is_4096_rows_within_64_mib(n_features: int, itemsize: int) -> None:
    rows = choose_block_rows(None, n_features, itemsize)
    row_bytes = n_features * itemsize
    assert 1 <= rows <= 4096
    assert rows == 1 or rows * row_bytes <= 64 << 20
    assert rows == 4096 or (rows + 1) * row_bytes > 64 << 20


def test_blocks_of_sparse_rows_are_as_large_as_what_they_store() -> None:
    rows = scipy.sparse.random_array((6000, 40_000), density=1e-4, format="csr", rng=0)
    source = from_arrays(rows)
    assert [len(block.X.indptr) - 1 for block in source.iter_from(0)] == [4096, 1904]
    assert source.nbytes is not None
    assert rows.data.nbytes <= source.nbytes <= 4 * rows.data.nbytes
    assert choose_block_rows(None, 40_000, 8) < 300  # control: of dense rows of this width
    empty = from_arrays(scipy.sparse.csr_array((5, 3)))
    assert [block.X.shape for block in empty.iter_from(0)] == [(5, 3)]


@pytest.mark.parametrize("order", ["C", "F"])
def test_blocks_of_arrays_are_views(order: Any) -> None:
    X = np.ones((10, 3), order=order)
    labels, weight = {"z": np.zeros(10)}, np.ones(10)
    for block in from_arrays(X, labels, sample_weight=weight, block_rows=4):
        assert np.shares_memory(block.X, X)
        assert np.shares_memory(block.labels["z"], labels["z"])
        assert np.shares_memory(block.sample_weight, weight)


def test_name_tells_sources_with_other_blocks_apart() -> None:
    X = np.ones((10, 3))
    assert from_arrays(X, block_rows=4).name == from_arrays(X, block_rows=4).name
    assert from_arrays(X, block_rows=4).name != from_arrays(X, block_rows=5).name
    assert "(10, 3)" in repr(from_arrays(X))


# --- arrays --------------------------------------------------------------------------------------


def test_labels_of_any_container_are_sliced_by_position() -> None:
    values = [3, 2, 1, 0, -1]
    containers = {
        "list": values,
        "tuple": tuple(values),
        "range": range(3, -2, -1),
        "numpy": np.array(values),
        "pandas": pd.Series(values, index=np.arange(10.0, 15.0)),  # which a slice could mean
        "polars": pl.Series(values),
        "arrow": pa.chunked_array([values[:2], values[2:]]),
    }
    blocks = list(from_arrays(np.ones((5, 2)), containers, block_rows=3))
    for name, container in containers.items():
        parts = [block.labels[name] for block in blocks]
        assert {type(part) for part in parts} == {type(container)}
        assert [column(part).tolist() for part in parts] == [[3, 2, 1], [0, -1]]


def test_series_are_sliced_by_position_where_pandas_would_slice_by_label() -> None:
    class Series:
        """As pandas before version 3 behaves with an index of floats."""

        shape, iloc = (3,), np.array([1, 2, 3])

        def __getitem__(self, labels: slice) -> Any:
            return self.iloc[:0]

    blocks = from_arrays(np.ones((3, 2)), {"z": Series()}, block_rows=2)
    assert [block.labels["z"].tolist() for block in blocks] == [[1, 2], [3]]


def test_rows_and_labels_may_be_frames_or_a_single_column() -> None:
    frame = pd.DataFrame({"z": [1, 2, 3], "y": ["a", "b", "c"]}, index=[2, 1, 0])
    rows = pd.DataFrame({"a": [1.0, 2.0, 3.0], "b": [4.0, 5.0, 6.0]}, index=[2.5, 1.5, 0.5])
    source = from_arrays(rows, frame.reset_index(drop=True), block_rows=2)
    blocks = list(source)
    assert [block.X["b"].tolist() for block in blocks] == [[4.0, 5.0], [6.0]]
    assert [block.labels["y"].tolist() for block in blocks] == [["a", "b"], ["c"]]
    assert (source.n_rows, source.n_features, source.nbytes) == (3, 2, None)
    blocks = list(from_arrays(np.ones((3, 2)), ["a", "b", "c"], block_rows=2))
    assert [block.labels for block in blocks] == [["a", "b"], ["c"]]


# --- any iterable --------------------------------------------------------------------------------


def test_items_of_an_iterable() -> None:
    X, z, w = np.ones((2, 2)), np.arange(2), np.ones(2)
    blocks = list(as_source([X, (X,), (X, z), [X, {"z": z}, w], Block(X, None, w)]))
    assert [block.labels is not None for block in blocks] == [False, False, True, True, False]
    assert [block.sample_weight is w for block in blocks] == [False, False, False, True, True]
    assert all(block.X is X for block in blocks)
    source = from_arrays(X)
    assert as_source(source) is source


def test_a_generator_is_read_once_and_not_silently_twice() -> None:
    source = as_source((np.full((1, 1), i), None) for i in range(3))
    assert [block.X.item() for block in source.iter_from(1)] == [1, 2]
    with pytest.raises(InputError, match="read only once"):
        list(source)
    listed = as_source([np.ones((1, 1))])
    assert len(list(listed)) == len(list(listed)) == 1


X2 = np.ones((4, 2))


def refused(column: Any) -> Callable[[], Any]:
    return lambda: from_arrays(X2, {"z": column})


# message -> calls that raise it
REFUSED: dict[str, list[Callable[[], Any]]] = {
    "block_rows is": [
        lambda n=n: from_arrays(X2, block_rows=n)  # type: ignore[misc]
        for n in (0, -1, 1.5, True, "8")
    ],
    r"X is an ndarray of shape \(4,\)": [lambda: from_arrays(np.ones(4))],
    r"X is an ndarray of shape \(4, 2, 2\)": [lambda: from_arrays(np.ones((4, 2, 2)))],
    "X is a list": [lambda: from_arrays([[1.0, 2.0]])],
    r"labels\['z'\] has 3 rows but there are 4 in X": [refused([1, 2, 3])],
    "labels has 5 rows but there are 4 in X": [lambda: from_arrays(X2, np.ones(5))],
    "sample_weight has 3 rows but there are 4": [lambda: from_arrays(X2, sample_weight=np.ones(3))],
    r"labels\['z'\] is .* cannot be sliced": [
        refused("abcd"), refused(dict.fromkeys(range(4), 1)), refused({1, 2, 3, 4}), refused(None),
        refused(i for i in range(4)), refused(np.array(1)),
    ],
    "from_arrays": [lambda: as_source(np.ones((3, 2)))],
    "from_npy": [lambda: as_source("rows.npy"), lambda: as_source(Path("rows.npy"))],
    "iterable of": [lambda: as_source({"X": np.ones((3, 2))}), lambda: as_source(7)],
    "block 1 is": [
        lambda item=item: list(as_source([np.ones((3, 2)), item]))  # type: ignore[misc]
        for item in (
            np.ones(3), {"X": np.ones((3, 2))}, (np.ones(3), np.ones(3)), (1, 2, 3, 4), (), 5,
        )
    ],
    "paths": [
        lambda paths=paths: from_npy(paths)  # type: ignore[misc]
        for paths in ([], 3, [3], np.ones(3))
    ],
}  # fmt: skip


@pytest.mark.parametrize("message", REFUSED)
def test_refused_arguments(message: str) -> None:
    for call in REFUSED[message]:
        with pytest.raises(InputError, match=message):
            call()
    assert len(list(from_arrays(X2, block_rows=np.int64(2)))) == 2  # type: ignore[arg-type]


# --- .npy ----------------------------------------------------------------------------------------


def test_npy_blocks_are_views_of_the_map_and_count_their_bytes(tmp_path: Path) -> None:
    for name, dtype in (("a", np.float16), ("b", np.float64)):
        np.save(tmp_path / f"{name}.npy", np.ones((5, 2), dtype))
    source = from_npy([tmp_path / "a.npy", tmp_path / "b.npy"])
    assert source.nbytes == 5 * 2 * 2 + 5 * 2 * 8
    blocks = list(source)
    assert [block.X.dtype for block in blocks] == [np.float16, np.float64]
    for owner in (block.X for block in blocks):
        assert type(owner) is np.ndarray
        while isinstance(owner, np.ndarray):
            owner = owner.base
        assert isinstance(owner, mmap.mmap)


def write_npy(folder: Path, name: str, array: Any) -> Path:
    np.save(folder / name, array)
    return folder / name


def npy_bytes(array: Any, save: Callable[..., None] = np.save) -> bytes:
    buffer = io.BytesIO()
    save(buffer, array)
    return buffer.getvalue()


BAD_NPY = {
    "truncated": npy_bytes(np.ones((100, 3)))[:-8],
    "empty": b"",
    "archive": npy_bytes(np.ones((3, 2)), np.savez),
    "objects": npy_bytes(np.array([[1, "a"]], dtype=object)),
    "one-dimensional": npy_bytes(np.ones(6)),
    "scalar": npy_bytes(np.array(1.0)),
    "no columns": npy_bytes(np.ones((6, 0))),
    "text": npy_bytes(np.array([["a", "b"]])),
    "complex": npy_bytes(np.ones((2, 2), complex)),
    "another width": npy_bytes(np.ones((6, 4))),
}


@pytest.mark.parametrize("content", BAD_NPY.values(), ids=BAD_NPY)
def test_bad_npy_file_is_named(content: bytes, tmp_path: Path) -> None:
    good, bad = write_npy(tmp_path, "good.npy", np.ones((6, 3))), tmp_path / "bad.npy"
    bad.write_bytes(content)
    with pytest.raises(InputError, match=str(bad)):
        from_npy([good, bad])
    assert from_npy([good]).n_rows == 6


def test_paths_without_a_npy_file_are_named(tmp_path: Path) -> None:
    for path, text in ((tmp_path / "x.npy", "x.npy"), (tmp_path, r"is a folder; .*glob\('\*\.npy")):
        with pytest.raises(InputError, match=text):
            from_npy(path)


def test_labels_of_npy_that_do_not_fit(tmp_path: Path) -> None:
    paths = [write_npy(tmp_path, f"{i}.npy", np.ones((3 + i, 2))) for i in range(2)]
    short = write_npy(tmp_path, "short.npy", np.ones(3))
    with pytest.raises(InputError, match=r"labels\['z'\] has 6 rows but there are 7 in 2 files"):
        from_npy(paths, {"z": np.ones(6)})
    with pytest.raises(InputError, match="names 1 files but X has 2"):
        from_npy(paths, {"z": short})
    with pytest.raises(InputError, match=rf"sample_weight: '{short}' has shape .* has 4 rows"):
        from_npy(paths, sample_weight=[short, short])
    (block,) = from_npy(paths[0], {"z": ["a", "b", "c"]})  # names of classes are no paths
    assert block.labels == {"z": ["a", "b", "c"]}


def test_a_file_that_was_replaced_is_refused(tmp_path: Path) -> None:
    path, table = write_npy(tmp_path, "x.npy", np.ones((8, 2))), tmp_path / "x.parquet"
    pq.write_table(arrow_table(Data(20, 3), "fixed"), table)
    labels = write_npy(tmp_path, "z.npy", np.arange(8))
    of_npy, of_parquet = from_npy(path), from_parquet(table, embedding="e")
    of_labels = from_npy(write_npy(tmp_path, "same.npy", np.ones((8, 2))), {"z": labels})
    write_npy(tmp_path, "x.npy", np.ones((9, 2)))
    write_npy(tmp_path, "z.npy", np.arange(9.0))
    pq.write_table(arrow_table(Data(21, 3), "fixed"), table)
    with pytest.raises(InputError, match=r"held float64 of shape \(8, 2\)"):
        list(of_npy)
    with pytest.raises(InputError, match=r"held int64 of shape \(8,\)"):
        list(of_labels)
    with pytest.raises(InputError, match="has changed"):
        list(of_parquet)


# --- Parquet and Arrow ---------------------------------------------------------------------------


@pytest.mark.parametrize("kind", LISTS)
def test_vectors_are_not_copied(kind: str) -> None:
    table = arrow_table(Data(20, 3), kind).slice(5, 12)
    values = table.column("e").chunk(0).values  # of the whole column, whatever the slice
    start = values.buffers()[1].address
    for number, block in enumerate(from_parquet(table, embedding="e", block_rows=4)):
        assert block.X.ctypes.data == start + (5 + 4 * number) * 3 * 4


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, np.int8])
def test_vectors_keep_their_type(dtype: Any, tmp_path: Path) -> None:
    data = Data(4, 3, dtype)
    pq.write_table(arrow_table(data, "fixed"), tmp_path / "x.parquet")
    source = from_parquet(tmp_path / "x.parquet", embedding="e", labels="z")
    (block,) = source
    assert block.X.dtype == dtype
    assert source.nbytes == data.X.nbytes
    assert list(block.labels) == ["z"]
    np.testing.assert_array_equal(block.X, data.X)


def test_fixed_shape_tensors_are_vectors() -> None:
    kind = pa.fixed_shape_tensor(pa.float32(), [3])
    storage = pa.FixedSizeListArray.from_arrays(pa.array(np.arange(12, dtype=np.float32)), 3)
    table = pa.table({"e": pa.ExtensionArray.from_storage(kind, storage)}).slice(1)
    (block,) = from_parquet(table, embedding="e")
    np.testing.assert_array_equal(block.X, np.arange(3, 12).reshape(3, 3))


BAD_VECTORS: dict[str, Any] = {  # message -> vector in place of row 9
    "no vector": None, "null within": [1.0, None, 2.0], "ragged": [1.0],
}  # fmt: skip
BAD_CASES = [(m, k) for m in BAD_VECTORS for k in LISTS if (m, k) != ("ragged", "fixed")]


@pytest.mark.parametrize(("message", "kind"), BAD_CASES)
def test_bad_vector_is_named_with_its_row_group(message: str, kind: str, tmp_path: Path) -> None:
    rows: list[Any] = [[float(i), 1.0, 2.0] for i in range(12)]
    rows[9] = BAD_VECTORS[message]
    number = pa.float32()
    types = {"fixed": pa.list_(number, 3), "list": pa.list_(number), "large": pa.large_list(number)}
    table = pa.table({"e": pa.array(rows, types[kind])})
    path = tmp_path / "x.parquet"
    try:
        pq.write_table(table, path, row_group_size=6)
    except pa.ArrowNotImplementedError:
        pytest.skip("this pyarrow cannot write missing vectors of fixed size")
    reader = pa.RecordBatchReader.from_batches(table.schema, table.to_batches(max_chunksize=5))
    for data, block_rows, place in (
        (path, 2, f"row 3 of row group 1 of '{path}'"),
        (table.slice(0), 5, "row 9 of Table"),
        (reader, 4, "row 9 of RecordBatchReader"),
    ):
        with pytest.raises(InputError, match=f"'e' .*{message}.* {place}"):
            list(from_parquet(data, embedding="e", block_rows=block_rows))
    assert len(list(from_parquet(table.slice(0, 9), embedding="e", block_rows=3))) == 3


def test_lists_that_change_or_hold_nulls_are_named(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    rows = [[1.0, 2.0]] * 4 + [[1.0, 2.0, 3.0]] * 4
    pq.write_table(pa.table({"e": rows}), path, row_group_size=4)
    source = from_parquet(path, embedding="e")
    assert source.n_features == 2
    with pytest.raises(InputError, match=f"3 values in row 0 of row group 1 of '{path}', where 2"):
        list(source)
    # 3 values and a null are as many entries as 2 rows of 2.
    pq.write_table(pa.table({"e": [[1.0, 2.0, 3.0], None]}), path)
    blocks = iter(from_parquet(path, embedding="e", block_rows=1))
    assert next(blocks).X.shape == (1, 3)
    with pytest.raises(InputError, match=r"no vector .* row 1 of row group 0"):
        next(blocks)
    table = pa.table({"e": [[1.0], [2.0]], "w": [1.0, None]})
    with pytest.raises(InputError, match="'w', the sample weight, is null in row 1"):
        list(from_parquet(table, embedding="e", sample_weight="w"))


@pytest.mark.parametrize("block_rows", [1000, 1500, 400])
def test_a_stream_holds_nothing_that_was_dropped(block_rows: int) -> None:
    row_bytes = 64 * 4
    held = []

    def batches() -> Iterator[Any]:
        for _ in range(6):
            held.append(pa.total_allocated_bytes() - before)
            values = pa.array([0.0], pa.float32()).take(pa.array(np.zeros(64000, np.int64)))
            vectors = pa.FixedSizeListArray.from_arrays(values, 64)
            del values
            yield pa.record_batch([vectors], ["e"])
            del vectors

    schema = pa.schema({"e": pa.list_(pa.float32(), 64)})
    gc.collect()
    before = pa.total_allocated_bytes()
    source = from_parquet(
        pa.RecordBatchReader.from_batches(schema, batches()), embedding="e", block_rows=block_rows
    )
    for block in source:
        del block
    # what is left of the last batch may be the beginning of a block, but no more
    assert max(held) < (1000 if block_rows == 1000 else 2500) * row_bytes


def test_files_that_do_not_fit_together(tmp_path: Path) -> None:
    for d in (2, 3, 4):
        pq.write_table(arrow_table(Data(4, d), "fixed"), tmp_path / f"{d}.parquet")
    with pytest.raises(InputError, match=r"3 values per row in .*3\.parquet' but 2 in"):
        from_parquet(tmp_path, embedding="e")


def test_a_directory_is_read_in_order_without_hidden_files(tmp_path: Path) -> None:
    for i, name in enumerate(["b/1.parquet", "a.parquet", "_x/2.parquet", ".3.parquet", "t.txt"]):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        data = Data(1, 1)
        data.X[:] = i
        pq.write_table(arrow_table(data, "fixed"), tmp_path / name)
    assert [block.X.item() for block in from_parquet(tmp_path, embedding="e")] == [1.0, 0.0]
    (tmp_path / "none").mkdir()
    with pytest.raises(InputError, match="holds no file"):
        from_parquet(tmp_path / "none", embedding="e")


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"embedding": "x"}, "no column named 'x'; its columns are"),
        ({"embedding": "e", "labels": ["q"]}, "no column named 'q'"),
        ({"embedding": "e", "labels": [1]}, r"labels is \[1\]; pass a name"),
        ({"embedding": "e", "labels": 1}, "labels is 1; pass a name"),
        ({"embedding": ["a", "b"]}, "one column per feature, write a column of vectors"),
        ({"embedding": "e", "sample_weight": "q"}, "no column named 'q'"),
        ({"embedding": "z"}, "has the type int64, which is no embedding"),
        ({"embedding": "name"}, "has the type string"),
    ],
)
def test_columns_that_are_not_there(columns: dict[str, Any], message: str, tmp_path: Path) -> None:
    table = arrow_table(Data(4, 3), "fixed")
    pq.write_table(table, tmp_path / "x.parquet")
    for data in (table, tmp_path / "x.parquet", table.to_reader()):
        with pytest.raises(InputError, match=message):
            from_parquet(data, **columns)


def test_damaged_parquet_is_named(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    pq.write_table(arrow_table(Data(2000, 3), "fixed"), path, row_group_size=1000)
    source = from_parquet(path, embedding="e")
    content = bytearray(path.read_bytes())
    first_page = pq.ParquetFile(path).metadata.row_group(1).column(0).dictionary_page_offset
    content[first_page : first_page + 64] = b"\xff" * 64
    path.write_bytes(content)
    blocks = iter(source)
    next(blocks)
    with pytest.raises(InputError, match=f"row group 1 of '{path}' cannot be read"):
        next(blocks)
    path.write_bytes(content[:-100])
    for bad in (path, tmp_path / "missing.parquet"):
        with pytest.raises(InputError, match=f"{bad}' cannot be read as Parquet"):
            from_parquet(bad, embedding="e")


def arrow_peak(source: Source) -> int:
    """Return the most bytes that Arrow holds while a block is in use."""
    gc.collect()
    before = pa.total_allocated_bytes()
    return int(max(pa.total_allocated_bytes() - before for _ in source))


def test_a_row_group_is_not_held_as_a_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(0)
    X = rng.standard_normal((32768, 64), dtype=np.float32)  # 8 MiB, in blocks of 64 KiB
    vectors = pa.FixedSizeListArray.from_arrays(pa.array(X.ravel()), 64)
    pq.write_table(pa.table({"e": vectors}), tmp_path / "x.parquet", use_dictionary=False)
    source = from_parquet(tmp_path / "x.parquet", embedding="e", block_rows=256)
    assert arrow_peak(source) < 4 << 20  # pages of 1 MiB, and a read buffer of 1 MiB
    monkeypatch.setattr("splince_fast.sources._parquet._BUFFER_BYTES", 0)
    assert arrow_peak(source) > 8 << 20


# --- Hugging Face --------------------------------------------------------------------------------


@pytest.fixture
def datasets() -> Any:
    return pytest.importorskip("datasets", reason="Hugging Face datasets is not installed")


def test_dataset_with_its_own_format_selection_and_shuffle(datasets: Any) -> None:
    data = Data(30, 3)
    ds = datasets.Dataset.from_dict({"e": data.X.tolist(), "z": data.z})
    rows = np.random.default_rng(0).permutation(30)[:20]
    ds = ds.cast_column("e", datasets.List(datasets.Value("float32"), length=3))
    source = from_dataset(
        ds.with_format("torch").select(rows), embedding="e", labels="z", block_rows=7
    )
    blocks = list(source)
    assert source.n_features == 3
    np.testing.assert_array_equal(np.concatenate([block.X for block in blocks]), data.X[rows])
    found = np.concatenate([column(block.labels["z"]) for block in blocks])
    np.testing.assert_array_equal(found, data.z[rows])


def test_dataset_from_disk_is_mapped_and_not_copied(datasets: Any, tmp_path: Path) -> None:
    data = Data(50, 4)
    datasets.Dataset(arrow_table(data, "fixed")).save_to_disk(tmp_path / "ds")
    ds = datasets.load_from_disk(tmp_path / "ds")
    first, second = from_dataset(ds, embedding="e", block_rows=25)
    np.testing.assert_array_equal(np.concatenate([first.X, second.X]), data.X)
    assert second.X.ctypes.data - first.X.ctypes.data == first.X.nbytes


def test_the_missing_label_of_a_class_label_is_missing(datasets: Any, tmp_path: Path) -> None:
    labels = np.array([0, 1, -1, 1, 0, -1])
    X = np.arange(12.0).reshape(6, 2)
    kinds = {"z": datasets.ClassLabel(names=["woman", "man"]), "n": datasets.Value("int64")}
    ds = datasets.Dataset.from_dict(
        {"e": X.tolist(), "z": labels, "n": labels},
        features=datasets.Features({"e": datasets.Sequence(datasets.Value("float64")), **kinds}),
    )
    ds.to_parquet(tmp_path / "ds.parquet")
    routes = [
        from_dataset(ds, "e", ["z", "n"], block_rows=4),
        from_dataset(ds.to_iterable_dataset(), "e", ["z", "n"]),
        from_parquet(tmp_path / "ds.parquet", "e", ["z", "n"]),
        from_parquet(ds.with_format("arrow")[:], "e", ["z", "n"]),
        from_arrays(X, {"z": ds["z"], "n": ds["n"]}, block_rows=4),
        [(X, {"z": ds["z"], "n": ds["n"]})],
        [(X, read_label_files([str(tmp_path / "ds.parquet")], ["z", "n"], {}))],
    ]
    weight = np.arange(6) % 5 > 0
    for route in routes:
        moments = Moments.from_blocks(route)
        assert moments.class_counts("z") == {0: 2, 1: 2}
        assert moments.class_counts("n") == {-1: 2, 0: 2, 1: 2}  # control: other integers
    some = Moments().update(X, {"z": ds["z"]}, sample_weight=weight)
    assert some.class_counts("z") == {0: 1, 1: 2}


def test_what_is_no_dataset_of_vectors(datasets: Any) -> None:
    ds = datasets.Dataset.from_dict({"e": [[1.0, 2.0], [3.0, 4.0], [5.0]]})
    for data, column_name, text in (
        (datasets.DatasetDict(train=ds), "e", "of a DatasetDict pass one"),
        (np.ones((2, 2)), "e", "ds is an ndarray"),
        (ds, "x", "the Dataset has no column named 'x'"),
        (ds, "e", "ragged: 1 values in row 2 of Dataset of 3 rows"),
        (ds.to_iterable_dataset(), "e", "ragged: 1 values in row 2 of IterableDataset"),
    ):
        with pytest.raises(InputError, match=text):
            list(from_dataset(data, column_name))


# --- torch ---------------------------------------------------------------------------------------


def test_tensor_is_shared_and_bfloat16_widened(torch: Any) -> None:
    X = torch.arange(12.0).reshape(6, 2)
    for block in from_arrays(X, block_rows=4):
        assert np.shares_memory(block.X, X.numpy())
    blocks = list(from_arrays(X.to(torch.bfloat16).requires_grad_(), block_rows=4))
    assert [block.X.dtype for block in blocks] == [np.float32, np.float32]
    np.testing.assert_array_equal(np.concatenate([block.X for block in blocks]), X.numpy())
    with pytest.raises(InputError, match="cannot be sliced by rows"):
        from_arrays(X.to_sparse())


def test_batches_of_a_loader_give_the_moments_of_the_rows(torch: Any) -> None:
    utils = torch.utils.data
    X, z, w = torch.arange(10.0).reshape(5, 2), torch.arange(5) % 2, torch.ones(5)
    found = Moments.from_blocks(utils.DataLoader(utils.TensorDataset(X, z, w), batch_size=2))
    expected = Moments().update(X.numpy(), z.numpy(), sample_weight=w.numpy())
    assert found.class_counts("concept") == expected.class_counts("concept")
    np.testing.assert_allclose(found.covariance(), expected.covariance(), rtol=1e-14)


@pytest.mark.parametrize("batched", [True, False])
def test_a_loader_that_shuffles_does_not_resume(torch: Any, batched: bool) -> None:
    utils, X = torch.utils.data, torch.ones(6, 2)
    options: dict[str, Any] = {"batch_size": 2}
    if not batched:
        X, options = X.reshape(3, 2, 2), {"batch_size": None}
    source = as_source(utils.DataLoader(X, shuffle=True, **options))
    assert sum(len(block.X) for block in source) == 6
    with pytest.raises(InputError, match="shuffle=False"):
        list(source.iter_from(1))
    assert len(list(as_source(utils.DataLoader(X, **options)).iter_from(1))) == 2


def test_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(MissingExtraError, match=r'pip install "splince_fast\[parquet\]"'):
        from_parquet("x.parquet", embedding="e")


# --- reading ahead -------------------------------------------------------------------------------


class Recorded(Source):
    """Blocks that are made when read, and remembered as long as they live."""

    def __init__(self, n_blocks: int, fail_at: int | None = None) -> None:
        super().__init__("recorded")
        self.n_blocks = n_blocks
        self.fail_at = fail_at
        self.started = 0
        self.alive: set[int] = set()  # numbers of the blocks

    def iter_from(self, first_block: int = 0) -> Iterator[Block]:
        for number in range(first_block, self.n_blocks):
            self.started += 1
            if number == self.fail_at:
                self.break_down()
            yield Block(self.rows(number))

    def rows(self, number: int) -> Any:
        X = np.full((2, 3), number)
        self.alive.add(number)
        weakref.finalize(X, self.alive.discard, number)
        return X

    def break_down(self) -> None:
        raise OSError("the disk is on fire")


def wait_until(condition: Callable[[], bool]) -> None:
    """Wait for another thread; a deadline turns a hang into a failure."""
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline, "the reader did not get there"
        time.sleep(0.001)


@pytest.mark.parametrize("first", [0, 3, 12])
def test_one_block_is_read_ahead_and_no_more(first: int) -> None:
    threads, source = threading.active_count(), Recorded(12)
    with prefetched(source, first) as blocks:
        for number in range(first, 12):
            block = next(blocks)
            n_started = min(12, number + 2) - first
            wait_until(lambda: source.started == n_started)  # noqa: B023
            time.sleep(0.002)  # time for a reader that does not stop to read another block
            assert source.started == n_started
            assert len(source.alive) <= 2
            assert int(block.X[0, 0]) == number
        assert next(blocks, None) is None
    assert threading.active_count() == threads
    plain = Recorded(12)
    next(iter(plain))
    assert plain.started == 1  # without it, nothing is read ahead


def refilled(arrays: list[Any]) -> Iterator[tuple[Any, dict[str, Any], Any]]:
    """Yield the same three arrays with other values each time."""
    X, z, weight = arrays
    for number in range(20):
        X[:], z[:], weight[:] = number, number, number
        yield X, {"z": z}, weight


def check_refilled(source: Source) -> None:
    with prefetched(source) as blocks:
        for number, block in enumerate(blocks):
            time.sleep(0.002)  # the reader gets time to fill the arrays with the next values
            for values in (block.X, block.labels["z"], block.sample_weight):
                assert (np.asarray(values) == number).all()
    assert number == 19


def test_an_iterator_may_refill_its_arrays() -> None:
    check_refilled(as_source(refilled([np.empty((4, 2)), np.empty(4, int), np.empty(4)])))
    items = list(refilled([np.empty((4, 2)), np.empty(4, int), np.empty(4)]))
    with prefetched(as_source(items)) as blocks:  # control: the items of a list are not copied
        assert np.shares_memory(next(blocks).X, items[0][0])


def test_batches_of_tensors_may_be_refilled(torch: Any) -> None:
    tensors = [torch.empty(4, 2), torch.empty(4, dtype=torch.int64), torch.empty(4)]
    check_refilled(as_source(refilled(tensors)))


def test_a_block_that_was_dropped_is_freed_while_the_next_is_read() -> None:
    class Patient(Recorded):
        def iter_from(self, first_block: int = 0) -> Iterator[Block]:
            for block in super().iter_from(first_block):
                number = int(block.X[0, 0])
                yield block
                del block
                wait_until(lambda: number not in self.alive)  # noqa: B023

    with prefetched(Patient(4)) as blocks:
        for _ in range(4):
            block = next(blocks)
            del block


def test_exception_of_the_reader_surfaces_with_its_traceback() -> None:
    threads = threading.active_count()
    seen = []
    with (
        pytest.raises(OSError, match="on fire") as caught,
        prefetched(Recorded(5, fail_at=3)) as blocks,
    ):
        seen.extend(int(block.X[0, 0]) for block in blocks)
    assert seen == [0, 1, 2]  # what was read before is not lost
    frames = [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert "break_down" in frames
    assert threading.active_count() == threads


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_leaving_early_stops_the_thread_and_frees_the_blocks(error: type[BaseException]) -> None:
    threads = threading.active_count()
    source = Recorded(10**6)

    def consume() -> None:
        with prefetched(source) as blocks:
            next(blocks)
            wait_until(lambda: source.started == 2)
            raise error

    with pytest.raises(error):
        consume()
    assert threading.active_count() == threads
    assert source.started == 2
    gc.collect()
    assert len(source.alive) == 0


def test_mapped_rows_are_copied_so_that_the_file_may_go(tmp_path: Path) -> None:
    path = write_npy(tmp_path, "x.npy", np.asfortranarray(np.arange(3000.0).reshape(1000, 3)))
    with prefetched(from_npy(path, block_rows=600)) as blocks:
        first, second = blocks
        with path.open("r+b") as file:
            file.truncate(0)
        assert first.X.flags.f_contiguous
        np.testing.assert_array_equal(
            np.concatenate([first.X, second.X]), np.arange(3000.0).reshape(1000, 3)
        )


def test_rows_in_memory_are_not_copied(tmp_path: Path) -> None:
    wide = np.full((10, 2000), np.nan, np.float16)  # NaN is none of the reader's business
    mapped = np.load(write_npy(tmp_path, "x.npy", np.ones((4, 2))), mmap_mode="r")
    vectors = np.empty(4, object)
    vectors[:] = list(np.ones((4, 2)))
    frame, masked = pd.DataFrame({"a": [1.0, 2.0]}), np.ma.masked_array(mapped, mask=np.eye(4, 2))
    for X in (*(lay_out(wide) for lay_out in LAYOUTS.values()), masked, vectors, frame):
        with prefetched(StreamSource("one block", [X], lambda items: map(Block, items))) as blocks:
            assert next(blocks).X is X


def test_every_file_is_closed_in_the_end(tmp_path: Path) -> None:
    paths = [write_npy(tmp_path, f"{i}.npy", np.ones((4, 2))) for i in range(5)]
    descriptors = Path("/proc/self/fd")
    if not descriptors.exists():
        pytest.skip("open files can be counted on Linux only")
    before = len(list(descriptors.iterdir()))
    source = from_npy(paths, block_rows=2)
    with prefetched(source) as blocks:
        next(blocks)
    assert len(list(source)) == 10
    assert len(list(descriptors.iterdir())) == before
