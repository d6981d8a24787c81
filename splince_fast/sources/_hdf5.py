"""Rows of data sets in HDF5 files, those of AnnData included."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from splince_fast._runtime.arguments import require
from splince_fast._runtime.names import listed
from splince_fast._runtime.rows import BLOCK_BYTES, cause_text
from splince_fast.exceptions import InputError
from splince_fast.labels.containers import map_labels
from splince_fast.sources._sharded import sharded_source
from splince_fast.sources.base import Source, as_paths


def from_hdf5(
    paths: object,
    dataset: str,
    labels: object = None,
    *,
    sample_weight: object = None,
    block_rows: int | None = None,
) -> Source:
    """Return a source of the rows of a data set in HDF5 or AnnData files.

    Parameters
    ----------
    paths : path or sequence of paths
        Files, read in this order, one at a time. Blocks do not cross files.
    dataset : str
        Path of the data set of rows (n, d) in each file; in AnnData "X", or a key of ``obsm``.
    labels, sample_weight, block_rows
        As for :func:`from_arrays`, for the rows of all files. A column may also be a string: the
        path of a data set in the same files, or in AnnData of a column, such as "/obs/donor".

    Returns
    -------
    Source
        Blocks are copies; chunks of up to 64 MiB are cached beside them. A missing category of
        AnnData becomes None.

    Raises
    ------
    MissingExtraError
        h5py is not installed.
    InputError
        A file cannot be read or lacks a data set, or the numbers of features or of rows differ.

    Examples
    --------
    >>> import pathlib, tempfile
    >>> import h5py, numpy as np
    >>> from splince_fast import sources
    >>> path = pathlib.Path(tempfile.mkdtemp()) / "cells.h5ad"
    >>> with h5py.File(path, "w") as file:  # as AnnData.write_h5ad does
    ...     file["obsm/X_pca"] = np.ones((3, 2))
    ...     file["obs/donor/categories"], file["obs/donor/codes"] = ["ann", "bob"], [1, 0, -1]
    >>> (block,) = sources.from_hdf5(path, "X_pca", {"donor": "/obs/donor"})
    >>> block.X.shape, block.labels["donor"].tolist()
    ((3, 2), ['bob', 'ann', None])
    """
    files = as_paths(paths, "paths")

    def opened(values: Any, _: str) -> Any:
        is_path = isinstance(values, str)
        return np.concatenate([read_column(path, values) for path in files]) if is_path else values

    columns, weight = map_labels(labels, opened), opened(sample_weight, "")
    rows_of = partial(open_rows, name=dataset)
    source = sharded_source(files, rows_of, columns, sample_weight=weight, block_rows=block_rows)
    source.name = f"{dataset!r} of {source.name}"  # in checkpoints
    return source


def open_rows(path: str, name: str | None) -> Any:
    """Open a data set of numbers (..., d); its file is open as long as it is in use."""
    names: list[str] = []

    def holds_rows(item: Any) -> bool:
        return getattr(item, "ndim", 0) > 1 and item.dtype.kind in "fiub"

    try:
        # Blocks share chunks of many rows and few columns, as h5py makes them by default. A pass
        # over chunks of 16,000 rows takes half of the time with the cache.
        file = require("h5py", "hdf5").File(path, rdcc_nbytes=BLOCK_BYTES)
        for place in (name, f"obsm/{name}") if name else ():
            if holds_rows(data := file.get(place)):
                return data
        file.visititems(lambda key, item: names.append(f"/{key}") if holds_rows(item) else None)
    except (OSError, RuntimeError, TypeError, ValueError) as error:
        raise InputError(f"{path!r} cannot be read as HDF5: {cause_text(error)}") from error
    raise InputError(
        f"{path!r}: {name or '/'!r} is no data set of dense numbers (n, d); those of the file are "
        f"{listed(names) or 'none'}"
    )


def read_column(path: str, name: str) -> Any:
    """Return the entries of a data set, or of a column of AnnData; missing labels are None."""
    try:
        with require("h5py", "hdf5").File(path) as file:
            return _decoded(file[name])
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise InputError(f"{path!r} has no column {name!r}: {cause_text(error)}") from error


def _decoded(entry: Any) -> Any:
    if "categories" in entry.attrs:  # anndata before 0.8
        entry = {"codes": entry, "categories": entry.file[entry.attrs["categories"]]}
    elif hasattr(entry, "asstr"):
        return entry.asstr()[:] if entry.dtype.kind in "OS" else entry[:]
    if "codes" in entry:
        names = [*_decoded(entry["categories"]).tolist(), None]
        return np.array(names, dtype=object)[entry["codes"][:]]
    values = _decoded(entry["values"]).astype(object)
    values[entry["mask"][:]] = None
    return values
