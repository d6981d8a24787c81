"""Files of rows: their formats, reading and writing of arrays, and sources of the rows."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from splince_fast._runtime.extras import require
from splince_fast._runtime.files import replacing
from splince_fast.exceptions import InputError

if TYPE_CHECKING:
    from splince_fast.sources import Source

ARRAYS = (".npy", ".npz", ".safetensors", ".pt", ".pth")
TABLES = (".parquet",)
SUFFIXES = (*ARRAYS, *TABLES)


def is_dataset(path: str | Path) -> bool:
    """Return whether a folder holds a data set saved by Hugging Face datasets."""
    names = ("dataset_info.json", "dataset_dict.json")
    return any((Path(path) / name).is_file() for name in names)


def format_of_rows(path: str | Path) -> str:
    """Return the format of a file of rows: "array", "parquet" or "dataset".

    A folder of a saved Hugging Face data set has the format "dataset".

    Raises
    ------
    InputError
        The suffix is unknown; the message says whether the file exists.
    """
    if is_dataset(path):
        return "dataset"
    suffix = Path(path).suffix
    if suffix in ARRAYS:
        return "array"
    if suffix in TABLES:
        return "parquet"
    if not os.path.exists(path):
        raise InputError(f"there is no file {str(path)!r}")
    raise InputError(
        f"{str(path)!r} has no known format; rows are read from .npy, .npz, .safetensors, .pt and "
        ".parquet files and from saved data sets; convert a text file of numbers with numpy.save"
    )


def expand_folders(paths: Sequence[str], *, ordered: bool = False) -> list[str]:
    """Replace each folder by its files of rows, sorted by name.

    A folder that is a saved data set counts as one file of rows. Files are `ordered` if labels are
    matched to their rows by position.

    Raises
    ------
    InputError
        A folder has no files of rows, the suffix of a file is unknown, or `ordered` files have
        numbers in their names that are not in ascending order.
    """
    files: list[str] = []
    for path in paths:
        if not os.path.isdir(path) or is_dataset(path):
            format_of_rows(path)
            files.append(path)
            continue
        folder_files = sorted(
            str(entry)
            for entry in Path(path).iterdir()
            if is_dataset(entry) or entry.suffix in SUFFIXES
        )
        if not folder_files:
            raise InputError(
                f"the folder {path!r} has no file of rows ({', '.join((*ARRAYS, *TABLES))})"
            )
        for first, second in pairwise(folder_files if ordered else ()):
            if _padded(first) > _padded(second):
                raise InputError(
                    f"{os.path.basename(first)!r} comes before {os.path.basename(second)!r} in the "
                    f"folder {path!r}, whose files are sorted by name, and labels are matched to "
                    "rows by position; pass the files themselves, in the order of the labels"
                )
        files += folder_files
    return files


def _padded(name: str) -> str:
    """Pad the numbers in a name with zeros, so that "shard-2" comes before "shard-10"."""
    return re.sub(r"\d+", lambda match: match[0].zfill(20), name)


class Arrays(NamedTuple):
    """The rows of a file of arrays, and its other arrays.

    Attributes
    ----------
    X : ndarray or torch tensor
        The rows.
    key : str or None
        Name of X in the file; None for a .npy file, "" for a .pt file that holds a single tensor.
    others : dict of str to array
        Other arrays by name.
    metadata : dict of str to str
        Metadata of a safetensors file; empty for other formats.
    """

    X: Any
    key: str | None
    others: dict[str, Any]
    metadata: dict[str, str]


def read_arrays(path: str, key: str | None, mode: Literal["r", "r+"] = "r") -> Arrays:
    """Read a file of arrays; a .npy file is memory-mapped.

    `key` is the name of the array of rows; it may be None if the file has a single array.

    Raises
    ------
    InputError
        The file cannot be read, has no array named `key`, or has several arrays and `key` is None.
    """
    suffix = Path(path).suffix
    if not os.path.exists(path):
        raise InputError(f"there is no file {path!r}")
    if suffix == ".npy":
        from splince_fast.sources._npy import open_npy

        return Arrays(open_npy(path, mode), None, {}, {})
    try:
        arrays, metadata = _READERS[suffix](path)
    except InputError:
        raise
    except Exception as error:  # readers of zip, pickle and safetensors raise various errors
        raise InputError(
            f"{path!r} cannot be read as a {suffix} file: {error}. It may be truncated, of another "
            "format, or hold Python objects"
        ) from error
    if key is None and len(arrays) == 1:
        key = next(iter(arrays))
    if key not in arrays:
        names = ", ".join(map(repr, arrays)) or "none"
        reason = "name the array of rows with --key" if key is None else f"no array {key!r}"
        raise InputError(f"{path!r}: {reason}; its arrays are {names}")
    return Arrays(arrays.pop(key), key, arrays, metadata)


def _read_npz(path: str) -> tuple[dict[str, Any], dict[str, str]]:
    with np.load(path, allow_pickle=False) as file:
        return {name: file[name] for name in file.files}, {}


def _read_safetensors(path: str) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the arrays of a file by name, and its metadata.

    The arrays are torch tensors if the file holds bfloat16 or float8 numbers, which NumPy lacks.
    """
    from safetensors import safe_open

    with safe_open(path, framework="numpy") as file:
        names = list(file.keys())
        metadata = file.metadata() or {}
        dtypes = {file.get_slice(name).get_dtype() for name in names}
        if not dtypes & {"BF16", "F8_E4M3", "F8_E5M2"}:
            return {name: file.get_tensor(name) for name in names}, metadata
    require("torch", "torch")
    with safe_open(path, framework="pt") as file:
        return {name: file.get_tensor(name) for name in names}, metadata


def _read_torch(path: str) -> tuple[dict[str, Any], dict[str, str]]:
    torch = require("torch", "torch")
    content = torch.load(path, map_location="cpu", weights_only=True)
    if isinstance(content, Mapping):
        return {str(name): value for name, value in content.items()}, {}
    return {"": content}, {}


_READERS = {
    ".npz": _read_npz, ".safetensors": _read_safetensors, ".pt": _read_torch, ".pth": _read_torch
}  # fmt: skip


def write_arrays(path: str, arrays: Arrays) -> None:
    """Write a .npz, .safetensors, .pt or .pth file; an error leaves no incomplete file.

    Raises
    ------
    InputError
        The format does not support the dtype of an array.
    """
    from safetensors import SafetensorError

    target = Path(path)
    contents = {arrays.key or "X": arrays.X, **arrays.others}
    tensors = any(hasattr(value, "detach") for value in contents.values())
    try:
        with replacing(target) as partial:
            if target.suffix == ".npz":
                numpy_arrays: dict[str, Any] = {
                    n: _array(value, path) for n, value in contents.items()
                }
                with open(partial, "wb") as file:
                    np.savez(file, **numpy_arrays)
            elif target.suffix == ".safetensors" and not tensors:
                from safetensors import numpy as safetensors_numpy

                contiguous = {name: np.ascontiguousarray(value) for name, value in contents.items()}
                safetensors_numpy.save_file(contiguous, partial, arrays.metadata or None)
            elif target.suffix == ".safetensors":
                from safetensors import torch as safetensors_torch

                safetensors_torch.save_file(_tensors(contents), partial, arrays.metadata or None)
            else:
                torch = require("torch", "torch")
                content = _tensors(contents)
                torch.save(content["X"] if arrays.key == "" else content, partial)
    except (TypeError, SafetensorError) as error:
        raise InputError(f"{path!r} cannot be written: {error}; write .npy") from error


def _array(value: object, path: str) -> NDArray[np.generic]:
    """Convert a value to an array for a .npz file; raise InputError for bfloat16."""
    if str(getattr(value, "dtype", "")) == "torch.bfloat16":
        raise InputError(f"{path!r} cannot hold bfloat16; write .safetensors or .pt")
    return np.asarray(value)


def _tensors(contents: Mapping[str, object]) -> dict[str, Any]:
    """Convert arrays and tensors to contiguous tensors; return other values unchanged."""
    torch = require("torch", "torch")
    tensors = {}
    for name, value in contents.items():
        tensor = torch.from_numpy(value) if isinstance(value, np.ndarray) else value
        tensors[name] = tensor.contiguous() if hasattr(tensor, "contiguous") else tensor
    return tensors


@contextmanager
def new_npy(target: Path, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Iterator[NDArray[Any]]:
    """Yield a writable memory map of a new .npy file.

    The file has a temporary name, and is renamed to `target` when the context ends without error.
    """
    with replacing(target) as partial:
        array = np.lib.format.open_memmap(partial, mode="w+", dtype=dtype, shape=shape)
        # Allocate the file on the disk: a full disk raises an error here, whereas a write to the
        # map would kill the process.
        if hasattr(os, "posix_fallocate"):
            with open(partial, "rb+") as file:
                os.posix_fallocate(file.fileno(), 0, partial.stat().st_size)
        yield array
        array.flush()


def check_key_and_embedding(paths: Sequence[str], key: str | None, embedding: str | None) -> None:
    """Raise InputError if `key` or `embedding` is set but applies to none of the files."""
    formats = {format_of_rows(path) for path in paths}
    if embedding is not None and formats == {"array"}:
        raise InputError("--embedding names a column of tables, and the files hold arrays")
    if key is not None and ("array" not in formats or all(p.endswith(".npy") for p in paths)):
        raise InputError("--key names one of several arrays, and no file holds several")


def embedding_missing(path: str) -> InputError:
    """Return the error for a table without ``--embedding``.

    For a Parquet file, the message names the columns of lists, which may be embeddings.
    """
    candidates: list[str] = []
    if format_of_rows(path) == "parquet":
        types = require("pyarrow.types", "parquet")
        tests = (types.is_list, types.is_large_list, types.is_fixed_size_list)
        for field in require("pyarrow.parquet", "parquet").read_schema(path):
            storage = getattr(field.type, "storage_type", field.type)
            candidates += [field.name] if any(test(storage) for test in tests) else []
    hint = ""
    if candidates:
        hint = f"; its columns of lists are {', '.join(map(repr, candidates))}"
    elif format_of_rows(path) == "parquet":
        hint = (
            "; it has none: make one of a column per feature, in pandas by df['embedding'] = "
            "list(df[features].to_numpy())"
        )
    return InputError(f"{path!r} is a table; name its column of vectors with --embedding{hint}")


def load_dataset(path: str) -> Any:
    """Load a saved data set; if it has splits, return a dictionary of the splits.

    Raises
    ------
    InputError
        The data set cannot be read.
    """
    datasets = require("datasets", "datasets")
    try:
        return datasets.load_from_disk(path)
    except Exception as error:  # errors have many classes, such as IndexError for an empty data set
        raise InputError(
            f"{path!r} cannot be read as a saved data set: {error}. It may be empty or damaged"
        ) from error


def source_of(
    paths: Sequence[str],
    *,
    key: str | None,
    embedding: str | None,
    variables: Sequence[str],
    labels: Callable[[], Mapping[str, object]],
) -> Source:
    """Return a source of the rows of all files.

    Labels of tables are the columns `variables`. Labels of files of arrays are the result of
    ``labels()``, which is called only for such files.

    Raises
    ------
    InputError
        The files have several formats, or an option does not apply to their format.
    """
    from splince_fast import sources

    formats = {format_of_rows(path) for path in paths}
    if len(formats) > 1:
        raise InputError(
            f"the files have different formats: {', '.join(sorted(formats))}; pass files of one "
            "format"
        )
    file_format = formats.pop()
    check_key_and_embedding(paths, key, embedding)
    if file_format == "array":
        return _array_source(paths, key, labels())
    if embedding is None:
        raise embedding_missing(paths[0])
    if file_format == "parquet":
        return sources.from_parquet(list(paths), embedding, list(variables))
    if len(paths) > 1:
        raise InputError("several saved data sets; pass one, or concatenate them first")
    data = load_dataset(paths[0])
    if isinstance(data, Mapping):
        raise InputError(
            f"{paths[0]!r} has the splits {list(data)}; pass one of them, such as "
            f"{os.path.join(paths[0], next(iter(data)))!r}"
        )
    return sources.from_dataset(data, embedding=embedding, labels=list(variables))


def _array_source(paths: Sequence[str], key: str | None, labels: Mapping[str, object]) -> Source:
    """Return a source of the rows of files of arrays.

    .npy files are memory-mapped. Files of other formats are loaded one at a time.
    """
    from splince_fast.sources import _sharded as sharded
    from splince_fast.sources import from_npy

    if all(path.endswith(".npy") for path in paths):
        return from_npy(list(paths), labels)

    def make_shard(path: str) -> sharded.Shard:
        X = read_arrays(path, key).X
        X = sharded.host_rows(X, path)
        return sharded.Shard(
            path, X.shape, X.dtype, lambda: sharded.host_rows(read_arrays(path, key).X, path)
        )

    source = sharded.sharded_source([make_shard(path) for path in paths], labels)
    source.files = tuple(paths)
    return source
