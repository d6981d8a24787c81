"""Files of rows: one reader per suffix, writing of erased rows, and sources of the rows."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from splince_fast._runtime.arguments import require
from splince_fast._runtime.files import replacing
from splince_fast.exceptions import InputError

if TYPE_CHECKING:
    from splince_fast.sources import Source


class Arrays(NamedTuple):
    """The rows X of a file of arrays, its other arrays, and the metadata of a safetensors file.

    `key` is the name of X: None in a .npy file, "" in a .pt file that holds a single tensor.
    """

    X: Any
    key: str | None
    others: dict[str, Any]
    metadata: dict[str, str]


# All arrays of a file by name, and its metadata.
Contents = tuple[dict[str, Any], dict[str, str]]


def _read_npz(path: str) -> Contents:
    with np.load(path, allow_pickle=False) as file:
        return {name: file[name] for name in file.files}, {}


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


# A file of arrays by suffix. .npy files are memory-mapped, tables are read in parts.
READERS: dict[str, Callable[[str], Contents]] = {
    ".npz": _read_npz,
    ".safetensors": _read_safetensors,
    ".pt": _read_torch,
}
ARRAYS = (".npy", *READERS)
TABLES = (".parquet",)
SUFFIXES = (*ARRAYS, *TABLES)


def is_table(path: str | Path) -> bool:
    """Return whether the labels of a file of rows are columns of the same file."""
    return Path(path).suffix in TABLES


def expand_folders(paths: Sequence[str], *, ordered: bool = False) -> list[str]:
    """Replace each folder by its files of rows, sorted by name.

    Raises InputError where a file is missing or of an unknown suffix, where a folder has no file of
    rows, and where the numbers in the names of `ordered` files, whose labels are matched by
    position, do not ascend.
    """
    files: list[str] = []
    for path in paths:
        if not os.path.isdir(path):
            if not os.path.exists(path):
                raise InputError(f"there is no file {path!r}")
            if Path(path).suffix not in SUFFIXES:
                raise InputError(
                    f"{path!r} has no known format; rows are read from {', '.join(SUFFIXES)} files;"
                    " convert a text file of numbers with numpy.save"
                )
            files.append(path)
            continue
        names = sorted(str(entry) for entry in Path(path).iterdir() if entry.suffix in SUFFIXES)
        if not names:
            raise InputError(f"the folder {path!r} has no file of rows ({', '.join(SUFFIXES)})")
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


def read_arrays(path: str, key: str | None, *, writable: bool = False) -> Arrays:
    """Read a file of arrays; a .npy file is memory-mapped.

    Raises InputError where the file cannot be read, has no array named `key`, or has several arrays
    and `key` is None.
    """
    suffix = Path(path).suffix
    if not os.path.exists(path):
        raise InputError(f"there is no file {path!r}")
    if suffix == ".npy":
        from splince_fast.sources._npy import open_npy

        return Arrays(open_npy(path, "r+" if writable else "r"), None, {}, {})
    try:
        arrays, metadata = READERS[suffix](path)
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


def write_arrays(path: str, arrays: Arrays) -> None:
    """Write arrays in the format that they were read from; an error leaves no incomplete file."""
    target = Path(path)
    contents = {str(arrays.key): arrays.X, **arrays.others}
    with replacing(target) as partial:
        if target.suffix == ".npz":
            with open(partial, "wb") as file:
                np.savez(file, **contents)
        elif target.suffix == ".pt":
            require("torch", "torch").save(arrays.X if arrays.key == "" else contents, partial)
        elif hasattr(arrays.X, "detach"):
            from safetensors.torch import save_file

            dense = {name: tensor.contiguous() for name, tensor in contents.items()}
            save_file(dense, partial, arrays.metadata or None)
        else:
            from safetensors.numpy import save_file as save_arrays

            dense = {name: np.ascontiguousarray(array) for name, array in contents.items()}
            save_arrays(dense, partial, arrays.metadata or None)


@contextmanager
def new_npy(target: Path, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Iterator[NDArray[Any]]:
    """Yield a writable memory map of a new .npy file, which replaces `target` without error."""
    with replacing(target) as partial:
        array = np.lib.format.open_memmap(partial, mode="w+", dtype=dtype, shape=shape)
        # Allocate the file on the disk: a full disk raises an error here, whereas a write to the
        # map would kill the process.
        if hasattr(os, "posix_fallocate"):
            with open(partial, "rb+") as file:
                os.posix_fallocate(file.fileno(), 0, partial.stat().st_size)
        yield array
        array.flush()


def check_options(paths: Sequence[str], key: str | None, embedding: str | None) -> bool:
    """Return whether the files are tables; raise InputError unless they agree with the options."""
    suffixes = {Path(path).suffix for path in paths}
    tables = any(map(is_table, paths))
    if tables and not all(map(is_table, paths)):
        raise InputError(
            f"the files have different formats: {', '.join(sorted(suffixes))}; pass tables or "
            "files of arrays"
        )
    if tables and embedding is None:
        raise _embedding_missing(paths[0])
    if embedding is not None and not tables:
        raise InputError("--embedding names a column of tables, and the files hold arrays")
    if key is not None and (tables or suffixes == {".npy"}):
        raise InputError("--key names one of several arrays, and no file holds several")
    return tables


def _embedding_missing(path: str) -> InputError:
    """Return the error for a table without ``--embedding``; it names the columns of lists."""
    types = require("pyarrow.types", "parquet")
    tests = (types.is_list, types.is_large_list, types.is_fixed_size_list)
    candidates: list[str] = []
    for field in require("pyarrow.parquet", "parquet").read_schema(path):
        storage = getattr(field.type, "storage_type", field.type)
        candidates += [field.name] if any(test(storage) for test in tests) else []
    hint = (
        f"; its columns of lists are {', '.join(map(repr, candidates))}"
        if candidates
        else "; it has none: make one of a column per feature, in pandas by df['embedding'] = "
        "list(df[features].to_numpy())"
    )
    return InputError(f"{path!r} is a table; name its column of vectors with --embedding{hint}")


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
    """
    from splince_fast import sources
    from splince_fast.sources import _sharded as sharded

    if check_options(paths, key, embedding):
        return sources.from_parquet(list(paths), str(embedding), list(variables))
    if all(path.endswith(".npy") for path in paths):
        return sources.from_npy(list(paths), labels())

    def make_shard(path: str) -> sharded.Shard:
        def read() -> NDArray[Any]:  # files of other formats are loaded one at a time
            return sharded.host_rows(read_arrays(path, key).X, path)

        X = read()
        return sharded.Shard(path, X.shape, X.dtype, read)

    source = sharded.sharded_source([make_shard(path) for path in paths], labels())
    source.files = tuple(paths)
    return source
