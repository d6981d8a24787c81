"""Rows of .npy files, memory-mapped."""

from __future__ import annotations

import bisect
import itertools
import os
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from splince_fast._runtime.rows import cause_text
from splince_fast.exceptions import InputError
from splince_fast.labels.containers import map_labels
from splince_fast.sources._sharded import check_unchanged, checked_shape, sharded_source
from splince_fast.sources.base import Source, as_paths


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
    labels, sample_weight, block_rows
        As for :func:`from_arrays`, for the rows of all shards. A column may also be the path of a
        .npy file, or a sequence of paths, one per shard.

    Returns
    -------
    Source
        Blocks are views of memory-mapped files.

    Raises
    ------
    InputError
        A file cannot be read, or holds no numeric matrix or another number of columns than the
        first one; or the number of labels or weights is not the number of rows. During reading: a
        file has changed or become shorter. Do not write to the files during a run.

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
    shards = as_paths(paths, "paths")
    column_files: set[str] = set()

    def opened(values: object, name: str) -> object:
        if not _are_paths(values):
            return values
        column = _FileColumn(as_paths(values, name), shards, name)
        column_files.update(column.paths)
        return column

    columns = map_labels(labels, opened)
    weight = None if sample_weight is None else opened(sample_weight, "sample_weight")
    source = sharded_source(shards, open_npy, columns, sample_weight=weight, block_rows=block_rows)
    source.files += tuple(sorted(column_files))
    return source


class _FileColumn:
    """Labels or weights in .npy files, one per shard of the rows; a slice is read from its file."""

    def __init__(self, paths: list[str], shards: list[str], name: str) -> None:
        if len(paths) != len(shards):
            raise InputError(
                f"{name} names {len(paths)} files but X has {len(shards)}; pass one per shard"
            )
        self.paths, self._found = paths, [(a.shape, a.dtype) for a in map(open_npy, paths)]
        for path, (shape, _), shard in zip(paths, self._found, shards, strict=True):
            (n, _), _ = checked_shape(shard, open_npy(shard))
            if shape[:1] != (n,):
                raise InputError(f"{name}: {path!r} has shape {shape} but {shard!r} has {n} rows")
        self._starts = [0, *itertools.accumulate(shape[0] for shape, _ in self._found)]
        self.shape = (self._starts[-1], *self._found[0][0][1:])

    def __getitem__(self, rows: slice) -> NDArray[Any]:
        """Return a copy of rows of one shard."""
        shard = bisect.bisect_right(self._starts, rows.start, 0, len(self.paths)) - 1
        path, start = self.paths[shard], self._starts[shard]
        array = open_npy(path)
        check_unchanged(path, array, *self._found[shard])
        return np.array(array[rows.start - start : rows.stop - start])


def _are_paths(values: object) -> bool:
    """Return whether `values` is a path, or a sequence of paths or texts that end in .npy."""
    if isinstance(values, list | tuple) and values:
        return all(isinstance(v, os.PathLike) or str(v).endswith(".npy") for v in values)
    return isinstance(values, str | os.PathLike)


def open_npy(path: str, mode: Literal["r", "r+"] = "r") -> np.memmap[Any, Any]:
    """Open a .npy file as a memory map."""
    try:
        return np.lib.format.open_memmap(path, mode=mode)
    except FileNotFoundError as error:
        raise InputError(f"{path!r} is missing: there is no such file") from error
    except IsADirectoryError as error:
        raise InputError(
            f"{path!r} is a folder; pass its files, sorted(pathlib.Path({path!r}).glob('*.npy'))"
        ) from error
    except (OSError, ValueError, EOFError, OverflowError) as error:
        raise InputError(
            f"{path!r} cannot be read as a .npy array: {cause_text(error)}. It may be truncated, "
            "of another format, or hold Python objects; write it by numpy.save again"
        ) from error
