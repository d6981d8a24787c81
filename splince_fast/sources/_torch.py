"""Rows of torch tensors and data loaders."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from typing import Any

from splince_fast._runtime.arguments import as_names, described_type, require
from splince_fast._runtime.names import listed
from splince_fast._runtime.rows import is_tensor, torch_to_numpy
from splince_fast.exceptions import InputError
from splince_fast.sources._arrays import from_arrays
from splince_fast.sources.base import Block, Source, StreamSource, is_matrix


def from_torch(
    data: object,
    labels: object = None,
    *,
    embedding: str | None = None,
    sample_weight: object = None,
    block_rows: int | None = None,
) -> Source:
    """Return a source of the rows of a tensor, or of the batches of a DataLoader.

    Blocks hold NumPy arrays: views of a CPU tensor, copies of other tensors. bfloat16 is converted
    to float32.

    Parameters
    ----------
    data : tensor of shape (n, d), DataLoader, or iterable of batches
        A batch is a tuple ``(X, label, ...)``, a mapping with X under the key `embedding`, or X.
    labels : mapping, frame or column; str or sequence of str for batches
        For a tensor: labels as in :func:`from_arrays`. For batches: the names of the entries that
        follow X in a tuple, or the keys of a mapping.
    embedding : str, optional
        Key of X in batches that are mappings.
    sample_weight : array of shape (n,); str for batches
        For a tensor: non-negative frequencies of the rows. For batches: the key of the weights in a
        mapping, or any name for weights in the last entry of a tuple.
    block_rows : int, optional
        Rows per block of a tensor, as in :func:`from_arrays`. A batch is a block.

    Returns
    -------
    Source
        Resuming a DataLoader reads and discards the earlier batches.

    Raises
    ------
    MissingExtraError
        torch is not installed.
    InputError
        The arguments do not fit the data. During reading: a batch does not fit the arguments, or a
        loader that shuffles is resumed.

    Examples
    --------
    >>> import torch
    >>> from splince_fast import sources
    >>> batches = [(torch.ones(4, 2), torch.zeros(4)), (torch.ones(1, 2), torch.ones(1))]
    >>> [block.X.shape for block in sources.from_torch(batches, labels="z")]
    [(4, 2), (1, 2)]
    """
    torch = require("torch", "torch")
    if isinstance(data, torch.Tensor):
        if embedding is not None:
            raise InputError("embedding= is a key of batches, but data is a tensor; leave it out")
        return from_arrays(data, labels, sample_weight=sample_weight, block_rows=block_rows)
    if block_rows is not None:
        raise InputError("each batch is a block: set batch_size of the DataLoader, no block_rows=")
    if not isinstance(data, Iterable) or is_matrix(data):
        raise InputError(
            f"data is {described_type(data)}, neither a tensor nor batches; pass a DataLoader"
        )
    names = () if labels is None else as_names(labels, "labels= of batches")
    if sample_weight is not None:
        names = (*names, *as_names(sample_weight, "sample_weight= of batches"))

    def to_block(number: int, batch: object) -> Block:
        X, *entries = _read_batch(batch, number, embedding, names)
        X = torch_to_numpy(X) if is_tensor(X) else X
        if not is_matrix(X):
            raise InputError(
                f"X of batch {number} has shape {tuple(getattr(X, 'shape', ()))}; it must be "
                "(n, d): wrap single samples in a DataLoader, flatten other axes by X.flatten(1)"
            )
        weight = None if sample_weight is None else entries.pop()
        return Block(X, dict(zip(names, entries, strict=False)) or None, weight)

    is_loader = isinstance(data, torch.utils.data.DataLoader)
    return StreamSource(
        f"{type(data).__name__} of batches",
        data,
        lambda batches: itertools.starmap(to_block, enumerate(batches)),
        n_rows=_count_rows(data) if is_loader else None,
        shuffled=is_loader and _shuffles(data),
        refills=not (is_loader or isinstance(data, list | tuple)),
    )


def _read_batch(
    batch: Any, number: int, embedding: str | None, names: tuple[str, ...]
) -> list[Any]:
    """Return X, and the entries `names`, of a mapping, a tuple, a list, or X alone."""
    if isinstance(batch, Mapping):
        keys = (embedding, *names)
        if missing := [key for key in keys if key not in batch]:
            raise InputError(
                f"batch {number} has no key {missing[0]!r} (of embedding=, labels=, "
                f"sample_weight=); its keys are {listed(batch)}"
            )
        return [batch[key] for key in keys]
    items = list(batch) if isinstance(batch, tuple | list) else [batch]
    if embedding is not None or len(items) != 1 + len(names):
        expected = "a mapping" if embedding is not None else f"(X, {', '.join(names)})"
        raise InputError(
            f"batch {number} is {described_type(batch)} of {len(items)}, where {expected} is "
            "expected; name the entries after X by labels=[...] and sample_weight="
        )
    return items


def _shuffles(loader: Any) -> bool:
    """Return whether a DataLoader draws its rows at random."""
    utils = require("torch.utils.data", "torch")
    random = (utils.RandomSampler, utils.SubsetRandomSampler, utils.WeightedRandomSampler)
    samplers = loader.sampler, getattr(loader.batch_sampler, "sampler", None)
    return any(isinstance(sampler, random) for sampler in samplers)


def _count_rows(loader: Any) -> int | None:
    """Return the number of rows of a DataLoader with standard batches and collation, or None."""
    utils, batches = require("torch.utils.data", "torch"), loader.batch_sampler
    if loader.collate_fn is not utils.default_collate or type(batches) is not utils.BatchSampler:
        return None
    n = len(batches.sampler) if hasattr(batches.sampler, "__len__") else None
    return n - n % batches.batch_size if n is not None and batches.drop_last else n
