"""Files of rows: the table `READERS` has one entry for each format."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from splince_fast._runtime.arguments import require
from splince_fast._runtime.files import replacing
from splince_fast.exceptions import InputError

if TYPE_CHECKING:
    from pyarrow import Table

    from splince_fast.projection import Eraser
    from splince_fast.sources import Source

# All arrays of a file by name, and its metadata.
Contents = tuple[dict[str, Any], dict[str, str]]

# Number of rows at the start, in the middle and at the end that are erased again to compare them.
_COMPARED_ROWS = 64


class Erasure(NamedTuple):
    """A file of rows to erase."""

    eraser: Eraser
    path: str
    target: str  # the file itself, if its rows are overwritten
    name: str | None  # name of the rows in the file
    labels: Mapping[str, Any] | None  # labels that the eraser needs and that are no columns

    def apply(self, X: Any, part: slice | None = None, **options: Any) -> Any:
        """Erase X or X[part]; `options` are those of an eraser."""
        if part is None:
            return self.eraser(X, self.labels, progress=None, **options)
        labels = self.labels and {name: column[part] for name, column in self.labels.items()}
        return self.eraser(X[part], labels)

    def dtype(self, X: Any) -> Any:
        """Return the dtype of the erased rows; raise InputError for rows that cannot be erased."""
        if getattr(X, "ndim", 0) < 2:
            shape = tuple(getattr(X, "shape", ()))
            raise InputError(
                f"{self.path!r} has shape {shape}; it must be (n, d), one row per sample"
            )
        try:
            return self.apply(X, slice(0)).dtype
        except RuntimeError:  # a sparse or nested tensor cannot be sliced; the eraser refuses it
            return self.apply(X).dtype


class Arrays(NamedTuple):
    """The rows X of a file of arrays, its other arrays, and the metadata of a safetensors file.

    `key` is the name of X, "" in a .npy file and in a .pt file that holds a single tensor.
    """

    X: Any
    key: str
    others: dict[str, Any]
    metadata: dict[str, str]

    def contents(self, X: Any) -> dict[str, Any]:
        """Return all arrays by name, with other rows."""
        return {self.key: X, **self.others}


# -- files of arrays -----------------------------------------------------------------------------


def read_arrays(path: str, name: str | None) -> Arrays:
    """Read a file; raise InputError where it has no array `name`, or several and no name."""
    reader = reader_of(path)
    if not os.path.exists(path):
        raise InputError(f"there is no file {path!r}")
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
    return Arrays(arrays.pop(name), name, arrays, metadata)


def _array_source(
    paths: Sequence[str],
    name: str | None,
    variables: Sequence[str],
    labels: Callable[[], Mapping[str, object]],
) -> Source:
    """Return a source of files of arrays; a file is loaded when its rows are read."""
    from splince_fast.sources import _sharded as sharded

    def read(path: str) -> NDArray[Any]:
        return sharded.host_rows(read_arrays(path, name).X, path)

    return sharded.sharded_source(paths, read, labels())


def _erase_arrays(erasure: Erasure) -> int:
    arrays = read_arrays(erasure.path, erasure.name)
    erasure.dtype(arrays.X)  # a wrong shape or dtype raises before any output
    with replacing(Path(erasure.target)) as partial:
        reader_of(erasure.target).write(partial, arrays, erasure)
    return int(np.prod(arrays.X.shape[:-1]))


def _erase_in_place(erasure: Erasure) -> int:
    from splince_fast.sources._npy import open_npy

    X = open_npy(erasure.path, "r+")
    dtype = erasure.dtype(X)
    if dtype != X.dtype:
        raise InputError(
            f"{erasure.path!r} holds {X.dtype}, and the result is {dtype}; use -o FILE"
        )
    erasure.apply(X, out=X)
    X.flush()
    return int(np.prod(X.shape[:-1]))


def _arrays_are_erased(erasure: Erasure) -> bool:
    """Compare the bits of rows at both ends and in the middle."""
    from splince_fast.sources._sharded import host_rows

    X = read_arrays(erasure.path, erasure.name).X
    erased = read_arrays(erasure.target, erasure.name).X
    if tuple(X.shape) != tuple(erased.shape):
        return False
    for start in {0, max(0, len(X) // 2), max(0, len(X) - _COMPARED_ROWS)}:
        part = slice(start, start + _COMPARED_ROWS)
        a = host_rows(erasure.apply(X, part), erasure.path)
        b = host_rows(erased[part], erasure.target)
        if a.dtype != b.dtype or a.tobytes() != b.tobytes():
            return False
    return True


def _read_npy(path: str) -> Contents:
    from splince_fast.sources._npy import open_npy

    return {"": open_npy(path)}, {}


def _write_npy(partial: Path, arrays: Arrays, erasure: Erasure) -> None:
    from splince_fast.sources._sharded import host_rows

    X = host_rows(arrays.X, "X")
    dtype = erasure.dtype(X)
    out = np.lib.format.open_memmap(partial, mode="w+", dtype=dtype, shape=X.shape)
    # Allocate the file on the disk: a full disk raises an error here, whereas a write to the map
    # would kill the process.
    if hasattr(os, "posix_fallocate"):
        with open(partial, "rb+") as file:
            os.posix_fallocate(file.fileno(), 0, partial.stat().st_size)
    erasure.apply(X, out=out)
    out.flush()


def _read_npz(path: str) -> Contents:
    with np.load(path, allow_pickle=False) as file:
        return {name: file[name] for name in file.files}, {}


def _write_npz(partial: Path, arrays: Arrays, erasure: Erasure) -> None:
    with open(partial, "wb") as file:
        np.savez(file, **arrays.contents(erasure.apply(arrays.X)))


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


def _write_safetensors(partial: Path, arrays: Arrays, erasure: Erasure) -> None:
    contents = arrays.contents(erasure.apply(arrays.X))
    if hasattr(arrays.X, "detach"):
        save = require("safetensors.torch", "torch").save_file
        save({k: v.contiguous() for k, v in contents.items()}, partial, arrays.metadata or None)
    else:
        from safetensors.numpy import save_file

        dense = {name: np.ascontiguousarray(array) for name, array in contents.items()}
        save_file(dense, partial, arrays.metadata or None)


def _read_torch(path: str) -> Contents:
    import pickle

    torch = require("torch", "torch")
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise InputError(
            f"{path!r} holds other Python objects than tensors, such as NumPy arrays or a module, "
            "or is damaged; save the tensor of rows alone by torch.save"
        ) from error
    return (dict(content) if isinstance(content, Mapping) else {"": content}), {}


def _write_torch(partial: Path, arrays: Arrays, erasure: Erasure) -> None:
    X = erasure.apply(arrays.X)
    require("torch", "torch").save(X if arrays.key == "" else arrays.contents(X), partial)


# -- tables --------------------------------------------------------------------------------------


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
        with parquet.ParquetFile(erasure.path) as file, replacing(Path(erasure.target)) as partial:
            for group in _row_groups(file, erasure):
                table = _erase_column(erasure, file.read_row_group(group), group)
                writer = writer or parquet.ParquetWriter(partial, table.schema)
                writer.write_table(table, row_group_size=table.num_rows)
                n += table.num_rows
            writer = writer or parquet.ParquetWriter(partial, file.schema_arrow)
            writer.close()
    except pa.ArrowException as error:
        raise InputError(f"{erasure.path!r} cannot be read as Parquet: {error}") from error
    return n


def _parquet_is_erased(erasure: Erasure) -> bool:
    """Compare the first and the last row group."""
    parquet = require("pyarrow.parquet", "parquet")
    with parquet.ParquetFile(erasure.path) as file, parquet.ParquetFile(erasure.target) as erased:
        groups = _row_groups(file, erasure)
        counts = erased.metadata.num_rows, erased.metadata.num_row_groups
        return counts == (file.metadata.num_rows, len(groups)) and all(
            _erase_column(erasure, file.read_row_group(groups[i]), groups[i]).equals(
                erased.read_row_group(i)
            )
            for i in ({0, len(groups) - 1} if groups else ())
        )


def _row_groups(file: Any, erasure: Erasure) -> list[int]:
    """Return the row groups with rows: the first erased rows determine the type of the column."""
    names = file.schema_arrow.names
    if erasure.name not in names:
        raise InputError(
            f"{erasure.path!r} has no column {erasure.name!r}; its columns are {names}"
        )
    groups = range(file.metadata.num_row_groups)
    return [i for i in groups if file.metadata.row_group(i).num_rows]


def _erase_column(erasure: Erasure, table: Table, group: int) -> Table:
    """Return the table with its column of vectors erased; integer vectors become float64."""
    from splince_fast.sources._arrow import column_matrix, row_namer

    pa = require("pyarrow", "parquet")
    eraser, name = erasure.eraser, str(erasure.name)
    place = f"row group {group} of {erasure.path!r}"
    labels = {}
    for variable in getattr(eraser, "label_kinds", ()):
        if variable not in table.column_names:
            raise InputError(
                f"{place} has no column {variable!r}, whose labels this eraser needs; its columns "
                f"are {table.column_names}"
            )
        labels[variable] = table.column(variable)
    index = table.column_names.index(name)
    field = table.schema.field(index)
    X = column_matrix(table.column(index), name, eraser.n_features, row_namer(place, 0))
    X = eraser(X, labels or None)
    values = pa.FixedSizeListArray.from_arrays(pa.array(X.reshape(-1)), X.shape[1])
    storage = getattr(field.type, "storage_type", field.type)
    # The column keeps its type, except that erased integer vectors are float64.
    if storage.value_type == values.type.value_type:
        values = values.cast(storage)
        if storage is not field.type and storage != field.type:
            values = pa.ExtensionArray.from_storage(field.type, values)
    return table.set_column(index, field.with_type(values.type), values)


def _column_missing(path: str) -> InputError:
    """Return the error for a table without ``--embedding``; it names the columns of lists."""
    types = require("pyarrow.types", "parquet")
    tests = (types.is_list, types.is_large_list, types.is_fixed_size_list)
    columns: list[str] = []
    for field in require("pyarrow.parquet", "parquet").read_schema(path):
        storage = getattr(field.type, "storage_type", field.type)
        columns += [field.name] if any(test(storage) for test in tests) else []
    hint = (
        f"; its columns of lists are {', '.join(map(repr, columns))}"
        if columns
        else "; it has none: make one of a column per feature, in pandas by df['embedding'] = "
        "list(df[features].to_numpy())"
    )
    return InputError(f"{path!r} is a table; name its column of vectors with --embedding{hint}")


# -- formats -------------------------------------------------------------------------------------


class Reader(NamedTuple):
    """A format of files of rows; a file of arrays needs only `outputs` and `read`."""

    outputs: tuple[str, ...]  # suffixes of the files into which erased rows can be written
    read: Callable[[str], Contents] = lambda path: ({}, {})
    write: Callable[[Path, Arrays, Erasure], None] = _write_npy
    option: str | None = "--key"  # option that names the rows in a file
    unnamed: Callable[[str], InputError] | None = None  # error of a file without --embedding
    labels_in_columns: bool = False  # whether labels are columns of the same files
    source: Callable[..., Source] = _array_source
    erase: Callable[[Erasure], int] = _erase_arrays  # returns the number of rows
    in_place: Callable[[Erasure], int] | None = None  # overwrites the rows of the file, if possible
    is_erased: Callable[[Erasure], bool] = _arrays_are_erased  # for a complete file `target`


READERS: dict[str, Reader] = {
    ".npy": Reader((".npy",), _read_npy, _write_npy, option=None, in_place=_erase_in_place),
    ".npz": Reader((".npz", ".npy"), _read_npz, _write_npz),
    ".safetensors": Reader((".safetensors", ".npy"), _read_safetensors, _write_safetensors),
    ".pt": Reader((".pt", ".npy"), _read_torch, _write_torch),
    ".parquet": Reader(
        (".parquet",),
        option="--embedding",
        unnamed=_column_missing,
        labels_in_columns=True,
        source=_parquet_source,
        erase=_erase_parquet,
        is_erased=_parquet_is_erased,
    ),
}


def reader_of(path: str) -> Reader:
    """Return the reader of a file of rows."""
    return READERS[Path(path).suffix]


def expand_folders(paths: Sequence[str], *, ordered: bool = False) -> list[str]:
    """Replace each folder by its files of rows, sorted by name.

    The labels of `ordered` files are matched by position: the numbers in their names must ascend.
    """
    suffixes = ", ".join(READERS)
    files: list[str] = []
    for path in paths:
        if not os.path.isdir(path):
            if not os.path.exists(path):
                raise InputError(f"there is no file {path!r}")
            if Path(path).suffix not in READERS:
                raise InputError(
                    f"{path!r} has no known format; rows are read from {suffixes} files; convert a "
                    "text file of numbers with numpy.save"
                )
            files.append(path)
            continue
        names = sorted(str(entry) for entry in Path(path).iterdir() if entry.suffix in READERS)
        if not names:
            raise InputError(f"the folder {path!r} has no file of rows ({suffixes})")
        for first, second in pairwise(names if ordered else ()):
            if _padded(first) > _padded(second):
                raise InputError(
                    f"{os.path.basename(first)!r} comes before {os.path.basename(second)!r} in the "
                    f"folder {path!r}, whose files are sorted by name, and labels are matched to "
                    "rows by position; pass the files themselves, in the order of the labels"
                )
        files += names
    return files


def _padded(name: str) -> str:
    """Pad the numbers in a name with zeros, so that "shard-2" comes before "shard-10"."""
    return re.sub(r"\d+", lambda match: match[0].zfill(20), name)


def row_options(args: argparse.Namespace, paths: Sequence[str]) -> tuple[Reader, str | None]:
    """Return the reader of the first file and the name of the rows, ``--key`` or ``--embedding``.

    Raises InputError unless the files agree with each other and with the options.
    """
    readers = list(map(reader_of, paths))
    first, key = readers[0], getattr(args, "key", None)
    if any(reader.labels_in_columns != first.labels_in_columns for reader in readers):
        suffixes = sorted({Path(path).suffix for path in paths})
        raise InputError(
            f"the files have different formats: {', '.join(suffixes)}; pass tables or files of "
            "arrays"
        )
    if args.embedding is None and first.unnamed is not None:
        raise first.unnamed(paths[0])
    if args.embedding is not None and first.unnamed is None:
        raise InputError("--embedding names a column of tables, and the files hold arrays")
    if key is not None and not any(reader.option == "--key" for reader in readers):
        raise InputError("--key names one of several arrays, and no file holds several")
    if first.labels_in_columns and args.labels:
        raise InputError(
            "--labels and --embedding exclude each other: labels are columns of the same files, "
            "as embeddings.merge(labels, on='id').to_parquet(path) makes them in pandas"
        )
    return first, key if args.embedding is None else args.embedding
