"""Rows, labels, weights, masks and directions of every container have the bits of arrays."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
from naive_model import LAYOUTS, STATES, laid_out, made, state_bytes

import splince_fast as sf
from splince_fast.evaluation import compare, fit_head
from splince_fast.exceptions import InputError

N, D = 240, 4
rng = np.random.default_rng(0)
Z = rng.integers(0, 2, N)
Y = np.where(rng.random(N) < 0.8, Z, 1 - Z)
WEIGHT, MASK = rng.integers(1, 5, N), rng.integers(0, 2, N)
# Multiples of 1/8, which are exact in half precision.
X = np.round(8 * (rng.normal(size=(N, D)) + np.outer(Z, [1, 2, 0, 1]) + np.outer(Y, [0, 1, 1, 0])))
X /= 8
LABELS = {"z": Z, "y": Y}
MOMENTS = sf.Moments().update(X, LABELS)
PROJECTION = sf.splince(MOMENTS, erase="z", keep="y")
ORACLE = sf.oracle(MOMENTS, erase="z", keep="y")


# -- containers: array and folder -> container -----------------------------------------------------


def spelled(order: str) -> Callable[[Any, Path], Any]:
    """The same numbers in a dtype that names its byte order."""

    def make(array: Any, _: Path) -> Any:
        dtype = array.dtype.newbyteorder(order)
        assert dtype.byteorder == (order if array.dtype.itemsize > 1 else "|")
        return array.astype(dtype)

    return make


def mapped(array: Any, folder: Path) -> Any:
    np.save(folder / "rows.npy", array)
    return np.load(folder / "rows.npy", mmap_mode="r")


def zarr_array(array: Any, folder: Path) -> Any:
    zarr = pytest.importorskip("zarr", reason="zarr is not installed")
    made = zarr.create_array(str(folder / "rows.zarr"), shape=array.shape, dtype=array.dtype)
    made[...] = array
    return made


def hdf5(array: Any, folder: Path) -> Any:
    h5py = pytest.importorskip("h5py", reason="h5py is not installed")
    dtype = array.dtype.newbyteorder(">")
    return h5py.File(folder / "rows.h5", "w").create_dataset("rows", data=array, dtype=dtype)


def matlab(array: Any, folder: Path) -> Any:
    import scipy.io

    scipy.io.savemat(folder / "rows.mat", {"rows": array})
    return scipy.io.loadmat(folder / "rows.mat")["rows"].reshape(array.shape)


def tensor(array: Any, _: Path) -> Any:
    return pytest.importorskip("torch", reason="torch is not installed").from_numpy(array.copy())


ARRAYS: dict[str, Callable[[Any, Path], Any]] = {
    "little-endian": spelled("<"),
    "big-endian": spelled(">"),
    "map": mapped,
    "zarr": zarr_array,
    "zarr slice": lambda a, folder: zarr_array(a, folder)[: len(a)],
    "HDF5": hdf5,
    "HDF5 slice": lambda a, folder: hdf5(a, folder)[: len(a)],
    "MATLAB": matlab,
    "tensor": tensor,
}
INDEXES: dict[str, Any] = {
    "text": ["a", "b", "c", "d"],
    "tuples": [("u", 1), ("u", 2), ("v", 1), ("v", 2)],
    "MultiIndex": pd.MultiIndex.from_product([["u", "v"], [1, 2]]),
    "dates": pd.date_range("2020-01-01", periods=4),
    "integers": [5, 7, 11, 13],
    "numbers from 0": range(4),
    "numbers and their texts": [1, "1", 2, "2"],
    "one None": ["a", None, "c", "d"],
}
MIXED = ("numbers and their texts", "one None")  # refused by scikit-learn itself
CONTAINERS = ARRAYS | {
    "object": lambda a, _: a.astype(object),
    "vectors": lambda a, _: pd.Series(list(a)),
    "list": lambda a, _: a.tolist(),
    "polars": lambda a, _: pl.DataFrame(a, schema=list("abcd")),
    "Arrow": lambda a, _: pa.table(dict(zip("abcd", a.T, strict=True))),
    **{
        layout: lambda a, _, layout=layout: laid_out(a, layout)
        for layout in (*LAYOUTS, "unaligned")
    },
    **{
        f"pandas, {name}": lambda a, _, index=index: pd.DataFrame(a, columns=index)
        for name, index in INDEXES.items()
    },
}
COLUMNS = ARRAYS | {"Arrow array": lambda a, _: pa.array(a)}
AS_FLOAT64 = ("object", "list")  # containers that do not keep a dtype


# -- entries: rows -> array or moments -------------------------------------------------------------


def bits(result: Any) -> bytes:
    """Numbers of a result in native order; of moments, the saved state without names."""
    if isinstance(result, sf.Moments):
        state = result.__getstate__()
        state["metadata"].pop("feature_names", None)
        tensors = {name: (t.shape, t.tobytes()) for name, t in state["tensors"].items()}
        return repr((state["metadata"], tensors)).encode()
    array = np.asarray(result)
    return np.ascontiguousarray(array, array.dtype.newbyteorder("=")).tobytes()


def streamed(rows: Any, labels: Any = LABELS, weight: Any = WEIGHT) -> sf.Moments:
    source = sf.sources.from_arrays(rows, labels, sample_weight=weight, block_rows=64)
    return sf.Moments.from_blocks(source)


def values_of(rows: Any) -> Any:
    result = compare(
        rows, task=Y, concept=Z, erasers=("LEACE",), heads=("frozen",), n_seeds=1, alphas=(1.0,),
        leakage=(), progress=False,
    )  # fmt: skip
    return list(result.records[0].values.values())


ENTRIES: dict[str, Callable[[Any], Any]] = {
    "update": lambda rows: sf.Moments().update(rows, LABELS),
    "one row": lambda rows: sf.Moments().update(X, LABELS).update(rows[:1], {"z": Z[:1]}),
    "source": streamed,
    "Folds": lambda rows: sum(sf.Folds(2).update(rows, LABELS), 0),
    "erase": lambda rows: sf.erase(rows, Z, Y)[0],
    "Projection": PROJECTION,
    "ConditionalEraser": lambda rows: ORACLE(rows, LABELS),
    "estimator": lambda rows: sf.SPLINCE().fit(rows, Y, concept=Z).transform(rows),
    "partial_fit": lambda rows: sf.LEACE().partial_fit(rows, concept=Z).projection_.matrix(),
    "head": lambda rows: fit_head(rows, Y).predict_proba(rows),
    "compare": values_of,
}


def applies(entry: str, container: str, dtype: str) -> bool:
    """Whether an entry takes a container; `compare`, which is slow, is run for one dtype."""
    if entry == "source":
        return container not in ("vectors", "list")  # nothing that slices to rows of a matrix
    if entry == "one row":
        return container in ARRAYS
    if entry == "head" and container in ("strided", "reversed"):
        return False  # it sums in the order of the memory
    if entry in ("estimator", "partial_fit"):
        return not container.endswith(MIXED)
    return entry != "compare" or (container in ARRAYS and dtype == "f4")


@pytest.mark.parametrize("dtype", ["f2", "f4", "f8", "i4"])
@pytest.mark.parametrize("container", CONTAINERS)
def test_rows_of_every_container_give_the_same_bits(
    container: str, dtype: str, tmp_path: Path
) -> None:
    native = (8 * X if dtype == "i4" else X).astype(dtype)
    rows = CONTAINERS[container](native, tmp_path)
    if container in AS_FLOAT64 or (container == "MATLAB" and dtype == "f2"):
        native = native.astype(float)
    for name, entry in ENTRIES.items():
        if applies(name, container, dtype):
            layouts = native, np.asfortranarray(native)  # heads sum in the order of the memory
            assert bits(entry(rows)) in [bits(entry(array)) for array in layouts], name


COLUMN_ENTRIES: dict[str, Callable[[Any], Any]] = {
    "labels": lambda z: sf.Moments().update(X, {"z": z, "y": Y}),
    "numbers": lambda z: sf.Moments(kinds={"z": "continuous"}).update(X, {"z": z}),
    "weights": lambda z: sf.Moments().update(X, LABELS, sample_weight=z),
    "mask": lambda z: sf.Moments().update(X, LABELS, mask=z),
    "labels of tokens": lambda z: sf.Moments().update(X.reshape(-1, 2, D), {"z": z}),
    "labels, some of weight zero": lambda z: sf.Moments().update(X, {"z": z}, sample_weight=MASK),
    "source": lambda z: streamed(X, {"z": z}, z),
    "Folds": lambda z: sum(sf.Folds(2).update(X, {"z": z}, sample_weight=z), 0),
    "erase": lambda z: sf.erase(X, z, Y, sample_weight=WEIGHT)[0],
    "mask of an eraser": lambda z: PROJECTION(X, mask=z),
    "ConditionalEraser": lambda z: ORACLE(X, {"z": z}),
    "estimator": lambda z: sf.LEACE().fit(X, concept=z, sample_weight=WEIGHT).transform(X),
    "weights of an estimator": lambda z: sf.LEACE().fit(X, concept=Y, sample_weight=z).transform(X),
    "head": lambda z: fit_head(X, z).coef_,
}


@pytest.mark.parametrize("dtype", ["i8", "u2", "f4", "f8"])
@pytest.mark.parametrize("container", COLUMNS)
def test_columns_of_every_container_give_the_same_bits(
    container: str, dtype: str, tmp_path: Path
) -> None:
    native = Z.astype(dtype)
    column = COLUMNS[container](native, tmp_path)
    for name, entry in COLUMN_ENTRIES.items():
        if not (name == "ConditionalEraser" and dtype[0] == "f"):  # it was fitted to classes
            assert bits(entry(column)) == bits(entry(native)), name


MATRIX_ENTRIES: dict[str, Callable[[Any], Any]] = {
    "keep": lambda a: sf.splince(MOMENTS, erase="z", keep=a[:, :2]).matrix(),
    "Projection": lambda a: sf.Projection(a, a, a[:, 0])(X),
    "fold_into": lambda a: PROJECTION.fold_into(a.T, a[0])[0],
    "out": lambda a: PROJECTION(X[:D].astype(a.dtype), out=np.empty_like(a)),
}


@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize("dtype", ["f4", "f8"])
def test_matrices_of_either_spelling_give_the_same_bits(dtype: str, order: str) -> None:
    native = np.round(8 * np.random.default_rng(1).normal(size=(D, D))).astype(dtype)
    spelling = spelled(order)(native, Path())
    for name, entry in MATRIX_ENTRIES.items():
        assert bits(entry(spelling)) == bits(entry(native)), name


def test_chunks_of_dask_arrays_of_zarr_are_rows(tmp_path: Path) -> None:
    da = pytest.importorskip("dask.array", reason="dask is not installed")
    rows = da.from_array(zarr_array(X, tmp_path), chunks=(64, D))
    read = sf.Moments.from_blocks(sf.sources.from_dask(rows, LABELS))
    assert bits(read) == bits(streamed(X, weight=None))
    assert bits(PROJECTION(rows).compute()) == bits(PROJECTION(X))
    with pytest.raises(InputError, match="X is a lazy Array"):
        sf.Moments().update(rows, LABELS)


# -- names of columns ------------------------------------------------------------------------------

NAMES = ("a", "b", "c", "d")
FRAME = pd.DataFrame(X, columns=NAMES)
REVERSED = FRAME[list(reversed(NAMES))]


def moments(rows: Any = FRAME, **parameters: Any) -> sf.Moments:
    return sf.Moments(**parameters).update(rows, LABELS)


REFUSING: dict[str, Callable[[Any, Any], Any]] = {
    "update": lambda frame, other: moments(frame).update(other, LABELS),
    "merge": lambda frame, other: moments(frame) + moments(other),
    "Projection": lambda frame, other: sf.erase(frame, Z)[1](other),
    "ConditionalEraser": lambda frame, other: ERASERS["oracle"](moments(frame))(other, LABELS),
    "estimator": lambda frame, other: sf.LEACE().fit(frame, concept=Z).transform(other),
    "partial fit of an estimator": lambda frame, other: (
        sf.LEACE().partial_fit(frame, concept=Z).projection_(other)
    ),
    "head": lambda frame, other: fit_head(frame, Y).predict(other),
}


@pytest.mark.parametrize("names", [*INDEXES, "Arrow"])
@pytest.mark.parametrize("entry", REFUSING)
def test_columns_in_another_order_are_refused(entry: str, names: str) -> None:
    frame = pd.DataFrame(X, columns=INDEXES.get(names, list("abcd")))
    reverse = frame.iloc[:, ::-1]
    if names == "Arrow":
        frame, reverse = (pa.Table.from_pandas(f) for f in (frame, reverse))
    call = REFUSING[entry]
    if entry.endswith("estimator") and names in MIXED:
        return
    if names == "numbers from 0" and entry in ("merge", "head"):
        call(frame, reverse)  # they see the names alone, and these numbers are none
        return
    with pytest.raises(ValueError, match=r"another order|in the same order|mixed up"):
        call(frame, reverse)
    call(frame, frame)
    if entry not in ("merge", "estimator"):
        call(frame, X)


ERASERS: dict[str, Callable[[Any], Any]] = {
    "splince": lambda m: sf.splince(m, erase="z", keep="y"),
    "leace": lambda m: sf.leace(m.factored(), erase="z"),
    "oracle": lambda m: sf.oracle(m, erase="z", keep="y"),
    "quadratic": lambda m: sf.quadratic(m, erase="z", shrinkage=0.5),
    "scaled": lambda m: sf.sal(m, erase="z").scaled(0.5),
    "float32": lambda m: sf.sal(m, erase="z").astype(np.float32),
    "composed": lambda m: sf.sal(m, erase="y") @ sf.sal(m, erase="z"),
}


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("frame", [REVERSED, pl.DataFrame(REVERSED.to_dict("list"))])
def test_another_order_is_refused_before_anything_changes(state: str, frame: Any) -> None:
    some = made(state).update(FRAME, LABELS)
    before = state_bytes(some)
    with pytest.raises(InputError, match=r"another order.*column 0 is 'd', and was 'a'"):
        some.update(frame, LABELS)
    with pytest.raises(InputError, match=r"'e' new; 'b' missing.*to_numpy\(\)"):
        some.update(FRAME.rename(columns={"b": "e"}), LABELS)
    assert state_bytes(some) == before
    assert some.update(FRAME, LABELS).feature_names == NAMES
    assert some.update(REVERSED.to_numpy(), LABELS).n_rows == 3 * N  # the control


@pytest.mark.parametrize("frame", [pd.DataFrame(X), pd.DataFrame({"embedding": list(X)})])
def test_numbered_columns_and_columns_of_vectors_have_no_names(frame: Any) -> None:
    state = moments(frame)
    assert state.feature_names is None
    assert state.update(FRAME, LABELS).feature_names == NAMES


def test_merging_compares_names() -> None:
    whole, other = moments(), moments(REVERSED)
    for combine in (lambda: whole + other, lambda: whole - other, lambda: other.__iadd__(whole)):
        with pytest.raises(sf.exceptions.IncompatibleMomentsError, match="another order"):
            combine()
    wide = pd.DataFrame(np.hstack([X, X[:, :1]]), columns=[*NAMES, "a"])
    with pytest.raises(sf.exceptions.IncompatibleMomentsError, match="5 features"):
        whole + moments(wide)
    arrays = moments(X)
    assert (arrays + whole).feature_names == (whole + arrays).feature_names == NAMES
    assert (whole + arrays - arrays).feature_names == whole.scaled(2).feature_names == NAMES
    assert sf.Moments().__iadd__(whole).feature_names == NAMES
    assert moments(by="z").by_class[0].feature_names == NAMES
    assert (moments(by="z") + moments(X, by="z")).copy().feature_names == NAMES


@pytest.mark.parametrize("name", ERASERS)
def test_erasers_refuse_frames_of_other_columns(name: str, tmp_path: Path) -> None:
    eraser = ERASERS[name](moments(by="z"))
    assert eraser.feature_names == NAMES
    expected = eraser(X, LABELS)
    assert np.array_equal(eraser(FRAME, LABELS), expected)
    assert not np.allclose(eraser(REVERSED.to_numpy(), LABELS), expected[:, ::-1])  # the control
    eraser.save(tmp_path / "eraser")
    for own in (eraser, type(eraser).load(tmp_path / "eraser"), pickle.loads(pickle.dumps(eraser))):
        with pytest.raises(InputError, match="another order"):
            own(REVERSED, LABELS)


def test_composition_and_repair_compare_names() -> None:
    first, second = sf.sal(moments(), erase="z"), sf.sal(moments(REVERSED), erase="y")
    with pytest.raises(InputError, match="the second projection are in another order"):
        second @ first
    assert (sf.sal(moments(X), erase="y") @ first).feature_names == NAMES
    after = sf.Moments().update(first(X), LABELS)
    assert sf.repair(after, before=moments(), keep="y").feature_names == NAMES
    swapped = sf.Moments().update(pd.DataFrame(first(X), columns=NAMES[::-1]), LABELS)
    with pytest.raises(InputError, match="columns of the erased rows"):
        sf.repair(swapped, before=moments(), keep="y")
