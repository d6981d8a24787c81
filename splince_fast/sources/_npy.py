"""Rows of .npy files, memory-mapped."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, Literal

import numpy as np

from splince_fast._runtime.rows import cause_text
from splince_fast.exceptions import InputError
from splince_fast.sources._sharded import Shard, make_shard, sharded_source, split_array
from splince_fast.sources.base import Source, as_paths, describe_files


def from_npy(
    paths: object,
    labels: object = None,
    *,
    sample_weight: object = None,
    block_rows: int | None = None,
) -> Source:
    """Return a source of the rows of one .npy file or of several shards.

    Parameters
    ----------
    paths : path or sequence of paths
        Shards, read in this order, one at a time. Blocks do not cross shards.
    labels : mapping of str to column(s), frame, or a single column, optional
        Labels of the rows of all shards. A column may also be the path of a .npy file of labels,
        or a sequence of paths, one per shard.
    sample_weight : array of shape (n,), path, or sequence of paths, optional
        Non-negative frequencies of the rows.
    block_rows : int, optional
        Rows per block; the default is 4096, or fewer if a block would exceed 64 MiB.

    Returns
    -------
    Source
        Blocks are views of memory-mapped files.

    Raises
    ------
    InputError
        A file is missing, truncated, not a .npy file, holds objects, is not two-dimensional or has
        another number of columns than the first file; or the number of labels or weights is not the
        number of rows. During reading: a file has changed or become shorter. The message names the
        path.

    Notes
    -----
    Reading a memory map beyond the end of its file kills the process, so the size of the file is
    checked before every block. Do not write to the files during a run.

    Examples
    --------
    >>> import pathlib, tempfile
    >>> import numpy as np
    >>> from splince_fast import sources
    >>> folder = pathlib.Path(tempfile.mkdtemp())
    >>> for shard in ("a", "b"):
    ...     np.save(folder / f"{shard}.npy", np.ones((3, 2), dtype=np.float32))
    >>> source = sources.from_npy([folder / "a.npy", folder / "b.npy"], {"z": [0, 1, 0, 1, 0, 1]})
    >>> source.n_rows, source.nbytes
    (6, 48)
    """
    shards = [make_shard(path, open_npy) for path in as_paths(paths, "paths")]
    column_files: list[str] = []
    source = sharded_source(
        shards,
        labels,
        sample_weight=sample_weight,
        block_rows=block_rows,
        split_column=lambda column, name: _split_column(column, name, shards, column_files),
    )
    source.files = (*(shard.path for shard in shards), *sorted(column_files))
    return source


def _split_column(
    values: object, name: str, shards: list[Shard], column_files: list[str]
) -> Callable[[int], object]:
    """Check a column, an array or paths of files; return a function from a shard to its part."""
    # Paths are added to `column_files`.
    if not _are_paths(values):
        counts = [shard.shape[0] for shard in shards]
        return split_array(values, name, counts, describe_files([shard.path for shard in shards]))
    files = [make_shard(path, open_npy) for path in as_paths(values, name)]
    if len(files) != len(shards):
        raise InputError(
            f"{name} names {len(files)} files but X has {len(shards)}; pass one per shard, or one "
            "array over all rows"
        )
    column_files += [file.path for file in files]
    for file, shard in zip(files, shards, strict=True):
        if file.shape[:1] != shard.shape[:1]:
            raise InputError(
                f"{name}: {file.path!r} has shape {file.shape} but {shard.path!r} has "
                f"{shard.shape[0]} rows; pass the labels of that shard, one per row"
            )
    return lambda index: np.array(files[index].rows())


def _are_paths(values: object) -> bool:
    """Return whether `values` is a path, or a sequence of paths or texts that end in .npy."""
    if isinstance(values, str | os.PathLike):
        return True
    return (
        isinstance(values, list | tuple)
        and len(values) > 0
        and all(
            isinstance(v, os.PathLike) or (isinstance(v, str) and v.endswith(".npy"))
            for v in values
        )
    )


def open_npy(path: str, mode: Literal["r", "r+"] = "r") -> np.memmap[Any, Any]:
    """Open a .npy file as a memory map."""
    try:
        return np.lib.format.open_memmap(path, mode=mode)
    except FileNotFoundError as error:
        raise InputError(f"{path!r} is missing: there is no such file") from error
    except IsADirectoryError as error:
        raise InputError(
            f"{path!r} is a folder; pass its files in their order, such as "
            f"sorted(pathlib.Path({path!r}).glob('*.npy'))"
        ) from error
    except (OSError, ValueError, EOFError, OverflowError) as error:
        raise InputError(
            f"{path!r} cannot be read as a .npy array: {cause_text(error)}. It may be truncated, "
            "of another format, or hold Python objects; write it with numpy.save and a numeric "
            "dtype"
        ) from error
