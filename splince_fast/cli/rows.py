"""Files of rows: the table `READERS` has one entry for each format."""

from __future__ import annotations

import argparse
import os
import re
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from splince_fast._runtime.arguments import require
from splince_fast._runtime.files import replacing
from splince_fast._runtime.rows import BLOCK_BYTES, choose_block_rows
from splince_fast.exceptions import InputError

if TYPE_CHECKING:
    from pyarrow import Table

    from splince_fast.projection import Eraser
    from splince_fast.sources import Source
    from splince_fast.sources._words import Words

# All arrays of a file by name, and its metadata.
Contents = tuple[dict[str, Any], dict[str, str]]

_COMPARED_ROWS = 64  # number of rows at both ends and in the middle that are compared


class Erasure(NamedTuple):
    """A file of rows to erase."""

    eraser: Eraser
    path: str
    target: str  # the file itself, if its rows are overwritten
    name: str | None  # name of the rows in the file
    labels: Mapping[str, Any] | None  # labels that the eraser needs and that are no columns

    def apply(self, X: Any, **options: Any) -> Any:
        """Erase all rows; `options` are those of an eraser."""
        return self.eraser(X, self.labels, progress=None, **options)

    def part(self, X: Any, rows: slice) -> Any:
        """Erase some rows."""
        labels = self.labels and {name: column[rows] for name, column in self.labels.items()}
        return self.eraser(X[rows], labels)


def read_arrays(path: str, name: str | None) -> tuple[str, dict[str, Any], dict[str, str]]:
    """Return the name of the rows, all arrays and the metadata of a file."""
    reader = reader_of(path)
    try:
        arrays, metadata = reader.read(path)
    except InputError:
        raise
    except Exception as error:  # readers of zip, pickle and safetensors raise various errors
        raise InputError(
            f"{path!r} cannot be read as a {Path(path).suffix} file: {error}. It may be truncated, "
            "of another format, or hold Python objects"
        ) from error
    if len(arrays) == 1 and (name is None or reader.option is None):
        name = next(iter(arrays))
    if name not in arrays:
        names = ", ".join(map(repr, arrays)) or "none"
        reason = "name the array of rows with --key" if name is None else f"no array {name!r}"
        raise InputError(f"{path!r}: {reason}; its arrays are {names}")
    return name, arrays, metadata


def _host_rows(path: str, name: str | None) -> NDArray[Any]:
    """Read the rows of a file as a NumPy array."""
    from splince_fast.sources._sharded import host_rows

    key, arrays, _ = read_arrays(path, name)
    return host_rows(arrays[key], path)


def _array_source(
    paths: Sequence[str],
    name: str | None,
    variables: Sequence[str],
    labels: Callable[[], Mapping[str, object]],
) -> Source:
    """Return a source of files of arrays; a file is loaded when its rows are read."""
    from splince_fast.sources._sharded import sharded_source

    return sharded_source(paths, partial(_host_rows, name=name), labels())


def _erase_arrays(erasure: Erasure) -> int:
    key, arrays, metadata = read_arrays(erasure.path, erasure.name)
    if getattr(arrays[key], "ndim", 0) < 2:
        raise InputError(f"{erasure.path!r} holds no rows (n, d), one per sample")
    with replacing(Path(erasure.target)) as path:
        if (write := reader_of(erasure.target).write) is None:
            X = _erase_to_npy(path, erasure)
        else:
            X = erasure.apply(arrays[key])
            write(path, arrays | {key: X}, metadata)
    return int(np.prod(X.shape[:-1]))


def _erase_in_place(erasure: Erasure) -> int:
    from splince_fast.sources._npy import open_npy

    X = open_npy(erasure.path, "r+")
    if (dtype := erasure.part(X, slice(0)).dtype) != X.dtype:
        raise InputError(
            f"{erasure.path!r} holds {X.dtype}, and the result is {dtype}; use -o FILE"
        )
    erasure.apply(X, out=X)
    X.flush()
    return int(np.prod(X.shape[:-1]))


def _arrays_are_erased(erasure: Erasure) -> bool:
    """Compare the shapes, and the bits of rows at both ends and in the middle."""
    X, erased = (reader_of(p).rows(p, erasure.name) for p in (erasure.path, erasure.target))
    starts = {0, len(X) // 2, max(0, len(X) - _COMPARED_ROWS)}
    parts = [slice(start, start + _COMPARED_ROWS) for start in starts]
    return erased.shape == X.shape and all(
        (again := erasure.part(X, part)).dtype == erased.dtype
        and again.tobytes() == erased[part].tobytes()
        for part in parts
    )


def _read_npy(path: str) -> Contents:
    from splince_fast.sources._npy import open_npy

    return {"": open_npy(path)}, {}


def _erase_to_npy(path: Path, erasure: Erasure) -> NDArray[Any]:
    X = _host_rows(erasure.path, erasure.name)
    dtype = erasure.part(X, slice(0)).dtype
    out = np.lib.format.open_memmap(path, mode="w+", dtype=dtype, shape=X.shape)
    # Allocate the file on the disk: a full disk raises an error here, whereas a write to the map
    # would kill the process.
    if hasattr(os, "posix_fallocate"):
        with open(path, "rb+") as file:
            os.posix_fallocate(file.fileno(), 0, path.stat().st_size)
    erasure.apply(X, out=out)
    out.flush()
    return out


def _read_npz(path: str) -> Contents:
    with np.load(path, allow_pickle=False) as file:
        return {name: file[name] for name in file.files}, {}


def _write_npz(path: Path, arrays: dict[str, Any], metadata: object) -> None:
    with open(path, "wb") as file:
        np.savez(file, **arrays)


def _read_safetensors(path: str) -> Contents:
    """Read arrays, or tensors where the file holds bfloat16 or float8, which NumPy lacks."""
    from safetensors import safe_open

    with safe_open(path, framework="numpy") as file:
        dtypes = {file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118
    framework = "pt" if dtypes & {"BF16", "F8_E4M3", "F8_E5M2"} else "numpy"
    if framework == "pt":
        require("torch", "torch")
    with safe_open(path, framework=framework) as file:
        arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        return arrays, file.metadata() or {}


def _write_safetensors(path: Path, arrays: dict[str, Any], metadata: dict[str, str]) -> None:
    if all(isinstance(array, np.ndarray) for array in arrays.values()):
        from safetensors.numpy import save_file

        dense = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
        save_file(dense, path, metadata or None)
    else:
        save = require("safetensors.torch", "torch").save_file
        save({k: v.contiguous() for k, v in arrays.items()}, path, metadata or None)


def _read_torch(path: str) -> Contents:
    import pickle

    try:
        content = require("torch", "torch").load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise InputError(
            f"{path!r} is damaged, or holds other Python objects than tensors; save the tensor of "
            "rows alone by torch.save"
        ) from error
    return (dict(content) if isinstance(content, Mapping) else {"": content}), {}


def _write_torch(path: Path, arrays: dict[str, Any], metadata: object) -> None:
    require("torch", "torch").save(arrays[""] if list(arrays) == [""] else arrays, path)


def _parquet_source(
    paths: Sequence[str], name: str | None, variables: Sequence[str], labels: object
) -> Source:
    from splince_fast.sources import from_parquet

    return from_parquet(list(paths), str(name), list(variables))


def _erase_parquet(erasure: Erasure) -> int:
    """Erase one Parquet file, one row group at a time; return the number of rows."""
    pa, parquet = require("pyarrow", "parquet"), require("pyarrow.parquet", "parquet")
    n, writer = 0, None
    try:
        with parquet.ParquetFile(erasure.path) as file, replacing(Path(erasure.target)) as path:
            for group in _row_groups(file, erasure):
                table = _erase_column(erasure, file.read_row_group(group), group)
                writer = writer or parquet.ParquetWriter(path, table.schema)
                writer.write_table(table, row_group_size=table.num_rows)
                n += table.num_rows
            writer = writer or parquet.ParquetWriter(path, file.schema_arrow)
            writer.close()
    except pa.ArrowException as error:
        raise InputError(f"{erasure.path!r} cannot be read as Parquet: {error}") from error
    return n


def _parquet_is_erased(erasure: Erasure) -> bool:
    """Compare the numbers of rows and of row groups, and the first and the last row group."""
    parquet = require("pyarrow.parquet", "parquet")
    with parquet.ParquetFile(erasure.path) as file, parquet.ParquetFile(erasure.target) as erased:
        groups = _row_groups(file, erasure)
        counts = erased.metadata.num_rows, erased.metadata.num_row_groups
        return counts == (file.metadata.num_rows, len(groups)) and all(
            _erase_column(erasure, file.read_row_group(groups[i]), groups[i]).equals(
                erased.read_row_group(i)
            )
            for i in {0, len(groups) - 1} & set(range(len(groups)))
        )


def _row_groups(file: Any, erasure: Erasure) -> list[int]:
    """Return the row groups with rows: the first erased rows determine the type of the column."""
    names = file.schema_arrow.names
    for name in (erasure.name, *getattr(erasure.eraser, "label_kinds", ())):
        if name not in names:
            raise InputError(f"{erasure.path!r} has no column {name!r}; its columns are {names}")
    groups = range(file.metadata.num_row_groups)
    return [i for i in groups if file.metadata.row_group(i).num_rows]


def _erase_column(erasure: Erasure, table: Table, group: int) -> Table:
    """Return the table with its column of vectors erased; integer vectors become float64."""
    from splince_fast.sources._arrow import column_matrix, row_namer

    pa = require("pyarrow", "parquet")
    eraser, name = erasure.eraser, str(erasure.name)
    labels = {variable: table.column(variable) for variable in getattr(eraser, "label_kinds", ())}
    index = table.column_names.index(name)
    field = table.schema.field(index)
    place = row_namer(f"row group {group} of {erasure.path!r}", 0)
    X = eraser(column_matrix(table.column(index), name, eraser.n_features, place), labels or None)
    values = pa.FixedSizeListArray.from_arrays(pa.array(X.reshape(-1)), X.shape[1])
    storage = getattr(field.type, "storage_type", field.type)
    # The column keeps its type, except that erased integer vectors are float64.
    if storage.value_type == values.type.value_type:
        values = values.cast(storage)
        if storage is not field.type and storage != field.type:
            values = pa.ExtensionArray.from_storage(field.type, values)
    return table.set_column(index, field.with_type(values.type), values)


def _word_source(
    paths: Sequence[str], name: object, variables: object, labels: Callable[[], Any]
) -> Source:
    from splince_fast.sources import from_word_vectors

    return from_word_vectors(paths, labels())


def _erase_words(erasure: Erasure) -> int:
    """Erase one file of word vectors, one block at a time; return the number of rows."""
    from splince_fast.sources._words import WordFile, write_words

    file = WordFile(erasure.path)
    blocks = (_erased_words(erasure, file.parse(*block)) for block in file.unparsed())
    with replacing(Path(erasure.target)) as path:
        return write_words(path, blocks, file, compressed=erasure.target.endswith(".gz"))


def _erased_words(erasure: Erasure, block: Words) -> Words:
    from splince_fast.sources._words import labels_of

    words, X = block
    return words, erasure.eraser(X, labels_of(words, erasure.labels))


def _words_are_erased(erasure: Erasure) -> bool:
    """Compare words and bits of the vectors in the first and the last block."""
    from splince_fast.sources._words import WordFile

    before, after = (WordFile(path).end_blocks() for path in (erasure.path, erasure.target))
    erased = [_erased_words(erasure, block) for block in before]
    return [(w, X.tobytes()) for w, X in erased] == [(w, X.tobytes()) for w, X in after]


def _hdf5_source(
    paths: Sequence[str], name: str | None, variables: Sequence[str], labels: Callable[[], object]
) -> Source:
    from splince_fast.sources import from_hdf5

    in_obs = {variable: f"/obs/{variable}" for variable in variables}
    return from_hdf5(list(paths), name or "/", in_obs if reader_of(paths[0]).is_table else labels())


def _hdf5_rows(path: str, name: str | None) -> Any:
    from splince_fast.sources._hdf5 import open_rows

    return open_rows(path, name)


def _obs_labels(path: str, names: Iterable[str]) -> dict[str, Any]:
    from splince_fast.sources._hdf5 import read_column

    return {name: read_column(path, f"/obs/{name}") for name in names}


def _erase_hdf5(erasure: Erasure) -> int:
    """Erase the data set in a copy of the file, a block at a time; return the number of rows."""
    h5py, X = require("h5py", "hdf5"), _hdf5_rows(erasure.path, erasure.name)
    if (owner := X.file.filename) != erasure.path:
        raise InputError(f"the rows of {erasure.path!r} lie in {owner!r}; apply the eraser to that")
    dtype = erasure.part(X, slice(0)).dtype
    step = choose_block_rows(None, int(np.prod(X.shape[1:])), X.dtype.itemsize)
    with replacing(Path(erasure.target)) as path:
        shutil.copyfile(erasure.path, path)
        with h5py.File(path, "r+", rdcc_nbytes=BLOCK_BYTES) as file:
            # A new data set with all names of the old one, which may be a view of other files.
            old, names = file[X.name].ref, []  # an open data set would keep its space
            for _ in range(h5py.h5o.get_info(file[old].id).rc):
                names.append(file[old].name)
                del file[names[-1]]
            # Scaleoffset would round.
            erased = file.create_dataset_like(names[0], X, dtype=dtype, scaleoffset=None)
            for name in names[1:]:
                file[name] = erased
            erased.attrs.update(X.attrs)
            for start in range(0, len(X), step):
                rows = slice(start, start + step)
                erased[rows] = erasure.part(X, rows)
    return int(np.prod(X.shape[:-1]))


class Reader(NamedTuple):
    """A format of files of rows; a file of arrays needs only `outputs`, and `read` or `rows`."""

    outputs: tuple[str, ...]  # suffixes of the files into which erased rows can be written
    read: Callable[[str], Contents] = lambda path: ({}, {})
    # Writes a file of all arrays with the metadata; None for .npy files, which are mapped.
    write: Callable[[Path, dict[str, Any], dict[str, str]], None] | None = None
    # Option that names the rows in a file; "--embedding" for tables, whose labels are columns.
    option: str | None = "--key"
    rows: Callable[[str, str | None], Any] = _host_rows  # of a file, by path and name
    # Labels by name that the file holds and `erase` does not read; None if there are none.
    labels: Callable[[str, Iterable[str]], Any] = lambda path, names: None
    source: Callable[..., Source] = _array_source
    erase: Callable[[Erasure], int] = _erase_arrays  # returns the number of rows
    in_place: Callable[[Erasure], int] | None = None  # overwrites the rows of the file, if possible
    is_erased: Callable[[Erasure], bool] = _arrays_are_erased  # for a complete file `target`
    by_word: bool = False  # whether labels belong to rows by word, and not by position

    @property
    def is_table(self) -> bool:
        return self.option == "--embedding"


_HDF5 = Reader((".h5", ".hdf5"), rows=_hdf5_rows, source=_hdf5_source, erase=_erase_hdf5)
READERS: dict[str, Reader] = {
    ".npy": Reader((".npy",), _read_npy, option=None, in_place=_erase_in_place),
    ".npz": Reader((".npz", ".npy"), _read_npz, _write_npz),
    ".safetensors": Reader((".safetensors", ".npy"), _read_safetensors, _write_safetensors),
    ".pt": Reader((".pt", ".npy"), _read_torch, _write_torch),
    ".h5": _HDF5,
    ".hdf5": _HDF5,
    ".h5ad": _HDF5._replace(outputs=(".h5ad",), option="--embedding", labels=_obs_labels),
    ".parquet": Reader(
        (".parquet",),
        option="--embedding",
        source=_parquet_source,
        erase=_erase_parquet,
        is_erased=_parquet_is_erased,
    ),
}
for _suffix in (".txt", ".vec", ".bin"):
    READERS[_suffix] = READERS[f"{_suffix}.gz"] = Reader(
        (_suffix, f"{_suffix}.gz"), option=None, erase=_erase_words, is_erased=_words_are_erased,
        source=_word_source, by_word=True,
    )  # fmt: skip

_listed = [", ".join(s for s in READERS if READERS[s].by_word == by_word) for by_word in (0, 1)]
FORMATS = f"{_listed[0]} files, and word vectors ({_listed[1]})"  # for the help of commands


def suffix_of(path: str | Path) -> str:
    """Return the suffix that names the format of a file; a format before .gz belongs to it."""
    suffixes = Path(path).suffixes
    return "".join(suffixes[-2:] if suffixes[-1:] == [".gz"] else suffixes[-1:])


def reader_of(path: str) -> Reader:
    """Return the reader of a file of rows."""
    return READERS[suffix_of(path)]


def expand_folders(paths: Sequence[str], *, ordered: bool = False) -> list[str]:
    """Replace each folder by its files of rows, sorted by name."""
    # With `ordered`, names whose numbers are in another order raise InputError.
    files: list[str] = []
    for path in paths:
        if not os.path.exists(path):
            raise InputError(f"there is no file {path!r}")
        folder = Path(path).is_dir()
        names = sorted(map(str, Path(path).iterdir())) if folder else [path]
        # Notes and weights of models, too, end in .txt and .bin: a folder has no word vectors.
        allowed = [suffix for suffix, reader in READERS.items() if not (folder and reader.by_word)]
        names = [name for name in names if suffix_of(name) in allowed]
        if not names:
            raise InputError(f"{path!r} is or holds no file of rows ({', '.join(allowed)})")
        # With zeros before numbers, "shard-2" comes before "shard-10".
        by_number = sorted(names, key=lambda n: re.sub(r"\d+", lambda m: m[0].zfill(20), n))
        if ordered and names != by_number:
            raise InputError(
                f"the files of the folder {path!r} are sorted by name, which is another order than "
                "that of their numbers, and labels are matched to rows by position; pass the files "
                "themselves, in the order of the labels"
            )
        files += names
    return files


def row_options(args: argparse.Namespace, paths: Sequence[str]) -> tuple[Reader, str | None]:
    """Return the reader of the files and the name of the rows, ``--key`` or ``--embedding``."""
    readers = list(map(reader_of, paths))
    table, key = readers[0].is_table, getattr(args, "key", None)
    if len({(reader.source, reader.is_table) for reader in readers}) > 1:
        raise InputError(
            "the files have different formats; pass tables, files of arrays, HDF5 or word vectors"
        )
    if table and args.embedding is None:
        raise InputError(f"{paths[0]!r} is a table; name its column of vectors with --embedding")
    if args.embedding is not None and not table:
        raise InputError("--embedding names a column of tables, and the files hold arrays")
    if key is not None and not any(reader.option == "--key" for reader in readers):
        raise InputError("--key names one of several arrays, and no file holds several")
    if table and args.labels:
        raise InputError(
            "--labels and --embedding exclude each other: labels are columns of the same files, "
            "as embeddings.merge(labels, on='id').to_parquet(path) makes them in pandas"
        )
    return readers[0], key if args.embedding is None else args.embedding
