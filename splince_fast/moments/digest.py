"""Digests and file stamps by which a resumed run checks that the data have not changed."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable

import numpy as np

from splince_fast._runtime.rows import as_numbers, as_weights, is_sparse
from splince_fast._runtime.sparse import SparseRows
from splince_fast.labels import ClassCodes, encode
from splince_fast.moments.parameters import Parameters


def block_digest(X: object, labels: object, sample_weight: object, parameters: Parameters) -> str:
    """Return a hexadecimal digest of the rows, labels and weights of a block."""
    digest = hashlib.sha256()

    def add(name: str, array: object) -> None:
        array = np.ascontiguousarray(array)
        digest.update(f"{name} {array.dtype.str} {array.shape};".encode())
        digest.update(array.reshape(-1).view(np.uint8).data)

    if is_sparse(X):
        sparse = SparseRows.of(X)
        n = len(sparse)
        for part in ("data", "indices", "indptr"):
            add(part, getattr(sparse.array, part))
    else:
        rows = as_numbers(X)
        n = len(rows)
        add("X", rows)
    if sample_weight is not None:
        add("weight", as_weights(sample_weight, n))
    encoded = encode(labels, n, kinds=parameters.kinds or None)
    for name, column in encoded.items():
        if isinstance(column, ClassCodes):
            digest.update(repr((name, column.classes)).encode())
            add("codes", column.codes)
        else:
            digest.update(repr((name, column.columns)).encode())
            add("values", column.values)
            if column.present is not None:
                add("present", column.present)
    return digest.hexdigest()


def file_stamps(paths: Iterable[str]) -> list[list[str | int]]:
    """Return the path, the size (bytes) and the modification time (ns) of each file."""
    stats = ((os.fspath(path), os.stat(path)) for path in paths)
    return [[path, status.st_size, status.st_mtime_ns] for path, status in stats]
