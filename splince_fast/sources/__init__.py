"""Sources of rows: arrays, tensors, files, Arrow data, Hugging Face datasets, dask.

A :class:`Source` yields rows in blocks (:class:`Block`). The block boundaries are the same in every
pass, so that an interrupted run can resume at a block. Sources do not encode labels;
:mod:`splince_fast.labels` encodes them.
"""

from __future__ import annotations

from splince_fast.sources._arrays import from_arrays
from splince_fast.sources._dask import from_dask
from splince_fast.sources._huggingface import from_dataset
from splince_fast.sources._npy import from_npy
from splince_fast.sources._parquet import from_parquet
from splince_fast.sources.base import Block, Source, as_source

__all__ = [
    "Block",
    "Source",
    "as_source",
    "from_arrays",
    "from_dask",
    "from_dataset",
    "from_npy",
    "from_parquet",
]
